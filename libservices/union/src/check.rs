//! Checks an upper branch that no union uses, and repairs what can be repaired without guessing.
//!
//! **What it does.** Everything in the work directory is checked, then every object of the tree: its marks, and of a sketch the
//! record, the origin, the bitmap and, where the lower branches are known, the lower file. What a crash leaves is repaired, and
//! so is what follows from other stored state. All else is damage, and stays as it is.
//!
//! **What it shares.** [`Union::open`](crate::Union::open) runs the same repair after an unclean end.
//!
//! **Memory.** An entry for each bitmap and sketch, each file in the index and each file with several names that has something
//! wrong, of which there may be [`NAMES_MAX`]; and the names of a walk.

mod bitmaps;
mod objects;

use crate::Lower;
use crate::exchange_note;
use crate::format::DIRECTORY;
use crate::format::{SketchRecord, bitmap_id};
use crate::journal;
use crate::journal_records;
use crate::journal_records::journal_name;
use crate::lower_path::LowerPath;
use crate::replay;
use crate::upper_names::find;
use crate::work::{self, FORMAT_NAME, Format, OPEN, foreign_format};
use crate::{attributed, links, marks, place};
use hashbrown::{HashMap, HashSet};
use poolfs_libservice::walk::{each_name, walk};
use poolfs_libservice::{
    Branch, Durability, Error, Finding, Findings, Held, Libservice, Opened, Outcome, Result, Tally,
};
use poolfs_types::{Attributes, Caller, Errno, FileType, Name, NodeId, OpenFlags};
use std::sync::Arc;

const ROOT: &Caller = &Caller::ROOT;

/// Most names of each directory of the work directory that a check can deal with.
pub const NAMES_MAX: usize = 1 << 22;

/// Most findings of one opening that are logged one by one.
const LOGGED_MAX: u64 = 100;

/// What can be wrong with an upper branch. The first word of each says whether it can be repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Problem {
    /// Repairable: the file that says which release wrote the branch is missing, or a crash has cut it.
    Format,
    /// Damage: another release wrote the branch. Nothing else of it is looked at.
    Release,
    /// Repairable: the last union over the branch was not closed.
    UncleanEnd,
    /// Repairable: an object that was being made or removed.
    Leftover,
    /// Repairable: a bitmap that no sketch names, or a file in the index without names. Damage where it may belong to what
    /// cannot be read, or to what has lost its attributes.
    Orphan,
    /// Damage: something in the work directory that poolfs does not make.
    Stranger,
    /// Damage: the record of a sketch.
    Record,
    /// Damage: an origin, or none on a sketch.
    Origin,
    /// Repairable: a truncation that was not finished.
    Truncation,
    /// Damage: a bitmap is missing, has a wrong size, broken sectors or those of another sketch, or tells of blocks that the file has not.
    Bitmap,
    /// Repairable: sectors of a bitmap that a crash has cut. At any other time they are damage.
    BitmapCut,
    /// Repairable: a bitmap that is not sound and was never promised, so that nothing has moved. It is removed.
    BitmapUnpromised,
    /// Repairable: `trusted.overlay.metacopy` on what is no sketch any more.
    MetacopyLeft,
    /// Repairable: a sketch without `trusted.overlay.metacopy`, which overlayfs would show as zeros.
    MetacopyMissing,
    /// Damage: an attribute with a value, or on an object, that poolfs does not give it.
    Mark,
    /// Damage: the link count of a file in the index, or its place there.
    Links,
    /// Damage: the lower file of a sketch is missing, or has another size or time.
    Lower,
    /// Damage: what a service had accepted before it died waits in a journal for the next union over this branch and its lower ones.
    Journal,
    /// Damage: the branch was copied without its extended attributes, or without its work directory.
    Attributes,
    /// Damage: what cannot be looked up, listed or read.
    Unreadable,
}

