//! The node table: which number stands for which inode, and how its descriptor is found again.
//!
//! Where the filesystem has file handles, a node is a handle. An `O_PATH` descriptor of it is opened when needed and may be
//! closed again (`descriptors`), so a tree may have more nodes than the process may have descriptors. A file that was opened as
//! it was created needs none while it is open: it is found by the descriptor that it was created with. A node that has lost its
//! last name keeps a descriptor of its own, because its handle may no longer open. Where the filesystem has no handles, every
//! node keeps one. Kept descriptors are bounded.

pub(crate) use crate::descriptors::lock;
use crate::descriptors::{Descriptors, OwnDescriptors, Slot as DescriptorSlot};
use crate::error::backend;
use crate::sys::{self, FileHandle};
use crate::transfer::SizeClass;
use hashbrown::HashMap;
use poolfs_libservice::{Error, Result, Taken};
use poolfs_types::{Errno, FileType, NodeId};
use rustix::fd::OwnedFd;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak};

/// Shards of each table; a power of two.
const SHARDS: usize = 64;

/// What makes an inode itself, for as long as it lives.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Identity {
    /// the filesystem's own handle, generation included
    Handle(FileHandle),
    /// device and inode number, unambiguous while a descriptor is kept
    Inode(u64, u64),
}

/// One inode that somebody above holds.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) id: NodeId,
    pub(crate) file_type: FileType,
    /// The device number the inode reports (subvolumes have their own).
    pub(crate) device: u64,
    /// Of a directory: held for writing while a new entry gets its owner, so that nobody sees it without.
    pub(crate) names: RwLock<()>,
    /// Of a file: whether it is large.
    pub(crate) size: SizeClass,
    identity: Identity,
    /// A descriptor of it: an `O_PATH` one, or that of the file that was opened as it was made (see [`Node::part_with`]).
    path: Arc<DescriptorSlot<OwnedFd>>,
    /// The descriptor that a file was opened by as it was made.
    made: OnceLock<Weak<OwnedFd>>,
    kept: OnceLock<Kept>,
}

#[derive(Debug)]
struct Kept {
    descriptor: Arc<OwnedFd>,
    _permit: Taken,
}

#[derive(Debug)]
struct Slot {
    node: Arc<Node>,
    /// References the caller holds.
    references: u64,
    /// Open handles; they keep the number alive as references do, but `forget` cannot take them.
    handles: u64,
}

pub(crate) struct Nodes {
    by_id: Vec<RwLock<HashMap<u64, Arc<Node>>>>,
    by_identity: Vec<Mutex<HashMap<Identity, Slot>>>,
    hasher: RandomState,
    next: AtomicU64,
    pub(crate) descriptors: OwnDescriptors,
    /// Held by whoever removes a name, until a descriptor is kept of what has lost its last.
    removing: RwLock<()>,
    /// An open directory of the mount, which handles are resolved against.
    mount: OwnedFd,
}

impl Node {
    /// Whether a descriptor is kept for good.
    pub(crate) fn is_kept(&self) -> bool {
        self.kept.get().is_some()
    }

    /// It is the node of a file that is open by the descriptor it was made with, which may be remembered as long as it is.
    pub(crate) fn open_by(&self, file: &Arc<OwnedFd>) {
        self.made.get_or_init(|| Arc::downgrade(file));
    }

    /// Whether `descriptor` is the one that the file was opened by as it was made.
    pub(crate) fn is_open_by(&self, descriptor: &Arc<OwnedFd>) -> bool {
        self.made.get().is_some_and(|made| std::ptr::eq(made.as_ptr(), Arc::as_ptr(descriptor)))
    }

    /// Forgets the descriptor of a file, which is closed now: none by which something can be written stays.
    pub(crate) fn part_with(&self, file: &Weak<OwnedFd>) {
        drop(self.path.take_this(file));
    }
}

impl Nodes {
    pub(crate) fn new(mount: OwnedFd, descriptors: &Arc<Descriptors>) -> Self {
        Self {
            by_id: (0..SHARDS).map(|_| RwLock::default()).collect(),
            by_identity: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
            next: AtomicU64::new(NodeId::ROOT.0),
            descriptors: descriptors.join(),
            removing: RwLock::default(),
            mount,
        }
    }

    fn ids(&self, id: NodeId) -> &RwLock<HashMap<u64, Arc<Node>>> {
        &self.by_id[id.0 as usize % SHARDS]
    }

