//! Finds, makes, moves and removes names.

use crate::attributes::touch;
use crate::client::{Answer, Inode};
use crate::content;
use crate::functions::Statx;
use crate::handles::{File, Handle, Listing};
use crate::layer::Ceph;
use crate::nodes::Node;
use crate::seen::{self, decoded_device, shown_inode};
use poolfs_libservice::{DirectoryEntry, Entry, Result, fail};
use poolfs_types::{Caller, Errno, FileType, HandleId, Name, NodeId, OpenFlags, RenameFlags, SetAttributes};
use std::ffi::CStr;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

/// Longest target of a symbolic link (Linux's PATH_MAX less the terminator).
const TARGET_BYTES_MAX: usize = 4095;

/// To ask for this asks the metadata server for the attributes of a directory, whatever is known.
const SUBDIRECTORIES: &CStr = c"ceph.dir.subdirs";

impl Ceph {
    fn directory(&self, id: NodeId) -> Result<Arc<Node>> {
        let node = self.nodes.get(id)?;
        node.directory()?;
        Ok(node)
    }

    /// The directory in which a name is to be made.
    fn making_in(&self, id: NodeId, name: Name<'_>) -> Result<Arc<Node>> {
        let parent = self.directory(id)?;
        if self.changeable(&parent).is_err() {
            // What exists is that even where nothing can be made.
            return match parent.inode.lookup(name.as_bytes()) {
                Ok(_) => fail(Errno::EEXIST),
                Err(_) => fail(Errno::EROFS),
            };
        }
        Ok(parent)
    }

    /// Makes a change of names in these directories, and sees to it that their times of modification are new ones: where somebody has set such a
    /// time back, this client keeps it while it alone has the directory.
    ///
    /// Where others change the tree, the change is stored before anybody asks for these directories again: until it is, whoever asks waits for
    /// the metadata server, which stores every five seconds by itself.
    fn changing<T>(&self, parents: &[&Node], change: impl FnOnce() -> Result<T>) -> Result<T> {
        let modified =
            |node: &Node| node.inode.attributes().map(|found| (found.modified.tv_sec, found.modified.tv_nsec));
        let before: Vec<_> = parents.iter().map(|parent| modified(parent)).collect();
        let done = change()?;
        if self.is_shared {
            for parent in parents {
                // The names are changed, whatever comes of it.
                let _ = parent.inode.sync();
            }
        }
        for (parent, before) in parents.iter().zip(before) {
            if before.is_ok() && modified(parent) == before {
                // The names are changed, whatever comes of it.
                let _ = touch(&parent.inode);
            }
        }
        Ok(done)
    }

    pub(crate) fn find(&self, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        let parent = self.directory(parent)?;
        let known = self.known_names.read().unwrap_or_else(PoisonError::into_inner);
        let found = parent.inode.lookup(name.as_bytes());
        drop(known);
        let (inode, found) = found.map_err(|errno| self.fault("looking up a name", errno))?;
        self.nodes.acquire(inode, &found)
    }

    /// Gives what was just made its owner and its set-id bits, where the metadata server has taken them from the directory, and a node.
    fn settle(&self, made: (Inode, Statx), caller: &Caller, permissions: u32) -> Result<Entry> {
        let (inode, found) = made;
        let entry = self.nodes.acquire(inode, &found)?;
        let (owner, mode) = (entry.attributes, entry.attributes.permissions);
        let wanted = mode & 0o777 | permissions & 0o7000;
        let is_foreign = (owner.uid, owner.gid) != (caller.uid, caller.gid);
        let is_other = owner.file_type != FileType::Symlink && mode != wanted;
        if !is_foreign && !is_other {
            return Ok(entry);
        }
        let changes = SetAttributes {
            uid: is_foreign.then_some(caller.uid),
            gid: is_foreign.then_some(caller.gid),
            permissions: (owner.file_type != FileType::Symlink).then_some(wanted),
            ..SetAttributes::default()
        };
        let settled = self.change_attributes(entry.node, &changes, None);
        settled.map(|attributes| Entry { attributes, ..entry }).inspect_err(|_| self.nodes.forget(entry.node, 1))
    }

    /// Makes something that is not opened.
    fn make(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
        make: impl FnOnce(&Inode) -> Answer<(Inode, Statx)>,
    ) -> Result<Entry> {
        let parent = self.making_in(parent, name)?;
        let _names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        let making = || make(&parent.inode).map_err(|errno| self.fault("making a name", errno));
        let made = self.changing(&[&parent], making)?;
        self.settle(made, caller, permissions)
    }

