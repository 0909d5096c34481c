//! Writes: into the cache while there is room for them here and below, otherwise written through.

use crate::blocks::{BLOCK, Chunk, block_of, blocks_for, cost_of};
use crate::budget::Reservation;
use crate::core::{Core, Room};
use crate::failure::cache_failure;
use crate::node::Node;
use crate::node_state::State;
use crate::sync::{lock, read, try_read};
use poolfs_libservice::{Result, Written, WrittenAt, fail};
use poolfs_types::limits::{BLOCK_SIZE, CACHED_SIZE_MAX, FILE_SIZE_MAX};
use poolfs_types::{Caller, Errno};
use std::ops::Range;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

/// Most a writer above the dirty limit writes back at once: it should wait, but not for everything.
const THROTTLE_BYTES: u64 = 8 << 20;

/// Dirty files tried on behalf of one writer.
const OTHERS_MAX: usize = 16;

/// A block of which only a part is overwritten, as it is below.
type Edge = (u64, Box<[u8; BLOCK_SIZE]>);

/// What writing back for a writer came to; the greater, the better.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Progress {
    Impossible,
    /// others are writing what could be written
    Elsewhere,
    Made,
}

/// How long a writer waits for others before it does without room in the cache: it holds no lock that they need, but no wait is
/// without an end.
struct Patience {
    pauses: u32,
    /// as long as nobody is seen to make room
    most_impossible: u32,
}

impl Patience {
    const PAUSE: Duration = Duration::from_millis(1);
    const PAUSES_MAX: u32 = 5000;

    /// Of who can write through.
    const SHORT: Self = Self { pauses: 0, most_impossible: 16 };
    /// Of who fails otherwise, though what others have set aside may be free in a moment.
    const LONG: Self = Self { pauses: 0, most_impossible: 1000 };

    /// Waits a moment, unless that has been done often enough.
    fn wait(&mut self, progress: &Progress) -> bool {
        let most = if matches!(progress, Progress::Elsewhere) { Self::PAUSES_MAX } else { self.most_impossible };
        self.pauses += 1;
        if self.pauses <= most {
            std::thread::sleep(Self::PAUSE);
        }
        self.pauses <= most
    }
}

fn known(chunk: &Chunk) -> u64 {
    chunk.resident | chunk.zero
}

impl State {
    /// The content changed now. Never goes back, whatever the clocks below and here say.
    pub(crate) fn note_modified(&mut self) {
        let now = WrittenAt::now().max(self.attributes.changed);
        self.attributes.modified = now;
        self.attributes.changed = now;
        self.written_back = None;
        self.stamp += 1;
        // The kernel below drops file capabilities when the file is written.
        self.xattrs = Vec::new();
    }
}

