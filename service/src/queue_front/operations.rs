//! The operations of the user-level path, each turned into a request of the dispatcher.

use crate::access;
use crate::handles::OpenFile;
use crate::instance::Instance;
use crate::queue_front::message::{DataArea, Message};
use crate::queue_front::serve::Refused;
use crate::queue_front::session::SessionState;
use crate::request::{Context, Reply as Outcome, Request, WriteMode};
use crate::walk::{Found, Place};
use poolfs_ipc::wire::{Operation, Reply, RequestFlags, WireStatfs, WireTime};
use poolfs_libservice::types::{
    AllocateMode, Attributes, Errno, FileType, NodeId, OpenFlags, RenameFlags, SeekTo, SetAttributes, SetTime,
    Timestamp, XattrFlags,
};
use poolfs_libservice::{Durability, Entry};
use std::sync::Arc;
use zerocopy::IntoBytes;

type Answer = Result<Reply, Refused>;

const UTIME_NOW: u32 = 0x3fff_ffff;
const UTIME_OMIT: u32 = 0x3fff_fffe;

/// What a mode says beside the type.
const PERMISSION_BITS: u32 = 0o7777;
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
enum Object<'a> {
    File(Arc<OpenFile>),
    Found(Found<'a>),
}

impl Object<'_> {
    fn node(&self) -> NodeId {
        match self {
            Object::File(file) => file.node(),
            Object::Found(found) => found.node.node(),
        }
    }

    fn file(&self) -> Option<&OpenFile> {
        match self {
            Object::File(file) => Some(file),
            Object::Found(_) => None,
        }
    }

    fn is_symlink(&self) -> bool {
        matches!(self, Object::Found(found) if found.attributes.file_type == FileType::Symlink)
    }
}

/// The directory a path starts from; holds it while it is walked.
struct Start {
    node: NodeId,
    _file: Option<Arc<OpenFile>>,
}

fn done() -> Answer {
    Ok(Reply::default())
}

