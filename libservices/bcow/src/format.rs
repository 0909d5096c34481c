//! The stored format: the record in an attribute of the file, and the sectors of its tables. docs/formats.md draws them byte by
//! byte.

use crate::decoding::{Cause, array};
use crate::inline::{Inline, PLACE_BYTES};
use poolfs_types::limits::{BLOCK_SIZE, FILE_SIZE_MAX};

/// The attribute that says that a file is of this format.
pub(crate) const ATTRIBUTE: &[u8] = b"trusted.poolfs.bcow";

const VERSION: u16 = 1;
const RECORD_BYTES: usize = 64;
const RECORD_CRC: usize = 60;
const HAS_FREED: u16 = 1;
const METACOPY: u16 = 2;

/// Bytes of one sector, the unit that reaches the disk wholly or up to a point.
pub(crate) const SECTOR_BYTES: usize = 512;
const ENTRY_BYTES: usize = 8;
const SECTOR_ENTRIES: usize = SECTOR_BYTES / ENTRY_BYTES - 1;
/// Sectors of a table.
pub(crate) const SECTORS: usize = BLOCK_SIZE / SECTOR_BYTES;
/// Entries of a table, which is one block.
pub(crate) const ENTRIES: usize = SECTORS * SECTOR_ENTRIES;

/// Unit sizes, as powers of two: one block, and the most that a file of one level grows to.
pub(crate) const UNIT_SHIFT_MIN: u32 = 12;
pub(crate) const UNIT_SHIFT_MAX: u32 = 30;

/// Most blocks of a root: 4 MiB, for a file of 1 TiB in units of one block.
pub(crate) const ROOT_BLOCKS_MAX: u32 = 1024;

/// How a file's blocks are found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Root {
    /// the record says where they are
    Inline(Inline),
    /// one table has all
    Table,
    /// tables found by a root of so many blocks, which begins at this one
    Tables { first: u32, blocks: u32 },
}

/// The lasting state of a file, but for its tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// random; what another file's sectors are told from this one's by
    pub tag: u64,
    /// log2 of a unit's bytes
    pub unit_shift: u32,
    pub root: Root,
    /// the file's size, also beyond what can be found: those bytes are zeros
    pub size: u64,
    /// what the places on disk say of bytes from here on is not so: they were cut off
    pub limit: u64,
    /// there may be blocks that nothing names
    pub has_freed: bool,
    /// overlayfs' mark of a file without content, as the layers above have set it
    pub is_metacopy: bool,
}

fn crc_with_hole(bytes: &[u8], at: usize) -> u32 {
    let crc = crc32c::crc32c(&bytes[..at]);
    let crc = crc32c::crc32c_append(crc, &[0; 4]);
    crc32c::crc32c_append(crc, &bytes[at + 4..])
}

