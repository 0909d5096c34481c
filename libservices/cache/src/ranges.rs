//! Operations on ranges: truncating, punching, zeroing, and seeking data or holes.

use crate::blocks::{BLOCK, Chunk, block_of, blocks_for};
use crate::content::Content;
use crate::node::Node;
use crate::node_state::State;
use crate::sync::{lock, read};
use poolfs_libservice::{Error, Result, fail};
use poolfs_types::{AllocateMode, Caller, Errno, HandleId, SeekTo, SetAttributes};
use std::ops::Range;

fn pending(chunk: &Chunk) -> u64 {
    chunk.dirty | chunk.writing
}

impl State {
    /// The file below has this size now; what is cached beyond it goes.
    pub(crate) fn truncate(&mut self, size: u64) {
        if size < self.attributes.size {
            let gone = blocks_for(size)..u64::MAX;
            self.blocks.change_existing(gone, |chunk, mask| {
                chunk.clear(mask);
                chunk.held &= !mask;
            });
            self.erase(size..i64::MAX as u64);
        }
        self.attributes.size = size;
        self.below_size = size;
        self.epoch += 1;
    }

    /// Cached bytes of a range become zeros. If the cache's memory fails, the clean blocks there are dropped; dirty ones
    /// cannot be, and a segment that refuses to be punched does not exist in practice.
    fn erase(&mut self, bytes: Range<u64>) {
        self.retract(&(block_of(bytes.start)..blocks_for(bytes.end)));
        if let Err(error) = self.content.punch(bytes.start, bytes.end - bytes.start) {
            tracing::error!(%error, "erasing a part of a cache segment failed");
            self.blocks.change_existing(block_of(bytes.start)..blocks_for(bytes.end), |chunk, mask| {
                chunk.clear(mask & chunk.evictable());
            });
        }
    }

    /// The range below reads as zeros now.
    fn zeroed(&mut self, bytes: Range<u64>) {
        let whole = blocks_for(bytes.start)..block_of(bytes.end);
        if whole.start < whole.end {
            let on_heap = matches!(self.content, Content::Heap(_));
            self.blocks.change_existing(whole, |chunk, mask| {
                // On the heap the bytes stay where they are, and stay charged.
                let kept = if on_heap { chunk.resident & mask } else { 0 };
                chunk.clear(mask);
                chunk.resident |= kept;
            });
        }
        self.erase(bytes);
        self.epoch += 1;
    }
}

impl Node {
    /// Allocates, punches or zeroes below first, then here. Only under a [`Use`](crate::node_use::Use).
    pub(crate) fn fallocate(&self, caller: &Caller, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        self.fallocate_below(caller, mode, offset, length)?;
        let removes = mode.intersects(AllocateMode::PUNCH_HOLE | AllocateMode::ZERO_RANGE);
        // What has gone is noted nowhere else.
        if removes && self.core.keeps_deferred { self.store_deferred() } else { Ok(()) }
    }

    fn fallocate_below(&self, caller: &Caller, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        let _writer = lock(&self.writer);
        let _flush = lock(&self.flush);
        let handle = self.writer_below()?;
        let size = self.extend_below(handle)?;
        self.core.below.fallocate(caller, handle, mode, offset, length)?;
        // What was allocated is not there for what is accepted from here on.
        self.core.forget_room();
        let end = offset.saturating_add(length);
        let note = |state: &mut State| {
            if mode.intersects(AllocateMode::PUNCH_HOLE | AllocateMode::ZERO_RANGE) {
                // The last block of the file may be covered only up to the end of the file.
                let end = if end >= size { blocks_for(end.max(size)) * BLOCK } else { end };
                state.zeroed(offset..end.min(i64::MAX as u64));
            }
            if !mode.contains(AllocateMode::KEEP_SIZE) {
                state.below_size = state.below_size.max(end);
                state.attributes.size = state.attributes.size.max(end);
            }
            state.note_modified();
            state.time_dirty = state.is_dirty();
            state.stale = true;
        };
        self.taking_away(|| self.update(None, note));
        Ok(())
    }

    /// Gives the file below the size it has here, which otherwise comes with the dirty blocks: those may be about to go.
    /// Under `writer` and `flush`.
    fn extend_below(&self, handle: HandleId) -> Result<u64> {
        let (size, below_size) = {
            let state = read(&self.state);
            (state.attributes.size, state.below_size)
        };
        if below_size < size {
            let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
            self.core.below.setattr(&Caller::ROOT, self.id, &changes, Some(handle))?;
            self.update(None, |state| state.below_size = size);
        }
        Ok(size)
    }

