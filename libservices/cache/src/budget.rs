//! The memory budget of a pool, and the eviction order of chunks.
//!
//! What is content is reserved before memory is used, and never more than the limit. What is no content is charged, within limits of its own, and
//! content makes room for it then: until that has left, or as long as it cannot, a part of it is used beside the limit.
//!
//! The order follows S3-FIFO: new chunks enter a small queue and leave the cache from there unless something was read twice.
//! Chunks that were read twice go round in the main queue as long as they are read again. A chunk that cannot be evicted (dirty,
//! held, locked) goes to the end of its queue, so nobody waits for it.

use crate::blocks::Cost;
use crate::config::LIMIT_BYTES_MIN;
use crate::sync::lock;
use crossbeam_utils::CachePadded;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, Weak};

const SHARDS: usize = 8;
/// One part in this many of a shard's chunks is meant to be in the small queue.
const SMALL_PART: usize = 10;
/// Entries of a shard that are never worth a sweep.
const SWEEP_AT_MIN: usize = 256;
/// How much is charged before content makes room for it.
const EVICTION_BYTES: u64 = 256 << 10;
/// Content makes room for what else is charged until that has one part in this many of the limit, however much it is: without room for
/// content every write would go through the cache.
const CHARGED_PART: u64 = 4;
/// What content may have at least, however little memory there is: one part in so many of the limit.
const FLOOR_PART: u64 = 8;
/// How often room is looked for before a reservation fails.
const ATTEMPTS_MAX: usize = 8;

/// A file whose chunks are in the order of eviction.
pub(crate) trait Evictable: Send + Sync {
    /// Whether the chunk may still be there. Waits for nothing: it is called with the queues locked, for which whoever has the file's state
    /// locked may wait.
    fn may_have_chunk(&self, index: u64, ticket: u64) -> bool;

    /// Drops what can be dropped of one chunk, unless it was read again since the last time. Does not wait either.
    fn evict_chunk(&self, index: u64, ticket: u64) -> Evicted;
}

/// What [`Evictable::evict_chunk`] did.
pub(crate) enum Evicted {
    /// the chunk is another one or none
    Gone,
    /// it was read again since the last time, and stays
    Hot,
    /// nothing could be evicted now
    Nothing,
    /// so many blocks, which freed so many bytes; `rest`: the chunk still holds others
    Blocks { bytes: u64, blocks: u64, rest: bool },
}

/// A chunk of a file in the order of eviction.
struct Entry {
    file: Weak<dyn Evictable>,
    chunk: u64,
    ticket: u64,
}

#[derive(Default)]
struct Queues {
    small: VecDeque<Entry>,
    main: VecDeque<Entry>,
    sweep_at: usize,
}

impl Queues {
    /// Entries of chunks that went another way (truncated, file gone) stay behind, and with them the memory of their files;
    /// they are swept out before they outnumber the living.
    fn sweep_if_due(&mut self) {
        if self.small.len() + self.main.len() > self.sweep_at.max(SWEEP_AT_MIN) {
            self.sweep();
        }
    }

    fn sweep(&mut self) {
        let alive =
            |entry: &Entry| entry.file.upgrade().is_some_and(|file| file.may_have_chunk(entry.chunk, entry.ticket));
        self.small.retain(alive);
        self.main.retain(alive);
        self.sweep_at = (self.small.len() + self.main.len()) * 2 + SWEEP_AT_MIN;
    }
}

/// Has somebody look how much memory there is.
pub(crate) type Look = Box<dyn Fn() + Send + Sync>;

pub(crate) struct Budget {
    limit: u64,
    dirty_percent: u64,
    /// Of the limit, what may be used now: less while there is too little memory. Changes under `charged`.
    allowed: CachePadded<AtomicU64>,
    look: OnceLock<Look>,
    /// What may still come to be used before somebody looks again.
    unwatched: CachePadded<AtomicI64>,
    used: CachePadded<AtomicU64>,
    /// Of that, what the kernel takes to find the pages of memory files. It changes with chunks, not with each block.
    of_kernel: AtomicU64,
    /// What is charged that is no content. Of that, [`Budget::counted`] is a part of `used`.
    charged: Mutex<i64>,
    dirty: CachePadded<AtomicU64>,
    evictions: AtomicU64,
    shards: [Mutex<Queues>; SHARDS],
    next_shard: AtomicUsize,
}

/// Bytes set aside; what is not used returns to the budget.
pub(crate) struct Reservation<'a> {
    budget: &'a Budget,
    bytes: u64,
}

