//! Deferred copy-ups: the first small write of a lower file is answered before its upper file is made.
//!
//! Making a sketch takes some thirty system calls, most of them on the branch's journal; the write itself is a few bytes. So the
//! bytes of a first write within one block are kept with the node, and in the [journal](crate::journal), and the copy-up comes
//! later: by a thread of the union when first writes have ceased for a moment, or by the first request that needs the upper file
//! (a second write, fsync, any change of the file's attributes or names). Readers see the lower file with these bytes in it. This
//! is copy-after-write taken one step further: not only the rest of the block comes after the write, but the file as well.
//!
//! The number of deferred copy-ups is bounded, and none is deferred when the upper branch is short of space: then it is the
//! writer that gets the error.

use crate::Union;
use crate::bitmap::SKETCH_SIZE_MAX;
use crate::changes::now;
use crate::copyup::Bytes;
use crate::first_write::FirstWrite;
use crate::format::BLOCK;
use crate::format::{ORIGIN_PATH_MAX, Origin};
use crate::links::has_several_names;
use crate::node::{Content, Node, OpenFile, State};
use crate::sync::lock;
use poolfs_libservice::{Held, Result, Spending, Written, fail};
use poolfs_types::{Attributes, Caller, Errno, FileType, NodeId, OpenFlags, SetAttributes, SetTime};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::{Duration, Instant};

/// How long first writes have to have ceased before the thread begins: a burst of them does not compete with it.
const LINGER: Duration = Duration::from_millis(2);

/// How long the thread leaves a copy-up alone that has failed.
const RETRY: Duration = Duration::from_secs(1);

/// Headroom that an upper branch has to have for a copy-up to come later: what all that wait may take, many times.
const ROOM_BYTES_MIN: u64 = 64 << 20;

/// Inodes that it has to have, where these are counted.
const ROOM_FILES_MIN: u64 = 1 << 14;

/// The files whose copy-up is still to come. Each node here is pinned.
pub(crate) struct Deferred {
    queue: Mutex<Queue>,
    wake: Condvar,
    max: usize,
    /// shared by who notes a first write with its file's path, owned by who changes the paths of files below a directory
    paths: RwLock<()>,
}

struct Queue {
    nodes: VecDeque<Arc<Node>>,
    last: Instant,
    stop: bool,
}

impl Deferred {
    /// At most `max` copy-ups wait.
    pub fn new(max: usize) -> Self {
        let queue = Queue { nodes: VecDeque::new(), last: Instant::now(), stop: false };
        Deferred { queue: Mutex::new(queue), wake: Condvar::new(), max, paths: RwLock::new(()) }
    }

    /// Copy-ups that wait.
    pub fn len(&self) -> usize {
        lock(&self.queue).nodes.len()
    }

    /// As long as this is held, no first write is noted.
    pub fn paths_change(&self) -> RwLockWriteGuard<'_, ()> {
        self.paths.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn paths_stay(&self) -> RwLockReadGuard<'_, ()> {
        self.paths.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_room(&self) -> bool {
        self.max > 0 && self.len() < self.max
    }

    fn add(&self, node: &Arc<Node>) {
        let mut queue = lock(&self.queue);
        queue.nodes.push_back(node.clone());
        queue.last = Instant::now();
        if queue.nodes.len() == 1 {
            self.wake.notify_one();
        }
    }

    fn all(&self) -> Vec<Arc<Node>> {
        lock(&self.queue).nodes.iter().cloned().collect()
    }

    /// Whether the node was among those that wait, and is no more.
    fn remove(&self, node: &Node) -> bool {
        let mut queue = lock(&self.queue);
        let at = queue.nodes.iter().position(|waiting| waiting.id == node.id);
        at.is_some_and(|at| queue.nodes.remove(at).is_some())
    }

    /// Has others come before the node.
    fn put_last(&self, node: &Arc<Node>) {
        let mut queue = lock(&self.queue);
        if let Some(at) = queue.nodes.iter().position(|waiting| waiting.id == node.id) {
            queue.nodes.remove(at);
            queue.nodes.push_back(node.clone());
        }
    }

