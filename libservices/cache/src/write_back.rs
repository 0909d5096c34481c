//! Write-back: dirty blocks go below in the order of their offsets and in large pieces, then the times; a file is clean only
//! after both.

use crate::blocks::{BLOCK, Chunk, blocks_for, by_chunk};
use crate::node::Node;
use crate::node_state::{Emptied, State};
use crate::sync::{lock, read, try_lock};
use poolfs_libservice::{Error, NameChange, Result, Spending};
use poolfs_types::{Caller, Errno, SetAttributes, SetTime, Timestamp};
use std::ops::Range;
use std::sync::{Arc, MutexGuard};

/// Most bytes written by one call below.
const PIECE_BYTES: u64 = 1 << 20;

/// Most runs of blocks written by one call below.
const PIECES_MAX: usize = 32;

fn writable(chunk: &Chunk) -> u64 {
    chunk.dirty & !chunk.held & !chunk.writing
}

/// A run of blocks on its way below.
struct Piece {
    blocks: Range<u64>,
    bytes: u64,
}

impl Node {
    /// Writes back for another file's writer, without waiting for whoever does it already.
    pub(crate) fn write_back_other(self: &Arc<Self>, bytes_max: u64) -> Option<Result<u64>> {
        self.begin_cleaning().ok()?.0.0.write_back(bytes_max)
    }

    /// What a flusher does with a file whose time has come.
    pub(crate) fn write_back_in_background(self: &Arc<Self>) {
        let unreachable = read(&self.state).orphan && !self.in_use();
        self.core.forget_room();
        if !unreachable && self.write_back_other(u64::MAX).is_none() {
            return;
        }
        if read(&self.state).is_unsettled() {
            self.requeue_dirty();
        }
    }

    /// Writes back up to `bytes_max` bytes; how many. Nothing while another thread does it. Only under a [`Use`](crate::node_use::Use).
    pub(crate) fn write_back(&self, bytes_max: u64) -> Option<Result<u64>> {
        if !read(&self.state).is_dirty() {
            return Some(Ok(0));
        }
        let flush = try_lock(&self.flush)?;
        Some(self.write_back_locked(&flush, 0..u64::MAX, bytes_max))
    }

    fn write_back_locked(&self, flush: &MutexGuard<'_, ()>, blocks: Range<u64>, bytes_max: u64) -> Result<u64> {
        // Whoever's request has it written: it was accepted.
        let _spending = Spending::of_service();
        let stamp = self.settled_stamp();
        let result = self.write_back_data(flush, blocks, bytes_max).and_then(|bytes| {
            self.push_times(flush, stamp)?;
            Ok(bytes)
        });
        self.update(None, |state| match &result {
            Ok(_) => state.error.failing = false,
            Err(error) => state.note_error(error.errno()),
        });
        result
    }

    /// The stamp of attributes that are all known here: from now on what is written below moves the change time there. Nothing
    /// when they are not.
    fn settled_stamp(&self) -> Option<u64> {
        if read(&self.state).stale && self.attributes().is_err() {
            return None;
        }
        let state = read(&self.state);
        (!state.stale).then_some(state.stamp)
    }

    fn write_back_data(&self, _flush: &MutexGuard<'_, ()>, range: Range<u64>, bytes_max: u64) -> Result<u64> {
        let mut from = range.start;
        let mut written = 0;
        while written < bytes_max {
            if self.is_abandoned() {
                break;
            }
            let (mut pieces, mut bytes) = (Vec::new(), 0);
            while pieces.len() < PIECES_MAX && bytes < PIECE_BYTES.min(bytes_max - written) {
                let Some(piece) = self.take_piece(from..range.end, PIECE_BYTES - bytes) else { break };
                from = piece.blocks.end;
                bytes += piece.bytes;
                pieces.push(piece);
            }
            if pieces.is_empty() {
                break;
            }
            let result = self.write_pieces(&pieces);
            if result.is_ok() {
                self.core.note_taken(bytes);
                written += bytes;
            }
            // Of those that one call wrote nobody knows which it did not.
            pieces.into_iter().for_each(|piece| self.return_piece(piece.blocks, result.is_ok()));
            result?;
        }
        Ok(written)
    }

    /// Marks the next run of dirty blocks, of so many bytes at most but of one block at least, as being written.
    fn take_piece(&self, range: Range<u64>, bytes_max: u64) -> Option<Piece> {
        read(&self.state).blocks.next(range.start, writable).filter(|&first| first < range.end)?;
        self.update(None, |state| {
            let first = state.blocks.next(range.start, writable).filter(|&first| first < range.end)?;
            let most = (bytes_max / BLOCK).max(1).min(range.end - first);
            let blocks = first..first + state.blocks.run(first, most, true, writable);
            state.blocks.change_existing(blocks.clone(), |chunk, mask| {
                chunk.dirty &= !mask;
                chunk.writing |= mask;
            });
            let end = (blocks.end * BLOCK).min(state.attributes.size);
            Some(Piece { bytes: end.saturating_sub(blocks.start * BLOCK), blocks })
        })
    }

    fn return_piece(&self, blocks: Range<u64>, done: bool) {
        let keeps_deferred = self.core.keeps_deferred;
        self.update(None, |state| {
            state.blocks.change_existing(blocks, |chunk, mask| {
                let back = chunk.writing & mask;
                chunk.writing &= !mask;
                if !done {
                    chunk.dirty |= back;
                } else if keeps_deferred {
                    chunk.deferred |= back;
                }
            });
            // The times have to follow before the file counts as clean.
            state.time_dirty |= done;
        });
    }

