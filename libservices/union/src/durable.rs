//! Flushes sketches to disk: data, then the bits that show it; and the directories that a copy-up made or changed. A thread does
//! this periodically for files that nobody syncs.

use crate::Union;
use crate::bitmap::{DirtySectors, file_bytes};
use crate::journal::{Ending, Fill};
use crate::marks;
use crate::node::{Content, Node, OpenFile};
use crate::sync::lock;
use poolfs_libservice::{Durability, Held, Opened, Result};
use poolfs_types::{Caller, OpenFlags, SetAttributes};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

const ROOT: &Caller = &Caller::ROOT;

/// Sectors of a bitmap that are written at once.
const SECTORS_AT_ONCE: u32 = 128;

/// Sketches whose bitmap on disk is behind. Each node here is pinned.
#[derive(Default)]
pub(crate) struct Dirty {
    lists: Mutex<Lists>,
}

#[derive(Default)]
struct Lists {
    waiting: VecDeque<Arc<Node>>,
    /// taken from those that wait, by threads that bring them to disk just now
    under_way: Vec<Arc<Node>>,
}

impl Lists {
    /// Takes a node from those that wait; whether it was among them.
    fn remove(&mut self, node: &Arc<Node>) -> bool {
        let at = self.waiting.iter().position(|other| Arc::ptr_eq(other, node));
        at.is_some_and(|at| self.waiting.remove(at).is_some())
    }

    fn take(&mut self) -> Option<Arc<Node>> {
        let node = self.waiting.pop_front()?;
        self.under_way.push(node.clone());
        Some(node)
    }
}

/// What the background thread is told.
#[derive(Default)]
pub(crate) struct Calls {
    waiting: Mutex<Waiting>,
    wake: Condvar,
}

#[derive(Default)]
struct Waiting {
    end: bool,
    journal: bool,
}

/// Why the background thread does something now.
enum Call {
    /// a generation of the journal is full
    Journal,
    /// it is time
    Interval,
}

impl Calls {
    pub fn end(&self) {
        lock(&self.waiting).end = true;
        self.wake.notify_all();
    }

    fn end_generation(&self) {
        if !std::mem::replace(&mut lock(&self.waiting).journal, true) {
            self.wake.notify_all();
        }
    }

    /// Waits for a call, at most for `time`; nothing: the end has come.
    fn wait(&self, time: Duration) -> Option<Call> {
        let idle = |waiting: &mut Waiting| !waiting.end && !waiting.journal;
        let (mut waiting, _) =
            self.wake.wait_timeout_while(lock(&self.waiting), time, idle).unwrap_or_else(PoisonError::into_inner);
        let call = if std::mem::take(&mut waiting.journal) { Call::Journal } else { Call::Interval };
        (!waiting.end).then_some(call)
    }
}

/// What the background thread does: every `interval`, the sketches that are dirty at its beginning; and those whose generation of the journal
/// is full, so that no writer has to.
pub(crate) fn run(union: &Weak<Union>, calls: &Calls, interval: Duration) {
    let mut due = Instant::now() + interval;
    while let Some(call) = calls.wait(due.saturating_duration_since(Instant::now())) {
        let Some(union) = union.upgrade() else { return };
        let done = match call {
            Call::Journal => union.renew_journal(Ending::Full),
            Call::Interval => {
                due = Instant::now() + interval;
                union.flush_all().and_then(|()| union.renew_journal(Ending::Any))
            }
        };
        if let Err(error) = done {
            tracing::warn!(%error, "a sketch could not be brought to disk");
        }
    }
}

impl Union {
    /// After blocks have moved: has the bitmap written soon. With too many waiting, the oldest is written now.
    pub(crate) fn after_move(&self, node: &Arc<Node>) {
        if self.queue(node) {
            self.trim_dirty();
        }
        self.heed_journal();
    }

    /// After something was recorded: has a generation of the journal ended that is full.
    pub(crate) fn heed_journal(&self) {
        match self.journal.fill() {
            Fill::Headroom => {}
            Fill::Begun => self.calls.end_generation(),
            Fill::Full => {
                if let Err(error) = self.renew_journal(Ending::Full) {
                    tracing::warn!(%error, "a sketch could not be brought to disk");
                }
            }
        }
    }

    /// Has the bitmap of a node written soon; whether it was not to be before.
    pub(crate) fn queue(&self, node: &Arc<Node>) -> bool {
        if node.queued.swap(true, Ordering::AcqRel) {
            return false;
        }
        self.nodes.pin(node);
        self.have_flushed();
        lock(&self.dirty.lists).waiting.push_back(node.clone());
        true
    }

