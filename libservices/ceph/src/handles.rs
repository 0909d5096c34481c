//! Open files and directories.

use crate::client::{OpenDirectory, OpenFile};
use crate::nodes::Node;
use hashbrown::HashMap;
use poolfs_libservice::{Error, Result, fail};
use poolfs_types::{Errno, HandleId, OpenFlags};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// An open file.
pub(crate) struct File {
    pub node: Arc<Node>,
    pub flags: OpenFlags,
    pub open: OpenFile,
}

/// A directory that is listed.
pub(crate) struct Listing {
    pub open: OpenDirectory,
    /// Where it goes on without seeking.
    pub place: i64,
}

pub(crate) enum Handle {
    File(File),
    Directory(Arc<Node>, Mutex<Listing>),
}

impl Handle {
    pub fn node(&self) -> &Arc<Node> {
        match self {
            Self::File(file) => &file.node,
            Self::Directory(node, _) => node,
        }
    }

    fn file(&self) -> Result<&File> {
        match self {
            Self::File(file) => Ok(file),
            Self::Directory(..) => fail(Errno::EBADF),
        }
    }

    pub fn readable(&self) -> Result<&File> {
        self.file().and_then(|file| if file.flags.readable() { Ok(file) } else { fail(Errno::EBADF) })
    }

    pub fn writable(&self) -> Result<&File> {
        self.file().and_then(|file| if file.flags.writable() { Ok(file) } else { fail(Errno::EBADF) })
    }
}

#[derive(Default)]
pub(crate) struct Handles {
    open: RwLock<HashMap<HandleId, Arc<Handle>>>,
    last: AtomicU64,
}

impl Handles {
    pub fn add(&self, handle: Handle) -> HandleId {
        let id = HandleId(self.last.fetch_add(1, Ordering::Relaxed) + 1);
        self.open.write().unwrap_or_else(PoisonError::into_inner).insert(id, Arc::new(handle));
        id
    }

    pub fn get(&self, id: HandleId) -> Result<Arc<Handle>> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.get(&id).cloned().ok_or_else(|| Error::from(Errno::EBADF))
    }

    pub fn remove(&self, id: HandleId) -> Option<Arc<Handle>> {
        self.open.write().unwrap_or_else(PoisonError::into_inner).remove(&id)
    }
}
