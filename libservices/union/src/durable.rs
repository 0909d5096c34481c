//! Bringing sketches to disk: data, then the bits that say so; the directories a copy-up made or changed; and the thread
//! that does it from time to time for files nobody syncs.

use crate::Union;
use crate::bitmap::{SECTOR_BYTES, file_bytes};
use crate::branch::{Held, Opened};
use crate::marks;
use crate::node::{Content, Node, OpenFile, lock};
use poolfs_libservice::{Durability, Result};
use poolfs_types::{Caller, OpenFlags, SetAttributes};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::Duration;

const ROOT: &Caller = &Caller::ROOT;

/// Sectors of a bitmap on their way to disk.
type Sectors = Vec<(u32, [u8; SECTOR_BYTES])>;

/// Sketches whose bitmap on disk is behind. Each waiting node is pinned.
#[derive(Default)]
pub(crate) struct Dirty {
    queue: Mutex<VecDeque<Arc<Node>>>,
}

/// How the background thread is told to end.
#[derive(Default)]
pub(crate) struct Stop {
    stopped: Mutex<bool>,
    wake: Condvar,
}

impl Stop {
    pub fn stop(&self) {
        *lock(&self.stopped) = true;
        self.wake.notify_all();
    }

    /// Waits for `time`; whether the end has come.
    fn wait(&self, time: Duration) -> bool {
        let guard = lock(&self.stopped);
        match self.wake.wait_timeout_while(guard, time, |stopped| !*stopped) {
            Ok((stopped, _)) => *stopped,
            Err(poisoned) => *poisoned.into_inner().0,
        }
    }
}

/// What the background thread does: every `interval`, the sketches that are dirty at its beginning.
pub(crate) fn run(union: &Weak<Union>, stop: &Stop, interval: Duration) {
    while !stop.wait(interval) {
        let Some(union) = union.upgrade() else { return };
        if let Err(error) = union.flush_all() {
            tracing::warn!(%error, "a sketch could not be brought to disk");
        }
    }
}

impl Union {
    /// After blocks have moved: has the bitmap written soon. With too many waiting, the oldest is written now.
    pub(crate) fn after_move(&self, node: &Arc<Node>) {
        if node.queued.swap(true, Ordering::AcqRel) {
            return;
        }
        self.nodes.pin(node);
        let oldest = {
            let mut queue = lock(&self.dirty.queue);
            queue.push_back(node.clone());
            if queue.len() > self.dirty_sketches_max { queue.pop_front() } else { None }
        };
        // What another file meets is no error of this write; that file's fsync reports it.
        if let Some(Err(error)) = oldest.map(|oldest| self.flush_queued(&oldest)) {
            tracing::warn!(%error, "a sketch could not be brought to disk");
        }
    }

    /// Brings a node to disk that was taken from the queue.
    fn flush_queued(&self, node: &Arc<Node>) -> Result<()> {
        node.queued.store(false, Ordering::Release);
        let result = self.flush_sketch(node, Durability::Data);
        if result.is_err() && !node.queued.swap(true, Ordering::AcqRel) {
            lock(&self.dirty.queue).push_back(node.clone());
            return result;
        }
        if lock(&node.handles).is_empty() {
            self.close_files(node);
        }
        self.nodes.unpin(node);
        result
    }

    /// Brings every waiting sketch to disk; returns the first failure, after trying all.
    pub(crate) fn flush_all(&self) -> Result<()> {
        let mut first = Ok(());
        let waiting = lock(&self.dirty.queue).len();
        for _ in 0..waiting {
            let Some(node) = lock(&self.dirty.queue).pop_front() else { break };
            let result = self.flush_queued(&node);
            if first.is_ok() {
                first = result;
            }
        }
        first
    }

