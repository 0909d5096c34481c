//! Opens files, reads and writes them.

use crate::attributes::{has_set_id_bits, restore_set_id_bits};
use crate::handles::{File, Handle};
use crate::layer::Ceph;
use libc::c_int;
use poolfs_libservice::{Durability, Result, Written, fail};
use poolfs_types::limits::FILE_SIZE_MAX;
use poolfs_types::{AllocateMode, Errno, FileType, HandleId, NodeId, OpenFlags, SeekTo, SetAttributes};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// The flags that libcephfs opens a file with.
pub(crate) fn flags_below(flags: OpenFlags) -> c_int {
    match (flags.readable(), flags.writable()) {
        (_, false) => libc::O_RDONLY,
        (false, true) => libc::O_WRONLY,
        (true, true) => libc::O_RDWR,
    }
}

/// A place in a file as libcephfs takes it.
fn place(offset: u64) -> Result<i64> {
    i64::try_from(offset).map_err(|_| Errno::EINVAL.into())
}

/// The end of what is written there.
fn end(offset: u64, length: u64) -> Result<u64> {
    offset.checked_add(length).filter(|end| *end <= FILE_SIZE_MAX).ok_or_else(|| Errno::EFBIG.into())
}

impl Ceph {
    pub(crate) fn open_file(&self, id: NodeId, flags: OpenFlags) -> Result<HandleId> {
        let node = self.nodes.get(id)?;
        match node.file_type {
            FileType::Regular => {}
            FileType::Directory => return fail(Errno::EISDIR),
            FileType::Symlink => return fail(Errno::ELOOP),
            _ => return fail(Errno::ENXIO),
        }
        if flags.writable() {
            self.changeable(&node)?;
        }
        let open = node.inode.open(flags_below(flags)).map_err(|errno| self.fault("opening a file", errno))?;
        if flags.contains(OpenFlags::TRUNCATE) && flags.writable() {
            let changes = SetAttributes { size: Some(0), ..SetAttributes::default() };
            self.change_attributes(id, &changes, None)?;
        }
        self.add_handle(Handle::File(File { node, flags, open }))
    }

    pub(crate) fn read_file(&self, handle: HandleId, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        let handle = self.handles.get(handle)?;
        let file = handle.readable()?;
        let fault = |errno| self.fault("reading a file", errno);
        let Ok(mut at) = place(offset) else { return Ok(0) };
        let mut done = 0;
        while done < buffer.len() {
            let count = file.open.read(at, &mut buffer[done..]).map_err(fault)?;
            if count == 0 {
                break;
            }
            done += count;
            at = at.saturating_add(count as i64);
        }
        Ok(done)
    }

    pub(crate) fn write_file(&self, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        let handle = self.handles.get(handle)?;
        let file = handle.writable()?;
        let fault = |errno| self.fault("writing a file", errno);
        self.has_session("writing a file")?;
        let (node, is_append) = (&file.node, file.flags.contains(OpenFlags::APPEND));
        let write = |offset| {
            end(offset, data.len() as u64)?;
            file.open.write(place(offset)?, data).map_err(fault)
        };
        let attributes = || node.inode.attributes().map_err(fault);
        if data.is_empty() {
            return Ok(Written { count: 0, offset: if is_append { attributes()?.size } else { offset } });
        }
        let shared = node.changing.read().unwrap_or_else(PoisonError::into_inner);
        let (count, offset) = if is_append || has_set_id_bits(&attributes()?) {
            drop(shared);
            let _alone = node.changing.write().unwrap_or_else(PoisonError::into_inner);
            // The end stays where it is until this is written there, for whoever uses this layer.
            let _end = (is_append && self.is_shared).then(|| file.open.lock_end().map_err(fault)).transpose()?;
            let before = attributes()?;
            let offset = if is_append { before.size } else { offset };
            let count = write(offset)?;
            if has_set_id_bits(&before) {
                restore_set_id_bits(&node.inode, &before).map_err(fault)?;
            }
            (count, offset)
        } else {
            (write(offset)?, offset)
        };
        if let Some(durability) = Durability::of_writes(file.flags) {
            self.make_file_durable(file, durability)?;
        }
        Ok(Written { count, offset })
    }

    /// Punches holes; room is never reserved.
    pub(crate) fn allocate(&self, handle: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        let handle = self.handles.get(handle)?;
        let file = handle.writable()?;
        if length == 0 {
            return fail(Errno::EINVAL);
        }
        end(offset, length)?;
        if mode != AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE {
            return fail(Errno::EOPNOTSUPP);
        }
        let punched = file.open.allocate(mode.bits() as c_int, place(offset)?, place(length)?);
        punched.map_err(|errno| self.fault("punching a hole", errno))
    }

    /// All below the size is data.
    pub(crate) fn seek_file(&self, handle: HandleId, offset: u64, to: SeekTo) -> Result<u64> {
        let handle = self.handles.get(handle)?;
        let Handle::File(file) = &*handle else { return fail(Errno::EBADF) };
        let size = file.node.inode.attributes().map_err(|errno| self.fault("reading a size", errno))?.size;
        match to {
            _ if offset >= size => fail(Errno::ENXIO),
            SeekTo::Data => Ok(offset),
            SeekTo::Hole => Ok(size),
        }
    }

    pub(crate) fn make_durable(&self, handle: HandleId, durability: Durability) -> Result<()> {
        let handle = self.handles.get(handle)?;
        match &*handle {
            Handle::File(file) => self.make_file_durable(file, durability),
            Handle::Directory(node, _) => self.synced(&node.inode, || node.inode.sync()),
        }
    }

    /// For libcephfs a size is no part of the data, nor is that something was cut off: where there may be such a change, all of the file is
    /// made durable.
    fn make_file_durable(&self, file: &File, durability: Durability) -> Result<()> {
        let node = &file.node;
        // In this order: what is set from here on counts as not durable.
        let changes = node.size_changes.load(Ordering::Acquire);
        let size = node.inode.attributes().map_err(|errno| self.fault("reading a size", errno))?.size;
        let now = Some((size, changes));
        let durable = || node.durable_size.lock().unwrap_or_else(PoisonError::into_inner);
        let is_data_enough = durability == Durability::Data && *durable() == now;
        self.synced(&node.inode, || file.open.sync(is_data_enough))?;
        if !is_data_enough {
            *durable() = now;
        }
        Ok(())
    }
}
