//! Makes good what a service that died had accepted: the records of the [journal](crate::journal) that it left.
//!
//! When a record is on disk, so are the bytes that it tells of. What is done here is the same when it is done twice, so that an end in the
//! middle of it does no harm; the journal goes when all is durable. Records of sketches that cannot be read now stay, for the union in
//! which they can.

use crate::Union;
use crate::bitmap::file_bytes;
use crate::format::{Cause, Origin, SketchRecord};
use crate::journal::{self, Change, LEFT, RECORD_BYTES};
use crate::marks;
use crate::sketch::{BLOCK, Sketch};
use crate::work::{DIRECTORY, list};
use hashbrown::HashMap;
use poolfs_libservice::walk::walk;
use poolfs_libservice::{Branch, Durability, Error, Held, Opened, Result};
use poolfs_types::{Caller, Errno, FileType, NodeId, OpenFlags, SetAttributes, SetTime};
use std::collections::BTreeMap;
use std::ops::Range;

const ROOT: &Caller = &Caller::ROOT;

/// Most bytes of a file that are looked at: no union writes more.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// Records read at once.
const READ_RECORDS: usize = 1024;

/// What the journal says of one sketch.
#[derive(Default)]
struct Said {
    moved: Vec<Range<u64>>,
    in_transit: BTreeMap<u64, Range<usize>>,
}

impl Said {
    fn add(&mut self, change: Change) {
        match change {
            Change::Moved(blocks) => {
                let ended: Vec<u64> = self.in_transit.range(blocks.clone()).map(|(&block, _)| block).collect();
                for block in ended {
                    self.in_transit.remove(&block);
                }
                match self.moved.last_mut() {
                    Some(last) if last.end == blocks.start => last.end = blocks.end,
                    _ => self.moved.push(blocks),
                }
            }
            Change::InTransit(block, new) => {
                self.in_transit.insert(block, new);
            }
        }
    }

    fn changes(&self) -> impl Iterator<Item = Change> {
        let in_transit = self.in_transit.iter().map(|(&block, new)| Change::InTransit(block, new.clone()));
        in_transit.chain(self.moved.iter().cloned().map(Change::Moved))
    }
}

type Journals = HashMap<[u8; 16], Said>;

/// The generations whose files are there, oldest first.
pub(crate) fn generations(upper: &Branch, top: NodeId) -> Result<Vec<u64>> {
    let names = list(upper, top)?;
    let mut found: Vec<u64> = names.iter().filter_map(|(name, _)| journal::generation_of(name)).collect();
    found.sort_unstable();
    Ok(found)
}

fn read(upper: &Branch, top: NodeId, generation: u64, journals: &mut Journals) -> Result<()> {
    let Some((held, attributes)) = crate::work::find(upper, top, journal::journal_name(generation).as_bytes())? else {
        return Ok(());
    };
    if attributes.file_type != FileType::Regular {
        return Err(Error::new(Errno::EIO, format!("{} is no file", journal::journal_name(generation))));
    }
    let file = Opened::file(upper, ROOT, held.node(), OpenFlags::READ_ONLY)?;
    let mut buffer = vec![0; READ_RECORDS * RECORD_BYTES];
    let mut offset = 0;
    while offset < FILE_BYTES_MAX {
        let count = file.read_full(offset, &mut buffer)?;
        let mut records = buffer[..count].as_chunks::<RECORD_BYTES>().0.iter();
        if offset == 0 {
            let Some(header) = records.next() else { return Ok(()) };
            if !journal::check_header(generation, header).map_err(|cause| Error::new(Errno::EIO, cause))? {
                return Ok(());
            }
        }
        for record in records {
            // What follows was never told of.
            let Some((id, change)) = Change::decode(record) else { return Ok(()) };
            journals.entry(id).or_default().add(change);
        }
        if count < buffer.len() {
            break;
        }
        offset += count as u64;
    }
    Ok(())
}

/// Whether nothing was ever written to the file of a generation: its service did not leave it, but a power cut.
pub(crate) fn is_empty(upper: &Branch, top: NodeId, generation: u64) -> Result<bool> {
    let name = journal::journal_name(generation);
    let Some((held, attributes)) = crate::work::find(upper, top, name.as_bytes())? else { return Ok(true) };
    if attributes.file_type != FileType::Regular {
        return Ok(false);
    }
    let file = Opened::file(upper, ROOT, held.node(), OpenFlags::READ_ONLY)?;
    let mut header = [0; RECORD_BYTES];
    let _ = file.read_full(0, &mut header)?;
    Ok(header == [0; RECORD_BYTES])
}

impl Union {
    /// Makes good what a journal says, if there is one.
    pub(crate) fn replay(&self) -> Result<()> {
        let (upper, top) = (&self.work.upper, self.work.top.node());
        let generations = generations(upper, top)?;
        if generations.is_empty() {
            return Ok(());
        }
        let mut journals = Journals::new();
        for &generation in &generations {
            read(upper, top, generation, &mut journals)?;
        }
        let left = if journals.is_empty() { Vec::new() } else { self.replay_sketches(&mut journals)? };
        upper.sync()?;
        self.keep(&left)?;
        for generation in generations.into_iter().filter(|&generation| generation != LEFT || left.is_empty()) {
            journal::remove(upper, top, generation)?;
        }
        self.work.sync_directory(top)
    }

