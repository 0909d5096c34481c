//! Unpacks a layer's archive into the form that a union takes as a lower branch.
//!
//! OCI represents what a layer hides as empty files. The whiteout `.wh.NAME` hides NAME of the layers below, and `.wh..wh..opq` makes a
//! directory opaque. In a lower branch those are a character device 0/0 and the attribute `trusted.overlay.opaque`.

use crate::archive::{ArchiveReader, Member, MemberKind, Time};
use crate::tree::{self, Ownership, TreePath, TreeWriter};
use crate::{ImageError, Limits, Result};
use rustix::fd::AsFd;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, XattrFlags, makedev};
use rustix::io::Errno;
use std::io::{ErrorKind, Read, Write};
use std::path::Path;

const WHITEOUT_PREFIX: &[u8] = b".wh.";
const OPAQUE_MARK: &[u8] = b".wh..wh..opq";
const OPAQUE_ATTRIBUTE: &str = "trusted.overlay.opaque";
/// The work directory in the root of a union's upper branch, by which a union knows that a lower branch was an upper one.
pub(crate) const WORK_DIRECTORY: &[u8] = b".poolfs";
/// Bytes of content copied at a time.
const COPY_BYTES: usize = 256 << 10;
/// Most bytes of directories' paths that wait for their times.
const WAITING_BYTES_MAX: usize = 256 << 20;

/// What an unpacked archive holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unpacked {
    pub members: u64,
    pub bytes: u64,
}

/// What becomes of an unpacked archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A lower branch of unions.
    Layer,
    /// Documents and blobs to import an image from.
    Source,
}

/// Unpack everything `reader` yields below `root`; gives the reader back for what follows the archive.
pub(crate) fn unpack<R: Read>(reader: R, root: &Path, purpose: Purpose, limits: &Limits) -> Result<(Unpacked, R)> {
    let mut unpacker = Unpacker::new(TreeWriter::open(root)?, purpose, limits);
    let reader = unpacker.everything(reader, limits)?;
    Ok((unpacker.done, reader))
}

struct Unpacker {
    tree: TreeWriter,
    purpose: Purpose,
    /// Set last: every new entry changes its directory's time.
    directory_times: Vec<(TreePath, Time)>,
    waiting_bytes: usize,
    buffer: Vec<u8>,
    done: Unpacked,
    bytes_max: u64,
}

impl Unpacker {
    fn new(tree: TreeWriter, purpose: Purpose, limits: &Limits) -> Unpacker {
        Unpacker {
            tree,
            purpose,
            directory_times: Vec::new(),
            waiting_bytes: 0,
            buffer: vec![0; COPY_BYTES],
            done: Unpacked::default(),
            bytes_max: limits.layer_bytes,
        }
    }

    fn everything<R: Read>(&mut self, reader: R, limits: &Limits) -> Result<R> {
        let mut archive = ArchiveReader::new(reader, limits);
        while let Some(member) = archive.next_member()? {
            self.member(&member, &mut archive)?;
        }
        self.finish()?;
        Ok(archive.into_inner())
    }

    fn member(&mut self, member: &Member, content: &mut impl Read) -> Result<()> {
        let path = TreePath::parse(&member.path)?;
        self.done.members += 1;
        let Some((parent, name)) = path.split() else {
            return match member.kind {
                MemberKind::Directory => self.directory_attributes(&path, member),
                _ => Err(ImageError::member(&member.path, "only a directory can be the root")),
            };
        };
        if self.purpose == Purpose::Layer && self.tree.leads_to_root_name(&path, WORK_DIRECTORY)? {
            return Err(ImageError::reserved(&member.path));
        }
        if path.as_bytes().split(|byte| *byte == b'/').rev().skip(1).any(|part| part.starts_with(WHITEOUT_PREFIX)) {
            return Err(ImageError::member(&member.path, "it lies in a directory with a whiteout's name"));
        }
        if name == OPAQUE_MARK {
            return self.opaque(&parent);
        }
        if let Some(hidden) = name.strip_prefix(WHITEOUT_PREFIX) {
            return self.whiteout(member, &parent, hidden);
        }
        self.place(member, &path, &parent, name, content)
            .map_err(|error| if let ImageError::Io { source, .. } = error { named(member, source) } else { error })
    }

