//! Filter layers: they pass every call on to the layer below, except for the calls that they define themselves.

use crate::{
    Coherence, DirectoryEntry, Durability, Entry, Libservice, NameChange, ReadTarget, Result, SharedContent, Upcalls,
    Written,
};
use poolfs_types::{
    AllocateMode, Attributes, Caller, FileSystemStatistics, FileType, HandleId, Name, NodeId, OpenFlags, RenameFlags,
    SeekTo, SetAttributes, XattrFlags,
};
use std::ops::{ControlFlow, Range};
use std::sync::Weak;

/// Declares [`Operation`] and [`Filter`], and makes each filter a [`Libservice`], from the methods of that trait. Those under `asked` have
/// the caller as their first argument; those under `infallible` are called whatever [`Filter::enter`] answers.
macro_rules! filter {
    (
        asked { $($asked:ident: fn $asked_name:ident($($asked_argument:ident: $asked_type:ty),*) -> $asked_result:ty;)* }
        fallible { $($operation:ident: fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty;)* }
        infallible { $($sure:ident: fn $sure_name:ident($($sure_argument:ident: $sure_type:ty),*) $(-> $sure_result:ty)?;)* }
    ) => {
        /// A method of [`Libservice`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Operation {
            $(#[doc = concat!("[`Libservice::", stringify!($asked_name), "`]")] $asked,)*
            $(#[doc = concat!("[`Libservice::", stringify!($name), "`]")] $operation,)*
            $(#[doc = concat!("[`Libservice::", stringify!($sure_name), "`]")] $sure,)*
        }

        impl Operation {
            /// All of them, in their order.
            pub const ALL: &[Self] = &[$(Self::$asked,)* $(Self::$operation,)* $(Self::$sure,)*];

            /// The method's name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$asked => stringify!($asked_name),)*
                    $(Self::$operation => stringify!($name),)*
                    $(Self::$sure => stringify!($sure_name),)*
                }
            }
        }

        /// A layer over another, to which it passes on every call that it does not define itself.
        ///
        /// Every method passes on, also those that [`Libservice`] makes of others: `write_pieces` does not come by the filter's `write`. Reads
        /// alone come by one method, `read_into`. A filter that changes what is written defines `write`, `write_pieces` and `copy_range`; one
        /// that changes how names are removed, `unlink` and `unlink_known`; one that changes how content becomes durable, `fsync`,
        /// `flush_range` and `write_before_names`.
        pub trait Filter: Send + Sync {
            /// The layer below.
            fn below(&self) -> &dyn Libservice;

            /// Called before every call, also one that the filter defines. What it returns is dropped after the call.
            ///
            /// # Errors
            /// Whatever the call is to fail with instead of being made; disregarded for calls that do not fail.
            #[inline]
            fn enter(&self, operation: Operation) -> Result<impl Sized> {
                let _ = operation;
                Ok(())
            }

            /// Who asks the layer below where a call is passed on.
            #[inline]
            fn asks_as(&self, caller: &Caller) -> Caller {
                *caller
            }

            $(
                #[doc = concat!("[`Libservice::", stringify!($asked_name), "`]")]
                ///
                /// # Errors
                /// Those of the layer below.
                #[inline]
                fn $asked_name(&self, caller: &Caller, $($asked_argument: $asked_type),*) -> $asked_result {
                    self.below().$asked_name(&self.asks_as(caller), $($asked_argument),*)
                }
            )*
            $(
                #[doc = concat!("[`Libservice::", stringify!($name), "`]")]
                ///
                /// # Errors
                /// Those of the layer below.
                #[inline]
                fn $name(&self, $($argument: $type),*) -> $result {
                    self.below().$name($($argument),*)
                }
            )*
            $(
                #[doc = concat!("[`Libservice::", stringify!($sure_name), "`]")]
                #[inline]
                fn $sure_name(&self, $($sure_argument: $sure_type),*) $(-> $sure_result)? {
                    self.below().$sure_name($($sure_argument),*)
                }
            )*
        }

        impl<T: Filter> Libservice for T {
            fn read(&self, caller: &Caller, handle: HandleId, offset: u64, mut buffer: &mut [u8]) -> Result<usize> {
                Libservice::read_into(self, caller, handle, offset, &mut buffer)
            }

            $(
                fn $asked_name(&self, caller: &Caller, $($asked_argument: $asked_type),*) -> $asked_result {
                    let _entered = self.enter(Operation::$asked)?;
                    Filter::$asked_name(self, caller, $($asked_argument),*)
                }
            )*
            $(
                fn $name(&self, $($argument: $type),*) -> $result {
                    let _entered = self.enter(Operation::$operation)?;
                    Filter::$name(self, $($argument),*)
                }
            )*
            $(
                fn $sure_name(&self, $($sure_argument: $sure_type),*) $(-> $sure_result)? {
                    let _entered = self.enter(Operation::$sure);
                    Filter::$sure_name(self, $($sure_argument),*)
                }
            )*
        }
    };
}

