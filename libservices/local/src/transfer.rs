//! Data transfer: whole pages of larger files by direct I/O, the rest through the kernel's page cache.
//!
//! A request is split at page boundaries, so that one call never writes a page both directly and through the cache. Between calls
//! the kernel keeps the two coherent: direct I/O first writes back the dirty pages of its range and drops the cached ones
//! afterwards, under the inode's lock, which buffered writes take too.

use crate::bounce::{BOUNCE_BYTES, Bounce};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags, Result};
use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// Files below this size are left to the kernel's page cache.
pub(crate) const DIRECT_SIZE_MIN: u64 = 64 << 10;

/// Direct requests are cut at least at pages, so that they share none with buffered ones.
const PAGE: u64 = 4096;

/// Most bytes one system call is asked to move (Linux moves at most 2 GiB - 4 KiB).
const CALL_BYTES_MAX: usize = 1 << 30;

/// `RWF_DONTCACHE` (Linux 6.14), which rustix does not name yet.
const DONTCACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);

/// What is known of a file's size: whether it is one for direct I/O. This decides how bytes move, never which, so that what others do
/// behind the layer's back makes them no worse than slower.
#[derive(Debug, Default)]
pub(crate) struct SizeClass(AtomicU8);

const UNKNOWN: u8 = 0;
const SMALL: u8 = 1;
const LARGE: u8 = 2;

impl SizeClass {
    /// Whether it is large, for a request that `writes` or one that reads. `size` asks how large it is, where that is not known: a file that
    /// was small is asked about again by those who read, as it may have grown elsewhere.
    pub(crate) fn is_large(&self, writes: bool, size: impl FnOnce() -> u64) -> bool {
        match self.0.load(Ordering::Relaxed) {
            LARGE => true,
            SMALL if writes => false,
            known => {
                let now = if size() < DIRECT_SIZE_MIN { SMALL } else { LARGE };
                // Whoever has changed it meanwhile knows better.
                let _ = self.0.compare_exchange(known, now, Ordering::Relaxed, Ordering::Relaxed);
                now == LARGE
            }
        }
    }

    /// So many bytes were written at `offset`.
    pub(crate) fn written(&self, offset: u64, count: u64) {
        if count > 0 && offset + count >= DIRECT_SIZE_MIN && self.0.load(Ordering::Relaxed) != LARGE {
            self.0.store(LARGE, Ordering::Relaxed);
        }
    }

    /// It may have any size.
    pub(crate) fn forget(&self) {
        self.0.store(UNKNOWN, Ordering::Relaxed);
    }
}

/// A second description of an open file, for direct I/O.
#[derive(Debug)]
pub(crate) struct Direct {
    fd: OwnedFd,
    /// Alignment of memory.
    memory: usize,
    /// Alignment of offsets and lengths: the device's, and at least a page.
    unit: u64,
    refused: AtomicBool,
}

impl Direct {
    /// Wraps a descriptor opened with `O_DIRECT`, if the file allows direct I/O.
    pub(crate) fn new(fd: OwnedFd) -> Option<Self> {
        let stat = rustix::fs::statx(&fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
        let (memory, offset) = if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
            (PAGE as u32, PAGE as u32)
        } else {
            (stat.stx_dio_mem_align, stat.stx_dio_offset_align)
        };
        let usable = memory.is_power_of_two() && offset.is_power_of_two() && memory.max(offset) <= 1 << 16;
        usable.then(|| Self {
            fd,
            memory: memory as usize,
            unit: PAGE.max(u64::from(offset)),
            refused: AtomicBool::new(false),
        })
    }

    /// The part of `range` that can move directly; empty when there is none.
    pub(crate) fn body(&self, range: &Range<u64>) -> Range<u64> {
        let none = range.start..range.start;
        if self.refused.load(Ordering::Relaxed) {
            return none;
        }
        let Some(start) = range.start.checked_next_multiple_of(self.unit) else { return none };
        let end = range.end / self.unit * self.unit;
        if start < end { start..end } else { none }
    }

