//! Sources of branches: the storage that has a branch's content, which one it is, and how it is claimed and opened. Each kind of storage has a
//! module here; what is above knows none of them.

mod ceph;
mod claim;
mod directory;

pub(crate) use ceph::{CephDirectory, Used};
use claim::PAUSE as ENDING_PAUSE;
pub(crate) use claim::{Claim, ClaimKind, ENDING, Unclaimed};
pub(crate) use directory::Directory;

use super::StackError;
use poolfs_libservice::Libservice;
use poolfs_local::Descriptors;
use poolfs_service_protocol::{Branch, CephAccess, Layer, MountSpec, Place, StackSpec};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Which storage it is, whatever it is called.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum BranchId {
    /// A directory of a filesystem of the host.
    Directory { device: u64, inode: u64 },
    /// A directory of a CephFS.
    Ceph(Arc<(CephAccess, PathBuf)>),
}

impl BranchId {
    /// Whether it may be the same storage.
    fn may_be(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Ceph(one), Self::Ceph(other)) => one.0.may_be_one(&other.0) && one.1 == other.1,
            _ => self == other,
        }
    }
}

/// Where the storage of a branch lies: which one it is, and then what it was in when it was given, from the inside out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lineage {
    own: BranchId,
    above: Vec<BranchId>,
}

impl Lineage {
    pub fn id(&self) -> &BranchId {
        &self.own
    }

    /// Whether they are one, or one lies in the other.
    pub fn overlaps(&self, other: &Self) -> bool {
        let lies_in = |inner: &Self, outer: &Self| inner.above.iter().any(|above| above.may_be(&outer.own));
        self.own.may_be(&other.own) || lies_in(self, other) || lies_in(other, self)
    }
}

/// The storage of a branch.
pub(crate) trait Source: Send + Sync {
    /// What it is called: in messages, and in what unions note of their lower branches.
    fn name(&self) -> &Path;

    /// Which storage it is, and where it lies.
    fn lineage(&self) -> &Lineage;

    /// As whom it is used, where the storage asks for that: whoever may not have it otherwise does not get it by way of another's cache.
    fn access(&self) -> Option<Arc<CephAccess>> {
        None
    }

    /// What its lowest layer is called.
    fn layer(&self) -> Layer;

    /// Keeps others from using it in ways that contradict this one, if need be after so long.
    fn claim(&self, kind: ClaimKind, wait: Duration) -> Result<Claim, Unclaimed>;

    /// Whether all that is stored takes the pool's memory.
    fn is_in_memory(&self) -> Result<bool, StackError>;

    /// What a client of it takes of the pool's memory, where that has one of its own.
    fn memory_bytes(&self) -> u64 {
        0
    }

    /// Its content as the lowest layer of a stack. What that layer has open counts among `descriptors`.
    fn open(&self, read_only: bool, descriptors: &Arc<Descriptors>) -> Result<Arc<dyn Backend>, StackError>;
}

/// All of a mount's stack: directories of the host as the control side has sent them, the others as it says.
pub(crate) fn received(spec: &MountSpec, descriptors: Vec<OwnedFd>) -> Result<Vec<Arc<dyn Source>>, StackError> {
    let branches = spec.stack.branches();
    let access = spec.ceph.as_deref().cloned().unwrap_or_default();
    let by_anybody = matches!(&spec.stack, StackSpec::Directory { coherence, .. } if coherence.timed().is_some());
    let used = |branch: &Branch<'_>| match (branch.read_only, by_anybody) {
        (true, _) => Used::Read,
        (false, true) => Used::ByAnybody,
        (false, false) => Used::Written,
    };
    let mut directories = Directory::received_all(spec, descriptors)?.into_iter();
    let source = |branch: &Branch<'_>| -> Option<Arc<dyn Source>> {
        match branch.place() {
            Place::Directory(_) => directories.next().map(|directory| Arc::new(directory) as Arc<dyn Source>),
            Place::Ceph(path) => Some(Arc::new(CephDirectory::new(branch.name, path, &access, used(branch)))),
        }
    };
    Ok(branches.iter().filter_map(source).collect())
}

/// The lowest layer of a stack.
pub(crate) trait Backend: Libservice {
    /// Nobody is going to look at its content again: from here on nothing is made durable.
    fn discard(&self);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_one_or_lies_in_another_overlaps() {
        let id = |inode| BranchId::Directory { device: 1, inode };
        let lineage = |own, above: &[u64]| Lineage { own: id(own), above: above.iter().copied().map(id).collect() };
        let [root, a, b, in_a] = [lineage(1, &[]), lineage(2, &[1]), lineage(3, &[1]), lineage(4, &[2, 1])];
        for (one, other, overlaps) in
            [(&a, &a, true), (&root, &in_a, true), (&a, &in_a, true), (&b, &in_a, false), (&a, &b, false)]
        {
            assert_eq!((one.overlaps(other), other.overlaps(one)), (overlaps, overlaps), "{one:?} {other:?}");
        }
    }
}
