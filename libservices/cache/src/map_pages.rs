//! Memory accounting of a file's map: the pages in which words are written. They are charged to the cache's memory, and each
//! layer has its share of them.
//!
//! The first two pages of a map, its head and the words of the file's beginning, come with the map. They are charged, but not
//! taken from the share: the number of maps is bounded.

use crate::blocks::{BLOCK, CHUNK_BLOCKS};
use crate::pool::Pool;
use poolfs_ipc::segment::CAPACITY_MAX;
use poolfs_libservice::Share;
use std::sync::Arc;

/// Blocks whose words are in one page.
pub(crate) const PAGE_BLOCKS: u64 = BLOCK / 4;
/// Chunks of these.
pub(crate) const PAGE_CHUNKS: u64 = PAGE_BLOCKS / CHUNK_BLOCKS;
/// Most pages of words.
const PAGES_MAX: usize = (CAPACITY_MAX / PAGE_BLOCKS) as usize;
/// Pages that come with each map.
const FIRST_PAGES: u64 = 2;

/// Which pages of a map's words are written; given back when dropped.
pub(crate) struct MapPages {
    written: [u64; PAGES_MAX / 64],
    /// How many beside the first.
    taken: u64,
    share: Arc<Share>,
    pool: Arc<Pool>,
}

impl MapPages {
    /// Those of a new map of a layer with this share.
    pub(crate) fn new(pool: &Arc<Pool>, share: &Arc<Share>) -> Self {
        pool.budget.charge(FIRST_PAGES * BLOCK);
        let (share, pool) = (Arc::clone(share), Arc::clone(pool));
        Self { written: [0; PAGES_MAX / 64], taken: 0, share, pool }
    }

    pub(crate) fn is_written(&self, page: u64) -> bool {
        self.written[page as usize / 64] & 1 << (page % 64) != 0
    }

    /// Takes the memory of a page that is not written yet, if there is room for it.
    pub(crate) fn take(&mut self, page: u64) -> bool {
        if page > 0 {
            if !self.share.add(1) {
                return false;
            }
            self.taken += 1;
            self.pool.budget.charge(BLOCK);
        }
        self.written[page as usize / 64] |= 1 << (page % 64);
        true
    }

    /// Bytes that the map may take.
    pub(crate) fn bytes(&self) -> u64 {
        (FIRST_PAGES + self.taken) * BLOCK
    }
}

impl Drop for MapPages {
    fn drop(&mut self) {
        self.share.subtract(self.taken);
        self.pool.budget.discharge(self.bytes());
    }
}