    /// Whether all of these bytes can move directly from where they are.
    pub(crate) fn takes_whole(&self, range: &Range<u64>, data: &[u8]) -> bool {
        self.body(range) == *range && data.as_ptr().align_offset(self.memory) == 0
    }

    /// The descriptor.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Reads a body into `buffer`; `None` when it has to be read the other way.
    pub(crate) fn read(&self, bounce: &Bounce, offset: u64, buffer: &mut [u8]) -> Option<Result<usize>> {
        if buffer.as_ptr().align_offset(self.memory) == 0 {
            return self.judge(read_all(self.fd.as_fd(), offset, buffer, ReadWriteFlags::empty(), self.unit));
        }
        let mut borrowed = bounce.borrow()?;
        let mut done = 0;
        for chunk in buffer.chunks_mut(BOUNCE_BYTES) {
            let aligned = &mut borrowed.bytes()[..chunk.len()];
            let at = offset + done as u64;
            match self.judge(read_all(self.fd.as_fd(), at, aligned, ReadWriteFlags::empty(), self.unit)) {
                Some(Ok(got)) => {
                    chunk[..got].copy_from_slice(&aligned[..got]);
                    done += got;
                    if got < chunk.len() {
                        break;
                    }
                }
                other if done == 0 => return other,
                _ => break,
            }
        }
        Some(Ok(done))
    }

    /// Writes a body; `None` when nothing was written and it has to be written the other way.
    pub(crate) fn write(&self, bounce: &Bounce, offset: u64, data: &[u8]) -> Option<Result<usize>> {
        if data.as_ptr().align_offset(self.memory) == 0 {
            return self.judge(write_all(self.fd.as_fd(), offset, data, ReadWriteFlags::empty(), self.unit));
        }
        let mut borrowed = bounce.borrow()?;
        let mut done = 0;
        for chunk in data.chunks(BOUNCE_BYTES) {
            let aligned = &mut borrowed.bytes()[..chunk.len()];
            aligned.copy_from_slice(chunk);
            let at = offset + done as u64;
            match self.judge(write_all(self.fd.as_fd(), at, aligned, ReadWriteFlags::empty(), self.unit)) {
                Some(Ok(put)) => {
                    done += put;
                    if put < chunk.len() {
                        break;
                    }
                }
                other if done == 0 => return other,
                _ => break,
            }
        }
        Some(Ok(done))
    }

    /// A filesystem that opens with `O_DIRECT` but then refuses is not asked again.
    fn judge(&self, result: Result<usize>) -> Option<Result<usize>> {
        if matches!(result, Err(Errno::INVAL | Errno::OPNOTSUPP)) {
            self.refused.store(true, Ordering::Relaxed);
            return None;
        }
        Some(result)
    }
}

/// Buffered I/O that leaves nothing in the page cache, where the filesystem knows how.
#[derive(Debug)]
pub(crate) struct Buffered {
    dontcache: AtomicBool,
}

impl Buffered {
    pub(crate) fn new() -> Self {
        Self { dontcache: AtomicBool::new(true) }
    }

    fn attempt(&self, call: &mut dyn FnMut(ReadWriteFlags) -> Result<usize>) -> Result<usize> {
        if self.dontcache.load(Ordering::Relaxed) {
            match call(DONTCACHE) {
                Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => self.dontcache.store(false, Ordering::Relaxed),
                result => return result,
            }
        }
        call(ReadWriteFlags::empty())
    }

    /// Reads until `buffer` is full or the file ends.
    pub(crate) fn read(&self, fd: BorrowedFd<'_>, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        self.attempt(&mut |flags| read_all(fd, offset, buffer, flags, 1))
    }

    /// Writes all of `data`, or as much as there is room for.
    pub(crate) fn write(&self, fd: BorrowedFd<'_>, offset: u64, data: &[u8]) -> Result<usize> {
        self.attempt(&mut |flags| write_all(fd, offset, data, flags, 1))
    }

