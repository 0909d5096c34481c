//! The journal: a union's state of its sketches that is ahead of the disk, stored where it survives the death of the service.
//!
//! **What it is for.** Which blocks are in transit, and which have moved since their bitmap was written, is otherwise in memory
//! only. For each such change a record is appended to a file of the work directory, after the bytes are in the upper file and
//! before the change is answered. The file is on hold: it is not on disk while the service lives, so after a power cut there is
//! none. Where the layer below survives the service's death, what it held back reaches the disk after all else is durable there:
//! a record on disk says that its bytes are, too. [`Union::open`](crate::Union::open) replays the journal that it finds
//! ([`replay`](crate::replay)).
//!
//! The first write of a file that is copied up later ([`deferred`](crate::deferred)) is recorded whole, with the path of its
//! file.
//!
//! **Outdated records.** A first write is outdated when its file has an upper file or does not exist any more. That a block has
//! moved stays true: the bitmap is monotone. That a block is in transit is outdated by a later record that says it has moved;
//! nothing else ends a transit, except truncating the file before the block. A record that cannot be appended therefore makes all
//! others void.
//!
//! **Generations.** When a file is full, or some time has passed, the next generation begins. The sketches with records in the
//! last one are flushed, and the file is removed. Whoever finds both generations full ends the last one before it goes on; until
//! then a file may become twice as long. That leaves space for operations that have begun and are recorded again when they end:
//! blocks in transit ([`Journal::transit_blocks_max`]) and first writes, whose completion takes a fraction of their own record.
//! While both generations are full, nothing of that kind begins ([`Journal::has_room`]): each write adds one record, and its
//! writer then sees that they are full.

use crate::first_write::FirstWrite;
use crate::format::DIRECTORY;
use crate::journal_records::{FirstWriteHead, RECORD_BYTES, header, journal_name};
use crate::sketch::Sketch;
use crate::sync::lock;
use crate::upper_names::find;
use hashbrown::HashSet;
use poolfs_libservice::{Branch, Error, Held, Opened, Result};
use poolfs_types::{AllocateMode, Caller, Errno, FileSystemStatistics, Name, NodeId, OpenFlags};
use std::sync::Mutex;
use std::time::{Duration, Instant};

const ROOT: &Caller = &Caller::ROOT;

/// After there was no memory for a journal, none is begun for so long.
const PAUSE: Duration = Duration::from_secs(5);
/// Bounds of [`Journal::left_bytes_max`].
const LEFT_BYTES_MIN: u64 = 4 << 20;
const LEFT_BYTES_MAX: u64 = 192 << 20;
/// A branch with less free room than this gives some to a journal when its file is made: that comes to disk when the branch may be full.
const SCARCE_BYTES: u64 = 64 << 20;
/// The part of the free room that it gives: a record for each block of 4 KiB that moves there, and more for some.
const ROOM_SHARE: u64 = 64;
/// Makes the file of a generation.
pub(crate) fn make(upper: &Branch, top: NodeId, generation: u64) -> Result<Opened> {
    let name = journal_name(generation);
    let (entry, handle) = upper.create(ROOT, top, Name::new(name.as_bytes())?, 0o600, OpenFlags::READ_WRITE)?;
    drop(Held::new(upper, entry.node));
    Ok(Opened::new(upper, handle))
}

/// Removes the file of a generation, if it is there.
pub(crate) fn remove(upper: &Branch, top: NodeId, generation: u64) -> Result<()> {
    match upper.unlink(ROOT, top, Name::new(journal_name(generation).as_bytes())?) {
        Err(error) if error != Errno::ENOENT => Err(error),
        _ => Ok(()),
    }
}

/// A file, and the sketches with records in it.
struct Generation {
    number: u64,
    file: Opened,
    end: u64,
    nodes: HashSet<NodeId>,
}

#[derive(Default)]
struct Generations {
    current: Option<Generation>,
    /// The one before, until its sketches are on disk.
    last: Option<Generation>,
    /// How many there were.
    made: u64,
    /// The current one has begun because the last was full, which nobody has been told of.
    has_begun: bool,
    /// When there was no memory to hold a further one back.
    refused: Option<Instant>,
}