    /// While too many bitmaps wait, writes the oldest.
    pub(crate) fn trim_dirty(&self) {
        let oldest = || {
            let mut lists = lock(&self.dirty.lists);
            if lists.waiting.len() > self.dirty_sketches_max { lists.take() } else { None }
        };
        while let Some(node) = oldest() {
            // What another file meets is no error of this write; that file's fsync reports it.
            if let Err(error) = self.flush_queued(&node) {
                tracing::warn!(%error, "a sketch could not be brought to disk");
                return;
            }
        }
    }

    /// Ends a generation of the journal, if there is such a one.
    pub(crate) fn renew_journal(&self, ending: Ending) -> Result<()> {
        let Some((generation, nodes)) = self.journal.ending(ending) else { return Ok(()) };
        // One that is not known any more has nothing that is ahead of the disk.
        for node in nodes.into_iter().filter_map(|id| self.nodes.get(id)) {
            self.flush_sketch(&node, Durability::Data)?;
        }
        self.journal.end(generation)
    }

    /// Brings a node to disk that was taken from those that wait.
    fn flush_queued(&self, node: &Arc<Node>) -> Result<()> {
        node.queued.store(false, Ordering::Release);
        let result = self.flush_sketch(node, Durability::Data);
        let again = result.is_err() && !node.queued.swap(true, Ordering::AcqRel);
        {
            let mut lists = lock(&self.dirty.lists);
            if let Some(at) = lists.under_way.iter().position(|other| Arc::ptr_eq(other, node)) {
                lists.under_way.swap_remove(at);
            }
            if again {
                lists.waiting.push_back(node.clone());
                return result;
            }
        }
        self.close_unused(node);
        self.nodes.unpin(node);
        result
    }

    /// Brings every sketch to disk that waits for it or is on its way; returns the first failure, after trying all.
    pub(crate) fn flush_all(&self) -> Result<()> {
        let mut first = self.complete_all_deferred();
        let (waiting, under_way) = {
            let lists = lock(&self.dirty.lists);
            (lists.waiting.len(), lists.under_way.clone())
        };
        for _ in 0..waiting {
            let Some(node) = lock(&self.dirty.lists).take() else { break };
            first = first.and(self.flush_queued(&node));
        }
        // What another thread does with these has ended when this returns, and is repeated if it failed.
        for node in under_way {
            first = first.and(self.flush_sketch(&node, Durability::Data));
        }
        first
    }

    /// Makes the moved blocks of a sketch durable, then the bits that say so. A file without any is only synced.
    pub(crate) fn flush_sketch(&self, node: &Arc<Node>, durability: Durability) -> Result<()> {
        self.complete_deferred(node)?;
        let Some(held) = node.upper() else { return Ok(()) };
        let sync = || {
            let data = Opened::file(&self.upper, ROOT, held.node(), OpenFlags::READ_ONLY)?;
            self.upper.fsync(ROOT, data.id(), durability)
        };
        if matches!(node.read().content, Content::Sketch(_)) {
            self.flush_with(node, &held, &sync)?;
            self.statistics.settled();
        }
        Ok(())
    }

    /// The same, where `sync` makes the upper file's data durable, which is done in any case.
    fn flush_with(&self, node: &Arc<Node>, held: &Held, sync: &dyn Fn() -> Result<()>) -> Result<()> {
        let result = self.flush_alone(node, held, sync, &lock(&node.flushing));
        // Whoever removed the file while the lock was held has left the bitmap to its holder.
        let orphan = {
            let state = node.read();
            match &state.content {
                Content::Sketch(sketch) if state.removed => Some(sketch.record.id),
                _ => None,
            }
        };
        result.and(orphan.map_or(Ok(()), |id| self.work.remove_bitmap(&id)))
    }

    fn flush_alone(
        &self,
        node: &Arc<Node>,
        held: &Held,
        sync: &dyn Fn() -> Result<()>,
        _: &MutexGuard<'_, ()>,
    ) -> Result<()> {
        let settled;
        if !node.read().removed {
            self.copies.complete_most(node);
        }
        let (sectors, id, first, bytes) = {
            let mut state = node.write();
            let removed = state.removed;
            // What cannot be copied does not keep the rest from the disk.
            settled = if removed { Ok(()) } else { self.copies.settle(node, &mut state, 0..u64::MAX) };
            match &mut state.content {
                Content::Sketch(sketch) if sketch.is_dirty() && !removed => {
                    self.move_ahead(node, held, sketch);
                    let id = sketch.record.id;
                    let sectors = sketch.map.as_mut().map(|map| map.bitmap.take_dirty(&id)).unwrap_or_default();
                    (sectors, id, !sketch.record.bitmap_durable, file_bytes(sketch.origin.size))
                }
                Content::Sketch(sketch) => (DirtySectors::default(), sketch.record.id, false, 0),
                _ => {
                    drop(state);
                    return sync();
                }
            }
        };
        let mut result = sync().and_then(|()| self.write_sectors(&id, &sectors, first, bytes));
        let mut state = node.write();
        let removed = state.removed;
        if !matches!(state.content, Content::Sketch(_)) {
            // It became an ordinary file meanwhile, perhaps before the bitmap was made.
            self.work.remove_bitmap(&id)?;
        }
        let before = self.upper.getattr(ROOT, held.node());
        if let Content::Sketch(sketch) = &mut state.content {
            if result.is_ok() && first && !sectors.is_empty() {
                let record = crate::format::SketchRecord { bitmap_durable: true, ..sketch.record };
                result = marks::set(&*self.upper, held.node(), marks::SKETCH, &record.encode());
                sketch.record.bitmap_durable = result.is_ok();
            }
            if result.is_err()
                && let Some(map) = &mut sketch.map
            {
                map.bitmap.put_back(&sectors);
            }
            if result.is_ok() && !removed && sketch.is_complete() && !sketch.is_dirty() {
                self.dissolve(&mut state)?;
            }
        }
        if let (Ok(before), Ok(after)) = (before, self.upper.getattr(ROOT, held.node())) {
            node.changed.hide(before.changed, after.changed);
        }
        drop(state);
        result?;
        settled?;
        if first && !sectors.is_empty() {
            let file = Opened::file(&self.upper, ROOT, held.node(), OpenFlags::READ_ONLY)?;
            self.upper.fsync(ROOT, file.id(), Durability::All)?;
        }
        Ok(())
    }

