//! Per-thread write time: when the content that the calling thread writes was written by its caller.
//!
//! A write whose caller has gone on (a posted write) is served a moment later. Its file must show the time of the write: a file
//! that others have made from it since must not look older than its source. The time is state of the thread, as
//! [`crate::Spending`] is.

use poolfs_types::Timestamp;
use std::cell::Cell;
use std::marker::PhantomData;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// So long ago a write may have been made at most: whoever says when cannot hide that a file has changed since.
const AGO_MAX: Duration = Duration::from_secs(1);

thread_local! {
    static MADE_AT: Cell<Option<Timestamp>> = const { Cell::new(None) };
}

/// As long as it is there, what the thread that made it writes was made then.
#[must_use]
pub struct WrittenAt {
    before: Option<Timestamp>,
    /// It belongs to its thread.
    _thread: PhantomData<*const ()>,
}

fn timestamp(since: Duration) -> Timestamp {
    Timestamp { seconds: since.as_secs().cast_signed(), nanoseconds: since.subsec_nanos() }
}

impl WrittenAt {
    /// At a time that somebody says, who may be wrong.
    pub fn at(time: Timestamp) -> Self {
        Self { before: MADE_AT.replace(Some(time)), _thread: PhantomData }
    }

    /// Whether the calling thread writes for somebody who has gone on. Others wait for it, so that it waits for what was accepted before only where that would have no room
    /// otherwise.
    #[must_use]
    pub fn is_said() -> bool {
        MADE_AT.get().is_some()
    }

    /// What time it is, or was when what the calling thread writes was made: a second ago at most, and not later than it is.
    #[must_use]
    pub fn now() -> Timestamp {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let least = timestamp(now.saturating_sub(AGO_MAX));
        let now = timestamp(now);
        MADE_AT.get().map_or(now, |made| made.clamp(least, now))
    }
}

impl Drop for WrittenAt {
    fn drop(&mut self) {
        MADE_AT.set(self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_was_made_when_somebody_says_unless_that_is_long_ago_or_to_come() {
        let before = WrittenAt::now();
        let said = |seconds: i64| {
            let _at = WrittenAt::at(Timestamp { seconds: before.seconds + seconds, ..before });
            WrittenAt::now()
        };
        assert_eq!(said(0), before);
        let (early, late) = (said(-3600), said(3600));
        let after = WrittenAt::now();
        assert!(early < after && early.seconds >= before.seconds - 1);
        assert!(late >= before && late <= after);
        assert!(WrittenAt::now() >= after, "nobody says anything any more");
    }
}
