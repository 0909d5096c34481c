//! Import of a root filesystem from a directory.

use crate::archive::Time;
use crate::digest::Digest;
use crate::limits::Room;
use crate::tree::{self, Ownership};
use crate::unpack::{Unpacked, WORK_DIRECTORY};
use crate::{ImageError, Limits, Progress, Result};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RawMode, Stat};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Deepest directory that is copied; open descriptors are held for each level.
const DEPTH_MAX: usize = 512;
/// Most bytes of the list of attributes of one file.
const ATTRIBUTE_LIST_BYTES: usize = 64 << 10;
const COPY_BYTES: usize = 256 << 10;

/// Copy the tree at `from` into the empty directory `to`; the digest is of everything that was copied, in order of names.
pub(crate) fn copy_tree(
    from: &Path,
    to: &Path,
    limits: &Limits,
    progress: &mut dyn Progress,
) -> Result<(Unpacked, Digest)> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = |path: &Path| rustix::fs::open(path, flags, Mode::empty()).map_err(|e| ImageError::io("open", path, e));
    let (source, target) = (open(from)?, open(to)?);
    let status = rustix::fs::fstat(&source).map_err(|errno| ImageError::io("look at", from, errno))?;
    let mut copier = Copier::new(to, status.st_dev, limits, progress);
    copier.progress.begin(&from.display().to_string(), 0);
    copier.directory(&source, &target, Path::new(""), &status, 0)?;
    copier.progress.end();
    Ok((copier.done, Digest::finished(copier.hasher)))
}

struct Copier<'a> {
    limits: &'a Limits,
    progress: &'a mut dyn Progress,
    /// Other filesystems mounted in the tree are not copied.
    device: u64,
    /// Where a file (filesystem and number) with several names was copied to first.
    linked: HashMap<(u64, u64), PathBuf>,
    target_root: PathBuf,
    hasher: Sha256,
    done: Unpacked,
    buffer: Vec<u8>,
    room: Room,
}