    /// The records of those that cannot be read now.
    fn replay_sketches(&self, journals: &mut Journals) -> Result<Vec<([u8; 16], Said)>> {
        let mut left = Vec::new();
        let mut count = 0u64;
        let root = Held::new(&self.work.upper, NodeId::ROOT);
        walk(&self.work.upper, root, b"", &mut |path, visited| {
            if path == DIRECTORY {
                return Ok(false);
            }
            // What cannot be looked at has been told of by the check that came before.
            let Ok((held, attributes)) = visited else { return Ok(true) };
            if attributes.file_type != FileType::Regular || journals.is_empty() {
                return Ok(true);
            }
            let Some(record) = self.record_of(held)? else { return Ok(true) };
            let Some(said) = journals.remove(&record.id) else { return Ok(true) };
            count += 1;
            let made_good = match self.replay_sketch(held, record, &said) {
                Err(error) if error == Errno::EIO => Err(error.to_string()),
                result => result?,
            };
            if let Err(cause) = made_good {
                let path = path.escape_ascii();
                tracing::error!(%path, cause, "what a service had accepted before it died waits: the file cannot be read");
                left.push((record.id, said));
            }
            Ok(true)
        })?;
        tracing::info!(sketches = count, left = left.len(), "what a service had accepted before it died is in order");
        Ok(left)
    }

    fn record_of(&self, held: &Held) -> Result<Option<SketchRecord>> {
        match self.work.upper.getxattr(ROOT, held.node(), marks::SKETCH) {
            Ok(value) => Ok(SketchRecord::decode(&value).ok()),
            Err(error) if error == Errno::ENODATA || error == Errno::EOPNOTSUPP => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn replay_sketch(&self, held: &Held, record: SketchRecord, said: &Said) -> Result<std::result::Result<(), Cause>> {
        let upper = &self.work.upper;
        let origin = match Origin::decode(&upper.getxattr(ROOT, held.node(), marks::ORIGIN)?) {
            Ok(origin) => origin,
            Err(cause) => return Ok(Err(cause)),
        };
        let bitmap_bytes = file_bytes(origin.size);
        let mut sketch = Sketch::new(record, origin);
        if sketch.is_truncating() {
            self.finish_truncation(held, &mut sketch.record)?;
        }
        let mut map = match self.load_map(&sketch)? {
            Ok(map) => map,
            Err(cause) => return Ok(Err(cause)),
        };
        let end = sketch.lower_blocks();
        let before = upper.getattr(ROOT, held.node())?;
        let in_transit = said.in_transit.iter().filter(|(block, _)| **block < end);
        let in_transit: Vec<_> = in_transit.filter(|(block, _)| !map.bitmap.moved(**block)).collect();
        if !in_transit.is_empty() {
            let lower =
                Opened::file(&self.lowers[map.lower.layer].layer, ROOT, map.lower.held.node(), OpenFlags::READ_ONLY)?;
            let file = Opened::file(upper, ROOT, held.node(), OpenFlags::READ_WRITE)?;
            let [mut whole, mut written] = [[0; BLOCK as usize]; 2];
            for &(&block, new) in &in_transit {
                let (below, above) =
                    (lower.read_full(block * BLOCK, &mut whole)?, file.read_full(block * BLOCK, &mut written)?);
                if below < whole.len() || above < written.len() {
                    return Ok(Err(format!("block {block}, which was in transit, is not whole")));
                }
                whole[new.clone()].copy_from_slice(&written[new.clone()]);
                file.write_full(block * BLOCK, &whole)?;
            }
            let modified = Some(SetTime::At(before.modified));
            let times = SetAttributes { modified, ..SetAttributes::default() };
            upper.setattr(ROOT, held.node(), &times, None)?;
        }
        let moved = said.moved.iter().cloned().chain(in_transit.iter().map(|&(&block, _)| block..block + 1));
        for blocks in moved {
            map.bitmap.set(blocks.start.min(end)..blocks.end.min(end));
        }
        let sectors = map.bitmap.take_dirty(&record.id);
        let first = !record.bitmap_durable;
        let data = Opened::file(upper, ROOT, held.node(), OpenFlags::READ_ONLY)?;
        upper.fsync(ROOT, data.id(), Durability::All)?;
        self.write_sectors(&record.id, &sectors, first, bitmap_bytes)?;
        if first && !sectors.is_empty() {
            let record = SketchRecord { bitmap_durable: true, ..sketch.record };
            marks::set(&**upper, held.node(), marks::SKETCH, &record.encode())?;
        }
        Ok(Ok(()))
    }

    /// Stores the records of sketches that cannot be read now.
    fn keep(&self, left: &[([u8; 16], Said)]) -> Result<()> {
        if left.is_empty() {
            return Ok(());
        }
        let (upper, top) = (&self.work.upper, self.work.top.node());
        let temporary = self.work.temporary();
        let name = poolfs_types::Name::new(&temporary)?;
        let (entry, handle) = upper.create(ROOT, self.work.work.node(), name, 0o600, OpenFlags::READ_WRITE)?;
        drop(Held::new(upper, entry.node));
        let file = Opened::new(upper, handle);
        let records = left.iter().flat_map(|(id, said)| said.changes().flat_map(|change| change.encode(id)));
        let bytes: Vec<u8> = std::iter::once(journal::header(LEFT)).chain(records).flatten().collect();
        file.write_full(0, &bytes)?;
        upper.fsync(ROOT, file.id(), Durability::All)?;
        let left = journal::journal_name(LEFT);
        let left = poolfs_types::Name::new(left.as_bytes())?;
        upper.rename(ROOT, self.work.work.node(), name, top, left, poolfs_types::RenameFlags::empty())?;
        self.work.sync_directory(top)
    }
}
