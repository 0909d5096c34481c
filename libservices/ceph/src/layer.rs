//! [`Ceph`] and its implementation of the layer interface.

use crate::client::{Answer, Client, Inode};
use crate::error::{MountError, backend, is_over, over};
use crate::handles::{Handle, Handles};
use crate::nodes::{Node, Nodes};
use crate::source::Source;
use poolfs_libservice::{
    DirectoryEntry, Durability, Entry, Error, Libservice, NameChange, Result, Written, copy_by_reading, fail,
};
use poolfs_types::{
    AllocateMode, Attributes, Caller, Errno, FileSystemStatistics, FileType, HandleId, Name, NodeId, OpenFlags,
    RenameFlags, SeekTo, SetAttributes, XattrFlags,
};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};

/// A directory tree of a CephFS as a layer.
pub struct Ceph {
    // In this order: what the mount has handed out goes before the mount.
    pub(crate) handles: Handles,
    pub(crate) nodes: Nodes,
    /// Held for writing by a rename, which looks first and renames then.
    pub(crate) names: RwLock<()>,
    /// Shared by whoever has libcephfs take up names in its cache; alone has it a rename after which that forgets some.
    pub(crate) known_names: RwLock<()>,
    client: Arc<Client>,
    read_only: bool,
    /// Other clients change the tree meanwhile, by this layer.
    pub(crate) is_shared: bool,
    /// From here on nothing is made durable.
    is_discarded: AtomicBool,
    /// The cluster has ended the session. What was accepted then may be lost, and libcephfs, which has thrown it away, answers success to
    /// whoever wants it durable.
    is_over: AtomicBool,
}

impl Ceph {
    /// Mounts a tree.
    ///
    /// # Errors
    /// When libcephfs is missing or the cluster does not let the tree be mounted; that takes up to half a minute.
    pub fn mount(source: &Source) -> std::result::Result<Arc<Self>, MountError> {
        let client = Client::mount(source)?;
        let refused = |errno| MountError::Mount {
            path: source.path.clone(),
            user: source.user.clone().unwrap_or_else(|| "admin".to_owned()),
            source: errno,
        };
        let root = client.root().map_err(refused)?;
        let found = root.attributes().map_err(refused)?;
        let nodes = Nodes::new(root, &found).map_err(|error| refused(error.errno()))?;
        let (handles, names, known_names, is_discarded, is_over) = Default::default();
        Ok(Arc::new(Self {
            handles,
            nodes,
            names,
            known_names,
            client,
            read_only: source.read_only,
            is_shared: source.is_shared,
            is_discarded,
            is_over,
        }))
    }

    /// Nobody is going to look at the tree again: from here on nothing is made durable.
    pub fn discard(&self) {
        self.is_discarded.store(true, Ordering::Release);
    }

    /// Refuses a change of what cannot be changed.
    pub(crate) fn changeable(&self, node: &Node) -> Result<()> {
        if self.read_only || node.is_snapshot { fail(Errno::EROFS) } else { self.has_session("a change") }
    }

    /// What libcephfs answered while `doing`; that the session is over is remembered.
    pub(crate) fn fault(&self, doing: &'static str, errno: Errno) -> Error {
        if is_over(errno) {
            self.is_over.store(true, Ordering::Release);
        }
        backend(doing, errno)
    }

    /// Refuses what counts on the session when that is over.
    pub(crate) fn has_session(&self, doing: &'static str) -> Result<()> {
        if self.is_over.load(Ordering::Acquire) { Err(over(doing)) } else { Ok(()) }
    }

    /// Makes something durable, and answers success only where that is true.
    ///
    /// With the session go all capabilities of its client, before anybody who waits for the cluster is told. So the attributes of an inode
    /// of which it had some are known here as long as the session lives, and are asked of the cluster, which refuses, when it is over.
    pub(crate) fn synced(&self, inode: &Inode, sync: impl FnOnce() -> Answer<()>) -> Result<()> {
        const DOING: &str = "making a file durable";
        self.has_session(DOING)?;
        sync().and_then(|()| inode.attributes()).map_err(|errno| self.fault(DOING, errno))?;
        self.has_session(DOING)
    }

    pub(crate) fn add_handle(&self, handle: Handle) -> Result<HandleId> {
        if self.nodes.handle_opened(handle.node().id) { Ok(self.handles.add(handle)) } else { fail(Errno::ESTALE) }
    }
}

impl Libservice for Ceph {
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

    /// CephFS has no files without a name.
    fn tmpfile(
        &self,
        _caller: &Caller,
        parent: NodeId,
        _permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        self.nodes.get(parent)?.directory()?;
        fail(if flags.writable() { Errno::EOPNOTSUPP } else { Errno::EINVAL })
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
        self.remove(parent, name, false)
    }

    fn rmdir(&self, _caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.remove(parent, name, true)
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
        self.read_file(handle, offset, buffer)
    }

    fn write(&self, _caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        self.write_file(handle, offset, data)
    }

    fn fallocate(
        &self,
        _caller: &Caller,
        handle: HandleId,
        mode: AllocateMode,
        offset: u64,
        length: u64,
    ) -> Result<()> {
        self.allocate(handle, mode, offset, length)
    }

    fn seek(&self, _caller: &Caller, handle: HandleId, offset: u64, to: SeekTo) -> Result<u64> {
        self.seek_file(handle, offset, to)
    }

    fn fsync(&self, _caller: &Caller, handle: HandleId, durability: Durability) -> Result<()> {
        if self.is_discarded.load(Ordering::Acquire) {
            return self.handles.get(handle).map(drop);
        }
        self.make_durable(handle, durability)
    }

    fn flush(&self, _caller: &Caller, handle: HandleId) -> Result<()> {
        self.handles.get(handle)?;
        self.has_session("closing a file")
    }

    /// What was written has been stored: libcephfs keeps nothing here.
    fn write_before_names(&self, _caller: &Caller, node: NodeId, _change: NameChange) -> Result<()> {
        self.nodes.get(node).map(drop)
    }

    fn release(&self, handle: HandleId) {
        if let Some(open) = self.handles.remove(handle) {
            self.nodes.handle_closed(open.node().id);
        }
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
        self.list(handle, cookie, visit)
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
        if self.is_discarded.load(Ordering::Acquire) {
            return Ok(());
        }
        self.synced(&self.nodes.root()?.inode, || self.client.sync())
    }

    fn copy_range(
        &self,
        caller: &Caller,
        source: HandleId,
        source_offset: u64,
        target: HandleId,
        target_offset: u64,
        length: u64,
    ) -> Result<u64> {
        let (from, to) = (self.handles.get(source)?, self.handles.get(target)?);
        let is_one = Arc::ptr_eq(&from.readable()?.node, &to.writable()?.node);
        if is_one && source_offset.abs_diff(target_offset) < length {
            return fail(Errno::EINVAL);
        }
        copy_by_reading(self, caller, (source, source_offset), (target, target_offset), length)
    }

    fn read_only(&self) -> bool {
        self.read_only
    }
}
