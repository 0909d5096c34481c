//! Writes into a directory tree that belongs to an image, and never outside of it.
//!
//! Every path is walked by the kernel with the tree as its root (`openat2` with RESOLVE_IN_ROOT): a symbolic link in a hostile archive
//! leads to another place of the same tree at most. Only the last component is ever created, and never followed.

use crate::archive::Time;
use crate::limits::Room;
use crate::{ImageError, Result};
use poolfs_host::remove_tree;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Longest path and longest name that Linux takes.
const PATH_BYTES_MAX: usize = 4095;
const NAME_BYTES_MAX: usize = 255;

/// A path below the tree's root, without `.`, `..` or a leading slash; empty is the root itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TreePath(Vec<u8>);

impl TreePath {
    /// Understand a path of an archive. A leading slash is dropped, as every archiver does.
    pub(crate) fn parse(bytes: &[u8]) -> Result<TreePath> {
        let refuse = |cause: &str| Err(ImageError::member(bytes, cause));
        let mut clean = Vec::with_capacity(bytes.len());
        for part in bytes.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".") {
            if part == b".." {
                return refuse("its path contains ..");
            }
            if part.len() > NAME_BYTES_MAX || part.contains(&0) {
                return refuse("its path contains a name that is too long or has a zero byte");
            }
            if !clean.is_empty() {
                clean.push(b'/');
            }
            clean.extend_from_slice(part);
        }
        if clean.len() > PATH_BYTES_MAX {
            return refuse("its path is too long");
        }
        Ok(TreePath(clean))
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Directory and last name; none for the root.
    pub(crate) fn split(&self) -> Option<(TreePath, &[u8])> {
        match self.0.iter().rposition(|byte| *byte == b'/') {
            Some(at) => Some((TreePath(self.0[..at].to_vec()), &self.0[at + 1..])),
            None if self.0.is_empty() => None,
            None => Some((TreePath(Vec::new()), &self.0)),
        }
    }

    fn as_path(&self) -> &Path {
        if self.0.is_empty() { Path::new(".") } else { Path::new(OsStr::from_bytes(&self.0)) }
    }
}

/// Who owns something and who may do what with it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ownership {
    pub uid: u32,
    pub gid: u32,
    pub mode: u32,
}

/// A tree that is being written.
pub(crate) struct TreeWriter {
    path: PathBuf,
    root: OwnedFd,
    /// The directory used last: archives list the members of a directory one after the other.
    last: Option<(TreePath, OwnedFd)>,
    room: Room,
}

