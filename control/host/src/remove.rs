//! Removal of whole directory trees made by untrusted programs.

use crate::{HostError, Result};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::path::Path;

/// What a directory on its way out is called in the root of its tree; a number follows.
const MOVED_PREFIX: &str = ".removed-";
const OPEN_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Remove a directory with everything in it; one that does not exist is fine.
///
/// However deep the tree is, three descriptors and no recursion are enough: a directory that is not empty is moved to the
/// tree's root before it is looked into. What is mounted in the tree is never touched, and is an error (EBUSY).
pub fn remove_tree(path: &Path) -> Result<()> {
    let failed = |errno: Errno| HostError::io("remove", path, errno);
    let root = match rustix::fs::openat(CWD, path, OPEN_FLAGS, Mode::empty()) {
        Ok(root) => root,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(failed(errno)),
    };
    let device = rustix::fs::fstat(&root).map_err(failed)?.st_dev;
    let mut tree = Tree { root: root.as_fd(), device, moved: 0 };
    while tree.pass().map_err(failed)? {}
    rustix::fs::unlinkat(CWD, path, AtFlags::REMOVEDIR).map_err(failed)
}

struct Tree<'a> {
    root: BorrowedFd<'a>,
    /// The filesystem it is on.
    device: u64,
    /// Directories that were moved to the root.
    moved: u64,
}

impl Tree<'_> {
    /// Empties every directory of the root once; false when nothing was left to do.
    fn pass(&mut self) -> rustix::io::Result<bool> {
        let mut found = false;
        for name in names(self.root)? {
            found = true;
            if let Some(directory) = self.remove(self.root, &name)? {
                for inner in names(directory.as_fd())? {
                    if self.remove(directory.as_fd(), &inner)?.is_some() {
                        self.move_up(directory.as_fd(), &inner)?;
                    }
                }
                rustix::fs::unlinkat(self.root, &name, AtFlags::REMOVEDIR)?;
            }
        }
        Ok(found)
    }

    /// Removes a file or an empty directory; another directory is opened.
    fn remove(&self, parent: BorrowedFd<'_>, name: &[u8]) -> rustix::io::Result<Option<OwnedFd>> {
        match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
            Err(Errno::ISDIR) => {}
            other => return other.map(|()| None),
        }
        match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY) => {}
            other => return other.map(|()| None),
        }
        let directory = rustix::fs::openat(parent, name, OPEN_FLAGS, Mode::empty())?;
        if rustix::fs::fstat(&directory)?.st_dev == self.device { Ok(Some(directory)) } else { Err(Errno::BUSY) }
    }

    fn move_up(&mut self, parent: BorrowedFd<'_>, name: &[u8]) -> rustix::io::Result<()> {
        loop {
            self.moved += 1;
            let new = format!("{MOVED_PREFIX}{}", self.moved);
            match rustix::fs::renameat_with(parent, name, self.root, &new, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => {}
                other => return other,
            }
        }
    }
}

/// Everything in a directory. The list is taken before anything is changed.
fn names(directory: BorrowedFd<'_>) -> rustix::io::Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if !matches!(name.as_slice(), b"." | b"..") {
            names.push(name);
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_deeper_than_there_are_descriptors_goes() {
        const DEPTH: usize = 5_000;
        let place = tempfile::tempdir().expect("a directory");
        let root = place.path().join("root");
        std::fs::create_dir(&root).expect("made");
        // Only by descriptors: the path is far longer than a path may be.
        let mut at = rustix::fs::open(&root, OPEN_FLAGS, Mode::empty()).expect("opened");
        for level in 0..DEPTH {
            if level % 1000 == 0 {
                rustix::fs::mknodat(&at, "pipe", rustix::fs::FileType::Fifo, Mode::RUSR, 0).expect("made");
                rustix::fs::mkdirat(&at, format!("{MOVED_PREFIX}{}", level / 1000 + 1), Mode::RWXU).expect("made");
            }
            rustix::fs::mkdirat(&at, "d", Mode::RWXU).expect("made");
            at = rustix::fs::openat(&at, "d", OPEN_FLAGS, Mode::empty()).expect("opened");
        }
        remove_tree(&root).expect("removed");
        remove_tree(&root).expect("absent is fine");
        assert!(!root.exists());
    }

    #[test]
    fn links_are_not_followed() {
        let place = tempfile::tempdir().expect("a directory");
        let (root, outside) = (place.path().join("root"), place.path().join("outside"));
        std::fs::create_dir_all(root.join("a/b")).expect("made");
        std::fs::create_dir(&outside).expect("made");
        std::fs::write(outside.join("kept"), "kept").expect("written");
        std::os::unix::fs::symlink(&outside, root.join("a/b/link")).expect("linked");
        remove_tree(&root).expect("removed");
        assert!(outside.join("kept").exists() && !root.exists());
        std::os::unix::fs::symlink(&outside, &root).expect("linked");
        remove_tree(&root).expect_err("a link is no tree");
        assert!(outside.join("kept").exists());
    }
}