impl Problem {
    /// Its name in messages and for programs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Problem::Format => "format",
            Problem::Release => "release",
            Problem::UncleanEnd => "unclean-end",
            Problem::Leftover => "leftover",
            Problem::Orphan => "orphan",
            Problem::Stranger => "stranger",
            Problem::Record => "record",
            Problem::Origin => "origin",
            Problem::Truncation => "truncation",
            Problem::Bitmap => "bitmap",
            Problem::BitmapCut => "bitmap-cut",
            Problem::BitmapUnpromised => "bitmap-unpromised",
            Problem::MetacopyLeft => "metacopy-left",
            Problem::MetacopyMissing => "metacopy-missing",
            Problem::Mark => "mark",
            Problem::Links => "links",
            Problem::Lower => "lower",
            Problem::Journal => "journal",
            Problem::Attributes => "attributes",
            Problem::Unreadable => "unreadable",
        }
    }
}

/// A check of an upper branch.
pub struct Check<'a> {
    /// The branch. Without `repair` nothing is ever changed in it.
    pub upper: Arc<dyn Libservice>,
    /// The lower branches, topmost first; nothing: lower files are not looked at.
    pub lowers: Option<&'a [Lower]>,
    /// Whether what can be repaired is.
    pub repair: bool,
    /// Whether the layers below are as they have to be: else the branch does not count as cleanly closed afterwards.
    pub is_whole_below: bool,
}

/// What a check has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Whether the directory is, or looks as if it had been, an upper branch.
    pub is_upper: bool,
    /// Objects of the tree that were looked at.
    pub objects: u64,
    /// Sketches among them.
    pub sketches: u64,
    /// What was found.
    pub tally: Tally,
}

impl Check<'_> {
    /// Looks at everything, and gives each finding to `report`.
    ///
    /// # Errors
    /// What the branch answers where nothing can be found without it: the work directory; `EINVAL` for unusable layer ids, `ENOSPC`,
    /// `EIO` ... when the repairs cannot be brought to disk.
    pub fn run(&self, report: &mut dyn FnMut(Finding<Problem>)) -> Result<Checked> {
        crate::check_layers(self.lowers.unwrap_or_default())?;
        let mut checker = Checker::new(&self.upper, self.lowers, Findings::new(self.repair, report));
        checker.run(self.is_whole_below)?;
        if self.repair {
            self.upper.sync()?;
        }
        Ok(checker.ended())
    }
}

/// What a union does when the last one over its upper branch was not closed; each thing is logged. Its work directory exists.
pub(crate) fn repair_after_unclean_end(upper: &Branch) -> Result<()> {
    let mut told = 0;
    let mut report = |finding: Finding<Problem>| {
        told += 1;
        let Finding { path, problem, cause, outcome } = finding;
        let problem = problem.name();
        match outcome {
            _ if told > LOGGED_MAX => {}
            Outcome::Repaired => tracing::warn!(path, problem, cause, "repaired after an unclean end"),
            Outcome::Damage | Outcome::Repairable => {
                tracing::error!(path, problem, cause, "the upper branch is damaged")
            }
        }
    };
    let mut checker = Checker::new(upper, None, Findings::new(true, &mut report));
    checker.is_unclean = true;
    let places = checker.places()?;
    checker.contents(&places)?;
    let Tally { repaired, damaged, .. } = checker.findings.tally;
    if told > LOGGED_MAX {
        tracing::warn!(
            repaired,
            damaged,
            "more was found in the upper branch than is logged; `poolfs fsck` tells of all"
        );
    }
    Ok(())
}

/// The directories in the work directory; those that are there.
#[derive(Default)]
struct Places {
    top: Option<Held>,
    work: Option<Held>,
    bitmaps: Option<Held>,
    index: Option<Held>,
}

/// A file in the index.
struct Indexed {
    name: Vec<u8>,
    links: u32,
    /// names that were found in the tree
    seen: u32,
    is_examined: bool,
}

