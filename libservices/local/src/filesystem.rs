//! What the host's filesystems are asked by descriptor: their kinds by `f_type`, a name below a directory, and attributes.

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Statx, StatxFlags};
use rustix::io::{Errno, Result};

/// Names are single components; these flags hold even if one were not.
const RESOLVE: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

/// How often a resolution that the kernel could not finish beside somebody's rename is tried.
const RESOLVE_TRIES_MAX: u32 = 16;

// Filesystems whose handles find an inode again as long as it has a name (f_type of statfs). Others may forget it (FUSE) or
// cannot tell.
pub(crate) const FILESYSTEMS_WITH_HANDLES: [u64; 5] = [0xEF53, 0x5846_5342, BTRFS, TMPFS, 0xF2F5_2010];

/// Filesystems that keep blocks for root: the family of ext4, f2fs.
pub(crate) const FILESYSTEMS_WITH_RESERVES: [u64; 2] = [0xEF53, 0xF2F5_2010];

/// f_type of btrfs, which does not count the punching of a hole into a hole as a change.
pub(crate) const BTRFS: u64 = 0x9123_683E;

/// f_type of tmpfs, where `O_DIRECT` opens but gains nothing.
pub(crate) const TMPFS: u64 = 0x0102_1994;

/// The device number of `stat`, as one number.
pub(crate) fn device_of(stat: &Statx) -> u64 {
    u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor)
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