impl Node {
    /// Writes all of `data` or, when space ran out after some bytes, a part of it. Only under a [`Use`](crate::node_use::Use).
    pub(crate) fn write(&self, append: bool, offset: u64, data: &[u8]) -> Result<Written> {
        if append && !self.core.coherence.delays() {
            return self.append_through(data);
        }
        self.throttle(data.len() as u64);
        let writer = lock(&self.writer);
        let offset = if append { read(&self.state).attributes.size } else { offset };
        let end = offset.checked_add(data.len() as u64).filter(|&end| end <= FILE_SIZE_MAX);
        let Some(end) = end else { return fail(Errno::EFBIG) };
        let mut done = 0;
        let mut went_through = false;
        while done < data.len() {
            let at = offset + done as u64;
            // A step ends at a multiple of its size, so that all but the first and last steps are whole blocks.
            let step = self.core.pool.step_bytes();
            let length = (step - at % step).min(end - at) as usize;
            match self.write_step(&writer, at, &data[done..done + length]) {
                Ok((count, is_cached)) => {
                    done += count;
                    went_through |= !is_cached;
                    if count < length {
                        break;
                    }
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        if went_through && self.core.keeps_deferred {
            // It is noted nowhere else.
            self.store_deferred()?;
        }
        Ok(Written { count: done, offset })
    }

    /// Writes a part: how many bytes, and whether they are cached.
    fn write_step(&self, _writer: &MutexGuard<'_, ()>, offset: u64, data: &[u8]) -> Result<(usize, bool)> {
        let end = offset + data.len() as u64;
        let blocks = block_of(offset)..blocks_for(end);
        let count = blocks.end - blocks.start;
        let (held, is_retiring) = {
            let state = read(&self.state);
            (state.blocks.run(blocks.start, count, false, |chunk| chunk.held) < count, state.is_retiring)
        };
        // Held blocks must not go below now, whatever room there is.
        let delays = self.core.coherence.delays();
        let cached = held || (delays && !is_retiring && end <= CACHED_SIZE_MAX && self.may_become_dirty(count * BLOCK));
        let patience = if held { Patience::LONG } else { Patience::SHORT };
        if cached && self.write_cached(offset, data, patience)? {
            return Ok((data.len(), true));
        }
        if held {
            return fail(Errno::ENOSPC);
        }
        Ok((self.core.with_room(|| self.write_through(offset, data))?, false))
    }

    /// Whether `bytes` more dirty bytes fit here and below; if not, tries to make it so.
    fn may_become_dirty(&self, bytes: u64) -> bool {
        let core = &self.core;
        match core.room_for(bytes) {
            Room::Enough => {}
            Room::Unforeseen => return false,
            Room::Short => {
                // What was accepted earlier goes first.
                for node in core.dirty_files() {
                    if !read(&node.state).error.failing {
                        let _ = node.write_back_other(u64::MAX);
                    }
                }
                if core.room_for(bytes) != Room::Enough {
                    return false;
                }
            }
        }
        self.throttle(bytes)
    }

    /// Writes back until `bytes` more may become dirty. The writer does it itself, so that nobody writes faster than
    /// the layer below takes it.
    fn throttle(&self, bytes: u64) -> bool {
        let pool = &self.core.pool;
        let bytes = bytes.min(pool.step_bytes());
        let dirty_max = pool.budget.dirty_max();
        if pool.budget.dirty() > dirty_max / 2 {
            pool.hurry();
        }
        if WrittenAt::is_said() {
            // It was accepted when there was room. No more comes before there is room again.
            return true;
        }
        let mut patience = Patience::SHORT;
        // As long as all layers together have half of it, none has more than it may.
        let may_dirty = || pool.budget.dirty() + bytes <= dirty_max / 2 || self.core.dirty.may_take(bytes);
        while !may_dirty() {
            match self.write_back_some(THROTTLE_BYTES, Core::is_beyond_its_part) {
                Progress::Made => {}
                progress if patience.wait(&progress) => {}
                _ => break,
            }
        }
        may_dirty()
    }

    /// Writes back up to `bytes` of this file or, if it has nothing to write, of the oldest dirty one of the layer that can be
    /// written. What is written back makes room when it is stored. What other layers have, if that `helps`, the flushers are asked to write: below may
    /// not answer there, which is nothing for a writer of this layer to wait for.
    fn write_back_some(&self, bytes: u64, helps: impl Fn(&Core<Node>) -> bool) -> Progress {
        if self.core.keeps_deferred && self.core.is_mostly_deferred() && self.store_some() == Progress::Made {
            return Progress::Made;
        }
        let own = match self.write_back(bytes) {
            Some(Ok(written)) if written > 0 => return Progress::Made,
            Some(_) => Progress::Impossible,
            // There will be room long before all of it is below.
            None => Progress::Elsewhere,
        };
        let others = self.try_others(
            |_| true,
            |node| {
                let written = node.write_back_other(bytes);
                if matches!(written, Some(Ok(0) | Err(_))) {
                    node.requeue_dirty();
                }
                written
            },
        );
        let near = own.max(others);
        let near = if near == Progress::Made { near } else { near.max(self.store_some()) };
        if near == Progress::Made {
            return near;
        }
        let is_far = |node: &Node| !self.is_near(node) && helps(&node.core);
        if self.core.lists.dirty_files(1, is_far).is_empty() {
            return near;
        }
        self.core.pool.want_room();
        Progress::Elsewhere
    }

    /// Has stored below what is deferred of this file, or of another one of the layer.
    fn store_some(&self) -> Progress {
        let own = match self.store_or_wait() {
            Some(Ok(stored)) if stored > 0 => return Progress::Made,
            Some(_) => Progress::Impossible,
            None => Progress::Elsewhere,
        };
        // Does not wait: the list is locked.
        let has_deferred =
            |node: &Node| node.core.keeps_deferred && try_read(&node.state).is_none_or(|state| state.has_deferred());
        own.max(self.try_others(has_deferred, |node| node.store_other()))
    }

    /// Whether it is a file of the same layer.
    fn is_near(&self, node: &Node) -> bool {
        std::ptr::eq(&*node.core, &*self.core)
    }

    /// Calls `attempt` with dirty files of the layer that `pick` takes, the oldest first, until one says that there was something to do.
    fn try_others(
        &self,
        pick: impl Fn(&Node) -> bool,
        attempt: impl Fn(&Arc<Node>) -> Option<Result<u64>>,
    ) -> Progress {
        let is_other = |node: &Node| !std::ptr::eq(node, self) && self.is_near(node) && pick(node);
        let mut progress = Progress::Impossible;
        for node in self.core.lists.dirty_files(OTHERS_MAX, is_other) {
            match attempt(&node) {
                Some(Ok(done)) if done > 0 => return Progress::Made,
                Some(_) => {}
                None => progress = Progress::Elsewhere,
            }
        }
        progress
    }

    /// Sets `bytes` of the cache's memory aside; nothing when no room could be made, or none in time.
    fn set_aside(&self, bytes: u64, mut patience: Patience) -> Option<Reservation<'_>> {
        loop {
            if let Some(reservation) = self.core.pool.budget.reserve(bytes) {
                return Some(reservation);
            }
            match self.write_back_some(bytes, |_| true) {
                Progress::Made => {}
                // What readers have set aside, or hold locked while they copy, is free again in a moment.
                progress if patience.wait(&progress) => {}
                _ => return None,
            }
        }
    }

    /// Keeps blocks back from write-back, or lets them go. To know of them takes memory; `ENOSPC` when no room can be made for that.
    pub(crate) fn hold(&self, range: Range<u64>, held: bool) -> Result<()> {
        if !held {
            self.update(None, |state| state.blocks.change_existing(range, |chunk, mask| chunk.held &= !mask));
            return Ok(());
        }
        let Some(mut reservation) = self.set_aside(cost_of(0, &range), Patience::LONG) else {
            return fail(Errno::ENOSPC);
        };
        self.update(Some(&mut reservation), |state| state.blocks.change(range, |chunk, mask| chunk.held |= mask));
        Ok(())
    }

    /// Puts `data` into the cache; false when there is no memory for it.
    fn write_cached(&self, offset: u64, data: &[u8], patience: Patience) -> Result<bool> {
        let end = offset + data.len() as u64;
        let blocks = block_of(offset)..blocks_for(end);
        let Some(mut reservation) = self.set_aside(cost_of(blocks.end - blocks.start, &blocks), patience) else {
            return Ok(false);
        };
        let mut edges = Vec::new();
        self.read_edges(offset, end, &mut edges)?;
        loop {
            let stored = self.update(Some(&mut reservation), |state| {
                let ready = |block: u64| {
                    state.blocks.has(block, known)
                        || !state.is_edge(block, offset, end)
                        || edges.iter().any(|edge| edge.0 == block)
                };
                if !ready(blocks.start) || !ready(blocks.end - 1) {
                    return None;
                }
                Some(self.store(state, offset, data, &edges))
            });
            match stored {
                Some(Ok(())) => return Ok(true),
                Some(Err(error)) => return Err(cache_failure(&error)),
                // A block that was cached a moment ago has been evicted.
                None => self.read_edges(offset, end, &mut edges)?,
            }
        }
    }

    /// Reads those blocks from below of which `offset..end` covers a part, the rest has content, and which are not
    /// cached. What is read stays true while the caller is the file's writer: only a dirty block changes what is below.
    fn read_edges(&self, offset: u64, end: u64, edges: &mut Vec<Edge>) -> Result<()> {
        let (blocks, below_size) = {
            let state = read(&self.state);
            let mut blocks = vec![block_of(offset), block_of(end - 1)];
            blocks.dedup();
            blocks.retain(|&block| state.is_edge(block, offset, end) && !state.blocks.has(block, known));
            (blocks, state.below_size)
        };
        for block in blocks.into_iter().filter(|&block| edges.iter().all(|edge| edge.0 != block)).collect::<Vec<_>>() {
            let mut buffer = self.core.pool.buffers.take(1);
            self.read_below(block * BLOCK, &mut buffer, below_size)?;
            let mut bytes = Box::new([0; BLOCK_SIZE]);
            bytes.copy_from_slice(&buffer);
            edges.push((block, bytes));
        }
        Ok(())
    }

    fn store(&self, state: &mut State, offset: u64, data: &[u8], edges: &[Edge]) -> std::io::Result<()> {
        let pool = &self.core.pool;
        let end = offset + data.len() as u64;
        // What is noted is where others find it.
        let small = if self.core.recorder.is_some() { 0 } else { pool.config.small_file_bytes };
        let blocks = block_of(offset)..blocks_for(end);
        let stored = (|| {
            for (block, bytes) in edges.iter().filter(|edge| !state.blocks.has(edge.0, known)) {
                // On the heap nothing is kept beyond the end of the file.
                let length = state.attributes.size.max(end).saturating_sub(block * BLOCK).min(BLOCK) as usize;
                state.content.write(&pool.segments, small, block * BLOCK, &bytes[..length])?;
            }
            state.content.write(&pool.segments, small, offset, data)
        })();
        if let Err(error) = stored {
            for block in blocks.filter(|&block| !state.blocks.has(block, |chunk| chunk.resident)) {
                let _ = state.content.punch(block * BLOCK, BLOCK);
            }
            return Err(error);
        }
        state.blocks.change(blocks, |chunk, mask| {
            chunk.resident |= mask;
            chunk.zero &= !mask;
            chunk.dirty |= mask;
            chunk.rewritten |= mask;
            chunk.touch(mask);
        });
        state.attributes.size = state.attributes.size.max(end);
        state.note_modified();
        state.time_dirty = true;
        Ok(())
    }

    /// Writes `data` below at once and updates what is cached of it.
    fn write_through(&self, offset: u64, data: &[u8]) -> Result<usize> {
        let _flush = lock(&self.flush);
        let handle = self.writer_below()?;
        let written = self.core.below.write(&Caller::ROOT, handle, offset, data)?;
        self.note_written(offset, &data[..written.count.min(data.len())])
    }

    /// Writes `data` below at once, at the end of the file as it is there.
    fn append_through(&self, data: &[u8]) -> Result<Written> {
        if data.is_empty() {
            self.validate()?;
            return Ok(Written { count: 0, offset: read(&self.state).attributes.size });
        }
        let _writer = lock(&self.writer);
        let _flush = lock(&self.flush);
        let handle = self.appender_below()?;
        let Written { count, offset } =
            self.core.with_room(|| self.core.below.write(&Caller::ROOT, handle, 0, data))?;
        let count = self.note_written(offset, &data[..count.min(data.len())])?;
        Ok(Written { count, offset })
    }

    /// Updates what is cached of what was written through. Under `writer` and `flush`.
    fn note_written(&self, offset: u64, data: &[u8]) -> Result<usize> {
        let pool = &self.core.pool;
        if data.is_empty() {
            return fail(Errno::ENOSPC);
        }
        let end = offset + data.len() as u64;
        let is_shared = self.core.coherence.is_shared();
        self.update(None, |state| {
            if is_shared && offset > state.attributes.size {
                // What is between them others have written.
                state.invalidate();
            }
            state.epoch += 1;
            let small = pool.config.small_file_bytes;
            for block in block_of(offset)..blocks_for(end) {
                if state.blocks.has(block, |chunk| chunk.resident) {
                    let from = offset.max(block * BLOCK);
                    let to = end.min((block + 1) * BLOCK);
                    let part = &data[(from - offset) as usize..(to - offset) as usize];
                    state.content.write(&pool.segments, small, from, part).map_err(|error| cache_failure(&error))?;
                    state.blocks.change(block..block + 1, |chunk, mask| chunk.rewritten |= mask);
                } else {
                    state.blocks.change_existing(block..block + 1, |chunk, mask| chunk.zero &= !mask);
                }
            }
            state.attributes.size = state.attributes.size.max(end);
            state.below_size = state.below_size.max(end);
            // Other dirty data will move the time below once more; else below's own time is the one to show.
            state.note_modified();
            state.time_dirty = state.blocks.counts().dirty > 0;
            state.stale |= !state.time_dirty;
            Ok(data.len())
        })
    }
}

impl State {
    /// Whether writing `offset..end` leaves bytes of `block` that have to come from below.
    fn is_edge(&self, block: u64, offset: u64, end: u64) -> bool {
        let start = block * BLOCK;
        let content_end = self.attributes.size.min(start + BLOCK);
        start < self.below_size && (offset > start || end < content_end)
    }
}

#[cfg(test)]
mod tests {
    use crate::blocks::BLOCK;
    use crate::cache::Cache;
    use crate::cache_pool::CachePool;
    use crate::config::CacheConfig;
    use poolfs_libservice::{Filter, Libservice, Memory, Result, Written};
    use poolfs_types::{Caller, HandleId, Name, NodeId, OpenFlags};
    use std::sync::mpsc::channel;
    use std::sync::{Arc, RwLock};
    use std::time::Duration;

    const ROOT: Caller = Caller::ROOT;

    /// Whose writes are answered only while nobody has the lock.
    struct Stopped(Arc<Memory>, RwLock<()>);

    impl Filter for Stopped {
        fn below(&self) -> &dyn Libservice {
            &*self.0
        }

        fn write(&self, caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
            let _resumed = self.1.read();
            self.0.write(caller, handle, offset, data)
        }

        fn write_pieces(&self, caller: &Caller, handle: HandleId, pieces: &[(u64, &[u8])]) -> Result<()> {
            let _resumed = self.1.read();
            self.0.write_pieces(caller, handle, pieces)
        }
    }

    /// A pool whose threads do nothing by themselves.
    fn pool() -> Arc<CachePool> {
        let hour = Duration::from_secs(3600);
        CachePool::new(CacheConfig { tick: hour, expire: hour, ..CacheConfig::with_limit(1 << 20) }).unwrap()
    }

    fn create(cache: &Cache, name: &str) -> HandleId {
        let name = Name::new(name.as_bytes()).unwrap();
        cache.create(&ROOT, NodeId::ROOT, name, 0o644, OpenFlags::READ_WRITE).unwrap().1
    }

    fn hold_and_write(cache: &Cache, handle: HandleId) -> Result<Written> {
        cache.hold(&ROOT, handle, 0..BLOCK, true)?;
        let written = cache.write(&ROOT, handle, 0, &[8; BLOCK as usize]);
        cache.hold(&ROOT, handle, 0..BLOCK, false)?;
        written
    }

    /// Who holds blocks makes room for what that takes as a writer does: also where another layer of the pool has it.
    #[test]
    fn blocks_are_held_though_all_memory_is_dirty_or_set_aside() {
        for is_near in [true, false] {
            let pool = pool();
            let cache = Cache::new(&pool, Memory::new());
            let other = if is_near { Arc::clone(&cache) } else { Cache::new(&pool, Memory::new()) };
            let (dirty, held) = (create(&other, "dirty"), create(&cache, "held"));
            other.write(&ROOT, dirty, 0, &[7; 256 << 10]).unwrap();
            let budget = &pool.pool.budget;
            let _others = budget.reserve(budget.allowed() - budget.used()).expect("the rest");
            assert!(hold_and_write(&cache, held).is_ok_and(|written| written.count as u64 == BLOCK), "{is_near}");
        }
    }

    #[test]
    fn no_writer_waits_for_good_for_a_layer_that_does_not_answer() {
        let pool = pool();
        let stopped = Arc::new(Stopped(Memory::new(), RwLock::default()));
        let hanging = Cache::new(&pool, Arc::clone(&stopped) as Arc<dyn Libservice>);
        let cache = Cache::new(&pool, Memory::new());
        // More than there are flushers.
        let files = ["a", "b", "c", "d", "e"].map(|name| create(&hanging, name));
        for file in files {
            hanging.write(&ROOT, file, 0, &[7; 32 << 10]).unwrap();
        }
        let held = create(&cache, "held");
        let budget = &pool.pool.budget;
        let others = budget.reserve(budget.allowed() - budget.used()).expect("the rest");
        let (done, answer) = channel();
        std::thread::scope(|scope| {
            let stop = stopped.1.write();
            scope.spawn(|| done.send(hold_and_write(&cache, held)));
            let answered = answer.recv_timeout(Duration::from_secs(60));
            drop(stop);
            assert!(answered.expect("it does not hang").is_err());
        });
        assert!(hold_and_write(&cache, held).is_ok(), "it is answered again");
        drop(others);
    }
}
