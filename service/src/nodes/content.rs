//! What the kernel must be told when the user-level path changes the content of a file: that its pages are outdated, and the
//! size.
//!
//! The kernel uses the size it knows without asking in `sendfile`, `splice` and `FIONREAD`, at a fault on a mapping's tail, and
//! as the offset of an append. So any process that has a file open by FUSE may depend on it, including a process without a
//! session that has inherited a description which a session adopted. Only a description that is proved unshared does not count:
//! the library vouches that only its own process has it, that it is not mapped, and that it will say so before that changes
//! (docs/protocol.md).
//!
//! `STORE` raises the size the kernel knows, and only the kernel's own requests lower it: a truncation of an open file is left to
//! the kernel. Any SETATTR is one of them, and so is a LINK of the file, for the kernel takes the size from the answer when it gets to it, however
//! old that is then.

use super::{NodeState, NodeTable};
use crate::sync::lock;
use poolfs_libservice::types::NodeId;
use std::sync::atomic::Ordering;

/// What a change by the user-level path has to tell the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelView {
    /// FUSE's number of the node.
    pub number: u64,
    /// It may hold pages of the file.
    pub may_cache: bool,
    /// Somebody may go by the size the kernel knows.
    pub goes_by_size: bool,
    /// Which change this is.
    pub change: u64,
}

/// As what an open file counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// The kernel may write it without the service's knowing, through a mapping.
    pub writer: bool,
    /// Somebody may go by the size the kernel knows.
    pub by_size: bool,
}

/// A size that the kernel may not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UntoldSize {
    /// FUSE's number of the node.
    pub number: u64,
    /// The last change of the content.
    pub change: u64,
}

/// Requests from whose answers the kernel may still come to take the size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingSizeAnswers {
    /// FUSE's number of the node.
    pub number: u64,
    /// How many there were so far, with those that are applied.
    pub count: u64,
    /// What tells the node's state from earlier and later ones.
    born: u64,
}

impl NodeState {
    fn has_pending_size_answers(&self) -> bool {
        self.size_answers > self.size_answers_applied
    }

    fn goes_by_size(&self) -> bool {
        self.appenders > 0 || self.by_size > 0
    }

    /// Whether one description alone is open, which its process has alone, and the kernel has no pages.
    fn is_a_posters(&self) -> bool {
        let is_alone = self.open_files == 1 && self.by_size == 0 && !self.may_map();
        is_alone && !self.may_cache && self.telling_pages == 0 && self.write_back_failed.is_none()
    }
}

impl NodeTable {
    /// Whether the kernel has the file open.
    #[must_use]
    pub fn is_open(&self, node: NodeId) -> bool {
        self.states(node).get(&node).is_some_and(|state| state.open_files > 0)
    }

    /// FUSE's number of a file that the kernel has open.
    #[must_use]
    pub fn open_number(&self, node: NodeId) -> Option<u64> {
        let states = self.states(node);
        let state = states.get(&node).filter(|state| state.open_files > 0 && state.number != 0)?;
        Some(state.number)
    }

    /// The files that the kernel has open, each with FUSE's number of it.
    pub(crate) fn open_numbers(&self) -> Vec<(NodeId, u64)> {
        let mut open = Vec::new();
        for shard in &self.states {
            let states = lock(shard);
            let of_shard = states.iter().filter(|(_, state)| state.open_files > 0 && state.number != 0);
            open.extend(of_shard.map(|(&node, state)| (node, state.number)));
        }
        open
    }

    /// What the kernel has to be told of the size of an open file when somebody comes to go by it; nothing when it knows it.
    #[must_use]
    pub fn untold_size(&self, node: NodeId) -> Option<UntoldSize> {
        let states = self.states(node);
        let state = states.get(&node).filter(|state| state.open_files > 0 && state.number != 0)?;
        (state.changes > state.size_told).then_some(UntoldSize { number: state.number, change: state.changes })
    }

