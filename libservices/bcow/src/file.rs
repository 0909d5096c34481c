//! One compact file in memory: where its bytes are, and which of its tables and places are not on disk yet. Its content is
//! accessed in `content.rs`.

mod in_memory;
mod room;
mod size;

use crate::Layout;
use crate::format::{ATTRIBUTE, ENTRIES, Level, ROOT_BLOCKS_MAX, Record, Root, Which};
use crate::inline::Inline;
use crate::table::{Space, Table};
pub(crate) use in_memory::Bound;
use in_memory::{RootTables, TablesInMemory};
use poolfs_libservice::{Branch, Error, Opened, Result};
use poolfs_types::limits::BLOCK_SIZE;
use poolfs_types::{Caller, Errno, NodeId, OpenFlags, XattrFlags};
use std::ops::Range;
use std::sync::Arc;

/// A file of the format.
pub(crate) struct File {
    node: NodeId,
    /// the file below, for what the layer itself reads and writes
    pub own: Arc<Opened>,
    /// as it is now; of few units it has the places
    pub record: Record,
    /// what stands in the file's attribute
    pub stored: Record,
    root: RootTables,
    tables: TablesInMemory,
    space: Space,
    /// There may be free room that `space` does not know of.
    has_unknown: bool,
    /// Something has to be written, and what that is must stay in memory.
    pub is_dirty: bool,
    /// Bytes from here to the end of their unit may stand on disk that are not the file's: they were cut off, or never promised, before
    /// a crash.
    stale: Option<u64>,
    /// How often all of it was thrown away: what was to be written of a time before must not be.
    pub emptied: u64,
    /// Sectors that were cut by a crash are mended, and these were.
    mended: Option<u64>,
}

/// A part of the file, all of it in one piece below, or nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub length: u64,
    /// where it is below; nowhere: it reads as zeros
    pub at: Option<u64>,
}

fn damaged(node: NodeId, cause: impl std::fmt::Display) -> Error {
    Error::new(Errno::EIO, format!("file {} is stored in blocks (trusted.poolfs.bcow), and damaged: {cause}", node.0))
}

fn behind_end(node: NodeId, block: u32) -> Error {
    damaged(node, format!("a block is said to be at {block}, behind its end"))
}

fn offset_of(block: u32) -> u64 {
    u64::from(block) * BLOCK_SIZE as u64
}

/// The record of a new file that is to have `size` bytes.
pub(crate) fn new_record(layout: Layout, size: u64, tag: u64, is_metacopy: bool) -> Result<Record> {
    let (unit_shift, root) = (layout.unit_shift(size), Root::Inline(Inline::default()));
    let record = Record { tag, unit_shift, root, size, limit: u64::MAX, has_freed: false, is_metacopy };
    if size > record.reach() {
        return Err(Errno::EFBIG.into());
    }
    Ok(record)
}

/// Stores the record of a file.
pub(crate) fn store_record(below: &Branch, node: NodeId, record: &Record) -> Result<()> {
    below.setxattr(&Caller::ROOT, node, ATTRIBUTE, &record.encode(), XattrFlags::empty())
}

/// How many blocks a root must have so that so many bytes can be found.
fn root_blocks(record: &Record, bytes: u64) -> Option<u32> {
    let tables = bytes.div_ceil(record.region());
    let blocks = u32::try_from(tables.div_ceil(ENTRIES as u64)).ok()?;
    (blocks <= ROOT_BLOCKS_MAX).then_some(blocks)
}

