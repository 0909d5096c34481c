//! Errors of control commands: why a service did not carry one out, for people and for programs.

use crate::fuse::MountError;
use crate::stack::StackError;
use crate::underway::{INSTANCES_MAX, UNDERWAY_MAX};
use poolfs_libservice::Error;
use poolfs_libservice::types::Errno;
use poolfs_service_protocol::{Answer, FailureCode};
use std::io;
use std::path::PathBuf;

/// Why a command was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The name cannot be used.
    #[error(
        "\"{0}\" is no name for an instance: 1 to 64 letters, digits, '-', '_' and '.', beginning with a letter or digit"
    )]
    Name(String),
    /// There is one of this name.
    #[error("the instance {0} exists already; unmount it first, or take another name")]
    Exists(String),
    /// There are too many.
    #[error("the service has {INSTANCES_MAX} instances, which is the most; unmount one, or use another pool")]
    TooMany,
    /// There are too many mounts under way.
    #[error("{UNDERWAY_MAX} mounts of the service are under way, which is the most; wait until one of them has ended")]
    TooManyUnderway,
    /// It mounts nothing any more.
    #[error("the service is about to end; mount it again, which starts another one")]
    Ending,
    /// Its mount was given up before it had come to its end.
    #[error("{0} was unmounted while it was about to be mounted; mount it again")]
    GivenUp(String),
    /// A path cannot be used.
    #[error("{what} {path}: {cause}")]
    Path {
        /// mount point, upper, lower ...
        what: &'static str,
        /// the path
        path: PathBuf,
        /// what is wrong, and what to do
        cause: String,
    },
    /// A branch cannot be used.
    #[error(transparent)]
    Stack(#[from] StackError),
    /// The mount failed.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// What programs have written is not on the disk, and would be lost.
    #[error(
        "what was written to {path} cannot be put on the disk ({cause}), and the mount stays as long as that is so; {}",
        remedy(cause)
    )]
    NotWritten {
        /// the mount point
        path: PathBuf,
        /// why not
        cause: Error,
    },
    /// The same, and the mount is gone.
    #[error("what was written to {path} could not be put on the disk ({cause}), and is lost: {again}")]
    Lost {
        /// the mount point
        path: PathBuf,
        /// why not
        cause: Error,
        /// why it could not be mounted again
        again: Box<ServiceError>,
    },
    /// The same, and its branch may still take it.
    #[error(
        "{path} is unmounted, but what was written to it last is not on the disk ({cause}): it is lost unless its branch answers before the service ends"
    )]
    LeftBehind {
        /// the mount point
        path: PathBuf,
        /// why not
        cause: Error,
    },
    /// It is gone from its place, and still used.
    #[error(
        "{path} is in use: programs in another mount namespace, or that were there before it was unmounted by others, have {files} files of it \
         open; end them: it ends with the last of them"
    )]
    UsedElsewhere {
        /// where it was mounted
        path: PathBuf,
        /// how many
        files: usize,
    },
    /// At the end of the service something could not be written back.
    #[error("what was written last through {instance} could not be put on the disk ({cause}), and is lost")]
    LostAtEnd {
        /// the instance
        instance: String,
        /// why not
        cause: Error,
    },
    /// The same, and the next service finds it.
    #[error(
        "what was written last through {instance} could not be put on the disk ({cause}): it waits in memory, and the next mount of its branch has it"
    )]
    WaitsAtEnd {
        /// the instance
        instance: String,
        /// why not
        cause: Error,
    },
    /// The user-level path cannot be had.
    #[error("no sessions at {place}: {cause}")]
    Sessions {
        /// where the sockets are
        place: PathBuf,
        /// what is wrong
        cause: io::Error,
    },
}

/// What kind of failure it is that something of a branch cannot be read or written.
pub(crate) fn code_of(error: &Error) -> FailureCode {
    match error.errno() {
        Errno::ENOSPC | Errno::EDQUOT => FailureCode::NoSpace,
        Errno::EUCLEAN => FailureCode::Damaged,
        _ => FailureCode::File,
    }
}

/// What an error of a layer says: without its errno, where the message says what can be done, so that nothing comes after that.
pub(crate) fn text_of(error: &Error) -> String {
    error.message().filter(|message| message.contains("; ")).map_or_else(|| error.to_string(), str::to_owned)
}

/// The answer with a text that says what is wrong and, where that is known, after the last semicolon what can be done about it.
pub(crate) fn failure(code: FailureCode, text: impl Into<String>) -> Answer {
    let text = text.into();
    let (message, remedy) = match text.rsplit_once("; ") {
        Some((message, remedy)) => (message.to_owned(), Some(remedy.to_owned())),
        None => (text, None),
    };
    Answer::Failed { code, message, remedy }
}

impl ServiceError {
    /// What kind of failure it is.
    fn code(&self) -> FailureCode {
        match self {
            Self::Name(_) => FailureCode::Usage,
            Self::Exists(_) => FailureCode::Exists,
            Self::TooMany | Self::TooManyUnderway | Self::Ending | Self::GivenUp(_) => FailureCode::Failed,
            Self::Path { .. } => FailureCode::File,
            Self::Stack(error) => error.code(),
            Self::Mount(MountError::Busy { .. } | MountError::Covered { .. }) | Self::UsedElsewhere { .. } => {
                FailureCode::InUse
            }
            Self::Mount(_) | Self::Sessions { .. } => FailureCode::Host,
            Self::NotWritten { cause, .. }
            | Self::Lost { cause, .. }
            | Self::LeftBehind { cause, .. }
            | Self::LostAtEnd { cause, .. }
            | Self::WaitsAtEnd { cause, .. } => code_of(cause),
        }
    }

    /// The answer to whoever gave the command.
    #[must_use]
    pub fn answer(&self) -> Answer {
        match self {
            // Nothing can be done, and a semicolon is part of a name.
            Self::LeftBehind { .. }
            | Self::LostAtEnd { .. }
            | Self::WaitsAtEnd { .. }
            | Self::Sessions { .. }
            | Self::Mount(MountError::Session { .. }) => {
                Answer::Failed { code: self.code(), message: self.to_string(), remedy: None }
            }
            _ => failure(self.code(), self.to_string()),
        }
    }
}

/// What to do about what cannot be stored.
fn remedy(cause: &Error) -> &'static str {
    if poolfs_ceph::has_lost_session(cause) {
        "what waits is lost: unmount it with --force, and mount it again"
    } else {
        "make room, repair the disk behind it, or remove the file that is damaged"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_done_is_told_apart_from_what_is_wrong() {
        let told = |error: ServiceError| match error.answer() {
            Answer::Failed { message, remedy, .. } => (message, remedy),
            other => panic!("{other:?}"),
        };
        let (message, remedy) = told(ServiceError::Mount(MountError::Busy { path: "/a; b".into() }));
        assert_eq!(message, "/a; b is in use");
        assert!(remedy.is_some_and(|remedy| remedy.starts_with("end the programs")));
        let lost = ServiceError::LeftBehind { path: "/a; b".into(), cause: Error::from(Errno::EIO) };
        assert_eq!(told(lost).1, None);
    }

    #[test]
    fn an_errno_does_not_come_after_what_can_be_done() {
        let text = |message| text_of(&Error::new(Errno::ENOMEM, message));
        assert_eq!(text("too much; take less"), "too much; take less");
        assert_eq!(text("too much"), Error::new(Errno::ENOMEM, "too much").to_string());
    }
}
