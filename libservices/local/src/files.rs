//! Operations on open files: reading, writing, allocating, seeking, copying, syncing.

use crate::error::backend;
use crate::local::{Handle, Local};
use crate::nodes::lock;
use crate::open_file::{OpenFile, Opened, backing_flags};
use crate::sys;
use crate::transfer::{DIRECT_SIZE_MIN, Direct};
use poolfs_libservice::{Durability, Result, Written, copy_in_pieces, fail};
use poolfs_types::limits::FILE_SIZE_MAX;
use poolfs_types::{AllocateMode, Errno, FileType, HandleId, NodeId, OpenFlags, SeekTo};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FallocateFlags, OFlags, SeekFrom, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::Errno as Raw;
use std::ops::Range;
use std::sync::Arc;

/// Most bytes one `copy_file_range` is asked to move.
const COPY_BYTES_MAX: u64 = 1 << 30;

impl Local {
    pub(crate) fn open_file(&self, id: NodeId, flags: OpenFlags) -> Result<HandleId> {
        let node = self.nodes.get(id)?;
        match node.file_type {
            FileType::Regular => {}
            FileType::Directory => return fail(Errno::EISDIR),
            FileType::Symlink => return fail(Errno::ELOOP),
            _ => return fail(Errno::ENXIO),
        }
        if flags.writable() {
            self.changeable()?;
        }
        let descriptor = self.nodes.descriptor(&node)?;
        let truncate = flags.contains(OpenFlags::TRUNCATE) && flags.writable();
        let how = backing_flags(flags) | if truncate { OFlags::TRUNC } else { OFlags::empty() };
        let file = self
            .nodes
            .with_room(|| self.backing.reopen(&descriptor, how))
            .map_err(|raw| backend("opening a file", raw))?;
        if truncate {
            node.size.forget();
        }
        self.add_handle(Handle::File(OpenFile::new(node, flags, file, &self.nodes.descriptors)))
    }

    /// The descriptors of an open file, which stay open as long as they are used.
    fn opened(&self, open: &OpenFile) -> Result<Arc<Opened>> {
        open.opened.get(&self.nodes.descriptors, || {
            let descriptor = self.nodes.descriptor(&open.node)?;
            let reopen = || self.backing.reopen(&descriptor, backing_flags(open.flags));
            let file = self.nodes.with_room(reopen).map_err(|raw| backend("opening a file again", raw))?;
            Ok(Opened::new(Arc::new(file)))
        })
    }

    pub(crate) fn truncate(&self, open: &OpenFile, size: u64) -> Result<()> {
        rustix::fs::ftruncate(&self.opened(open)?.file, size).map_err(|raw| backend("truncating a file", raw))?;
        open.node.size.forget();
        Ok(())
    }