    pub fn stop(&self) {
        lock(&self.queue).stop = true;
        self.wake.notify_all();
    }

    /// Waits for `time`, or for the end, which it tells.
    fn rest(&self, time: Duration) -> bool {
        let resting = |queue: &mut Queue| !queue.stop;
        let queue = lock(&self.queue);
        self.wake.wait_timeout_while(queue, time, resting).unwrap_or_else(PoisonError::into_inner).0.stop
    }

    /// The next file to copy up; `None` when the end has come. Waits until there is one, and until a burst is over, or half of the room taken.
    fn next(&self) -> Option<Arc<Node>> {
        let mut queue = lock(&self.queue);
        loop {
            if queue.stop {
                return None;
            }
            if queue.nodes.is_empty() {
                queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let rest = LINGER.saturating_sub(queue.last.elapsed());
            if rest.is_zero() || queue.nodes.len() > self.max / 2 {
                return queue.nodes.front().cloned();
            }
            queue = self.wake.wait_timeout(queue, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The life of the thread that copies up what nobody waits for.
pub(crate) fn run(union: &Weak<Union>, deferred: &Deferred) {
    while let Some(node) = deferred.next() {
        let Some(union) = union.upgrade() else { return };
        let result = union.complete_deferred(&node);
        union.trim_dirty();
        if let Err(error) = result {
            // It stays: whoever needs it tries again, and fsync reports it.
            tracing::warn!(inode = node.inode, %error, "a file that was written could not be copied up");
            drop(union);
            deferred.put_last(&node);
            if deferred.rest(RETRY) {
                return;
            }
        }
    }
}

/// Whether a node's upper file may be made later, as far as its state says.
fn may_wait(state: &State) -> bool {
    let is_untouched = state.upper.is_none() && state.first_write.is_none() && !state.is_copied_up_now;
    is_untouched && !state.removed && matches!(state.content, Content::Plain)
}

/// Lets go of the first write of a file that cannot be copied up, if nobody can read it any more.
fn give_up_removed(node: &Node) -> bool {
    let is_open = !lock(&node.handles).is_empty();
    let mut state = node.write();
    let gives_up = state.removed && !is_open;
    if gives_up {
        state.first_write = None;
    }
    gives_up
}

impl Union {
    /// The write of a few bytes that is the first of its file, if its upper file may be made later.
    pub(crate) fn write_first(&self, file: &OpenFile, offset: u64, data: &[u8]) -> Result<Option<Written>> {
        let node = &file.node;
        let at_once = OpenFlags::APPEND | OpenFlags::DATA_SYNC | OpenFlags::FILE_SYNC;
        let is_within_block = offset % BLOCK + data.len() as u64 <= BLOCK;
        if file.flags.intersects(at_once) || !is_within_block || !may_wait(&node.read()) || !self.deferred.has_room() {
            return Ok(None);
        }
        {
            let _paths = self.deferred.paths_stay();
            let Some((first, attributes)) = self.first_write(node, offset, data)? else { return Ok(None) };
            if !self.has_room_for_copy_ups() {
                return Ok(None);
            }
            let mut state = node.write();
            if !may_wait(&state) {
                return Ok(None);
            }
            if !self.journal.note_first_write(node.id, &first)? {
                return Ok(None);
            }
            if let Some(lease) = lock(&node.lease).take().and_then(|lease| lease.upgrade()) {
                lease.revoke();
            }
            node.changed.show(attributes.changed, first.at);
            state.first_write = Some(Arc::new(first));
            self.nodes.pin(node);
            self.deferred.add(node);
        }
        self.have_copied_up();
        self.trim_dirty();
        self.heed_journal();
        Ok(Some(Written { count: data.len(), offset }))
    }

    /// What has to be known of a first write until its file is copied up, and the lower file's attributes; nothing for files of which
    /// this is too much, and for writes that make them longer.
    fn first_write(&self, node: &Arc<Node>, offset: u64, data: &[u8]) -> Result<Option<(FirstWrite, Attributes)>> {
        let Some(lower) = node.read().lowers.first().cloned() else { return Ok(None) };
        let branch = &self.lowers[lower.layer];
        let attributes = branch.layer.getattr(&Caller::ROOT, lower.held.node())?;
        let size = attributes.size;
        let has_block = offset + data.len() as u64 <= size && size <= SKETCH_SIZE_MAX;
        if node.file_type != FileType::Regular || !has_block || has_several_names(&attributes) {
            return Ok(None);
        }
        let Some(path) = node.path_bytes().filter(|path| path.len() <= ORIGIN_PATH_MAX) else { return Ok(None) };
        if lower.path.len() > ORIGIN_PATH_MAX {
            return Ok(None);
        }
        let origin = Origin {
            layer_id: branch.layer_id.clone(),
            path: lower.path.to_vec(),
            inode: node.inode,
            size,
            modified: attributes.modified,
        };
        let id = crate::sketch::new_id()?;
        Ok(Some((FirstWrite { id, origin, path, offset, data: data.to_vec(), at: now() }, attributes)))
    }

    /// Whether all copy-ups that may wait find room in the upper branch.
    fn has_room_for_copy_ups(&self) -> bool {
        let Ok(found) = self.upper.statfs(&Caller::ROOT, NodeId::ROOT) else { return false };
        let bytes = found.blocks_available.saturating_mul(u64::from(found.block_size));
        // Filesystems that do not count inodes say that there are none.
        !found.has_quotas && bytes >= ROOM_BYTES_MIN && (found.files == 0 || found.files_free >= ROOM_FILES_MIN)
    }

    /// Copies up a file whose first write was answered before, if that is still to be done.
    pub(crate) fn complete_deferred(&self, node: &Arc<Node>) -> Result<()> {
        let waits = node.read().first_write.is_some();
        if waits {
            let _spending = Spending::of_service();
            let _names = self.names_mut();
            match self.copy_up(node, Bytes::Sketch) {
                Err(_) if give_up_removed(node) => {}
                copied => copied.map(drop)?,
            }
            self.statistics.settled();
        }
        let removed = {
            // A first write that is noted from here on stays among those that wait.
            let state = node.read();
            state.first_write.is_none() && self.deferred.remove(node)
        };
        if removed {
            self.nodes.unpin(node);
        }
        Ok(())
    }

    /// Copies up every file that waits for it; returns the first failure, after trying all. Of a removed one only who has it open wants to know.
    pub(crate) fn complete_all_deferred(&self) -> Result<()> {
        let complete = |node: &Arc<Node>| match self.complete_deferred(node) {
            Err(_) if node.read().removed => Ok(()),
            completed => completed,
        };
        let results: Vec<_> = self.deferred.all().iter().map(complete).collect();
        results.into_iter().collect()
    }

    /// The same, by a holder of the namespace lock, before paths change.
    pub(crate) fn complete_all_deferred_locked(&self) -> Result<()> {
        let waiting = self.deferred.all();
        let has_path = |state: &State| state.first_write.is_some() && !state.removed;
        let mut waiting = waiting.iter().filter(|node| has_path(&node.read()));
        waiting.try_for_each(|node| self.copy_up(node, Bytes::Sketch).map(drop))
    }

    /// Writes what was written before into a sketch that is being made, as any other write: the rest of its block may come later still.
    pub(crate) fn put_first_write(
        &self,
        node: &Node,
        held: &Held,
        content: &mut Content,
        first: &FirstWrite,
    ) -> Result<()> {
        let Content::Sketch(sketch) = content else { return Ok(()) };
        self.open_files(held, sketch)?;
        let size = sketch.origin.size;
        let written = self.write_moving(sketch, held, size, first.offset, &first.data)?;
        if written.count < first.data.len() {
            return fail(Errno::ENOSPC);
        }
        let times = SetAttributes { modified: Some(SetTime::At(first.at)), ..SetAttributes::default() };
        self.upper.setattr(&Caller::ROOT, held.node(), &times, None)?;
        self.journal.record(node.id, sketch)
    }
}
