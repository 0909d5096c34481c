//! The table of a union's open files and directories.

use crate::node::OpenFile;
use hashbrown::HashMap;
use poolfs_libservice::{Error, Result};
use poolfs_types::{Errno, HandleId};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

const SHARDS: usize = 16;

/// Open files by number.
#[derive(Default)]
pub(crate) struct Handles {
    shards: [RwLock<HashMap<u64, Arc<OpenFile>>>; SHARDS],
    last: AtomicU64,
}

impl Handles {
    fn shard(&self, id: u64) -> &RwLock<HashMap<u64, Arc<OpenFile>>> {
        &self.shards[(id % SHARDS as u64) as usize]
    }

    pub fn insert(&self, file: Arc<OpenFile>) -> HandleId {
        let id = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.shard(id).write().unwrap_or_else(PoisonError::into_inner).insert(id, file);
        HandleId(id)
    }

    pub fn get(&self, id: HandleId) -> Result<Arc<OpenFile>> {
        let shard = self.shard(id.0).read().unwrap_or_else(PoisonError::into_inner);
        shard.get(&id.0).cloned().ok_or_else(|| Error::from(Errno::EBADF))
    }

    /// An open regular file.
    pub fn file(&self, id: HandleId) -> Result<Arc<OpenFile>> {
        self.get(id).and_then(|file| if file.directory { Err(Errno::EBADF.into()) } else { Ok(file) })
    }

    pub fn remove(&self, id: HandleId) -> Option<Arc<OpenFile>> {
        self.shard(id.0).write().unwrap_or_else(PoisonError::into_inner).remove(&id.0)
    }

    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.read().unwrap_or_else(PoisonError::into_inner).len()).sum()
    }
}
