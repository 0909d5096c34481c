//! Linux's error numbers as a type.

use core::fmt;

/// An error number of Linux (never 0), printed by its name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Errno(i32);

macro_rules! errnos {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        impl Errno {
            $(#[doc = $text] pub const $name: Errno = Errno($number);)*

            /// The symbolic name, or `"E?"` for a number that is not in the table.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self.0 { $($number => stringify!($name),)* _ => "E?" }
            }

            /// What the number means, in the C library's words.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self.0 { $($number => $text,)* _ => "unknown error" }
            }
        }
    };
}

errnos! {
    EPERM = 1, "operation not permitted";
    ENOENT = 2, "no such file or directory";
    ESRCH = 3, "no such process";
    EINTR = 4, "interrupted system call";
    EIO = 5, "input/output error";
    ENXIO = 6, "no such device or address";
    E2BIG = 7, "argument list too long";
    ENOEXEC = 8, "exec format error";
    EBADF = 9, "bad file descriptor";
    ECHILD = 10, "no child processes";
    EAGAIN = 11, "resource temporarily unavailable";
    ENOMEM = 12, "cannot allocate memory";
    EACCES = 13, "permission denied";
    EFAULT = 14, "bad address";
    ENOTBLK = 15, "block device required";
    EBUSY = 16, "device or resource busy";
    EEXIST = 17, "file exists";
    EXDEV = 18, "invalid cross-device link";
    ENODEV = 19, "no such device";
    ENOTDIR = 20, "not a directory";
    EISDIR = 21, "is a directory";
    EINVAL = 22, "invalid argument";
    ENFILE = 23, "too many open files in system";
    EMFILE = 24, "too many open files";
    ENOTTY = 25, "inappropriate ioctl for device";
    ETXTBSY = 26, "text file busy";
    EFBIG = 27, "file too large";
    ENOSPC = 28, "no space left on device";
    ESPIPE = 29, "illegal seek";
    EROFS = 30, "read-only file system";
    EMLINK = 31, "too many links";
    EPIPE = 32, "broken pipe";
    EDOM = 33, "numerical argument out of domain";
    ERANGE = 34, "numerical result out of range";
    EDEADLK = 35, "resource deadlock avoided";
    ENAMETOOLONG = 36, "file name too long";
    ENOLCK = 37, "no locks available";
    ENOSYS = 38, "function not implemented";
    ENOTEMPTY = 39, "directory not empty";
    ELOOP = 40, "too many levels of symbolic links";
    ENODATA = 61, "no data available";
    ETIME = 62, "timer expired";
    EPROTO = 71, "protocol error";
    EOVERFLOW = 75, "value too large for defined data type";
    EUSERS = 87, "too many users";
    EMSGSIZE = 90, "message too long";
    EOPNOTSUPP = 95, "operation not supported";
    ECONNABORTED = 103, "software caused connection abort";
    ECONNRESET = 104, "connection reset by peer";
    ENOTCONN = 107, "transport endpoint is not connected";
    ETIMEDOUT = 110, "connection timed out";
    EUCLEAN = 117, "structure needs cleaning";
    ECONNREFUSED = 111, "connection refused";
    EALREADY = 114, "operation already in progress";
    EINPROGRESS = 115, "operation now in progress";
    ESTALE = 116, "stale file handle";
    EDQUOT = 122, "disk quota exceeded";
    ECANCELED = 125, "operation canceled";
}

impl Errno {
    /// The number for `raw`; anything outside 1..=4095 (the kernel's range) becomes `EIO`, so that no peer can
    /// make an error look like a success.
    #[must_use]
    pub const fn from_raw(raw: i32) -> Self {
        if raw >= 1 && raw <= 4095 { Self(raw) } else { Self::EIO }
    }

    /// The positive number, as in `errno`.
    #[must_use]
    pub const fn raw(self) -> i32 {
        self.0
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name() == "E?" { write!(f, "errno {}", self.0) } else { f.write_str(self.name()) }
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", self.meaning(), self)
    }
}

impl core::error::Error for Errno {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_raw_number_becomes_success() {
        for raw in [0, -1, i32::MIN, 4096, i32::MAX] {
            assert_eq!(Errno::from_raw(raw), Errno::EIO);
        }
        assert_eq!(Errno::from_raw(2), Errno::ENOENT);
        assert_eq!(Errno::ENOENT.name(), "ENOENT");
    }
}
