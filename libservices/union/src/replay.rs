//! Journal replay: applies the records of the [journal](crate::journal) that a dead service has left, so that what it had
//! accepted is not lost.
//!
//! When a record is on disk, so are the bytes that it names. Replay is idempotent, so it may be interrupted at any point; the
//! journal is removed when all is durable. Records of sketches that cannot be read now stay, for the union that can read them.
//! Records of sketches whose bytes cannot reach the disk now stay on hold, in a file of their own, which reaches the disk only
//! after these bytes, when the union ends.

use crate::Union;
use crate::bitmap::file_bytes;
use crate::branch::LowerNode;
use crate::copyup::Bytes;
use crate::first_write::FirstWrite;
use crate::format::BLOCK;
use crate::format::{Cause, Origin, SketchRecord, array};
use crate::journal;
use crate::journal_records;
use crate::journal_records::{Change, FirstWriteHead, LEFT, RECORD_BYTES};
use crate::journal_records::{generations, too_much};
use crate::marks;
use crate::node::{Content, Node};
use crate::resolve::Referenced;
use crate::sketch::Sketch;
use crate::waiting::Waiting;
use hashbrown::{HashMap, HashSet};
use poolfs_libservice::{Branch, Durability, Error, Held, Opened, Result};
use poolfs_types::{Attributes, Caller, Errno, FileType, Name, NodeId, OpenFlags, RenameFlags, SetAttributes, SetTime};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

const ROOT: &Caller = &Caller::ROOT;

/// What a record and a sketch that a journal names take in memory at most.
const RECORD_COST: u64 = 64;
const SKETCH_COST: u64 = 256;

/// Records read at once.
const READ_RECORDS: usize = 1024;

/// What the journal says of one sketch.
#[derive(Default)]
struct Said {
    moved: Vec<Range<u64>>,
    in_transit: BTreeMap<u64, Range<usize>>,
}

impl Said {
    /// Adds a change; what that takes of memory.
    fn add(&mut self, change: Change) -> u64 {
        match change {
            Change::Moved(blocks) => {
                let ended: Vec<u64> = self.in_transit.range(blocks.clone()).map(|(&block, _)| block).collect();
                for block in ended {
                    self.in_transit.remove(&block);
                }
                match self.moved.last_mut() {
                    Some(last) if last.end == blocks.start => {
                        last.end = blocks.end;
                        return 0;
                    }
                    _ => self.moved.push(blocks),
                }
            }
            Change::InTransit(block, new) => {
                self.in_transit.insert(block, new);
            }
        }
        RECORD_COST
    }

    fn changes(&self) -> impl Iterator<Item = Change> {
        let in_transit = self.in_transit.iter().map(|(&block, new)| Change::InTransit(block, new.clone()));
        in_transit.chain(self.moved.iter().cloned().map(Change::Moved))
    }
}

/// What the files of a journal say.
#[derive(Default)]
struct Journals {
    sketches: HashMap<[u8; 16], Said>,
    first_writes: Vec<FirstWrite>,
    /// what has been read, and what is kept of it in memory
    bytes: u64,
    cost: u64,
}

impl Journals {
    fn add(&mut self, id: [u8; 16], change: Change) {
        let before = self.sketches.len();
        self.cost += self.sketches.entry(id).or_default().add(change);
        self.cost += (self.sketches.len() - before) as u64 * SKETCH_COST;
    }
}

fn cost_of_first_write(first: &FirstWrite) -> u64 {
    (first.path.len() + first.origin.path.len() + first.data.len()) as u64 + SKETCH_COST
}

/// Why the records of a sketch are not made good.
enum Hindrance {
    Unreadable(Cause),
    /// Its bytes are not on disk.
    NotDurable(Cause),
}

fn is_of_one_file(error: &Error) -> bool {
    *error == Errno::EIO || *error == Errno::ENOMEM
}

/// What could not be made good.
#[derive(Default)]
struct Left {
    sketches: Vec<([u8; 16], Said)>,
    /// Those of them whose bytes are not on disk.
    not_durable: Vec<([u8; 16], Said)>,
    first_writes: Vec<FirstWrite>,
}

