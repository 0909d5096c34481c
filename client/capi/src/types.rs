//! C's type names for the generated header, and the conversion of C arguments to the front driver's types.
#![expect(non_camel_case_types, reason = "these are C's names")]

use core::ffi::{c_char, c_void};
use poolfs_client::memory::{UserMemory, UserPath};

/// `mode_t` of `sys/types.h`
pub type mode_t = u32;
/// `uid_t` of `sys/types.h`
pub type uid_t = u32;
/// `gid_t` of `sys/types.h`
pub type gid_t = u32;
/// `dev_t` of `sys/types.h`
pub type dev_t = u64;
/// `ssize_t` of `sys/types.h`
pub type ssize_t = isize;
/// `struct stat` of `sys/stat.h`
pub type stat = linux_raw_sys::general::stat;
/// `struct timespec` of `time.h`
pub type timespec = linux_raw_sys::general::timespec;

/// A path argument.
pub fn path(pointer: *const c_char) -> UserPath {
    // SAFETY: the header asks for null or a terminated string.
    unsafe { UserPath::new(pointer) }
}

/// A buffer argument.
pub fn memory(pointer: *const c_void, length: usize) -> UserMemory {
    // SAFETY: the header asks for memory of that length, written to by the functions that fill it only.
    unsafe { UserMemory::new(pointer.cast_mut().cast(), length) }
}

/// An argument that is one structure of C, or several in a row.
pub fn structures<T>(pointer: *const T, count: usize) -> UserMemory {
    memory(pointer.cast(), count * size_of::<T>())
}
