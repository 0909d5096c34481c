//! The messages of the user-level path, byte by byte: handshake, adoption, requests and replies.
//!
//! All numbers are little-endian (both ends run on one machine). Every structure has a fixed size, no padding and no
//! invalid bit patterns; what its fields mean is checked once, by the side that receives it.

use poolfs_types::{Attributes, FileType, Timestamp};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// First word of every handshake message: `PFS1`.
pub const MAGIC: u32 = u32::from_le_bytes(*b"PFS1");

/// Version of everything in this module; both ends must have the same.
pub const VERSION: u32 = 15;

/// File-system type of every poolfs mount in `/proc/self/mountinfo`.
pub const MOUNT_TYPE: &str = "fuse.poolfs";

/// Prefix of the source field of a poolfs mount; the instance's name follows.
pub const MOUNT_SOURCE_PREFIX: &str = "poolfs:";

/// Where an instance's socket is found, on the host and in its containers: `/run/poolfs/INSTANCE.sock`.
pub const SOCKET_DIRECTORY: &str = "/run/poolfs";

/// What comes after the instance's name in its socket's file name.
pub const SOCKET_SUFFIX: &str = ".sock";

/// The client's first message on the instance's socket (`SOCK_SEQPACKET`).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Hello {
    /// [`MAGIC`]
    pub magic: u32,
    /// [`VERSION`]
    pub version: u32,
}

/// The service's answer to [`Hello`], with the descriptors of the buffers' memory file, of each queue's, and of the leases' if there
/// are any, in that order.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Welcome {
    /// [`MAGIC`]
    pub magic: u32,
    /// [`VERSION`]
    pub version: u32,
    /// The session's number in its instance.
    pub session: u32,
    /// Request buffers in the memory file.
    pub buffers: u32,
    /// Bytes of one buffer's data area.
    pub buffer_data: u32,
    /// Request queues (one per core group): as many descriptors follow the first.
    pub queues: u32,
    /// Slots of each queue, a power of two.
    pub queue_slots: u32,
    /// Core group of CPU n in byte n. CPUs from 64 on, and those with a number that is no queue's (not the pool's): group 0.
    pub group_of_cpu: [u8; 64],
    /// Device number (major, minor) of the instance's mounts: another mount that claims its name is somebody else's.
    pub device: [u32; 2],
    /// Leases of segments ([`crate::segment`]); 0: none are given.
    pub leases: u32,
    /// How long a caller waits for a reply at most, milliseconds; 0: as long as it takes.
    pub timeout_ms: u32,
}

/// A file's segment, sent over the session's socket with the descriptors of its map, of the segment itself and of its lease's notice. The
/// reply to [`Operation::Segment`] tells its number. Or a whole file to be mapped, with its descriptor and nothing else
/// ([`Operation::Lend`]).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Grant {
    /// [`MAGIC`]
    pub magic: u32,
    /// [`VERSION`]
    pub version: u32,
    /// What tells it from the session's other grants; never 0.
    pub number: u64,
    /// Blocks of the map; 0: there is none, it is a whole file.
    pub capacity: u64,
    /// The lease.
    pub lease: u32,
    /// Its epoch, as long as it is not revoked.
    pub epoch: u32,
}

impl Grant {
    /// What the service gives under a lease, before it is sent.
    #[must_use]
    pub fn new(capacity: u64, lease: u32, epoch: u32) -> Self {
        Self { magic: MAGIC, version: VERSION, number: 0, capacity, lease, epoch }
    }

    /// A whole file.
    #[must_use]
    pub fn of_whole_file() -> Self {
        Self::new(0, 0, 0)
    }

    /// How many descriptors come with it.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        if self.capacity == 0 { 1 } else { 3 }
    }
}

/// Number of the adoption ioctl: `_IOWR('P', 1, [u8; 64])`. Sent on a descriptor of the mount.
pub const ADOPT: u32 = (3 << 30) | (64 << 16) | ((b'P' as u32) << 8) | 1;

/// Number of the ioctl that does what [`Operation::SyncAll`] does, for who has no session: `_IO('P', 2)`. Sent on a descriptor of
/// the mount.
pub const SYNC_ALL: u32 = ((b'P' as u32) << 8) | 2;