    /// Hide `name` of the layers below. What this layer itself has at that name stays, and hides the whole of the one below.
    fn whiteout(&mut self, member: &Member, parent: &TreePath, name: &[u8]) -> Result<()> {
        if name.is_empty() || name.starts_with(b".wh.") || matches!(name, b"." | b"..") {
            return Err(ImageError::member(&member.path, "this whiteout hides no name"));
        }
        let path = TreePath::parse(&[parent.as_bytes(), b"/", name].concat())?;
        if self.purpose == Purpose::Layer && self.tree.leads_to_root_name(&path, WORK_DIRECTORY)? {
            // No layer has that name, so there is nothing to hide.
            return Ok(());
        }
        match self.tree.existing(parent, name)? {
            Some((FileType::Directory, _)) => self.opaque(&path),
            Some(_) => Ok(()),
            None => {
                self.tree.room().take_object()?;
                let directory = self.tree.directory(parent)?;
                rustix::fs::mknodat(directory, name, FileType::CharacterDevice, Mode::empty(), makedev(0, 0))
                    .map_err(|errno| self.tree.refused("make a whiteout in", parent, errno))
            }
        }
    }

    fn opaque(&mut self, path: &TreePath) -> Result<()> {
        self.tree.room().take_attributes(&[(OPAQUE_ATTRIBUTE.to_owned(), b"y".to_vec())])?;
        let directory = self.tree.directory(path)?;
        rustix::fs::fsetxattr(directory, OPAQUE_ATTRIBUTE, b"y", XattrFlags::empty())
            .map_err(|errno| self.tree.refused("mark opaque", path, errno))
    }

    fn place(
        &mut self,
        member: &Member,
        path: &TreePath,
        parent: &TreePath,
        name: &[u8],
        content: &mut impl Read,
    ) -> Result<()> {
        if let MemberKind::Character { major: 0, minor: 0 } = member.kind {
            // In a lower branch this device would hide what is below; no image has a use for it.
            tracing::warn!(member = %String::from_utf8_lossy(&member.path), "left out: a device 0/0 cannot be in a layer");
            return Ok(());
        }
        let existing = self.tree.existing(parent, name)?;
        let hid_below = matches!(existing, Some((FileType::CharacterDevice, 0)));
        let keeps_directory =
            member.kind == MemberKind::Directory && matches!(existing, Some((FileType::Directory, _)));
        if existing.is_some() && !keeps_directory {
            self.tree.remove(parent, name)?;
        }
        match member.kind {
            MemberKind::Directory => {
                if !keeps_directory {
                    self.tree.room().take_object()?;
                    let directory = self.tree.directory(parent)?;
                    rustix::fs::mkdirat(directory, name, Mode::RWXU)
                        .map_err(|errno| self.tree.refused("make", path, errno))?;
                }
                if hid_below {
                    self.opaque(path)?;
                }
                self.directory_attributes(path, member)
            }
            MemberKind::File => self.file(member, path, parent, name, content),
            MemberKind::HardLink => self.hard_link(member, parent, name),
            _ => self.special(member, path, parent, name),
        }
    }

    fn file(
        &mut self,
        member: &Member,
        path: &TreePath,
        parent: &TreePath,
        name: &[u8],
        content: &mut impl Read,
    ) -> Result<()> {
        self.done.bytes = self.done.bytes.saturating_add(member.size);
        if self.done.bytes > self.bytes_max {
            return Err(ImageError::TooLarge { what: "the content of a layer", limit: self.bytes_max });
        }
        let attributes = kept_attributes(member);
        self.tree.room().take_object()?;
        self.tree.room().take_attributes(&attributes)?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = self.tree.directory(parent)?;
        let file = rustix::fs::openat(directory, name, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|errno| self.tree.refused("make", path, errno))?;
        let mut file = std::fs::File::from(file);
        loop {
            let count = content.read(&mut self.buffer).map_err(|e| ImageError::Archive(e.to_string()))?;
            if count == 0 {
                break;
            }
            self.tree.room().take(count as u64)?;
            file.write_all(&self.buffer[..count]).map_err(|source| named(member, source))?;
        }
        tree::set_open_file(file.as_fd(), owner(member), &attributes)
            .and_then(|()| tree::set_times(file.as_fd(), b"", member.modified))
            .map_err(|errno| self.tree.refused("set attributes of", path, errno))
    }

