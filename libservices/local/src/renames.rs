//! Renames.

use crate::directories::type_of;
use crate::error::backend;
use crate::filesystem::{open_name, stat};
use crate::local::Local;
use crate::names::shared;
use poolfs_libservice::{Result, fail};
use poolfs_types::{Errno, FileType, Name, NodeId, RenameFlags};
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, Mode, OFlags, StatxTimestamp, Timespec, Timestamps, UTIME_OMIT};
use rustix::io::Errno as Raw;

/// A directory that is about to move, and when its content was last changed.
struct Moving {
    directory: OwnedFd,
    modified: StatxTimestamp,
}

impl Moving {
    fn of(directory: &OwnedFd, name: Name<'_>) -> Option<Self> {
        let directory = open_name(directory, name.as_bytes(), OFlags::PATH, Mode::empty()).ok()?;
        let modified = stat(&directory).ok().filter(|seen| type_of(seen) == FileType::Directory)?.stx_mtime;
        Some(Self { directory, modified })
    }

    /// xfs counts the new `..` as a change of the directory's content when two names are exchanged; nobody else does.
    fn moved(&self) -> rustix::io::Result<()> {
        let StatxTimestamp { tv_sec, tv_nsec, .. } = self.modified;
        let now = stat(&self.directory)?.stx_mtime;
        if (now.tv_sec, now.tv_nsec) == (tv_sec, tv_nsec) {
            return Ok(());
        }
        let last_access = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
        let times = Timestamps { last_access, last_modification: Timespec { tv_sec, tv_nsec: tv_nsec.into() } };
        rustix::fs::utimensat(&self.directory, c"", &times, AtFlags::EMPTY_PATH)
    }
}

impl Local {
    pub(crate) fn move_name(
        &self,
        (parent, name): (NodeId, Name<'_>),
        (new_parent, new_name): (NodeId, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let from = self.directory(parent)?;
        let to = self.directory(new_parent)?;
        let exchange = flags.contains(RenameFlags::EXCHANGE);
        let contradiction = RenameFlags::NO_REPLACE | RenameFlags::WHITEOUT;
        if exchange && flags.intersects(contradiction) || !RenameFlags::all().contains(flags) {
            return fail(Errno::EINVAL);
        }
        self.changeable()?;
        // In the order of their numbers: a waiting writer of one lock must not stand between two readers of both.
        let (first, second) = if from.id <= to.id { (&from, &to) } else { (&to, &from) };
        let _first = shared(first);
        let _second = (first.id != second.id).then(|| shared(second));
        let (source, target) = (self.entered(&from)?, self.entered(&to)?);
        let stays = exchange || (from.id == to.id && name == new_name);
        let replaced = if stays { None } else { self.removal(&target, new_name)? };
        let moving = [(&source, name), (&target, new_name)]
            .map(|(at, name)| (exchange && from.id != to.id).then(|| Moving::of(at, name)).flatten());
        let how = rustix::fs::RenameFlags::from_bits_retain(flags.bits());
        let rename = || rustix::fs::renameat_with(&source, name.as_bytes(), &target, new_name.as_bytes(), how);
        match self.backing.spend(rename) {
            // POSIX leaves the choice of number, and xfs makes the other one.
            Err(Raw::EXIST) if !flags.contains(RenameFlags::NO_REPLACE) => return fail(Errno::ENOTEMPTY),
            result => result.map_err(|raw| backend("renaming", raw))?,
        }
        self.removed(replaced);
        moving.iter().flatten().try_for_each(Moving::moved).map_err(|raw| backend("renaming", raw))
    }
}
