//! The node table: which number stands for which inode of libcephfs.

use crate::client::Inode;
use crate::functions::Statx;
use crate::seen::{self, Seen};
use hashbrown::HashMap;
use poolfs_libservice::{Entry, Error, Result, fail};
use poolfs_types::{Errno, FileType, NodeId};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// One inode that somebody above holds.
pub(crate) struct Node {
    pub id: NodeId,
    pub file_type: FileType,
    /// Whether it is, or is in, a snapshot, or shows the list of them.
    pub is_snapshot: bool,
    pub inode: Inode,
    /// Shared by writes; alone have it appends, changes of attributes, and writes to files with set-id bits.
    pub changing: RwLock<()>,
    /// How often its size was set. Data that was made durable is not all of a file whose size was set since.
    pub size_changes: AtomicU64,
    /// The size that is durable with all else of the file, and how often it was set until then; nothing before this client has seen to that.
    pub durable_size: Mutex<Option<(u64, u64)>>,
}

impl Node {
    /// Refuses what is no directory.
    pub fn directory(&self) -> Result<()> {
        if self.file_type == FileType::Directory { Ok(()) } else { fail(Errno::ENOTDIR) }
    }
}

struct Slot {
    node: Arc<Node>,
    references: u64,
    /// Open handles: `forget` cannot take them.
    handles: u64,
}

#[derive(Default)]
struct Table {
    by_id: HashMap<NodeId, Slot>,
    by_inode: HashMap<usize, NodeId>,
    last: u64,
}

/// All nodes that somebody holds, and the root.
#[derive(Default)]
pub(crate) struct Nodes {
    table: RwLock<Table>,
}

impl Nodes {
    /// The table with the root, to which the first number belongs.
    pub fn new(root: Inode, found: &Statx) -> Result<Self> {
        let nodes = Self::default();
        nodes.acquire(root, found)?;
        Ok(nodes)
    }

    /// The node of an inode, with one more reference for the caller.
    pub fn acquire(&self, inode: Inode, found: &Statx) -> Result<Entry> {
        let Seen { attributes, is_snapshot } = seen::of(found)?;
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let table = &mut *table;
        if let Some(id) = table.by_inode.get(&inode.identity()) {
            let slot = table.by_id.get_mut(id).ok_or(Errno::EIO)?;
            slot.references = slot.references.saturating_add(1);
            return Ok(Entry { node: *id, attributes });
        }
        table.last += 1;
        let id = NodeId(table.last);
        table.by_inode.insert(inode.identity(), id);
        let node = Node {
            id,
            file_type: attributes.file_type,
            is_snapshot,
            inode,
            changing: RwLock::default(),
            size_changes: AtomicU64::new(0),
            durable_size: Mutex::default(),
        };
        table.by_id.insert(id, Slot { node: Arc::new(node), references: 1, handles: 0 });
        Ok(Entry { node: id, attributes })
    }

    /// The node of the tree's root, which is always there.
    pub fn root(&self) -> Result<Arc<Node>> {
        self.get(NodeId::ROOT)
    }

    /// The node a number stands for.
    pub fn get(&self, id: NodeId) -> Result<Arc<Node>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        table.by_id.get(&id).map(|slot| Arc::clone(&slot.node)).ok_or_else(|| Error::from(Errno::ESTALE))
    }

    /// Gives back references of the caller.
    pub fn forget(&self, id: NodeId, count: u64) {
        if id != NodeId::ROOT {
            self.change(id, |slot| slot.references = slot.references.saturating_sub(count));
        }
    }

    /// One more reference for the caller, who holds one; false when that is not so.
    pub fn acquire_again(&self, id: NodeId) -> bool {
        self.change(id, |slot| slot.references = slot.references.saturating_add(1))
    }

    /// Counts one more open handle; false when the node has just been forgotten.
    pub fn handle_opened(&self, id: NodeId) -> bool {
        self.change(id, |slot| slot.handles += 1)
    }

    /// Counts one less.
    pub fn handle_closed(&self, id: NodeId) {
        self.change(id, |slot| slot.handles = slot.handles.saturating_sub(1));
    }

    fn change(&self, id: NodeId, change: impl FnOnce(&mut Slot)) -> bool {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let Some(slot) = table.by_id.get_mut(&id) else { return false };
        change(slot);
        let gone = slot.references == 0 && slot.handles == 0 && id != NodeId::ROOT;
        let removed = if gone { table.by_id.remove(&id) } else { None };
        if let Some(slot) = &removed {
            table.by_inode.remove(&slot.node.inode.identity());
        }
        drop(table);
        // The inode is given back with nothing locked: the cluster may have to be told.
        drop(removed);
        true
    }
}
