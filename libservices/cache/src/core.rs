//! What the nodes of one cache layer share, whatever they are: the layer below, the table in which they are found, the names, and
//! the space left below.

use crate::blocks::{BLOCK, Held};
use crate::file_lists::FileLists;
use crate::leaving::Leaving;
use crate::ledger::Recorder;
use crate::names::Names;
use crate::pool::Pool;
use crate::sync::{lock, read};
use hashbrown::HashMap;
use poolfs_libservice::{Coherence, Libservice, Result, Share, Shares, Upcalls};
use poolfs_types::{Caller, Errno, NodeId};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, Weak};

const SHARDS: usize = 32;

/// A part of the table of nodes.
pub(crate) type Shard<N> = RwLock<HashMap<NodeId, Arc<N>>>;

/// What is known of the room below for what is to become dirty.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    Enough,
    Short,
    /// Quotas may refuse what there is room for: whether something has room shows when it is stored, and no earlier.
    Unforeseen,
}

/// What the nodes of a layer share; they are `N`.
pub(crate) struct Core<N> {
    pub(crate) below: Arc<dyn Libservice>,
    pub(crate) pool: Arc<Pool>,
    /// The pool's lists of what there is to do.
    pub(crate) lists: Arc<FileLists<N>>,
    pub(crate) names: Names,
    /// Who else changes the layer below.
    pub(crate) coherence: Coherence,
    /// Who is told what that layer says of changes by others.
    pub(crate) above: Mutex<Option<Weak<dyn Upcalls>>>,
    /// Where what is dirty is noted, if it is.
    pub(crate) recorder: Option<Recorder>,
    pub(crate) shards: [Shard<N>; SHARDS],
    idle: Mutex<VecDeque<NodeId>>,
    pub(crate) removals: AtomicU64,
    used: Arc<AtomicU64>,
    /// Whether what is written back is kept until the layer below has stored where it is.
    pub(crate) keeps_deferred: bool,
    /// Dirty bytes, and those that are not stored below, beside those of other layers.
    pub(crate) dirty: Arc<Share>,
    /// Bytes that are not dirty, but not stored below either.
    deferred: AtomicU64,
    taken: AtomicU64,
    /// Pages of the maps by which clients read its files, beside those of other layers.
    pub(crate) map_pages: Arc<Share>,
    /// Bytes of answers that are kept beside its nodes, beside those of other layers.
    pub(crate) answers: Arc<Share>,
    held: AtomicU64,
    /// Files without a name that somebody holds.
    pub(crate) leaving: Leaving,
    /// Bytes that may still become dirty before the layer below has to be asked how much room it has.
    room: AtomicI64,
}

/// The pool's memory that the files of a layer use.
#[derive(Clone)]
pub struct Usage(Arc<AtomicU64>);

impl Usage {
    /// Bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl<N> Core<N> {
    /// That of a layer without any node.
    pub(crate) fn empty(
        pool: Arc<Pool>,
        lists: Arc<FileLists<N>>,
        below: Arc<dyn Libservice>,
        recorder: Option<Recorder>,
    ) -> Arc<Self>
    where
        Self: Upcalls + 'static,
    {
        let names = Names::new(pool.config.names_max);
        let dirty = if below.read_only() { Shares::new(0).join() } else { pool.dirty_shares.join() };
        let map_pages = pool.map_shares.join();
        let answers = pool.answer_shares.join();
        let keeps_deferred = recorder.is_some() && below.defers();
        Arc::new_cyclic(|me: &Weak<Self>| Self {
            coherence: below.attach(me.clone()),
            above: Mutex::default(),
            below,
            leaving: Leaving::new(pool.config.leaving_wait_max),
            pool,
            lists,
            names,
            recorder,
            shards: Default::default(),
            idle: Mutex::default(),
            removals: AtomicU64::new(0),
            used: Arc::default(),
            keeps_deferred,
            dirty,
            deferred: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            map_pages,
            answers,
            held: AtomicU64::new(0),
            room: AtomicI64::new(0),
        })
    }

    /// The part of the table in which a node is, if it is known.
    pub(crate) fn shard(&self, id: NodeId) -> &Shard<N> {
        &self.shards[(id.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize % SHARDS]
    }

    pub(crate) fn usage(&self) -> Usage {
        Usage(Arc::clone(&self.used))
    }

    /// Bytes that whoever comes after this process does not find below.
    pub(crate) fn unsettled_bytes(&self) -> u64 {
        self.dirty.used()
    }

    /// Bytes that are not below.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.unsettled_bytes().saturating_sub(self.deferred.load(Ordering::Relaxed))
    }

    /// Whether so much is written back, and not stored, that to store it makes more room than to write back more.
    pub(crate) fn is_mostly_deferred(&self) -> bool {
        self.deferred.load(Ordering::Relaxed).saturating_mul(2) >= self.unsettled_bytes().max(1)
    }