struct Checker<'a> {
    upper: &'a Branch,
    lowers: Option<&'a [Lower]>,
    findings: Findings<'a, Problem>,
    is_unclean: bool,
    /// the branch says that it had attributes which are not there
    has_lost_attributes: bool,
    /// bitmaps of files whose last name was removed
    nameless: HashSet<[u8; 16]>,
    /// a sketch with the number of another file is a copy
    are_owners_known: bool,
    /// the bitmaps there are and those that are named, each with the inode of the sketch that names it, once that is found
    bitmaps: HashMap<[u8; 16], Option<u64>>,
    /// by inode
    index: HashMap<u64, Indexed>,
    /// the inodes of files with several names of which something was found; they are not told of again by another name
    told: HashSet<u64>,
    /// There are, or may be, sketches whose ids are not known.
    has_unknown: bool,
    /// Something could not be read, or its repair failed.
    is_incomplete: bool,
    checked: Checked,
}

fn in_work_directory(directory: &str, name: &[u8]) -> Vec<u8> {
    [DIRECTORY, b"/", directory.as_bytes(), b"/", name].concat()
}

impl<'a> Checker<'a> {
    fn new(upper: &'a Branch, lowers: Option<&'a [Lower]>, findings: Findings<'a, Problem>) -> Self {
        Checker {
            upper,
            lowers,
            findings,
            is_unclean: false,
            has_lost_attributes: false,
            are_owners_known: false,
            nameless: HashSet::new(),
            bitmaps: HashMap::new(),
            index: HashMap::new(),
            told: HashSet::new(),
            has_unknown: false,
            is_incomplete: false,
            checked: Checked::default(),
        }
    }

    fn ended(self) -> Checked {
        Checked { tally: self.findings.tally, ..self.checked }
    }

    fn unreadable(&mut self, path: &[u8], error: &Error) {
        (self.is_incomplete, self.has_unknown) = (true, true);
        self.findings.damage(path, Problem::Unreadable, error.to_string());
    }

    fn mendable(
        &mut self,
        path: &[u8],
        problem: Problem,
        cause: impl Into<String>,
        mend: impl FnOnce() -> Result<()>,
    ) -> bool {
        let is_mended = self.findings.mendable(path, problem, cause, mend);
        self.is_incomplete |= !is_mended && self.findings.repairs();
        is_mended
    }

    fn run(&mut self, is_whole_below: bool) -> Result<()> {
        let places = self.places()?;
        if let Some(top) = &places.top {
            self.checked.is_upper = true;
            if !self.format(top)? {
                return Ok(());
            }
            self.is_unclean = find(self.upper, top.node(), OPEN)?.is_some();
            self.are_owners_known = place::of(self.upper, top)? == place::Place::Untouched;
        }
        if let Some(cause) = attributed::left_behind(self.upper, places.top.as_ref())? {
            let path = if places.top.is_some() { attributed::path() } else { DIRECTORY.to_vec() };
            (self.checked.is_upper, self.is_incomplete, self.has_lost_attributes) = (true, true, true);
            self.findings.damage(&path, Problem::Attributes, cause);
        }
        self.leftovers(&places)?;
        self.journals(&places)?;
        self.contents(&places)?;
        if self.is_unclean
            && let Some(top) = &places.top
        {
            let (upper, is_whole) = (self.upper, is_whole_below && !self.is_incomplete);
            let path = [DIRECTORY, b"/", OPEN].concat();
            let cause = "the last union over this branch was not closed";
            let _ = self.mendable(&path, Problem::UncleanEnd, cause, || match is_whole {
                true => {
                    // From here on nobody looks again for what the end has left.
                    upper.sync()?;
                    upper.unlink(ROOT, top.node(), Name::new(OPEN)?)
                }
                false => Err(Error::new(Errno::EIO, "not all that it left could be read and repaired")),
            });
        }
        Ok(())
    }

