//! One file of the format: where its bytes are, and what is not on disk yet. What is done with the bytes is in `content.rs`.

use crate::Layout;
use crate::format::{ENTRIES, Level, ROOT_BLOCKS_MAX, Record, Root, Which};
use crate::table::{Room, Space, Table};
use hashbrown::HashMap;
use poolfs_libservice::{Branch, Error, Opened, Result};
use poolfs_types::limits::BLOCK_SIZE;
use poolfs_types::{AllocateMode, Caller, Errno, NodeId, OpenFlags, SetAttributes};
use std::ops::Range;

/// Tables that one file keeps in memory although nothing is to be written of them: 4 GiB in units of one block.
const CLEAN_TABLES_MAX: usize = 2048;

/// A file of the format.
pub(crate) struct File {
    node: NodeId,
    /// the file below, for what the layer itself reads and writes
    pub own: Opened,
    pub record: Record,
    /// what stands in the file's attribute
    pub stored: Record,
    root: Vec<Table>,
    tables: HashMap<u64, Table>,
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

fn offset_of(block: u32) -> u64 {
    u64::from(block) * BLOCK_SIZE as u64
}

/// The record of a new file that is to have `size` bytes.
pub(crate) fn new_record(layout: Layout, size: u64, tag: u64, is_metacopy: bool) -> Result<Record> {
    let unit_shift = layout.unit_shift(size);
    let mut record =
        Record { tag, unit_shift, root: Root::Table, size: 0, limit: u64::MAX, has_freed: false, is_metacopy };
    if size > record.reach() {
        record.root = Root::Tables { first: 0, blocks: root_blocks(&record, size).ok_or(Errno::EFBIG)? };
    }
    Ok(Record { size, ..record })
}

/// How many blocks a root must have so that so many bytes can be found.
fn root_blocks(record: &Record, bytes: u64) -> Option<u32> {
    let tables = bytes.div_ceil(record.region());
    let blocks = u32::try_from(tables.div_ceil(ENTRIES as u64)).ok()?;
    (blocks <= ROOT_BLOCKS_MAX).then_some(blocks)
}

impl File {
    /// The file `node`, of which `record` is stored. What a crash has cut is damage, or with `mend` mended.
    pub fn open(below: &Branch, node: NodeId, record: Record, mend: bool) -> Result<Self> {
        let flags = if below.read_only() { OpenFlags::READ_ONLY } else { OpenFlags::READ_WRITE };
        let own = Opened::file(below, &Caller::ROOT, node, flags)?;
        let size_below = below.getattr(&Caller::ROOT, node)?.size;
        let used = u32::try_from(size_below.div_ceil(BLOCK_SIZE as u64)).map_err(|_| Error::from(Errno::EFBIG))?;
        let end_of_root = match record.root {
            Root::Table => 1,
            Root::Tables { first, blocks } => first.saturating_add(blocks),
        };
        let mut file = File {
            node,
            own,
            record,
            stored: record,
            root: Vec::new(),
            tables: HashMap::new(),
            space: Space::new(used.max(end_of_root)),
            has_unknown: record.has_freed,
            // What lies beyond the limit is let go with the next flush.
            is_dirty: record.limit != u64::MAX && !below.read_only(),
            stale: None,
            emptied: 0,
            mended: mend.then_some(0),
        };
        if record.limit == 0 {
            file.forget_all();
            return Ok(file);
        }
        if let Root::Tables { first, blocks } = record.root {
            for number in 0..blocks {
                let table = file.read_table(Level::Tables, u64::from(number), first + number)?;
                file.root.push(table);
            }
        }
        // What stands behind the size may have come of a write that grew the file, and was not synced.
        file.record.limit = record.limit.min(record.size);
        let limit = file.record.limit;
        file.stale = (!limit.is_multiple_of(record.unit())).then_some(limit);
        Ok(file)
    }

