//! libc's names that change modes, owners and times.

use crate::macros::{intercept, path, structure};
use core::ffi::{c_char, c_int, c_uint, c_void};
use linux_raw_sys::general as sys;
use poolfs_client::calls;
use poolfs_client::paths::WORKING_DIRECTORY;

const EBADF: isize = 9;
const EINVAL: isize = 22;
const NO_FOLLOW: c_int = sys::AT_SYMLINK_NOFOLLOW as c_int;

intercept! {
    chmod(name: *const c_char, mode: c_uint) -> c_int = calls::fchmodat(WORKING_DIRECTORY, path(name), mode, 0);
    fchmod(descriptor: c_int, mode: c_uint) -> c_int = calls::fchmod(descriptor, mode);
    chown(name: *const c_char, uid: c_uint, gid: c_uint) -> c_int =
        calls::fchownat(WORKING_DIRECTORY, path(name), uid, gid, 0);
    lchown(name: *const c_char, uid: c_uint, gid: c_uint) -> c_int =
        calls::fchownat(WORKING_DIRECTORY, path(name), uid, gid, NO_FOLLOW);
    fchown(descriptor: c_int, uid: c_uint, gid: c_uint) -> c_int = calls::fchown(descriptor, uid, gid);
    fchownat(directory: c_int, name: *const c_char, uid: c_uint, gid: c_uint, flags: c_int) -> c_int =
        calls::fchownat(directory, path(name), uid, gid, flags);
    utimensat(directory: c_int, name: *const c_char, times: *const c_void, flags: c_int) -> c_int =
        if name.is_null() { -EINVAL } else {
            calls::utimensat(directory, Some(path(name)), structure::<[i64; 4]>(times), flags)
        };
    futimens(descriptor: c_int, times: *const c_void) -> c_int =
        // By libc itself: the kernel would not look at it when there is nothing to change.
        if descriptor < 0 { -EBADF } else { calls::utimensat(descriptor, None, structure::<[i64; 4]>(times), 0) };
    utimes(name: *const c_char, times: *const c_void) -> c_int =
        calls::utimes_at(WORKING_DIRECTORY, Some(path(name)), structure::<[i64; 4]>(times), 0);
    lutimes(name: *const c_char, times: *const c_void) -> c_int =
        calls::utimes_at(WORKING_DIRECTORY, Some(path(name)), structure::<[i64; 4]>(times), NO_FOLLOW);
    futimes(descriptor: c_int, times: *const c_void) -> c_int =
        calls::utimes_at(descriptor, None, structure::<[i64; 4]>(times), 0);
    futimesat(directory: c_int, name: *const c_char, times: *const c_void) -> c_int =
        calls::utimes_at(directory, (!name.is_null()).then(|| path(name)), structure::<[i64; 4]>(times), 0);
    utime(name: *const c_char, times: *const c_void) -> c_int = calls::utime(path(name), structure::<[i64; 2]>(times));
}

/// Without following links it is libc's own work on older kernels; without flags, ours.
#[unsafe(no_mangle)]
unsafe extern "C" fn fchmodat(directory: c_int, name: *const c_char, mode: c_uint, flags: c_int) -> c_int {
    static NEXT: crate::next::Next = crate::next::Next::new(c"fchmodat");
    let next = if flags == 0 { core::ptr::null_mut() } else { NEXT.address() };
    if next.is_null() {
        return poolfs_client::errno::convert(calls::fchmodat(directory, path(name), mode, flags)) as c_int;
    }
    // SAFETY: libc's function of this very name and type.
    let next: extern "C" fn(c_int, *const c_char, c_uint, c_int) -> c_int = unsafe { core::mem::transmute(next) };
    next(directory, name, mode, flags)
}
