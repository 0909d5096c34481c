//! A count of changes that sleeping threads must notice, although clients can write the word they sleep on.
//!
//! A thread that sleeps on a queue is woken through the queue's event count. Any client of the instance can turn that back just
//! while the thread goes to sleep, and then the thread has missed the change. So whoever changes something keeps waking until no
//! thread is asleep that began to sleep before.

use crate::sync::lock;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence};
use std::time::Duration;

/// Between two wake-ups of threads that may have missed the one before.
const PAUSE: Duration = Duration::from_micros(100);

/// The count, and who sleeps by which value of it.
#[derive(Default)]
pub(super) struct Changes {
    count: AtomicU32,
    /// Threads asleep by an even, and by an odd count. There are never sleepers by more than two of them.
    asleep: [AtomicUsize; 2],
    telling: Mutex<()>,
}

impl Changes {
    /// The word to sleep on.
    pub(super) fn word(&self) -> &AtomicU32 {
        &self.count
    }

    /// The count now.
    pub(super) fn seen(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    /// Runs `sleep`, which must not begin to sleep when the word no longer holds `seen`.
    pub(super) fn asleep(&self, seen: u32, sleep: impl FnOnce()) {
        let asleep = &self.asleep[seen as usize % 2];
        asleep.fetch_add(1, Ordering::Relaxed);
        // Counted before the word is looked at: the other half is in `tell`.
        fence(Ordering::SeqCst);
        sleep();
        asleep.fetch_sub(1, Ordering::Release);
    }

    /// Advances the count; `wake` wakes the sleepers, as often as it takes.
    pub(super) fn tell(&self, wake: impl Fn()) {
        let _one_at_a_time = lock(&self.telling);
        let before = self.count.fetch_add(1, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        loop {
            wake();
            if self.asleep[before as usize % 2].load(Ordering::Acquire) == 0 {
                return;
            }
            std::thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn who_misses_a_wake_up_is_woken_again() {
        let (changes, wakes, late) = (Changes::default(), AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                let (changes, wakes, late, seen) = (&changes, &wakes, &late, changes.seen());
                scope.spawn(move || {
                    changes.asleep(seen, || {
                        late.store(true, Ordering::Release);
                        // Deaf to the first two.
                        while wakes.load(Ordering::Relaxed) < 3 {
                            std::thread::yield_now();
                        }
                    });
                });
                while !late.swap(false, Ordering::Acquire) {
                    std::thread::yield_now();
                }
                changes.tell(|| {
                    wakes.fetch_add(1, Ordering::Relaxed);
                });
                assert!(wakes.swap(0, Ordering::Relaxed) >= 3);
            }
        });
        changes.tell(|| {
            wakes.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!((wakes.into_inner(), changes.seen()), (1, 4));
    }
}