    fn hard_link(&mut self, member: &Member, parent: &TreePath, name: &[u8]) -> Result<()> {
        let target = TreePath::parse(&member.target)?;
        let refuse = |cause: String| ImageError::member(&member.path, cause);
        let (target_parent, target_name) =
            target.split().ok_or_else(|| refuse("it is a hard link to the root".to_owned()))?;
        if matches!(self.tree.existing(&target_parent, target_name)?, Some((FileType::CharacterDevice, 0))) {
            return Err(refuse("it is a hard link to a whiteout".to_owned()));
        }
        self.tree.room().take_name()?;
        let from = self
            .tree
            .open_in(&target_parent, OFlags::PATH | OFlags::DIRECTORY)
            .map_err(|errno| self.tree.refused("open", &target_parent, errno))?;
        let directory = self.tree.directory(parent)?;
        rustix::fs::linkat(&from, target_name, directory, name, AtFlags::empty()).map_err(|errno| {
            refuse(format!(
                "no hard link to {:?}: {}",
                String::from_utf8_lossy(&member.target),
                std::io::Error::from(errno)
            ))
        })
    }

    fn special(&mut self, member: &Member, path: &TreePath, parent: &TreePath, name: &[u8]) -> Result<()> {
        let attributes = kept_attributes(member);
        self.tree.room().take_object()?;
        self.tree.room().take_attributes(&attributes)?;
        let directory = self.tree.directory(parent)?;
        let mode = Mode::from_raw_mode(member.mode & 0o777);
        let made = match member.kind {
            MemberKind::Symlink => rustix::fs::symlinkat(member.target.as_slice(), directory, name),
            MemberKind::Character { major, minor } => {
                rustix::fs::mknodat(directory, name, FileType::CharacterDevice, mode, makedev(major, minor))
            }
            MemberKind::Block { major, minor } => {
                rustix::fs::mknodat(directory, name, FileType::BlockDevice, mode, makedev(major, minor))
            }
            _ => rustix::fs::mknodat(directory, name, FileType::Fifo, mode, 0),
        };
        let is_link = member.kind == MemberKind::Symlink;
        made.and_then(|()| tree::set_named(directory, name, owner(member), is_link, &attributes))
            .and_then(|()| tree::set_times(directory, name, member.modified))
            .map_err(|errno| self.tree.refused("make", path, errno))
    }

    fn directory_attributes(&mut self, path: &TreePath, member: &Member) -> Result<()> {
        let attributes = kept_attributes(member);
        self.tree.room().take_attributes(&attributes)?;
        let directory = self.tree.directory(path)?;
        tree::set_open_file(directory, owner(member), &attributes)
            .map_err(|errno| self.tree.refused("set attributes of", path, errno))?;
        self.waiting_bytes += path.as_bytes().len();
        if self.waiting_bytes > WAITING_BYTES_MAX {
            return Err(ImageError::TooLarge { what: "the paths of directories", limit: WAITING_BYTES_MAX as u64 });
        }
        self.directory_times.push((path.clone(), member.modified));
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        for (path, time) in std::mem::take(&mut self.directory_times) {
            // A later member may have taken the directory's place.
            match self.tree.open_in(&path, OFlags::RDONLY | OFlags::DIRECTORY) {
                Ok(directory) => tree::set_times(directory.as_fd(), b"", time)
                    .map_err(|errno| self.tree.refused("set times of", &path, errno))?,
                Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(errno) => return Err(self.tree.refused("open", &path, errno)),
            }
        }
        // No order of members was found that makes it; if there is one, it does not become a layer either.
        let root = TreePath::parse(b"")?;
        if self.purpose == Purpose::Layer && self.tree.existing(&root, WORK_DIRECTORY)?.is_some() {
            return Err(ImageError::reserved(WORK_DIRECTORY));
        }
        Ok(())
    }
}

/// The failure of a call for a member: one of the archive, unless there is no room for it.
fn named(member: &Member, source: std::io::Error) -> ImageError {
    match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            ImageError::NoRoomFor { member: String::from_utf8_lossy(&member.path).into_owned(), source }
        }
        _ => ImageError::member(&member.path, source.to_string()),
    }
}

fn owner(member: &Member) -> Ownership {
    Ownership { uid: member.uid, gid: member.gid, mode: member.mode }
}

fn kept_attributes(member: &Member) -> Vec<(String, Vec<u8>)> {
    member.attributes.iter().filter(|(name, _)| is_kept_attribute(name)).cloned().collect()
}

