//! Which of the program's pages can be used, asked of the kernel and remembered until its coarse clock moves on: for some
//! milliseconds at most, or the few calls more that a path may be looked at by a [late](crate::turns) time.
//!
//! A program that unmaps or protects memory by libc's functions has everything forgotten first. What libc itself gives back
//! meanwhile (the memory of a large `free`) nobody may pass to it any more.

use crate::raw::{self, PAGE};
use core::sync::atomic::{AtomicU64, Ordering};

/// Pages remembered, each at its place.
const PLACES: usize = 64;

/// Nanoseconds of one tick, as a power of two: no more than the clock moves on at a time.
const TICK_SHIFT: u32 = 20;

/// Bits of an entry that say when; the page's number is above them.
const TIME_BITS: u32 = 28;
const TIME_MASK: u64 = (1 << TIME_BITS) - 1;

struct Pages([AtomicU64; PLACES]);

static READABLE: Pages = Pages([const { AtomicU64::new(0) }; PLACES]);
static WRITABLE: Pages = Pages([const { AtomicU64::new(0) }; PLACES]);

/// Whether every page of a range can be read.
pub fn are_readable(address: usize, length: usize) -> bool {
    let now = raw::coarse_time_ns();
    READABLE.have(address, length, now) || have_asked(address, length, now)
}

/// Whether the page with one byte can be read, at a time by [`raw::coarse_time_ns`].
#[inline]
pub fn is_readable_at(address: usize, now: u64) -> bool {
    is_known_readable_at(address, now) || have_asked(address, 1, now)
}

/// The same; false also when the kernel would have to be asked.
#[inline]
pub fn is_known_readable_at(address: usize, now: u64) -> bool {
    READABLE.has((address / PAGE) as u64, tick(now))
}

#[cold]
fn have_asked(address: usize, length: usize, now: u64) -> bool {
    raw::is_readable(address, length) && READABLE.note(address, length, now)
}

/// Whether every page of a range can be written.
pub fn are_writable(address: usize, length: usize) -> bool {
    let now = raw::coarse_time_ns();
    WRITABLE.have(address, length, now) || (raw::is_writable(address, length) && WRITABLE.note(address, length, now))
}

/// To be called before memory is unmapped or protected.
pub fn forget() {
    for entry in READABLE.0.iter().chain(&WRITABLE.0) {
        entry.store(0, Ordering::Relaxed);
    }
}

fn tick(now: u64) -> u64 {
    now >> TICK_SHIFT & TIME_MASK
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

    fn have(&self, address: usize, length: usize, now: u64) -> bool {
        let now = tick(now);
        numbers(address, length).all(|number| self.has(number, now))
    }

    fn note(&self, address: usize, length: usize, now: u64) -> bool {
        let now = tick(now);
        for number in numbers(address, length) {
            self.place(number).store(number << TIME_BITS | now, Ordering::Relaxed);
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
        let now = raw::coarse_time_ns();
        assert!(!pages.have(address, 2, now));
        assert!(pages.note(address, 2, now));
        assert!(pages.have(address, 2, now) && pages.have(6 * PAGE, 2 * PAGE, now));
        assert!(!pages.have(address, PAGE + 2, now) && !pages.have(address + PLACES * PAGE, 2, now));
        let later = now + (1 << TICK_SHIFT);
        assert!(!pages.have(address, 2, later), "remembered for too long");
    }
}
