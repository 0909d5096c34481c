//! What the threads of a pool do: they write back, have stored below what is deferred, look after what clients read by themselves,
//! and read ahead.

use crate::blocks::{block_of, blocks_for};
use crate::file_lists::FileLists;
use crate::flushers::{FlusherId, Flushers};
use crate::node::Node;
use crate::pool::Pool;
use crate::sync::{lock, read, try_lock};
use std::io;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The part of a tick that may go into making huge pages: one in so many.
const HUGE_PAGES_SHARE: u32 = 8;
/// How long none are made after the kernel had no memory for one.
const HUGE_PAGES_PAUSE: Duration = Duration::from_secs(30);
/// Most files a flusher takes up in one round for lack of room.
const HURRIED_MAX: usize = 64;

/// What the threads work on.
pub(crate) struct Background {
    pool: Arc<Pool>,
    pub(crate) lists: Arc<FileLists<Node>>,
    /// When huge pages are made next; never where the kernel cannot make any.
    huge_due: Mutex<Option<Instant>>,
    flushers: Flushers,
    /// The threads of flushers.
    started: Mutex<Vec<JoinHandle<()>>>,
}

impl Background {
    pub(crate) fn new(pool: &Arc<Pool>) -> Self {
        let huge_due = Mutex::new(Some(Instant::now()));
        let flushers = Flushers::new(pool.config.flush_threads);
        Self { pool: Arc::clone(pool), lists: Arc::default(), huge_due, flushers, started: Mutex::default() }
    }

    /// Starts the flushers that are missing.
    pub(crate) fn start_flushers(self: &Arc<Self>) -> io::Result<()> {
        let mut started = lock(&self.started);
        started.retain(|thread| !thread.is_finished());
        let mut failed = Ok(());
        for id in self.flushers.missing(Instant::now()) {
            let own = Arc::clone(self);
            match std::thread::Builder::new().name("cache-flush".into()).spawn(move || own.flush(id)) {
                Ok(thread) => started.push(thread),
                // Nobody takes its place.
                Err(error) => {
                    self.flushers.leave(id);
                    failed = Err(error);
                }
            }
        }
        failed
    }

    /// Waits for the end of all flushers, which have been told.
    pub(crate) fn join_flushers(&self) {
        let started = std::mem::take(&mut *lock(&self.started));
        for thread in started {
            // A thread that panicked has said so already.
            let _ = thread.join();
        }
    }

    /// The life of the thread that looks after everything for which no branch is asked, and after the flushers.
    pub(crate) fn look_after(self: &Arc<Self>) {
        while self.pool.wait_to_look() {
            if self.pool.is_short() {
                self.pool.idle.layers().iter().for_each(|layer| layer.give_up_answers());
            }
            self.visit_segments();
            self.pool.mmap_exports.visit();
            if let Err(error) = self.start_flushers() {
                tracing::warn!(%error, "no further thread for write-back could be started");
            }
        }
    }

    /// A flusher's life.
    fn flush(&self, id: FlusherId) {
        while self.pool.wait_for_tick() {
            let due = self.due();
            let layer = |node: &Arc<Node>| Arc::as_ptr(&node.core).addr();
            due.iter().for_each(|node| self.flushers.within(id, layer(node), || node.write_back_in_background()));
            // When the content of all is on its way to the disk, the first has the least to wait for.
            // One flusher at a time waits for the disk of a layer; what another leaves is due again.
            for node in due.iter().filter(|node| self.flushers.begin_storing(layer(node))) {
                self.flushers.within(id, layer(node), || node.store_in_background());
                self.flushers.end_storing(layer(node));
            }
            if self.flushers.leaves_as_surplus(id, Instant::now()) {
                return;
            }
        }
        self.flushers.leave(id);
    }

    /// The life of a thread that reads ahead.
    pub(crate) fn read_ahead(self: &Arc<Self>) {
        self.lists.read_ahead.work(|node, bytes| {
            let Ok(node) = node.begin_use() else { return };
            // A failure here is no one's yet: the reader meets it again when it gets there.
            let _ = node.0.read_ahead(block_of(bytes.start)..blocks_for(bytes.end));
        });
    }

    fn due(&self) -> Vec<Arc<Node>> {
        let pool = &self.pool;
        let is_short = pool.is_short() || pool.take_want_of_room();
        let hurry = is_short || pool.budget.dirty() > pool.budget.dirty_max() / 2;
        let mut hurried = 0;
        self.lists.due(pool.config.expire, hurry, |node| {
            let is_hurried = hurried < HURRIED_MAX && (is_short || node.core.is_beyond_its_part());
            hurried += usize::from(is_hurried);
            is_hurried
        })
    }

    /// Looks at what the readers of every file that clients may read by themselves brought back, and at what can be held in huge pages.
    pub(crate) fn visit_segments(&self) {
        let viewed = self.lists.viewed_files();
        viewed.iter().for_each(|node| node.sweep_segment());
        // What was not empty when it was to go.
        viewed.iter().filter(|node| read(&node.state).is_retiring).for_each(|node| node.drop_clean());
        // A client that keeps one page of a huge one keeps all of it.
        if !self.pool.is_short() {
            self.make_huge_pages(&viewed);
        }
        self.lists.retain_viewed(Node::was_viewed);
    }

    /// For a part of each tick.
    fn make_huge_pages(&self, viewed: &[Arc<Node>]) {
        let Some(mut due) = try_lock(&self.huge_due) else { return };
        let begun = Instant::now();
        if due.is_none_or(|due| due > begun) {
            return;
        }
        let tick = self.pool.config.tick;
        *due = Some(begun + tick);
        let end = begun + tick / HUGE_PAGES_SHARE;
        for node in viewed.iter().take_while(|_| Instant::now() < end) {
            match node.hold_in_huge_pages(end) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                    tracing::info!(
                        "this kernel makes no huge pages of what is cached: reads without a request are slower"
                    );
                    *due = None;
                    return;
                }
                Err(error) => {
                    tracing::debug!(%error, "no huge pages for the cache now");
                    *due = Some(begun + HUGE_PAGES_PAUSE);
                    return;
                }
            }
        }
    }
}