    /// The next data or hole: below's answer, with what is not below yet counting as data. Only under a
    /// [`Use`](crate::node_use::Use).
    pub(crate) fn seek(&self, caller: &Caller, offset: u64, to: SeekTo) -> Result<u64> {
        let size = read(&self.state).attributes.size;
        if offset >= size {
            return fail(Errno::ENXIO);
        }
        match to {
            SeekTo::Data => {
                let cached = read(&self.state).blocks.next(block_of(offset), pending);
                let cached = cached.map(|block| (block * BLOCK).max(offset)).filter(|&at| at < size);
                match (cached, self.seek_below(caller, offset, to)) {
                    (Some(cached), Ok(below)) => Ok(cached.min(below)),
                    (Some(cached), Err(error)) if error.errno() == Errno::ENXIO => Ok(cached),
                    (_, below) => below,
                }
            }
            SeekTo::Hole => self.seek_hole(caller, offset, size),
        }
    }

    fn seek_hole(&self, caller: &Caller, offset: u64, size: u64) -> Result<u64> {
        let mut at = offset;
        while at < size {
            let run = read(&self.state).blocks.run(block_of(at), blocks_for(size) - block_of(at), true, pending);
            if run > 0 {
                at = (block_of(at) + run) * BLOCK;
                continue;
            }
            let below = match self.seek_below(caller, at, SeekTo::Hole) {
                // Below the file ends in the middle of a block, here it goes on.
                Ok(below) if below < size && below >= read(&self.state).below_size => blocks_for(below) * BLOCK,
                Ok(below) => below,
                // At or beyond the end of the file below: nothing is there.
                Err(error) if error.errno() == Errno::ENXIO => at,
                Err(error) => return Err(error),
            };
            let dirty = read(&self.state).blocks.has(block_of(below), pending);
            if !dirty || below >= size {
                return Ok(below.min(size));
            }
            at = below.max(at);
        }
        Ok(size)
    }

    fn seek_below(&self, caller: &Caller, offset: u64, to: SeekTo) -> Result<u64> {
        if offset >= read(&self.state).below_size {
            return Err(Error::from(Errno::ENXIO));
        }
        self.core.below.seek(caller, self.reader_below()?, offset, to)
    }
}

#[cfg(test)]
mod tests {
    use crate::blocks::BLOCK;
    use crate::cache_pool::CachePool;
    use crate::config::CacheConfig;
    use crate::content::Content;
    use crate::core::Core;
    use crate::sync::read;
    use poolfs_libservice::{Libservice, Memory};
    use poolfs_types::{AllocateMode, Caller, Name, NodeId, OpenFlags};

    #[test]
    fn a_punched_file_on_the_heap_is_charged_with_all_it_holds() {
        let pool = CachePool::new(CacheConfig::with_limit(1 << 20)).unwrap();
        let memory = Memory::new();
        let name = Name::new(b"f").unwrap();
        let (entry, handle) = memory.create(&Caller::ROOT, NodeId::ROOT, name, 0o644, OpenFlags::READ_WRITE).unwrap();
        let core = Core::new(&pool.pool, &pool.background.lists, memory, None);
        let node = core.adopt(&entry, 0).begin_use().unwrap();
        node.0.adopt_writer(handle);
        node.0.write(false, 0, &[1; 32 << 10]).unwrap();
        let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
        for (offset, length) in [(0, 12 << 10), (30 << 10, 2 << 10), (16 << 10, 20 << 10)] {
            node.0.fallocate(&Caller::ROOT, punch, offset, length).unwrap();
            let state = read(&node.0.state);
            let held = if let Content::Heap(bytes) = &state.content { bytes.len() as u64 } else { 0 };
            let charged = state.blocks.counts().resident * BLOCK;
            assert!(held > 0 && held <= charged, "{held} bytes held, {charged} charged");
        }
        let mut buffer = [9; 32 << 10];
        assert_eq!(node.0.read(0, &mut &mut buffer[..], 0).unwrap().0, 32 << 10);
        assert!(buffer.iter().enumerate().all(|(at, &byte)| byte == u8::from((12 << 10..16 << 10).contains(&at))));
    }
}
