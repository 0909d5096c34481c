//! The records of the [journal](crate::journal) byte by byte, and the names of its files.

use crate::first_write::{ENCODED_MAX, FirstWrite};
use crate::format::{BLOCK, VERSION, array, check, crc_with_hole};
use poolfs_libservice::walk::each_name;
use poolfs_libservice::{Branch, Error, Result};
use poolfs_types::{Errno, NodeId};
use std::ops::Range;

/// Bytes of a record, and of the header.
pub(crate) const RECORD_BYTES: usize = 40;

const CRC_AT: usize = 36;
const MAGIC: &[u8; 4] = b"PFJR";
const MOVED: u32 = 1;
const IN_TRANSIT: u32 = 2;
const FIRST_WRITE: u32 = 3;
/// How the names of the files begin; a number follows.
const NAME: &str = "journal-";
/// The generation that a replay leaves: what could not be made good.
pub(crate) const LEFT: u64 = 0;

pub(crate) fn journal_name(generation: u64) -> String {
    format!("{NAME}{generation}")
}

/// The generation whose file has this name.
pub(crate) fn generation_of(name: &[u8]) -> Option<u64> {
    let number = std::str::from_utf8(name).ok()?.strip_prefix(NAME)?.parse().ok()?;
    (journal_name(number).as_bytes() == name).then_some(number)
}

/// The beginning of what the journal keeps of a first write, which is in the records behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FirstWriteHead {
    bytes: usize,
    crc: u32,
}

impl FirstWriteHead {
    /// This record, and those behind it.
    pub fn records(first: &FirstWrite) -> Vec<u8> {
        let encoded = first.encode();
        let mut head = [0; RECORD_BYTES];
        head[16..24].copy_from_slice(&(encoded.len() as u64).to_le_bytes());
        head[24..28].copy_from_slice(&1u32.to_le_bytes());
        head[28..32].copy_from_slice(&crc32c::crc32c(&encoded).to_le_bytes());
        head[32..36].copy_from_slice(&FIRST_WRITE.to_le_bytes());
        seal(&mut head);
        let mut records = [&head[..], &encoded].concat();
        records.resize(records.len().next_multiple_of(RECORD_BYTES), 0);
        records
    }

    /// What a record says, if it is such a one.
    pub fn decode(record: &[u8; RECORD_BYTES]) -> Option<Self> {
        let is_sound = u32::from_le_bytes(array(record, CRC_AT)) == crc_with_hole(record, CRC_AT);
        if !is_sound || u32::from_le_bytes(array(record, 32)) != FIRST_WRITE {
            return None;
        }
        let bytes = usize::try_from(u64::from_le_bytes(array(record, 16))).ok()?;
        (bytes <= ENCODED_MAX).then_some(FirstWriteHead { bytes, crc: u32::from_le_bytes(array(record, 28)) })
    }

    /// Records behind it that belong to it.
    pub fn following(&self) -> usize {
        self.bytes.div_ceil(RECORD_BYTES)
    }

    /// What these say.
    pub fn first_write(&self, following: &[u8]) -> Option<FirstWrite> {
        let encoded = following.get(..self.bytes).filter(|encoded| crc32c::crc32c(encoded) == self.crc)?;
        FirstWrite::decode(encoded).ok()
    }
}

/// What a record says of blocks of a sketch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// They have moved.
    Moved(Range<u64>),
    /// It is in transit; these of its bytes are new.
    InTransit(u64, Range<usize>),
}

impl Change {
    pub(crate) fn encode(&self, id: &[u8; 16]) -> impl Iterator<Item = [u8; RECORD_BYTES]> + use<> {
        let (mut blocks, new, kind) = match self {
            Change::Moved(blocks) => (blocks.clone(), 0..0, MOVED),
            Change::InTransit(block, new) => (*block..block + 1, new.clone(), IN_TRANSIT),
        };
        let id = *id;
        std::iter::from_fn(move || {
            let count = u32::try_from(blocks.end.saturating_sub(blocks.start)).unwrap_or(u32::MAX);
            if count == 0 {
                return None;
            }
            let mut out = [0; RECORD_BYTES];
            out[..16].copy_from_slice(&id);
            out[16..24].copy_from_slice(&blocks.start.to_le_bytes());
            out[24..28].copy_from_slice(&count.to_le_bytes());
            out[28..30].copy_from_slice(&(new.start as u16).to_le_bytes());
            out[30..32].copy_from_slice(&(new.end as u16).to_le_bytes());
            out[32..36].copy_from_slice(&kind.to_le_bytes());
            seal(&mut out);
            blocks.start += u64::from(count);
            Some(out)
        })
    }

