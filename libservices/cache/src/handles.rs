//! The layer's table of open files and directories.

use crate::node_use::Use;
use crate::read_ahead::Reader;
use crate::sync::{read, write};
use hashbrown::HashMap;
use poolfs_libservice::{Result, fail};
use poolfs_types::{Errno, HandleId, OpenFlags};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

const SHARDS: usize = 16;

/// An open file.
pub(crate) struct OpenFile {
    pub(crate) node: Use,
    pub(crate) flags: OpenFlags,
    /// The last failed write-back this handle has told.
    pub(crate) seen: AtomicU64,
    pub(crate) reader: Reader,
}

/// An open directory: the handle below, and what keeps the node.
pub(crate) struct OpenDirectory {
    pub(crate) node: Use,
    pub(crate) below: HandleId,
}

impl Drop for OpenDirectory {
    fn drop(&mut self) {
        self.node.0.core.below.release(self.below);
    }
}

/// What a handle stands for.
pub(crate) enum Open {
    File(OpenFile),
    Directory(OpenDirectory),
}

pub(crate) struct Handles {
    shards: [RwLock<HashMap<HandleId, Arc<Open>>>; SHARDS],
    next: AtomicU64,
}

/// An open file, with the proof that the handle is one.
pub(crate) struct FileRef(Arc<Open>);

impl std::ops::Deref for FileRef {
    type Target = OpenFile;

    fn deref(&self) -> &OpenFile {
        match &*self.0 {
            Open::File(file) => file,
            Open::Directory(_) => unreachable!("made from open files only"),
        }
    }
}

impl Handles {
    pub(crate) fn new() -> Self {
        Self { shards: Default::default(), next: AtomicU64::new(1) }
    }

    fn shard(&self, id: HandleId) -> &RwLock<HashMap<HandleId, Arc<Open>>> {
        &self.shards[id.0 as usize % SHARDS]
    }

    pub(crate) fn insert(&self, open: Open) -> HandleId {
        let id = HandleId(self.next.fetch_add(1, Ordering::Relaxed));
        write(self.shard(id)).insert(id, Arc::new(open));
        id
    }

    pub(crate) fn get(&self, id: HandleId) -> Result<Arc<Open>> {
        read(self.shard(id)).get(&id).map_or_else(|| fail(Errno::EBADF), |open| Ok(Arc::clone(open)))
    }

    pub(crate) fn file(&self, id: HandleId) -> Result<FileRef> {
        let open = self.get(id)?;
        if matches!(*open, Open::File(_)) { Ok(FileRef(open)) } else { fail(Errno::EBADF) }
    }

    /// A file that may be written through this handle.
    pub(crate) fn writable(&self, id: HandleId) -> Result<FileRef> {
        let file = self.file(id)?;
        if file.flags.writable() { Ok(file) } else { fail(Errno::EBADF) }
    }

    /// A file that may be read through this handle.
    pub(crate) fn readable(&self, id: HandleId) -> Result<FileRef> {
        let file = self.file(id)?;
        if file.flags.readable() { Ok(file) } else { fail(Errno::EBADF) }
    }

    pub(crate) fn remove(&self, id: HandleId) -> Option<Arc<Open>> {
        write(self.shard(id)).remove(&id)
    }

    pub(crate) fn clear(&self) {
        for shard in &self.shards {
            let gone = std::mem::take(&mut *write(shard));
            drop(gone);
        }
    }
}