    /// The content was changed by the user-level path: answers what the kernel must be told, and takes the node as not cached
    /// from here on (a READ that comes now sees the new content and sets the flag again). As long as another change's
    /// notification is on its way, the kernel may still hold what that one is about. A view is followed by
    /// [`NodeTable::told`].
    pub fn changed(&self, node: NodeId) -> Option<KernelView> {
        let mut states = self.states(node);
        let state = states.get_mut(&node)?;
        let view = KernelView {
            number: state.number,
            may_cache: std::mem::take(&mut state.may_cache) || state.telling_pages > 0,
            goes_by_size: state.goes_by_size(),
            change: state.changes + 1,
        };
        state.changes += 1;
        // Who is about to open the file may have been answered the size from before.
        state.size_unshown |= !view.goes_by_size;
        state.highest_byte = 0;
        self.cached_bytes.fetch_sub(std::mem::take(&mut state.cached_bytes), Ordering::Relaxed);
        let tells = view.number != 0 && (view.may_cache || view.goes_by_size);
        state.telling_pages += u32::from(tells);
        tells.then_some(view)
    }

    /// Whether one session alone has to do with the file, and the kernel has nothing of its content.
    #[must_use]
    pub fn may_post(&self, node: NodeId) -> bool {
        self.states(node).get(&node).is_some_and(NodeState::is_a_posters)
    }

    /// Somebody is about to write the file without waiting for answers: the kernel is given no attributes to keep from here on. Whether that can be.
    #[must_use]
    pub fn begin_posting(&self, node: NodeId) -> bool {
        let mut states = self.states(node);
        let state = states.get_mut(&node).filter(|state| state.is_a_posters() && !state.posting);
        state.map(|state| state.posting = true).is_some()
    }

    /// Whether somebody writes the file without waiting for answers.
    #[must_use]
    pub fn is_posting(&self, node: NodeId) -> bool {
        self.states(node).get(&node).is_some_and(|state| state.posting)
    }

    /// Nobody does so any more.
    pub fn end_posting(&self, node: NodeId) {
        let mut states = self.states(node);
        if let Some(state) = states.get_mut(&node) {
            state.posting = false;
        }
        let gone = self.tidy(&mut states, node);
        drop(states);
        drop(gone);
    }

    /// The content was changed by who did not wait for it: the kernel has no pages of it, and nobody goes by the size that it knows.
    pub fn changed_by_post(&self, node: NodeId) {
        if let Some(state) = self.states(node).get_mut(&node) {
            state.changes += 1;
            state.size_unshown = true;
        }
    }

    /// The kernel is about to be answered the size, as it is from here on or later, by what it applies in any case.
    pub fn answers_size(&self, node: NodeId) {
        if let Some(state) = self.states(node).get_mut(&node) {
            state.size_answers += 1;
        }
    }

    /// The requests whose answers may come to be applied after the kernel was told the size of an open file, if there are any.
    #[must_use]
    pub fn pending_size_answers(&self, node: NodeId) -> Option<PendingSizeAnswers> {
        let states = self.states(node);
        let state = states.get(&node).filter(|state| state.open_files > 0 && state.number != 0)?;
        let pending = PendingSizeAnswers { number: state.number, count: state.size_answers, born: state.born };
        state.has_pending_size_answers().then_some(pending)
    }

    /// The answers to these are applied.
    pub fn size_answers_applied(&self, node: NodeId, pending: PendingSizeAnswers) {
        let mut states = self.states(node);
        if let Some(state) = states.get_mut(&node).filter(|state| state.born == pending.born) {
            state.size_answers_applied = state.size_answers_applied.max(pending.count);
        }
    }

    /// The kernel is about to be answered the size, as it is from here on or later.
    pub fn shows_size(&self, node: NodeId) {
        if let Some(state) = self.states(node).get_mut(&node) {
            state.size_unshown = false;
        }
    }

