//! The record of a first write whose copy-up is deferred, and its form in the journal. docs/formats.md draws it byte by byte.

use crate::format::BLOCK;
use crate::format::{Cause, ORIGIN_PATH_MAX, Origin, array};
use poolfs_types::Timestamp;

const HEADER: usize = 48;

/// Most bytes that one takes in the journal: a block, two paths, the name of a layer, and what is around them.
pub(crate) const ENCODED_MAX: usize = 8192;

/// The first bytes that were written into a lower file that has no upper file yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FirstWrite {
    /// the id that its sketch will have
    pub id: [u8; 16],
    /// the lower file
    pub origin: Origin,
    /// where the union shows it
    pub path: Vec<u8>,
    pub offset: u64,
    /// within one block, and within the lower file
    pub data: Vec<u8>,
    /// when it was written
    pub at: Timestamp,
}

impl FirstWrite {
    /// Puts the bytes that were written into `buffer`, which begins at `offset` of the file.
    pub fn overlay(&self, offset: u64, buffer: &mut [u8]) {
        let (first, last) = (self.offset, self.offset + self.data.len() as u64);
        let (from, to) = (first.max(offset), last.min(offset.saturating_add(buffer.len() as u64)));
        if from < to {
            let new = &self.data[(from - first) as usize..(to - first) as usize];
            buffer[(from - offset) as usize..(to - offset) as usize].copy_from_slice(new);
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        let origin = self.origin.encode();
        let mut out = vec![0; HEADER];
        out[..8].copy_from_slice(&self.offset.to_le_bytes());
        out[8..16].copy_from_slice(&self.at.seconds.to_le_bytes());
        out[16..20].copy_from_slice(&self.at.nanoseconds.to_le_bytes());
        out[20..22].copy_from_slice(&(origin.len() as u16).to_le_bytes());
        out[22..24].copy_from_slice(&(self.path.len() as u16).to_le_bytes());
        out[24..26].copy_from_slice(&(self.data.len() as u16).to_le_bytes());
        out[32..48].copy_from_slice(&self.id);
        for part in [&origin, &self.path, &self.data] {
            out.extend_from_slice(part);
        }
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Cause> {
        let part = |from: usize, length: usize| bytes.get(from..from + length).ok_or("a first write is too short");
        part(0, HEADER)?;
        let length = |at| usize::from(u16::from_le_bytes(array(bytes, at)));
        let (origin, path, data) = (length(20), length(22), length(24));
        let write = FirstWrite {
            id: array(bytes, 32),
            origin: Origin::decode(part(HEADER, origin)?)?,
            path: part(HEADER + origin, path)?.to_vec(),
            data: part(HEADER + origin + path, data)?.to_vec(),
            offset: u64::from_le_bytes(array(bytes, 0)),
            at: Timestamp {
                seconds: i64::from_le_bytes(array(bytes, 8)),
                nanoseconds: u32::from_le_bytes(array(bytes, 16)),
            },
        };
        let end = write.offset.checked_add(data as u64).filter(|&end| end <= write.origin.size);
        let is_within = write.offset % BLOCK + data as u64 <= BLOCK && end.is_some() && data > 0;
        let is_time = write.at.nanoseconds < 1_000_000_000;
        if !is_within || !is_time || path > ORIGIN_PATH_MAX || bytes.len() != HEADER + origin + path + data {
            return Err("a first write contradicts itself".into());
        }
        Ok(write)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write() -> FirstWrite {
        let modified = Timestamp { seconds: 5, nanoseconds: 6 };
        let origin = Origin { layer_id: "layer".into(), path: b"d/f".to_vec(), inode: 7, size: 9000, modified };
        let at = Timestamp { seconds: -1, nanoseconds: 999_999_999 };
        FirstWrite { id: [8; 16], origin, path: b"e/f".to_vec(), offset: 4100, data: b"new".to_vec(), at }
    }

    #[test]
    fn it_comes_back_and_what_contradicts_itself_does_not() {
        let bytes = write().encode();
        assert_eq!(FirstWrite::decode(&bytes), Ok(write()));
        for length in 0..bytes.len() {
            assert!(FirstWrite::decode(&bytes[..length]).is_err(), "{length} bytes");
        }
        for wrong in [
            FirstWrite { offset: 4094, ..write() },
            FirstWrite { offset: 8999, ..write() },
            FirstWrite { offset: u64::MAX, ..write() },
            FirstWrite { data: Vec::new(), ..write() },
            FirstWrite { path: vec![b'p'; ORIGIN_PATH_MAX + 1], ..write() },
            FirstWrite { at: Timestamp { seconds: 0, nanoseconds: 1_000_000_000 }, ..write() },
        ] {
            assert!(FirstWrite::decode(&wrong.encode()).is_err(), "{wrong:?}");
        }
        let longest = FirstWrite {
            origin: Origin { layer_id: "l".repeat(255), path: vec![b'p'; ORIGIN_PATH_MAX], ..write().origin },
            path: vec![b'p'; ORIGIN_PATH_MAX],
            offset: 4096,
            data: vec![1; 4096],
            ..write()
        };
        assert!(longest.encode().len() <= ENCODED_MAX);
    }

    #[test]
    fn it_lies_over_what_is_below() {
        for (offset, below, shown) in
            [(4100, "abcde", "newde"), (4099, "abcde", "anewe"), (4101, "abcde", "ewcde"), (4096, "abcde", "abcdn")]
        {
            let mut buffer = below.as_bytes().to_vec();
            write().overlay(offset, &mut buffer);
            assert_eq!(buffer, shown.as_bytes(), "{offset}");
        }
        for offset in [0, 4095, 4103, u64::MAX - 2] {
            let mut buffer = *b"abcde";
            write().overlay(offset, &mut buffer);
            assert_eq!(&buffer, b"abcde", "{offset}");
        }
    }
}
