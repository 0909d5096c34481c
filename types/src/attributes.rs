//! File attributes: types, times, changes to attributes, filesystem statistics, and the caller of a layer.

use crate::NO_ID;

/// A point in time since 1970, UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp {
    /// Whole seconds; negative before 1970.
    pub seconds: i64,
    /// 0 to 999,999,999.
    pub nanoseconds: u32,
}

/// The type of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileType {
    /// regular file
    Regular,
    /// directory
    Directory,
    /// symbolic link
    Symlink,
    /// character device
    CharDevice,
    /// block device
    BlockDevice,
    /// named pipe
    Fifo,
    /// Unix socket
    Socket,
}

impl FileType {
    /// Whether it stands for a device.
    #[must_use]
    pub const fn is_device(self) -> bool {
        matches!(self, FileType::CharDevice | FileType::BlockDevice)
    }

    /// The `S_IFMT` bits of `st_mode`.
    #[must_use]
    pub const fn mode_bits(self) -> u32 {
        match self {
            FileType::Fifo => 0o010_000,
            FileType::CharDevice => 0o020_000,
            FileType::Directory => 0o040_000,
            FileType::BlockDevice => 0o060_000,
            FileType::Regular => 0o100_000,
            FileType::Symlink => 0o120_000,
            FileType::Socket => 0o140_000,
        }
    }

    /// The type in the `S_IFMT` bits of `mode`, if it is one.
    #[must_use]
    pub const fn from_mode(mode: u32) -> Option<Self> {
        Some(match mode & 0o170_000 {
            0o010_000 => FileType::Fifo,
            0o020_000 => FileType::CharDevice,
            0o040_000 => FileType::Directory,
            0o060_000 => FileType::BlockDevice,
            0o100_000 => FileType::Regular,
            0o120_000 => FileType::Symlink,
            0o140_000 => FileType::Socket,
            _ => return None,
        })
    }
}

/// The attributes of a file, as `stat` shows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// The inode number users see; unique among the live files of the layer.
    pub inode: u64,
    /// The type.
    pub file_type: FileType,
    /// The low twelve bits of `st_mode`: set-id, sticky and rwx bits.
    pub permissions: u32,
    /// Hard links.
    pub links: u32,
    /// Owner, or [`NO_ID`].
    pub uid: u32,
    /// Group, or [`NO_ID`].
    pub gid: u32,
    /// Device number of a device file (Linux's 32-bit encoding: minor low 8, major 12, minor high 12), else 0.
    pub device: u32,
    /// Bytes.
    pub size: u64,
    /// Units of 512 bytes allocated.
    pub blocks: u64,
    /// Last access.
    pub accessed: Timestamp,
    /// Last change of the content.
    pub modified: Timestamp,
    /// Last change of content or attributes.
    pub changed: Timestamp,
    /// Of an answer of the backend: another number after every change of the object that the backend has made, whoever asked for it. No program sees it.
    pub change: u64,
}

impl Attributes {
    /// `st_mode`: type and permissions.
    #[must_use]
    pub const fn mode(&self) -> u32 {
        self.file_type.mode_bits() | self.permissions
    }

    /// Whether its owner or group is nobody's id where it is looked at ([`NO_ID`]).
    #[must_use]
    pub fn is_foreign(&self) -> bool {
        self.uid == NO_ID || self.gid == NO_ID
    }

    /// Whether this is a directory.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        self.file_type == FileType::Directory
    }
}

/// A new value for a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// the layer's clock, now
    Now,
    /// this time
    At(Timestamp),
}

/// Changes to attributes; `None` leaves a field alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttributes {
    /// The low twelve bits of the mode.
    pub permissions: Option<u32>,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// New size: truncate or extend with zeros. Regular files only (`EISDIR`, else `EINVAL`).
    pub size: Option<u64>,
    /// New access time.
    pub accessed: Option<SetTime>,
    /// New modification time.
    pub modified: Option<SetTime>,
}

/// On whose behalf a layer is called. Layers decide ownership of new objects by it, never permission: the service
/// has decided that already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Owner of what the call creates.
    pub uid: u32,
    /// Group of what the call creates (the service has applied a set-group-id directory).
    pub gid: u32,
    /// Bits taken from the mode of what the call creates, unless the parent has a default ACL, which then decides.
    pub umask: u32,
}

impl Caller {
    /// Root with an empty umask: what the service itself does.
    pub const ROOT: Caller = Caller { uid: 0, gid: 0, umask: 0 };
}

/// Space and inodes of a filesystem, as `statfs` shows them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileSystemStatistics {
    /// Bytes of a block, the unit of the three counts below.
    pub block_size: u32,
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
    /// Longest name, bytes.
    pub name_max: u32,
    /// Whether disk quotas may refuse what the counts above have room for.
    pub has_quotas: bool,
}
