//! The size of a compact file: what is freed when it is truncated, and how it gets tables and roots as it grows.

use super::{File, root_blocks};
use crate::format::{ENTRIES, Level, ROOT_BLOCKS_MAX, Record, Root};
use crate::inline::Inline;
use crate::table::{Space, Table};
use poolfs_libservice::{Error, Result};
use poolfs_types::{Caller, Errno, SetAttributes};

impl File {
    /// The file has `size` bytes from here on.
    pub fn resize(&mut self, size: u64) -> Result<()> {
        let old = self.record.size;
        self.drop_stale()?;
        if size > old {
            self.have_reach(size)?;
        } else if size < old {
            if size == 0 {
                return self.empty();
            }
            let unit = self.record.unit();
            let end = (size.div_ceil(unit) * unit).min(old);
            self.learn(&(size..end))?;
            let limit = self.record.limit.min(size);
            self.store_size(size, limit)?;
            (self.record.size, self.record.limit) = (size, limit);
            self.is_dirty = true;
            self.stale = (size < end).then_some(size);
            self.put_zeros(size..end)?;
            self.stale = None;
            let blocks = self.record.unit_blocks();
            if let Root::Inline(inline) = &mut self.record.root {
                inline.cut(size.div_ceil(unit)).into_iter().for_each(|block| self.space.free_later(block, blocks));
            }
            for (number, table) in self.tables.iter_mut() {
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
        self.store_size(size, self.record.limit)?;
        self.record.size = size;
        Ok(())
    }

    /// Nothing is in the file any more: nor is anything below. The record that says so names no place, so that all of them go at once.
    fn empty(&mut self) -> Result<()> {
        let root = Root::Inline(Inline::default());
        let record = Record { root, size: 0, limit: u64::MAX, has_freed: true, ..self.stored.clone() };
        self.store(record.clone())?;
        self.record = record;
        self.forget_all();
        self.emptied += 1;
        self.is_dirty = false;
        // Should the file below not get shorter, what is in it is found when it is opened the next time.
        (self.space, self.has_unknown) = (Space::new(self.space.end()), false);
        let size = SetAttributes { size: Some(0), ..SetAttributes::default() };
        self.own.branch().setattr(&Caller::ROOT, self.node, &size, None)?;
        self.space = Space::new(1);
        Ok(())
    }

    /// Stores size and limit, with what else is stored already. While the places of now are on their way to the disk, the limit there has to
    /// stay as low as it is.
    fn store_size(&mut self, size: u64, limit: u64) -> Result<()> {
        self.store(Record { size, limit: limit.min(self.stored.limit), ..self.stored.clone() })?;
        // Only a flush lifts a stored limit, and whoever opens the file before that finds nothing behind it.
        self.is_dirty |= self.stored.limit != u64::MAX;
        Ok(())
    }

    /// Has so many bytes be findable. A new root comes to disk with the next flush; until then the old one counts there.
    pub fn have_reach(&mut self, bytes: u64) -> Result<()> {
        if bytes <= self.record.reach() {
            return Ok(());
        }
        let old = self.record.root.clone();
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
            if let Some(table) = self.tables.get_mut(0) {
                table.move_to(block);
            }
        }
        self.root.set(root);
        self.record.root = Root::Tables { first, blocks };
        self.is_dirty = true;
        match old {
            Root::Inline(_) => {}
            Root::Table => self.space.free_later(0, 1),
            Root::Tables { first, blocks } => self.space.free_later(first, blocks),
        }
        Ok(())
    }

    /// Has tables say where the units are, if the record does; the first `bytes` bytes can be found by them. They come to disk with the
    /// next flush; until then the stored record counts there.
    pub fn have_tables(&mut self, bytes: u64) -> Result<()> {
        let Root::Inline(inline) = &self.record.root else { return Ok(()) };
        let places: Vec<(u64, u32)> = inline.places().collect();
        let end = places.last().map_or(0, |(index, _)| (index + 1) << self.record.unit_shift);
        let bytes = bytes.max(end).max(self.record.size.min(self.record.reach()));
        let mut numbers: Vec<u64> = places.iter().map(|&(index, _)| self.place(index).0).collect();
        numbers.dedup();
        let has_root = bytes > self.record.region();
        // Block 0 never holds a unit: a table that is alone, or a root of one block, has its place there.
        let mut blocks = if has_root { Vec::new() } else { vec![0] };
        numbers.resize(if has_root { numbers.len() } else { 1 }, 0);
        while blocks.len() < numbers.len() {
            blocks.push(self.take_room(1)?.block);
        }
        let root = match root_blocks(&self.record, bytes).ok_or(Errno::EFBIG)? {
            1 if !has_root => Root::Table,
            1 => Root::Tables { first: 0, blocks: 1 },
            blocks => Root::Tables { first: self.space.append(blocks).ok_or(Errno::EFBIG)?.block, blocks },
        };
        if let Root::Tables { first, blocks } = root {
            let table = |number| Table::new(self.which(Level::Tables, u64::from(number)), first + number);
            self.root.set((0..blocks).map(table).collect());
        }
        for (&number, &block) in numbers.iter().zip(&blocks) {
            self.tables.insert(number, Table::new(self.which(Level::Units, number), block));
            if let Some(root) = self.root.get_mut((number / ENTRIES as u64) as usize) {
                root.set((number % ENTRIES as u64) as usize, block);
            }
        }
        self.record.root = root;
        places.into_iter().for_each(|(index, block)| self.set_place(index, block));
        self.is_dirty = true;
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
                self.tables.remove(number);
                if let Some(root) = self.root.get_mut((number / ENTRIES as u64) as usize) {
                    root.set((number % ENTRIES as u64) as usize, 0);
                }
            }
        }
        Ok(())
    }
}
