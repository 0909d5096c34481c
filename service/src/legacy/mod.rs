//! The legacy path: kernel VFS, FUSE, service. The kernel caches pages; names and attributes it asks for each time.
//!
//! What the rest of the service sees of it is small, so that another implementation of the protocol can take its place:
//! [`LegacyMount::start`], [`LegacyMount::end`], and the kernel's caches behind [`KernelCache`].

mod convert;
mod filesystem;
mod front;
mod listing;
mod mount;

pub use mount::{LegacyMount, MountError, detach_dead};

use crate::notify::KernelCache;
use fuser::{INodeNo, Notifier};
use std::io;

impl KernelCache for Notifier {
    fn invalidate(&self, number: u64, offset: i64, length: i64) -> io::Result<()> {
        self.inval_inode(INodeNo(number), offset, length)
    }

    fn store(&self, number: u64, offset: u64, bytes: &[u8]) -> io::Result<()> {
        Notifier::store(self, INodeNo(number), offset, bytes)
    }
}
