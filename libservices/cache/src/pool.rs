//! The cache pool of one service: budget, segments, dirty files by age, and the threads that write back and read ahead.

use crate::budget::Budget;
use crate::buffer::BufferStore;
use crate::config::{CacheConfig, CacheError, CacheStatistics};
use crate::idle::IdleNodes;
use crate::ledger::Ledger;
use crate::limits::VIEWS_MAX;
use crate::limits::Weigh;
use crate::limits::answers_max;
use crate::limits::pages_max;
use crate::mmap_exports::MmapExports;
use crate::node::Node;
use crate::pins::Pins;
use crate::read_ahead::ReadAheadQueue;
use crate::segments::{SegmentStore, SharedNotice};
use crate::sync::{lock, try_lock};
use crossbeam_utils::CachePadded;
use poolfs_ipc::segment::{Leases, leases_length};
use poolfs_libservice::Shares;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Parts of the counters of hits and misses, so that readers on several cores do not share a cache line.
const COUNTER_PARTS: usize = 16;
/// The part of a tick that may go into making huge pages: one in so many.
const HUGE_PAGES_SHARE: u32 = 8;
/// How long none are made after the kernel had no memory for one.
const HUGE_PAGES_PAUSE: Duration = Duration::from_secs(30);
/// Most files a flusher takes up in one round for lack of room.
const HURRIED_MAX: usize = 64;

/// Most segments of programs open at once, between uses: they are hardly ever read or written here.
const TEXT_DESCRIPTORS_MAX: usize = 64;
/// Most segments kept open because clients may have them: those that have a view, and as many whose view is over.
const HOLDS_MAX: usize = 2 * VIEWS_MAX;
/// Most files lent to processes.
const LENT_MAX: usize = 1024;

#[derive(Default)]
struct Counter {
    hits: AtomicU64,
    misses: AtomicU64,
}

struct DirtyFile {
    since: Instant,
    node: Arc<Node>,
}

#[derive(Default)]
struct Signal {
    stop: bool,
    hurry: bool,
}

/// What every node and every thread of the pool reaches.
pub(crate) struct Pool {
    pub(crate) config: CacheConfig,
    pub(crate) budget: Budget,
    /// Of what may be dirty each layer that can be written has its share.
    pub(crate) dirty_shares: Arc<Shares>,
    /// Of the pages of maps each layer has its share.
    pub(crate) map_shares: Arc<Shares>,
    /// Of the bytes of answers that are kept beside nodes each layer has its share.
    pub(crate) answer_shares: Arc<Shares>,
    pub(crate) segments: Arc<SegmentStore>,
    /// What is dirty, where the death of the process does not take it.
    pub(crate) ledger: Option<Arc<Ledger>>,
    /// Where programs are that the kernel maps by itself.
    pub(crate) texts: Arc<SegmentStore>,
    pub(crate) pins: Arc<Pins>,
    pub(crate) mmap_exports: MmapExports,
    pub(crate) buffers: BufferStore,
    pub(crate) read_ahead: ReadAheadQueue,
    pub(crate) idle: IdleNodes,
    /// There is too little memory: nothing of it is given away.
    pub(crate) is_short: AtomicBool,
    /// What the process is counted for.
    pub(crate) kept: OnceLock<Box<Weigh>>,
    /// How many bytes of what is let go next are to be weighed.
    pub(crate) weighing_due: AtomicU64,
    /// How many files have a view.
    pub(crate) views: Arc<AtomicUsize>,
    /// The files that have one, or had, or that were given as a whole, by their place in memory.
    viewed: Mutex<BTreeMap<usize, Weak<Node>>>,
    /// When huge pages are made next; never where the kernel cannot make any.
    huge_due: Mutex<Option<Instant>>,
    counters: [CachePadded<Counter>; COUNTER_PARTS],
    dirty: Mutex<BTreeMap<u64, DirtyFile>>,
    next_dirty: AtomicU64,
    /// held by the flusher that has stored what is deferred below
    storing: Mutex<()>,
    signal: Mutex<Signal>,
    wake: Condvar,
}