fn with_attributes(attributes: &Attributes) -> Reply {
    Reply { attributes: attributes.into(), ..Reply::default() }
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
            Operation::ChangeOwner => self.change_owner(path),
            Operation::SetTimes => self.set_times(path),
            Operation::GetXattr => self.get_xattr(path, second),
            Operation::SetXattr => self.set_xattr(path, second, third),
            Operation::ListXattr => self.list_xattr(path),
            Operation::RemoveXattr => self.remove_xattr(path, second),
            Operation::Statfs => self.statfs(path),
            _ => Err(Errno::EINVAL.into()),
        }
    }

    fn dispatch(&self, request: Request<'_>) -> Result<Outcome, Refused> {
        Ok(self.instance.dispatch(&self.context, request)?)
    }

    /// A file the session adopted. The kernel may have closed it just now: then it also serves what is asked.
    fn file(&self, handle: u64) -> Result<Arc<OpenFile>, Refused> {
        self.session.file(handle).ok_or(Refused::KERNEL)
    }

    fn start(&self, directory: u64) -> Result<Start, Refused> {
        if directory == 0 {
            return Ok(Start { node: NodeId::ROOT, _file: None });
        }
        let file = self.file(directory)?;
        if !file.is_directory() {
            return Err(Errno::ENOTDIR.into());
        }
        Ok(Start { node: file.node(), _file: Some(file) })
    }

    fn follows(&self) -> bool {
        !self.message.flags.contains(RequestFlags::NO_FOLLOW)
    }

    fn object(&self, path: &[u8], follow: bool) -> Result<Object<'a>, Refused> {
        if !self.message.has_path() {
            return Ok(Object::File(self.file(self.message.request.handle)?));
        }
        let start = self.start(self.message.request.directory)?;
        Ok(Object::Found(self.instance.walk(&self.context, start.node, path, follow)?))
    }

    /// The place of a name. Names that end in a slash are left to the kernel, which has rules of its own for them.
    fn place<'p>(&self, directory: u64, path: &'p [u8]) -> Result<(Start, Place<'a, 'p>), Refused> {
        let start = self.start(directory)?;
        let place = self.instance.walk_to_parent(&self.context, start.node, path)?;
        if place.must_be_directory { Err(Refused::KERNEL) } else { Ok((start, place)) }
    }

    /// Gives back the reference that came with a new name.
    fn forget(&self, entry: &Entry) {
        self.instance.layer().forget(entry.node, 1);
    }

    fn attributes(&self, object: &Object<'_>) -> Result<Attributes, Refused> {
        match object {
            Object::Found(found) => Ok(found.attributes),
            Object::File(file) => match self.dispatch(Request::Stat { node: file.node() })? {
                Outcome::Attributes(attributes) => Ok(attributes),
                _ => Err(Errno::EIO.into()),
            },
        }
    }

    fn change(&self, object: &Object<'_>, changes: SetAttributes) -> Answer {
        match self.dispatch(Request::Change { node: object.node(), changes, file: object.file() })? {
            Outcome::Attributes(attributes) => Ok(with_attributes(&attributes)),
            _ => done(),
        }
    }

    fn read(&self, scratch: &mut [u8]) -> Answer {
        let request = &self.message.request;
        let file = self.file(request.handle)?;
        let buffer = &mut scratch[..request.length as usize];
        let Outcome::Count(count) = self.dispatch(Request::Read { file: &file, offset: request.offset, buffer })?
        else {
            return Err(Errno::EIO.into());
        };
        self.area.put(0, &scratch[..count]).map_err(|_| Errno::EIO)?;
        Ok(Reply { length: count as u64, ..Reply::default() })
    }

    fn write(&self, data: &[u8]) -> Answer {
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

    fn sync(&self) -> Answer {
        let file = self.file(self.message.request.handle)?;
        let data_only = self.message.flags.contains(RequestFlags::DATA_ONLY);
        let durability = if data_only { Durability::Data } else { Durability::All };
        self.dispatch(Request::Sync { file: &file, durability })?;
        done()
    }

    fn allocate(&self) -> Answer {
        let request = &self.message.request;
        let mode = AllocateMode::from_bits(request.mode).ok_or(Errno::EOPNOTSUPP)?;
        let file = self.file(request.handle)?;
        let (offset, length) = (request.offset, request.length);
        self.dispatch(Request::Allocate { file: &file, mode, offset, length })?;
        done()
    }

    fn seek(&self) -> Answer {
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

    fn copy_range(&self) -> Answer {
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

    fn stat(&self, path: &[u8]) -> Answer {
        let object = self.object(path, self.follows())?;
        match self.dispatch(Request::Stat { node: object.node() })? {
            Outcome::Attributes(attributes) => Ok(with_attributes(&attributes)),
            _ => Err(Errno::EIO.into()),
        }
    }

    fn access(&self, path: &[u8]) -> Answer {
        let object = self.object(path, self.follows())?;
        self.dispatch(Request::Access { node: object.node(), mask: self.message.request.mode })?;
        done()
    }

    fn truncate(&self, path: &[u8]) -> Answer {
        let object = self.object(path, true)?;
        // Only the kernel knows whether the program is running (ETXTBSY).
        if object.file().is_none() && self.attributes(&object)?.permissions & EXECUTE_BITS != 0 {
            return Err(Refused::KERNEL);
        }
        self.change(&object, SetAttributes { size: Some(self.message.request.offset), ..SetAttributes::default() })
    }

    /// `mkdir`, `mknod`, `symlink`.
    fn make(&self, path: &[u8], target: &[u8]) -> Answer {
        let request = &self.message.request;
        let (_start, place) = self.place(request.directory, path)?;
        let (parent, name, permissions) = (place.parent.node(), place.name, request.mode & PERMISSION_BITS);
        let made = match self.message.operation {
            Operation::MakeDirectory => Request::MakeDirectory { parent, name, permissions },
            Operation::SymbolicLink => Request::SymbolicLink { parent, name, target },
            _ => {
                let file_type = made_type(request.mode)?;
                Request::MakeNode { parent, name, file_type, permissions, device: request.device }
            }
        };
        match self.dispatch(made)? {
            Outcome::Entry(entry) => {
                self.forget(&entry);
                Ok(with_attributes(&entry.attributes))
            }
            _ => Err(Errno::EIO.into()),
        }
    }

    fn unlink(&self, path: &[u8]) -> Answer {
        let (_start, place) = self.place(self.message.request.directory, path)?;
        self.dispatch(Request::Unlink { parent: place.parent.node(), name: place.name })?;
        done()
    }

    fn rename(&self, path: &[u8], second: &[u8]) -> Answer {
        let request = &self.message.request;
        let flags = RenameFlags::from_bits(request.mode).ok_or(Errno::EINVAL)?;
        let (_start, from) = self.place(request.directory, path)?;
        let (_start, to) = self.place(request.second_directory, second).map_err(Refused::of_second)?;
        self.dispatch(Request::Rename {
            parent: from.parent.node(),
            name: from.name,
            new_parent: to.parent.node(),
            new_name: to.name,
            flags,
        })?;
        done()
    }

    fn link(&self, path: &[u8], second: &[u8]) -> Answer {
        let object = self.object(path, self.follows())?;
        let (_start, place) = self.place(self.message.request.second_directory, second).map_err(Refused::of_second)?;
        let linked = Request::Link { node: object.node(), parent: place.parent.node(), name: place.name };
        match self.dispatch(linked)? {
            Outcome::Entry(entry) => {
                self.forget(&entry);
                Ok(with_attributes(&entry.attributes))
            }
            _ => Err(Errno::EIO.into()),
        }
    }

    fn read_link(&self, path: &[u8]) -> Answer {
        let object = self.object(path, false)?;
        match self.dispatch(Request::ReadLink { node: object.node() })? {
            Outcome::Bytes(target) => self.bring(&target, u64::MAX),
            _ => Err(Errno::EIO.into()),
        }
    }

    /// Puts bytes into the data area: their number is the value, and `limit` the most the caller has room for (0: none, it
    /// asks for the number only).
    fn bring(&self, bytes: &[u8], limit: u64) -> Answer {
        let value = bytes.len() as u64;
        if limit == 0 {
            return Ok(Reply { value, ..Reply::default() });
        }
        if value > limit {
            return Err(Errno::ERANGE.into());
        }
        self.area.put(0, bytes).map_err(|_| Errno::ERANGE)?;
        Ok(Reply { value, length: value, ..Reply::default() })
    }

    fn change_mode(&self, path: &[u8]) -> Answer {
        let object = self.object(path, self.follows())?;
        if object.is_symlink() {
            return Err(Refused::KERNEL);
        }
        let permissions = Some(self.message.request.mode & PERMISSION_BITS);
        self.change(&object, SetAttributes { permissions, ..SetAttributes::default() })
    }

    fn change_owner(&self, path: &[u8]) -> Answer {
        let request = &self.message.request;
        let given = |id: u32| (id != u32::MAX).then_some(id);
        let changes = SetAttributes { uid: given(request.uid), gid: given(request.gid), ..SetAttributes::default() };
        if changes == SetAttributes::default() {
            return Err(Refused::KERNEL);
        }
        // Ids of the host: in a user namespace the kernel has to translate the application's.
        if self.context.credentials.is_some_and(|credentials| credentials.user_namespace.is_some()) {
            return Err(Refused::KERNEL);
        }
        let object = self.object(path, self.follows())?;
        self.change(&object, changes)
    }

    fn set_times(&self, path: &[u8]) -> Answer {
        let [accessed, modified] = self.message.request.times;
        let changes =
            SetAttributes { accessed: new_time(accessed)?, modified: new_time(modified)?, ..SetAttributes::default() };
        if changes == SetAttributes::default() {
            return done();
        }
        let object = self.object(path, self.follows())?;
        self.change(&object, changes)
    }

    fn get_xattr(&self, path: &[u8], name: &[u8]) -> Answer {
        let object = self.object(path, self.follows())?;
        match self.dispatch(Request::GetXattr { node: object.node(), name })? {
            Outcome::Bytes(value) => self.bring(&value, self.message.request.length),
            _ => Err(Errno::EIO.into()),
        }
    }

    fn list_xattr(&self, path: &[u8]) -> Answer {
        let object = self.object(path, self.follows())?;
        match self.dispatch(Request::ListXattr { node: object.node() })? {
            Outcome::Names(names) => {
                let list: Vec<u8> = names.iter().flat_map(|name| name.iter().copied().chain([0])).collect();
                self.bring(&list, self.message.request.length)
            }
            _ => Err(Errno::EIO.into()),
        }
    }

    fn set_xattr(&self, path: &[u8], name: &[u8], value: &[u8]) -> Answer {
        if kernel_keeps(name) {
            return Err(Refused::KERNEL);
        }
        let flags = XattrFlags::from_bits(self.message.request.mode).ok_or(Errno::EINVAL)?;
        let object = self.object(path, self.follows())?;
        self.dispatch(Request::SetXattr { node: object.node(), name, value, flags })?;
        done()
    }

    fn remove_xattr(&self, path: &[u8], name: &[u8]) -> Answer {
        if kernel_keeps(name) {
            return Err(Refused::KERNEL);
        }
        let object = self.object(path, self.follows())?;
        self.dispatch(Request::RemoveXattr { node: object.node(), name })?;
        done()
    }

    fn statfs(&self, path: &[u8]) -> Answer {
        let object = self.object(path, true)?;
        let Outcome::Statistics(found) = self.dispatch(Request::Statfs { node: object.node() })? else {
            return Err(Errno::EIO.into());
        };
        let statfs = WireStatfs {
            blocks: found.blocks,
            blocks_free: found.blocks_free,
            blocks_available: found.blocks_available,
            files: found.files,
            files_free: found.files_free,
            block_size: found.block_size,
            name_max: found.name_max,
        };
        self.bring(statfs.as_bytes(), u64::MAX)
    }
}

/// Access lists are cached by the kernel, and in the application's user namespace; file capabilities are rewritten by it.
fn kernel_keeps(name: &[u8]) -> bool {
    name.starts_with(b"system.") || name.starts_with(b"security.")
}

/// The type in a `mknod` mode; none means a regular file.
fn made_type(mode: u32) -> Result<FileType, Errno> {
    if mode & 0o170_000 == 0 {
        return Ok(FileType::Regular);
    }
    match FileType::from_mode(mode) {
        Some(FileType::Directory) => Err(Errno::EPERM),
        Some(FileType::Symlink) | None => Err(Errno::EINVAL),
        Some(file_type) => Ok(file_type),
    }
}

fn new_time(time: WireTime) -> Result<Option<SetTime>, Errno> {
    match time.nanoseconds {
        UTIME_NOW => Ok(Some(SetTime::Now)),
        UTIME_OMIT => Ok(None),
        nanoseconds @ 0..=999_999_999 => Ok(Some(SetTime::At(Timestamp { seconds: time.seconds, nanoseconds }))),
        _ => Err(Errno::EINVAL),
    }
}
