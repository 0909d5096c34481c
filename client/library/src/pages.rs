//! A cache of the kernel's answers to which pages of the program can be read or written.
//!
//! An answer counts until a clock moves on: for some milliseconds at most, or the few calls more for which a path is looked at by a cached
//! time (`CachedClock`). Readable pages go by the kernel's coarse clock, by which paths are looked at; writable pages go by the processor's
//! counter, which costs fewer instructions.
//!
//! When a program unmaps or protects memory, or cuts a file, by libc's functions or by `syscall(2)`, everything is forgotten first
//! (docs/semantics.md, "Memory that cannot be used", lists what is not). Memory that libc itself gives back
//! meanwhile (that of a large `free`) must not be passed to libc any more.

use crate::raw::{self, PAGE};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Pages remembered, each at its place: those of a transfer of 4 MiB.
const PLACES: usize = 1024;

/// Nanoseconds of one tick, as a power of two: no more than the clock moves on at a time.
const TICK_SHIFT: u32 = 20;

/// Counts of the processor's counter in a nanosecond, about, as a power of two.
const COUNTS_SHIFT: u32 = 1;

/// Bits of an entry that say when; the page's number is above them.
const TIME_BITS: u32 = 28;

/// How often everything was forgotten.
static FORGOTTEN: AtomicU32 = AtomicU32::new(0);

struct Pages([AtomicU64; PLACES]);

static READABLE: Pages = Pages([const { AtomicU64::new(0) }; PLACES]);
static WRITABLE: Pages = Pages([const { AtomicU64::new(0) }; PLACES]);

/// Whether every page of a range can be read.
pub fn are_readable(address: usize, length: usize) -> bool {
    let tick = tick(raw::coarse_time_ns());
    READABLE.have(address, length, tick) || have_asked(address, length, tick)
}

/// Whether the page with one byte can be read, at a time by [`raw::coarse_time_ns`].
#[inline]
pub fn is_readable_at(address: usize, now: u64) -> bool {
    is_known_readable_at(address, now) || have_asked(address, 1, tick(now))
}

/// The same; false also when the kernel would have to be asked.
#[inline]
pub fn is_known_readable_at(address: usize, now: u64) -> bool {
    READABLE.has((address / PAGE) as u64, tick(now))
}

#[cold]
fn have_asked(address: usize, length: usize, tick: u64) -> bool {
    raw::is_readable(address, length) && READABLE.note(address, length, tick)
}

/// Whether every page of a range of at least one byte can be written.
#[inline]
pub fn are_writable(address: usize, length: usize) -> bool {
    let tick = tick(raw::counter() >> COUNTS_SHIFT);
    let (first, last) = ((address / PAGE) as u64, ((address + length - 1) / PAGE) as u64);
    let are_known = last - first <= 1 && WRITABLE.has(first, tick) && WRITABLE.has(last, tick);
    are_known || are_many_writable(address, length, tick)
}

#[inline(never)]
fn are_many_writable(address: usize, length: usize, tick: u64) -> bool {
    WRITABLE.have(address, length, tick) || (raw::is_writable(address, length) && WRITABLE.note(address, length, tick))
}

/// To be called before memory is unmapped or protected, or a file is cut that may be mapped.
pub fn forget() {
    FORGOTTEN.fetch_add(1, Ordering::Relaxed);
}

/// The time for which something is remembered: until the clock moves on, or everything is forgotten. What it is then is
/// another number, but for one in 2^28.
fn tick(now: u64) -> u64 {
    let forgotten = u64::from(FORGOTTEN.load(Ordering::Relaxed));
    // The constant is 2^64 divided by the golden ratio, which spreads consecutive numbers over the upper bits.
    (now >> TICK_SHIFT ^ forgotten << 32).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - TIME_BITS)
}

fn numbers(address: usize, length: usize) -> core::ops::Range<u64> {
    (address / PAGE) as u64..(address + length).div_ceil(PAGE) as u64
}

impl Pages {
    fn place(&self, number: u64) -> &AtomicU64 {
        &self.0[number as usize % PLACES]
    }

    /// Whether a page is remembered in this tick.
    #[inline]
    fn has(&self, number: u64, tick: u64) -> bool {
        self.place(number).load(Ordering::Relaxed) == number << TIME_BITS | tick
    }

    fn have(&self, address: usize, length: usize, tick: u64) -> bool {
        numbers(address, length).all(|number| self.has(number, tick))
    }

    fn note(&self, address: usize, length: usize, tick: u64) -> bool {
        for number in numbers(address, length) {
            self.place(number).store(number << TIME_BITS | tick, Ordering::Relaxed);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_remembered_until_they_are_forgotten() {
        let pages = Pages([const { AtomicU64::new(0) }; PLACES]);
        let address = 7 * PAGE - 1;
        let time = raw::coarse_time_ns();
        let now = tick(time);
        assert!(!pages.have(address, 2, now));
        assert!(pages.note(address, 2, now));
        assert!(pages.have(address, 2, now) && pages.have(6 * PAGE, 2 * PAGE, now));
        assert!(!pages.have(address, PAGE + 2, now) && !pages.have(address + PLACES * PAGE, 2, now));
        assert!(!pages.have(address, 2, tick(time + (1 << TICK_SHIFT))), "remembered for too long");
        forget();
        assert!(!pages.have(address, 2, tick(time)));
    }
}