    pub(crate) fn create_file(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        let parent = self.making_in(parent, name)?;
        let entry;
        let open;
        {
            let _names = self.names.read().unwrap_or_else(PoisonError::into_inner);
            let how = content::flags_below(flags) | libc::O_CREAT | libc::O_EXCL;
            let mode = FileType::Regular.mode_bits() | permissions & 0o777;
            let create = || parent.inode.create(caller, name.as_bytes(), mode, how);
            let making = || create().map_err(|errno| self.fault("creating a file", errno));
            let (inode, found, file) = self.changing(&[&parent], making)?;
            open = file;
            entry = self.settle((inode, found), caller, permissions)?;
        }
        let node = self.nodes.get(entry.node)?;
        if self.is_shared {
            // Whoever looks the name up waits for this, too.
            let _ = node.inode.sync();
        }
        let opened = self.add_handle(Handle::File(File { node, flags, open }));
        opened.map(|handle| (entry, handle)).inspect_err(|_| self.nodes.forget(entry.node, 1))
    }

    pub(crate) fn make_node(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        file_type: FileType,
        permissions: u32,
        device: u32,
    ) -> Result<Entry> {
        if matches!(file_type, FileType::Directory | FileType::Symlink) {
            self.directory(parent)?;
            return fail(Errno::EINVAL);
        }
        let device = if file_type.is_device() { decoded_device(device) } else { 0 };
        let mode = file_type.mode_bits() | permissions & 0o777;
        self.make(caller, parent, name, permissions, |parent| parent.make_node(caller, name.as_bytes(), mode, device))
    }

    pub(crate) fn make_directory(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
    ) -> Result<Entry> {
        let mode = permissions & 0o777;
        self.make(caller, parent, name, permissions, |parent| parent.make_directory(caller, name.as_bytes(), mode))
    }

