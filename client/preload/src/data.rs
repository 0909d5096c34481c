//! libc's names that read, write and sync the content of open files.

use crate::macros::{intercept, memory, structure, vectors};
use crate::next::announce_and_go_on;
use core::ffi::{c_int, c_uint, c_void};
use poolfs_client::{calls, weak_symbol};

intercept! {
    read | __read(descriptor: c_int, buffer: *mut c_void, count: usize) -> isize =
        calls::read(descriptor, memory(buffer, count));
    write | __write(descriptor: c_int, buffer: *const c_void, count: usize) -> isize =
        calls::write(descriptor, memory(buffer, count));
    pread | pread64 | __pread64(descriptor: c_int, buffer: *mut c_void, count: usize, offset: i64) -> isize =
        calls::pread(descriptor, memory(buffer, count), offset);
    pwrite | pwrite64 | __pwrite64(descriptor: c_int, buffer: *const c_void, count: usize, offset: i64) -> isize =
        calls::pwrite(descriptor, memory(buffer, count), offset);
    readv(descriptor: c_int, vector: *const c_void, count: c_int) -> isize =
        calls::readv(descriptor, vectors(vector, count));
    writev(descriptor: c_int, vector: *const c_void, count: c_int) -> isize =
        calls::writev(descriptor, vectors(vector, count));
    preadv | preadv64(descriptor: c_int, vector: *const c_void, count: c_int, offset: i64) -> isize =
        calls::preadv(descriptor, vectors(vector, count), offset, None);
    pwritev | pwritev64(descriptor: c_int, vector: *const c_void, count: c_int, offset: i64) -> isize =
        calls::pwritev(descriptor, vectors(vector, count), offset, None);
    preadv2 | preadv64v2(descriptor: c_int, vector: *const c_void, count: c_int, offset: i64, flags: c_int) -> isize =
        calls::preadv(descriptor, vectors(vector, count), offset, Some(flags));
    pwritev2 | pwritev64v2(descriptor: c_int, vector: *const c_void, count: c_int, offset: i64, flags: c_int) -> isize =
        calls::pwritev(descriptor, vectors(vector, count), offset, Some(flags));
    __read_chk(descriptor: c_int, buffer: *mut c_void, count: usize, room: usize) -> isize =
        calls::read(descriptor, memory(buffer, fitting(count, room)));
    __pread_chk | __pread64_chk(descriptor: c_int, buffer: *mut c_void, count: usize, offset: i64, room: usize) -> isize =
        calls::pread(descriptor, memory(buffer, fitting(count, room)), offset);
    lseek | lseek64(descriptor: c_int, offset: i64, whence: c_int) -> i64 = calls::lseek(descriptor, offset, whence);
    fsync(descriptor: c_int) -> c_int = calls::sync(descriptor, false);
    fdatasync(descriptor: c_int) -> c_int = calls::sync(descriptor, true);
    syncfs(descriptor: c_int) -> c_int = calls::syncfs(descriptor);
    ftruncate | ftruncate64(descriptor: c_int, length: i64) -> c_int = calls::ftruncate(descriptor, length);
    fallocate | fallocate64(descriptor: c_int, mode: c_int, offset: i64, length: i64) -> c_int =
        calls::fallocate(descriptor, mode, offset, length);
    sendfile | sendfile64(to: c_int, from: c_int, offset: *mut c_void, count: usize) -> isize =
        calls::sendfile(to, from, structure::<i64>(offset), count);
    copy_file_range(from: c_int, at: *mut c_void, to: c_int, to_at: *mut c_void, count: usize, flags: c_uint) -> isize =
        calls::copy_file_range((from, structure::<i64>(at)), (to, structure::<i64>(to_at)), count, flags);
}

fn splicing(from: usize, _: usize, _: usize) {
    calls::refresh_size(from as c_int);
}

fn controlling(descriptor: usize, request: usize, _: usize) {
    calls::before_device_control(descriptor as c_int, request);
}

announce_and_go_on! { splicing: splice c"splice" }

announce_and_go_on! { controlling: ioctl c"ioctl" }

#[unsafe(no_mangle)]
unsafe extern "C" fn sync() {
    calls::sync_everything();
}

/// The count of a fortified call, whose buffer the compiler knows to have `room` bytes.
pub fn fitting(count: usize, room: usize) -> usize {
    if count > room {
        let fail = weak_symbol!("__chk_fail");
        if !fail.is_null() {
            // SAFETY: the C library's function of that name takes nothing and does not return.
            let fail: extern "C" fn() -> ! = unsafe { core::mem::transmute(fail) };
            fail();
        }
        crate::process::abort();
    }
    count
}

/// The error number itself is the result, and filesystems that cannot allocate get what libc does instead.
macro_rules! posix_fallocate {
    ($($name:ident $text:literal),+) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name(descriptor: c_int, offset: i64, length: i64) -> c_int {
                static NEXT: crate::next::Next = crate::next::Next::new($text);
                if let Some(result) = calls::allocate_in_instance(descriptor, 0, offset, length) {
                    return -result as c_int;
                }
                let next = NEXT.address();
                if next.is_null() {
                    return -calls::fallocate(descriptor, 0, offset, length) as c_int;
                }
                // SAFETY: libc's function of this very name and type.
                let next: extern "C" fn(c_int, i64, i64) -> c_int = unsafe { core::mem::transmute(next) };
                next(descriptor, offset, length)
            }
        )+
    };
}
posix_fallocate!(posix_fallocate c"posix_fallocate", posix_fallocate64 c"posix_fallocate64");
