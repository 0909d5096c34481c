//! One reference filesystem, seen and changed by several layers that do not know of each other.

use super::Memory;
use crate::{Coherence, Entry, Filter, Libservice, Result, Stale, Upcalls, Written, write_whole};
use poolfs_types::{
    AllocateMode, Attributes, Caller, FileType, HandleId, Name, NodeId, OpenFlags, RenameFlags, SetAttributes,
    XattrFlags,
};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// What the views of one filesystem share.
#[derive(Default)]
pub(super) struct Views {
    /// Changes come one after the other, each with its upcalls.
    changing: Mutex<()>,
    attached: Mutex<Vec<(u64, Weak<dyn Upcalls>)>>,
}

impl std::fmt::Debug for Views {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Views").finish_non_exhaustive()
    }
}

/// A [`Memory`] as one of several layers has it.
pub struct View {
    memory: Arc<Memory>,
    number: u64,
    coherence: Coherence,
}

/// What a change has made stale.
#[derive(Clone, Copy)]
enum Changed {
    Node(NodeId, Stale),
    Names(NodeId),
    /// Whatever a name leads to.
    Victim(Option<NodeId>),
}

impl Memory {
    /// A view of it, which the layer above may keep as much of as `coherence` says.
    #[must_use]
    pub fn view(self: &Arc<Self>, coherence: Coherence) -> Arc<View> {
        static NUMBERS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let number = NUMBERS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Arc::new(View { memory: Arc::clone(self), number, coherence })
    }
}

impl Memory {
    /// Says to all who are told of changes that some may have come of which they were not.
    pub fn lose_upcalls(&self) {
        let attached = self.views.attached.lock().unwrap_or_else(PoisonError::into_inner).clone();
        attached.iter().filter_map(|(_, above)| above.upgrade()).for_each(|above| above.lost());
    }
}

impl View {
    /// Makes a change, and tells all others of it before anybody makes another.
    fn change<R>(
        &self,
        change: impl FnOnce(&Memory) -> Result<R>,
        stale: impl FnOnce(&R) -> Vec<Changed>,
    ) -> Result<R> {
        let views = &self.memory.views;
        let _changing = views.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let done = change(&self.memory)?;
        let attached = views.attached.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let others: Vec<_> = attached.iter().filter(|(number, _)| *number != self.number).collect();
        for changed in stale(&done) {
            for above in others.iter().filter_map(|(_, above)| above.upgrade()) {
                match changed {
                    Changed::Node(node, what) => above.stale(node, what),
                    Changed::Victim(Some(node)) => above.stale(node, Stale::Attributes),
                    Changed::Victim(None) => {}
                    Changed::Names(directory) => {
                        above.names(directory);
                        above.stale(directory, Stale::Attributes);
                    }
                }
            }
        }
        Ok(done)
    }

    /// The same, of names in a directory: `name` may lead to something before.
    fn change_names<R>(&self, parent: NodeId, name: Name<'_>, change: impl FnOnce(&Memory) -> Result<R>) -> Result<R> {
        self.change_both((parent, name), (parent, name), change)
    }