/// Number of the ioctl that takes back what [`Adopt::unshared`] said of a description: `_IO('P', 3)`. Sent on a descriptor of the mount;
/// whoever sends it has the kernel ask for the size afterwards.
pub const SHARE: u32 = ((b'P' as u32) << 8) | 3;

/// What the adoption ioctl carries, in and out. The service matches the calling thread to its process's session.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Adopt {
    /// In: [`MAGIC`].
    pub magic: u32,
    /// In: the session's number.
    pub session: u32,
    /// In: 0; or another number, to give the description up, because it is about to be mapped shared and writable or to append:
    /// all handles on it end, and it is not adopted again.
    /// Out: the handle, for requests of this session; 0: not to be had (or given up), use the kernel.
    pub handle: u64,
    /// Out: the file's inode number.
    pub inode: u64,
    /// Out: the open flags (`O_*`) of the description.
    pub open_flags: u32,
    /// Out: `st_mode` at that moment.
    pub mode: u32,
    /// Out: whether the kernel tells the service of every descriptor of this description that is closed, before that is done.
    pub announces_closing: u32,
    /// In: not 0 if the process vouches that nobody else has the description and that it is not mapped; and that it says so before
    /// that changes ([`SHARE`], [`Operation::Share`]). Then the kernel need not know the size.
    pub unshared: u32,
    /// Zero.
    pub reserved: [u8; 24],
}

impl Adopt {
    /// Asks for a handle of this session.
    #[must_use]
    pub const fn asking(session: u32) -> Self {
        Self {
            magic: MAGIC,
            session,
            handle: 0,
            inode: 0,
            open_flags: 0,
            mode: 0,
            announces_closing: 0,
            unshared: 0,
            reserved: [0; 24],
        }
    }
}

/// What a request asks. The file is named by `handle` when `path_length` is 0, else by the path: relative to the adopted
/// directory `directory`, or from the instance's root when that is 0. Paths are the first `path_length` bytes of the
/// data area; a second path, name or value follows with `second_length`, a value after a name with `third_length`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum Operation {
    /// Nothing; answers `value` = `offset`. For measuring a round trip.
    Echo = 1,
    /// `handle`, `offset`, `length`: bytes into the data area, their count into `length`.
    Read = 2,
    /// `handle`, `offset`, `length` bytes of the data area; `value` = offset of the first byte written, `length` = count.
    Write = 3,
    /// Attributes of file or path ([`RequestFlags::NO_FOLLOW`]). By handle: `value` = owner (upper half) and group of the host, as
    /// the notice of the file's lease has them.
    Stat = 4,
    /// Whether the session's (real: [`RequestFlags::REAL_IDS`], effective otherwise) ids may `mode` (R 4, W 2, X 1, 0 exists).
    Access = 5,
    /// `offset` = the new size; by handle (must be writable) or path.
    Truncate = 6,
    /// `handle`; [`RequestFlags::DATA_ONLY`] for fdatasync.
    Sync = 7,
    /// `handle`, `mode` = `FALLOC_FL_*`, `offset`, `length`.
    Allocate = 8,
    /// `handle`, `offset`; `mode` = 3 SEEK_DATA, 4 SEEK_HOLE; `value` = the offset found.
    Seek = 9,
    /// `handle` at `offset` to `second_handle` at `second_offset`, `length` bytes; `value` = count.
    CopyRange = 10,
    /// Path, `mode`, `umask`.
    MakeDirectory = 11,
    /// Path; `EISDIR` as Linux's unlink.
    Unlink = 12,
    /// Path to `second_directory` and second path; `mode` = `RENAME_*`. Directories are answered [`Status::UseKernel`].
    Rename = 13,
    /// File or path (`NO_FOLLOW` unless AT_SYMLINK_FOLLOW) gets the second path as a name.
    Link = 14,
    /// Path gets a symbolic link to the second string.
    SymbolicLink = 15,
    /// Path; target into the data area, its length into `length`.
    ReadLink = 16,
    /// Path, `mode` with type, `device`, `umask`.
    MakeNode = 17,
    /// File or path, `mode`.
    ChangeMode = 18,
    /// File or path (`NO_FOLLOW`), `times`.
    SetTimes = 19,
    /// File or path (`NO_FOLLOW`), name in second; up to `length` bytes of value into the data area; `value` = its size;
    /// `length` 0 asks for the size only.
    GetXattr = 20,
    /// File or path, name in second, value in third, `mode` = `XATTR_*`.
    SetXattr = 21,
    /// File or path; names, each with a NUL, into the data area, as `GetXattr`.
    ListXattr = 22,
    /// File or path, name in second.
    RemoveXattr = 23,
    /// File or path; a [`WireStatfs`] into the data area.
    Statfs = 24,
    /// Everything that was written to the instance before is durable when it is answered.
    SyncAll = 25,
    /// `handle`: its segment, to read by oneself; `value` = the number of the [`Grant`] that is sent over the socket.
    Segment = 26,
    /// `handle`: all of the file, to map it instead of the descriptor; `value` = the number of the [`Grant`] that is sent over the
    /// socket. Privately only: what is mapped stays as it is when the file is changed.
    Lend = 27,
    /// Others are about to get what descriptions the process has: the kernel knows the sizes of all that the session has adopted when
    /// it is answered, and from then on.
    Share = 28,
}

