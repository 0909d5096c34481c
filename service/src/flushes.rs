//! The flushes of an instance before its end: how far the one that goes on has come, and what of those before nobody has heard yet.

use crate::stack::Stack;
use crate::sync::lock;
use poolfs_libservice::{Error, Result};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often whoever waits looks whether to go on with that.
pub(crate) const LOOK: Duration = Duration::from_millis(100);

/// For how long a branch takes nothing of what it is given that does not answer any more.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// The same once all was given to it, and it brings that to its disk: then nothing is seen of how far it has come.
const SYNC_MAX: Duration = Duration::from_secs(60);

/// What becomes of something that brings what was written to the branches of a stack. What others write meanwhile does not count for ever: as much as there was at the
/// beginning, and then as much as there was left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    /// Bytes that the branches have taken so far, ever.
    taken: u64,
    /// When they have taken so many, all may have been given to them that there was at the beginning.
    due: u64,
    /// Others may have had a part of it: as much once more.
    is_extended: bool,
    is_given: bool,
    /// What waited above the branches, and was brought to them. It is found only on the way.
    settled: u64,
    /// The last time that something became of it.
    since: Instant,
}

impl Standing {
    pub fn begin(stack: &Stack) -> Self {
        let (taken, left) = (stack.taken_bytes(), stack.pending_bytes());
        let due = taken.wrapping_add(left);
        let settled = stack.settled();
        Self { taken, due, is_extended: false, is_given: left == 0, settled, since: Instant::now() }
    }

    /// All was given to the branches, just now.
    pub fn given() -> Self {
        Self { taken: 0, due: 0, is_extended: true, is_given: true, settled: 0, since: Instant::now() }
    }

    /// How it is now.
    pub fn look(&mut self, stack: &Stack) {
        self.see(stack.taken_bytes(), stack.pending_bytes(), stack.settled());
    }

    fn see(&mut self, taken: u64, left: u64, settled: u64) {
        let was_given = self.is_given;
        // It wraps around.
        if !was_given && self.due.wrapping_sub(taken).cast_signed() <= 0 {
            self.is_given = self.is_extended;
            (self.due, self.is_extended) = (taken.wrapping_add(left), true);
        }
        self.is_given |= left == 0;
        if settled != self.settled || !was_given && (self.is_given || taken != self.taken) {
            (self.taken, self.settled, self.since) = (taken, settled, Instant::now());
        }
    }

    /// Whether the branches do not answer any more, as far as one can tell.
    pub fn is_stuck(&self) -> bool {
        self.since.elapsed() >= if self.is_given { SYNC_MAX } else { SILENCE_MAX }
    }

    /// The same for who loses what nobody has given up: he waits longer.
    pub fn is_lost(&self) -> bool {
        self.since.elapsed() >= SYNC_MAX
    }
}

/// Flushes of an instance, of which one at a time goes on.
#[derive(Default)]
pub(crate) struct Flushes {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
pub(crate) struct State {
    pub begun: u64,
    pub ended: u64,
    /// The last that failed.
    failed: Option<Failed>,
    /// How the one that goes on stands.
    pub standing: Option<Standing>,
    /// The instance has ended: there is nothing to flush any more.
    pub is_closed: bool,
}

/// A flush that failed. A branch may say so only once, and nothing of it to the flush after it: it is not forgotten before all have heard it who have waited
/// for it, and at least one.
struct Failed {
    number: u64,
    error: Error,
    is_heard: bool,
}

impl Flushes {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Waits until a flush has ended, or it is time to look whether to go on waiting.
    pub fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.ended.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0
    }

    pub fn end(&self, outcome: Result<()>) {
        let mut state = self.lock();
        state.ended += 1;
        if let Err(error) = outcome {
            state.failed = Some(Failed { number: state.ended, error, is_heard: false });
        }
        state.standing = None;
        self.ended.notify_all();
    }
}

impl State {
    /// What to say to whoever has come before the flush of this number ended.
    pub fn outcome(&mut self, first: u64) -> Result<()> {
        match &mut self.failed {
            Some(failed) if failed.number >= first || !failed.is_heard => {
                failed.is_heard = true;
                Err(failed.error.clone())
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_libservice::types::Errno;

    /// As it was so many seconds ago, with 5 bytes taken and `left` to be given.
    fn ago(seconds: u64, left: u64) -> Standing {
        let since = Instant::now() - Duration::from_secs(seconds);
        Standing { taken: 5, due: 5 + left, is_given: left == 0, since, ..Standing::given() }
    }

    fn seen(mut standing: Standing, taken: u64, left: u64) -> Standing {
        standing.see(taken, left, 0);
        standing
    }

    #[test]
    fn a_branch_answers_as_long_as_it_takes_something_or_has_time_for_its_disk() {
        assert!(!ago(1, 9).is_stuck() && ago(10, 9).is_stuck());
        assert!(!ago(10, 0).is_stuck() && ago(60, 0).is_stuck());
        assert!(!ago(10, 9).is_lost() && ago(60, 9).is_lost());
        assert!(seen(ago(10, 9), 5, 9).is_stuck());
        assert!(seen(ago(10, 9), 5, 8).is_stuck(), "what is taken back was not taken by it");
        assert!(!seen(ago(10, 9), 6, 9).is_stuck(), "it takes what it is given");
        assert!(!seen(ago(60, 9), 5, 0).is_stuck(), "now it syncs");
    }

    #[test]
    fn what_a_flush_finds_on_its_way_lengthens_it() {
        for left in [0, 9] {
            let mut standing = ago(60, left);
            standing.see(5, left, 1);
            assert!(!standing.is_stuck() && !standing.is_lost());
            standing.since -= SYNC_MAX;
            standing.see(5, left, 1);
            assert!(standing.is_stuck());
        }
    }

    #[test]
    fn what_others_go_on_writing_lengthens_nothing_for_ever() {
        let mut standing = Standing { is_extended: false, ..ago(10, 9) };
        standing.see(14, 100, 0);
        assert!(!standing.is_given && !standing.is_stuck(), "they may have had a part of it");
        standing.see(114, 50, 0);
        assert!(standing.is_given && !standing.is_stuck());
        standing.since -= SYNC_MAX;
        for (taken, left) in [(115, 99), (200, 0), (200, 7)] {
            standing.see(taken, left, 0);
            assert!(standing.is_stuck() && standing.is_lost());
        }
        let standing = seen(Standing { taken: u64::MAX, due: 9, ..ago(10, 9) }, 3, 6);
        assert!(!standing.is_given && !standing.is_stuck());
    }

    fn told(flushes: &Flushes, outcome: Result<()>) {
        flushes.lock().begun += 1;
        flushes.end(outcome);
    }

    #[test]
    fn a_failure_is_told_to_all_who_waited_for_it_and_to_nobody_who_came_later() {
        let flushes = Flushes::default();
        for outcome in [Ok(()), Err(Error::new(Errno::EIO, "told once")), Ok(())] {
            told(&flushes, outcome);
        }
        let mut state = flushes.lock();
        assert!(state.outcome(1).is_err() && state.outcome(2).is_err() && state.outcome(3).is_ok());
        assert_eq!((state.begun, state.ended), (3, 3));
    }

    #[test]
    fn a_failure_that_nobody_waited_for_is_told_to_the_next_and_only_to_him() {
        let flushes = Flushes::default();
        told(&flushes, Err(Error::new(Errno::EIO, "told once")));
        told(&flushes, Ok(()));
        let mut state = flushes.lock();
        assert!(state.outcome(3).is_err());
        assert!(state.outcome(3).is_ok() && state.outcome(u64::MAX).is_ok());
    }
}
