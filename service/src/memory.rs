//! The memory monitor: it watches how near the service's control group is to its limit, at which the kernel kills the process,
//! and with it all mounts of the pool.
//!
//! Not everything that takes memory is counted by the service. So besides its own counts the group itself is read: by a thread
//! periodically, and by a caller about to use more when much has been used since. What follows from a reading ([`level`]) applies
//! at once: the cache becomes smaller, and what can be refused is refused. What has to wait for others is done by the thread:
//! clients' segments are retired, and clients that keep pages after they were taken away are given no others until there is
//! plenty.
//!
//! # Locks
//!
//! The caller of a reading may hold any lock of the cache or of an instance. So a reading waits for no lock that is held for
//! long, and for none that may be held where memory is used. Locks taken while others are held, from left to right:
//!
//! ```text
//! level (tried by a reading) -> budget.charged            the cache becomes smaller
//!                            -> shard queues              what is clean leaves ...
//!                            -> state of a file (tried) -> shard queues, dirty files, ledger, segments   ... chunk by chunk
//!                            -> pool.signal               flushers are to hurry
//!                            -> signal                    the thread is to go on
//! level (waited for)         -> tables                    status() only
//! shard queues               -> state of a file (tried)   sweeping them
//! ```
//!
//! `budget.charged` is a leaf: a node that ends while the shard queues are swept gives back there what its answers were charged
//! with. Otherwise it, the shard queues, `pool.signal` (`libservices/cache`), `signal` and `tables` are never held together, nor
//! while `level` is waited for. What instances share is tightened by atomic variables only; the list of users of a resource
//! (`Shares::users`) and that of free leases (`LeaseTable::free`) are leaves. While memory is short a reading may evict for some
//! time, and whoever waits for `level` waits for that: the thread, and [`MemoryWatch::status`], for which the service holds its
//! `instances` meanwhile.

pub mod group;
pub mod level;
mod strays;
#[cfg(test)]
mod tests;

use crate::leases::LeaseTable;
use crate::pool_memory::PoolMemory;
use crate::shares::PoolShares;
use crate::sync::lock;
use group::{MemoryGroup, Reading};
use level::{CacheUse, State};
use poolfs_ipc::service::give_back_freed;
use poolfs_libservice::Holder;
use poolfs_service_protocol::MemoryStatus;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};
use strays::Strays;
use tracing::{debug, error, info, warn};

/// How often the thread looks while there is plenty, and otherwise or when that may end soon.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_NEAR: Duration = Duration::from_millis(100);
/// Who finds somebody looking leaves it to who uses so much more.
const SKIPPED_BYTES: u64 = 4 << 20;
/// How often the C library is asked, while memory is short, for what was freed and it keeps.
const HEAP_PAUSE: Duration = Duration::from_secs(1);
/// How long the cache waits until it gets more back.
const GROWTH_PAUSE: Duration = Duration::from_secs(1);

/// The cache, as it makes do with less.
pub trait WatchedMemory: PoolMemory {
    /// What it has.
    fn cache_use(&self) -> CacheUse;

    /// It may use so much from here on; what that came to.
    fn allow(&self, bytes: u64) -> u64;

    /// Has `look` called when so much more is used as [`WatchedMemory::look_after`] says; once.
    fn watch(&self, look: Box<dyn Fn() + Send + Sync>);

    /// Has `kept` say what the process is counted for when something is taken away that clients have; once.
    fn weigh_by(&self, kept: Box<dyn Fn() -> Option<u64> + Send + Sync>);

    /// When so much more is used, it is time for another look.
    fn look_after(&self, bytes: u64);

    /// From here on nothing of it is given away, or may be again.
    fn set_short(&self, is_short: bool);

    /// Retires what clients have of it, as far as it can now. `kept` is what the process is counted for.
    fn retire_segments(&self, kept: &dyn Fn() -> Option<u64>);

    /// The same of what those have only who keep what is taken away.
    fn retire_kept_segments(&self, kept: &dyn Fn() -> Option<u64>);

    /// Looks who does; each time at others.
    fn probe_segments(&self, turn: usize, kept: &dyn Fn() -> Option<u64>);
}

#[derive(Default)]
struct Level {
    state: State,
    /// That of the last look.
    reading: Option<Reading>,
    grown: Option<Instant>,
    /// Beside the cache.
    others: u64,
    strays: Strays,
    is_probe_due: bool,
    /// How often it became short.
    shortages: u64,
}

impl Level {
    /// How long until the thread looks again.
    fn pause(&self) -> Duration {
        let is_near = self.reading.is_none_or(Reading::is_near);
        if is_near || self.is_probe_due || self.state != State::Plenty { PAUSE_NEAR } else { PAUSE }
    }

