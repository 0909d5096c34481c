//! Owners of a container with a user namespace: what is stored are the container's ids, above the layer they are the host's.
//!
//! It is to an instance what an idmapped mount is to a filesystem of the kernel, and is on top of the instance's stack: all that
//! is below, caches and shared branches, knows stored ids only, so that instances with different maps share it. All that is
//! above decides by the host's ids, which is what the kernel vouches for and what a FUSE mount of the initial user namespace
//! is answered.
//!
//! - Owners go out through the map: those of attributes, of access lists, of file capabilities. An owner that the map has no id
//!   for is [`NO_ID`]: nobody is it and no capability reaches it. An entry of an access list for such an id is left out, as
//!   it lets in nobody that there is.
//! - Ids come in through the map: new owners, owners of what is made, access lists, file capabilities. One without a
//!   counterpart is refused: `EOVERFLOW` as an owner, `EINVAL` in a list or with capabilities.
//!
//! The layer keeps nothing: no state is lost with it.

#![forbid(unsafe_code)]

mod values;

use poolfs_libservice::{
    DirectoryEntry, Durability, Entry, Error, Holder, Lease, Libservice, NameChange, Result, Segment, Text, Written,
};
use poolfs_types::{
    AllocateMode, Attributes, Caller, Errno, FileSystemStatistics, FileType, HandleId, IdMap, NO_ID, Name, NodeId,
    OpenFlags, RenameFlags, SeekTo, SetAttributes, XattrFlags,
};
use std::ops::{ControlFlow, Range};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A layer whose stored owners are a container's.
pub struct IdMapped {
    below: Arc<dyn Libservice>,
    map: IdMap,
}

impl IdMapped {
    /// Shows what `below` has stored by the host's ids of `map`, which is for users and groups.
    #[must_use]
    pub fn new(below: Arc<dyn Libservice>, map: IdMap) -> Arc<Self> {
        Arc::new(Self { below, map })
    }

    fn shown(&self, stored: Attributes) -> Attributes {
        let host = |id| self.map.host(id).unwrap_or(NO_ID);
        Attributes { uid: host(stored.uid), gid: host(stored.gid), ..stored }
    }

    fn shown_entry(&self, stored: Entry) -> Entry {
        Entry { attributes: self.shown(stored.attributes), ..stored }
    }

    /// What is stored for an owner.
    fn stored(&self, id: u32) -> Result<u32> {
        self.map.inside(id).ok_or_else(|| Error::from(Errno::EOVERFLOW))
    }

    fn exists(&self, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.below.forget(self.below.lookup(ANYBODY, parent, name)?.node, 1);
        Ok(())
    }

    /// Whom something that is made will belong to.
    fn maker(&self, caller: &Caller) -> Result<Caller> {
        Ok(Caller { uid: self.stored(caller.uid)?, gid: self.stored(caller.gid)?, ..*caller })
    }
}

/// Where nothing is made, nobody is asked for.
const ANYBODY: &Caller = &Caller::ROOT;

impl Libservice for IdMapped {
    fn lookup(&self, _: &Caller, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        Ok(self.shown_entry(self.below.lookup(ANYBODY, parent, name)?))
    }

    fn forget(&self, node: NodeId, count: u64) {
        self.below.forget(node, count);
    }

    fn getattr(&self, _: &Caller, node: NodeId) -> Result<Attributes> {
        Ok(self.shown(self.below.getattr(ANYBODY, node)?))
    }

    fn setattr(
        &self,
        _: &Caller,
        node: NodeId,
        changes: &SetAttributes,
        handle: Option<HandleId>,
    ) -> Result<Attributes> {
        let stored = |id: Option<u32>| id.map(|id| self.stored(id)).transpose();
        let changes = SetAttributes { uid: stored(changes.uid)?, gid: stored(changes.gid)?, ..*changes };
        Ok(self.shown(self.below.setattr(ANYBODY, node, &changes, handle)?))
    }

