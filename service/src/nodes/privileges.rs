//! Remembers which files have no set-id bits and capabilities, so that they need not be looked up before a write.

use super::NodeTable;
use poolfs_libservice::types::NodeId;
use std::sync::atomic::Ordering;

/// What is known of a node's set-id bits and capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Privileges {
    /// It has none.
    pub none: bool,
    /// Tells whether they have changed when somebody has looked at the node.
    version: u64,
}

impl NodeTable {
    /// What is known of the node's set-id bits and capabilities.
    pub fn privileges(&self, node: NodeId) -> Privileges {
        let states = self.states(node);
        states.get(&node).map_or(Privileges { none: false, version: 0 }, |state| Privileges {
            none: state.unprivileged,
            version: state.privileges,
        })
    }

    /// Notes that the node was found without set-id bits and capabilities after `seen` was known of it, unless they have
    /// changed since.
    pub fn note_unprivileged(&self, node: NodeId, seen: Privileges) {
        if let Some(state) = self.states(node).get_mut(&node).filter(|state| state.privileges == seen.version) {
            state.unprivileged = true;
        }
    }

    /// Its set-id bits or capabilities may have changed. To be called after the change: whoever looked before it and notes
    /// what he saw later is too late then, and what he noted earlier is forgotten.
    pub fn privileges_changed(&self, node: NodeId) {
        // Whoever sees the new state sees this.
        self.privileges_changes.fetch_add(1, Ordering::SeqCst);
        let version = self.privileges.fetch_add(1, Ordering::Relaxed);
        if let Some(state) = self.states(node).get_mut(&node) {
            state.unprivileged = false;
            state.privileges = version;
        }
    }

    /// How often privileges of any node have changed so far.
    pub(crate) fn privileges_changes(&self) -> u64 {
        self.privileges_changes.load(Ordering::SeqCst)
    }

    /// Notes that a file which was made after `seen` were all changes has neither set-id bits nor capabilities, unless something has
    /// changed since: somebody may have found it by its name at once.
    pub(crate) fn note_made_unprivileged(&self, node: NodeId, seen: u64) {
        let mut states = self.states(node);
        if let Some(state) = states.get_mut(&node)
            && self.privileges_changes() == seen
        {
            state.unprivileged = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_before_a_change_of_privileges_is_not_noted_after_it() {
        let table = NodeTable::default();
        let node = NodeId(7);
        table.note_unprivileged(node, table.privileges(node));
        table.enter(node, 70);
        let early = table.privileges(node);
        assert!(!early.none);
        table.note_unprivileged(node, early);
        assert!(table.privileges(node).none);
        table.privileges_changed(node);
        table.note_unprivileged(node, early);
        assert!(!table.privileges(node).none);
        let seen = table.privileges(node);
        table.forget(70, 1);
        table.enter(node, 70);
        table.note_unprivileged(node, seen);
        assert!(!table.privileges(node).none, "another state of the node");
    }

    #[test]
    fn what_was_made_is_known_to_have_none_unless_some_were_given_meanwhile() {
        let table = NodeTable::default();
        let node = NodeId(7);
        let seen = table.privileges_changes();
        table.note_made_unprivileged(node, seen);
        table.enter(node, 70);
        assert!(!table.privileges(node).none);
        table.note_made_unprivileged(node, seen);
        assert!(table.privileges(node).none);
        table.privileges_changed(node);
        table.note_made_unprivileged(node, seen);
        assert!(!table.privileges(node).none);
        // Given before anything was known of it.
        let (other, seen) = (NodeId(8), table.privileges_changes());
        table.privileges_changed(other);
        table.enter(other, 80);
        table.note_made_unprivileged(other, seen);
        assert!(!table.privileges(other).none);
    }
}
