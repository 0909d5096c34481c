//! Where a read puts its bytes: memory of the reader, or memory that it shares with others.

use crate::{Error, Result};
use poolfs_types::Errno;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Where a read puts its bytes. A slice is one.
///
/// Memory that others may change at any moment, a client's for instance, cannot be lent as a slice. So such a target comes with a buffer that is the
/// reader's alone, as long as the target itself: bytes are made there and then put into the target, but for what comes from a file, which
/// the kernel puts there at once.
pub trait ReadTarget {
    /// The buffer. What is in it says nothing of the target.
    fn buffer(&mut self) -> &mut [u8];

    /// Puts this part of the buffer into the target, at the same place.
    ///
    /// # Errors
    /// Those of the target, which knows more of them: the read is to end with it.
    fn put(&mut self, range: Range<usize>) -> Result<()>;

    /// Puts what `file` has from `offset` on there; zeros behind its end.
    ///
    /// # Errors
    /// Those of the target, as above; `EIO` when the file cannot be read.
    fn put_file(&mut self, range: Range<usize>, file: &File, offset: u64) -> Result<()>;
}

/// A part of a target.
pub struct PartOf<'a> {
    target: &'a mut dyn ReadTarget,
    range: Range<usize>,
}

impl<'a> PartOf<'a> {
    /// This part of it.
    #[must_use]
    pub fn new(target: &'a mut dyn ReadTarget, range: Range<usize>) -> Self {
        Self { target, range }
    }

    fn of_whole(&self, range: &Range<usize>) -> Range<usize> {
        self.range.start + range.start..self.range.start + range.end
    }
}

impl ReadTarget for PartOf<'_> {
    fn buffer(&mut self) -> &mut [u8] {
        &mut self.target.buffer()[self.range.clone()]
    }

    fn put(&mut self, range: Range<usize>) -> Result<()> {
        self.target.put(self.of_whole(&range))
    }

    fn put_file(&mut self, range: Range<usize>, file: &File, offset: u64) -> Result<()> {
        self.target.put_file(self.of_whole(&range), file, offset)
    }
}

/// Fills `bytes` with what `file` has from `offset` on, and with zeros behind its end.
///
/// # Errors
/// Those of reading, but for interruptions.
pub fn read_with_zeros(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes[done..].fill(0);
    Ok(())
}

/// The answer to a read of a file of a layer's own that cannot be read.
#[must_use]
pub fn unreadable_file(error: &io::Error) -> Error {
    Error::new(Errno::EIO, format!("a file with cached content cannot be read: {error}"))
}

impl ReadTarget for &mut [u8] {
    fn buffer(&mut self) -> &mut [u8] {
        self
    }

    fn put(&mut self, _: Range<usize>) -> Result<()> {
        Ok(())
    }

    fn put_file(&mut self, range: Range<usize>, file: &File, offset: u64) -> Result<()> {
        read_with_zeros(file, &mut self[range], offset).map_err(|error| unreadable_file(&error))
    }
}