fn counter_part() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static PART: Cell<usize> = const { Cell::new(usize::MAX) });
    PART.with(|part| {
        if part.get() == usize::MAX {
            part.set(NEXT.fetch_add(1, Ordering::Relaxed) % COUNTER_PARTS);
        }
        part.get()
    })
}

impl Pool {
    pub(crate) fn count_hits(&self, blocks: u64) {
        self.counters[counter_part()].hits.fetch_add(blocks, Ordering::Relaxed);
    }

    pub(crate) fn count_misses(&self, blocks: u64) {
        self.counters[counter_part()].misses.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Most bytes moved by one step of a reader or writer: a step's reservation must leave room for others.
    pub(crate) fn step_bytes(&self) -> u64 {
        (self.budget.allowed() / 16).clamp(4096 * 2, 1 << 20) & !4095
    }

    /// Notes that a file became dirty; the number is its place in the order of age.
    pub(crate) fn enqueue_dirty(&self, node: Arc<Node>) -> u64 {
        let ticket = self.next_dirty.fetch_add(1, Ordering::Relaxed);
        lock(&self.dirty).insert(ticket, DirtyFile { since: Instant::now(), node });
        ticket
    }

    pub(crate) fn dequeue_dirty(&self, ticket: u64) {
        let entry = lock(&self.dirty).remove(&ticket);
        // The node may die with its entry, and that takes locks of its own.
        drop(entry);
    }

    /// Dirty files for which `pick` says yes, oldest first.
    pub(crate) fn dirty_files(&self, most: usize, pick: impl Fn(&Node) -> bool) -> Vec<Arc<Node>> {
        let dirty = lock(&self.dirty);
        dirty.values().filter(|file| pick(&file.node)).take(most).map(|file| Arc::clone(&file.node)).collect()
    }

    /// Notes that clients may read the file by themselves, or the kernel for them.
    pub(crate) fn viewed(&self, node: &Arc<Node>) {
        lock(&self.viewed).insert(Arc::as_ptr(node).addr(), Arc::downgrade(node));
    }

    /// Those that there still are.
    pub(crate) fn viewed_files(&self) -> Vec<Arc<Node>> {
        lock(&self.viewed).values().filter_map(Weak::upgrade).collect()
    }

    /// Looks at what the readers of every such file brought back, and at what can be held in huge pages.
    pub(crate) fn visit_segments(&self) {
        let viewed = self.viewed_files();
        viewed.iter().for_each(|node| node.sweep_segment());
        Self::go_on_retiring(&viewed);
        // A client that keeps one page of a huge one keeps all of it.
        if !self.is_short() {
            self.make_huge_pages(&viewed);
        }
        lock(&self.viewed).retain(|_, node| node.upgrade().is_some_and(|node| node.was_viewed()));
    }

    /// By one thread at a time, for a part of each tick.
    fn make_huge_pages(&self, viewed: &[Arc<Node>]) {
        let Some(mut due) = try_lock(&self.huge_due) else { return };
        let begun = Instant::now();
        if due.is_none_or(|due| due > begun) {
            return;
        }
        *due = Some(begun + self.config.tick);
        let end = begun + self.config.tick / HUGE_PAGES_SHARE;
        for node in viewed.iter().take_while(|_| Instant::now() < end) {
            match node.hold_in_huge_pages(end) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                    tracing::info!(
                        "this kernel makes no huge pages of what is cached: reads without a request are slower"
                    );
                    *due = None;
                    return;
                }
                Err(error) => {
                    tracing::debug!(%error, "no huge pages for the cache now");
                    *due = Some(begun + HUGE_PAGES_PAUSE);
                    return;
                }
            }
        }
    }

    fn due(&self) -> Vec<Arc<Node>> {
        let is_short = self.is_short();
        let hurry = is_short || self.budget.dirty() > self.budget.dirty_max() / 2;
        let now = Instant::now();
        let dirty = lock(&self.dirty);
        let mut hurried = 0;
        let is_old = |file: &DirtyFile| now.duration_since(file.since) >= self.config.expire;
        let mut is_due = |file: &DirtyFile| {
            let is_hurried = hurried < HURRIED_MAX && (is_short || file.node.core.is_beyond_its_part());
            hurried += usize::from(is_hurried);
            is_hurried || is_old(file)
        };
        let due = dirty.values().take_while(|file| hurry || is_old(file)).filter(|file| is_due(file));
        due.map(|file| Arc::clone(&file.node)).collect()
    }

    /// Asks the flushers not to wait for the next tick.
    pub(crate) fn hurry(&self) {
        let mut signal = lock(&self.signal);
        if !signal.hurry {
            signal.hurry = true;
            self.wake.notify_one();
        }
    }

    fn flusher(&self) {
        loop {
            let mut signal = lock(&self.signal);
            if !signal.hurry && !signal.stop {
                let waited = self.wake.wait_timeout(signal, self.config.tick);
                signal = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            if signal.stop {
                return;
            }
            signal.hurry = false;
            drop(signal);
            if self.is_short() {
                self.give_up_answers();
            }
            let due = self.due();
            due.iter().for_each(Node::write_back_in_background);
            // When the content of all is on its way to the disk, the first has the least to wait for.
            // One flusher at a time waits for disks; what another leaves is due again.
            if let Some(_storing) = try_lock(&self.storing) {
                due.iter().for_each(Node::store_in_background);
            }
            self.visit_segments();
            self.mmap_exports.visit();
        }
    }
}

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
        let budget = Budget::new(config.limit_bytes, config.dirty_percent);
        let pool = Arc::new(Pool {
            dirty_shares: Shares::reclaimable(budget.dirty_max()),
            map_shares: Shares::new(pages_max(config.limit_bytes)),
            answer_shares: Shares::new(answers_max(config.limit_bytes)),
            budget,
            segments,
            ledger,
            texts,
            pins: Pins::new(config.limit_bytes),
            mmap_exports: MmapExports::default(),
            buffers: BufferStore::default(),
            read_ahead: ReadAheadQueue::default(),
            idle: IdleNodes::default(),
            is_short: AtomicBool::new(false),
            kept: OnceLock::new(),
            weighing_due: AtomicU64::new(0),
            views: Arc::default(),
            viewed: Mutex::default(),
            huge_due: Mutex::new(Some(Instant::now())),
            counters: Default::default(),
            dirty: Mutex::default(),
            next_dirty: AtomicU64::new(0),
            storing: Mutex::default(),
            signal: Mutex::default(),
            wake: Condvar::new(),
            config,
        });
        let mut made = Self { pool, threads: Vec::new() };
        for _ in 0..made.pool.config.flush_threads {
            made.start("cache-flush", |pool| pool.flusher())?;
        }
        for _ in 0..made.pool.config.read_ahead_threads {
            made.start("cache-ahead", |pool| pool.read_ahead.work())?;
        }
        Ok(Arc::new(made))
    }

    fn start(&mut self, name: &str, work: fn(&Pool)) -> Result<(), CacheError> {
        let pool = Arc::clone(&self.pool);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || work(&pool));
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
        let sum = |pick: fn(&Counter) -> &AtomicU64| {
            pool.counters.iter().map(|counter| pick(counter).load(Ordering::Relaxed)).sum()
        };
        CacheStatistics {
            limit_bytes: pool.budget.limit(),
            allowed_bytes: pool.budget.allowed(),
            used_bytes: pool.budget.used(),
            kernel_bytes: pool.budget.of_kernel(),
            dirty_bytes: pool.budget.dirty(),
            hits: sum(|counter| &counter.hits),
            misses: sum(|counter| &counter.misses),
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
        lock(&self.pool.signal).stop = true;
        self.pool.wake.notify_all();
        self.pool.read_ahead.stop();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so already.
            let _ = thread.join();
        }
    }
}
