//! The table of regular files that the layers above hold, and what each of them is: plain, compact, or damaged.

use crate::file::{Bound, File};
use crate::format::{ATTRIBUTE, Record};
use hashbrown::HashMap;
use poolfs_libservice::{Branch, Changed, Durability, Error, Result};
use poolfs_types::{Attributes, Caller, Errno, NodeId, OpenFlags};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

const SHARDS: usize = 64;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a regular file is.
pub(crate) enum Content {
    /// stored as it is
    Plain,
    /// of the format, and not looked at yet
    Stored(Record),
    /// of the format, and in use
    Open(Box<File>),
    /// what should be its record is none
    Damaged(String),
}

impl Content {
    pub fn read(below: &Branch, node: NodeId) -> Result<Self> {
        match below.getxattr(&Caller::ROOT, node, ATTRIBUTE) {
            Ok(bytes) => Ok(Record::decode(&bytes).map_or_else(Content::Damaged, Content::Stored)),
            Err(error) if error == Errno::ENODATA || error == Errno::EOPNOTSUPP => Ok(Content::Plain),
            Err(error) => Err(error),
        }
    }

    /// Whether it is, or should be, of the format.
    pub fn is_formatted(&self) -> bool {
        !matches!(self, Content::Plain)
    }

    /// The record, of one that has a sound one.
    pub fn record(&self) -> Option<&Record> {
        match self {
            Content::Stored(record) => Some(record),
            Content::Open(file) => Some(&file.record),
            Content::Plain | Content::Damaged(_) => None,
        }
    }

    /// The record that stands on disk, of one that is in use.
    pub fn stored(&self) -> Option<&Record> {
        match self {
            Content::Open(file) => Some(&file.stored),
            _ => None,
        }
    }

    /// The file of one of the format; sectors that were cut by a crash are damage, or mended.
    pub fn open(&mut self, below: &Branch, node: NodeId, mend: bool, bound: &Arc<Bound>) -> Result<&mut File> {
        if let Content::Stored(record) = self {
            *self = Content::Open(Box::new(File::open(below, node, record.clone(), mend, bound)?));
        }
        match self {
            Content::Open(file) => Ok(file),
            Content::Damaged(cause) => {
                Err(Error::new(Errno::EIO, format!("file {} (trusted.poolfs.bcow) is damaged: {cause}", node.0)))
            }
            Content::Plain | Content::Stored(_) => Err(Errno::EIO.into()),
        }
    }
}

/// A regular file.
pub(crate) struct Node {
    pub id: NodeId,
    content: RwLock<Content>,
    /// its time of change, without what tables did to it
    pub changed: Changed,
    /// held by whoever brings it to disk
    pub flushing: Mutex<()>,
    /// It waits to be brought to disk.
    pub is_queued: AtomicBool,
    /// how often the size was stored, as it was when this node was met too
    sizes_stored: AtomicU64,
    /// as many of those are durable
    sizes_durable: AtomicU64,
}

impl Node {
    fn new(id: NodeId, content: Content) -> Arc<Self> {
        let (changed, flushing, is_queued, sizes_durable) = Default::default();
        let (content, sizes_stored) = (RwLock::new(content), AtomicU64::new(1));
        Arc::new(Node { id, content, changed, flushing, is_queued, sizes_stored, sizes_durable })
    }

    /// A user has given the file a size, and it is stored.
    pub fn note_size(&self) {
        self.sizes_stored.fetch_add(1, Ordering::Release);
    }

    /// Has `sync` make the file below durable. The size belongs to the data, but is in an attribute, for which the layer below only waits when
    /// it is to wait for all of them.
    pub fn sync_sized(&self, durability: Durability, sync: impl FnOnce(Durability) -> Result<()>) -> Result<()> {
        let stored = self.sizes_stored.load(Ordering::Acquire);
        let is_ahead = self.sizes_durable.load(Ordering::Acquire) < stored && self.read().is_formatted();
        let durability = if is_ahead { Durability::All } else { durability };
        sync(durability)?;
        if durability == Durability::All {
            self.sizes_durable.fetch_max(stored, Ordering::AcqRel);
        }
        Ok(())
    }

