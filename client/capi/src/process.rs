//! Announcements of changes to the process (`poolfs_before_*`), and the count of operations on the user-level path.

use core::ffi::c_int;
use linux_raw_sys::general as sys;
use poolfs_client::rights::{self, Change};
use poolfs_client::{raw, trace};

/// To be called before making a process (`fork`, `vfork`, `posix_spawn`, `system`, `popen`), executing a program, or sending a descriptor
/// to a process.
#[unsafe(no_mangle)]
pub extern "C" fn poolfs_before_fork() {
    rights::before(Change::SharingMemory);
}

/// To be called before the process changes its user, groups or capabilities (`setuid`, `setgroups`, `capset` and the like).
#[unsafe(no_mangle)]
pub extern "C" fn poolfs_before_identity() {
    rights::before(Change::Identity);
}

/// To be called before `chroot`, `unshare`, `setns`, Landlock or seccomp: from then on everything goes to the kernel.
#[unsafe(no_mangle)]
pub extern "C" fn poolfs_before_view() {
    rights::before(Change::View);
}

/// Operations that took the user-level path so far.
#[unsafe(no_mangle)]
pub extern "C" fn poolfs_requests() -> u64 {
    trace::counts().0
}

/// Ends the process at once.
pub fn abort() -> ! {
    const SIGABRT: usize = 6;
    const STATUS: c_int = 134;
    // SAFETY: a call without pointers.
    unsafe { raw::system_call(sys::__NR_kill, [raw::process_id() as usize, SIGABRT, 0, 0, 0, 0]) };
    loop {
        // SAFETY: a call without pointers.
        unsafe { raw::system_call(sys::__NR_exit_group, [STATUS as usize, 0, 0, 0, 0, 0]) };
    }
}
