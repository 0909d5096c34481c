//! Whether every call of this process goes to the kernel.

use core::sync::atomic::{AtomicU32, Ordering};

/// Not in the wiped state: a child of a process that is off is off.
static VERDICT: AtomicU32 = AtomicU32::new(NONE);

const NONE: u32 = 0;
const OFF: u32 = 1;
const ON: u32 = 2;

/// From now on every call goes to the kernel, in this process and its children.
pub fn switch_off() {
    VERDICT.store(OFF, Ordering::SeqCst);
}

/// Whether the library is used. Before [`settle`] it is not.
#[inline]
pub fn is_on() -> bool {
    VERDICT.load(Ordering::Relaxed) == ON
}

/// Notes whether this program may use the library, as `may_be_used` finds it the first time; whether it is used.
pub fn settle(may_be_used: impl FnOnce() -> bool) -> bool {
    if VERDICT.load(Ordering::Relaxed) == NONE {
        let verdict = if may_be_used() { ON } else { OFF };
        // Somebody may have switched it off meanwhile.
        VERDICT.compare_exchange(NONE, verdict, Ordering::AcqRel, Ordering::Acquire).ok();
    }
    is_on()
}