    /// A record of nothing, and no table to say otherwise.
    fn forget_all(&mut self) {
        self.tables.clear();
        self.root.clear();
        (self.record.root, self.stale) = (Root::Table, None);
        self.tables.insert(0, Table::new(self.which(Level::Units, 0), 0));
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
        if self.tables.len() >= CLEAN_TABLES_MAX && !self.is_dirty {
            self.tables.retain(|_, table| table.is_dirty());
        }
        let mut table = self.read_table(Level::Units, number, block)?;
        let first = number * ENTRIES as u64;
        let blocks = self.record.unit_blocks();
        for at in 0..ENTRIES {
            let unit = table.get(at);
            if unit != 0 && (first + at as u64) << self.record.unit_shift >= self.record.limit {
                table.set(at, 0);
                self.space.free_later(unit, blocks);
            } else if unit != 0 && unit.checked_add(blocks).is_none_or(|end| end > self.space.end()) {
                return Err(damaged(self.node, format!("a block is said to be at {unit}, behind its end")));
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
        let (number, entry) = self.place(index);
        self.tables.get(&number).map(|table| table.get(entry)).filter(|&block| block != 0)
    }

    /// Whether all is in memory that says where these bytes are.
    pub fn knows(&self, bytes: &Range<u64>) -> bool {
        let region = self.record.region();
        let mut numbers = bytes.start / region..bytes.end.div_ceil(region);
        numbers.all(|number| self.tables.contains_key(&number) || self.table_block(number).is_none())
    }

    /// Has all in memory that says where these bytes are.
    pub fn learn(&mut self, bytes: &Range<u64>) -> Result<()> {
        let region = self.record.region();
        for number in bytes.start / region..bytes.end.div_ceil(region) {
            self.load(number)?;
        }
        Ok(())
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

    /// Has the file below read as zeros where it can have holes; whether it can.
    fn punch_below(&self, at: u64, length: u64) -> Result<bool> {
        let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
        match self.own.branch().fallocate(&Caller::ROOT, self.own.id(), punch, at, length) {
            Ok(()) => Ok(true),
            Err(error) if error == Errno::EOPNOTSUPP => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Room that no table on disk names any more: it can be used again, and is given back to the disk meanwhile.
    pub fn release(&mut self, freed: Vec<(u32, u32)>) -> Result<()> {
        let unit = self.record.unit_blocks();
        for &(first, blocks) in &freed {
            self.space.give(first, blocks, unit);
        }
        if let Some(end) = self.space.trim(unit) {
            let size = SetAttributes { size: Some(offset_of(end)), ..SetAttributes::default() };
            self.own.branch().setattr(&Caller::ROOT, self.node, &size, None)?;
        }
        for (first, blocks) in freed.into_iter().filter(|(first, _)| *first < self.space.end()) {
            if !self.punch_below(offset_of(first), offset_of(blocks))? {
                break;
            }
        }
        Ok(())
    }

    /// Zeros in the file below.
    pub fn fill(&self, at: u64, length: u64) -> Result<()> {
        static ZEROS: [u8; 1 << 16] = [0; 1 << 16];
        let mut done = 0;
        while done < length {
            let piece = (length - done).min(ZEROS.len() as u64);
            self.own.write_full(at + done, &ZEROS[..piece as usize])?;
            done += piece;
        }
        Ok(())
    }

    fn take_room(&mut self, blocks: u32) -> Result<Room> {
        if std::mem::take(&mut self.has_unknown) {
            self.find_free()?;
        }
        self.space.take(blocks, self.record.unit_blocks()).ok_or_else(|| Errno::EFBIG.into())
    }

    /// Gives the unit with that number a place, with zeros in it; `whole` when all of it is about to be written. Its table is in memory,
    /// if there is one. Whether it had none before.
    pub fn make_unit(&mut self, index: u64, whole: bool) -> Result<bool> {
        if self.unit(index).is_some() {
            return Ok(false);
        }
        let (number, entry) = self.place(index);
        if !self.tables.contains_key(&number) {
            let room = self.take_room(1)?;
            if let Some(root) = self.root.get_mut((number / ENTRIES as u64) as usize) {
                root.set((number % ENTRIES as u64) as usize, room.block);
            }
            self.tables.insert(number, Table::new(self.which(Level::Units, number), room.block));
            self.is_dirty = true;
        }
        let blocks = self.record.unit_blocks();
        let room = self.take_room(blocks)?;
        if let Err(error) = self.clear(room, whole) {
            self.space.give(room.block, blocks, blocks);
            return Err(error);
        }
        if let Some(table) = self.tables.get_mut(&number) {
            table.set(entry, room.block);
        }
        self.is_dirty = true;
        Ok(true)
    }

    /// Has zeros in a unit's room that is not about to be written as a `whole`.
    fn clear(&self, room: Room, whole: bool) -> Result<()> {
        let (at, unit) = (offset_of(room.block), self.record.unit());
        if room.is_used && !whole {
            return self.fill(at, unit);
        }
        if !room.is_used && self.record.unit_blocks() > 1 {
            // The end of the file below is that of its last unit: there the next one is put.
            let size = SetAttributes { size: Some(at + unit), ..SetAttributes::default() };
            self.own.branch().setattr(&Caller::ROOT, self.node, &size, None)?;
        }
        Ok(())
    }

    /// Takes the place back that [`File::make_unit`] gave, when nothing was written there.
    pub fn unmake_unit(&mut self, index: u64) {
        let (number, entry) = self.place(index);
        if let Some(table) = self.tables.get_mut(&number) {
            let blocks = self.record.unit_blocks();
            self.space.give(table.get(entry), blocks, blocks);
            table.set(entry, 0);
        }
    }

    /// Lets the unit with that number go; its table is in memory.
    pub fn free_unit(&mut self, index: u64) {
        let (number, entry) = self.place(index);
        let Some(table) = self.tables.get_mut(&number) else { return };
        let block = table.get(entry);
        if block != 0 {
            table.set(entry, 0);
            self.space.free_later(block, self.record.unit_blocks());
            self.is_dirty = true;
        }
    }

    /// `offset`, or the begin of the next region that has a table, when the one at `offset` has none.
    pub fn next_table_with_units(&self, offset: u64) -> u64 {
        let region = self.record.region();
        let number = offset / region;
        if self.table_block(number).is_some() || self.tables.contains_key(&number) {
            return offset;
        }
        match self.record.root {
            Root::Table => u64::MAX,
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

    /// The file has `size` bytes from here on.
    pub fn resize(&mut self, size: u64) -> Result<()> {
        let old = self.record.size;
        self.drop_stale()?;
        if size > old {
            self.have_reach(size)?;
        } else if size < old {
            let unit = self.record.unit();
            let end = (size.div_ceil(unit) * unit).min(old);
            self.learn(&(size..end))?;
            let record = Record { size, limit: self.record.limit.min(size), ..self.record };
            self.store_size(record)?;
            self.record = record;
            self.is_dirty = true;
            if size == 0 {
                return self.empty();
            }
            self.stale = (size < end).then_some(size);
            self.put_zeros(size..end)?;
            self.stale = None;
            let blocks = self.record.unit_blocks();
            for (number, table) in &mut self.tables {
                for at in 0..ENTRIES {
                    let block = table.get(at);
                    if block != 0 && (number * ENTRIES as u64 + at as u64) << self.record.unit_shift >= size {
                        table.set(at, 0);
                        self.space.free_later(block, blocks);
                    }
                }
            }
            return Ok(());
        }
        let record = Record { size, ..self.record };
        self.store_size(record)?;
        self.record = record;
        Ok(())
    }

    /// Nothing is in the file any more: nor is anything below.
    fn empty(&mut self) -> Result<()> {
        let size = SetAttributes { size: Some(0), ..SetAttributes::default() };
        self.own.branch().setattr(&Caller::ROOT, self.node, &size, None)?;
        self.forget_all();
        self.emptied += 1;
        // Where the old root was, which the stored record still names, nothing is put: there may be something then that looks like one.
        let end = match self.stored.root {
            Root::Table => 1,
            Root::Tables { first, blocks } => first + blocks,
        };
        (self.space, self.has_unknown) = (Space::new(end), false);
        Ok(())
    }

    /// Stores size and limit of `record`, with what else is stored already.
    fn store_size(&mut self, record: Record) -> Result<()> {
        self.store(Record { size: record.size, limit: record.limit, ..self.stored })
    }

    /// Stores a record.
    pub fn store(&mut self, record: Record) -> Result<()> {
        if record != self.stored {
            crate::layer::store(self.own.branch(), self.node, &record)?;
            self.stored = record;
        }
        Ok(())
    }

    /// Has so many bytes be findable. A new root comes to disk with the next flush; until then the old one counts there.
    pub fn have_reach(&mut self, bytes: u64) -> Result<()> {
        if bytes <= self.record.reach() {
            return Ok(());
        }
        let old = self.record.root;
        // Room for as much again, so that appending does not come here each time.
        let wanted = root_blocks(&self.record, bytes).ok_or(Errno::EFBIG)?;
        let blocks = wanted.next_power_of_two().min(ROOT_BLOCKS_MAX);
        let too_large = || Error::from(Errno::EFBIG);
        self.load(0)?;
        let first = self.space.append(blocks).ok_or_else(too_large)?.block;
        let mut root: Vec<Table> = Vec::new();
        for number in 0..blocks {
            root.push(Table::new(self.which(Level::Tables, u64::from(number)), first + number));
        }
        for (old, new) in self.root.iter().zip(&mut root) {
            old.entries().iter().enumerate().for_each(|(at, &block)| new.set(at, block));
        }
        if old == Root::Table {
            let block = self.space.append(1).ok_or_else(too_large)?.block;
            root[0].set(0, block);
            if let Some(table) = self.tables.get_mut(&0) {
                table.move_to(block);
            }
        }
        self.root = root;
        self.record.root = Root::Tables { first, blocks };
        self.is_dirty = true;
        match old {
            Root::Table => self.space.free_later(0, 1),
            Root::Tables { first, blocks } => self.space.free_later(first, blocks),
        }
        Ok(())
    }

    /// Finds the blocks that no table names, those that are known already among them.
    fn find_free(&mut self) -> Result<()> {
        let numbers: Vec<u64> = self.tables_from(0).collect();
        let mut used: Vec<(u32, u32)> = Vec::new();
        match self.record.root {
            Root::Table => used.push((0, 1)),
            Root::Tables { first, blocks } => used.push((first, blocks)),
        }
        for number in numbers {
            self.load(number)?;
            let Some(table) = self.tables.get(&number) else { continue };
            used.push((table.block, 1));
            let units = table.entries().iter().filter(|block| **block != 0);
            used.extend(units.map(|&block| (block, self.record.unit_blocks())));
        }
        // What is not on disk as it is here counts as used.
        let freed = self.space.take_freed();
        used.extend(&freed);
        self.space.put_back_freed(freed);
        self.space.forget_free();
        used.push((self.space.end(), 0));
        used.sort_unstable();
        let mut at = 0;
        for (first, blocks) in used {
            if first > at {
                self.space.give(at, first - at, self.record.unit_blocks());
            }
            at = at.max(first.saturating_add(blocks));
        }
        Ok(())
    }

    /// The tables of a file with bytes beyond a limit have to be known before the limit can go.
    pub fn apply_limit(&mut self) -> Result<()> {
        if self.record.limit == u64::MAX {
            return Ok(());
        }
        self.drop_stale()?;
        let limit = self.record.limit;
        let numbers: Vec<u64> = self.tables_from(limit / self.record.region()).collect();
        for number in numbers {
            self.load(number)?;
            let Root::Tables { .. } = self.record.root else { continue };
            let is_empty = |table: &Table| table.entries().iter().all(|&block| block == 0);
            if number * self.record.region() >= limit
                && let Some(table) = self.tables.get(&number).filter(|table| is_empty(table))
            {
                self.space.free_later(table.block, 1);
                self.tables.remove(&number);
                if let Some(root) = self.root.get_mut((number / ENTRIES as u64) as usize) {
                    root.set((number % ENTRIES as u64) as usize, 0);
                }
            }
        }
        Ok(())
    }

    /// Has read every table there is; how many sectors of them were mended, if that was asked for.
    pub fn read_all(&mut self) -> Result<u64> {
        let numbers: Vec<u64> = self.tables_from(0).collect();
        for number in numbers {
            self.load(number)?;
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

    /// The room that is not used.
    pub fn space(&mut self) -> &mut Space {
        &mut self.space
    }

    /// Units of 512 bytes that it takes, where the file below says that it has so many: what is free is given back with the next flush.
    pub fn shown_blocks(&self, below: u64) -> u64 {
        const SECTORS_PER_BLOCK: u64 = BLOCK_SIZE as u64 / 512;
        below.min(self.space.used(self.record.unit_blocks()) * SECTORS_PER_BLOCK)
    }

    /// Whether there is, or may be, room that no table names.
    pub fn has_free(&self) -> bool {
        self.has_unknown || self.space.has_free()
    }
}
