//! Open files.

use crate::macros::{export, memory, path, structure};
use core::ffi::{c_char, c_int, c_uint, c_void};
use linux_raw_sys::general as sys;
use poolfs_client::calls::{self, Of};
use poolfs_client::paths::WORKING_DIRECTORY;

export! {
    poolfs_open(name: *const c_char, flags: c_int, mode: c_uint) -> c_int =
        calls::openat(WORKING_DIRECTORY, path(name), flags, mode);
    poolfs_openat(directory: c_int, name: *const c_char, flags: c_int, mode: c_uint) -> c_int =
        calls::openat(directory, path(name), flags, mode);
    poolfs_close(descriptor: c_int) -> c_int = calls::close(descriptor);
    poolfs_dup2(from: c_int, to: c_int) -> c_int = calls::dup2(from, to);
    poolfs_read(descriptor: c_int, buffer: *mut c_void, count: usize) -> isize =
        calls::read(descriptor, memory(buffer, count));
    poolfs_write(descriptor: c_int, buffer: *const c_void, count: usize) -> isize =
        calls::write(descriptor, memory(buffer, count));
    poolfs_pread(descriptor: c_int, buffer: *mut c_void, count: usize, offset: i64) -> isize =
        calls::pread(descriptor, memory(buffer, count), offset);
    poolfs_pwrite(descriptor: c_int, buffer: *const c_void, count: usize, offset: i64) -> isize =
        calls::pwrite(descriptor, memory(buffer, count), offset);
    poolfs_lseek(descriptor: c_int, offset: i64, whence: c_int) -> i64 = calls::lseek(descriptor, offset, whence);
    poolfs_fsync(descriptor: c_int) -> c_int = calls::sync(descriptor, false);
    poolfs_fdatasync(descriptor: c_int) -> c_int = calls::sync(descriptor, true);
    poolfs_ftruncate(descriptor: c_int, length: i64) -> c_int = calls::ftruncate(descriptor, length);
    poolfs_fallocate(descriptor: c_int, mode: c_int, offset: i64, length: i64) -> c_int =
        calls::fallocate(descriptor, mode, offset, length);
    poolfs_copy_file_range(from: c_int, at: *mut i64, to: c_int, to_at: *mut i64, count: usize, flags: c_uint) -> isize =
        calls::copy_file_range((from, structure::<i64>(at.cast())), (to, structure::<i64>(to_at.cast())), count, flags);
    poolfs_fstat(descriptor: c_int, out: *mut c_void) -> c_int = calls::fstat(descriptor, structure::<sys::stat>(out));
    poolfs_fchmod(descriptor: c_int, mode: c_uint) -> c_int = calls::fchmod(descriptor, mode);
    poolfs_fchown(descriptor: c_int, uid: c_uint, gid: c_uint) -> c_int = calls::fchown(descriptor, uid, gid);
    poolfs_futimens(descriptor: c_int, times: *const c_void) -> c_int =
        calls::utimensat(descriptor, None, structure::<[i64; 4]>(times), 0);
    poolfs_fgetxattr(descriptor: c_int, name: *const c_char, value: *mut c_void, size: usize) -> isize =
        calls::getxattr(Of::Descriptor(descriptor), path(name), memory(value, size));
    poolfs_fsetxattr(descriptor: c_int, name: *const c_char, value: *const c_void, size: usize, flags: c_int) -> c_int =
        calls::setxattr(Of::Descriptor(descriptor), path(name), memory(value, size), flags);
}

/// `mmap`: a shared mapping takes the file away from the user-level path first.
#[unsafe(no_mangle)]
unsafe extern "C" fn poolfs_mmap(
    place: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    descriptor: c_int,
    offset: i64,
) -> *mut c_void {
    let result = calls::mmap(memory(place, length), protection, flags, descriptor, offset);
    poolfs_client::errno::convert(result) as *mut c_void
}
