//! The bound on transfer memory: the buffers of threads that read the kernel's requests, and the entries of rings.
//!
//! Each thread has a buffer that one request of a MiB fills, and so has each entry of a ring. A pool of many mounts has many of
//! them, so their number is bounded for the pool, and the cache gets by without the memory that they have come to use
//! ([`Charge`]).
//!
//! The first thread of a mount needs no permission: every mount goes on, however many others there are. It is counted like all
//! others. Further threads are started when they are needed and end when they are not ([`MountTransfers::permit`]); they are
//! divided among the mounts like everything else that instances share. Entries of rings stay as long as their mount. Each mount
//! has equally many, so they are not divided: they are given to the mounts that come first ([`MountTransfers::entries`]), and
//! fewer to each when half of them are given.

use crate::pool_memory::PoolMemory;
use poolfs_libservice::{Share, Shares, Taken};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a thread or an entry may come to use.
const TRANSFER_BYTES: u64 = 1 << 20;

/// So much of its memory a thread keeps, and nothing is charged with.
pub(crate) const KEPT_BYTES: usize = 32 << 10;

/// Threads: one part in so many of the limit of the service's control group, within bounds; those beyond what is reserved for each mount are half
/// of them, the first thread of each mount is within what is reserved.
const THREADS_PART: u64 = 8;
const THREADS_MIN: u64 = 32;
const THREADS_MAX: u64 = 1024;

/// Entries of rings, the same.
const ENTRIES_PART: u64 = 2;
const ENTRIES_MIN: u64 = 32;
const ENTRIES_MAX: u64 = 4096;

/// When one part in so many of the threads have a permit, those that have nothing to do are to end.
const SCARCE_PART: u64 = 4;

/// What the mounts of a pool share.
pub(crate) struct PoolTransfers {
    threads: Arc<Shares>,
    /// Of those, how many are not the first of their mount.
    permits: Arc<AtomicU64>,
    entries_max: u64,
    entries: Arc<AtomicU64>,
    memory: Arc<dyn PoolMemory>,
}

/// What one mount has of it.
pub(crate) struct MountTransfers {
    threads: Arc<Share>,
    threads_max: u64,
    permits: Arc<AtomicU64>,
    entries_max: u64,
    entries: Arc<AtomicU64>,
    memory: Arc<dyn PoolMemory>,
}

/// Leave for a thread, given back when dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    _taken: Taken,
    _counted: Counted,
}

/// So many are counted as long as there is this.
#[derive(Debug)]
pub(crate) struct Counted {
    of: Arc<AtomicU64>,
    count: u64,
}

impl Counted {
    fn new(of: &Arc<AtomicU64>, count: u64) -> Self {
        of.fetch_add(count, Ordering::Relaxed);
        Self { of: Arc::clone(of), count }
    }

    /// So many, if no more than `max` are counted then.
    fn more(of: &Arc<AtomicU64>, count: u64, max: u64) -> Option<Self> {
        let fits = |now: u64| now.checked_add(count).filter(|&sum| sum <= max);
        of.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(Self { of: Arc::clone(of), count })
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.of.fetch_sub(self.count, Ordering::Relaxed);
    }
}

impl PoolTransfers {
    /// For a service whose control group has this limit, if it has one.
    pub(crate) fn new(group_limit: Option<u64>, memory: Arc<dyn PoolMemory>) -> Self {
        let limit = group_limit.unwrap_or(u64::MAX);
        let part = |part: u64| limit / part / TRANSFER_BYTES;
        let (permits, entries) = Default::default();
        Self {
            threads: Shares::new(part(THREADS_PART).clamp(THREADS_MIN, THREADS_MAX)),
            permits,
            entries_max: part(ENTRIES_PART).clamp(ENTRIES_MIN, ENTRIES_MAX),
            entries,
            memory,
        }
    }

    /// While there is too little memory, no mount has threads beyond what is reserved for it, but those that it has.
    pub(crate) fn tighten(&self, is_short: bool) {
        self.threads.tighten(is_short);
    }

    /// What one more mount has.
    pub(crate) fn join(&self) -> Arc<MountTransfers> {
        let threads = self.threads.join();
        // The first thread, which there always is.
        threads.force(1);
        Arc::new(MountTransfers {
            threads,
            threads_max: self.threads.total(),
            permits: Arc::clone(&self.permits),
            entries_max: self.entries_max,
            entries: Arc::clone(&self.entries),
            memory: Arc::clone(&self.memory),
        })
    }
}

impl MountTransfers {
    /// What a mount has that shares nothing with others.
    pub(crate) fn alone() -> Arc<Self> {
        struct Plenty;
        impl PoolMemory for Plenty {
            fn charge(&self, _: u64) {}
            fn discharge(&self, _: u64) {}
        }
        PoolTransfers::new(None, Arc::new(Plenty)).join()
    }

