//! A sketch in memory: its record, its bitmap of moved blocks, and the files its bytes come from.

use crate::ahead::Ahead;
use crate::bitmap::{Bitmap, Sectors};
use crate::branch::LowerNode;
use crate::format::BLOCK;
use crate::format::{Origin, SketchRecord};
use crate::in_transit::{Permit, Transit};
use crate::journal_records::Change;
use poolfs_libservice::{Opened, Result};
use poolfs_types::Errno;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// An upper file of which some blocks are still in the lower file.
pub(crate) struct Sketch {
    pub record: SketchRecord,
    pub origin: Origin,
    /// what the bitmap says; `None` until a byte is needed
    pub map: Option<Map>,
    /// open while the file is, and while blocks are in transit
    pub files: Option<Arc<Files>>,
    pub transit: Transit,
    /// how blocks have moved from sync to sync
    pub ahead: Ahead,
    /// what the journal has not been told of
    pub unrecorded: Vec<Change>,
    /// It is so long, or longer: only a truncation makes it shorter, which changes the node's state.
    at_least: AtomicU64,
}

/// The map of moved blocks, in memory.
pub(crate) struct Map {
    pub bitmap: Bitmap,
    /// blocks below the limit that have not moved
    pub unmoved: u64,
    pub lower: LowerNode,
}

/// The two files.
pub(crate) struct Files {
    pub lower: Opened,
    pub upper: Opened,
}

/// An id that no other sketch has.
pub(crate) fn new_id() -> Result<[u8; 16]> {
    let mut id = [0; 16];
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| Errno::from_raw(errno.raw_os_error()))?;
    Ok(id)
}

impl Sketch {
    pub fn new(record: SketchRecord, origin: Origin) -> Self {
        Sketch {
            record,
            origin,
            map: None,
            files: None,
            transit: Transit::default(),
            ahead: Ahead::default(),
            unrecorded: Vec::new(),
            at_least: AtomicU64::new(0),
        }
    }

    /// The sketch of a file that is found, with this size of its upper file.
    pub fn found(record: SketchRecord, origin: Origin, size: u64) -> Self {
        // A truncation that was not finished has stored its limit.
        Sketch { at_least: AtomicU64::new(size.min(record.limit)), ..Self::new(record, origin) }
    }

    /// The sketch of a file that is just being copied up.
    pub fn fresh(record: SketchRecord, origin: Origin, lower: LowerNode, all: &Arc<Sectors>) -> Self {
        let map = Map { bitmap: Bitmap::new(all), unmoved: record.limit.div_ceil(BLOCK), lower };
        Sketch { map: Some(map), at_least: AtomicU64::new(record.limit), ..Self::new(record, origin) }
    }

    /// The size, or one that is smaller and not before `end`: it is asked for only when the file may end before. With the node's state locked.
    pub fn size_from(&self, end: u64, ask: impl FnOnce() -> Result<u64>) -> Result<u64> {
        let known = self.at_least.load(Ordering::Relaxed);
        if end <= known {
            return Ok(known);
        }
        let size = ask()?;
        self.at_least.fetch_max(size, Ordering::Relaxed);
        Ok(size)
    }

    /// The file is about to be made so long, or is left as it is.
    pub fn may_become(&mut self, size: u64) {
        let at_least = self.at_least.get_mut();
        *at_least = size.min(*at_least);
    }

    /// Blocks that may be in the lower file: all others are in the upper one.
    pub fn lower_blocks(&self) -> u64 {
        self.record.limit.div_ceil(BLOCK)
    }

    /// Whether something has to be brought to disk.
    pub fn is_dirty(&self) -> bool {
        self.map.as_ref().is_some_and(|map| map.bitmap.is_dirty()) || !self.transit.is_empty()
    }

    /// Whether no byte of the lower file is visible any more.
    pub fn is_complete(&self) -> bool {
        self.map.as_ref().is_some_and(|map| map.unmoved == 0)
    }

    /// Whether a truncation was begun and not finished. Nothing else happens to the file before that is made good: the next
    /// opening would repeat it.
    pub fn is_truncating(&self) -> bool {
        self.record.is_truncating()
    }

    /// The map and the files; `EIO` when the sketch was not made ready.
    pub fn parts(&self) -> Result<(&Map, &Files)> {
        match (&self.map, &self.files) {
            (Some(map), Some(files)) if !self.is_truncating() => Ok((map, files)),
            _ => Err(Errno::EIO.into()),
        }
    }

    /// Whether all of `blocks` are in the upper file, as far as is known.
    pub fn all_upper(&self, blocks: Range<u64>) -> bool {
        let end = blocks.end.min(self.lower_blocks());
        if self.is_truncating() {
            return false;
        }
        blocks.start >= end || self.map.as_ref().is_some_and(|map| map.bitmap.run_end(blocks.start, end, true) == end)
    }

    /// Whether a write that moves `blocks` can be accepted; `ENOMEM` when too much would have to be kept in memory of where they are.
    pub fn admit(&self, blocks: Range<u64>) -> Result<()> {
        let end = blocks.end.min(self.lower_blocks());
        self.map.as_ref().map_or(Ok(()), |map| map.bitmap.admit(blocks.start.min(end)..end))
    }

    /// Marks `blocks` as moved, which the journal has to be told of; returns how many were not.
    pub fn set_moved(&mut self, blocks: Range<u64>) -> u64 {
        let end = blocks.end.min(self.lower_blocks());
        let Some(map) = &mut self.map else { return 0 };
        if blocks.start >= end {
            return 0;
        }
        let fresh = map.bitmap.set(blocks.start..end);
        map.unmoved -= fresh.min(map.unmoved);
        if fresh > 0 {
            self.ahead.note(&(blocks.start..end));
            self.unrecorded.push(Change::Moved(blocks.start..end));
        }
        fresh
    }

    /// Notes that a part of a block has been written, and the rest not been copied, which the journal has to be told of.
    pub fn set_in_transit(&mut self, block: u64, new: Range<usize>, permit: Permit) {
        self.unrecorded.push(Change::InTransit(block, new.clone()));
        self.transit.insert(block, new, permit);
    }
}
