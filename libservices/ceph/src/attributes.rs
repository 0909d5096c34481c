//! Reads and changes attributes, and reports space (`statfs`).

use crate::client::{Answer, Inode};
use crate::functions::Statx;
use crate::handles::Handle;
use crate::layer::Ceph;
use crate::seen;
use libc::{c_int, timespec};
use poolfs_libservice::{Result, fail};
use poolfs_types::limits::{FILE_SIZE_MAX, NAME_MAX};
use poolfs_types::{
    Attributes, Errno, FileSystemStatistics, FileType, HandleId, NodeId, SetAttributes, SetTime, Timestamp,
};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Of a mode.
const SET_ID_BITS: u16 = 0o6000;

/// `CEPH_SETATTR_*`.
const SET_MODE: c_int = 1;
const SET_UID: c_int = 1 << 1;
const SET_GID: c_int = 1 << 2;
const SET_MODIFIED: c_int = 1 << 3;
const SET_ACCESSED: c_int = 1 << 4;
const SET_SIZE: c_int = 1 << 5;

fn now() -> timespec {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    timespec { tv_sec: since.as_secs() as i64, tv_nsec: since.subsec_nanos().into() }
}

/// The nearest time that CephFS can keep: it has 32 bits for seconds from 1970 on. The kernel's client does the same.
fn nearest(at: Timestamp) -> timespec {
    let last = i64::from(u32::MAX);
    let nanoseconds = if (0..=last).contains(&at.seconds) { at.nanoseconds } else { 0 };
    timespec { tv_sec: at.seconds.clamp(0, last), tv_nsec: nanoseconds.into() }
}

/// The time as libcephfs takes it.
fn time(wanted: SetTime) -> Result<timespec> {
    match wanted {
        SetTime::Now => Ok(now()),
        SetTime::At(Timestamp { nanoseconds: 1_000_000_000.., .. }) => fail(Errno::EINVAL),
        SetTime::At(at) => Ok(nearest(at)),
    }
}

/// Sets the time of modification to now.
pub(crate) fn touch(inode: &Inode) -> Answer<()> {
    let mut values = Statx { modified: now(), ..inode.attributes()? };
    inode.set_attributes(&mut values, SET_MODIFIED)
}

/// Whether a file with these attributes has bits that a write takes away in libcephfs, whoever writes: whether that is right has been decided above.
pub(crate) fn has_set_id_bits(found: &Statx) -> bool {
    found.mode & SET_ID_BITS != 0
}

/// Gives such bits back after a write. The caller has the node's `changing` alone.
pub(crate) fn restore_set_id_bits(inode: &Inode, before: &Statx) -> Answer<()> {
    let mut values = inode.attributes()?;
    if values.mode == before.mode {
        return Ok(());
    }
    values.mode = before.mode;
    inode.set_attributes(&mut values, SET_MODE)
}

impl Ceph {
    pub(crate) fn attributes_of(&self, id: NodeId) -> Result<Attributes> {
        let node = self.nodes.get(id)?;
        let found = node.inode.attributes().map_err(|errno| self.fault("reading attributes", errno))?;
        Ok(seen::of(&found)?.attributes)
    }

    pub(crate) fn change_attributes(
        &self,
        id: NodeId,
        changes: &SetAttributes,
        handle: Option<HandleId>,
    ) -> Result<Attributes> {
        let node = self.nodes.get(id)?;
        let handle = handle.filter(|_| changes.size.is_some()).map(|id| self.handles.get(id)).transpose()?;
        if let Some(file) = handle.as_deref().map(Handle::writable).transpose()?
            && !Arc::ptr_eq(&file.node, &node)
        {
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
        let (accessed, modified) = (changes.accessed.map(time).transpose()?, changes.modified.map(time).transpose()?);
        self.changeable(&node)?;
        let fault = |errno| self.fault("changing attributes", errno);
        let _alone = node.changing.write().unwrap_or_else(PoisonError::into_inner);
        let before = node.inode.attributes().map_err(fault)?;
        let mode = changes.permissions.map_or(before.mode & 0o7777, |permissions| (permissions & 0o7777) as u16);
        // The size first: only it can be refused for what the cluster has. It sets times, so those come last.
        if let Some(size) = changes.size {
            node.size_changes.fetch_add(1, Ordering::AcqRel);
            let mut values = Statx { size, modified: now(), ..before };
            // libcephfs does nothing for the size that there is.
            let mask = if size == before.size { SET_MODIFIED } else { SET_SIZE };
            node.inode.set_attributes(&mut values, mask).map_err(fault)?;
        }
        let mut values = node.inode.attributes().map_err(fault)?;
        let mut mask = 0;
        if changes.permissions.is_some() {
            values.mode = mode;
            mask |= SET_MODE;
        }
        if let Some(uid) = changes.uid {
            values.uid = uid;
            mask |= SET_UID;
        }
        if let Some(gid) = changes.gid {
            values.gid = gid;
            mask |= SET_GID;
        }
        if let Some(at) = accessed {
            values.accessed = at;
            mask |= SET_ACCESSED;
        }
        if let Some(at) = modified {
            values.modified = at;
            mask |= SET_MODIFIED;
        }
        let before = (values.changed.tv_sec, values.changed.tv_nsec);
        if mask != 0 {
            node.inode.set_attributes(&mut values, mask).map_err(fault)?;
        }
        let mut found = node.inode.attributes().map_err(fault)?;
        if node.file_type != FileType::Symlink && found.mode & 0o7777 != mode {
            // Whether set-id bits go with an owner has been decided above.
            found.mode = mode;
            node.inode.set_attributes(&mut found, SET_MODE).map_err(fault)?;
            found = node.inode.attributes().map_err(fault)?;
        }
        if mask != 0 && (found.changed.tv_sec, found.changed.tv_nsec) == before {
            // libcephfs takes what is so already for no change. To change nothing means that the time is to change.
            node.inode.set_attributes(&mut found, 0).map_err(fault)?;
            found = node.inode.attributes().map_err(fault)?;
        }
        if self.is_shared {
            // As for changes of names; it is changed, whatever comes of this.
            let _ = node.inode.sync();
        }
        Ok(seen::of(&found)?.attributes)
    }

    pub(crate) fn space(&self, id: NodeId) -> Result<FileSystemStatistics> {
        let node = self.nodes.get(id)?;
        let space = node.inode.space().map_err(|errno| self.fault("asking for free space", errno))?;
        Ok(FileSystemStatistics {
            block_size: u32::try_from(if space.f_frsize > 0 { space.f_frsize } else { space.f_bsize })
                .unwrap_or(u32::MAX),
            blocks: space.f_blocks,
            blocks_free: space.f_bfree,
            blocks_available: space.f_bavail,
            // There are as many as there is room for: Ceph calls the free ones -1.
            files: if space.f_ffree == u64::MAX { 0 } else { space.f_files },
            files_free: if space.f_ffree == u64::MAX { 0 } else { space.f_ffree },
            name_max: NAME_MAX as u32,
            // That of the tree is told here. Those of directories in it are enforced late and by nobody reliably: a writer is told when the cluster refuses.
            has_quotas: false,
        })
    }
}