    /// Appends `data` in one piece at the file's end, wherever that is then; the description's position ends up behind it.
    pub(crate) fn append(&self, fd: BorrowedFd<'_>, data: &[u8]) -> Result<usize> {
        let data = &data[..data.len().min(CALL_BYTES_MAX)];
        self.attempt(&mut |flags| {
            retry(|| rustix::io::pwritev2(fd, &[IoSlice::new(data)], u64::MAX, flags | ReadWriteFlags::APPEND))
        })
    }
}

fn retry(mut call: impl FnMut() -> Result<usize>) -> Result<usize> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// Reads until the buffer is full, the file ends, or a count that is no multiple of `unit` shows its end.
fn read_all(fd: BorrowedFd<'_>, offset: u64, buffer: &mut [u8], flags: ReadWriteFlags, unit: u64) -> Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        let end = buffer.len().min(done + CALL_BYTES_MAX);
        let part = &mut buffer[done..end];
        let at = offset + done as u64;
        match retry(|| rustix::io::preadv2(fd, &mut [IoSliceMut::new(part)], at, flags)) {
            Ok(0) => break,
            Ok(got) => {
                done += got;
                if !(got as u64).is_multiple_of(unit) {
                    break;
                }
            }
            Err(_) if done > 0 => break,
            Err(raw) => return Err(raw),
        }
    }
    Ok(done)
}

/// Writes until everything is written or something fails; a failure after some bytes is a short count.
fn write_all(fd: BorrowedFd<'_>, offset: u64, data: &[u8], flags: ReadWriteFlags, unit: u64) -> Result<usize> {
    let mut done = 0;
    while done < data.len() {
        let end = data.len().min(done + CALL_BYTES_MAX);
        let part = &data[done..end];
        let at = offset + done as u64;
        match retry(|| rustix::io::pwritev2(fd, &[IoSlice::new(part)], at, flags)) {
            Ok(0) => break,
            Ok(put) => {
                done += put;
                if !(put as u64).is_multiple_of(unit) {
                    break;
                }
            }
            Err(_) if done > 0 => break,
            Err(raw) => return Err(raw),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_whole_pages_and_never_more_than_was_asked_for() {
        let fd = std::fs::File::open("/dev/null").expect("/dev/null").into();
        let direct = Direct { fd, memory: 512, unit: PAGE, refused: AtomicBool::new(false) };
        assert_eq!(direct.body(&(0..8192)), 0..8192);
        assert_eq!(direct.body(&(1..12_287)), 4096..8192);
        assert_eq!(direct.body(&(4096..8192 + 4095)), 4096..8192);
        for nothing in [0..4095, 1..8191, 5..5, u64::MAX - 10..u64::MAX] {
            assert!(direct.body(&nothing).is_empty(), "{nothing:?}");
        }
        assert!(direct.judge(Err(Errno::INVAL)).is_none());
        assert!(direct.body(&(0..8192)).is_empty(), "it was refused once");
    }

    #[test]
    fn a_size_is_asked_for_until_it_is_known() {
        let class = SizeClass::default();
        let known = |writes| class.is_large(writes, || panic!("it is known"));
        assert!(!class.is_large(true, || DIRECT_SIZE_MIN - 1));
        assert!(!known(true));
        class.written(0, DIRECT_SIZE_MIN - 1);
        class.written(DIRECT_SIZE_MIN, 0);
        assert!(!known(true));
        assert!(class.is_large(false, || DIRECT_SIZE_MIN), "it has grown elsewhere");
        assert!(known(true) && known(false));
        class.forget();
        assert!(!class.is_large(true, || 0));
        class.written(DIRECT_SIZE_MIN - 1, 1);
        assert!(known(true) && known(false));
    }

    #[test]
    fn a_filesystem_without_the_flag_is_asked_once() {
        let buffered = Buffered::new();
        let mut asked = Vec::new();
        for _ in 0..2 {
            let mut call = |flags: ReadWriteFlags| {
                asked.push(flags);
                if flags.is_empty() { Ok(1) } else { Err(Errno::OPNOTSUPP) }
            };
            assert_eq!(buffered.attempt(&mut call), Ok(1));
        }
        assert_eq!(asked, [DONTCACHE, ReadWriteFlags::empty(), ReadWriteFlags::empty()]);
    }
}
