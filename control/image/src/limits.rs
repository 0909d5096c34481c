//! Bounds on the cost of an image, and the interface for reporting progress while it is read.

use crate::{ImageError, Result};
use std::path::{Path, PathBuf};

/// Bounds on one image.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most layers: as many as a union may have lower branches.
    pub layers: usize,
    /// Most bytes of one layer's uncompressed archive.
    pub layer_bytes: u64,
    /// Most members of one layer's archive.
    pub layer_members: u64,
    /// Most bytes of one JSON document.
    pub document_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { layers: 128, layer_bytes: 256 << 30, layer_members: 8 << 20, document_bytes: 8 << 20 }
    }
}

/// Most bytes that are written before the disk is asked again how much room it has.
const ASK_BYTES_MAX: u64 = 32 << 20;
/// An import leaves the last twentieth of a disk to others, or its last gigabyte, whichever is less.
const KEPT_SHARE: u64 = 20;
const KEPT_BYTES_MAX: u64 = 1 << 30;

/// The room on the disk of a directory, so that no image, however it is packed, fills it up.
#[derive(Debug)]
pub(crate) struct Room {
    path: PathBuf,
    /// Bytes that may be written before the disk is asked again.
    granted_bytes: u64,
}

impl Room {
    pub(crate) fn of(path: &Path) -> Room {
        Room { path: path.to_path_buf(), granted_bytes: 0 }
    }

    /// So many bytes are about to be written.
    pub(crate) fn take(&mut self, bytes: u64) -> Result<()> {
        if self.granted_bytes < bytes {
            let asked = rustix::fs::statvfs(&self.path);
            let disk = asked.map_err(|errno| ImageError::io("ask for room at", &self.path, errno))?;
            let left_bytes = disk.f_bavail.saturating_mul(disk.f_frsize);
            let kept_bytes = (disk.f_blocks.saturating_mul(disk.f_frsize) / KEPT_SHARE).min(KEPT_BYTES_MAX);
            if left_bytes < kept_bytes.saturating_add(bytes) {
                return Err(ImageError::NoRoom { path: self.path.clone(), left_bytes, kept_bytes });
            }
            self.granted_bytes = bytes.max((kept_bytes / 2).min(ASK_BYTES_MAX));
        }
        self.granted_bytes -= bytes;
        Ok(())
    }
}

/// Told while content is read.
pub trait Progress {
    /// Reading of something with so many bytes begins.
    fn begin(&mut self, what: &str, bytes: u64);
    /// So many bytes more were read.
    fn advance(&mut self, bytes: u64);
    /// The reading has ended.
    fn end(&mut self);
    /// Whether it should be given up.
    fn is_cancelled(&mut self) -> bool {
        false
    }
}

/// Nobody is told.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&mut self, _what: &str, _bytes: u64) {}
    fn advance(&mut self, _bytes: u64) {}
    fn end(&mut self) {}
}
