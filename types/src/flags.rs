//! Flags of calls, with the kernel's own bit values (x86-64).

use bitflags::bitflags;

bitflags! {
    /// How a file is opened. Bits have the values of Linux's `O_*`; the access mode is [`OpenFlags::access`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct OpenFlags: u32 {
        /// `O_WRONLY`
        const WRITE_ONLY = 0o1;
        /// `O_RDWR`
        const READ_WRITE = 0o2;
        /// `O_CREAT`
        const CREATE = 0o100;
        /// `O_EXCL`
        const EXCLUSIVE = 0o200;
        /// `O_TRUNC`
        const TRUNCATE = 0o1000;
        /// `O_APPEND`: every write goes to the end of the file, whatever its offset
        const APPEND = 0o2000;
        /// `O_DSYNC`: every write is durable, with what is needed to read it back, before it returns
        const DATA_SYNC = 0o10000;
        /// `O_DIRECT`
        const DIRECT = 0o40000;
        /// `O_DIRECTORY`
        const DIRECTORY = 0o200000;
        /// `O_NOFOLLOW`
        const NO_FOLLOW = 0o400000;
        /// `O_NOATIME`
        const NO_ATIME = 0o1000000;
        /// the bit that `O_SYNC` has beyond `O_DSYNC`
        const FILE_SYNC = 0o4000000;
    }
}

/// What an open file may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessMode {
    /// `O_RDONLY`
    Read,
    /// `O_WRONLY`
    Write,
    /// `O_RDWR`
    ReadWrite,
}

impl OpenFlags {
    /// `O_RDONLY`
    pub const READ_ONLY: OpenFlags = OpenFlags::empty();

    /// The access mode. `O_WRONLY|O_RDWR` (3), which Linux reserves, counts as [`AccessMode::ReadWrite`].
    #[must_use]
    pub fn access(self) -> AccessMode {
        match (self.contains(Self::WRITE_ONLY), self.contains(Self::READ_WRITE)) {
            (false, false) => AccessMode::Read,
            (true, false) => AccessMode::Write,
            (_, true) => AccessMode::ReadWrite,
        }
    }

    /// Whether reads are allowed.
    #[must_use]
    pub fn readable(self) -> bool {
        self.access() != AccessMode::Write
    }

    /// Whether writes are allowed.
    #[must_use]
    pub fn writable(self) -> bool {
        self.access() != AccessMode::Read
    }
}

bitflags! {
    /// How a rename treats the target; values of `renameat2`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RenameFlags: u32 {
        /// fail with `EEXIST` when the target exists
        const NO_REPLACE = 1;
        /// swap the two names; both must exist
        const EXCHANGE = 2;
        /// leave a whiteout (a 0/0 character device) at the source
        const WHITEOUT = 4;
    }
}

bitflags! {
    /// What `fallocate` does; values of `FALLOC_FL_*`. Empty: allocate and extend.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct AllocateMode: u32 {
        /// do not change the file's size
        const KEEP_SIZE = 1;
        /// deallocate the range, which then reads as zeros; only with `KEEP_SIZE`
        const PUNCH_HOLE = 2;
        /// the range reads as zeros
        const ZERO_RANGE = 16;
    }
}

bitflags! {
    /// How `setxattr` treats an existing attribute; values of `XATTR_*`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct XattrFlags: u32 {
        /// fail with `EEXIST` when the attribute exists
        const CREATE = 1;
        /// fail with `ENODATA` when it does not
        const REPLACE = 2;
    }
}

/// What `seek` looks for (`SEEK_DATA`, `SEEK_HOLE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeekTo {
    /// the next offset that holds data
    Data,
    /// the next hole; the end of the file counts as one
    Hole,
}
