//! Futex waits on words of shared memory. Every wait is bounded.

use crate::sync::AtomicU32;
use core::time::Duration;
use rustix::thread::futex;
use rustix::thread::futex::Timespec;

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Woken {
    /// woken, interrupted, or the word had changed already: look again
    LookAgain,
    /// the time was up
    TimedOut,
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs().min(i64::MAX as u64) as i64, tv_nsec: i64::from(time.subsec_nanos()) }
}

/// Sleeps while `word` holds `expected`, at most `limit`.
pub fn wait(word: &AtomicU32, expected: u32, limit: Duration) -> Woken {
    // Empty flags: the futex is shared between processes.
    match futex::wait(word, futex::Flags::empty(), expected, Some(&timespec(limit))) {
        Err(rustix::io::Errno::TIMEDOUT) => Woken::TimedOut,
        _ => Woken::LookAgain,
    }
}

/// Wakes one sleeper of `word`.
pub fn wake_one(word: &AtomicU32) {
    wake(word, 1);
}

/// Wakes all sleepers of `word`.
pub fn wake_all(word: &AtomicU32) {
    // The kernel takes the number as signed, and -1 for one.
    wake(word, i32::MAX as u32);
}

fn wake(word: &AtomicU32, count: u32) {
    // It can only fail for an address that is not mapped, and then nobody sleeps there.
    let _ = futex::wake(word, futex::Flags::empty(), count);
}

/// Most words one thread can sleep on at once (the kernel's FUTEX_WAITV_MAX).
#[cfg(feature = "std")]
pub const WORDS_MAX: usize = 128;

/// Sleeps while each word holds its expected value, at most `limit`. At most [`WORDS_MAX`] words; the rest are not
/// slept on.
#[cfg(feature = "std")]
pub fn wait_any(words: &[(&AtomicU32, u32)], limit: Duration) -> Woken {
    let [(word, expected)] = words else { return wait_several(words, limit) };
    wait(word, *expected, limit)
}

#[cfg(feature = "std")]
fn wait_several(words: &[(&AtomicU32, u32)], limit: Duration) -> Woken {
    use rustix::time::{ClockId, clock_gettime};
    let mut waits = [futex::Wait::new(); WORDS_MAX];
    let count = words.len().min(WORDS_MAX);
    if count == 0 {
        std::thread::sleep(limit);
        return Woken::TimedOut;
    }
    for (wait, (word, expected)) in waits.iter_mut().zip(words) {
        wait.val = u64::from(*expected);
        wait.uaddr = futex::WaitPtr::new(std::ptr::from_ref(*word).cast_mut().cast());
        wait.flags = futex::WaitFlags::SIZE_U32;
    }
    let now = clock_gettime(ClockId::Monotonic);
    let until = Duration::new(now.tv_sec as u64, now.tv_nsec as u32) + limit;
    match futex::waitv(&waits[..count], futex::WaitvFlags::empty(), Some(&timespec(until)), ClockId::Monotonic) {
        Err(rustix::io::Errno::TIMEDOUT) => Woken::TimedOut,
        _ => Woken::LookAgain,
    }
}

#[cfg(all(test, feature = "std", not(loom)))]
mod tests {
    use super::*;
    use crate::sync::Ordering;
    use std::time::Instant;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn one_or_all_sleepers_are_woken_on_one_word_or_several() {
        let (first, second) = (AtomicU32::new(0), AtomicU32::new(0));
        let asleep = AtomicU32::new(0);
        let start = Instant::now();
        std::thread::scope(|scope| {
            for n in 0..4 {
                let (words, asleep) = ([(&first, 0), (&second, 0)], &asleep);
                scope.spawn(move || {
                    asleep.fetch_add(1, Ordering::SeqCst);
                    let woken = if n % 2 == 0 { wait_any(&words, LONG) } else { wait(words[1].0, 0, LONG) };
                    assert_eq!(woken, Woken::LookAgain);
                    asleep.fetch_sub(1, Ordering::SeqCst);
                });
            }
            let count = |wanted| {
                while asleep.load(Ordering::SeqCst) != wanted {
                    std::thread::sleep(Duration::from_millis(1));
                }
                std::thread::sleep(Duration::from_millis(50));
                asleep.load(Ordering::SeqCst)
            };
            assert_eq!(count(4), 4);
            wake_one(&second);
            assert_eq!(count(3), 3);
            wake_all(&second);
        });
        assert!(start.elapsed() < LONG);
    }

    #[test]
    fn waits_are_bounded_and_do_not_begin_on_another_value() {
        let word = AtomicU32::new(7);
        let short = Duration::from_millis(5);
        assert_eq!(wait(&word, 7, short), Woken::TimedOut);
        assert_eq!(wait(&word, 8, LONG), Woken::LookAgain);
        assert_eq!(wait_any(&[(&word, 7), (&word, 7)], short), Woken::TimedOut);
        assert_eq!(wait_any(&[(&word, 7), (&word, 8)], LONG), Woken::LookAgain);
    }
}
