//! Determines which mounts of the instance a client can reach: those that the kernel would let it walk to.
//!
//! A mount in a client's table may be unreachable for the client: it may be below a directory that others may not search, or
//! under another mount. So the path to it is walked from the client's root, and each directory on it is checked for whether the
//! client may search it. These directories are the client's own: it may have mounted filesystems there that never answer. So
//! nothing is looked up that the kernel does not have in its cache, where all that leads to a mount stays; attributes are taken
//! as the kernel has them; and access lists are read only where no process has to answer for it.
//!
//! A client whose root is not that of its mount namespace, as after `chroot`, reaches none. Its table leaves out what is outside
//! of its root, and the kernel does not: a mount there binds the client as well, on a name of the instance as anywhere.
//! Containers have the root of their namespace, by `pivot_root`.

use crate::access::{Acl, Credentials, EXECUTE, may_access};
use crate::outside::{Deed, outside};
use poolfs_libservice::types::{Attributes, Errno, FileType, Timestamp};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Statx, StatxFlags, open, openat2, readlink, statx};
use std::collections::HashSet;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

const ACCESS_LIST: &str = "system.posix_acl_access";

/// Most bytes of a directory's access list.
const LIST_BYTES_MAX: usize = 64 << 10;

/// Most directories that are passed to find the first of a client's mounts that it reaches.
const STEPS_MAX: usize = 1024;

/// How often a step is tried that met a change of what the kernel has in its cache.
const TRIES_MAX: usize = 64;

/// A mount that a client may reach.
pub(super) struct Candidate {
    /// Its number, as `stx_mnt_id` has it.
    pub(super) id: u64,
    /// Its path from the client's root on.
    pub(super) place: Vec<u8>,
}

/// Who walks.
#[derive(Clone)]
pub(super) struct Walker {
    /// Its root is where ways begin.
    pub(super) process: u32,
    /// Decide which directories it may search.
    pub(super) credentials: Credentials,
    /// The numbers of mounts in which access lists can be read without waiting for anybody.
    pub(super) answering: HashSet<u64>,
}

impl Walker {
    /// The first of the mounts that the client reaches. `root` is the number of the one in which its root was when its table was read.
    pub(super) fn first_of(&self, candidates: Vec<Candidate>, root: u64) -> Option<usize> {
        if candidates.is_empty() {
            return None;
        }
        let walker = self.clone();
        let first = move || {
            let root = walker.root(root)?;
            let mut steps = STEPS_MAX;
            let mut reaches = |candidate| walker.reaches(root.as_fd(), candidate, &mut steps);
            candidates.iter().position(|candidate| reaches(candidate).is_some_and(|reached| reached))
        };
        outside(Deed::Reach, first).ok().flatten()
    }

    /// The client's root, if it is that of its mount namespace and of the mount with this number.
    fn root(&self, number: u64) -> Option<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = open(format!("/proc/{}/root", self.process), flags, Mode::empty()).ok()?;
        let is_that_of_the_table = known(root.as_fd(), Path::new("")).ok()?.stx_mnt_id == number;
        // The kernel says how far it is below the root of all, whatever namespace that is of.
        let path = readlink(place_of(root.as_fd()), Vec::new()).ok()?;
        (is_that_of_the_table && path.as_bytes() == b"/").then_some(root)
    }

    /// Nothing when the way cannot be looked at.
    fn reaches(&self, root: BorrowedFd<'_>, candidate: &Candidate, steps: &mut usize) -> Option<bool> {
        let mut here = root.try_clone_to_owned().ok()?;
        let mut found = known(root, Path::new("")).ok()?;
        for name in candidate.place.split(|&byte| byte == b'/').filter(|name| !name.is_empty()) {
            *steps = steps.checked_sub(1)?;
            if !self.may_search(here.as_fd(), &found) {
                return Some(false);
            }
            here = step(here.as_fd(), name)?;
            found = known(here.as_fd(), Path::new("")).ok()?;
        }
        Some(found.stx_mnt_id == candidate.id)
    }

    fn may_search(&self, directory: BorrowedFd<'_>, found: &Statx) -> bool {
        let list = || {
            // A filesystem of a disk answers by itself.
            if found.stx_dev_major != 0 || self.answering.contains(&found.stx_mnt_id) {
                access_list(directory)
            } else {
                // It may let others in than the mode says, or not.
                Ok(Some(Acl::for_nobody()))
            }
        };
        may_access(&self.credentials, &attributes(found), EXECUTE, list).is_ok()
    }
}

