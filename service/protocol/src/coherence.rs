//! Coherence modes of a mounted directory: who else may change it, and how soon such changes are seen.
//!
//! [`Coherence::CloseToOpen`] is what NFS calls close-to-open consistency (RFC 8881, section 10.3.1).

use crate::timeout::{parse_milliseconds, show_milliseconds};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The longest time after which changes by others may be seen.
pub const TIMED_MAX: Duration = Duration::from_secs(3600);

/// After how long changes by others are seen of a file that stays open, with [`Coherence::CloseToOpen`].
pub const OPEN_FILES_TIME: Duration = Duration::from_secs(1);

/// Who else may change a directory, and how soon that is seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "mode")]
pub enum Coherence {
    /// Nobody else changes it. It is claimed: no other service can have it mounted.
    #[default]
    Exclusive,
    /// Other services may have it mounted, all in this mode. None sees in time what the others write, and the last write-back wins.
    Uncoordinated,
    /// Anybody may change it, by whatever way. Names, and what whoever opens a file reads, are what they are below at that time. An open
    /// file's attributes and content may be those of [`OPEN_FILES_TIME`] before. What was written is durable when `close` returns.
    CloseToOpen,
    /// Anybody may change it, by whatever way, and every use asks: the same as [`Coherence::Timed`] with no time.
    Strict,
    /// Anybody may change it, by whatever way. A look-up, a listing, an attribute or a read never shows a state of names, attributes or
    /// content that is older than this.
    Timed {
        /// Milliseconds, from 0 to [`TIMED_MAX`].
        milliseconds: u64,
    },
}

impl Coherence {
    /// After how long changes by others are seen; nothing where that is not promised.
    #[must_use]
    pub fn timed(self) -> Option<Duration> {
        match self {
            Self::Timed { milliseconds } => Some(Duration::from_millis(milliseconds)),
            Self::CloseToOpen => Some(OPEN_FILES_TIME),
            Self::Strict => Some(Duration::ZERO),
            Self::Exclusive | Self::Uncoordinated => None,
        }
    }

    /// The same of names, and so of what is looked up by one.
    #[must_use]
    pub fn names_timed(self) -> Option<Duration> {
        if self == Self::CloseToOpen { Some(Duration::ZERO) } else { self.timed() }
    }
}

impl fmt::Display for Coherence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exclusive => f.write_str("exclusive"),
            Self::Uncoordinated => f.write_str("uncoordinated"),
            Self::CloseToOpen => f.write_str("close-to-open"),
            Self::Strict => f.write_str("strict"),
            Self::Timed { milliseconds } => write!(f, "timed:{}", show_milliseconds(*milliseconds)),
        }
    }
}

/// A text that names no coherence mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoCoherence;

impl fmt::Display for NoCoherence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "give private (or exclusive), close-to-open, strict, uncoordinated, or timed:TIME with a time in ms or s up to 3600s, such as timed:1s or \
             timed:500ms",
        )
    }
}

impl std::error::Error for NoCoherence {}

impl FromStr for Coherence {
    type Err = NoCoherence;

    fn from_str(text: &str) -> Result<Self, NoCoherence> {
        match text.split_once(':') {
            None => match text {
                // What a cluster's users call it.
                "exclusive" | "private" => Ok(Self::Exclusive),
                "uncoordinated" => Ok(Self::Uncoordinated),
                "close-to-open" => Ok(Self::CloseToOpen),
                "strict" => Ok(Self::Strict),
                _ => Err(NoCoherence),
            },
            Some(("timed", time)) => {
                let milliseconds = parse_milliseconds(time).ok_or(NoCoherence)?;
                let fits = Duration::from_millis(milliseconds) <= TIMED_MAX;
                fits.then_some(Self::Timed { milliseconds }).ok_or(NoCoherence)
            }
            _ => Err(NoCoherence),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_named_and_understood() {
        let modes = ["exclusive", "uncoordinated", "close-to-open", "strict"];
        for text in modes.into_iter().chain(["timed:0s", "timed:1s", "timed:1500ms", "timed:3600s"]) {
            assert_eq!(text.parse::<Coherence>().map(|mode| mode.to_string()), Ok(text.to_owned()));
        }
        assert_eq!("private".parse(), Ok(Coherence::Exclusive));
        let second = Coherence::Timed { milliseconds: 1000 };
        assert_eq!("timed:1000ms".parse(), Ok(second));
        assert_eq!(second.timed(), Some(Duration::from_secs(1)));
        assert_eq!((second.names_timed(), Coherence::Strict.names_timed()), (second.timed(), Some(Duration::ZERO)));
        assert_eq!(Coherence::CloseToOpen.names_timed(), Some(Duration::ZERO));
        let wrong = [
            "",
            "close",
            "strict:1s",
            "timed",
            "timed:",
            "timed:1",
            "timed:s",
            "timed:-1s",
            "timed:+1s",
            "timed:3601s",
            "exclusive:1s",
        ];
        for text in wrong.iter().copied().chain(["timed:99999999999999999999s", "timed:18446744073709551615s"]) {
            assert_eq!(text.parse::<Coherence>(), Err(NoCoherence), "{text}");
        }
    }
}
