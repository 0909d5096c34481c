//! The counting layer: keeps the account of what a branch stores.

use crate::account::Account;
use crate::nodes::{Nodes, lists_one_more, taken};
use poolfs_libservice::walk::walk;
use poolfs_libservice::{Branch, Durability, Entry, Filter, Held, Libservice, NameChange, Result, Written, fail};
use poolfs_types::limits::BLOCK_SIZE;
use poolfs_types::{
    AllocateMode, Attributes, Caller, Errno, FileType, HandleId, Name, NodeId, OpenFlags, RenameFlags, SetAttributes,
    XattrFlags,
};
use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A layer that counts what the backend below it gives to the branch. Only calls through it may change the branch.
pub struct UsageAccounting {
    below: Branch,
    account: Arc<Account>,
    nodes: Nodes,
    /// held while names go, so that what loses one is known
    removing: Mutex<()>,
    /// in memory, held while a size is set and while room is asked for behind one
    sizing: Mutex<()>,
    /// in memory, held while an attribute is set
    naming: Mutex<()>,
}

impl UsageAccounting {
    /// Counts what there is, and from then on what changes.
    ///
    /// # Errors
    /// What the backend answers where something cannot be looked at.
    pub fn open(below: Branch, account: &Arc<Account>) -> Result<Arc<Self>> {
        let root = below.getattr(&Caller::ROOT, NodeId::ROOT)?;
        let root = taken(account, &below, NodeId::ROOT, &root, 0, 0);
        let mut sum = root;
        let mut linked = HashSet::new();
        walk(&below, Held::new(&below, NodeId::ROOT), b"", &mut |_, visited| {
            let (held, attributes) = visited?;
            let is_counted = !attributes.is_directory() && attributes.links > 1 && !linked.insert(attributes.inode);
            sum += if is_counted { 0 } else { taken(account, &below, held.node(), attributes, 0, 0) };
            Ok(true)
        })?;
        account.settle(0, sum);
        let nodes = Nodes::new(root);
        Ok(Arc::new(UsageAccounting {
            below,
            account: Arc::clone(account),
            nodes,
            removing: Mutex::default(),
            sizing: Mutex::default(),
            naming: Mutex::default(),
        }))
    }

    /// Excludes others from sizes, where it matters.
    fn sizing(&self) -> Option<MutexGuard<'_, ()>> {
        self.account.is_in_memory().then(|| self.sizing.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Excludes others who set attributes, where it matters.
    fn naming(&self) -> Option<MutexGuard<'_, ()>> {
        self.account.is_in_memory().then(|| self.naming.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn measure(&self, node: NodeId) {
        self.nodes.measure(&self.below, &self.account, node);
    }

    fn measure_file(&self, handle: HandleId) {
        if let Some(node) = self.nodes.file(handle) {
            self.measure(node);
        }
    }

    fn opened(&self, node: NodeId, handle: HandleId) {
        self.nodes.hold(&self.below, &self.account, node);
        self.nodes.opened(handle, node);
    }

    /// An object was made in `parent`.
    fn made(&self, parent: NodeId, entry: Entry) -> Entry {
        self.nodes.hold_new(&self.below, &self.account, entry.node, &entry.attributes);
        self.measure(parent);
        entry
    }

    /// Calls `remove`, after which the object at this name, if there is one, may have lost it.
    fn removing<T>(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        remove: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let _alone = self.removing.lock().unwrap_or_else(PoisonError::into_inner);
        let found = Filter::lookup(self, caller, parent, name).ok();
        let removed = remove();
        if let Some(entry) = found {
            if self.account.is_in_memory() {
                // Each of its names counts.
                self.measure(entry.node);
            }
            Filter::forget(self, entry.node, 1);
        }
        self.measure(parent);
        removed
    }

    /// Calls `rename`, which makes an object at its old name, if it changes anything. While names go, so that the object is counted before
    /// anybody can remove it.
    fn leaving_whiteout(&self, parent: NodeId, name: Name<'_>, rename: impl FnOnce() -> Result<()>) -> Result<()> {
        let find = || self.below.lookup(&Caller::ROOT, parent, name).ok();
        let before = find();
        let renamed = rename();
        if let Some(entry) = renamed.is_ok().then(find).flatten() {
            if before.as_ref().is_some_and(|before| before.node != entry.node) {
                self.nodes.hold_new(&self.below, &self.account, entry.node, &entry.attributes);
                Filter::forget(self, entry.node, 1);
            } else {
                self.below.forget(entry.node, 1);
            }
        }
        before.iter().for_each(|before| self.below.forget(before.node, 1));
        renamed
    }
}

impl Filter for UsageAccounting {
    fn below(&self) -> &dyn Libservice {
        &*self.below
    }

    fn lookup(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        let entry = self.below.lookup(caller, parent, name)?;
        self.nodes.hold(&self.below, &self.account, entry.node);
        Ok(entry)
    }

    fn forget(&self, node: NodeId, count: u64) {
        self.nodes.let_go(&self.below, &self.account, node, count);
        self.below.forget(node, count);
    }

    fn setattr(
        &self,
        caller: &Caller,
        node: NodeId,
        changes: &SetAttributes,
        handle: Option<HandleId>,
    ) -> Result<Attributes> {
        let sizing = changes.size.and_then(|_| self.sizing());
        let attributes = self.below.setattr(caller, node, changes, handle);
        drop(sizing);
        if changes.size.is_some() {
            self.measure(node);
        }
        attributes
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
        let entry = self.made(parent, entry);
        self.opened(entry.node, handle);
        Ok((entry, handle))
    }

    fn tmpfile(
        &self,
        caller: &Caller,
        parent: NodeId,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        let (entry, handle) = self.below.tmpfile(caller, parent, permissions, flags)?;
        let entry = self.made(parent, entry);
        self.opened(entry.node, handle);
        Ok((entry, handle))
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
        Ok(self.made(parent, self.below.mknod(caller, parent, name, file_type, permissions, device)?))
    }

    fn mkdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>, permissions: u32) -> Result<Entry> {
        Ok(self.made(parent, self.below.mkdir(caller, parent, name, permissions)?))
    }

    fn symlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        Ok(self.made(parent, self.below.symlink(caller, parent, name, target)?))
    }