fn records_of((id, said): &([u8; 16], Said)) -> Vec<u8> {
    said.changes().flat_map(|change| change.encode(id)).flatten().collect()
}

impl Left {
    /// Whether nothing of it can be on disk now.
    fn is_empty(&self) -> bool {
        self.sketches.is_empty() && self.first_writes.is_empty()
    }

    /// What it takes in memory when it is read.
    fn cost(&self) -> u64 {
        let of_sketch = |said: &Said| SKETCH_COST + (said.moved.len() + said.in_transit.len()) as u64 * RECORD_COST;
        let sketches: u64 = self.sketches.iter().map(|(_, said)| of_sketch(said)).sum();
        sketches + self.first_writes.iter().map(cost_of_first_write).sum::<u64>()
    }

    /// The files that it is about.
    fn waiting(&self) -> Waiting {
        let mut waiting = Waiting::default();
        self.sketches.iter().chain(&self.not_durable).for_each(|&(id, _)| waiting.add_sketch(id));
        self.first_writes.iter().for_each(|first| waiting.add_first_write(first));
        waiting
    }

    /// The file that says it.
    fn journal(&self) -> Vec<u8> {
        let mut bytes = journal_records::header(LEFT).to_vec();
        bytes.extend(self.sketches.iter().flat_map(records_of));
        bytes.extend(self.first_writes.iter().flat_map(FirstWriteHead::records));
        bytes
    }
}

/// The records of a file, one after the other.
struct Records {
    file: Opened,
    buffer: Vec<u8>,
    /// bytes of the buffer that were read, and those of them that were taken
    filled: usize,
    taken: usize,
    offset: u64,
}

impl Records {
    fn new(file: Opened) -> Self {
        Records { file, buffer: vec![0; READ_RECORDS * RECORD_BYTES], filled: 0, taken: 0, offset: 0 }
    }

    /// The next record; nothing at the end.
    fn next(&mut self) -> Result<Option<[u8; RECORD_BYTES]>> {
        if self.taken + RECORD_BYTES > self.filled {
            if self.offset > 0 && self.filled < self.buffer.len() {
                return Ok(None);
            }
            self.filled = self.file.read_full(self.offset, &mut self.buffer)?;
            self.offset += self.filled as u64;
            self.taken = 0;
        }
        let record =
            self.buffer[..self.filled].get(self.taken..self.taken + RECORD_BYTES).map(|record| array(record, 0));
        self.taken += RECORD_BYTES;
        Ok(record)
    }

    /// So many records, if they are there.
    fn take(&mut self, count: usize) -> Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        for _ in 0..count {
            let Some(record) = self.next()? else { return Ok(None) };
            bytes.extend_from_slice(&record);
        }
        Ok(Some(bytes))
    }
}

/// Reads a file, as long as all together have at most so many bytes, and take as much in memory.
fn read(upper: &Branch, top: NodeId, generation: u64, most: u64, journals: &mut Journals) -> Result<()> {
    let Some((held, attributes)) =
        crate::upper_names::find(upper, top, journal_records::journal_name(generation).as_bytes())?
    else {
        return Ok(());
    };
    if attributes.file_type != FileType::Regular {
        return Err(Error::new(Errno::EIO, format!("{} is no file", journal_records::journal_name(generation))));
    }
    let mut records = Records::new(Opened::file(upper, ROOT, held.node(), OpenFlags::READ_ONLY)?);
    let Some(header) = records.next()? else { return Ok(()) };
    if !journal_records::check_header(generation, &header).map_err(|cause| Error::new(Errno::EIO, cause))? {
        return Ok(());
    }
    while let Some(record) = records.next()? {
        if journals.bytes + records.offset > most || journals.cost > most {
            return Err(too_much("records"));
        }
        if let Some((id, change)) = Change::decode(&record) {
            journals.add(id, change);
            continue;
        }
        // What follows what cannot be read was never told of.
        let Some(head) = FirstWriteHead::decode(&record) else { break };
        let following = records.take(head.following())?;
        let Some(first) = following.and_then(|following| head.first_write(&following)) else { break };
        journals.cost += cost_of_first_write(&first);
        journals.first_writes.push(first);
    }
    journals.bytes += records.offset;
    Ok(())
}

