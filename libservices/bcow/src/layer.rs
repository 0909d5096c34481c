//! The layer's [`Libservice`] implementation: calls on the content of compact files are served here, all others below.

use crate::Bcow;
use crate::file::File;
use crate::format::{ATTRIBUTE, Record, reach_max};
use crate::formatting::METACOPY;
use crate::nodes::{Content, Node, Open};
use poolfs_libservice::{
    DirectoryEntry, Durability, Entry, Error, Holder, Lease, Libservice, NameChange, Result, Segment, SharedContent,
    Text, Written, copy_by_reading, fail, shared_content,
};
use poolfs_types::limits::{BLOCK_SIZE, FILE_SIZE_MAX};
use poolfs_types::{
    AllocateMode, Attributes, Caller, Errno, FileSystemStatistics, FileType, HandleId, Name, NodeId, OpenFlags,
    RenameFlags, SeekTo, SetAttributes, SetTime, XattrFlags,
};
use std::ops::{ControlFlow, Range};
use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError};

const ROOT: &Caller = &Caller::ROOT;

/// A shorter file would take as much with a table as it does without.
const FORMATTED_MIN: u64 = 4 * BLOCK_SIZE as u64;

fn end_of(offset: u64, length: u64) -> Result<u64> {
    offset.checked_add(length).filter(|&end| end <= FILE_SIZE_MAX).ok_or_else(|| Errno::EFBIG.into())
}

impl Bcow {
    /// The layers above have got an entry: it is counted, and shown as it is to be.
    fn entered(&self, entry: Entry, is_new: bool) -> Result<Entry> {
        if entry.attributes.file_type != FileType::Regular {
            return Ok(entry);
        }
        match self.nodes.refer(&self.below, entry.node, is_new, false).inspect(|node| self.made(node, is_new)) {
            Ok(node) => Ok(Entry { attributes: node.shown(entry.attributes), ..entry }),
            Err(error) => {
                self.below.forget(entry.node, 1);
                Err(error)
            }
        }
    }

    /// The layers above have opened a file.
    fn opened(&self, node: NodeId, handle: HandleId, flags: OpenFlags, is_new: bool) -> Result<Arc<Node>> {
        let node = self.nodes.refer(&self.below, node, is_new, true).inspect_err(|_| self.below.release(handle))?;
        self.made(&node, is_new);
        let open = Arc::new(Open { node: node.clone(), flags });
        self.handles.write().unwrap_or_else(PoisonError::into_inner).insert(handle, open);
        Ok(node)
    }

    /// An open file that is, or may come to be, of the format; directories are none.
    fn handle(&self, handle: HandleId) -> Option<Arc<Open>> {
        self.handles.read().unwrap_or_else(PoisonError::into_inner).get(&handle).cloned()
    }

    /// What `plain` does with an open file that is not of the format, and does not become so meanwhile; else the file.
    fn while_plain<T>(&self, handle: HandleId, plain: impl FnOnce() -> T) -> std::result::Result<T, Arc<Open>> {
        let Some(open) = self.handle(handle) else { return Ok(plain()) };
        {
            let content = open.node.read();
            if !content.is_formatted() {
                return Ok(plain());
            }
        }
        Err(open)
    }

    /// An open file of the format.
    fn formatted(&self, handle: HandleId) -> Option<Arc<Open>> {
        self.handle(handle).filter(|open| open.node.read().is_formatted())
    }

    fn read_file(&self, node: &Arc<Node>, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        let wanted = |file: &File| {
            let end = offset.saturating_add(buffer.len() as u64).min(file.record.size);
            offset.min(end)..end
        };
        if let Content::Open(file) = &*node.read()
            && file.knows(&wanted(file))
        {
            let bytes = wanted(file);
            return file.read(bytes, buffer);
        }
        self.have_room_to_read(node);
        let mut content = node.write();
        let file = content.open(&self.below, node.id, false, &self.bound)?;
        let bytes = wanted(file);
        file.learn(&bytes)?;
        file.read(bytes, buffer)
    }

