//! The one request type: both fronts produce it, and [`crate::Instance::dispatch`] serves it.
//!
//! A front does three things: it checks the form of what its peer sent, it turns the peer's numbers into nodes ([`NodeId`]) and
//! open files ([`crate::OpenFile`]), and it turns the [`Reply`] or [`Failure`] into its own message. Everything else (permission,
//! statistics, set-id bits, errors, the kernel's caches) happens behind `dispatch`.
//!
//! A front that names files by path resolves it with [`crate::Instance::walk`].

mod concerns;

use crate::access::Credentials;
use crate::handles::OpenFile;
use crate::queue_front::MountPoints;
use poolfs_libservice::types::{
    AllocateMode, Attributes, Caller, Errno, FileSystemStatistics, FileType, Name, NodeId, OpenFlags, RenameFlags,
    SeekTo, SetAttributes, XattrFlags,
};
use poolfs_libservice::{DirectoryEntry, Durability, Entry, ReadTarget, Written};
use poolfs_service_protocol::OperationPath;
use std::ops::ControlFlow;
use std::sync::Arc;

/// On whose behalf a request is served, and which way it came.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The way the request came. It decides whether the kernel's caches have to be told of changes.
    pub path: OperationPath,
    /// Owner, group and umask of what the request creates.
    pub caller: Caller,
    /// The calling thread's id as this process sees it, 0 when unknown. Only asked for rare decisions by FUSE
    /// requests, which carry neither groups nor capabilities.
    pub thread: u32,
    /// Who asks, when nobody has checked permissions yet (the queue front). `None`: the kernel has checked already
    /// (FUSE with `default_permissions`), or the service itself asks.
    pub credentials: Option<&'a Credentials>,
    /// Names on which the caller has something mounted: they are left to the kernel, with what is behind them.
    pub mounted: Option<&'a MountPoints>,
    /// Nobody waits for the answer: the request is taken before another one is served, maybe by the thread that serves that.
    pub is_posted: bool,
    /// When it came, or its caller says that it was asked for, milliseconds of the monotonic clock; nothing: now.
    pub asked_ms: Option<u64>,
}

impl<'a> Context<'a> {
    /// A request of the user-level path: permissions are checked here.
    #[must_use]
    pub fn library(credentials: &'a Credentials, umask: u32) -> Self {
        let caller = Caller { uid: credentials.uid, gid: credentials.gid, umask: umask & 0o777 };
        Self {
            path: OperationPath::Library,
            caller,
            thread: 0,
            credentials: Some(credentials),
            mounted: None,
            is_posted: false,
            asked_ms: None,
        }
    }

    /// A request of the kernel, which has checked permissions.
    #[must_use]
    pub fn fuse(uid: u32, gid: u32, umask: u32, thread: u32) -> Self {
        let caller = Caller { uid, gid, umask: umask & 0o777 };
        Self {
            path: OperationPath::Fuse,
            caller,
            thread,
            credentials: None,
            mounted: None,
            is_posted: false,
            asked_ms: None,
        }
    }

    /// Whether the caller has something mounted on a name of a directory.
    #[must_use]
    pub fn has_mounted_on(&self, directory: NodeId, name: &[u8]) -> bool {
        self.mounted.is_some_and(|points| points.has(directory, name))
    }

    /// Whether symbolic links are left to the kernel.
    #[must_use]
    pub fn leaves_links(&self) -> bool {
        self.mounted.is_some_and(|points| points.forbid_links())
    }

    /// Whether the caller has something mounted on a node, whatever it is called by now.
    #[must_use]
    pub fn has_covered(&self, node: NodeId) -> bool {
        self.mounted.is_some_and(|points| points.cover(node))
    }

    /// Whether the request came over shared memory.
    #[must_use]
    pub fn is_library(&self) -> bool {
        self.path == OperationPath::Library
    }
}

/// Modifiers of a write that only a front knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteMode {
    /// To the end of the file, whatever the offset (the description has `O_APPEND` now).
    pub append: bool,
    /// The kernel writes back a page of a shared mapping: at its offset, on nobody's behalf.
    pub from_mapping: bool,
    /// The kernel says that the writer may not keep set-id bits. The user-level path leaves it `false`: there the
    /// credentials decide.
    pub kill_set_id: bool,
    /// What this write has to be before it is answered, whatever its open file asks for (`RWF_DSYNC`, `RWF_SYNC`). The kernel says it of
    /// every write, and syncs by itself only after those that it keeps pages of: of what goes past its pages nobody else knows.
    pub durability: Option<Durability>,
}

