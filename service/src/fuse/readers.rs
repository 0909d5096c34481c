//! The number of threads that read a mount's device: one more than have something to do, up to a limit and as far as the pool has
//! memory for them.
//!
//! The first stays as long as the mount. Each of the others ends when it has had nothing to do for a while, as long as somebody
//! is left to receive the next message.

use crate::sync::lock;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

/// The number of threads that there are is counted by these, that of those that have something to do by ones.
const STARTED: u64 = 1 << 32;

/// What came of it that one was to be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Added {
    /// somebody is there who reads, or comes
    Enough,
    /// there may be no more, and nobody reads
    Refused,
}

/// The threads that read a device.
pub(super) struct Readers {
    /// The place of the first.
    first: usize,
    max: AtomicUsize,
    /// How many there are, and how many have something to do: one number, so that none ends by what was true a moment ago.
    counts: AtomicU64,
    /// Held while one is added or ends.
    places: Mutex<Places>,
}

/// Where threads can be: each has a place of its own.
#[derive(Default)]
struct Places {
    /// Those before it are taken or free.
    next: usize,
    free: Vec<usize>,
}

fn started(counts: u64) -> u64 {
    counts / STARTED
}

fn busy(counts: u64) -> u64 {
    counts % STARTED
}

impl Readers {
    /// None, the first of which will have the place `first`.
    pub(super) fn new(first: usize) -> Self {
        Self { first, max: AtomicUsize::new(0), counts: AtomicU64::new(0), places: Mutex::default() }
    }

    /// There may be so many.
    pub(super) fn allow(&self, max: usize) {
        self.max.store(max, Ordering::SeqCst);
    }

    /// The place of the first.
    pub(super) fn first(&self) -> usize {
        self.first
    }

    /// Whether there are no more of them than `lost`.
    pub(super) fn are_all(&self, lost: usize) -> bool {
        started(self.counts.load(Ordering::SeqCst)) <= lost as u64
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        lock(&self.places)
    }

    /// Whether nobody is left who would receive the next message, and there may be one more.
    fn lacks(&self, counts: u64) -> bool {
        busy(counts) >= started(counts) && started(counts) < self.max.load(Ordering::SeqCst) as u64
    }

    /// One of them has got something to do; whether nobody is left who would receive the next message, and somebody should be added.
    pub(super) fn begin(&self) -> bool {
        let counts = self.counts.fetch_add(1, Ordering::SeqCst) + 1;
        self.lacks(counts)
    }

    /// One of them is done with it.
    pub(super) fn end(&self) {
        self.counts.fetch_sub(1, Ordering::SeqCst);
    }

    /// Has `start` start one with the place it is given, if one is needed and there may be one more. Every one but the first needs what `permit`
    /// gives, as long as it runs.
    ///
    /// # Errors
    /// Those of `start`.
    pub(super) fn add<P>(
        &self,
        permit: impl FnOnce() -> Option<P>,
        start: impl FnOnce(usize, Option<P>) -> io::Result<()>,
    ) -> io::Result<Added> {
        let mut places = self.places();
        let counts = self.counts.load(Ordering::SeqCst);
        if !self.lacks(counts) {
            return Ok(Added::Enough);
        }
        let permit = match started(counts) {
            0 => None,
            _ => match permit() {
                Some(permit) => Some(permit),
                None => return Ok(Added::Refused),
            },
        };
        let place = places.free.pop().unwrap_or(places.next);
        // Counted before it runs: it may be busy at once.
        self.counts.fetch_add(STARTED, Ordering::SeqCst);
        match start(self.first + place, permit) {
            Ok(()) => places.next = places.next.max(place + 1),
            Err(error) => {
                self.counts.fetch_sub(STARTED, Ordering::SeqCst);
                if place < places.next {
                    places.free.push(place);
                }
                return Err(error);
            }
        }
        Ok(Added::Enough)
    }

    /// Whether the one in `place`, which has nothing to do, is to end: then it is counted no more, and its place may be another's.
    pub(super) fn retire(&self, place: usize) -> bool {
        if place == self.first {
            return false;
        }
        let mut places = self.places();
        // It is one of those that have nothing to do; another one must be left.
        let left = |counts: u64| (started(counts) >= busy(counts) + 2).then(|| counts - STARTED);
        let is_retired = self.counts.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left).is_ok();
        if is_retired {
            places.free.push(place - self.first);
        }
        is_retired
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    fn permitted() -> Option<()> {
        Some(())
    }

