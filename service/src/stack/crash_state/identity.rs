//! The identity of an upper branch's directory: stored with a service's state of it, so that a mark that was copied elsewhere
//! leads to nothing.
//!
//! ```text
//! 8 bytes  PFBRNCH2
//! u64      number of the filesystem: its own, or its device's where it has none
//! u64      inode
//! i64, u32 when the directory was made: seconds, nanoseconds
//! u32      1: that is known, else 0
//! i32, u32 its handle (`name_to_handle_at(2)`), by which it is found wherever it was moved to: type, and how many bytes; 0: it has none
//!          these bytes, then the path
//! ```
//! Numbers are little-endian.

use poolfs_libservice::types::Timestamp;
use poolfs_local::{LastingName, Place, lasting_name};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, fstat, fstatvfs, open, openat, statx};
use rustix::io::Errno;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"PFBRNCH2";
const HEADER_BYTES: usize = 48;
const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// What tells a directory from its copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BranchIdentity {
    filesystem: u64,
    inode: u64,
    born: Option<Timestamp>,
    handle: Option<LastingName>,
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

/// Where a directory is that was noted.
#[derive(Debug)]
pub(super) enum Whereabouts {
    /// Here; it may be a copy of it ([`Kinship::Unclear`]).
    Known(OwnedFd, BranchIdentity),
    /// Nowhere: it was removed.
    Removed,
    /// Its filesystem is not mounted where it was, or cannot find it.
    Unknown,
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
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
        let handle = lasting_name(&directory);
        Ok(Self { filesystem, inode: status.st_ino, born: born(directory)?, handle, path: path.to_owned() })
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let born = self.born.unwrap_or_default();
        let (kind, handle) = self.handle.as_ref().map_or((0, &[][..]), |(kind, bytes)| (*kind, bytes));
        [
            MAGIC,
            &self.filesystem.to_le_bytes()[..],
            &self.inode.to_le_bytes(),
            &born.seconds.to_le_bytes(),
            &born.nanoseconds.to_le_bytes(),
            &u32::from(self.born.is_some()).to_le_bytes(),
            &kind.to_le_bytes(),
            &(handle.len() as u32).to_le_bytes(),
            handle,
            self.path.as_os_str().as_bytes(),
        ]
        .concat()
    }

    /// Nothing for what another release has noted.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (header, rest) = bytes.split_first_chunk::<HEADER_BYTES>()?;
        let word = |at: usize| Some(u64::from_le_bytes(*header.get(at..)?.first_chunk()?));
        let half = |at: usize| Some(u32::from_le_bytes(*header.get(at..)?.first_chunk()?));
        if !header.starts_with(MAGIC) {
            return None;
        }
        let made = Timestamp { seconds: word(24)?.cast_signed(), nanoseconds: half(32)? };
        let (handle, path) = rest.split_at_checked(half(44)? as usize)?;
        let handle = (!handle.is_empty()).then_some((half(40)?.cast_signed(), handle.to_vec()));
        Some(Self {
            filesystem: word(8)?,
            inode: word(16)?,
            born: (half(36)? == 1).then_some(made),
            handle,
            path: PathBuf::from(OsString::from_vec(path.to_vec())),
        })
    }

    /// Looks for the directory: at its path, and wherever it was moved to in its filesystem, as far as that is mounted above that path.
    ///
    /// # Errors
    /// When what is there does not say which directory it is.
    pub(super) fn find(&self) -> io::Result<Whereabouts> {
        match Self::at(&self.path) {
            Ok((directory, found)) if self.compare(&found) != Kinship::Other => {
                return Ok(Whereabouts::Known(directory, found));
            }
            Err(error) if !is_absent(&error) => return Err(error),
            _ => {}
        }
        let Some(handle) = &self.handle else { return Ok(Whereabouts::Unknown) };
        for above in self.path.ancestors().skip(1) {
            let (directory, found) = match Self::at(above) {
                Ok(at) => at,
                Err(error) if is_absent(&error) => continue,
                Err(error) => return Err(error),
            };
            if found.filesystem != self.filesystem {
                continue;
            }
            return match Place::from(directory).find(handle) {
                Ok(place) if fstat(&place)?.st_nlink > 0 => {
                    let directory = openat(&place, c".", DIRECTORY, Mode::empty())?;
                    let found = Self::of(&directory, &self.path)?;
                    let is_it = self.compare(&found) != Kinship::Other;
                    Ok(if is_it { Whereabouts::Known(directory, found) } else { Whereabouts::Removed })
                }
                Ok(_) => Ok(Whereabouts::Removed),
                Err(error) if error.raw_os_error() == Some(Errno::STALE.raw_os_error()) => Ok(Whereabouts::Removed),
                Err(_) => Ok(Whereabouts::Unknown),
            };
        }
        Ok(Whereabouts::Unknown)
    }

    fn at(path: &Path) -> io::Result<(OwnedFd, Self)> {
        let directory = open(path, DIRECTORY, Mode::empty())?;
        let found = Self::of(&directory, path)?;
        Ok((directory, found))
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