impl Generations {
    /// Whether there was none a moment ago: whoever asks again waits for it in vain.
    fn is_refused(&self) -> bool {
        self.refused.is_some_and(|refused| refused.elapsed() < PAUSE)
    }

    /// Bytes of the generation that is appended to, if none can begin after it.
    fn filled(&self) -> u64 {
        match (&self.last, &self.current) {
            (Some(_), Some(current)) => current.end,
            // What does not fit into the current one begins the next.
            _ => RECORD_BYTES as u64,
        }
    }
}

/// How full a journal is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    /// There is room.
    Headroom,
    /// A generation has just become full, and the next has begun.
    Begun,
    /// The next is full, too, before the last has ended.
    Full,
}

/// Which generation is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// one that is full
    Full,
    /// the oldest there is
    Any,
}

/// The journal of a union.
pub(crate) struct Journal {
    upper: Branch,
    top: Held,
    /// Most bytes of a generation; zero: there is no journal.
    bytes_max: u64,
    generations: Mutex<Generations>,
}

impl Journal {
    /// That of the union over an upper branch, which has a work directory.
    pub fn new(upper: &Branch, bytes_max: u64) -> Result<Self> {
        let (top, _) = find(upper, NodeId::ROOT, DIRECTORY)?.ok_or_else(|| Error::from(Errno::EIO))?;
        Ok(Journal { upper: upper.clone(), top, bytes_max, generations: Mutex::default() })
    }

    /// Records what has changed of a sketch, whose lock is held.
    ///
    /// # Errors
    /// `EIO` when a record could not be appended and what was recorded before could not be made void.
    pub fn record(&self, node: NodeId, sketch: &mut Sketch) -> Result<()> {
        let changes = std::mem::take(&mut sketch.unrecorded);
        if self.bytes_max == 0 || changes.is_empty() {
            return Ok(());
        }
        let records: Vec<u8> = changes.iter().flat_map(|change| change.encode(&sketch.record.id)).flatten().collect();
        self.put(&mut lock(&self.generations), node, &records)
    }

    /// Records the first write of a file that is copied up later. Says whether it may be: not if the journal has no room for it.
    ///
    /// # Errors
    /// As of [`Self::record`].
    pub fn note_first_write(&self, node: NodeId, first: &FirstWrite) -> Result<bool> {
        if self.bytes_max == 0 {
            return Ok(true);
        }
        let records = FirstWriteHead::records(first);
        let mut generations = lock(&self.generations);
        if generations.filled() + records.len() as u64 > self.bytes_max {
            return Ok(false);
        }
        self.put(&mut generations, node, &records).map(|()| true)
    }

    /// Most bytes of all files of a journal that another union left, and of what is kept of them in memory: a multiple of what a union with
    /// as much memory leaves, and as much again that waits.
    pub fn left_bytes_max(&self) -> u64 {
        match self.bytes_max {
            0 => LEFT_BYTES_MAX,
            bytes_max => bytes_max.saturating_mul(16).clamp(LEFT_BYTES_MIN, LEFT_BYTES_MAX),
        }
    }

    /// Whether more may be begun that has to be recorded again when it ends.
    pub fn has_room(&self) -> bool {
        self.bytes_max == 0 || lock(&self.generations).filled() < self.bytes_max
    }

    /// Most blocks in transit for whose completion a journal of so many bytes a generation has room when it is full: a quarter of it, because
    /// others need room as well.
    pub fn transit_blocks_max(bytes_max: u64) -> usize {
        if bytes_max == 0 {
            return usize::MAX;
        }
        usize::try_from(bytes_max / RECORD_BYTES as u64 / 4).unwrap_or(usize::MAX)
    }

    fn put(&self, generations: &mut Generations, node: NodeId, records: &[u8]) -> Result<()> {
        let is_told = generations.is_refused();
        let Err(error) = self.append(generations, node, records) else { return Ok(()) };
        if !is_told {
            tracing::warn!(%error, "what is written now does not outlive the service: it could not be recorded");
        }
        let Generations { current, last, .. } = generations;
        for generation in [current, last] {
            if let Some(void) = generation {
                remove(&self.upper, self.top.node(), void.number)
                    .map_err(|error| Error::new(Errno::EIO, format!("a journal that is out of date stays: {error}")))?;
                *generation = None;
            }
        }
        Ok(())
    }