impl Record {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; RECORD_BYTES];
        let (levels, first, blocks) = match &self.root {
            Root::Inline(inline) => {
                out[42..44].copy_from_slice(&(inline.len() as u16).to_le_bytes());
                out.extend(inline.encode());
                (0, 0, 0)
            }
            Root::Table => (1, 0, 1),
            &Root::Tables { first, blocks } => (2, first, blocks),
        };
        let flags = if self.has_freed { HAS_FREED } else { 0 } | if self.is_metacopy { METACOPY } else { 0 };
        out[..4].copy_from_slice(b"PFBC");
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        out[6] = self.unit_shift as u8;
        out[7] = levels;
        out[8..16].copy_from_slice(&self.tag.to_le_bytes());
        out[16..24].copy_from_slice(&self.size.to_le_bytes());
        out[24..32].copy_from_slice(&self.limit.to_le_bytes());
        out[32..36].copy_from_slice(&first.to_le_bytes());
        out[36..40].copy_from_slice(&blocks.to_le_bytes());
        out[40..42].copy_from_slice(&flags.to_le_bytes());
        let crc = crc_with_hole(&out, RECORD_CRC);
        out[RECORD_CRC..RECORD_BYTES].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// The record that stands in `bytes`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<Self, Cause> {
        let Some((_, places)) = bytes.split_at_checked(RECORD_BYTES) else {
            return Err("its record has a wrong length".into());
        };
        if bytes[..4] != *b"PFBC" {
            return Err("its record does not start with PFBC".into());
        }
        let version = u16::from_le_bytes(array(bytes, 4));
        if version != VERSION {
            return Err(format!("its record has version {version}, this release knows {VERSION}"));
        }
        if u32::from_le_bytes(array(bytes, RECORD_CRC)) != crc_with_hole(bytes, RECORD_CRC) {
            return Err("its record has a wrong checksum".into());
        }
        let unit_shift = u32::from(bytes[6]);
        if !(UNIT_SHIFT_MIN..=UNIT_SHIFT_MAX).contains(&unit_shift) {
            return Err(format!("its record has units of 2^{unit_shift} bytes"));
        }
        let count = u16::from_le_bytes(array(bytes, 42));
        if places.len() != usize::from(count) * PLACE_BYTES || count > 0 && bytes[7] != 0 {
            return Err(format!("its record has {} bytes for {count} places", places.len()));
        }
        let [first, blocks] = [32, 36].map(|at| u32::from_le_bytes(array(bytes, at)));
        let root = match bytes[7] {
            0 if (first, blocks) == (0, 0) => {
                let units = reach_max(unit_shift) >> unit_shift;
                Root::Inline(Inline::decode(places, units, 1 << (unit_shift - UNIT_SHIFT_MIN))?)
            }
            1 if (first, blocks) == (0, 1) => Root::Table,
            2 if (1..=ROOT_BLOCKS_MAX).contains(&blocks) && first <= u32::MAX - ROOT_BLOCKS_MAX => {
                Root::Tables { first, blocks }
            }
            levels => return Err(format!("its record names {levels} levels and a root of {blocks} blocks at {first}")),
        };
        let flags = u16::from_le_bytes(array(bytes, 40));
        let size = u64::from_le_bytes(array(bytes, 16));
        if size > FILE_SIZE_MAX {
            return Err(format!("its record has a size of {size} bytes"));
        }
        Ok(Record {
            tag: u64::from_le_bytes(array(bytes, 8)),
            unit_shift,
            root,
            size,
            limit: u64::from_le_bytes(array(bytes, 24)),
            has_freed: flags & HAS_FREED != 0,
            is_metacopy: flags & METACOPY != 0,
        })
    }

    /// Bytes of a unit.
    pub fn unit(&self) -> u64 {
        1 << self.unit_shift
    }

    /// Blocks of a unit.
    pub fn unit_blocks(&self) -> u32 {
        1 << (self.unit_shift - UNIT_SHIFT_MIN)
    }

    /// Bytes that one table tells of.
    pub fn region(&self) -> u64 {
        (ENTRIES as u64) << self.unit_shift
    }

    /// Bytes that can be found without another root; where the record has the places, with any.
    pub fn reach(&self) -> u64 {
        match self.root {
            Root::Inline(_) => reach_max(self.unit_shift),
            Root::Table => self.region(),
            Root::Tables { blocks, .. } => self.region() * u64::from(blocks) * ENTRIES as u64,
        }
    }
}

/// The most that a file in units of 2^`unit_shift` bytes may have.
pub(crate) fn reach_max(unit_shift: u32) -> u64 {
    let tables = u64::from(ROOT_BLOCKS_MAX) * ENTRIES as u64;
    (tables * ENTRIES as u64) << unit_shift
}

/// What a table is one of: its entries name units of the file, or tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Level {
    Units,
    Tables,
}

/// What its sectors are checked with: that of which file, and which one of its tables it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Which {
    pub tag: u64,
    pub level: Level,
    /// of the table among those of its level
    pub number: u64,
}

impl Which {
    fn seal(&self, place: usize, bytes: &[u8]) -> u32 {
        let level = u64::from(self.level == Level::Tables) << 63;
        let crc = crc32c::crc32c(&self.tag.to_le_bytes());
        let crc = crc32c::crc32c_append(crc, &(level | self.number).to_le_bytes());
        let crc = crc32c::crc32c_append(crc, &(place as u64).to_le_bytes());
        crc32c::crc32c_append(crc, bytes)
    }
}

/// Where the things are that a table's entries stand for: the number of a block of the file below each, 0 for those that are nowhere.
pub(crate) type Entries = [u32; ENTRIES];

/// One sector of a table.
pub(crate) fn encode_sector(which: Which, sector: usize, entries: &Entries) -> [u8; SECTOR_BYTES] {
    let mut out = [0; SECTOR_BYTES];
    for (at, &block) in entries.iter().enumerate().skip(sector * SECTOR_ENTRIES).take(SECTOR_ENTRIES) {
        if block != 0 {
            let place = (at % SECTOR_ENTRIES) * ENTRY_BYTES;
            out[place..place + 4].copy_from_slice(&block.to_le_bytes());
            out[place + 4..place + 8].copy_from_slice(&which.seal(at, &block.to_le_bytes()).to_le_bytes());
        }
    }
    let end = SECTOR_BYTES - ENTRY_BYTES;
    let seal = which.seal(ENTRIES + sector, &out[..end]);
    out[end..end + 4].copy_from_slice(b"PFBT");
    out[end + 4..].copy_from_slice(&seal.to_le_bytes());
    out
}

