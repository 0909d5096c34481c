//! The directory that is served: its private mount, and the way from an `O_PATH` descriptor to an open file.

use crate::error::OpenError;
use crate::mount::PrivateMount;
use crate::nodes::Identity;
use crate::sys::{self, FilesystemUser};
use poolfs_libservice::Spending;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Statx, StatxFlags};
use rustix::io::{Errno, Result};
use rustix::mount::{OpenTreeFlags, open_tree};
use rustix::path::DecInt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Names are single components; these flags hold even if one were not.
const RESOLVE: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

/// How often a resolution that the kernel could not finish beside somebody's rename is tried.
const RESOLVE_TRIES_MAX: u32 = 16;

// Filesystems whose handles find an inode again as long as it has a name (f_type of statfs). Others may forget it (FUSE) or
// cannot tell.
const FILESYSTEMS_WITH_HANDLES: [u64; 5] = [0xEF53, 0x5846_5342, BTRFS, TMPFS, 0xF2F5_2010];

/// Filesystems that keep blocks for root: the family of ext4, f2fs.
const FILESYSTEMS_WITH_RESERVES: [u64; 2] = [0xEF53, 0xF2F5_2010];

/// f_type of btrfs, which does not count the punching of a hole into a hole as a change.
const BTRFS: u64 = 0x9123_683E;

/// f_type of tmpfs, where `O_DIRECT` opens but gains nothing.
pub(crate) const TMPFS: u64 = 0x0102_1994;

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

/// The device number of `stat`, as one number.
pub(crate) fn device_of(stat: &Statx) -> u64 {
    u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor)
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

/// `openat2` of one name below a directory, never through a symbolic link.
pub(crate) fn open_name(directory: impl AsFd, name: &[u8], flags: OFlags, mode: Mode) -> Result<OwnedFd> {
    let mut tries = 0;
    loop {
        tries += 1;
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::openat2(directory.as_fd(), name, flags, mode, RESOLVE) {
            Err(Errno::AGAIN) if tries < RESOLVE_TRIES_MAX => {}
            result => return result,
        }
    }
}

/// The attributes of what is behind `fd`.
pub(crate) fn stat(fd: impl AsFd) -> Result<Statx> {
    rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH | AtFlags::NO_AUTOMOUNT, StatxFlags::BASIC_STATS)
}

/// Whether the directory `fd` is still below the root of its mount. The kernel answers `ENOENT` for `..` when not.
pub(crate) fn is_connected(fd: impl AsFd) -> Result<bool> {
    match rustix::fs::statx(fd, c"..", AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC, StatxFlags::empty()) {
        Ok(_) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(raw) => Err(raw),
    }
}
