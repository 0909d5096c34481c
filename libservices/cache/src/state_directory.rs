//! The directory in which a service keeps its state: opened relative to a descriptor, and trusted only if nobody but its owner
//! can have made its content.
//!
//! No symbolic link is followed here, and no path is resolved from outside. A file is used only if it is a regular file of the
//! directory's own filesystem with a single name, so that no name in it stands for something elsewhere on the host.

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, fstatfs, openat, openat2, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Names the use of a branch by one service: what is noted under one says nothing of the next.
pub type BranchKey = [u8; 16];

/// `f_type` of tmpfs.
const TMPFS: u64 = 0x0102_1994;

/// Most bytes of what is noted of a branch.
const BRANCH_BYTES_MAX: u64 = 8192;

/// How the names of the files begin that say which branch a key is of.
const BRANCH: &str = "branch-";

pub(crate) fn branch_name(key: &BranchKey) -> String {
    format!("{BRANCH}{:032x}", u128::from_be_bytes(*key))
}

fn key_of(name: &[u8]) -> Option<BranchKey> {
    let digits = name.strip_prefix(BRANCH.as_bytes()).filter(|digits| digits.len() == 32)?;
    u128::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok().map(u128::to_be_bytes)
}

fn untrusted(path: &Path, cause: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{} is not used: {cause}", path.display()))
}

/// Opens the directory `name` of `parent`, which `path` is for messages, if it is one that only this process's user can enter.
///
/// # Errors
/// `InvalidData` when others can enter it, or it is somebody else's; else those of opening it: `NotADirectory` and `FilesystemLoop`
/// for what is no directory or a symbolic link.
pub fn open_private(parent: impl AsFd, name: &OsStr, path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let directory = openat2(parent, name, flags, Mode::empty(), resolve)?;
    check_private(&fstat(&directory)?, path)?;
    Ok(directory)
}

/// Refuses what others can enter.
pub(crate) fn check_private(status: &Stat, path: &Path) -> io::Result<()> {
    if status.st_uid != rustix::process::geteuid().as_raw() {
        return Err(untrusted(path, "it is another user's"));
    }
    if status.st_mode & 0o077 != 0 {
        return Err(untrusted(path, "others can enter it"));
    }
    Ok(())
}

/// A tmpfs in which a service keeps its state.
#[derive(Debug)]
pub struct StateDirectory {
    directory: OwnedFd,
    device: u64,
    path: PathBuf,
}

impl StateDirectory {
    /// The one that is mounted on the directory `name` of `parent`, which `path` is for messages and for unmounting it.
    ///
    /// # Errors
    /// `InvalidData` for what no service can have made; else those of [`open_private`].
    pub fn open(parent: impl AsFd, name: &OsStr, path: &Path) -> io::Result<Self> {
        let around = fstat(&parent)?.st_dev;
        let opened = Self::of(open_private(parent, name, path)?, path)?;
        if opened.device == around {
            return Err(untrusted(path, "nothing is mounted there"));
        }
        Ok(opened)
    }