    /// Whether the layer has more dirty bytes than are its own whatever others have. If all layers together have more than half of what may
    /// be dirty, one of them has. To write back for a layer that has not makes no room for others.
    pub(crate) fn is_beyond_its_part(&self) -> bool {
        self.dirty.used() > self.dirty.reserved()
    }

    /// Bytes that were written back so far, ever.
    pub(crate) fn taken_bytes(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// So many more were.
    pub(crate) fn note_taken(&self, bytes: u64) {
        self.taken.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Dirty bytes that are not on hold.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.dirty_bytes().saturating_sub(self.held.load(Ordering::Relaxed))
    }

    pub(crate) fn settle(&self, before: Held, after: Held) {
        // Wrapping arithmetic: a difference is added, whatever its sign.
        self.used.fetch_add(after.cost.bytes.wrapping_sub(before.cost.bytes), Ordering::Relaxed);
        let (before, after) = (before.counts, after.counts);
        self.held.fetch_add(after.held.wrapping_sub(before.held).wrapping_mul(BLOCK), Ordering::Relaxed);
        self.deferred.fetch_add(after.deferred.wrapping_sub(before.deferred).wrapping_mul(BLOCK), Ordering::Relaxed);
        if after.dirty > before.dirty {
            let dirtied = (after.dirty - before.dirty) * BLOCK;
            self.room.fetch_sub(dirtied as i64, Ordering::Relaxed);
        }
        let (before, after) = (before.unsettled(), after.unsettled());
        if after > before {
            self.dirty.force((after - before) * BLOCK);
        } else if after < before {
            self.dirty.subtract((before - after) * BLOCK);
        }
    }

    /// Whether there is room below for `bytes` more dirty ones.
    pub(crate) fn room_for(&self, bytes: u64) -> Room {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        if self.room.load(Ordering::Relaxed) > bytes {
            return Room::Enough;
        }
        let Ok(statistics) = self.below.statfs(&Caller::ROOT, NodeId::ROOT) else { return Room::Enough };
        if statistics.has_quotas {
            return Room::Unforeseen;
        }
        if statistics.blocks == 0 || statistics.block_size == 0 {
            // A backend that does not say how large it is.
            self.room.store(1 << 30, Ordering::Relaxed);
            return Room::Enough;
        }
        let unit = u64::from(statistics.block_size);
        // The layer below needs blocks for its own maps too.
        let margin = (statistics.blocks.saturating_mul(unit) / 50).clamp(256 << 10, 64 << 20);
        let free = statistics.blocks_available.saturating_mul(unit);
        let room = free.saturating_sub(margin).saturating_sub(self.dirty_bytes());
        let room = i64::try_from(room).unwrap_or(i64::MAX);
        self.room.store(room, Ordering::Relaxed);
        if room > bytes { Room::Enough } else { Room::Short }
    }

    /// Others use the room below too: ask again before the next write.
    pub(crate) fn forget_room(&self) {
        self.room.store(0, Ordering::Relaxed);
    }

    /// Calls something below that needs room; again when there may be more, because a file without a name has ended meanwhile.
    pub(crate) fn with_room<T>(&self, call: impl Fn() -> Result<T>) -> Result<T> {
        let is_full = |result: &Result<T>| result.as_ref().is_err_and(|error| error.errno() == Errno::ENOSPC);
        let mut result = call();
        if is_full(&result) {
            self.leaving.wait(&mut || {
                if is_full(&result) {
                    result = call();
                }
                !is_full(&result)
            });
        }
        result
    }

    pub(crate) fn get(&self, id: NodeId) -> Option<Arc<N>> {
        read(self.shard(id)).get(&id).map(Arc::clone)
    }

    /// How often something has come that may have outdated answers: a node has left the table, or others have changed something. Taken before asking below for an entry that [`Core::adopt`] gets.
    pub(crate) fn removals(&self) -> u64 {
        self.removals.load(Ordering::Acquire)
    }

    /// Every node.
    pub(crate) fn nodes(&self) -> Vec<Arc<N>> {
        self.shards.iter().flat_map(|shard| read(shard).values().map(Arc::clone).collect::<Vec<_>>()).collect()
    }

    /// A node is idle from now on; how many there are then in the pool.
    pub(crate) fn push_idle(&self, id: NodeId) -> usize {
        // Counted before it can be popped, so that the count is never less than nothing.
        let count = self.pool.idle.count_one_more();
        lock(&self.idle).push_back(id);
        count
    }

    /// The node that has been idle for longest is idle no more.
    pub(crate) fn pop_idle(&self) -> Option<NodeId> {
        let id = lock(&self.idle).pop_front()?;
        self.pool.idle.count_less(1);
        Some(id)
    }

    /// How many nodes are idle.
    pub(crate) fn idle_nodes(&self) -> usize {
        lock(&self.idle).len()
    }
}