    fn link(&self, caller: &Caller, node: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        let entry = self.below.link(caller, node, parent, name)?;
        self.nodes.hold(&self.below, &self.account, entry.node);
        if self.account.is_in_memory() {
            self.measure(entry.node);
        }
        self.measure(parent);
        Ok(entry)
    }

    fn unlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.removing(caller, parent, name, || self.below.unlink(caller, parent, name))
    }

    fn unlink_known(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        victim: NodeId,
        is_last: Option<bool>,
    ) -> Result<()> {
        self.removing(caller, parent, name, || self.below.unlink_known(caller, parent, name, victim, is_last))
    }

    fn rmdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.removing(caller, parent, name, || self.below.rmdir(caller, parent, name))
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
        self.removing(caller, new_parent, new_name, || {
            let rename = || self.below.rename(caller, parent, name, new_parent, new_name, flags);
            let renamed = if flags.contains(RenameFlags::WHITEOUT) {
                self.leaving_whiteout(parent, name, rename)
            } else {
                rename()
            };
            self.measure(parent);
            renamed
        })
    }

    fn open(&self, caller: &Caller, node: NodeId, flags: OpenFlags) -> Result<HandleId> {
        let sizing = flags.contains(OpenFlags::TRUNCATE).then(|| self.sizing());
        let handle = self.below.open(caller, node, flags)?;
        drop(sizing);
        self.opened(node, handle);
        if flags.contains(OpenFlags::TRUNCATE) {
            self.measure(node);
        }
        Ok(handle)
    }

    fn write(&self, caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        let written = self.below.write(caller, handle, offset, data);
        self.measure_file(handle);
        written
    }

    fn write_pieces(&self, caller: &Caller, handle: HandleId, pieces: &[(u64, &[u8])]) -> Result<()> {
        let written = self.below.write_pieces(caller, handle, pieces);
        self.measure_file(handle);
        written
    }

    /// In memory, room behind the end of a file is given only where it continues the file: what finds lonely pages there could not be counted, of which
    /// nobody knows where they are. `EOPNOTSUPP` elsewhere.
    fn fallocate(&self, caller: &Caller, handle: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        let keeps_size = mode.contains(AllocateMode::KEEP_SIZE) && !mode.contains(AllocateMode::PUNCH_HOLE);
        let sizing = if keeps_size { self.sizing() } else { None };
        if sizing.is_some()
            && let Some(node) = self.nodes.file(handle)
            && offset > self.below.getattr(&Caller::ROOT, node)?.size.next_multiple_of(BLOCK_SIZE as u64)
        {
            return fail(Errno::EOPNOTSUPP);
        }
        let allocated = self.below.fallocate(caller, handle, mode, offset, length);
        drop(sizing);
        if let Some(node) = self.nodes.file(handle) {
            if allocated.is_ok() && keeps_size {
                self.nodes.ask_for(node, offset.saturating_add(length));
            }
            self.measure(node);
        }
        allocated
    }

    /// Room that is given when data reaches the disk may be more than what was said before.
    fn fsync(&self, caller: &Caller, handle: HandleId, durability: Durability) -> Result<()> {
        let synced = self.below.fsync(caller, handle, durability);
        self.measure_file(handle);
        synced
    }

    /// As with [`Libservice::fsync`].
    fn write_before_names(&self, caller: &Caller, node: NodeId, change: NameChange) -> Result<()> {
        let written = self.below.write_before_names(caller, node, change);
        self.measure(node);
        written
    }

    /// As with [`Libservice::fsync`].
    fn store_deferred(&self, node: NodeId) -> Result<()> {
        let stored = self.below.store_deferred(node);
        self.measure(node);
        stored
    }

    fn release(&self, handle: HandleId) {
        if let Some(node) = self.nodes.closed(handle) {
            self.nodes.let_go(&self.below, &self.account, node, 1);
        }
        self.below.release(handle);
    }

    /// In memory, no object gets more names of attributes than can be listed: they could not be counted. `ENOSPC` then, as on filesystems of a disk.
    fn setxattr(&self, caller: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        let alone = self.naming();
        if alone.is_some() && !lists_one_more(&self.below, node, name) {
            return fail(Errno::ENOSPC);
        }
        let set = self.below.setxattr(caller, node, name, value, flags);
        self.measure(node);
        set
    }

    fn removexattr(&self, caller: &Caller, node: NodeId, name: &[u8]) -> Result<()> {
        let removed = self.below.removexattr(caller, node, name);
        self.measure(node);
        removed
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
        let copied = self.below.copy_range(caller, source, source_offset, target, target_offset, length);
        self.measure_file(target);
        copied
    }
}
