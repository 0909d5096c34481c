//! The identity and location of a directory: which one it is, and which directories contain it, independent of names and mount
//! points.

use crate::error::OpenError;
use crate::mount::PrivateMount;
use crate::sys::{self, FileHandle};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxAttributes, StatxFlags, openat, openat2, statx};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};
use std::io;
use std::path::{Path, PathBuf};

/// Device and inode: which directory it is.
pub type DirectoryId = (u64, u64);

/// A directory's lasting name within its filesystem: type and bytes, as the kernel gave them.
pub type LastingName = (i32, Vec<u8>);

/// More directories than this are not above one: paths have at most 2048 names.
const DEPTH_MAX: usize = 4096;

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// An open directory: what is done with it is done with this one, whatever is at its path meanwhile.
#[derive(Debug)]
pub struct Place(OwnedFd);

impl From<OwnedFd> for Place {
    /// What is no directory fails where it is used as one.
    fn from(directory: OwnedFd) -> Self {
        Self(directory)
    }
}

impl AsFd for Place {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Place {
    /// The directory at a path.
    ///
    /// # Errors
    /// When there is none.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let failed = |raw: Errno| OpenError::Directory { directory: path.into(), source: raw.into() };
        Ok(Self(openat(CWD, path, DIRECTORY, Mode::empty()).map_err(failed)?))
    }

    /// A private mount of it; `path` is what messages call it.
    ///
    /// # Errors
    /// When the host does not allow that.
    pub fn private_mount(&self, path: &Path, read_only: bool) -> Result<PrivateMount, OpenError> {
        PrivateMount::of_open(&self.0, path, read_only)
    }

    /// The same directory on a copy of its mount on which nothing else is mounted, so that all ways lead through the filesystem itself. This one
    /// must be the root of the mount.
    ///
    /// # Errors
    /// When the host does not allow that.
    pub fn bare(&self) -> io::Result<Self> {
        let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        Ok(Self(open_tree(&self.0, c"", clone)?))
    }

    /// A path of this process that leads to this very directory as long as it is open here.
    #[must_use]
    pub fn path_of_descriptor(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }

    /// Number of the mount by which it was opened, as in `/proc/self/mountinfo`.
    ///
    /// # Errors
    /// Those of `statx(2)`.
    pub fn mount_id(&self) -> io::Result<u64> {
        Ok(statx(&self.0, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?.stx_mnt_id)
    }

    /// Which directory it is.
    ///
    /// # Errors
    /// Those of `fstat(2)`.
    pub fn id(&self) -> io::Result<DirectoryId> {
        id_of(&self.0)
    }

    /// A directory below this one, on the same mount, without following links.
    ///
    /// # Errors
    /// When there is none, or something is mounted on the way.
    pub fn below(&self, path: &Path) -> io::Result<Self> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        Ok(Self(openat2(&self.0, path, DIRECTORY, Mode::empty(), resolve)?))
    }

    /// The directory itself and those above it, up to the root of its mount.
    ///
    /// # Errors
    /// When the way up is not open: something is mounted over it, or it was taken out of the mount's tree.
    pub fn lineage(&self) -> io::Result<Vec<DirectoryId>> {
        let mut lineage = vec![self.id()?];
        let mut above: Option<OwnedFd> = None;
        loop {
            let here = above.as_ref().unwrap_or(&self.0);
            let status = statx(here, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?;
            if status.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
                return Ok(lineage);
            }
            let next = openat2(here, c"..", DIRECTORY, Mode::empty(), ResolveFlags::NO_XDEV)?;
            let id = id_of(&next)?;
            if lineage.last() == Some(&id) {
                // The root of this process: it sees no more.
                return Ok(lineage);
            }
            if lineage.len() >= DEPTH_MAX {
                return Err(Errno::NAMETOOLONG.into());
            }
            lineage.push(id);
            above = Some(next);
        }
    }

    /// That of the directory.
    #[must_use]
    pub fn lasting_name(&self) -> Option<LastingName> {
        lasting_name(&self.0)
    }

    /// The directory of this filesystem with such a name, on the mount of this one.
    ///
    /// # Errors
    /// When there is none any more.
    pub fn find(&self, name: &LastingName) -> io::Result<Self> {
        let handle = FileHandle::of_parts(name).ok_or(Errno::INVAL)?;
        // A mount is named by a file that is really open.
        let open = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mount = openat(&self.0, c".", open, Mode::empty())?;
        Ok(Self(sys::open_handle(mount, &handle, DIRECTORY.bits().cast_signed())?))
    }
}

/// What finds a directory again wherever it is moved to; nothing where the filesystem has no such names.
pub fn lasting_name(directory: impl AsFd) -> Option<LastingName> {
    sys::file_handle(directory).ok().map(FileHandle::into_parts)
}

fn id_of(directory: impl AsFd) -> io::Result<DirectoryId> {
    let status = rustix::fs::fstat(directory)?;
    Ok((status.st_dev, status.st_ino))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_knows_what_it_is_in_and_is_found_wherever_it_is_moved() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(at("a/b/c")).expect("folders");
        std::fs::create_dir(at("elsewhere")).expect("a folder");
        let id = |name: &str| Place::open(&at(name)).expect("there").id().expect("known");
        let place = Place::open(&at("a/b/c")).expect("there");
        let lineage = place.lineage().expect("a way up");
        assert_eq!(lineage[..3], [id("a/b/c"), id("a/b"), id("a")]);
        let top = Place::open(&at("")).expect("there").bare().expect("cloned");
        let below = top.below(Path::new("a/b/c")).expect("there");
        assert_eq!(below.lineage().expect("a way up"), [id("a/b/c"), id("a/b"), id("a"), id("")]);

        let Some(name) = place.lasting_name() else { return };
        std::fs::rename(at("a/b"), at("elsewhere/b")).expect("moved");
        std::fs::create_dir_all(at("a/b/c")).expect("others");
        let found = top.find(&name).expect("it has moved");
        assert_eq!(
            found.lineage().expect("a way up"),
            [place.id().expect("known"), id("elsewhere/b"), id("elsewhere"), id("")]
        );
        std::fs::remove_dir_all(at("elsewhere")).expect("removed");
        drop((place, below, found));
        assert!(top.find(&name).is_err());
        assert!(top.find(&(0, vec![0; 1000])).is_err());
    }
}
