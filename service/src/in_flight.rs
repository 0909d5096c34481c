//! Calls that have not returned yet: which ones, and since when. This is how `poolfs status` finds requests that wait, and branches that do
//! not respond, without asking either.

use poolfs_service_protocol::WaitStatus;
use rustix::time::{ClockId, clock_gettime};
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Calls that are watched at the same time. Further ones are made without being watched.
const SLOTS: usize = 128;

/// A call that takes longer than this is reported as waiting.
const WAITING_MIN: Duration = Duration::from_secs(1);

const CODE_BITS: u32 = 8;

/// 0 while it is free, else the time at which the call began, in milliseconds, and its code in the lowest bits. Each on a line of the
/// processor's cache of its own: threads take different ones.
#[derive(Default)]
#[repr(align(64))]
struct Slot(AtomicU64);

/// The calls that are in flight at one place.
pub(crate) struct InFlight(Box<[Slot]>);

/// A call in flight, until this is dropped.
pub(crate) struct Call<'a>(Option<&'a Slot>);

/// Calls that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    /// How many there are.
    pub calls: u64,
    /// For how long the longest of them has waited.
    pub longest: Duration,
    /// That one's code.
    pub code: u8,
}

impl Waiting {
    /// As `status` reports it, with the name of the longest call.
    pub fn status(self, operation: &str) -> WaitStatus {
        let longest_ms = u64::try_from(self.longest.as_millis()).unwrap_or(u64::MAX);
        WaitStatus { calls: self.calls, longest_ms, operation: operation.to_owned() }
    }
}

impl Default for InFlight {
    fn default() -> Self {
        Self((0..SLOTS).map(|_| Slot::default()).collect())
    }
}

impl InFlight {
    /// A call begins, which is told from others by `code`.
    #[inline]
    pub fn begin(&self, code: u8) -> Call<'_> {
        self.begin_at(now_ms(), code)
    }

    fn begin_at(&self, now_ms: u64, code: u8) -> Call<'_> {
        let word = now_ms << CODE_BITS | u64::from(code);
        let first = preferred_slot();
        let free = (0..SLOTS).map(|next| &self.0[(first + next) % SLOTS]).find(|slot| {
            slot.0.load(Ordering::Relaxed) == 0
                && slot.0.compare_exchange(0, word, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        });
        Call(free)
    }

    /// The calls that have been in flight for more than a second; nothing without one.
    pub fn waiting(&self) -> Option<Waiting> {
        self.waiting_at(now_ms())
    }

    fn waiting_at(&self, now_ms: u64) -> Option<Waiting> {
        let words = self.0.iter().map(|slot| slot.0.load(Ordering::Relaxed)).filter(|&word| word != 0);
        let ages = words.map(|word| {
            let age = Duration::from_millis(now_ms.saturating_sub(word >> CODE_BITS));
            (age, word as u8)
        });
        ages.filter(|(age, _)| *age > WAITING_MIN).fold(None, |found, (age, code)| {
            let Waiting { calls, longest, code: other } = found.unwrap_or(Waiting { calls: 0, longest: age, code });
            let (longest, code) = if age > longest { (age, code) } else { (longest, other) };
            Some(Waiting { calls: calls + 1, longest, code })
        })
    }
}

impl Drop for Call<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            slot.0.store(0, Ordering::Relaxed);
        }
    }
}

/// Never 0. Some milliseconds coarse, which is enough to tell seconds, and several times cheaper than the exact clock.
#[inline]
pub(crate) fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    (now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000).max(1)
}

/// Where a thread begins to look for a free slot, so that threads do not meet.
#[inline]
fn preferred_slot() -> usize {
    thread_local! {
        static SLOT: usize = std::hash::RandomState::new().build_hasher().finish() as usize % SLOTS;
    }
    SLOT.with(|slot| *slot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_calls_that_take_long_are_reported_the_longest_by_name() {
        let calls = InFlight::default();
        let first = calls.begin_at(1000, 7);
        let second = calls.begin_at(500, 9);
        assert_eq!(calls.waiting_at(1500), None);
        let waiting = |calls, ms, code| Some(Waiting { calls, longest: Duration::from_millis(ms), code });
        assert_eq!(calls.waiting_at(1600), waiting(1, 1100, 9));
        assert_eq!(calls.waiting_at(9000), waiting(2, 8500, 9));
        drop(second);
        assert_eq!(calls.waiting_at(9000), waiting(1, 8000, 7));
        drop(first);
        assert_eq!(calls.waiting_at(9000), None);
    }

    #[test]
    fn more_calls_than_slots_are_made_unwatched() {
        let calls = InFlight::default();
        let all: Vec<_> = (0..SLOTS + 5).map(|_| calls.begin_at(1, 1)).collect();
        assert_eq!(calls.waiting_at(5000).map(|waiting| waiting.calls), Some(SLOTS as u64));
        drop(all);
        assert_eq!(calls.waiting_at(5000), None);
        assert!(calls.begin(1).0.is_some() && calls.waiting().is_none());
    }
}