/// The sector with an entry.
pub(crate) fn sector_of(entry: usize) -> usize {
    entry / SECTOR_ENTRIES
}

/// Puts the entries of a sector where they belong.
///
/// # Errors
/// What is wrong with it. One that was never written, of zeros only, is sound.
pub(crate) fn decode_sector(which: Which, sector: usize, bytes: &[u8], entries: &mut Entries) -> Result<(), Cause> {
    if bytes.iter().all(|&byte| byte == 0) {
        return Ok(());
    }
    let end = SECTOR_BYTES - ENTRY_BYTES;
    let is_whole = bytes[end..end + 4] == *b"PFBT"
        && u32::from_le_bytes(array(bytes, end + 4)) == which.seal(ENTRIES + sector, &bytes[..end]);
    match read_entries(which, sector, bytes, entries) {
        0 if is_whole => Ok(()),
        _ => Err(format!("sector {sector} of table {} is damaged", which.number)),
    }
}

/// The same for a sector that may have been written up to a point only: where it was cut, and there alone, one entry may be
/// half of one, and then was never promised to anybody. Whether anything was wrong.
///
/// # Errors
/// When more is wrong than that.
pub(crate) fn salvage_sector(which: Which, sector: usize, bytes: &[u8], entries: &mut Entries) -> Result<bool, Cause> {
    if decode_sector(which, sector, bytes, entries).is_ok() {
        return Ok(false);
    }
    match read_entries(which, sector, bytes, entries) {
        0 | 1 => Ok(true),
        wrong => Err(format!("{wrong} entries in sector {sector} of table {} are damaged", which.number)),
    }
}

