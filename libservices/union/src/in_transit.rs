//! The blocks of one sketch that are [in transit](crate::transit).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most blocks, one behind the other, that are completed at once: writers wait as long.
const RUN_BLOCKS: u64 = 32;

/// One of the blocks that may be in transit at once; given back when dropped.
pub(crate) struct Permit(Arc<AtomicUsize>);

impl Permit {
    /// One that has been counted.
    pub fn counted(count: &Arc<AtomicUsize>) -> Self {
        Self(Arc::clone(count))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A block on its way: which of its bytes are new.
struct InTransit {
    new: Range<usize>,
    _permit: Permit,
}

/// The blocks in transit of one sketch.
#[derive(Default)]
pub(crate) struct Transit {
    blocks: BTreeMap<u64, InTransit>,
}

impl Transit {
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether any of `blocks` is in transit.
    pub fn any(&self, blocks: Range<u64>) -> bool {
        blocks.start < blocks.end && self.blocks.range(blocks).next().is_some()
    }

    /// Behind the last one.
    pub fn end(&self) -> u64 {
        self.blocks.last_key_value().map_or(0, |(&last, _)| last + 1)
    }

    /// The first of `blocks` in transit, with those right behind it.
    pub fn run(&self, blocks: Range<u64>) -> Option<Range<u64>> {
        let (&first, _) = self.blocks.range(blocks.clone()).next()?;
        let most = blocks.end.min(first.saturating_add(RUN_BLOCKS));
        let behind =
            self.blocks.range(first..most).zip(first..).take_while(|((block, _), expected)| *block == expected);
        Some(first..first + behind.count() as u64)
    }

    /// What is new in those of `blocks` that are in transit.
    pub fn new_bytes(&self, blocks: Range<u64>) -> impl Iterator<Item = Range<usize>> + Clone {
        self.blocks.range(blocks).map(|(_, block)| block.new.clone())
    }

    /// What is new in a block; nothing when it is not in transit.
    pub fn new_bytes_mut(&mut self, block: u64) -> Option<&mut Range<usize>> {
        self.blocks.get_mut(&block).map(|block| &mut block.new)
    }

    /// A block has arrived.
    pub fn remove(&mut self, block: u64) {
        self.blocks.remove(&block);
    }

    pub fn insert(&mut self, block: u64, new: Range<usize>, permit: Permit) {
        self.blocks.insert(block, InTransit { new, _permit: permit });
    }
}
