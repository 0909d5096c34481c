//! The owners of bitmaps: each sketch has the number of its file, so that of two that name one bitmap it is known whose it is.

use crate::format::{DIRECTORY, SketchRecord, bitmap_name};
use crate::marks;
use crate::place::{self, NOBODY, Place};
use crate::upper_names::{find, list};
use crate::work::Work;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use poolfs_libservice::walk::walk;
use poolfs_libservice::{Error, Headroom, Held, Result};
use poolfs_types::{Attributes, Caller, Errno, FileType, NodeId, Timestamp};

const ROOT: &Caller = &Caller::ROOT;
/// Most sketches of a branch that is not where it was.
const SKETCHES_MAX: usize = 1 << 22;
/// Most files of which it is said that they name another's bitmap.
const LOGGED_MAX: u64 = 100;

/// What is done with a file of that path.
pub(crate) type VisitFile<'a> = dyn FnMut(&[u8], &Held, &Attributes) -> Result<()> + 'a;

/// What is done with a sketch of that path, inode number and record.
type VisitSketch<'a> = dyn FnMut(&[u8], &Held, u64, SketchRecord) -> Result<()> + 'a;

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
        for (name, file_type) in list(upper, self.index.node())? {
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
        place::say(&self.upper, &self.top, left)
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
