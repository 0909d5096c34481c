//! Translates libcephfs's error numbers, and says why a tree cannot be mounted.

use poolfs_libservice::Error;
use poolfs_types::Errno;
use std::path::PathBuf;

/// Why a tree of a CephFS cannot be mounted. The message names the thing and the remedy; the cause is the error's source.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The shared library cannot be loaded.
    #[error("cannot load libcephfs.so.2; install it (Debian: libcephfs2)")]
    Library(#[source] libloading::Error),
    /// It has not all that is called.
    #[error("this libcephfs lacks {function}; install Ceph 16.2 or newer")]
    Function {
        /// what is missing
        function: &'static str,
        /// what the loader said
        source: libloading::Error,
    },
    /// Something that was given cannot be passed on.
    #[error("{what} for Ceph contains a zero byte; give it without")]
    Argument {
        /// what was given
        what: &'static str,
    },
    /// The configuration cannot be used.
    #[error("cannot read Ceph's configuration{}; name the right file with --ceph-conf", place(.file.as_ref()))]
    Configuration {
        /// the file that was named
        file: Option<PathBuf>,
        /// what libcephfs said
        source: Errno,
    },
    /// A setting is refused.
    #[error("libcephfs refuses the setting {option}")]
    Setting {
        /// its name
        option: &'static str,
        /// what libcephfs said
        source: Errno,
    },
    /// The cluster does not let the tree be mounted.
    #[error("cannot mount {} of CephFS as client.{user}: {}", path.display(), remedy(*source))]
    Mount {
        /// the directory
        path: PathBuf,
        /// as whom
        user: String,
        /// what the cluster said
        source: Errno,
    },
}

fn place(file: Option<&PathBuf>) -> String {
    file.map_or_else(|| " (/etc/ceph/ceph.conf)".to_owned(), |file| format!(" {}", file.display()))
}

fn remedy(errno: Errno) -> &'static str {
    match errno {
        Errno::ENOENT => {
            "there is no such directory or filesystem, or no key of that user; make the directory (mount ceph:/, and mkdir), or name what there is with \
             --ceph-fs, --ceph-user and --ceph-keyring"
        }
        Errno::EACCES | Errno::EPERM => {
            "the user may not; give it the right (ceph fs authorize), or name its key with --ceph-keyring"
        }
        Errno::ETIMEDOUT => {
            "no monitor or metadata server answers, or the directory waits for a client that has died; look at the cluster (ceph -s), or try again \
             after a minute"
        }
        _ => "look at the cluster (ceph -s) and at Ceph's log",
    }
}

/// Whether an answer says that the cluster has ended this client's session: libcephfs never begins another one then.
pub(crate) fn is_over(errno: Errno) -> bool {
    const ESHUTDOWN: Errno = Errno::from_raw(108);
    matches!(errno, ESHUTDOWN | Errno::ENOTCONN)
}

/// What is answered from there on.
pub(crate) fn over(doing: &'static str) -> Error {
    Error::new(Errno::EIO, format!("CephFS, {doing}: {LOST_SESSION}; unmount and mount again"))
}

const LOST_SESSION: &str = "the cluster has closed this client's session";

/// Whether an error says that the cluster has ended a client's session: nothing that the client has accepted and not stored can be stored any more.
#[must_use]
pub fn has_lost_session(error: &Error) -> bool {
    error.message().is_some_and(|message| message.contains(LOST_SESSION))
}

/// The number of what libcephfs answered while `doing`, with words where an operator has to act on it.
pub(crate) fn backend(doing: &'static str, errno: Errno) -> Error {
    match errno {
        _ if is_over(errno) => over(doing),
        Errno::EIO | Errno::ENOMEM | Errno::ETIMEDOUT => {
            Error::new(errno, format!("CephFS, {doing}: the cluster refuses"))
        }
        _ => Error::from(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_that_is_gone_is_an_input_output_error_that_says_so() {
        let lost = backend("writing", Errno::from_raw(108));
        assert_eq!(lost.errno(), Errno::EIO);
        assert!(lost.message().is_some_and(|text| text.contains("writing") && text.contains("session")), "{lost}");
        assert!(has_lost_session(&lost) && !has_lost_session(&backend("x", Errno::EIO)));
        assert_eq!(backend("x", Errno::ENOTEMPTY).message(), None);
    }
}
