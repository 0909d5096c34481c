//! Space management within the backing file of a compact file: which of its blocks are free, and which become free.

use super::{File, offset_of};
use crate::format::Root;
use crate::table::{Room, Space};
use poolfs_libservice::Result;
use poolfs_types::limits::BLOCK_SIZE;
use poolfs_types::{AllocateMode, Caller, Errno, SetAttributes};

impl File {
    /// Has the file below read as zeros where it can have holes; whether it can.
    pub(super) fn punch_below(&self, at: u64, length: u64) -> Result<bool> {
        let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
        match self.own.branch().fallocate(&Caller::ROOT, self.own.id(), punch, at, length) {
            Ok(()) => Ok(true),
            Err(error) if error == Errno::EOPNOTSUPP => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// What was let go before the places that are on disk now: it can be used again, and is given back to the disk meanwhile.
    pub fn release(&mut self) -> Result<()> {
        let unit = self.record.unit_blocks();
        let freed = self.space.take_freeing();
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

    pub(super) fn take_room(&mut self, blocks: u32) -> Result<Room> {
        if std::mem::take(&mut self.has_unknown) {
            self.find_free()?;
        }
        self.space.take(blocks, self.record.unit_blocks()).ok_or_else(|| Errno::EFBIG.into())
    }

    /// Has zeros in a unit's room that is not about to be written as a `whole`.
    pub(super) fn clear(&self, room: Room, whole: bool) -> Result<()> {
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

    /// Finds the blocks that nothing names, those that are known already among them.
    fn find_free(&mut self) -> Result<()> {
        let numbers: Vec<u64> = self.tables_from(0).collect();
        let mut used: Vec<(u32, u32)> = Vec::new();
        let unit_blocks = self.record.unit_blocks();
        match &self.record.root {
            Root::Inline(inline) => used.extend(inline.places().map(|(_, block)| (block, unit_blocks))),
            Root::Table => used.push((0, 1)),
            &Root::Tables { first, blocks } => used.push((first, blocks)),
        }
        for number in numbers {
            self.with_table(number, |table| {
                used.push((table.block, 1));
                let units = table.entries().iter().filter(|block| **block != 0);
                used.extend(units.map(|&block| (block, unit_blocks)));
            })?;
        }
        // What is not on disk as it is here counts as used.
        used.extend(self.space.not_yet_free());
        self.space.forget_free();
        used.push((self.space.end(), 0));
        used.sort_unstable();
        let mut at = 0;
        for (first, blocks) in used {
            if first > at {
                self.space.give(at, first - at, unit_blocks);
            }
            at = at.max(first.saturating_add(blocks));
        }
        Ok(())
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

    /// Whether there is, or may be, room that nothing names.
    pub fn has_free(&self) -> bool {
        self.has_unknown || self.space.has_free()
    }
}
