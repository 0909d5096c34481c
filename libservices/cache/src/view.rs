//! The view of a file for clients that read it without requests: the map of its segment, kept true while the file's state
//! changes.
//!
//! The map belongs to the state: it is written under the state's lock only. Before bytes are taken away, their blocks are
//! retracted ([`View::retract`]); every other change is published when it is booked ([`View::publish_changed`]).

use crate::blocks::{BLOCK, BlockMap, CHUNK_BLOCKS, by_chunk};
use crate::failure::cache_failure;
use crate::limits::VIEWS_MAX;
use crate::map_pages::{MapPages, PAGE_BLOCKS, PAGE_CHUNKS};
use crate::pool::Pool;
use crate::segments::Segment;
use poolfs_ipc::segment::{Place, SegmentMap, capacity_for, map_length};
use poolfs_libservice::{Error, Result, Share};
use poolfs_types::Errno;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that readers' faults may have brought back before they are looked for.
pub(crate) const STRAY_BYTES_MAX: u64 = 64 << 10;

/// One of the views of a pool; given back when dropped.
struct Permit(Arc<AtomicUsize>);

impl Permit {
    fn take(count: &Arc<AtomicUsize>) -> Option<Self> {
        let room = |count: usize| (count < VIEWS_MAX).then_some(count + 1);
        count.fetch_update(Ordering::AcqRel, Ordering::Acquire, room).ok()?;
        Some(Self(Arc::clone(count)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A file's map. Dropped, it ends for all who read by it.
pub(crate) struct View {
    map: SegmentMap,
    file: Segment,
    /// Blocks whose words have to be written anew.
    retracted: Vec<Range<u64>>,
    pages: MapPages,
    _permit: Permit,
}

impl View {
    /// One of a file of that size, in which nothing is shown yet. Of the pages that maps may have, it takes those of `share`.
    pub(crate) fn new(pool: &Arc<Pool>, share: &Arc<Share>, size: u64) -> Result<Self> {
        let permit = Permit::take(&pool.views).ok_or_else(|| Error::from(Errno::EOPNOTSUPP))?;
        let capacity = capacity_for(size);
        let pages = MapPages::new(pool, share);
        let file = pool.segments.create().map_err(|error| cache_failure(&error))?;
        let map = file.share(map_length(capacity) as u64).and_then(|()| {
            let map = file.with_file(|file| Ok(SegmentMap::new(file, capacity)));
            map?.map_err(|errno| io::Error::from_raw_os_error(errno.raw()))
        });
        let map = map.map_err(|error| cache_failure(&error))?;
        Ok(Self { map, file, retracted: Vec::new(), pages, _permit: permit })
    }

    /// Blocks of which it can say something.
    pub(crate) fn capacity(&self) -> u64 {
        self.map.capacity()
    }

    /// A descriptor of the map by which it can only be read.
    pub(crate) fn reader(&self) -> io::Result<OwnedFd> {
        self.file.reader()
    }

    fn publish(&mut self, blocks: &BlockMap, shown: Range<u64>) {
        for (chunk, mask) in by_chunk(shown.start..shown.end.min(self.map.capacity())) {
            self.publish_chunk(blocks, chunk, mask);
        }
    }

    /// Shows all that is there, in a map in which nothing has been written.
    pub(crate) fn publish_all(&mut self, blocks: &BlockMap) {
        for chunk in blocks.indices() {
            self.publish(blocks, chunk * CHUNK_BLOCKS..(chunk + 1) * CHUNK_BLOCKS);
        }
    }

    /// Shows what has changed: these chunks, what was retracted, and the size.
    pub(crate) fn publish_changed(&mut self, blocks: &BlockMap, changed: &[u64], size: u64) {
        for retracted in self.retracted.drain(..).collect::<Vec<_>>() {
            self.publish(blocks, retracted);
        }
        for chunk in changed {
            self.publish(blocks, chunk * CHUNK_BLOCKS..(chunk + 1) * CHUNK_BLOCKS);
        }
        self.map.set_size(size);
    }

    /// A page in which no word has been written says that nothing is there. It is left so as long as that is true, and when there is no
    /// room for it.
    fn publish_chunk(&mut self, blocks: &BlockMap, chunk: u64, mask: u64) {
        let page = chunk / PAGE_CHUNKS;
        if self.pages.is_written(page) {
            return self.write_words(blocks, chunk, mask);
        }
        let is_there = blocks.chunk(chunk).is_some_and(|chunk| (chunk.resident | chunk.zero) & mask != 0);
        if is_there && self.pages.take(page) {
            // What found no room before.
            for chunk in page * PAGE_CHUNKS..(page + 1) * PAGE_CHUNKS {
                self.write_words(blocks, chunk, u64::MAX);
            }
        }
    }

    fn write_words(&self, blocks: &BlockMap, chunk: u64, mask: u64) {
        let (resident, zero) = blocks.chunk(chunk).map_or((0, 0), |chunk| (chunk.resident, chunk.zero));
        for at in (0..CHUNK_BLOCKS).filter(|at| mask & (1 << at) != 0) {
            let place = match 1 << at {
                bit if resident & bit != 0 => Place::Resident,
                bit if zero & bit != 0 => Place::Zero,
                _ => Place::Absent,
            };
            self.map.publish(chunk * CHUNK_BLOCKS + at, place);
        }
    }

    /// To be called before bytes of these blocks are taken away, or changed otherwise than by an ordinary write.
    pub(crate) fn retract(&mut self, blocks: &Range<u64>) {
        let blocks = blocks.start..blocks.end.min(self.map.capacity());
        if blocks.is_empty() {
            return;
        }
        let pages = blocks.start / PAGE_BLOCKS..blocks.end.div_ceil(PAGE_BLOCKS);
        // To read a word gives its page memory, too.
        for page in pages.filter(|&page| self.pages.is_written(page)) {
            let (start, end) = (page * PAGE_BLOCKS, (page + 1) * PAGE_BLOCKS);
            self.map.retract(start.max(blocks.start)..end.min(blocks.end));
        }
        self.retracted.push(blocks);
    }

    /// Frees what readers' faults have brought back of pages in which no word has been written.
    pub(crate) fn sweep(&self) {
        let held = self.pages.bytes();
        if !self.file.allocated().is_ok_and(|bytes| bytes > held + STRAY_BYTES_MAX) {
            return;
        }
        for page in (0..self.map.capacity().div_ceil(PAGE_BLOCKS)).filter(|&page| !self.pages.is_written(page)) {
            if let Err(error) = self.file.punch((page + 1) * BLOCK, BLOCK) {
                tracing::warn!(%error, "what readers brought back of a map could not be freed");
                return;
            }
        }
    }
}
