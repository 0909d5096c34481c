//! libc's names that open, close, duplicate and map descriptors.

use crate::macros::{intercept, memory, path, structure};
use crate::next::{Next, announce_and_go_on};
use core::ffi::{c_char, c_int, c_uint, c_void};
use poolfs_client::calls;
use poolfs_client::paths::WORKING_DIRECTORY;

/// `O_CREAT|O_WRONLY|O_TRUNC`
const CREATE: c_int = 0o1101;

intercept! {
    open | open64 | __open | __open64(name: *const c_char, flags: c_int, mode: c_uint) -> c_int =
        calls::openat(WORKING_DIRECTORY, path(name), flags, mode);
    openat | openat64(directory: c_int, name: *const c_char, flags: c_int, mode: c_uint) -> c_int =
        calls::openat(directory, path(name), flags, mode);
    __open_2 | __open64_2(name: *const c_char, flags: c_int) -> c_int =
        calls::openat(WORKING_DIRECTORY, path(name), flags, 0);
    __openat_2 | __openat64_2(directory: c_int, name: *const c_char, flags: c_int) -> c_int =
        calls::openat(directory, path(name), flags, 0);
    creat | creat64(name: *const c_char, mode: c_uint) -> c_int =
        calls::openat(WORKING_DIRECTORY, path(name), CREATE, mode);
    openat2(directory: c_int, name: *const c_char, how: *const c_void, size: usize) -> c_int =
        calls::openat2(directory, path(name), memory(how, size));
    close | __close(descriptor: c_int) -> c_int = calls::close(descriptor);
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int = calls::close_range(first, last, flags as u32);
    dup(descriptor: c_int) -> c_int = calls::dup(descriptor);
    dup2 | __dup2(from: c_int, to: c_int) -> c_int = calls::dup2(from, to);
    dup3(from: c_int, to: c_int, flags: c_int) -> c_int = calls::dup3(from, to, flags);
    munmap(place: *mut c_void, length: usize) -> c_int = calls::munmap(memory(place, length));
    mprotect(place: *mut c_void, length: usize, protection: c_int) -> c_int =
        calls::mprotect(memory(place, length), protection, -1);
    pkey_mprotect(place: *mut c_void, length: usize, protection: c_int, key: c_int) -> c_int =
        calls::mprotect(memory(place, length), protection, key);
    shmdt(place: *const c_void) -> c_int = calls::shmdt(memory(place, 0));
    umask(mask: c_uint) -> c_uint = calls::umask(mask);
    setrlimit | setrlimit64(resource: c_uint, limits: *const c_void) -> c_int =
        calls::prlimit(0, resource, structure::<[u64; 2]>(limits), structure::<[u64; 2]>(core::ptr::null()));
    prlimit | prlimit64(process: c_int, resource: c_uint, new: *const c_void, old: *mut c_void) -> c_int =
        calls::prlimit(process, resource, structure::<[u64; 2]>(new), structure::<[u64; 2]>(old));
}

#[unsafe(no_mangle)]
unsafe extern "C" fn closefrom(first: c_int) {
    calls::close_range(first.max(0) as u32, u32::MAX, 0);
}

/// libc closes the descriptor of a stream by its own means.
fn forget_stream(stream: usize) {
    static FILENO: Next = Next::new(c"fileno");
    let fileno = FILENO.address();
    if stream != 0 && !fileno.is_null() {
        // SAFETY: libc's function of this name, on a stream that the program passes to libc.
        let fileno: extern "C" fn(usize) -> c_int = unsafe { core::mem::transmute(fileno) };
        calls::forget(poolfs_client::errno::keep(|| fileno(stream)));
    }
}

fn closing_stream(stream: usize, _: usize, _: usize) {
    forget_stream(stream);
}

fn reopening_stream(_: usize, _: usize, stream: usize) {
    forget_stream(stream);
}

announce_and_go_on! { closing_stream: fclose c"fclose" }

announce_and_go_on! { reopening_stream: freopen c"freopen", freopen64 c"freopen64" }

macro_rules! map {
    ($($name:ident),+) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name(
                place: *mut c_void, length: usize, protection: c_int, flags: c_int, descriptor: c_int, offset: i64,
            ) -> *mut c_void {
                let result = calls::mmap(memory(place, length), protection, flags, descriptor, offset);
                poolfs_client::errno::convert(result) as *mut c_void
            }
        )+
    };
}
map!(mmap, mmap64);

#[unsafe(no_mangle)]
unsafe extern "C" fn mremap(
    place: *mut c_void,
    length: usize,
    new_length: usize,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    let result = calls::mremap(memory(place, length), new_length, flags, memory(new, new_length));
    poolfs_client::errno::convert(result) as *mut c_void
}

macro_rules! control {
    ($($name:ident $text:literal),+) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name(descriptor: c_int, command: c_int, argument: usize) -> c_int {
                static NEXT: Next = Next::new($text);
                if calls::duplicates(command) {
                    let result = calls::duplicate_above(descriptor, command, argument);
                    return poolfs_client::errno::convert(result) as c_int;
                }
                calls::before_control(descriptor, command, argument);
                let next = NEXT.address();
                if next.is_null() {
                    return crate::next::missing() as c_int;
                }
                // SAFETY: libc's function of this name; its variable arguments travel like fixed ones.
                let next: extern "C" fn(c_int, c_int, usize) -> c_int = unsafe { core::mem::transmute(next) };
                next(descriptor, command, argument)
            }
        )+
    };
}
control!(fcntl c"fcntl", fcntl64 c"fcntl64");