    fn write_file(&self, open: &Open, offset: u64, data: &[u8]) -> Result<Written> {
        let node = &open.node;
        let appends = open.flags.contains(OpenFlags::APPEND);
        if data.is_empty() {
            let offset = if appends { node.read().record().map_or(0, |record| record.size) } else { offset };
            return Ok(Written { count: 0, offset });
        }
        let written = self.overwrite(node, offset, data, appends)?;
        let written = match written {
            Some(written) => written,
            None => {
                self.have_room(node)?;
                let mut content = node.write();
                let file = content.open(&self.below, node.id, false, &self.bound)?;
                let offset = if appends { file.record.size } else { offset };
                let bytes = offset..end_of(offset, data.len() as u64)?;
                Written { count: file.write(bytes, data)?, offset }
            }
        };
        node.changed.see();
        self.queue_if_dirty(node);
        if open.flags.intersects(OpenFlags::DATA_SYNC | OpenFlags::FILE_SYNC) {
            self.flush_with_data(node)?;
        }
        Ok(written)
    }

    /// Writes where the file has places already, beside others who do.
    fn overwrite(&self, node: &Node, offset: u64, data: &[u8], appends: bool) -> Result<Option<Written>> {
        let content = node.read();
        let Content::Open(file) = &*content else { return Ok(None) };
        let Some(end) = offset.checked_add(data.len() as u64).filter(|&end| end <= file.record.size) else {
            return Ok(None);
        };
        let bytes = offset..end;
        if appends || !file.knows(&bytes) || !file.has_places(&bytes) || file.has_stale(&bytes) {
            return Ok(None);
        }
        file.put(bytes, data).map(|count| Some(Written { count, offset }))
    }

    fn queue_if_dirty(&self, node: &Arc<Node>) {
        let is_dirty = matches!(&*node.read(), Content::Open(file) if file.is_dirty);
        if is_dirty {
            self.queue(node);
        }
    }

    /// Gives a file its size. One that is empty, and is to be some blocks long, comes to be of the format. Whether it is of the format.
    fn resize(&self, node: &Arc<Node>, size: u64) -> Result<bool> {
        if node.read().is_formatted() {
            self.have_room(node)?;
        }
        let mut content = node.write();
        if !content.is_formatted() {
            if size < FORMATTED_MIN
                || self.below.getattr(ROOT, node.id)?.size > 0
                || !self.format(node, &mut content, size)?
            {
                return Ok(false);
            }
        } else {
            content.open(&self.below, node.id, false, &self.bound)?.resize(size)?;
        }
        node.note_size();
        node.changed.see();
        drop(content);
        self.queue_if_dirty(node);
        Ok(true)
    }

    fn allocate(&self, open: &Open, mode: AllocateMode, bytes: Range<u64>) -> Result<()> {
        let node = &open.node;
        let keeps_size = mode.contains(AllocateMode::KEEP_SIZE);
        let punches = mode.intersects(AllocateMode::PUNCH_HOLE | AllocateMode::ZERO_RANGE);
        if !punches {
            let mut content = node.write();
            let file = content.open(&self.below, node.id, false, &self.bound)?;
            // Before the first piece takes room.
            if bytes.end > reach_max(file.record.unit_shift) {
                return fail(Errno::EFBIG);
            }
        }
        let mut at = bytes.start;
        while at < bytes.end {
            // In pieces of some tables, so that all that it changes need not be in memory at once.
            self.have_room(node)?;
            let mut content = node.write();
            let file = content.open(&self.below, node.id, false, &self.bound)?;
            let end = file.end_of_piece(at).min(bytes.end);
            let changed = if punches { file.punch(at..end) } else { file.reserve(at..end) };
            at = if punches { file.next_with_units(end).max(end) } else { end };
            drop(content);
            // Also what came before a failure has to be brought to disk.
            self.queue_if_dirty(node);
            changed?;
        }
        let mut content = node.write();
        let file = content.open(&self.below, node.id, false, &self.bound)?;
        if !keeps_size && bytes.end > file.record.size {
            file.resize(bytes.end)?;
            node.note_size();
        }
        drop(content);
        self.touch(node)?;
        self.queue_if_dirty(node);
        Ok(())
    }

