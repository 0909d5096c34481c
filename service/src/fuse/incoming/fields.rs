//! The parser of a message's body, read from its beginning to its end.

use super::{FileOperation, Forgets, NodeOperation, Offer, Operation};
use crate::fuse::abi::{self, opcode};
use crate::request::WriteMode;
use poolfs_libservice::Durability;
use poolfs_libservice::types::{
    AllocateMode, Errno, FileType, Name, OpenFlags, RenameFlags, SeekTo, SetAttributes, SetTime, Timestamp, XattrFlags,
};
use zerocopy::FromBytes;

/// What has not been read of a message's body.
pub(super) struct Fields<'a> {
    rest: &'a [u8],
    /// Found on the way: the umask of the caller.
    pub(super) umask: u32,
}

pub(super) type Parsed<T> = Result<T, Errno>;

/// A message shorter than it says.
pub(super) const SHORT: Errno = Errno::EIO;

impl<'a> Fields<'a> {
    pub(super) fn of(body: &'a [u8]) -> Self {
        Self { rest: body, umask: 0 }
    }

    fn take<T: FromBytes>(&mut self) -> Parsed<T> {
        let (value, rest) = T::read_from_prefix(self.rest).map_err(|_| SHORT)?;
        self.rest = rest;
        Ok(value)
    }

