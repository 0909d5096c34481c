//! Reads and changes attributes, reads link targets, and reports space (`statfs`).

use crate::directories::type_of;
use crate::error::backend;
use crate::filesystem::{device_of, stat};
use crate::local::Local;
use crate::nodes::Node;
use crate::open_file::OpenFile;
use poolfs_libservice::{Result, fail};
use poolfs_types::limits::FILE_SIZE_MAX;
use poolfs_types::{
    Attributes, Errno, FileSystemStatistics, FileType, HandleId, NodeId, SetAttributes, SetTime, Timestamp,
};
use rustix::fd::AsFd;
use rustix::fs::{AtFlags, OFlags, Statx, StatxTimestamp, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use std::sync::Arc;

fn timestamp(raw: StatxTimestamp) -> Timestamp {
    Timestamp { seconds: raw.tv_sec, nanoseconds: raw.tv_nsec }
}

/// The time as one number.
fn nanoseconds(raw: StatxTimestamp) -> u64 {
    raw.tv_sec.cast_unsigned().wrapping_mul(1_000_000_000).wrapping_add(raw.tv_nsec.into())
}

/// The kernel's form of a new time. `nanoseconds` has been checked: the kernel gives values beyond a second a meaning.
fn timespec(time: Option<SetTime>) -> Timespec {
    match time {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(SetTime::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(SetTime::At(at)) => Timespec { tv_sec: at.seconds, tv_nsec: at.nanoseconds.into() },
    }
}

/// Linux's 32-bit encoding of a device number.
pub(crate) fn encode_device(major: u32, minor: u32) -> u32 {
    minor & 0xff | (major & 0xfff) << 8 | (minor & 0xfff00) << 12
}

/// Major and minor of Linux's 32-bit encoding.
pub(crate) fn decode_device(device: u32) -> (u32, u32) {
    (device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xfff00)
}

/// Refuses changes that the node cannot take.
fn check(node: &Arc<Node>, changes: &SetAttributes, open: Option<&OpenFile>) -> Result<()> {
    if open.is_some_and(|open| !Arc::ptr_eq(&open.node, node)) {
        return fail(Errno::EBADF);
    }
    match (node.file_type, changes.size) {
        (_, None) => {}
        (FileType::Regular, Some(size)) if size > FILE_SIZE_MAX => return fail(Errno::EFBIG),
        (FileType::Regular, Some(_)) => {}
        (FileType::Directory, Some(_)) => return fail(Errno::EISDIR),
        (_, Some(_)) => return fail(Errno::EINVAL),
    }
    if node.file_type == FileType::Symlink && changes.permissions.is_some() {
        return fail(Errno::EOPNOTSUPP);
    }
    let bad = |time| matches!(time, Some(SetTime::At(Timestamp { nanoseconds: 1_000_000_000.., .. })));
    if bad(changes.accessed) || bad(changes.modified) { fail(Errno::EINVAL) } else { Ok(()) }
}

impl Local {
    pub(crate) fn attributes(&self, stat: &Statx) -> Attributes {
        let file_type = type_of(stat);
        let is_device = matches!(file_type, FileType::CharDevice | FileType::BlockDevice);
        Attributes {
            inode: self.backing.shown_inode(device_of(stat), stat.stx_ino),
            file_type,
            permissions: u32::from(stat.stx_mode) & 0o7777,
            links: stat.stx_nlink,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            device: if is_device { encode_device(stat.stx_rdev_major, stat.stx_rdev_minor) } else { 0 },
            size: stat.stx_size,
            blocks: stat.stx_blocks,
            accessed: timestamp(stat.stx_atime),
            modified: timestamp(stat.stx_mtime),
            changed: timestamp(stat.stx_ctime),
            change: nanoseconds(stat.stx_ctime),
        }
    }

    pub(crate) fn attributes_of(&self, id: NodeId) -> Result<Attributes> {
        let node = self.nodes.get(id)?;
        let descriptor = self.nodes.descriptor(&node)?;
        let stat = stat(&descriptor).map_err(|raw| backend("reading attributes", raw))?;
        Ok(self.attributes(&stat))
    }

    /// Changes attributes. Everything that can be refused by looking is, before anything changes; the size comes first, since
    /// only it can run out of space, and the times last, since the others set them.
    pub(crate) fn change_attributes(
        &self,
        id: NodeId,
        changes: &SetAttributes,
        handle: Option<HandleId>,
    ) -> Result<Attributes> {
        let node = self.nodes.get(id)?;
        let handle = handle.filter(|_| changes.size.is_some()).map(|id| self.handle(id)).transpose()?;
        let open = handle.as_deref().map(|handle| handle.file()?.writable()).transpose()?;
        check(&node, changes, open)?;
        self.changeable()?;
        let descriptor = self.nodes.descriptor(&node)?;
        match (changes.size, open) {
            (None, _) => {}
            (Some(size), Some(open)) => self.truncate(open, size)?,
            (Some(size), None) => {
                let fault = |raw| backend("truncating a file", raw);
                let reopen = || self.backing.reopen(&descriptor, OFlags::WRONLY);
                let file = self.nodes.with_room(reopen).map_err(fault)?;
                rustix::fs::ftruncate(&file, size).map_err(fault)?;
                node.size.forget();
            }
        }
        self.change_owner_and_mode(descriptor.as_fd(), changes)?;
        if changes.accessed.is_some() || changes.modified.is_some() {
            let times =
                Timestamps { last_access: timespec(changes.accessed), last_modification: timespec(changes.modified) };
            rustix::fs::utimensat(&descriptor, c"", &times, AtFlags::EMPTY_PATH)
                .map_err(|raw| backend("changing times", raw))?;
        }
        let stat = stat(&descriptor).map_err(|raw| backend("reading attributes", raw))?;
        Ok(self.attributes(&stat))
    }

    fn change_owner_and_mode(&self, fd: rustix::fd::BorrowedFd<'_>, changes: &SetAttributes) -> Result<()> {
        let mut permissions = changes.permissions;
        if changes.uid.is_some() || changes.gid.is_some() {
            let fault = |raw| backend("changing the owner", raw);
            let before = stat(fd).map_err(fault)?;
            self.backing.change_owner(fd, changes.uid, changes.gid).map_err(fault)?;
            // The kernel takes set-id bits away with the owner; whether they go is not this layer's decision.
            let mode = u32::from(before.stx_mode) & 0o7777;
            if type_of(&before) != FileType::Directory && mode & 0o6000 != 0 {
                permissions = permissions.or(Some(mode));
            }
        }
        if let Some(permissions) = permissions {
            self.backing.change_mode(fd, permissions).map_err(|raw| backend("changing the mode", raw))?;
        }
        Ok(())
    }

    pub(crate) fn link_target(&self, id: NodeId) -> Result<Vec<u8>> {
        let node = self.nodes.get(id)?;
        if node.file_type != FileType::Symlink {
            return fail(Errno::EINVAL);
        }
        let descriptor = self.nodes.descriptor(&node)?;
        let target = rustix::fs::readlinkat(&descriptor, c"", Vec::new());
        Ok(target.map_err(|raw| backend("reading a symbolic link", raw))?.into_bytes())
    }

    pub(crate) fn space(&self, id: NodeId) -> Result<FileSystemStatistics> {
        let node = self.nodes.get(id)?;
        let descriptor = self.nodes.descriptor(&node)?;
        let raw = rustix::fs::fstatfs(&descriptor).map_err(|raw| backend("asking for free space", raw))?;
        let unit = if raw.f_frsize > 0 { raw.f_frsize } else { raw.f_bsize };
        Ok(FileSystemStatistics {
            block_size: u32::try_from(unit).unwrap_or(u32::MAX),
            blocks: raw.f_blocks,
            blocks_free: raw.f_bfree,
            blocks_available: raw.f_bavail,
            files: raw.f_files,
            files_free: raw.f_ffree,
            name_max: u32::try_from(raw.f_namelen).unwrap_or(255),
            has_quotas: self.has_quotas,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_survive_both_ways() {
        for (major, minor) in [(0, 0), (1, 3), (8, 17), (0xfff, 0xfffff), (259, 0x12345)] {
            assert_eq!(decode_device(encode_device(major, minor)), (major, minor));
        }
    }
}
