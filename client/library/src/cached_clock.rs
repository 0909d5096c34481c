//! A clock cached for 8 calls, for uses that tolerate a slightly late time.
//!
//! Reading the clock would be most of what a call on a foreign file pays for the library. Each of the clocks here serves the calls from
//! some pages of stack, so that threads seldom share one, and is read at every eighth call.

use crate::raw;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Calls from one look at the clock to the next.
const CALLS: u32 = 8;

const CLOCKS: usize = 64;

/// One line of the processor's cache, so that threads do not wait for each other.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct CachedClock {
    /// Calls before the next look.
    left: AtomicU32,
    now: AtomicU64,
}

static ALL: [CachedClock; CLOCKS] = [const { CachedClock { left: AtomicU32::new(0), now: AtomicU64::new(0) } }; CLOCKS];

impl CachedClock {
    /// That of the caller's place on the stack.
    #[inline(always)]
    #[must_use]
    pub fn here() -> &'static Self {
        let here = 0_u8;
        let page = core::ptr::from_ref(&here).addr() as u64 / raw::PAGE as u64;
        let index = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - CLOCKS.trailing_zeros());
        &ALL[index as usize % CLOCKS]
    }

    /// The time by [`raw::coarse_time_ns`] as it was some calls ago; nothing when it is time to look again.
    #[inline(always)]
    pub fn late_time_ns(&self) -> Option<u64> {
        // Whoever interrupts this, or shares the place, may have it look some calls earlier or later.
        let left = self.left.load(Ordering::Relaxed).checked_sub(1)?;
        self.left.store(left, Ordering::Relaxed);
        Some(self.now.load(Ordering::Relaxed))
    }

    /// The time now, which will be the late one.
    pub fn time_ns(&self) -> u64 {
        let now = raw::coarse_time_ns();
        self.now.store(now, Ordering::Relaxed);
        self.left.store(CALLS - 1, Ordering::Relaxed);
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_late_time_is_that_of_a_few_calls_ago() {
        let turn = CachedClock { left: AtomicU32::new(0), now: AtomicU64::new(0) };
        assert_eq!(turn.late_time_ns(), None);
        let now = turn.time_ns();
        for _ in 1..CALLS {
            assert_eq!(turn.late_time_ns(), Some(now));
        }
        assert_eq!([turn.late_time_ns(), turn.late_time_ns()], [None, None]);
        assert!(turn.time_ns() >= now);
        assert!(turn.late_time_ns().is_some());
    }
}
