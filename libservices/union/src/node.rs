//! The node table: which objects of the branches each union node stands for.

use crate::branch::LowerNode;
use crate::changes::Forgotten;
use crate::first_write::FirstWrite;
use crate::lower_path::LowerPath;
use crate::pinned::Pinned;
use crate::sketch::Sketch;
use hashbrown::HashMap;
use poolfs_libservice::{Changed, Headroom, Held, Lease, Opened};
use poolfs_types::{FileType, NodeId, OpenFlags};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

/// How many bytes the names take that a file remembers, if it is more than one name: a part of what a node is charged for. Others are found again through
/// the index.
const NAMES_BYTES_MAX: usize = 1024;

/// Where a regular file's bytes are, once it has an upper file.
pub(crate) enum Content {
    /// the upper file alone (or, without one, the lower file alone)
    Plain,
    /// some blocks here, some there
    Sketch(Box<Sketch>),
    /// nobody knows; the cause
    Damaged(Arc<str>),
}

/// One name of a node.
pub(crate) struct NameOf {
    pub parent: Arc<Node>,
    pub name: Box<[u8]>,
}

impl NameOf {
    /// What the allocator adds to a name.
    const ALLOCATION_BYTES: usize = 16;

    /// What it takes of memory.
    fn bytes(&self) -> usize {
        size_of::<Self>() + self.name.len() + Self::ALLOCATION_BYTES
    }
}

/// What can change about a node.
pub(crate) struct State {
    pub upper: Option<Arc<Held>>,
    /// a directory: what is merged below the upper one, topmost first; else at most one
    pub lowers: Vec<LowerNode>,
    /// known names; a directory has one. Empty for the root and for what has been removed
    pub names: Vec<NameOf>,
    pub removed: bool,
    pub content: Content,
    /// what was written before there is an upper file
    pub first_write: Option<Arc<FirstWrite>>,
    /// whether the upper object is being made
    pub is_copied_up_now: bool,
    /// of a file in the index: its link count less that of the upper inode
    pub index_links: Option<i64>,
    /// whether the upper object has an origin
    pub origin: bool,
    /// of a directory that has lower ones: their path in the union of the lower branches
    pub lower_path: Option<LowerPath>,
    /// whether the upper directory is marked as holding whiteouts
    pub whiteouts: bool,
    /// whether the upper directory is marked as holding copied-up objects
    pub impure: bool,
    /// subdirectories of a merged directory, once counted
    pub subdirectories: Option<u32>,
}

/// One object of the union.
pub(crate) struct Node {
    pub id: NodeId,
    pub inode: u64,
    pub file_type: FileType,
    state: RwLock<State>,
    /// a directory that a copy-up made or changed, and that has not been synced since
    pub undurable: AtomicBool,
    /// held by whoever brings the sketch's bitmap or the directory to disk; taken before the state's lock, never after it
    pub flushing: Mutex<()>,
    /// whether the node waits in the list of dirty sketches
    pub queued: AtomicBool,
    /// whether blocks in transit could not be completed, which nobody has been told
    pub stuck: AtomicBool,
    /// open files
    pub handles: Mutex<Vec<Weak<OpenFile>>>,
    /// the lease under which clients read the lower file by themselves, as long as somebody has it; given and taken under the
    /// state's lock
    pub lease: Mutex<Option<Weak<dyn Lease>>>,
    /// the time of change that users see
    pub changed: Changed,
}

/// An open file or directory of the union.
pub(crate) struct OpenFile {
    pub node: Arc<Node>,
    pub flags: OpenFlags,
    pub directory: bool,
    pub upper: OnceLock<Opened>,
    pub lower: OnceLock<Opened>,
    /// of a directory: the walk through it that began last
    pub walk: Mutex<Option<crate::listing::Walk>>,
}

impl Node {
    pub fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn is_directory(&self) -> bool {
        self.file_type == FileType::Directory
    }

    /// The upper node, if there is one.
    pub fn upper(&self) -> Option<Arc<Held>> {
        self.read().upper.clone()
    }

    /// The parent of one of the names.
    pub fn parent(&self) -> Option<Arc<Node>> {
        self.read().names.first().map(|name| name.parent.clone())
    }

    /// A path of the node in the union, for messages.
    pub fn path(&self) -> String {
        self.path_bytes().map_or_else(|| format!("(inode {})", self.inode), |path| path.escape_ascii().to_string())
    }

