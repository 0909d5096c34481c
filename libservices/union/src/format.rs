//! The two structures stored in attributes of copied-up files: origin and sketch. docs/formats.md draws them byte by byte.

use crate::inode;
use poolfs_types::Timestamp;
use poolfs_types::limits::BLOCK_SIZE;

/// What is wrong with a stored structure, in words for `status`.
pub(crate) type Cause = String;

/// The version of every structure this release writes.
pub(crate) const VERSION: u16 = 1;

/// The name of the work directory, which the union hides.
pub(crate) const DIRECTORY: &[u8] = b".poolfs";

/// Bytes of a block, as file offsets count.
pub(crate) const BLOCK: u64 = BLOCK_SIZE as u64;

/// Paths longer than this do not fit into an origin on every backend; such files are copied whole.
pub(crate) const ORIGIN_PATH_MAX: usize = 1024;

const ORIGIN_HEADER: usize = 44;
const ORIGIN_CRC: usize = 40;
const SKETCH_BYTES: usize = 64;
const SKETCH_CRC: usize = 60;
const BITMAP_DURABLE: u16 = 1;

/// Which lower object an upper one was copied from, and the inode number both show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    pub layer_id: String,
    pub path: Vec<u8>,
    pub inode: u64,
    pub size: u64,
    pub modified: Timestamp,
}

/// The lasting state of a sketch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SketchRecord {
    pub id: [u8; 16],
    /// whether the bitmap has been durable once
    pub bitmap_durable: bool,
    /// bytes of the lower file that may be visible
    pub limit: u64,
    /// the size the last truncation gave
    pub size: u64,
    /// odd while a truncation is under way
    pub epoch: u64,
    /// the inode number of the file that is the sketch; 0 by earlier releases
    pub owner: u64,
}

pub(crate) fn crc_with_hole(bytes: &[u8], at: usize) -> u32 {
    let crc = crc32c::crc32c(&bytes[..at]);
    let crc = crc32c::crc32c_append(crc, &[0; 4]);
    crc32c::crc32c_append(crc, &bytes[at + 4..])
}

pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

/// Checks magic, version and checksum, in this order, so that a newer version is named as such.
pub(crate) fn check(what: &str, bytes: &[u8], magic: &[u8; 4], crc_at: usize) -> Result<(), Cause> {
    if bytes[..4] != *magic {
        return Err(format!("{what} does not start with {}", magic.escape_ascii()));
    }
    let version = u16::from_le_bytes(array(bytes, 4));
    if version != VERSION {
        return Err(format!("{what} has version {version}, this release knows {VERSION}"));
    }
    if u32::from_le_bytes(array(bytes, crc_at)) != crc_with_hole(bytes, crc_at) {
        return Err(format!("{what} has a wrong checksum"));
    }
    Ok(())
}

impl Origin {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; ORIGIN_HEADER];
        out[..4].copy_from_slice(b"PFOR");
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        out[6..8].copy_from_slice(&(self.layer_id.len() as u16).to_le_bytes());
        out[8..16].copy_from_slice(&self.inode.to_le_bytes());
        out[16..24].copy_from_slice(&self.size.to_le_bytes());
        out[24..32].copy_from_slice(&self.modified.seconds.to_le_bytes());
        out[32..36].copy_from_slice(&self.modified.nanoseconds.to_le_bytes());
        out[36..38].copy_from_slice(&(self.path.len() as u16).to_le_bytes());
        out.extend_from_slice(self.layer_id.as_bytes());
        out.extend_from_slice(&self.path);
        let crc = crc_with_hole(&out, ORIGIN_CRC);
        out[ORIGIN_CRC..ORIGIN_CRC + 4].copy_from_slice(&crc.to_le_bytes());
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Cause> {
        if bytes.len() < ORIGIN_HEADER {
            return Err("origin is too short".into());
        }
        check("origin", bytes, b"PFOR", ORIGIN_CRC)?;
        let layer = u16::from_le_bytes(array(bytes, 6)) as usize;
        let path = u16::from_le_bytes(array(bytes, 36)) as usize;
        if bytes.len() != ORIGIN_HEADER + layer + path {
            return Err("origin has a wrong length".into());
        }
        let inode = u64::from_le_bytes(array(bytes, 8));
        if !inode::can_be_shown(inode) {
            return Err(format!("origin has the inode number {inode}, which no union shows"));
        }
        let (layer, path) = bytes[ORIGIN_HEADER..].split_at(layer);
        Ok(Origin {
            layer_id: String::from_utf8(layer.to_vec()).map_err(|_| "origin names no layer".to_string())?,
            path: path.to_vec(),
            inode,
            size: u64::from_le_bytes(array(bytes, 16)),
            modified: Timestamp {
                seconds: i64::from_le_bytes(array(bytes, 24)),
                nanoseconds: u32::from_le_bytes(array(bytes, 32)),
            },
        })
    }
}

