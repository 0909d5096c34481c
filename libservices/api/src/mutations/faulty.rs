//! A layer over the reference with one deliberate bug.

use crate::types::{
    AllocateMode, Attributes, Caller, Errno, FileType, HandleId, Name, NodeId, OpenFlags, RenameFlags, SetAttributes,
    SetTime,
};
use crate::{DirectoryEntry, Entry, Filter, Libservice, Memory, ReadTarget, Result, Written, fail, write_whole};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bug {
    None,
    /// Of some long writes only the length arrives.
    LostWrite,
    /// A full directory is refused by another errno.
    WrongErrno,
    /// The size shown is the largest there ever was.
    StaleSize,
    /// Punching does nothing.
    LostPunch,
    /// An unlink leaves the number of links as it was.
    StaleLinks,
    /// The mode loses its set-id bits.
    LostModeBits,
    /// Writing does not set the time.
    LostTime,
    /// Some listings leave a name out when they go on.
    LostName,
    /// Exchanging is replacing.
    ExchangeReplaces,
    /// The value of an xattr is cut.
    CutXattr,
    /// A short file is read beyond its end.
    ReadBeyondEnd,
    /// The umask counts beside a default list.
    UmaskDespiteAcl,
}

impl Bug {
    pub(super) const ALL: [Bug; 12] = [
        Bug::LostWrite,
        Bug::WrongErrno,
        Bug::StaleSize,
        Bug::LostPunch,
        Bug::StaleLinks,
        Bug::LostModeBits,
        Bug::LostTime,
        Bug::LostName,
        Bug::ExchangeReplaces,
        Bug::CutXattr,
        Bug::ReadBeyondEnd,
        Bug::UmaskDespiteAcl,
    ];
}

pub(super) struct Faulty {
    inner: Arc<Memory>,
    bug: Bug,
    calls: AtomicUsize,
    sizes: Mutex<HashMap<u64, u64>>,
    nodes: Mutex<HashMap<HandleId, NodeId>>,
}

impl Faulty {
    pub(super) fn over(inner: Arc<Memory>, bug: Bug) -> Arc<dyn Libservice> {
        Arc::new(Self { inner, bug, calls: AtomicUsize::new(0), sizes: Mutex::default(), nodes: Mutex::default() })
    }

    /// Whether the bug is this one.
    fn has(&self, bug: Bug) -> bool {
        self.bug == bug
    }

    /// Whether the bug is this one and its turn has come, every `period` calls.
    fn strikes(&self, bug: Bug, period: usize) -> bool {
        self.has(bug) && self.calls.fetch_add(1, Ordering::Relaxed) % period == period - 1
    }

    fn distorted(&self, mut attributes: Attributes) -> Attributes {
        if self.has(Bug::StaleSize) && attributes.file_type == FileType::Regular {
            let mut sizes = self.sizes.lock().unwrap_or_else(PoisonError::into_inner);
            let largest = sizes.entry(attributes.inode).or_insert(0);
            *largest = attributes.size.max(*largest);
            attributes.size = *largest;
        }
        if self.has(Bug::StaleLinks) && attributes.links == 0 {
            attributes.links = 1;
        }
        if self.has(Bug::LostModeBits) {
            attributes.permissions &= 0o1777;
        }
        attributes
    }

    fn noted(&self, handle: HandleId, node: NodeId) -> HandleId {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner).insert(handle, node);
        handle
    }

    /// Writes, and sets the time back.
    fn write_timeless(&self, caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        let node = self.nodes.lock().unwrap_or_else(PoisonError::into_inner).get(&handle).copied();
        let node = node.unwrap_or(NodeId::ROOT);
        let modified = Some(SetTime::At(self.inner.getattr(caller, node)?.modified));
        let written = self.inner.write(caller, handle, offset, data)?;
        self.inner.setattr(caller, node, &SetAttributes { modified, ..Default::default() }, None)?;
        Ok(written)
    }

    fn distorted_entry(&self, entry: Entry) -> Entry {
        Entry { attributes: self.distorted(entry.attributes), ..entry }
    }

    fn umasked(&self, entry: Entry, caller: &Caller) -> Entry {
        let mut entry = self.distorted_entry(entry);
        if self.has(Bug::UmaskDespiteAcl) {
            entry.attributes.permissions &= !caller.umask;
        }
        entry
    }
}