    /// Stores sectors of a bitmap of so many bytes, of which the blocks are durable.
    pub(crate) fn write_sectors(&self, id: &[u8; 16], sectors: &DirtySectors, first: bool, bytes: u64) -> Result<()> {
        if sectors.is_empty() {
            return Ok(());
        }
        let (bitmap, file) = match self.work.bitmap(id)? {
            Some((bitmap, _)) => {
                let file = Opened::file(&self.upper, ROOT, bitmap.node(), OpenFlags::READ_WRITE)?;
                (bitmap, file)
            }
            None => self.work.make_bitmap(id)?,
        };
        if first {
            let size = SetAttributes { size: Some(bytes), ..SetAttributes::default() };
            self.upper.setattr(ROOT, bitmap.node(), &size, None)?;
        }
        for (offset, bytes) in sectors.pieces(SECTORS_AT_ONCE) {
            file.write_full(offset, &bytes)?;
        }
        // Its times are nobody's business.
        self.upper.fsync(ROOT, file.id(), if first { Durability::All } else { Durability::Data })?;
        if first { self.work.sync_names() } else { Ok(()) }
    }

    /// `fsync` of an open file: the sketch, the upper file as this handle sees it, and what its copy-up made.
    pub(crate) fn sync_file(&self, file: &OpenFile, durability: Durability) -> Result<()> {
        let node = &file.node;
        self.complete_deferred(node)?;
        let Some(held) = node.upper() else { return Ok(()) };
        // By this handle: it is the one that learns of its failed write-backs, and no bit may say of a block that was lost
        // there that it has moved.
        let data = self.upper_handle(file, &held)?.id();
        let sync = || self.upper.fsync(ROOT, data, durability);
        let sketch = matches!(node.read().content, Content::Sketch(_));
        if sketch { self.flush_with(node, &held, &sync) } else { sync() }?;
        self.sync_parents(node)
    }

    /// Makes the directories durable that copy-ups made or changed, from `node` upwards.
    pub(crate) fn sync_parents(&self, node: &Arc<Node>) -> Result<()> {
        let indexed = node.read().index_links.is_some();
        if indexed && self.work.undurable.load(Ordering::Acquire) {
            self.work.sync_names()?;
        }
        let mut next = node.parent();
        while let Some(directory) = next {
            self.sync_undurable(&directory)?;
            next = directory.parent();
        }
        Ok(())
    }

    /// Makes a directory durable that a copy-up made or changed. Whoever comes second waits for the first.
    fn sync_undurable(&self, directory: &Node) -> Result<()> {
        let _syncing = lock(&directory.flushing);
        if directory.undurable.swap(false, Ordering::AcqRel)
            && let Some(held) = directory.upper()
            && let Err(error) = self.work.sync_directory(held.node())
        {
            directory.undurable.store(true, Ordering::Release);
            return Err(error);
        }
        Ok(())
    }

    /// Closes the branches' files of a sketch that nobody has open and that has nothing to bring to disk.
    pub(crate) fn close_unused(&self, node: &Arc<Node>) {
        if !lock(&node.handles).is_empty() {
            return;
        }
        let mut state = node.write();
        let removed = state.removed;
        if let Content::Sketch(sketch) = &mut state.content
            && (removed || !sketch.is_dirty())
        {
            sketch.files = None;
        }
        drop(state);
        // Its room is wanted back when the last who holds it lets it go, not when the list is written.
        if removed && node.queued.load(Ordering::Acquire) && lock(&self.dirty.lists).remove(node) {
            node.queued.store(false, Ordering::Release);
            self.nodes.unpin(node);
        }
    }
}
