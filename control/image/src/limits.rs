//! Bounds on the cost of an image, and the interface for reporting progress while it is read.

use crate::{ImageError, Result};
use rustix::fs::StatVfs;
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
/// Most objects that are made before that: what one takes in the end (attributes that it inherits, say) only the filesystem knows.
const ASK_OBJECTS_MAX: u64 = 64;
/// An import leaves the last twentieth of a disk's bytes and inodes to others, or its last gigabyte, whichever is less.
const KEPT_SHARE: u64 = 20;
const KEPT_BYTES_MAX: u64 = 1 << 30;
/// As many as ext4 has for these bytes. XFS counts all that would fit on the disk.
const KEPT_INODES_MAX: u64 = KEPT_BYTES_MAX / (16 << 10);

/// A directory, a long symbolic link, the end of a file and attributes take whole blocks.
pub(crate) const BLOCK_BYTES: u64 = 4 << 10;
/// What a name and an inode take, wherever the filesystem has them: the longest name in a directory whose blocks are half full is 512 bytes.
pub(crate) const NAME_BYTES: u64 = 1 << 10;

/// The room on the disk of a directory, so that no image, however it is packed, fills it up.
#[derive(Debug)]
pub(crate) struct Room {
    path: PathBuf,
    /// Bytes that may be written before the disk is asked again.
    granted_bytes: u64,
    /// Objects that may be made before that.
    granted_objects: u64,
}

impl Room {
    pub(crate) fn of(path: &Path) -> Room {
        Room { path: path.to_path_buf(), granted_bytes: 0, granted_objects: 0 }
    }

    /// So many bytes of content are about to be written.
    pub(crate) fn take(&mut self, bytes: u64) -> Result<()> {
        self.take_with_objects(bytes, 0)
    }

    /// An object of whichever kind is about to be made. A block is taken for those that need none, too: what is taken in excess is granted
    /// again when the disk is asked.
    pub(crate) fn take_object(&mut self) -> Result<()> {
        self.take_with_objects(BLOCK_BYTES + NAME_BYTES, 1)
    }

    /// An object that is there is about to have another name.
    pub(crate) fn take_name(&mut self) -> Result<()> {
        self.take(NAME_BYTES)
    }

    /// These attributes are about to be set.
    pub(crate) fn take_attributes(&mut self, attributes: &[(String, Vec<u8>)]) -> Result<()> {
        let bytes: usize = attributes.iter().map(|(name, value)| name.len() + value.len()).sum();
        self.take((bytes as u64).next_multiple_of(BLOCK_BYTES))
    }

    fn take_with_objects(&mut self, bytes: u64, objects: u64) -> Result<()> {
        if self.granted_bytes < bytes || self.granted_objects < objects {
            let asked = rustix::fs::statvfs(&self.path);
            let disk = asked.map_err(|errno| ImageError::io("ask for room at", &self.path, errno))?;
            self.grant(&disk, bytes, objects)?;
        }
        self.granted_bytes -= bytes;
        self.granted_objects -= objects;
        Ok(())
    }

    /// Grant at least so much, if the disk has it beyond what is kept.
    fn grant(&mut self, disk: &StatVfs, bytes: u64, objects: u64) -> Result<()> {
        let left_bytes = disk.f_bavail.saturating_mul(disk.f_frsize);
        let kept_bytes = (disk.f_blocks.saturating_mul(disk.f_frsize) / KEPT_SHARE).min(KEPT_BYTES_MAX);
        // A cluster without a manager daemon does not say how large it is: it refuses what it has no room for.
        let (left_bytes, step) = if disk.f_blocks == 0 { (u64::MAX, u64::MAX) } else { (left_bytes, kept_bytes / 2) };
        let spare_bytes = self.spare("bytes", left_bytes, kept_bytes, bytes)?;
        // A filesystem that makes inodes as long as there are bytes says that it has none at all.
        let left_inodes = if disk.f_files == 0 { u64::MAX } else { disk.f_favail };
        let kept_inodes = (disk.f_files / KEPT_SHARE).min(KEPT_INODES_MAX);
        let spare_inodes = self.spare("inodes", left_inodes, kept_inodes, objects)?;
        self.granted_bytes = spare_bytes.min(step).min(ASK_BYTES_MAX).max(bytes);
        self.granted_objects = spare_inodes.min(ASK_OBJECTS_MAX).max(objects);
        Ok(())
    }

