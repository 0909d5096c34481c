//! What the kernel may keep of attributes and names without asking again.
//!
//! Whatever an answer lets the kernel keep is noted here *before* the layers are asked, and removed *after* the layers have
//! changed it. So a change finds the note of every answer that may show the old state.
//!
//! A change is told to the kernel before it is answered. Until then its note stays as "being told": a second change of the same
//! object may not be answered earlier than the first one's notification.

use super::NodeTable;
use super::notices::Changing;
use hashbrown::HashMap;
use poolfs_libservice::Headroom;
use poolfs_libservice::types::NodeId;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Most names noted one by one, for one mount.
pub const NAMES_HELD_MAX: u64 = 1 << 17;

/// What a name takes of memory beside its bytes.
const NAME_BYTES: u64 = 96;

/// How many names are noted, and the room that they take.
#[derive(Default)]
pub(super) struct NamesHeld {
    count: AtomicU64,
    bytes: AtomicU64,
    /// In what all instances together have.
    room: OnceLock<Arc<dyn Headroom>>,
}

impl NamesHeld {
    fn cost(name: &[u8]) -> u64 {
        NAME_BYTES + name.len() as u64
    }

    /// Headroom for one more, if there is some.
    fn add(&self, name: &[u8]) -> bool {
        let has_room = self.count.load(Ordering::Relaxed) < NAMES_HELD_MAX
            && self.room.get().is_none_or(|room| room.add(Self::cost(name)));
        if has_room {
            self.note(name);
        }
        has_room
    }

    /// The same whether there is room or not: the kernel has it already.
    fn force(&self, name: &[u8]) {
        self.room.get().into_iter().for_each(|room| room.force(Self::cost(name)));
        self.note(name);
    }

    fn note(&self, name: &[u8]) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(Self::cost(name), Ordering::Relaxed);
    }

    fn left(&self, names: u64, bytes: u64) {
        self.count.fetch_sub(names, Ordering::Relaxed);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.room.get().into_iter().for_each(|room| room.subtract(bytes));
    }

    /// Those of a directory are noted no more.
    pub(super) fn forget(&self, held: &Held) {
        if !held.names.is_empty() {
            self.left(held.names.len() as u64, held.names.keys().map(|name| Self::cost(name)).sum());
        }
    }

    /// None is noted any more.
    pub(super) fn clear(&self) {
        self.left(self.count.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed));
    }
}

impl Drop for NamesHeld {
    fn drop(&mut self) {
        self.clear();
    }
}

#[derive(Default)]
struct NameState {
    held: bool,
    /// Changes whose notifications are on their way.
    telling: u32,
}

/// Of one node.
#[derive(Default)]
pub(super) struct Held {
    /// Attributes or access lists.
    attributes: bool,
    /// They came with a name, and maybe before the kernel knew the node.
    arriving: bool,
    /// Changes whose notifications about attributes are on their way.
    telling_attributes: u32,
    /// Names in it, if it is a directory; also of objects that do not exist.
    names: HashMap<Box<[u8]>, NameState>,
    /// Names beyond those, which there was no room to note.
    others: bool,
}

/// What the kernel may keep when nothing more is to be kept.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Rest {
    /// FUSE's numbers of nodes with attributes.
    pub attributes: Vec<u64>,
    /// Names, with FUSE's numbers of their directories.
    pub names: Vec<(u64, Box<[u8]>)>,
    /// FUSE's numbers of directories with listings.
    pub listings: Vec<u64>,
}

/// A change of a name that the kernel has to be told of, followed by [`NodeTable::name_told`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameView {
    /// FUSE's number of the directory.
    pub parent: u64,
}

/// A change of attributes that the kernel has to be told of, followed by [`NodeTable::attributes_told`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttributesView {
    /// FUSE's number of the node.
    pub number: u64,
    /// The kernel may know a size from before this change of the content, and go by it when it refuses an answer that crosses this
    /// notification: it has to be told the size first.
    pub size_since: Option<u64>,
}

