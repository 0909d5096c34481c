//! Bounce buffers: aligned memory for direct I/O of callers whose buffers are unaligned. Their number is bounded, they are
//! reused, and nobody waits for one.

use crate::budget::{Budget, Permit};
use crate::descriptors::lock;
use poolfs_libservice::PageBuffer;
use std::sync::{Arc, Mutex};

/// Bytes of one buffer.
pub(crate) const BOUNCE_BYTES: usize = 256 << 10;

/// Most buffers at a time; who finds none uses buffered I/O.
const BUFFERS_MAX: usize = 16;

#[derive(Debug)]
pub(crate) struct Bounce {
    budget: Arc<Budget>,
    idle: Mutex<Vec<PageBuffer>>,
}

/// A borrowed buffer.
pub(crate) struct Borrowed<'a> {
    pool: &'a Bounce,
    memory: PageBuffer,
    _permit: Permit,
}

impl Bounce {
    pub(crate) fn new() -> Self {
        Self { budget: Budget::new(BUFFERS_MAX), idle: Mutex::default() }
    }

    /// A buffer, unless all are in use.
    pub(crate) fn borrow(&self) -> Option<Borrowed<'_>> {
        let permit = self.budget.take()?;
        let memory = lock(&self.idle).pop().unwrap_or_else(|| PageBuffer::zeroed(BOUNCE_BYTES));
        Some(Borrowed { pool: self, memory, _permit: permit })
    }
}

impl Borrowed<'_> {
    /// The aligned bytes.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        lock(&self.pool.idle).push(std::mem::take(&mut self.memory));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_bounded_and_come_back() {
        let pool = Bounce::new();
        let mut all: Vec<_> = std::iter::from_fn(|| pool.borrow()).collect();
        assert_eq!(all.len(), BUFFERS_MAX);
        for buffer in &mut all {
            assert_eq!(buffer.bytes().as_ptr().align_offset(4096), 0);
            assert_eq!(buffer.bytes().len(), BOUNCE_BYTES);
        }
        drop(all);
        assert_eq!(lock(&pool.idle).len(), BUFFERS_MAX);
        assert!(pool.borrow().is_some());
    }
}
