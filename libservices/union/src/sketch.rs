//! A sketch in memory: its record, its bitmap of moved blocks, and the files its bytes come from.

use crate::Union;
use crate::ahead::Ahead;
use crate::bitmap::{self, Bitmap, SECTOR_BYTES, Sectors};
use crate::branch::LowerNode;
use crate::data::read_runs;
use crate::format::{Cause, Origin, SketchRecord};
use crate::journal::Change;
use crate::marks;
use crate::node::{Content, Node, State};
use crate::transit::{Permit, Transit};
use poolfs_libservice::{Branch, Error, Held, Opened, Result};
use poolfs_types::limits::BLOCK_SIZE;
use poolfs_types::{Caller, Errno, OpenFlags, SeekTo, SetAttributes, SetTime};
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLockWriteGuard};

/// Bytes of a block, as file offsets count.
pub(crate) const BLOCK: u64 = BLOCK_SIZE as u64;

/// The largest lower file a sketch may have: its bitmap's sectors are counted by 32 bits.
pub(crate) const SKETCH_SIZE_MAX: u64 = u32::MAX as u64 * bitmap::SECTOR_BLOCKS * BLOCK;

/// Bitmap bytes read at once.
const LOAD_BYTES: usize = 64 << 10;

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

impl Union {
    /// Makes some blocks of `node` usable: loads a sketch's map, opens its files, completes what is in transit of them.
    pub(crate) fn make_ready(&self, node: &Arc<Node>, blocks: Range<u64>) -> Result<()> {
        self.load_locked(node, &mut node.write())?;
        self.copies.complete(node, blocks)
    }

