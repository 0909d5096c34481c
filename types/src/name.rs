//! [`Name`]: one component of a path, checked once.

use crate::{Errno, limits::NAME_MAX};
use core::fmt;

/// One component of a path: 1 to 255 bytes, no slash, no NUL, neither `.` nor `..`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name<'a>(&'a [u8]);

impl<'a> Name<'a> {
    /// Checks `bytes` once, so that nobody behind the edge has to.
    ///
    /// # Errors
    /// `ENOENT` for an empty name, `ENAMETOOLONG` above 255 bytes, `EINVAL` for a slash, a NUL, `.` or `..`.
    pub fn new(bytes: &'a [u8]) -> Result<Self, Errno> {
        if bytes.is_empty() {
            return Err(Errno::ENOENT);
        }
        if bytes.len() > NAME_MAX {
            return Err(Errno::ENAMETOOLONG);
        }
        if bytes == b"." || bytes == b".." || bytes.iter().any(|&b| b == b'/' || b == 0) {
            return Err(Errno::EINVAL);
        }
        Ok(Self(bytes))
    }

    /// The name's bytes.
    #[must_use]
    pub fn as_bytes(self) -> &'a [u8] {
        self.0
    }
}

impl fmt::Debug for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_is_no_component() {
        assert_eq!(Name::new(b""), Err(Errno::ENOENT));
        assert_eq!(Name::new(b"."), Err(Errno::EINVAL));
        assert_eq!(Name::new(b".."), Err(Errno::EINVAL));
        assert_eq!(Name::new(b"a/b"), Err(Errno::EINVAL));
        assert_eq!(Name::new(b"a\0b"), Err(Errno::EINVAL));
        assert_eq!(Name::new(&[b'x'; 256]), Err(Errno::ENAMETOOLONG));
        assert!(Name::new(&[b'x'; 255]).is_ok());
        assert!(Name::new(b"...").is_ok());
    }
}
