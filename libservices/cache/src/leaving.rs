//! Files without a name that somebody still holds: their space is freed when the last holder releases them.
//!
//! The kernel reports that release after the call that caused it has returned: RELEASE after `close`, FORGET after `unlink`. So a
//! call that finds no space waits while such files exist.
//!
//! The wait is bounded, and a file that stays open without a name does not slow down every later write: after a wait without
//! success nobody waits again until another file loses its name, one is closed, or some time has passed.

use crate::sync::lock;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long nobody waits after a wait in vain. Not every end is announced: a mapping that outlives its descriptor is not.
const REST: Duration = Duration::from_secs(10);

#[derive(Default)]
struct State {
    /// files now
    files: usize,
    /// Counts those that are gone.
    gone: u64,
    /// Counts events after which one is expected to go soon.
    signs: u64,
    waiting: u32,
    /// When somebody last waited in vain, and the signs until then.
    vain: Option<(Instant, u64)>,
}

/// How many there are, and who waits for their end.
pub(crate) struct Leaving {
    /// The longest wait of one that waits alone. Of several each waits its part, so that threads are left to let files go.
    patience: Duration,
    rest: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

impl Leaving {
    /// Nobody waits longer than this.
    pub(crate) fn new(patience: Duration) -> Self {
        Self { patience, rest: REST, state: Mutex::default(), changed: Condvar::new() }
    }

    /// A file has lost its last name, or was made without one.
    pub(crate) fn enter(&self) {
        let mut state = lock(&self.state);
        state.files += 1;
        state.signs += 1;
    }

    /// One of them was closed by somebody.
    pub(crate) fn closed(&self) {
        lock(&self.state).signs += 1;
    }

    /// One of them has given back what it took, or has got a name.
    pub(crate) fn leave(&self) {
        let mut state = lock(&self.state);
        state.files = state.files.saturating_sub(1);
        state.gone += 1;
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until there is `enough`, which is asked again whenever a file has gone; whether there is. Called with nothing locked that
    /// is needed to let a file go.
    pub(crate) fn wait(&self, enough: &mut dyn FnMut() -> bool) -> bool {
        let mut state = lock(&self.state);
        let is_vain = state.vain.is_some_and(|(at, signs)| signs == state.signs && at.elapsed() < self.rest);
        if state.files == 0 || is_vain {
            drop(state);
            return enough();
        }
        state.waiting += 1;
        let deadline = Instant::now() + self.patience / state.waiting;
        let mut is_over = false;
        let is_enough = loop {
            let (seen, is_last) = (state.gone, state.files == 0 || is_over);
            drop(state);
            let is_enough = enough();
            state = lock(&self.state);
            if is_enough || is_last {
                break is_enough;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let nothing_new = |state: &mut State| state.gone == seen;
            let waited =
                self.changed.wait_timeout_while(state, left, nothing_new).unwrap_or_else(PoisonError::into_inner);
            state = waited.0;
            is_over = left.is_zero() || waited.1.timed_out();
        };
        state.waiting -= 1;
        if !is_enough && state.files > 0 {
            state.vain = Some((Instant::now(), state.signs));
        }
        is_enough
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Longer than any machine is busy.
    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn whoever_waits_goes_on_when_there_is_enough() {
        let (leaving, is_enough) = (Leaving::new(LONG), AtomicBool::new(false));
        leaving.enter();
        leaving.enter();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| leaving.wait(&mut || is_enough.load(Ordering::SeqCst)));
            leaving.leave();
            is_enough.store(true, Ordering::SeqCst);
            leaving.leave();
            assert!(waiter.join().expect("it ends"));
        });
    }

    #[test]
    fn nobody_waits_for_nothing_or_twice_in_vain() {
        let leaving = Leaving { rest: LONG, ..Leaving::new(Duration::from_millis(1)) };
        let asked = |leaving: &Leaving| {
            let mut count = 0;
            assert!(!leaving.wait(&mut || {
                count += 1;
                false
            }));
            count
        };
        assert_eq!(asked(&leaving), 1, "nothing can be waited for");
        leaving.enter();
        assert_eq!(asked(&leaving), 2, "before the wait and after it");
        assert_eq!(asked(&leaving), 1, "the file stays");
        leaving.closed();
        assert_eq!(asked(&leaving), 2, "it may be about to end");
    }
}
