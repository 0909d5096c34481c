//! The bitmap of moved blocks of a sketch: in memory, and as sectors on disk.
//!
//! In memory there are only sectors of which some blocks have moved and others have not, so a bitmap costs what was written at
//! scattered places, not what the file measures. Sectors of which all blocks have moved are kept as ranges, also on their way to
//! the disk. A block is *lower* (bit clear) or *upper* (bit set). A block *in transit*, of which only a part has arrived, is not
//! visible here, because one write below stores the part and the rest together.

use crate::format::BLOCK;
use crate::format::{Cause, VERSION, array, check, crc_with_hole};
use poolfs_libservice::{Error, Result as Answer};
use poolfs_types::Errno;
use rangemap::RangeSet;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of one sector, the unit that reaches the disk wholly or not at all.
pub(crate) const SECTOR_BYTES: usize = 512;
const HEADER_BYTES: usize = 32;
const CRC_AT: usize = 28;
const WORDS: usize = (SECTOR_BYTES - HEADER_BYTES) / 8;
/// Blocks one sector tells of.
pub(crate) const SECTOR_BLOCKS: u64 = WORDS as u64 * 64;

/// The largest lower file a sketch may have: its bitmap's sectors are counted by 32 bits.
pub(crate) const SKETCH_SIZE_MAX: u64 = u32::MAX as u64 * SECTOR_BLOCKS * BLOCK;

/// Sectors and ranges of sectors that a sketch may have in memory in any case: the nodes are bounded.
const UNCHARGED: usize = 8;
/// Most others of one sketch: scattered writes to 240 GiB.
const CHARGED_MAX: usize = 16384;
/// Most of all sketches. What is accepted may become sectors later (blocks in transit, first writes), so that it must hold a file that had
/// as many as it may when that was accepted.
const CHARGED_MAX_OF_ALL: usize = 2 * CHARGED_MAX;

/// How many sectors, and ranges of them, the bitmaps of a union have in memory, of those that are charged.
#[derive(Debug, Default)]
pub(crate) struct Sectors(AtomicUsize);

impl Sectors {
    /// Whether there are so few that any sketch can have some thousand more.
    pub fn are_few(&self) -> bool {
        self.0.load(Ordering::Relaxed) <= CHARGED_MAX / 4 * 3
    }
}

type Words = [u64; WORDS];

/// The words of a sector of which all blocks have moved.
const FULL: Words = [u64::MAX; WORDS];

/// Which blocks of a sketch have moved, and which sectors of that are not on disk yet.
#[derive(Debug, Default)]
pub(crate) struct Bitmap {
    /// those of which some blocks have moved
    mixed: BTreeMap<u32, Box<Words>>,
    /// those of which all blocks have moved
    full: RangeSet<u32>,
    dirty: RangeSet<u32>,
    /// whose they are, and how many have been charged
    all: Arc<Sectors>,
    charged: usize,
}

/// Sectors of a bitmap on their way to the disk. Those of which all blocks have moved are ranges here, too.
#[derive(Debug, Default)]
pub(crate) struct DirtySectors {
    id: [u8; 16],
    sectors: RangeSet<u32>,
    mixed: BTreeMap<u32, [u8; SECTOR_BYTES]>,
}

impl DirtySectors {
    pub fn is_empty(&self) -> bool {
        self.sectors.is_empty()
    }

    /// The bytes of the bitmap file, in pieces of so many sectors at most, each with its offset.
    pub fn pieces(&self, most: u32) -> impl Iterator<Item = (u64, Vec<u8>)> + '_ {
        let cut = move |sectors: &std::ops::Range<u32>| {
            let end = sectors.end;
            (sectors.start..end).step_by(most as usize).map(move |first| first..end.min(first.saturating_add(most)))
        };
        self.sectors.iter().flat_map(cut).map(|sectors| {
            let offset = u64::from(sectors.start) * SECTOR_BYTES as u64;
            (offset, sectors.flat_map(|sector| self.bytes(sector)).collect())
        })
    }

    fn bytes(&self, sector: u32) -> [u8; SECTOR_BYTES] {
        self.mixed.get(&sector).copied().unwrap_or_else(|| encode(&self.id, sector, &FULL))
    }
}

impl Drop for Bitmap {
    fn drop(&mut self) {
        self.all.0.fetch_sub(self.charged, Ordering::Relaxed);
    }
}

fn too_many() -> Error {
    Error::new(Errno::ENOMEM, "too many scattered blocks of large files have moved to be kept in memory")
}