    /// Leave for a thread beside the first.
    pub(crate) fn permit(&self) -> Option<Permit> {
        Some(Permit { _taken: self.threads.take(1)?, _counted: Counted::new(&self.permits, 1) })
    }

    /// Whether so many threads have leave that others may find none: who has nothing to do is to give it back.
    pub(crate) fn is_scarce(&self) -> bool {
        self.permits.load(Ordering::Relaxed) >= self.threads_max / SCARCE_PART
    }

    /// Leave for the entries of a mount: for `all`, or for the `fewest` with which it works.
    pub(crate) fn entries(&self, all: usize, fewest: usize) -> Option<(usize, Counted)> {
        let take = |count: usize, max: u64| Some((count, Counted::more(&self.entries, count as u64, max)?));
        take(all, self.entries_max / 2).or_else(|| take(fewest, self.entries_max))
    }

    /// What the pool's memory is to be charged with for a thread or an entry; nothing yet.
    pub(crate) fn charge(&self) -> Charge {
        Charge { memory: Arc::clone(&self.memory), bytes: 0 }
    }
}

/// The memory that a thread or an entry has come to use, with which that of the pool is charged until this is dropped.
pub(crate) struct Charge {
    memory: Arc<dyn PoolMemory>,
    bytes: usize,
}

impl Charge {
    /// So much is used. What is more than before is charged at once, as many come to use theirs in a moment.
    pub(crate) fn note_used(&mut self, used: usize) {
        if used > KEPT_BYTES.max(self.bytes) {
            self.memory.charge((used - self.bytes) as u64);
            self.bytes = used;
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.memory.discharge(self.bytes as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::tests::Memory;

    const GROUP: u64 = 200 << 20;

    fn pool(limit: Option<u64>) -> PoolTransfers {
        PoolTransfers::new(limit, Arc::new(Memory::default()))
    }

    fn all(mount: &MountTransfers) -> Vec<Permit> {
        std::iter::from_fn(|| mount.permit()).collect()
    }

    #[test]
    fn threads_of_many_mounts_fit_into_the_group_and_none_takes_those_of_the_others() {
        for count in [2, 4, 10] {
            let pool = pool(Some(GROUP));
            let mounts: Vec<_> = (0..count).map(|_| pool.join()).collect();
            let permits: Vec<_> = mounts.iter().map(|mount| all(mount)).collect();
            let half = 32 / (2 * count);
            assert_eq!(permits[0].len(), 16 + half - 1, "of {count}");
            assert!(permits.iter().all(|permits| permits.len() + 1 >= half), "of {count}");
            assert!(permits.iter().map(Vec::len).sum::<usize>() + count <= 32, "of {count}");
        }
        let pool = pool(Some(GROUP));
        let mounts: Vec<_> = (0..64).map(|_| pool.join()).collect();
        let permits: Vec<_> = mounts.iter().map(|mount| all(mount)).collect();
        assert_eq!(permits.iter().map(Vec::len).sum::<usize>(), 16, "beside 64 that need none");
    }

    #[test]
    fn permits_are_given_back_with_their_threads_and_scarce_before_there_are_none() {
        let pool = pool(Some(GROUP));
        let [one, other] = [pool.join(), pool.join()];
        assert!(!one.is_scarce());
        let mut permits = all(&one);
        assert!(one.is_scarce() && other.is_scarce());
        permits.truncate(7);
        assert!(!other.is_scarce());
        drop(permits);
        assert_eq!(all(&other).len(), 23);
    }

    #[test]
    fn while_memory_is_short_there_are_only_threads_that_are_reserved() {
        let pool = pool(Some(GROUP));
        let mounts: Vec<_> = (0..64).map(|_| pool.join()).collect();
        pool.tighten(true);
        assert!(mounts[0].permit().is_none());
        pool.tighten(false);
        assert!(mounts[0].permit().is_some());
    }

    #[test]
    fn later_mounts_have_fewer_entries_and_the_last_have_none() {
        // As of a cache of 512 MiB.
        let pool = pool(Some(704 << 20));
        let mounts: Vec<_> = (0..100).map(|_| pool.join()).collect();
        let given: Vec<_> = mounts.iter().map_while(|mount| mount.entries(8, 4)).collect();
        let counts: Vec<_> = given.iter().map(|(count, _)| *count).collect();
        assert_eq!((counts.len(), counts[21], counts[22], counts[65]), (66, 8, 4, 4));
        drop(given);
        assert_eq!(mounts[0].entries(8, 4).map(|(count, _)| count), Some(8));
    }

    #[test]
    fn without_a_group_and_in_the_smallest_a_mount_has_several_threads_and_rings() {
        for limit in [None, Some(u64::MAX), Some(40 << 20)] {
            let mount = pool(limit).join();
            assert!(all(&mount).len() >= 23, "{limit:?}");
            assert!(mount.entries(16, 8).is_some(), "{limit:?}");
        }
        assert_eq!(all(&MountTransfers::alone()).len(), 767);
    }
}
