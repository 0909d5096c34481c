//! The account of one branch: what it stores, what is promised, and the limit on both.

use poolfs_types::limits::{BLOCK_SIZE, CACHED_SIZE_MAX, PAGE_TREE_FANOUT, PAGE_TREE_NODE_BYTES};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that names and attributes may take beyond the limit, so that what is full can be tidied up: a sixteenth of the limit, at most this.
const SLACK_MAX: u64 = 1 << 20;

/// The account of one branch.
#[derive(Debug)]
pub struct Account {
    limit: u64,
    /// whether names and attributes take memory of which the backend tells nothing
    in_memory: bool,
    used: AtomicU64,
    /// room of calls that are under way
    promised: AtomicU64,
}

/// Room for a call that is under way; given back when dropped, as what the call stored is then counted by itself.
pub(crate) struct Promise<'a> {
    account: &'a Account,
    bytes: u64,
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        self.account.promised.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// In memory, what finding `bytes` of pages takes at most, wherever they are in an object of this size: each level of the tree has no more nodes
/// than there are pages, and no more than find all of the size.
pub(crate) fn tree_bytes(bytes: u64, size: u64) -> u64 {
    let (pages, mut most) = (bytes.div_ceil(BLOCK_SIZE as u64), size.div_ceil(BLOCK_SIZE as u64));
    let mut nodes = 0_u64;
    while most > 1 {
        most = most.div_ceil(PAGE_TREE_FANOUT);
        nodes = nodes.saturating_add(most.min(pages));
    }
    nodes.saturating_mul(PAGE_TREE_NODE_BYTES)
}

impl Account {
    /// An account of at most `limit` bytes, of which none is used.
    #[must_use]
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Account { limit, in_memory: false, used: AtomicU64::new(0), promised: AtomicU64::new(0) })
    }

    /// The same of a branch whose filesystem keeps everything in memory: counted is also what names and attributes take there, of which such a
    /// filesystem tells nothing.
    #[must_use]
    pub fn in_memory(limit: u64) -> Arc<Self> {
        Arc::new(Account { limit, in_memory: true, used: AtomicU64::new(0), promised: AtomicU64::new(0) })
    }

    pub(crate) fn is_in_memory(&self) -> bool {
        self.in_memory
    }

    /// The limit, bytes.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// What the backend has given to files and directories of the branch, bytes.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }

    /// An object that took `before` bytes takes `after`.
    pub(crate) fn settle(&self, before: u64, after: u64) {
        // Each object is settled by what was settled before, so the sum never goes below zero.
        if after >= before {
            self.used.fetch_add(after - before, Ordering::AcqRel);
        } else {
            self.used.fetch_sub(before - after, Ordering::AcqRel);
        }
    }

    /// What so many bytes of whole blocks are counted for at most when they are stored.
    pub(crate) fn most_stored(&self, bytes: u64) -> u64 {
        if self.in_memory { bytes.saturating_add(tree_bytes(bytes, CACHED_SIZE_MAX)) } else { bytes }
    }

    /// What is neither used nor promised, where `dirty` bytes wait in the cache.
    pub(crate) fn free(&self, dirty: u64) -> u64 {
        let taken = self.used().saturating_add(self.promised.load(Ordering::Acquire)).saturating_add(dirty);
        self.limit.saturating_sub(taken)
    }

    /// Promises `bytes`, if they are free. What is used is asked for last and what is promised first, so that what another call or the
    /// cache turns from one into the next is not missed on its way.
    pub(crate) fn promise(&self, bytes: u64, dirty: impl FnOnce() -> u64) -> Option<Promise<'_>> {
        // What can never be free is not added: sums of some of that begin again at zero, and all of them would seem to be free.
        if bytes > self.limit {
            return None;
        }
        self.promised.fetch_add(bytes, Ordering::AcqRel);
        let promise = Promise { account: self, bytes };
        let taken = self.promised.load(Ordering::Acquire).saturating_add(dirty()).saturating_add(self.used());
        (taken <= self.limit).then_some(promise)
    }

    /// Whether names and attributes may still be added.
    pub(crate) fn has_room_for_names(&self, dirty: u64) -> bool {
        self.used().saturating_add(dirty) < self.limit.saturating_add((self.limit / 16).min(SLACK_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_promised_and_dirty_is_never_more_than_the_limit() {
        let account = Account::new(100);
        account.settle(0, 50);
        let first = account.promise(30, || 0).expect("free");
        assert!(account.promise(21, || 0).is_none() && account.promise(20, || 1).is_none());
        assert_eq!(account.free(5), 15);
        let second = account.promise(20, || 0).expect("free");
        assert_eq!(account.free(0), 0);
        drop((first, second));
        account.settle(50, 20);
        assert_eq!((account.used(), account.free(0)), (20, 80));
    }

    #[test]
    fn what_can_never_be_free_makes_no_room_for_others() {
        let account = Account::new(100);
        let while_asked = || {
            assert!(account.promise(1 << 63, || 0).is_none(), "twice as much is no more than nothing");
            0
        };
        assert!(account.promise(1 << 63, while_asked).is_none());
        assert!(account.promise(100, || 0).is_some());
    }

    #[test]
    fn names_may_be_added_a_little_longer() {
        let account = Account::new(1600);
        account.settle(0, 1699);
        assert!(account.has_room_for_names(0) && !account.has_room_for_names(1));
        assert!(account.promise(0, || 0).is_none(), "data is beyond its limit");
    }
}