    fn places(&mut self) -> Result<Places> {
        let mut places = Places { top: self.place(NodeId::ROOT, DIRECTORY, DIRECTORY)?, ..Places::default() };
        if let Some(top) = &places.top {
            let mut below = |name: &str| {
                let path = [DIRECTORY, b"/", name.as_bytes()].concat();
                self.place(top.node(), name.as_bytes(), &path)
            };
            (places.work, places.bitmaps, places.index) = (below("work")?, below("bitmaps")?, below("index")?);
        }
        Ok(places)
    }

    fn place(&mut self, parent: NodeId, name: &[u8], path: &[u8]) -> Result<Option<Held>> {
        match find(self.upper, parent, name)? {
            Some((held, attributes)) if attributes.is_directory() => Ok(Some(held)),
            Some(_) => {
                self.checked.is_upper = true;
                self.findings.damage(path, Problem::Stranger, "it is no directory; the branch cannot be mounted");
                Ok(None)
            }
            None => Ok(None),
        }
    }

    /// Whether the branch is this release's.
    fn format(&mut self, top: &Held) -> Result<bool> {
        let (upper, path) = (self.upper, [DIRECTORY, b"/format"].concat());
        let mend = || {
            let held = work::checked_format(upper, top)?;
            let file = Opened::file(upper, ROOT, held.node(), OpenFlags::READ_ONLY)?;
            upper.fsync(ROOT, file.id(), Durability::All)
        };
        match find(upper, top.node(), FORMAT_NAME)? {
            None => {
                let _ = self.mendable(&path, Problem::Format, "it is missing", mend);
            }
            Some((_, attributes)) if attributes.file_type != FileType::Regular => {
                self.findings.damage(&path, Problem::Stranger, "it is no regular file; the branch cannot be mounted");
            }
            Some((held, _)) => {
                let file = Opened::file(upper, ROOT, held.node(), OpenFlags::READ_ONLY)?;
                match work::format_of(&file)? {
                    Format::Sound => {}
                    Format::Cut => {
                        let _ = self.mendable(&path, Problem::Format, "its text is not whole", mend);
                    }
                    Format::Foreign(text) => {
                        self.findings.damage(&path, Problem::Release, foreign_format(&text));
                        return Ok(false);
                    }
                }
            }
        }
        Ok(true)
    }

    /// The names of a directory of the work directory, as many as can be dealt with.
    fn names(&mut self, directory: &str, held: &Held) -> Result<Vec<(Vec<u8>, FileType)>> {
        let mut names = Vec::new();
        each_name(self.upper, held.node(), &mut |name, file_type| {
            if names.len() == NAMES_MAX {
                let cause = format!("there are more than {NAMES_MAX} names in .poolfs/{directory}");
                return Err(Error::new(Errno::EMFILE, cause));
            }
            names.push((name.to_vec(), file_type));
            Ok(())
        })?;
        Ok(names)
    }

    fn leftovers(&mut self, places: &Places) -> Result<()> {
        let upper = self.upper;
        if let Some(top) = &places.top
            && find(upper, top.node(), exchange_note::NOTE)?.is_some()
        {
            let path = [DIRECTORY, b"/", exchange_note::NOTE].concat();
            let cause = "two names were changing places when the end came";
            let _ = self.mendable(&path, Problem::Leftover, cause, || exchange_note::complete(upper, top));
        }
        let Some(held) = &places.work else { return Ok(()) };
        for (name, file_type) in self.names("work", held)? {
            let (path, cause) = (in_work_directory("work", &name), "it was being made or removed when the end came");
            let _ = self.mendable(&path, Problem::Leftover, cause, || work::remove_tree(upper, held, &name, file_type));
        }
        Ok(())
    }

