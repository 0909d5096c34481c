//! The in-memory reference implementation: the whole contract, as simple as possible, under one lock.
//!
//! The random-operations test compares other layers with it. It also serves as a well-behaved lower layer in tests. It is strict
//! where a real layer may be lenient: a node on which nobody holds a reference or a handle is `ESTALE` at once.

mod attributes;
mod content;
mod directory;
mod files;
mod names;
mod state;
mod views;

pub use views::View;

use crate::types::{
    AllocateMode, Attributes, Caller, FileSystemStatistics, FileType, HandleId, Name, NodeId, OpenFlags, RenameFlags,
    SeekTo, SetAttributes, XattrFlags,
};
use crate::{DirectoryEntry, Durability, Entry, Libservice, Result, Written};
use state::State;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes that file contents may take when nothing else is said.
const DEFAULT_CAPACITY: u64 = 1 << 30;

/// A filesystem in memory. See the module.
#[derive(Debug)]
pub struct Memory {
    state: Mutex<State>,
    views: views::Views,
}

impl Memory {
    /// An empty filesystem with room for 1 GiB of content.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Self::with_capacity(DEFAULT_CAPACITY)
    }

    /// An empty filesystem whose files together hold at most `bytes`, counted in whole blocks; more is `ENOSPC`.
    #[must_use]
    pub fn with_capacity(bytes: u64) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State::new(bytes)), views: views::Views::default() })
    }

    /// How many node references and how many handles callers hold now: what a layer above must have given back
    /// when nobody uses it.
    #[must_use]
    pub fn outstanding(&self) -> (u64, usize) {
        self.state().outstanding()
    }

    /// The state stays consistent when a caller's buffer or visitor panics: those run outside the lock or read only.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Libservice for Memory {
    fn lookup(&self, _: &Caller, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        self.state().lookup(parent, name)
    }

    fn forget(&self, node: NodeId, count: u64) {
        self.state().forget(node, count);
    }

    fn getattr(&self, _: &Caller, node: NodeId) -> Result<Attributes> {
        Ok(self.state().inode(node)?.shown_attributes())
    }

    fn setattr(
        &self,
        _: &Caller,
        node: NodeId,
        changes: &SetAttributes,
        handle: Option<HandleId>,
    ) -> Result<Attributes> {
        self.state().setattr(node, changes, handle)
    }

    fn readlink(&self, _: &Caller, node: NodeId) -> Result<Vec<u8>> {
        self.state().readlink(node)
    }

    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        let mut state = self.state();
        let entry = state.mknod(caller, parent, name, FileType::Regular, permissions, 0)?;
        Ok((entry, state.new_handle(entry.node, flags)))
    }

    fn tmpfile(
        &self,
        caller: &Caller,
        parent: NodeId,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        self.state().tmpfile(caller, parent, permissions, flags)
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
        self.state().mknod(caller, parent, name, file_type, permissions, device)
    }

    fn mkdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>, permissions: u32) -> Result<Entry> {
        self.state().mkdir(caller, parent, name, permissions)
    }

    fn symlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.state().symlink(caller, parent, name, target)
    }

    fn link(&self, _: &Caller, node: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        self.state().link(node, parent, name)
    }

    fn unlink(&self, _: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.state().unlink(parent, name)
    }

    fn rmdir(&self, _: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.state().rmdir(parent, name)
    }

    fn rename(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        new_parent: NodeId,
        new_name: Name<'_>,
        flags: RenameFlags,
    ) -> Result<()> {
        self.state().rename(caller, (parent, name), (new_parent, new_name), flags)
    }

    fn open(&self, _: &Caller, node: NodeId, flags: OpenFlags) -> Result<HandleId> {
        self.state().open(node, flags)
    }

    fn read(&self, _: &Caller, handle: HandleId, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        self.state().read(handle, offset, buffer)
    }

    fn write(&self, _: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        self.state().write(handle, offset, data)
    }

    fn fallocate(&self, _: &Caller, handle: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        self.state().fallocate(handle, mode, offset, length)
    }

    fn seek(&self, _: &Caller, handle: HandleId, offset: u64, to: SeekTo) -> Result<u64> {
        self.state().seek(handle, offset, to)
    }

    fn fsync(&self, _: &Caller, handle: HandleId, _: Durability) -> Result<()> {
        self.state().handle(handle).map(drop)
    }

    fn flush(&self, _: &Caller, handle: HandleId) -> Result<()> {
        self.state().handle(handle).map(drop)
    }

    fn release(&self, handle: HandleId) {
        self.state().release(handle);
    }

    fn opendir(&self, _: &Caller, node: NodeId) -> Result<HandleId> {
        let mut state = self.state();
        state.directory(node)?;
        Ok(state.new_handle(node, OpenFlags::DIRECTORY))
    }

    fn readdir(
        &self,
        _: &Caller,
        handle: HandleId,
        cookie: u64,
        visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        let listing = self.state().listing(handle, cookie)?;
        for listed in &listing {
            let Ok(name) = Name::new(&listed.name) else { continue };
            let (inode, file_type, cookie) = (listed.inode, listed.file_type, listed.cookie);
            if visit(DirectoryEntry { name, inode, file_type, cookie }).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn getxattr(&self, _: &Caller, node: NodeId, name: &[u8]) -> Result<Vec<u8>> {
        self.state().getxattr(node, name)
    }

    fn setxattr(&self, _: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        self.state().setxattr(node, name, value, flags)
    }

    fn listxattr(&self, _: &Caller, node: NodeId) -> Result<Vec<Vec<u8>>> {
        self.state().listxattr(node)
    }

    fn removexattr(&self, _: &Caller, node: NodeId, name: &[u8]) -> Result<()> {
        self.state().removexattr(node, name)
    }

    fn statfs(&self, _: &Caller, node: NodeId) -> Result<FileSystemStatistics> {
        self.state().statfs(node)
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn hold(&self, _: &Caller, handle: HandleId, _: std::ops::Range<u64>, _: bool) -> Result<()> {
        self.state().handle(handle).map(drop)
    }

    fn copy_range(
        &self,
        _: &Caller,
        source: HandleId,
        source_offset: u64,
        target: HandleId,
        target_offset: u64,
        length: u64,
    ) -> Result<u64> {
        self.state().copy_range((source, source_offset), (target, target_offset), length)
    }
}

#[cfg(test)]
mod tests;
