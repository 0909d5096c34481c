//! [`Local`]: a directory of the host, with its nodes and open handles. The files beside this one add what it does.

use crate::backing::Backing;
use crate::bounce::Bounce;
use crate::descriptors::Descriptors;
use crate::error::{OpenError, read_only};
use crate::filesystem::{device_of, stat};
use crate::mount::PrivateMount;
use crate::nodes::{Node, Nodes};
use crate::open_directory::OpenDirectory;
use crate::open_file::OpenFile;
use crate::rings::Rings;
use crate::transfer::Buffered;
use hashbrown::HashMap;
use poolfs_libservice::{Error, Result, fail};
use poolfs_types::{Errno, FileType, HandleId};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Shards of the table of handles; a power of two.
const SHARDS: usize = 16;

/// How a directory is served.
#[derive(Clone, Debug)]
pub struct LocalOptions {
    /// Refuse every change with `EROFS`.
    pub read_only: bool,
    /// Whether its filesystem has disk quotas ([`FileSystemStatistics::has_quotas`]), which a descriptor of it does not tell.
    pub has_quotas: bool,
    /// Where its descriptors are counted, with those of other directories of the process. By default it has them alone.
    pub descriptors: Arc<Descriptors>,
}

impl Default for LocalOptions {
    fn default() -> Self {
        Self { read_only: false, has_quotas: false, descriptors: Descriptors::of_process() }
    }
}

/// A directory of the host as a layer.
pub struct Local {
    pub(crate) backing: Backing,
    pub(crate) nodes: Nodes,
    pub(crate) buffered: Buffered,
    pub(crate) bounce: Bounce,
    pub(crate) rings: Rings,
    handles: Vec<RwLock<HashMap<u64, Arc<Handle>>>>,
    next_handle: AtomicU64,
    pub(crate) read_only: bool,
    pub(crate) has_quotas: bool,
    discarded: AtomicBool,
}

#[derive(Debug)]
pub(crate) enum Handle {
    File(OpenFile),
    Directory(OpenDirectory),
}

impl Handle {
    pub(crate) fn node(&self) -> &Arc<Node> {
        match self {
            Handle::File(open) => &open.node,
            Handle::Directory(open) => &open.node,
        }
    }

    pub(crate) fn file(&self) -> Result<&OpenFile> {
        match self {
            Handle::File(open) => Ok(open),
            Handle::Directory(_) => fail(Errno::EBADF),
        }
    }

    pub(crate) fn directory(&self) -> Result<&OpenDirectory> {
        match self {
            Handle::Directory(open) => Ok(open),
            Handle::File(_) => fail(Errno::EBADF),
        }
    }
}

impl Local {
    /// Serves `directory`.
    ///
    /// # Errors
    /// When it is no directory, or the host does not allow a private mount of it.
    pub fn open(directory: &Path, options: LocalOptions) -> std::result::Result<Arc<Self>, OpenError> {
        let mount = PrivateMount::of(directory, options.read_only)?;
        Self::over(Arc::new(mount), directory, options)
    }

    /// Serves a directory whose private mount there is; `directory` is what messages call it.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn over(
        mount: Arc<PrivateMount>,
        directory: &Path,
        options: LocalOptions,
    ) -> std::result::Result<Arc<Self>, OpenError> {
        let backing = Backing::of(mount, directory)?;
        let failed = |source: std::io::Error| OpenError::Directory { directory: directory.into(), source };
        let mount = backing.root().try_clone_to_owned().map_err(failed)?;
        let root = Arc::new(backing.root().try_clone_to_owned().map_err(failed)?);
        let seen = stat(&root).map_err(|raw| failed(raw.into()))?;
        let identity = backing.identity(&root, &seen).map_err(|raw| failed(raw.into()))?;
        let nodes = Nodes::new(mount, &options.descriptors);
        let full = |error: Error| failed(std::io::Error::from_raw_os_error(error.errno().raw()));
        let node =
            nodes.acquire(identity, FileType::Directory, device_of(&seen), || Ok(Arc::clone(&root))).map_err(full)?;
        if !node.is_kept() {
            nodes.keep(&node, &root, nodes.permit().map_err(full)?);
        }
        Ok(Arc::new(Self {
            backing,
            nodes,
            buffered: Buffered::new(),
            bounce: Bounce::new(),
            rings: Rings::default(),
            handles: (0..SHARDS).map(|_| RwLock::default()).collect(),
            next_handle: AtomicU64::new(1),
            read_only: options.read_only,
            has_quotas: options.has_quotas,
            discarded: AtomicBool::new(false),
        }))
    }

    /// Nobody is going to look at the directory again: from here on nothing is made durable.
    pub fn discard(&self) {
        self.discarded.store(true, Ordering::Release);
    }

    pub(crate) fn is_discarded(&self) -> bool {
        self.discarded.load(Ordering::Acquire)
    }

    /// Refuses a change of a read-only layer. Calls that make a name leave it to the kernel, whose mount is read-only as well,
    /// because a name that exists is `EEXIST` even there.
    pub(crate) fn changeable(&self) -> Result<()> {
        if self.read_only { Err(read_only()) } else { Ok(()) }
    }

    pub(crate) fn handles(&self, id: HandleId) -> &RwLock<HashMap<u64, Arc<Handle>>> {
        &self.handles[id.0 as usize % SHARDS]
    }

    pub(crate) fn add_handle(&self, handle: Handle) -> Result<HandleId> {
        if !self.nodes.handle_opened(handle.node()) {
            return fail(Errno::ESTALE);
        }
        let id = HandleId(self.next_handle.fetch_add(1, Ordering::Relaxed));
        self.handles(id).write().unwrap_or_else(PoisonError::into_inner).insert(id.0, Arc::new(handle));
        Ok(id)
    }

    pub(crate) fn handle(&self, id: HandleId) -> Result<Arc<Handle>> {
        let handles = self.handles(id).read().unwrap_or_else(PoisonError::into_inner);
        handles.get(&id.0).cloned().ok_or_else(|| Error::from(Errno::EBADF))
    }
}