impl SketchRecord {
    /// Whether a truncation was begun and not finished.
    pub fn is_truncating(&self) -> bool {
        self.epoch % 2 == 1
    }

    /// The same with a truncation begun, or with it finished. The epoch may be any number: it comes from the disk.
    pub fn next_epoch(&self) -> Self {
        SketchRecord { epoch: self.epoch.wrapping_add(1), ..*self }
    }

    pub fn encode(&self) -> [u8; SKETCH_BYTES] {
        let mut out = [0; SKETCH_BYTES];
        out[..4].copy_from_slice(b"PFSK");
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        let flags = if self.bitmap_durable { BITMAP_DURABLE } else { 0 };
        out[6..8].copy_from_slice(&flags.to_le_bytes());
        out[8..24].copy_from_slice(&self.id);
        out[24..32].copy_from_slice(&self.limit.to_le_bytes());
        out[32..40].copy_from_slice(&self.size.to_le_bytes());
        out[40..48].copy_from_slice(&self.epoch.to_le_bytes());
        out[48..56].copy_from_slice(&self.owner.to_le_bytes());
        let crc = crc_with_hole(&out, SKETCH_CRC);
        out[SKETCH_CRC..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Cause> {
        if bytes.len() != SKETCH_BYTES {
            return Err("sketch record has a wrong length".into());
        }
        check("sketch record", bytes, b"PFSK", SKETCH_CRC)?;
        Ok(SketchRecord {
            id: array(bytes, 8),
            bitmap_durable: u16::from_le_bytes(array(bytes, 6)) & BITMAP_DURABLE != 0,
            limit: u64::from_le_bytes(array(bytes, 24)),
            size: u64::from_le_bytes(array(bytes, 32)),
            epoch: u64::from_le_bytes(array(bytes, 40)),
            owner: u64::from_le_bytes(array(bytes, 48)),
        })
    }
}

/// The name of a sketch's bitmap in `bitmaps/`.
pub(crate) fn bitmap_name(id: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*id))
}

/// The id of the sketch whose bitmap has this name.
pub(crate) fn bitmap_id(name: &[u8]) -> Option<[u8; 16]> {
    let digits = std::str::from_utf8(name).ok().filter(|digits| digits.len() == 32)?;
    u128::from_str_radix(digits, 16).ok().map(u128::to_be_bytes).filter(|id| bitmap_name(id) == digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_come_back_and_damage_is_named() {
        let origin = Origin {
            layer_id: "sha256:ab".into(),
            path: b"usr/lib/x".to_vec(),
            inode: 77,
            size: 1 << 40,
            modified: Timestamp { seconds: -5, nanoseconds: 999_999_999 },
        };
        assert_eq!(Origin::decode(&origin.encode()), Ok(origin.clone()));
        let record = SketchRecord { id: [7; 16], bitmap_durable: true, limit: 4097, size: 9, epoch: 3, owner: 12 };
        assert_eq!(SketchRecord::decode(&record.encode()), Ok(record));
        for at in 0..64 {
            let mut bytes = record.encode();
            bytes[at] ^= 1;
            assert!(SketchRecord::decode(&bytes).is_err(), "byte {at}");
        }
        let mut newer = record.encode();
        newer[4] = 2;
        assert!(SketchRecord::decode(&newer).unwrap_err().contains("version 2"));
        for at in 0..origin.encode().len() {
            let mut bytes = origin.encode();
            bytes[at] ^= 1;
            assert!(Origin::decode(&bytes).is_err(), "byte {at}");
        }
        assert!(Origin::decode(&origin.encode()[..20]).is_err());
        for (inode, is_shown) in
            [(0, false), (1, false), (2, true), (u64::MAX >> 1, true), (1 << 63, false), (u64::MAX, false)]
        {
            let found = Origin::decode(&Origin { inode, ..origin.clone() }.encode());
            assert_eq!(found.is_ok(), is_shown, "{inode}");
            assert!(found.err().is_none_or(|cause| cause.contains("inode number")), "{inode}");
        }
        assert_eq!(bitmap_id(bitmap_name(&[0xab; 16]).as_bytes()), Some([0xab; 16]));
        for other in [&b""[..], b"ab", b"+0000000000000000000000000000000", b"AB000000000000000000000000000000"] {
            assert_eq!(bitmap_id(other), None);
        }
    }
}