    fn identities(&self, identity: &Identity) -> MutexGuard<'_, HashMap<Identity, Slot>> {
        lock(&self.by_identity[self.hasher.hash_one(identity) as usize % SHARDS])
    }

    /// Room for one more kept descriptor.
    pub(crate) fn permit(&self) -> Result<Taken> {
        self.descriptors.kept.take(1).ok_or_else(|| {
            Error::new(
                Errno::ENFILE,
                "local directory: too many files need a descriptor of their own (removed but in use, or on a filesystem \
                 without file handles); raise the service's limit of open files",
            )
        })
    }

    /// The node of an inode, with one more reference for the caller. `descriptor` gives an `O_PATH` descriptor of it,
    /// for filesystems without handles.
    pub(crate) fn acquire(
        &self,
        identity: Identity,
        file_type: FileType,
        device: u64,
        descriptor: impl FnOnce() -> Result<Arc<OwnedFd>>,
    ) -> Result<Arc<Node>> {
        let mut slots = self.identities(&identity);
        if let Some(slot) = slots.get_mut(&identity) {
            slot.references = slot.references.saturating_add(1);
            return Ok(Arc::clone(&slot.node));
        }
        let kept = OnceLock::new();
        if matches!(identity, Identity::Inode(..)) {
            let permit = self.permit()?;
            let descriptor = descriptor()?;
            kept.get_or_init(|| Kept { descriptor, _permit: permit });
        }
        let id = NodeId(self.next.fetch_add(1, Ordering::Relaxed));
        let (path, own_identity) = (DescriptorSlot::new(), identity.clone());
        let (names, size) = (RwLock::default(), SizeClass::default());
        let node = Arc::new(Node {
            id,
            file_type,
            device,
            names,
            size,
            identity: own_identity,
            path,
            made: OnceLock::new(),
            kept,
        });
        self.ids(id).write().unwrap_or_else(PoisonError::into_inner).insert(id.0, Arc::clone(&node));
        slots.insert(identity, Slot { node: Arc::clone(&node), references: 1, handles: 0 });
        Ok(node)
    }

    /// The node a number stands for.
    pub(crate) fn get(&self, id: NodeId) -> Result<Arc<Node>> {
        let nodes = self.ids(id).read().unwrap_or_else(PoisonError::into_inner);
        nodes.get(&id.0).cloned().ok_or_else(|| Error::from(Errno::ESTALE))
    }

    /// The node of an inode, if somebody holds it.
    pub(crate) fn held(&self, identity: &Identity) -> Option<Arc<Node>> {
        self.identities(identity).get(identity).map(|slot| Arc::clone(&slot.node))
    }

    /// One more reference for the caller, who holds one; false when that is not so.
    pub(crate) fn acquire_again(&self, node: &Node) -> bool {
        self.change(node, |slot| slot.references = slot.references.saturating_add(1))
    }

    /// Gives back `count` references of the caller.
    pub(crate) fn forget(&self, id: NodeId, count: u64) {
        if id == NodeId::ROOT {
            return;
        }
        let Ok(node) = self.get(id) else { return };
        self.change(&node, |slot| slot.references = slot.references.saturating_sub(count));
    }

    /// Counts one more open handle on `node`; false when the node has just been forgotten.
    pub(crate) fn handle_opened(&self, node: &Node) -> bool {
        self.change(node, |slot| slot.handles += 1)
    }

    /// Counts one open handle less.
    pub(crate) fn handle_closed(&self, node: &Node) {
        self.change(node, |slot| slot.handles = slot.handles.saturating_sub(1));
    }

    /// Applies `change` to the counts of `node`, and removes it when nobody holds it any more.
    fn change(&self, node: &Node, change: impl FnOnce(&mut Slot)) -> bool {
        let mut slots = self.identities(&node.identity);
        // After the last forget the inode may have got a new node: that one is none of this caller's business.
        let Some(slot) = slots.get_mut(&node.identity).filter(|slot| slot.node.id == node.id) else { return false };
        change(slot);
        if slot.references == 0 && slot.handles == 0 && node.id != NodeId::ROOT {
            slots.remove(&node.identity);
            self.ids(node.id).write().unwrap_or_else(PoisonError::into_inner).remove(&node.id.0);
            drop(node.path.take());
        }
        true
    }

    /// A descriptor of `node`, which may not be what it can be read or written by, and is not to be remembered as another one's.
    pub(crate) fn descriptor(&self, node: &Node) -> Result<Arc<OwnedFd>> {
        if let Some(kept) = node.kept.get() {
            return Ok(Arc::clone(&kept.descriptor));
        }
        let found = node.path.get(&self.descriptors, || {
            let Identity::Handle(handle) = &node.identity else {
                return Err(Error::new(Errno::EIO, "local directory: a node lost its kept descriptor"));
            };
            let open = || sys::open_handle(&self.mount, handle, libc::O_PATH | libc::O_NOFOLLOW);
            self.with_room(open).map_err(|raw| backend("finding a file again", raw))
        });
        match found {
            Err(error) if error == Errno::ESTALE => {
                // Its last name may just have been removed. Then whoever did that is about to keep a descriptor of it.
                drop(self.removing.write().unwrap_or_else(PoisonError::into_inner));
                node.kept.get().map_or(Err(error), |kept| Ok(Arc::clone(&kept.descriptor)))
            }
            found => found,
        }
    }

    /// Announces that a name is about to be removed, until what this answers is dropped.
    pub(crate) fn begin_removal(&self) -> RwLockReadGuard<'_, ()> {
        self.removing.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps `descriptor` for a while, since the node was just found or made by it.
    pub(crate) fn remember(&self, node: &Node, descriptor: &Arc<OwnedFd>) {
        if !node.is_kept() {
            node.path.put(&self.descriptors, Arc::clone(descriptor));
        }
    }

    /// Keeps `descriptor`, an `O_PATH` one, for as long as the node lives, because its last name is gone.
    pub(crate) fn keep(&self, node: &Node, descriptor: &Arc<OwnedFd>, permit: Taken) {
        node.kept.get_or_init(|| Kept { descriptor: Arc::clone(descriptor), _permit: permit });
        drop(node.path.take());
    }

    /// Runs a call that needs a new descriptor; when the table is full, once more after closing those that can be had again.
    pub(crate) fn with_room<T>(&self, call: impl Fn() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
        match call() {
            Err(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => {
                self.descriptors.close_all();
                call()
            }
            result => result,
        }
    }
}