/// What is asked. Nodes that a [`Reply::Entry`] names carry one reference, to be given back by [`Request::Forget`].
pub enum Request<'a> {
    /// Resolves one name. Answer: `Entry`.
    Lookup {
        /// the directory
        parent: NodeId,
        /// the name
        name: Name<'a>,
    },
    /// Gives references back. Answer: `Done`.
    Forget {
        /// the node
        node: NodeId,
        /// how many references
        count: u64,
    },
    /// Attributes. Answer: `Attributes`.
    Stat {
        /// the node
        node: NodeId,
    },
    /// Whether the caller may `mask` (R 4, W 2, X 1, 0: exists). Answer: `Done`.
    Access {
        /// the node
        node: NodeId,
        /// the access asked for
        mask: u32,
    },
    /// Changes attributes. Answer: `Attributes`.
    Change {
        /// the node
        node: NodeId,
        /// what becomes of them
        changes: SetAttributes,
        /// an open file by which the size is changed (ftruncate): its access counts, not the file's mode
        file: Option<&'a OpenFile>,
    },
    /// Target of a symbolic link. Answer: `Bytes`.
    ReadLink {
        /// the link
        node: NodeId,
    },
    /// Creates and opens a regular file that does not exist. Answer: `Opened` with an entry.
    Create {
        /// the directory
        parent: NodeId,
        /// the name
        name: Name<'a>,
        /// low twelve bits of the mode, before the umask
        permissions: u32,
        /// how it is opened
        flags: OpenFlags,
    },
    /// Creates and opens a regular file without a name. Answer: `Opened` with an entry.
    CreateNameless {
        /// the directory whose filesystem and defaults it gets
        parent: NodeId,
        /// low twelve bits of the mode, before the umask
        permissions: u32,
        /// how it is opened; `EXCLUSIVE`: it never gets a name
        flags: OpenFlags,
    },
    /// Creates a regular file, fifo, socket or device. Answer: `Entry`.
    MakeNode {
        /// the directory
        parent: NodeId,
        /// the name
        name: Name<'a>,
        /// what
        file_type: FileType,
        /// low twelve bits of the mode, before the umask
        permissions: u32,
        /// device number
        device: u32,
    },
    /// Creates a directory. Answer: `Entry`.
    MakeDirectory {
        /// the directory
        parent: NodeId,
        /// the name
        name: Name<'a>,
        /// low twelve bits of the mode, before the umask
        permissions: u32,
    },
    /// Creates a symbolic link. Answer: `Entry`.
    SymbolicLink {
        /// the directory
        parent: NodeId,
        /// the name
        name: Name<'a>,
        /// where it points
        target: &'a [u8],
    },
    /// Another name for a file. Answer: `Entry`.
    Link {
        /// the file
        node: NodeId,
        /// the directory
        parent: NodeId,
        /// the name
        name: Name<'a>,
    },
    /// Removes a name of what is no directory. Answer: `Done`.
    Unlink {
        /// the directory
        parent: NodeId,
        /// the name
        name: Name<'a>,
    },
    /// Removes an empty directory. Answer: `Done`.
    RemoveDirectory {
        /// the directory
        parent: NodeId,
        /// the name
        name: Name<'a>,
    },
    /// Renames. Answer: `Done`.
    Rename {
        /// the old directory
        parent: NodeId,
        /// the old name
        name: Name<'a>,
        /// the new directory
        new_parent: NodeId,
        /// the new name
        new_name: Name<'a>,
        /// exchange and the like
        flags: RenameFlags,
    },
    /// Opens a regular file. Answer: `Opened`.
    Open {
        /// the file
        node: NodeId,
        /// how
        flags: OpenFlags,
    },
    /// Opens a directory for listing. Answer: `Opened`.
    OpenDirectory {
        /// the directory
        node: NodeId,
    },
    /// Reads into `target`. Answer: `Count`.
    Read {
        /// from where
        file: &'a OpenFile,
        /// at which byte
        offset: u64,
        /// where to
        target: &'a mut dyn ReadTarget,
    },
    /// Writes. Answer: `Written`.
    Write {
        /// where to
        file: &'a OpenFile,
        /// at which byte
        offset: u64,
        /// what
        data: &'a [u8],
        /// modifiers
        mode: WriteMode,
    },
    /// `fallocate`. Answer: `Done`.
    Allocate {
        /// the file
        file: &'a OpenFile,
        /// allocate, punch or zero
        mode: AllocateMode,
        /// from which byte
        offset: u64,
        /// bytes
        length: u64,
    },
    /// Next data or hole. Answer: `Offset`.
    Seek {
        /// the file
        file: &'a OpenFile,
        /// from which byte
        offset: u64,
        /// what
        to: SeekTo,
    },
    /// `fsync`, `fdatasync`. Answer: `Done`.
    Sync {
        /// file or directory
        file: &'a OpenFile,
        /// how much
        durability: Durability,
    },
    /// `sync`, `syncfs`: everything written before. Answer: `Done`.
    SyncAll,
    /// A descriptor was closed. Answer: `Done`.
    Flush {
        /// the file
        file: &'a OpenFile,
    },
    /// `copy_file_range`. Answer: `Offset` with the count.
    CopyRange {
        /// from
        source: &'a OpenFile,
        /// at
        source_offset: u64,
        /// to
        target: &'a OpenFile,
        /// at
        target_offset: u64,
        /// bytes
        length: u64,
    },
    /// Lists a directory from `cookie` on. Answer: `Done`.
    List {
        /// an open directory
        file: &'a OpenFile,
        /// 0, or the cookie of the last entry delivered
        cookie: u64,
        /// told every entry until it breaks; called while the layer may hold locks, so it must not call the instance
        visit: &'a mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    },
    /// Value of an extended attribute. Answer: `Bytes`.
    GetXattr {
        /// the object
        node: NodeId,
        /// the attribute, with its namespace
        name: &'a [u8],
    },
    /// Names of all extended attributes the caller may see. Answer: `Names`.
    ListXattr {
        /// the object
        node: NodeId,
    },
    /// Sets an extended attribute. Answer: `Done`.
    SetXattr {
        /// the object
        node: NodeId,
        /// the attribute, with its namespace
        name: &'a [u8],
        /// its value
        value: &'a [u8],
        /// create or replace only
        flags: XattrFlags,
    },
    /// Removes an extended attribute. Answer: `Done`.
    RemoveXattr {
        /// the object
        node: NodeId,
        /// the attribute, with its namespace
        name: &'a [u8],
    },
    /// Space of the filesystem. Answer: `Statistics`.
    Statfs {
        /// any object
        node: NodeId,
    },
}

