//! Reads: cached bytes are copied under the file's shared lock; missing ones are read from below in large pieces.

use crate::blocks::{BLOCK, Chunk, block_of, blocks_for, by_chunk, cost_of};
use crate::node::Node;
use crate::node_state::State;
use crate::sync::{lock, read};
use poolfs_libservice::{ReadTarget, Result};
use poolfs_types::Caller;
use std::ops::Range;
use std::sync::PoisonError;

/// Blocks to read from below, and what they were when that was decided.
struct Fill {
    blocks: Range<u64>,
    epoch: u64,
    below_size: u64,
    size: u64,
}

/// Blocks that this thread reads and others wait for.
struct Claim<'a> {
    node: &'a Node,
    blocks: Range<u64>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        lock(&self.node.filling).retain(|range| *range != self.blocks);
        self.node.filled.notify_all();
    }
}

fn present(chunk: &Chunk) -> u64 {
    chunk.resident | chunk.zero
}

impl State {
    /// Copies cached blocks from `offset` on to what is left of `target` behind `done`, up to the first that is not cached or the end of the file.
    fn copy_cached(&self, offset: u64, target: &mut dyn ReadTarget, done: usize) -> Result<usize> {
        let size = self.attributes.size;
        if offset >= size {
            return Ok(0);
        }
        let want = ((target.buffer().len() - done) as u64).min(size - offset);
        let end = offset + want;
        let mut at = offset;
        while at < end {
            let block = block_of(at);
            let limit = blocks_for(end) - block;
            let bytes = self.blocks.run(block, limit, true, |chunk| chunk.resident);
            let zeros = if bytes > 0 { 0 } else { self.blocks.run(block, limit, true, |chunk| chunk.zero) };
            if bytes + zeros == 0 {
                break;
            }
            let stop = ((block + bytes + zeros) * BLOCK).min(end);
            let part = done + (at - offset) as usize..done + (stop - offset) as usize;
            if bytes > 0 {
                self.content.read(at, target, part)?;
            } else {
                target.buffer()[part.clone()].fill(0);
                target.put(part)?;
            }
            for (index, mask) in by_chunk(block..block + bytes + zeros) {
                if let Some(chunk) = self.blocks.chunk(index) {
                    chunk.touch(mask);
                }
            }
            at = stop;
        }
        Ok((at - offset) as usize)
    }
}

impl Node {
    /// Reads as many bytes as `target` is long, or fewer; what has to be fetched is fetched `window` bytes at a time or more. Returns the
    /// count and, if something was missing, where fetching ended. Only under a [`Use`](crate::node_use::Use).
    pub(crate) fn read(&self, offset: u64, target: &mut dyn ReadTarget, window: u64) -> Result<(usize, Option<u64>)> {
        let length = target.buffer().len();
        let mut done = 0;
        let mut fetched = None;
        let (mut hits, mut misses) = (0, 0);
        while done < length {
            let at = offset + done as u64;
            let (copied, size) = {
                let state = read(&self.state);
                (state.copy_cached(at, target, done)?, state.attributes.size)
            };
            hits += blocks_for(copied as u64);
            done += copied;
            let at = at + copied as u64;
            if done == length || at >= size {
                break;
            }
            let wanted = ((length - done) as u64).max(window);
            let last = blocks_for(at.saturating_add(wanted).min(size));
            let copied = self.fill(block_of(at)..last, Some((at, &mut target.buffer()[done..])))?;
            target.put(done..done + copied)?;
            misses += blocks_for(copied as u64);
            done += copied;
            fetched = Some(last * BLOCK);
        }
        self.core.pool.count_hits(hits);
        if misses > 0 {
            self.core.pool.count_misses(misses);
        }
        Ok((done, fetched))
    }

    /// Reads ahead what is missing of a range. Only under a [`Use`](crate::node_use::Use).
    pub(crate) fn read_ahead(&self, blocks: Range<u64>) -> Result<()> {
        let mut at = blocks.start;
        while at < blocks.end && !read(&self.state).is_retiring {
            let skip = read(&self.state).blocks.run(at, blocks.end - at, true, present);
            at += skip;
            let end = blocks.end.min(blocks_for(read(&self.state).attributes.size));
            if at >= end {
                break;
            }
            let step = (end - at).min(self.core.pool.step_bytes() / BLOCK);
            if self.core.pool.budget.used() + step * BLOCK > self.core.pool.budget.allowed() {
                // Only guesses would be evicted for a guess; the reader fetches for itself what it needs.
                self.core.pool.budget.evict(step * BLOCK);
            }
            self.fill(at..at + step, None)?;
            at += step;
        }
        Ok(())
    }

    /// Reads missing blocks from the first of `blocks` on, as many as one step allows, keeps them if there is room, and
    /// copies what belongs to `sink` (an offset within the first block, and where its bytes go). Returns how many bytes
    /// it copied there: 0 when another thread was reading the same blocks, and the caller should look again.
    fn fill(&self, blocks: Range<u64>, sink: Option<(u64, &mut [u8])>) -> Result<usize> {
        let most = self.core.pool.step_bytes() / BLOCK;
        let Some(fill) = self.begin_fill(blocks.start..blocks.end.min(blocks.start + most)) else { return Ok(0) };
        // Also when the layer below panics, or others would wait for these blocks for ever.
        let _claim = Claim { node: self, blocks: fill.blocks.clone() };
        self.fill_now(&fill, sink)
    }