    /// What is left beyond what is kept, if that is as much as is wanted.
    fn spare(&self, what: &'static str, left: u64, kept: u64, wanted: u64) -> Result<u64> {
        let spare = left.checked_sub(kept).filter(|spare| *spare >= wanted);
        spare.ok_or_else(|| ImageError::NoRoom { path: self.path.clone(), what, left, kept })
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::StatVfsMountFlags;

    impl Room {
        /// Of a disk that cannot be asked.
        pub(crate) fn with(bytes: u64, objects: u64) -> Room {
            Room { path: PathBuf::from("/nowhere"), granted_bytes: bytes, granted_objects: objects }
        }

        /// Bytes and objects that are left.
        pub(crate) fn granted(&self) -> (u64, u64) {
            (self.granted_bytes, self.granted_objects)
        }
    }

    /// In blocks of 4 KiB.
    fn disk(blocks: u64, free_blocks: u64, inodes: u64, free_inodes: u64) -> StatVfs {
        StatVfs {
            f_bsize: 4096,
            f_frsize: 4096,
            f_blocks: blocks,
            f_bfree: free_blocks,
            f_bavail: free_blocks,
            f_files: inodes,
            f_ffree: free_inodes,
            f_favail: free_inodes,
            f_fsid: 0,
            f_flag: StatVfsMountFlags::empty(),
            f_namemax: 255,
        }
    }

    fn grant(disk: &StatVfs, bytes: u64, objects: u64) -> std::result::Result<(u64, u64), &'static str> {
        let mut room = Room::with(0, 0);
        match room.grant(disk, bytes, objects) {
            Ok(()) => Ok(room.granted()),
            Err(ImageError::NoRoom { what, .. }) => Err(what),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn a_twentieth_of_the_bytes_and_of_the_inodes_is_kept() {
        // 40,000 blocks: 2,000 of them are kept, and of as many inodes.
        let half = 1000 * 4096;
        assert_eq!(grant(&disk(40_000, 39_000, 40_000, 39_000), 1, 1), Ok((half, ASK_OBJECTS_MAX)));
        assert_eq!(grant(&disk(40_000, 2010, 40_000, 2010), 1, 1), Ok((10 * 4096, 10)), "no more than is left");
        assert_eq!(grant(&disk(40_000, 2001, 40_000, 2001), 4096, 1), Ok((4096, 1)), "the last");
        assert_eq!(grant(&disk(40_000, 2001, 40_000, 2001), 4097, 1), Err("bytes"));
        assert_eq!(grant(&disk(40_000, 39_000, 40_000, 2000), 4096, 1), Err("inodes"));
        assert_eq!(grant(&disk(40_000, 39_000, 40_000, 2000), 4096, 0), Ok((half, 0)), "content needs none");
        assert_eq!(grant(&disk(40_000, 39_000, 0, 0), 1, 1), Ok((half, ASK_OBJECTS_MAX)), "they are not bounded");
        assert_eq!(grant(&disk(0, 0, 0, 0), 1, 1), Ok((ASK_BYTES_MAX, ASK_OBJECTS_MAX)), "it does not say");
    }

    #[test]
    fn of_a_large_disk_a_gigabyte_is_kept() {
        let (terabyte, kept) = ((1 << 40) / 4096, KEPT_BYTES_MAX / 4096);
        assert_eq!(grant(&disk(terabyte, kept + 8192, 1 << 26, KEPT_INODES_MAX + 1), 1, 1), Ok((ASK_BYTES_MAX, 1)));
        assert_eq!(grant(&disk(terabyte, kept, 1 << 26, 1 << 25), 1, 1), Err("bytes"));
        assert_eq!(grant(&disk(terabyte, terabyte, 1 << 26, KEPT_INODES_MAX), 1, 1), Err("inodes"));
    }
}
