//! What all layers of a pool share, whatever files they have: the budget, the segments, the limits, and the signal to the flushers.

use crate::budget::Budget;
use crate::buffer::BufferStore;
use crate::config::CacheConfig;
use crate::idle::IdleNodes;
use crate::ledger::Ledger;
use crate::limits::{Weigh, answers_max, pages_max};
use crate::mmap_exports::MmapExports;
use crate::pins::Pins;
use crate::segments::SegmentStore;
use crate::sync::lock;
use crossbeam_utils::CachePadded;
use poolfs_libservice::Shares;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

/// Parts of the counters of hits and misses, so that readers on several cores do not share a cache line.
const COUNTER_PARTS: usize = 16;

#[derive(Default)]
struct Counter {
    hits: AtomicU64,
    misses: AtomicU64,
}

#[derive(Default)]
struct Signal {
    stop: bool,
    hurry: bool,
    /// A writer waits for memory that dirty content of other layers takes.
    wants_room: bool,
}

/// What every node and every thread of a pool reaches.
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
    pub(crate) idle: IdleNodes,
    /// There is too little memory: nothing of it is given away.
    pub(crate) is_short: AtomicBool,
    /// What the process is counted for.
    pub(crate) kept: OnceLock<Box<Weigh>>,
    /// How many bytes of what is let go next are to be weighed.
    pub(crate) weighing_due: AtomicU64,
    /// How many files have a view.
    pub(crate) views: Arc<AtomicUsize>,
    counters: [CachePadded<Counter>; COUNTER_PARTS],
    signal: Mutex<Signal>,
    wake: Condvar,
    /// For the thread that looks after the pool.
    look: Condvar,
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
    pub(crate) fn new(
        config: CacheConfig,
        segments: Arc<SegmentStore>,
        texts: Arc<SegmentStore>,
        ledger: Option<Arc<Ledger>>,
    ) -> Self {
        let budget = Budget::new(config.limit_bytes, config.dirty_percent);
        Self {
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
            idle: IdleNodes::default(),
            is_short: AtomicBool::new(false),
            kept: OnceLock::new(),
            weighing_due: AtomicU64::new(0),
            views: Arc::default(),
            counters: Default::default(),
            signal: Mutex::default(),
            wake: Condvar::new(),
            look: Condvar::new(),
            config,
        }
    }

    /// Whether there is too little memory.
    pub(crate) fn is_short(&self) -> bool {
        self.is_short.load(Ordering::Acquire)
    }

    pub(crate) fn count_hits(&self, blocks: u64) {
        self.counters[counter_part()].hits.fetch_add(blocks, Ordering::Relaxed);
    }

    pub(crate) fn count_misses(&self, blocks: u64) {
        self.counters[counter_part()].misses.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Block reads so far that were answered from the cache, and those that went below.
    pub(crate) fn hits_and_misses(&self) -> (u64, u64) {
        let sum = |pick: fn(&Counter) -> &AtomicU64| {
            self.counters.iter().map(|counter| pick(counter).load(Ordering::Relaxed)).sum()
        };
        (sum(|counter| &counter.hits), sum(|counter| &counter.misses))
    }

    /// Most bytes moved by one step of a reader or writer: a step's reservation must leave room for others.
    pub(crate) fn step_bytes(&self) -> u64 {
        (self.budget.allowed() / 16).clamp(4096 * 2, 1 << 20) & !4095
    }

    /// Asks the flushers not to wait for the next tick.
    pub(crate) fn hurry(&self) {
        let mut signal = lock(&self.signal);
        if !signal.hurry {
            signal.hurry = true;
            self.wake.notify_one();
            self.look.notify_one();
        }
    }

    /// Asks the flushers for memory that is taken by what is dirty.
    pub(crate) fn want_room(&self) {
        lock(&self.signal).wants_room = true;
        self.hurry();
    }

    /// Whether somebody has asked for that since.
    pub(crate) fn take_want_of_room(&self) -> bool {
        std::mem::take(&mut lock(&self.signal).wants_room)
    }

    /// Waits as a flusher until it has something to do; false when it has to end.
    pub(crate) fn wait_for_tick(&self) -> bool {
        let mut signal = lock(&self.signal);
        if !signal.hurry && !signal.stop {
            let waited = self.wake.wait_timeout(signal, self.config.tick);
            signal = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        signal.hurry = false;
        !signal.stop
    }

    /// Waits as the thread that looks after the pool; false when it has to end.
    pub(crate) fn wait_to_look(&self) -> bool {
        let mut signal = lock(&self.signal);
        if !signal.stop {
            signal = self.look.wait_timeout(signal, self.config.tick).unwrap_or_else(PoisonError::into_inner).0;
        }
        !signal.stop
    }

    /// Has the flushers end, and whoever looks after them.
    pub(crate) fn stop(&self) {
        lock(&self.signal).stop = true;
        self.wake.notify_all();
        self.look.notify_all();
    }
}