impl Bitmap {
    /// An empty one, whose sectors count with `all`.
    pub fn new(all: &Arc<Sectors>) -> Self {
        let mut bitmap = Bitmap::default();
        bitmap.all = all.clone();
        bitmap
    }

    fn in_memory(&self) -> usize {
        self.mixed.len() + self.full.len()
    }

    fn charge(&mut self) {
        let now = self.in_memory().saturating_sub(UNCHARGED);
        // By the difference: nobody else finds this one counted twice, or not at all.
        self.all.0.fetch_add(now.saturating_sub(self.charged), Ordering::Relaxed);
        self.all.0.fetch_sub(self.charged.saturating_sub(now), Ordering::Relaxed);
        self.charged = now;
    }

    /// Whether a write that moves `blocks` can be accepted; `ENOMEM` when there would be too many sectors in memory.
    pub fn admit(&self, blocks: std::ops::Range<u64>) -> Answer<()> {
        if blocks.is_empty() {
            return Ok(());
        }
        let (first, last) = (Self::split(blocks.start).0, Self::split(blocks.end - 1).0);
        let is_new = |sector: u32| !self.mixed.contains_key(&sector) && !self.full.contains(&sector);
        let edges = usize::from(is_new(first)) + usize::from(last > first && is_new(last));
        // Those between become full, which is one range.
        let between = first.saturating_add(1)..last;
        let new = edges + usize::from(!between.is_empty() && !self.full.overlaps(&between));
        let more = (self.in_memory() + new).saturating_sub(UNCHARGED).saturating_sub(self.charged);
        let all = self.all.0.load(Ordering::Relaxed);
        let is_one_too_many = self.charged + more > CHARGED_MAX || all + more > CHARGED_MAX_OF_ALL;
        if more > 0 && is_one_too_many { Err(too_many()) } else { Ok(()) }
    }

    /// Whether what is being loaded has room; `ENOMEM` when it has none.
    pub fn admit_loaded(&self) -> Answer<()> {
        let is_one_too_many = self.charged > 0 && self.all.0.load(Ordering::Relaxed) > CHARGED_MAX_OF_ALL;
        if is_one_too_many { Err(too_many()) } else { Ok(()) }
    }

    fn split(block: u64) -> (u32, usize, u32) {
        let bit = block % SECTOR_BLOCKS;
        ((block / SECTOR_BLOCKS) as u32, (bit / 64) as usize, (bit % 64) as u32)
    }

    /// Whether `block` has moved.
    pub fn moved(&self, block: u64) -> bool {
        let (sector, word, bit) = Self::split(block);
        self.mixed.get(&sector).map_or_else(|| self.full.contains(&sector), |words| words[word] >> bit & 1 == 1)
    }

    /// The first block in `from..end` whose state differs from `moved`, or `end`.
    pub fn run_end(&self, from: u64, end: u64, moved: bool) -> u64 {
        let mut block = from;
        while block < end {
            let (sector, word, bit) = Self::split(block);
            let Some(words) = self.mixed.get(&sector) else {
                let full = self.full.get(&sector);
                if full.is_some() != moved {
                    return block;
                }
                // Up to where they are full, or up to the next of which some have moved.
                let next = match full {
                    Some(sectors) => Some(sectors.end),
                    None => {
                        let mixed = self.mixed.range(sector..).next().map(|(&next, _)| next);
                        let full = self.full.overlapping(&(sector..u32::MAX)).next().map(|sectors| sectors.start);
                        mixed.into_iter().chain(full).min()
                    }
                };
                block = next.map_or(end, |next| u64::from(next) * SECTOR_BLOCKS).min(end);
                continue;
            };
            let differs = if moved { !words[word] } else { words[word] } >> bit;
            if differs != 0 {
                return (block + u64::from(differs.trailing_zeros())).min(end);
            }
            block += 64 - u64::from(bit);
        }
        end
    }

    /// Marks `blocks` as moved; returns how many were not.
    pub fn set(&mut self, blocks: std::ops::Range<u64>) -> u64 {
        let fresh = match Self::whole(&blocks) {
            Some(whole) => {
                let [first, last] = [whole.start, whole.end].map(|sector| u64::from(sector) * SECTOR_BLOCKS);
                self.set_here(blocks.start..first) + self.set_whole(whole) + self.set_here(last..blocks.end)
            }
            None => self.set_here(blocks),
        };
        self.charge();
        fresh
    }

