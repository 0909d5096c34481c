//! The private mount of a directory, on which a layer works, whichever process made it.

use crate::error::OpenError;
use crate::filesystem::{TMPFS, stat};
use crate::sys;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, StatVfsMountFlags, StatxAttributes, StatxFlags, fstatfs, fstatvfs, openat, statx,
};
use rustix::io::{Errno, Result};
use rustix::mount::{OpenTreeFlags, open_tree};
use std::path::Path;

/// f_type of ramfs.
const RAMFS: u64 = 0x8584_58F6;

/// `ST_NOSYMFOLLOW` of `statfs`.
const NO_SYMLINKS: StatVfsMountFlags = StatVfsMountFlags::from_bits_retain(0x2000);

/// What every private mount is.
const RESTRICTED: StatVfsMountFlags =
    StatVfsMountFlags::NOSUID.union(StatVfsMountFlags::NODEV).union(StatVfsMountFlags::NOATIME).union(NO_SYMLINKS);

/// A filesystem that keeps everything in memory, which counts for whoever writes there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InMemory {
    /// One that may have a size of its own, bytes.
    Tmpfs {
        /// None: it has none.
        size_bytes: Option<u64>,
    },
    /// One without any limit.
    Ramfs,
}

impl InMemory {
    /// Whether that of an open directory is one.
    fn of(directory: &OwnedFd) -> Result<Option<Self>> {
        let found = fstatfs(directory)?;
        Ok(match found.f_type as u64 {
            TMPFS => {
                let size_bytes = found.f_blocks.saturating_mul(found.f_bsize as u64);
                Some(Self::Tmpfs { size_bytes: (size_bytes > 0).then_some(size_bytes) })
            }
            RAMFS => Some(Self::Ramfs),
            _ => None,
        })
    }
}

/// A directory as a mount of its own: nothing outside of it is reached from here, and no set-id bits, devices or symbolic links have effect.
///
/// Another process may have made it and have sent the descriptor: [`PrivateMount::received`] believes nothing of that.
#[derive(Debug)]
pub struct PrivateMount(OwnedFd);

impl PrivateMount {
    /// One of the directory at a path.
    ///
    /// # Errors
    /// When it is no directory, or the host does not allow a private mount of it.
    pub fn of(directory: &Path, read_only: bool) -> std::result::Result<Self, OpenError> {
        let no_directory = |raw: Errno| OpenError::Directory { directory: directory.into(), source: raw.into() };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let given = openat(CWD, directory, flags, Mode::empty()).map_err(no_directory)?;
        Self::of_open(&given, directory, read_only)
    }

    /// One of an open directory; `path` is what messages call it.
    pub(crate) fn of_open(directory: &OwnedFd, path: &Path, read_only: bool) -> std::result::Result<Self, OpenError> {
        let no_mount = |raw: Errno| OpenError::PrivateMount { directory: path.into(), source: raw.into() };
        let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        let tree = open_tree(directory, c"", clone).map_err(no_mount)?;
        sys::restrict_mount(&tree, read_only).map_err(no_mount)?;
        Ok(Self(tree))
    }

    /// One that another process has made; `directory` is what messages call it.
    ///
    /// # Errors
    /// When it is no directory, or not as [`PrivateMount::of`] makes them.
    pub fn received(tree: OwnedFd, directory: &Path, read_only: bool) -> std::result::Result<Self, OpenError> {
        let failed = |raw: Errno| OpenError::Directory { directory: directory.into(), source: raw.into() };
        if is_private(&tree, read_only).map_err(failed)? {
            Ok(Self(tree))
        } else {
            Err(OpenError::NotPrivate { directory: directory.into() })
        }
    }

    /// Whether its filesystem keeps everything in memory.
    ///
    /// # Errors
    /// Those of `fstatfs(2)`.
    pub fn in_memory(&self) -> std::io::Result<Option<InMemory>> {
        Ok(InMemory::of(&self.0)?)
    }

    /// Device and inode: which directory it is, whatever its path.
    ///
    /// # Errors
    /// Those of `fstat(2)`.
    pub fn identity(&self) -> std::io::Result<(u64, u64)> {
        let status = rustix::fs::fstat(&self.0)?;
        Ok((status.st_dev, status.st_ino))
    }
}

impl AsFd for PrivateMount {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether it is a directory with nothing above it, on a mount that is restricted.
fn is_private(tree: &OwnedFd, read_only: bool) -> Result<bool> {
    if rustix::fs::FileType::from_raw_mode(stat(tree)?.stx_mode.into()) != rustix::fs::FileType::Directory {
        return Err(Errno::NOTDIR);
    }
    let wanted = RESTRICTED | if read_only { StatVfsMountFlags::RDONLY } else { StatVfsMountFlags::empty() };
    if !fstatvfs(tree)?.f_flag.contains(wanted) {
        return Ok(false);
    }
    let look = |path| statx(tree, path, AtFlags::EMPTY_PATH | AtFlags::NO_AUTOMOUNT, StatxFlags::MNT_ID);
    let (own, above) = (look(c"")?, look(c"..")?);
    let is_root = own.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
    Ok(is_root && own.stx_mnt_id == above.stx_mnt_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_a_private_mount_is_taken_for_one() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("file"), "").expect("a file");
        let open = |path: &Path| OwnedFd::from(std::fs::File::open(path).expect("there"));
        let received = |tree: OwnedFd, read_only| PrivateMount::received(tree, folder.path(), read_only);
        let copy = |mount: &PrivateMount| mount.as_fd().try_clone_to_owned().expect("a descriptor");

        let writable = PrivateMount::of(folder.path(), false).expect("made");
        let read_only = PrivateMount::of(folder.path(), true).expect("made");
        assert_eq!(received(copy(&writable), false).expect("one").identity().ok(), read_only.identity().ok());
        received(copy(&read_only), true).expect("one");
        assert!(matches!(received(copy(&writable), true), Err(OpenError::NotPrivate { .. })));

        assert!(matches!(received(open(folder.path()), false), Err(OpenError::NotPrivate { .. })));
        assert!(matches!(received(open(Path::new("/")), false), Err(OpenError::NotPrivate { .. })));
        assert!(matches!(received(open(&folder.path().join("file")), false), Err(OpenError::Directory { .. })));
        // A clone that is not restricted, and a directory somewhere in one that is.
        let clone = open_tree(CWD, folder.path(), OpenTreeFlags::OPEN_TREE_CLONE).expect("cloned");
        assert!(matches!(received(clone, false), Err(OpenError::NotPrivate { .. })));
        std::fs::create_dir(folder.path().join("below")).expect("a folder");
        let below = openat(&writable, c"below", OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).expect("there");
        assert!(matches!(received(below, false), Err(OpenError::NotPrivate { .. })));
    }
}
