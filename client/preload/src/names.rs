//! libc's names that create, remove, rename and link names, and `truncate`.

use crate::macros::{intercept, memory, path};
use core::ffi::{c_char, c_int, c_uint};
use poolfs_client::calls;
use poolfs_client::paths::WORKING_DIRECTORY;

const FIFO: c_uint = 0o010_000;

intercept! {
    mkdir(name: *const c_char, mode: c_uint) -> c_int = calls::mkdirat(WORKING_DIRECTORY, path(name), mode);
    mkdirat(directory: c_int, name: *const c_char, mode: c_uint) -> c_int = calls::mkdirat(directory, path(name), mode);
    unlink(name: *const c_char) -> c_int = calls::unlinkat(WORKING_DIRECTORY, path(name), 0);
    unlinkat(directory: c_int, name: *const c_char, flags: c_int) -> c_int =
        calls::unlinkat(directory, path(name), flags);
    remove(name: *const c_char) -> c_int = calls::remove(path(name));
    rename(from: *const c_char, to: *const c_char) -> c_int =
        calls::renameat2((WORKING_DIRECTORY, path(from)), (WORKING_DIRECTORY, path(to)), 0);
    renameat(directory: c_int, from: *const c_char, to_directory: c_int, to: *const c_char) -> c_int =
        calls::renameat2((directory, path(from)), (to_directory, path(to)), 0);
    renameat2(directory: c_int, from: *const c_char, to_directory: c_int, to: *const c_char, flags: c_uint) -> c_int =
        calls::renameat2((directory, path(from)), (to_directory, path(to)), flags);
    link(from: *const c_char, to: *const c_char) -> c_int =
        calls::linkat((WORKING_DIRECTORY, path(from)), (WORKING_DIRECTORY, path(to)), 0);
    linkat(directory: c_int, from: *const c_char, to_directory: c_int, to: *const c_char, flags: c_int) -> c_int =
        calls::linkat((directory, path(from)), (to_directory, path(to)), flags);
    symlink(target: *const c_char, name: *const c_char) -> c_int =
        calls::symlinkat(path(target), WORKING_DIRECTORY, path(name));
    symlinkat(target: *const c_char, directory: c_int, name: *const c_char) -> c_int =
        calls::symlinkat(path(target), directory, path(name));
    mknod(name: *const c_char, mode: c_uint, device: u64) -> c_int =
        calls::mknodat(WORKING_DIRECTORY, path(name), mode, device);
    mknodat(directory: c_int, name: *const c_char, mode: c_uint, device: u64) -> c_int =
        calls::mknodat(directory, path(name), mode, device);
    __xmknod(version: c_int, name: *const c_char, mode: c_uint, device: *const u64) -> c_int =
        of_version(version, device, |device| calls::mknodat(WORKING_DIRECTORY, path(name), mode, device));
    __xmknodat(version: c_int, directory: c_int, name: *const c_char, mode: c_uint, device: *const u64) -> c_int =
        of_version(version, device, |device| calls::mknodat(directory, path(name), mode, device));
    mkfifo(name: *const c_char, mode: c_uint) -> c_int =
        calls::mknodat(WORKING_DIRECTORY, path(name), mode | FIFO, 0);
    mkfifoat(directory: c_int, name: *const c_char, mode: c_uint) -> c_int =
        calls::mknodat(directory, path(name), mode | FIFO, 0);
    truncate | truncate64(name: *const c_char, length: i64) -> c_int = calls::truncate(path(name), length);
}

/// `__xmknod` of version 0, the only one, with the device it points to.
fn of_version(version: c_int, device: *const u64, make: impl FnOnce(u64) -> isize) -> isize {
    const EINVAL: isize = 22;
    match memory(device.cast(), size_of::<u64>()).get::<u64>() {
        Some(device) if version == 0 => make(device),
        _ => -EINVAL,
    }
}
