//! Error messages of commands: the thing, the cause, the remedy, and a code for programs.

use crate::text::plain;
use poolfs_host::HostError;
use poolfs_image::ImageError;
use poolfs_service_protocol::FailureCode;
use std::fmt::{Display, Formatter};
use std::path::Path;

/// What can be done where an image finds no room.
const NO_ROOM_REMEDY: &str = "make room there, or raise its quota; nothing of the image was kept";

/// Why something on a file failed.
pub trait FileCause: Display {
    /// Whether it is for want of room.
    fn is_no_space(&self) -> bool {
        false
    }
}

impl FileCause for std::io::Error {
    fn is_no_space(&self) -> bool {
        matches!(self.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)
    }
}

impl FileCause for rustix::io::Errno {
    fn is_no_space(&self) -> bool {
        matches!(*self, Self::NOSPC | Self::DQUOT)
    }
}

impl FileCause for serde_json::Error {}

impl FileCause for &str {}

impl FileCause for String {}

/// What kind of failure it is, for programs: these names stay as they are (docs/observability.md has the list).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// None of the others.
    Failed,
    /// The command line, or a value in it, is wrong.
    Usage,
    /// What is named does not exist.
    NotFound,
    /// The name is taken.
    Exists,
    /// What is named is mounted, running or somebody else's just now.
    InUse,
    /// A service does not answer.
    NoAnswer,
    /// The host lacks something, or refuses it.
    Host,
    /// A file or directory cannot be used.
    File,
    /// What is stored, or is to be imported, is not as it should be.
    Damaged,
    /// There is no room.
    NoSpace,
    /// A signal ended it.
    Interrupted,
}

impl Code {
    /// All of them.
    const ALL: [Code; 11] = [
        Code::Failed,
        Code::Usage,
        Code::NotFound,
        Code::Exists,
        Code::InUse,
        Code::NoAnswer,
        Code::Host,
        Code::File,
        Code::Damaged,
        Code::NoSpace,
        Code::Interrupted,
    ];

    /// The exit status of a command that fails so, unless it has statuses of its own (docs/observability.md).
    fn status(self) -> u8 {
        match self {
            Code::Usage => 2,
            Code::Interrupted => 130,
            _ => 1,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Code::Failed => "failed",
            Code::Usage => "usage",
            Code::NotFound => "not-found",
            Code::Exists => "exists",
            Code::InUse => "in-use",
            Code::NoAnswer => "no-answer",
            Code::Host => "host",
            Code::File => "file",
            Code::Damaged => "damaged",
            Code::NoSpace => "no-space",
            Code::Interrupted => "interrupted",
        }
    }
}

impl From<FailureCode> for Code {
    fn from(code: FailureCode) -> Code {
        match code {
            FailureCode::Failed => Code::Failed,
            FailureCode::Usage => Code::Usage,
            FailureCode::NotFound => Code::NotFound,
            FailureCode::Exists => Code::Exists,
            FailureCode::InUse => Code::InUse,
            FailureCode::Host => Code::Host,
            FailureCode::File => Code::File,
            FailureCode::Damaged => Code::Damaged,
            FailureCode::NoSpace => Code::NoSpace,
        }
    }
}

/// A command failed.
#[derive(Debug)]
pub struct Failure {
    code: Code,
    thing: String,
    cause: String,
    remedy: String,
    /// The exit status, of commands that have statuses of their own.
    status: Option<u8>,
}