    /// Claims the missing blocks at the start of `blocks`; nothing if the first is there or was being read by another
    /// thread, which this one has then waited for.
    fn begin_fill(&self, blocks: Range<u64>) -> Option<Fill> {
        let mut filling = lock(&self.filling);
        if filling.iter().any(|range| range.contains(&blocks.start)) {
            while filling.iter().any(|range| range.contains(&blocks.start)) {
                filling = self.filled.wait(filling).unwrap_or_else(PoisonError::into_inner);
            }
            return None;
        }
        let state = read(&self.state);
        let end = filling.iter().map(|range| range.start).filter(|&start| start > blocks.start).min();
        let end = end.unwrap_or(u64::MAX).min(blocks.end);
        let missing = state.blocks.run(blocks.start, end - blocks.start, false, present);
        if missing == 0 {
            return None;
        }
        let blocks = blocks.start..blocks.start + missing;
        filling.push(blocks.clone());
        Some(Fill { blocks, epoch: state.epoch, below_size: state.below_size, size: state.attributes.size })
    }

    fn fill_now(&self, fill: &Fill, sink: Option<(u64, &mut [u8])>) -> Result<usize> {
        let pool = &self.core.pool;
        let count = fill.blocks.end - fill.blocks.start;
        let start = fill.blocks.start * BLOCK;
        let mut buffer = pool.buffers.take(count as usize);
        self.read_below(start, &mut buffer, fill.below_size)?;
        self.keep(fill, &buffer);
        let Some((offset, sink)) = sink else { return Ok(0) };
        let end = (fill.blocks.end * BLOCK).min(fill.size);
        let length = end.saturating_sub(offset).min(sink.len() as u64) as usize;
        let from = (offset - start) as usize;
        sink[..length].copy_from_slice(&buffer[from..from + length]);
        Ok(length)
    }

    /// Reads bytes of a file that has no others than below, without keeping more of them than there are. Only under a
    /// [`Use`](crate::node_use::Use).
    pub(crate) fn read_past_cache(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let at = offset + done as u64;
            let copied = read(&self.state).copy_cached(at, &mut &mut *buffer, done)?;
            done += copied;
            if copied == 0 {
                let step = (buffer.len() - done).min(self.core.pool.step_bytes() as usize);
                let below_size = read(&self.state).below_size;
                self.read_below(at, &mut buffer[done..done + step], below_size)?;
                done += step;
            }
        }
        Ok(())
    }

    /// Reads bytes of the file as they are below, where the file ends at `below_size`; zeros follow.
    pub(crate) fn read_below(&self, offset: u64, buffer: &mut [u8], below_size: u64) -> Result<()> {
        let want = below_size.saturating_sub(offset).min(buffer.len() as u64) as usize;
        let mut done = 0;
        if want > 0 {
            let handle = self.reader_below()?;
            while done < want {
                let below = &self.core.below;
                let count = below.read(&Caller::ROOT, handle, offset + done as u64, &mut buffer[done..want])?;
                if count == 0 {
                    break;
                }
                done += count;
            }
        }
        buffer[done..].fill(0);
        Ok(())
    }

    /// Makes what was read cached, except where the file changed meanwhile.
    fn keep(&self, fill: &Fill, bytes: &[u8]) {
        let pool = &self.core.pool;
        let count = fill.blocks.end - fill.blocks.start;
        let is_zero = |block: &[u8]| block.iter().all(|&byte| byte == 0);
        let zeros: Vec<bool> = bytes.chunks(BLOCK as usize).map(is_zero).collect();
        let data = zeros.iter().filter(|&&zero| !zero).count() as u64;
        let Some(mut reservation) = pool.budget.reserve(cost_of(data, &fill.blocks)) else {
            return;
        };
        self.update(Some(&mut reservation), |state| {
            if state.epoch != fill.epoch || state.is_retiring {
                return;
            }
            let mut at = 0;
            while at < count {
                let block = fill.blocks.start + at;
                if block * BLOCK >= state.attributes.size {
                    break;
                }
                let absent = state.blocks.run(block, count - at, false, present);
                let zero = zeros[at as usize];
                let alike = zeros[at as usize..].iter().take_while(|&&other| other == zero).count() as u64;
                let run = absent.min(alike).min(blocks_for(state.attributes.size) - block);
                if run == 0 {
                    at += 1;
                    continue;
                }
                let part = &bytes[(at * BLOCK) as usize..((at + run) * BLOCK) as usize];
                if !zero && !state.store_absent(pool, block * BLOCK, part) {
                    break;
                }
                state.blocks.change(block..block + run, |chunk, mask| {
                    if zero {
                        chunk.zero |= mask;
                    } else {
                        chunk.resident |= mask;
                    }
                });
                at += run;
            }
        });
    }
}

impl State {
    /// Stores bytes of blocks that are not cached; if that fails they read as zeros again.
    fn store_absent(&mut self, pool: &crate::pool::Pool, offset: u64, bytes: &[u8]) -> bool {
        // On the heap nothing is kept beyond the end of the file.
        let length = (self.attributes.size - offset).min(bytes.len() as u64) as usize;
        let stored = self.content.write(&pool.segments, pool.config.small_file_bytes, offset, &bytes[..length]);
        if stored.is_err() {
            let _ = self.content.punch(offset, bytes.len() as u64);
        }
        stored.is_ok()
    }
}
