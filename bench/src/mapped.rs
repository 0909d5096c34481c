//! A memory-mapped file: an upper bound for every way of reading it.

use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{copy_nonoverlapping, null_mut};

/// A whole file, mapped.
pub struct Mapped {
    base: *mut u8,
    length: usize,
}

impl Mapped {
    /// Maps the file, which nobody makes shorter meanwhile; `at_once` with all its pages. By libc's function, as programs do: a
    /// library may have a way of its own.
    pub fn new(file: &File, at_once: bool) -> Result<Self> {
        let length = usize::try_from(file.metadata()?.len())?;
        let flags = if at_once { libc::MAP_SHARED | libc::MAP_POPULATE } else { libc::MAP_PRIVATE };
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let base = unsafe { libc::mmap(null_mut(), length, libc::PROT_READ, flags, file.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).context("cannot map the file");
        }
        Ok(Self { base: base.cast(), length })
    }

    /// Copies what is at `offset`.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let offset = usize::try_from(offset)?;
        ensure!(offset.checked_add(buffer.len()).is_some_and(|end| end <= self.length), "beyond the end of the file");
        // SAFETY: the range is inside of the mapping, which lives as long as this value and which only the kernel gave; the
        // buffer is memory of its own, and bytes that another process changes meanwhile are bytes all the same.
        unsafe { copy_nonoverlapping(self.base.add(offset), buffer.as_mut_ptr(), buffer.len()) };
        Ok(())
    }

    /// Its length in bytes.
    pub fn length(&self) -> u64 {
        self.length as u64
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by this value, and nothing borrowed from it is left.
        let unmapped = unsafe { libc::munmap(self.base.cast(), self.length) };
        debug_assert_eq!(unmapped, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn what_is_mapped_is_read_and_no_more() {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(b"0123456789").expect("written");
        let mapped = Mapped::new(&file, true).expect("mapped");
        let mut buffer = [0; 4];
        mapped.read(6, &mut buffer).expect("inside");
        assert_eq!(&buffer, b"6789");
        for beyond in [7, u64::MAX] {
            assert!(mapped.read(beyond, &mut buffer).is_err(), "{beyond}");
        }
    }
}
