//! The work directory in the upper branch's root: temporary objects, bitmaps, the index of hard links.

use crate::attributed::{self, Pending};
use crate::exchange_note;
use crate::format::DIRECTORY;
use crate::format::{SketchRecord, bitmap_name};
use crate::marks;
use crate::place::{self, Place};
use crate::sync::lock;
use crate::upper_names::{Listed, find, first_names};
use poolfs_libservice::{Branch, Durability, Error, Held, Opened, Result};
use poolfs_types::{Attributes, Caller, Errno, FileType, Name, NodeId, OpenFlags, SetAttributes, SetTime};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The file in it that says which release wrote the branch.
pub(crate) const FORMAT_NAME: &[u8] = b"format";
const FORMAT: &[u8] = b"poolfs-union 1\n";
/// Bytes of the format file that are looked at; no release wrote more.
const FORMAT_BYTES_MAX: usize = 64;
/// The whiteout by which it is tried whether there can be any.
const WHITEOUT_TRIED: &[u8] = b"whiteout";
/// What exists in the work directory while a union is open.
pub(crate) const OPEN: &[u8] = b"open";
/// Names of a directory that are removed before the next are listed.
const NAMES_AT_ONCE: usize = 1 << 12;
const ROOT: &Caller = &Caller::ROOT;

/// The work directory, open for the life of the union.
pub(crate) struct Work {
    pub upper: Branch,
    pub top: Held,
    format: Held,
    pub work: Held,
    pub bitmaps: Held,
    pub index: Held,
    counter: AtomicU64,
    attributed: Pending,
    /// whether names were made in `index` or above that are not durable yet
    pub undurable: AtomicBool,
    /// held by whoever makes them durable
    syncing: Mutex<()>,
    is_frozen: bool,
    /// what was known of the branch when it was opened
    pub place: Place,
    /// whether each sketch is known to have a bitmap of its own
    pub is_settled: bool,
    /// whether the backend exchanges names in one step
    pub exchanges: bool,
}

fn directory(upper: &Branch, parent: NodeId, name: &[u8]) -> Result<Held> {
    match find(upper, parent, name)? {
        Some((held, attributes)) if attributes.is_directory() => Ok(held),
        Some(_) => Err(Error::new(Errno::EIO, format!("{} in the upper branch is no directory", name.escape_ascii()))),
        None => {
            let held = Held::new(upper, upper.mkdir(ROOT, parent, Name::new(name)?, 0o700)?.node);
            for acl in [&b"system.posix_acl_default"[..], b"system.posix_acl_access"] {
                match upper.removexattr(ROOT, held.node(), acl) {
                    Err(error) if error != Errno::ENODATA && error != Errno::EOPNOTSUPP => return Err(error),
                    _ => {}
                }
            }
            Ok(held)
        }
    }
}

impl Work {
    /// Opens or makes the work directory. Says as well whether the last end was unclean.
    pub fn open(upper: &Branch) -> Result<(Self, bool)> {
        let there = find(upper, NodeId::ROOT, DIRECTORY)?;
        if there.as_ref().is_none_or(|(_, found)| found.is_directory()) {
            refuse_parts(upper, there.as_ref().map(|(held, _)| held))?;
        }
        let top = directory(upper, NodeId::ROOT, DIRECTORY)?;
        let format = checked_format(upper, &top)?;
        exchange_note::complete(upper, &top)?;
        let mut work = Work {
            upper: upper.clone(),
            format,
            work: directory(upper, top.node(), b"work")?,
            bitmaps: directory(upper, top.node(), b"bitmaps")?,
            index: directory(upper, top.node(), b"index")?,
            exchanges: exchange_note::is_offered(upper, &top)?,
            top,
            attributed: Pending::default(),
            counter: AtomicU64::new(0),
            undurable: AtomicBool::new(true),
            syncing: Mutex::new(()),
            is_frozen: false,
            place: Place::New,
            is_settled: false,
        };
        if there.is_some() {
            work.place = place::of(upper, &work.top)?;
            work.is_settled = work.place == Place::Untouched;
        }
        let unclean = find(upper, work.top.node(), OPEN)?.is_some();
        if !unclean {
            let entry = upper.mknod(ROOT, work.top.node(), Name::new(OPEN)?, FileType::Regular, 0o600, 0)?;
            drop(Held::new(upper, entry.node));
        }
        loop {
            let names = first_names(upper, work.work.node(), NAMES_AT_ONCE)?;
            if names.is_empty() {
                break;
            }
            names.iter().try_for_each(|(name, file_type)| remove_tree(upper, &work.work, name, *file_type))?;
        }
        // After an unclean end all of it is looked at.
        let is_whole = unclean
            || first_names(upper, work.bitmaps.node(), 1)?.is_empty()
                && first_names(upper, work.index.node(), 1)?.is_empty();
        work.attributed = Pending::begin(upper, &work.top, is_whole)?;
        Ok((work, unclean))
    }

