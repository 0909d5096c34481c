//! The *ledger*: a crash-surviving index of dirty blocks, in a file beside the segments.
//!
//! An entry for each dirty file says which file of which branch it is, where its bytes are, and its size and times; an entry for
//! each chunk with dirty blocks says which these are. The ledger is updated under the lock of the file's state, after the bytes
//! are in the segment and before the change is answered. A block leaves it when it is below, and stored there where it can be
//! found. After a crash it is read by [`CrashRecovery`](crate::CrashRecovery).
//!
//! ```text
//! 8 words:    magic, entries of files, entries of chunks, 0 ...
//! a file:     state (0 free, 1, 3: has blocks on hold), key (2 words), inode, segment (0: none), size,
//!             modified and changed: seconds, nanoseconds
//! a chunk:    blocks (64 bits; 0 free), entry of its file, which chunk of it
//! ```

use crate::blocks::{BLOCK, BlockMap, Chunk};
use crate::segments::SegmentStore;
use crate::state_directory::BranchKey;
use crate::sync::lock;
use hashbrown::HashMap;
use poolfs_ipc::words::Words;
use poolfs_types::Timestamp;
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

pub(crate) const LEDGER_NAME: &str = "ledger";
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"PFLEDGR1");
const HEADER_WORDS: usize = 8;
const FILE_WORDS: usize = 10;
const CHUNK_WORDS: usize = 3;
const USED: u64 = 1;
const HOLDS: u64 = 2;
/// Files of which only the time is dirty, beyond those that have a block of the cache.
const TIMES_MAX: u64 = 1 << 16;

/// How many entries a ledger has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) files: u32,
    pub(crate) chunks: u32,
}

impl Layout {
    /// One that has room for whatever a cache of so many bytes can hold.
    fn for_limit(limit_bytes: u64) -> Self {
        let blocks = limit_bytes / BLOCK + 1;
        let most = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        Self { files: most(blocks + TIMES_MAX), chunks: most(blocks) }
    }

    pub(crate) fn words(self) -> usize {
        self.chunk_at(self.chunks)
    }

    fn file_at(self, slot: u32) -> usize {
        HEADER_WORDS + slot as usize * FILE_WORDS
    }

    fn chunk_at(self, slot: u32) -> usize {
        self.file_at(self.files) + slot as usize * CHUNK_WORDS
    }
}

/// What the entry of a file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileWords {
    pub(crate) key: BranchKey,
    pub(crate) inode: u64,
    pub(crate) segment: u64,
    pub(crate) size: u64,
    pub(crate) modified: Timestamp,
    /// When it was changed last: a file that was made later is another one.
    pub(crate) changed: Timestamp,
    pub(crate) holds: bool,
}

/// What the entry of a chunk says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkWords {
    pub(crate) blocks: u64,
    pub(crate) file: u32,
    pub(crate) index: u64,
}

/// The words, and where in them what stands.
pub(crate) struct Entries {
    words: Words,
    pub(crate) layout: Layout,
}

