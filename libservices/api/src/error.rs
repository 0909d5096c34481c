//! The error of a layer: one errno, and a message for the log where the errno does not say enough.

use poolfs_types::Errno;
use std::fmt;

/// What a call of a layer returns.
pub type Result<T> = std::result::Result<T, Error>;

/// One errno for the application, and words for the log where there is more to say than the errno does.
#[derive(Clone, Debug)]
pub struct Error {
    errno: Errno,
    message: Option<Box<str>>,
    is_of_files: bool,
}

impl Error {
    /// An error that an operator should read about: `message` names the thing and the cause.
    pub fn new(errno: Errno, message: impl Into<String>) -> Self {
        Self { errno, message: Some(message.into().into_boxed_str()), is_of_files: false }
    }

    /// The same, of a call that concerns many files and failed for some of them: what it had to do for all others is done.
    #[must_use]
    pub fn of_files(self) -> Self {
        Self { is_of_files: true, ..self }
    }

    /// Whether it is [of single files](Self::of_files).
    #[must_use]
    pub fn is_of_files(&self) -> bool {
        self.is_of_files
    }

    /// The number the application gets.
    #[must_use]
    pub fn errno(&self) -> Errno {
        self.errno
    }

    /// What to log, if the errno is not the whole story (as it is for an ordinary `ENOENT`).
    #[must_use]
    pub fn message(&self) -> Option<&str> {
        self.message.as_deref()
    }
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Self {
        Self { errno, message: None, is_of_files: false }
    }
}

impl PartialEq<Errno> for Error {
    fn eq(&self, other: &Errno) -> bool {
        self.errno == *other
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.message {
            Some(message) => write!(f, "{message}: {}", self.errno),
            None => write!(f, "{}", self.errno),
        }
    }
}

impl std::error::Error for Error {}