    fn limit_and_kept(&self) -> (u64, u64) {
        self.reading.map_or((0, 0), |reading| (reading.limit, reading.kept))
    }
}

/// What the thread remembers from one of its turns to the next.
#[derive(Default)]
struct Past {
    told: State,
    /// When what was freed was given back.
    given_back: Option<Instant>,
}

/// Looks at the group of this process.
pub struct MemoryWatch {
    group: MemoryGroup,
    memory: Arc<dyn WatchedMemory>,
    shares: Arc<PoolShares>,
    level: Mutex<Level>,
    tables: Mutex<Vec<Weak<LeaseTable>>>,
    signal: Mutex<Signal>,
    wake: Condvar,
    cannot_read: AtomicBool,
    ineffective: AtomicU64,
}

#[derive(Default)]
struct Signal {
    is_due: bool,
    is_ending: bool,
}

impl MemoryWatch {
    /// Starts to look, until it is told to [end](MemoryWatch::end).
    ///
    /// # Errors
    /// When no thread can be had.
    pub fn start(
        group: MemoryGroup,
        memory: Arc<dyn WatchedMemory>,
        shares: &Arc<PoolShares>,
    ) -> io::Result<Arc<Self>> {
        let watch = Self::new(group, memory, shares);
        let of_thread = Arc::clone(&watch);
        std::thread::Builder::new().name("memory".into()).spawn(move || of_thread.work())?;
        Ok(watch)
    }

    /// One that looks only when more is used.
    fn new(group: MemoryGroup, memory: Arc<dyn WatchedMemory>, shares: &Arc<PoolShares>) -> Arc<Self> {
        let (level, tables, signal, wake, cannot_read, ineffective) = Default::default();
        let shares = Arc::clone(shares);
        let watch = Arc::new(Self { group, memory, shares, level, tables, signal, wake, cannot_read, ineffective });
        let looking = Arc::downgrade(&watch);
        watch.memory.watch(Box::new(move || looking.upgrade().into_iter().for_each(|watch| watch.look())));
        let weighing = Arc::downgrade(&watch);
        watch.memory.weigh_by(Box::new(move || weighing.upgrade()?.kept()));
        watch
    }

    /// From here on nobody looks but who uses more.
    pub fn end(&self) {
        lock(&self.signal).is_ending = true;
        self.wake.notify_all();
    }

    /// Counts with these leases from here on.
    pub fn add(&self, leases: &Arc<LeaseTable>) {
        let mut tables = lock(&self.tables);
        tables.retain(|table| table.strong_count() > 0);
        tables.push(Arc::downgrade(leases));
    }

    /// What was last seen; nothing before the first look.
    #[must_use]
    pub fn status(&self) -> Option<MemoryStatus> {
        let level = lock(&self.level);
        let (limit_bytes, kept_bytes) = level.limit_and_kept();
        (limit_bytes > 0).then(|| MemoryStatus {
            limit_bytes,
            kept_bytes,
            state: level.state.name().to_owned(),
            shortages_total: level.shortages,
            segments_kept_total: self.ineffective.load(Ordering::Relaxed),
            instances_without_segments: self.tables().iter().filter(|table| table.is_suspended()).count() as u64,
        })
    }

    fn tables(&self) -> Vec<Arc<LeaseTable>> {
        lock(&self.tables).iter().filter_map(Weak::upgrade).collect()
    }

    /// Looks, unless somebody is looking, and does what follows at once. The caller may hold locks of the cache and of an instance: this waits
    /// for none.
    fn look(&self) {
        let mut level = match self.level.try_lock() {
            Ok(level) => level,
            // Somebody has panicked in the middle of a look. What that one has left undone, this one does.
            Err(TryLockError::Poisoned(left)) => left.into_inner(),
            Err(TryLockError::WouldBlock) => return self.memory.look_after(SKIPPED_BYTES),
        };
        let cache = self.memory.cache_use();
        let reading = match self.group.read(cache.of_kernel) {
            Ok(reading) => reading,
            Err(error) => {
                if !self.cannot_read.swap(true, Ordering::Relaxed) {
                    warn!(%error, "the memory of the service's control group is not watched");
                }
                return self.memory.look_after(SKIPPED_BYTES);
            }
        };
        if self.cannot_read.swap(false, Ordering::Relaxed) {
            info!("the memory of the service's control group is watched again");
        }
        let may_grow = level.grown.is_none_or(|grown| grown.elapsed() >= GROWTH_PAUSE);
        let outcome = level.state.after(reading, cache, may_grow);
        if outcome.allowed != cache.allowed {
            let allowed = self.memory.allow(outcome.allowed);
            if allowed > cache.allowed {
                level.grown = Some(Instant::now());
            }
        }
        self.memory.look_after(outcome.look_after);
        level.reading = Some(reading);
        level.others = reading.kept.saturating_sub(cache.used);
        let others = level.others;
        if level.strays.take_probe(others, Instant::now()) {
            level.is_probe_due = true;
            self.wake_thread();
        }
        if outcome.state != level.state {
            let (was_short, is_short) = (level.state.is_short(), outcome.state.is_short());
            self.memory.set_short(is_short);
            self.shares.tighten(outcome.state);
            // Only now: should one of these panic, the next look does them.
            level.shortages += u64::from(is_short && !was_short);
            level.state = outcome.state;
            self.wake_thread();
        }
    }

