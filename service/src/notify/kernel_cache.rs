//! The kernel's side of a mount, and the threads that tell it something.

use crate::bare_threads;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::{io, thread};

/// The kernel's side of a mount, as far as notifications go.
pub trait KernelCache: Send + Sync {
    /// Whether [`KernelCache::expire_name`] is supported.
    fn expires_names(&self) -> bool;

    /// Drops the attributes and access lists of `number`; whether it knows the node. Never waits.
    ///
    /// # Errors
    /// Those of the device; an unknown node is none.
    fn drop_attributes(&self, number: u64) -> io::Result<bool>;

    /// Drops the pages of `number` that hold the byte range (a negative length: to the end), and its attributes.
    ///
    /// # Errors
    /// Those of the device; an unknown node is none.
    fn invalidate(&self, number: u64, offset: i64, length: i64) -> io::Result<()>;

    /// Puts bytes into the kernel's cache, which raises the size it knows.
    ///
    /// # Errors
    /// Those of the device; an unknown node is none.
    fn store(&self, number: u64, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Drops a name of the directory `parent`, and unmounts what is mounted on it or below, in every mount namespace.
    ///
    /// # Errors
    /// Those of the device; an unknown name is none.
    fn invalidate_name(&self, parent: u64, name: &[u8]) -> io::Result<()>;

    /// Has a name of the directory `parent` looked up at its next use. What is mounted on it stays.
    ///
    /// # Errors
    /// Those of the device; [`io::ErrorKind::Unsupported`] before Linux 6.2; an unknown name is none.
    fn expire_name(&self, parent: u64, name: &[u8]) -> io::Result<()>;

    /// Comes back when the kernel's lock of a file has been free: the answers to SETATTR and LINK that were given before are
    /// applied then. A program can keep it for any time.
    ///
    /// # Errors
    /// Those of the device; an unknown node is none.
    fn await_unlocked(&self, number: u64) -> io::Result<()> {
        let _ = number;
        Ok(())
    }

    /// The descriptor by which it is told, where there is one, and how that is done by a copy of it: names are told and files are waited for so.
    fn by_descriptor(&self) -> Option<(BorrowedFd<'_>, ByDescriptor)> {
        None
    }

    /// Asks the kernel to forget those of these nodes that nobody uses.
    ///
    /// # Errors
    /// Those of the device; `EINVAL` before Linux 6.18; unknown nodes are none.
    fn prune(&self, numbers: &[u64]) -> io::Result<()>;

    /// Has the kernel forget all nodes of the mount that nobody uses, as one before Linux 6.18 can.
    ///
    /// # Errors
    /// Those of the mount; [`io::ErrorKind::Unsupported`] where there is no way.
    fn forget_unused(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Whether files can be given to it that it maps and reads in place of the mount's own, and that it lets go when asked to forget
    /// theirs.
    fn takes_backings(&self) -> bool {
        false
    }

    /// Gives it such a file; the number by which it is named from then on.
    ///
    /// # Errors
    /// Those of the device.
    fn open_backing(&self, file: &OwnedFd) -> io::Result<u32> {
        let _ = file;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Takes it back, but for what is open or mapped.
    ///
    /// # Errors
    /// Those of the device.
    fn close_backing(&self, id: u32) -> io::Result<()> {
        let _ = id;
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Tells the kernel by this copy of a descriptor.
pub type ByDescriptor = Box<dyn FnOnce(OwnedFd) -> Box<dyn KernelCache> + Send>;

/// What a thread does with the way to the kernel.
pub(super) type KernelWork = Box<dyn FnOnce(&dyn KernelCache) + Send>;

/// Starts a thread.
pub(super) fn spawn(kernel: &Arc<dyn KernelCache>, name: String, work: KernelWork) -> io::Result<()> {
    let kernel = Arc::clone(kernel);
    thread::Builder::new().name(name).spawn(move || work(&*kernel)).map(drop)
}

/// Starts a thread that the kernel may keep for any time: of the service's descriptors it has that of the kernel alone.
pub(super) fn spawn_bare(kernel: &Arc<dyn KernelCache>, name: String, work: KernelWork) -> io::Result<()> {
    match kernel.by_descriptor() {
        Some((descriptor, by)) => bare_threads::spawn(name, descriptor, move |descriptor| work(&*by(descriptor))),
        None => spawn(kernel, name, work),
    }
}
