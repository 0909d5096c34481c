//! libc's names for extended attributes.

use crate::macros::{intercept, memory, path};
use core::ffi::{c_char, c_int, c_void};
use poolfs_client::calls::{self, Of};

intercept! {
    getxattr(file: *const c_char, name: *const c_char, value: *mut c_void, size: usize) -> isize =
        calls::getxattr(Of::Path(path(file)), path(name), memory(value, size));
    lgetxattr(file: *const c_char, name: *const c_char, value: *mut c_void, size: usize) -> isize =
        calls::getxattr(Of::Link(path(file)), path(name), memory(value, size));
    fgetxattr(descriptor: c_int, name: *const c_char, value: *mut c_void, size: usize) -> isize =
        calls::getxattr(Of::Descriptor(descriptor), path(name), memory(value, size));
    setxattr(file: *const c_char, name: *const c_char, value: *const c_void, size: usize, flags: c_int) -> c_int =
        calls::setxattr(Of::Path(path(file)), path(name), memory(value, size), flags);
    lsetxattr(file: *const c_char, name: *const c_char, value: *const c_void, size: usize, flags: c_int) -> c_int =
        calls::setxattr(Of::Link(path(file)), path(name), memory(value, size), flags);
    fsetxattr(descriptor: c_int, name: *const c_char, value: *const c_void, size: usize, flags: c_int) -> c_int =
        calls::setxattr(Of::Descriptor(descriptor), path(name), memory(value, size), flags);
    listxattr(file: *const c_char, names: *mut c_char, size: usize) -> isize =
        calls::listxattr(Of::Path(path(file)), memory(names.cast::<c_void>(), size));
    llistxattr(file: *const c_char, names: *mut c_char, size: usize) -> isize =
        calls::listxattr(Of::Link(path(file)), memory(names.cast::<c_void>(), size));
    flistxattr(descriptor: c_int, names: *mut c_char, size: usize) -> isize =
        calls::listxattr(Of::Descriptor(descriptor), memory(names.cast::<c_void>(), size));
    removexattr(file: *const c_char, name: *const c_char) -> c_int =
        calls::removexattr(Of::Path(path(file)), path(name));
    lremovexattr(file: *const c_char, name: *const c_char) -> c_int =
        calls::removexattr(Of::Link(path(file)), path(name));
    fremovexattr(descriptor: c_int, name: *const c_char) -> c_int =
        calls::removexattr(Of::Descriptor(descriptor), path(name));
}
