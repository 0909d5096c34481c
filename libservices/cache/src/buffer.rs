//! Bounce buffers, aligned so that the layer below can use them for direct I/O, and reused.

use crate::sync::lock;
use poolfs_types::limits::BLOCK_SIZE;
use std::ops::{Deref, DerefMut};
use std::sync::Mutex;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Most buffers kept for the next user.
const KEPT_MAX: usize = 8;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Block([u8; BLOCK_SIZE]);

/// Whole blocks of memory with arbitrary content, given back to their store when dropped.
pub(crate) struct Buffer<'a> {
    store: &'a BufferStore,
    blocks: Vec<Block>,
    count: usize,
}

impl Deref for Buffer<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.blocks[..self.count].as_bytes()
    }
}

impl DerefMut for Buffer<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.blocks[..self.count].as_mut_bytes()
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
    kept: Mutex<Vec<Vec<Block>>>,
}

impl BufferStore {
    /// A buffer of `count` blocks. Its content is whatever an earlier user left.
    pub(crate) fn take(&self, count: usize) -> Buffer<'_> {
        let mut blocks = lock(&self.kept).pop().unwrap_or_default();
        if blocks.len() < count {
            blocks.resize(count, Block([0; BLOCK_SIZE]));
        }
        Buffer { store: self, blocks, count }
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
