//! The [`Libservice`] implementation of the cache.

use crate::blocks::{block_of, blocks_for};
use crate::cache::Cache;
use crate::handles::{Open, OpenDirectory};
use crate::names::Known;
use crate::node::Node;
use crate::sync::{lock, read};
use crate::write_back::hold_is_bounded;
use poolfs_libservice::{
    Coherence, DirectoryEntry, Durability, Entry, Error, Holder, Lease, Libservice, NameChange, ReadTarget, Result,
    Segment, SharedContent, Text, Upcalls, Written, fail,
};
use poolfs_types::{
    AllocateMode, Attributes, Caller, Errno, FileSystemStatistics, FileType, HandleId, Name, NodeId, OpenFlags,
    RenameFlags, SeekTo, SetAttributes, XattrFlags,
};
use std::ops::{ControlFlow, Range};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

const ALL: Range<u64> = 0..u64::MAX;

/// What the names of access lists begin with.
const ACCESS_LISTS: &[u8] = b"system.posix_acl_";

impl Libservice for Cache {
    fn lookup(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        if self.core.coherence.is_shared() {
            self.fresh(parent)?;
        }
        match self.core.known(parent, name) {
            Some(Known::Absent) => return fail(Errno::ENOENT),
            Some(Known::Present(id)) => {
                if let Some(node) = self.core.reference(id) {
                    match self.entry(&node) {
                        // It was removed by others.
                        Err(error) if error.errno() == Errno::ESTALE && self.core.coherence.is_shared() => {}
                        entry => return entry,
                    }
                }
            }
            None => {}
        }
        let directory = self.directory(parent)?;
        let node = {
            let _unchanging = read(&directory.names);
            let (removals, epoch) = (self.core.removals(), self.core.epoch_of_names(parent));
            match self.core.below.lookup(caller, parent, name) {
                Ok(entry) => {
                    let node = self.core.adopt(&entry, removals);
                    self.core.names.set(parent, name, Known::Present(node.id), epoch);
                    node
                }
                Err(error) => {
                    if error.errno() == Errno::ENOENT {
                        self.core.names.set(parent, name, Known::Absent, epoch);
                    }
                    return Err(error);
                }
            }
        };
        self.entry(&node)
    }

    fn forget(&self, node: NodeId, count: u64) {
        self.core.forget(node, count);
    }

    fn getattr(&self, _caller: &Caller, node: NodeId) -> Result<Attributes> {
        self.fresh(node)?.attributes()
    }

    fn setattr(
        &self,
        caller: &Caller,
        node: NodeId,
        changes: &SetAttributes,
        handle: Option<HandleId>,
    ) -> Result<Attributes> {
        let node = self.node(node)?.begin_use()?;
        let below = match handle {
            Some(handle) if changes.size.is_some() => {
                if self.handles.writable(handle)?.node.0.id != node.0.id {
                    return fail(Errno::EBADF);
                }
                Some(node.0.writer_below()?)
            }
            _ => None,
        };
        node.0.set_attributes(caller, changes, below)
    }

