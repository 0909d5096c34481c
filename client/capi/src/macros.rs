//! How the functions are defined.

use core::ffi::{c_char, c_void};
use poolfs_client::memory::{UserMemory, UserPath};

/// Defines C functions that return -1 and set `errno` for an error.
macro_rules! export {
    ($( $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $body:expr; )*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) -> $result {
                poolfs_client::errno::convert($body) as $result
            }
        )*
    };
}
pub(crate) use export;

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

/// An argument that is a structure of C.
pub fn structure<T>(pointer: *const c_void) -> UserMemory {
    memory(pointer, size_of::<T>())
}