/// What came out.
#[derive(Debug)]
pub enum Reply {
    /// it is done
    Done,
    /// a node with one reference, and its attributes
    Entry(Entry),
    /// attributes
    Attributes(Attributes),
    /// an open file, to be ended with [`crate::Instance::release`]; with the entry when it was created
    Opened {
        /// the file
        file: Arc<OpenFile>,
        /// the new name's node, with one reference
        entry: Option<Entry>,
    },
    /// bytes read
    Count(usize),
    /// bytes written, and where
    Written(Written),
    /// an offset or a count
    Offset(u64),
    /// a link's target or an attribute's value
    Bytes(Vec<u8>),
    /// names of attributes
    Names(Vec<Vec<u8>>),
    /// of the filesystem
    Statistics(FileSystemStatistics),
}

/// Why nothing came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// it failed: this errno is the application's
    Errno(Errno),
    /// nothing happened: the same call through the kernel will be right. Only for the user-level path.
    UseKernel,
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl Failure {
    /// The errno; what the kernel should have been asked for is a mistake of the front that cannot ask it.
    #[must_use]
    pub fn errno(self) -> Errno {
        match self {
            Failure::Errno(errno) => errno,
            Failure::UseKernel => Errno::EIO,
        }
    }
}

/// The kinds of requests statistics tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Kind {
    /// [`Request::Lookup`]
    Lookup,
    /// [`Request::Forget`]
    Forget,
    /// [`Request::Stat`]
    Stat,
    /// [`Request::Access`]
    Access,
    /// [`Request::Change`]
    Change,
    /// [`Request::ReadLink`]
    ReadLink,
    /// [`Request::Create`]
    Create,
    /// [`Request::MakeNode`]
    MakeNode,
    /// [`Request::MakeDirectory`]
    MakeDirectory,
    /// [`Request::SymbolicLink`]
    SymbolicLink,
    /// [`Request::Link`]
    Link,
    /// [`Request::Unlink`]
    Unlink,
    /// [`Request::RemoveDirectory`]
    RemoveDirectory,
    /// [`Request::Rename`]
    Rename,
    /// [`Request::Open`]
    Open,
    /// [`Request::OpenDirectory`]
    OpenDirectory,
    /// [`Request::Read`]
    Read,
    /// [`Request::Write`]
    Write,
    /// [`Request::Allocate`]
    Allocate,
    /// [`Request::Seek`]
    Seek,
    /// [`Request::Sync`]
    Sync,
    /// [`Request::Flush`]
    Flush,
    /// [`Request::CopyRange`]
    CopyRange,
    /// [`Request::List`]
    List,
    /// [`Request::GetXattr`]
    GetXattr,
    /// [`Request::ListXattr`]
    ListXattr,
    /// [`Request::SetXattr`]
    SetXattr,
    /// [`Request::RemoveXattr`]
    RemoveXattr,
    /// [`Request::Statfs`]
    Statfs,
    /// [`Request::CreateNameless`]
    CreateNameless,
    /// [`Request::SyncAll`]
    SyncAll,
}

