//! The macro that defines names of libc, and the conversion of their arguments.

use core::ffi::{c_char, c_void};
use poolfs_client::memory::{UserMemory, UserPath};

/// Defines functions with libc's names that return C's -1 and `errno` for an error. Several names before `fn` arguments
/// are the same function.
macro_rules! intercept {
    (@each [$($name:ident)+] $arguments:tt -> $result:ty = $body:expr) => {
        $( intercept!(@one $name $arguments -> $result = $body); )+
    };
    (@one $name:ident ($($argument:ident: $type:ty),*) -> $result:ty = $body:expr) => {
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            poolfs_client::errno::convert($body) as $result
        }
    };
    ($( $($name:ident)|+ ($($argument:tt)*) -> $result:ty = $body:expr; )*) => {
        $( intercept!(@each [$($name)+] ($($argument)*) -> $result = $body); )*
    };
}
pub(crate) use intercept;

/// A path argument.
pub fn path(pointer: *const c_char) -> UserPath {
    // SAFETY: the program calls a function of libc that takes a path: null or a terminated string.
    unsafe { UserPath::new(pointer) }
}

/// A buffer argument.
pub fn memory(pointer: *const c_void, length: usize) -> UserMemory {
    // SAFETY: the program calls a function of libc that uses this memory in the same way.
    unsafe { UserMemory::new(pointer.cast_mut().cast(), length) }
}

/// An argument that is a structure of C.
pub fn structure<T>(pointer: *const c_void) -> UserMemory {
    memory(pointer, size_of::<T>())
}

/// An array of `struct iovec`.
pub fn vectors(pointer: *const c_void, count: i32) -> UserMemory {
    // A negative count stays one that the kernel refuses.
    memory(pointer, (count as isize as usize).wrapping_mul(size_of::<[usize; 2]>()))
}