/// Whether nothing was ever written to the file of a generation: its service did not leave it, but a power cut.
pub(crate) fn is_empty(upper: &Branch, top: NodeId, generation: u64) -> Result<bool> {
    let name = journal_records::journal_name(generation);
    let Some((held, attributes)) = crate::upper_names::find(upper, top, name.as_bytes())? else { return Ok(true) };
    if attributes.file_type != FileType::Regular {
        return Ok(false);
    }
    let file = Opened::file(upper, ROOT, held.node(), OpenFlags::READ_ONLY)?;
    let mut header = [0; RECORD_BYTES];
    let _ = file.read_full(0, &mut header)?;
    Ok(header == [0; RECORD_BYTES])
}

/// There is no room in the branch. Who has it mounted can make some.
fn is_no_room(error: &Error) -> bool {
    *error == Errno::ENOSPC || *error == Errno::EDQUOT
}

/// What cannot be done for one file now waits and is no reason to refuse the others: its bytes, or their map, cannot be read, or there is no room for it.
fn of_one_file(done: Result<std::result::Result<(), Cause>>) -> Result<std::result::Result<(), Cause>> {
    match done {
        Err(error) if is_of_one_file(&error) || is_no_room(&error) => Ok(Err(error.to_string())),
        done => done,
    }
}

impl Union {
    /// Makes good what a journal says, if there is one.
    pub(crate) fn replay(&self) -> Result<()> {
        let (upper, top) = (&self.work.upper, self.work.top.node());
        let generations = generations(upper, top)?;
        if generations.is_empty() {
            return Ok(());
        }
        let mut journals = Journals::default();
        for &generation in &generations {
            read(upper, top, generation, self.journal.left_bytes_max(), &mut journals)?;
        }
        let not_durable = generations.last().copied().unwrap_or_default().saturating_add(1);
        // Completing a first write may record what it does.
        self.journal.begin_after(not_durable);
        let mut left = Left::default();
        if !journals.sketches.is_empty() {
            self.replay_sketches(&mut journals.sketches, &mut left)?;
        }
        let mut waiting = Waiting::default();
        for first in journals.first_writes {
            // Of one file one is made good after the other.
            let done = if waiting.has(&first) {
                Err("an earlier one waits".to_owned())
            } else {
                of_one_file(self.replay_first_write(&first))?
            };
            if let Err(cause) = done {
                let path = first.path.escape_ascii();
                tracing::error!(%path, cause, "what a service had accepted before it died waits: the file cannot be copied up");
                waiting.add_first_write(&first);
                left.first_writes.push(first);
            }
        }
        match upper.sync() {
            // What is said here of these files stays on hold, or is of none.
            Err(error) if error.is_of_files() && is_of_one_file(&error) => {}
            synced => synced?,
        }
        if !left.is_empty() || !left.not_durable.is_empty() {
            let _ = self.waiting.set(left.waiting());
        }
        match self.keep(&left) {
            // The files that say it stay, with what is in order by now, which is nothing to whoever reads it again.
            Err(error) if is_no_room(&error) && left.not_durable.is_empty() => {
                tracing::warn!("no room to store apart what waits: the journals of the dead service stay");
                return Ok(());
            }
            kept => kept?,
        }
        if !left.not_durable.is_empty() {
            let _ = self.behind.set(self.hold_back(not_durable, &left.not_durable)?);
        }
        for generation in generations.into_iter().filter(|&generation| generation != LEFT || left.is_empty()) {
            journal::remove(upper, top, generation)?;
        }
        self.work.sync_directory(top)
    }

