//! Owner translation for containers with a user namespace: the container's ids are stored, the layers above see the host's.
//!
//! For an instance it is what an idmapped mount is for a filesystem of the kernel. It is on top of the instance's stack.
//! Everything below, caches and shared branches included, knows stored ids only, so that instances with different maps share it.
//! Everything above decides by the host's ids: these are what the kernel vouches for, and what a FUSE mount of the initial user
//! namespace is answered.
//!
//! - Outgoing owners are mapped: those of attributes, access lists and file capabilities. An owner for which the map has no id
//!   becomes [`NO_ID`]: it is nobody's, and no capability applies to it. An access-list entry for such an id is left out, because
//!   it admits nobody that exists.
//! - Incoming ids are mapped: new owners, owners of new objects, access lists, file capabilities. An id without a counterpart is
//!   refused: `EOVERFLOW` as an owner, `EINVAL` in a list or with capabilities.
//!
//! The layer is stateless. Begin reading with [`IdMapped`]; the translation of attribute values is in `values.rs`.

#![forbid(unsafe_code)]

mod values;

use poolfs_libservice::{Entry, Error, Filter, Libservice, Result};
use poolfs_types::{
    Attributes, Caller, Errno, FileType, HandleId, IdMap, NO_ID, Name, NodeId, OpenFlags, RenameFlags, SetAttributes,
    XattrFlags,
};
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

const ANYBODY: &Caller = &Caller::ROOT;

impl Filter for IdMapped {
    fn below(&self) -> &dyn Libservice {
        &*self.below
    }

    /// Where nothing is made, nobody is asked for.
    fn asks_as(&self, _: &Caller) -> Caller {
        *ANYBODY
    }

    fn lookup(&self, _: &Caller, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        Ok(self.shown_entry(self.below.lookup(ANYBODY, parent, name)?))
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

    fn getxattr(&self, _: &Caller, node: NodeId, name: &[u8]) -> Result<Vec<u8>> {
        let stored = self.below.getxattr(ANYBODY, node, name)?;
        Ok(values::shown(&self.map, name, stored))
    }

    fn setxattr(&self, _: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        let stored = values::stored(&self.map, name, value)?;
        self.below.setxattr(ANYBODY, node, name, &stored, flags)
    }
}
