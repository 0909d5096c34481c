//! Changes whose callers have been told that they failed because the mount's time limit was over, and which may take effect nevertheless.
//!
//! Such a change would undo a later one if it came after it: a program that has seen its write fail writes again, and finds the first write in
//! the file in the end. So no change begins while another one may have been given up by its caller.
//!
//! Callers of the library count their time from when they have asked, which the service only knows by what they say. So a change that has waited
//! for half of its time is not begun, and one that is begun can be given up after half of its time at the earliest. From then on others wait
//! for it. They fail, without having been begun, when half of their own time is over, and a moment after it is certain that the other was given up.
//! Nobody fails for what another client says.

use crate::in_flight::now_ms;
use crate::sync::lock;
use poolfs_libservice::types::Errno;
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How long a change waits for another one that was given up: the branch may have answered just now.
const GRACE_MS: u64 = 1000;

/// How often it is looked how old the others are.
const PAUSE: Duration = Duration::from_millis(20);

/// The changes of a mount that are being served.
pub(crate) struct InDoubt {
    timeout_ms: u64,
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    next: u64,
    /// When they were begun, by [`now_ms`].
    begun: BTreeMap<u64, u64>,
}

/// A change that is being served, until this is dropped.
pub(crate) struct Change<'a> {
    of: &'a InDoubt,
    number: u64,
}

impl InDoubt {
    /// Those of a mount with this time limit.
    pub fn new(timeout: Duration) -> Self {
        Self { timeout_ms: timeout.as_millis() as u64, state: Mutex::default(), ended: Condvar::new() }
    }

    /// A change begins that was asked for then, by the milliseconds of the monotonic clock: as its caller says, who is not believed that it was
    /// later than now.
    ///
    /// # Errors
    /// `EIO` when it has waited too long, or another one is in doubt: it must not be made then.
    pub fn begin(&self, asked_ms: Option<u64>) -> Result<Change<'_>, Errno> {
        self.begin_by(asked_ms, &now_ms)
    }

    fn begin_by(&self, asked_ms: Option<u64>, now_ms: &dyn Fn() -> u64) -> Result<Change<'_>, Errno> {
        let came = now_ms();
        let asked = asked_ms.map_or(came, |asked| asked.min(came));
        // Clocks are some milliseconds coarse.
        let doubtful_after = self.timeout_ms / 2 - self.timeout_ms / 16;
        let mut state = lock(&self.state);
        loop {
            let now = now_ms();
            if now - asked >= self.timeout_ms / 2 {
                return Err(Errno::EIO);
            }
            let age = state.begun.values().map(|&begun| now.saturating_sub(begun)).max().unwrap_or(0);
            if age < doubtful_after {
                let number = state.next;
                state.next += 1;
                state.begun.insert(number, now);
                return Ok(Change { of: self, number });
            }
            if age >= self.timeout_ms && now - came >= GRACE_MS.min(self.timeout_ms / 4) {
                return Err(Errno::EIO);
            }
            state = self.ended.wait_timeout(state, PAUSE).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        lock(&self.of.state).begun.remove(&self.number);
        self.of.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;

    /// Those of a mount with a limit of eight seconds.
    fn changes() -> InDoubt {
        InDoubt::new(Duration::from_secs(8))
    }

    #[test]
    fn a_change_that_has_waited_for_half_of_its_time_is_not_begun() {
        let changes = changes();
        let begin = |asked, now: u64| changes.begin_by(asked, &|| now);
        drop(begin(Some(10_001), 14_000).expect("it may be given up in four seconds"));
        assert!(begin(Some(10_000), 14_000).is_err());
        drop(begin(Some(u64::MAX), 14_000).expect("it is as old as it can be at least"));
        let first = begin(Some(10_000), 13_999).expect("nothing is in doubt");
        drop(begin(None, 13_999 + 3_499).expect("however old it says it is, it is not given up yet"));
        drop(first);
    }

    /// A clock that goes on by 100 ms each time that somebody looks.
    fn steps(from: u64) -> impl Fn() -> u64 {
        let clock = AtomicU64::new(from);
        move || clock.fetch_add(100, Ordering::SeqCst)
    }

    #[test]
    fn nothing_is_begun_while_a_change_is_in_doubt() {
        let changes = changes();
        let first = changes.begin_by(None, &|| 10_000).expect("nothing is in doubt");
        assert!(
            changes.begin_by(None, &steps(13_500)).is_err(),
            "the first ends in vain for half of the second's time"
        );
        let fails_at = AtomicU64::new(0);
        let clock = steps(18_000);
        let noted = || {
            let now = clock();
            fails_at.store(now, Ordering::SeqCst);
            now
        };
        assert!(changes.begin_by(None, &noted).is_err());
        assert!(fails_at.load(Ordering::SeqCst) <= 19_200, "a moment after it was given up");
        drop(first);
        drop(changes.begin_by(None, &|| 20_000).expect("it has ended"));
    }

    #[test]
    fn whoever_waits_comes_after_the_change_in_doubt() {
        let changes = changes();
        let clock = AtomicU64::new(10_000);
        let now = || clock.load(Ordering::SeqCst);
        let doubtful = changes.begin_by(None, &now).expect("nothing is in doubt");
        clock.store(14_000, Ordering::SeqCst);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| drop(changes.begin_by(None, &now).expect("the other has ended")));
            thread::yield_now();
            assert!(!waiting.is_finished());
            drop(doubtful);
        });
    }
}