/// Takes over those that are right; how many are not.
fn read_entries(which: Which, sector: usize, bytes: &[u8], entries: &mut Entries) -> usize {
    let mut wrong = 0;
    for (at, entry) in entries.iter_mut().enumerate().skip(sector * SECTOR_ENTRIES).take(SECTOR_ENTRIES) {
        let place = (at % SECTOR_ENTRIES) * ENTRY_BYTES;
        let [block, seal] = [place, place + 4].map(|from| u32::from_le_bytes(array(bytes, from)));
        let is_right = block != 0 && which.seal(at, &block.to_le_bytes()) == seal;
        wrong += usize::from(!is_right && (block, seal) != (0, 0));
        *entry = if is_right { block } else { 0 };
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHICH: Which = Which { tag: 0x1234_5678_9abc_def0, level: Level::Units, number: 3 };

    #[test]
    fn records_come_back_and_damage_is_named() {
        let record = Record {
            tag: 77,
            unit_shift: 12,
            root: Root::Tables { first: 9, blocks: 2 },
            size: 1 << 30,
            limit: u64::MAX,
            has_freed: true,
            is_metacopy: false,
        };
        let single = Record { root: Root::Table, size: 5, is_metacopy: true, has_freed: false, ..record.clone() };
        let of = |places: &[(u64, u32)]| {
            let mut inline = Inline::default();
            places.iter().for_each(|&(index, block)| assert!(inline.set(index, block)));
            Record { root: Root::Inline(inline), ..single.clone() }
        };
        let (inline, empty) = (of(&[(3, 2), (900, 1), (1 << 27, 3)]), of(&[]));
        for record in [&record, &single, &inline, &empty] {
            let sound = record.encode();
            assert_eq!(Record::decode(&sound).as_ref(), Ok(record));
            for at in 0..sound.len() {
                let mut bytes = sound.clone();
                bytes[at] ^= 1;
                assert!(Record::decode(&bytes).is_err(), "byte {at}");
                assert!(Record::decode(&sound[..at]).is_err(), "{at} bytes");
            }
        }
        let wrong = [
            Record { unit_shift: 11, ..single.clone() },
            Record { unit_shift: 31, ..single.clone() },
            Record { root: Root::Tables { first: 1, blocks: 0 }, ..record.clone() },
            Record { root: Root::Tables { first: u32::MAX - 1, blocks: 2 }, ..record.clone() },
            Record { size: FILE_SIZE_MAX + 1, ..record.clone() },
            Record { root: Root::Tables { first: 1, blocks: ROOT_BLOCKS_MAX + 1 }, ..record.clone() },
            of(&[(1 << 28, 1)]),
            of(&[(1, 1), (2, 1)]),
        ];
        for record in wrong {
            assert!(Record::decode(&record.encode()).is_err(), "{record:?}");
        }
        let sealed = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = inline.encode();
            change(&mut bytes);
            let crc = crc_with_hole(&bytes, RECORD_CRC);
            bytes[RECORD_CRC..RECORD_BYTES].copy_from_slice(&crc.to_le_bytes());
            Record::decode(&bytes)
        };
        assert!(sealed(&|_| ()).is_ok());
        assert!(sealed(&|bytes| bytes[7] = 1).is_err(), "a table and places");
        assert!(sealed(&|bytes| bytes[32] = 1).is_err(), "a root and places");
        assert!(sealed(&|bytes| bytes[42] = 2).is_err(), "fewer places than there are");
        assert!(sealed(&|bytes| bytes.push(0)).is_err(), "something behind the places");
    }

    #[test]
    fn a_record_with_a_table_has_the_form_it_always_had() {
        let record = Record {
            tag: 0x0807_0605_0403_0201,
            unit_shift: 12,
            root: Root::Table,
            size: 1 << 20,
            limit: u64::MAX,
            has_freed: false,
            is_metacopy: true,
        };
        let mut stored =
            *b"PFBC\x01\0\x0c\x01\x01\x02\x03\x04\x05\x06\x07\x08\0\0\x10\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff\
            \0\0\0\0\x01\0\0\0\x02\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
        let crc = crc32c::crc32c(&stored);
        stored[RECORD_CRC..].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(Record::decode(&stored).as_ref(), Ok(&record));
        assert_eq!(record.encode(), stored);
    }

    fn some() -> Entries {
        std::array::from_fn(|at| if at % 3 == 0 { at as u32 + 1 } else { 0 })
    }

    #[test]
    fn sectors_come_back_and_those_of_another_place_do_not() {
        let mut read = [0; ENTRIES];
        for sector in 0..SECTORS {
            let bytes = encode_sector(WHICH, sector, &some());
            decode_sector(WHICH, sector, &bytes, &mut read).expect("sound");
            let others =
                [Which { tag: 1, ..WHICH }, Which { level: Level::Tables, ..WHICH }, Which { number: 4, ..WHICH }];
            for other in others {
                assert!(decode_sector(other, sector, &bytes, &mut [0; ENTRIES]).is_err());
                assert!(salvage_sector(other, sector, &bytes, &mut [0; ENTRIES]).is_err());
            }
            assert!(decode_sector(WHICH, (sector + 1) % SECTORS, &bytes, &mut [0; ENTRIES]).is_err());
        }
        assert_eq!(read, some());
        decode_sector(WHICH, 0, &[0; SECTOR_BYTES], &mut read).expect("never written");
    }

    #[test]
    fn a_sector_cut_anywhere_loses_nothing_that_was_there_before() {
        let before = some();
        let after: Entries = std::array::from_fn(|at| match at % 6 {
            0 => before[at],
            3 => 0,
            _ => at as u32 + 1000,
        });
        let [old, new] = [&before, &after].map(|entries| encode_sector(WHICH, 1, entries));
        for cut in 0..=SECTOR_BYTES {
            let mut torn = old;
            torn[..cut].copy_from_slice(&new[..cut]);
            let mut read = [0; ENTRIES];
            assert_eq!(salvage_sector(WHICH, 1, &torn, &mut read), Ok(torn != old && torn != new), "{cut}");
            for at in (0..ENTRIES).filter(|&at| sector_of(at) == 1) {
                let is_allowed =
                    read[at] == before[at] || read[at] == after[at] || before[at] != after[at] && read[at] == 0;
                assert!(is_allowed, "cut at {cut}: entry {at} is {}", read[at]);
            }
        }
        for at in 0..SECTOR_BYTES {
            let mut rotten = old;
            rotten[at] ^= 4;
            assert!(decode_sector(WHICH, 1, &rotten, &mut [0; ENTRIES]).is_err(), "byte {at}");
        }
        let mut rotten = old;
        rotten[0] ^= 1;
        rotten[24] ^= 1;
        assert!(salvage_sector(WHICH, 1, &rotten, &mut [0; ENTRIES]).is_err());
    }
}