    pub fn read(&self) -> RwLockReadGuard<'_, Content> {
        self.content.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn write(&self) -> RwLockWriteGuard<'_, Content> {
        self.content.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// What users are shown where the layer below says `stored`.
    pub fn shown(&self, stored: Attributes) -> Attributes {
        let content = self.read();
        let Some(record) = content.record() else { return stored };
        let blocks = match &*content {
            Content::Open(file) => file.shown_blocks(stored.blocks),
            _ => stored.blocks,
        };
        Attributes { size: record.size, blocks, changed: self.changed.shown(stored.changed), ..stored }
    }
}

/// An open regular file.
pub(crate) struct Open {
    pub node: Arc<Node>,
    pub flags: OpenFlags,
}

struct Known {
    node: Arc<Node>,
    /// of the layers above
    references: u64,
    handles: u64,
    /// as often as it waits to be brought to disk, or is on its way
    flushes: u64,
}

/// The nodes that somebody refers to.
pub(crate) struct Nodes {
    shards: [Shard; SHARDS],
}

impl Default for Nodes {
    fn default() -> Self {
        Nodes { shards: std::array::from_fn(|_| Shard::default()) }
    }
}

#[derive(Default)]
struct Shard(Mutex<HashMap<NodeId, Known>>);

impl Nodes {
    fn shard(&self, id: NodeId) -> MutexGuard<'_, HashMap<NodeId, Known>> {
        lock(&self.shards[id.0 as usize % SHARDS].0)
    }

    /// The node with that number, whether somebody refers to it or not.
    pub fn get(&self, below: &Branch, id: NodeId) -> Result<Arc<Node>> {
        match self.known(id) {
            Some(node) => Ok(node),
            None => Ok(Node::new(id, Content::read(below, id)?)),
        }
    }

    /// The node with that number, if somebody refers to it.
    pub fn known(&self, id: NodeId) -> Option<Arc<Node>> {
        self.shard(id).get(&id).map(|known| known.node.clone())
    }

    /// The layers above have one more reference on a regular file, or (`handle`) have it open once more. One that was just made is plain.
    pub fn refer(&self, below: &Branch, id: NodeId, is_new: bool, handle: bool) -> Result<Arc<Node>> {
        let mut shard = self.shard(id);
        if !shard.contains_key(&id) {
            let content = if is_new { Content::Plain } else { Content::read(below, id)? };
            shard.insert(id, Known { node: Node::new(id, content), references: 0, handles: 0, flushes: 0 });
        }
        let known = shard.get_mut(&id).ok_or(Errno::ESTALE)?;
        *if handle { &mut known.handles } else { &mut known.references } += 1;
        Ok(known.node.clone())
    }

    /// All that somebody refers to.
    pub fn all(&self) -> Vec<Arc<Node>> {
        let of = |shard: &Shard| lock(&shard.0).values().map(|known| known.node.clone()).collect::<Vec<_>>();
        self.shards.iter().flat_map(of).collect()
    }

    fn change(&self, id: NodeId, change: impl FnOnce(&mut Known)) {
        let mut shard = self.shard(id);
        let Some(known) = shard.get_mut(&id) else { return };
        change(known);
        if known.references == 0 && known.handles == 0 && known.flushes == 0 {
            shard.remove(&id);
        }
    }

    /// So many references are given back.
    pub fn forget(&self, id: NodeId, count: u64) {
        self.change(id, |known| known.references = known.references.saturating_sub(count));
    }

    /// It is open once less.
    pub fn release(&self, id: NodeId) {
        self.change(id, |known| known.handles = known.handles.saturating_sub(1));
    }

    /// It waits to be brought to disk, and is kept until then.
    pub fn begin_flush(&self, id: NodeId) {
        self.change(id, |known| known.flushes += 1);
    }

    /// It has been brought there.
    pub fn end_flush(&self, id: NodeId) {
        self.change(id, |known| known.flushes = known.flushes.saturating_sub(1));
    }
}
