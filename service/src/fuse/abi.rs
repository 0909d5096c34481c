//! The kernel's FUSE ABI as far as it is used here: layouts and numbers of `linux/fuse.h`, version 7.45.
//!
//! All numbers are in the machine's own byte order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub const VERSION_MAJOR: u32 = 7;
pub const VERSION_MINOR: u32 = 45;

/// Requests.
pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const NOTIFY_REPLY: u32 = 41;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const TMPFILE: u32 = 51;
    pub const STATX: u32 = 52;
    pub const COPY_FILE_RANGE_64: u32 = 53;
}

/// What the service tells the kernel unasked.
pub mod notify {
    pub const INVALIDATE_INODE: i32 = 2;
    pub const INVALIDATE_ENTRY: i32 = 3;
    pub const STORE: i32 = 4;
    pub const PRUNE: i32 = 9;

    /// Of `INVALIDATE_ENTRY`: the name is looked up again at its next use, and what is mounted on it stays.
    pub const EXPIRE_ONLY: u32 = 1;
}

/// What INIT agrees on.
pub mod init {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const DONT_MASK: u64 = 1 << 6;
    pub const HAS_IOCTL_DIR: u64 = 1 << 11;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const POSIX_ACL: u64 = 1 << 20;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    /// The upper half of the flags counts.
    pub const INIT_EXT: u64 = 1 << 30;
    pub const HAS_EXPIRE_ONLY: u64 = 1 << 35;
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub const PASSTHROUGH: u64 = 1 << 37;
    pub const OVER_IO_URING: u64 = 1 << 41;
}

/// Which fields of [`SetAttributesIn`] count.
pub mod set_attributes {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ACCESSED: u32 = 1 << 4;
    pub const MODIFIED: u32 = 1 << 5;
    pub const HANDLE: u32 = 1 << 6;
    pub const ACCESSED_NOW: u32 = 1 << 7;
    pub const MODIFIED_NOW: u32 = 1 << 8;
}

/// Flags of an open file.
pub mod open {
    pub const DIRECT_IO: u32 = 1 << 0;
    pub const KEEP_CACHE: u32 = 1 << 1;
    pub const CACHE_LISTING: u32 = 1 << 3;
    pub const NO_FLUSH: u32 = 1 << 5;
    /// Mapped and read from the file that the answer names.
    pub const PASSTHROUGH: u32 = 1 << 7;
}

/// Flags of [`WriteIn`].
pub mod write {
    /// A page of the kernel's cache, on nobody's behalf.
    pub const CACHE: u32 = 1 << 0;
    pub const KILL_SET_ID: u32 = 1 << 2;
}

/// Of [`SyncIn`]: the content only.
pub const SYNC_DATA_ONLY: u32 = 1;

/// Of [`StatxOut`]: everything stat(2) shows.
pub const STATX_BASIC_STATS: u32 = 0x7ff;

