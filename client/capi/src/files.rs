//! The `poolfs_*` functions for open files, and `poolfs_open` itself.

use crate::types::{gid_t, memory, mode_t, path as user_path, ssize_t, stat, structures, timespec, uid_t};
use core::ffi::{c_char, c_int, c_uint, c_void};
use poolfs_client::calls::{self, Of};
use poolfs_client::errno::convert;
use poolfs_client::paths::WORKING_DIRECTORY;

/// `open`. `mode` counts only when `flags` make a file: give 0 otherwise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    convert(calls::openat(WORKING_DIRECTORY, user_path(path), flags, mode)) as c_int
}

/// `openat`, as `poolfs_open`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_openat(directory: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    convert(calls::openat(directory, user_path(path), flags, mode)) as c_int
}

/// `close`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_close(descriptor: c_int) -> c_int {
    convert(calls::close(descriptor)) as c_int
}

/// `dup2`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_dup2(from: c_int, to: c_int) -> c_int {
    convert(calls::dup2(from, to)) as c_int
}

/// `read`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_read(descriptor: c_int, buffer: *mut c_void, count: usize) -> ssize_t {
    convert(calls::read(descriptor, memory(buffer, count)))
}

/// `write`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_write(descriptor: c_int, buffer: *const c_void, count: usize) -> ssize_t {
    convert(calls::write(descriptor, memory(buffer, count)))
}

/// `pread`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_pread(descriptor: c_int, buffer: *mut c_void, count: usize, offset: i64) -> ssize_t {
    convert(calls::pread(descriptor, memory(buffer, count), offset))
}

/// `pwrite`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_pwrite(descriptor: c_int, buffer: *const c_void, count: usize, offset: i64) -> ssize_t {
    convert(calls::pwrite(descriptor, memory(buffer, count), offset))
}

/// `lseek`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_lseek(descriptor: c_int, offset: i64, whence: c_int) -> i64 {
    convert(calls::lseek(descriptor, offset, whence)) as i64
}

/// `fsync`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_fsync(descriptor: c_int) -> c_int {
    convert(calls::sync(descriptor, false)) as c_int
}

/// `fdatasync`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_fdatasync(descriptor: c_int) -> c_int {
    convert(calls::sync(descriptor, true)) as c_int
}

/// `ftruncate`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_ftruncate(descriptor: c_int, length: i64) -> c_int {
    convert(calls::ftruncate(descriptor, length)) as c_int
}

/// `fallocate`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_fallocate(descriptor: c_int, mode: c_int, offset: i64, length: i64) -> c_int {
    convert(calls::fallocate(descriptor, mode, offset, length)) as c_int
}

/// `copy_file_range`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_copy_file_range(
    from: c_int,
    from_offset: *mut i64,
    to: c_int,
    to_offset: *mut i64,
    count: usize,
    flags: c_uint,
) -> ssize_t {
    convert(calls::copy_file_range((from, structures(from_offset, 1)), (to, structures(to_offset, 1)), count, flags))
}

/// `fstat`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_fstat(descriptor: c_int, out: *mut stat) -> c_int {
    convert(calls::fstat(descriptor, structures(out, 1))) as c_int
}

/// `fchmod`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_fchmod(descriptor: c_int, mode: mode_t) -> c_int {
    convert(calls::fchmod(descriptor, mode)) as c_int
}

/// `fchown`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_fchown(descriptor: c_int, uid: uid_t, gid: gid_t) -> c_int {
    convert(calls::fchown(descriptor, uid, gid)) as c_int
}

/// `futimens`: `times` is null, or the times of last access and modification.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_futimens(descriptor: c_int, times: *const timespec) -> c_int {
    convert(calls::utimensat(descriptor, None, structures(times, 2), 0)) as c_int
}

/// `fgetxattr`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_fgetxattr(
    descriptor: c_int,
    name: *const c_char,
    value: *mut c_void,
    size: usize,
) -> ssize_t {
    convert(calls::getxattr(Of::Descriptor(descriptor), user_path(name), memory(value, size)))
}

/// `fsetxattr`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_fsetxattr(
    descriptor: c_int,
    name: *const c_char,
    value: *const c_void,
    size: usize,
    flags: c_int,
) -> c_int {
    convert(calls::setxattr(Of::Descriptor(descriptor), user_path(name), memory(value, size), flags)) as c_int
}

/// `mmap`. A shared mapping of a file takes it away from the user-level path: use this one, not libc's, for files that were
/// opened with a function of this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_mmap(
    place: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    descriptor: c_int,
    offset: i64,
) -> *mut c_void {
    convert(calls::mmap(memory(place, length), protection, flags, descriptor, offset)) as *mut c_void
}