impl NodeTable {
    /// The kernel may keep attributes and names from here on.
    pub fn start_holding(&self) {
        self.holding.store(true, Ordering::SeqCst);
    }

    /// The kernel may keep nothing more, and clients are shown nothing. Answers what the kernel may have until now.
    pub fn stop_holding(&self) -> Rest {
        self.holding.store(false, Ordering::SeqCst);
        let mut rest = Rest::default();
        // Whoever saw the old value has noted what it gave before its shard is looked through.
        for shard in &self.states {
            for state in super::lock(shard).values_mut() {
                state.forget_noted();
                if state.outdate_listing() {
                    rest.listings.push(state.number);
                }
                if state.held.attributes {
                    rest.attributes.push(state.number);
                }
                rest.names.extend(state.held.names.keys().map(|name| (state.number, name.clone())));
            }
        }
        rest
    }

    /// Whether the kernel may keep anything.
    #[must_use]
    pub fn is_holding(&self) -> bool {
        self.holding.load(Ordering::SeqCst)
    }

    /// The kernel is about to be answered attributes or access lists; whether it may keep them.
    #[must_use]
    pub fn hold_attributes(&self, node: NodeId) -> bool {
        let mut states = self.states(node);
        let Some(state) = states.get_mut(&node).filter(|state| self.is_holding() && !state.posting) else {
            return false;
        };
        state.held.attributes = true;
        true
    }

    /// The kernel has been given a reference with a name, and is about to be answered attributes with it; whether it may keep them, if
    /// they are from after this call or have not changed since before it.
    #[must_use]
    pub fn hold_arriving(&self, node: NodeId) -> bool {
        let mut states = self.states(node);
        let Some(state) = states.get_mut(&node).filter(|state| self.is_holding() && !state.posting) else {
            return false;
        };
        (state.held.attributes, state.held.arriving) = (true, true);
        true
    }

    /// Whether the kernel may get to know the node, with attributes, just now.
    #[must_use]
    pub fn is_arriving(&self, node: NodeId) -> bool {
        self.states(node).get(&node).is_some_and(|state| state.held.arriving && state.kernel_references > 0)
    }

    /// The kernel is about to be answered what `name` stands for, or that it stands for nothing; whether it may keep that.
    /// When there is no room to note the name, a directory that can say so notes that there are others.
    #[must_use]
    pub fn hold_name(&self, parent: NodeId, name: &[u8], others: bool) -> bool {
        let mut states = self.states(parent);
        let Some(state) = states.get_mut(&parent).filter(|_| self.is_holding()) else { return false };
        if let Some(known) = state.held.names.get_mut(name) {
            known.held = true;
        } else if self.names_held.add(name) {
            state.held.names.insert(name.into(), NameState { held: true, telling: 0 });
        } else {
            state.held.others |= others;
            return others;
        }
        true
    }

    /// The kernel itself has taken a name away, while nobody else may look it up.
    pub fn name_gone(&self, parent: NodeId, name: &[u8]) {
        self.take_name(parent, name);
    }

    /// The kernel itself has moved a name, while nobody else may look up either.
    pub fn name_moved(&self, (parent, name): (NodeId, &[u8]), (new_parent, new_name): (NodeId, &[u8])) {
        let (held, others) = self.take_name(parent, name);
        self.note_moved(new_parent, new_name, held, others);
    }

    /// The kernel itself has exchanged two names, while nobody else may look up either.
    pub fn names_exchanged(&self, one: (NodeId, &[u8]), other: (NodeId, &[u8])) {
        let (of_one, of_other) = (self.take_name(one.0, one.1), self.take_name(other.0, other.1));
        self.note_moved(other.0, other.1, of_one.0, of_one.1);
        self.note_moved(one.0, one.1, of_other.0, of_other.1);
    }

    fn note_moved(&self, parent: NodeId, name: &[u8], held: bool, others: bool) {
        let mut states = self.states(parent);
        let Some(state) = states.get_mut(&parent) else { return };
        state.held.others |= others;
        if held {
            self.name_state(&mut state.held, name).held = true;
        }
    }

