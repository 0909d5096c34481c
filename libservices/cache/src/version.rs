//! The version of what is kept of a node, where others make other versions.

use std::time::{Duration, Instant};

/// Which version it is.
#[derive(Default)]
pub(crate) struct Version {
    change: Option<u64>,
    /// When somebody began to ask, for the last time, and heard that it is this one.
    asked: Option<Instant>,
}

impl Version {
    /// Who asked at that time heard that it is this one; whether it was another before.
    pub(crate) fn becomes(&mut self, change: u64, asked: Instant) -> bool {
        self.asked = self.asked.max(Some(asked));
        self.change.replace(change) != Some(change)
    }

    /// Whether somebody asked at that time, or as much earlier as an answer counts.
    pub(crate) fn is_known_since(&self, time: Instant, validity: Duration) -> bool {
        self.asked.and_then(|asked| asked.checked_add(validity)).is_some_and(|until| until >= time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_counts_for_its_time_and_an_earlier_one_no_longer() {
        let second = Duration::from_secs(1);
        let start = Instant::now();
        let mut version = Version::default();
        assert!(!version.is_known_since(start, second));
        assert!(version.becomes(7, start + second));
        assert!(!version.becomes(7, start), "whoever asked earlier is heard later");
        assert!(version.is_known_since(start + second, Duration::ZERO));
        assert!(version.is_known_since(start + 2 * second, second));
        assert!(!version.is_known_since(start + 3 * second, second));
        assert!(version.becomes(8, start + 3 * second));
    }
}
