//! [`Local`] and its face to the layers above.

use crate::backing::{Backing, device_of, stat};
use crate::bounce::Bounce;
use crate::descriptors::Descriptors;
use crate::error::{OpenError, backend};
use crate::files::OpenFile;
use crate::listing::OpenDirectory;
use crate::mount::PrivateMount;
use crate::names::read_only;
use crate::nodes::{Node, Nodes};
use crate::rings::Rings;
use crate::transfer::Buffered;
use hashbrown::HashMap;
use poolfs_libservice::{
    DirectoryEntry, Durability, Entry, Error, Libservice, NameChange, Result, Written, fail, write_whole,
};
use poolfs_types::{
    AllocateMode, Attributes, Caller, Errno, FileSystemStatistics, FileType, HandleId, Name, NodeId, OpenFlags,
    RenameFlags, SeekTo, SetAttributes, XattrFlags,
};
use rustix::fs::AtFlags;
use std::ops::ControlFlow;
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
    read_only: bool,
    pub(crate) has_quotas: bool,
    discarded: AtomicBool,
}

#[derive(Debug)]
pub(crate) enum Handle {
    File(OpenFile),
    Directory(OpenDirectory),
}

impl Handle {
    fn node(&self) -> &Arc<Node> {
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

    fn directory(&self) -> Result<&OpenDirectory> {
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
        let nodes = Nodes::new(mount, options.descriptors);
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

    fn handles(&self, id: HandleId) -> &RwLock<HashMap<u64, Arc<Handle>>> {
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

impl Libservice for Local {
    fn lookup(&self, _caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        self.find(parent, name)
    }

    fn forget(&self, node: NodeId, count: u64) {
        self.nodes.forget(node, count);
    }

    fn getattr(&self, _caller: &Caller, node: NodeId) -> Result<Attributes> {
        self.attributes_of(node)
    }

    fn setattr(
        &self,
        _caller: &Caller,
        node: NodeId,
        changes: &SetAttributes,
        handle: Option<HandleId>,
    ) -> Result<Attributes> {
        self.change_attributes(node, changes, handle)
    }

    fn readlink(&self, _caller: &Caller, node: NodeId) -> Result<Vec<u8>> {
        self.link_target(node)
    }

    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        self.create_file(caller, parent, name, permissions, flags)
    }

    fn tmpfile(
        &self,
        caller: &Caller,
        parent: NodeId,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        self.create_nameless(caller, parent, permissions, flags)
    }

    fn mknod(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        file_type: FileType,
        permissions: u32,
        device: u32,
    ) -> Result<Entry> {
        self.make_node(caller, parent, name, file_type, permissions, device)
    }

    fn mkdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>, permissions: u32) -> Result<Entry> {
        self.make_directory(caller, parent, name, permissions)
    }

    fn symlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.make_symlink(caller, parent, name, target)
    }

    fn link(&self, _caller: &Caller, node: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        self.make_link(node, parent, name)
    }

    fn unlink(&self, _caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.remove(parent, name, AtFlags::empty())
    }

    fn unlink_known(
        &self,
        _caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        victim: NodeId,
        is_last: Option<bool>,
    ) -> Result<()> {
        self.remove_known(parent, name, victim, is_last)
    }

    fn rmdir(&self, _caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.remove(parent, name, AtFlags::REMOVEDIR)
    }

    fn rename(
        &self,
        _caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        new_parent: NodeId,
        new_name: Name<'_>,
        flags: RenameFlags,
    ) -> Result<()> {
        self.move_name((parent, name), (new_parent, new_name), flags)
    }

    fn open(&self, _caller: &Caller, node: NodeId, flags: OpenFlags) -> Result<HandleId> {
        self.open_file(node, flags)
    }

    fn read(&self, _caller: &Caller, handle: HandleId, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        self.read_file(self.handle(handle)?.file()?, offset, buffer)
    }

    fn write(&self, _caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        self.write_file(self.handle(handle)?.file()?, offset, data)
    }

    fn write_pieces(&self, caller: &Caller, handle: HandleId, pieces: &[(u64, &[u8])]) -> Result<()> {
        let are_written = self.write_at_once(self.handle(handle)?.file()?, pieces)?;
        let mut others = pieces.iter().zip(are_written).filter(|(_, is_written)| !is_written);
        others.try_for_each(|(&(offset, data), _)| write_whole(self, caller, handle, offset, data))
    }

    fn fallocate(
        &self,
        _caller: &Caller,
        handle: HandleId,
        mode: AllocateMode,
        offset: u64,
        length: u64,
    ) -> Result<()> {
        self.allocate(self.handle(handle)?.file()?, mode, offset, length)
    }

    fn seek(&self, _caller: &Caller, handle: HandleId, offset: u64, to: SeekTo) -> Result<u64> {
        self.seek_file(self.handle(handle)?.file()?, offset, to)
    }

    fn fsync(&self, _caller: &Caller, handle: HandleId, durability: Durability) -> Result<()> {
        match &*self.handle(handle)? {
            Handle::File(open) => self.sync_file(open, durability),
            Handle::Directory(open) => Self::sync_descriptor(&self.opened_directory(open)?.directory, durability),
        }
    }

    fn flush(&self, _caller: &Caller, handle: HandleId) -> Result<()> {
        self.handle(handle).map(drop)
    }

    /// What was written is in the kernel's cache, and goes to the disk with the names: only that which replaces something is to go first.
    fn write_before_names(&self, _caller: &Caller, node: NodeId, change: NameChange) -> Result<()> {
        match change {
            NameChange::Adds => Ok(()),
            NameChange::Replaces => self.begin_write_back(node),
        }
    }

    fn release(&self, handle: HandleId) {
        let removed = self.handles(handle).write().unwrap_or_else(PoisonError::into_inner).remove(&handle.0);
        let Some(open) = removed else { return };
        if let Handle::File(file) = &*open {
            file.part();
        }
        self.nodes.handle_closed(open.node());
    }

    fn opendir(&self, _caller: &Caller, node: NodeId) -> Result<HandleId> {
        self.open_directory(node)
    }

    fn readdir(
        &self,
        _caller: &Caller,
        handle: HandleId,
        cookie: u64,
        visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        self.list(self.handle(handle)?.directory()?, cookie, visit)
    }

    fn getxattr(&self, _caller: &Caller, node: NodeId, name: &[u8]) -> Result<Vec<u8>> {
        self.xattr(node, name)
    }

    fn setxattr(&self, _caller: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        self.set_xattr(node, name, value, flags)
    }

    fn listxattr(&self, _caller: &Caller, node: NodeId) -> Result<Vec<Vec<u8>>> {
        self.xattr_names(node)
    }

    fn removexattr(&self, _caller: &Caller, node: NodeId, name: &[u8]) -> Result<()> {
        self.remove_xattr(node, name)
    }

    fn statfs(&self, _caller: &Caller, node: NodeId) -> Result<FileSystemStatistics> {
        self.space(node)
    }

    fn sync(&self) -> Result<()> {
        // It would make all of the filesystem durable, whoever wrote it.
        if self.read_only || self.is_discarded() {
            return Ok(());
        }
        rustix::fs::syncfs(self.backing.root()).map_err(|raw| backend("making the directory durable", raw))
    }

    fn copy_range(
        &self,
        _caller: &Caller,
        source: HandleId,
        source_offset: u64,
        target: HandleId,
        target_offset: u64,
        length: u64,
    ) -> Result<u64> {
        let (source, target) = (self.handle(source)?, self.handle(target)?);
        self.copy_files(source.file()?, source_offset, target.file()?, target_offset, length)
    }

    fn read_only(&self) -> bool {
        self.read_only
    }
}