impl Entries {
    /// Those of a file that was made with a layout.
    pub(crate) fn open(file: &File) -> io::Result<Self> {
        let mut header = [0; HEADER_WORDS * 8];
        file.read_exact_at(&mut header, 0)?;
        let [magic, files, chunks, ..] = *header.as_chunks().0 else { return Err(io::ErrorKind::InvalidData.into()) };
        let count = |word| u32::try_from(u64::from_ne_bytes(word)).map_err(|_| io::ErrorKind::InvalidData);
        let layout = Layout { files: count(files)?, chunks: count(chunks)? };
        if u64::from_ne_bytes(magic) != MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no ledger of this release"));
        }
        Self::map(file, layout)
    }

    fn map(file: &File, layout: Layout) -> io::Result<Self> {
        let words = Words::new(file, layout.words()).map_err(|errno| io::Error::from_raw_os_error(errno.raw()))?;
        Ok(Self { words, layout })
    }

    pub(crate) fn file(&self, slot: u32) -> Option<FileWords> {
        let at = self.layout.file_at(slot);
        let word = |offset: usize| self.words.load(at + offset).unwrap_or(0);
        if slot >= self.layout.files || word(0) & USED == 0 {
            return None;
        }
        let mut key = [0; 16];
        key[..8].copy_from_slice(&word(1).to_ne_bytes());
        key[8..].copy_from_slice(&word(2).to_ne_bytes());
        let time = |at| Timestamp { seconds: word(at).cast_signed(), nanoseconds: word(at + 1) as u32 };
        let (inode, segment, size, holds) = (word(3), word(4), word(5), word(0) & HOLDS != 0);
        Some(FileWords { key, inode, segment, size, modified: time(6), changed: time(8), holds })
    }

    fn set_file(&self, slot: u32, file: &FileWords) {
        let at = self.layout.file_at(slot);
        let [low, high] = *file.key.as_chunks::<8>().0 else { return };
        let times = [file.modified, file.changed];
        let times = times.iter().flat_map(|time| [time.seconds.cast_unsigned(), time.nanoseconds.into()]);
        let state = USED | if file.holds { HOLDS } else { 0 };
        let words = [u64::from_ne_bytes(low), u64::from_ne_bytes(high), file.inode, file.segment, file.size];
        for (offset, word) in words.into_iter().chain(times).enumerate() {
            self.words.store(at + 1 + offset, word);
        }
        self.words.store(at, state);
    }

    pub(crate) fn free_file(&self, slot: u32) {
        self.words.store(self.layout.file_at(slot), 0);
    }

    pub(crate) fn chunk(&self, slot: u32) -> Option<ChunkWords> {
        let at = self.layout.chunk_at(slot);
        let word = |offset: usize| self.words.load(at + offset).unwrap_or(0);
        let (blocks, file) = (word(0), u32::try_from(word(1)).ok()?);
        (slot < self.layout.chunks && blocks != 0).then(|| ChunkWords { blocks, file, index: word(2) })
    }

    fn set_chunk(&self, slot: u32, chunk: &ChunkWords) {
        let at = self.layout.chunk_at(slot);
        self.words.store(at + 1, u64::from(chunk.file));
        self.words.store(at + 2, chunk.index);
        self.words.store(at, chunk.blocks);
    }

    pub(crate) fn set_blocks(&self, slot: u32, blocks: u64) {
        self.words.store(self.layout.chunk_at(slot), blocks);
    }
}

/// Which entries are free.
struct Slots {
    given_back: Vec<u32>,
    next: u32,
    count: u32,
}

impl Slots {
    fn of(count: u32) -> Self {
        Self { given_back: Vec::new(), next: 0, count }
    }

    fn take(&mut self) -> Option<u32> {
        self.given_back.pop().or_else(|| {
            let slot = (self.next < self.count).then_some(self.next)?;
            self.next += 1;
            Some(slot)
        })
    }
}

struct Free {
    files: Slots,
    chunks: Slots,
}

/// The ledger of this process.
pub(crate) struct Ledger {
    entries: Entries,
    free: Mutex<Free>,
    /// Locked: the process that writes it lives.
    _file: File,
}

impl Ledger {
    /// Makes the ledger of a cache of so many bytes in its tmpfs.
    pub(crate) fn new(store: &SegmentStore, limit_bytes: u64) -> io::Result<Arc<Self>> {
        let layout = Layout::for_limit(limit_bytes);
        let file = store.named(LEDGER_NAME)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        file.set_len(layout.words() as u64 * 8)?;
        let mut header = [0; HEADER_WORDS * 8];
        for (word, value) in header.as_chunks_mut().0.iter_mut().zip([MAGIC, layout.files.into(), layout.chunks.into()])
        {
            *word = value.to_ne_bytes();
        }
        file.write_all_at(&header, 0)?;
        let free = Mutex::new(Free { files: Slots::of(layout.files), chunks: Slots::of(layout.chunks) });
        Ok(Arc::new(Self { entries: Entries::map(&file, layout)?, free, _file: file }))
    }

    /// Whether nothing is noted.
    pub(crate) fn is_empty(&self) -> bool {
        let free = lock(&self.free);
        free.files.next as usize == free.files.given_back.len()
    }
}

/// Where the files of one branch are noted, and under which name.
pub(crate) struct Recorder {
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) key: BranchKey,
}

impl Recorder {
    /// Notes what has changed of a file of which something is not settled: in these chunks, and otherwise. `file` is what it is now; which size and
    /// holds the entry shows is decided here.
    pub(crate) fn note(&self, kept: &mut Option<Box<Record>>, file: FileWords, blocks: &BlockMap, changed: &[u64]) {
        let chunks = || changed.iter().map(|&index| (index, blocks.chunk(index)));
        let holds = chunks().any(|(_, chunk)| chunk.is_some_and(|chunk| chunk.held != 0));
        let file = FileWords {
            size: kept.as_ref().and_then(|record| record.cut).unwrap_or(u64::MAX).min(file.size),
            holds: holds || kept.as_ref().is_some_and(|record| record.file.holds),
            ..file
        };
        let is_new = kept.is_none();
        let mut record = match kept.take() {
            Some(record) => record,
            None => match Record::new(self, file) {
                Some(record) => Box::new(record),
                None => return tracing::warn!(inode = file.inode, "no room to note what a death of the service takes"),
            },
        };
        let noted =
            chunks().filter(|&(index, chunk)| !record.note_chunk(index, chunk.map_or(0, Chunk::unsettled))).count()
                == 0;
        if !noted {
            tracing::warn!(inode = file.inode, "no room to note what a death of the service takes");
        }
        if is_new || record.file != file {
            record.ledger.entries.set_file(record.slot, &file);
            record.file = file;
        }
        *kept = Some(record);
    }
}

