//! Memory that nobody accounts for: when to look whether clients keep it, and when they have given it back.

use std::time::{Duration, Instant};

/// It is looked for when there is so much more of it than when it was looked for last.
const PROBE_STEP: u64 = 16 << 20;
/// When so much less is left than there was, clients have given back.
const FALL: u64 = 8 << 20;
/// After so long without looking what there is counts as known.
const FORGET: Duration = Duration::from_secs(60);

/// What a group has beside the cache.
#[derive(Debug, Default)]
pub struct Strays {
    known: Option<u64>,
    probed: Option<Instant>,
    most: u64,
}

impl Strays {
    /// There is so much now; whether it is time to look for who keeps it.
    pub fn is_probe_due(&mut self, others: u64, now: Instant) -> bool {
        self.most = self.most.max(others);
        let known = *self.known.get_or_insert(others);
        if others > known.saturating_add(PROBE_STEP) {
            (self.known, self.probed) = (Some(others), Some(now));
            return true;
        }
        if others < known && self.probed.is_none_or(|probed| now.duration_since(probed) >= FORGET) {
            self.known = Some(others);
        }
        false
    }

    /// Somebody keeps some: what comes is compared with what there is now.
    pub fn note_kept(&mut self, others: u64) {
        self.most = others;
    }

    /// Whether some of it has been given back since that was noted.
    #[must_use]
    pub fn has_fallen(&self, others: u64) -> bool {
        others.saturating_add(FALL) <= self.most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_looked_for_at_each_step_up() {
        let (mut strays, start) = (Strays::default(), Instant::now());
        let mut is_due =
            |mebibytes: u64, seconds| strays.is_probe_due(mebibytes << 20, start + Duration::from_secs(seconds));
        assert!(!is_due(5, 0) && !is_due(21, 0) && is_due(22, 0));
        assert!(!is_due(22, 1) && !is_due(5, 2) && !is_due(38, 3), "it has been seen a moment ago");
        assert!(is_due(39, 4));
        assert!(!is_due(5, 4 + FORGET.as_secs()) && is_due(22, 5 + FORGET.as_secs()));
    }

    #[test]
    fn it_has_fallen_when_less_is_left_than_there_was() {
        let (mut strays, now) = (Strays::default(), Instant::now());
        strays.note_kept(100 << 20);
        assert!(!strays.has_fallen(93 << 20) && strays.has_fallen(92 << 20));
        let _ = strays.is_probe_due(150 << 20, now);
        assert!(strays.has_fallen(142 << 20) && !strays.has_fallen(143 << 20));
    }
}
