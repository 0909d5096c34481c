//! The operations of the user-level path, each turned into a request of the dispatcher: the common part, and those on content.

use crate::handles::OpenFile;
use crate::instance::Instance;
use crate::queue_front::message::{DataArea, Message};
use crate::queue_front::refused::Refused;
use crate::queue_front::session::SessionState;
use crate::request::{Context, Reply as Outcome, Request, WriteMode};
use crate::walk::{Found, Place};
use poolfs_ipc::service::DataError;
use poolfs_ipc::wire::{Grant, Operation, Reply, RequestFlags, owners};
use poolfs_libservice::types::{AllocateMode, Attributes, Errno, FileType, NodeId, OpenFlags, SeekTo, SetAttributes};
use poolfs_libservice::{Durability, Entry, ReadTarget};
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

pub(super) type Answer = Result<Reply, Refused>;

/// What a mode says beside the type.
pub(super) const PERMISSION_BITS: u32 = 0o7777;
const EXECUTE_BITS: u32 = 0o111;

/// A request under way.
pub(super) struct Call<'a> {
    pub(super) instance: &'a Instance,
    pub(super) session: &'a SessionState,
    pub(super) message: &'a Message,
    pub(super) area: &'a dyn DataArea,
    pub(super) context: Context<'a>,
}

/// What an operation works on: an open file, or what its path names.
pub(super) enum Object<'a> {
    File(Arc<OpenFile>),
    Found(Found<'a>),
}

impl Object<'_> {
    pub(super) fn node(&self) -> NodeId {
        match self {
            Object::File(file) => file.node(),
            Object::Found(found) => found.node.node(),
        }
    }

    pub(super) fn file(&self) -> Option<&OpenFile> {
        match self {
            Object::File(file) => Some(file),
            Object::Found(_) => None,
        }
    }

    pub(super) fn is_symlink(&self) -> bool {
        matches!(self, Object::Found(found) if found.attributes.file_type == FileType::Symlink)
    }
}

/// The directory a path starts from; holds it while it is walked.
pub(super) struct Start {
    node: NodeId,
    _file: Option<Arc<OpenFile>>,
}

/// The data area of a request as the target of a read.
struct AreaTarget<'a> {
    area: &'a dyn DataArea,
    buffer: &'a mut [u8],
    /// Why the area did not take something.
    failure: Option<DataError>,
}

impl AreaTarget<'_> {
    fn note(&mut self, put: Result<(), DataError>) -> poolfs_libservice::Result<()> {
        put.map_err(|failure| {
            self.failure = Some(failure);
            Errno::EIO.into()
        })
    }
}

impl ReadTarget for AreaTarget<'_> {
    fn buffer(&mut self) -> &mut [u8] {
        self.buffer
    }

    fn put(&mut self, range: Range<usize>) -> poolfs_libservice::Result<()> {
        let put = self.area.put(range.start, &self.buffer[range]);
        self.note(put)
    }

    fn put_file(&mut self, range: Range<usize>, file: &File, offset: u64) -> poolfs_libservice::Result<()> {
        let put = self.area.put_file(range, file, offset);
        self.note(put)
    }
}

pub(super) fn done() -> Answer {
    Ok(Reply::default())
}

impl<'a> Call<'a> {
    /// Serves the message; its input is at the beginning of `scratch`.
    pub(super) fn serve(&self, scratch: &mut [u8]) -> Answer {
        if self.message.operation == Operation::Read {
            return self.read(scratch);
        }
        let input = &scratch[..self.message.input_bytes()];
        let [path, second, third] = self.message.strings();
        match self.message.operation {
            Operation::Write => return self.write(input),
            Operation::Sync => return self.sync(),
            Operation::SyncAll => return self.sync_all(),
            Operation::Segment => return self.segment(),
            Operation::Lend => return self.lend(),
            Operation::Share => return self.share(),
            Operation::Allocate => return self.allocate(),
            Operation::Seek => return self.seek(),
            Operation::CopyRange => return self.copy_range(),
            _ => {}
        }
        let (path, second, third) = (&input[path], &input[second], &input[third]);
        match self.message.operation {
            Operation::Stat => self.stat(path),
            Operation::Access => self.access(path),
            Operation::Truncate => self.truncate(path),
            Operation::MakeDirectory | Operation::MakeNode | Operation::SymbolicLink => self.make(path, second),
            Operation::Unlink => self.unlink(path),
            Operation::Rename => self.rename(path, second),
            Operation::Link => self.link(path, second),
            Operation::ReadLink => self.read_link(path),
            Operation::ChangeMode => self.change_mode(path),
            Operation::SetTimes => self.set_times(path),
            Operation::GetXattr => self.get_xattr(path, second),
            Operation::SetXattr => self.set_xattr(path, second, third),
            Operation::ListXattr => self.list_xattr(path),
            Operation::RemoveXattr => self.remove_xattr(path, second),
            Operation::Statfs => self.statfs(path),
            _ => Err(Errno::EINVAL.into()),
        }
    }