    /// The sectors all of whose blocks are among these, if there are some.
    fn whole(blocks: &std::ops::Range<u64>) -> Option<std::ops::Range<u32>> {
        let first = u32::try_from(blocks.start.div_ceil(SECTOR_BLOCKS)).ok()?;
        // The last of all has no end that can be counted.
        let end = u32::try_from(blocks.end / SECTOR_BLOCKS).unwrap_or(u32::MAX);
        (first < end).then_some(first..end)
    }

    /// Marks all blocks of these sectors, in one go however many they are.
    fn set_whole(&mut self, sectors: std::ops::Range<u32>) -> u64 {
        let mut fresh = 0;
        for gap in self.full.gaps(&sectors).collect::<Vec<_>>() {
            fresh += u64::from(gap.end - gap.start) * SECTOR_BLOCKS;
            self.dirty.insert(gap);
        }
        let mixed: Vec<u32> = self.mixed.range(sectors.clone()).map(|(&sector, _)| sector).collect();
        for words in mixed.iter().filter_map(|sector| self.mixed.remove(sector)) {
            fresh -= words.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
        }
        self.full.insert(sectors);
        fresh
    }

    /// Marks blocks of a few sectors.
    fn set_here(&mut self, blocks: std::ops::Range<u64>) -> u64 {
        let mut fresh = 0;
        let mut block = blocks.start;
        while block < blocks.end {
            let (sector, word, bit) = Self::split(block);
            let end = (u64::from(sector) + 1) * SECTOR_BLOCKS;
            if self.full.contains(&sector) {
                block = end;
                continue;
            }
            let words = self.mixed.entry(sector).or_insert_with(|| Box::new([0; WORDS]));
            let (mut word, mut bit, end) = (word, bit, end.min(blocks.end));
            let before = fresh;
            while block < end {
                let count = (64 - u64::from(bit)).min(end - block);
                let mask = (u64::MAX >> (64 - count)) << bit;
                let new = mask & !words[word];
                words[word] |= mask;
                fresh += u64::from(new.count_ones());
                block += count;
                (word, bit) = (word + 1, 0);
            }
            if fresh > before {
                self.note_dirty(sector);
            }
            self.note_full(sector);
        }
        fresh
    }

    fn note_dirty(&mut self, sector: u32) {
        // The last of all, which has no end that can be counted, is never one of a sketch.
        if let Some(next) = sector.checked_add(1) {
            self.dirty.insert(sector..next);
        }
    }

    /// Keeps a sector as one of a range when all its blocks have moved.
    fn note_full(&mut self, sector: u32) {
        // The last of all has no end that can be counted.
        let Some(next) = sector.checked_add(1) else { return };
        if self.mixed.get(&sector).is_some_and(|words| **words == FULL) {
            self.mixed.remove(&sector);
            self.full.insert(sector..next);
        }
    }

    /// How many of the blocks below `end` have moved.
    pub fn count_below(&self, end: u64) -> u64 {
        let mut count = 0;
        for sectors in self.full.iter() {
            let blocks = [sectors.start, sectors.end].map(|sector| (u64::from(sector) * SECTOR_BLOCKS).min(end));
            count += blocks[1] - blocks[0];
        }
        for (&sector, words) in self.mixed.range(..=Self::split(end).0) {
            let first = u64::from(sector) * SECTOR_BLOCKS;
            for (index, word) in words.iter().enumerate() {
                let start = first + index as u64 * 64;
                if start >= end {
                    break;
                }
                let keep = (end - start).min(64);
                count += u64::from((word & (u64::MAX >> (64 - keep))).count_ones());
            }
        }
        count
    }

    /// Whether something is not on disk yet.
    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// The sectors that are not on disk yet, as they have to be written, and forgets that they are dirty.
    pub fn take_dirty(&mut self, id: &[u8; 16]) -> DirtySectors {
        let sectors = std::mem::take(&mut self.dirty);
        let dirty = |sector: &u32| sectors.contains(sector);
        let mixed = self.mixed.iter().filter(|(sector, _)| dirty(sector));
        let mixed = mixed.map(|(&sector, words)| (sector, encode(id, sector, words))).collect();
        DirtySectors { id: *id, sectors, mixed }
    }

    /// Takes back sectors that could not be written.
    pub fn put_back(&mut self, taken: &DirtySectors) {
        self.dirty.extend(taken.sectors.iter().cloned());
    }

