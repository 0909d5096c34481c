//! Methods that a layer hands on as they are.

/// Methods of [`Libservice`](crate::Libservice) that ask the same of the layer in a field: `pass_through!(below: lookup forget getattr);`
/// in the implementation for a layer with a field `below`.
#[macro_export]
macro_rules! pass_through {
    ($below:ident: $($method:ident)*) => {
        $($crate::pass_through!(@ $below $method);)*
    };
    (@ $below:ident lookup) => {
        fn lookup(&self, caller: &$crate::types::Caller, parent: $crate::types::NodeId, name: $crate::types::Name<'_>) -> $crate::Result<$crate::Entry> {
            self.$below.lookup(caller, parent, name)
        }
    };
    (@ $below:ident forget) => {
        fn forget(&self, node: $crate::types::NodeId, count: u64) {
            self.$below.forget(node, count)
        }
    };
    (@ $below:ident getattr) => {
        fn getattr(&self, caller: &$crate::types::Caller, node: $crate::types::NodeId) -> $crate::Result<$crate::types::Attributes> {
            self.$below.getattr(caller, node)
        }
    };
    (@ $below:ident setattr) => {
        fn setattr(&self, caller: &$crate::types::Caller, node: $crate::types::NodeId, changes: &$crate::types::SetAttributes, handle: Option<$crate::types::HandleId>) -> $crate::Result<$crate::types::Attributes> {
            self.$below.setattr(caller, node, changes, handle)
        }
    };
    (@ $below:ident readlink) => {
        fn readlink(&self, caller: &$crate::types::Caller, node: $crate::types::NodeId) -> $crate::Result<Vec<u8>> {
            self.$below.readlink(caller, node)
        }
    };
    (@ $below:ident create) => {
        fn create(&self, caller: &$crate::types::Caller, parent: $crate::types::NodeId, name: $crate::types::Name<'_>, permissions: u32, flags: $crate::types::OpenFlags) -> $crate::Result<($crate::Entry, $crate::types::HandleId)> {
            self.$below.create(caller, parent, name, permissions, flags)
        }
    };
    (@ $below:ident tmpfile) => {
        fn tmpfile(&self, caller: &$crate::types::Caller, parent: $crate::types::NodeId, permissions: u32, flags: $crate::types::OpenFlags) -> $crate::Result<($crate::Entry, $crate::types::HandleId)> {
            self.$below.tmpfile(caller, parent, permissions, flags)
        }
    };
    (@ $below:ident mknod) => {
        fn mknod(&self, caller: &$crate::types::Caller, parent: $crate::types::NodeId, name: $crate::types::Name<'_>, file_type: $crate::types::FileType, permissions: u32, device: u32) -> $crate::Result<$crate::Entry> {
            self.$below.mknod(caller, parent, name, file_type, permissions, device)
        }
    };
    (@ $below:ident mkdir) => {
        fn mkdir(&self, caller: &$crate::types::Caller, parent: $crate::types::NodeId, name: $crate::types::Name<'_>, permissions: u32) -> $crate::Result<$crate::Entry> {
            self.$below.mkdir(caller, parent, name, permissions)
        }
    };
    (@ $below:ident symlink) => {
        fn symlink(&self, caller: &$crate::types::Caller, parent: $crate::types::NodeId, name: $crate::types::Name<'_>, target: &[u8]) -> $crate::Result<$crate::Entry> {
            self.$below.symlink(caller, parent, name, target)
        }
    };
    (@ $below:ident link) => {
        fn link(&self, caller: &$crate::types::Caller, node: $crate::types::NodeId, parent: $crate::types::NodeId, name: $crate::types::Name<'_>) -> $crate::Result<$crate::Entry> {
            self.$below.link(caller, node, parent, name)
        }
    };
    (@ $below:ident unlink) => {
        fn unlink(&self, caller: &$crate::types::Caller, parent: $crate::types::NodeId, name: $crate::types::Name<'_>) -> $crate::Result<()> {
            self.$below.unlink(caller, parent, name)
        }
    };
    (@ $below:ident unlink_known) => {
        fn unlink_known(&self, caller: &$crate::types::Caller, parent: $crate::types::NodeId, name: $crate::types::Name<'_>, victim: $crate::types::NodeId, is_last: Option<bool>) -> $crate::Result<()> {
            self.$below.unlink_known(caller, parent, name, victim, is_last)
        }
    };
    (@ $below:ident rmdir) => {
        fn rmdir(&self, caller: &$crate::types::Caller, parent: $crate::types::NodeId, name: $crate::types::Name<'_>) -> $crate::Result<()> {
            self.$below.rmdir(caller, parent, name)
        }
    };
    (@ $below:ident rename) => {
        fn rename(&self, caller: &$crate::types::Caller, parent: $crate::types::NodeId, name: $crate::types::Name<'_>, new_parent: $crate::types::NodeId, new_name: $crate::types::Name<'_>, flags: $crate::types::RenameFlags) -> $crate::Result<()> {
            self.$below.rename(caller, parent, name, new_parent, new_name, flags)
        }
    };
    (@ $below:ident open) => {
        fn open(&self, caller: &$crate::types::Caller, node: $crate::types::NodeId, flags: $crate::types::OpenFlags) -> $crate::Result<$crate::types::HandleId> {
            self.$below.open(caller, node, flags)
        }
    };
    (@ $below:ident read) => {
        fn read(&self, caller: &$crate::types::Caller, handle: $crate::types::HandleId, offset: u64, buffer: &mut [u8]) -> $crate::Result<usize> {
            self.$below.read(caller, handle, offset, buffer)
        }
    };
    (@ $below:ident write) => {
        fn write(&self, caller: &$crate::types::Caller, handle: $crate::types::HandleId, offset: u64, data: &[u8]) -> $crate::Result<$crate::Written> {
            self.$below.write(caller, handle, offset, data)
        }
    };
    (@ $below:ident fallocate) => {
        fn fallocate(&self, caller: &$crate::types::Caller, handle: $crate::types::HandleId, mode: $crate::types::AllocateMode, offset: u64, length: u64) -> $crate::Result<()> {
            self.$below.fallocate(caller, handle, mode, offset, length)
        }
    };
    (@ $below:ident seek) => {
        fn seek(&self, caller: &$crate::types::Caller, handle: $crate::types::HandleId, offset: u64, to: $crate::types::SeekTo) -> $crate::Result<u64> {
            self.$below.seek(caller, handle, offset, to)
        }
    };
    (@ $below:ident fsync) => {
        fn fsync(&self, caller: &$crate::types::Caller, handle: $crate::types::HandleId, durability: $crate::Durability) -> $crate::Result<()> {
            self.$below.fsync(caller, handle, durability)
        }
    };
    (@ $below:ident flush) => {
        fn flush(&self, caller: &$crate::types::Caller, handle: $crate::types::HandleId) -> $crate::Result<()> {
            self.$below.flush(caller, handle)
        }
    };
    (@ $below:ident release) => {
        fn release(&self, handle: $crate::types::HandleId) {
            self.$below.release(handle)
        }
    };
    (@ $below:ident opendir) => {
        fn opendir(&self, caller: &$crate::types::Caller, node: $crate::types::NodeId) -> $crate::Result<$crate::types::HandleId> {
            self.$below.opendir(caller, node)
        }
    };
    (@ $below:ident readdir) => {
        fn readdir(&self, caller: &$crate::types::Caller, handle: $crate::types::HandleId, cookie: u64, visit: &mut dyn FnMut($crate::DirectoryEntry<'_>) -> ::std::ops::ControlFlow<()>, ) -> $crate::Result<()> {
            self.$below.readdir(caller, handle, cookie, visit)
        }
    };
    (@ $below:ident getxattr) => {
        fn getxattr(&self, caller: &$crate::types::Caller, node: $crate::types::NodeId, name: &[u8]) -> $crate::Result<Vec<u8>> {
            self.$below.getxattr(caller, node, name)
        }
    };
    (@ $below:ident setxattr) => {
        fn setxattr(&self, caller: &$crate::types::Caller, node: $crate::types::NodeId, name: &[u8], value: &[u8], flags: $crate::types::XattrFlags) -> $crate::Result<()> {
            self.$below.setxattr(caller, node, name, value, flags)
        }
    };
    (@ $below:ident listxattr) => {
        fn listxattr(&self, caller: &$crate::types::Caller, node: $crate::types::NodeId) -> $crate::Result<Vec<Vec<u8>>> {
            self.$below.listxattr(caller, node)
        }
    };
    (@ $below:ident removexattr) => {
        fn removexattr(&self, caller: &$crate::types::Caller, node: $crate::types::NodeId, name: &[u8]) -> $crate::Result<()> {
            self.$below.removexattr(caller, node, name)
        }
    };
    (@ $below:ident statfs) => {
        fn statfs(&self, caller: &$crate::types::Caller, node: $crate::types::NodeId) -> $crate::Result<$crate::types::FileSystemStatistics> {
            self.$below.statfs(caller, node)
        }
    };
    (@ $below:ident sync) => {
        fn sync(&self) -> $crate::Result<()> {
            self.$below.sync()
        }
    };
    (@ $below:ident flush_range) => {
        fn flush_range(&self, caller: &$crate::types::Caller, handle: $crate::types::HandleId, range: ::std::ops::Range<u64>) -> $crate::Result<()> {
            self.$below.flush_range(caller, handle, range)
        }
    };
    (@ $below:ident write_before_names) => {
        fn write_before_names(&self, caller: &$crate::types::Caller, node: $crate::types::NodeId, change: $crate::NameChange) -> $crate::Result<()> {
            self.$below.write_before_names(caller, node, change)
        }
    };
    (@ $below:ident defers) => {
        fn defers(&self) -> bool {
            self.$below.defers()
        }
    };
    (@ $below:ident store_deferred) => {
        fn store_deferred(&self, node: $crate::types::NodeId) -> $crate::Result<()> {
            self.$below.store_deferred(node)
        }
    };
    (@ $below:ident hold) => {
        fn hold(&self, caller: &$crate::types::Caller, handle: $crate::types::HandleId, range: ::std::ops::Range<u64>, held: bool) -> $crate::Result<()> {
            self.$below.hold(caller, handle, range, held)
        }
    };
    (@ $below:ident copy_range) => {
        fn copy_range(&self, caller: &$crate::types::Caller, source: $crate::types::HandleId, source_offset: u64, target: $crate::types::HandleId, target_offset: u64, length: u64) -> $crate::Result<u64> {
            self.$below.copy_range(caller, source, source_offset, target, target_offset, length)
        }
    };
    (@ $below:ident segment) => {
        fn segment(&self, handle: $crate::types::HandleId, lease: &::std::sync::Arc<dyn $crate::Lease>) -> $crate::Result<$crate::Segment> {
            self.$below.segment(handle, lease)
        }
    };
    (@ $below:ident text) => {
        fn text(&self, handle: $crate::types::HandleId, holder: ::std::option::Option<&::std::sync::Arc<dyn $crate::Holder>>) -> $crate::Result<$crate::Text> {
            self.$below.text(handle, holder)
        }
    };
    (@ $below:ident lend) => {
        fn lend(&self, handle: $crate::types::HandleId, holder: ::std::option::Option<&::std::sync::Arc<dyn $crate::Holder>>) -> $crate::Result<::std::os::fd::OwnedFd> {
            self.$below.lend(handle, holder)
        }
    };
    (@ $below:ident read_only) => {
        fn read_only(&self) -> bool {
            self.$below.read_only()
        }
    };
}