    /// What only a union can make good.
    fn journals(&mut self, places: &Places) -> Result<()> {
        let Some(top) = &places.top else { return Ok(()) };
        let upper = self.upper;
        for generation in journal_records::generations(upper, top.node())? {
            let path = [DIRECTORY, b"/", journal_name(generation).as_bytes()].concat();
            if replay::is_empty(upper, top.node(), generation)? {
                let remove = || journal::remove(upper, top.node(), generation);
                let _ = self.mendable(&path, Problem::Leftover, "nothing was written to it when the end came", remove);
                continue;
            }
            self.is_incomplete = true;
            let cause = "what a service had accepted before it died waits here; mount the branch once, with its lower ones; removing it gives that up";
            self.findings.damage(&path, Problem::Journal, cause);
        }
        Ok(())
    }

    /// Everything but the work directory's own state.
    fn contents(&mut self, places: &Places) -> Result<()> {
        self.find_bitmaps(places)?;
        self.find_index(places)?;
        self.count_in_work(places)?;
        let root = Held::new(self.upper, NodeId::ROOT);
        let attributes = self.upper.getattr(ROOT, NodeId::ROOT)?;
        self.examine(places, b"", &root, &attributes);
        walk(self.upper, root, b"", &mut |path, visited| {
            match visited {
                Ok(_) if path == DIRECTORY => return Ok(false),
                Ok((held, attributes)) => {
                    self.checked.objects += 1;
                    self.met(places, path, held, attributes);
                }
                Err(error) => self.unreadable(path, &error),
            }
            Ok(true)
        })?;
        self.check_index(places)?;
        self.check_orphans(places)
    }

    fn find_bitmaps(&mut self, places: &Places) -> Result<()> {
        let Some(held) = &places.bitmaps else { return Ok(()) };
        for (name, file_type) in self.names("bitmaps", held)? {
            match bitmap_id(&name).filter(|_| file_type == FileType::Regular) {
                Some(id) => {
                    self.bitmaps.insert(id, None);
                }
                None => {
                    let path = in_work_directory("bitmaps", &name);
                    self.findings.damage(&path, Problem::Stranger, "it is no bitmap of poolfs; remove it by hand");
                }
            }
        }
        Ok(())
    }

    fn find_index(&mut self, places: &Places) -> Result<()> {
        let Some(held) = &places.index else { return Ok(()) };
        let upper = self.upper;
        for (name, file_type) in self.names("index", held)? {
            let path = in_work_directory("index", &name);
            // Keys have the form of ids.
            if bitmap_id(&name).is_none() || file_type == FileType::Directory {
                self.findings.damage(&path, Problem::Stranger, "it is no file of the index; remove it by hand");
                continue;
            }
            let Some((file, attributes)) = self.readable(&path, held, &name)? else { continue };
            let value = upper.getxattr(ROOT, file.node(), marks::LINKS);
            if attributes.links == 1 && value.as_ref().is_ok_and(|value| value == b"U-1") {
                let record = upper.getxattr(ROOT, file.node(), marks::SKETCH).ok();
                self.nameless
                    .extend(record.and_then(|record| SketchRecord::decode(&record).ok()).map(|record| record.id));
                let mend = || upper.unlink(ROOT, held.node(), Name::new(&name)?);
                let _ = self.mendable(&path, Problem::Orphan, "its last name was removed", mend);
                continue;
            }
            match value {
                Ok(_) => {}
                Err(error) if error == Errno::ENODATA || error == Errno::EOPNOTSUPP => {
                    self.findings.damage(&path, Problem::Links, "it has no trusted.overlay.nlink");
                }
                Err(error) => self.unreadable(&path, &error),
            }
            let links = attributes.links;
            self.index.insert(attributes.inode, Indexed { name, links, seen: 0, is_examined: false });
        }
        Ok(())
    }

    /// What has that name; that it cannot be read is a finding.
    fn readable(&mut self, path: &[u8], parent: &Held, name: &[u8]) -> Result<Option<(Held, Attributes)>> {
        match find(self.upper, parent.node(), name) {
            Err(error) if error == Errno::EIO => {
                self.unreadable(path, &error);
                Ok(None)
            }
            found => found,
        }
    }