    /// Makes all of a node usable, and keeps it so.
    pub(crate) fn ready<'a>(&self, node: &'a Arc<Node>) -> Result<RwLockWriteGuard<'a, State>> {
        self.load_locked(node, &mut node.write())?;
        self.copies.complete_most(node);
        let mut state = node.write();
        self.load_locked(node, &mut state)?;
        self.copies.settle(node, &mut state, 0..u64::MAX)?;
        Ok(state)
    }

    /// Loads a sketch's map and opens its files.
    pub(crate) fn load_locked(&self, node: &Arc<Node>, state: &mut State) -> Result<()> {
        let State { upper, content, .. } = state;
        let sketch = match content {
            Content::Plain => return Ok(()),
            Content::Damaged(cause) => return Err(self.damaged(node, cause)),
            Content::Sketch(sketch) => sketch,
        };
        let Some(upper) = upper else { return Err(Errno::EIO.into()) };
        if sketch.is_truncating() {
            self.finish_truncation(upper, &mut sketch.record)?;
        }
        let is_met = sketch.map.is_none();
        if is_met {
            match self.load_map(sketch)? {
                Ok(map) => sketch.map = Some(map),
                Err(cause) => {
                    let cause: Arc<str> = cause.into();
                    *content = Content::Damaged(cause.clone());
                    return Err(self.damaged(node, &cause));
                }
            }
        }
        self.open_files(upper, sketch)?;
        if is_met && !self.work.is_frozen() { self.finish_last_block(node, upper, sketch) } else { Ok(()) }
    }

    /// Moves the block in which the lower file ends if the upper one has bytes in it behind that end. They were written and reached the disk,
    /// and a power cut came before the bit that shows them: as long as the block counts as the lower file's, they read as zeros, although the
    /// file is longer. Such a block is written whole, so before that end the upper file has what was written last, too, and zeros only in
    /// sectors that have not arrived.
    fn finish_last_block(&self, node: &Arc<Node>, upper: &Held, sketch: &mut Sketch) -> Result<()> {
        let limit = sketch.record.limit;
        let (block, start) = (limit / BLOCK, limit - limit % BLOCK);
        if start == limit || sketch.all_upper(block..block + 1) {
            return Ok(());
        }
        let before = self.upper.getattr(&Caller::ROOT, upper.node())?;
        let mut whole = vec![0; (before.size.clamp(limit, start + BLOCK) - start) as usize];
        let (map, files) = sketch.parts()?;
        let (_, appended) = whole.split_at_mut((limit - start) as usize);
        files.upper.read_full(limit, appended)?;
        if appended.iter().all(|&byte| byte == 0) {
            return Ok(());
        }
        let mut arrived = vec![0; (limit - start) as usize];
        files.upper.read_full(start, &mut arrived)?;
        let kept = &mut whole[..arrived.len()];
        read_runs(sketch, map, files, start, &mut &mut *kept)?;
        for (kept, arrived) in kept.chunks_mut(SECTOR_BYTES).zip(arrived.chunks(SECTOR_BYTES)) {
            if arrived.iter().any(|&byte| byte != 0) {
                kept.copy_from_slice(arrived);
            }
        }
        files.upper.write_full(start, &whole)?;
        let times = SetAttributes { modified: Some(SetTime::At(before.modified)), ..SetAttributes::default() };
        let after = self.upper.setattr(&Caller::ROOT, upper.node(), &times, None)?;
        node.changed.hide(before.changed, after.changed);
        self.statistics.moved(sketch.set_moved(block..block + 1), 1);
        self.queue(node);
        self.journal.record(node.id, sketch)
    }

    /// Opens the files of a sketch whose map is there.
    pub(crate) fn open_files(&self, upper: &Held, sketch: &mut Sketch) -> Result<()> {
        if sketch.files.is_none()
            && let Some(map) = &sketch.map
        {
            let branch = &self.lowers[map.lower.layer].layer;
            sketch.files = Some(Arc::new(Files {
                lower: Opened::file(branch, &Caller::ROOT, map.lower.held.node(), OpenFlags::READ_ONLY)?,
                upper: Opened::file(&self.upper, &Caller::ROOT, upper.node(), self.work.sketch_flags())?,
            }));
        }
        Ok(())
    }

    /// Records that `node` cannot be read, and why. The message is for the log, the errno for the application.
    pub(crate) fn damaged(&self, node: &Node, cause: &Arc<str>) -> Error {
        // The state's lock may be held by the caller, so that the path is looked up by whoever asks for statistics; till
        // then the node stays.
        if self.statistics.damage(node.id, cause) {
            self.nodes.pin(node);
            tracing::error!(inode = node.inode, %cause, "a sketch cannot be read");
        }
        Error::new(Errno::EIO, cause.to_string())
    }

    pub(crate) fn load_map(&self, sketch: &Sketch) -> Result<std::result::Result<Map, Cause>> {
        let lower = match self.lower_of(&sketch.origin)? {
            Ok((lower, _)) => lower,
            Err(cause) => return Ok(Err(cause)),
        };
        let bitmap = match self.load_bitmap(sketch)? {
            Ok(bitmap) => bitmap,
            Err(cause) if sketch.record.bitmap_durable => return Ok(Err(cause)),
            Err(_) => Bitmap::new(&self.sectors),
        };
        let blocks = sketch.lower_blocks();
        let unmoved = blocks - bitmap.count_below(blocks);
        Ok(Ok(Map { bitmap, unmoved, lower }))
    }

    fn load_bitmap(&self, sketch: &Sketch) -> Result<std::result::Result<Bitmap, Cause>> {
        let id = &sketch.record.id;
        let name = crate::format::bitmap_name(id);
        let Some((held, attributes)) = self.work.bitmap(id)? else {
            return Ok(Err(format!("its bitmap {name} is missing")));
        };
        let size = bitmap::file_bytes(sketch.origin.size);
        if attributes.size != size {
            return Ok(Err(format!("its bitmap {name} has {} bytes instead of {size}", attributes.size)));
        }
        let file = Opened::file(&self.upper, &Caller::ROOT, held.node(), OpenFlags::READ_ONLY)?;
        let mut bitmap = Bitmap::new(&self.sectors);
        let mut damage = None;
        each_sector(&file, size, &mut |number, sector| {
            damage = bitmap.load(id, number, sector).err();
            bitmap.admit_loaded()?;
            Ok(if damage.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        if let Some(cause) = damage {
            return Ok(Err(cause));
        }
        Ok(Ok(bitmap))
    }

    /// Repeats the upper part of a truncation whose record is stored, and stores that it is done.
    pub(crate) fn finish_truncation(&self, upper: &Held, record: &mut SketchRecord) -> Result<()> {
        finish_truncation(&self.upper, upper, record)
    }

    /// Turns a sketch without visible lower bytes into an ordinary file. Its data must be durable or of length zero.
    pub(crate) fn dissolve(&self, state: &mut State) -> Result<()> {
        let State { upper: Some(upper), content, .. } = state else { return Ok(()) };
        let Content::Sketch(sketch) = content else { return Ok(()) };
        let id = sketch.record.id;
        marks::clear(&*self.upper, upper.node(), marks::SKETCH)?;
        *content = Content::Plain;
        let cleared = marks::clear(&*self.upper, upper.node(), marks::METACOPY);
        cleared.and(self.work.remove_bitmap(&id))
    }
}

/// Repeats the upper part of a truncation whose record is stored, and stores that it is done.
pub(crate) fn finish_truncation(branch: &Branch, upper: &Held, record: &mut SketchRecord) -> Result<()> {
    let changes = SetAttributes { size: Some(record.size), ..SetAttributes::default() };
    branch.setattr(&Caller::ROOT, upper.node(), &changes, None)?;
    let done = record.next_epoch();
    marks::set(&**branch, upper.node(), marks::SKETCH, &done.encode())?;
    *record = done;
    Ok(())
}

/// What is done with the sector of that number, and whether the next is wanted.
type VisitSector<'a> = dyn FnMut(u32, &[u8; SECTOR_BYTES]) -> Result<ControlFlow<()>> + 'a;

/// Visits the sectors of a bitmap file of `size` bytes, without those in its holes, until `visit` breaks.
pub(crate) fn each_sector(file: &Opened, size: u64, visit: &mut VisitSector<'_>) -> Result<()> {
    let mut buffer = vec![0; LOAD_BYTES];
    let mut offset = 0;
    while offset < size {
        match file.branch().seek(&Caller::ROOT, file.id(), offset, SeekTo::Data) {
            Ok(data) => offset = data - data % SECTOR_BYTES as u64,
            Err(error) if error == Errno::ENXIO => break,
            Err(error) => return Err(error),
        }
        let count = file.read_full(offset, &mut buffer)?;
        for (at, sector) in buffer[..count].as_chunks::<SECTOR_BYTES>().0.iter().enumerate() {
            let number = u32::try_from(offset / SECTOR_BYTES as u64 + at as u64);
            let number = number.map_err(|_| Error::new(Errno::EFBIG, "a bitmap is too large"))?;
            if visit(number, sector)?.is_break() {
                return Ok(());
            }
        }
        if count < SECTOR_BYTES {
            break;
        }
        offset += (count - count % SECTOR_BYTES) as u64;
    }
    Ok(())
}
