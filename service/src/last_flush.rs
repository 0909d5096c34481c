//! The flush before the end of an instance: one at a time, on a thread of its own, which all join who end it, and leave when nobody waits for them any more. It may
//! take long, and never end: whoever waits is told how long nothing has become of it.

use crate::instance::Instance;
use crate::stack::Stack;
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

/// What becomes of something that brings what was written to the branches of a stack.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    /// Bytes that the branches have taken so far, ever.
    taken: u64,
    /// Since when it has been so many.
    since: Instant,
    /// Bytes that they have not been given yet.
    left: u64,
}

impl Standing {
    pub fn begin(stack: &Stack) -> Self {
        Self { taken: stack.taken_bytes(), since: Instant::now(), left: stack.pending_bytes() }
    }

    /// How it is now.
    pub fn look(&mut self, stack: &Stack) {
        self.see(stack.taken_bytes(), stack.pending_bytes());
    }

    fn see(&mut self, taken: u64, left: u64) {
        // With the last of it another limit begins.
        if taken != self.taken || (left == 0) != (self.left == 0) {
            *self = Self { taken, since: Instant::now(), left };
        }
    }

    /// Whether the branches do not answer any more, as far as one can tell.
    pub fn is_stuck(&self) -> bool {
        self.since.elapsed() >= if self.left > 0 { SILENCE_MAX } else { SYNC_MAX }
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
    /// The last that failed, and why. What a branch says only once is not forgotten before all have heard it who have waited for it.
    failed: Option<(u64, Error)>,
    /// How the one that goes on stands.
    standing: Option<Standing>,
    /// The instance has ended: there is nothing to flush any more.
    is_closed: bool,
}

impl LastFlush {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, outcome: Result<()>) {
        let mut state = self.lock();
        state.ended += 1;
        if let Err(error) = outcome {
            state.failed = Some((state.ended, error));
        }
        state.standing = None;
        self.ended.notify_all();
    }
}

impl State {
    /// What to say to whoever needed the flush of this number, or a later one.
    fn outcome(&self, needed: u64) -> Result<()> {
        self.failed.as_ref().filter(|(number, _)| *number >= needed).map_or(Ok(()), |(_, error)| Err(error.clone()))
    }
}

/// Brings all to the disk that an instance has accepted before this call; nothing when `goes_on`, which is asked again and again, has said that it is not to be
/// waited for any longer. The flush goes on then.
pub(crate) fn flush(instance: &Arc<Instance>, mut goes_on: impl FnMut(&Standing) -> bool) -> Option<Result<()>> {
    let flushes = &instance.last_flush;
    let mut state = flushes.lock();
    // One that goes on may have passed over what was accepted just now.
    let needed = state.begun + 1;
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
    Some(state.outcome(needed))
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

/// It is there all the same.
pub(crate) fn reopen(instance: &Instance) {
    instance.last_flush.lock().is_closed = false;
}

fn carry_out(instance: Arc<Instance>) {
    let flushes = Arc::clone(&instance.last_flush);
    let outcome = catch_unwind(AssertUnwindSafe(|| instance.layer().sync()))
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

    fn ago(taken: u64, seconds: u64, left: u64) -> Standing {
        Standing { taken, since: Instant::now() - Duration::from_secs(seconds), left }
    }

    #[test]
    fn a_branch_answers_as_long_as_it_takes_something_or_has_time_for_its_disk() {
        assert!(!ago(5, 1, 9).is_stuck() && ago(5, 10, 9).is_stuck());
        assert!(!ago(5, 10, 0).is_stuck() && ago(5, 60, 0).is_stuck());
        assert!(!ago(5, 10, 9).is_lost() && ago(5, 60, 9).is_lost());
        let seen = |mut standing: Standing, taken, left| {
            standing.see(taken, left);
            standing
        };
        assert!(seen(ago(5, 10, 9), 5, 9).is_stuck());
        assert!(seen(ago(5, 10, 9), 5, 8).is_stuck(), "what is taken back was not taken by it");
        assert!(!seen(ago(5, 10, 9), 6, 9).is_stuck(), "others go on writing");
        assert!(!seen(ago(5, 60, 9), 5, 0).is_stuck(), "now it syncs");
        assert!(!seen(ago(5, 60, 0), 5, 9).is_stuck(), "and is given more");
        assert!(seen(ago(5, 60, 0), 5, 0).is_stuck());
    }

    #[test]
    fn a_failure_is_told_to_all_who_waited_for_it_and_to_nobody_who_came_later() {
        let flushes = LastFlush::default();
        let failure = || Error::new(Errno::EIO, "told once");
        for outcome in [Ok(()), Err(failure()), Ok(())] {
            flushes.lock().begun += 1;
            flushes.end(outcome);
        }
        let state = flushes.lock();
        assert!(state.outcome(1).is_err() && state.outcome(2).is_err() && state.outcome(3).is_ok());
        assert_eq!((state.begun, state.ended), (3, 3));
    }
}
