//! System calls that no safe crate offers: file handles, mount attributes, xattrs relative to a descriptor, starting write-back,
//! and per-thread umask and filesystem user. All `unsafe` code of the crate is here, except that of the rings.

use rustix::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use rustix::io::{Errno, Result};
use rustix::thread::{CapabilitiesSecureBits, capabilities_secure_bits, set_capabilities_secure_bits};
use std::ffi::{CStr, c_int, c_long, c_void};
use std::marker::PhantomData;

/// Longest file handle the kernel makes (MAX_HANDLE_SZ).
const HANDLE_BYTES_MAX: usize = 128;

/// A file's lasting name within its filesystem: type and opaque bytes, as the kernel gave them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FileHandle {
    kind: i32,
    bytes: Box<[u8]>,
}

impl FileHandle {
    pub(crate) fn into_parts(self) -> (i32, Vec<u8>) {
        (self.kind, self.bytes.into_vec())
    }

    /// Nothing for one that is too long to be the kernel's.
    pub(crate) fn of_parts((kind, bytes): &(i32, Vec<u8>)) -> Option<Self> {
        (bytes.len() <= HANDLE_BYTES_MAX).then(|| FileHandle { kind: *kind, bytes: bytes.as_slice().into() })
    }
}

/// `struct file_handle` with room for the longest one.
#[repr(C)]
struct RawHandle {
    handle_bytes: u32,
    handle_type: i32,
    f_handle: [u8; HANDLE_BYTES_MAX],
}

/// `struct mount_attr` of `mount_setattr`.
#[repr(C)]
struct MountAttributes {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

/// `struct xattr_args` of the `xattrat` family.
#[repr(C)]
struct XattrArguments {
    value: u64,
    size: u32,
    flags: u32,
}

// The `xattrat` family (Linux 6.13) has one number on every architecture; the libc crate does not name them yet.
const SYS_SETXATTRAT: c_long = 463;
const SYS_GETXATTRAT: c_long = 464;
const SYS_LISTXATTRAT: c_long = 465;
const SYS_REMOVEXATTRAT: c_long = 466;

fn checked(result: c_long) -> Result<c_long> {
    if result < 0 {
        let raw = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        return Err(Errno::from_raw_os_error(raw));
    }
    Ok(result)
}

/// The handle of the file behind `fd` (an `O_PATH` descriptor will do).
pub(crate) fn file_handle(fd: impl AsFd) -> Result<FileHandle> {
    let mut raw = RawHandle { handle_bytes: HANDLE_BYTES_MAX as u32, handle_type: 0, f_handle: [0; HANDLE_BYTES_MAX] };
    let mut mount_id: i32 = 0;
    // SAFETY: `raw` is a `struct file_handle` followed by the `handle_bytes` bytes it announces, the name is an empty C
    // string, and the kernel writes only into `raw` and `mount_id`, which both outlive the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            fd.as_fd().as_raw_fd(),
            c"".as_ptr(),
            &raw mut raw,
            &raw mut mount_id,
            libc::AT_EMPTY_PATH,
        )
    };
    checked(result)?;
    let bytes = raw.f_handle.get(..raw.handle_bytes as usize).ok_or(Errno::OVERFLOW)?;
    Ok(FileHandle { kind: raw.handle_type, bytes: bytes.into() })
}