impl<'a> Copier<'a> {
    fn new(to: &Path, device: u64, limits: &'a Limits, progress: &'a mut dyn Progress) -> Copier<'a> {
        Copier {
            limits,
            progress,
            device,
            linked: HashMap::new(),
            target_root: to.to_path_buf(),
            hasher: Sha256::new(),
            done: Unpacked::default(),
            buffer: vec![0; COPY_BYTES],
            room: Room::of(to),
        }
    }

    fn directory(&mut self, from: &OwnedFd, to: &OwnedFd, path: &Path, status: &Stat, depth: usize) -> Result<()> {
        if depth > DEPTH_MAX {
            return Err(ImageError::TooLarge { what: "the depth of a directory tree", limit: DEPTH_MAX as u64 });
        }
        let fail = |action| move |errno: Errno| ImageError::io(action, &Path::new("/").join(path), errno);
        self.note(path, status, b"");
        let mut names = Vec::new();
        for entry in Dir::read_from(from).map_err(fail("list"))? {
            let name = entry.map_err(fail("list"))?.file_name().to_bytes().to_vec();
            if !matches!(name.as_slice(), b"." | b"..") {
                names.push(name);
            }
        }
        names.sort();
        for name in names {
            let child = path.join(std::ffi::OsStr::from_bytes(&name));
            self.child(from.as_fd(), to.as_fd(), &name, &child, depth)?;
        }
        let attributes = self.attributes(from.as_fd(), path)?;
        self.room.take_attributes(&attributes)?;
        tree::set_open_file(to.as_fd(), owner(status), &attributes)
            .and_then(|()| tree::set_times(to.as_fd(), b"", time(status)))
            .map_err(fail("set attributes of"))
    }

    fn child(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        name: &[u8],
        path: &Path,
        depth: usize,
    ) -> Result<()> {
        let fail = |action| move |errno: Errno| ImageError::io(action, &Path::new("/").join(path), errno);
        if depth == 0 && name == WORK_DIRECTORY {
            return Err(ImageError::reserved(name));
        }
        let status = rustix::fs::statat(from, name, AtFlags::SYMLINK_NOFOLLOW).map_err(fail("look at"))?;
        self.done.members += 1;
        if self.done.members > self.limits.layer_members {
            let limit = self.limits.layer_members;
            return Err(ImageError::TooLarge { what: "the number of files", limit });
        }
        let kind = FileType::from_raw_mode(status.st_mode);
        match kind {
            FileType::Socket => return Ok(()),
            FileType::CharacterDevice if status.st_rdev == 0 => {
                tracing::warn!(path = %path.display(), "left out: a device 0/0 cannot be in a layer");
                return Ok(());
            }
            _ => {}
        }
        if kind != FileType::Directory && status.st_nlink > 1 {
            let identity = (status.st_dev, status.st_ino);
            if let Some(first) = self.linked.get(&identity) {
                let first = self.target_root.join(first);
                self.room.take_name()?;
                rustix::fs::linkat(rustix::fs::CWD, &first, to, name, AtFlags::empty()).map_err(fail("link"))?;
                self.note(path, &status, b"link");
                return Ok(());
            }
            self.linked.insert(identity, path.to_path_buf());
        }
        self.room.take_object()?;
        match kind {
            FileType::Directory => {
                let open = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                rustix::fs::mkdirat(to, name, Mode::RWXU).map_err(fail("make"))?;
                let target = rustix::fs::openat(to, name, open, Mode::empty()).map_err(fail("open"))?;
                if status.st_dev != self.device {
                    // A mount point stays, what is mounted on it belongs to somebody else.
                    return tree::set_open_file(target.as_fd(), owner(&status), &[]).map_err(fail("set attributes of"));
                }
                let source = rustix::fs::openat(from, name, open, Mode::empty()).map_err(fail("open"))?;
                self.directory(&source, &target, path, &status, depth + 1)
            }
            FileType::RegularFile => self.file(from, to, name, path, &status),
            _ => {
                let mut target = Vec::new();
                let made = if kind == FileType::Symlink {
                    target = rustix::fs::readlinkat(from, name, Vec::new()).map_err(fail("read"))?.into_bytes();
                    rustix::fs::symlinkat(target.as_slice(), to, name)
                } else {
                    rustix::fs::mknodat(to, name, kind, Mode::RUSR | Mode::WUSR, status.st_rdev)
                };
                self.note(path, &status, &target);
                made.and_then(|()| tree::set_named(to, name, owner(&status), kind == FileType::Symlink, &[]))
                    .and_then(|()| tree::set_times(to, name, time(&status)))
                    .map_err(fail("make"))
            }
        }
    }

    fn file(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        name: &[u8],
        path: &Path,
        status: &Stat,
    ) -> Result<()> {
        let fail = |action| move |errno: Errno| ImageError::io(action, &Path::new("/").join(path), errno);
        let failed = |source: std::io::Error| ImageError::io("copy", &Path::new("/").join(path), source);
        let reading = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let writing = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut source = File::from(rustix::fs::openat(from, name, reading, Mode::empty()).map_err(fail("open"))?);
        let target = rustix::fs::openat(to, name, writing, Mode::RUSR | Mode::WUSR).map_err(fail("make"))?;
        let mut target = File::from(target);
        self.note(path, status, b"");
        loop {
            let count = source.read(&mut self.buffer).map_err(failed)?;
            if count == 0 {
                break;
            }
            self.room.take(count as u64)?;
            self.hasher.update(&self.buffer[..count]);
            target.write_all(&self.buffer[..count]).map_err(failed)?;
            self.progress.advance(count as u64);
            if self.progress.is_cancelled() {
                return Err(failed(std::io::Error::other("it was interrupted")));
            }
            self.done.bytes += count as u64;
            if self.done.bytes > self.limits.layer_bytes {
                return Err(ImageError::TooLarge { what: "the content of a layer", limit: self.limits.layer_bytes });
            }
        }
        let attributes = self.attributes(source.as_fd(), path)?;
        self.room.take_attributes(&attributes)?;
        tree::set_open_file(target.as_fd(), owner(status), &attributes)
            .and_then(|()| tree::set_times(target.as_fd(), b"", time(status)))
            .map_err(fail("set attributes of"))
    }

    /// The attributes worth taking over, also into the digest.
    fn attributes(&mut self, file: BorrowedFd<'_>, path: &Path) -> Result<Vec<(String, Vec<u8>)>> {
        let fail = |errno: Errno| ImageError::io("read attributes of", &Path::new("/").join(path), errno);
        let mut list = vec![0; ATTRIBUTE_LIST_BYTES];
        let length = match rustix::fs::flistxattr(file, &mut list) {
            Ok(length) => length,
            Err(Errno::NOTSUP) => 0,
            Err(errno) => return Err(fail(errno)),
        };
        let mut attributes = Vec::new();
        for name in list[..length].split(|byte| *byte == 0).filter_map(|name| std::str::from_utf8(name).ok()) {
            if crate::unpack::is_kept_attribute(name) {
                let mut value = vec![0; ATTRIBUTE_LIST_BYTES];
                let length = rustix::fs::fgetxattr(file, name, &mut value).map_err(fail)?;
                value.truncate(length);
                self.hasher.update(name);
                self.hasher.update(&value);
                attributes.push((name.to_owned(), value));
            }
        }
        Ok(attributes)
    }

    fn note(&mut self, path: &Path, status: &Stat, more: &[u8]) {
        let numbers = format!(
            "\0{:o} {} {} {} {}.{} {}\0",
            status.st_mode as RawMode,
            status.st_uid,
            status.st_gid,
            status.st_size,
            status.st_mtime,
            status.st_mtime_nsec,
            status.st_rdev
        );
        self.hasher.update(path.as_os_str().as_bytes());
        self.hasher.update(numbers);
        self.hasher.update(more);
    }
}

