//! The lists of files by which the threads of a pool find what there is to do: those that are dirty, in the order of age, and those
//! that clients may read by themselves.

use crate::read_ahead::ReadAheadQueue;
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

struct DirtyFile<N> {
    since: Instant,
    node: Arc<N>,
}

/// The files of all layers of a pool.
pub(crate) struct FileLists<N> {
    pub(crate) read_ahead: ReadAheadQueue<N>,
    dirty: Mutex<BTreeMap<u64, DirtyFile<N>>>,
    next_dirty: AtomicU64,
    /// The files that have a view, or had, or that were given as a whole, by their place in memory.
    viewed: Mutex<BTreeMap<usize, Weak<N>>>,
}

impl<N> Default for FileLists<N> {
    fn default() -> Self {
        Self {
            read_ahead: ReadAheadQueue::default(),
            dirty: Mutex::default(),
            next_dirty: AtomicU64::new(0),
            viewed: Mutex::default(),
        }
    }
}

impl<N> FileLists<N> {
    /// Notes that a file became dirty; the number is its place in the order of age.
    pub(crate) fn enqueue_dirty(&self, node: Arc<N>) -> u64 {
        let ticket = self.next_dirty.fetch_add(1, Ordering::Relaxed);
        lock(&self.dirty).insert(ticket, DirtyFile { since: Instant::now(), node });
        ticket
    }

    pub(crate) fn dequeue_dirty(&self, ticket: u64) {
        let entry = lock(&self.dirty).remove(&ticket);
        // The node may die with its entry, and that takes locks of its own.
        drop(entry);
    }

    /// Dirty files for which `pick` says yes, oldest first.
    pub(crate) fn dirty_files(&self, most: usize, pick: impl Fn(&N) -> bool) -> Vec<Arc<N>> {
        let dirty = lock(&self.dirty);
        dirty.values().filter(|file| pick(&file.node)).take(most).map(|file| Arc::clone(&file.node)).collect()
    }

    /// Files that have been dirty for as long as `expire`, oldest first; with `hurry` also the younger ones for which `is_hurried` says yes.
    pub(crate) fn due(&self, expire: Duration, hurry: bool, mut is_hurried: impl FnMut(&N) -> bool) -> Vec<Arc<N>> {
        let now = Instant::now();
        let dirty = lock(&self.dirty);
        let is_old = |file: &DirtyFile<N>| now.duration_since(file.since) >= expire;
        let due = dirty.values().take_while(|file| hurry || is_old(file));
        let due = due.filter(|file| is_hurried(&file.node) || is_old(file));
        due.map(|file| Arc::clone(&file.node)).collect()
    }

    /// Notes that clients may read the file by themselves, or the kernel for them.
    pub(crate) fn viewed(&self, node: &Arc<N>) {
        lock(&self.viewed).insert(Arc::as_ptr(node).addr(), Arc::downgrade(node));
    }

    /// Those that there still are.
    pub(crate) fn viewed_files(&self) -> Vec<Arc<N>> {
        lock(&self.viewed).values().filter_map(Weak::upgrade).collect()
    }

    /// Forgets those of them for which `is_viewed` says no.
    pub(crate) fn retain_viewed(&self, is_viewed: impl Fn(&N) -> bool) {
        lock(&self.viewed).retain(|_, node| node.upgrade().is_some_and(|node| is_viewed(&node)));
    }
}