impl TreeWriter {
    /// Write into an existing directory.
    pub(crate) fn open(path: &Path) -> Result<TreeWriter> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| ImageError::io("open", path, e))?;
        Ok(TreeWriter { path: path.to_path_buf(), root, last: None, room: Room::of(path) })
    }

    /// The same tree with this room.
    #[cfg(test)]
    pub(crate) fn with_room(self, room: Room) -> TreeWriter {
        TreeWriter { room, ..self }
    }

    /// The room that everything written into the tree is taken from.
    pub(crate) fn room(&mut self) -> &mut Room {
        &mut self.room
    }

    pub(crate) fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// An error with the place in the tree it concerns.
    pub(crate) fn refused(&self, action: &'static str, path: &TreePath, errno: Errno) -> ImageError {
        ImageError::io(action, &self.path.join(path.as_path()), errno)
    }

    /// Open something in the tree; symbolic links on the way stay inside.
    pub(crate) fn open_in(&self, path: &TreePath, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        open_in_root(self.root.as_fd(), path.as_path(), flags)
    }

    /// The directory at `path`, made with all above it when it is not there.
    pub(crate) fn directory(&mut self, path: &TreePath) -> Result<BorrowedFd<'_>> {
        if self.last.as_ref().is_none_or(|(last, _)| last != path) {
            let opened = match self.open_in(path, OFlags::RDONLY | OFlags::DIRECTORY) {
                Err(Errno::NOENT) => self.make_directories(path)?,
                other => other.map_err(|errno| self.refused("open", path, errno))?,
            };
            self.last = Some((path.clone(), opened));
        }
        Ok(self.last.as_ref().map_or(self.root.as_fd(), |(_, directory)| directory.as_fd()))
    }

    fn make_directories(&mut self, path: &TreePath) -> Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let mut above = self.root.try_clone().map_err(|source| ImageError::io("open", &self.path, source))?;
        let mut is_new = false;
        let ends = path.0.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
        for end in ends.chain([path.0.len()]) {
            let part = TreePath(path.0[..end].to_vec());
            let found = if is_new { Err(Errno::NOENT) } else { self.open_in(&part, flags) };
            above = match found {
                Err(Errno::NOENT) => {
                    let name = part.split().map_or(&b"."[..], |(_, name)| name);
                    let opened = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                    // What was just made has no links, and nothing in it: there it goes on without the way from the root.
                    is_new = true;
                    self.room.take_object()?;
                    rustix::fs::mkdirat(&above, name, Mode::from_raw_mode(0o755))
                        .and_then(|()| rustix::fs::openat(&above, name, opened, Mode::empty()))
                        .map_err(|errno| self.refused("make", &part, errno))?
                }
                other => other.map_err(|errno| self.refused("open", &part, errno))?,
            };
        }
        Ok(above)
    }

    /// Whether `path` is that of `name` in the tree's root, or of something below it, also by symbolic links of the tree that lead back to its root.
    pub(crate) fn leads_to_root_name(&self, path: &TreePath, name: &[u8]) -> Result<bool> {
        let mut start = 0;
        for part in path.0.split(|byte| *byte == b'/') {
            if part == name && self.is_root(&TreePath(path.0[..start].to_vec()))? {
                return Ok(true);
            }
            start += part.len() + 1;
        }
        Ok(false)
    }

    fn is_root(&self, path: &TreePath) -> Result<bool> {
        if path.0.is_empty() {
            return Ok(true);
        }
        let identity = |file: BorrowedFd<'_>| rustix::fs::fstat(file).map(|status| (status.st_dev, status.st_ino));
        match self.open_in(path, OFlags::PATH | OFlags::DIRECTORY) {
            Ok(found) => identity(found.as_fd())
                .and_then(|found| Ok(found == identity(self.root.as_fd())?))
                .map_err(|errno| self.refused("look at", path, errno)),
            // What is not there yet becomes a directory of its own, or is refused.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(false),
            Err(errno) => Err(self.refused("open", path, errno)),
        }
    }

    /// Take away what is at `name` in the directory `parent`, if anything; a directory with all it contains.
    pub(crate) fn remove(&mut self, parent: &TreePath, name: &[u8]) -> Result<()> {
        let directory = self.directory(parent)?;
        let removed = match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(Errno::ISDIR) => remove_tree(&descriptor_path(directory, name)).map_err(ImageError::from),
            Err(errno) => Err(self.refused("remove", parent, errno)),
        };
        // The directory used last may have been below it, or been reached through it when it was a link.
        self.last = None;
        removed
    }

    /// What is at `name` in the directory `parent`, not followed; none when there is nothing.
    pub(crate) fn existing(&mut self, parent: &TreePath, name: &[u8]) -> Result<Option<(FileType, u64)>> {
        let directory = self.directory(parent)?;
        match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(status) => Ok(Some((FileType::from_raw_mode(status.st_mode), status.st_rdev))),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(self.refused("look at", parent, errno)),
        }
    }
}

/// Open below `root` as if it were `/`, for as long as somebody else changes names on the way (EAGAIN), within reason.
pub(crate) fn open_in_root(root: BorrowedFd<'_>, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let mut result = Err(Errno::AGAIN);
    for _ in 0..16 {
        result = rustix::fs::openat2(root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve);
        if !matches!(result, Err(Errno::AGAIN)) {
            break;
        }
    }
    result
}

