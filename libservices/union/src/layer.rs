//! The [`Libservice`] implementation of the union.

use crate::Union;
use crate::names::New;
use crate::node::{Content, Node, OpenFile};
use crate::rename::{End, Renamed};
use crate::sync::lock;
use poolfs_libservice::{
    DirectoryEntry, Durability, Entry, Error, Holder, Lease, Libservice, Opened, ReadTarget, Result, Segment,
    SharedContent, Text, Written, copy_in_pieces, fail,
};
use poolfs_types::{
    AllocateMode, Attributes, Caller, Errno, FileSystemStatistics, FileType, HandleId, Name, NodeId, OpenFlags,
    RenameFlags, SeekTo, SetAttributes, XattrFlags,
};
use std::ops::{ControlFlow, Range};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, OnceLock};

fn open_file(node: Arc<Node>, flags: OpenFlags, directory: bool) -> OpenFile {
    OpenFile { node, flags, directory, upper: OnceLock::new(), lower: OnceLock::new(), walk: Mutex::new(None) }
}

impl Libservice for Union {
    fn lookup(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        let parent = self.node(parent)?;
        if !parent.is_directory() {
            return fail(Errno::ENOTDIR);
        }
        let _names = self.names();
        let child = self.child(&parent, name.as_bytes())?.ok_or_else(|| Error::from(Errno::ENOENT))?;
        let attributes = self.attributes(caller, &child)?;
        Ok(Entry { node: child.keep().id, attributes })
    }

    fn forget(&self, node: NodeId, count: u64) {
        self.nodes.forget(node, count);
    }

    fn getattr(&self, caller: &Caller, node: NodeId) -> Result<Attributes> {
        let node = self.node(node)?;
        let _names = node.is_directory().then(|| self.names());
        self.attributes(caller, &node)
    }

    fn setattr(
        &self,
        caller: &Caller,
        node: NodeId,
        changes: &SetAttributes,
        handle: Option<HandleId>,
    ) -> Result<Attributes> {
        let _change = self.change();
        let node = self.node(node)?;
        let file = handle.map(|handle| self.handles.get(handle)).transpose()?;
        self.set_attributes(caller, &node, changes, file.as_deref())
    }