impl Operation {
    /// All operations, in the order of their numbers.
    pub const ALL: [Operation; 28] = [
        Self::Echo,
        Self::Read,
        Self::Write,
        Self::Stat,
        Self::Access,
        Self::Truncate,
        Self::Sync,
        Self::Allocate,
        Self::Seek,
        Self::CopyRange,
        Self::MakeDirectory,
        Self::Unlink,
        Self::Rename,
        Self::Link,
        Self::SymbolicLink,
        Self::ReadLink,
        Self::MakeNode,
        Self::ChangeMode,
        Self::SetTimes,
        Self::GetXattr,
        Self::SetXattr,
        Self::ListXattr,
        Self::RemoveXattr,
        Self::Statfs,
        Self::SyncAll,
        Self::Segment,
        Self::Lend,
        Self::Share,
    ];

    /// The operation with this number, if there is one.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get((number as usize).wrapping_sub(1)).copied()
    }
}

bitflags::bitflags! {
    /// Modifiers of a request.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RequestFlags: u32 {
        /// a symbolic link as last component is the object itself
        const NO_FOLLOW = 1;
        /// `fdatasync` instead of `fsync`
        const DATA_ONLY = 2;
        /// `access` by the real instead of the effective ids
        const REAL_IDS = 4;
    }
}

/// A time in a request.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct WireTime {
    /// Whole seconds.
    pub seconds: i64,
    /// 0..=999,999,999, or `UTIME_NOW` (0x3fffffff), or `UTIME_OMIT` (0x3ffffffe).
    pub nanoseconds: u32,
    /// Zero.
    pub reserved: u32,
}

/// A request, at a fixed place of its buffer.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Request {
    /// An [`Operation`].
    pub operation: u32,
    /// [`RequestFlags`].
    pub flags: u32,
    /// An adopted handle, or 0.
    pub handle: u64,
    /// An adopted directory's handle, or 0 for the instance's root.
    pub directory: u64,
    /// The target's adopted handle (copy range), or 0.
    pub second_handle: u64,
    /// The second path's directory, as `directory`.
    pub second_directory: u64,
    /// Offset or size.
    pub offset: u64,
    /// The second file's offset; of a post ([`crate::posts`]) its number in its slot.
    pub second_offset: u64,
    /// Bytes.
    pub length: u64,
    /// Mode, mask, flags or whence, by operation.
    pub mode: u32,
    /// Device number (Linux's 32-bit encoding).
    pub device: u32,
    /// The caller's umask.
    pub umask: u32,
    /// Bytes of the path.
    pub path_length: u32,
    /// Bytes of the second string.
    pub second_length: u32,
    /// Bytes of the third string.
    pub third_length: u32,
    /// Access and modification time.
    pub times: [WireTime; 2],
    /// When it was submitted (`CLOCK_MONOTONIC`, nanoseconds), while the service wants to know; else 0. Only ever shown: nobody
    /// vouches for it.
    pub submitted_ns: u64,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// served; the reply's fields say what came out
    Done = 0,
    /// failed with `errno`
    Failed = 1,
    /// not served here, nothing happened: the same call through the kernel will be right
    UseKernel = 2,
    /// A symbolic link was met: nothing happened. The data area holds the path to go on with (`length` bytes), absolute when
    /// it begins with a slash (then from the process's root), else relative to the same starting point as before.
    Redirect = 3,
    /// as `Redirect`, for the second path
    RedirectSecond = 4,
    /// The session has ended, nothing happened: the same call through the kernel will be right, and the session is of no more use.
    Ended = 5,
}

