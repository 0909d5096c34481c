//! Checks every compact file of the layer below, and repairs what a crash has cut.

use crate::Bcow;
use crate::decoding::Cause;
use crate::format::{ATTRIBUTE, ENTRIES, Entries, Level, Record, Root, SECTOR_BYTES, Which};
use crate::format::{decode_sector, salvage_sector};
use crate::formatting::METACOPY;
use crate::inline::Inline;
use poolfs_libservice::walk::walk;
use poolfs_libservice::{Branch, Finding, Findings, Held, Opened, Result, Tally};
use poolfs_types::limits::BLOCK_SIZE;
use poolfs_types::{Attributes, Caller, Errno, FileType, NodeId, OpenFlags, SeekTo, XattrFlags};
use std::cell::RefCell;
use std::collections::BTreeMap;

const ROOT: &Caller = &Caller::ROOT;

/// Blocks of a file of which it is noted at once whether a table names them: 2 TiB of the file, 64 MiB of memory. What is behind them
/// comes in another reading of the tables.
const WINDOW_BLOCKS: u64 = 1 << 29;

/// Most holes of a file that are remembered.
const HOLES_MAX: usize = 4096;

/// Blocks of a file that anything can name: its size may say more.
const NAMEABLE_BLOCKS: u64 = 1 << 32;

/// What can be wrong with files of the format. The first word of each says whether it can be repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Problem {
    /// Damage: the record of a file, or what looks like one on something else.
    Record,
    /// Repairable: files of the format in a branch that is not marked as having them: they would be shown as they are stored.
    MarkMissing,
    /// Repairable: a file of the format without `trusted.overlay.metacopy`, of which overlayfs would show the tables.
    MetacopyMissing,
    /// Repairable: a truncation that the tables do not show yet.
    Truncation,
    /// Damage: sectors of a table or of the root.
    Table,
    /// Repairable: sectors that a crash has cut. At any other time they are damage.
    TableCut,
    /// Damage: a table or a unit that is said to be behind the end of the file, or where something else is.
    Place,
    /// Damage: what cannot be looked up, listed or read.
    Unreadable,
}

impl Problem {
    /// Its name in messages and for programs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Problem::Record => "compact-record",
            Problem::MarkMissing => "compact-mark-missing",
            Problem::MetacopyMissing => "metacopy-missing",
            Problem::Truncation => "compact-truncation",
            Problem::Table => "table",
            Problem::TableCut => "table-cut",
            Problem::Place => "place",
            Problem::Unreadable => "unreadable",
        }
    }
}

/// What a check has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Files of the format, or with what should be a record.
    pub files: u64,
    /// What was found.
    pub tally: Tally,
}

impl Bcow {
    /// Looks at every file of the format, of which nobody uses one, and gives each finding to `report`. `is_unclean`: the last use of the
    /// layer was cut off, so that sectors may be cut. With `repair`, what can be repaired is; else nothing is ever changed.
    ///
    /// # Errors
    /// What the layer below answers about its root; `EIO`, `ENOSPC` ... when the repairs cannot be brought to disk.
    pub fn check(&self, is_unclean: bool, repair: bool, report: &mut dyn FnMut(Finding<Problem>)) -> Result<Checked> {
        let mut findings = Findings::new(repair, report);
        let mut files = 0;
        let root = Held::new(&self.below, NodeId::ROOT);
        let is_marked = match attribute(&self.below, NodeId::ROOT, ATTRIBUTE)? {
            Some(value) if value == b"1" => true,
            Some(_) => {
                findings.damage(b"", Problem::Record, "trusted.poolfs.bcow of the branch itself is not \"1\"");
                true
            }
            None => false,
        };
        walk(&self.below, root, b"", &mut |path, visited| {
            let looked_at = visited.and_then(|(held, attributes)| {
                files += u64::from(self.look_at(path, held, attributes, is_unclean, &mut findings)?);
                Ok(())
            });
            if let Err(error) = looked_at {
                findings.damage(path, Problem::Unreadable, error.to_string());
            }
            Ok(true)
        })?;
        if files > 0 && !is_marked {
            let cause = format!("it has {files} compact files, and no trusted.poolfs.bcow that says so");
            let mark = || self.below.setxattr(ROOT, NodeId::ROOT, ATTRIBUTE, b"1", XattrFlags::empty());
            let _ = findings.mendable(b"", Problem::MarkMissing, cause, mark);
        }
        if repair {
            self.below.sync()?;
        }
        Ok(Checked { files, tally: findings.tally })
    }

