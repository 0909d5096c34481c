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
use crate::work::{self, DIRECTORY, Work, find};
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use poolfs_libservice::walk::walk;
use poolfs_libservice::{Branch, Error, Headroom, Held, Result};
use poolfs_types::{Attributes, Caller, Errno, FileType, Name, NodeId, Timestamp};

/// Of the branch's root.
const ATTRIBUTE: &[u8] = b"trusted.poolfs.place";
/// The file whose number and time no copy has.
const FILE: &[u8] = b"place";
const ROOT: &Caller = &Caller::ROOT;
const BYTES: usize = 48;
const CRC_AT: usize = 44;
/// No file has this number.
const NOBODY: u64 = u64::MAX;
/// Most sketches of a branch that is not where it was.
const SKETCHES_MAX: usize = 1 << 22;
/// Most files of which it is said that they name another's bitmap.
const LOGGED_MAX: u64 = 100;

/// What is done with a file of that path.
pub(crate) type VisitFile<'a> = dyn FnMut(&[u8], &Held, &Attributes) -> Result<()> + 'a;

/// What is done with a sketch of that path, inode number and record.
type VisitSketch<'a> = dyn FnMut(&[u8], &Held, u64, SketchRecord) -> Result<()> + 'a;

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

/// What is found of an id.
struct Found {
    /// the file that was met first
    inode: u64,
    /// the file that has its own number
    owner: Option<u64>,
    is_shared: bool,
}

/// What a branch has of sketches. What is remembered of them is charged to the pool meanwhile.
struct Sketches<'a> {
    found: HashMap<[u8; 16], Found>,
    /// some have the number of another file
    has_others: bool,
    headroom: Option<&'a dyn Headroom>,
    charged_bytes: u64,
}

impl Drop for Sketches<'_> {
    fn drop(&mut self) {
        self.headroom.iter().for_each(|headroom| headroom.subtract(self.charged_bytes));
    }
}

impl<'a> Sketches<'a> {
    fn new(headroom: Option<&'a dyn Headroom>) -> Self {
        Self { found: HashMap::new(), has_others: false, headroom, charged_bytes: 0 }
    }

    /// Charges what the table has come to take.
    fn charge(&mut self) -> Result<()> {
        let bytes = self.found.allocation_size() as u64;
        if bytes > self.charged_bytes {
            let more = bytes - self.charged_bytes;
            if self.headroom.is_some_and(|headroom| !headroom.add(more)) {
                let cause = "the pool has too little memory to look at all partly written files of the upper branch";
                return Err(Error::new(Errno::ENOMEM, cause));
            }
            self.charged_bytes = bytes;
        }
        Ok(())
    }

    fn add(&mut self, record: &SketchRecord, inode: u64) -> Result<()> {
        let owner = (record.owner == inode).then_some(inode);
        self.has_others |= owner.is_none();
        if self.found.len() == SKETCHES_MAX {
            let cause = format!(
                "there are more than {SKETCHES_MAX} partly written files in it, to be looked at as it is not where it was"
            );
            return Err(Error::new(Errno::EMFILE, cause));
        }
        match self.found.entry(record.id) {
            Entry::Vacant(entry) => drop(entry.insert(Found { inode, owner, is_shared: false })),
            Entry::Occupied(mut entry) => {
                let found = entry.get_mut();
                found.is_shared |= found.inode != inode;
                found.owner = found.owner.or(owner);
            }
        }
        self.charge()
    }

    /// Whether one of two that name one bitmap is known to be the one that has it, wherever there are two.
    fn are_decided(&self, place: Place) -> bool {
        self.found.values().all(|found| !found.is_shared || (place == Place::Home && found.owner.is_some()))
    }

    /// The number that a record is to have.
    fn owner(&self, record: &SketchRecord, inode: u64, place: Place) -> u64 {
        match self.found.get(&record.id) {
            Some(found) if !found.is_shared => inode,
            Some(Found { owner: Some(owner), .. }) if place == Place::Home => {
                if *owner == inode {
                    inode
                } else {
                    record.owner
                }
            }
            _ => NOBODY,
        }
    }
}

impl Work {
    /// Makes sure that each sketch has the number of its file, and of two that name one bitmap one at most. What that takes of memory is taken
    /// of `headroom`.
    pub fn find_owners(&mut self, headroom: Option<&dyn Headroom>) -> Result<()> {
        if self.place == Place::Untouched {
            return Ok(());
        }
        self.is_settled = self.place == Place::New || self.look_for_owners(headroom)?;
        if !self.is_settled || self.place == Place::Home {
            return Ok(());
        }
        if self.place == Place::Elsewhere {
            // From here on the numbers count.
            self.upper.sync()?;
        }
        self.say_place(None)
    }

    /// Whether all was seen, and of two that name one bitmap it is known whose it is.
    fn look_for_owners(&self, headroom: Option<&dyn Headroom>) -> Result<bool> {
        let mut sketches = Sketches::new(headroom);
        let mut is_seen = self.each_sketch(&mut |_, _, inode, record| sketches.add(&record, inode))?;
        let mut told = 0;
        if sketches.has_others {
            is_seen &= self.each_sketch(&mut |path, held, inode, record| {
                let owner = sketches.owner(&record, inode, self.place);
                if owner != inode {
                    told += 1;
                    if told <= LOGGED_MAX {
                        let (path, bitmap) = (path.escape_ascii(), bitmap_name(&record.id));
                        tracing::error!(%path, inode, bitmap, "it has the bitmap of another file, and cannot be read");
                    }
                }
                if owner == record.owner {
                    return Ok(());
                }
                let record = SketchRecord { owner, ..record };
                marks::set(&*self.upper, held.node(), marks::SKETCH, &record.encode())
            })?;
        }
        Ok(is_seen && sketches.are_decided(self.place))
    }