    fn bytes(&mut self, count: u32) -> Parsed<&'a [u8]> {
        let (bytes, rest) = self.rest.split_at_checked(count as usize).ok_or(SHORT)?;
        self.rest = rest;
        Ok(bytes)
    }

    /// What comes before the next NUL.
    fn string(&mut self) -> Parsed<&'a [u8]> {
        let end = self.rest.iter().position(|&byte| byte == 0).ok_or(SHORT)?;
        let (string, rest) = self.rest.split_at(end);
        self.rest = &rest[1..];
        Ok(string)
    }

    fn name(&mut self) -> Parsed<Name<'a>> {
        Name::new(self.string()?)
    }

    pub(super) fn forget(&mut self, node: u64) -> Parsed<Forgets<'a>> {
        Ok(Forgets::One(node, self.take::<abi::ForgetIn>()?.count))
    }

    pub(super) fn forget_many(&mut self) -> Parsed<Forgets<'a>> {
        let count = self.take::<abi::BatchForgetIn>()?.count;
        let bytes = u32::try_from(size_of::<abi::ForgetOne>()).ok().and_then(|size| count.checked_mul(size));
        Ok(Forgets::Many(self.bytes(bytes.ok_or(SHORT)?)?))
    }

    pub(super) fn operation(&mut self, number: u32) -> Parsed<Operation<'a>> {
        use opcode as op;
        match number {
            op::INIT => self.offer(),
            op::DESTROY => Ok(Operation::Destroy),
            op::SETATTR => self.change(),
            op::LINK => {
                let node = self.take::<abi::LinkIn>()?.node;
                Ok(Operation::Link { node, name: self.name()? })
            }
            op::RENAME => {
                let new_parent = self.take::<abi::RenameIn>()?.new_parent;
                self.rename(new_parent, RenameFlags::empty())
            }
            op::RENAME2 => {
                let head: abi::Rename2In = self.take()?;
                self.rename(head.new_parent, RenameFlags::from_bits(head.flags).ok_or(Errno::EINVAL)?)
            }
            op::RELEASE | op::RELEASEDIR => Ok(Operation::Release { handle: self.take::<abi::ReleaseIn>()?.handle }),
            op::READ..=op::WRITE
            | op::FSYNC
            | op::FLUSH
            | op::READDIR
            | op::FSYNCDIR
            | op::IOCTL
            | op::FALLOCATE
            | op::READDIRPLUS
            | op::LSEEK
            | op::COPY_FILE_RANGE
            | op::COPY_FILE_RANGE_64 => self.on_file(number),
            _ => self.on_node(number).map(Operation::Node),
        }
    }

    fn on_node(&mut self, number: u32) -> Parsed<NodeOperation<'a>> {
        use opcode as op;
        Ok(match number {
            op::LOOKUP => NodeOperation::Lookup { name: self.name()? },
            op::GETATTR => NodeOperation::Stat,
            op::STATX => NodeOperation::Statx,
            op::READLINK => NodeOperation::ReadLink,
            op::SYMLINK => NodeOperation::SymbolicLink { name: self.name()?, target: self.string()? },
            op::MKNOD => {
                let head: abi::MakeNodeIn = self.take()?;
                self.umask = head.umask;
                let file_type = FileType::from_mode(head.mode).ok_or(Errno::EINVAL)?;
                let (permissions, device) = (head.mode & PERMISSION_BITS, head.device);
                NodeOperation::MakeNode { name: self.name()?, file_type, permissions, device }
            }
            op::MKDIR => {
                let head: abi::MakeDirectoryIn = self.take()?;
                self.umask = head.umask;
                NodeOperation::MakeDirectory { name: self.name()?, permissions: head.mode & PERMISSION_BITS }
            }
            op::UNLINK => NodeOperation::Unlink { name: self.name()? },
            op::RMDIR => NodeOperation::RemoveDirectory { name: self.name()? },
            op::CREATE => {
                let head: abi::CreateIn = self.take()?;
                self.umask = head.umask;
                let flags = OpenFlags::from_bits_truncate(head.flags);
                NodeOperation::Create { name: self.name()?, permissions: head.mode & PERMISSION_BITS, flags }
            }
            op::TMPFILE => {
                // The name that follows is none.
                let head: abi::CreateIn = self.take()?;
                self.umask = head.umask;
                let flags = OpenFlags::from_bits_truncate(head.flags) - OpenFlags::DIRECTORY;
                NodeOperation::CreateNameless { permissions: head.mode & PERMISSION_BITS, flags }
            }
            op::OPEN => NodeOperation::Open { flags: OpenFlags::from_bits_truncate(self.take::<abi::OpenIn>()?.flags) },
            op::OPENDIR => NodeOperation::OpenDirectory,
            op::STATFS => NodeOperation::Statfs,
            op::SETXATTR => {
                let head: abi::SetXattrIn = self.take()?;
                let flags = XattrFlags::from_bits(head.flags).ok_or(Errno::EINVAL)?;
                NodeOperation::SetXattr { name: self.string()?, value: self.bytes(head.size)?, flags }
            }
            op::GETXATTR => {
                let room = self.take::<abi::GetXattrIn>()?.size as usize;
                NodeOperation::GetXattr { name: self.string()?, room }
            }
            op::LISTXATTR => NodeOperation::ListXattr { room: self.take::<abi::GetXattrIn>()?.size as usize },
            op::REMOVEXATTR => NodeOperation::RemoveXattr { name: self.string()? },
            _ => return Err(Errno::ENOSYS),
        })
    }

    fn on_file(&mut self, number: u32) -> Parsed<Operation<'a>> {
        let (handle, operation) = match number {
            opcode::READ | opcode::READDIR | opcode::READDIRPLUS => self.read(number)?,
            opcode::WRITE => self.write()?,
            opcode::FLUSH => (self.take::<abi::FlushIn>()?.handle, FileOperation::Flush),
            opcode::FSYNC | opcode::FSYNCDIR => {
                let head: abi::SyncIn = self.take()?;
                let data_only = head.flags & abi::SYNC_DATA_ONLY != 0;
                let durability = if data_only { Durability::Data } else { Durability::All };
                (head.handle, FileOperation::Sync { durability })
            }
            opcode::IOCTL => {
                let head: abi::IoctlIn = self.take()?;
                let (command, room) = (head.command, head.out_size as usize);
                (head.handle, FileOperation::Control { command, input: self.bytes(head.in_size)?, room })
            }
            opcode::FALLOCATE => {
                let head: abi::AllocateIn = self.take()?;
                let mode = AllocateMode::from_bits(head.mode).ok_or(Errno::EOPNOTSUPP)?;
                (head.handle, FileOperation::Allocate { mode, offset: head.offset, length: head.length })
            }
            opcode::LSEEK => {
                let head: abi::SeekIn = self.take()?;
                let to = match head.whence {
                    SEEK_DATA => SeekTo::Data,
                    SEEK_HOLE => SeekTo::Hole,
                    _ => return Err(Errno::EINVAL),
                };
                if i64::try_from(head.offset).is_err() {
                    return Err(Errno::ENXIO);
                }
                (head.handle, FileOperation::Seek { offset: head.offset, to })
            }
            _ => {
                let head: abi::CopyRangeIn = self.take()?;
                let abi::CopyRangeIn { source, source_offset, target, target_offset, length, .. } = head;
                let wide_answer = number == opcode::COPY_FILE_RANGE_64;
                (source, FileOperation::CopyRange { source_offset, target, target_offset, length, wide_answer })
            }
        };
        Ok(Operation::File { handle, operation })
    }

    fn read(&mut self, number: u32) -> Parsed<(u64, FileOperation<'a>)> {
        let head: abi::ReadIn = self.take()?;
        let (offset, size) = (head.offset, head.size as usize);
        let operation = match number {
            opcode::READ => FileOperation::Read { offset, length: size },
            opcode::READDIR => FileOperation::List { cookie: offset, room: size },
            _ => FileOperation::ListWithAttributes { cookie: offset, room: size },
        };
        Ok((head.handle, operation))
    }

    fn write(&mut self) -> Parsed<(u64, FileOperation<'a>)> {
        let head: abi::WriteIn = self.take()?;
        let flags = OpenFlags::from_bits_truncate(head.flags);
        let mode = WriteMode {
            append: flags.contains(OpenFlags::APPEND),
            durability: Durability::of_writes(flags),
            from_mapping: head.write_flags & abi::write::CACHE != 0,
            kill_set_id: head.write_flags & abi::write::KILL_SET_ID != 0,
        };
        Ok((head.handle, FileOperation::Write { offset: head.offset, data: self.bytes(head.size)?, mode }))
    }

    fn offer(&mut self) -> Parsed<Operation<'a>> {
        // Kernels before 7.36 send the first sixteen bytes only.
        let mut whole = [0; size_of::<abi::InitIn>()];
        let known = self.rest.len().min(whole.len());
        whole[..known].copy_from_slice(&self.rest[..known]);
        let head = abi::InitIn::read_from_bytes(&whole).map_err(|_| SHORT)?;
        let (major, minor, read_ahead_max) = (head.major, head.minor, head.read_ahead_max);
        let mut flags = u64::from(head.flags);
        if flags & abi::init::INIT_EXT != 0 {
            flags |= u64::from(head.flags_high) << 32;
        }
        Ok(Operation::Init(Offer { major, minor, read_ahead_max, flags }))
    }

    fn rename(&mut self, new_parent: u64, flags: RenameFlags) -> Parsed<Operation<'a>> {
        Ok(Operation::Rename { name: self.name()?, new_parent, new_name: self.name()?, flags })
    }

    fn change(&mut self) -> Parsed<Operation<'a>> {
        use abi::set_attributes as bit;
        let head: abi::SetAttributesIn = self.take()?;
        let has = |mask: u32| head.valid & mask != 0;
        let accessed = (head.accessed, head.accessed_nanoseconds);
        let modified = (head.modified, head.modified_nanoseconds);
        let changes = SetAttributes {
            permissions: has(bit::MODE).then_some(head.mode & PERMISSION_BITS),
            uid: has(bit::UID).then_some(head.uid),
            gid: has(bit::GID).then_some(head.gid),
            size: has(bit::SIZE).then_some(head.size),
            accessed: new_time(has(bit::ACCESSED), has(bit::ACCESSED_NOW), accessed)?,
            modified: new_time(has(bit::MODIFIED), has(bit::MODIFIED_NOW), modified)?,
        };
        Ok(Operation::Change { changes, handle: has(bit::HANDLE).then_some(head.handle) })
    }
}

const PERMISSION_BITS: u32 = 0o7777;
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

fn new_time(given: bool, now: bool, (seconds, nanoseconds): (i64, u32)) -> Parsed<Option<SetTime>> {
    match (given, now) {
        (_, true) => Ok(Some(SetTime::Now)),
        (true, false) if nanoseconds < 1_000_000_000 => Ok(Some(SetTime::At(Timestamp { seconds, nanoseconds }))),
        (true, false) => Err(Errno::EINVAL),
        (false, false) => Ok(None),
    }
}
