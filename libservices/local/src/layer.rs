//! [`Local`] and its implementation of the layer interface.

use crate::error::backend;
use crate::local::{Handle, Local};
use poolfs_libservice::{DirectoryEntry, Durability, Entry, Libservice, NameChange, Result, Written, write_whole};
use poolfs_types::{
    AllocateMode, Attributes, Caller, FileSystemStatistics, FileType, HandleId, Name, NodeId, OpenFlags, RenameFlags,
    SeekTo, SetAttributes, XattrFlags,
};
use rustix::fs::AtFlags;
use std::ops::ControlFlow;
use std::sync::PoisonError;

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