    fn readlink(&self, caller: &Caller, node: NodeId) -> Result<Vec<u8>> {
        let node = self.node(node)?;
        if node.file_type != FileType::Symlink {
            return fail(Errno::EINVAL);
        }
        let state = node.read();
        let (branch, id) = self.top(&state)?;
        branch.readlink(caller, id)
    }

    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        let _change = self.change();
        let _names = self.names_mut();
        let parent = self.parent_of_new(parent, name.as_bytes())?;
        let (entry, opened) = self.make(caller, &parent, name, New::File(permissions, flags))?;
        let file = open_file(self.node(entry.node)?, flags, false);
        if let Some(opened) = opened {
            let _ = file.upper.set(opened);
        }
        Ok((entry, self.open_handle(file)))
    }

    fn tmpfile(
        &self,
        caller: &Caller,
        parent: NodeId,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        let _change = self.change();
        let _names = self.names_mut();
        let parent = self.node(parent)?;
        if !parent.is_directory() {
            return fail(Errno::ENOTDIR);
        }
        let (entry, opened) = self.make_nameless(caller, &parent, permissions, flags)?;
        let file = open_file(self.node(entry.node)?, flags, false);
        let _ = file.upper.set(opened);
        Ok((entry, self.open_handle(file)))
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
        let _change = self.change();
        let _names = self.names_mut();
        let parent = self.parent_of_new(parent, name.as_bytes())?;
        Ok(self.make(caller, &parent, name, New::Special(file_type, permissions, device))?.0)
    }

    fn mkdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>, permissions: u32) -> Result<Entry> {
        let _change = self.change();
        let _names = self.names_mut();
        let parent = self.parent_of_new(parent, name.as_bytes())?;
        Ok(self.make(caller, &parent, name, New::Directory(permissions))?.0)
    }

    fn symlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        let _change = self.change();
        let _names = self.names_mut();
        let parent = self.parent_of_new(parent, name.as_bytes())?;
        Ok(self.make(caller, &parent, name, New::Symlink(target))?.0)
    }

    fn link(&self, caller: &Caller, node: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        let _change = self.change();
        let node = self.node(node)?;
        self.write_before_link(&node)?;
        let _names = self.names_mut();
        let parent = self.parent_of_new(parent, name.as_bytes())?;
        self.make_link(caller, &node, &parent, name)
    }

    fn unlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        let _change = self.change();
        let _names = self.names_mut();
        let parent = self.node(parent)?;
        if !parent.is_directory() {
            return fail(Errno::ENOTDIR);
        }
        self.remove_file(caller, &parent, name)
    }

    fn rmdir(&self, _: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        let _change = self.change();
        let names = self.names_mut();
        let parent = self.node(parent)?;
        if !parent.is_directory() {
            return fail(Errno::ENOTDIR);
        }
        let left = self.remove_directory(&parent, name)?;
        drop(names);
        drop(left);
        Ok(())
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
        let _change = self.change();
        let mut written = None;
        loop {
            let paths = self.deferred.paths_change();
            let names = self.names_mut();
            let (parent, new_parent) = (self.node(parent)?, self.node(new_parent)?);
            if !parent.is_directory() || !new_parent.is_directory() {
                return fail(Errno::ENOTDIR);
            }
            let (old, new) = (End { parent: &parent, name }, End { parent: &new_parent, name: new_name });
            let renamed = self.rename_name(caller, old, new, flags, written.as_deref())?;
            drop((names, paths));
            match renamed {
                Renamed::Done(left) => {
                    drop(left);
                    return Ok(());
                }
                // It happens once: whatever else is found then is written at once.
                Renamed::Unwritten(files) => {
                    files.iter().try_for_each(|file| self.write_content(file))?;
                    written = Some(files);
                }
            }
        }
    }

    fn open(&self, caller: &Caller, node: NodeId, flags: OpenFlags) -> Result<HandleId> {
        let node = self.node(node)?;
        match node.file_type {
            FileType::Regular => {}
            FileType::Directory => return fail(Errno::EISDIR),
            FileType::Symlink => return fail(Errno::ELOOP),
            _ => return fail(Errno::ENXIO),
        }
        let _change = flags.contains(OpenFlags::TRUNCATE).then(|| self.change());
        self.open_regular(caller, &node, flags).inspect_err(|_| self.close_unused(&node))
    }

    fn read(&self, caller: &Caller, handle: HandleId, offset: u64, mut buffer: &mut [u8]) -> Result<usize> {
        self.read_into(caller, handle, offset, &mut buffer)
    }

    fn read_into(&self, caller: &Caller, handle: HandleId, offset: u64, target: &mut dyn ReadTarget) -> Result<usize> {
        let file = self.handles.file(handle)?;
        if !file.flags.readable() {
            return fail(Errno::EBADF);
        }
        self.read_file(caller, &file, offset, target)
    }

    fn write(&self, caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        let file = self.handles.file(handle)?;
        if !file.flags.writable() {
            return fail(Errno::EBADF);
        }
        let _change = self.change();
        self.write_file(caller, &file, offset, data)
    }

    fn fallocate(&self, caller: &Caller, handle: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        let file = self.handles.file(handle)?;
        if !file.flags.writable() {
            return fail(Errno::EBADF);
        }
        let _change = self.change();
        self.allocate(caller, &file, mode, offset, length)
    }

    fn seek(&self, caller: &Caller, handle: HandleId, offset: u64, to: SeekTo) -> Result<u64> {
        let file = self.handles.file(handle)?;
        self.seek_file(caller, &file, offset, to)
    }

    fn fsync(&self, _: &Caller, handle: HandleId, durability: Durability) -> Result<()> {
        let file = self.handles.get(handle)?;
        if !file.directory {
            return self.sync_file(&file, durability);
        }
        if let Some(held) = file.node.upper() {
            self.work.sync_directory(held.node())?;
        }
        self.sync_parents(&file.node)
    }

    fn flush(&self, caller: &Caller, handle: HandleId) -> Result<()> {
        let file = self.handles.get(handle)?;
        let flushed = match file.upper.get() {
            Some(opened) if !file.directory => self.upper.flush(caller, opened.id()),
            _ => Ok(()),
        };
        let reported = if file.flags.writable() { self.copies.report_stuck(&file.node) } else { Ok(()) };
        flushed.and(reported)
    }

    fn release(&self, handle: HandleId) {
        let Some(file) = self.handles.remove(handle) else { return };
        let node = file.node.clone();
        if !file.directory {
            lock(&node.handles).retain(|other| !std::ptr::eq(other.as_ptr(), &*file));
            self.close_unused(&node);
        }
        drop(file);
        self.nodes.unpin(&node);
    }

    fn opendir(&self, _: &Caller, node: NodeId) -> Result<HandleId> {
        let node = self.node(node)?;
        if !node.is_directory() {
            return fail(Errno::ENOTDIR);
        }
        let walk = {
            let _names = self.names();
            self.walk_when_opened(&node)?
        };
        let file = open_file(node, OpenFlags::READ_ONLY, true);
        *lock(&file.walk) = walk;
        Ok(self.open_handle(file))
    }

    fn readdir(
        &self,
        _: &Caller,
        handle: HandleId,
        cookie: u64,
        visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        let file = self.handles.get(handle)?;
        if !file.directory {
            return fail(Errno::EBADF);
        }
        let known = lock(&file.walk).clone();
        let walk = match known {
            Some(walk) if walk.leads_on_after(cookie) => walk,
            _ => {
                // What the walk before kept makes room first.
                drop((known, lock(&file.walk).take()));
                let _names = self.names();
                let walk = self.begin_walk(&file.node)?;
                *lock(&file.walk) = Some(walk.clone());
                walk
            }
        };
        self.go_on(&file.node, &walk, cookie, visit)
    }

    fn getxattr(&self, caller: &Caller, node: NodeId, name: &[u8]) -> Result<Vec<u8>> {
        self.get_xattr(caller, &*self.node(node)?, name)
    }

    fn setxattr(&self, caller: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        let _change = self.change();
        self.set_xattr(caller, &self.node(node)?, name, value, flags)
    }

    fn listxattr(&self, caller: &Caller, node: NodeId) -> Result<Vec<Vec<u8>>> {
        self.list_xattrs(caller, &*self.node(node)?)
    }

    fn removexattr(&self, caller: &Caller, node: NodeId, name: &[u8]) -> Result<()> {
        let _change = self.change();
        self.remove_xattr(caller, &self.node(node)?, name)
    }

    fn statfs(&self, caller: &Caller, node: NodeId) -> Result<FileSystemStatistics> {
        self.node(node)?;
        self.upper.statfs(caller, NodeId::ROOT)
    }

    fn sync(&self) -> Result<()> {
        let flushed = self.flush_all();
        self.upper.sync()?;
        flushed
    }

    fn flush_range(&self, caller: &Caller, handle: HandleId, range: Range<u64>) -> Result<()> {
        let file = self.handles.file(handle)?;
        self.complete_deferred(&file.node)?;
        let plain = {
            let state = file.node.read();
            match (&state.upper, &state.content) {
                (None, _) => return Ok(()),
                (Some(held), Content::Plain) => Some(held.clone()),
                _ => None,
            }
        };
        match plain {
            Some(held) => self.upper.flush_range(caller, self.upper_handle(&file, &held)?.id(), range),
            None => self.sync_file(&file, Durability::Data),
        }
    }

    fn hold(&self, caller: &Caller, handle: HandleId, range: Range<u64>, held: bool) -> Result<()> {
        let file = self.handles.file(handle)?;
        match file.upper.get() {
            Some(opened) => self.upper.hold(caller, opened.id(), range, held),
            None => Ok(()),
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
        let (from, to) = (self.handles.file(source)?, self.handles.file(target)?);
        if !from.flags.readable() || !to.flags.writable() {
            return fail(Errno::EBADF);
        }
        if Arc::ptr_eq(&from.node, &to.node)
            && source_offset < target_offset.saturating_add(length)
            && target_offset < source_offset.saturating_add(length)
        {
            return fail(Errno::EINVAL);
        }
        let _change = self.change();
        if let (Some(from), Some(upper)) = (self.plain_upper(&from)?, self.plain_upper(&to)?) {
            let count = self.upper.copy_range(caller, from.id(), source_offset, upper.id(), target_offset, length)?;
            if count > 0 {
                to.node.changed.see();
            }
            return Ok(count);
        }
        copy_in_pieces(
            0..length,
            |at, buffer| self.read_file(caller, &from, source_offset.saturating_add(at), &mut &mut *buffer),
            |at, bytes| Ok(self.write_file(caller, &to, target_offset.saturating_add(at), bytes)?.count),
        )
    }

    fn shared_content(&self) -> Option<&dyn SharedContent> {
        Some(self)
    }

    fn read_only(&self) -> bool {
        self.upper.read_only()
    }
}