    /// What the process is counted for and the kernel cannot drop by itself, now.
    fn kept(&self) -> Option<u64> {
        Some(self.group.read(self.memory.cache_use().of_kernel).ok()?.kept)
    }

    fn wake_thread(&self) {
        lock(&self.signal).is_due = true;
        self.wake.notify_all();
    }

    fn work(&self) {
        let (mut past, mut has_panicked) = (Past::default(), false);
        for turn in 0.. {
            if !self.wait() {
                return debug!("nobody looks at the memory any more");
            }
            // Without this thread nobody would look while nobody uses more, and no segment would be retired.
            let panics = catch_unwind(AssertUnwindSafe(|| self.turn(turn, &mut past))).is_err();
            if panics && !has_panicked {
                error!("a look at the memory panicked; it is tried again");
            }
            has_panicked = panics;
        }
    }

    /// Looks, and does what has to wait for others.
    fn turn(&self, turn: usize, past: &mut Past) {
        self.look();
        let (state, is_probe_due) = {
            let mut level = lock(&self.level);
            (level.state, std::mem::take(&mut level.is_probe_due))
        };
        let is_freed_due = || past.given_back.is_none_or(|last| last.elapsed() >= HEAP_PAUSE);
        if is_probe_due || state.is_short() && is_freed_due() {
            past.given_back = Some(Instant::now());
            give_back_freed();
        }
        self.look_after_segments(state, is_probe_due.then_some(turn));
        if state != past.told {
            self.tell(state);
            past.told = state;
        }
    }

    /// Takes segments away from those who keep what is taken away, or from all.
    fn look_after_segments(&self, state: State, probe: Option<usize>) {
        let kept = || self.kept();
        match probe {
            _ if state.is_short() => self.memory.retire_segments(&kept),
            Some(turn) => self.memory.probe_segments(turn, &kept),
            None => {}
        }
        let tables = self.tables();
        let suspended = tables.iter().filter(|table| table.suspend_if_kept()).count() as u64;
        if suspended > 0 {
            self.ineffective.fetch_add(suspended, Ordering::Relaxed);
            let mut level = lock(&self.level);
            let others = level.others;
            level.strays.note_kept(others);
            warn!(
                instances = suspended,
                others, "clients keep memory that was taken away: they are given none of the cache"
            );
        }
        if !tables.iter().any(|table| table.is_suspended()) {
            return;
        }
        let has_fallen = {
            let level = lock(&self.level);
            !state.is_short() && level.strays.has_fallen(level.others)
        };
        if has_fallen {
            info!("clients have given memory back: they are given of the cache again");
            tables.iter().for_each(|table| table.resume());
        } else {
            self.memory.retire_kept_segments(&kept);
        }
    }

    fn tell(&self, state: State) {
        let (limit, kept) = lock(&self.level).limit_and_kept();
        let cache = self.memory.cache_use().allowed;
        match state {
            State::Plenty => info!(limit, kept, cache, "there is plenty of memory"),
            State::Reduced => info!(limit, kept, cache, "the cache makes do with less memory"),
            State::Short => warn!(limit, kept, cache, "memory is short: clients are given none of the cache"),
            State::Exhausted => warn!(limit, kept, cache, "memory is exhausted: what can be refused is"),
        }
    }

    /// Waits until it is time to look, if there is to be another look.
    fn wait(&self) -> bool {
        let pause = lock(&self.level).pause();
        let signal = lock(&self.signal);
        let over = self.wake.wait_timeout_while(signal, pause, |signal| !signal.is_due && !signal.is_ending);
        let (mut signal, _) = over.unwrap_or_else(PoisonError::into_inner);
        signal.is_due = false;
        !signal.is_ending
    }
}