    /// A path of the node in the union; nothing for one without a name.
    pub fn path_bytes(&self) -> Option<Vec<u8>> {
        let mut parts = Vec::new();
        let name_of = |node: &Node| node.read().names.first().map(|up| (up.parent.clone(), up.name.clone()));
        let mut next = name_of(self);
        while let Some((parent, name)) = next {
            parts.push(name);
            next = name_of(&parent);
        }
        parts.reverse();
        (!parts.is_empty()).then(|| parts.join(&b'/'))
    }
}

struct Slot {
    node: Arc<Node>,
    /// references of callers
    references: u64,
    /// open files, children that name it as parent, the list of dirty sketches, the list of damaged ones
    pins: u64,
    /// its keys in the other two maps
    upper: Option<NodeId>,
    lower: Option<(usize, NodeId)>,
}

impl Slot {
    /// Whether nobody refers to it, and it stays all the same. The root always does.
    fn is_pinned(&self) -> bool {
        self.references == 0 && self.pins > 0 && self.node.id != NodeId::ROOT
    }
}

/// Entries of [`Removals`].
const REMOVALS: usize = 1024;

#[derive(Default)]
struct Table {
    by_id: HashMap<NodeId, Slot>,
    by_upper: HashMap<NodeId, NodeId>,
    by_lower: HashMap<(usize, NodeId), NodeId>,
    forgotten: Forgotten,
    removals: Removals,
    pinned: Arc<Pinned>,
}

/// Of which objects nodes have been removed last: what somebody has read of such an object before is not how the node has left it.
struct Removals {
    count: u64,
    /// the last of those that share an entry
    last: Box<[u64; REMOVALS]>,
}

impl Default for Removals {
    fn default() -> Self {
        Removals { count: 0, last: Box::new([0; REMOVALS]) }
    }
}

impl Removals {
    fn note(&mut self, object: NodeId) {
        self.count += 1;
        self.last[object.0 as usize % REMOVALS] = self.count;
    }

    fn had_since(&self, object: NodeId, since: u64) -> bool {
        self.last[object.0 as usize % REMOVALS] > since
    }
}

/// All nodes that somebody refers to.
pub(crate) struct Nodes {
    table: RwLock<Table>,
    next: AtomicU64,
    pinned: Arc<Pinned>,
}

/// What a new node is made of.
pub(crate) struct NewNode {
    pub inode: u64,
    pub file_type: FileType,
    pub state: State,
}

impl Nodes {
    pub fn new(root: NewNode) -> Self {
        let pinned = Arc::<Pinned>::default();
        let table = RwLock::new(Table { pinned: Arc::clone(&pinned), ..Table::default() });
        let nodes = Nodes { table, next: AtomicU64::new(NodeId::ROOT.0), pinned };
        {
            let mut table = nodes.table_mut();
            let root = nodes.insert(&mut table, root);
            if let Some(slot) = table.by_id.get_mut(&root.id) {
                slot.pins = 1;
            }
        }
        nodes
    }