    fn change_both<R>(
        &self,
        from: (NodeId, Name<'_>),
        to: (NodeId, Name<'_>),
        change: impl FnOnce(&Memory) -> Result<R>,
    ) -> Result<R> {
        let victims = std::cell::Cell::new([None; 2]);
        let led_to = |(parent, name): (NodeId, Name<'_>)| self.memory.state().named(parent, name);
        let change = |memory: &Memory| {
            victims.set([led_to(from), led_to(to)]);
            change(memory)
        };
        let stale = |_: &R| {
            let victims = victims.get().into_iter().map(Changed::Victim);
            [from.0, to.0].into_iter().map(Changed::Names).chain(victims).collect()
        };
        self.change(change, stale)
    }

    fn change_content<R>(&self, handle: HandleId, change: impl FnOnce(&Memory) -> Result<R>) -> Result<R> {
        let node = self.memory.state().handle(handle).map(|handle| NodeId(handle.inode))?;
        self.change(change, |_| vec![Changed::Node(node, Stale::Content)])
    }
}

impl Filter for View {
    fn below(&self) -> &dyn Libservice {
        &*self.memory
    }

    fn attach(&self, above: Weak<dyn Upcalls>) -> Coherence {
        if self.coherence == Coherence::Leased {
            let mut attached = self.memory.views.attached.lock().unwrap_or_else(PoisonError::into_inner);
            // One that is being made cannot be reached yet, and is no less there for that.
            attached.retain(|(number, above)| *number != self.number && above.weak_count() > 0);
            attached.push((self.number, above));
        }
        self.coherence
    }

    fn setattr(
        &self,
        caller: &Caller,
        node: NodeId,
        changes: &SetAttributes,
        handle: Option<HandleId>,
    ) -> Result<Attributes> {
        let what = if changes.size.is_some() { Stale::Content } else { Stale::Attributes };
        self.change(|memory| memory.setattr(caller, node, changes, handle), |_| vec![Changed::Node(node, what)])
    }

    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        self.change_names(parent, name, |memory| memory.create(caller, parent, name, permissions, flags))
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
        self.change_names(parent, name, |memory| memory.mknod(caller, parent, name, file_type, permissions, device))
    }

    fn mkdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>, permissions: u32) -> Result<Entry> {
        self.change_names(parent, name, |memory| memory.mkdir(caller, parent, name, permissions))
    }

    fn symlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.change_names(parent, name, |memory| memory.symlink(caller, parent, name, target))
    }

    fn link(&self, caller: &Caller, node: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        let linked = |entry: &Entry| vec![Changed::Names(parent), Changed::Node(entry.node, Stale::Attributes)];
        self.change(|memory| memory.link(caller, node, parent, name), linked)
    }

    fn unlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.change_names(parent, name, |memory| memory.unlink(caller, parent, name))
    }

    fn unlink_known(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        _victim: NodeId,
        _is_last: Option<bool>,
    ) -> Result<()> {
        Filter::unlink(self, caller, parent, name)
    }

    fn rmdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.change_names(parent, name, |memory| memory.rmdir(caller, parent, name))
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
        let rename = |memory: &Memory| memory.rename(caller, parent, name, new_parent, new_name, flags);
        self.change_both((parent, name), (new_parent, new_name), rename)
    }

    fn open(&self, caller: &Caller, node: NodeId, flags: OpenFlags) -> Result<HandleId> {
        if flags.contains(OpenFlags::TRUNCATE) {
            let open = |memory: &Memory| memory.open(caller, node, flags);
            return self.change(open, |_| vec![Changed::Node(node, Stale::Content)]);
        }
        self.memory.open(caller, node, flags)
    }

    fn write(&self, caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        self.change_content(handle, |memory| memory.write(caller, handle, offset, data))
    }

    fn write_pieces(&self, caller: &Caller, handle: HandleId, pieces: &[(u64, &[u8])]) -> Result<()> {
        let write = |memory: &Memory| {
            pieces.iter().try_for_each(|&(offset, data)| write_whole(memory, caller, handle, offset, data))
        };
        self.change_content(handle, write)
    }

    fn fallocate(&self, caller: &Caller, handle: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        self.change_content(handle, |memory| memory.fallocate(caller, handle, mode, offset, length))
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
        let copy = |memory: &Memory| memory.copy_range(caller, source, source_offset, target, target_offset, length);
        self.change_content(target, copy)
    }

    fn setxattr(&self, caller: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        let set = |memory: &Memory| memory.setxattr(caller, node, name, value, flags);
        self.change(set, |()| vec![Changed::Node(node, Stale::Attributes)])
    }

    fn removexattr(&self, caller: &Caller, node: NodeId, name: &[u8]) -> Result<()> {
        let remove = |memory: &Memory| memory.removexattr(caller, node, name);
        self.change(remove, |()| vec![Changed::Node(node, Stale::Attributes)])
    }
}