/// What is noted of one file; given up when dropped.
pub(crate) struct Record {
    ledger: Arc<Ledger>,
    slot: u32,
    file: FileWords,
    /// What the file is being cut to below, if it is.
    cut: Option<u64>,
    chunks: HashMap<u64, u32>,
}

impl Record {
    fn new(recorder: &Recorder, file: FileWords) -> Option<Self> {
        let ledger = Arc::clone(&recorder.ledger);
        let slot = lock(&ledger.free).files.take()?;
        Some(Self { ledger, slot, file, cut: None, chunks: HashMap::new() })
    }

    /// The file is about to be cut below, to this size: after a death in the middle of it the record has it cut, too. Nothing: it is
    /// over.
    pub(crate) fn cut(&mut self, size: Option<u64>) {
        self.cut = size;
    }

    /// Notes which blocks of a chunk are dirty; false when there is no room for it.
    fn note_chunk(&mut self, index: u64, blocks: u64) -> bool {
        let ledger = &self.ledger;
        match self.chunks.get(&index) {
            Some(&slot) if blocks != 0 => ledger.entries.set_blocks(slot, blocks),
            Some(&slot) => {
                ledger.entries.set_blocks(slot, 0);
                self.chunks.remove(&index);
                lock(&ledger.free).chunks.given_back.push(slot);
            }
            None if blocks == 0 => {}
            None => {
                let Some(slot) = lock(&ledger.free).chunks.take() else { return false };
                ledger.entries.set_chunk(slot, &ChunkWords { blocks, file: self.slot, index });
                self.chunks.insert(index, slot);
            }
        }
        true
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let entries = &self.ledger.entries;
        self.chunks.values().for_each(|&slot| entries.set_blocks(slot, 0));
        entries.free_file(self.slot);
        let mut free = lock(&self.ledger.free);
        free.chunks.given_back.extend(self.chunks.values());
        free.files.given_back.push(self.slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_again_until_they_are_given_up() {
        let store = SegmentStore::new(4, 4, None).unwrap();
        let ledger = Ledger::new(&store, 1 << 20).unwrap();
        let recorder = Recorder { ledger: Arc::clone(&ledger), key: [7; 16] };
        let modified = Timestamp { seconds: -5, nanoseconds: 17 };
        let changed = Timestamp { seconds: 1 << 33, nanoseconds: 999_999_999 };
        let file = FileWords { key: [7; 16], inode: 12, segment: 3, size: 5000, modified, changed, holds: true };
        let mut record = Record::new(&recorder, file).unwrap();
        assert_eq!(ledger.entries.file(record.slot), None, "nothing is said before all is known");
        ledger.entries.set_file(record.slot, &file);
        assert!(record.note_chunk(4, 0b101) && record.note_chunk(9, 1) && record.note_chunk(9, 0));
        record.ledger.entries.set_file(record.slot, &FileWords { size: 4096, ..file });
        let found = Entries::open(&ledger._file).unwrap();
        assert_eq!(found.file(record.slot), Some(FileWords { size: 4096, ..file }));
        let chunks: Vec<_> = (0..found.layout.chunks).filter_map(|slot| found.chunk(slot)).collect();
        assert_eq!(chunks, [ChunkWords { blocks: 0b101, file: record.slot, index: 4 }]);
        drop(record);
        assert!((0..found.layout.files).all(|slot| found.file(slot).is_none()));
        assert!((0..found.layout.chunks).all(|slot| found.chunk(slot).is_none()));
    }

    #[test]
    fn there_is_room_for_all_that_a_cache_can_hold_and_no_more() {
        let store = SegmentStore::new(4, 4, None).unwrap();
        let ledger = Ledger::new(&store, 1 << 20).unwrap();
        let mut free = lock(&ledger.free);
        assert_eq!(std::iter::from_fn(|| free.chunks.take()).count(), 257);
        assert_eq!(std::iter::from_fn(|| free.files.take()).count(), 257 + (1 << 16));
    }
}