impl SharedContent for Union {
    fn segment(&self, handle: HandleId, lease: &Arc<dyn Lease>) -> Result<Segment> {
        let file = self.handles.file(handle)?;
        if !file.flags.readable() {
            return fail(Errno::EBADF);
        }
        self.segment_of(&file, lease)
    }

    fn text(&self, handle: HandleId, holder: Option<&Arc<dyn Holder>>) -> Result<Text> {
        let file = self.handles.file(handle)?;
        if !file.flags.readable() {
            return fail(Errno::EBADF);
        }
        self.text_of(&file, holder)
    }

    fn lend(&self, handle: HandleId, holder: Option<&Arc<dyn Holder>>) -> Result<OwnedFd> {
        let file = self.handles.file(handle)?;
        if !file.flags.readable() || file.flags.writable() {
            return fail(Errno::EBADF);
        }
        self.lend_of(&file, holder)
    }
}

impl Union {
    fn open_regular(&self, caller: &Caller, node: &Arc<Node>, flags: OpenFlags) -> Result<HandleId> {
        if matches!(node.read().content, Content::Sketch(_) | Content::Damaged(_)) {
            self.load_locked(node, &mut node.write())?;
        }
        let file = open_file(node.clone(), flags - OpenFlags::TRUNCATE, false);
        if flags.writable() && flags.contains(OpenFlags::TRUNCATE) {
            let changes = SetAttributes { size: Some(0), ..SetAttributes::default() };
            self.set_attributes(caller, node, &changes, None)?;
        }
        if let Some(held) = node.upper() {
            self.upper_handle(&file, &held)?;
        }
        Ok(self.open_handle(file))
    }

    /// The upper handle of a file that is wholly in the upper branch.
    fn plain_upper<'a>(&self, file: &'a OpenFile) -> Result<Option<&'a Opened>> {
        let held = {
            let state = file.node.read();
            match (&state.upper, &state.content) {
                (Some(held), Content::Plain) => held.clone(),
                _ => return Ok(None),
            }
        };
        self.upper_handle(file, &held).map(Some)
    }
}
