//! The files of a sketch: its map is loaded when a byte is needed, its two files are opened, and what a crash left unfinished is finished.

use crate::Union;
use crate::bitmap::{self, Bitmap, SECTOR_BYTES};
use crate::data::read_runs;
use crate::format::{BLOCK, Cause, SketchRecord};
use crate::marks;
use crate::node::{Content, Node, State};
use crate::sketch::{Files, Map, Sketch};
use poolfs_libservice::{Branch, Error, Held, Opened, PageBuffer, Result};
use poolfs_types::{Caller, Errno, OpenFlags, SeekTo, SetAttributes, SetTime};
use std::ops::{ControlFlow, Range};
use std::sync::{Arc, RwLockWriteGuard};

/// Bitmap bytes read at once.
const LOAD_BYTES: usize = 64 << 10;

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
    let mut buffer = PageBuffer::zeroed(LOAD_BYTES);
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
