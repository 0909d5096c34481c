//! Bounce buffers, aligned so that the layer below can use them for direct I/O, and reused.

use crate::sync::lock;
use poolfs_libservice::PageBuffer;
use poolfs_types::limits::BLOCK_SIZE;
use std::ops::{Deref, DerefMut};
use std::sync::Mutex;

/// Most buffers kept for the next user.
const KEPT_MAX: usize = 8;

/// Whole blocks of memory with arbitrary content, given back to their store when dropped.
pub(crate) struct Buffer<'a> {
    store: &'a BufferStore,
    blocks: PageBuffer,
}

impl Deref for Buffer<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.blocks
    }
}

impl DerefMut for Buffer<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.blocks
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        let mut kept = lock(&self.store.kept);
        if kept.len() < KEPT_MAX {
            kept.push(std::mem::take(&mut self.blocks));
        }
    }
}

#[derive(Default)]
pub(crate) struct BufferStore {
    kept: Mutex<Vec<PageBuffer>>,
}

impl BufferStore {
    /// A buffer of `count` blocks. Its content is whatever an earlier user left.
    pub(crate) fn take(&self, count: usize) -> Buffer<'_> {
        let mut blocks = lock(&self.kept).pop().unwrap_or_default();
        blocks.set_length(count * BLOCK_SIZE);
        Buffer { store: self, blocks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_as_long_as_asked() {
        let store = BufferStore::default();
        for count in [1, 7, 3, 256] {
            let buffer = store.take(count);
            assert_eq!(buffer.len(), count * BLOCK_SIZE);
            assert_eq!(buffer.as_ptr().addr() % BLOCK_SIZE, 0);
        }
        assert_eq!(lock(&store.kept).len(), 1);
    }
}
