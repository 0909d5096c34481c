//! The view of a file for clients that read it without requests: the map of its segment, kept true while the file's state
//! changes.
//!
//! The map belongs to the state: it is written under the state's lock only. Before bytes are taken away, their blocks are
//! retracted ([`State::retract`]); every other change is published when it is booked ([`State::publish`]).

use crate::blocks::{BLOCK, CHUNK_BLOCKS, blocks_for, by_chunk};
use crate::content::Content;
use crate::core::Core;
use crate::failure::cache_failure;
use crate::limits::{GIVEN_MAX, VIEWS_MAX};
use crate::map_pages::{MapPages, PAGE_BLOCKS, PAGE_CHUNKS};
use crate::node::{Node, State};
use crate::segments::Segment;
use crate::sync::{read, try_write, write};
use poolfs_ipc::segment::{CAPACITY_MAX, Place, SegmentMap, capacity_for, collapse, map_length};
use poolfs_libservice::{Error, Lease, Result, Segment as Shared, fail};
use poolfs_types::{Errno, FileType};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Bytes that readers' faults may have brought back before they are looked for.
const STRAY_BYTES_MAX: u64 = 64 << 10;

/// One of the views of a pool; given back when dropped.
struct Permit(Arc<AtomicUsize>);

impl Permit {
    fn take(count: &Arc<AtomicUsize>) -> Option<Self> {
        let room = |count: usize| (count < VIEWS_MAX).then_some(count + 1);
        count.fetch_update(Ordering::AcqRel, Ordering::Acquire, room).ok()?;
        Some(Self(Arc::clone(count)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A file's map. Dropped, it ends for all who read by it.
pub(crate) struct View {
    map: SegmentMap,
    file: Segment,
    /// Blocks whose words have to be written anew.
    retracted: Vec<Range<u64>>,
    pages: MapPages,
    _permit: Permit,
}

impl View {
    fn new(core: &Core, size: u64) -> Result<Self> {
        let pool = &core.pool;
        let permit = Permit::take(&pool.views).ok_or_else(|| Error::from(Errno::EOPNOTSUPP))?;
        let capacity = capacity_for(size);
        let pages = MapPages::new(core);
        let file = pool.segments.create().map_err(|error| cache_failure(&error))?;
        let map = file.share(map_length(capacity) as u64).and_then(|()| {
            let map = file.with_file(|file| Ok(SegmentMap::new(file, capacity)));
            map?.map_err(|errno| io::Error::from_raw_os_error(errno.raw()))
        });
        let map = map.map_err(|error| cache_failure(&error))?;
        Ok(Self { map, file, retracted: Vec::new(), pages, _permit: permit })
    }

    fn publish(&mut self, state: &State, blocks: Range<u64>) {
        for (chunk, mask) in by_chunk(blocks.start..blocks.end.min(self.map.capacity())) {
            self.publish_chunk(state, chunk, mask);
        }
    }

    /// Shows all that is there, in a map in which nothing has been written.
    fn publish_all(&mut self, state: &State) {
        for chunk in state.blocks.indices() {
            self.publish(state, chunk * CHUNK_BLOCKS..(chunk + 1) * CHUNK_BLOCKS);
        }
    }

    /// A page in which no word has been written says that nothing is there. It is left so as long as that is true, and when there is no
    /// room for it.
    fn publish_chunk(&mut self, state: &State, chunk: u64, mask: u64) {
        let page = chunk / PAGE_CHUNKS;
        if self.pages.is_written(page) {
            return self.write_words(state, chunk, mask);
        }
        let is_there = state.blocks.chunk(chunk).is_some_and(|chunk| (chunk.resident | chunk.zero) & mask != 0);
        if is_there && self.pages.take(page) {
            // What found no room before.
            for chunk in page * PAGE_CHUNKS..(page + 1) * PAGE_CHUNKS {
                self.write_words(state, chunk, u64::MAX);
            }
        }
    }

    fn write_words(&self, state: &State, chunk: u64, mask: u64) {
        let (resident, zero) = state.blocks.chunk(chunk).map_or((0, 0), |chunk| (chunk.resident, chunk.zero));
        for at in (0..CHUNK_BLOCKS).filter(|at| mask & (1 << at) != 0) {
            let place = match 1 << at {
                bit if resident & bit != 0 => Place::Resident,
                bit if zero & bit != 0 => Place::Zero,
                _ => Place::Absent,
            };
            self.map.publish(chunk * CHUNK_BLOCKS + at, place);
        }
    }

    fn retract(&mut self, blocks: Range<u64>) {
        let pages = blocks.start / PAGE_BLOCKS..blocks.end.div_ceil(PAGE_BLOCKS);
        // To read a word gives its page memory, too.
        for page in pages.filter(|&page| self.pages.is_written(page)) {
            let (start, end) = (page * PAGE_BLOCKS, (page + 1) * PAGE_BLOCKS);
            self.map.retract(start.max(blocks.start)..end.min(blocks.end));
        }
        self.retracted.push(blocks);
    }

    /// Frees what readers' faults have brought back of pages in which no word has been written.
    fn sweep_map(&self) {
        let held = self.pages.bytes();
        if !self.file.allocated().is_ok_and(|bytes| bytes > held + STRAY_BYTES_MAX) {
            return;
        }
        for page in (0..self.map.capacity().div_ceil(PAGE_BLOCKS)).filter(|&page| !self.pages.is_written(page)) {
            if let Err(error) = self.file.punch((page + 1) * BLOCK, BLOCK) {
                tracing::warn!(%error, "what readers brought back of a map could not be freed");
                return;
            }
        }
    }
}

impl State {
    /// To be called before bytes of these blocks are taken away, or changed otherwise than by an ordinary write.
    pub(crate) fn retract(&mut self, blocks: Range<u64>) {
        if let Some(huge) = &mut self.huge {
            huge.note_loss(&blocks);
        }
        if let Some(view) = &mut self.view {
            let blocks = blocks.start..blocks.end.min(view.map.capacity());
            if blocks.start < blocks.end {
                view.retract(blocks);
            }
        }
    }

    /// Shows what has changed: these chunks, and what was retracted.
    pub(crate) fn publish(&mut self, changed: &[u64]) {
        let Some(mut view) = self.view.take() else { return };
        for blocks in view.retracted.drain(..).collect::<Vec<_>>() {
            view.publish(self, blocks);
        }
        for chunk in changed {
            view.publish(self, chunk * CHUNK_BLOCKS..(chunk + 1) * CHUNK_BLOCKS);
        }
        view.map.set_size(self.attributes.size);
        self.view = Some(view);
    }

    /// Ends the view, if there is one.
    pub(crate) fn end_view(&mut self) {
        self.view = None;
        self.blocks.note_changes(false);
        if self.blocks.counts().resident == 0 {
            self.empty();
        }
    }

    /// Gives the memory of its content back, of which nothing is cached any more.
    pub(crate) fn empty(&mut self) {
        self.content = Content::Empty;
        self.huge = None;
        self.given = Vec::new();
        self.is_retiring = false;
    }

    /// What a client is given to read it by itself.
    fn descriptors(&self) -> Result<Shared> {
        let (Some(view), Content::Segment(segment)) = (&self.view, &self.content) else {
            return fail(Errno::EOPNOTSUPP);
        };
        let files = view.file.reader().and_then(|map| Ok((map, segment.reader()?)));
        let (map, data) = files.map_err(|error| cache_failure(&error))?;
        Ok(Shared { map, data, capacity: view.map.capacity() })
    }

    /// Frees what readers' faults have brought back of blocks that are not there. Nobody copies from those.
    fn sweep(&mut self) {
        if let Some(view) = &self.view {
            view.sweep_map();
        }
        let (Some(view), Content::Segment(segment)) = (&self.view, &self.content) else { return };
        let held = self.blocks.counts().resident * BLOCK;
        if !segment.allocated().is_ok_and(|bytes| bytes > held + STRAY_BYTES_MAX) {
            return;
        }
        let capacity = view.map.capacity();
        let mut at = 0;
        while at < capacity {
            let gone = self.blocks.run(at, capacity - at, false, |chunk| chunk.resident);
            if gone > 0
                && let Err(error) = segment.punch(at * BLOCK, gone * BLOCK)
            {
                tracing::warn!(%error, "what readers brought back of a cache segment could not be freed");
                return;
            }
            at += gone;
            at += self.blocks.run(at, capacity - at, true, |chunk| chunk.resident);
        }
    }
}

impl Node {
    /// The file's segment with a map, which is made if there is none that is large enough. Only under a [`Use`](crate::node::Use).
    pub(crate) fn segment(self: &Arc<Self>, lease: &Arc<dyn Lease>) -> Result<Shared> {
        let pool = &self.core.pool;
        if pool.is_short() {
            return fail(Errno::EOPNOTSUPP);
        }
        let attributes = self.attributes()?;
        if attributes.file_type != FileType::Regular || !pool.segments.is_shared() {
            return fail(Errno::EOPNOTSUPP);
        }
        let is_enough = |state: &State| {
            let blocks = blocks_for(state.attributes.size).min(CAPACITY_MAX);
            state.view.as_ref().is_some_and(|view| view.map.capacity() >= blocks)
        };
        let is_new = !is_enough(&read(&self.state));
        if is_new {
            let mut view = View::new(&self.core, attributes.size)?;
            self.update(None, |state| {
                // Another one may have come meanwhile.
                if is_enough(state) {
                    return Ok(());
                }
                if state.is_retiring {
                    return Err(io::ErrorKind::Unsupported.into());
                }
                // Before there is a segment, which goes with the view when nothing is cached.
                state.end_view();
                let segment = state.content.promote(&pool.segments)?;
                segment.hold()?;
                segment.share(view.map.capacity() * BLOCK)?;
                view.publish_all(state);
                state.blocks.note_changes(true);
                state.huge.get_or_insert_default().reach(view.map.capacity());
                state.view = Some(Box::new(view));
                Ok(())
            })
            .map_err(|error: io::Error| match error.kind() {
                io::ErrorKind::Unsupported => Errno::EOPNOTSUPP.into(),
                _ => cache_failure(&error),
            })?;
            pool.viewed(self);
        }
        self.give(lease)
    }

    /// The descriptors of what there is by now, which may be nothing any more; from then on it is known who has them.
    fn give(&self, lease: &Arc<dyn Lease>) -> Result<Shared> {
        let holder = lease.holder();
        {
            let state = read(&self.state);
            if holder.as_ref().is_none_or(|holder| state.was_given(holder)) {
                return state.descriptors();
            }
        }
        let mut state = write(&self.state);
        let shared = state.descriptors()?;
        holder.iter().for_each(|holder| state.note_given(holder, GIVEN_MAX));
        Ok(shared)
    }

    /// Looks for memory that readers brought back, and whether there still are any after the view's end, unless the file is busy.
    pub(crate) fn sweep_segment(&self) {
        if let Some(mut state) = try_write(&self.state) {
            state.sweep();
            let State { view, content, .. } = &mut *state;
            if let (None, Content::Segment(segment)) = (view, content) {
                segment.let_go();
            }
        }
    }

    /// Has what clients read of it held in huge pages, until it is `end`; what is left then is taken up the next time. Not under the state's lock, for the kernel takes its time: what is taken away meanwhile is found by the sweep.
    ///
    /// # Errors
    /// Those of the kernel; what it did not do is left alone until something comes or goes.
    pub(crate) fn hold_in_huge_pages(&self, end: Instant) -> io::Result<()> {
        let (runs, file) = {
            let Some(mut state) = try_write(&self.state) else { return Ok(()) };
            let state = &mut *state;
            let (Some(huge), Content::Segment(segment)) = (&mut state.huge, &state.content) else { return Ok(()) };
            let runs = huge.visit(&state.blocks);
            if runs.is_empty() {
                return Ok(());
            }
            (runs, segment.with_file(File::try_clone)?)
        };
        for run in runs {
            let is_late = Instant::now() >= end;
            if !is_late {
                collapse(&file, run.start * BLOCK, ((run.end - run.start) * BLOCK) as usize)?;
            }
            let mut state = write(&self.state);
            let Some(huge) = &mut state.huge else { return Ok(()) };
            if is_late {
                huge.note_rest();
                return Ok(());
            }
            huge.note_huge(&run);
        }
        Ok(())
    }

    /// Whether clients may read it by themselves.
    pub(crate) fn has_view(&self) -> bool {
        read(&self.state).view.is_some()
    }

    /// Whether clients read it by themselves, or did while what is cached of it came, or it was given as a whole.
    pub(crate) fn was_viewed(&self) -> bool {
        let state = read(&self.state);
        state.huge.is_some() || !state.given.is_empty()
    }
}