    fn write_pieces(&self, pieces: &[Piece]) -> Result<()> {
        let blocks = pieces.iter().map(|piece| blocks_for(piece.bytes) as usize).sum();
        let mut buffer = self.core.pool.buffers.take(blocks);
        let mut rest = &mut buffer[..];
        let mut read_pieces = Vec::with_capacity(pieces.len());
        {
            let state = read(&self.state);
            // Each begins at a block, as direct I/O below wants it.
            for piece in pieces.iter().filter(|piece| piece.bytes > 0) {
                let (own, behind) = rest.split_at_mut((blocks_for(piece.bytes) * BLOCK) as usize);
                let (offset, own) = (piece.blocks.start * BLOCK, &mut own[..piece.bytes as usize]);
                let length = own.len();
                state.content.read(offset, &mut &mut *own, 0..length)?;
                read_pieces.push((offset, &*own));
                rest = behind;
            }
        }
        let handle = self.writer_below()?;
        self.core.below.write_pieces(&Caller::ROOT, handle, &read_pieces)?;
        let end = read_pieces.iter().map(|(offset, bytes)| offset + bytes.len() as u64).max();
        self.update(None, |state| state.below_size = state.below_size.max(end.unwrap_or(0)));
        Ok(())
    }

    /// Gives the file below the modification time that users see. Only after its data: writing moves it.
    fn push_times(&self, _flush: &MutexGuard<'_, ()>, settled: Option<u64>) -> Result<()> {
        let taken = self.update(None, |state| {
            let unwritten = state.blocks.next(0, writable).is_some();
            // With data left to write, another round follows and sets the times then.
            (state.time_dirty && !unwritten).then(|| {
                state.time_dirty = false;
                state.time_moving = true;
                state.attributes.modified
            })
        });
        let Some(modified) = taken else { return Ok(()) };
        let result = self.set_modified_below(modified, settled);
        self.update(None, |state| {
            state.time_moving = false;
            state.time_dirty |= result.is_err();
            // Answers from below that are on their way here show the time of the write-back.
            state.stamp += 1;
        });
        result
    }

    fn set_modified_below(&self, modified: Timestamp, settled: Option<u64>) -> Result<()> {
        let changes = SetAttributes { modified: Some(SetTime::At(modified)), ..SetAttributes::default() };
        let stamp = read(&self.state).stamp;
        let attributes = self.core.below.setattr(&Caller::ROOT, self.id, &changes, None)?;
        self.update(None, |state| {
            if state.stamp == stamp {
                state.attributes.blocks = attributes.blocks;
            }
            let unchanged = settled == Some(state.stamp) && !state.stale;
            state.written_back = unchanged.then_some((attributes.changed, state.attributes.changed));
        });
        Ok(())
    }

    /// Makes the file durable: what is dirty goes below, and below does the rest. Only under a [`Use`](crate::node_use::Use).
    pub(crate) fn sync(&self, range: Range<u64>, below: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        {
            // The mutex is taken even when nothing is dirty: another thread may be writing the last piece right now.
            let flush = lock(&self.flush);
            self.write_back_locked(&flush, range, u64::MAX)?;
        }
        let result = below(self);
        if let Err(error) = &result {
            // Below has forgotten what it could not write; every other handle should hear of it too.
            self.update(None, |state| {
                state.error.failing = false;
                state.note_error(error.errno());
                state.error.failing = false;
            });
        }
        result
    }
}

impl Node {
    /// Writes the content below that waits here, before the names of the file change.
    pub(crate) fn write_before_names(self: &Arc<Self>) -> Result<()> {
        if read(&self.state).blocks.counts().dirty == 0 {
            return Ok(());
        }
        self.begin_use()?.0.sync(0..u64::MAX, |_| Ok(()))
    }

    /// A descriptor that may write is being closed, or with `is_last` the last one of an open file: writes the content below that has
    /// come in the place of what was truncated. Later descriptors that are closed of the same open file have nothing to wait for.
    pub(crate) fn closing(self: &Arc<Self>, is_last: bool) -> Result<()> {
        let (emptied, is_dirty, is_empty) = {
            let state = read(&self.state);
            if state.emptied == Emptied::No || state.orphan {
                return Ok(());
            }
            (state.emptied, state.blocks.counts().dirty > 0, state.attributes.size == 0)
        };
        let (next, is_due) = match emptied {
            Emptied::No => return Ok(()),
            // It is not written again yet.
            Emptied::Open if is_empty => return Ok(()),
            Emptied::Open => (Emptied::Closing, true),
            Emptied::Closing => (Emptied::Closing, is_dirty && is_last),
        };
        let next = if is_last { Emptied::No } else { next };
        if next != emptied {
            self.update(None, |state| state.emptied = next);
        }
        if !is_due {
            return Ok(());
        }
        self.write_before_names()?;
        self.core.below.write_before_names(&Caller::ROOT, self.id, NameChange::Replaces)
    }
}

impl State {
    fn note_error(&mut self, errno: Errno) {
        if !self.error.failing || self.error.errno != Some(errno) {
            self.error.sequence += 1;
            self.error.errno = Some(errno);
        }
        self.error.failing = true;
    }

    /// The failure a handle has not reported yet.
    pub(crate) fn unreported(&self, seen: u64) -> Option<Error> {
        self.error.errno.filter(|_| seen < self.error.sequence).map(Error::from)
    }
}

/// Whether a range may be held: holding makes chunks, so it is bounded (to 1 GiB).
pub(crate) fn hold_is_bounded(range: &Range<u64>) -> bool {
    const CHUNKS_MAX: usize = 1 << 12;
    by_chunk(range.clone()).take(CHUNKS_MAX + 1).count() <= CHUNKS_MAX
}
