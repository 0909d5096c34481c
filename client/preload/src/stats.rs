//! libc's names `fstat`, in its forms, and `statx`.

use crate::macros::{intercept, path, structure};
use core::ffi::{c_char, c_int, c_uint, c_void};
use linux_raw_sys::general as sys;
use poolfs_client::calls;

/// Version of `struct stat` in `__fxstat`: the kernel's layout. Others do not exist on x86-64.
const VERSION: c_int = 1;
const EINVAL: isize = 22;

intercept! {
    fstat | fstat64(descriptor: c_int, out: *mut c_void) -> c_int =
        calls::fstat(descriptor, structure::<sys::stat>(out));
    __fxstat | __fxstat64(version: c_int, descriptor: c_int, out: *mut c_void) -> c_int =
        of_version(version, || calls::fstat(descriptor, structure::<sys::stat>(out)));
    statx(descriptor: c_int, name: *const c_char, flags: c_int, mask: c_uint, out: *mut c_void) -> c_int =
        calls::statx(descriptor, path(name), flags, mask, structure::<sys::statx>(out));
}

fn of_version(version: c_int, stat: impl FnOnce() -> isize) -> isize {
    if version == VERSION || version == 0 { stat() } else { -EINVAL }
}
