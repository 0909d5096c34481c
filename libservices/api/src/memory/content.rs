//! The content of one regular file as a sparse array of 4 KiB blocks: blocks that were never written are absent.

use poolfs_types::limits::{BLOCK_SHIFT, BLOCK_SIZE};
use std::collections::BTreeMap;
use std::ops::Range;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// A sparse file. Bytes at or beyond `size` in a present block are always zero.
#[derive(Debug, Default)]
pub(super) struct Content {
    size: u64,
    blocks: BTreeMap<u64, Box<[u8]>>,
}

/// The part of one block that a byte range covers.
struct Piece {
    block: u64,
    within: Range<usize>,
}

/// Cuts a byte range at block boundaries.
fn pieces(range: Range<u64>) -> impl Iterator<Item = Piece> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        if at >= range.end {
            return None;
        }
        let block = at >> BLOCK_SHIFT;
        let start = (at % BLOCK) as usize;
        let length = (BLOCK - at % BLOCK).min(range.end - at);
        at += length;
        Some(Piece { block, within: start..start + length as usize })
    })
}

fn new_block() -> Box<[u8]> {
    vec![0; BLOCK_SIZE].into_boxed_slice()
}

impl Content {
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// How many blocks are present.
    pub(super) fn allocated(&self) -> u64 {
        self.blocks.len() as u64
    }

    pub(super) fn read(&self, offset: u64, buffer: &mut [u8]) -> usize {
        let end = self.size.min(offset.saturating_add(buffer.len() as u64));
        let mut done = 0;
        for piece in pieces(offset..end) {
            let target = &mut buffer[done..done + piece.within.len()];
            done += target.len();
            match self.blocks.get(&piece.block) {
                Some(block) => target.copy_from_slice(&block[piece.within]),
                None => target.fill(0),
            }
        }
        done
    }

    /// Writes what fits when at most `room` blocks may be added; returns how many bytes that was.
    pub(super) fn write(&mut self, offset: u64, data: &[u8], mut room: u64) -> usize {
        let mut done = 0;
        for piece in pieces(offset..offset + data.len() as u64) {
            if !self.blocks.contains_key(&piece.block) {
                if room == 0 {
                    break;
                }
                room -= 1;
            }
            let block = self.blocks.entry(piece.block).or_insert_with(new_block);
            let source = &data[done..done + piece.within.len()];
            block[piece.within].copy_from_slice(source);
            done += source.len();
        }
        if done > 0 {
            self.size = self.size.max(offset + done as u64);
        }
        done
    }

    pub(super) fn truncate(&mut self, size: u64) {
        if size < self.size {
            self.zero_partial(size..self.size.min(size.next_multiple_of(BLOCK)));
        }
        self.blocks.split_off(&size.div_ceil(BLOCK));
        self.size = size;
    }

    /// Makes the range read as zeros, dropping the blocks that lie wholly within it.
    pub(super) fn punch(&mut self, range: Range<u64>) {
        let first_whole = range.start.div_ceil(BLOCK);
        let end_whole = range.end >> BLOCK_SHIFT;
        if first_whole > end_whole {
            return self.zero_partial(range);
        }
        self.zero_partial(range.start..first_whole * BLOCK);
        self.zero_partial(end_whole * BLOCK..range.end);
        let whole: Vec<u64> = self.blocks.range(first_whole..end_whole).map(|(&block, _)| block).collect();
        for block in whole {
            self.blocks.remove(&block);
        }
    }

    /// How many blocks [`Content::allocate`] of the range would add.
    pub(super) fn missing(&self, range: &Range<u64>) -> u64 {
        let blocks = range.start >> BLOCK_SHIFT..range.end.div_ceil(BLOCK);
        let present = self.blocks.range(blocks.clone()).count() as u64;
        blocks.end - blocks.start - present
    }

    /// Adds the absent blocks of the range; the size stays.
    pub(super) fn allocate(&mut self, range: &Range<u64>) {
        for block in range.start >> BLOCK_SHIFT..range.end.div_ceil(BLOCK) {
            self.blocks.entry(block).or_insert_with(new_block);
        }
    }

    /// Raises the size to at least `size`.
    pub(super) fn extend(&mut self, size: u64) {
        self.size = self.size.max(size);
    }

    /// The next byte of a present block at or after `offset`, below the size.
    pub(super) fn next_data(&self, offset: u64) -> Option<u64> {
        let (&block, _) = self.blocks.range(offset >> BLOCK_SHIFT..).next()?;
        Some(offset.max(block << BLOCK_SHIFT)).filter(|&at| at < self.size)
    }

    /// The next byte of an absent block at or after `offset`, at most the size.
    pub(super) fn next_hole(&self, offset: u64) -> u64 {
        let mut at = offset;
        while at < self.size && self.blocks.contains_key(&(at >> BLOCK_SHIFT)) {
            at = ((at >> BLOCK_SHIFT) + 1) << BLOCK_SHIFT;
        }
        at.min(self.size)
    }

    /// Zeroes the range in blocks that are present; for ranges that span no whole block, or few.
    fn zero_partial(&mut self, range: Range<u64>) {
        for piece in pieces(range) {
            if let Some(block) = self.blocks.get_mut(&piece.block) {
                block[piece.within].fill(0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(content: &Content) -> Vec<u8> {
        let mut buffer = vec![0xee; content.size() as usize];
        assert_eq!(content.read(0, &mut buffer), buffer.len());
        buffer
    }

    #[test]
    fn shrinking_and_growing_shows_zeros() {
        let mut content = Content::default();
        assert_eq!(content.write(0, &[7; 10_000], u64::MAX), 10_000);
        content.truncate(5000);
        content.truncate(9000);
        let expected: Vec<u8> = [vec![7; 5000], vec![0; 4000]].concat();
        assert_eq!(bytes(&content), expected);
        assert_eq!(content.allocated(), 2);
    }

    #[test]
    fn punching_drops_only_whole_blocks() {
        let mut content = Content::default();
        content.write(0, &[7; 4 * BLOCK_SIZE], u64::MAX);
        content.punch(100..200);
        content.punch(BLOCK + 1..3 * BLOCK + 5);
        assert_eq!(content.allocated(), 3);
        let data = bytes(&content);
        for (at, &byte) in data.iter().enumerate() {
            let zero = (100..200).contains(&at) || (BLOCK_SIZE + 1..3 * BLOCK_SIZE + 5).contains(&at);
            assert_eq!(byte, if zero { 0 } else { 7 }, "at {at}");
        }
        assert_eq!(content.next_hole(0), 2 * BLOCK);
        assert_eq!(content.next_data(2 * BLOCK), Some(3 * BLOCK));
    }

    #[test]
    fn a_write_without_room_is_short() {
        let mut content = Content::default();
        assert_eq!(content.write(10, &[7; 3 * BLOCK_SIZE], 2), 2 * BLOCK_SIZE - 10);
        assert_eq!(content.size(), 2 * BLOCK);
        assert_eq!(content.missing(&(0..4 * BLOCK)), 2);
    }
}