    pub(super) fn dispatch(&self, request: Request<'_>) -> Result<Outcome, Refused> {
        Ok(self.instance.dispatch(&self.context, request)?)
    }

    /// A reply with a file's attributes, as the caller sees them.
    pub(super) fn with_attributes(&self, attributes: &Attributes) -> Reply {
        let (uid, gid) = self.session.credentials().as_seen(attributes.uid, attributes.gid);
        let seen = Attributes { uid, gid, ..*attributes };
        Reply { attributes: (&seen).into(), ..Reply::default() }
    }

    /// A file the session adopted. The kernel may have closed it just now: then it also serves what is asked.
    pub(super) fn file(&self, handle: u64) -> Result<Arc<OpenFile>, Refused> {
        self.session.file(handle).ok_or(Refused::KERNEL)
    }

    pub(super) fn start(&self, directory: u64) -> Result<Start, Refused> {
        if directory == 0 {
            return Ok(Start { node: NodeId::ROOT, _file: None });
        }
        let file = self.file(directory)?;
        if !file.is_directory() {
            return Err(Errno::ENOTDIR.into());
        }
        Ok(Start { node: file.node(), _file: Some(file) })
    }

    pub(super) fn follows(&self) -> bool {
        !self.message.flags.contains(RequestFlags::NO_FOLLOW)
    }

