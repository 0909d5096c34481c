//! Open files and directories of an instance, of both paths. The key is the FUSE front's file handle.

use crate::nodes::NodeTable;
use hashbrown::HashMap;
use poolfs_libservice::types::{Caller, Errno, HandleId, NodeId, OpenFlags};
use poolfs_libservice::{Libservice, Result};
use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

/// Most files and directories one instance keeps open.
pub const HANDLES_MAX: usize = 1 << 17;

const SHARDS: usize = 16;

const KERNEL_ONLY: u8 = 0;
const ADOPTED: u8 = 1;
const CLOSED: u8 = 2;

/// One open file or directory. It ends in the layers when its last user lets it go, so that a request in service is
/// never left with a handle that was released under it.
pub struct OpenFile {
    key: u64,
    node: NodeId,
    flags: OpenFlags,
    directory: bool,
    handle: HandleId,
    /// A second handle with the opposite of `APPEND`: a description changes that flag while it is open (F_SETFL), and
    /// pages of a mapping are written back at their own offset through any handle.
    other: OnceLock<HandleId>,
    state: AtomicU8,
    layer: Arc<dyn Libservice>,
    nodes: Arc<NodeTable>,
}

impl fmt::Debug for OpenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenFile")
            .field("key", &self.key)
            .field("node", &self.node)
            .field("flags", &self.flags)
            .finish()
    }
}

impl OpenFile {
    /// Its key in the instance's table: the FUSE front's file handle.
    #[must_use]
    pub fn key(&self) -> u64 {
        self.key
    }

    /// The file.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// How it was opened.
    #[must_use]
    pub fn flags(&self) -> OpenFlags {
        self.flags
    }

    /// Whether it is a directory.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        self.directory
    }

    /// Whether a session of the user-level path works on it.
    #[must_use]
    pub fn is_adopted(&self) -> bool {
        self.state.load(Ordering::Acquire) == ADOPTED
    }

    /// Notes that a session adopted the file, or let it go. While no session has, a file open for writing may be changed
    /// through a mapping of the kernel, and the user-level path keeps off its content. A closed file stays closed.
    pub fn set_adopted(&self, adopted: bool) {
        let (from, to) = if adopted { (KERNEL_ONLY, ADOPTED) } else { (ADOPTED, KERNEL_ONLY) };
        let changed = self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if changed && self.counts_as_writer() {
            self.nodes.change_writers(self.node, if adopted { -1 } else { 1 });
        }
    }

    /// The kernel has closed the file for good.
    pub(crate) fn close(&self) {
        let before = self.state.swap(CLOSED, Ordering::AcqRel);
        if before != CLOSED {
            let writer = before == KERNEL_ONLY && self.counts_as_writer();
            self.nodes.closed(self.node, writer, self.flags.contains(OpenFlags::APPEND));
        }
    }

    fn counts_as_writer(&self) -> bool {
        self.flags.writable() && !self.directory
    }

    /// The layers' handle.
    pub(crate) fn handle(&self) -> HandleId {
        self.handle
    }

    /// The layers' handle for a write that appends, or does not.
    pub(crate) fn handle_for(&self, caller: &Caller, append: bool) -> Result<HandleId> {
        if append == self.flags.contains(OpenFlags::APPEND) {
            return Ok(self.handle);
        }
        if let Some(&handle) = self.other.get() {
            return Ok(handle);
        }
        let mut flags = layer_flags(self.flags) - OpenFlags::TRUNCATE;
        flags.set(OpenFlags::APPEND, append);
        let opened = self.layer.open(caller, self.node, flags)?;
        let kept = *self.other.get_or_init(|| opened);
        if kept != opened {
            self.layer.release(opened);
        }
        Ok(kept)
    }

    /// All of the layers' handles.
    pub(crate) fn handles(&self) -> impl Iterator<Item = HandleId> {
        [Some(self.handle), self.other.get().copied()].into_iter().flatten()
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.close();
        for handle in self.handles() {
            self.layer.release(handle);
        }
    }
}

/// The flags the layers see: the kernel has dealt with `O_DIRECT` and `O_NOFOLLOW`, the service itself with the sync bits.
pub(crate) fn layer_flags(flags: OpenFlags) -> OpenFlags {
    flags & (OpenFlags::WRITE_ONLY | OpenFlags::READ_WRITE | OpenFlags::APPEND | OpenFlags::TRUNCATE)
}

/// The open files of an instance.
pub struct HandleTable {
    shards: [RwLock<HashMap<u64, Arc<OpenFile>>>; SHARDS],
    next: AtomicU64,
    count: AtomicUsize,
    layer: Arc<dyn Libservice>,
    nodes: Arc<NodeTable>,
}

impl HandleTable {
    pub(crate) fn new(layer: Arc<dyn Libservice>, nodes: Arc<NodeTable>) -> Self {
        Self {
            shards: std::array::from_fn(|_| RwLock::new(HashMap::new())),
            next: AtomicU64::new(1),
            count: AtomicUsize::new(0),
            layer,
            nodes,
        }
    }

    fn shard(&self, key: u64) -> &RwLock<HashMap<u64, Arc<OpenFile>>> {
        &self.shards[key as usize % SHARDS]
    }

    /// Reserves room for one more file, before the layers open it.
    pub(crate) fn reserve(&self) -> std::result::Result<Reservation<'_>, Errno> {
        if self.count.fetch_add(1, Ordering::Relaxed) >= HANDLES_MAX {
            self.count.fetch_sub(1, Ordering::Relaxed);
            return Err(Errno::ENFILE);
        }
        Ok(Reservation { table: self, used: false })
    }

    /// The open file with this key.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn get(&self, key: u64) -> std::result::Result<Arc<OpenFile>, Errno> {
        let shard = self.shard(key).read().unwrap_or_else(PoisonError::into_inner);
        shard.get(&key).cloned().ok_or(Errno::EBADF)
    }

    /// Takes the file out of the table.
    pub(crate) fn remove(&self, key: u64) -> Option<Arc<OpenFile>> {
        let removed = self.shard(key).write().unwrap_or_else(PoisonError::into_inner).remove(&key);
        if removed.is_some() {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        removed
    }

    /// Takes all files out of the table.
    pub(crate) fn clear(&self) {
        for shard in &self.shards {
            let files = std::mem::take(&mut *shard.write().unwrap_or_else(PoisonError::into_inner));
            self.count.fetch_sub(files.len(), Ordering::Relaxed);
        }
    }

    /// Open files now.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether nothing is open.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Room for one file in the table, given back unless it is used.
pub(crate) struct Reservation<'a> {
    table: &'a HandleTable,
    used: bool,
}

impl Reservation<'_> {
    /// Enters an open file.
    pub(crate) fn enter(mut self, node: NodeId, handle: HandleId, flags: OpenFlags, directory: bool) -> Arc<OpenFile> {
        self.used = true;
        self.table.nodes.opened(node, flags.writable() && !directory, flags.contains(OpenFlags::APPEND));
        let key = self.table.next.fetch_add(1, Ordering::Relaxed);
        let file = Arc::new(OpenFile {
            key,
            node,
            flags,
            directory,
            handle,
            other: OnceLock::new(),
            state: AtomicU8::new(KERNEL_ONLY),
            layer: Arc::clone(&self.table.layer),
            nodes: Arc::clone(&self.table.nodes),
        });
        let mut shard = self.table.shard(key).write().unwrap_or_else(PoisonError::into_inner);
        shard.insert(key, Arc::clone(&file));
        file
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if !self.used {
            self.table.count.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
