//! The configuration of a pool's cache, its errors, and its statistics.

use crate::blocks::{BLOCK, CHUNK_BLOCKS};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// The smallest budget a cache works with.
pub const LIMIT_BYTES_MIN: u64 = 128 << 10;

/// How large a cache is and when it writes back.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// Most bytes of file content (and of the maps that describe it) that the cache holds.
    pub limit_bytes: u64,
    /// Share of `limit_bytes` that may be dirty before writers have to write back themselves, percent.
    pub dirty_percent: u8,
    /// Age at which dirty data is written back.
    pub expire: Duration,
    /// How often the age is looked at.
    pub tick: Duration,
    /// Longest wait of one that finds no room for removed files that may be about to end.
    pub leaving_wait_max: Duration,
    /// Files up to this size are held on the heap, larger ones in a segment; at most 256 KiB.
    pub small_file_bytes: u64,
    /// Most bytes read ahead of a sequential reader.
    pub read_ahead_bytes: u64,
    /// Most nodes kept that nobody refers to, in all layers together.
    pub idle_nodes_max: usize,
    /// Most names kept by one layer, present and absent ones together.
    pub names_max: usize,
    /// Most segments open at once, between uses.
    pub descriptors_max: usize,
    /// Threads for write-back that are to be free, beside those that branches keep.
    pub flush_threads: usize,
    /// Threads that read ahead.
    pub read_ahead_threads: usize,
    /// The directory under which the segments are mounted, so that what is dirty outlives this process
    /// ([`Cache::recorded`](crate::Cache::recorded)). Nothing: it does not.
    pub kept_at: Option<PathBuf>,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            limit_bytes: 256 << 20,
            dirty_percent: 50,
            expire: Duration::from_secs(5),
            tick: Duration::from_secs(1),
            leaving_wait_max: Duration::from_secs(2),
            small_file_bytes: 32 << 10,
            read_ahead_bytes: 4 << 20,
            idle_nodes_max: 3 << 13,
            names_max: 1 << 15,
            descriptors_max: 1024,
            flush_threads: 2,
            read_ahead_threads: 2,
            kept_at: None,
        }
    }
}

impl CacheConfig {
    /// The default configuration with another budget. Nodes and names, which do not count towards it, are fewer with a small
    /// one: a node costs more than a kilobyte in all layers together, a name some 100 bytes.
    #[must_use]
    pub fn with_limit(limit_bytes: u64) -> Self {
        let default = Self::default();
        let share = |bytes: u64| usize::try_from(limit_bytes / bytes).unwrap_or(usize::MAX);
        let idle_nodes_max = share(16 << 10).clamp(1024, default.idle_nodes_max);
        let names_max = share(8 << 10).clamp(1024, default.names_max);
        Self { limit_bytes, idle_nodes_max, names_max, ..default }
    }

    pub(crate) fn check(&self) -> Result<(), CacheError> {
        let refuse = |what| Err(CacheError::Config { what });
        if self.limit_bytes < LIMIT_BYTES_MIN {
            return refuse("limit_bytes is below 128 KiB");
        }
        if !(1..=90).contains(&self.dirty_percent) {
            return refuse("dirty_percent is not within 1 to 90");
        }
        // Heap content leaves as a whole, so it must not be more than what leaves together.
        if self.small_file_bytes > CHUNK_BLOCKS * BLOCK {
            return refuse("small_file_bytes is above 256 KiB");
        }
        if self.tick.is_zero() {
            return refuse("tick is zero");
        }
        if !(1..=16).contains(&self.flush_threads) || self.read_ahead_threads > 16 {
            return refuse("more than 16 threads, or none that writes back");
        }
        Ok(())
    }
}

/// Why a cache cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The configuration contradicts itself.
    #[error("cache configuration: {what}")]
    Config {
        /// which part, and how
        what: &'static str,
    },
    /// The private tmpfs cannot be mounted; it needs CAP_SYS_ADMIN and Linux 5.2.
    #[error("mounting the cache's private tmpfs failed (needs CAP_SYS_ADMIN)")]
    Mount(#[source] io::Error),
    /// What would outlive the process cannot be noted.
    #[error("the ledger of what is dirty cannot be made")]
    Ledger(#[source] io::Error),
    /// A thread cannot be started.
    #[error("starting a thread of the cache failed")]
    Thread(#[source] io::Error),
}

/// What a pool's cache holds and did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatistics {
    /// Most bytes the cache may hold.
    pub limit_bytes: u64,
    /// Of those, what it may hold now: less while there is too little memory.
    pub allowed_bytes: u64,
    /// Bytes it holds or has set aside for what is being read. A quarter more than the limit at most: what is no content is counted before
    /// content has made room for it.
    pub used_bytes: u64,
    /// Of those, what the kernel takes to find the pages of its memory files: nodes of trees, inodes, names.
    pub kernel_bytes: u64,
    /// Bytes not yet written back, or not stored yet where they can be found.
    pub dirty_bytes: u64,
    /// Block reads answered from the cache.
    pub hits: u64,
    /// Block reads that went below.
    pub misses: u64,
    /// Blocks evicted.
    pub evictions: u64,
    /// Bytes that stay because the kernel maps them by itself.
    pub pinned_bytes: u64,
    /// Most of those.
    pub pinned_bytes_max: u64,
}