    /// What is to be removed may be a name of a file in the index.
    fn count_in_work(&mut self, places: &Places) -> Result<()> {
        let Some(top) = &places.top else { return Ok(()) };
        let Some((held, _)) = find(self.upper, top.node(), b"work")? else { return Ok(()) };
        walk(self.upper, held, &in_work_directory("work", b""), &mut |_, visited| {
            if let Ok((_, attributes)) = visited
                && let Some(indexed) = self.index.get_mut(&attributes.inode)
            {
                indexed.seen = indexed.seen.saturating_add(1);
            }
            Ok(true)
        })
    }

    /// An object of the tree; a file in the index is looked at by the first of its names.
    fn met(&mut self, places: &Places, path: &[u8], held: &Held, attributes: &Attributes) {
        if let Some(indexed) = self.index.get_mut(&attributes.inode) {
            indexed.seen = indexed.seen.saturating_add(1);
            if std::mem::replace(&mut indexed.is_examined, true) {
                return;
            }
        }
        let has_names = attributes.links > 1 && !attributes.is_directory();
        if has_names && self.told.contains(&attributes.inode) {
            return;
        }
        let before = self.findings.tally;
        self.examine(places, path, held, attributes);
        if has_names && self.findings.tally != before && self.told.len() < NAMES_MAX {
            self.told.insert(attributes.inode);
        }
    }

    fn check_index(&mut self, places: &Places) -> Result<()> {
        let Some(index) = &places.index else { return Ok(()) };
        for (_, indexed) in std::mem::take(&mut self.index) {
            let path = in_work_directory("index", &indexed.name);
            let Some((held, attributes)) = self.readable(&path, index, &indexed.name)? else { continue };
            if !indexed.is_examined {
                // By its place there it is no stranger to the index.
                let known = Indexed { name: indexed.name.clone(), is_examined: true, ..indexed };
                self.index.insert(attributes.inode, known);
                self.examine(places, &path, &held, &attributes);
                self.index.clear();
            }
            if let Err(cause) = self.links(&held, &indexed)? {
                self.findings.damage(&path, Problem::Links, cause);
            }
        }
        Ok(())
    }

    /// Whether the link count of a file in the index fits the names there are.
    fn links(&self, held: &Held, indexed: &Indexed) -> Result<std::result::Result<(), String>> {
        let (links, names) = (i64::from(indexed.links), i64::from(indexed.seen));
        if links != names + 1 {
            return Ok(Err(format!("it has {links} links, of which {names} are names in the branch and one is this")));
        }
        let value = match self.upper.getxattr(ROOT, held.node(), marks::LINKS) {
            Ok(value) => value,
            // That was told of when it was found in the index.
            Err(_) => return Ok(Ok(())),
        };
        // What cannot be understood was told of with the other attributes.
        let Some((base, delta)) = links::parse(&value) else { return Ok(Ok(())) };
        let lower = match self.lowers {
            Some(lowers) => self
                .origin(held)?
                .map(|origin| crate::branch::lower_of(lowers, &LowerPath::root(None), &origin))
                .transpose()?,
            None => None,
        };
        let lower = lower.and_then(std::result::Result::ok).map(|(_, attributes)| i64::from(attributes.links));
        let shown = match (base, lower) {
            (b'U', _) => links + delta,
            (_, Some(lower)) => lower + delta,
            (_, None) => return Ok(Ok(())),
        };
        // Names that are still in the lower branch alone.
        let below = shown - names;
        if below < 0 || lower.is_some_and(|lower| below > lower) {
            let value = value.escape_ascii();
            return Ok(Err(format!("trusted.overlay.nlink is {value}: {shown} links in all, {names} of them here")));
        }
        Ok(Ok(()))
    }
}
