//! Memory that no account covers: when to search for clients that keep it, and when they have given it back.

use std::time::{Duration, Instant};

/// It is looked for when there is so much more of it than when it was looked for last.
const PROBE_STEP: u64 = 16 << 20;
/// When so much less is left than there was, clients have given back.
const FALL: u64 = 8 << 20;
/// After it was looked for, this long only when there is more than ever since: what comes and goes is not worth looking each time.
const REST: Duration = Duration::from_secs(10);

/// What a group has beside the cache.
#[derive(Debug, Default)]
pub struct Strays {
    /// When it was looked for last, and how much there was.
    probed: Option<(Instant, u64)>,
    /// The least since then.
    least: Option<u64>,
    most: u64,
}

impl Strays {
    /// There is so much now; whether it is time to look for who keeps it, which this takes for done.
    pub fn take_probe(&mut self, others: u64, now: Instant) -> bool {
        self.most = self.most.max(others);
        let least = self.least.map_or(others, |least| least.min(others));
        let from = match self.probed {
            Some((at, known)) if now.duration_since(at) < REST => known,
            _ => least,
        };
        let is_due = others > from.saturating_add(PROBE_STEP);
        self.least = Some(if is_due { others } else { least });
        if is_due {
            self.probed = Some((now, others));
        }
        is_due
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
            |mebibytes: u64, seconds| strays.take_probe(mebibytes << 20, start + Duration::from_secs(seconds));
        assert!(!is_due(5, 0) && !is_due(21, 0) && is_due(22, 0));
        assert!(!is_due(22, 1) && !is_due(5, 2) && !is_due(38, 3), "it has been seen a moment ago");
        assert!(is_due(39, 4) && is_due(56, 4));
        let rest = REST.as_secs();
        assert!(!is_due(5, 5) && !is_due(56, 6) && !is_due(56, 3 + rest), "no more than was seen");
        assert!(is_due(56, 4 + rest), "more than was there meanwhile");
        assert!(!is_due(56, 5 + rest) && !is_due(56, 5 + 3 * rest) && !is_due(40, 6 + 3 * rest));
        assert!(!is_due(56, 7 + 3 * rest) && is_due(57, 8 + 3 * rest));
    }

    #[test]
    fn it_has_fallen_when_less_is_left_than_there_was() {
        let (mut strays, now) = (Strays::default(), Instant::now());
        strays.note_kept(100 << 20);
        assert!(!strays.has_fallen(93 << 20) && strays.has_fallen(92 << 20));
        let _ = strays.take_probe(150 << 20, now);
        assert!(strays.has_fallen(142 << 20) && !strays.has_fallen(143 << 20));
    }
}
