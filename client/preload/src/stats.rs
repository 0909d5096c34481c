//! `stat` and `access` in all their forms.

use crate::macros::{intercept, path, structure};
use core::ffi::{c_char, c_int, c_uint, c_void};
use linux_raw_sys::general as sys;
use poolfs_client::calls;
use poolfs_client::paths::WORKING_DIRECTORY;

/// Version of `struct stat` in `__xstat` and the like: the kernel's layout. Others do not exist on x86-64.
const VERSION: c_int = 1;
const EINVAL: isize = 22;
const NO_FOLLOW: c_int = sys::AT_SYMLINK_NOFOLLOW as c_int;
const EFFECTIVE: c_int = sys::AT_EACCESS as c_int;

intercept! {
    stat | stat64(name: *const c_char, out: *mut c_void) -> c_int = stat_at(WORKING_DIRECTORY, name, out, 0);
    lstat | lstat64(name: *const c_char, out: *mut c_void) -> c_int = stat_at(WORKING_DIRECTORY, name, out, NO_FOLLOW);
    fstat | fstat64(descriptor: c_int, out: *mut c_void) -> c_int =
        calls::fstat(descriptor, structure::<sys::stat>(out));
    fstatat | fstatat64(directory: c_int, name: *const c_char, out: *mut c_void, flags: c_int) -> c_int =
        stat_at(directory, name, out, flags);
    __xstat | __xstat64(version: c_int, name: *const c_char, out: *mut c_void) -> c_int =
        of_version(version, || stat_at(WORKING_DIRECTORY, name, out, 0));
    __lxstat | __lxstat64(version: c_int, name: *const c_char, out: *mut c_void) -> c_int =
        of_version(version, || stat_at(WORKING_DIRECTORY, name, out, NO_FOLLOW));
    __fxstat | __fxstat64(version: c_int, descriptor: c_int, out: *mut c_void) -> c_int =
        of_version(version, || calls::fstat(descriptor, structure::<sys::stat>(out)));
    __fxstatat | __fxstatat64(version: c_int, directory: c_int, name: *const c_char, out: *mut c_void, flags: c_int) -> c_int =
        of_version(version, || stat_at(directory, name, out, flags));
    statx(directory: c_int, name: *const c_char, flags: c_int, mask: c_uint, out: *mut c_void) -> c_int =
        calls::statx(directory, path(name), flags, mask, structure::<sys::statx>(out));
    access(name: *const c_char, mode: c_int) -> c_int = calls::faccessat(WORKING_DIRECTORY, path(name), mode, 0);
    euidaccess | eaccess(name: *const c_char, mode: c_int) -> c_int =
        calls::faccessat(WORKING_DIRECTORY, path(name), mode, EFFECTIVE);
    faccessat(directory: c_int, name: *const c_char, mode: c_int, flags: c_int) -> c_int =
        calls::faccessat(directory, path(name), mode, flags);
}

fn stat_at(directory: c_int, name: *const c_char, out: *mut c_void, flags: c_int) -> isize {
    calls::fstatat(directory, path(name), structure::<sys::stat>(out), flags)
}

fn of_version(version: c_int, stat: impl FnOnce() -> isize) -> isize {
    if version == VERSION || version == 0 { stat() } else { -EINVAL }
}