/// Opens the file named by `handle`, on the mount of the open directory `mount`.
pub(crate) fn open_handle(mount: impl AsFd, handle: &FileHandle, flags: i32) -> Result<OwnedFd> {
    let mut raw = RawHandle {
        handle_bytes: handle.bytes.len() as u32,
        handle_type: handle.kind,
        f_handle: [0; HANDLE_BYTES_MAX],
    };
    raw.f_handle[..handle.bytes.len()].copy_from_slice(&handle.bytes);
    // SAFETY: `raw` is a complete `struct file_handle`, read by the kernel during the call only.
    let result = unsafe {
        libc::syscall(libc::SYS_open_by_handle_at, mount.as_fd().as_raw_fd(), &raw mut raw, flags | libc::O_CLOEXEC)
    };
    let fd = checked(result)? as i32;
    // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes the detached mount `tree` private, without access times, devices, set-id programs and symbolic links to follow,
/// and read-only if asked.
pub(crate) fn restrict_mount(tree: impl AsFd, read_only: bool) -> Result<()> {
    const RDONLY: u64 = 0x01;
    const NOSUID: u64 = 0x02;
    const NODEV: u64 = 0x04;
    const ATIME: u64 = 0x70;
    const NOATIME: u64 = 0x10;
    const NOSYMFOLLOW: u64 = 0x0020_0000;
    let attributes = MountAttributes {
        attr_set: NOSUID | NODEV | NOATIME | NOSYMFOLLOW | if read_only { RDONLY } else { 0 },
        attr_clr: ATIME,
        propagation: libc::MS_PRIVATE,
        userns_fd: 0,
    };
    // SAFETY: the name is an empty C string and `attributes` a `struct mount_attr` of the size told; both are only read.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<MountAttributes>(),
        )
    };
    checked(result).map(drop)
}

/// Gives the calling thread a working directory, root and umask of its own, if it still shares them with others.
pub(crate) fn own_thread_state() -> Result<()> {
    // SAFETY: only CLONE_FS is unshared. It touches no memory and no descriptor; working directory and root keep their
    // values, and no code relies on one thread's chdir or umask reaching another.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FS) }
}

/// Has the kernel begin to write what it has cached of a file, all of it, as it is now.
///
/// It waits only for pages that were being written before they were changed last: the kernel passes over those.
pub(crate) fn begin_write_back(file: impl AsFd) -> Result<()> {
    let begin = |flags| {
        // SAFETY: the call takes numbers only.
        let result = unsafe { libc::sync_file_range(file.as_fd().as_raw_fd(), 0, 0, flags) };
        checked(c_long::from(result)).map(drop)
    };
    begin(libc::SYNC_FILE_RANGE_WRITE)?;
    // Where the kernel does not tell (before Linux 6.5), there may be some.
    match dirty_pages(file.as_fd()) {
        Ok(0) => Ok(()),
        _ => begin(libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE),
    }
}

/// How many pages of a file the kernel has in its cache that are to be written and are not being written, or were changed meanwhile.
fn dirty_pages(file: impl AsFd) -> Result<u64> {
    /// `struct cachestat_range`: all of the file.
    const WHOLE: [u64; 2] = [0; 2];
    /// On every architecture; the crate for C's calls does not have it yet.
    const SYS_CACHESTAT: c_long = 451;
    // `struct cachestat`: cached, dirty, being written, and two that tell of evicted ones.
    let mut counts = [0u64; 5];
    // SAFETY: the kernel reads two numbers and writes five, into memory that holds as many.
    let result =
        unsafe { libc::syscall(SYS_CACHESTAT, file.as_fd().as_raw_fd(), WHOLE.as_ptr(), counts.as_mut_ptr(), 0) };
    checked(result).map(|_| counts[1])
}

/// As long as it is there, filesystems take the calling thread for another user's, with the capabilities that it has.
pub(crate) struct FilesystemUser {
    before: c_int,
    /// It belongs to its thread.
    _thread: PhantomData<*const ()>,
}

impl FilesystemUser {
    /// Becomes `user`; nothing where that would take capabilities away.
    pub(crate) fn new(user: u32) -> Option<Self> {
        thread_local! {
            static KEEPS_CAPABILITIES: bool = keeps_capabilities();
        }
        if !KEEPS_CAPABILITIES.with(|keeps| *keeps) {
            return None;
        }
        // SAFETY: it changes which user the calling thread is for filesystems, and touches no memory. The C library does not have
        // other threads follow.
        let before = unsafe { libc::setfsuid(user) };
        Some(Self { before, _thread: PhantomData })
    }
}

