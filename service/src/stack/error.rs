//! Errors of building a stack, and the roles of branches.

use poolfs_libservice::Error;
use poolfs_libservice::types::Errno;
use poolfs_service_protocol::FailureCode;
use std::path::PathBuf;

/// Why a stack cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum StackError {
    /// A branch cannot be used.
    #[error("the directory {path} cannot be opened: {cause}")]
    Branch {
        /// the directory
        path: PathBuf,
        /// what is wrong
        cause: String,
    },
    /// The cache of the pool cannot be made.
    #[error("the cache of {bytes} bytes cannot be made: {cause}")]
    Cache {
        /// how large it should be
        bytes: u64,
        /// what is wrong
        cause: String,
    },
    /// What is stored in a branch is not as it should be.
    #[error(transparent)]
    Damaged(Box<StackError>),
    /// The branches do not make a union.
    #[error("the union over {upper} cannot be opened: {cause}")]
    Union {
        /// its upper branch
        upper: PathBuf,
        /// what is wrong
        cause: String,
    },
    /// It is an upper branch, and was to be mounted by itself.
    #[error(
        "the directory {path} cannot be mounted by itself: {cause}; mount it with --upper, and with --lower naming what it was written over"
    )]
    Upper {
        /// the directory
        path: PathBuf,
        /// what is wrong
        cause: String,
    },
    /// Another process has the branch.
    #[error("the directory {path} cannot be used: {cause}")]
    Held {
        /// the directory
        path: PathBuf,
        /// by whom, and what to do
        cause: &'static str,
    },
    /// Two uses of a branch exclude each other.
    #[error(
        "{path} cannot be {wanted} while {other} is {used}; unmount the instance that uses it, or name another directory"
    )]
    Conflict {
        /// the directory
        path: PathBuf,
        /// what it should become
        wanted: Role,
        /// the directory in use: the same, one above or one below
        other: PathBuf,
        /// what it is
        used: Role,
    },
}

impl StackError {
    /// The same, of a union that could not be opened because of `error`.
    pub(super) fn because(self, error: &Error) -> Self {
        if error.errno() == Errno::EUCLEAN { Self::Damaged(Box::new(self)) } else { self }
    }

    /// What kind of failure it is.
    #[must_use]
    pub fn code(&self) -> FailureCode {
        match self {
            Self::Branch { .. } | Self::Union { .. } | Self::Upper { .. } => FailureCode::File,
            Self::Damaged(_) => FailureCode::Damaged,
            Self::Cache { .. } => FailureCode::Host,
            Self::Held { .. } | Self::Conflict { .. } => FailureCode::InUse,
        }
    }
}

/// What a branch is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// mounted by itself
    Directory,
    /// the same, while anybody may change it: nothing of it is cached
    TimedDirectory,
    /// the writable branch of a union
    Upper,
    /// a read-only branch of unions
    Lower,
}

impl Role {
    /// Whether it is mounted by itself.
    pub(super) fn is_directory(self) -> bool {
        matches!(self, Self::Directory | Self::TimedDirectory)
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Role::Directory => "a mounted directory",
            Role::TimedDirectory => {
                "a mounted directory that others may change (--coherence strict, close-to-open or timed)"
            }
            Role::Upper => "the upper branch of a union",
            Role::Lower => "a lower branch of a union",
        })
    }
}