impl Reservation<'_> {
    /// Takes up to `bytes` out of the reservation, for memory that counts for itself from now on.
    pub(crate) fn consume(&mut self, bytes: u64) -> u64 {
        let taken = bytes.min(self.bytes);
        self.bytes -= taken;
        taken
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Budget {
    pub(crate) fn new(limit: u64, dirty_percent: u8) -> Self {
        Self {
            limit,
            dirty_percent: u64::from(dirty_percent),
            allowed: AtomicU64::new(limit).into(),
            look: OnceLock::new(),
            unwatched: AtomicI64::new(i64::MAX).into(),
            used: CachePadded::default(),
            of_kernel: AtomicU64::new(0),
            charged: Mutex::default(),
            dirty: CachePadded::default(),
            evictions: AtomicU64::new(0),
            shards: Default::default(),
            next_shard: AtomicUsize::new(0),
        }
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// What may be used now.
    pub(crate) fn allowed(&self) -> u64 {
        self.allowed.load(Ordering::Relaxed)
    }

    /// So much may be used from here on, within what content needs at least and the limit. Returns what that came to.
    pub(crate) fn allow(&self, bytes: u64) -> u64 {
        let charged = lock(&self.charged);
        let floor = self.counted(*charged) + (self.limit / FLOOR_PART).max(LIMIT_BYTES_MIN);
        let allowed = bytes.max(floor).min(self.limit);
        self.allowed.store(allowed, Ordering::Relaxed);
        allowed
    }

    /// Has `look` called when as much more is used as it says by [`Budget::look_after`]; once.
    pub(crate) fn watch(&self, look: Look) {
        let _ = self.look.set(look);
    }

    /// When so much more is used somebody is to look.
    pub(crate) fn look_after(&self, bytes: u64) {
        self.unwatched.store(i64::try_from(bytes).unwrap_or(i64::MAX), Ordering::Relaxed);
    }

    /// So much more is used, or about to be.
    pub(crate) fn grew(&self, bytes: u64) {
        let Some(look) = self.look.get() else { return };
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let left = self.unwatched.fetch_sub(bytes, Ordering::Relaxed);
        // By whoever passes it, and by no other until that has looked.
        if left >= 0 && left < bytes {
            look();
        }
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn dirty(&self) -> u64 {
        self.dirty.load(Ordering::Relaxed)
    }

    pub(crate) fn dirty_max(&self) -> u64 {
        self.allowed() / 100 * self.dirty_percent
    }

    pub(crate) fn evictions(&self) -> u64 {
        self.evictions.load(Ordering::Relaxed)
    }

    /// Sets `bytes` aside, evicting for them; nothing when what is cached cannot leave now. Must be called without
    /// a file's state locked, else that file's chunks cannot leave.
    pub(crate) fn reserve(&self, bytes: u64) -> Option<Reservation<'_>> {
        self.grew(bytes);
        for _ in 0..ATTEMPTS_MAX {
            let allowed = self.allowed();
            let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                (used + bytes <= allowed).then_some(used + bytes)
            });
            match taken {
                Ok(_) => return Some(Reservation { budget: self, bytes }),
                Err(used) => {
                    if bytes > allowed || self.evict(used + bytes - allowed) == 0 {
                        return None;
                    }
                }
            }
        }
        None
    }

    /// Books a change of what a file holds; growth is taken from the reservation first.
    pub(crate) fn settle_used(&self, before: Cost, after: Cost, reservation: Option<&mut Reservation<'_>>) {
        if after.bytes > before.bytes {
            let grown = after.bytes - before.bytes;
            let taken = reservation.map_or(0, |reservation| reservation.consume(grown));
            self.used.fetch_add(grown - taken, Ordering::Relaxed);
        } else {
            self.used.fetch_sub(before.bytes - after.bytes, Ordering::Relaxed);
        }
        if after.of_kernel > before.of_kernel {
            self.of_kernel.fetch_add(after.of_kernel - before.of_kernel, Ordering::Relaxed);
        } else if after.of_kernel < before.of_kernel {
            self.of_kernel.fetch_sub(before.of_kernel - after.of_kernel, Ordering::Relaxed);
        }
    }

    /// Of what is used, what the kernel takes to find the pages of memory files.
    pub(crate) fn of_kernel(&self) -> u64 {
        self.of_kernel.load(Ordering::Relaxed)
    }

    /// Something that is no content uses `bytes` from now on. Content makes room for it, if it can leave, up to a part of the limit.
    pub(crate) fn charge(&self, bytes: u64) {
        self.grew(bytes);
        let (used, taken) = self.add_charged(bytes.cast_signed());
        let allowed = self.allowed();
        // Not each time: what cannot leave now is looked at in vain.
        if used > allowed && used / EVICTION_BYTES != (used - taken) / EVICTION_BYTES {
            self.evict(used - allowed);
        }
    }

    /// Gives back what was charged.
    pub(crate) fn discharge(&self, bytes: u64) {
        self.add_charged(-bytes.cast_signed());
    }

    /// What is used then, and how much more content does without. One thread's charge may come after it was given back by another, so
    /// that there may be less than nothing meanwhile.
    fn add_charged(&self, bytes: i64) -> (u64, u64) {
        let mut charged = lock(&self.charged);
        let before = self.counted(*charged);
        *charged = charged.saturating_add(bytes);
        let after = self.counted(*charged);
        // Never less than what is counted: both change together.
        let used = match after.checked_sub(before) {
            Some(more) => self.used.fetch_add(more, Ordering::Relaxed) + more,
            None => self.used.fetch_sub(before - after, Ordering::Relaxed) - (before - after),
        };
        (used, after.saturating_sub(before))
    }

    /// How much of what is charged content does without.
    fn counted(&self, charged: i64) -> u64 {
        u64::try_from(charged).unwrap_or_default().min(self.limit / CHARGED_PART)
    }

    pub(crate) fn settle_dirty(&self, before: u64, after: u64) {
        if after > before {
            self.dirty.fetch_add(after - before, Ordering::Relaxed);
        } else {
            self.dirty.fetch_sub(before - after, Ordering::Relaxed);
        }
    }

    /// Puts a new chunk into the order.
    pub(crate) fn enter(&self, file: Weak<dyn Evictable>, chunk: u64, ticket: u64) {
        let shard = (chunk as usize ^ (file.as_ptr().addr() >> 6)) % SHARDS;
        let mut queues = lock(&self.shards[shard]);
        queues.small.push_back(Entry { file, chunk, ticket });
        queues.sweep_if_due();
    }

    /// Chunks in the order of eviction, those that are gone included.
    #[cfg(test)]
    fn entries(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard)).map(|queues| queues.small.len() + queues.main.len()).sum()
    }

    /// Evicts until `bytes` are free or everything was looked at twice; returns how many it freed.
    pub(crate) fn evict(&self, bytes: u64) -> u64 {
        let mut freed = 0;
        let start = self.next_shard.fetch_add(1, Ordering::Relaxed);
        for turn in 0..SHARDS {
            let shard = &self.shards[(start + turn) % SHARDS];
            freed += self.evict_shard(shard, bytes.saturating_sub(freed));
            if freed >= bytes {
                break;
            }
        }
        freed
    }

    fn evict_shard(&self, shard: &Mutex<Queues>, bytes: u64) -> u64 {
        let mut freed = 0;
        let mut looks = {
            let mut queues = lock(shard);
            queues.sweep_if_due();
            2 * (queues.small.len() + queues.main.len()) + 1
        };
        while freed < bytes && looks > 0 {
            looks -= 1;
            let (entry, from_small) = {
                let mut queues = lock(shard);
                let length = queues.small.len() + queues.main.len();
                let small_first = queues.small.len() * SMALL_PART >= length;
                let popped = if small_first { queues.small.pop_front() } else { queues.main.pop_front() };
                match popped {
                    Some(entry) => (entry, small_first),
                    None => match queues.small.pop_front() {
                        Some(entry) => (entry, true),
                        None => break,
                    },
                }
            };
            let Some(file) = entry.file.upgrade() else { continue };
            match file.evict_chunk(entry.chunk, entry.ticket) {
                Evicted::Gone => {}
                Evicted::Hot => lock(shard).main.push_back(entry),
                Evicted::Nothing if from_small => lock(shard).small.push_back(entry),
                Evicted::Nothing => lock(shard).main.push_back(entry),
                Evicted::Blocks { bytes, rest, blocks } => {
                    freed += bytes;
                    self.evictions.fetch_add(blocks, Ordering::Relaxed);
                    if rest {
                        lock(shard).small.push_back(entry);
                    }
                }
            }
        }
        freed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::cache_pool::CachePool;
    use crate::config::CacheConfig;
    use crate::core::Core;
    use crate::sync::write;
    use poolfs_libservice::{Libservice, Memory};
    use poolfs_types::{Caller, Name, NodeId, OpenFlags};
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    /// A file that is gone must not leave its entry, which keeps the memory of its node.
    #[test]
    fn files_that_come_and_go_leave_nothing() {
        let config = CacheConfig { idle_nodes_max: 0, ..CacheConfig::with_limit(64 << 20) };
        let cache = Cache::new(&CachePool::new(config).unwrap(), Memory::new());
        let name = Name::new(b"f").unwrap();
        for _ in 0..20_000 {
            let (entry, handle) =
                cache.create(&Caller::ROOT, NodeId::ROOT, name, 0o644, OpenFlags::READ_WRITE).unwrap();
            cache.write(&Caller::ROOT, handle, 0, b"x").unwrap();
            cache.release(handle);
            cache.unlink(&Caller::ROOT, NodeId::ROOT, name).unwrap();
            cache.forget(entry.node, 1);
        }
        let entries = cache.core.pool.budget.entries();
        assert!(entries <= SHARDS * (SWEEP_AT_MIN + 1), "{entries} entries of files that are gone");
    }

    #[test]
    fn sweeping_waits_for_no_file() {
        let pool = CachePool::new(CacheConfig::with_limit(1 << 20)).unwrap();
        let core = Core::new(&pool.pool, &pool.background.lists, Memory::new(), None);
        let node = core.get(NodeId::ROOT).unwrap();
        let mut queues = Queues::default();
        let file = Arc::downgrade(&node);
        queues.small.push_back(Entry { file, chunk: 0, ticket: 1 });
        let (told, swept) = channel();
        // Whoever changes a file may be about to put a chunk of it into the queues, and waits for them.
        let state = write(&node.state);
        let sweeper = std::thread::spawn(move || {
            queues.sweep();
            let _ = told.send(queues.small.len());
            queues
        });
        let kept = swept.recv_timeout(Duration::from_secs(5));
        drop(state);
        assert_eq!(kept, Ok(1), "it waited, or took a chunk for gone that it could not look at");
        let mut queues = sweeper.join().unwrap();
        queues.sweep();
        assert_eq!(queues.small.len(), 0, "the chunk is gone");
    }

    #[test]
    fn little_memory_makes_content_leave_but_for_what_it_needs() {
        let cache = {
            let pool = CachePool::new(CacheConfig::with_limit(16 << 20)).unwrap();
            Cache::new(&pool, Memory::new())
        };
        let budget = &cache.core.pool.budget;
        let kept = budget.reserve(3 << 20).unwrap();
        assert_eq!(budget.dirty_max(), (16 << 20) / 100 * 50);
        assert_eq!(budget.allow(8 << 20), 8 << 20);
        assert_eq!(budget.dirty_max(), (8 << 20) / 100 * 50, "a part of what may be used");
        assert!(budget.reserve(6 << 20).is_none() && budget.reserve(5 << 20).is_some());
        assert_eq!(budget.allow(0), 2 << 20, "the floor");
        assert!(budget.reserve(1).is_none());
        drop(kept);
        assert!(budget.reserve(2 << 20).is_some());
        budget.charge(100 << 20);
        assert_eq!(budget.allow(0), 6 << 20, "whatever is charged");
        budget.discharge(100 << 20);
        assert_eq!(budget.allow(u64::MAX), 16 << 20);
        assert!(budget.reserve(16 << 20).is_some());
    }

    #[test]
    fn somebody_looks_after_so_much_and_once() {
        let pool = CachePool::new(CacheConfig::with_limit(16 << 20)).unwrap();
        let budget = &pool.pool.budget;
        let looks = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&looks);
        budget.watch(Box::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        }));
        budget.look_after(1000);
        drop(budget.reserve(999).unwrap());
        budget.charge(1);
        assert_eq!(looks.load(Ordering::Relaxed), 0);
        budget.charge(1);
        budget.charge(5000);
        assert_eq!(looks.load(Ordering::Relaxed), 1);
        budget.look_after(0);
        drop(budget.reserve(1).unwrap());
        assert_eq!(looks.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn what_is_given_back_before_it_is_charged_makes_no_use_of_memory() {
        let pool = CachePool::new(CacheConfig::with_limit(1 << 20)).unwrap();
        let used = || pool.pool.budget.used.load(Ordering::Relaxed);
        let before = used();
        pool.pool.budget.discharge(5000);
        assert_eq!(used(), before);
        pool.pool.budget.charge(5000);
        assert_eq!(used(), before);
        pool.pool.budget.charge(1000);
        assert_eq!(used(), before + 1000);
        pool.pool.budget.discharge(1000);
        assert_eq!(used(), before);
    }
}