macro_rules! layouts {
    ($($(#[$doc:meta])* $name:ident: $size:literal { $($(#[$note:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct $name { $($(#[$note])* pub $field: $type,)* }

        const _: () = assert!(size_of::<$name>() == $size);
    )*};
}

layouts! {
    /// Before every request.
    InHeader: 40 {
        length: u32, opcode: u32, unique: u64, node: u64, uid: u32, gid: u32, thread: u32,
        /// Bytes of extensions at the end, divided by 8.
        extensions: u16,
        padding: u16,
    }

    /// Before every answer and notification.
    OutHeader: 16 {
        length: u32,
        /// An answer's errno, negative; a notification's code.
        error: i32,
        /// The request's number; 0 of a notification.
        unique: u64,
    }

    InitIn: 64 {
        major: u32, minor: u32, read_ahead_max: u32, flags: u32, flags_high: u32, unused: [u32; 11],
    }

    InitOut: 64 {
        major: u32, minor: u32, read_ahead_max: u32, flags: u32, background_max: u16, congestion_threshold: u16,
        write_max: u32, time_granularity: u32, pages_max: u16, map_alignment: u16, flags_high: u32,
        stack_depth_max: u32, request_timeout: u16, unused: [u16; 11],
    }

    Attr: 88 {
        inode: u64, size: u64, blocks: u64, accessed: i64, modified: i64, changed: i64, accessed_nanoseconds: u32,
        modified_nanoseconds: u32, changed_nanoseconds: u32, mode: u32, links: u32, uid: u32, gid: u32, device: u32,
        block_size: u32, flags: u32,
    }

    AttrOut: 104 { valid_seconds: u64, valid_nanoseconds: u32, padding: u32, attributes: Attr, }

    EntryOut: 128 {
        node: u64, generation: u64, entry_valid_seconds: u64, attr_valid_seconds: u64, entry_valid_nanoseconds: u32,
        attr_valid_nanoseconds: u32, attributes: Attr,
    }

    StatxTime: 16 { seconds: i64, nanoseconds: u32, reserved: u32, }

    Statx: 256 {
        mask: u32, block_size: u32, attributes: u64, links: u32, uid: u32, gid: u32, mode: u16, spare: u16, inode: u64,
        size: u64, blocks: u64, attributes_mask: u64, accessed: StatxTime, born: StatxTime, changed: StatxTime,
        modified: StatxTime, device_major: u32, device_minor: u32, on_major: u32, on_minor: u32, unused: [u64; 14],
    }

    StatxOut: 288 { valid_seconds: u64, valid_nanoseconds: u32, flags: u32, spare: [u64; 2], attributes: Statx, }

    ForgetIn: 8 { count: u64, }

    BatchForgetIn: 8 { count: u32, padding: u32, }

    ForgetOne: 16 { node: u64, count: u64, }

    SetAttributesIn: 88 {
        valid: u32, padding: u32, handle: u64, size: u64, lock_owner: u64, accessed: i64, modified: i64, changed: i64,
        accessed_nanoseconds: u32, modified_nanoseconds: u32, changed_nanoseconds: u32, mode: u32, unused: u32, uid: u32,
        gid: u32, unused_too: u32,
    }

    MakeNodeIn: 16 { mode: u32, device: u32, umask: u32, padding: u32, }

    MakeDirectoryIn: 8 { mode: u32, umask: u32, }

    RenameIn: 8 { new_parent: u64, }

    Rename2In: 16 { new_parent: u64, flags: u32, padding: u32, }

    LinkIn: 8 { node: u64, }

    OpenIn: 8 { flags: u32, open_flags: u32, }

    CreateIn: 16 { flags: u32, mode: u32, umask: u32, open_flags: u32, }

    OpenOut: 16 { handle: u64, flags: u32, backing: u32, }

    ReleaseIn: 24 { handle: u64, flags: u32, release_flags: u32, lock_owner: u64, }

    FlushIn: 24 { handle: u64, unused: u32, padding: u32, lock_owner: u64, }

    /// READ, READDIR and READDIRPLUS.
    ReadIn: 40 {
        handle: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }

    WriteIn: 40 {
        handle: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }

    WriteOut: 8 { size: u32, padding: u32, }

    StatfsOut: 80 {
        blocks: u64, blocks_free: u64, blocks_available: u64, files: u64, files_free: u64, block_size: u32,
        name_max: u32, fragment_size: u32, padding: u32, spare: [u32; 6],
    }

    SyncIn: 16 { handle: u64, flags: u32, padding: u32, }

    /// The form without `FUSE_SETXATTR_EXT`, which INIT does not ask for.
    SetXattrIn: 8 { size: u32, flags: u32, }

    /// GETXATTR and LISTXATTR.
    GetXattrIn: 8 { size: u32, padding: u32, }

    GetXattrOut: 8 { size: u32, padding: u32, }

    IoctlIn: 32 { handle: u64, flags: u32, command: u32, argument: u64, in_size: u32, out_size: u32, }

    IoctlOut: 16 { result: i32, flags: u32, in_vectors: u32, out_vectors: u32, }

    AllocateIn: 32 { handle: u64, offset: u64, length: u64, mode: u32, padding: u32, }

    SeekIn: 24 { handle: u64, offset: u64, whence: u32, padding: u32, }

    SeekOut: 8 { offset: u64, }

    CopyRangeIn: 56 {
        source: u64, source_offset: u64, target_node: u64, target: u64, target_offset: u64, length: u64, flags: u64,
    }

    CopyRange64Out: 8 { count: u64, }

    /// Before each name of a listing, which is filled up to a multiple of 8 bytes.
    Dirent: 24 { inode: u64, cookie: u64, name_length: u32, file_type: u32, }

    InvalidateInodeOut: 24 { node: u64, offset: i64, length: i64, }

    InvalidateEntryOut: 16 { parent: u64, name_length: u32, flags: u32, }

    StoreOut: 24 { node: u64, offset: u64, size: u32, padding: u32, }

    PruneOut: 16 { count: u32, padding: u32, spare: u64, }
}
