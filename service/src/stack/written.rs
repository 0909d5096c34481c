//! The dirty data of a stack, and its progress towards the disk.

use super::{Role, Stack};
use std::sync::Arc;

impl Stack {
    /// Bytes that were accepted and are not below yet.
    pub fn pending_bytes(&self) -> u64 {
        self.caches().map(|cache| cache.pending_bytes()).sum()
    }

    /// Bytes of that kind that its branches have taken so far, ever.
    pub fn taken_bytes(&self) -> u64 {
        self.caches().map(|cache| cache.taken_bytes()).fold(0, u64::wrapping_add)
    }

    /// How often what waits above its branches was brought further towards them.
    pub fn settled(&self) -> u64 {
        self.union.as_ref().map_or(0, |union| union.0.settled())
    }

    /// What says, when all have let go of the stack who do so before the process ends, whether the next process finds what it has written.
    pub fn left_behind(&self) -> impl Fn() -> bool + use<> {
        let kept = self.branches.iter().filter(|branch| branch.kept.is_kept);
        let kept: Vec<_> = kept.map(Arc::downgrade).collect();
        move || kept.iter().any(|branch| branch.strong_count() > 0)
    }

    /// Nobody is going to look at what it has written, if others do not show the same: from here on nothing of it is made durable.
    pub fn discard(&self) {
        let own = self.branches.iter().filter(|branch| branch.role == Role::Upper);
        own.for_each(|branch| branch.backend.discard());
    }
}