filter! {
    asked {
        Lookup: fn lookup(parent: NodeId, name: Name<'_>) -> Result<Entry>;
        Getattr: fn getattr(node: NodeId) -> Result<Attributes>;
        Setattr: fn setattr(node: NodeId, changes: &SetAttributes, handle: Option<HandleId>) -> Result<Attributes>;
        Readlink: fn readlink(node: NodeId) -> Result<Vec<u8>>;
        Create: fn create(parent: NodeId, name: Name<'_>, permissions: u32, flags: OpenFlags) -> Result<(Entry, HandleId)>;
        Tmpfile: fn tmpfile(parent: NodeId, permissions: u32, flags: OpenFlags) -> Result<(Entry, HandleId)>;
        Mknod: fn mknod(parent: NodeId, name: Name<'_>, file_type: FileType, permissions: u32, device: u32) -> Result<Entry>;
        Mkdir: fn mkdir(parent: NodeId, name: Name<'_>, permissions: u32) -> Result<Entry>;
        Symlink: fn symlink(parent: NodeId, name: Name<'_>, target: &[u8]) -> Result<Entry>;
        Link: fn link(node: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry>;
        Unlink: fn unlink(parent: NodeId, name: Name<'_>) -> Result<()>;
        UnlinkKnown: fn unlink_known(parent: NodeId, name: Name<'_>, victim: NodeId, is_last: Option<bool>) -> Result<()>;
        Rmdir: fn rmdir(parent: NodeId, name: Name<'_>) -> Result<()>;
        Rename: fn rename(parent: NodeId, name: Name<'_>, new_parent: NodeId, new_name: Name<'_>, flags: RenameFlags) -> Result<()>;
        Open: fn open(node: NodeId, flags: OpenFlags) -> Result<HandleId>;
        ReadInto: fn read_into(handle: HandleId, offset: u64, target: &mut dyn ReadTarget) -> Result<usize>;
        Write: fn write(handle: HandleId, offset: u64, data: &[u8]) -> Result<Written>;
        WritePieces: fn write_pieces(handle: HandleId, pieces: &[(u64, &[u8])]) -> Result<()>;
        Fallocate: fn fallocate(handle: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()>;
        Seek: fn seek(handle: HandleId, offset: u64, to: SeekTo) -> Result<u64>;
        Fsync: fn fsync(handle: HandleId, durability: Durability) -> Result<()>;
        Flush: fn flush(handle: HandleId) -> Result<()>;
        Opendir: fn opendir(node: NodeId) -> Result<HandleId>;
        Readdir: fn readdir(handle: HandleId, cookie: u64, visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>) -> Result<()>;
        Getxattr: fn getxattr(node: NodeId, name: &[u8]) -> Result<Vec<u8>>;
        Setxattr: fn setxattr(node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()>;
        Listxattr: fn listxattr(node: NodeId) -> Result<Vec<Vec<u8>>>;
        Removexattr: fn removexattr(node: NodeId, name: &[u8]) -> Result<()>;
        Statfs: fn statfs(node: NodeId) -> Result<FileSystemStatistics>;
        FlushRange: fn flush_range(handle: HandleId, range: Range<u64>) -> Result<()>;
        WriteBeforeNames: fn write_before_names(node: NodeId, change: NameChange) -> Result<()>;
        Hold: fn hold(handle: HandleId, range: Range<u64>, held: bool) -> Result<()>;
        CopyRange: fn copy_range(source: HandleId, source_offset: u64, target: HandleId, target_offset: u64, length: u64) -> Result<u64>;
    }
    fallible {
        Sync: fn sync() -> Result<()>;
        StoreDeferred: fn store_deferred(node: NodeId) -> Result<()>;
    }
    infallible {
        Forget: fn forget(node: NodeId, count: u64);
        Release: fn release(handle: HandleId);
        Attach: fn attach(above: Weak<dyn Upcalls>) -> Coherence;
        Defers: fn defers() -> bool;
        ReadOnly: fn read_only() -> bool;
        SharedContent: fn shared_content() -> Option<&dyn SharedContent>;
    }
}