    /// Opens the work directory of a union that has ended, for reading.
    pub fn open_frozen(upper: &Branch) -> Result<Self> {
        let found = |parent: NodeId, name: &'static [u8]| -> Result<Held> {
            let missing = || Error::new(Errno::EIO, format!("it has no {} in .poolfs", name.escape_ascii()));
            find(upper, parent, name)?.map(|(held, _)| held).ok_or_else(missing)
        };
        let top = found(NodeId::ROOT, DIRECTORY)?;
        let format = found(top.node(), FORMAT_NAME)?;
        match format_of(&Opened::file(upper, ROOT, format.node(), OpenFlags::READ_ONLY)?)? {
            Format::Sound => {}
            Format::Cut => return Err(Error::new(Errno::EIO, "its .poolfs/format is not whole")),
            Format::Foreign(text) => return Err(Error::new(Errno::EIO, foreign_format(&text))),
        }
        refuse_parts(upper, Some(&top))?;
        if find(upper, top.node(), OPEN)?.is_some()
            || !crate::journal_records::generations(upper, top.node())?.is_empty()
        {
            let cause = "it is in use as an upper branch, or its last use did not end in good order: unmount it, or else mount it once as one or repair it with `poolfs fsck --repair`";
            return Err(Error::new(Errno::EBUSY, cause));
        }
        let place = place::of(upper, &top)?;
        Ok(Work {
            upper: upper.clone(),
            format,
            work: found(top.node(), b"work")?,
            bitmaps: found(top.node(), b"bitmaps")?,
            index: found(top.node(), b"index")?,
            top,
            attributed: Pending::default(),
            counter: AtomicU64::new(0),
            undurable: AtomicBool::new(false),
            syncing: Mutex::new(()),
            is_frozen: true,
            place,
            is_settled: place == Place::Untouched,
            exchanges: true,
        })
    }

    /// Whether nothing of the upper branch is ever to be changed.
    pub fn is_frozen(&self) -> bool {
        self.is_frozen
    }

    /// How the upper files of sketches are opened.
    pub fn sketch_flags(&self) -> OpenFlags {
        if self.is_frozen { OpenFlags::READ_ONLY } else { OpenFlags::READ_WRITE }
    }

    /// Says that everything is in order on disk, where it has been brought.
    pub fn close(&self) -> Result<()> {
        self.attributed.end(&self.upper, &self.top);
        match self.upper.unlink(ROOT, self.top.node(), Name::new(OPEN)?) {
            Err(error) if error != Errno::ENOENT => return Err(error),
            _ => {}
        }
        self.leave_place();
        Ok(())
    }

    /// Why a sketch is not the one whose bitmap it names. In a frozen branch that cannot always be known.
    pub fn stranger(&self, record: &SketchRecord, inode: u64) -> Option<String> {
        let counts = !self.is_frozen || self.is_settled;
        let cause = counts.then(|| place::stranger(record, inode)).flatten()?;
        Some(format!("{cause}; `poolfs fsck` names the files"))
    }

    /// A name for a new object in `work`.
    pub fn temporary(&self) -> Vec<u8> {
        format!("w{}", self.counter.fetch_add(1, Ordering::Relaxed)).into_bytes()
    }

    /// The upper file of a hard-linked lower file that was copied up.
    pub fn indexed(&self, upper: &Branch, key: &str) -> Result<Option<(Arc<Held>, Attributes)>> {
        let Some((held, attributes)) = find(upper, self.index.node(), key.as_bytes())? else { return Ok(None) };
        if attributes.is_directory() {
            return Err(Error::new(Errno::EIO, format!("index/{key} in .poolfs is a directory, which no file can be")));
        }
        Ok(Some((Arc::new(held), attributes)))
    }

    /// The bitmap file of a sketch.
    pub fn bitmap(&self, id: &[u8; 16]) -> Result<Option<(Held, Attributes)>> {
        find(&self.upper, self.bitmaps.node(), bitmap_name(id).as_bytes())
    }

    /// Makes the bitmap file of a sketch, open for writing.
    pub fn make_bitmap(&self, id: &[u8; 16]) -> Result<(Held, Opened)> {
        let name = bitmap_name(id);
        let (entry, handle) =
            self.upper.create(ROOT, self.bitmaps.node(), Name::new(name.as_bytes())?, 0o600, OpenFlags::READ_WRITE)?;
        Ok((Held::new(&self.upper, entry.node), Opened::new(&self.upper, handle)))
    }

    /// Removes the bitmap file of a sketch, if there is one.
    pub fn remove_bitmap(&self, id: &[u8; 16]) -> Result<()> {
        match self.upper.unlink(ROOT, self.bitmaps.node(), Name::new(bitmap_name(id).as_bytes())?) {
            Err(error) if error != Errno::ENOENT => Err(error),
            _ => Ok(()),
        }
    }

    /// Makes the names in the index, in `bitmaps` and of the work directory itself durable.
    pub fn sync_names(&self) -> Result<()> {
        self.sync_directory(self.bitmaps.node())?;
        // Whoever comes second waits for the first.
        let _syncing = lock(&self.syncing);
        if self.undurable.swap(false, Ordering::AcqRel) {
            let directories = [self.index.node(), self.top.node(), NodeId::ROOT];
            let result = self
                .sync_format()
                .and_then(|()| self.attributed.sync(&self.upper))
                .and_then(|()| directories.into_iter().try_for_each(|node| self.sync_directory(node)));
            if result.is_err() {
                self.undurable.store(true, Ordering::Release);
            }
            result?;
            self.attributed.end(&self.upper, &self.top);
        }
        Ok(())
    }

    fn sync_format(&self) -> Result<()> {
        let file = Opened::file(&self.upper, ROOT, self.format.node(), OpenFlags::READ_ONLY)?;
        self.upper.fsync(ROOT, file.id(), Durability::All)
    }

    /// Makes the names of an upper directory durable.
    pub fn sync_directory(&self, node: NodeId) -> Result<()> {
        let directory = Opened::directory(&self.upper, node)?;
        self.upper.fsync(ROOT, directory.id(), Durability::All)
    }
}