    /// Looks at one object; whether it is, or should be, a file of the format.
    fn look_at(
        &self,
        path: &[u8],
        held: &Held,
        attributes: &Attributes,
        is_unclean: bool,
        findings: &mut Findings<'_, Problem>,
    ) -> Result<bool> {
        let Some(value) = attribute(&self.below, held.node(), ATTRIBUTE)? else { return Ok(false) };
        if attributes.file_type != FileType::Regular {
            findings.damage(path, Problem::Record, "trusted.poolfs.bcow cannot be on such an object");
            return Ok(false);
        }
        let record = match Record::decode(&value) {
            Ok(record) => record,
            Err(cause) => {
                findings.damage(path, Problem::Record, cause);
                return Ok(true);
            }
        };
        if attribute(&self.below, held.node(), METACOPY)?.is_none() {
            let mark = || self.below.setxattr(ROOT, held.node(), METACOPY, b"", XattrFlags::empty());
            let cause = "it is stored compactly, without trusted.overlay.metacopy";
            let _ = findings.mendable(path, Problem::MetacopyMissing, cause, mark);
        }
        let read = self.read_tables(held, attributes, &record, is_unclean)?;
        let is_damaged = read.damage.is_some();
        if let Some((problem, cause)) = read.damage {
            findings.damage(path, problem, cause);
        }
        let mend = || self.repair(held.node()).map(drop);
        if read.cut > 0 {
            let cause = format!("{} sectors of its tables were cut", read.cut);
            if is_damaged {
                findings.damage(path, Problem::TableCut, format!("{cause}, and more is damaged"));
            } else {
                let _ = findings.mendable(path, Problem::TableCut, cause, mend);
            }
        } else if record.limit != u64::MAX && !is_damaged {
            let cause = format!("a truncation to {} bytes has not come to its tables", record.limit);
            let _ = findings.mendable(path, Problem::Truncation, cause, mend);
        }
        Ok(true)
    }

    fn read_tables(&self, held: &Held, attributes: &Attributes, record: &Record, is_unclean: bool) -> Result<Tables> {
        let mut tables = Tables::default();
        // Nothing of them counts.
        if record.limit == 0 {
            return Ok(tables);
        }
        let reader = Reader {
            file: Opened::file(&self.below, ROOT, held.node(), OpenFlags::READ_ONLY)?,
            record,
            blocks: attributes.size.div_ceil(BLOCK_SIZE as u64).min(NAMEABLE_BLOCKS),
            is_unclean,
            holes: RefCell::default(),
        };
        let mut from = 0;
        loop {
            let mut named = Named::new(from, reader.blocks);
            tables = Tables::default();
            reader.read(&mut tables, &mut named)?;
            from += WINDOW_BLOCKS;
            if tables.damage.is_some() || from >= reader.blocks {
                return Ok(tables);
            }
        }
    }
}

fn attribute(below: &Branch, node: NodeId, name: &[u8]) -> Result<Option<Vec<u8>>> {
    match below.getxattr(ROOT, node, name) {
        Ok(value) => Ok(Some(value)),
        Err(error) if error == Errno::ENODATA || error == Errno::EOPNOTSUPP => Ok(None),
        Err(error) => Err(error),
    }
}

/// What the tables of a file are like.
#[derive(Default)]
struct Tables {
    /// sectors that a crash has cut
    cut: u64,
    /// the damage of the first table that has any
    damage: Option<(Problem, Cause)>,
}

/// Which blocks of a window of the file are named already.
struct Named {
    from: u64,
    bits: Vec<u64>,
}

impl Named {
    fn new(from: u64, blocks: u64) -> Self {
        let count = blocks.saturating_sub(from).min(WINDOW_BLOCKS);
        Named { from, bits: vec![0; count.div_ceil(64) as usize] }
    }

    /// Notes blocks, as far as they are in the window; whether one was named before.
    fn note(&mut self, blocks: std::ops::Range<u64>) -> bool {
        let end = self.from + self.bits.len() as u64 * 64;
        for block in blocks.start.max(self.from)..blocks.end.min(end) {
            let (word, bit) = (((block - self.from) / 64) as usize, (block - self.from) % 64);
            if self.bits[word] >> bit & 1 == 1 {
                return true;
            }
            self.bits[word] |= 1 << bit;
        }
        false
    }
}

/// Reads the tables of one file.
struct Reader<'a> {
    file: Opened,
    record: &'a Record,
    /// of the file below, as far as they can be named
    blocks: u64,
    is_unclean: bool,
    /// holes that were found, from their first bytes to their ends
    holes: RefCell<BTreeMap<u64, u64>>,
}