/// A path by which calls without an `*at` form reach `name` in an open directory.
fn descriptor_path(directory: BorrowedFd<'_>, name: &[u8]) -> PathBuf {
    Path::new(&format!("/proc/self/fd/{}", directory.as_raw_fd())).join(OsStr::from_bytes(name))
}

/// Owner first (it clears set-user-id bits and capabilities), then mode, then attributes.
pub(crate) fn set_open_file(
    file: BorrowedFd<'_>,
    owner: Ownership,
    attributes: &[(String, Vec<u8>)],
) -> rustix::io::Result<()> {
    rustix::fs::fchown(file, Some(Uid::from_raw(owner.uid)), Some(Gid::from_raw(owner.gid)))?;
    rustix::fs::fchmod(file, Mode::from_raw_mode(owner.mode))?;
    for (name, value) in attributes {
        rustix::fs::fsetxattr(file, name.as_str(), value, XattrFlags::empty())?;
    }
    Ok(())
}

/// The same for what cannot be opened: links, devices, pipes.
pub(crate) fn set_named(
    directory: BorrowedFd<'_>,
    name: &[u8],
    owner: Ownership,
    is_link: bool,
    attributes: &[(String, Vec<u8>)],
) -> rustix::io::Result<()> {
    let ids = (Some(Uid::from_raw(owner.uid)), Some(Gid::from_raw(owner.gid)));
    rustix::fs::chownat(directory, name, ids.0, ids.1, AtFlags::SYMLINK_NOFOLLOW)?;
    if !is_link {
        rustix::fs::chmodat(directory, name, Mode::from_raw_mode(owner.mode), AtFlags::empty())?;
    }
    let place = descriptor_path(directory, name);
    for (attribute, value) in attributes {
        rustix::fs::lsetxattr(&place, attribute.as_str(), value, XattrFlags::empty())?;
    }
    Ok(())
}

/// Both times of something in a directory, not followed; of the directory itself for an empty name.
pub(crate) fn set_times(directory: BorrowedFd<'_>, name: &[u8], time: Time) -> rustix::io::Result<()> {
    let time = Timespec { tv_sec: time.seconds, tv_nsec: time.nanoseconds.into() };
    let times = Timestamps { last_access: time, last_modification: time };
    if name.is_empty() {
        rustix::fs::futimens(directory, &times)
    } else {
        rustix::fs::utimensat(directory, name, &times, AtFlags::SYMLINK_NOFOLLOW)
    }
}

/// Make everything that was written to the filesystem of `directory` durable.
pub(crate) fn make_durable(path: &Path) -> std::io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(CWD, path, flags, Mode::empty()).and_then(rustix::fs::syncfs)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_cleaned_or_refused() {
        let parse = |text: &str| TreePath::parse(text.as_bytes());
        for (text, clean) in [("./a//b/", "a/b"), ("/etc/passwd", "etc/passwd"), ("./", ""), ("", "")] {
            assert_eq!(parse(text).expect(text).as_bytes(), clean.as_bytes());
        }
        for bad in ["..", "a/../b", "a/..", &"x".repeat(256), "a\0b", &"x/".repeat(3000)] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn links_on_the_way_stay_inside() {
        let outside = tempfile::tempdir().expect("a directory");
        let place = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(place.path().join("real")).expect("made");
        std::os::unix::fs::symlink(outside.path(), place.path().join("out")).expect("made");
        std::os::unix::fs::symlink("../../../real", place.path().join("up")).expect("made");
        let mut tree = TreeWriter::open(place.path()).expect("opened");
        let up = tree.directory(&TreePath::parse(b"up").expect("valid")).expect("leads to real");
        rustix::fs::mkdirat(up, "child", Mode::RWXU).expect("made");
        assert!(place.path().join("real/child").is_dir());
        // The link's target does not exist inside of the tree: nothing is made anywhere.
        assert!(tree.directory(&TreePath::parse(b"out/x").expect("valid")).is_err());
        assert_eq!(std::fs::read_dir(outside.path()).expect("listed").count(), 0);
    }
}
