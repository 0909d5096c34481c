//! The final flush of an instance: one at a time, on a thread of its own.
//!
//! All that end the instance join the same flush, and leave it when nobody waits for them any more. It may take long, or never
//! end: whoever waits is told how long no progress has been made.

use crate::instance::Instance;
use crate::stack::Stack;
use crate::sync::lock;
use poolfs_libservice::types::Errno;
use poolfs_libservice::{Error, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tracing::error;

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
pub(crate) struct LastFlush {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    begun: u64,
    ended: u64,
    /// The last that failed.
    failed: Option<Failed>,
    /// How the one that goes on stands.
    standing: Option<Standing>,
    /// The instance has ended: there is nothing to flush any more.
    is_closed: bool,
}

/// A flush that failed. A branch may say so only once, and nothing of it to the flush after it: it is not forgotten before all have heard it who have waited
/// for it, and at least one.
struct Failed {
    number: u64,
    error: Error,
    is_heard: bool,
}

impl LastFlush {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn end(&self, outcome: Result<()>) {
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
    fn outcome(&mut self, first: u64) -> Result<()> {
        match &mut self.failed {
            Some(failed) if failed.number >= first || !failed.is_heard => {
                failed.is_heard = true;
                Err(failed.error.clone())
            }
            _ => Ok(()),
        }
    }
}

/// Brings all to the disk that an instance has accepted before this call; nothing when `goes_on`, which is asked again and again, has said that it is not to be
/// waited for any longer. The flush goes on then.
pub(crate) fn flush(instance: &Arc<Instance>, mut goes_on: impl FnMut(&Standing) -> bool) -> Option<Result<()>> {
    let flushes = &instance.last_flush;
    let mut state = flushes.lock();
    // One that goes on may have passed over what was accepted just now.
    let (first, needed) = (state.ended + 1, state.begun + 1);
    while state.ended < needed {
        if state.begun == state.ended {
            let standing = Standing::begin(&instance.stack);
            if !goes_on(&standing) {
                return None;
            }
            if state.is_closed {
                break;
            }
            state.begun += 1;
            state.standing = Some(standing);
            let flushing = Arc::clone(instance);
            let spawned = thread::Builder::new().name("last-flush".into()).spawn(move || carry_out(flushing));
            if let Err(cause) = spawned {
                drop(state);
                error!(instance = instance.name(), %cause, "no thread for a flush");
                carry_out(Arc::clone(instance));
                state = flushes.lock();
                continue;
            }
        } else if let Some(standing) = &mut state.standing {
            standing.look(&instance.stack);
            if !goes_on(standing) {
                return None;
            }
        }
        state = flushes.ended.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
    }
    Some(state.outcome(first))
}

/// An instance was taken away: nobody flushes it from here on, so that what it stands on is free when it has ended. Whether no flush goes on any more, unless its
/// branches do not answer.
pub(crate) fn close(instance: &Instance) -> bool {
    let flushes = &instance.last_flush;
    let mut state = flushes.lock();
    state.is_closed = true;
    while state.begun != state.ended {
        if let Some(standing) = &mut state.standing {
            standing.look(&instance.stack);
            if standing.is_stuck() {
                return false;
            }
        }
        state = flushes.ended.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
    }
    true
}

/// The number of the next flush that ends.
pub(crate) fn next(instance: &Instance) -> u64 {
    instance.last_flush.lock().ended + 1
}

/// What flushes have said since the one with the number `first`, and what nobody has heard of those before it, or of any.
///
/// # Errors
/// What was wrong with them.
pub(crate) fn said_since(instance: &Instance, first: Option<u64>) -> Result<()> {
    instance.last_flush.lock().outcome(first.unwrap_or(u64::MAX))
}

/// It is there all the same.
pub(crate) fn reopen(instance: &Instance) {
    instance.last_flush.lock().is_closed = false;
}

fn carry_out(instance: Arc<Instance>) {
    let flushes = Arc::clone(&instance.last_flush);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        instance.settle_all_posts(None);
        instance.layer().sync()
    }))
    .unwrap_or_else(|_| Err(Error::new(Errno::EIO, "the flush has failed")));
    if let Err(error) = &outcome {
        // Somebody may wait for it, or not.
        error!(instance = instance.name(), %error, "a flush before the end has failed");
    }
    // Whoever hears of it may count on its branches being free when he has let go of it.
    drop(instance);
    flushes.end(outcome);
}

#[cfg(test)]
mod tests {
    use super::*;

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

    fn told(flushes: &LastFlush, outcome: Result<()>) {
        flushes.lock().begun += 1;
        flushes.end(outcome);
    }

    #[test]
    fn a_failure_is_told_to_all_who_waited_for_it_and_to_nobody_who_came_later() {
        let flushes = LastFlush::default();
        for outcome in [Ok(()), Err(Error::new(Errno::EIO, "told once")), Ok(())] {
            told(&flushes, outcome);
        }
        let mut state = flushes.lock();
        assert!(state.outcome(1).is_err() && state.outcome(2).is_err() && state.outcome(3).is_ok());
        assert_eq!((state.begun, state.ended), (3, 3));
    }

    #[test]
    fn a_failure_that_nobody_waited_for_is_told_to_the_next_and_only_to_him() {
        let flushes = LastFlush::default();
        told(&flushes, Err(Error::new(Errno::EIO, "told once")));
        told(&flushes, Ok(()));
        let mut state = flushes.lock();
        assert!(state.outcome(3).is_err());
        assert!(state.outcome(3).is_ok() && state.outcome(u64::MAX).is_ok());
    }
}