    /// The direct description of an open file, made when first needed.
    fn direct<'a>(&self, opened: &'a Opened, flags: OpenFlags) -> Option<&'a Direct> {
        if !self.backing.has_device() {
            return None;
        }
        let make = || {
            let flags = backing_flags(flags) | OFlags::DIRECT;
            Direct::new(self.backing.reopen(&opened.file, flags).ok()?)
        };
        opened.direct.get_or_init(make).as_ref()
    }

    /// The part of `range` that moves by direct I/O, if the file is large enough, and the description to move it by.
    fn direct_part<'a>(
        &self,
        open: &OpenFile,
        opened: &'a Opened,
        range: &Range<u64>,
        writes: bool,
    ) -> Option<(&'a Direct, Range<u64>)> {
        if range.end - range.start < 4096 {
            return None;
        }
        let size = || rustix::fs::fstat(&opened.file).map_or(0, |stat| stat.st_size as u64);
        let becomes_large = writes && range.end >= DIRECT_SIZE_MIN;
        if !becomes_large && !open.node.size.is_large(writes, size) {
            return None;
        }
        let direct = self.direct(opened, open.flags)?;
        let body = direct.body(range);
        (!body.is_empty()).then_some((direct, body))
    }

    pub(crate) fn read_file(&self, open: &OpenFile, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        let opened = self.opened(open.readable()?)?;
        let file = opened.file.as_fd();
        let room = FILE_SIZE_MAX.saturating_sub(offset).min(buffer.len() as u64) as usize;
        let buffer = &mut buffer[..room];
        let fault = |raw| backend("reading a file", raw);
        let range = offset..offset + room as u64;
        let Some((direct, body)) = self.direct_part(open, &opened, &range, false) else {
            return self.buffered.read(file, offset, buffer).map_err(fault);
        };
        let head = (body.start - offset) as usize;
        let (first, rest) = buffer.split_at_mut(head);
        let (middle, last) = rest.split_at_mut((body.end - body.start) as usize);
        let mut done = self.buffered.read(file, offset, first).map_err(fault)?;
        if done < head {
            return Ok(done);
        }
        // xfs refuses (EIO) to read an extent directly that it has reserved but not yet placed on the disk, which is no
        // failure of the disk. What is one fails again through the cache.
        let got = match direct.read(&self.bounce, body.start, middle) {
            Some(Ok(got)) => Ok(got),
            Some(Err(_)) | None => self.buffered.read(file, body.start, middle),
        };
        match got {
            Ok(got) => done += got,
            Err(_) if done > 0 => return Ok(done),
            Err(raw) => return Err(fault(raw)),
        }
        if done < head + middle.len() {
            return Ok(done);
        }
        // The bytes before were read: a failure of the rest is the next read's to report.
        Ok(done + self.buffered.read(file, body.end, last).unwrap_or(0))
    }

    pub(crate) fn write_file(&self, open: &OpenFile, offset: u64, data: &[u8]) -> Result<Written> {
        let opened = self.opened(open.writable()?)?;
        let file = opened.file.as_fd();
        let fault = |raw| backend("writing a file", raw);
        if open.flags.contains(OpenFlags::APPEND) {
            return self.append(open, file, data);
        }
        let room = FILE_SIZE_MAX.saturating_sub(offset).min(data.len() as u64) as usize;
        if room == 0 && !data.is_empty() {
            return fail(Errno::EFBIG);
        }
        let data = &data[..room];
        let range = offset..offset.saturating_add(room as u64);
        let Some((direct, body)) = self.direct_part(open, &opened, &range, true) else {
            let count = self.backing.spend(|| self.buffered.write(file, offset, data)).map_err(fault)?;
            open.node.size.written(offset, count as u64);
            return Ok(Written { count, offset });
        };
        let (first, rest) = data.split_at((body.start - offset) as usize);
        let (middle, last) = rest.split_at((body.end - body.start) as usize);
        let buffered = |at, part: &[u8]| self.buffered.write(file, at, part);
        let mut count = 0;
        for (at, part, is_body) in [(offset, first, false), (body.start, middle, true), (body.end, last, false)] {
            let put = || {
                if is_body {
                    direct.write(&self.bounce, at, part).unwrap_or_else(|| buffered(at, part))
                } else {
                    buffered(at, part)
                }
            };
            match self.backing.spend(put) {
                Ok(put) => count += put,
                Err(_) if count > 0 => break,
                Err(raw) => return Err(fault(raw)),
            }
            if count < (at - offset) as usize + part.len() {
                break;
            }
        }
        open.node.size.written(offset, count as u64);
        Ok(Written { count, offset })
    }

    /// Writes those pieces at once that go to the disk directly, if there are several. For each piece, whether all of it is written; nobody
    /// knows what is of the others.
    pub(crate) fn write_at_once(&self, open: &OpenFile, pieces: &[(u64, &[u8])]) -> Result<Vec<bool>> {
        let opened = self.opened(open.writable()?)?;
        let mut are_written = vec![false; pieces.len()];
        if open.flags.contains(OpenFlags::APPEND) {
            return Ok(are_written);
        }
        let direct = pieces.iter().enumerate().filter_map(|(number, &(offset, data))| {
            let range = offset..offset.checked_add(data.len() as u64).filter(|&end| end <= FILE_SIZE_MAX)?;
            let (direct, _) = self.direct_part(open, &opened, &range, true)?;
            direct.takes_whole(&range, data).then_some((number, direct))
        });
        let (numbers, direct): (Vec<usize>, Vec<&Direct>) = direct.unzip();
        let (Some(direct), 2..) = (direct.first(), numbers.len()) else { return Ok(are_written) };
        let at_once: Vec<(u64, &[u8])> = numbers.iter().map(|&number| pieces[number]).collect();
        let written = self.backing.spend(|| Ok(self.rings.write(direct.fd(), &at_once)));
        let written = written.map_err(|raw| backend("writing a file", raw))?;
        for (number, is_written) in numbers.into_iter().zip(written) {
            are_written[number] = is_written;
            if is_written {
                let (offset, data) = pieces[number];
                open.node.size.written(offset, data.len() as u64);
            }
        }
        Ok(are_written)
    }

    /// One append. The kernel finds the end and writes there in one step; the description's position tells where that was.
    fn append(&self, open: &OpenFile, file: BorrowedFd<'_>, data: &[u8]) -> Result<Written> {
        let fault = |raw| backend("appending to a file", raw);
        let _position = lock(&open.position);
        if data.is_empty() {
            let size = rustix::fs::fstat(file).map_err(fault)?.st_size as u64;
            return Ok(Written { count: 0, offset: size });
        }
        let count = self.backing.spend(|| self.buffered.append(file, data)).map_err(fault)?;
        let end = rustix::fs::tell(file).map_err(fault)?;
        let offset = end.saturating_sub(count as u64);
        open.node.size.written(offset, count as u64);
        Ok(Written { count, offset })
    }

    pub(crate) fn allocate(&self, open: &OpenFile, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        open.writable()?;
        if length == 0 {
            return fail(Errno::EINVAL);
        }
        let punch = mode.contains(AllocateMode::PUNCH_HOLE);
        let whole_size = !mode.contains(AllocateMode::KEEP_SIZE) || mode.contains(AllocateMode::ZERO_RANGE);
        // Other modes of the kernel move data about, which no layer above expects.
        if punch && whole_size || !AllocateMode::all().contains(mode) {
            return fail(Errno::EOPNOTSUPP);
        }
        if offset.checked_add(length).is_none_or(|end| end > FILE_SIZE_MAX) {
            return fail(Errno::EFBIG);
        }
        let opened = self.opened(open)?;
        let flags = FallocateFlags::from_bits_retain(mode.bits());
        let fault = |raw| backend("allocating space", raw);
        loop {
            match self.backing.spend(|| rustix::fs::fallocate(&opened.file, flags, offset, length)) {
                Err(Raw::INTR) => {}
                Err(raw) => return Err(fault(raw)),
                Ok(()) => break,
            }
        }
        open.node.size.forget();
        if punch && self.backing.skips_times() {
            let last_access = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
            let last_modification = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
            rustix::fs::futimens(&opened.file, &Timestamps { last_access, last_modification }).map_err(fault)?;
        }
        Ok(())
    }

    pub(crate) fn seek_file(&self, open: &OpenFile, offset: u64, to: SeekTo) -> Result<u64> {
        if offset > FILE_SIZE_MAX {
            return fail(Errno::ENXIO);
        }
        let from = match to {
            SeekTo::Data => SeekFrom::Data(offset),
            SeekTo::Hole => SeekFrom::Hole(offset),
        };
        let opened = self.opened(open)?;
        let _position = lock(&open.position);
        rustix::fs::seek(&opened.file, from).map_err(|raw| backend("looking for data", raw))
    }

    pub(crate) fn sync_descriptor(fd: &OwnedFd, durability: Durability) -> Result<()> {
        let result = match durability {
            Durability::Data => rustix::fs::fdatasync(fd),
            Durability::All => rustix::fs::fsync(fd),
        };
        result.map_err(|raw| backend("making a file durable", raw))
    }

    pub(crate) fn sync_file(&self, open: &OpenFile, durability: Durability) -> Result<()> {
        if self.is_discarded() {
            return Ok(());
        }
        Self::sync_descriptor(&self.opened(open)?.file, durability)
    }

    /// Has the kernel begin to write a file. Writing allocates its blocks, and a filesystem with ordered data then commits no later change
    /// of names before it; that is what ext4 and btrfs do by themselves where a rename replaces a file.
    pub(crate) fn begin_write_back(&self, id: NodeId) -> Result<()> {
        let node = self.nodes.get(id)?;
        if self.is_discarded() || node.file_type != FileType::Regular {
            return Ok(());
        }
        let descriptor = self.nodes.descriptor(&node)?;
        let begun =
            self.nodes.with_room(|| self.backing.reopen(&descriptor, OFlags::RDONLY)).and_then(sys::begin_write_back);
        begun.map_err(|raw| backend("writing a file back", raw))
    }

    pub(crate) fn copy_files(
        &self,
        source: &OpenFile,
        from: u64,
        target: &OpenFile,
        to: u64,
        length: u64,
    ) -> Result<u64> {
        source.readable()?;
        target.writable()?;
        if from.checked_add(length).is_none_or(|end| end > FILE_SIZE_MAX)
            || to.checked_add(length).is_none_or(|end| end > FILE_SIZE_MAX)
        {
            return fail(Errno::EFBIG);
        }
        let same = source.node.id == target.node.id;
        if same && from < to.saturating_add(length) && to < from.saturating_add(length) {
            return fail(Errno::EINVAL);
        }
        if target.flags.contains(OpenFlags::APPEND) {
            return self.copy_through(source, from, target, to, length, 0);
        }
        let (reading, writing) = (self.opened(source)?, self.opened(target)?);
        let mut done = 0;
        while done < length {
            let (mut at, mut into) = (from + done, to + done);
            let want = (length - done).min(COPY_BYTES_MAX) as usize;
            let copy =
                || rustix::fs::copy_file_range(&reading.file, Some(&mut at), &writing.file, Some(&mut into), want);
            match self.backing.spend(copy) {
                Ok(0) => break,
                Ok(copied) => {
                    target.node.size.written(to + done, copied as u64);
                    done += copied as u64;
                }
                Err(Raw::INTR) => {}
                Err(Raw::XDEV | Raw::OPNOTSUPP | Raw::NOSYS | Raw::INVAL) => {
                    return self.copy_through(source, from, target, to, length, done);
                }
                Err(_) if done > 0 => break,
                Err(raw) => return Err(backend("copying between files", raw)),
            }
        }
        Ok(done)
    }

    /// Copies what the kernel does not copy by itself.
    fn copy_through(
        &self,
        source: &OpenFile,
        from: u64,
        target: &OpenFile,
        to: u64,
        length: u64,
        done: u64,
    ) -> Result<u64> {
        copy_in_pieces(
            done..length,
            |at, buffer| self.read_file(source, from + at, buffer),
            |at, bytes| Ok(self.write_file(target, to + at, bytes)?.count),
        )
    }
}