    fn each_sketch(&self, visit: &mut VisitSketch<'_>) -> Result<bool> {
        let mut is_read = true;
        let is_seen = self.each_file(&mut |path, held, attributes| {
            match self.record_of(held) {
                Err(error) if error == Errno::EIO => is_read = false,
                record => {
                    if let Some(record) = record? {
                        visit(path, held, attributes.inode, record)?;
                    }
                }
            }
            Ok(())
        })?;
        Ok(is_seen && is_read)
    }

    /// Visits the regular files of the branch, those with several names by each of them; whether all could be looked at.
    pub fn each_file(&self, visit: &mut VisitFile<'_>) -> Result<bool> {
        let upper = &self.upper;
        let mut is_seen = true;
        walk(upper, Held::new(upper, NodeId::ROOT), b"", &mut |path, visited| {
            if path == DIRECTORY {
                return Ok(false);
            }
            match visited {
                Ok((held, attributes)) if attributes.file_type == FileType::Regular => visit(path, held, attributes)?,
                Ok(_) => {}
                Err(_) => is_seen = false,
            }
            Ok(true)
        })?;
        // A file of several lower names has its only upper name here when the one that it was written by is gone.
        for (name, file_type) in work::list(upper, self.index.node())? {
            match find(upper, self.index.node(), &name) {
                Ok(Some((held, attributes))) if file_type == FileType::Regular => visit(&name, &held, &attributes)?,
                Ok(_) => {}
                Err(error) if error == Errno::EIO => is_seen = false,
                Err(error) => return Err(error),
            }
        }
        Ok(is_seen)
    }

    /// The record of a sketch; nothing for what is none, or cannot be understood.
    pub fn record_of(&self, held: &Held) -> Result<Option<SketchRecord>> {
        match self.upper.getxattr(ROOT, held.node(), marks::SKETCH) {
            Ok(value) => Ok(SketchRecord::decode(&value).ok()),
            Err(error) if error == Errno::ENODATA || error == Errno::EOPNOTSUPP => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Says that nobody uses the branch any more, as the last that is done in it. Where that cannot be said, the next union looks at all sketches.
    pub fn leave_place(&self) {
        if !self.is_settled {
            return;
        }
        let left = self.upper.getattr(ROOT, self.top.node()).map(|top| top.changed);
        if let Err(error) = left.and_then(|left| self.say_place(Some(left))) {
            tracing::warn!(%error, "the next mount of the upper branch has to look at all of its files");
        }
    }

    fn say_place(&self, left: Option<Timestamp>) -> Result<()> {
        let file = match find(&self.upper, self.top.node(), FILE)? {
            Some((_, file)) => file,
            None => {
                let (top, name) = (self.top.node(), Name::new(FILE)?);
                let entry = self.upper.mknod(ROOT, top, name, FileType::Regular, 0o600, 0)?;
                drop(Held::new(&self.upper, entry.node));
                entry.attributes
            }
        };
        let stored = Stored { inode: file.inode, made: file.changed, left };
        marks::set(&*self.upper, NodeId::ROOT, ATTRIBUTE, &stored.encode())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// As much as this, and not more.
    struct Bounded {
        left: AtomicU64,
    }

    impl Headroom for Bounded {
        fn add(&self, amount: u64) -> bool {
            let less = |left: u64| left.checked_sub(amount);
            self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
        }

        fn force(&self, _: u64) {
            unreachable!("it is asked");
        }

        fn subtract(&self, amount: u64) {
            self.left.fetch_add(amount, Ordering::Relaxed);
        }
    }

    #[test]
    fn what_is_remembered_of_sketches_is_charged_until_it_is_forgotten() {
        const SKETCHES: u64 = 1000;
        let bounded = Bounded { left: AtomicU64::new(1 << 20) };
        let record = |number: u64| {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&number.to_le_bytes());
            SketchRecord { id, bitmap_durable: false, limit: 0, size: 0, epoch: 0, owner: number }
        };
        let mut sketches = Sketches::new(Some(&bounded));
        (0..SKETCHES).for_each(|number| sketches.add(&record(number), number).expect("there is room"));
        let charged = (1 << 20) - bounded.left.load(Ordering::Relaxed);
        assert!(charged >= SKETCHES * (16 + size_of::<Found>() as u64), "{charged}");
        drop(sketches);
        assert_eq!(bounded.left.load(Ordering::Relaxed), 1 << 20);

        bounded.left.store(charged / 2, Ordering::Relaxed);
        let mut sketches = Sketches::new(Some(&bounded));
        let refused = (0..SKETCHES).find_map(|number| sketches.add(&record(number), number).err());
        assert_eq!(refused.map(|error| error.errno()), Some(Errno::ENOMEM));
        drop(sketches);
        assert_eq!(bounded.left.load(Ordering::Relaxed), charged / 2);
    }
}
