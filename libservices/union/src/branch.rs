//! What the union knows of a lower branch.

use poolfs_libservice::Held;
use std::sync::Arc;

/// A node of a lower branch and where it was found.
#[derive(Clone)]
pub(crate) struct LowerNode {
    /// index of the branch, 0 the topmost
    pub layer: usize,
    pub held: Arc<Held>,
    /// from the branch's root, without a leading slash
    pub path: Arc<[u8]>,
}

/// `parent/name`, or `name` in the root.
pub(crate) fn join(parent: &[u8], name: &[u8]) -> Arc<[u8]> {
    if parent.is_empty() { Arc::from(name) } else { [parent, b"/", name].concat().into() }
}