    pub(crate) fn make_symlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.directory(parent)?;
        match target.len() {
            0 => return fail(Errno::ENOENT),
            1..=TARGET_BYTES_MAX if target.contains(&0) => return fail(Errno::EINVAL),
            1..=TARGET_BYTES_MAX => {}
            _ => return fail(Errno::ENAMETOOLONG),
        }
        self.make(caller, parent, name, 0o777, |parent| parent.make_symlink(caller, name.as_bytes(), target))
    }

    pub(crate) fn make_link(&self, id: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        let node = self.nodes.get(id)?;
        let parent = self.making_in(parent, name)?;
        let fault = |errno| self.fault("making a link", errno);
        {
            let _names = self.names.read().unwrap_or_else(PoisonError::into_inner);
            let refusal = match node.file_type {
                FileType::Directory => Some(Errno::EPERM),
                _ => (node.inode.attributes().map_err(fault)?.links == 0).then_some(Errno::ENOENT),
            };
            if let Some(refusal) = refusal {
                let exists = parent.inode.lookup(name.as_bytes()).is_ok();
                return fail(if exists { Errno::EEXIST } else { refusal });
            }
            self.changing(&[&parent], || node.inode.link(&parent.inode, name.as_bytes()).map_err(fault))?;
        }
        if !self.nodes.acquire_again(id) {
            return fail(Errno::ESTALE);
        }
        let attributes = node.inode.attributes().map_err(fault).and_then(|found| Ok(seen::of(&found)?.attributes));
        attributes.map(|attributes| Entry { node: id, attributes }).inspect_err(|_| self.nodes.forget(id, 1))
    }

    pub(crate) fn remove(&self, parent: NodeId, name: Name<'_>, is_directory: bool) -> Result<()> {
        let parent = self.directory(parent)?;
        self.changeable(&parent)?;
        let _names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        let fault = |errno| self.fault("removing a name", errno);
        let (_, found) = parent.inode.lookup(name.as_bytes()).map_err(fault)?;
        match (seen::of(&found)?.attributes.is_directory(), is_directory) {
            (true, false) => return fail(Errno::EISDIR),
            (false, true) => return fail(Errno::ENOTDIR),
            _ => {}
        }
        let remove = if is_directory { Inode::remove_directory } else { Inode::unlink };
        self.changing(&[&parent], || remove(&parent.inode, name.as_bytes()).map_err(fault))
    }

    /// Renames. Nobody who uses this layer makes a name between looking for it and a rename that must not replace one.
    pub(crate) fn move_name(
        &self,
        (parent, name): (NodeId, Name<'_>),
        (new_parent, new_name): (NodeId, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let (from, to) = (self.directory(parent)?, self.directory(new_parent)?);
        if flags.contains(RenameFlags::NO_REPLACE | RenameFlags::EXCHANGE)
            || flags.contains(RenameFlags::WHITEOUT | RenameFlags::EXCHANGE)
            || flags.intersects(RenameFlags::EXCHANGE | RenameFlags::WHITEOUT)
        {
            return fail(Errno::EINVAL);
        }
        self.changeable(&from)?;
        self.changeable(&to)?;
        let fault = |errno| self.fault("renaming", errno);
        let _alone = self.names.write().unwrap_or_else(PoisonError::into_inner);
        let (source, found) = from.inode.lookup(name.as_bytes()).map_err(fault)?;
        let is_directory = |found: &Statx| seen::of(found).map(|seen| seen.attributes.is_directory());
        if is_directory(&found)? && self.is_at_or_above(&source, &to.inode).map_err(fault)? {
            return fail(Errno::EINVAL);
        }
        let mut other_names = None;
        match to.inode.lookup(new_name.as_bytes()) {
            Err(Errno::ENOENT) => {}
            Err(errno) => return Err(fault(errno)),
            Ok(_) if flags.contains(RenameFlags::NO_REPLACE) => return fail(Errno::EEXIST),
            // CephFS would remove a name.
            Ok((target, _)) if target.identity() == source.identity() => return Ok(()),
            Ok((target, replaced)) => match (is_directory(&found)?, is_directory(&replaced)?) {
                (_, true) if self.is_at_or_above(&target, &from.inode).map_err(fault)? => {
                    return fail(Errno::ENOTEMPTY);
                }
                (true, false) => return fail(Errno::ENOTDIR),
                (false, true) => return fail(Errno::EISDIR),
                (is_directory, _) => other_names = (!is_directory && replaced.links > 1).then_some(target),
            },
        }
        let rename = || match from.inode.rename(name.as_bytes(), &to.inode, new_name.as_bytes()) {
            // No directory with a limit is above one that has been removed: that is what it says then.
            Err(Errno::EXDEV) if to.inode.attributes().is_ok_and(|found| found.links == 0) => fail(Errno::ENOENT),
            renamed => renamed.map_err(fault),
        };
        let Some(replaced) = other_names else {
            self.changing(&[&from, &to], rename)?;
            if is_directory(&found)? && !Arc::ptr_eq(&from, &to) {
                // What the metadata server tells of a rename leaves out how many directories are left in the one that it came from.
                let _ = from.inode.xattr(SUBDIRECTORIES, &mut [0; 32]);
            }
            return Ok(());
        };
        // When the metadata server has stored that a file was replaced, libcephfs forgets all its names, as if none were left, and does not
        // forget that it knows all of their directories. As it drops what it knows of both when it renames, there is nothing to
        // forget, unless a change of its names was not stored before, or somebody looks in between.
        let _alone = self.known_names.write().unwrap_or_else(PoisonError::into_inner);
        self.synced(&replaced, || replaced.sync())?;
        self.changing(&[&from, &to], rename)?;
        self.synced(&to.inode, || to.inode.sync())
    }

    /// Whether `above` is the directory `inode`, or one of those that lead to it.
    fn is_at_or_above(&self, above: &Inode, inode: &Inode) -> Answer<bool> {
        let root = self.nodes.get(NodeId::ROOT).map_err(|error| error.errno())?;
        let mut parent: Option<Inode> = None;
        loop {
            let at = parent.as_ref().unwrap_or(inode);
            if at.identity() == above.identity() {
                return Ok(true);
            }
            if at.identity() == root.inode.identity() {
                return Ok(false);
            }
            let next = at.lookup(b"..")?.0;
            // What libcephfs answers of a directory that has been removed: no directory leads to that.
            if next.identity() == at.identity() {
                return Ok(false);
            }
            parent = Some(next);
        }
    }

    pub(crate) fn link_target(&self, id: NodeId) -> Result<Vec<u8>> {
        let node = self.nodes.get(id)?;
        if node.file_type != FileType::Symlink {
            return fail(Errno::EINVAL);
        }
        let mut target = vec![0; TARGET_BYTES_MAX + 1];
        let length = node.inode.read_link(&mut target).map_err(|errno| self.fault("reading a symbolic link", errno))?;
        target.truncate(length);
        Ok(target)
    }

    pub(crate) fn open_directory(&self, id: NodeId) -> Result<HandleId> {
        let node = self.directory(id)?;
        let open = node.inode.open_directory().map_err(|errno| self.fault("opening a directory", errno))?;
        self.add_handle(Handle::Directory(node, Mutex::new(Listing { open, place: 0 })))
    }

    pub(crate) fn list(
        &self,
        handle: HandleId,
        cookie: u64,
        visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        let handle = self.handles.get(handle)?;
        let Handle::Directory(_, listing) = &*handle else { return fail(Errno::EBADF) };
        let place = i64::try_from(cookie).map_err(|_| Errno::EINVAL)?;
        let mut listing = listing.lock().unwrap_or_else(PoisonError::into_inner);
        if place == 0 || place != listing.place {
            listing.open.seek(place);
        }
        loop {
            let known = self.known_names.read().unwrap_or_else(PoisonError::into_inner);
            let next = listing.open.next();
            drop(known);
            let next = next.map_err(|errno| self.fault("listing a directory", errno))?;
            let Some(listed) = next else { return Ok(()) };
            listing.place = listed.next;
            let Ok(name) = Name::new(&listed.name) else { continue };
            let file_type = seen::of(&listed.found)?.attributes.file_type;
            let cookie = listed.next.cast_unsigned();
            let entry = DirectoryEntry { name, inode: shown_inode(&listed.found), file_type, cookie };
            if visit(entry).is_break() {
                // It counts as not delivered.
                listing.place = -1;
                return Ok(());
            }
        }
    }
}