impl Drop for FilesystemUser {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { libc::setfsuid(self.before.cast_unsigned()) };
    }
}

/// Whether the calling thread keeps its capabilities when it becomes another user; sees to that, if it may.
fn keeps_capabilities() -> bool {
    let wanted = CapabilitiesSecureBits::NO_SETUID_FIXUP;
    let Ok(bits) = capabilities_secure_bits() else { return false };
    bits.contains(wanted) || set_capabilities_secure_bits(bits | wanted).is_ok()
}

/// `getxattrat`: the size of the value, which is in `value` if it fits.
pub(crate) fn getxattrat(dir: impl AsFd, path: &CStr, name: &CStr, value: &mut [u8]) -> Result<usize> {
    let arguments = XattrArguments { value: value.as_mut_ptr() as u64, size: value.len() as u32, flags: 0 };
    // SAFETY: both names are C strings, `arguments` names `value`, whose length it tells, as the only memory to write.
    let result = unsafe {
        libc::syscall(
            SYS_GETXATTRAT,
            dir.as_fd().as_raw_fd(),
            path.as_ptr(),
            0,
            name.as_ptr(),
            &raw const arguments,
            size_of::<XattrArguments>(),
        )
    };
    Ok(checked(result)? as usize)
}

/// `setxattrat`.
pub(crate) fn setxattrat(dir: impl AsFd, path: &CStr, name: &CStr, value: &[u8], flags: u32) -> Result<()> {
    let arguments = XattrArguments { value: value.as_ptr() as u64, size: value.len() as u32, flags };
    // SAFETY: both names are C strings; `arguments` and the `value` it names are only read during the call.
    let result = unsafe {
        libc::syscall(
            SYS_SETXATTRAT,
            dir.as_fd().as_raw_fd(),
            path.as_ptr(),
            0,
            name.as_ptr(),
            &raw const arguments,
            size_of::<XattrArguments>(),
        )
    };
    checked(result).map(drop)
}

/// `listxattrat`: the size of the list, which is in `list` if it fits.
pub(crate) fn listxattrat(dir: impl AsFd, path: &CStr, list: &mut [u8]) -> Result<usize> {
    // SAFETY: the path is a C string and the kernel writes at most `list.len()` bytes into `list`.
    let result = unsafe {
        libc::syscall(
            SYS_LISTXATTRAT,
            dir.as_fd().as_raw_fd(),
            path.as_ptr(),
            0,
            list.as_mut_ptr().cast::<c_void>(),
            list.len(),
        )
    };
    Ok(checked(result)? as usize)
}

/// `removexattrat`.
pub(crate) fn removexattrat(dir: impl AsFd, path: &CStr, name: &CStr) -> Result<()> {
    // SAFETY: both names are C strings that outlive the call.
    let result = unsafe { libc::syscall(SYS_REMOVEXATTRAT, dir.as_fd().as_raw_fd(), path.as_ptr(), 0, name.as_ptr()) };
    checked(result).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changed_while_it_was_being_written_is_being_written_again() {
        use std::os::unix::fs::FileExt;
        let folder = tempfile::tempdir().expect("a folder");
        let file = std::fs::File::create(folder.path().join("f")).expect("a file");
        if dirty_pages(&file) == Err(rustix::io::Errno::NOSYS) {
            return;
        }
        for round in 0..20 {
            file.write_all_at(&vec![round; 4 << 20], 0).expect("written");
            begin_write_back(&file).expect("begun");
            file.write_all_at(&vec![!round; 4 << 20], 0).expect("written");
            assert_ne!(dirty_pages(&file), Ok(0));
            begin_write_back(&file).expect("begun");
            assert_eq!(dirty_pages(&file), Ok(0), "round {round}");
        }
    }
}
