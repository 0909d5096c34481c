//! The FUSE library's callbacks: numbers and bytes of the kernel into [`Request`]s, [`Reply`]s into its answers.

use super::front::{Front, NO_TIME, TRANSFER_BYTES_MAX, appends_whole, context, mistaken, reply_done, reply_sized};
use super::{convert, listing};
use crate::request::{Failure, Reply, Request, WriteMode};
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, IoctlFlags,
    KernelConfig, LockOwner, RenameFlags as FuseRename, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
    TimeOrNow, WriteFlags,
};
use poolfs_ipc::wire::ADOPT;
use poolfs_libservice::Durability;
use poolfs_libservice::types::{
    AllocateMode, Errno, FileType, OpenFlags, RenameFlags, SeekTo, SetAttributes, XattrFlags,
};
use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::SystemTime;
use tracing::debug;
use zerocopy::IntoBytes;

/// Bytes of an entry's header in a listing, without and with attributes.
const ENTRY_HEADER: usize = 24;
const ENTRY_PLUS_HEADER: usize = 152;
const LISTING_BYTES: usize = 32 << 10;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl Filesystem for Front {
    fn init(&mut self, _: &fuser::Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = [
            InitFlags::FUSE_ASYNC_READ,
            InitFlags::FUSE_BIG_WRITES,
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            InitFlags::FUSE_DONT_MASK,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_POSIX_ACL,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_HAS_IOCTL_DIR,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
            InitFlags::FUSE_EXPLICIT_INVAL_DATA,
            InitFlags::FUSE_MAX_PAGES,
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
        ];
        for flag in wanted {
            if config.add_capabilities(flag).is_err() {
                debug!(?flag, "the kernel lacks a FUSE capability");
            }
        }
        let _ = config.set_max_write(TRANSFER_BYTES_MAX);
        let _ = config.set_max_background(64);
        Ok(())
    }

    fn lookup(&self, request: &fuser::Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let outcome = self.node(parent).and_then(|parent| {
            let name = convert::name(name)?;
            self.serve(&context(request, 0), Request::Lookup { parent, name })
        });
        self.reply_entry(outcome, reply);
    }

    fn forget(&self, request: &fuser::Request, number: INodeNo, count: u64) {
        if let Some((node, count)) = self.instance.nodes.forget(number.0, count) {
            let _ = self.instance.dispatch(&context(request, 0), Request::Forget { node, count });
        }
    }

    fn getattr(&self, request: &fuser::Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let outcome = self.node(number).and_then(|node| self.serve(&context(request, 0), Request::Stat { node }));
        self.reply_attributes(outcome, reply);
    }

    fn setattr(
        &self,
        request: &fuser::Request,
        number: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        accessed: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _: Option<SystemTime>,
        handle: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let changes = SetAttributes {
            permissions: mode.map(|mode| mode & 0o7777),
            uid,
            gid,
            size,
            accessed: accessed.map(convert::set_time),
            modified: modified.map(convert::set_time),
        };
        let outcome = self.node(number).and_then(|node| {
            let file = handle.map(|handle| self.file(handle)).transpose()?;
            let file = file.as_deref().filter(|file| file.flags().writable());
            self.serve(&context(request, 0), Request::Change { node, changes, file })
        });
        self.reply_attributes(outcome, reply);
    }

    fn readlink(&self, request: &fuser::Request, number: INodeNo, reply: ReplyData) {
        let outcome = self.node(number).and_then(|node| self.serve(&context(request, 0), Request::ReadLink { node }));
        match outcome {
            Ok(Reply::Bytes(target)) => reply.data(&target),
            Ok(_) => reply.error(convert::errno(mistaken())),
            Err(errno) => reply.error(convert::errno(errno)),
        }
    }

    fn mknod(
        &self,
        request: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        device: u32,
        reply: ReplyEntry,
    ) {
        let outcome = self.node(parent).and_then(|parent| {
            let name = convert::name(name)?;
            let file_type = FileType::from_mode(mode).ok_or(Errno::EINVAL)?;
            let permissions = mode & 0o7777;
            let request_ = Request::MakeNode { parent, name, file_type, permissions, device };
            self.serve(&context(request, umask), request_)
        });
        self.reply_entry(outcome, reply);
    }

    fn mkdir(&self, request: &fuser::Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let outcome = self.node(parent).and_then(|parent| {
            let name = convert::name(name)?;
            self.serve(&context(request, umask), Request::MakeDirectory { parent, name, permissions: mode & 0o7777 })
        });
        self.reply_entry(outcome, reply);
    }

    fn unlink(&self, request: &fuser::Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let outcome = self.node(parent).and_then(|parent| {
            let name = convert::name(name)?;
            self.serve(&context(request, 0), Request::Unlink { parent, name })
        });
        reply_done(outcome, reply);
    }

    fn rmdir(&self, request: &fuser::Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let outcome = self.node(parent).and_then(|parent| {
            let name = convert::name(name)?;
            self.serve(&context(request, 0), Request::RemoveDirectory { parent, name })
        });
        reply_done(outcome, reply);
    }

    fn symlink(&self, request: &fuser::Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let outcome = self.node(parent).and_then(|parent| {
            let name = convert::name(name)?;
            let target = target.as_os_str().as_bytes();
            self.serve(&context(request, 0), Request::SymbolicLink { parent, name, target })
        });
        self.reply_entry(outcome, reply);
    }

    fn rename(
        &self,
        request: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: FuseRename,
        reply: ReplyEmpty,
    ) {
        let outcome = self.node(parent).and_then(|parent| {
            let new_parent = self.node(new_parent)?;
            let (name, new_name) = (convert::name(name)?, convert::name(new_name)?);
            let flags = RenameFlags::from_bits(flags.bits()).ok_or(Errno::EINVAL)?;
            self.serve(&context(request, 0), Request::Rename { parent, name, new_parent, new_name, flags })
        });
        reply_done(outcome, reply);
    }

    fn link(&self, request: &fuser::Request, number: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let outcome = self.node(number).and_then(|node| {
            let parent = self.node(parent)?;
            let name = convert::name(name)?;
            self.serve(&context(request, 0), Request::Link { node, parent, name })
        });
        self.reply_entry(outcome, reply);
    }

    fn open(&self, request: &fuser::Request, number: INodeNo, flags: fuser::OpenFlags, reply: ReplyOpen) {
        let flags = OpenFlags::from_bits_truncate(flags.0 as u32);
        let outcome =
            self.node(number).and_then(|node| self.serve(&context(request, 0), Request::Open { node, flags }));
        self.reply_opened(outcome, reply);
    }

    fn create(
        &self,
        request: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let flags = OpenFlags::from_bits_truncate(flags as u32);
        let outcome = self.node(parent).and_then(|parent| {
            let name = convert::name(name)?;
            let request_ = Request::Create { parent, name, permissions: mode & 0o7777, flags };
            self.serve(&context(request, umask), request_)
        });
        match outcome {
            Ok(Reply::Opened { file, entry: Some(entry) }) => {
                let handle = FileHandle(file.key());
                let attr = self.enter(&entry);
                let mode = FopenFlags::FOPEN_KEEP_CACHE | appends_whole(flags);
                reply.created(&NO_TIME, &attr, Generation(0), handle, mode);
            }
            // The user-level path was faster with the name. Looking again, the kernel finds it and opens it as it should.
            Err(Errno::EEXIST) if !flags.contains(OpenFlags::EXCLUSIVE) => {
                reply.error(convert::errno(Errno::ESTALE));
            }
            Ok(_) => reply.error(convert::errno(mistaken())),
            Err(errno) => reply.error(convert::errno(errno)),
        }
    }

    fn read(
        &self,
        request: &fuser::Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: fuser::OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let size = size.min(TRANSFER_BYTES_MAX) as usize;
        BUFFER.with_borrow_mut(|buffer| {
            if buffer.len() < size {
                buffer.resize(size, 0);
            }
            let buffer = &mut buffer[..size];
            let outcome = self.file(handle).and_then(|file| {
                self.serve(&context(request, 0), Request::Read { file: &file, offset, buffer: &mut *buffer })
            });
            match outcome {
                Ok(Reply::Count(count)) if count <= size => reply.data(&buffer[..count]),
                Ok(_) => reply.error(convert::errno(mistaken())),
                Err(errno) => reply.error(convert::errno(errno)),
            }
        });
    }

    fn write(
        &self,
        request: &fuser::Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: fuser::OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mode = WriteMode {
            append: OpenFlags::from_bits_truncate(flags.0 as u32).contains(OpenFlags::APPEND),
            from_mapping: write_flags.contains(WriteFlags::FUSE_WRITE_CACHE),
            kill_set_id: write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID),
        };
        let outcome = self
            .file(handle)
            .and_then(|file| self.serve(&context(request, 0), Request::Write { file: &file, offset, data, mode }));
        match outcome {
            Ok(Reply::Written(written)) => reply.written(u32::try_from(written.count).unwrap_or(u32::MAX)),
            Ok(_) => reply.error(convert::errno(mistaken())),
            Err(errno) => reply.error(convert::errno(errno)),
        }
    }

    fn flush(&self, request: &fuser::Request, _: INodeNo, handle: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        let outcome =
            self.file(handle).and_then(|file| self.serve(&context(request, 0), Request::Flush { file: &file }));
        reply_done(outcome, reply);
    }

    fn release(
        &self,
        _: &fuser::Request,
        _: INodeNo,
        handle: FileHandle,
        _: fuser::OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.instance.release(handle.0);
        reply.ok();
    }

    fn fsync(&self, request: &fuser::Request, _: INodeNo, handle: FileHandle, data_only: bool, reply: ReplyEmpty) {
        let durability = if data_only { Durability::Data } else { Durability::All };
        let outcome = self
            .file(handle)
            .and_then(|file| self.serve(&context(request, 0), Request::Sync { file: &file, durability }));
        reply_done(outcome, reply);
    }

    fn opendir(&self, request: &fuser::Request, number: INodeNo, _: fuser::OpenFlags, reply: ReplyOpen) {
        let outcome =
            self.node(number).and_then(|node| self.serve(&context(request, 0), Request::OpenDirectory { node }));
        self.reply_opened(outcome, reply);
    }

    fn readdir(
        &self,
        request: &fuser::Request,
        _: INodeNo,
        handle: FileHandle,
        cookie: u64,
        mut reply: ReplyDirectory,
    ) {
        let context = context(request, 0);
        let outcome = self.file(handle).and_then(|file| {
            let room = (LISTING_BYTES, ENTRY_HEADER);
            listing::gather(&self.instance, &context, &file, cookie, room).map_err(Failure::errno)
        });
        match outcome {
            Ok(listed) => {
                for entry in listed {
                    let (inode, kind) = (INodeNo(entry.inode), convert::file_type(entry.file_type));
                    if reply.add(inode, entry.cookie, kind, OsStr::from_bytes(&entry.name)) {
                        break;
                    }
                }
                reply.ok();
            }
            Err(errno) => reply.error(convert::errno(errno)),
        }
    }

    fn readdirplus(
        &self,
        request: &fuser::Request,
        number: INodeNo,
        handle: FileHandle,
        cookie: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let context = context(request, 0);
        let outcome = self.node(number).and_then(|node| {
            let file = self.file(handle)?;
            let room = (LISTING_BYTES, ENTRY_PLUS_HEADER);
            let listed = listing::gather(&self.instance, &context, &file, cookie, room).map_err(Failure::errno)?;
            let own = self.serve(&context, Request::Stat { node })?;
            Ok((node, listed, own))
        });
        let (node, listed, own) = match outcome {
            Ok((node, listed, Reply::Attributes(own))) => (node, listed, own),
            Ok(_) => return reply.error(convert::errno(mistaken())),
            Err(errno) => return reply.error(convert::errno(errno)),
        };
        for entry in listed {
            let name = OsStr::from_bytes(&entry.name);
            if entry.is_dot() {
                let attr = self.attr(&own);
                if reply.add(attr.ino, entry.cookie, name, &NO_TIME, &attr, Generation(0)) {
                    break;
                }
                continue;
            }
            let Some(found) = listing::look_up(&self.instance, &context, node, &entry) else {
                continue;
            };
            let attr = self.enter(&found);
            if reply.add(attr.ino, entry.cookie, name, &NO_TIME, &attr, Generation(0)) {
                self.forget(request, attr.ino, 1);
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(&self, _: &fuser::Request, _: INodeNo, handle: FileHandle, _: fuser::OpenFlags, reply: ReplyEmpty) {
        self.instance.release(handle.0);
        reply.ok();
    }

    fn fsyncdir(&self, request: &fuser::Request, number: INodeNo, handle: FileHandle, data: bool, reply: ReplyEmpty) {
        self.fsync(request, number, handle, data, reply);
    }

    fn statfs(&self, request: &fuser::Request, number: INodeNo, reply: ReplyStatfs) {
        let outcome = self.node(number).and_then(|node| self.serve(&context(request, 0), Request::Statfs { node }));
        match outcome {
            Ok(Reply::Statistics(s)) => {
                let (available, size) = (s.blocks_available, s.block_size);
                reply.statfs(s.blocks, s.blocks_free, available, s.files, s.files_free, size, s.name_max, size);
            }
            Ok(_) => reply.error(convert::errno(mistaken())),
            Err(errno) => reply.error(convert::errno(errno)),
        }
    }

    fn setxattr(
        &self,
        request: &fuser::Request,
        number: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        let outcome = self.node(number).and_then(|node| {
            let flags = XattrFlags::from_bits(flags as u32).ok_or(Errno::EINVAL)?;
            let request_ = Request::SetXattr { node, name: name.as_bytes(), value, flags };
            self.serve(&context(request, 0), request_)
        });
        reply_done(outcome, reply);
    }

    fn getxattr(&self, request: &fuser::Request, number: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let outcome = self.node(number).and_then(|node| {
            match self.serve(&context(request, 0), Request::GetXattr { node, name: name.as_bytes() })? {
                Reply::Bytes(value) => Ok(value),
                _ => Err(mistaken()),
            }
        });
        reply_sized(outcome, size, reply);
    }

    fn listxattr(&self, request: &fuser::Request, number: INodeNo, size: u32, reply: ReplyXattr) {
        let outcome =
            self.node(number).and_then(|node| match self.serve(&context(request, 0), Request::ListXattr { node })? {
                Reply::Names(names) => Ok(names.into_iter().flat_map(|name| [name, vec![0]].concat()).collect()),
                _ => Err(mistaken()),
            });
        reply_sized(outcome, size, reply);
    }

    fn removexattr(&self, request: &fuser::Request, number: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let outcome = self
            .node(number)
            .and_then(|node| self.serve(&context(request, 0), Request::RemoveXattr { node, name: name.as_bytes() }));
        reply_done(outcome, reply);
    }

    fn ioctl(
        &self,
        request: &fuser::Request,
        _: INodeNo,
        handle: FileHandle,
        _: IoctlFlags,
        command: u32,
        input: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        if command != ADOPT {
            return reply.error(convert::errno(Errno::ENOTTY));
        }
        match self.adopt(request, handle, input) {
            Ok(answer) => reply.ioctl(0, answer.as_bytes()),
            Err(errno) => reply.error(convert::errno(errno)),
        }
    }

    fn fallocate(
        &self,
        request: &fuser::Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let outcome = self.file(handle).and_then(|file| {
            let mode = AllocateMode::from_bits(mode as u32).ok_or(Errno::EOPNOTSUPP)?;
            self.serve(&context(request, 0), Request::Allocate { file: &file, mode, offset, length })
        });
        reply_done(outcome, reply);
    }

    fn lseek(
        &self,
        request: &fuser::Request,
        _: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let outcome = self.file(handle).and_then(|file| {
            let to = match whence {
                3 => SeekTo::Data,
                4 => SeekTo::Hole,
                _ => return Err(Errno::EINVAL),
            };
            let offset = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
            self.serve(&context(request, 0), Request::Seek { file: &file, offset, to })
        });
        match outcome {
            Ok(Reply::Offset(found)) => reply.offset(i64::try_from(found).unwrap_or(i64::MAX)),
            Ok(_) => reply.error(convert::errno(mistaken())),
            Err(errno) => reply.error(convert::errno(errno)),
        }
    }

    fn copy_file_range(
        &self,
        request: &fuser::Request,
        _: INodeNo,
        source: FileHandle,
        source_offset: u64,
        _: INodeNo,
        target: FileHandle,
        target_offset: u64,
        length: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let outcome = self.file(source).and_then(|source| {
            let target = self.file(target)?;
            let request_ =
                Request::CopyRange { source: &source, source_offset, target: &target, target_offset, length };
            self.serve(&context(request, 0), request_)
        });
        match outcome {
            Ok(Reply::Offset(count)) => reply.written(u32::try_from(count).unwrap_or(u32::MAX)),
            Ok(_) => reply.error(convert::errno(mistaken())),
            Err(errno) => reply.error(convert::errno(errno)),
        }
    }
}