impl Filter for Faulty {
    fn below(&self) -> &dyn Libservice {
        &*self.inner
    }

    fn lookup(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        self.inner.lookup(caller, parent, name).map(|entry| self.distorted_entry(entry))
    }

    fn getattr(&self, caller: &Caller, node: NodeId) -> Result<Attributes> {
        self.inner.getattr(caller, node).map(|attributes| self.distorted(attributes))
    }

    fn setattr(
        &self,
        caller: &Caller,
        node: NodeId,
        changes: &SetAttributes,
        handle: Option<HandleId>,
    ) -> Result<Attributes> {
        self.inner.setattr(caller, node, changes, handle).map(|attributes| self.distorted(attributes))
    }

    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        let made = self.inner.create(caller, parent, name, permissions, flags);
        made.map(|(entry, handle)| (self.umasked(entry, caller), self.noted(handle, entry.node)))
    }

    fn tmpfile(
        &self,
        caller: &Caller,
        parent: NodeId,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        let made = self.inner.tmpfile(caller, parent, permissions, flags);
        made.map(|(entry, handle)| (self.umasked(entry, caller), self.noted(handle, entry.node)))
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
        let made = self.inner.mknod(caller, parent, name, file_type, permissions, device);
        made.map(|entry| self.umasked(entry, caller))
    }

    fn mkdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>, permissions: u32) -> Result<Entry> {
        self.inner.mkdir(caller, parent, name, permissions).map(|entry| self.umasked(entry, caller))
    }

    fn link(&self, caller: &Caller, node: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        self.inner.link(caller, node, parent, name).map(|entry| self.distorted_entry(entry))
    }

    fn rmdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        match self.inner.rmdir(caller, parent, name) {
            Err(error) if error == Errno::ENOTEMPTY && self.has(Bug::WrongErrno) => fail(Errno::EEXIST),
            result => result,
        }
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
        let flags = if self.has(Bug::ExchangeReplaces) { flags - RenameFlags::EXCHANGE } else { flags };
        self.inner.rename(caller, parent, name, new_parent, new_name, flags)
    }

    fn open(&self, caller: &Caller, node: NodeId, flags: OpenFlags) -> Result<HandleId> {
        self.inner.open(caller, node, flags).map(|handle| self.noted(handle, node))
    }

    fn read_into(&self, caller: &Caller, handle: HandleId, offset: u64, target: &mut dyn ReadTarget) -> Result<usize> {
        let mut got = self.inner.read(caller, handle, offset, target.buffer())?;
        if self.has(Bug::ReadBeyondEnd) && (1..target.buffer().len()).contains(&got) {
            target.buffer()[got] = 0;
            got += 1;
        }
        target.put(0..got)?;
        Ok(got)
    }

    fn write(&self, caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        if data.len() > 1000 && self.strikes(Bug::LostWrite, 20) {
            let zeros = vec![0; data.len()];
            return self.inner.write(caller, handle, offset, &zeros);
        }
        if self.has(Bug::LostTime) {
            return self.write_timeless(caller, handle, offset, data);
        }
        self.inner.write(caller, handle, offset, data)
    }

    fn write_pieces(&self, caller: &Caller, handle: HandleId, pieces: &[(u64, &[u8])]) -> Result<()> {
        pieces.iter().try_for_each(|&(offset, data)| write_whole(self, caller, handle, offset, data))
    }

    fn fallocate(&self, caller: &Caller, handle: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        let punches = mode.contains(AllocateMode::PUNCH_HOLE) && self.has(Bug::LostPunch);
        let mode = if punches { AllocateMode::KEEP_SIZE } else { mode };
        self.inner.fallocate(caller, handle, mode, offset, length)
    }

    fn readdir(
        &self,
        caller: &Caller,
        handle: HandleId,
        cookie: u64,
        visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        let mut skip = cookie != 0 && self.has(Bug::LostName);
        self.inner.readdir(caller, handle, cookie, &mut |entry| {
            if std::mem::take(&mut skip) { ControlFlow::Continue(()) } else { visit(entry) }
        })
    }

    fn getxattr(&self, caller: &Caller, node: NodeId, name: &[u8]) -> Result<Vec<u8>> {
        let mut value = self.inner.getxattr(caller, node, name)?;
        if self.has(Bug::CutXattr) {
            value.truncate(20);
        }
        Ok(value)
    }
}