fn owner(status: &Stat) -> Ownership {
    Ownership { uid: status.st_uid, gid: status.st_gid, mode: status.st_mode & 0o7777 }
}

fn time(status: &Stat) -> Time {
    Time { seconds: status.st_mtime, nanoseconds: u32::try_from(status.st_mtime_nsec).unwrap_or(0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{BLOCK_BYTES, NAME_BYTES};

    #[test]
    fn whatever_is_made_takes_room() {
        const GRANTED: (u64, u64) = (1 << 30, 1000);
        let (from, to) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        let at = |name: &str| from.path().join(name);
        std::fs::create_dir(at("d")).expect("made");
        std::fs::write(at("d/f"), b"content").expect("written");
        std::fs::hard_link(at("d/f"), at("d/g")).expect("linked");
        std::os::unix::fs::symlink("f", at("d/s")).expect("linked");
        rustix::fs::setxattr(at("d"), "user.x", &[7; 100], rustix::fs::XattrFlags::empty()).expect("set");
        let open = |path: &Path| OwnedFd::from(File::open(path).expect("opened"));
        let (source, target) = (open(from.path()), open(to.path()));
        let status = rustix::fs::fstat(&source).expect("there");
        let (limits, mut progress) = (Limits::default(), crate::Silent);
        let mut copier = Copier::new(to.path(), status.st_dev, &limits, &mut progress);
        copier.room = Room::with(GRANTED.0, GRANTED.1);
        copier.directory(&source, &target, Path::new(""), &status, 0).expect("copied");
        let left = copier.room.granted();
        // The directory with its attributes, the file with its content and its second name, the link.
        let bytes = 3 * (BLOCK_BYTES + NAME_BYTES) + BLOCK_BYTES + 7 + NAME_BYTES;
        assert_eq!((GRANTED.0 - left.0, GRANTED.1 - left.1), (bytes, 3));
    }
}
