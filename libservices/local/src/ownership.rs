//! Gives a new object exactly the owner and the mode that the call says.
//!
//! The kernel applies the umask (the calling thread's) or the parent's default ACL. Owner, group and set-id bits are corrected
//! afterwards, because the kernel would take them from this process and from set-group-id directories.

use crate::backing::Backing;
use crate::filesystem::stat;
use crate::sys;
use poolfs_types::Caller;
use rustix::fd::BorrowedFd;
use rustix::fs::{AtFlags, Gid, Mode, Statx, Uid};
use rustix::io::Result;
use rustix::path::DecInt;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a umask takes from a file's owner.
const OF_OWNER: u32 = 0o700;

/// Whether threads go on with the umask of the last caller they made something for.
static LEAVES_UMASKS: AtomicBool = AtomicBool::new(false);

thread_local! {
    static HAS_OWN_UMASK: Cell<bool> = const { Cell::new(false) };
    /// The umask that this thread goes on with, if it was left so.
    static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
}

/// From now on a thread of this process that makes something for a caller goes on with that caller's umask until it makes something for one
/// with another: most have the same, and each is then set once. A umask that takes something from the owner of a file is not left
/// behind. So this is for a process that sets no umasks itself and makes, without layers, only what is its owner's alone, or sets
/// the mode of what it makes.
pub fn leave_umasks() {
    LEAVES_UMASKS.store(true, Ordering::Relaxed);
}

/// Puts the thread's umask back, also when the call between panics.
struct Restore(Mode);

impl Drop for Restore {
    fn drop(&mut self) {
        rustix::process::umask(self.0);
    }
}

/// Runs `call` with the caller's umask in force, for this thread alone.
pub(crate) fn with_umask<T>(umask: u32, call: impl FnOnce() -> Result<T>) -> Result<T> {
    if !HAS_OWN_UMASK.get() {
        sys::own_thread_state()?;
        HAS_OWN_UMASK.set(true);
    }
    let umask = umask & 0o777;
    if LEAVES_UMASKS.load(Ordering::Relaxed) && umask & OF_OWNER == 0 {
        if LEFT.get() != Some(umask) {
            rustix::process::umask(Mode::from_raw_mode(umask));
            LEFT.set(Some(umask));
        }
        return call();
    }
    let _restore = Restore(rustix::process::umask(Mode::from_raw_mode(umask)));
    call()
}

impl Backing {
    /// Gives the new object behind `fd`, which was found to be `made`, its owner and, but for symbolic links, its set-id bits.
    /// What it is then.
    pub(crate) fn settle(&self, fd: BorrowedFd<'_>, made: Statx, caller: &Caller, permissions: u32) -> Result<Statx> {
        let mode = u32::from(made.stx_mode);
        let foreign = (made.stx_uid, made.stx_gid) != (caller.uid, caller.gid);
        if foreign {
            self.change_owner(fd, Some(caller.uid), Some(caller.gid))?;
        }
        let symlink = mode & 0o170_000 == 0o120_000;
        let wanted = mode & 0o777 | permissions & 0o7000;
        // A change of owner takes set-id bits away.
        let other_mode = !symlink && (mode & 0o7777 != wanted || foreign && wanted & 0o6000 != 0);
        if other_mode {
            self.change_mode(fd, wanted)?;
        }
        if foreign || other_mode { stat(fd) } else { Ok(made) }
    }

    pub(crate) fn change_owner(&self, fd: BorrowedFd<'_>, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        rustix::fs::chownat(fd, c"", uid.map(Uid::from_raw), gid.map(Gid::from_raw), AtFlags::EMPTY_PATH)
    }

    pub(crate) fn change_mode(&self, fd: BorrowedFd<'_>, permissions: u32) -> Result<()> {
        let number = DecInt::from_fd(fd);
        let mode = Mode::from_raw_mode(permissions & 0o7777);
        rustix::fs::chmodat(self.proc(), number.as_c_str(), mode, AtFlags::empty())
    }
}
