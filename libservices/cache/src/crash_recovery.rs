//! Crash recovery of dirty data: the segments of a dead process's dirty files, and the ledger that describes them.
//!
//! **What is written back.** The dirty blocks of every file that still has a name, its size and its modification time. Held
//! blocks come last, after all else is durable, so that whoever finds them on disk also finds what was written before them.
//!
//! **Files that fail.** A file that is damaged does not stop the recovery of others. It waits, and the held blocks with it, until
//! a cache over the branch takes it over as it was before the crash ([`CrashRecovery::carry_on`]). An error of the whole branch
//! ends the recovery.
//!
//! **Safety.** Only the ledger of a dead process is read: its file lock says whether the process lives. The recovering process
//! may die as well: nothing is changed before all is below and durable, and writing it back twice is the same as once.

use crate::blocks::{BLOCK, CHUNK_BLOCKS};
use crate::buffer::BufferStore;
use crate::ledger::{Entries, FileWords, LEDGER_NAME};
use crate::segments::SegmentStore;
use crate::state_directory::BranchKey;
use crate::state_directory::{StateDirectory, branch_name};
use hashbrown::{HashMap, HashSet};
use poolfs_libservice::walk::walk;
use poolfs_libservice::{Error, Held, Libservice, Opened, Result, read_with_zeros};
use poolfs_types::{Attributes, Caller, Errno, FileType, NodeId, OpenFlags, SetAttributes, SetTime, Timestamp};
use rustix::fs::{FlockOperation, OFlags, flock};
use std::fs::File;
use std::io;
use std::sync::Arc;

/// Most bytes brought below by one call.
pub(crate) const PIECE_BLOCKS: u64 = CHUNK_BLOCKS * 4;

/// What was brought below.
#[derive(Debug, Default)]
pub struct Salvaged {
    /// Files that were dirty.
    pub files: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Dirty files besides that have no name any more.
    pub nameless: u64,
    /// Those that could not be brought there.
    pub waiting: Vec<Waiting>,
}

/// A dirty file that cannot be brought below, for what is wrong with it alone.
#[derive(Debug)]
pub struct Waiting {
    /// Its path in the branch.
    pub path: Vec<u8>,
    /// What is wrong; nothing where it only follows others.
    pub cause: Option<String>,
    pub(crate) dirty: Dirty,
}

/// Whether an error says something of one file, and nothing of the branch that it is in.
fn is_of_one_file(error: &Error) -> bool {
    [Errno::EIO, Errno::EFBIG, Errno::EPERM, Errno::EACCES, Errno::ETXTBSY].contains(&error.errno())
}

fn in_file(path: &[u8], error: &Error) -> Error {
    Error::new(error.errno(), format!("{}: {error}", path.escape_ascii()))
}

/// A dirty file: what its entry says, and its chunks with their dirty blocks.
#[derive(Debug)]
pub(crate) struct Dirty {
    pub(crate) file: FileWords,
    pub(crate) chunks: Vec<(u64, u64)>,
}

impl Dirty {
    /// The next run of dirty blocks from `from`, not longer than a piece.
    pub(crate) fn next_run(&self, from: u64) -> Option<std::ops::Range<u64>> {
        let mut run: Option<std::ops::Range<u64>> = None;
        let first = self.chunks.partition_point(|&(index, _)| index < from / CHUNK_BLOCKS);
        for &(index, blocks) in &self.chunks[first..] {
            let mut at = index * CHUNK_BLOCKS;
            let end = at + CHUNK_BLOCKS;
            at = at.max(from);
            while at < end {
                let rest = blocks >> (at % CHUNK_BLOCKS);
                match &mut run {
                    Some(run) => {
                        let more = u64::from(rest.trailing_ones()).min(end - at);
                        if run.end != at || more == 0 || run.end - run.start >= PIECE_BLOCKS {
                            return Some(run.clone());
                        }
                        run.end = at + more;
                        at += more;
                        if at < end {
                            return Some(run.clone());
                        }
                    }
                    None if rest == 0 => break,
                    None => {
                        at += u64::from(rest.trailing_zeros());
                        run = Some(at..at);
                    }
                }
            }
        }
        run
    }
}

/// What a dead process has left in a directory of [`CacheConfig::kept_at`](crate::CacheConfig::kept_at).
pub struct CrashRecovery {
    directory: StateDirectory,
    entries: Entries,
    /// Locked, so that one at a time deals with it.
    _ledger: File,
}