    /// What the kernel has to be told of the size of a file that it opens: it asks for that before it opens, and what is written in between is told
    /// to nobody. Nothing when it knows it.
    #[must_use]
    pub fn unshown_size(&self, node: NodeId) -> Option<UntoldSize> {
        let states = self.states(node);
        let state = states.get(&node).filter(|state| state.open_files > 0 && state.number != 0)?;
        let may_know_less = state.size_unshown || (state.changes > 0 && state.has_pending_size_answers());
        may_know_less.then_some(UntoldSize { number: state.number, change: state.changes })
    }

    /// Whether nothing has changed the content since this change, and the kernel has looked at none of it.
    #[must_use]
    pub fn is_newest(&self, node: NodeId, change: u64) -> bool {
        self.states(node).get(&node).is_some_and(|state| state.changes == change && !state.may_cache)
    }

    /// The kernel knows the size that the file had after this change, or a later one.
    pub fn size_told(&self, node: NodeId, change: u64) {
        if let Some(state) = self.states(node).get_mut(&node) {
            state.size_told = state.size_told.max(change);
            state.size_unshown &= change < state.changes;
        }
    }

    /// The kernel knows of a change of content.
    pub fn told(&self, node: NodeId) {
        if let Some(state) = self.states(node).get_mut(&node) {
            state.telling_pages = state.telling_pages.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_told_once_and_only_when_it_may_hold_pages() {
        let table = NodeTable::default();
        table.enter(NodeId(7), 70);
        table.opened(NodeId(7), false, false);
        assert_eq!(
            table.changed(NodeId(7)),
            Some(KernelView { number: 70, may_cache: false, goes_by_size: true, change: 1 })
        );
        table.told(NodeId(7));
        table.recount(NodeId(7), Counted { writer: false, by_size: true }, Counted::default());
        assert_eq!(table.changed(NodeId(7)), None);
        table.touched(NodeId(7), 0, 4096, false);
        assert_eq!(table.cached_bytes(), 4096);
        let view = |change| Some(KernelView { number: 70, may_cache: true, goes_by_size: false, change });
        assert_eq!(table.changed(NodeId(7)), view(3));
        assert_eq!(table.changed(NodeId(7)), view(4), "the first is still on its way");
        table.told(NodeId(7));
        table.told(NodeId(7));
        assert_eq!(table.changed(NodeId(7)), None);
        assert_eq!(table.cached_bytes(), 0);
    }

    #[test]
    fn unadopted_writers_and_mappings_keep_the_user_level_path_off() {
        let table = NodeTable::default();
        table.enter(NodeId(7), 70);
        table.opened(NodeId(7), true, false);
        assert!(table.may_map(NodeId(7)));
        let kernels = Counted { writer: true, by_size: true };
        table.recount(NodeId(7), kernels, Counted { writer: false, ..kernels });
        assert!(!table.may_map(NodeId(7)));
        table.touched(NodeId(7), 0, 4096, true);
        assert!(table.may_map(NodeId(7)));
        table.closed(NodeId(7), false, Counted { writer: false, ..kernels });
        assert!(!table.may_map(NodeId(7)));
    }

    #[test]
    fn a_size_is_untold_until_somebody_goes_by_it() {
        let table = NodeTable::default();
        let node = NodeId(7);
        table.enter(node, 70);
        assert_eq!(table.untold_size(node), None);
        table.opened(node, true, false);
        let shared = Counted { writer: false, by_size: true };
        table.recount(node, Counted { writer: true, by_size: true }, Counted::default());
        assert_eq!((table.changed(node), table.untold_size(node)), (None, Some(UntoldSize { number: 70, change: 1 })));
        table.recount(node, Counted::default(), shared);
        let view = table.changed(node).expect("somebody goes by the size");
        assert!(view.goes_by_size);
        table.size_told(node, view.change);
        table.told(node);
        assert_eq!(table.untold_size(node), None);
        table.closed(node, false, shared);
        assert!(!table.is_open(node));
    }
}
