//! The served directory: its private mount, and how an `O_PATH` descriptor becomes an open file.

use crate::error::OpenError;
use crate::filesystem::{BTRFS, FILESYSTEMS_WITH_HANDLES, FILESYSTEMS_WITH_RESERVES, TMPFS, device_of, stat};
use crate::mount::PrivateMount;
use crate::nodes::Identity;
use crate::sys::{self, FilesystemUser};
use poolfs_libservice::Spending;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, Statx};
use rustix::io::{Errno, Result};
use rustix::mount::{OpenTreeFlags, open_tree};
use rustix::path::DecInt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// The private mount of the served directory.
pub(crate) struct Backing {
    /// Keeps the detached mount alive.
    _mount: Arc<PrivateMount>,
    root: OwnedFd,
    proc: OwnedFd,
    handles: bool,
    kind: u64,
    device: u64,
}

impl Backing {
    pub(crate) fn of(mount: Arc<PrivateMount>, directory: &Path) -> std::result::Result<Self, OpenError> {
        let no_directory = |raw: Errno| OpenError::Directory { directory: directory.into(), source: raw.into() };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::openat(&*mount, c".", flags, Mode::empty()).map_err(no_directory)?;
        let proc = own_descriptors().map_err(|raw| OpenError::Proc { source: raw.into() })?;
        let kind = rustix::fs::fstatfs(&root).map_err(no_directory)?.f_type as u64;
        let handles = FILESYSTEMS_WITH_HANDLES.contains(&kind)
            && sys::file_handle(&root).and_then(|h| sys::open_handle(&root, &h, libc::O_PATH)).is_ok();
        let stat = stat(&root).map_err(no_directory)?;
        Ok(Self { _mount: mount, root, proc, handles, kind, device: device_of(&stat) })
    }

    /// The open directory that the tree hangs from.
    pub(crate) fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// Whether inodes are found again by their handles.
    pub(crate) fn has_handles(&self) -> bool {
        self.handles
    }

    /// Whether direct I/O can gain anything.
    pub(crate) fn has_device(&self) -> bool {
        self.kind != TMPFS
    }

    /// Whether the times of a punched file have to be set by hand.
    pub(crate) fn skips_times(&self) -> bool {
        self.kind == BTRFS
    }

    /// Runs a call that may take room of the disk. Where some of that is kept for root, it gets no more than whoever this is done for.
    pub(crate) fn spend<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let user = Spending::user().filter(|_| FILESYSTEMS_WITH_RESERVES.contains(&self.kind));
        let _user = user.and_then(FilesystemUser::new);
        call()
    }

    /// What names the inode behind `fd`.
    pub(crate) fn identity(&self, fd: impl AsFd, stat: &Statx) -> Result<Identity> {
        if self.handles {
            return sys::file_handle(fd).map(Identity::Handle);
        }
        Ok(Identity::Inode(device_of(stat), stat.stx_ino))
    }

    /// The inode number users see. Inodes of other devices (subvolumes) are moved out of the way of the root's.
    pub(crate) fn shown_inode(&self, device: u64, inode: u64) -> u64 {
        if device == self.device { inode } else { inode ^ device.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1 << 63 }
    }

    /// Opens the file behind the `O_PATH` descriptor `fd` with `flags`.
    pub(crate) fn reopen(&self, fd: impl AsFd, flags: OFlags) -> Result<OwnedFd> {
        let number = DecInt::from_fd(fd);
        rustix::fs::openat(&self.proc, number.as_c_str(), flags | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())
    }

    /// `/proc/self/fd`, where calls that take a path find the file behind a descriptor by its number.
    pub(crate) fn proc(&self) -> BorrowedFd<'_> {
        self.proc.as_fd()
    }
}

/// What [`keep_own_descriptors`] has found.
static OWN_DESCRIPTORS: OnceLock<OwnedFd> = OnceLock::new();

/// Finds `/proc/self/fd` for all later layers of this process, which may lose sight of `/proc`, or of where its links lead. It is a mount
/// of its own: no way leads up from it.
///
/// # Errors
/// When `/proc` is missing or something else is mounted there, or the host does not allow a private mount of it.
pub fn keep_own_descriptors() -> std::result::Result<(), OpenError> {
    let failed = |raw: Errno| OpenError::Proc { source: raw.into() };
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let own = open_proc().and_then(|found| open_tree(&found, c"", clone)).map_err(failed)?;
    // Whoever was first has found the same.
    let _ = OWN_DESCRIPTORS.set(own);
    Ok(())
}

fn own_descriptors() -> Result<OwnedFd> {
    match OWN_DESCRIPTORS.get() {
        Some(kept) => rustix::io::fcntl_dupfd_cloexec(kept, 0),
        None => open_proc(),
    }
}

/// The private way to `/proc/self/fd`, past anything mounted over a part of it.
fn open_proc() -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let proc = rustix::fs::openat(CWD, c"/proc", flags | OFlags::NOFOLLOW, Mode::empty())?;
    if rustix::fs::fstatfs(&proc)?.f_type as u64 != rustix::fs::PROC_SUPER_MAGIC as u64 {
        return Err(Errno::NODEV);
    }
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(&proc, c"self/fd", flags, Mode::empty(), resolve)
}