/// The result of a command or of a part of it.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// What failed, why, and what can be done about it.
    pub fn new(thing: impl Into<String>, cause: impl Display, remedy: impl Into<String>) -> Failure {
        Failure {
            code: Code::Failed,
            thing: thing.into(),
            cause: cause.to_string(),
            remedy: remedy.into(),
            status: None,
        }
    }

    /// The command line, or a value in it, is wrong.
    pub fn usage(thing: impl Into<String>, cause: impl Display, remedy: impl Into<String>) -> Failure {
        Failure::new(thing, cause, remedy).with_code(Code::Usage)
    }

    /// What is named does not exist.
    pub fn not_found(thing: impl Into<String>, cause: impl Display, remedy: impl Into<String>) -> Failure {
        Failure::new(thing, cause, remedy).with_code(Code::NotFound)
    }

    /// What is named is mounted, running or somebody else's just now.
    pub fn in_use(thing: impl Into<String>, cause: impl Display, remedy: impl Into<String>) -> Failure {
        Failure::new(thing, cause, remedy).with_code(Code::InUse)
    }

    /// The host lacks something.
    pub fn host(thing: impl Into<String>, cause: impl Display, remedy: impl Into<String>) -> Failure {
        Failure::new(thing, cause, remedy).with_code(Code::Host)
    }

    /// A signal ended it.
    pub fn interrupted(thing: impl Into<String>, cause: impl Display) -> Failure {
        Failure::new(thing, cause, "").with_code(Code::Interrupted)
    }

    /// The same failure of another kind.
    pub fn with_code(mut self, code: Code) -> Failure {
        self.code = code;
        self
    }

    /// Something on a file failed for a reason only the kernel knows.
    pub fn file(path: &Path, cause: impl FileCause) -> Failure {
        let (code, remedy) = match cause.is_no_space() {
            true => (Code::NoSpace, "make room on its disk, then try again"),
            false => (Code::File, "check that the path exists, and that poolfs runs as root"),
        };
        Failure::new(path.display().to_string(), cause, remedy).with_code(code)
    }

    /// The same failure of a named thing.
    pub fn of(mut self, thing: impl Into<String>) -> Failure {
        self.cause = format!("{}: {}", self.thing, self.cause);
        self.thing = thing.into();
        self
    }

    /// The same failure, said of another thing in the place of its own.
    pub fn about(mut self, thing: impl Into<String>) -> Failure {
        self.thing = thing.into();
        self
    }

    /// The same failure, with another name of a directory in all that it says.
    pub fn renamed(mut self, directory: &Path, name: &Path) -> Failure {
        let (directory, name) = (directory.display().to_string(), name.display().to_string());
        for text in [&mut self.thing, &mut self.cause, &mut self.remedy] {
            *text = text.replace(&directory, &name);
        }
        self
    }

    /// The same failure with more of its cause.
    pub fn because(mut self, more: impl Display) -> Failure {
        self.cause = format!("{}; {more}", self.cause);
        self
    }

    /// The same failure with another remedy.
    pub fn with_remedy(mut self, remedy: impl Into<String>) -> Failure {
        self.remedy = remedy.into();
        self
    }

    /// The same failure, with what is to be done after its remedy.
    pub fn then(mut self, next: &str) -> Failure {
        let first = self.remedy().unwrap_or("correct that");
        self.remedy = format!("{first}; then {next}");
        self
    }

    /// For programs, as `--json` prints it.
    pub fn json(&self) -> serde_json::Value {
        let remedy = self.remedy();
        serde_json::json!({"error": {"code": self.code.name(), "thing": self.thing, "cause": self.cause, "remedy": remedy}})
    }

    /// What [`Failure::json`] made; nothing when it is something else.
    pub fn of_json(object: &serde_json::Value) -> Option<Failure> {
        let told = |key: &str| object["error"][key].as_str();
        let code = Code::ALL.into_iter().find(|code| told("code") == Some(code.name()))?;
        Some(Failure::new(told("thing")?, told("cause")?, told("remedy").unwrap_or_default()).with_code(code))
    }

    /// The thing and the cause, for a failure that has been dealt with.
    pub fn summary(&self) -> String {
        format!("{}: {}", self.thing, self.cause)
    }

    /// What can be done about it, if anything is known.
    pub fn remedy(&self) -> Option<&str> {
        Some(self.remedy.as_str()).filter(|remedy| !remedy.is_empty())
    }

    /// The same failure of a command that has exit statuses of its own.
    pub fn with_status(mut self, status: u8) -> Failure {
        self.status = Some(status);
        self
    }

    /// The exit status of the whole command.
    pub fn status(&self) -> u8 {
        self.status.unwrap_or_else(|| self.code.status())
    }

    /// What kind of failure it is.
    pub fn code(&self) -> Code {
        self.code
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
            HostError::OthersGroups { .. } => "choose another name, or remove the other pool",
            HostError::LeftGroups { .. } => "choose another name, or end them",
            HostError::Io { .. } | HostError::Process { .. } => {
                "run as root; `poolfs doctor` says what this host lacks"
            }
        };
        let code = match error {
            HostError::Malformed { .. } => Code::Usage,
            HostError::OthersGroups { .. } => Code::Exists,
            HostError::LeftGroups { .. } => Code::InUse,
            _ => Code::Host,
        };
        Failure::new("host", error, remedy).with_code(code)
    }
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Failure {
        let told = error.to_string();
        let (code, remedy) = match error {
            // The kind and the remedy are those of what is wrong in it.
            ImageError::Within { cause, .. } => return Failure { cause: told, ..Failure::from(*cause) },
            ImageError::Exists(name) => {
                let remedy = format!("remove it with `poolfs image rm {name}`, or take another name");
                return Failure::new(format!("image {name}"), "it exists already", remedy).with_code(Code::Exists);
            }
            ImageError::Absent(name) => {
                let remedy = "`poolfs image ls` lists the images, `poolfs image import` adds one";
                return Failure::not_found(format!("image {name}"), "it does not exist", remedy);
            }
            ImageError::UnknownSource(_) | ImageError::BadName(_) => (Code::Usage, "correct the argument"),
            ImageError::OtherKind(_) => (
                Code::Usage,
                "name it by what it is: oci:DIR[:TAG], oci-archive:FILE, docker-archive:FILE (of `docker save`), tar:FILE or dir:DIR",
            ),
            ImageError::NotChosen { .. } => {
                (Code::Usage, "name one of them, as oci:DIR:TAG (of an archive, when it is unpacked)")
            }
            ImageError::Damaged { .. } | ImageError::Archive(_) => (Code::Damaged, "fetch or build the image again"),
            ImageError::Member { .. } | ImageError::Description { .. } | ImageError::TooLarge { .. } => {
                (Code::Damaged, "repair the image at its source; nothing of it was kept")
            }
            ImageError::Reserved { .. } => (
                Code::Damaged,
                "leave .poolfs out of the image; an upper branch becomes one by `poolfs commit` while it is mounted",
            ),
            ImageError::NoRoom { .. } => (
                Code::NoSpace,
                "make room there, or use another --state directory (--to, of one at a cluster); nothing of the image was kept",
            ),
            ImageError::NoRoomFor { .. } => (Code::NoSpace, NO_ROOM_REMEDY),
            ImageError::Io { source, .. } if source.is_no_space() => (Code::NoSpace, NO_ROOM_REMEDY),
            ImageError::Io { .. } => {
                (Code::File, "check the path, the rights (root is needed) and the room on the disk")
            }
            ImageError::Interrupted => (Code::Interrupted, ""),
        };
        Failure::new("image", told, remedy).with_code(code)
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
        assert_eq!(failure.json()["error"]["code"], "failed");
        assert_eq!(Failure::in_use("a", "b", "c").of("d").json()["error"]["code"], "in-use");
    }

    #[test]
    fn what_is_to_be_done_then_comes_after_the_remedy() {
        let remedy = |remedy: &str| Failure::new("a", "b", remedy).then("try again").remedy().map(str::to_owned);
        assert_eq!(remedy("make room").as_deref(), Some("make room; then try again"));
        assert_eq!(remedy("").as_deref(), Some("correct that; then try again"));
    }

    #[test]
    fn every_code_is_documented() {
        let document = include_str!("../../../docs/observability.md");
        for code in Code::ALL {
            assert!(document.contains(&format!("| `{}` |", code.name())), "{code:?}");
        }
        // The last of them.
        assert_eq!(Code::ALL.len(), Code::Interrupted as usize + 1);
        assert!(Code::ALL.iter().enumerate().all(|(at, code)| *code as usize == at));
    }

    #[test]
    fn the_code_decides_the_exit_status() {
        let status = |code| Failure::new("a", "b", "c").with_code(code).status();
        assert_eq!(Failure::new("a", "b", "c").status(), 1);
        assert_eq!(Failure::usage("a", "b", "c").status(), 2);
        assert_eq!((status(Code::Interrupted), status(Code::InUse), status(Code::NoAnswer)), (130, 1, 1));
        assert_eq!(Failure::from(ImageError::Interrupted).status(), 130);
        assert_eq!(Failure::usage("a", "b", "c").with_status(127).of("d").status(), 127);
    }

    #[test]
    fn what_a_service_answers_has_the_same_codes() {
        for code in Code::ALL {
            let name = code.name();
            let told: FailureCode = serde_json::from_value(name.into()).expect("another is none of the others");
            let expected = if matches!(code, Code::NoAnswer | Code::Interrupted) { Code::Failed } else { code };
            assert_eq!(Code::from(told), expected, "{name}");
        }
    }

    #[test]
    fn what_is_wrong_in_an_archive_has_its_own_code_and_remedy() {
        let within = |place: &str, cause| ImageError::Within { place: place.into(), cause: Box::new(cause) };
        let layer = || within("a.tar", within("blobs/b", ImageError::Reserved { member: "./.poolfs".into() }));
        let text = Failure::from(layer()).to_string();
        assert!(text.starts_with("image: a.tar: blobs/b: member \"./.poolfs\": "), "{text}");
        assert!(text.contains("\n  remedy: leave .poolfs out"), "{text}");
        assert_eq!(Failure::from(layer()).code(), Code::Damaged);
        assert_eq!(Failure::from(within("a.tar", ImageError::Interrupted)).status(), 130);
    }

    #[test]
    fn a_full_disk_is_told_from_a_wrong_path() {
        use rustix::io::Errno;
        let code = |errno: Errno| {
            [Failure::file(Path::new("/x"), errno), Failure::file(Path::new("/x"), std::io::Error::from(errno))]
                .map(|failure| failure.code())
        };
        assert_eq!(code(Errno::NOSPC), [Code::NoSpace; 2]);
        assert_eq!(code(Errno::DQUOT), [Code::NoSpace; 2]);
        assert_eq!(code(Errno::NOENT), [Code::File; 2]);
    }
}
