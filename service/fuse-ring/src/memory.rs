//! The memory of an entry: a memory file that is mapped twice.
//!
//! The kernel copies from and to addresses that it was told once. They are those of a [`Window`], which is never read or written
//! here; the entry works at a [`Desk`] with the same pages. A window can be switched to other pages: a thread that works at the
//! old desk keeps what is on it, whatever the kernel does from then on.

use crate::layout::HEADERS;
use poolfs_ipc::memory::{Mapping, create_sealed};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

pub const PAGE: usize = poolfs_ipc::memory::PAGE;

/// Where the data begins: behind the page of the headers, and one whose end is where a message's head is put before its data.
pub const PAYLOAD: usize = 2 * PAGE;
const _: () = assert!(HEADERS <= PAGE);

/// Behind the data: room for the answer to a message that fills it.
const ROOM: usize = PAGE;

fn length(payload_bytes: usize) -> usize {
    PAYLOAD + payload_bytes + ROOM
}

/// Memory for one entry.
pub fn file(payload_bytes: usize) -> io::Result<OwnedFd> {
    create_sealed(c"fuse-ring", length(payload_bytes)).map_err(|errno| io::Error::from_raw_os_error(errno.raw()))
}

fn mapped(file: &OwnedFd, payload_bytes: usize) -> io::Result<Mapping> {
    let mapped = Mapping::of_sealed(file, length(payload_bytes), true);
    mapped.map_err(|errno| io::Error::from_raw_os_error(errno.raw()))
}

/// The pages as the kernel sees them.
pub struct Window {
    mapping: ManuallyDrop<Mapping>,
    payload_bytes: usize,
    lent: AtomicBool,
}

impl Window {
    pub fn new(file: &OwnedFd, payload_bytes: usize) -> io::Result<Self> {
        let mapping = ManuallyDrop::new(mapped(file, payload_bytes)?);
        Ok(Self { mapping, payload_bytes, lent: AtomicBool::new(false) })
    }

    pub fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }

    /// Where the kernel finds headers and data. It may use them until [`Window::give_back`].
    pub fn lend(&self) -> [libc::iovec; 2] {
        self.lent.store(true, Ordering::Release);
        let base = self.mapping.base().as_ptr();
        let segment = |at, iov_len| libc::iovec { iov_base: base.wrapping_add(at).cast(), iov_len };
        [segment(0, HEADERS), segment(PAYLOAD, self.payload_bytes)]
    }

    /// The kernel does not use it any more.
    pub fn give_back(&self) {
        self.lent.store(false, Ordering::Release);
    }

    /// From here on the kernel sees the pages of `file`.
    pub fn turn_to(&self, file: &OwnedFd) -> io::Result<()> {
        let (base, length) = (self.mapping.base().as_ptr(), self.mapping.length());
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: the range is this value's own mapping, into which no reference points; what replaces it is as long.
        unsafe { mmap(base.cast(), length, access, flags, file, 0) }?;
        Ok(())
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if !*self.lent.get_mut() {
            // SAFETY: dropped nowhere else. Where the kernel may still write, the addresses stay taken for good instead.
            unsafe { ManuallyDrop::drop(&mut self.mapping) };
        }
    }
}

/// The pages as the entry sees them.
pub struct Desk {
    mapping: Mapping,
    payload_bytes: usize,
}

impl Desk {
    pub fn new(file: &OwnedFd, payload_bytes: usize) -> io::Result<Self> {
        Ok(Self { mapping: mapped(file, payload_bytes)?, payload_bytes })
    }

    pub fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }

    /// All of it.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is as long, and lives as long as `self`, from which alone references to it come. The kernel writes to its
        // pages only while the thread that has `self` is in a system call for the entry's ring.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.base().as_ptr(), self.mapping.length()) }
    }
}