/// The attributes an image may bring. `trusted.*` steers unions (redirects, sketches) and other `security.*` the host.
pub(crate) fn is_kept_attribute(name: &str) -> bool {
    matches!(name, "security.capability" | "system.posix_acl_access" | "system.posix_acl_default")
        || (name.starts_with("user.") && !name.starts_with("user.overlay.") && !name.starts_with("user.poolfs."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{BLOCK_BYTES, NAME_BYTES, Room};
    use tar::{Builder, EntryType, Header};

    const GRANTED: (u64, u64) = (1 << 30, 1000);

    fn add(builder: &mut Builder<Vec<u8>>, kind: EntryType, path: &str, content: &[u8]) {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o755);
        header.set_size(content.len() as u64);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        match kind {
            EntryType::Symlink | EntryType::Link => builder.append_link(&mut header, path, "f"),
            _ => builder.append_data(&mut header, path, content),
        }
        .expect("in memory");
    }

    /// Bytes and objects that unpacking takes of so much room.
    fn taken(granted: (u64, u64), build: impl FnOnce(&mut Builder<Vec<u8>>)) -> Result<(u64, u64)> {
        let place = tempfile::tempdir().expect("a directory");
        let mut builder = Builder::new(Vec::new());
        build(&mut builder);
        let archive = builder.into_inner().expect("in memory");
        let limits = Limits::default();
        let tree = TreeWriter::open(place.path())?.with_room(Room::with(granted.0, granted.1));
        let mut unpacker = Unpacker::new(tree, Purpose::Layer, &limits);
        unpacker.everything(&archive[..], &limits)?;
        let left = unpacker.tree.room().granted();
        Ok((granted.0 - left.0, granted.1 - left.1))
    }

    #[test]
    fn whatever_is_made_takes_room() {
        let taken = |build: &dyn Fn(&mut Builder<Vec<u8>>)| taken(GRANTED, build).expect("unpacked");
        let objects = |count: u64| (count * (BLOCK_BYTES + NAME_BYTES), count);
        let with = |(bytes, objects): (u64, u64), more: u64| (bytes + more, objects);
        assert_eq!(taken(&|b| add(b, EntryType::Directory, "d", b"")), objects(1));
        assert_eq!(taken(&|b| (0..2).for_each(|_| add(b, EntryType::Directory, "d", b""))), objects(1), "it is there");
        assert_eq!(
            taken(&|b| add(b, EntryType::Regular, "a/b/f", b"content")),
            with(objects(3), 7),
            "what leads there"
        );
        assert_eq!(taken(&|b| add(b, EntryType::Symlink, "s", b"")), objects(1));
        assert_eq!(taken(&|b| add(b, EntryType::Fifo, "p", b"")), objects(1));
        assert_eq!(taken(&|b| add(b, EntryType::Regular, ".wh.gone", b"")), objects(1));
        assert_eq!(taken(&|b| add(b, EntryType::Regular, "d/.wh..wh..opq", b"")), with(objects(1), BLOCK_BYTES));
        let links = |b: &mut Builder<Vec<u8>>| {
            for name in ["f", "g", "h"] {
                let kind = if name == "f" { EntryType::Regular } else { EntryType::Link };
                add(b, kind, name, b"");
            }
        };
        assert_eq!(taken(&links), with(objects(1), 2 * NAME_BYTES), "further names");
        for kind in [EntryType::Directory, EntryType::Regular] {
            let attributes = |b: &mut Builder<Vec<u8>>| {
                b.append_pax_extensions([("SCHILY.xattr.user.x", &[7; 100][..])]).expect("in memory");
                add(b, kind, "x", b"");
            };
            assert_eq!(taken(&attributes), with(objects(1), BLOCK_BYTES), "attributes of {kind:?}");
        }
    }

    #[test]
    fn an_archive_of_names_alone_ends_where_no_room_is_left() {
        for kind in [EntryType::Directory, EntryType::Symlink, EntryType::Regular, EntryType::Fifo] {
            let many = |b: &mut Builder<Vec<u8>>| (0..100).for_each(|n| add(b, kind, &format!("n{n}"), b""));
            taken(GRANTED, many).expect("unpacked");
            for granted in [(GRANTED.0, 99), (100 * BLOCK_BYTES, GRANTED.1)] {
                let error = taken(granted, many).expect_err("more than there is").to_string();
                assert!(error.contains("No such file"), "the disk is asked again, {kind:?}: {error}");
            }
        }
    }
}
