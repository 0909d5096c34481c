//! A block table in memory, and the free space of the file below.

use crate::decoding::Cause;
use crate::format::{
    ENTRIES, Entries, SECTOR_BYTES, SECTORS, Which, decode_sector, encode_sector, salvage_sector, sector_of,
};
use poolfs_types::limits::BLOCK_SIZE;

/// One table.
pub(crate) struct Table {
    /// Where it is stored.
    pub block: u32,
    pub which: Which,
    entries: Box<Entries>,
    /// of its sectors, those that are not on disk as they are here
    dirty: u8,
    /// those that are on their way there: should they not arrive, they are dirty again
    storing: u8,
}

impl Table {
    /// A new one at `block`, which may hold something else.
    pub fn new(which: Which, block: u32) -> Self {
        Table { block, which, entries: Box::new([0; ENTRIES]), dirty: u8::MAX, storing: 0 }
    }

    /// That which stands in `bytes`, a block.
    pub fn decode(which: Which, block: u32, bytes: &[u8]) -> Result<Self, Cause> {
        let mut entries = Box::new([0; ENTRIES]);
        for (sector, bytes) in bytes.chunks_exact(SECTOR_BYTES).enumerate() {
            decode_sector(which, sector, bytes, &mut entries)?;
        }
        Ok(Table { block, which, entries, dirty: 0, storing: 0 })
    }

    /// The same of one that may have been cut by a crash: what is lost by that was promised to nobody. The sectors for which it was so are
    /// counted, and written again.
    pub fn salvage(which: Which, block: u32, bytes: &[u8], mended: &mut u64) -> Result<Self, Cause> {
        let mut table = Table { block, which, entries: Box::new([0; ENTRIES]), dirty: 0, storing: 0 };
        for (sector, bytes) in bytes.chunks_exact(SECTOR_BYTES).enumerate() {
            if salvage_sector(which, sector, bytes, &mut table.entries)? {
                table.put_back(sector);
                *mended += 1;
            }
        }
        Ok(table)
    }

    pub fn get(&self, entry: usize) -> u32 {
        self.entries[entry]
    }

    pub fn set(&mut self, entry: usize, block: u32) {
        if std::mem::replace(&mut self.entries[entry], block) != block {
            self.dirty |= 1 << sector_of(entry);
        }
    }

    pub fn entries(&self) -> &Entries {
        &self.entries
    }

    /// It goes to another block, which may hold something else.
    pub fn move_to(&mut self, block: u32) {
        self.block = block;
        self.dirty = u8::MAX;
    }

    pub fn is_dirty(&self) -> bool {
        self.dirty != 0
    }

    /// Whether it is on disk as it is here, and can be read again.
    pub fn is_stored(&self) -> bool {
        self.dirty == 0 && self.storing == 0
    }

    /// What was on its way has arrived, or is dirty again.
    pub fn end_storing(&mut self) {
        self.storing = 0;
    }

    /// The sectors that have to be written, which count as written from here on.
    pub fn take_dirty(&mut self) -> Vec<Sector> {
        let dirty = std::mem::take(&mut self.dirty);
        self.storing |= dirty;
        let of = |sector| Sector {
            which: self.which,
            sector,
            offset: u64::from(self.block) * BLOCK_SIZE as u64 + (sector * SECTOR_BYTES) as u64,
            bytes: encode_sector(self.which, sector, &self.entries),
        };
        (0..SECTORS).filter(|sector| dirty >> sector & 1 == 1).map(of).collect()
    }

    /// A sector could not be written.
    pub fn put_back(&mut self, sector: usize) {
        self.dirty |= 1 << sector;
    }
}

/// A sector to be written.
pub(crate) struct Sector {
    pub which: Which,
    pub sector: usize,
    /// where, in the file below
    pub offset: u64,
    pub bytes: [u8; SECTOR_BYTES],
}

/// The room of a file that nothing names.
#[derive(Default)]
pub(crate) struct Space {
    /// the first block behind everything
    end: u32,
    /// first blocks of units that are free
    units: Vec<u32>,
    /// blocks that are free, where a unit has several
    blocks: Vec<u32>,
    /// what becomes free when nothing on disk names it any more: first block and how many
    freed: Vec<(u32, u32)>,
    /// that of it which is so as soon as what is on its way to the disk is there
    freeing: Vec<(u32, u32)>,
}

/// A piece of room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    pub block: u32,
    /// Something has been written there before.
    pub is_used: bool,
}

impl Space {
    pub fn new(end: u32) -> Self {
        Space { end, ..Space::default() }
    }

    /// Room for `blocks` blocks: those of a unit (`unit`), or others. `None` when the file below cannot be larger.
    pub fn take(&mut self, blocks: u32, unit: u32) -> Option<Room> {
        let free = if blocks == unit { self.units.pop() } else { None };
        let free = free.or_else(|| if blocks == 1 { self.blocks.pop() } else { None });
        match free {
            Some(block) => Some(Room { block, is_used: true }),
            None => self.append(blocks),
        }
    }

    /// Room behind everything.
    pub fn append(&mut self, blocks: u32) -> Option<Room> {
        let block = self.end;
        self.end = block.checked_add(blocks)?;
        Some(Room { block, is_used: false })
    }

