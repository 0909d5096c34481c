//! The service's end of the segments' tmpfs: the read-only clone for clients, huge pages, and the mutex that says that the
//! service lives.

use crate::memory::{HUGE_PAGE, Mapping};
use poolfs_types::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};
use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// Says that the service lives. Belongs to the thread that began it.
pub struct Life<'a> {
    mutex: *mut libc::pthread_mutex_t,
    _mapping: PhantomData<&'a Mapping>,
}

impl<'a> Life<'a> {
    pub(super) fn begin(mapping: &'a Mapping) -> Result<Self, Errno> {
        assert!(size_of::<libc::pthread_mutex_t>() <= 64 && mapping.length() >= 64);
        let mutex = mapping.base().as_ptr().cast::<libc::pthread_mutex_t>();
        let mut attributes = MaybeUninit::uninit();
        let attributes = attributes.as_mut_ptr();
        let made = |result: i32| if result == 0 { Ok(()) } else { Err(Errno::from_raw(result)) };
        // SAFETY: the mutex's place is inside the mapping, page-aligned, and no other thread of this process uses it:
        // clients can only read it.
        unsafe {
            made(libc::pthread_mutexattr_init(attributes))?;
            made(libc::pthread_mutexattr_setpshared(attributes, libc::PTHREAD_PROCESS_SHARED))?;
            made(libc::pthread_mutexattr_setrobust(attributes, libc::PTHREAD_MUTEX_ROBUST))?;
            made(libc::pthread_mutex_init(mutex, attributes))?;
            libc::pthread_mutexattr_destroy(attributes);
            made(libc::pthread_mutex_lock(mutex))?;
        }
        Ok(Self { mutex, _mapping: PhantomData })
    }
}

impl Drop for Life<'_> {
    fn drop(&mut self) {
        // SAFETY: locked by this thread, which the type cannot leave; the mapping is borrowed.
        let unlocked = unsafe { libc::pthread_mutex_unlock(self.mutex) };
        debug_assert_eq!(unlocked, 0);
    }
}

/// Has the kernel hold a part of a segment, which is whole huge pages long and all there, in huge pages: who has it mapped
/// needs one entry of the page table, and of the processor's copy of it, for each, and not 512. Nobody who reads or writes the
/// bytes meanwhile sees others; who touches them may wait for some hundred microseconds.
///
/// # Errors
/// `EINVAL` on kernels that cannot (before Linux 6.1) or for a range that is not aligned; `ENOMEM` and `EAGAIN` when it is not
/// possible now; else those of `mmap(2)`.
pub fn collapse(file: impl AsFd, offset: u64, length: usize) -> io::Result<()> {
    if length == 0 || !length.is_multiple_of(HUGE_PAGE) || !offset.is_multiple_of(HUGE_PAGE as u64) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mapping =
        Mapping::of_range(file, offset, length, true).map_err(|errno| io::Error::from_raw_os_error(errno.raw()))?;
    // SAFETY: the range is the mapping; the advice leaves its bytes alone.
    let result = unsafe { libc::madvise(mapping.base().as_ptr().cast(), length, libc::MADV_COLLAPSE) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether a file that is open here to be read and written, by this descriptor only, is open or mapped by anybody else: then the
/// kernel gives nobody a lease to be the only one who has it. Who opens it at this very moment may wait until this returns.
///
/// # Errors
/// `EINVAL` where the kernel gives no leases at all; else those of `fcntl(2)`.
pub fn is_used_by_others(file: impl AsFd) -> io::Result<bool> {
    const F_SETSIG: libc::c_int = 10;
    let descriptor = file.as_fd().as_raw_fd();
    // Whoever opens it meanwhile has a signal sent here, by which nothing happens; the usual one would end the process.
    for (command, argument) in [(F_SETSIG, libc::SIGURG), (libc::F_SETLEASE, libc::F_WRLCK)] {
        // SAFETY: commands with a number as argument, on a descriptor that is open.
        if unsafe { libc::fcntl(descriptor, command, argument) } != 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(true) } else { Err(error) };
        }
    }
    // SAFETY: as above.
    let given_back = unsafe { libc::fcntl(descriptor, libc::F_SETLEASE, libc::F_UNLCK) };
    if given_back == 0 { Ok(false) } else { Err(io::Error::last_os_error()) }
}

/// A read-only way to the filesystem of a mount: what is opened through it cannot be opened for writing again, by nobody.
///
/// # Errors
/// Those of `open_tree(2)` and `mount_setattr(2)`: `EINVAL` on kernels that do not clone a mount which is nowhere.
pub fn read_only_clone(root: impl AsFd) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let clone = open_tree(root.as_fd(), c"", flags)?;
    let attributes = libc::mount_attr { attr_set: libc::MOUNT_ATTR_RDONLY, attr_clr: 0, propagation: 0, userns_fd: 0 };
    // SAFETY: the kernel reads the empty path and one `mount_attr`, of the size that is told.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            clone.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 { Ok(clone) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn who_has_a_file_open_or_mapped_is_told() {
        let folder = std::env::temp_dir().join(format!("poolfs-used-{}", std::process::id()));
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&folder).expect("a file");
        file.set_len(4096).expect("sized");
        let is_used = || is_used_by_others(&file).expect("told");
        assert!(!is_used());
        let reader = File::open(&folder).expect("there");
        std::fs::remove_file(&folder).expect("removed");
        assert!(is_used());
        let mapping = Mapping::of_segment(&reader, 4096, false).expect("mapped");
        drop(reader);
        assert!(is_used(), "it is mapped");
        drop(mapping);
        assert!(!is_used() && !is_used());
    }
}