    /// A user has changed the file, and nothing below may have: its times say so.
    fn touch(&self, node: &Node) -> Result<()> {
        let now = SetAttributes { modified: Some(SetTime::Now), ..SetAttributes::default() };
        self.below.setattr(ROOT, node.id, &now, None)?;
        node.changed.see();
        Ok(())
    }
}

impl Libservice for Bcow {
    fn lookup(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        self.entered(self.below.lookup(caller, parent, name)?, false)
    }

    fn forget(&self, node: NodeId, count: u64) {
        self.nodes.forget(node, count);
        self.below.forget(node, count);
    }

    fn getattr(&self, caller: &Caller, node: NodeId) -> Result<Attributes> {
        let stored = self.below.getattr(caller, node)?;
        if stored.file_type != FileType::Regular {
            return Ok(stored);
        }
        Ok(self.nodes.get(&self.below, node)?.shown(stored))
    }

    fn setattr(
        &self,
        caller: &Caller,
        node: NodeId,
        changes: &SetAttributes,
        handle: Option<HandleId>,
    ) -> Result<Attributes> {
        let known = match changes.size {
            Some(_) => self.nodes.known(node),
            None => None,
        };
        let mut changes = *changes;
        if let (Some(known), Some(size)) = (known, changes.size) {
            let may_write = |handle| self.handle(handle).is_some_and(|open| open.flags.writable());
            if handle.is_some_and(|handle| !may_write(handle)) {
                return fail(Errno::EBADF);
            }
            if size > FILE_SIZE_MAX {
                return fail(Errno::EFBIG);
            }
            if self.resize(&known, size)? {
                changes.size = None;
                changes.modified = changes.modified.or(Some(SetTime::Now));
            }
        }
        let stored = self.below.setattr(caller, node, &changes, handle)?;
        if stored.file_type != FileType::Regular {
            return Ok(stored);
        }
        let node = self.nodes.get(&self.below, node)?;
        node.changed.see();
        Ok(node.shown(stored))
    }