/// Device number (major, minor) of what is mounted at `mount_point`.
///
/// # Errors
/// When the mount point is gone.
pub(super) fn device(mount_point: &Path) -> Result<[u32; 2], Errno> {
    let place = mount_point.to_owned();
    let found = outside(Deed::Reach, move || known(CWD, &place)).map_err(|_| Errno::ENOMEM)?;
    let found = found.map_err(|error| Errno::from_raw(error.raw_os_error()))?;
    Ok([found.stx_dev_major, found.stx_dev_minor])
}

/// What a name in a directory leads to, if the kernel knows that without asking a filesystem.
fn step(directory: BorrowedFd<'_>, name: &[u8]) -> Option<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::CACHED | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let tries = (0..TRIES_MAX).map(|_| openat2(directory, name, flags, Mode::empty(), resolve));
    tries.into_iter().find(|tried| !matches!(tried, Err(rustix::io::Errno::AGAIN)))?.ok()
}

/// What the kernel knows of a file without asking its filesystem: that may be this service's own, or a client's that never
/// answers.
fn known(directory: BorrowedFd<'_>, path: &Path) -> rustix::io::Result<Statx> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT | AtFlags::EMPTY_PATH;
    let wanted =
        StatxFlags::INO | StatxFlags::TYPE | StatxFlags::MODE | StatxFlags::UID | StatxFlags::GID | StatxFlags::MNT_ID;
    statx(directory, path, flags, wanted)
}

/// A path to the directory that needs none of its names.
fn place_of(directory: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/thread-self/fd/{}", directory.as_raw_fd()))
}

fn access_list(directory: BorrowedFd<'_>) -> Result<Option<Acl>, Errno> {
    let mut value = vec![0; LIST_BYTES_MAX];
    match rustix::fs::getxattr(place_of(directory), ACCESS_LIST, &mut value) {
        Ok(length) => Acl::parse(&value[..length]).map(Some),
        Err(rustix::io::Errno::NODATA | rustix::io::Errno::OPNOTSUPP) => Ok(None),
        Err(error) => Err(Errno::from_raw(error.raw_os_error())),
    }
}

fn attributes(directory: &Statx) -> Attributes {
    let never = Timestamp { seconds: 0, nanoseconds: 0 };
    Attributes {
        inode: directory.stx_ino,
        file_type: FileType::Directory,
        permissions: u32::from(directory.stx_mode) & 0o7777,
        links: 1,
        uid: directory.stx_uid,
        gid: directory.stx_gid,
        device: 0,
        size: 0,
        blocks: 0,
        accessed: never,
        modified: never,
        changed: never,
        change: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Between the reading of the table and the walk the client may have got another root (by `chroot`, or a mount over it): the numbers of that table's mounts
    /// say nothing of what is there.
    #[test]
    fn a_root_that_is_none_of_the_table_leads_nowhere() {
        let credentials = Credentials { uid: 0, gid: 0, groups: vec![], capabilities: u64::MAX, user_namespace: None };
        let client = Walker { process: std::process::id(), credentials, answering: HashSet::new() };
        let id = known(CWD, Path::new("/")).expect("a root").stx_mnt_id;
        let first_by = |root: u64| client.first_of(vec![Candidate { id, place: b"/".to_vec() }], root);
        assert_eq!((first_by(id), first_by(id + 1)), (Some(0), None));
    }
}
