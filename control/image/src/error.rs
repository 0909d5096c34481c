//! Errors of images, layers and archives.

use poolfs_host::HostError;
use std::path::{Path, PathBuf};

/// An image, a layer or an archive could not be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The kernel refused something.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted, as a verb.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The kernel's reason.
        source: std::io::Error,
    },
    /// A source that is not one of the known forms.
    #[error(
        "image source {0:?} is not understood: oci:DIR[:TAG], oci-archive:FILE, docker-archive:FILE, tar:FILE and dir:DIR are"
    )]
    UnknownSource(String),
    /// A source that is there, and is none of its kind.
    #[error("{0}")]
    OtherKind(&'static str),
    /// A layout that has no image of the name that was asked for, or several and none was.
    #[error("{cause}; it has: {names}")]
    NotChosen {
        /// What is wrong.
        cause: String,
        /// What could have been asked for.
        names: String,
    },
    /// A name that cannot name an image.
    #[error(
        "image name {0:?} is not allowed: letters, digits, '.', '_', '-' and ':' are, at most 128, a letter or digit first"
    )]
    BadName(String),
    /// The image is there already.
    #[error("image {0}: it exists already")]
    Exists(String),
    /// There is no such image.
    #[error("image {0}: it does not exist")]
    Absent(String),
    /// A member of an archive that must not be unpacked.
    #[error("archive member {member:?}: {cause}")]
    Member {
        /// The member's name.
        member: String,
        /// Why not.
        cause: String,
    },
    /// A layer that a union would take for one of its upper branches.
    #[error("member {member:?}: .poolfs at the root of a layer is the mark of a union's upper branch")]
    Reserved {
        /// The member's name, or the path in a directory.
        member: String,
    },
    /// An archive that breaks its own format.
    #[error("malformed archive: {0}")]
    Archive(String),
    /// What is wrong in an archive, a blob or a directory that an image is made of.
    #[error("{place}: {cause}")]
    Within {
        /// Its name.
        place: String,
        /// What is wrong.
        cause: Box<ImageError>,
    },
    /// An image description that breaks its own format.
    #[error("malformed {what}: {cause}")]
    Description {
        /// Which document.
        what: String,
        /// What is wrong.
        cause: String,
    },
    /// Content that is not what its digest says.
    #[error("{what} is damaged: its digest is {found}, expected {expected}")]
    Damaged {
        /// Which content.
        what: String,
        /// The digest it has.
        found: String,
        /// The digest it should have.
        expected: String,
    },
    /// Whoever asked for it does not want it any more.
    #[error("it was interrupted; nothing of it was kept")]
    Interrupted,
    /// The disk would be filled.
    #[error(
        "only {left} {what} are left on the disk of {}: an import leaves {kept} {what} to others",
        path.display()
    )]
    NoRoom {
        /// The directory of layers.
        path: PathBuf,
        /// What would be used up: bytes or inodes.
        what: &'static str,
        /// How many are left.
        left: u64,
        /// How many an import never takes.
        kept: u64,
    },
    /// The disk, or a quota, has no room for a member of an archive.
    #[error("there is no room for archive member {member:?}: {source}")]
    NoRoomFor {
        /// The member's name.
        member: String,
        /// The kernel's reason.
        source: std::io::Error,
    },
    /// An image larger than the bounds allow.
    #[error("{what} is over the limit of {limit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// The bound.
        limit: u64,
    },
}

impl ImageError {
    pub(crate) fn io(action: &'static str, path: &Path, source: impl Into<std::io::Error>) -> Self {
        ImageError::Io { action, path: path.to_path_buf(), source: source.into() }
    }

    pub(crate) fn member(path: &[u8], cause: impl Into<String>) -> Self {
        ImageError::Member { member: String::from_utf8_lossy(path).into_owned(), cause: cause.into() }
    }

    pub(crate) fn reserved(path: &[u8]) -> Self {
        ImageError::Reserved { member: String::from_utf8_lossy(path).into_owned() }
    }

    /// The same with the name of what is being read, where it does not say that already.
    pub(crate) fn within(self, place: &str) -> Self {
        match &self {
            ImageError::Within { place: named, .. } if named == place => self,
            ImageError::Io { path, .. } if path == Path::new(place) => self,
            _ => ImageError::Within { place: place.to_owned(), cause: Box::new(self) },
        }
    }

    pub(crate) fn description(what: impl Into<String>, cause: impl ToString) -> Self {
        ImageError::Description { what: what.into(), cause: cause.to_string() }
    }
}

impl From<HostError> for ImageError {
    fn from(error: HostError) -> Self {
        match error {
            HostError::Io { action, path, source } => ImageError::Io { action, path, source },
            other => ImageError::Io { action: "use", path: PathBuf::from("/"), source: std::io::Error::other(other) },
        }
    }
}

/// The result of an operation on images.
pub type Result<T> = std::result::Result<T, ImageError>;