impl Reader<'_> {
    /// Whether a block is in a hole of the file below: such a table is empty. Of these a root can name half a million, in no time and no
    /// room, so that they are not read one by one.
    fn is_in_hole(&self, block: u64) -> Result<bool> {
        let offset = block * BLOCK_SIZE as u64;
        let mut holes = self.holes.borrow_mut();
        if holes.range(..=offset).next_back().is_some_and(|(_, &end)| offset + BLOCK_SIZE as u64 <= end) {
            return Ok(true);
        }
        let end = match self.file.branch().seek(ROOT, self.file.id(), offset, SeekTo::Data) {
            Ok(data) => data,
            Err(error) if error == Errno::ENXIO => u64::MAX,
            Err(error) => return Err(error),
        };
        if end < offset + BLOCK_SIZE as u64 {
            return Ok(false);
        }
        // What it reaches is a part of it.
        while let Some((&next, _)) = holes.range(offset..).next()
            && next <= end
        {
            holes.remove(&next);
        }
        if holes.len() < HOLES_MAX {
            holes.insert(offset, end);
        }
        Ok(true)
    }

    /// Looks at all tables until one is damaged.
    fn read(&self, tables: &mut Tables, named: &mut Named) -> Result<()> {
        let (first, blocks) = match &self.record.root {
            Root::Inline(inline) => {
                self.places(inline, tables, named);
                return Ok(());
            }
            Root::Table => {
                let _ = named.note(0..1);
                return self.units(0, 0, tables, named);
            }
            &Root::Tables { first, blocks } => (first, blocks),
        };
        let _ = named.note(u64::from(first)..u64::from(first) + u64::from(blocks));
        for number in 0..u64::from(blocks) {
            let Some(root) = self.table(Level::Tables, number, u64::from(first) + number, tables)? else {
                return Ok(());
            };
            for (at, block) in root.iter().enumerate().filter(|(_, block)| **block != 0) {
                let table = number * ENTRIES as u64 + at as u64;
                if !self.place(u64::from(*block), 1, &format!("table {table}"), tables, named) {
                    return Ok(());
                }
                self.units(table, u64::from(*block), tables, named)?;
                if tables.damage.is_some() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Looks at the places that the record has.
    fn places(&self, inline: &Inline, tables: &mut Tables, named: &mut Named) {
        let blocks = u64::from(self.record.unit_blocks());
        let counts = |index: &u64| index << self.record.unit_shift < self.record.limit;
        for (index, block) in inline.places().take_while(|(index, _)| counts(index)) {
            if !self.place(u64::from(block), blocks, &format!("unit {index}"), tables, named) {
                break;
            }
        }
    }

    /// Looks at a table of units.
    fn units(&self, number: u64, block: u64, tables: &mut Tables, named: &mut Named) -> Result<()> {
        let Some(entries) = self.table(Level::Units, number, block, tables)? else { return Ok(()) };
        for (at, unit) in entries.iter().enumerate().filter(|(_, unit)| **unit != 0) {
            let index = number * ENTRIES as u64 + at as u64;
            let blocks = u64::from(self.record.unit_blocks());
            if !self.place(u64::from(*unit), blocks, &format!("unit {index}"), tables, named) {
                break;
            }
        }
        Ok(())
    }

    /// Whether something can be at these blocks.
    fn place(&self, block: u64, blocks: u64, what: &str, tables: &mut Tables, named: &mut Named) -> bool {
        let cause = if block + blocks > self.blocks {
            format!("{what} is said to be at block {block}, and the file ends at {}", self.blocks)
        } else if named.note(block..block + blocks) {
            format!("{what} is said to be at block {block}, where something else is")
        } else {
            return true;
        };
        tables.damage = Some((Problem::Place, cause));
        false
    }

    /// The entries of a table, as far as they can be relied on; nothing when it is damaged.
    fn table(&self, level: Level, number: u64, block: u64, tables: &mut Tables) -> Result<Option<Box<Entries>>> {
        if self.is_in_hole(block)? {
            return Ok(Some(Box::new([0; ENTRIES])));
        }
        let mut bytes = vec![0; BLOCK_SIZE];
        self.file.read_full(block * BLOCK_SIZE as u64, &mut bytes)?;
        let which = Which { tag: self.record.tag, level, number };
        let mut entries = Box::new([0; ENTRIES]);
        let mut damage: Option<(Cause, u32)> = None;
        for (sector, bytes) in bytes.chunks_exact(SECTOR_BYTES).enumerate() {
            let read = match self.is_unclean {
                true => salvage_sector(which, sector, bytes, &mut entries),
                false => decode_sector(which, sector, bytes, &mut entries).map(|()| false),
            };
            match read {
                Ok(is_cut) => tables.cut += u64::from(is_cut),
                Err(cause) => damage = Some(damage.map_or((cause, 0), |(first, more)| (first, more + 1))),
            }
        }
        let Some((cause, more)) = damage else { return Ok(Some(entries)) };
        let of = if level == Level::Tables { "of its root: " } else { "" };
        let more = if more > 0 { format!(", and {more} more of it") } else { String::new() };
        tables.damage = Some((Problem::Table, format!("{of}{cause}{more}")));
        Ok(None)
    }
}
