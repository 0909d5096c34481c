//! One open regular file: its flags, and the descriptors by which it is read and written.

use crate::descriptors::{OwnDescriptors, Slot};
use crate::nodes::Node;
use crate::transfer::Direct;
use poolfs_libservice::{Result, fail};
use poolfs_types::{AccessMode, Errno, OpenFlags};
use rustix::fd::OwnedFd;
use rustix::fs::OFlags;
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// One open file.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) node: Arc<Node>,
    pub(crate) flags: OpenFlags,
    pub(crate) opened: Arc<Slot<Opened>>,
    /// The descriptor of a file that was opened as it was made: its node may have it as well.
    made: Weak<OwnedFd>,
    /// Held while the description's position matters: it tells where an append went.
    pub(crate) position: Mutex<()>,
}

/// Its descriptors. A file that was closed meanwhile is opened again by its node.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) file: Arc<OwnedFd>,
    pub(crate) direct: OnceLock<Option<Direct>>,
}

impl Opened {
    pub(crate) fn new(file: Arc<OwnedFd>) -> Self {
        Self { file, direct: OnceLock::new() }
    }
}

/// The `O_*` bits that a descriptor of the backing file gets: access mode and synchrony. `O_APPEND` is not among them: appends
/// say so one by one, because the layer has to know where they went.
pub(crate) fn backing_flags(flags: OpenFlags) -> OFlags {
    let access = match flags.access() {
        AccessMode::Read => OFlags::RDONLY,
        AccessMode::Write => OFlags::WRONLY,
        AccessMode::ReadWrite => OFlags::RDWR,
    };
    let sync = flags & (OpenFlags::DATA_SYNC | OpenFlags::FILE_SYNC);
    access | OFlags::from_bits_retain(sync.bits())
}

impl OpenFile {
    pub(crate) fn new(node: Arc<Node>, flags: OpenFlags, file: OwnedFd, descriptors: &OwnDescriptors) -> Self {
        Self { made: Weak::new(), ..Self::of_new(node, flags, Arc::new(file), descriptors) }
    }

    /// A file that was opened as it was made, by `file`.
    pub(crate) fn of_new(node: Arc<Node>, flags: OpenFlags, file: Arc<OwnedFd>, descriptors: &OwnDescriptors) -> Self {
        let opened = Slot::new();
        let made = Arc::downgrade(&file);
        opened.put(descriptors, Arc::new(Opened::new(file)));
        Self { node, flags, opened, made, position: Mutex::new(()) }
    }

    /// It is closed: its node goes on without its descriptor.
    pub(crate) fn part(&self) {
        self.node.part_with(&self.made);
    }

    pub(crate) fn readable(&self) -> Result<&Self> {
        if self.flags.readable() { Ok(self) } else { fail(Errno::EBADF) }
    }

    pub(crate) fn writable(&self) -> Result<&Self> {
        if self.flags.writable() { Ok(self) } else { fail(Errno::EBADF) }
    }
}