    fn readlink(&self, _: &Caller, node: NodeId) -> Result<Vec<u8>> {
        self.below.readlink(ANYBODY, node)
    }

    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        let (entry, handle) = self.below.create(&self.maker(caller)?, parent, name, permissions, flags)?;
        Ok((self.shown_entry(entry), handle))
    }

    fn tmpfile(
        &self,
        caller: &Caller,
        parent: NodeId,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        let (entry, handle) = self.below.tmpfile(&self.maker(caller)?, parent, permissions, flags)?;
        Ok((self.shown_entry(entry), handle))
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
        let made = self.below.mknod(&self.maker(caller)?, parent, name, file_type, permissions, device)?;
        Ok(self.shown_entry(made))
    }

    fn mkdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>, permissions: u32) -> Result<Entry> {
        Ok(self.shown_entry(self.below.mkdir(&self.maker(caller)?, parent, name, permissions)?))
    }

    fn symlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        Ok(self.shown_entry(self.below.symlink(&self.maker(caller)?, parent, name, target)?))
    }

    fn link(&self, caller: &Caller, node: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        Ok(self.shown_entry(self.below.link(&self.maker(caller)?, node, parent, name)?))
    }

    fn unlink(&self, _: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.below.unlink(ANYBODY, parent, name)
    }

    fn rmdir(&self, _: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.below.rmdir(ANYBODY, parent, name)
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
        let maker = self.maker(caller);
        if maker.is_err() {
            // As in Linux, what moves to a name that is new there is made there.
            self.exists(parent, name)?;
            if flags.contains(RenameFlags::WHITEOUT) || self.exists(new_parent, new_name).is_err() {
                return maker.map(drop);
            }
        }
        self.below.rename(maker.as_ref().unwrap_or(ANYBODY), parent, name, new_parent, new_name, flags)
    }

    fn open(&self, _: &Caller, node: NodeId, flags: OpenFlags) -> Result<HandleId> {
        self.below.open(ANYBODY, node, flags)
    }

    fn read(&self, _: &Caller, handle: HandleId, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        self.below.read(ANYBODY, handle, offset, buffer)
    }

    fn write(&self, _: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        self.below.write(ANYBODY, handle, offset, data)
    }

    fn fallocate(&self, _: &Caller, handle: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        self.below.fallocate(ANYBODY, handle, mode, offset, length)
    }

    fn seek(&self, _: &Caller, handle: HandleId, offset: u64, to: SeekTo) -> Result<u64> {
        self.below.seek(ANYBODY, handle, offset, to)
    }

    fn fsync(&self, _: &Caller, handle: HandleId, durability: Durability) -> Result<()> {
        self.below.fsync(ANYBODY, handle, durability)
    }

    fn flush(&self, _: &Caller, handle: HandleId) -> Result<()> {
        self.below.flush(ANYBODY, handle)
    }

    fn release(&self, handle: HandleId) {
        self.below.release(handle);
    }

    fn opendir(&self, _: &Caller, node: NodeId) -> Result<HandleId> {
        self.below.opendir(ANYBODY, node)
    }

    fn readdir(
        &self,
        _: &Caller,
        handle: HandleId,
        cookie: u64,
        visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        self.below.readdir(ANYBODY, handle, cookie, visit)
    }

    fn getxattr(&self, _: &Caller, node: NodeId, name: &[u8]) -> Result<Vec<u8>> {
        let stored = self.below.getxattr(ANYBODY, node, name)?;
        Ok(values::shown(&self.map, name, stored))
    }

    fn setxattr(&self, _: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        let stored = values::stored(&self.map, name, value)?;
        self.below.setxattr(ANYBODY, node, name, &stored, flags)
    }

    fn listxattr(&self, _: &Caller, node: NodeId) -> Result<Vec<Vec<u8>>> {
        self.below.listxattr(ANYBODY, node)
    }

    fn removexattr(&self, _: &Caller, node: NodeId, name: &[u8]) -> Result<()> {
        self.below.removexattr(ANYBODY, node, name)
    }

    fn statfs(&self, _: &Caller, node: NodeId) -> Result<FileSystemStatistics> {
        self.below.statfs(ANYBODY, node)
    }

    fn sync(&self) -> Result<()> {
        self.below.sync()
    }

    fn flush_range(&self, _: &Caller, handle: HandleId, range: Range<u64>) -> Result<()> {
        self.below.flush_range(ANYBODY, handle, range)
    }

    fn write_before_names(&self, _: &Caller, node: NodeId, change: NameChange) -> Result<()> {
        self.below.write_before_names(ANYBODY, node, change)
    }

    fn defers(&self) -> bool {
        self.below.defers()
    }

    fn store_deferred(&self, node: NodeId) -> Result<()> {
        self.below.store_deferred(node)
    }

    fn hold(&self, _: &Caller, handle: HandleId, range: Range<u64>, held: bool) -> Result<()> {
        self.below.hold(ANYBODY, handle, range, held)
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
        self.below.copy_range(ANYBODY, source, source_offset, target, target_offset, length)
    }

    fn segment(&self, handle: HandleId, lease: &Arc<dyn Lease>) -> Result<Segment> {
        self.below.segment(handle, lease)
    }

    fn text(&self, handle: HandleId, holder: Option<&Arc<dyn Holder>>) -> Result<Text> {
        self.below.text(handle, holder)
    }

    fn lend(&self, handle: HandleId, holder: Option<&Arc<dyn Holder>>) -> Result<OwnedFd> {
        self.below.lend(handle, holder)
    }

    fn read_only(&self) -> bool {
        self.below.read_only()
    }
}
