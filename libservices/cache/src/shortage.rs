//! Too little memory: the cache makes do with less, and gives nothing of it away.
//!
//! A client that has a segment can keep its pages (in a pipe, by `splice`) when they are taken away: the kernel goes on counting them for this
//! process. So while there is too little memory no segment is given, and those that were given are *retired*: their views end, nothing more
//! comes into them, what is in them is dropped as soon as it is clean, and then they go. What is cached of their files after that is in
//! others, of which no client has a descriptor. Whether the memory came back is measured, and told to those whose clients had the segment.

use crate::blocks::BLOCK;
use crate::budget::Look;
use crate::content::Content;
use crate::node::Node;
use crate::pool::{CachePool, Pool};
use crate::sync::{read, write};
use poolfs_libservice::{Holder, Lease};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// How much of a file is taken away to see whether its memory comes back.
const PROBE_BYTES: u64 = 8 << 20;
/// Most of all files at a time.
const PROBES_BYTES_MAX: u64 = 64 << 20;

/// Most holders remembered of a segment: those given it last.
const GIVEN_MAX: usize = 64;

impl Pool {
    /// Whether there is too little memory.
    pub(crate) fn is_short(&self) -> bool {
        self.is_short.load(Ordering::Acquire)
    }

    /// Goes on with segments that were not empty when they were to go.
    pub(crate) fn go_on_retiring(viewed: &[Arc<Node>]) {
        viewed.iter().filter(|node| read(&node.state).is_retiring).for_each(|node| node.drop_clean());
    }

    /// Takes away what exceeds what may be used, as far as it is clean.
    fn fit(&self) {
        let beyond = self.budget.used().saturating_sub(self.budget.allowed());
        if beyond > 0 && self.budget.evict(beyond) < beyond {
            self.hurry();
        }
    }
}

impl Node {
    /// Notes who is given the segment.
    pub(crate) fn note_given(&self, lease: &Arc<dyn Lease>) {
        let Some(holder) = lease.holder() else { return };
        let is_it = |known: &Weak<dyn Holder>| std::ptr::addr_eq(known.as_ptr(), Arc::as_ptr(&holder));
        if read(&self.state).given.iter().any(is_it) {
            return;
        }
        let mut state = write(&self.state);
        state.given.retain(|known| known.strong_count() > 0);
        if state.given.len() >= GIVEN_MAX {
            state.given.remove(0);
        }
        state.given.push(Arc::downgrade(&holder));
    }

    /// Ends what clients read by themselves, and drops what is clean of it. `beside` is what the
    /// process is counted for beside the cache.
    fn retire(&self, beside: &dyn Fn() -> Option<u64>) {
        let (given, before) = self.update(None, |state| {
            if state.is_pinned() || !matches!(state.content, Content::Segment(_)) {
                return (Vec::new(), 0);
            }
            let (given, before) = (state.given.clone(), state.blocks.counts().resident * BLOCK);
            state.is_retiring = true;
            // Without content it is over.
            state.end_view();
            (given, before)
        });
        if before > 0 {
            self.take_away(&given, beside, || self.drop_clean());
        }
    }

    /// Drops a part of what clients read by themselves, to see whether its memory comes back; how much that was.
    fn probe(&self, first: usize, beside: &dyn Fn() -> Option<u64>) -> u64 {
        let given = {
            let state = read(&self.state);
            let is_segment = matches!(state.content, Content::Segment(_));
            if is_segment && !state.is_pinned() { state.given.clone() } else { Vec::new() }
        };
        if given.is_empty() { 0 } else { self.take_away(&given, beside, || self.drop_clean_from(first, PROBE_BYTES)) }
    }

    fn take_away(&self, given: &[Weak<dyn Holder>], beside: &dyn Fn() -> Option<u64>, drop: impl FnOnce()) -> u64 {
        let resident = || read(&self.state).blocks.counts().resident * BLOCK;
        let (before, had) = (beside(), resident());
        drop();
        let taken = had.saturating_sub(resident());
        // What stays is no more the cache's, and the process is counted for it. Whatever else comes into the cache meanwhile changes nothing
        // of that.
        if let (Some(before), Some(after)) = (before, beside()) {
            let stayed = after.saturating_sub(before).min(taken);
            given.iter().filter_map(Weak::upgrade).for_each(|holder| holder.stayed(taken, stayed));
        }
        taken
    }

    /// Whether somebody has the segment who keeps what is taken away.
    fn is_kept(&self) -> bool {
        read(&self.state).given.iter().filter_map(Weak::upgrade).any(|holder| holder.is_suspended())
    }
}

impl CachePool {
    /// Has `look` called, by whoever comes to use more, when as much more is used as was last said by [`CachePool::look_after`]; once.
    pub fn watch(&self, look: Look) {
        self.pool.budget.watch(look);
    }

    /// When so many more bytes are used somebody is to look.
    pub fn look_after(&self, bytes: u64) {
        self.pool.budget.look_after(bytes);
    }

    /// So many more bytes of the process's memory are used, which are not charged to the cache.
    pub fn grew(&self, bytes: u64) {
        self.pool.budget.grew(bytes);
    }

    /// The cache may use so much from here on, but never less than what it works with, nor more than its limit. What it has beyond that leaves
    /// as soon as it can. Returns what it may use.
    pub fn allow(&self, bytes: u64) -> u64 {
        let allowed = self.pool.budget.allow(bytes);
        self.pool.fit();
        allowed
    }

    /// From here on clients and the kernel are given none of the cache's memory, or may be again.
    pub fn set_short(&self, is_short: bool) {
        self.pool.is_short.store(is_short, Ordering::Release);
        if is_short {
            self.pool.hurry();
        }
    }

    /// Whether nothing of the cache's memory is given away.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.pool.is_short()
    }

    /// Retires the segments that clients have, as far as what is in them is clean; the rest when this is called again. `beside` is what the process is
    /// counted for beside the cache.
    pub fn retire_segments(&self, beside: &dyn Fn() -> Option<u64>) {
        self.pool.viewed_files().iter().for_each(|node| node.retire(beside));
    }

    /// The same of those only that somebody has who keeps what is taken away ([`Holder::is_suspended`]).
    pub fn retire_kept_segments(&self, beside: &dyn Fn() -> Option<u64>) {
        self.pool.viewed_files().iter().filter(|node| node.is_kept()).for_each(|node| node.retire(beside));
    }

    /// Takes away a little of what clients have, and tells whose clients have it whether its memory came back. `turn`: others each time.
    pub fn probe_segments(&self, turn: usize, beside: &dyn Fn() -> Option<u64>) {
        let mut viewed = self.pool.viewed_files();
        let count = viewed.len();
        viewed.rotate_left(turn.checked_rem(count).unwrap_or(0));
        let mut taken = 0;
        for node in viewed {
            taken += node.probe(turn, beside);
            if taken >= PROBES_BYTES_MAX {
                return;
            }
        }
    }
}