    /// Adds what the sector `sector` of a bitmap file says.
    pub fn load(&mut self, id: &[u8; 16], sector: u32, bytes: &[u8; SECTOR_BYTES]) -> Result<(), Cause> {
        if bytes.iter().all(|&byte| byte == 0) {
            return Ok(());
        }
        let what = format!("sector {sector} of bitmap {}", crate::format::bitmap_name(id));
        check(&what, bytes, b"PFBM", CRC_AT)?;
        if array::<16>(bytes, 8) != *id {
            return Err(format!("{what} belongs to another file"));
        }
        if u32::from_le_bytes(array(bytes, 24)) != sector {
            return Err(format!("{what} is in the wrong place"));
        }
        let mut words = Box::new([0; WORDS]);
        for (index, word) in words.iter_mut().enumerate() {
            *word = u64::from_le_bytes(array(bytes, HEADER_BYTES + 8 * index));
        }
        self.mixed.insert(sector, words);
        self.note_full(sector);
        self.charge();
        Ok(())
    }
}

/// The sector `sector` of a bitmap file as it has to be, when it was cut by a crash while it was written: bits are set only when the data
/// of their blocks is on disk, so any mixture of those before and after is right. Nothing for one that is sound, and for damage that no
/// crash does.
pub(crate) fn mended(id: &[u8; 16], sector: u32, bytes: &[u8; SECTOR_BYTES]) -> Option<[u8; SECTOR_BYTES]> {
    if Bitmap::default().load(id, sector, bytes).is_ok() {
        return None;
    }
    let mut words = [0; WORDS];
    for (index, word) in words.iter_mut().enumerate() {
        *word = u64::from_le_bytes(array(bytes, HEADER_BYTES + 8 * index));
    }
    let whole = encode(id, sector, &words);
    // The sum is the last of the header: whatever else there is must be right, or nothing have come behind it.
    let was_cut = bytes[..CRC_AT] == whole[..CRC_AT] || words == [0; WORDS];
    was_cut.then_some(whole)
}

