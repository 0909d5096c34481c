//! Identifiers of a layer's nodes and handles, and the ids of owners that have none.

use core::fmt;

/// The number that is nobody's id (`-1`): what an object's owner is where a map has no id for it, as `INVALID_UID` in Linux.
pub const NO_ID: u32 = u32::MAX;

/// What such an owner looks like to users (the kernel's default of `kernel.overflowuid`).
pub const OVERFLOW_ID: u32 = 65534;

/// A file, directory or other object of one layer, valid while the caller holds a reference to it.
///
/// A layer never gives the same number to two different objects during its life.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u64);

impl NodeId {
    /// The root directory of every layer; it needs no reference.
    pub const ROOT: NodeId = NodeId(1);
}

/// An open file or directory of one layer, valid from open to release; never reused during the layer's life.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HandleId(pub u64);

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.0)
    }
}

impl fmt::Debug for HandleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "handle {}", self.0)
    }
}
