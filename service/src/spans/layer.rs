//! A layer that passes everything on and has the thread's clock count for the one below it.

use super::clock::enter;
use poolfs_libservice::types::{
    AllocateMode, Attributes, Caller, FileSystemStatistics, FileType, HandleId, Name, NodeId, OpenFlags, RenameFlags,
    SeekTo, SetAttributes, XattrFlags,
};
use poolfs_libservice::{
    DirectoryEntry, Durability, Entry, Holder, Lease, Libservice, NameChange, Result, Segment, Text, Written,
};
use poolfs_service_protocol::Layer;
use std::ops::{ControlFlow, Range};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A layer whose time is measured.
pub struct Timed {
    layer: Layer,
    inner: Arc<dyn Libservice>,
}

impl Timed {
    /// `inner`, whose time counts as that of `layer`.
    #[must_use]
    pub fn over(layer: Layer, inner: Arc<dyn Libservice>) -> Arc<dyn Libservice> {
        Arc::new(Self { layer, inner })
    }
}

/// Methods that only pass on.
macro_rules! timed {
    ($(fn $name:ident(&self $(, $argument:ident: $type:ty)*) $(-> $result:ty)?;)*) => {
        $(fn $name(&self $(, $argument: $type)*) $(-> $result)? {
            let _entered = enter(self.layer);
            self.inner.$name($($argument),*)
        })*
    };
}

impl Libservice for Timed {
    timed! {
        fn lookup(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<Entry>;
        fn forget(&self, node: NodeId, count: u64);
        fn getattr(&self, caller: &Caller, node: NodeId) -> Result<Attributes>;
        fn setattr(&self, caller: &Caller, node: NodeId, changes: &SetAttributes, handle: Option<HandleId>) -> Result<Attributes>;
        fn readlink(&self, caller: &Caller, node: NodeId) -> Result<Vec<u8>>;
        fn create(&self, caller: &Caller, parent: NodeId, name: Name<'_>, permissions: u32, flags: OpenFlags) -> Result<(Entry, HandleId)>;
        fn tmpfile(&self, caller: &Caller, parent: NodeId, permissions: u32, flags: OpenFlags) -> Result<(Entry, HandleId)>;
        fn mknod(&self, caller: &Caller, parent: NodeId, name: Name<'_>, file_type: FileType, permissions: u32, device: u32) -> Result<Entry>;
        fn mkdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>, permissions: u32) -> Result<Entry>;
        fn symlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>, target: &[u8]) -> Result<Entry>;
        fn link(&self, caller: &Caller, node: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry>;
        fn unlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()>;
        fn unlink_known(&self, caller: &Caller, parent: NodeId, name: Name<'_>, victim: NodeId, is_last: Option<bool>) -> Result<()>;
        fn rmdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()>;
        fn rename(&self, caller: &Caller, parent: NodeId, name: Name<'_>, new_parent: NodeId, new_name: Name<'_>, flags: RenameFlags) -> Result<()>;
        fn open(&self, caller: &Caller, node: NodeId, flags: OpenFlags) -> Result<HandleId>;
        fn read(&self, caller: &Caller, handle: HandleId, offset: u64, buffer: &mut [u8]) -> Result<usize>;
        fn write(&self, caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written>;
        fn write_pieces(&self, caller: &Caller, handle: HandleId, pieces: &[(u64, &[u8])]) -> Result<()>;
        fn fallocate(&self, caller: &Caller, handle: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()>;
        fn seek(&self, caller: &Caller, handle: HandleId, offset: u64, to: SeekTo) -> Result<u64>;
        fn fsync(&self, caller: &Caller, handle: HandleId, durability: Durability) -> Result<()>;
        fn flush(&self, caller: &Caller, handle: HandleId) -> Result<()>;
        fn release(&self, handle: HandleId);
        fn opendir(&self, caller: &Caller, node: NodeId) -> Result<HandleId>;
        fn getxattr(&self, caller: &Caller, node: NodeId, name: &[u8]) -> Result<Vec<u8>>;
        fn setxattr(&self, caller: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()>;
        fn listxattr(&self, caller: &Caller, node: NodeId) -> Result<Vec<Vec<u8>>>;
        fn removexattr(&self, caller: &Caller, node: NodeId, name: &[u8]) -> Result<()>;
        fn statfs(&self, caller: &Caller, node: NodeId) -> Result<FileSystemStatistics>;
        fn sync(&self) -> Result<()>;
        fn flush_range(&self, caller: &Caller, handle: HandleId, range: Range<u64>) -> Result<()>;
        fn write_before_names(&self, caller: &Caller, node: NodeId, change: NameChange) -> Result<()>;
        fn defers(&self) -> bool;
        fn store_deferred(&self, node: NodeId) -> Result<()>;
        fn hold(&self, caller: &Caller, handle: HandleId, range: Range<u64>, held: bool) -> Result<()>;
        fn copy_range(&self, caller: &Caller, source: HandleId, source_offset: u64, target: HandleId, target_offset: u64, length: u64) -> Result<u64>;
        fn read_only(&self) -> bool;
        fn segment(&self, handle: HandleId, lease: &Arc<dyn Lease>) -> Result<Segment>;
        fn text(&self, handle: HandleId, holder: Option<&Arc<dyn Holder>>) -> Result<Text>;
        fn lend(&self, handle: HandleId, holder: Option<&Arc<dyn Holder>>) -> Result<OwnedFd>;
    }

    /// What is done with the entries is the time of whoever asked for them.
    fn readdir(
        &self,
        caller: &Caller,
        handle: HandleId,
        cookie: u64,
        visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        let entered = enter(self.layer);
        let Some(above) = entered.above() else { return self.inner.readdir(caller, handle, cookie, visit) };
        self.inner.readdir(caller, handle, cookie, &mut |entry| {
            let _above = enter(above);
            visit(entry)
        })
    }
}