    /// What of them stays goes to `left`.
    fn replay_sketches(&self, journals: &mut HashMap<[u8; 16], Said>, left: &mut Left) -> Result<()> {
        let mut count = 0u64;
        let mut strangers = HashSet::new();
        let mut is_read = true;
        let is_seen = self.work.each_file(&mut |path, held, attributes| {
            if journals.is_empty() {
                return Ok(());
            }
            let record = match self.work.record_of(held) {
                Err(error) if error == Errno::EIO => {
                    is_read = false;
                    return Ok(());
                }
                record => record?,
            };
            let Some(record) = record.filter(|record| journals.contains_key(&record.id)) else { return Ok(()) };
            if self.work.stranger(&record, attributes.inode).is_some() {
                strangers.insert(record.id);
                return Ok(());
            }
            let Some(said) = journals.remove(&record.id) else { return Ok(()) };
            count += 1;
            let done = match self.replay_sketch(held, record, &said) {
                Err(error) if is_of_one_file(&error) || is_no_room(&error) => {
                    Err(Hindrance::Unreadable(error.to_string()))
                }
                done => done?,
            };
            let path = path.escape_ascii();
            match done {
                Ok(()) => {}
                Err(Hindrance::Unreadable(cause)) => {
                    tracing::error!(%path, cause, "what a service had accepted before it died waits: the file cannot be read, or has no room");
                    left.sketches.push((record.id, said));
                }
                Err(Hindrance::NotDurable(cause)) => {
                    tracing::error!(%path, cause, "what a service had accepted before it died waits: the file cannot be written");
                    left.not_durable.push((record.id, said));
                }
            }
            Ok(())
        })?;
        // What cannot be looked at has been told of by the check that came before, and what has another's bitmap when that was found.
        let is_partly_unseen = !(is_seen && is_read);
        left.sketches.extend(journals.extract_if(|id, _| strangers.contains(id)));
        if is_partly_unseen && !journals.is_empty() {
            let files = journals.len();
            tracing::error!(
                files,
                "what a service had accepted before it died waits: not all of the branch can be read"
            );
            left.sketches.extend(journals.drain());
        }
        let left = left.sketches.len() + left.not_durable.len();
        tracing::info!(sketches = count, left, "what a service had accepted before it died is in order");
        Ok(())
    }

    /// Copies up a file whose first write is recorded, unless that was done before: then it has an upper file, or is not where it was.
    fn replay_first_write(&self, first: &FirstWrite) -> Result<std::result::Result<(), Cause>> {
        let (lower, attributes) = match self.lower_of(&first.origin)? {
            Ok(lower) => lower,
            Err(cause) => return Ok(Err(cause)),
        };
        let mut found: Option<Referenced<'_>> = None;
        for name in first.path.split(|&byte| byte == b'/') {
            let parent = match &found {
                None => self.node(NodeId::ROOT)?,
                Some(found) => Arc::clone(&**found),
            };
            // A path of another branch, or one that was no path ever, leads nowhere.
            let child =
                if parent.is_directory() && Name::new(name).is_ok() { self.child(&parent, name)? } else { None };
            let Some(child) = child else { return Ok(Ok(())) };
            found = Some(child);
        }
        let Some(node) = found.filter(|node| node.file_type == FileType::Regular) else { return Ok(Ok(())) };
        let begun = match node.upper() {
            Some(held) => self.repeat_first_write(&node, &held, first),
            None => self.begin_first_write(&node, (&lower, &attributes), first),
        };
        begun.and_then(|_| self.flush_sketch(&node, Durability::All)).map(Ok)
    }

    fn begin_first_write(
        &self,
        node: &Arc<Node>,
        (lower, attributes): (&LowerNode, &Attributes),
        first: &FirstWrite,
    ) -> Result<()> {
        {
            let mut state = node.write();
            let known = state.lowers.first();
            // Before names change, all that waits is copied up: another file has been moved there since.
            if known.is_some_and(|known| known.path.to_vec() != lower.path.to_vec()) {
                return Ok(());
            }
            let known = known.map(|known| (known.layer, known.held.node()));
            if known != Some((lower.layer, lower.held.node())) || !matches!(state.content, Content::Plain) {
                return Err(Error::new(Errno::EIO, "its path shows another file"));
            }
            node.changed.show(attributes.changed, first.at);
            state.first_write = Some(Arc::new(first.clone()));
        }
        let copied = self.copy_up(node, Bytes::Sketch);
        node.write().first_write = None;
        copied.map(drop)
    }