impl File {
    /// The file `node`, of which `record` is stored. What a crash has cut is damage, or with `mend` mended.
    pub fn open(below: &Branch, node: NodeId, record: Record, mend: bool, bound: &Arc<Bound>) -> Result<Self> {
        let flags = if below.read_only() { OpenFlags::READ_ONLY } else { OpenFlags::READ_WRITE };
        let own = Arc::new(Opened::file(below, &Caller::ROOT, node, flags)?);
        let size_below = below.getattr(&Caller::ROOT, node)?.size;
        let blocks = record.unit_blocks();
        let used = u32::try_from(size_below.div_ceil(BLOCK_SIZE as u64)).map_err(|_| Error::from(Errno::EFBIG))?;
        let end_of_root = match record.root {
            Root::Inline(_) | Root::Table => 1,
            Root::Tables { first, blocks } => first.saturating_add(blocks),
        };
        let mut file = File {
            node,
            own,
            stored: record.clone(),
            root: RootTables::new(bound.clone()),
            tables: TablesInMemory::new(bound.clone()),
            space: Space::new(used.max(end_of_root)),
            has_unknown: record.has_freed,
            // What lies beyond the limit is let go with the next flush.
            is_dirty: record.limit != u64::MAX && !below.read_only(),
            stale: None,
            emptied: 0,
            mended: mend.then_some(0),
            record,
        };
        if file.record.limit == 0 {
            file.forget_all();
            return Ok(file);
        }
        if let Root::Tables { first, blocks } = file.record.root {
            let tables = (0..blocks).map(|number| file.read_table(Level::Tables, u64::from(number), first + number));
            let tables = tables.collect::<Result<_>>()?;
            file.root.set(tables);
        }
        // What stands behind the size may have come of a write that grew the file, and was not synced.
        let (unit, limit) = (file.record.unit(), file.record.limit.min(file.record.size));
        file.record.limit = limit;
        file.stale = (!limit.is_multiple_of(unit)).then_some(limit);
        if let Root::Inline(inline) = &mut file.record.root {
            let cut = inline.cut(limit.div_ceil(unit));
            if let Some((_, block)) = inline.places().find(|&(_, block)| !file.space.has(block, blocks)) {
                return Err(behind_end(node, block));
            }
            for block in cut {
                if file.space.has(block, blocks) {
                    file.space.free_later(block, blocks);
                }
            }
        }
        Ok(file)
    }

    /// A record of nothing, and no table to say otherwise.
    fn forget_all(&mut self) {
        self.tables.clear();
        self.root.set(Vec::new());
        (self.record.root, self.stale) = (Root::Inline(Inline::default()), None);
    }

    fn which(&self, level: Level, number: u64) -> Which {
        Which { tag: self.record.tag, level, number }
    }

    fn read_table(&mut self, level: Level, number: u64, block: u32) -> Result<Table> {
        let mut bytes = vec![0; BLOCK_SIZE];
        self.own.read_full(offset_of(block), &mut bytes)?;
        let which = self.which(level, number);
        let table = match &mut self.mended {
            Some(mended) => Table::salvage(which, block, &bytes, mended),
            None => Table::decode(which, block, &bytes),
        };
        table.map_err(|cause| damaged(self.node, cause))
    }

    /// The block of a table, if there is one.
    fn table_block(&self, number: u64) -> Option<u32> {
        match self.record.root {
            Root::Inline(_) => None,
            Root::Table => (number == 0).then_some(0),
            Root::Tables { .. } => {
                let root = self.root.get((number / ENTRIES as u64) as usize)?;
                Some(root.get((number % ENTRIES as u64) as usize)).filter(|&block| block != 0)
            }
        }
    }

    /// Has the table `number` in memory, if there is one.
    fn load(&mut self, number: u64) -> Result<()> {
        if self.tables.contains_key(&number) {
            return Ok(());
        }
        let Some(block) = self.table_block(number) else { return Ok(()) };
        let mut table = self.read_table(Level::Units, number, block)?;
        let first = number * ENTRIES as u64;
        let blocks = self.record.unit_blocks();
        for at in 0..ENTRIES {
            let unit = table.get(at);
            let is_there = self.space.has(unit, blocks);
            if unit != 0 && (first + at as u64) << self.record.unit_shift >= self.record.limit {
                table.set(at, 0);
                if is_there {
                    self.space.free_later(unit, blocks);
                }
            } else if unit != 0 && !is_there {
                return Err(behind_end(self.node, unit));
            }
        }
        self.tables.insert(number, table);
        Ok(())
    }

    fn place(&self, index: u64) -> (u64, usize) {
        (index / ENTRIES as u64, (index % ENTRIES as u64) as usize)
    }

    /// The unit with that number; its table is in memory.
    fn unit(&self, index: u64) -> Option<u32> {
        if let Root::Inline(inline) = &self.record.root {
            return inline.get(index);
        }
        let (number, entry) = self.place(index);
        self.tables.get(&number).map(|table| table.get(entry)).filter(|&block| block != 0)
    }

    /// Notes where the unit with that number is, 0 for nowhere. Its table is in memory, or the record has room for it.
    fn set_place(&mut self, index: u64, block: u32) {
        if let Root::Inline(inline) = &mut self.record.root {
            inline.set(index, block);
            return;
        }
        let (number, entry) = self.place(index);
        if let Some(table) = self.tables.get_mut(number) {
            table.set(entry, block);
        }
    }

    /// Whether all is in memory that says where these bytes are.
    pub fn knows(&self, bytes: &Range<u64>) -> bool {
        let region = self.record.region();
        let mut numbers = bytes.start / region..bytes.end.div_ceil(region);
        numbers.all(|number| self.tables.contains_key(&number) || self.table_block(number).is_none())
    }