    /// What a record says, and of which sketch; nothing for what is none.
    pub(crate) fn decode(bytes: &[u8; RECORD_BYTES]) -> Option<([u8; 16], Self)> {
        if u32::from_le_bytes(array(bytes, CRC_AT)) != crc_with_hole(bytes, CRC_AT) {
            return None;
        }
        let first = u64::from_le_bytes(array(bytes, 16));
        let count = u64::from(u32::from_le_bytes(array(bytes, 24)));
        let end = first.checked_add(count).filter(|end| *end <= u64::MAX / BLOCK)?;
        let new = u16::from_le_bytes(array(bytes, 28)).into()..u16::from_le_bytes(array(bytes, 30)).into();
        let change = match u32::from_le_bytes(array(bytes, 32)) {
            MOVED if count > 0 => Change::Moved(first..end),
            IN_TRANSIT if count == 1 && new.start <= new.end && new.end <= BLOCK as usize => {
                Change::InTransit(first, new)
            }
            _ => return None,
        };
        Some((array(bytes, 0), change))
    }
}

fn seal(bytes: &mut [u8; RECORD_BYTES]) {
    let crc = crc_with_hole(bytes, CRC_AT);
    bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
}

/// How a file begins.
pub(crate) fn header(generation: u64) -> [u8; RECORD_BYTES] {
    let mut out = [0; RECORD_BYTES];
    out[..4].copy_from_slice(MAGIC);
    out[4..6].copy_from_slice(&VERSION.to_le_bytes());
    out[6..8].copy_from_slice(&(RECORD_BYTES as u16).to_le_bytes());
    out[8..16].copy_from_slice(&generation.to_le_bytes());
    seal(&mut out);
    out
}

/// Whether a file of this generation begins so; nothing but zeros is a file that nothing was written to.
pub(crate) fn check_header(generation: u64, bytes: &[u8; RECORD_BYTES]) -> std::result::Result<bool, String> {
    if bytes.iter().all(|&byte| byte == 0) {
        return Ok(false);
    }
    check(&journal_name(generation), bytes, MAGIC, CRC_AT)?;
    if *bytes != header(generation) {
        return Err(format!("{} is another one's", journal_name(generation)));
    }
    Ok(true)
}

/// Most of these files: no union leaves as many.
const GENERATIONS_MAX: usize = 64;

pub(crate) fn too_much(what: &str) -> Error {
    let remedy = "mount it in a pool with more cache; or to give up what waits, remove .poolfs/journal-* of the branch";
    Error::new(Errno::EIO, format!("its journal has more {what} than a union with so much memory leaves: {remedy}"))
}

/// The generations whose files are there, oldest first.
pub(crate) fn generations(upper: &Branch, top: NodeId) -> Result<Vec<u64>> {
    let mut found = Vec::new();
    each_name(upper, top, &mut |name, _| {
        found.extend(generation_of(name));
        if found.len() > GENERATIONS_MAX { Err(too_much("files")) } else { Ok(()) }
    })?;
    found.sort_unstable();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_and_damaged_ones_do_not() {
        let id = *b"sixteen bytes id";
        for change in [Change::Moved(7..9000), Change::InTransit(u64::from(u32::MAX) + 3, 17..4096)] {
            let records: Vec<_> = change.encode(&id).collect();
            assert_eq!(records.len(), 1);
            assert_eq!(Change::decode(&records[0]), Some((id, change)));
            for at in 0..RECORD_BYTES {
                let mut damaged = records[0];
                damaged[at] ^= 0x10;
                assert_eq!(Change::decode(&damaged), None, "byte {at}");
            }
        }
        assert_eq!(Change::decode(&[0; RECORD_BYTES]), None);
        assert_eq!(Change::Moved(5..5).encode(&id).count(), 0);
        let long: Vec<_> =
            Change::Moved(1..1 + (1 << 33)).encode(&id).filter_map(|record| Change::decode(&record)).collect();
        assert!(
            matches!(&long[..], [(_, Change::Moved(first)), .., (_, Change::Moved(last))] if first.start == 1 && last.end == 1 + (1 << 33))
        );
    }

    #[test]
    fn files_are_known_by_name_and_header() {
        assert_eq!(generation_of(journal_name(12).as_bytes()), Some(12));
        for name in ["journal-", "journal-01", "journal-+1", "open"] {
            assert_eq!(generation_of(name.as_bytes()), None, "{name}");
        }
        assert_eq!(check_header(3, &header(3)), Ok(true));
        assert_eq!(check_header(3, &[0; RECORD_BYTES]), Ok(false));
        assert!(check_header(4, &header(3)).is_err());
        let mut newer = header(3);
        newer[4] = 2;
        assert!(check_header(3, &newer).is_err_and(|cause| cause.contains("version 2")));
    }
}
