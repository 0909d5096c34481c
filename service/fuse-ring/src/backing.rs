//! FUSE passthrough backing files: files that the kernel maps and reads in place of those of a mount.

use rustix::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ffi::c_ulong;
use std::io;

/// `FUSE_DEV_IOC_BACKING_OPEN` and `FUSE_DEV_IOC_BACKING_CLOSE`.
const OPEN: c_ulong = write_ioctl(1, size_of::<BackingMap>());
const CLOSE: c_ulong = write_ioctl(2, size_of::<u32>());

/// `struct fuse_backing_map`.
#[repr(C)]
struct BackingMap {
    file: i32,
    flags: u32,
    padding: u64,
}

const fn write_ioctl(number: c_ulong, bytes: usize) -> c_ulong {
    const WRITE: c_ulong = 1;
    const FUSE: c_ulong = 229;
    WRITE << 30 | (bytes as c_ulong) << 16 | FUSE << 8 | number
}

/// Gives the connection of `device` a file, and answers the number by which it is named from then on. The descriptor may be closed.
///
/// # Errors
/// `EPERM` when that was not agreed on, or without the rights of the host's root; `ELOOP` for a file that itself is in a stack of
/// filesystems.
pub fn open_backing(device: impl AsFd, file: impl AsFd) -> io::Result<u32> {
    let map = BackingMap { file: file.as_fd().as_raw_fd(), flags: 0, padding: 0 };
    control(device.as_fd(), OPEN, &raw const map as c_ulong)
}

/// Takes a file back by its number. What is open or mapped of it stays.
///
/// # Errors
/// `ENOENT` when there is none of this number.
pub fn close_backing(device: impl AsFd, id: u32) -> io::Result<()> {
    control(device.as_fd(), CLOSE, &raw const id as c_ulong).map(drop)
}

fn control(device: BorrowedFd<'_>, command: c_ulong, argument: c_ulong) -> io::Result<u32> {
    // SAFETY: both commands only read what the argument points to, which is of the size that they name and outlives the call.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), command, argument) };
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_are_those_of_the_kernel() {
        assert_eq!((OPEN, CLOSE), (0x4010_e501, 0x4004_e502));
    }

    #[test]
    fn what_is_no_connection_refuses() {
        let file = std::fs::File::open("/dev/null").expect("there");
        assert!(open_backing(&file, &file).is_err() && close_backing(&file, 1).is_err());
    }
}
