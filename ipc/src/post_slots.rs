//! The slots of posted writes in a session's memory.

use crate::area::{POSTS_LENGTH, word};
use crate::memory::Mapping;
use crate::posts::{POST_SLOTS, SlotWords};

const SLOT_BYTES: usize = 64;
const _: () = assert!(POST_SLOTS * SLOT_BYTES <= POSTS_LENGTH);

/// The words of a session's slots, on the last page of its buffers' memory.
#[derive(Clone, Copy)]
pub struct PostSlots<'a>(&'a Mapping);

impl<'a> PostSlots<'a> {
    /// Those of a mapping of a session's buffers.
    #[must_use]
    pub fn new(buffers: &'a Mapping) -> Self {
        Self(buffers)
    }

    /// Where they are.
    #[must_use]
    pub fn range(&self) -> (usize, usize) {
        (self.0.base().as_ptr().addr() + self.0.length() - POSTS_LENGTH, POSTS_LENGTH)
    }

    /// A slot. Panics for one that does not exist.
    #[must_use]
    pub fn slot(&self, slot: usize) -> SlotWords<'a> {
        assert!(slot < POST_SLOTS);
        let start = self.0.length() - POSTS_LENGTH + slot * SLOT_BYTES;
        SlotWords::new(word(self.0, start), word(self.0, start + 4), word(self.0, start + 8))
    }

    /// The bits of every slot.
    pub fn posted(self) -> impl Iterator<Item = u64> {
        (0..POST_SLOTS).map(move |slot| self.slot(slot).posted())
    }
}
