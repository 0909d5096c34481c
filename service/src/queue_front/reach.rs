//! Who may have a session: whoever the kernel would let reach the mount.
//!
//! Sockets lie in a directory that every user of the host may search, but a mount may lie below one that others may not. The
//! path to the mount is checked as the kernel would walk it for the client. A container's processes do not come that way:
//! they have the mount as their root.

use crate::access::{Acl, Credentials, EXECUTE, may_access};
use crate::outside::{Deed, outside};
use poolfs_libservice::types::{Attributes, Errno, FileType, Timestamp};
use rustix::fs::{AtFlags, CWD, Statx, StatxFlags, statx};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const ACCESS_LIST: &str = "system.posix_acl_access";

/// Most bytes of a directory's access list.
const LIST_BYTES_MAX: usize = 64 << 10;

/// The way to a mount.
#[derive(Clone)]
pub(super) struct Reach {
    mount_point: PathBuf,
    /// The directories that lead there, without links on the way.
    passed: Vec<PathBuf>,
}

impl Reach {
    /// The way to `mount_point`, where nothing is mounted yet.
    ///
    /// # Errors
    /// When there is no such directory.
    pub(super) fn to(mount_point: &Path) -> io::Result<Self> {
        let above = mount_point.parent().unwrap_or(mount_point).to_owned();
        let above = outside(Deed::Reach, move || above.canonicalize())??;
        Ok(Self { mount_point: mount_point.to_owned(), passed: above.ancestors().map(Path::to_owned).collect() })
    }

    /// Whether a process with these credentials reaches the mount.
    pub(super) fn is_open_to(&self, process: u32, credentials: &Credentials) -> bool {
        let (way, credentials) = (self.clone(), credentials.clone());
        let is_open =
            move || way.is_root_of(process) || way.passed.iter().all(|directory| may_search(directory, &credentials));
        outside(Deed::Reach, is_open).unwrap_or(false)
    }

    /// Device number (major, minor) of what is mounted there.
    ///
    /// # Errors
    /// When the mount point is gone.
    pub(super) fn device(&self) -> Result<[u32; 2], Errno> {
        let place = self.mount_point.clone();
        let found = outside(Deed::Reach, move || known(&place)).map_err(|_| Errno::ENOMEM)?;
        let found = found.map_err(|error| Errno::from_raw(error.raw_os_error()))?;
        Ok([found.stx_dev_major, found.stx_dev_minor])
    }

    fn is_root_of(&self, process: u32) -> bool {
        let root = PathBuf::from(format!("/proc/{process}/root"));
        let identity = |found: Statx| (found.stx_dev_major, found.stx_dev_minor, found.stx_ino);
        match (known(&root), known(&self.mount_point)) {
            (Ok(root), Ok(mount)) => identity(root) == identity(mount),
            _ => false,
        }
    }
}

/// What the kernel knows of a file without asking its filesystem: that may be this service's own, or a client's that never
/// answers.
fn known(path: &Path) -> rustix::io::Result<Statx> {
    statx(CWD, path, AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT, StatxFlags::INO)
}

fn may_search(directory: &Path, credentials: &Credentials) -> bool {
    let Ok(metadata) = fs::metadata(directory) else { return false };
    may_access(credentials, &attributes(&metadata), EXECUTE, || access_list(directory)).is_ok()
}

fn access_list(directory: &Path) -> Result<Option<Acl>, Errno> {
    let mut value = vec![0; LIST_BYTES_MAX];
    match rustix::fs::getxattr(directory, ACCESS_LIST, &mut value) {
        Ok(length) => Acl::parse(&value[..length]).map(Some),
        Err(rustix::io::Errno::NODATA | rustix::io::Errno::OPNOTSUPP) => Ok(None),
        Err(error) => Err(Errno::from_raw(error.raw_os_error())),
    }
}

fn attributes(directory: &Metadata) -> Attributes {
    let never = Timestamp { seconds: 0, nanoseconds: 0 };
    Attributes {
        inode: directory.ino(),
        file_type: FileType::Directory,
        permissions: directory.mode() & 0o7777,
        links: 1,
        uid: directory.uid(),
        gid: directory.gid(),
        device: 0,
        size: 0,
        blocks: 0,
        accessed: never,
        modified: never,
        changed: never,
    }
}
