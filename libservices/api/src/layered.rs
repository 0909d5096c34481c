//! The interface of a layer over read-only branches beyond [`Libservice`]: list its differences from them, and become independent
//! of them.

use crate::{Libservice, Result};
use poolfs_types::{Attributes, NodeId};
use std::ops::{ControlFlow, Range};
use std::sync::RwLockWriteGuard;

/// What differs under a name.
#[derive(Clone, Copy, Debug)]
pub enum Difference<'a> {
    /// The lower branches have something there, and the layer has nothing.
    Removed,
    /// The layer has something of its own there.
    Object {
        /// Its number, which is good while it is told of.
        node: NodeId,
        /// What the layer shows of it.
        attributes: &'a Attributes,
        /// What the lower branches have there.
        relation: Relation,
    },
}

/// How an object of the layer stands to what the lower branches have under its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// They have nothing.
    Added,
    /// It is theirs, with other attributes or another content; of a directory, perhaps only because something in it differs.
    Changed,
    /// They have another object. Nothing that they have in a directory of this name is in this one.
    Replaced,
}

/// Told of each difference, with its path; whether to go on.
pub type Visit<'a> = dyn FnMut(&[u8], Difference<'_>) -> Result<ControlFlow<()>> + 'a;

/// As long as it is there, nobody changes what the layer shows: who wants to waits.
#[must_use]
pub struct ChangesHeld<'a>(#[expect(dead_code, reason = "the lock is what it is for")] RwLockWriteGuard<'a, ()>);

impl<'a> ChangesHeld<'a> {
    /// Of a layer whose changes each hold this lock for reading.
    pub fn by(lock: RwLockWriteGuard<'a, ()>) -> Self {
        ChangesHeld(lock)
    }
}

/// What a flattening has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flattened {
    /// Files that need no lower branch any more.
    pub files: u64,
    /// Bytes copied for it.
    pub bytes: u64,
    /// How many could not be completed.
    pub failed: u64,
    /// Those, at most 100: path, of which at most 4096 bytes and three dots, and cause.
    pub failures: Vec<(Vec<u8>, String)>,
}

/// A layer over read-only branches.
pub trait Layered: Libservice {
    /// Tells `visit` of everything in which it differs from its lower branches, each directory before what is in it, the root first of all and
    /// names in order; paths are from the root, without a leading slash. What is changed meanwhile is told of as it was, as it is, or not at all.
    ///
    /// # Errors
    /// Those of `visit`; `ENAMETOOLONG` for a directory that is deeper than [`WALK_DEPTH_MAX`](crate::walk::WALK_DEPTH_MAX), `ENOMEM` when there is
    /// no room for the names of one and of those above it; what the branches answer.
    fn differences(&self, visit: &mut Visit<'_>) -> Result<()>;

    /// Whether the permissions, the owners or the extended attributes of the root, which is always told of, are not those that the lower branches
    /// have of theirs.
    ///
    /// # Errors
    /// What the branches answer.
    fn root_differs(&self) -> Result<bool>;

    /// Parts of a regular file, from `from` on and in order, whose bytes are not the lower branches': those that have been written since, or
    /// are new. Whole blocks, cut at the file's end; at most `most` of them, which must not be 0. Holes of files that are not the lower branches' are left out.
    ///
    /// # Errors
    /// `ESTALE` for a node that is no more, `EINVAL` for one that is no regular file, `EIO` for a damaged one; what the branches answer.
    fn changed_parts(&self, node: NodeId, from: u64, most: usize) -> Result<Vec<Range<u64>>>;

    /// Waits for all changes under way, and has those that come wait.
    fn hold_changes(&self) -> ChangesHeld<'_>;

    /// Copies what files have in lower branches only, a mebibyte at a time, so that nobody waits for long who uses one of them. Ends early
    /// when `go_on` says so, which is asked before each.
    ///
    /// # Errors
    /// When the differences cannot be listed. What concerns a file alone is told of in the result.
    fn flatten(&self, go_on: &dyn Fn() -> bool) -> Result<Flattened>;
}