    fn readlink(&self, caller: &Caller, node: NodeId) -> Result<Vec<u8>> {
        self.below.readlink(caller, node)
    }

    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        let (entry, handle) = self.below.create(caller, parent, name, permissions, flags)?;
        self.opened(entry.node, handle, flags, true)?;
        Ok((self.entered(entry, true)?, handle))
    }

    fn tmpfile(
        &self,
        caller: &Caller,
        parent: NodeId,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        let (entry, handle) = self.below.tmpfile(caller, parent, permissions, flags)?;
        self.opened(entry.node, handle, flags, true)?;
        Ok((self.entered(entry, true)?, handle))
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
        self.entered(self.below.mknod(caller, parent, name, file_type, permissions, device)?, true)
    }

    fn mkdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>, permissions: u32) -> Result<Entry> {
        self.below.mkdir(caller, parent, name, permissions)
    }

    fn symlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.below.symlink(caller, parent, name, target)
    }

    fn link(&self, caller: &Caller, node: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        self.entered(self.below.link(caller, node, parent, name)?, false)
    }

    fn unlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.below.unlink(caller, parent, name)
    }

    fn unlink_known(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        victim: NodeId,
        is_last: Option<bool>,
    ) -> Result<()> {
        self.below.unlink_known(caller, parent, name, victim, is_last)
    }

    fn rmdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.below.rmdir(caller, parent, name)
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
        self.below.rename(caller, parent, name, new_parent, new_name, flags)
    }

    fn open(&self, caller: &Caller, node: NodeId, flags: OpenFlags) -> Result<HandleId> {
        let truncates = flags.contains(OpenFlags::TRUNCATE) && flags.writable();
        let (is_formatted, handle) = {
            let known = truncates.then(|| self.nodes.get(&self.below, node)).transpose()?;
            // One that is not of the format does not become so meanwhile.
            let content = known.as_ref().map(|known| known.read());
            let is_formatted = content.as_ref().is_some_and(|content| content.is_formatted());
            let flags = if is_formatted { flags - OpenFlags::TRUNCATE } else { flags };
            (is_formatted, self.below.open(caller, node, flags)?)
        };
        let node = self.opened(node, handle, flags, false)?;
        if is_formatted {
            let emptied = self.resize(&node, 0).and_then(|_| self.touch(&node));
            emptied.inspect_err(|_| self.release(handle))?;
        }
        Ok(handle)
    }

    fn read(&self, caller: &Caller, handle: HandleId, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        match self.while_plain(handle, || self.below.read(caller, handle, offset, buffer)) {
            Ok(read) => read,
            Err(open) if !open.flags.readable() => fail(Errno::EBADF),
            Err(open) => self.read_file(&open.node, offset, buffer),
        }
    }

    fn write(&self, caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        match self.while_plain(handle, || self.below.write(caller, handle, offset, data)) {
            Ok(written) => written,
            Err(open) if !open.flags.writable() => fail(Errno::EBADF),
            Err(open) => self.write_file(&open, offset, data),
        }
    }

    fn fallocate(&self, caller: &Caller, handle: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        let open = match self.while_plain(handle, || self.below.fallocate(caller, handle, mode, offset, length)) {
            Ok(allocated) => return allocated,
            Err(open) => open,
        };
        if !open.flags.writable() {
            return fail(Errno::EBADF);
        }
        if length == 0 {
            return fail(Errno::EINVAL);
        }
        let punches = mode.contains(AllocateMode::PUNCH_HOLE);
        if punches && mode != AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE {
            return fail(Errno::EOPNOTSUPP);
        }
        self.allocate(&open, mode, offset..end_of(offset, length)?)
    }

    fn seek(&self, caller: &Caller, handle: HandleId, offset: u64, to: SeekTo) -> Result<u64> {
        let open = match self.while_plain(handle, || self.below.seek(caller, handle, offset, to)) {
            Ok(found) => return found,
            Err(open) => open,
        };
        self.have_room_to_read(&open.node);
        let mut content = open.node.write();
        let file = content.open(&self.below, open.node.id, false, &self.bound)?;
        let size = file.record.size;
        if offset >= size {
            return fail(Errno::ENXIO);
        }
        match file.find(offset, to == SeekTo::Data)? {
            Some(found) => Ok(found),
            None if to == SeekTo::Hole => Ok(size),
            None => fail(Errno::ENXIO),
        }
    }

    fn fsync(&self, caller: &Caller, handle: HandleId, durability: Durability) -> Result<()> {
        // This handle's own comes first: it is the one that learns of its failed write-backs.
        let sync = |durability| self.below.fsync(caller, handle, durability);
        let Some(open) = self.handle(handle) else { return sync(durability) };
        open.node.sync_sized(durability, sync)?;
        self.flush(&open.node)
    }

    fn flush(&self, caller: &Caller, handle: HandleId) -> Result<()> {
        self.below.flush(caller, handle)
    }

    fn release(&self, handle: HandleId) {
        let open = self.handles.write().unwrap_or_else(PoisonError::into_inner).remove(&handle);
        self.below.release(handle);
        open.into_iter().for_each(|open| self.nodes.release(open.node.id));
    }

    fn opendir(&self, caller: &Caller, node: NodeId) -> Result<HandleId> {
        self.below.opendir(caller, node)
    }

    fn readdir(
        &self,
        caller: &Caller,
        handle: HandleId,
        cookie: u64,
        visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        self.below.readdir(caller, handle, cookie, visit)
    }

    fn getxattr(&self, caller: &Caller, node: NodeId, name: &[u8]) -> Result<Vec<u8>> {
        if name == ATTRIBUTE {
            return fail(Errno::ENODATA);
        }
        if name == METACOPY
            && let Some(record) = self.nodes.get(&self.below, node)?.read().record()
            && !record.is_metacopy
        {
            return fail(Errno::ENODATA);
        }
        self.below.getxattr(caller, node, name)
    }

    fn setxattr(&self, caller: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        if name == ATTRIBUTE {
            return fail(Errno::EPERM);
        }
        if name == METACOPY {
            let node = self.nodes.get(&self.below, node)?;
            if node.read().is_formatted() {
                return self.set_metacopy(&node, true);
            }
        }
        self.below.setxattr(caller, node, name, value, flags)
    }

    fn listxattr(&self, caller: &Caller, node: NodeId) -> Result<Vec<Vec<u8>>> {
        let mut names = self.below.listxattr(caller, node)?;
        if let Some(at) = names.iter().position(|name| name == ATTRIBUTE) {
            names.swap_remove(at);
            let hides = |record: &Record| !record.is_metacopy;
            if self.nodes.get(&self.below, node)?.read().record().is_some_and(hides) {
                names.retain(|name| name != METACOPY);
            }
        }
        Ok(names)
    }

    fn removexattr(&self, caller: &Caller, node: NodeId, name: &[u8]) -> Result<()> {
        if name == ATTRIBUTE {
            return fail(Errno::ENODATA);
        }
        if name == METACOPY {
            let node = self.nodes.get(&self.below, node)?;
            if node.read().is_formatted() {
                return self.set_metacopy(&node, false);
            }
        }
        self.below.removexattr(caller, node, name)
    }

    fn statfs(&self, caller: &Caller, node: NodeId) -> Result<FileSystemStatistics> {
        self.below.statfs(caller, node)
    }

    fn sync(&self) -> Result<()> {
        let flushed = self.flush_all();
        self.below.sync().and(flushed.map_err(Error::of_files))
    }

    /// Bytes that have a new place are found only with what says so.
    fn write_before_names(&self, caller: &Caller, node: NodeId, change: NameChange) -> Result<()> {
        if let Some(known) = self.nodes.known(node) {
            let is_behind = matches!(&*known.read(), Content::Open(file) if file.is_dirty);
            if is_behind {
                return self.flush_with_data(&known);
            }
        }
        self.below.write_before_names(caller, node, change)
    }

    /// Where the bytes are that were written; until then only this process knows.
    fn defers(&self) -> bool {
        true
    }

    fn store_deferred(&self, node: NodeId) -> Result<()> {
        match self.nodes.known(node) {
            Some(known) => self.flush(&known),
            None => Ok(()),
        }
    }

    fn hold(&self, caller: &Caller, handle: HandleId, range: Range<u64>, held: bool) -> Result<()> {
        match self.formatted(handle) {
            Some(_) => Ok(()),
            None => self.below.hold(caller, handle, range, held),
        }
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
        let ends = [source, target].map(|handle| self.formatted(handle));
        let [from, to] = &ends;
        if from.is_none() && to.is_none() {
            return self.below.copy_range(caller, source, source_offset, target, target_offset, length);
        }
        let may = |handle, allows: fn(OpenFlags) -> bool| self.handle(handle).is_some_and(|open| allows(open.flags));
        if !may(source, OpenFlags::readable) || !may(target, OpenFlags::writable) {
            return fail(Errno::EBADF);
        }
        let is_same = matches!((from, to), (Some(from), Some(to)) if Arc::ptr_eq(&from.node, &to.node));
        let apart = source_offset.abs_diff(target_offset);
        if is_same && apart < length {
            return fail(Errno::EINVAL);
        }
        copy_by_reading(self, caller, (source, source_offset), (target, target_offset), length)
    }

    fn shared_content(&self) -> Option<&dyn SharedContent> {
        Some(self)
    }

    fn read_only(&self) -> bool {
        self.below.read_only()
    }
}

impl SharedContent for Bcow {
    fn segment(&self, handle: HandleId, lease: &Arc<dyn Lease>) -> Result<Segment> {
        match self.formatted(handle) {
            Some(_) => fail(Errno::EOPNOTSUPP),
            None => shared_content(&*self.below)?.segment(handle, lease),
        }
    }

    fn text(&self, handle: HandleId, holder: Option<&Arc<dyn Holder>>) -> Result<Text> {
        match self.formatted(handle) {
            Some(_) => fail(Errno::EOPNOTSUPP),
            None => shared_content(&*self.below)?.text(handle, holder),
        }
    }

    fn lend(&self, handle: HandleId, holder: Option<&Arc<dyn Holder>>) -> Result<OwnedFd> {
        match self.formatted(handle) {
            Some(_) => fail(Errno::EOPNOTSUPP),
            None => shared_content(&*self.below)?.lend(handle, holder),
        }
    }
}
