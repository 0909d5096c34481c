//! Time limits of requests, and the way in which times are written.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Milliseconds of a text such as `2s` or `500ms`.
pub(crate) fn parse_milliseconds(text: &str) -> Option<u64> {
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 1),
        None => (text.strip_suffix('s')?, 1000),
    };
    let digits = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    number.parse::<u64>().ok().filter(|_| digits)?.checked_mul(unit)
}

/// The same, shown so.
pub(crate) fn show_milliseconds(milliseconds: u64) -> String {
    if milliseconds.is_multiple_of(1000) { format!("{}s", milliseconds / 1000) } else { format!("{milliseconds}ms") }
}

/// How long a request to a mount may take before it fails with `EIO`. The request itself is not undone: it may take effect later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct Timeout(u64);

impl Timeout {
    /// The shortest.
    pub const MIN: Duration = Duration::from_millis(100);
    /// The longest.
    pub const MAX: Duration = Duration::from_secs(3600);

    /// The time.
    #[must_use]
    pub fn duration(self) -> Duration {
        Duration::from_millis(self.0)
    }
}

/// No time that a [`Timeout`] can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoTimeout;

impl fmt::Display for NoTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("give a time in ms or s, from 100ms to 3600s, such as 30s")
    }
}

impl std::error::Error for NoTimeout {}

impl TryFrom<u64> for Timeout {
    type Error = NoTimeout;

    /// Of milliseconds.
    fn try_from(milliseconds: u64) -> Result<Self, NoTimeout> {
        let fits = (Self::MIN..=Self::MAX).contains(&Duration::from_millis(milliseconds));
        fits.then_some(Self(milliseconds)).ok_or(NoTimeout)
    }
}

impl From<Timeout> for u64 {
    fn from(timeout: Timeout) -> Self {
        timeout.0
    }
}

impl FromStr for Timeout {
    type Err = NoTimeout;

    fn from_str(text: &str) -> Result<Self, NoTimeout> {
        parse_milliseconds(text).ok_or(NoTimeout)?.try_into()
    }
}

impl fmt::Display for Timeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&show_milliseconds(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_understood_shown_and_bounded() {
        for text in ["100ms", "1500ms", "1s", "30s", "3600s"] {
            let timeout: Timeout = text.parse().expect("a time");
            assert_eq!(timeout.to_string(), text);
            let json = serde_json::to_string(&timeout).expect("serializable");
            assert_eq!(serde_json::from_str::<Timeout>(&json).expect("its own output"), timeout);
        }
        assert_eq!("2s".parse::<Timeout>().map(Timeout::duration), Ok(Duration::from_secs(2)));
        for text in ["", "s", "ms", "30", "0s", "99ms", "3601s", "-1s", "+1s", "1 s", "1m", "99999999999999999999s"] {
            assert_eq!(text.parse::<Timeout>(), Err(NoTimeout), "{text}");
        }
        assert!(serde_json::from_str::<Timeout>("7").is_err());
    }
}