    fn table_mut(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn table(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn insert(&self, table: &mut Table, new: NewNode) -> Arc<Node> {
        let id = NodeId(self.next.fetch_add(1, Ordering::Relaxed));
        let upper = new.state.upper.as_ref().map(|upper| upper.node());
        let lower = new.state.lowers.first().filter(|_| upper.is_none()).map(|lower| (lower.layer, lower.held.node()));
        if let Some(upper) = upper {
            table.by_upper.insert(upper, id);
        }
        if let Some(lower) = lower {
            table.by_lower.insert(lower, id);
        }
        let unseen = upper.and_then(|_| table.forgotten.take(new.inode));
        let node = Arc::new(Node {
            id,
            inode: new.inode,
            file_type: new.file_type,
            state: RwLock::new(new.state),
            undurable: AtomicBool::new(false),
            flushing: Mutex::new(()),
            queued: AtomicBool::new(false),
            stuck: AtomicBool::new(false),
            handles: Mutex::new(Vec::new()),
            lease: Mutex::new(None),
            changed: Changed::new(unseen),
        });
        table.by_id.insert(id, Slot { node: node.clone(), references: 0, pins: 0, upper, lower });
        node
    }

    pub fn get(&self, id: NodeId) -> Option<Arc<Node>> {
        self.table().by_id.get(&id).map(|slot| slot.node.clone())
    }

    /// How many nodes there are.
    pub fn len(&self) -> usize {
        self.table().by_id.len()
    }

    /// The node that stands for an upper object, with one more reference.
    pub fn refer_upper(&self, upper: NodeId) -> Option<Arc<Node>> {
        let mut table = self.table_mut();
        let id = *table.by_upper.get(&upper)?;
        table.refer(id)
    }

    /// The node that stands for a lower object, with one more reference.
    pub fn refer_lower(&self, layer: usize, lower: NodeId) -> Option<Arc<Node>> {
        let mut table = self.table_mut();
        let id = *table.by_lower.get(&(layer, lower))?;
        table.refer(id)
    }

    /// Adds a reference to a node that the caller refers to already.
    pub fn refer(&self, node: &Node) {
        let _ = self.table_mut().refer(node.id);
    }

    /// The inode number of the node that stands for an upper object.
    pub fn inode_of_upper(&self, upper: NodeId) -> Option<u64> {
        let table = self.table();
        let id = table.by_upper.get(&upper)?;
        table.by_id.get(id).map(|slot| slot.node.inode)
    }

    /// How many nodes have been removed; taken before something is read for [`Self::intern_read`].
    pub fn removals(&self) -> u64 {
        self.table().removals.count
    }

    /// As [`Self::intern`], of an object that was read since there were so many removals. Nothing when another thread has had a node of it
    /// meanwhile that has gone again: it may have changed what was read, or have given a lower object an upper one.
    pub fn intern_read(&self, new: NewNode, removals: u64) -> Option<Arc<Node>> {
        let mut table = self.table_mut();
        let object = match &new.state.upper {
            Some(upper) => Some(upper.node()),
            None => new.state.lowers.first().map(|lower| lower.held.node()),
        };
        let is_outdated = object.is_some_and(|object| table.removals.had_since(object, removals));
        if is_outdated && table.known(&new).is_none() { None } else { Some(self.intern_in(&mut table, new)) }
    }

    /// The node for what `new` describes, which another thread may have made meanwhile, with one more reference.
    pub fn intern(&self, new: NewNode) -> Arc<Node> {
        self.intern_in(&mut self.table_mut(), new)
    }

    fn intern_in(&self, table: &mut Table, new: NewNode) -> Arc<Node> {
        let known = table.known(&new);
        if let Some(node) = known.and_then(|id| table.refer(id)) {
            return node;
        }
        let node = self.insert(table, new);
        if let Some(slot) = table.by_id.get_mut(&node.id) {
            slot.references = 1;
        }
        node
    }

    /// Says that `node` now stands for an upper object as well.
    pub fn bind_upper(&self, node: &Node, upper: NodeId) {
        let mut table = self.table_mut();
        table.by_upper.insert(upper, node.id);
        if let Some(slot) = table.by_id.get_mut(&node.id) {
            slot.upper = Some(upper);
        }
    }

    /// Remembers a name of `node`; a directory has only one. Its parent is pinned.
    pub fn add_name(&self, node: &Arc<Node>, parent: &Arc<Node>, name: &[u8]) {
        let known =
            |state: &State| state.names.iter().any(|known| Arc::ptr_eq(&known.parent, parent) && *known.name == *name);
        if known(&node.read()) {
            return;
        }
        let replaced = {
            let mut state = node.write();
            if known(&state) {
                return;
            }
            let new = NameOf { parent: parent.clone(), name: name.into() };
            let is_one_enough = node.is_directory() || self.pinned.are_many();
            let mut room = if is_one_enough { 0 } else { NAMES_BYTES_MAX.saturating_sub(new.bytes()) };
            let fit = |known: &&NameOf| {
                let left = room.checked_sub(known.bytes());
                room = left.unwrap_or_default();
                left.is_some()
            };
            // The latest stay.
            let stay = state.names.iter().rev().take_while(fit).count();
            let surplus = state.names.len() - stay;
            let replaced: Vec<NameOf> = state.names.drain(..surplus).collect();
            state.names.push(new);
            state.removed = false;
            replaced
        };
        self.pin(parent);
        replaced.iter().for_each(|replaced| self.unpin(&replaced.parent));
    }

    /// Forgets a name of `node`.
    pub fn remove_name(&self, node: &Node, parent: &Node, name: &[u8]) {
        let removed = {
            let mut state = node.write();
            let at = state.names.iter().position(|known| known.parent.id == parent.id && *known.name == *name);
            at.map(|at| state.names.swap_remove(at))
        };
        if let Some(removed) = removed {
            self.unpin(&removed.parent);
        }
    }

    pub fn pin(&self, node: &Node) {
        if let Some(slot) = self.table_mut().by_id.get_mut(&node.id) {
            let before = slot.is_pinned();
            slot.pins += 1;
            self.pinned.change(before, slot.is_pinned());
        }
        self.pinned.tell();
    }

    /// Where nodes are counted that nobody refers to, without being refused. Set once.
    pub fn set_pinned_room(&self, room: Arc<dyn Headroom>) {
        self.pinned.set_room(room);
    }

    pub fn unpin(&self, node: &Node) {
        self.give_back(node.id, 0, 1);
    }

    pub fn forget(&self, id: NodeId, count: u64) {
        self.give_back(id, count, 0);
    }

    /// Takes references and pins away; what nobody needs any more goes, and what it pinned, in a loop, not by recursion.
    fn give_back(&self, id: NodeId, references: u64, pins: u64) {
        let mut pending = vec![(id, references, pins)];
        while let Some((id, references, pins)) = pending.pop() {
            let gone = {
                let mut table = self.table_mut();
                let Some(slot) = table.by_id.get_mut(&id) else { continue };
                let before = slot.is_pinned();
                slot.references = slot.references.saturating_sub(references);
                slot.pins = slot.pins.saturating_sub(pins);
                self.pinned.change(before, slot.is_pinned());
                if slot.references > 0 || slot.pins > 0 {
                    continue;
                }
                table.remove(id)
            };
            let Some(node) = gone else { continue };
            let names = std::mem::take(&mut node.write().names);
            pending.extend(names.iter().map(|name| (name.parent.id, 0, 1)));
        }
        self.pinned.tell();
    }
}

impl Table {
    /// The node that stands for what `new` describes.
    fn known(&self, new: &NewNode) -> Option<NodeId> {
        match (&new.state.upper, new.state.lowers.first()) {
            (Some(upper), _) => self.by_upper.get(&upper.node()).copied(),
            (None, Some(lower)) => self.by_lower.get(&(lower.layer, lower.held.node())).copied(),
            (None, None) => None,
        }
    }

    fn refer(&mut self, id: NodeId) -> Option<Arc<Node>> {
        let slot = self.by_id.get_mut(&id)?;
        let before = slot.is_pinned();
        slot.references += 1;
        self.pinned.change(before, false);
        Some(slot.node.clone())
    }

    fn remove(&mut self, id: NodeId) -> Option<Arc<Node>> {
        let slot = self.by_id.remove(&id)?;
        let objects = slot.upper.into_iter().chain(slot.lower.map(|(_, lower)| lower));
        objects.for_each(|object| self.removals.note(object));
        if let Some(upper) = slot.upper
            && self.by_upper.get(&upper) == Some(&id)
        {
            self.by_upper.remove(&upper);
        }
        if let Some(lower) = slot.lower
            && self.by_lower.get(&lower) == Some(&id)
        {
            self.by_lower.remove(&lower);
        }
        if let Some(unseen) = slot.node.changed.unseen()
            && slot.upper.is_some()
        {
            self.forgotten.put(slot.node.inode, unseen);
        }
        Some(slot.node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Union, UnionConfig};
    use poolfs_libservice::{Libservice, Memory};
    use poolfs_types::{Caller, Name};

    const ROOT: Caller = Caller::ROOT;

    /// A node is charged for a fixed number of bytes, and whoever looks a file up by all its names has the union remember them.
    #[test]
    fn the_names_of_a_file_take_no_more_than_they_may() {
        let union = Union::open(UnionConfig::new(Memory::new(), Vec::new())).expect("a union");
        let create =
            union.create(&ROOT, NodeId::ROOT, Name::new(b"first").expect("short"), 0o644, OpenFlags::READ_WRITE);
        let (entry, handle) = create.expect("created");
        union.release(handle);
        for length in [10, 250] {
            for number in 0..100 {
                let name = format!("{number:0>length$}");
                let name = Name::new(name.as_bytes()).expect("short");
                union.link(&ROOT, entry.node, NodeId::ROOT, name).expect("linked");
                union.lookup(&ROOT, NodeId::ROOT, name).expect("there");
                let node = union.nodes.get(entry.node).expect("held");
                let state = node.read();
                let bytes: usize = state.names.iter().map(NameOf::bytes).sum();
                let latest = state.names.last().expect("a name");
                assert!(
                    bytes <= NAMES_BYTES_MAX && *latest.name == *name.as_bytes(),
                    "{bytes} after {number} of {length}"
                );
                assert!(state.names.len() >= 3 || number < 3);
            }
        }
    }
}
