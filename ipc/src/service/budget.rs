//! The budget of the memory that the service pays for its clients' sessions.
//!
//! A page of a memory file is charged to the process that touches it first: if the service writes into a buffer whose pages the
//! client never touched, they are charged to the service. Each page of a session counts once, however often the client gives it
//! back to the kernel: it can exist only once.

use crate::area::DATA_BYTES;
use crate::memory::PAGE;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

const _: () = assert!(DATA_BYTES / PAGE <= u32::BITS as usize);

/// What may be paid for, by whoever shares it.
pub trait SessionMemory: fmt::Debug + Send + Sync {
    /// Takes `pages`, if so many are to be had.
    fn take(&self, pages: usize) -> bool;

    /// Gives `pages` back.
    fn give(&self, pages: usize);
}

/// Pages that may still be paid for, by all sessions together.
#[derive(Debug)]
pub struct MemoryBudget(AtomicUsize);

impl MemoryBudget {
    /// A budget of so many bytes, in whole pages.
    #[must_use]
    pub const fn new(bytes: usize) -> Self {
        Self(AtomicUsize::new(bytes / PAGE))
    }
}

impl SessionMemory for MemoryBudget {
    fn take(&self, pages: usize) -> bool {
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(pages)).is_ok()
    }

    fn give(&self, pages: usize) {
        self.0.fetch_add(pages, Ordering::Relaxed);
    }
}

/// The pages of one data area that were paid for.
#[derive(Debug, Default)]
pub(super) struct Paid(AtomicU32);

impl Paid {
    /// Pays for the pages of `length` bytes at `offset`, which lie within the data area; whether the budget allows it.
    pub(super) fn pay(&self, budget: &dyn SessionMemory, offset: usize, length: usize) -> bool {
        if length == 0 {
            return true;
        }
        let (first, last) = (offset / PAGE, (offset + length - 1) / PAGE);
        let wanted = (u32::MAX >> (u32::BITS as usize - 1 - (last - first))) << first;
        let paid = self.0.load(Ordering::Relaxed);
        if paid & wanted == wanted {
            return true;
        }
        let due = (wanted & !paid).count_ones() as usize;
        if !budget.take(due) {
            return false;
        }
        // Only who has acquired the buffer pays, but what an earlier one paid may not be seen yet.
        let before = self.0.fetch_or(wanted, Ordering::Relaxed);
        budget.give(due - (wanted & !before).count_ones() as usize);
        true
    }

    /// How many they are.
    pub(super) fn pages(&self) -> usize {
        self.0.load(Ordering::Relaxed).count_ones() as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_paid_for_once() {
        let budget = MemoryBudget::new(5 * PAGE + 1);
        let paid = Paid::default();
        assert!(paid.pay(&budget, 0, 0) && paid.pages() == 0);
        assert!(paid.pay(&budget, PAGE - 1, 2) && paid.pages() == 2);
        assert!(paid.pay(&budget, 0, 3 * PAGE) && paid.pages() == 3);
        assert!(paid.pay(&budget, DATA_BYTES - 1, 1) && paid.pages() == 4);
        assert!(!paid.pay(&budget, 0, DATA_BYTES) && paid.pages() == 4);
        assert!(paid.pay(&budget, 4 * PAGE, PAGE) && !paid.pay(&budget, 5 * PAGE, 1));
        budget.give(DATA_BYTES / PAGE);
        assert!(paid.pay(&budget, 0, DATA_BYTES) && paid.pages() == DATA_BYTES / PAGE);
        assert_eq!(budget.0.load(Ordering::Relaxed), 5);
    }
}
