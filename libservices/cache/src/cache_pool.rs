//! The cache pool of one service: how its memory is mounted and its threads are started, and what the service asks of it.

use crate::background::Background;
use crate::config::{CacheConfig, CacheError, CacheStatistics};
use crate::ledger::Ledger;
use crate::limits::VIEWS_MAX;
use crate::pool::Pool;
use crate::segments::{SegmentStore, SharedNotice};
use poolfs_ipc::segment::{Leases, leases_length};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Most segments of programs open at once, between uses: they are hardly ever read or written here.
const TEXT_DESCRIPTORS_MAX: usize = 64;
/// Most segments kept open because clients may have them: those that have a view, and as many whose view is over.
const HOLDS_MAX: usize = 2 * VIEWS_MAX;
/// Most files lent to processes.
const LENT_MAX: usize = 1024;

/// Where a cache is going to be: mounts that are made where the threads of the cache may have none to see.
pub struct CacheMemory {
    segments: Arc<SegmentStore>,
    texts: Arc<SegmentStore>,
}

impl CacheMemory {
    /// Mounts it, with what outlives the process in a new directory of [`CacheConfig::kept_at`].
    ///
    /// # Errors
    /// See [`CacheError`]; nothing is left behind.
    pub fn mount(config: &CacheConfig) -> Result<Self, CacheError> {
        config.check()?;
        let segments = SegmentStore::new(config.descriptors_max, HOLDS_MAX, config.kept_at.as_deref())?;
        let segments = Arc::new(segments);
        let texts = SegmentStore::new(TEXT_DESCRIPTORS_MAX.min(config.descriptors_max), LENT_MAX, None)?;
        let texts = Arc::new(texts);
        Ok(Self { segments, texts })
    }
}

/// The cache memory of one service, shared by all its [`Cache`](crate::Cache) layers. The threads end with it.
pub struct CachePool {
    pub(crate) pool: Arc<Pool>,
    pub(crate) background: Arc<Background>,
    threads: Vec<JoinHandle<()>>,
}

impl CachePool {
    /// Mounts the segments' tmpfs and starts the threads.
    ///
    /// # Errors
    /// See [`CacheError`]; nothing is left behind.
    pub fn new(config: CacheConfig) -> Result<Arc<Self>, CacheError> {
        let memory = CacheMemory::mount(&config)?;
        Self::with_memory(config, memory)
    }

    /// The same with memory that was mounted before, with the same configuration.
    ///
    /// # Errors
    /// See [`CacheError`].
    pub fn with_memory(config: CacheConfig, memory: CacheMemory) -> Result<Arc<Self>, CacheError> {
        config.check()?;
        let CacheMemory { segments, texts } = memory;
        let ledger = match &config.kept_at {
            Some(_) => Some(Ledger::new(&segments, config.limit_bytes).map_err(CacheError::Ledger)?),
            None => None,
        };
        let pool = Arc::new(Pool::new(config, segments, texts, ledger));
        let background = Arc::new(Background::new(&pool));
        let mut made = Self { pool, background, threads: Vec::new() };
        made.background.start_flushers().map_err(CacheError::Thread)?;
        made.start("cache-keeper", Background::look_after)?;
        for _ in 0..made.pool.config.read_ahead_threads {
            made.start("cache-ahead", Background::read_ahead)?;
        }
        Ok(Arc::new(made))
    }

    fn start(&mut self, name: &str, work: fn(&Arc<Background>)) -> Result<(), CacheError> {
        let background = Arc::clone(&self.background);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || work(&background));
        self.threads.push(thread.map_err(CacheError::Thread)?);
        Ok(())
    }

    /// Room for `count` leases of segments, and what clients are given of it. Nothing when this kernel cannot show it to them
    /// read-only.
    ///
    /// # Errors
    /// Those of making a file and mapping it.
    pub fn leases(&self, count: usize) -> io::Result<Option<(Leases, OwnedFd)>> {
        let Some((file, reader)) = self.pool.segments.anonymous(leases_length(count) as u64)? else {
            return Ok(None);
        };
        let leases = Leases::new(&file, count, true).map_err(|errno| io::Error::from_raw_os_error(errno.raw()))?;
        Ok(Some((leases, reader)))
    }

    /// A notice that says nothing, for the clients of one file.
    ///
    /// # Errors
    /// Those of making a file and mapping it.
    pub fn notice(&self) -> io::Result<SharedNotice> {
        SharedNotice::new(&self.pool.segments)
    }

    /// Where what is dirty is found when this process dies; nothing: nowhere.
    #[must_use]
    pub fn kept_directory(&self) -> Option<&Path> {
        self.pool.segments.mounted()
    }

    /// The process is about to end: what it keeps for the next is unmounted, unless there is something in it.
    pub fn end_kept(&self) {
        if self.pool.ledger.as_ref().is_some_and(|ledger| ledger.is_empty()) {
            self.pool.segments.detach();
        }
    }

    /// Something else uses `bytes` of the cache's memory, until they are [given back](CachePool::discharge). Content keeps three quarters of
    /// the memory, however much is charged.
    pub fn charge(&self, bytes: u64) {
        self.pool.budget.charge(bytes);
    }

    /// Gives back what was charged.
    pub fn discharge(&self, bytes: u64) {
        self.pool.budget.discharge(bytes);
    }

    /// What the cache holds and did.
    #[must_use]
    pub fn statistics(&self) -> CacheStatistics {
        let pool = &self.pool;
        let (hits, misses) = pool.hits_and_misses();
        CacheStatistics {
            limit_bytes: pool.budget.limit(),
            allowed_bytes: pool.budget.allowed(),
            used_bytes: pool.budget.used(),
            kernel_bytes: pool.budget.of_kernel(),
            dirty_bytes: pool.budget.dirty(),
            hits,
            misses,
            evictions: pool.budget.evictions(),
            pinned_bytes: pool.pins.bytes(),
            pinned_bytes_max: pool.pins.bytes_max(),
        }
    }

    /// How long a write that reached the cache waits at most before it is on its way below.
    #[must_use]
    pub fn write_back_delay(&self) -> Duration {
        self.pool.config.expire + self.pool.config.tick
    }
}

impl Drop for CachePool {
    fn drop(&mut self) {
        self.pool.stop();
        self.background.lists.read_ahead.stop();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so already.
            let _ = thread.join();
        }
        self.background.join_flushers();
    }
}