    pub(super) fn object(&self, path: &[u8], follow: bool) -> Result<Object<'a>, Refused> {
        if !self.message.has_path() {
            return Ok(Object::File(self.file(self.message.request.handle)?));
        }
        let start = self.start(self.message.request.directory)?;
        Ok(Object::Found(self.instance.walk(&self.context, start.node, path, follow)?))
    }

    /// The place of a name. Names that end in a slash are left to the kernel, which has rules of its own for them.
    pub(super) fn place<'p>(&self, directory: u64, path: &'p [u8]) -> Result<(Start, Place<'a, 'p>), Refused> {
        let start = self.start(directory)?;
        let place = self.instance.walk_to_parent(&self.context, start.node, path)?;
        if place.must_be_directory { Err(Refused::KERNEL) } else { Ok((start, place)) }
    }

    /// Gives back the reference that came with a new name.
    pub(super) fn forget(&self, entry: &Entry) {
        self.instance.layer().forget(entry.node, 1);
    }

    pub(super) fn attributes(&self, object: &Object<'_>) -> Result<Attributes, Refused> {
        match object {
            Object::Found(found) => Ok(found.attributes),
            Object::File(file) => match self.dispatch(Request::Stat { node: file.node() })? {
                Outcome::Attributes(attributes) => Ok(attributes),
                _ => Err(Errno::EIO.into()),
            },
        }
    }

    pub(super) fn change(&self, object: &Object<'_>, changes: SetAttributes) -> Answer {
        match self.dispatch(Request::Change { node: object.node(), changes, file: object.file() })? {
            Outcome::Attributes(attributes) => Ok(self.with_attributes(&attributes)),
            _ => done(),
        }
    }

    pub(super) fn read(&self, scratch: &mut [u8]) -> Answer {
        let request = &self.message.request;
        let file = self.file(request.handle)?;
        let buffer = &mut scratch[..request.length as usize];
        let mut target = AreaTarget { area: self.area, buffer, failure: None };
        let read = self.dispatch(Request::Read { file: &file, offset: request.offset, target: &mut target });
        if let Some(failure) = target.failure {
            return Err(failure.into());
        }
        match read? {
            Outcome::Count(count) => Ok(Reply { length: count as u64, ..Reply::default() }),
            _ => Err(Errno::EIO.into()),
        }
    }

    pub(super) fn write(&self, data: &[u8]) -> Answer {
        let request = &self.message.request;
        let file = self.file(request.handle)?;
        let mode = WriteMode { append: file.flags().contains(OpenFlags::APPEND), ..WriteMode::default() };
        match self.dispatch(Request::Write { file: &file, offset: request.offset, data, mode })? {
            Outcome::Written(written) => {
                Ok(Reply { value: written.offset, length: written.count as u64, ..Reply::default() })
            }
            _ => Err(Errno::EIO.into()),
        }
    }

    pub(super) fn sync(&self) -> Answer {
        let file = self.file(self.message.request.handle)?;
        let data_only = self.message.flags.contains(RequestFlags::DATA_ONLY);
        let durability = if data_only { Durability::Data } else { Durability::All };
        self.dispatch(Request::Sync { file: &file, durability })?;
        done()
    }

    pub(super) fn sync_all(&self) -> Answer {
        self.dispatch(Request::SyncAll)?;
        done()
    }

    pub(super) fn segment(&self) -> Answer {
        let file = self.file(self.message.request.handle)?;
        let (segment, lease) = self.instance.segment(&file).map_err(|error| error.errno())?;
        let notice = lease.notice_reader()?;
        let (lease, epoch) = (lease.number(), lease.epoch());
        let grant = Grant::new(segment.capacity, lease, epoch);
        Ok(Reply { value: self.area.grant(grant, &segment, notice.as_fd())?, ..Reply::default() })
    }

    pub(super) fn lend(&self) -> Answer {
        let file = self.file(self.message.request.handle)?;
        let lent = self.instance.lend(&file).map_err(|error| error.errno())?;
        Ok(Reply { value: self.area.lend(lent.as_fd())?, ..Reply::default() })
    }

    pub(super) fn share(&self) -> Answer {
        for file in self.session.files() {
            if file.share() {
                self.instance.revoke_posts(file.node());
            }
            // Also of one that others share at this moment, who may not have told it.
            self.instance.tell_size(file.node());
        }
        // Whoever takes the files away tells their sizes, and may not be done with that.
        if self.session.has_let_go() { Err(Refused::KERNEL) } else { done() }
    }

    pub(super) fn allocate(&self) -> Answer {
        let request = &self.message.request;
        let mode = AllocateMode::from_bits(request.mode).ok_or(Errno::EOPNOTSUPP)?;
        let file = self.file(request.handle)?;
        let (offset, length) = (request.offset, request.length);
        self.dispatch(Request::Allocate { file: &file, mode, offset, length })?;
        done()
    }

    pub(super) fn seek(&self) -> Answer {
        let request = &self.message.request;
        let to = match request.mode {
            3 => SeekTo::Data,
            4 => SeekTo::Hole,
            _ => return Err(Errno::EINVAL.into()),
        };
        let file = self.file(request.handle)?;
        match self.dispatch(Request::Seek { file: &file, offset: request.offset, to })? {
            Outcome::Offset(value) => Ok(Reply { value, ..Reply::default() }),
            _ => Err(Errno::EIO.into()),
        }
    }

    pub(super) fn copy_range(&self) -> Answer {
        let request = &self.message.request;
        let (source, target) = (self.file(request.handle)?, self.file(request.second_handle)?);
        let outcome = self.dispatch(Request::CopyRange {
            source: &source,
            source_offset: request.offset,
            target: &target,
            target_offset: request.second_offset,
            length: request.length,
        })?;
        match outcome {
            Outcome::Offset(value) => Ok(Reply { value, ..Reply::default() }),
            _ => Err(Errno::EIO.into()),
        }
    }

    pub(super) fn stat(&self, path: &[u8]) -> Answer {
        let object = self.object(path, self.follows())?;
        let attributes = self.instance.stat(&self.context, object.node())?;
        let value = object.file().map_or(0, |_| owners(attributes.uid, attributes.gid));
        Ok(Reply { value, ..self.with_attributes(&attributes) })
    }

    pub(super) fn access(&self, path: &[u8]) -> Answer {
        let object = self.object(path, self.follows())?;
        self.dispatch(Request::Access { node: object.node(), mask: self.message.request.mode })?;
        done()
    }

    pub(super) fn truncate(&self, path: &[u8]) -> Answer {
        let object = self.object(path, true)?;
        // Only the kernel knows whether the program is running (ETXTBSY).
        if object.file().is_none() && self.attributes(&object)?.permissions & EXECUTE_BITS != 0 {
            return Err(Refused::KERNEL);
        }
        self.change(&object, SetAttributes { size: Some(self.message.request.offset), ..SetAttributes::default() })
    }

    /// Puts bytes into the data area: their number is the value, and `limit` the most the caller has room for (0: none, it
    /// asks for the number only).
    pub(super) fn bring(&self, bytes: &[u8], limit: u64) -> Answer {
        let value = bytes.len() as u64;
        if limit == 0 {
            return Ok(Reply { value, ..Reply::default() });
        }
        if value > limit.min(self.area.bytes() as u64) {
            return Err(Errno::ERANGE.into());
        }
        self.area.put(0, bytes)?;
        Ok(Reply { value, length: value, ..Reply::default() })
    }
}