impl CrashRecovery {
    /// Those in `directory`; nothing when there are none.
    ///
    /// # Errors
    /// `WouldBlock` when the process lives, or another one deals with them; `InvalidData` for those of another release; else those of reading
    /// them.
    pub fn open(directory: StateDirectory) -> io::Result<Option<Self>> {
        let ledger = match directory.file(LEDGER_NAME, OFlags::RDWR) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        match flock(&ledger, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(Some(Self { directory, entries: Entries::open(&ledger)?, _ledger: ledger }))
    }

    /// Where they are.
    #[must_use]
    pub fn directory(&self) -> &StateDirectory {
        &self.directory
    }

    /// How many files of a branch wait here.
    #[must_use]
    pub fn files(&self, key: &BranchKey) -> u64 {
        self.files_of(key).count() as u64
    }

    fn files_of(&self, key: &BranchKey) -> impl Iterator<Item = (u32, FileWords)> {
        let files = (0..self.entries.layout.files).filter_map(|slot| Some((slot, self.entries.file(slot)?)));
        files.filter(move |(_, file)| file.key == *key)
    }

    /// The dirty files of a branch by their inodes.
    fn dirty(&self, key: &BranchKey) -> HashMap<u64, Dirty> {
        let mut files: HashMap<u32, Dirty> =
            self.files_of(key).map(|(slot, file)| (slot, Dirty { file, chunks: Vec::new() })).collect();
        for chunk in (0..self.entries.layout.chunks).filter_map(|slot| self.entries.chunk(slot)) {
            if let Some(dirty) = files.get_mut(&chunk.file).filter(|_| chunk.index < u64::MAX / CHUNK_BLOCKS / BLOCK) {
                dirty.chunks.push((chunk.index, chunk.blocks));
            }
        }
        files.values_mut().for_each(|dirty| dirty.chunks.sort_unstable());
        files.into_values().map(|dirty| (dirty.file.inode, dirty)).collect()
    }

    /// Brings what is left of a branch below, into the layer over which it was cached, and makes it durable there. `born` says when the file of
    /// a path was made, if that is known: one that was made after a change that is left took the number of the one that was changed.
    ///
    /// # Errors
    /// What the layer answers, with the path of the file, unless it is that file's alone; all others are below then, as far as that goes. What is
    /// left stays as it is.
    pub fn bring_below(
        &self,
        key: &BranchKey,
        below: &Arc<dyn Libservice>,
        born: &dyn Fn(&[u8]) -> Option<Timestamp>,
    ) -> Result<Salvaged> {
        let dirty = self.dirty(key);
        let (held, plain): (HashMap<_, _>, HashMap<_, _>) = dirty.into_iter().partition(|(_, dirty)| dirty.file.holds);
        let mut salvaged = Salvaged::default();
        for mut files in [plain, held] {
            if files.is_empty() {
                continue;
            }
            let unseen = self.bring_files(&mut files, below, born, &mut salvaged)?;
            below.sync()?;
            match unseen {
                // One of those that were not found may be there.
                Some(error) if !files.is_empty() => return Err(error),
                _ => salvaged.nameless += files.len() as u64,
            }
        }
        Ok(salvaged)
    }

    /// Takes those files out that have a name, and brings them below. What kept it from seeing all of the branch.
    fn bring_files(
        &self,
        files: &mut HashMap<u64, Dirty>,
        below: &Arc<dyn Libservice>,
        born: &dyn Fn(&[u8]) -> Option<Timestamp>,
        salvaged: &mut Salvaged,
    ) -> Result<Option<Error>> {
        let mut unseen = None;
        walk(below, Held::new(below, NodeId::ROOT), b"", &mut |path, visited| {
            let (held, attributes) = match visited {
                Ok(visited) => visited,
                Err(error) => {
                    unseen.get_or_insert(in_file(path, &error));
                    return Ok(false);
                }
            };
            // Where a file was changed before it was made, the clock was set back in between, and its birth says nothing.
            let told = || born(path).filter(|born| *born <= attributes.changed);
            let is_it = |dirty: &Dirty| told().is_none_or(|born| born <= dirty.file.changed);
            if attributes.file_type != FileType::Regular || !files.get(&attributes.inode).is_some_and(is_it) {
                return Ok(true);
            }
            let Some(dirty) = files.remove(&attributes.inode) else { return Ok(true) };
            // What is on hold may say that others are below which are not.
            if dirty.file.holds && !salvaged.waiting.is_empty() {
                salvaged.waiting.push(Waiting { path: path.to_vec(), cause: None, dirty });
                return Ok(true);
            }
            match self.bring_file(&dirty, below, held.node(), attributes) {
                Ok(bytes) => {
                    salvaged.bytes += bytes;
                    salvaged.files += 1;
                }
                Err(error) if is_of_one_file(&error) => {
                    let cause = Some(error.to_string());
                    salvaged.waiting.push(Waiting { path: path.to_vec(), cause, dirty });
                }
                Err(error) => return Err(in_file(path, &error)),
            }
            Ok(true)
        })?;
        Ok(unseen)
    }

    fn bring_file(
        &self,
        dirty: &Dirty,
        below: &Arc<dyn Libservice>,
        node: NodeId,
        attributes: &Attributes,
    ) -> Result<u64> {
        let file = &dirty.file;
        let segment = self.segment(file)?;
        let mut changes = SetAttributes { modified: Some(SetTime::At(file.modified)), ..SetAttributes::default() };
        let mut written = 0;
        // A segment that is gone was given up, with all that is noted of it, by a process that died in the middle of that.
        if let Some(segment) = segment {
            let set_size = || {
                let size = SetAttributes { size: Some(file.size), ..SetAttributes::default() };
                below.setattr(&Caller::ROOT, node, &size, None)
            };
            let mut size = attributes.size.min(file.size);
            if size < attributes.size {
                set_size()?;
            }
            let opened = Opened::file(below, &Caller::ROOT, node, OpenFlags::READ_WRITE)?;
            let buffers = BufferStore::default();
            let mut buffer = buffers.take((PIECE_BLOCKS + CHUNK_BLOCKS) as usize);
            let mut from = 0;
            while let Some(run) = dirty.next_run(from) {
                from = run.end;
                let end = (run.end * BLOCK).min(file.size);
                let offset = run.start * BLOCK;
                let bytes = &mut buffer[..end.saturating_sub(offset) as usize];
                read_with_zeros(&segment, bytes, offset).map_err(|error| unreadable(&error))?;
                opened.write_full(offset, bytes)?;
                written += bytes.len() as u64;
                size = size.max(end);
            }
            // Not before: what is written into room that was reserved for it leaves no hole.
            if size < file.size {
                set_size()?;
            }
        } else if file.segment != 0 {
            changes.modified = None;
        }
        below.setattr(&Caller::ROOT, node, &changes, None)?;
        Ok(written)
    }

    /// Where the bytes of a file are, if there are any.
    pub(crate) fn segment(&self, file: &FileWords) -> Result<Option<File>> {
        match self.directory.file(&SegmentStore::name(file.segment), OFlags::RDONLY) {
            Ok(segment) => Ok(Some(segment).filter(|_| file.segment != 0)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(unreadable(&error)),
        }
    }

    /// Gives up what is left of a branch.
    ///
    /// # Errors
    /// Those of removing it.
    pub fn forget(&self, key: &BranchKey) -> io::Result<()> {
        for (slot, file) in self.files_of(key) {
            self.entries.free_file(slot);
            self.directory.remove(&SegmentStore::name(file.segment))?;
        }
        self.directory.remove(&branch_name(key))
    }

    /// Gives the memory back of all that was not dirty.
    ///
    /// # Errors
    /// Those of reading the directory and removing files.
    pub fn drop_clean(&self) -> io::Result<()> {
        let files = (0..self.entries.layout.files).filter_map(|slot| self.entries.file(slot));
        let kept: HashSet<String> = files.map(|file| SegmentStore::name(file.segment)).collect();
        self.directory.remove_but(|name| name == LEDGER_NAME || kept.contains(name))
    }

    /// Unmounts the directory and removes it when no branch has anything left in it.
    ///
    /// # Errors
    /// Those of unmounting and removing.
    pub fn end(self) -> io::Result<()> {
        if self.directory.branches()?.is_empty() { self.directory.detach() } else { Ok(()) }
    }
}

pub(crate) fn unreadable(error: &io::Error) -> Error {
    Error::new(Errno::EIO, format!("what was written to it before cannot be read: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(chunks: &[(u64, u64)]) -> Vec<std::ops::Range<u64>> {
        let never = Timestamp::default();
        let file =
            FileWords { key: [0; 16], inode: 1, segment: 1, size: 0, modified: never, changed: never, holds: false };
        let dirty = Dirty { file, chunks: chunks.to_vec() };
        let mut from = 0;
        std::iter::from_fn(|| {
            let run = dirty.next_run(from)?;
            from = run.end;
            Some(run)
        })
        .collect()
    }

    #[test]
    fn runs_go_on_from_chunk_to_chunk() {
        assert_eq!(runs(&[]), []);
        assert_eq!(runs(&[(0, 0b1011)]), [0..2, 3..4]);
        assert_eq!(runs(&[(0, 1 << 63), (1, 0b11), (3, 1)]), [63..66, 192..193]);
        assert_eq!(runs(&[(2, u64::MAX), (3, u64::MAX), (4, 1 << 5)]), [128..256, 261..262]);
        let long = runs(&(0..9).map(|index| (index, u64::MAX)).collect::<Vec<_>>());
        assert_eq!(long.iter().map(|run| run.end - run.start).sum::<u64>(), 9 * 64);
        assert!(long.iter().all(|run| run.end - run.start <= PIECE_BLOCKS + CHUNK_BLOCKS), "{long:?}");
    }
}
