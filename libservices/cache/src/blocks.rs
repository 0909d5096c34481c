//! The block map of one file: which blocks are cached and in which state, as plain data, 64 blocks to a chunk.

use crate::page_tree::{PageTree, height};
use poolfs_types::limits::{BLOCK_SHIFT, BLOCK_SIZE, PAGE_TREE_FANOUT, PAGE_TREE_NODE_BYTES};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Blocks of one chunk: one bit each in a word.
pub(crate) const CHUNK_BLOCKS: u64 = 64;
// The pages of a chunk are those of one leaf of the kernel's tree.
const _: () = assert!(CHUNK_BLOCKS == PAGE_TREE_FANOUT);
/// What the description of a chunk costs, bytes; counted so that maps of huge sparse files are bounded too.
const CHUNK_COST: u64 = 192;
/// What a file costs besides of which something is cached, bytes: its state, and the room for its first chunks. It stays as long as they
/// do, also when nobody above knows the file any more; without it, small files would take half as much memory again as is counted.
const FILE_COST: u64 = 2048;
/// What the kernel takes for a memory file that holds content, bytes: its inode and its name (752 and 192 in Linux 6.18).
const MEMORY_FILE_COST: u64 = 1024;
/// What it costs to count a node of the tree of such a file, bytes.
const NODE_COUNT_COST: u64 = 48;
pub(crate) const BLOCK: u64 = BLOCK_SIZE as u64;

/// The block that holds `offset`.
pub(crate) const fn block_of(offset: u64) -> u64 {
    offset >> BLOCK_SHIFT
}

/// Blocks needed for `bytes`.
pub(crate) const fn blocks_for(bytes: u64) -> u64 {
    bytes.div_ceil(BLOCK)
}

/// The states of 64 neighbouring blocks.
#[derive(Default)]
pub(crate) struct Chunk {
    /// cached bytes are there
    pub(crate) resident: u64,
    /// known to be zeros, without bytes
    pub(crate) zero: u64,
    /// newer than below
    pub(crate) dirty: u64,
    /// on its way below; becomes dirty again if that fails
    pub(crate) writing: u64,
    /// below, which has not stored yet where they are
    pub(crate) deferred: u64,
    /// those of them that it is storing; deferred again if that fails
    pub(crate) storing: u64,
    /// not to be written back
    pub(crate) held: u64,
    /// written since it became cached: below had other bytes once
    pub(crate) rewritten: u64,
    touched: AtomicU64,
    hot: AtomicBool,
    /// Tells this chunk from another one at the same place later.
    pub(crate) ticket: u64,
}

impl Chunk {
    /// Blocks that can be dropped without losing anything.
    pub(crate) fn evictable(&self) -> u64 {
        (self.resident | self.zero) & !self.pinned()
    }

    pub(crate) fn pinned(&self) -> u64 {
        self.unsettled() | (self.held & self.resident)
    }

    /// Blocks that whoever comes after this process does not find below.
    pub(crate) fn unsettled(&self) -> u64 {
        self.dirty | self.writing | self.deferred | self.storing
    }

    /// Notes a read; a block read again makes the chunk worth keeping, one pass over it does not.
    pub(crate) fn touch(&self, mask: u64) {
        let touched = self.touched.load(Ordering::Relaxed);
        if touched & mask != 0 && !self.hot.load(Ordering::Relaxed) {
            self.hot.store(true, Ordering::Relaxed);
        }
        if touched & mask != mask {
            self.touched.fetch_or(mask, Ordering::Relaxed);
        }
    }

    /// Whether the chunk was hot; it has to become so anew.
    pub(crate) fn cool(&self) -> bool {
        self.touched.store(0, Ordering::Relaxed);
        self.hot.swap(false, Ordering::Relaxed)
    }

    /// Forgets the blocks of `mask`, but not who holds them.
    pub(crate) fn clear(&mut self, mask: u64) {
        for word in [&mut self.resident, &mut self.zero, &mut self.rewritten] {
            *word &= !mask;
        }
        for word in [&mut self.dirty, &mut self.writing, &mut self.deferred, &mut self.storing] {
            *word &= !mask;
        }
        *self.touched.get_mut() &= !mask;
    }

    fn is_empty(&self) -> bool {
        self.resident | self.zero | self.unsettled() | self.held == 0
    }
}

