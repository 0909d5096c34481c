//! The final flush of an instance: one at a time, on a thread of its own.
//!
//! All that end the instance join the same flush, and leave it when nobody waits for them any more. It may take long, or never
//! end: whoever waits is told how long no progress has been made.

use crate::flushes::Standing;
use crate::instance::Instance;
use poolfs_libservice::types::Errno;
use poolfs_libservice::{Error, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use tracing::error;

/// Brings all to the disk that an instance has accepted before this call; nothing when `goes_on`, which is asked again and again, has said that it is not to be
/// waited for any longer. The flush goes on then.
pub(crate) fn flush(instance: &Arc<Instance>, mut goes_on: impl FnMut(&Standing) -> bool) -> Option<Result<()>> {
    let flushes = &instance.flushes;
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
        state = flushes.wait(state);
    }
    Some(state.outcome(first))
}

/// An instance was taken away: nobody flushes it from here on, so that what it stands on is free when it has ended. Whether no flush goes on any more, unless its
/// branches do not answer.
pub(crate) fn close(instance: &Instance) -> bool {
    let flushes = &instance.flushes;
    let mut state = flushes.lock();
    state.is_closed = true;
    while state.begun != state.ended {
        if let Some(standing) = &mut state.standing {
            standing.look(&instance.stack);
            if standing.is_stuck() {
                return false;
            }
        }
        state = flushes.wait(state);
    }
    true
}

/// The number of the next flush that ends.
pub(crate) fn next(instance: &Instance) -> u64 {
    instance.flushes.lock().ended + 1
}

/// What flushes have said since the one with the number `first`, and what nobody has heard of those before it, or of any.
///
/// # Errors
/// What was wrong with them.
pub(crate) fn said_since(instance: &Instance, first: Option<u64>) -> Result<()> {
    instance.flushes.lock().outcome(first.unwrap_or(u64::MAX))
}

/// It is there all the same.
pub(crate) fn reopen(instance: &Instance) {
    instance.flushes.lock().is_closed = false;
}

fn carry_out(instance: Arc<Instance>) {
    let flushes = Arc::clone(&instance.flushes);
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
