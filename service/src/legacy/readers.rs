//! How many threads read the device of a mount: one more than have something to do, up to a number.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// The threads that read a device.
pub(super) struct Readers {
    /// The place of the first.
    first: usize,
    max: AtomicUsize,
    started: AtomicUsize,
    busy: AtomicUsize,
    /// Held while one is added.
    adding: Mutex<()>,
}

impl Readers {
    /// None, the first of which will have the place `first`.
    pub(super) fn new(first: usize) -> Self {
        Self {
            first,
            max: AtomicUsize::new(0),
            started: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            adding: Mutex::new(()),
        }
    }

    /// There may be so many.
    pub(super) fn allow(&self, max: usize) {
        self.max.store(max, Ordering::SeqCst);
    }

    /// One of them has got something to do; whether nobody is left who would receive the next message, and somebody should be added.
    pub(super) fn begin(&self) -> bool {
        let busy = self.busy.fetch_add(1, Ordering::SeqCst) + 1;
        let started = self.started.load(Ordering::SeqCst);
        busy >= started && started < self.max.load(Ordering::SeqCst)
    }

    /// One of them is done with it.
    pub(super) fn end(&self) {
        self.busy.fetch_sub(1, Ordering::SeqCst);
    }

    /// Has `start` start one with the place it is given, if one is needed and there may be one more.
    ///
    /// # Errors
    /// Those of `start`.
    pub(super) fn add(&self, start: impl FnOnce(usize) -> io::Result<()>) -> io::Result<()> {
        let _adding = self.adding.lock().unwrap_or_else(PoisonError::into_inner);
        let started = self.started.load(Ordering::SeqCst);
        if started >= self.max.load(Ordering::SeqCst) || self.busy.load(Ordering::SeqCst) < started {
            return Ok(());
        }
        // Counted before it runs: it may be busy at once.
        self.started.store(started + 1, Ordering::SeqCst);
        start(self.first + started).inspect_err(|_| self.started.store(started, Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn one_is_added_when_all_have_something_to_do_and_never_more_than_there_may_be() {
        let readers = Readers::new(5);
        readers.allow(2);
        let places = RefCell::new(Vec::new());
        let add = || {
            readers.add(|place| {
                places.borrow_mut().push(place);
                Ok(())
            })
        };
        add().expect("the first");
        add().expect("none is needed");
        assert_eq!(*places.borrow(), [5]);
        assert!(readers.begin());
        assert!(readers.add(|_| Err(io::ErrorKind::WouldBlock.into())).is_err());
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
}
