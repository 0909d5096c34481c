//! Leases of segments: whether a client may take the cached bytes it was given for a file's content.
//!
//! A node of the instance has at most one, which all clients share that read it by themselves. It is revoked when the node's
//! content comes to be elsewhere (the union says so), or may be changed by the kernel alone ([`crate::nodes`]).

use poolfs_ipc::segment::{Leases, Life};
use poolfs_libservice::Lease;
use poolfs_libservice::types::Errno;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Leases of one instance.
pub const LEASES_PER_INSTANCE: usize = 1 << 10;

/// The leases of one instance.
pub struct LeaseTable {
    words: Leases,
    file: Arc<OwnedFd>,
    free: Mutex<Vec<u32>>,
}

impl LeaseTable {
    /// A table over its words; `file` is what clients get of them.
    #[must_use]
    pub fn new(words: Leases, file: OwnedFd) -> Arc<Self> {
        let free = Mutex::new((0..words.count() as u32).rev().collect());
        Arc::new(Self { words, file: Arc::new(file), free })
    }

    /// How many it has, and what clients are given to read them.
    #[must_use]
    pub fn shared(&self) -> (u32, Arc<OwnedFd>) {
        (self.words.count() as u32, Arc::clone(&self.file))
    }

    /// Says that the service lives: without it no lease holds.
    ///
    /// # Errors
    /// Those of a robust mutex.
    pub fn live(&self) -> Result<Life<'_>, Errno> {
        self.words.live()
    }

    /// How many are in use.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.words.count().saturating_sub(self.free().len()) as u64
    }

    /// A new lease, if there is one.
    #[must_use]
    pub fn lease(self: &Arc<Self>) -> Option<Arc<SegmentLease>> {
        let number = self.free().pop()?;
        let epoch = self.words.look(number as usize)?.epoch;
        Some(Arc::new(SegmentLease { table: Arc::clone(self), number, epoch, revoked: AtomicBool::new(false) }))
    }

    fn free(&self) -> MutexGuard<'_, Vec<u32>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A lease.
pub struct SegmentLease {
    table: Arc<LeaseTable>,
    number: u32,
    epoch: u32,
    revoked: AtomicBool,
}

impl SegmentLease {
    /// Its place in the table.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// What its word holds as long as it is not revoked.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// A descriptor of its file is being closed; to be called before the kernel is answered.
    pub fn count_closing(&self) {
        self.table.words.count_closing(self.number as usize);
    }

    /// Whether it is over.
    #[must_use]
    pub fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }
}

impl Lease for SegmentLease {
    fn revoke(&self) {
        if !self.revoked.swap(true, Ordering::AcqRel) {
            self.table.words.revoke(self.number as usize);
        }
    }
}

impl Drop for SegmentLease {
    fn drop(&mut self) {
        self.revoke();
        self.table.free().push(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_ipc::segment::leases_length;

    #[test]
    fn a_lease_that_is_over_does_not_come_back() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(leases_length(2) as u64).expect("sized");
        let words = Leases::new(&file, 2, true).expect("leases");
        let seen = Leases::new(&file, 2, false).expect("leases");
        let table = LeaseTable::new(words, file.into());
        let (one, two) = (table.lease().expect("a lease"), table.lease().expect("another"));
        assert!(table.lease().is_none());
        assert_eq!(table.used(), 2);
        let number = one.number() as usize;
        let epoch = || seen.look(number).map(|word| word.epoch);
        assert_eq!(epoch(), Some(one.epoch()));
        one.revoke();
        assert!(one.is_revoked() && epoch() != Some(one.epoch()));
        let over = one.epoch();
        drop(one);
        let again = table.lease().expect("its place");
        assert_eq!((again.number() as usize, epoch()), (number, Some(again.epoch())));
        assert_ne!(again.epoch(), over);
        drop((two, again));
        assert_eq!(table.used(), 0);
    }
}