    #[test]
    fn one_is_added_when_all_have_something_to_do_and_never_more_than_there_may_be() {
        let readers = Readers::new(5);
        readers.allow(2);
        let places = RefCell::new(Vec::new());
        let add = || {
            readers.add(permitted, |place, _| {
                places.borrow_mut().push(place);
                Ok(())
            })
        };
        add().expect("the first");
        add().expect("none is needed");
        assert_eq!(*places.borrow(), [5]);
        assert!(readers.begin());
        assert!(readers.add(permitted, |_, _| Err(io::ErrorKind::WouldBlock.into())).is_err());
        readers.end();
        assert!(readers.begin(), "it was not added");
        add().expect("the second");
        assert_eq!(*places.borrow(), [5, 6]);
        assert!(!readers.begin(), "there are no more than two");
        add().expect("none");
        readers.end();
        readers.end();
        assert_eq!(*places.borrow(), [5, 6]);
    }

    #[test]
    fn the_first_needs_no_permit_and_each_other_one() {
        let readers = Readers::new(0);
        readers.allow(6);
        let none = || None::<()>;
        let first = readers.add(none, |place, permit| {
            assert_eq!((place, permit), (0, None));
            Ok(())
        });
        assert_eq!(first.expect("started"), Added::Enough);
        assert_eq!(readers.add(none, |_, _| panic!("it reads")).expect("nothing"), Added::Enough);
        assert!(readers.begin());
        assert_eq!(readers.add(none, |_, _| panic!("no permit")).expect("nothing"), Added::Refused);
        let second = readers.add(permitted, |place, permit| {
            assert_eq!((place, permit), (1, Some(())));
            Ok(())
        });
        assert_eq!(second.expect("started"), Added::Enough);
    }

    #[test]
    fn whoever_has_nothing_to_do_ends_unless_nobody_else_would_read() {
        let readers = Readers::new(3);
        readers.allow(3);
        let added = RefCell::new(Vec::new());
        let add = || {
            readers.add(permitted, |place, _| {
                added.borrow_mut().push(place);
                Ok(())
            })
        };
        for _ in 0..3 {
            add().expect("started");
            readers.begin();
        }
        assert_eq!(*added.borrow(), [3, 4, 5]);
        readers.end();
        assert!(!readers.retire(4), "it is the only one that reads");
        readers.end();
        assert!(!readers.retire(3), "the first stays");
        assert!(readers.retire(4));
        assert!(!readers.retire(5), "now it is the only one beside the busy first");
        assert!(readers.begin(), "all have something to do, and there may be another one");
        add().expect("started");
        assert_eq!(*added.borrow(), [3, 4, 5, 4], "the place is used again");
        readers.end();
        readers.end();
        assert!(readers.retire(4) && readers.retire(5));
        assert!(readers.begin());
        assert!(readers.add(permitted, |_, _| Err(io::ErrorKind::WouldBlock.into())).is_err());
        add().expect("started");
        assert!(matches!(*added.borrow().last().expect("some"), 4 | 5));
    }

    #[test]
    fn however_threads_come_and_go_somebody_reads_and_no_place_is_used_twice() {
        const MAX: usize = 4;
        const ROUNDS: usize = 20_000;
        let readers = Readers::new(0);
        readers.allow(MAX);
        let is_used: [AtomicBool; MAX] = Default::default();
        let claim = |place: usize, _: Option<()>| {
            assert!(!is_used[place].swap(true, Ordering::SeqCst), "{place} is taken");
            Ok(())
        };
        readers.add(permitted, claim).expect("the first");
        // Each stands for the threads of a mount in turn: one begins something, ends it, and perhaps itself.
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for round in 0..ROUNDS {
                        if readers.begin() {
                            readers.add(permitted, claim).expect("started");
                        }
                        readers.end();
                        let place = 1 + round % (MAX - 1);
                        // Only one who runs can end.
                        if is_used[place].swap(false, Ordering::SeqCst) && !readers.retire(place) {
                            is_used[place].store(true, Ordering::SeqCst);
                        }
                    }
                });
            }
        });
        let left = is_used.iter().filter(|is_used| is_used.load(Ordering::SeqCst)).count();
        let counts = readers.counts.load(Ordering::SeqCst);
        assert_eq!((started(counts), busy(counts)), (left as u64, 0));
        assert!(left >= 1);
    }
}
