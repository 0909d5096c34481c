//! Translates the kernel's error numbers into the layer's errors.

use poolfs_libservice::Error;
use poolfs_types::Errno;
use rustix::io::Errno as Raw;
use std::path::PathBuf;
use thiserror::Error as ThisError;

/// Why a directory cannot be served. The message names the thing; the cause is the error's source.
#[derive(Debug, ThisError)]
pub enum OpenError {
    /// The directory cannot be opened.
    #[error("cannot open the directory {directory}; it must exist and be a directory")]
    Directory {
        /// the directory
        directory: PathBuf,
        /// what the kernel said
        source: std::io::Error,
    },
    /// The directory's mount cannot be cloned for private use.
    #[error("cannot make a private mount of {directory}; this needs CAP_SYS_ADMIN and Linux 5.12 or newer")]
    PrivateMount {
        /// the directory
        directory: PathBuf,
        /// what the kernel said
        source: std::io::Error,
    },
    /// What another process has made of the directory is no private mount.
    #[error(
        "what was given for {directory} is no private mount of it, or may be written where it must not be; use the poolfs and the \
         poolfs-service of one build"
    )]
    NotPrivate {
        /// the directory
        directory: PathBuf,
    },
    /// `/proc` is missing or something else is mounted there.
    #[error("cannot use /proc/self/fd; mount a proc filesystem on /proc")]
    Proc {
        /// what the kernel said
        source: std::io::Error,
    },
}

/// The layer's error for what the kernel answered while `doing`: the same number, with words where an operator
/// has to act on it.
pub(crate) fn backend(doing: &'static str, raw: Raw) -> Error {
    match raw {
        Raw::MFILE | Raw::NFILE => Error::new(
            Errno::ENFILE,
            format!("local directory, {doing}: no descriptor left; raise the service's limit (RLIMIT_NOFILE)"),
        ),
        Raw::IO | Raw::UCLEAN | Raw::ROFS | Raw::NODEV | Raw::NOMEM | Raw::XDEV => {
            let errno = Errno::from_raw(raw.raw_os_error());
            Error::new(errno, format!("local directory, {doing}: the filesystem below refuses"))
        }
        _ => Error::from(Errno::from_raw(raw.raw_os_error())),
    }
}

/// The error of a change to a read-only layer.
pub(crate) fn read_only() -> Error {
    Error::from(Errno::EROFS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_pass_unchanged_and_a_full_table_is_named() {
        assert_eq!(backend("x", Raw::NOTEMPTY).errno(), Errno::ENOTEMPTY);
        assert_eq!(backend("x", Raw::NOTEMPTY).message(), None);
        assert_eq!(backend("x", Raw::MFILE).errno(), Errno::ENFILE);
        assert!(backend("writing", Raw::IO).message().is_some_and(|text| text.contains("writing")));
    }
}
