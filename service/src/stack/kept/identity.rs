//! Which directory of the host an upper branch is: noted with what a service keeps of it, so that a mark that was copied elsewhere
//! leads to nothing.
//!
//! ```text
//! 8 bytes  PFBRNCH1
//! u64      number of the filesystem: its own, or its device's where it has none
//! u64      inode
//! i64, u32 when the directory was made: seconds, nanoseconds
//! u32      1: that is known, else 0
//!          path
//! ```
//! Numbers are little-endian.

use poolfs_libservice::types::Timestamp;
use rustix::fd::AsFd;
use rustix::fs::{AtFlags, StatxFlags, fstat, fstatvfs, statx};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"PFBRNCH1";
const HEADER_BYTES: usize = 40;

/// What tells a directory from its copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BranchIdentity {
    filesystem: u64,
    inode: u64,
    born: Option<Timestamp>,
    pub(super) path: PathBuf,
}

/// Whether a directory is the one that was noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kinship {
    /// It is.
    Same,
    /// It has its number and was made when it was, on another filesystem: the same one on another device, or a copy of that.
    Unclear,
    /// It is not.
    Other,
}

/// When an open file or directory was made, where the filesystem says that.
pub(super) fn born(file: impl AsFd) -> rustix::io::Result<Option<Timestamp>> {
    let status = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME)?;
    let made = status.stx_btime;
    let is_told = status.stx_mask & StatxFlags::BTIME.bits() != 0;
    Ok(is_told.then_some(Timestamp { seconds: made.tv_sec, nanoseconds: made.tv_nsec }))
}

impl BranchIdentity {
    /// That of an open directory, which `path` leads to now.
    pub(super) fn of(directory: impl AsFd, path: &Path) -> rustix::io::Result<Self> {
        let status = fstat(&directory)?;
        let filesystem = match fstatvfs(&directory)?.f_fsid {
            0 => status.st_dev,
            number => number,
        };
        Ok(Self { filesystem, inode: status.st_ino, born: born(directory)?, path: path.to_owned() })
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let born = self.born.unwrap_or_default();
        [
            MAGIC,
            &self.filesystem.to_le_bytes()[..],
            &self.inode.to_le_bytes(),
            &born.seconds.to_le_bytes(),
            &born.nanoseconds.to_le_bytes(),
            &u32::from(self.born.is_some()).to_le_bytes(),
            self.path.as_os_str().as_bytes(),
        ]
        .concat()
    }

    /// Nothing for what another release has noted.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (header, path) = bytes.split_first_chunk::<HEADER_BYTES>()?;
        let word = |at: usize| Some(u64::from_le_bytes(*header.get(at..)?.first_chunk()?));
        let half = |at: usize| Some(u32::from_le_bytes(*header.get(at..)?.first_chunk()?));
        if !header.starts_with(MAGIC) {
            return None;
        }
        let made = Timestamp { seconds: word(24)?.cast_signed(), nanoseconds: half(32)? };
        Some(Self {
            filesystem: word(8)?,
            inode: word(16)?,
            born: (half(36)? == 1).then_some(made),
            path: PathBuf::from(OsString::from_vec(path.to_vec())),
        })
    }

    /// Whether `other` is the same directory, wherever it is found.
    pub(super) fn compare(&self, other: &Self) -> Kinship {
        let is_made_with = self.born.is_none() || other.born.is_none() || self.born == other.born;
        match (self.inode == other.inode && is_made_with, self.filesystem == other.filesystem) {
            (true, true) => Kinship::Same,
            (true, false) => Kinship::Unclear,
            (false, _) => Kinship::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_known_again_and_its_copies_are_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let identity = |name: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(&path).expect("made");
            BranchIdentity::of(std::fs::File::open(&path).expect("opened"), &path).expect("known")
        };
        let one = identity("one");
        let noted = BranchIdentity::from_bytes(&one.to_bytes()).expect("read");
        assert_eq!(noted, one);
        std::fs::rename(folder.path().join("one"), folder.path().join("moved")).expect("moved");
        assert_eq!(noted.compare(&identity("moved")), Kinship::Same);
        assert_eq!(noted.compare(&identity("two")), Kinship::Other);
        let later = one.born.map(|born| Timestamp { seconds: born.seconds + 1, ..born });
        assert!(later.is_none() || noted.compare(&BranchIdentity { born: later, ..one.clone() }) == Kinship::Other);
        let elsewhere = BranchIdentity { filesystem: !one.filesystem, ..one.clone() };
        assert_eq!(noted.compare(&elsewhere), Kinship::Unclear);
        for wrong in [&b"/the/path/of/an/older/release/that/is/long/enough"[..], b"", &one.to_bytes()[..39]] {
            assert_eq!(BranchIdentity::from_bytes(wrong), None);
        }
    }
}