/// How much a map holds.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) resident: u64,
    pub(crate) dirty: u64,
    /// those that are not dirty, but not stored below either
    pub(crate) deferred: u64,
    /// those of the dirty ones that are not to be written back
    pub(crate) held: u64,
    pub(crate) chunks: u64,
    /// Nodes of the tree that finds the resident ones, if they are in a memory file.
    pub(crate) tree_nodes: u64,
}

/// What content costs.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub(crate) struct Cost {
    /// All of it, bytes.
    pub(crate) bytes: u64,
    /// Of that, what the kernel takes to find the pages of a memory file.
    pub(crate) of_kernel: u64,
}

/// What the cache holds of one object.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) counts: Counts,
    pub(crate) cost: Cost,
}

/// The most that `resident` blocks among these of a file cost, bytes.
pub(crate) fn cost_of(resident: u64, blocks: &Range<u64>) -> u64 {
    let Some(last) = blocks.end.checked_sub(1).filter(|&last| last >= blocks.start) else { return 0 };
    let last_chunk = last / CHUNK_BLOCKS;
    let chunks = last_chunk - blocks.start / CHUNK_BLOCKS + 1;
    // Each level may begin anew on both sides, and the tree may become so much higher.
    let tree_nodes = chunks + chunks / (CHUNK_BLOCKS - 1) + 3 * height(last_chunk);
    Counts { resident, chunks, tree_nodes, ..Counts::default() }.cost(true).bytes
}

impl Counts {
    /// What it comes to, in a memory file or on the heap.
    pub(crate) fn cost(self, is_in_memory_file: bool) -> Cost {
        if self.chunks == 0 {
            return Cost::default();
        }
        let tree = MEMORY_FILE_COST + self.tree_nodes * PAGE_TREE_NODE_BYTES;
        let of_kernel = if is_in_memory_file { tree } else { 0 };
        let described = self.chunks * CHUNK_COST + self.tree_nodes * NODE_COUNT_COST + FILE_COST;
        Cost { bytes: self.resident * BLOCK + described + of_kernel, of_kernel }
    }

    /// Blocks that whoever comes after this process does not find below.
    pub(crate) fn unsettled(self) -> u64 {
        self.dirty + self.deferred
    }
}

/// The chunks of a file.
#[derive(Default)]
pub(crate) struct BlockMap {
    chunks: BTreeMap<u64, Chunk>,
    counts: Counts,
    /// Of the chunks beyond the first that have resident blocks, if there are any.
    tree: Option<Box<PageTree>>,
    next_ticket: u64,
    /// Chunks that the eviction order has not heard of yet.
    pub(crate) fresh: Vec<(u64, u64)>,
    /// Chunks that have changed, when somebody wants to know.
    changed: Option<Vec<u64>>,
    is_always_noting: bool,
}

/// The parts of a block range by chunk, with the bits it covers there.
pub(crate) fn by_chunk(range: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        if at >= range.end {
            return None;
        }
        let chunk = at / CHUNK_BLOCKS;
        let first = at % CHUNK_BLOCKS;
        let count = (CHUNK_BLOCKS - first).min(range.end - at);
        at += count;
        Some((chunk, mask(first, count)))
    })
}

/// `count` bits from bit `first`.
pub(crate) fn mask(first: u64, count: u64) -> u64 {
    if count >= CHUNK_BLOCKS { u64::MAX } else { ((1 << count) - 1) << first }
}

