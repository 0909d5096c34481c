//! What a command says when it fails: the thing, the cause, the remedy.

use crate::text::plain;
use poolfs_host::HostError;
use poolfs_image::ImageError;
use std::fmt::{Display, Formatter};
use std::path::Path;

/// A command failed.
#[derive(Debug)]
pub struct Failure {
    thing: String,
    cause: String,
    remedy: String,
    /// The exit status of the whole command.
    pub status: u8,
}

/// The result of a command or of a part of it.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// What failed, why, and what can be done about it.
    pub fn new(thing: impl Into<String>, cause: impl Display, remedy: impl Into<String>) -> Failure {
        Failure { thing: thing.into(), cause: cause.to_string(), remedy: remedy.into(), status: 1 }
    }

    /// Something on a file failed for a reason only the kernel knows.
    pub fn file(path: &Path, cause: impl Display) -> Failure {
        Failure::new(
            path.display().to_string(),
            cause,
            "check that the path exists and that poolfs runs as root with room on the disk",
        )
    }

    /// The same failure of a named thing.
    pub fn of(mut self, thing: impl Into<String>) -> Failure {
        self.cause = format!("{}: {}", self.thing, self.cause);
        self.thing = thing.into();
        self
    }

    /// The same failure with another remedy.
    pub fn with_remedy(mut self, remedy: impl Into<String>) -> Failure {
        self.remedy = remedy.into();
        self
    }

    /// For programs, as `--json` prints it.
    pub fn json(&self) -> serde_json::Value {
        let remedy = Some(&self.remedy).filter(|remedy| !remedy.is_empty());
        serde_json::json!({"error": {"thing": self.thing, "cause": self.cause, "remedy": remedy}})
    }

    /// The thing and the cause, for a failure that has been dealt with.
    pub fn summary(&self) -> String {
        format!("{}: {}", self.thing, self.cause)
    }

    /// The same failure with another exit status.
    pub fn with_status(mut self, status: u8) -> Failure {
        self.status = status;
        self
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(&plain(&self.summary()))?;
        if self.remedy.is_empty() { Ok(()) } else { write!(f, "\n  remedy: {}", plain(&self.remedy)) }
    }
}

impl From<HostError> for Failure {
    fn from(error: HostError) -> Failure {
        let remedy = match &error {
            HostError::NoControlGroups => "mount control groups (version 1 or 2) at /sys/fs/cgroup",
            HostError::Malformed { .. } => "correct the value",
            HostError::Io { .. } | HostError::Process { .. } => {
                "run as root; `poolfs doctor` says what this host lacks"
            }
        };
        Failure::new("host", error, remedy)
    }
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Failure {
        let remedy = match &error {
            ImageError::Exists(name) => {
                format!("remove it with `poolfs image rm {name}`, or import under another name")
            }
            ImageError::Absent(_) => "`poolfs image ls` lists the images, `poolfs image import` adds one".to_owned(),
            ImageError::UnknownSource(_) | ImageError::BadName(_) => "correct the argument".to_owned(),
            ImageError::Damaged { .. } | ImageError::Archive(_) => "fetch or build the image again".to_owned(),
            ImageError::Member { .. } | ImageError::Description { .. } | ImageError::TooLarge { .. } => {
                "repair the image at its source; nothing of it was kept".to_owned()
            }
            ImageError::NoRoom { .. } => {
                "make room there, or use another --state directory; nothing of the image was kept".to_owned()
            }
            ImageError::Io { .. } => "check the path, the rights (root is needed) and the room on the disk".to_owned(),
        };
        Failure::new("image", error, remedy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_strangers_wrote_does_not_reach_the_terminal_as_it_is() {
        let failure = Failure::new("a\x1b]0;x\x07", "first line\nsecond\u{9b}2J", "b\r");
        let text = failure.to_string();
        assert_eq!(text, "a\\u{1b}]0;x\\u{7}: first line\nsecond\\u{9b}2J\n  remedy: b\\r");
        assert_eq!(failure.json()["error"]["thing"], "a\x1b]0;x\x07");
    }
}