fn encode(id: &[u8; 16], sector: u32, words: &Words) -> [u8; SECTOR_BYTES] {
    let mut out = [0; SECTOR_BYTES];
    out[..4].copy_from_slice(b"PFBM");
    out[4..6].copy_from_slice(&VERSION.to_le_bytes());
    out[6..8].copy_from_slice(&((SECTOR_BYTES - HEADER_BYTES) as u16).to_le_bytes());
    out[8..24].copy_from_slice(id);
    out[24..28].copy_from_slice(&sector.to_le_bytes());
    for (index, word) in words.iter().enumerate() {
        out[HEADER_BYTES + 8 * index..HEADER_BYTES + 8 * index + 8].copy_from_slice(&word.to_le_bytes());
    }
    let crc = crc_with_hole(&out, CRC_AT);
    out[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    out
}

/// Blocks of a lower file of `size` bytes.
pub(crate) fn blocks(size: u64) -> u64 {
    size.div_ceil(poolfs_types::limits::BLOCK_SIZE as u64)
}

/// Bytes of the bitmap file of a lower file of `size` bytes.
pub(crate) fn file_bytes(size: u64) -> u64 {
    blocks(size).div_ceil(SECTOR_BLOCKS).max(1).saturating_mul(SECTOR_BYTES as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// What would be written, sector by sector.
    fn taken(bitmap: &mut Bitmap, id: &[u8; 16]) -> Vec<(u32, [u8; SECTOR_BYTES])> {
        let sectors = bitmap.take_dirty(id);
        let sector = |(offset, bytes): (u64, Vec<u8>)| {
            ((offset / SECTOR_BYTES as u64) as u32, bytes.try_into().expect("one sector"))
        };
        sectors.pieces(1).map(sector).collect()
    }

    #[test]
    fn agrees_with_a_plain_set() {
        let mut bitmap = Bitmap::default();
        let mut model = BTreeSet::new();
        let mut seed = 1u64;
        let end = 5 * SECTOR_BLOCKS + 100;
        for round in 0..400 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let start = (seed >> 20) % end;
            let length = if round % 100 == 99 { SECTOR_BLOCKS + 77 } else { (seed >> 50) % 200 + 1 };
            let stop = (start + length).min(end);
            let fresh = (start..stop).filter(|&block| model.insert(block)).count() as u64;
            assert_eq!(bitmap.set(start..stop), fresh);
        }
        assert!(!bitmap.full.is_empty() && !bitmap.mixed.is_empty(), "both kinds");
        assert_eq!(bitmap.count_below(end), model.len() as u64);
        let mut loaded = Bitmap::default();
        for (sector, bytes) in taken(&mut bitmap, &[7; 16]) {
            loaded.load(&[7; 16], sector, &bytes).expect("sound");
        }
        assert_eq!((&loaded.full, &loaded.mixed), (&bitmap.full, &bitmap.mixed));
        for block in (0..end).step_by(7) {
            assert_eq!(bitmap.moved(block), model.contains(&block));
            assert_eq!(loaded.moved(block), model.contains(&block));
            let state = bitmap.moved(block);
            let expected = (block..end).find(|other| model.contains(other) != state).unwrap_or(end);
            assert_eq!(bitmap.run_end(block, end, state), expected);
            assert_eq!(bitmap.count_below(block), model.range(..block).count() as u64);
        }
    }

    #[test]
    fn sectors_in_memory_are_bounded_for_each_and_for_all() {
        let all = Arc::default();
        let mut bitmaps = [Bitmap::new(&all), Bitmap::new(&all), Bitmap::new(&all)];
        let block = |sector: usize| sector as u64 * SECTOR_BLOCKS;
        let most = UNCHARGED + CHARGED_MAX;
        for bitmap in &mut bitmaps[..2] {
            for sector in 0..most {
                bitmap.admit(block(sector)..block(sector) + 1).expect("room");
                bitmap.set(block(sector)..block(sector) + 1);
            }
            bitmap.admit(block(3)..block(5)).expect("in sectors that are there");
            let refused = bitmap.admit(block(most) - 1..block(most) + 1).expect_err("too many of one");
            assert!(refused == Errno::ENOMEM);
        }
        let [first, second, third] = bitmaps;
        let mut third = third;
        let mut scatter = |sector: usize| {
            third.admit(block(sector)..block(sector) + 1)?;
            third.set(block(sector)..block(sector) + 1);
            third.admit_loaded()
        };
        (0..UNCHARGED).for_each(|sector| scatter(sector).expect("small files always have room"));
        assert!(scatter(UNCHARGED).expect_err("too many of all") == Errno::ENOMEM);
        second.admit_loaded().expect("as many as may be");
        third.set(block(UNCHARGED)..block(UNCHARGED) + 1);
        assert!(third.admit_loaded().expect_err("one too many") == Errno::ENOMEM);
        drop(first);
        third.admit_loaded().expect("room again");
        drop((second, third));
        assert_eq!(all.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_file_of_any_size_can_be_rewritten_from_its_beginning_to_its_end() {
        let all = Arc::default();
        let mut bitmap = Bitmap::new(&all);
        let end = (2 * (UNCHARGED + CHARGED_MAX_OF_ALL)) as u64 * SECTOR_BLOCKS;
        for start in (0..end).step_by(2000) {
            let blocks = start..(start + 2000).min(end);
            bitmap.admit(blocks.clone()).expect("accepted");
            bitmap.set(blocks);
        }
        assert_eq!((bitmap.run_end(0, end, true), bitmap.in_memory()), (end, 1));
        // One piece of any length as well, between what is scattered.
        let mut bitmap = Bitmap::new(&all);
        for sector in (0..CHARGED_MAX as u64).map(|index| index * 4) {
            let block = sector * SECTOR_BLOCKS;
            bitmap.admit(block..block + 1).expect("accepted");
            bitmap.set(block..block + 1);
        }
        assert!(!all.are_few());
        bitmap.admit(0..end).expect("it takes less than what is there");
        bitmap.set(0..end);
        assert_eq!(bitmap.in_memory(), 1);
        assert!(all.are_few());
    }

    #[test]
    fn what_moves_in_one_go_takes_no_more_memory_however_long_it_is() {
        let all = Arc::default();
        let mut bitmap = Bitmap::new(&all);
        let last = u64::from(u32::MAX) * SECTOR_BLOCKS;
        bitmap.set(5 * SECTOR_BLOCKS + 7..6 * SECTOR_BLOCKS);
        bitmap.set(9..last / 2);
        let _ = bitmap.take_dirty(&[7; 16]);
        bitmap.admit(3..last - 2).expect("accepted");
        assert_eq!(bitmap.set(3..last - 2), last - 5 - (last / 2 - 9));
        assert_eq!((bitmap.count_below(last), bitmap.in_memory()), (last - 5, 3));
        let sectors = bitmap.take_dirty(&[7; 16]);
        assert_eq!((sectors.mixed.len(), sectors.sectors.len()), (2, 2), "of what was dirty now");
        bitmap.put_back(&sectors);
        assert!(bitmap.is_dirty());
        let mut pieces = sectors.pieces(128);
        assert_eq!(pieces.next().map(|(offset, bytes)| (offset, bytes.len())), Some((0, SECTOR_BYTES)));
        let (offset, bytes) = pieces.next().expect("many");
        let first = (last / 2) / SECTOR_BLOCKS;
        assert_eq!((offset, bytes.len()), (first * SECTOR_BYTES as u64, 128 * SECTOR_BYTES));
        assert_eq!(bytes[SECTOR_BYTES..2 * SECTOR_BYTES], encode(&[7; 16], first as u32 + 1, &FULL));
    }

    #[test]
    fn nobody_is_refused_for_what_is_charged_just_now() {
        let all = Arc::default();
        let block = |sector: usize| sector as u64 * SECTOR_BLOCKS;
        let scattered = |sectors: usize| {
            let mut bitmap = Bitmap::new(&all);
            (0..UNCHARGED + sectors).for_each(|sector| {
                bitmap.set(block(2 * sector)..block(2 * sector) + 1);
            });
            bitmap
        };
        let (mut one, other) = (scattered(CHARGED_MAX), scattered(10));
        let is_done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    one.set(0..1);
                }
            });
            let refused = (0..100_000).filter(|_| other.admit(block(5001)..block(5001) + 1).is_err()).count();
            is_done.store(true, Ordering::Relaxed);
            assert_eq!(refused, 0);
        });
    }

    #[test]
    fn a_sector_cut_anywhere_is_mended_to_what_was_or_was_to_be() {
        let id = [9; 16];
        let [none, before, after] = [&[][..], &[3], &[3, 70, 900]].map(|blocks| {
            let mut bitmap = Bitmap::default();
            bitmap.set(SECTOR_BLOCKS..SECTOR_BLOCKS + 1);
            for block in blocks {
                let _ = bitmap.set(SECTOR_BLOCKS + block..SECTOR_BLOCKS + block + 1);
            }
            taken(&mut bitmap, &id).pop().map_or([0; SECTOR_BYTES], |(_, bytes)| bytes)
        });
        for (old, new) in [([0; SECTOR_BYTES], none), (none, before), (before, after)] {
            for cut in 0..=SECTOR_BYTES {
                let mut torn = old;
                torn[..cut].copy_from_slice(&new[..cut]);
                let whole = mended(&id, 1, &torn).unwrap_or(torn);
                let moved = |bytes: &[u8; SECTOR_BYTES]| {
                    let mut bitmap = Bitmap::default();
                    bitmap.load(&id, 1, bytes).expect("sound");
                    (0..SECTOR_BLOCKS).filter(|block| bitmap.moved(SECTOR_BLOCKS + block)).collect::<BTreeSet<_>>()
                };
                let (least, seen, most) = (moved(&old), moved(&whole), moved(&new));
                assert!(least.is_subset(&seen) && seen.is_subset(&most), "cut at {cut}");
            }
        }
        for at in (0..CRC_AT).step_by(3) {
            let mut rotten = after;
            rotten[at] ^= 1;
            assert_eq!(mended(&id, 1, &rotten), None, "byte {at}");
        }
        assert_eq!((mended(&[8; 16], 1, &after), mended(&id, 2, &after)), (None, None));
    }

    #[test]
    fn sectors_come_back_and_refuse_damage() {
        let id = [9; 16];
        let mut bitmap = Bitmap::default();
        bitmap.set(SECTOR_BLOCKS + 3..SECTOR_BLOCKS + 5);
        let sectors = taken(&mut bitmap, &id);
        assert!(!bitmap.is_dirty());
        let [(1, bytes)] = sectors.as_slice() else { panic!("{sectors:?}") };
        let mut loaded = Bitmap::default();
        loaded.load(&id, 1, bytes).unwrap();
        assert!(loaded.moved(SECTOR_BLOCKS + 3) && !loaded.moved(SECTOR_BLOCKS + 5) && !loaded.is_dirty());
        assert!(loaded.load(&id, 2, bytes).unwrap_err().contains("place"));
        assert!(loaded.load(&[8; 16], 1, bytes).unwrap_err().contains("another"));
        for at in 0..SECTOR_BYTES {
            let mut broken = *bytes;
            broken[at] ^= 4;
            assert!(loaded.load(&id, 1, &broken).is_err(), "byte {at}");
        }
        loaded.load(&id, 0, &[0; SECTOR_BYTES]).unwrap();
    }
}
