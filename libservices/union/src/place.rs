//! The owner of each bitmap: detects sketches that were copied within a branch or with it.
//!
//! A sketch names its bitmap by an id in an attribute, and a copy of the file has that attribute, too. Two files that move blocks
//! in one bitmap would hide each other's bytes. So the record of a sketch has the inode number of its file, and a file with
//! another number is answered `EIO`.
//!
//! In a copy of the branch all files have other numbers. So the branch records its own identity: an attribute of the root has the
//! inode number and creation time of an empty file in the work directory, which no copy shares, and the time of the work
//! directory's last change, which a service makes when it begins. If both match, nobody but the last union has used the branch,
//! except perhaps single files in it, and the inode numbers count. Otherwise all sketches are examined once before any is used:
//! each gets the number of its file, unless two files name one bitmap. Of those, the one that has its own number keeps the bitmap
//! if the branch is where it was; otherwise none does.

use crate::format::{SketchRecord, VERSION, array, bitmap_name, check, crc_with_hole};
use crate::marks;
use crate::upper_names::find;
use poolfs_libservice::{Branch, Held, Result};
use poolfs_types::{Caller, Errno, FileType, Name, NodeId, Timestamp};

/// Of the branch's root.
const ATTRIBUTE: &[u8] = b"trusted.poolfs.place";
/// The file whose number and time no copy has.
const FILE: &[u8] = b"place";
const ROOT: &Caller = &Caller::ROOT;
const BYTES: usize = 48;
const CRC_AT: usize = 44;
/// No file has this number.
pub(crate) const NOBODY: u64 = u64::MAX;

/// What is known of a branch before it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// It was just made.
    New,
    /// Nobody has used it since a union has left it in order.
    Untouched,
    /// It is where it was.
    Home,
    /// It is a copy, or an earlier release has written it.
    Elsewhere,
}

/// The attribute.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stored {
    inode: u64,
    made: Timestamp,
    /// when the work directory was changed last; nothing while it is used
    left: Option<Timestamp>,
}

impl Stored {
    fn encode(&self) -> [u8; BYTES] {
        let mut out = [0; BYTES];
        out[..4].copy_from_slice(b"PFPL");
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        out[6..8].copy_from_slice(&u16::from(self.left.is_some()).to_le_bytes());
        out[8..16].copy_from_slice(&self.inode.to_le_bytes());
        for (at, time) in [(16, Some(self.made)), (28, self.left)] {
            let time = time.unwrap_or_default();
            out[at..at + 8].copy_from_slice(&time.seconds.to_le_bytes());
            out[at + 8..at + 12].copy_from_slice(&time.nanoseconds.to_le_bytes());
        }
        let crc = crc_with_hole(&out, CRC_AT);
        out[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// What cannot be read says nothing.
    fn decode(bytes: &[u8]) -> Option<Self> {
        check("place", bytes.get(..BYTES)?, b"PFPL", CRC_AT).ok()?;
        let time = |at| Timestamp {
            seconds: i64::from_le_bytes(array(bytes, at)),
            nanoseconds: u32::from_le_bytes(array(bytes, at + 8)),
        };
        let is_left = u16::from_le_bytes(array(bytes, 6)) & 1 != 0;
        let inode = u64::from_le_bytes(array(bytes, 8));
        (bytes.len() == BYTES).then(|| Stored { inode, made: time(16), left: is_left.then(|| time(28)) })
    }
}

/// What is known of the branch with this work directory, which was there before.
pub(crate) fn of(upper: &Branch, top: &Held) -> Result<Place> {
    let stored = match upper.getxattr(ROOT, NodeId::ROOT, ATTRIBUTE) {
        Ok(value) => Stored::decode(&value),
        // All sketches are looked at then, as far as they can be read.
        Err(error) if [Errno::ENODATA, Errno::EOPNOTSUPP, Errno::EIO].contains(&error.errno()) => None,
        Err(error) => return Err(error),
    };
    let (Some(stored), Some((_, file))) = (stored, find(upper, top.node(), FILE)?) else { return Ok(Place::Elsewhere) };
    if (stored.inode, stored.made) != (file.inode, file.changed) {
        return Ok(Place::Elsewhere);
    }
    let changed = upper.getattr(ROOT, top.node())?.changed;
    Ok(if stored.left == Some(changed) { Place::Untouched } else { Place::Home })
}

/// Why a file is not the one whose bitmap it names, if it is not.
pub(crate) fn stranger(record: &SketchRecord, inode: u64) -> Option<String> {
    let name = bitmap_name(&record.id);
    match record.owner {
        owner if owner == inode => None,
        NOBODY => Some(format!(
            "another file names its bitmap {name}, too, and nobody can tell whose it is; remove the wrong one while the branch is not mounted"
        )),
        owner => Some(format!(
            "its bitmap {name} is that of another file, which has or had the inode number {owner} in the upper branch: it was copied within the branch, or put back alone; \
             remove it, or bring the whole branch back"
        )),
    }
}

/// Notes that the branch is here, and when it was left, if it is.
pub(crate) fn say(upper: &Branch, top: &Held, left: Option<Timestamp>) -> Result<()> {
    let file = match find(upper, top.node(), FILE)? {
        Some((_, file)) => file,
        None => {
            let (directory, name) = (top.node(), Name::new(FILE)?);
            let entry = upper.mknod(ROOT, directory, name, FileType::Regular, 0o600, 0)?;
            drop(Held::new(upper, entry.node));
            entry.attributes
        }
    };
    let stored = Stored { inode: file.inode, made: file.changed, left };
    marks::set(&**upper, NodeId::ROOT, ATTRIBUTE, &stored.encode())
}