/// Refuses a branch of which something was left behind when it was copied. What cannot be read of its marks says nothing: files may be readable that are
/// elsewhere on the disk.
fn refuse_parts(upper: &Branch, top: Option<&Held>) -> Result<()> {
    match attributed::left_behind(upper, top) {
        Ok(None) => Ok(()),
        Ok(Some(cause)) => Err(Error::new(Errno::EUCLEAN, cause)),
        Err(error) => {
            tracing::warn!(%error, "whether the upper branch has its extended attributes cannot be read");
            Ok(())
        }
    }
}

/// Whether there is no union that was not closed.
pub(crate) fn has_ended_cleanly(upper: &Branch) -> Result<bool> {
    match find(upper, NodeId::ROOT, DIRECTORY)? {
        Some((top, _)) => Ok(find(upper, top.node(), OPEN)?.is_none()),
        None => Ok(true),
    }
}

/// What the file says by which a release knows its upper branches.
pub(crate) enum Format {
    /// that it is this release's
    Sound,
    /// nothing, or a part of that: a crash has cut it while the branch was made
    Cut,
    /// that it is another release's, in these words
    Foreign(String),
}

/// Reads the format file, which is `file`.
pub(crate) fn format_of(file: &Opened) -> Result<Format> {
    let mut text = [0; FORMAT_BYTES_MAX];
    let count = file.read_full(0, &mut text)?;
    let text = &text[..count];
    let written = text.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    Ok(match text == FORMAT {
        true => Format::Sound,
        false if count <= FORMAT.len() && FORMAT.starts_with(&text[..written]) => Format::Cut,
        false => Format::Foreign(text.escape_ascii().to_string()),
    })
}

/// Whether a union has written this branch, and was there long enough to say so.
pub(crate) fn was_upper(branch: &Branch) -> Result<bool> {
    let Some((top, _)) = find(branch, NodeId::ROOT, DIRECTORY)?.filter(|(_, found)| found.is_directory()) else {
        return Ok(false);
    };
    let is_file = |found: &Attributes| found.file_type == FileType::Regular;
    let Some((format, _)) = find(branch, top.node(), FORMAT_NAME)?.filter(|(_, found)| is_file(found)) else {
        return Ok(false);
    };
    match format_of(&Opened::file(branch, ROOT, format.node(), OpenFlags::READ_ONLY)?)? {
        Format::Sound => Ok(true),
        Format::Cut => Ok(false),
        Format::Foreign(text) => Err(Error::new(Errno::EIO, foreign_format(&text))),
    }
}

/// The file that says which release wrote the upper branch. It is brought to disk with the first names that depend on it: what a crash
/// before that left of its text is completed here.
pub(crate) fn checked_format(upper: &Branch, top: &Held) -> Result<Held> {
    let held = match find(upper, top.node(), FORMAT_NAME)? {
        Some((held, _)) => held,
        None => {
            refuse_without_marks(upper, top)?;
            let entry = upper.mknod(ROOT, top.node(), Name::new(FORMAT_NAME)?, FileType::Regular, 0o600, 0)?;
            Held::new(upper, entry.node)
        }
    };
    let file = Opened::file(upper, ROOT, held.node(), OpenFlags::READ_WRITE)?;
    match format_of(&file)? {
        Format::Sound => Ok(held),
        Format::Cut => file.write_full(0, FORMAT).map(|()| held),
        Format::Foreign(text) => Err(Error::new(Errno::EIO, foreign_format(&text))),
    }
}