    /// A replay that did not come to its end may have left the upper file without what was written.
    fn repeat_first_write(&self, node: &Arc<Node>, held: &Held, first: &FirstWrite) -> Result<()> {
        let mut state = node.write();
        let block = first.offset / BLOCK;
        if !matches!(&state.content, Content::Sketch(sketch) if sketch.record.id == first.id) {
            return Ok(());
        }
        self.load_locked(node, &mut state)?;
        match &state.content {
            Content::Sketch(sketch) if !sketch.all_upper(block..block + 1) => {
                self.put_first_write(node, held, &mut state.content, first)
            }
            _ => Ok(()),
        }
    }

    fn replay_sketch(
        &self,
        held: &Held,
        record: SketchRecord,
        said: &Said,
    ) -> Result<std::result::Result<(), Hindrance>> {
        let upper = &self.work.upper;
        let origin = match Origin::decode(&upper.getxattr(ROOT, held.node(), marks::ORIGIN)?) {
            Ok(origin) => origin,
            Err(cause) => return Ok(Err(Hindrance::Unreadable(cause))),
        };
        let bitmap_bytes = file_bytes(origin.size);
        let mut sketch = Sketch::new(record, origin);
        if sketch.is_truncating() {
            self.finish_truncation(held, &mut sketch.record)?;
        }
        let mut map = match self.load_map(&sketch)? {
            Ok(map) => map,
            Err(cause) => return Ok(Err(Hindrance::Unreadable(cause))),
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
                    let cause = format!("block {block}, which was in transit, is not whole");
                    return Ok(Err(Hindrance::Unreadable(cause)));
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
        match upper.fsync(ROOT, data.id(), Durability::All) {
            Err(error) if is_of_one_file(&error) => return Ok(Err(Hindrance::NotDurable(error.to_string()))),
            synced => synced?,
        }
        self.write_sectors(&record.id, &sectors, first, bitmap_bytes).inspect_err(|_| {
            if first {
                // A bitmap that no record tells of is nobody's when the file is removed.
                let _ = self.work.remove_bitmap(&record.id);
            }
        })?;
        if first && !sectors.is_empty() {
            let record = SketchRecord { bitmap_durable: true, ..sketch.record };
            marks::set(&**upper, held.node(), marks::SKETCH, &record.encode())?;
        }
        Ok(Ok(()))
    }

    /// Stores what cannot be made good now.
    fn keep(&self, left: &Left) -> Result<()> {
        if left.is_empty() {
            return Ok(());
        }
        let bytes = left.journal();
        // The next service leaves some more, and whoever reads both keeps them in memory.
        if left.cost().max(bytes.len() as u64) > self.journal.left_bytes_max() / 2 {
            return Err(too_much("records that wait"));
        }
        let (upper, top) = (&self.work.upper, self.work.top.node());
        let temporary = self.work.temporary();
        let name = Name::new(&temporary)?;
        let (entry, handle) = upper.create(ROOT, self.work.work.node(), name, 0o600, OpenFlags::READ_WRITE)?;
        drop(Held::new(upper, entry.node));
        let file = Opened::new(upper, handle);
        file.write_full(0, &bytes)?;
        upper.fsync(ROOT, file.id(), Durability::All)?;
        let left = journal_records::journal_name(LEFT);
        let left = Name::new(left.as_bytes())?;
        upper.rename(ROOT, self.work.work.node(), name, top, left, RenameFlags::empty())?;
        self.work.sync_directory(top)
    }

    /// Keeps records from the disk, whose bytes are not there.
    fn hold_back(&self, generation: u64, sketches: &[([u8; 16], Said)]) -> Result<Opened> {
        let mut bytes = journal_records::header(generation).to_vec();
        bytes.extend(sketches.iter().flat_map(records_of));
        let upper = &self.work.upper;
        let file = journal::make(upper, self.work.top.node(), generation)?;
        upper.hold(ROOT, file.id(), 0..bytes.len() as u64, true)?;
        file.write_full(0, &bytes)?;
        Ok(file)
    }

    /// Brings those records to disk, after everything else was.
    pub(crate) fn store_behind(&self) -> Result<()> {
        let Some(file) = self.behind.get() else { return Ok(()) };
        let upper = &self.work.upper;
        upper.hold(ROOT, file.id(), 0..u64::MAX, false)?;
        upper.fsync(ROOT, file.id(), Durability::All)?;
        self.work.sync_directory(self.work.top.node())
    }
}