    /// Has all in memory that says where these bytes are. What others have learnt before may go by that: nowhere else does it.
    pub fn learn(&mut self, bytes: &Range<u64>) -> Result<()> {
        let region = self.record.region();
        let mut numbers = bytes.start / region..bytes.end.div_ceil(region);
        self.tables.have_room(&numbers);
        numbers.try_for_each(|number| self.load(number))
    }

    /// Does `work` with the table `number`, if there is one; one that was not in memory does not stay there, unless it has to be written.
    fn with_table(&mut self, number: u64, work: impl FnOnce(&Table)) -> Result<()> {
        let is_new = !self.tables.contains_key(&number);
        self.load(number)?;
        if let Some(table) = self.tables.get(&number) {
            work(table);
            if is_new && table.is_stored() {
                self.tables.remove(number);
            }
        }
        Ok(())
    }

    /// The end of the piece from `offset` on that is changed at once: that of some regions.
    pub fn end_of_piece(&self, offset: u64) -> u64 {
        const REGIONS: u64 = 16;
        let region = self.record.region();
        (offset / region).saturating_add(REGIONS).saturating_mul(region)
    }

    /// Lets all tables go that are on disk.
    pub fn drop_tables(&mut self) {
        self.tables.drop_stored(&(0..0));
    }

    /// Whether it has tables in memory.
    pub fn has_tables(&self) -> bool {
        !self.tables.is_empty()
    }

    /// Whether it has a root.
    pub fn has_root(&self) -> bool {
        !self.root.is_empty()
    }

    /// Whether it can be opened again as it is: all of it is on disk, and that there is free room is known there.
    pub fn is_at_rest(&self) -> bool {
        let is_there = |table: &Table| table.is_stored();
        // What it was opened with says where the bytes end that may be believed, which whoever opens it finds again.
        let (limit, has_freed) = (self.record.limit, self.record.has_freed);
        !self.is_dirty
            && self.record == Record { limit, has_freed, ..self.stored.clone() }
            && self.tables.values().chain(self.root.iter()).all(is_there)
            && (self.stored.has_freed || !self.has_free())
    }

    /// Whether it has as many tables in memory as it may.
    pub fn has_all_tables(&self) -> bool {
        self.tables.is_full(1)
    }

    /// Whether it has more than half as many tables in memory as it may.
    pub fn has_many_tables(&self) -> bool {
        self.tables.is_full(self.tables.len() as u64)
    }

    /// Puts zeros where bytes stand that are not the file's.
    pub fn drop_stale(&mut self) -> Result<()> {
        let Some(from) = self.stale else { return Ok(()) };
        self.load(from / self.record.region())?;
        self.put_zeros(from..(from | (self.record.unit() - 1)) + 1)?;
        self.stale = None;
        Ok(())
    }

    /// Whether some of these bytes may not be the file's as they stand on disk.
    pub fn has_stale(&self, bytes: &Range<u64>) -> bool {
        self.stale_in(bytes).is_some()
    }

    pub fn stale_in(&self, bytes: &Range<u64>) -> Option<Range<u64>> {
        let from = self.stale?;
        let end = (from | (self.record.unit() - 1)) + 1;
        let stale = from.max(bytes.start)..end.min(bytes.end);
        (stale.start < stale.end).then_some(stale)
    }

    /// What is at `offset`, up to `end`; its tables are in memory.
    pub fn run(&self, offset: u64, end: u64) -> Run {
        let unit = self.record.unit();
        let index = offset >> self.record.unit_shift;
        let first = self.unit(index);
        let mut upto = (index + 1) * unit;
        let mut next = index + 1;
        while upto < end {
            let expected = first.map(|first| first + (next - index) as u32 * self.record.unit_blocks());
            if self.unit(next) != expected {
                break;
            }
            next += 1;
            upto += unit;
        }
        Run { length: upto.min(end) - offset, at: first.map(|first| offset_of(first) + offset % unit) }
    }

    /// Whether every one of these bytes has a place; their tables are in memory.
    pub fn has_places(&self, bytes: &Range<u64>) -> bool {
        let unit = self.record.unit();
        (bytes.start / unit..bytes.end.div_ceil(unit)).all(|index| self.unit(index).is_some())
    }

    /// Puts zeros into those of `bytes`, of one unit, that have a place.
    pub fn put_zeros(&mut self, bytes: Range<u64>) -> Result<()> {
        const MUCH: u64 = 1 << 16;
        let Some(at) = self.run(bytes.start, bytes.end).at.filter(|_| bytes.start < bytes.end) else { return Ok(()) };
        let length = bytes.end - bytes.start;
        if length > MUCH && self.punch_below(at, length)? {
            return Ok(());
        }
        self.fill(at, length)
    }