impl BlockMap {
    /// A map of which somebody always wants to know the changes.
    pub(crate) fn noting() -> Self {
        Self { changed: Some(Vec::new()), is_always_noting: true, ..Self::default() }
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    pub(crate) fn chunk(&self, index: u64) -> Option<&Chunk> {
        self.chunks.get(&index)
    }

    /// Whether `pick` of the block's chunk has its bit.
    pub(crate) fn has(&self, block: u64, pick: impl Fn(&Chunk) -> u64) -> bool {
        let bit = 1 << (block % CHUNK_BLOCKS);
        self.chunk(block / CHUNK_BLOCKS).is_some_and(|chunk| pick(chunk) & bit != 0)
    }

    /// How many blocks from `first`, at most `limit`, have the bit that `pick` yields equal to `value`.
    pub(crate) fn run(&self, first: u64, limit: u64, value: bool, pick: impl Fn(&Chunk) -> u64) -> u64 {
        let mut count = 0;
        while count < limit {
            let block = first + count;
            let bits = self.chunk(block / CHUNK_BLOCKS).map_or(0, &pick);
            let bits = (if value { bits } else { !bits }) >> (block % CHUNK_BLOCKS);
            let within = CHUNK_BLOCKS - block % CHUNK_BLOCKS;
            let ones = u64::from(bits.trailing_ones()).min(within);
            count += ones;
            if ones < within {
                break;
            }
        }
        count.min(limit)
    }

    /// The first block at or after `from` whose bit of `pick` is set.
    pub(crate) fn next(&self, from: u64, pick: impl Fn(&Chunk) -> u64) -> Option<u64> {
        for (&index, chunk) in self.chunks.range(from / CHUNK_BLOCKS..) {
            let mut bits = pick(chunk);
            if index == from / CHUNK_BLOCKS {
                bits &= u64::MAX << (from % CHUNK_BLOCKS);
            }
            if bits != 0 {
                return Some(index * CHUNK_BLOCKS + u64::from(bits.trailing_zeros()));
            }
        }
        None
    }

    /// Changes the chunks of a range, making them where there are none yet.
    pub(crate) fn change(&mut self, range: Range<u64>, change: impl Fn(&mut Chunk, u64)) {
        for (index, mask) in by_chunk(range) {
            if !self.chunks.contains_key(&index) {
                self.next_ticket += 1;
                self.fresh.push((index, self.next_ticket));
                self.counts.chunks += 1;
                self.chunks.insert(index, Chunk { ticket: self.next_ticket, ..Chunk::default() });
            }
            self.change_chunk(index, |chunk| change(chunk, mask));
        }
    }

    /// Changes the chunks that exist in a range, which may be as long as a file can be.
    pub(crate) fn change_existing(&mut self, range: Range<u64>, change: impl Fn(&mut Chunk, u64)) {
        if range.is_empty() {
            return;
        }
        let chunks = range.start / CHUNK_BLOCKS..=(range.end - 1) / CHUNK_BLOCKS;
        let indices: Vec<u64> = self.chunks.range(chunks).map(|(&index, _)| index).collect();
        for index in indices {
            let first = range.start.max(index * CHUNK_BLOCKS);
            let end = range.end.min((index + 1) * CHUNK_BLOCKS);
            self.change_chunk(index, |chunk| change(chunk, mask(first % CHUNK_BLOCKS, end - first)));
        }
    }

    /// Changes one chunk, if it exists, and drops it when nothing is left in it.
    pub(crate) fn change_chunk<R>(&mut self, index: u64, change: impl FnOnce(&mut Chunk) -> R) -> Option<R> {
        let chunk = self.chunks.get_mut(&index)?;
        if let Some(changed) = self.changed.as_mut().filter(|changed| changed.last() != Some(&index)) {
            changed.push(index);
        }
        let count = |chunk: &Chunk| {
            let dirty = chunk.dirty | chunk.writing;
            let deferred = chunk.unsettled() & !dirty;
            [chunk.resident, dirty, dirty & chunk.held, deferred].map(|blocks| u64::from(blocks.count_ones()))
        };
        let before = count(chunk);
        let result = change(chunk);
        let after = count(chunk);
        self.counts.resident = self.counts.resident + after[0] - before[0];
        self.counts.dirty = self.counts.dirty + after[1] - before[1];
        self.counts.held = self.counts.held + after[2] - before[2];
        self.counts.deferred = self.counts.deferred + after[3] - before[3];
        if chunk.is_empty() {
            self.chunks.remove(&index);
            self.counts.chunks -= 1;
        }
        if (before[0] == 0) != (after[0] == 0) {
            self.note_leaf(index, after[0] > 0);
        }
        Some(result)
    }

    /// A chunk has resident blocks from now on, or none any more.
    fn note_leaf(&mut self, index: u64, has_pages: bool) {
        match (index, has_pages) {
            (0, _) => {}
            (_, true) => self.tree.get_or_insert_default().add(index),
            (_, false) => self.tree.iter_mut().for_each(|tree| tree.remove(index)),
        }
        self.tree.take_if(|tree| tree.is_empty());
        let first = self.chunk(0).is_some_and(|chunk| chunk.resident != 0);
        self.counts.tree_nodes = u64::from(first) + self.tree.as_ref().map_or(0, |tree| tree.nodes());
    }

    /// From now on somebody who comes and goes wants to know of changes, or no more.
    pub(crate) fn note_changes(&mut self, noted: bool) {
        if !noted && !self.is_always_noting {
            self.changed = None;
        } else {
            self.changed.get_or_insert_default();
        }
    }

    /// The chunks that have changed since the last time.
    pub(crate) fn take_changed(&mut self) -> Vec<u64> {
        self.changed.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Indices of all chunks.
    pub(crate) fn indices(&self) -> Vec<u64> {
        self.chunks.keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_costs_more_than_its_blocks() {
        let costs = |resident, chunks| Counts { resident, chunks, ..Counts::default() }.cost(false).bytes;
        assert_eq!((costs(0, 0), costs(0, 1), costs(3, 1)), (0, CHUNK_COST + FILE_COST, 3 * BLOCK + costs(0, 1)));
        assert_eq!(costs(70, 2) - costs(64, 1), 6 * BLOCK + CHUNK_COST, "the file counts once");
    }

    #[test]
    fn what_the_kernel_needs_to_find_pages_is_counted() {
        let mut map = BlockMap::default();
        let chunks = [0, 1, 63, 64, 4096, 1 << 20, (1 << 45) - 1];
        for chunk in chunks {
            let block = chunk * CHUNK_BLOCKS;
            let before = map.counts().cost(true);
            map.change(block..block + 1, |chunk, mask| chunk.resident |= mask);
            let grown = map.counts().cost(true).bytes - before.bytes;
            assert!(grown <= cost_of(1, &(block..block + 1)), "{grown} bytes for chunk {chunk}");
        }
        let cost = map.counts().cost(true);
        assert_eq!(cost.bytes - cost.of_kernel, map.counts().cost(false).bytes);
        // Zeros need no pages.
        let with_pages = map.counts().tree_nodes;
        map.change(5 << 30..(5 << 30) + 7000, |chunk, mask| chunk.zero |= mask);
        assert_eq!(map.counts().tree_nodes, with_pages);
        for chunk in chunks {
            map.change_existing(chunk * CHUNK_BLOCKS..(chunk + 1) * CHUNK_BLOCKS, Chunk::clear);
        }
        assert_eq!((map.counts().tree_nodes, map.tree.is_none()), (0, true));
    }

    #[test]
    fn no_more_is_used_than_was_reserved() {
        for blocks in [0..1, 63..65, 0..64 * 64, 4032..8300, 4095 * 64..4097 * 64, 5..64 * 64 * 65] {
            let mut map = BlockMap::default();
            map.change(blocks.clone(), |chunk, mask| chunk.resident |= mask);
            let reserved = cost_of(blocks.end - blocks.start, &blocks);
            assert!(map.counts().cost(true).bytes <= reserved, "{blocks:?}");
        }
        assert_eq!(cost_of(0, &(5..5)), 0);
    }

    #[test]
    fn runs_and_counts_cross_chunks() {
        let mut map = BlockMap::default();
        map.change(60..200, |chunk, mask| chunk.resident |= mask);
        assert_eq!(map.counts(), Counts { resident: 140, chunks: 4, tree_nodes: 5, ..Counts::default() });
        assert_eq!(map.run(60, 1000, true, |chunk| chunk.resident), 140);
        assert_eq!(map.run(0, 1000, false, |chunk| chunk.resident), 60);
        assert_eq!(map.run(200, 33, false, |chunk| chunk.resident), 33);
        map.change(64..128, |chunk, mask| chunk.dirty |= mask);
        assert_eq!(map.counts().dirty, 64);
        assert_eq!(map.next(0, |chunk| chunk.dirty), Some(64));
        assert_eq!(map.next(100, |chunk| chunk.dirty), Some(100));
        assert_eq!(map.next(128, |chunk| chunk.dirty), None);
        map.change_existing(61..u64::MAX >> 12, Chunk::clear);
        assert_eq!(map.counts(), Counts { resident: 1, chunks: 1, tree_nodes: 1, ..Counts::default() });
        map.change_existing(0..64, Chunk::clear);
        assert_eq!(map.counts(), Counts::default());
    }

    #[test]
    fn one_pass_leaves_a_chunk_cold() {
        let chunk = Chunk::default();
        chunk.touch(1);
        chunk.touch(2);
        assert!(!chunk.cool());
        chunk.touch(1);
        chunk.touch(1);
        assert!(chunk.cool());
        assert!(!chunk.cool());
    }
}