    /// Makes the moved blocks of a sketch durable, then the bits that say so. A file without any is only synced.
    pub(crate) fn flush_sketch(&self, node: &Arc<Node>, durability: Durability) -> Result<()> {
        let _flushing = lock(&node.flushing);
        let Some(held) = node.upper() else { return Ok(()) };
        let (sectors, id, first, bytes) = {
            let mut state = node.write();
            let removed = state.removed;
            match &mut state.content {
                Content::Sketch(sketch) if sketch.is_dirty() && !removed => {
                    let id = sketch.record.id;
                    let sectors = sketch.map.as_mut().map(|map| map.bitmap.take_dirty(&id)).unwrap_or_default();
                    (sectors, id, !sketch.record.bitmap_durable, file_bytes(sketch.origin.size))
                }
                Content::Sketch(sketch) => (Vec::new(), sketch.record.id, false, 0),
                _ => return Ok(()),
            }
        };
        let mut result = self.write_sectors(&held, &id, &sectors, first, bytes, durability);
        let mut state = node.write();
        let removed = state.removed;
        if let Content::Sketch(sketch) = &mut state.content {
            if result.is_ok() && first && !sectors.is_empty() {
                let record = crate::format::SketchRecord { bitmap_durable: true, ..sketch.record };
                result = marks::set(&*self.upper, held.node(), marks::SKETCH, &record.encode());
                sketch.record.bitmap_durable = result.is_ok();
            }
            if result.is_err()
                && let Some(map) = &mut sketch.map
            {
                map.bitmap.put_back(sectors.iter().map(|&(sector, _)| sector));
            }
            let complete = sketch.is_complete() && !sketch.is_dirty();
            if removed {
                self.work.remove_bitmap(&id)?;
            } else if result.is_ok() && complete {
                self.dissolve(&mut state)?;
            }
        }
        drop(state);
        result?;
        if first && !sectors.is_empty() {
            let file = Opened::file(&self.upper, ROOT, held.node(), OpenFlags::READ_ONLY)?;
            self.upper.fsync(ROOT, file.id(), Durability::All)?;
        }
        Ok(())
    }

    fn write_sectors(
        &self,
        held: &Held,
        id: &[u8; 16],
        sectors: &Sectors,
        first: bool,
        bytes: u64,
        durability: Durability,
    ) -> Result<()> {
        let data = Opened::file(&self.upper, ROOT, held.node(), OpenFlags::READ_ONLY)?;
        self.upper.fsync(ROOT, data.id(), durability)?;
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
        for (sector, bytes) in sectors {
            file.write_full(u64::from(*sector) * SECTOR_BYTES as u64, bytes)?;
        }
        self.upper.fsync(ROOT, file.id(), Durability::All)?;
        if first { self.work.sync_names() } else { Ok(()) }
    }

    /// `fsync` of an open file: the sketch, the upper file as this handle sees it, and what its copy-up made.
    pub(crate) fn sync_file(&self, file: &OpenFile, durability: Durability) -> Result<()> {
        let node = &file.node;
        let Some(held) = node.upper() else { return Ok(()) };
        let sketch = matches!(node.read().content, Content::Sketch(_));
        // This handle's own sync comes first: it is the one that learns of its failed write-backs.
        let own = self.upper.fsync(ROOT, self.upper_handle(file, &held)?.id(), durability);
        if sketch {
            self.flush_sketch(node, durability)?;
        }
        own?;
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
            if directory.undurable.swap(false, Ordering::AcqRel)
                && let Some(held) = directory.upper()
                && let Err(error) = self.work.sync_directory(held.node())
            {
                directory.undurable.store(true, Ordering::Release);
                return Err(error);
            }
            next = directory.parent();
        }
        Ok(())
    }

    /// Closes the branches' files of a sketch that nobody has open and that has nothing to bring to disk.
    pub(crate) fn close_files(&self, node: &Node) {
        let mut state = node.write();
        if let Content::Sketch(sketch) = &mut state.content
            && !sketch.is_dirty()
        {
            sketch.files = None;
        }
    }
}
