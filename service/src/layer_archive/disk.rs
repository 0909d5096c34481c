//! The file of an archive, which leaves some of its disk to others: programs can make files that are as large as they like in an archive, and
//! take no room of theirs.

use std::fs::File;
use std::io::{self, Write};

/// An archive leaves the last twentieth of a disk to others, or its last gigabyte, whichever is less: as an image that is imported.
const KEPT_SHARE: u64 = 20;
const KEPT_BYTES_MAX: u64 = 1 << 30;

/// Most bytes that are written before the disk is asked again how much room it has.
const ASK_BYTES_MAX: u64 = 32 << 20;

pub(super) struct SparingFile {
    file: File,
    /// Bytes that may be written before the disk is asked again.
    granted_bytes: u64,
}

impl SparingFile {
    pub(super) fn new(file: File) -> Self {
        Self { file, granted_bytes: 0 }
    }

    /// So many bytes are about to be written.
    fn take(&mut self, bytes: u64) -> io::Result<()> {
        if self.granted_bytes < bytes {
            let disk = rustix::fs::fstatvfs(&self.file)?;
            let left_bytes = disk.f_bavail.saturating_mul(disk.f_frsize);
            let kept_bytes = (disk.f_blocks.saturating_mul(disk.f_frsize) / KEPT_SHARE).min(KEPT_BYTES_MAX);
            if left_bytes < kept_bytes.saturating_add(bytes) {
                let cause = format!(
                    "only {left_bytes} bytes are left on its disk, and it leaves {kept_bytes} bytes to others; make room there, or use another \
                     --state directory"
                );
                return Err(io::Error::new(io::ErrorKind::StorageFull, cause));
            }
            self.granted_bytes = bytes.max((kept_bytes / 2).min(ASK_BYTES_MAX));
        }
        self.granted_bytes -= bytes;
        Ok(())
    }
}

impl Write for SparingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.take(bytes.len() as u64)?;
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