    /// The tmpfs whose root is open.
    ///
    /// # Errors
    /// `InvalidData` for what no service can have made.
    pub fn of(directory: OwnedFd, path: &Path) -> io::Result<Self> {
        let status = fstat(&directory)?;
        check_private(&status, path)?;
        if fstatfs(&directory)?.f_type as u64 != TMPFS {
            return Err(untrusted(path, "it is no tmpfs"));
        }
        Ok(Self { directory, device: status.st_dev, path: path.to_owned() })
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a file. Segments may have any owner: nobody but this directory's can have put them there.
    pub(crate) fn file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        // What is no file is not opened at all: that can wait for somebody, or do something.
        self.check_file(name, &statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW)?)?;
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
        let file = openat2(&self.directory, name, flags, Mode::empty(), resolve)?;
        self.check_file(name, &fstat(&file)?)?;
        Ok(File::from(file))
    }

    fn check_file(&self, name: &str, status: &Stat) -> io::Result<()> {
        let is_plain = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile;
        if is_plain && status.st_nlink == 1 && status.st_dev == self.device {
            return Ok(());
        }
        Err(untrusted(&self.path.join(name), "it is no ordinary file of its directory alone"))
    }

    fn names(&self) -> io::Result<Vec<CString>> {
        let mut names = Vec::new();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        for entry in Dir::new(openat(&self.directory, ".", flags, Mode::empty())?)? {
            let name = entry?.file_name().to_owned();
            if !matches!(name.to_bytes(), b"." | b"..") {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// Whether there is a branch of that key: also one of a process that lives.
    #[must_use]
    pub fn has(&self, key: &BranchKey) -> bool {
        statat(&self.directory, branch_name(key), AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// What is noted of a branch ([`Cache::recorded`](crate::Cache::recorded)).
    ///
    /// # Errors
    /// `NotFound` when there is none of that key; else those of reading it.
    pub fn branch(&self, key: &BranchKey) -> io::Result<Vec<u8>> {
        let mut noted = Vec::new();
        let count = self.file(&branch_name(key), OFlags::RDONLY)?.take(BRANCH_BYTES_MAX + 1).read_to_end(&mut noted)?;
        if count as u64 > BRANCH_BYTES_MAX {
            return Err(untrusted(&self.path.join(branch_name(key)), "it is too long"));
        }
        Ok(noted)
    }

    /// The branches that files were written in.
    ///
    /// # Errors
    /// Those of reading the directory.
    pub fn branches(&self) -> io::Result<Vec<BranchKey>> {
        Ok(self.names()?.iter().filter_map(|name| key_of(name.to_bytes())).collect())
    }

    /// Removes a file that may be gone.
    pub(crate) fn remove(&self, name: &str) -> io::Result<()> {
        match unlinkat(&self.directory, name, AtFlags::empty()) {
            Err(Errno::NOENT) | Ok(()) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Removes every file but branches and those that `is_wanted`.
    pub(crate) fn remove_but(&self, is_wanted: impl Fn(&str) -> bool) -> io::Result<()> {
        for name in self.names()? {
            let is_kept = name.to_str().is_ok_and(|name| key_of(name.as_bytes()).is_some() || is_wanted(name));
            if !is_kept {
                unlinkat(&self.directory, &name, AtFlags::empty())?;
            }
        }
        Ok(())
    }

    /// Empties and unmounts it, and removes the directory it was mounted on; that one's parent with the last.
    ///
    /// # Errors
    /// Those of removing and unmounting.
    pub(crate) fn detach(&self) -> io::Result<()> {
        // Other mount namespaces may have the mount, too: what is in it would take its memory for as long as they are there.
        for name in self.names()? {
            unlinkat(&self.directory, &name, AtFlags::empty())?;
        }
        match unmount(&self.path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            // It is none any more.
            Err(Errno::INVAL) | Ok(()) => {}
            Err(errno) => return Err(errno.into()),
        }
        std::fs::remove_dir(&self.path)?;
        if let Some(place) = self.path.parent() {
            // Not empty means that others are there.
            let _ = std::fs::remove_dir(place);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segments::SegmentStore;
    use std::io::ErrorKind;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn only_a_tmpfs_that_nobody_else_can_enter_is_believed() {
        let place = tempfile::tempdir().expect("a directory");
        let around = File::open(place.path()).expect("opened");
        let open = |name: &str| StateDirectory::open(&around, OsStr::new(name), &place.path().join(name));
        let kind = |name: &str| open(name).expect_err("refused").kind();
        let kept = place.path().join("kept");
        let store = SegmentStore::new(4, 4, Some(&kept)).expect("mounted");
        for (name, mode) in [("plain", 0o700), ("open", 0o711)] {
            std::fs::create_dir(place.path().join(name)).expect("made");
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(place.path().join(name), mode).expect("set");
        }
        symlink("kept/1", place.path().join("link")).expect("made");
        assert_eq!(kind("plain"), ErrorKind::InvalidData, "it is no tmpfs");
        assert_eq!(kind("open"), ErrorKind::InvalidData, "others can enter it");
        assert!(open("link").is_err() && open("kept/..").is_err() && open("../").is_err());
        let root = open_private(&around, OsStr::new("kept"), &kept).expect("its own");
        let found = StateDirectory::open(&root, OsStr::new("1"), &kept.join("1")).expect("mounted");
        assert_eq!(found.branches().expect("listed"), [] as [BranchKey; 0]);
        let set =
            |mode: u32| std::fs::set_permissions(kept.join("1"), std::fs::Permissions::from_mode(mode)).expect("set");
        set(0o750);
        assert!(StateDirectory::open(&root, OsStr::new("1"), &kept.join("1")).is_err());
        // Its end does not touch it otherwise.
        set(0o700);
        drop(store);
        assert!(!kept.exists(), "it is unmounted");
    }

    #[test]
    fn a_name_that_stands_for_something_else_is_not_followed() {
        let place = tempfile::tempdir().expect("a directory");
        let outside = place.path().join("outside");
        std::fs::write(&outside, "secret").expect("written");
        let store = SegmentStore::new(4, 4, Some(&place.path().join("kept"))).expect("mounted");
        let at = place.path().join("kept/1");
        let parent = File::open(place.path().join("kept")).expect("opened");
        let directory = StateDirectory::open(&parent, OsStr::new("1"), &at).expect("mounted");
        let key = *b"the branch's key";
        let name = branch_name(&key);
        symlink(&outside, at.join(&name)).expect("made");
        symlink("/nowhere", at.join("dangling")).expect("made");
        std::fs::create_dir(at.join("directory")).expect("made");
        rustix::fs::mknodat(rustix::fs::CWD, at.join("pipe"), FileType::Fifo, Mode::RUSR, 0).expect("made");
        let zero = rustix::fs::makedev(1, 5);
        rustix::fs::mknodat(rustix::fs::CWD, at.join("device"), FileType::CharacterDevice, Mode::RUSR, zero)
            .expect("made");
        std::fs::write(at.join("one"), "two names").expect("written");
        std::fs::hard_link(at.join("one"), at.join("two")).expect("made");
        assert!(directory.branch(&key).is_err());
        for name in ["dangling", "directory", "pipe", "device", "one", "two", "../1/one", "../../outside"] {
            assert!(directory.file(name, OFlags::RDONLY).is_err(), "{name}");
        }
        std::fs::remove_file(at.join("two")).expect("removed");
        assert!(directory.file("one", OFlags::RDONLY).is_ok());
        std::fs::remove_dir(at.join("directory")).expect("removed");
        directory.remove_but(|_| false).expect("removed");
        assert_eq!(directory.branches().expect("listed"), [key]);
        drop(store);
        assert_eq!(std::fs::read(outside).expect("there"), b"secret");
    }

    #[test]
    fn names_of_branches_are_those_of_their_keys() {
        let key = *b"\x00\x01sixteen bytes.";
        assert_eq!(key_of(branch_name(&key).as_bytes()), Some(key));
        assert_eq!(key_of(b"branch-12"), None);
        assert_eq!(key_of(b"0000000000000001"), None);
    }
}
