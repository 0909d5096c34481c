//! What the callbacks share: numbers into nodes and files, replies into the library's answers.

use super::convert;
use crate::handles::OpenFile;
use crate::instance::Instance;
use crate::request::{Context, Failure, Reply, Request};
use fuser::{FileHandle, FopenFlags, Generation, INodeNo, ReplyAttr, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyXattr};
use poolfs_ipc::wire::{Adopt, MAGIC};
use poolfs_libservice::Entry;
use poolfs_libservice::types::{Attributes, Errno, NodeId, OpenFlags};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;
use tracing::error;
use zerocopy::FromBytes;

/// Most bytes of one READ or WRITE.
pub(super) const TRANSFER_BYTES_MAX: u32 = 1 << 20;

/// Names and attributes are asked for each time.
pub(super) const NO_TIME: Duration = Duration::ZERO;

/// One instance as the kernel sees it.
pub(super) struct Front {
    pub(super) instance: Arc<Instance>,
}

pub(super) fn context(request: &fuser::Request, umask: u32) -> Context<'static> {
    Context::fuse(request.uid(), request.gid(), umask, request.pid())
}

/// An answer of another kind than the request's is a mistake of the dispatcher.
pub(super) fn mistaken() -> Errno {
    Errno::EIO
}

pub(super) type Outcome<T> = Result<T, Errno>;

impl Front {
    pub(super) fn node(&self, number: INodeNo) -> Outcome<NodeId> {
        self.instance.nodes.node(number.0).ok_or(Errno::ESTALE)
    }

    pub(super) fn file(&self, handle: FileHandle) -> Outcome<Arc<OpenFile>> {
        self.instance.handles.get(handle.0)
    }

    pub(super) fn serve(&self, context: &Context<'_>, request: Request<'_>) -> Outcome<Reply> {
        // A layer that panics costs the request, never one of the threads all programs of the mount share.
        match catch_unwind(AssertUnwindSafe(|| self.instance.dispatch(context, request))) {
            Ok(outcome) => outcome.map_err(Failure::errno),
            Err(_) => {
                error!(instance = self.instance.name(), "a layer panicked; the request failed");
                Err(Errno::EIO)
            }
        }
    }

    pub(super) fn attr(&self, attributes: &Attributes) -> fuser::FileAttr {
        convert::attributes(attributes.inode, attributes)
    }

    /// The entry under its FUSE number; its reference is the kernel's from here on.
    pub(super) fn enter(&self, entry: &Entry) -> fuser::FileAttr {
        let number = self.instance.nodes.enter(entry.node, entry.attributes.inode);
        convert::attributes(number, &entry.attributes)
    }

    pub(super) fn reply_entry(&self, outcome: Outcome<Reply>, reply: ReplyEntry) {
        match outcome {
            Ok(Reply::Entry(entry)) => reply.entry(&NO_TIME, &self.enter(&entry), Generation(0)),
            Ok(_) => reply.error(convert::errno(mistaken())),
            Err(errno) => reply.error(convert::errno(errno)),
        }
    }

    pub(super) fn reply_attributes(&self, outcome: Outcome<Reply>, reply: ReplyAttr) {
        match outcome {
            Ok(Reply::Attributes(attributes)) => reply.attr(&NO_TIME, &self.attr(&attributes)),
            Ok(_) => reply.error(convert::errno(mistaken())),
            Err(errno) => reply.error(convert::errno(errno)),
        }
    }

    pub(super) fn reply_opened(&self, outcome: Outcome<Reply>, reply: ReplyOpen) {
        match outcome {
            Ok(Reply::Opened { file, .. }) => {
                let mut mode = appends_whole(file.flags());
                if self.instance.keeps_kernel_pages() && !file.is_directory() {
                    mode |= FopenFlags::FOPEN_KEEP_CACHE;
                }
                reply.opened(FileHandle(file.key()), mode);
            }
            Ok(_) => reply.error(convert::errno(mistaken())),
            Err(errno) => reply.error(convert::errno(errno)),
        }
    }

    pub(super) fn adopt(&self, request: &fuser::Request, handle: FileHandle, asked: &[u8]) -> Outcome<Adopt> {
        let asked = Adopt::read_from_bytes(asked).map_err(|_| Errno::EINVAL)?;
        if asked.magic != MAGIC {
            return Err(Errno::EINVAL);
        }
        let file = self.file(handle)?;
        match self.instance.adopter() {
            Some(adopter) => adopter.adopt(request.pid(), &file, asked),
            None => Ok(Adopt { handle: 0, ..asked }),
        }
    }
}

pub(super) fn reply_done(outcome: Outcome<Reply>, reply: ReplyEmpty) {
    match outcome {
        Ok(_) => reply.ok(),
        Err(errno) => reply.error(convert::errno(errno)),
    }
}

pub(super) fn reply_sized(outcome: Outcome<Vec<u8>>, size: u32, reply: ReplyXattr) {
    match outcome {
        Ok(bytes) if size == 0 => reply.size(u32::try_from(bytes.len()).unwrap_or(u32::MAX)),
        Ok(bytes) if bytes.len() <= size as usize => reply.data(&bytes),
        Ok(_) => reply.error(convert::errno(Errno::ERANGE)),
        Err(errno) => reply.error(convert::errno(errno)),
    }
}

/// How a description that appends is opened: past the kernel's page cache, which would send a write that crosses a page
/// boundary as two requests, between which others could append.
pub(super) fn appends_whole(flags: OpenFlags) -> FopenFlags {
    if flags.contains(OpenFlags::APPEND) && flags.writable() {
        FopenFlags::FOPEN_DIRECT_IO
    } else {
        FopenFlags::empty()
    }
}
