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
    /// What became of the last that has ended.
    outcome: Option<Result<()>>,
    /// How the one that goes on stands.
    standing: Option<Standing>,
}

impl LastFlush {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, outcome: Result<()>) {
        let mut state = self.lock();
        state.ended += 1;
        state.outcome = Some(outcome);
        state.standing = None;
        self.ended.notify_all();
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
            state.begun += 1;
            state.standing = Some(Standing::begin(&instance.stack));
            let flushing = Arc::clone(instance);
            let spawned = thread::Builder::new().name("last-flush".into()).spawn(move || carry_out(flushing));
            if let Err(cause) = spawned {
                drop(state);
                error!(instance = instance.name(), %cause, "no thread for a flush");
                carry_out(Arc::clone(instance));
                state = flushes.lock();
                continue;
            }
        }
        if let Some(standing) = &mut state.standing {
            standing.look(&instance.stack);
            if !goes_on(standing) {
                return None;
            }
        }
        state = flushes.ended.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
    }
    state.outcome.clone()
}

fn carry_out(instance: Arc<Instance>) {
    let flushes = Arc::clone(&instance.last_flush);
    let outcome = catch_unwind(AssertUnwindSafe(|| instance.layer().sync()));
    // Whoever hears of it may count on its branches being free when he has let go of it.
    drop(instance);
    flushes.end(outcome.unwrap_or_else(|_| Err(Error::new(Errno::EIO, "the flush has failed"))));
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
}