    /// Room that was taken and not used, or no longer named on disk.
    pub fn give(&mut self, first: u32, blocks: u32, unit: u32) {
        // An entry cannot name the first block of a file.
        let mut at = first.max(1);
        while at < first + blocks {
            if first + blocks - at >= unit {
                self.units.push(at);
                at += unit;
            } else {
                self.blocks.push(at);
                at += 1;
            }
        }
    }

    /// Takes free room at the end from the file, so that the next that is taken is behind what is used; the new end, if it is another one.
    pub fn trim(&mut self, unit: u32) -> Option<u32> {
        let before = self.end;
        self.units.sort_unstable();
        self.blocks.sort_unstable();
        loop {
            if self.units.last().is_some_and(|&last| last + unit == self.end) {
                self.end -= unit;
                self.units.pop();
            } else if self.blocks.last().is_some_and(|&last| last + 1 == self.end) {
                self.end -= 1;
                self.blocks.pop();
            } else {
                return (self.end < before).then_some(self.end);
            }
        }
    }

    /// What is free is about to be found anew.
    pub fn forget_free(&mut self) {
        self.units.clear();
        self.blocks.clear();
    }

    /// Room that something on disk may still name.
    pub fn free_later(&mut self, first: u32, blocks: u32) {
        self.freed.push((first, blocks));
    }

    /// The places as they are now are on their way to the disk: what they no longer name becomes free when they are there.
    pub fn begin_freeing(&mut self) {
        self.freeing.append(&mut self.freed);
    }

    /// They are there: what that makes free.
    pub fn take_freeing(&mut self) -> Vec<(u32, u32)> {
        std::mem::take(&mut self.freeing)
    }

    /// They are not.
    pub fn put_back_freeing(&mut self) {
        self.freed.append(&mut self.freeing);
    }

    /// What something on disk may still name: first blocks, and how many.
    pub fn not_yet_free(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.freed.iter().chain(&self.freeing).copied()
    }

    /// Whether there is room that nothing names.
    pub fn has_free(&self) -> bool {
        !self.units.is_empty() || !self.blocks.is_empty() || self.not_yet_free().next().is_some()
    }

    /// Blocks of the file that are not free, and do not become so.
    pub fn used(&self, unit: u32) -> u64 {
        let freed: u64 = self.not_yet_free().map(|(_, blocks)| u64::from(blocks)).sum();
        let free = self.units.len() as u64 * u64::from(unit) + self.blocks.len() as u64;
        u64::from(self.end).saturating_sub(free + freed)
    }

    /// Whether so many blocks from `first` on are before the end.
    pub fn has(&self, first: u32, blocks: u32) -> bool {
        first.checked_add(blocks).is_some_and(|end| end <= self.end)
    }

    /// The first block behind everything.
    pub fn end(&self) -> u32 {
        self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Level;

    const WHICH: Which = Which { tag: 5, level: Level::Units, number: 0 };

    #[test]
    fn only_what_changed_is_written_again() {
        let mut table = Table::new(WHICH, 7);
        table.set(0, 9);
        table.set(ENTRIES - 1, 10);
        let mut disk = [0xee; BLOCK_SIZE];
        let write = |table: &mut Table, disk: &mut [u8]| {
            let sectors = table.take_dirty();
            for sector in &sectors {
                let at = sector.offset as usize - 7 * BLOCK_SIZE;
                disk[at..at + SECTOR_BYTES].copy_from_slice(&sector.bytes);
            }
            sectors.len()
        };
        assert_eq!(write(&mut table, &mut disk), SECTORS, "the block may have held something else");
        assert_eq!(write(&mut table, &mut disk), 0);
        table.set(0, 9);
        table.set(1, 11);
        assert_eq!(write(&mut table, &mut disk), 1);
        let read = Table::decode(WHICH, 7, &disk).expect("sound");
        assert_eq!((read.get(0), read.get(1), read.get(2), read.get(ENTRIES - 1)), (9, 11, 0, 10));
        assert!(!read.is_dirty());
    }

    #[test]
    fn what_is_freed_is_used_again_only_when_it_may() {
        let mut space = Space::new(1);
        let first = space.take(4, 4).expect("room");
        assert_eq!((first, space.end()), (Room { block: 1, is_used: false }, 5));
        space.free_later(1, 4);
        assert_eq!(space.take(4, 4).expect("room").block, 5);
        space.begin_freeing();
        assert_eq!(space.not_yet_free().collect::<Vec<_>>(), [(1, 4)]);
        assert_eq!(space.take(4, 4).expect("room").block, 9, "it is on its way only");
        space.put_back_freeing();
        assert_eq!(space.take_freeing(), []);
        space.begin_freeing();
        for (first, blocks) in space.take_freeing() {
            space.give(first, blocks, 4);
        }
        assert_eq!(space.take(4, 4), Some(Room { block: 1, is_used: true }));
        space.give(20, 6, 4);
        assert_eq!([space.take(1, 4), space.take(1, 4)].map(|room| room.expect("room").block), [25, 24]);
        assert_eq!(space.take(4, 4).expect("room").block, 20);
        assert!(!space.has_free());
        let mut space = Space::new(20);
        space.give(8, 4, 4);
        space.give(13, 7, 4);
        assert_eq!((space.trim(4), space.trim(4)), (Some(13), None));
        assert_eq!([space.take(4, 4), space.take(4, 4)].map(|room| room.expect("room").block), [8, 13]);
        assert_eq!(Space::new(u32::MAX).take(1, 1), None);
    }
}
