//! A counting permit: a bounded number of units, here of bounce buffers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A bounded number of permits.
#[derive(Debug)]
pub(crate) struct Budget {
    used: AtomicUsize,
    max: usize,
}

/// One unit of a [`Budget`], given back when dropped.
#[derive(Debug)]
pub(crate) struct Permit(Arc<Budget>);

impl Budget {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { used: AtomicUsize::new(0), max })
    }

    /// One unit, if one is left.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Permit> {
        let taken = |used| (used < self.max).then_some(used + 1);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).ok()?;
        Some(Permit(Arc::clone(self)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gives_no_more_than_it_has_and_takes_back() {
        let budget = Budget::new(2);
        let first = budget.take().expect("first");
        let _second = budget.take().expect("second");
        assert!(budget.take().is_none());
        drop(first);
        assert!(budget.take().is_some());
    }
}