/// Refuses a new branch that does not keep what a union marks: another union, or a network filesystem. Without that, no lower object could be changed,
/// and who changes one would be told that he may not.
fn refuse_without_marks(upper: &Branch, top: &Held) -> Result<()> {
    // All else, as a full disk, has nothing to do with marks.
    const LACKING: [Errno; 5] = [Errno::EOPNOTSUPP, Errno::EPERM, Errno::EINVAL, Errno::ENODATA, Errno::ENOSYS];
    let unmarked = |what: &str, error: Error| {
        if !LACKING.contains(&error.errno()) {
            return error;
        }
        let cause = format!("its filesystem does not keep {what}, as ext4, xfs, btrfs and tmpfs do");
        Error::new(error.errno(), cause)
    };
    for mark in [marks::OPAQUE, marks::ORIGIN] {
        marks::set(&**upper, top.node(), mark, b"y")
            .and_then(|()| marks::clear(&**upper, top.node(), mark))
            .map_err(|error| unmarked(&format!("the attribute {}", mark.escape_ascii()), error))?;
    }
    let name = Name::new(WHITEOUT_TRIED)?;
    match upper.mknod(ROOT, top.node(), name, FileType::CharDevice, 0, 0) {
        Ok(made) => drop(Held::new(upper, made.node)),
        // A crash has left it.
        Err(error) if error == Errno::EEXIST => {}
        Err(error) => return Err(unmarked("whiteouts", error)),
    }
    // A union below takes it for its own, and says that there is nothing.
    match upper.unlink(ROOT, top.node(), name) {
        Err(error) if error == Errno::ENOENT => Err(unmarked("whiteouts", Error::from(Errno::EINVAL))),
        outcome => outcome,
    }
}

/// What is said of an upper branch whose format file says something else.
pub(crate) fn foreign_format(text: &str) -> String {
    format!("the upper branch was written by another release (its .poolfs/format says \"{text}\")")
}

/// Who still has a removed directory open saw it empty, and sees it unchanged.
fn keep_time(upper: &Branch, directory: &Held, before: &Attributes) {
    let times = SetAttributes { modified: Some(SetTime::At(before.modified)), ..SetAttributes::default() };
    if let Err(error) = upper.setattr(ROOT, directory.node(), &times, None) {
        tracing::warn!(%error, "a removed directory shows that it was emptied");
    }
}

/// Removes a name of an upper directory and all below it.
pub(crate) fn remove_tree(upper: &Branch, parent: &Held, name: &[u8], file_type: FileType) -> Result<()> {
    if file_type != FileType::Directory {
        return upper.unlink(ROOT, parent.node(), Name::new(name)?);
    }
    // Directories on the way down, each with the names it still holds, and whether there are more.
    type Entered = (Held, Vec<u8>, Vec<Listed>, bool);
    let listed = |held: &Held| -> Result<(Vec<Listed>, bool)> {
        let names = first_names(upper, held.node(), NAMES_AT_ONCE)?;
        let is_full = names.len() == NAMES_AT_ONCE;
        Ok((names, is_full))
    };
    let mut way: Vec<Entered> = Vec::new();
    let enter = |parent: NodeId, name: &[u8]| -> Result<(Entered, Attributes)> {
        let entry = upper.lookup(ROOT, parent, Name::new(name)?)?;
        let held = Held::new(upper, entry.node);
        let (names, has_more) = listed(&held)?;
        Ok(((held, name.to_vec(), names, has_more), entry.attributes))
    };
    let (first, before) = enter(parent.node(), name)?;
    let held_something = !first.2.is_empty();
    way.push(first);
    while let Some((held, _, names, has_more)) = way.last_mut() {
        match names.pop() {
            Some((name, FileType::Directory)) => {
                let (below, _) = enter(held.node(), &name)?;
                way.push(below);
            }
            Some((name, _)) => upper.unlink(ROOT, held.node(), Name::new(&name)?)?,
            None => {
                if std::mem::take(has_more) {
                    (*names, *has_more) = listed(held)?;
                    continue;
                }
                if let Some((held, name, ..)) = way.pop() {
                    let above = way.last().map_or(parent.node(), |(held, ..)| held.node());
                    if way.is_empty() && held_something {
                        keep_time(upper, &held, &before);
                    }
                    upper.rmdir(ROOT, above, Name::new(&name)?)?;
                }
            }
        }
    }
    Ok(())
}
