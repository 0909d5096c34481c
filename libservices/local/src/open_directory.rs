//! One directory open for listing: the kernel's answers in chunks, resumed at any cookie.

use crate::descriptors::{Slot, lock};
use crate::filesystem::{open_name, stat};
use crate::nodes::Node;
use poolfs_types::FileType;
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags, RawDir, SeekFrom};
use rustix::io::Errno;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The largest cookie that is shown: FUSE carries them as signed numbers, and layers above add entries of their own.
const COOKIE_MAX: u64 = i64::MAX as u64 - 16;

/// The cookie that some filesystems give the last entry.
const RAW_COOKIE_MAX: u64 = i64::MAX as u64;

/// Bytes of the kernel's answer that are fetched at a time.
const CHUNK_BYTES: usize = 32 << 10;

#[derive(Debug)]
pub(crate) struct Listed {
    pub(crate) name: Range<usize>,
    pub(crate) inode: u64,
    pub(crate) file_type: FileType,
    pub(crate) cookie: u64,
}

/// One answer of the kernel, taken apart.
#[derive(Debug)]
pub(crate) struct Chunk {
    /// The cookie that leads to the first entry.
    start: u64,
    /// The cookie that leads on after the last one.
    pub(crate) end: u64,
    pub(crate) names: Vec<u8>,
    pub(crate) entries: Vec<Listed>,
}

impl Chunk {
    /// Which entry follows `cookie`, if the chunk knows.
    pub(crate) fn index_after(&self, cookie: u64) -> Option<usize> {
        if cookie == self.start {
            return Some(0);
        }
        self.entries.iter().position(|entry| entry.cookie == cookie).map(|index| index + 1)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// What the last call fetched and did not deliver wholly.
    pub(crate) rest: Option<Chunk>,
}

/// One directory open for listing.
#[derive(Debug)]
pub(crate) struct OpenDirectory {
    pub(crate) node: Arc<Node>,
    pub(crate) opened: Arc<Slot<OpenedDirectory>>,
    pub(crate) progress: Mutex<Progress>,
}

/// Its descriptor.
#[derive(Debug)]
pub(crate) struct OpenedDirectory {
    pub(crate) directory: OwnedFd,
    /// Where the description stands, as far as is known to whoever has the progress locked.
    pub(crate) position: AtomicU64,
}

impl OpenDirectory {
    /// The chunk that goes on after `cookie`, or `None` at the end. A listing from the start sees what is there now.
    pub(crate) fn chunk(&self, opened: &OpenedDirectory, cookie: u64) -> rustix::io::Result<Option<Chunk>> {
        let OpenedDirectory { directory, position } = opened;
        let mut progress = lock(&self.progress);
        if let Some(rest) = progress.rest.take()
            && cookie != 0
            && rest.index_after(cookie).is_some_and(|index| index < rest.entries.len())
        {
            return Ok(Some(rest));
        }
        if cookie == 0 || cookie != position.load(Ordering::Relaxed) {
            position.store(rustix::fs::seek(directory, SeekFrom::Start(cookie))?, Ordering::Relaxed);
        }
        let mut space = Vec::with_capacity(CHUNK_BYTES);
        let mut raw = RawDir::new(directory, space.spare_capacity_mut());
        let mut chunk = Chunk { start: cookie, end: cookie, names: Vec::new(), entries: Vec::new() };
        let mut any = false;
        while let Some(entry) = raw.next() {
            let entry = match entry {
                Ok(entry) => entry,
                // A removed directory is not listed at all; to its holders it is an empty one.
                Err(Errno::NOENT) => break,
                Err(raw) => return Err(raw),
            };
            any = true;
            chunk.end = entry.next_entry_cookie();
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                let start = chunk.names.len();
                chunk.names.extend_from_slice(name);
                let file_type = file_type(entry.file_type()).unwrap_or_else(|| look(directory, name));
                let (inode, cookie) = (entry.ino(), chunk.end);
                chunk.entries.push(Listed { name: start..chunk.names.len(), inode, file_type, cookie });
            }
            if raw.is_buffer_empty() {
                break;
            }
        }
        position.store(chunk.end, Ordering::Relaxed);
        Ok(any.then_some(chunk))
    }
}

/// The type of an entry whose filesystem does not list types; a name that has just gone counts as a file.
fn look(directory: &OwnedFd, name: &[u8]) -> FileType {
    let found = open_name(directory, name, OFlags::PATH, Mode::empty()).and_then(stat);
    found.ok().and_then(|stat| FileType::from_mode(u32::from(stat.stx_mode))).unwrap_or(FileType::Regular)
}

/// The cookie shown for a filesystem's, whose values are far smaller but for the very last.
pub(crate) fn shown_cookie(raw: u64) -> u64 {
    raw.min(COOKIE_MAX)
}

/// The filesystem's cookie for one that was shown.
pub(crate) fn raw_cookie(shown: u64) -> u64 {
    if shown < COOKIE_MAX { shown } else { RAW_COOKIE_MAX }
}

fn file_type(raw: rustix::fs::FileType) -> Option<FileType> {
    FileType::from_mode(raw.as_raw_mode()).filter(|_| raw != rustix::fs::FileType::Unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cookies_lead_back_to_where_they_came_from() {
        for raw in [1, 3, 0x7fff_fffe_ffff_fffe, RAW_COOKIE_MAX] {
            assert!(shown_cookie(raw) <= COOKIE_MAX);
            assert_eq!(raw_cookie(shown_cookie(raw)), raw);
        }
        assert_eq!(raw_cookie(0), 0);
    }
}