    fn readlink(&self, caller: &Caller, node: NodeId) -> Result<Vec<u8>> {
        self.node(node)?.target(caller)
    }

    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        let (node, handle) =
            self.make(parent, name, |below| below.create(caller, parent, name, permissions, OpenFlags::READ_WRITE))?;
        let node = node.begin_use().inspect_err(|_| {
            self.core.below.release(handle);
            self.core.forget(node.id, 1);
        })?;
        node.0.adopt_writer(handle);
        let entry = self.entry(&node.0)?;
        Ok((entry, self.insert_file(node, flags)))
    }

    fn tmpfile(
        &self,
        caller: &Caller,
        parent: NodeId,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        self.directory(parent)?;
        if !flags.writable() {
            return fail(Errno::EINVAL);
        }
        let access = OpenFlags::READ_WRITE | flags & OpenFlags::EXCLUSIVE;
        let removals = self.core.removals();
        let make = || self.core.below.tmpfile(caller, parent, permissions, access);
        let (made, handle) = self.core.with_room(make)?;
        let node = self.core.adopt(&made, removals);
        // Without a name nobody but its users reaches it.
        node.update(None, |state| state.orphan = true);
        node.note_whether_leaving();
        let node = node.begin_use().inspect_err(|_| {
            self.core.below.release(handle);
            self.core.forget(node.id, 1);
        })?;
        node.0.adopt_writer(handle);
        let entry = self.entry(&node.0)?;
        Ok((entry, self.insert_file(node, flags)))
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
        let (node, ()) = self.make(parent, name, |below| {
            below.mknod(caller, parent, name, file_type, permissions, device).map(|entry| (entry, ()))
        })?;
        self.entry(&node)
    }

    fn mkdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>, permissions: u32) -> Result<Entry> {
        let (node, ()) =
            self.make(parent, name, |below| below.mkdir(caller, parent, name, permissions).map(|entry| (entry, ())))?;
        self.entry(&node)
    }

    fn symlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        let (node, ()) =
            self.make(parent, name, |below| below.symlink(caller, parent, name, target).map(|entry| (entry, ())))?;
        self.entry(&node)
    }

    fn link(&self, caller: &Caller, node: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        let source = self.node(node)?;
        source.write_before_names()?;
        let (node, ()) = self.make(parent, name, |below| {
            source.gain_name(|| below.link(caller, node, parent, name)).map(|entry| (entry, ()))
        })?;
        self.entry(&node)
    }

    fn unlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.remove_name(parent, name, |below, known| match known {
            Some((victim, is_last)) => below.unlink_known(caller, parent, name, victim, is_last),
            None => below.unlink(caller, parent, name),
        })
    }

    fn rmdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.remove_name(parent, name, |below, _| below.rmdir(caller, parent, name))
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
        self.core.with_room(|| self.rename_locked(caller, (parent, name), (new_parent, new_name), flags))
    }

    fn open(&self, caller: &Caller, node: NodeId, flags: OpenFlags) -> Result<HandleId> {
        let node = self.fresh(node)?.begin_use()?;
        match node.0.attributes()?.file_type {
            FileType::Regular => {}
            FileType::Directory => return fail(Errno::EISDIR),
            FileType::Symlink => return fail(Errno::ELOOP),
            _ => return fail(Errno::ENXIO),
        }
        if flags.writable() {
            // Whether the file can be written at all should be known now, not at write-back.
            node.0.writer_below()?;
            if flags.contains(OpenFlags::TRUNCATE) {
                self.truncate_on_open(caller, &node)?;
            }
        }
        Ok(self.insert_file(node, flags))
    }

    fn read(&self, caller: &Caller, handle: HandleId, offset: u64, mut buffer: &mut [u8]) -> Result<usize> {
        self.read_into(caller, handle, offset, &mut buffer)
    }

    fn read_into(&self, _: &Caller, handle: HandleId, offset: u64, target: &mut dyn ReadTarget) -> Result<usize> {
        let file = self.handles.readable(handle)?;
        file.node.0.validate()?;
        let pool = &self.core.pool;
        let window_max = pool.config.read_ahead_bytes.min(pool.budget.allowed() / 16);
        let (window, ahead) = file.reader.advance(offset, target.buffer().len() as u64, window_max);
        if let Some(ahead) = ahead {
            self.core.lists.read_ahead.submit(&file.node.0, ahead, pool.step_bytes());
        }
        let (count, fetched) = file.node.0.read(offset, target, window)?;
        if let Some(end) = fetched {
            file.reader.fetched(end);
        }
        Ok(count)
    }

    fn write(&self, caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        let file = self.handles.writable(handle)?;
        let written = file.node.0.write(file.flags.contains(OpenFlags::APPEND), offset, data)?;
        if file.flags.intersects(OpenFlags::DATA_SYNC | OpenFlags::FILE_SYNC) && written.count > 0 {
            let all = file.flags.contains(OpenFlags::FILE_SYNC);
            self.fsync(caller, handle, if all { Durability::All } else { Durability::Data })?;
        }
        Ok(written)
    }

    fn fallocate(&self, caller: &Caller, handle: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        self.handles.writable(handle)?.node.0.fallocate(caller, mode, offset, length)
    }

    fn seek(&self, caller: &Caller, handle: HandleId, offset: u64, to: SeekTo) -> Result<u64> {
        let file = self.handles.file(handle)?;
        file.node.0.validate()?;
        file.node.0.seek(caller, offset, to)
    }

    fn fsync(&self, caller: &Caller, handle: HandleId, durability: Durability) -> Result<()> {
        if let Open::Directory(directory) = &*self.handles.get(handle)? {
            return self.core.below.fsync(caller, directory.below, durability);
        }
        let file = self.handles.file(handle)?;
        let below = &self.core.below;
        let fsync = |node: &Node| below.fsync(caller, node.reader_below()?, durability);
        let result = file.node.0.sync(ALL, |node| node.stored_by(|| fsync(node)));
        file.settle(result)
    }

    fn flush(&self, _caller: &Caller, handle: HandleId) -> Result<()> {
        match &*self.handles.get(handle)? {
            Open::File(file) => {
                if read(&file.node.0.state).is_leaving {
                    self.core.leaving.closed();
                }
                if file.flags.writable() { file.settle(file.node.0.closing(false)) } else { file.report() }
            }
            Open::Directory(_) => Ok(()),
        }
    }

    fn release(&self, handle: HandleId) {
        // What was open ends when the calls that still use it have ended.
        let Some(open) = self.handles.remove(handle) else { return };
        if let Open::File(file) = &*open
            && file.flags.writable()
            && let Err(error) = file.node.0.closing(true)
        {
            // It stays here, and is tried again when its time has come.
            tracing::warn!(node = file.node.0.id.0, %error, "a file that is closed could not be written back");
        }
    }

    fn opendir(&self, caller: &Caller, node: NodeId) -> Result<HandleId> {
        let node = self.node(node)?.begin_use()?;
        let below = self.core.below.opendir(caller, node.0.id)?;
        Ok(self.handles.insert(Open::Directory(OpenDirectory { node, below })))
    }

    fn readdir(
        &self,
        caller: &Caller,
        handle: HandleId,
        cookie: u64,
        visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        match &*self.handles.get(handle)? {
            Open::Directory(directory) => self.core.below.readdir(caller, directory.below, cookie, visit),
            Open::File(_) => fail(Errno::EBADF),
        }
    }

    fn getxattr(&self, caller: &Caller, node: NodeId, name: &[u8]) -> Result<Vec<u8>> {
        self.fresh(node)?.xattr(caller, name)
    }

    fn setxattr(&self, caller: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        let node = self.node(node)?;
        let result = self.core.with_room(|| self.core.below.setxattr(caller, node.id, name, value, flags));
        node.xattrs_changed(result.is_ok());
        result
    }

    fn listxattr(&self, caller: &Caller, node: NodeId) -> Result<Vec<Vec<u8>>> {
        self.core.below.listxattr(caller, self.node(node)?.id)
    }

    fn removexattr(&self, caller: &Caller, node: NodeId, name: &[u8]) -> Result<()> {
        let node = self.node(node)?;
        // An access list that is not there can be removed, which changes nothing: no time either.
        let is_there = !name.starts_with(ACCESS_LISTS) || self.core.below.getxattr(caller, node.id, name).is_ok();
        let result = self.core.below.removexattr(caller, node.id, name);
        node.xattrs_changed(is_there && result.is_ok());
        result
    }

    fn statfs(&self, caller: &Caller, node: NodeId) -> Result<FileSystemStatistics> {
        let mut statistics = self.core.below.statfs(caller, self.node(node)?.id)?;
        // What is dirty here will need its place below.
        let pending = self.core.dirty_bytes() / u64::from(statistics.block_size.max(1));
        statistics.blocks_free = statistics.blocks_free.saturating_sub(pending);
        statistics.blocks_available = statistics.blocks_available.saturating_sub(pending);
        Ok(statistics)
    }

    fn sync(&self) -> Result<()> {
        let mut result = Ok(());
        // A file that nobody can reach any more need not be written, nor one that ended meanwhile.
        let cleaned = |node: &Arc<Node>| {
            let unreachable = read(&node.state).orphan && !node.in_use();
            if unreachable { None } else { node.begin_cleaning().ok() }
        };
        let files = self.core.dirty_files();
        for node in files.iter().filter_map(cleaned) {
            result = result.and(node.0.0.sync(ALL, |_| Ok(())));
        }
        for node in files.iter().filter(|node| read(&node.state).has_deferred()).filter_map(cleaned) {
            result = result.and(node.0.0.store_deferred());
        }
        self.core.below.sync().and(result.map_err(Error::of_files))
    }

    fn flush_range(&self, caller: &Caller, handle: HandleId, range: Range<u64>) -> Result<()> {
        let file = self.handles.file(handle)?;
        let below = &self.core.below;
        let blocks = block_of(range.start)..blocks_for(range.end);
        let result = file.node.0.sync(blocks, |node| below.flush_range(caller, node.reader_below()?, range));
        file.settle(result)
    }

    fn write_before_names(&self, caller: &Caller, node: NodeId, change: NameChange) -> Result<()> {
        let node = self.node(node)?;
        node.write_before_names()?;
        self.core.below.write_before_names(caller, node.id, change)
    }

    fn hold(&self, _caller: &Caller, handle: HandleId, range: Range<u64>, held: bool) -> Result<()> {
        let file = self.handles.file(handle)?;
        if !self.core.coherence.delays() {
            return Ok(());
        }
        let blocks = block_of(range.start)..blocks_for(range.end);
        if held && !hold_is_bounded(&blocks) {
            return fail(Errno::EINVAL);
        }
        file.node.0.hold(blocks, held)
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
        self.copy(caller, (source, source_offset), (target, target_offset), length)
    }

    fn shared_content(&self) -> Option<&dyn SharedContent> {
        // Who reads without a call asks nobody first.
        self.core.coherence.validity().is_none().then_some(self)
    }

    fn attach(&self, above: Weak<dyn Upcalls>) -> Coherence {
        *lock(&self.core.above) = Some(above);
        self.core.coherence
    }

    fn read_only(&self) -> bool {
        self.core.below.read_only()
    }
}

impl SharedContent for Cache {
    fn segment(&self, handle: HandleId, lease: &Arc<dyn Lease>) -> Result<Segment> {
        self.handles.readable(handle)?.node.0.segment(lease)
    }

    fn text(&self, handle: HandleId, holder: Option<&Arc<dyn Holder>>) -> Result<Text> {
        let file = self.handles.readable(handle)?;
        if self.never_changes() { file.node.0.text(holder) } else { fail(Errno::EOPNOTSUPP) }
    }

    fn lend(&self, handle: HandleId, holder: Option<&Arc<dyn Holder>>) -> Result<OwnedFd> {
        let file = self.handles.readable(handle)?;
        if self.never_changes() { file.node.0.lend(holder) } else { fail(Errno::EOPNOTSUPP) }
    }
}
