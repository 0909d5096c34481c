//! Per-node locks that keep a permission check true until the operation that it allowed is done.

use poolfs_libservice::types::NodeId;
use std::sync::{Mutex, MutexGuard, PoisonError};

const SHARDS: usize = 64;

/// Whoever changes who may do what with a node (owner, group, mode, access list) holds its lock from the check to the change:
/// an owner's new mode is not for the file of the next owner, and bits that a write takes away are not those of a mode set
/// meanwhile. Nothing else is locked or waited for under it but the layers. Nodes share locks.
pub(crate) struct NodeLocks([Mutex<()>; SHARDS]);

impl Default for NodeLocks {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Mutex::default()))
    }
}

impl NodeLocks {
    /// Locks a node; the calling thread must hold none of these locks.
    pub(crate) fn lock(&self, node: NodeId) -> MutexGuard<'_, ()> {
        self.0[node.0 as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }
}