    /// Gives the unit with that number a place, with zeros in it; `whole` when all of it is about to be written. Its table is in memory,
    /// if there is one. Whether it had none before.
    pub fn make_unit(&mut self, index: u64, whole: bool) -> Result<bool> {
        if self.unit(index).is_some() {
            return Ok(false);
        }
        let end = (index + 1) << self.record.unit_shift;
        if matches!(&self.record.root, Root::Inline(inline) if inline.is_full()) {
            self.have_tables(end)?;
        }
        // What was asked of a file without tables may go beyond the first that it gets.
        self.have_reach(end)?;
        self.have_table(index)?;
        let blocks = self.record.unit_blocks();
        let room = self.take_room(blocks)?;
        if let Err(error) = self.clear(room, whole) {
            self.space.give(room.block, blocks, blocks);
            return Err(error);
        }
        self.set_place(index, room.block);
        self.is_dirty = true;
        Ok(true)
    }

    /// Has a table for the unit with that number, where tables say where units are; one that there is already is in memory.
    fn have_table(&mut self, index: u64) -> Result<()> {
        let (number, _) = self.place(index);
        if matches!(self.record.root, Root::Inline(_)) || self.tables.contains_key(&number) {
            return Ok(());
        }
        let room = self.take_room(1)?;
        if let Some(root) = self.root.get_mut((number / ENTRIES as u64) as usize) {
            root.set((number % ENTRIES as u64) as usize, room.block);
        }
        self.tables.insert(number, Table::new(self.which(Level::Units, number), room.block));
        self.is_dirty = true;
        Ok(())
    }

    /// Takes the place back that [`File::make_unit`] gave, when nothing was written there.
    pub fn unmake_unit(&mut self, index: u64) {
        if let Some(block) = self.unit(index) {
            let blocks = self.record.unit_blocks();
            self.space.give(block, blocks, blocks);
            self.set_place(index, 0);
        }
    }

    /// Lets the unit with that number go; its table is in memory.
    pub fn free_unit(&mut self, index: u64) {
        if let Some(block) = self.unit(index) {
            self.set_place(index, 0);
            self.space.free_later(block, self.record.unit_blocks());
            self.is_dirty = true;
        }
    }

    /// `offset`, or the begin of the next unit or region that may have bytes, when the one at `offset` has none.
    pub fn next_with_units(&self, offset: u64) -> u64 {
        if let Root::Inline(inline) = &self.record.root {
            let shift = self.record.unit_shift;
            return inline.next(offset >> shift).map_or(u64::MAX, |index| offset.max(index << shift));
        }
        let region = self.record.region();
        let number = offset / region;
        if self.table_block(number).is_some() || self.tables.contains_key(&number) {
            return offset;
        }
        match self.record.root {
            Root::Inline(_) | Root::Table => u64::MAX,
            Root::Tables { .. } => self.tables_from(number + 1).next().map_or(u64::MAX, |number| number * region),
        }
    }

    /// The numbers of the tables that there are, from `number` on.
    fn tables_from(&self, number: u64) -> impl Iterator<Item = u64> + '_ {
        let of_root = self.root.iter().enumerate().skip((number / ENTRIES as u64) as usize).flat_map(|(at, root)| {
            let first = (at * ENTRIES) as u64;
            let there = root.entries().iter().enumerate().filter(|(_, block)| **block != 0);
            there.map(move |(entry, _)| first + entry as u64)
        });
        let only = matches!(self.record.root, Root::Table).then_some(0);
        only.into_iter().chain(of_root).filter(move |found| *found >= number)
    }

    /// Stores a record.
    pub fn store(&mut self, record: Record) -> Result<()> {
        if record != self.stored {
            store_record(self.own.branch(), self.node, &record)?;
            self.stored = record;
        }
        Ok(())
    }

    /// Has read every table there is; how many sectors of them were mended, if that was asked for.
    pub fn read_all(&mut self) -> Result<u64> {
        let numbers: Vec<u64> = self.tables_from(0).collect();
        for number in numbers {
            self.with_table(number, |_| ())?;
        }
        let mended = self.mended.unwrap_or(0);
        self.is_dirty |= mended > 0;
        Ok(mended)
    }

    /// The tables, those of units or the root's.
    pub fn tables_mut(&mut self, level: Level) -> Box<dyn Iterator<Item = &mut Table> + '_> {
        match level {
            Level::Units => Box::new(self.tables.values_mut()),
            Level::Tables => Box::new(self.root.iter_mut()),
        }
    }
}
