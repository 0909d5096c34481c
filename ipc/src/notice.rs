//! Notices (seqlocks): a few words that one side writes and another copies without a lock, whole or not at all.
//!
//! The sequence number of a notice is odd while its content is valid, and even otherwise. The writer takes a notice back before
//! the fact that it states changes, so that a reader that begins after the change does not find the old state.
//!
//! The content was found out without a lock and may have changed since. Whether it may be published is recorded beside the
//! notice, in an [`Edition`], under a lock of the writer's.

use crate::sync::{AtomicU64, Ordering, fence};

/// A notice of so many words.
#[derive(Clone, Copy)]
pub struct Notice<'a, const WORDS: usize> {
    sequence: &'a AtomicU64,
    words: &'a [AtomicU64; WORDS],
}

impl<'a, const WORDS: usize> Notice<'a, WORDS> {
    /// The notice in these words. All zeros: it says nothing.
    #[must_use]
    pub const fn new(sequence: &'a AtomicU64, words: &'a [AtomicU64; WORDS]) -> Self {
        Self { sequence, words }
    }

    /// What it says, if it says anything. [`fence`]d: what is looked at next is no older.
    #[inline]
    #[must_use]
    pub fn read(&self) -> Option<[u64; WORDS]> {
        let before = self.sequence.load(Ordering::Acquire);
        if before & 1 == 0 {
            return None;
        }
        let words = self.words.each_ref().map(|word| word.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (self.sequence.load(Ordering::Relaxed) == before).then_some(words)
    }

    /// Says something from now on. One writer at a time.
    pub fn publish(&self, words: [u64; WORDS]) {
        self.retract();
        let before = self.sequence.load(Ordering::Relaxed);
        for (word, new) in self.words.iter().zip(words) {
            word.store(new, Ordering::Relaxed);
        }
        self.sequence.store(before.wrapping_add(1), Ordering::Release);
    }

    /// Says nothing any more to who reads from now on. One writer at a time.
    pub fn retract(&self) {
        let before = self.sequence.load(Ordering::Relaxed);
        if before & 1 == 1 {
            self.sequence.store(before.wrapping_add(1), Ordering::Relaxed);
            fence(Ordering::SeqCst);
        }
    }
}

/// What tells whether something has changed since it was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version(u64);

/// The changes of what a notice says.
#[derive(Debug, Default)]
pub struct Edition {
    /// Under way.
    changing: u32,
    /// Done so far.
    changes: u64,
}

impl Edition {
    /// It is about to change: the notice is to be taken back now.
    pub fn begin_change(&mut self) {
        self.changing += 1;
    }

    /// It has changed, or has not after all.
    pub fn end_change(&mut self) {
        self.changing = self.changing.saturating_sub(1);
        self.changed();
    }

    /// It has changed, and nobody had said that it would: the notice is to be taken back now.
    pub fn changed(&mut self) {
        self.changes = self.changes.wrapping_add(1);
    }

    /// Before it is looked at, to be published; nothing while it changes.
    #[must_use]
    pub fn version(&self) -> Option<Version> {
        (self.changing == 0).then_some(Version(self.changes))
    }

    /// Whether what was found after `version` was asked for may be published.
    #[must_use]
    pub fn still_is(&self, version: Version) -> bool {
        self.version() == Some(version)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_notice_says_what_was_published_until_it_is_taken_back() {
        let (sequence, words) = (AtomicU64::new(0), [const { AtomicU64::new(0) }; 2]);
        let notice = Notice::new(&sequence, &words);
        assert_eq!(notice.read(), None, "zeros say nothing");
        notice.retract();
        assert_eq!(sequence.load(Ordering::Relaxed), 0);
        notice.publish([1, 2]);
        assert_eq!(notice.read(), Some([1, 2]));
        notice.publish([3, 4]);
        assert_eq!(notice.read(), Some([3, 4]));
        notice.retract();
        notice.retract();
        assert_eq!((notice.read(), sequence.load(Ordering::Relaxed)), (None, 4));
    }

    #[test]
    fn nothing_is_published_that_may_have_changed_since() {
        let mut edition = Edition::default();
        let seen = edition.version().expect("nobody changes it");
        assert!(edition.still_is(seen));
        edition.begin_change();
        edition.begin_change();
        assert!(!edition.still_is(seen) && edition.version().is_none());
        edition.end_change();
        assert!(edition.version().is_none(), "the other change is under way");
        edition.end_change();
        assert!(!edition.still_is(seen));
        let seen = edition.version().expect("nobody changes it");
        edition.changed();
        assert!(!edition.still_is(seen));
    }
}