impl Status {
    /// The status with this number, if there is one.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::Done,
            1 => Self::Failed,
            2 => Self::UseKernel,
            3 => Self::Redirect,
            4 => Self::RedirectSecond,
            5 => Self::Ended,
            _ => return None,
        })
    }
}

/// Attributes in a reply or a notice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct WireAttributes {
    /// `st_ino`
    pub inode: u64,
    /// `st_size`
    pub size: u64,
    /// `st_blocks`, units of 512 bytes
    pub blocks: u64,
    /// `st_mode`
    pub mode: u32,
    /// `st_nlink`
    pub links: u32,
    /// `st_uid`
    pub uid: u32,
    /// `st_gid`
    pub gid: u32,
    /// `st_rdev`, Linux's 32-bit encoding
    pub device: u32,
    /// Nanoseconds of access, modification and change.
    pub nanoseconds: [u32; 3],
    /// Seconds of access, modification and change.
    pub seconds: [i64; 3],
}

impl From<&Attributes> for WireAttributes {
    fn from(a: &Attributes) -> Self {
        Self {
            inode: a.inode,
            size: a.size,
            blocks: a.blocks,
            mode: a.mode(),
            links: a.links,
            uid: a.uid,
            gid: a.gid,
            device: a.device,
            nanoseconds: [a.accessed.nanoseconds, a.modified.nanoseconds, a.changed.nanoseconds],
            seconds: [a.accessed.seconds, a.modified.seconds, a.changed.seconds],
        }
    }
}

impl WireAttributes {
    /// The attributes, or nothing when the peer sent a type that does not exist.
    #[must_use]
    pub fn to_attributes(self) -> Option<Attributes> {
        let time = |i: usize| Timestamp { seconds: self.seconds[i], nanoseconds: self.nanoseconds[i].min(999_999_999) };
        Some(Attributes {
            inode: self.inode,
            file_type: FileType::from_mode(self.mode)?,
            permissions: self.mode & 0o7777,
            links: self.links,
            uid: self.uid,
            gid: self.gid,
            device: self.device,
            size: self.size,
            blocks: self.blocks,
            accessed: time(0),
            modified: time(1),
            changed: time(2),
            change: 0,
        })
    }
}

/// Owner and group in one number, as the reply to [`Operation::Stat`] has them.
#[must_use]
pub const fn owners(uid: u32, gid: u32) -> u64 {
    (uid as u64) << 32 | gid as u64
}

/// Filesystem statistics in a reply's data area.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct WireStatfs {
    /// All blocks.
    pub blocks: u64,
    /// Free blocks.
    pub blocks_free: u64,
    /// Blocks free to users other than root.
    pub blocks_available: u64,
    /// All inodes.
    pub files: u64,
    /// Free inodes.
    pub files_free: u64,
    /// Bytes of a block.
    pub block_size: u32,
    /// Longest name.
    pub name_max: u32,
}

/// A reply, at a fixed place of its buffer.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Reply {
    /// A [`Status`].
    pub status: u32,
    /// The errno (1..=4095) when `Failed`.
    pub errno: i32,
    /// A number, by operation.
    pub value: u64,
    /// Bytes moved, or of what the data area holds.
    pub length: u64,
    /// One more than the slot by which writes of this open file may be posted from now on ([`crate::posts`]); 0: none.
    pub post_slot: u32,
    /// The epoch of that grant; never 0 with a slot.
    pub post_epoch: u32,
    /// The file's attributes after the operation (stat, truncate, chmod and the like).
    pub attributes: WireAttributes,
}