    fn append(&self, generations: &mut Generations, node: NodeId, records: &[u8]) -> Result<()> {
        let length = records.len() as u64;
        let is_full = |generation: &Generation| generation.end + length > self.bytes_max;
        if generations.last.is_none() && generations.current.as_ref().is_some_and(is_full) {
            generations.last = generations.current.take();
            generations.has_begun = true;
        }
        if generations.current.is_none() {
            if generations.is_refused() {
                return Err(Error::new(Errno::ENOSPC, "there was no memory for a journal a moment ago"));
            }
            // A file that was found may have any number.
            let number = generations.made.checked_add(1).ok_or_else(|| Error::from(Errno::EOVERFLOW))?;
            generations.made = number;
            let file = make(&self.upper, self.top.node(), number)?;
            let end = RECORD_BYTES as u64;
            // Whoever appends when it is full ends the one before; until then others append some more.
            self.reserve(&file);
            if let Err(error) = self.upper.hold(ROOT, file.id(), 0..self.bytes_max * 2, true) {
                remove(&self.upper, self.top.node(), number)?;
                generations.refused = Some(Instant::now());
                return Err(error);
            }
            generations.current = Some(Generation { number, file, end, nodes: HashSet::new() });
            let current = generations.current.as_ref().map(|current| &current.file);
            current.map_or(Ok(()), |file| file.write_full(0, &header(number)))?;
        }
        let Some(current) = &mut generations.current else { return Err(Errno::EIO.into()) };
        if current.end + length > self.bytes_max * 2 {
            // It would not be held back.
            return Err(Error::new(Errno::EFBIG, "the journal is full"));
        }
        current.file.write_full(current.end, records)?;
        current.end += length;
        current.nodes.insert(node);
        Ok(())
    }

    /// Gives a new file room in the branch. Where there is none any more, nothing of what would be recorded finds room, either.
    fn reserve(&self, file: &Opened) {
        let free_bytes = |found: FileSystemStatistics| found.blocks_available.saturating_mul(found.block_size.into());
        let reserved = self.upper.statfs(ROOT, NodeId::ROOT).and_then(|found| {
            let free = free_bytes(found);
            let room = (free / ROOM_SHARE).min(self.bytes_max * 2);
            if room == 0 || free > SCARCE_BYTES {
                return Ok(());
            }
            self.upper.fallocate(ROOT, file.id(), AllocateMode::KEEP_SIZE, 0, room)
        });
        if let Err(error) = reserved {
            tracing::debug!(%error, "no room is kept for a journal");
        }
    }

    /// Has the generations begin after those whose files another union has left.
    pub fn begin_after(&self, generation: u64) {
        let mut generations = lock(&self.generations);
        generations.made = generations.made.max(generation);
    }

    /// How full it is; that a generation has begun is told once.
    pub fn fill(&self) -> Fill {
        let mut generations = lock(&self.generations);
        let begun = std::mem::take(&mut generations.has_begun);
        let is_full = generations.current.as_ref().is_some_and(|current| current.end >= self.bytes_max);
        match generations.last {
            Some(_) if is_full => Fill::Full,
            Some(_) if begun => Fill::Begun,
            _ => Fill::Headroom,
        }
    }

    /// The generation whose sketches have to be brought to disk so that it can end, and these.
    pub fn ending(&self, ending: Ending) -> Option<(u64, Vec<NodeId>)> {
        let mut generations = lock(&self.generations);
        if generations.last.is_none() && ending == Ending::Any {
            generations.last = generations.current.take();
        }
        let last = generations.last.as_ref()?;
        Some((last.number, last.nodes.iter().copied().collect()))
    }

    /// Its sketches are on disk.
    pub fn end(&self, generation: u64) -> Result<()> {
        let mut generations = lock(&self.generations);
        if generations.last.as_ref().is_some_and(|last| last.number == generation) {
            remove(&self.upper, self.top.node(), generation)?;
            generations.last = None;
        }
        Ok(())
    }

    /// All sketches are on disk, and nobody writes any more.
    pub fn end_all(&self) -> Result<()> {
        while let Some((generation, _)) = self.ending(Ending::Any) {
            self.end(generation)?;
        }
        Ok(())
    }
}