impl Kind {
    /// How many there are.
    pub const COUNT: usize = 31;

    /// The names in `status`, in the order of the kinds.
    pub const NAMES: [&'static str; Self::COUNT] = [
        "lookup",
        "forget",
        "stat",
        "access",
        "change",
        "readlink",
        "create",
        "mknod",
        "mkdir",
        "symlink",
        "link",
        "unlink",
        "rmdir",
        "rename",
        "open",
        "opendir",
        "read",
        "write",
        "allocate",
        "seek",
        "sync",
        "flush",
        "copy-range",
        "list",
        "getxattr",
        "listxattr",
        "setxattr",
        "removexattr",
        "statfs",
        "tmpfile",
        "sync-all",
    ];
}

impl Request<'_> {
    /// Which kind of request this is.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Request::Lookup { .. } => Kind::Lookup,
            Request::Forget { .. } => Kind::Forget,
            Request::Stat { .. } => Kind::Stat,
            Request::Access { .. } => Kind::Access,
            Request::Change { .. } => Kind::Change,
            Request::ReadLink { .. } => Kind::ReadLink,
            Request::Create { .. } => Kind::Create,
            Request::CreateNameless { .. } => Kind::CreateNameless,
            Request::MakeNode { .. } => Kind::MakeNode,
            Request::MakeDirectory { .. } => Kind::MakeDirectory,
            Request::SymbolicLink { .. } => Kind::SymbolicLink,
            Request::Link { .. } => Kind::Link,
            Request::Unlink { .. } => Kind::Unlink,
            Request::RemoveDirectory { .. } => Kind::RemoveDirectory,
            Request::Rename { .. } => Kind::Rename,
            Request::Open { .. } => Kind::Open,
            Request::OpenDirectory { .. } => Kind::OpenDirectory,
            Request::Read { .. } => Kind::Read,
            Request::Write { .. } => Kind::Write,
            Request::Allocate { .. } => Kind::Allocate,
            Request::Seek { .. } => Kind::Seek,
            Request::Sync { .. } => Kind::Sync,
            Request::Flush { .. } => Kind::Flush,
            Request::CopyRange { .. } => Kind::CopyRange,
            Request::List { .. } => Kind::List,
            Request::GetXattr { .. } => Kind::GetXattr,
            Request::ListXattr { .. } => Kind::ListXattr,
            Request::SetXattr { .. } => Kind::SetXattr,
            Request::RemoveXattr { .. } => Kind::RemoveXattr,
            Request::Statfs { .. } => Kind::Statfs,
            Request::SyncAll => Kind::SyncAll,
        }
    }
}
