//! Operations of the reference on open files: reading, writing, allocating, seeking, copying.

use super::content::Content;
use super::state::{Body, Handle, State};
use crate::{Result, Written, fail};
use poolfs_types::limits::FILE_SIZE_MAX;
use poolfs_types::{AllocateMode, Errno, FileType, HandleId, NodeId, OpenFlags, SeekTo};
use std::ops::Range;

impl State {
    pub(super) fn open(&mut self, node: NodeId, flags: OpenFlags) -> Result<HandleId> {
        match self.inode(node)?.attributes.file_type {
            FileType::Regular => {}
            FileType::Directory => return fail(Errno::EISDIR),
            FileType::Symlink => return fail(Errno::ELOOP),
            _ => return fail(Errno::ENXIO),
        }
        self.check_handles()?;
        if flags.contains(OpenFlags::TRUNCATE) && flags.writable() {
            self.change_content(node.0, |content| content.truncate(0))?;
            self.inode_mut(node)?.touch_content();
        }
        Ok(self.new_handle(node, flags))
    }

    pub(super) fn read(&self, handle: HandleId, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        Ok(self.readable(handle)?.read(offset, buffer))
    }

    pub(super) fn write(&mut self, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        let Handle { inode, flags } = self.writable(handle)?;
        let offset = if flags.contains(OpenFlags::APPEND) { self.content(inode)?.size() } else { offset };
        if data.is_empty() {
            return Ok(Written { count: 0, offset });
        }
        checked_range(offset, data.len() as u64)?;
        let room = self.room();
        let count = self.change_content(inode, |content| content.write(offset, data, room))?;
        if count == 0 {
            return fail(Errno::ENOSPC);
        }
        self.any_inode_mut(inode)?.touch_content();
        Ok(Written { count, offset })
    }

    pub(super) fn fallocate(&mut self, handle: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        let Handle { inode, .. } = self.writable(handle)?;
        if length == 0 {
            return fail(Errno::EINVAL);
        }
        let punch = mode.contains(AllocateMode::PUNCH_HOLE);
        let zero = mode.contains(AllocateMode::ZERO_RANGE);
        let keep_size = mode.contains(AllocateMode::KEEP_SIZE);
        if (punch && (zero || !keep_size)) || !AllocateMode::all().contains(mode) {
            return fail(Errno::EOPNOTSUPP);
        }
        let range = checked_range(offset, length)?;
        if !punch && self.content(inode)?.missing(&range) > self.room() {
            return fail(Errno::ENOSPC);
        }
        self.change_content(inode, |content| {
            if punch || zero {
                content.punch(range.clone());
            }
            if !punch {
                content.allocate(&range);
            }
            if !keep_size {
                content.extend(range.end);
            }
        })?;
        self.any_inode_mut(inode)?.touch_content();
        Ok(())
    }

    pub(super) fn seek(&self, handle: HandleId, offset: u64, to: SeekTo) -> Result<u64> {
        let content = self.content(self.handle(handle)?.inode)?;
        if offset >= content.size() {
            return fail(Errno::ENXIO);
        }
        match to {
            SeekTo::Data => content.next_data(offset).ok_or_else(|| Errno::ENXIO.into()),
            SeekTo::Hole => Ok(content.next_hole(offset)),
        }
    }

    pub(super) fn copy_range(
        &mut self,
        (source, source_offset): (HandleId, u64),
        (target, target_offset): (HandleId, u64),
        length: u64,
    ) -> Result<u64> {
        let size = self.readable(source)?.size();
        let same_file = self.handle(source)?.inode == self.writable(target)?.inode;
        checked_range(source_offset, length)?;
        checked_range(target_offset, length)?;
        if same_file && source_offset.abs_diff(target_offset) < length {
            return fail(Errno::EINVAL);
        }
        let mut left = length.min(size.saturating_sub(source_offset));
        let mut buffer = vec![0; left.min(1 << 20) as usize];
        let mut done = 0;
        while left > 0 {
            let want = left.min(buffer.len() as u64) as usize;
            let got = self.read(source, source_offset + done, &mut buffer[..want])?;
            let written = match self.write(target, target_offset + done, &buffer[..got]) {
                Ok(written) => written.count as u64,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            };
            done += written;
            left -= written;
        }
        Ok(done)
    }

    /// A handle that may write a file.
    pub(super) fn writable(&self, handle: HandleId) -> Result<Handle> {
        let found = self.handle(handle)?;
        if !found.flags.writable() {
            return fail(Errno::EBADF);
        }
        self.content(found.inode)?;
        Ok(found)
    }

    fn readable(&self, handle: HandleId) -> Result<&Content> {
        let found = self.handle(handle)?;
        if found.flags.readable() { self.content(found.inode) } else { fail(Errno::EBADF) }
    }

    /// The content behind a handle; a directory has none.
    fn content(&self, inode: u64) -> Result<&Content> {
        match &self.any_inode(inode)?.body {
            Body::File(content) => Ok(content),
            _ => fail(Errno::EBADF),
        }
    }
}

fn checked_range(offset: u64, length: u64) -> Result<Range<u64>> {
    match offset.checked_add(length) {
        Some(end) if end <= FILE_SIZE_MAX => Ok(offset..end),
        _ => fail(Errno::EFBIG),
    }
}
