//! The C library's `errno`, and the C convention of results.

use core::ffi::c_int;

unsafe extern "C" {
    safe fn __errno_location() -> *mut c_int;
}

/// Sets the calling thread's `errno`.
pub fn set(errno: i32) {
    // SAFETY: libc gives the address of the thread's own variable.
    unsafe { __errno_location().write(errno) };
}

/// Runs something that may change the calling thread's `errno`, and puts it back.
pub fn keep<T>(run: impl FnOnce() -> T) -> T {
    // SAFETY: libc gives the address of the thread's own variable.
    let before = unsafe { __errno_location().read() };
    let result = run();
    set(before);
    result
}

/// A result of [`crate::calls`] as C has it: -1 and `errno` for an error.
#[inline]
pub fn convert(result: isize) -> isize {
    match crate::raw::check(result) {
        Ok(_) => result,
        Err(errno) => {
            set(errno);
            -1
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errno_is_put_back() {
        set(7);
        assert_eq!(keep(|| convert(-2)), -1);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(7));
    }

    #[test]
    fn errors_become_minus_one_and_errno() {
        assert_eq!(convert(7), 7);
        assert_eq!(convert(-2), -1);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(2));
        assert_eq!(convert(i64::MIN as isize), i64::MIN as isize, "an address or offset is no error");
    }
}