    fn name_state<'h>(&self, held: &'h mut Held, name: &[u8]) -> &'h mut NameState {
        held.names.entry(name.into()).or_insert_with(|| {
            self.names_held.force(name);
            NameState::default()
        })
    }

    /// Whether the kernel held the name, and whether it may hold names that are not noted.
    fn take_name(&self, parent: NodeId, name: &[u8]) -> (bool, bool) {
        let mut states = self.states(parent);
        let Some(state) = states.get_mut(&parent) else { return (false, false) };
        let held = state.held.names.get_mut(name).is_some_and(|known| std::mem::take(&mut known.held));
        self.tidy_name(&mut state.held, name);
        (held, state.held.others)
    }

    fn tidy_name(&self, held: &mut Held, name: &[u8]) {
        if held.names.get(name).is_some_and(|known| !known.held && known.telling == 0) {
            held.names.remove(name);
            self.names_held.left(1, NamesHeld::cost(name));
        }
    }

    /// Somebody else than the kernel has changed what `name` stands for: what the kernel must be told, if anything.
    #[must_use]
    pub fn name_changed(&self, parent: NodeId, name: &[u8]) -> Option<NameView> {
        let mut states = self.states(parent);
        let state = states.get_mut(&parent)?;
        let others = state.held.others;
        if !others && !state.held.names.contains_key(name) {
            return None;
        }
        let known = self.name_state(&mut state.held, name);
        known.held = false;
        known.telling += 1;
        Some(NameView { parent: state.number })
    }

    /// The kernel knows of a change of the name.
    pub fn name_told(&self, parent: NodeId, name: &[u8]) {
        if let Some(state) = self.states(parent).get_mut(&parent) {
            if let Some(known) = state.held.names.get_mut(name) {
                known.telling = known.telling.saturating_sub(1);
            }
            self.tidy_name(&mut state.held, name);
        }
    }

    /// Whether the kernel may not know yet what the name stands for: it is being told, and has not asked since.
    #[must_use]
    pub fn is_name_being_told(&self, parent: NodeId, name: &[u8]) -> bool {
        let states = self.states(parent);
        let known = states.get(&parent).and_then(|state| state.held.names.get(name));
        known.is_some_and(|known| known.telling > 0 && !known.held)
    }

    /// Attributes have changed: what the kernel must be told, if anything.
    #[must_use]
    pub fn attributes_changed(&self, changing: Changing) -> Option<AttributesView> {
        let mut states = self.states(changing.node);
        self.changes_ended.fetch_add(1, Ordering::SeqCst);
        let state = states.get_mut(&changing.node)?;
        Self::end_change(state, changing);
        if !std::mem::take(&mut state.held.attributes) && state.held.telling_attributes == 0 {
            return None;
        }
        state.held.telling_attributes += 1;
        let size_since = (state.changes > state.size_told).then_some(state.changes);
        Some(AttributesView { number: state.number, size_since })
    }

    /// The point in all changes of attributes at which this one finds the instance, if none is under way.
    #[must_use]
    pub fn unchanging(&self) -> Option<u64> {
        let ended = self.changes_ended.load(Ordering::SeqCst);
        (self.changes_begun.load(Ordering::SeqCst) == ended).then_some(ended)
    }

    /// Whether no attributes have begun to change since.
    #[must_use]
    pub fn still_unchanging(&self, since: u64) -> bool {
        self.changes_begun.load(Ordering::SeqCst) == since
    }

    /// The kernel knows of a change of attributes.
    pub fn attributes_told(&self, node: NodeId) {
        if let Some(state) = self.states(node).get_mut(&node) {
            state.held.telling_attributes = state.held.telling_attributes.saturating_sub(1);
        }
    }

    /// Names the kernel may keep.
    #[must_use]
    pub fn names_held(&self) -> u64 {
        self.names_held.count.load(Ordering::Relaxed)
    }

    /// Counts them with those of other instances from here on; once, and before there are any.
    pub(crate) fn set_names_room(&self, room: Arc<dyn Headroom>) {
        let _ = self.names_held.room.set(room);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::ROOT_NUMBER;

    const DIRECTORY: NodeId = NodeId::ROOT;

    fn changed(table: &NodeTable, node: NodeId) -> Option<AttributesView> {
        table.attributes_changed(table.attributes_changing(node))
    }

    fn holding() -> NodeTable {
        let table = NodeTable::default();
        table.start_holding();
        assert_eq!(table.enter(NodeId(7), 70), 70);
        table
    }

    #[test]
    fn the_kernel_is_told_of_what_it_holds_and_of_nothing_else() {
        let table = holding();
        assert_eq!(table.name_changed(DIRECTORY, b"n"), None);
        assert!(table.hold_name(DIRECTORY, b"n", false) && table.hold_attributes(NodeId(7)));
        assert_eq!(table.name_changed(DIRECTORY, b"m"), None);
        assert_eq!(table.name_changed(DIRECTORY, b"n"), Some(NameView { parent: ROOT_NUMBER }));
        let told = AttributesView { number: 70, size_since: None };
        assert_eq!(changed(&table, NodeId(7)), Some(told));
        assert_eq!(changed(&table, NodeId(8)), None);
        assert!(table.is_name_being_told(DIRECTORY, b"n"));
        table.name_told(DIRECTORY, b"n");
        table.attributes_told(NodeId(7));
        assert_eq!((table.name_changed(DIRECTORY, b"n"), changed(&table, NodeId(7))), (None, None));
        assert_eq!(table.names_held(), 0);
    }

    #[test]
    fn a_second_change_is_told_as_long_as_the_first_is_on_its_way() {
        let table = holding();
        assert!(table.hold_name(DIRECTORY, b"n", false) && table.hold_attributes(NodeId(7)));
        for _ in 0..2 {
            assert!(table.name_changed(DIRECTORY, b"n").is_some() && changed(&table, NodeId(7)).is_some());
        }
        table.name_told(DIRECTORY, b"n");
        // An answer that comes in between is not forgotten when the older notifications have come back.
        assert!(table.is_name_being_told(DIRECTORY, b"n"));
        assert!(table.hold_name(DIRECTORY, b"n", false) && !table.is_name_being_told(DIRECTORY, b"n"));
        table.name_told(DIRECTORY, b"n");
        assert!(table.name_changed(DIRECTORY, b"n").is_some());
    }

    #[test]
    fn attributes_that_came_with_a_name_may_be_on_their_way_while_the_kernel_has_a_reference() {
        let table = holding();
        assert!(table.hold_attributes(NodeId(7)));
        assert!(!table.is_arriving(NodeId(7)));
        assert!(!table.hold_arriving(NodeId(8)), "no reference was given");
        assert!(table.hold_arriving(NodeId(7)) && table.is_arriving(NodeId(7)));
        assert!(changed(&table, NodeId(7)).is_some());
        table.forget(70, 1);
        assert!(!table.is_arriving(NodeId(7)));
    }

    #[test]
    fn attributes_may_have_changed_since_as_soon_as_a_change_begins_and_until_it_ends() {
        let table = holding();
        let before = table.unchanging().expect("nothing changes");
        assert!(table.still_unchanging(before));
        let [first, second] = [7, 8].map(|node| table.attributes_changing(NodeId(node)));
        assert!(!table.still_unchanging(before) && table.unchanging().is_none());
        let _ = table.attributes_changed(first);
        assert_eq!(table.unchanging(), None);
        let _ = table.attributes_changed(second);
        assert!(!table.still_unchanging(before) && table.unchanging().is_some_and(|now| table.still_unchanging(now)));
    }

    #[test]
    fn the_size_is_told_until_the_kernel_knows_the_newest() {
        let table = holding();
        let since = || {
            assert!(table.hold_attributes(NodeId(7)));
            changed(&table, NodeId(7)).expect("it is told").size_since
        };
        assert_eq!(since(), None);
        assert_eq!(table.changed(NodeId(7)), None, "the kernel has no pages");
        assert_eq!(since(), Some(1));
        assert_eq!(since(), Some(1), "the first may still be on its way");
        assert_eq!(table.changed(NodeId(7)), None);
        table.size_told(NodeId(7), 1);
        assert_eq!(since(), Some(2), "it grew meanwhile");
        table.size_told(NodeId(7), 2);
        assert_eq!(since(), None);
    }

    #[test]
    fn names_follow_the_kernel_when_it_moves_them_and_go_with_their_directory() {
        let table = holding();
        assert!(table.hold_name(DIRECTORY, b"n", false));
        table.name_moved((DIRECTORY, b"n"), (NodeId(7), b"m"));
        assert_eq!(table.name_changed(DIRECTORY, b"n"), None);
        assert_eq!(table.name_changed(NodeId(7), b"m"), Some(NameView { parent: 70 }));
        table.name_told(NodeId(7), b"m");
        assert!(table.hold_name(NodeId(7), b"gone", false) && table.hold_name(NodeId(7), b"kept", false));
        table.name_gone(NodeId(7), b"gone");
        assert_eq!(table.names_held(), 1);
        table.forget(70, 1);
        assert_eq!((table.names_held(), table.name_changed(NodeId(7), b"kept")), (0, None));
    }

    #[test]
    fn beyond_the_most_names_all_of_a_directory_count_or_none_is_kept() {
        let table = holding();
        for name in 0..NAMES_HELD_MAX {
            assert!(table.hold_name(DIRECTORY, &name.to_ne_bytes(), false));
        }
        assert!(!table.hold_name(NodeId(7), b"n", false));
        assert_eq!(table.name_changed(NodeId(7), b"n"), None);
        assert!(table.hold_name(NodeId(7), b"n", true));
        assert_eq!(table.name_changed(NodeId(7), b"whatever"), Some(NameView { parent: 70 }));
        table.name_moved((NodeId(7), b"n"), (DIRECTORY, b"moved"));
        assert!(table.name_changed(DIRECTORY, b"moved").is_some());
    }

    #[test]
    fn names_take_room_of_the_pool_until_they_are_gone() {
        let shares = crate::shares::PoolShares::new(64 << 20, None, Arc::new(crate::shares::tests::Memory::default()));
        let instances = [shares.join(), shares.join()];
        let tables = [holding(), holding()];
        tables.iter().zip(&instances).for_each(|(table, instance)| table.set_names_room(instance.names()));
        let name = |number: u64| [&number.to_ne_bytes()[..], &[b'x'; 242]].concat();
        let all = |table: &NodeTable| {
            (0..NAMES_HELD_MAX).take_while(|&n| table.hold_name(DIRECTORY, &name(n), false)).count()
        };
        let [first, second] = [all(&tables[0]), all(&tables[1])];
        assert!(first < NAMES_HELD_MAX as usize && second > first / 4 && second < first / 2, "{first}, {second}");
        tables[0].name_gone(DIRECTORY, &name(0));
        assert!(tables[0].hold_name(DIRECTORY, &name(0), false) && !tables[0].hold_name(DIRECTORY, b"one more", false));
        assert!(tables[0].hold_name(DIRECTORY, b"one more", true), "others of the directory");
        tables[0].forget_all();
        assert_eq!(all(&tables[1]), first, "with those that it had");
        assert!(all(&holding()) > second, "without a bound of the pool");
        drop(tables);
        assert_eq!(shares.names_used(), 0);
    }

    #[test]
    fn nothing_is_kept_after_the_end_and_what_was_is_told() {
        let table = holding();
        assert!(table.hold_name(DIRECTORY, b"n", false) && table.hold_attributes(NodeId(7)));
        let rest = table.stop_holding();
        let names = vec![(ROOT_NUMBER, b"n"[..].into())];
        assert_eq!(rest, Rest { attributes: vec![70], names, listings: vec![] });
        assert!(!table.hold_name(DIRECTORY, b"n", true) && !table.hold_attributes(NodeId(7)));
    }
}
