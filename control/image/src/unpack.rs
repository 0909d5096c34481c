//! Unpacks a layer's archive into the form that a union takes as a lower branch.
//!
//! OCI represents what a layer hides as empty files. The whiteout `.wh.NAME` hides NAME of the layers below, and `.wh..wh..opq` makes a
//! directory opaque. In a lower branch those are a character device 0/0 and the attribute `trusted.overlay.opaque`.

use crate::archive::{ArchiveReader, Member, MemberKind, Time};
use crate::limits::Room;
use crate::tree::{self, Ownership, TreePath, TreeWriter};
use crate::{ImageError, Limits, Result};
use rustix::fd::AsFd;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, XattrFlags, makedev};
use rustix::io::Errno;
use std::io::{Read, Write};
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
    let mut archive = ArchiveReader::new(reader, limits);
    let mut unpacker = Unpacker {
        tree: TreeWriter::open(root)?,
        purpose,
        directory_times: Vec::new(),
        waiting_bytes: 0,
        buffer: vec![0; COPY_BYTES],
        done: Unpacked::default(),
        bytes_max: limits.layer_bytes,
        room: Room::of(root),
    };
    while let Some(member) = archive.next_member()? {
        unpacker.member(&member, &mut archive)?;
    }
    unpacker.finish()?;
    Ok((unpacker.done, archive.into_inner()))
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
    room: Room,
}

impl Unpacker {
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
            .map_err(|error| if let ImageError::Io { source, .. } = &error { named(member, source) } else { error })
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
                let directory = self.tree.directory(parent)?;
                rustix::fs::mknodat(directory, name, FileType::CharacterDevice, Mode::empty(), makedev(0, 0))
                    .map_err(|errno| self.tree.refused("make a whiteout in", parent, errno))
            }
        }
    }

    fn opaque(&mut self, path: &TreePath) -> Result<()> {
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
            self.room.take(count as u64)?;
            file.write_all(&self.buffer[..count]).map_err(|source| named(member, &source))?;
        }
        tree::set_open_file(file.as_fd(), owner(member), &kept_attributes(member))
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
        made.and_then(|()| tree::set_named(directory, name, owner(member), is_link, &kept_attributes(member)))
            .and_then(|()| tree::set_times(directory, name, member.modified))
            .map_err(|errno| self.tree.refused("make", path, errno))
    }

    fn directory_attributes(&mut self, path: &TreePath, member: &Member) -> Result<()> {
        let directory = self.tree.directory(path)?;
        tree::set_open_file(directory, owner(member), &kept_attributes(member))
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

fn named(member: &Member, source: &std::io::Error) -> ImageError {
    ImageError::member(&member.path, source.to_string())
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
