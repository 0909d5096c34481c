//! The cache as the evictable memory of its pool.

use crate::memory::WatchedMemory;
use crate::memory::level::CacheUse;
use crate::pool_memory::PoolMemory;
use poolfs_cache::CachePool;
use std::sync::Arc;

/// What the cache does without when others need it.
pub(super) struct EvictableMemory(pub(super) Arc<CachePool>);

impl PoolMemory for EvictableMemory {
    fn charge(&self, bytes: u64) {
        self.0.charge(bytes);
    }

    fn discharge(&self, bytes: u64) {
        self.0.discharge(bytes);
    }

    fn grew(&self, bytes: u64) {
        self.0.grew(bytes);
    }

    fn is_short(&self) -> bool {
        self.0.is_short()
    }
}

/// What the client of a source takes of the pool's memory; given back when dropped.
pub(super) struct SourceMemory {
    pool: Arc<CachePool>,
    bytes: u64,
}

impl SourceMemory {
    /// Takes so much, for which content makes room.
    pub fn take(pool: &Arc<CachePool>, bytes: u64) -> Self {
        pool.charge(bytes);
        Self { pool: Arc::clone(pool), bytes }
    }
}

impl Drop for SourceMemory {
    fn drop(&mut self) {
        self.pool.discharge(self.bytes);
    }
}

impl WatchedMemory for EvictableMemory {
    fn cache_use(&self) -> CacheUse {
        let statistics = self.0.statistics();
        CacheUse {
            limit: statistics.limit_bytes,
            allowed: statistics.allowed_bytes,
            used: statistics.used_bytes,
            of_kernel: statistics.kernel_bytes,
        }
    }

    fn allow(&self, bytes: u64) -> u64 {
        self.0.allow(bytes)
    }

    fn watch(&self, look: Box<dyn Fn() + Send + Sync>) {
        self.0.watch(look);
    }

    fn weigh_by(&self, kept: Box<dyn Fn() -> Option<u64> + Send + Sync>) {
        self.0.weigh_by(kept);
    }

    fn look_after(&self, bytes: u64) {
        self.0.look_after(bytes);
    }

    fn set_short(&self, is_short: bool) {
        self.0.set_short(is_short);
    }

    fn retire_segments(&self, kept: &dyn Fn() -> Option<u64>) {
        self.0.retire_segments(kept);
    }

    fn retire_kept_segments(&self, kept: &dyn Fn() -> Option<u64>) {
        self.0.retire_kept_segments(kept);
    }

    fn probe_segments(&self, turn: usize, kept: &dyn Fn() -> Option<u64>) {
        self.0.probe_segments(turn, kept);
    }
}
