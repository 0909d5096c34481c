//! Contents of files and disks; versions share the blocks they have in common.

use std::sync::Arc;

/// Bytes of a block, the unit in which a union moves a lower file.
pub const BLOCK_BYTES: usize = 4096;

type Block = [u8; BLOCK_BYTES];

const ZEROS: &Block = &[0; BLOCK_BYTES];

/// What a file or a disk holds.
#[derive(Clone, Default)]
pub struct Content {
    size: usize,
    /// nothing is zeros, as is what is missing at the end
    blocks: Vec<Option<Arc<Block>>>,
}

impl Content {
    /// These bytes.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Self {
        let mut content = Self::default();
        content.truncate(bytes.len());
        for (number, block) in bytes.chunks(BLOCK_BYTES).enumerate() {
            if !ZEROS.starts_with(block) {
                content.write(number * BLOCK_BYTES, block);
            }
        }
        content
    }

    /// How many bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Some of its bytes, as far as there are any.
    #[must_use]
    pub fn read(&self, offset: usize, length: usize) -> Vec<u8> {
        let end = self.size.min(offset + length);
        let mut bytes = Vec::with_capacity(length);
        let mut at = offset;
        while at < end {
            let (number, within) = (at / BLOCK_BYTES, at % BLOCK_BYTES);
            let count = (BLOCK_BYTES - within).min(end - at);
            bytes.extend_from_slice(&self.block(number)[within..within + count]);
            at += count;
        }
        bytes
    }

    /// A block with the zeros behind the end of the file.
    #[must_use]
    pub fn block(&self, number: usize) -> &[u8; BLOCK_BYTES] {
        self.blocks.get(number).and_then(Option::as_deref).unwrap_or(ZEROS)
    }

    /// Writes bytes, beyond the end too.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.size = self.size.max(offset + bytes.len());
        self.change(offset, bytes.len(), |at, place| place.copy_from_slice(&bytes[at..at + place.len()]));
    }

    /// Makes a range zeros, as far as the file goes.
    pub fn punch(&mut self, offset: usize, length: usize) {
        let length = length.min(self.size.saturating_sub(offset));
        self.change(offset, length, |_, place| place.fill(0));
    }

    /// Cuts it or makes it longer.
    pub fn truncate(&mut self, size: usize) {
        let end = self.blocks.len() * BLOCK_BYTES;
        self.change(size, end.saturating_sub(size), |_, place| place.fill(0));
        self.blocks.truncate(size.div_ceil(BLOCK_BYTES));
        self.size = size;
    }

    /// Has the parts of a range changed, each with its place in the range.
    fn change(&mut self, offset: usize, length: usize, mut change: impl FnMut(usize, &mut [u8])) {
        let mut at = 0;
        while at < length {
            let (number, within) = ((offset + at) / BLOCK_BYTES, (offset + at) % BLOCK_BYTES);
            let count = (BLOCK_BYTES - within).min(length - at);
            if self.blocks.len() <= number {
                self.blocks.resize(number + 1, None);
            }
            let block = self.blocks[number].get_or_insert_with(|| Arc::new(*ZEROS));
            change(at, &mut Arc::make_mut(block)[within..within + count]);
            at += count;
        }
    }
}
