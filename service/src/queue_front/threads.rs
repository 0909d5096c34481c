//! The pool's service threads: pinned to their core group, started on demand up to a bound.
//!
//! A thread that takes a request checks whether another one of its group is still waiting; if none is, it starts one. So a
//! request that blocks in a layer never keeps the next one waiting. Each instance has a share of a group's threads: if the
//! requests of one instance block, those of others still find threads. Threads started for a burst stay for a while: the next
//! burst finds them, and a thread that has ended is charged to the pool's memory until the kernel frees it. A pool that is idle
//! for long has two threads per group.

use crate::cpus::keep_on;
use crate::queue_front::changes::Changes;
use crate::queue_front::front::QueueFront;
use crate::queue_front::session::SessionState;
use crate::sync::lock;
use poolfs_ipc::area::DATA_BYTES;
use poolfs_ipc::futex;
use poolfs_ipc::service::{CoreGroups, Endpoint, MemoryBudget, Search, SessionMemory, wait_for_doorbells};
use poolfs_libservice::{PageBuffer, Share, Shares};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tracing::{error, warn};

/// Most service threads of one core group that serve the requests of one instance.
pub const SERVICE_THREADS_PER_GROUP_MAX: usize = 16;

/// Threads of a group that stay though there is nothing to do.
const THREADS_MIN: usize = 2;

/// A sleep that ends without a doorbell: time to see whether the thread is still needed.
const SLEEP_MAX: Duration = Duration::from_secs(10);

/// How long a thread beyond those has nothing to do before it ends.
const LINGER: Duration = Duration::from_secs(60);

/// Memory of sessions that a service pays for, of all its instances together.
const SESSION_MEMORY_BYTES_MAX: usize = 128 << 20;

struct Group {
    threads: AtomicUsize,
    /// Threads started so far.
    started: AtomicUsize,
    waiting: AtomicUsize,
    /// Of the instances: requests in service, and looks at who makes them.
    shares: Arc<Shares>,
}

impl Group {
    fn new() -> Self {
        let shares = Shares::reclaimable(SERVICE_THREADS_PER_GROUP_MAX as u64);
        Self { threads: AtomicUsize::new(0), started: AtomicUsize::new(0), waiting: AtomicUsize::new(0), shares }
    }
}

type Fronts = Vec<Arc<QueueFront>>;

/// The service threads, and what else the fronts of a service share.
pub struct ServiceThreads {
    groups: CoreGroups,
    session_memory: Arc<MemoryBudget>,
    state: Vec<Group>,
    fronts: Mutex<Arc<Fronts>>,
    /// Of `fronts` and of `ending`.
    changes: Changes,
    ending: AtomicBool,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

/// Most threads of a group with so many instances: each of those beside the first finds its part of the shares, also when the first had all before.
fn threads_max(instances: usize) -> usize {
    let half = SERVICE_THREADS_PER_GROUP_MAX / 2;
    SERVICE_THREADS_PER_GROUP_MAX + if instances > 1 { half.max(instances) } else { 0 }
}

impl ServiceThreads {
    /// Starts the first threads of each core group of `cpus`.
    ///
    /// # Errors
    /// When no thread can be had.
    pub fn start(cpus: &[u32]) -> io::Result<Arc<Self>> {
        let groups = CoreGroups::of_cpus(cpus);
        let threads = Arc::new(Self {
            state: (0..groups.count()).map(|_| Group::new()).collect(),
            groups,
            session_memory: Arc::new(MemoryBudget::new(SESSION_MEMORY_BYTES_MAX)),
            fronts: Mutex::default(),
            changes: Changes::default(),
            ending: AtomicBool::new(false),
            handles: Mutex::default(),
        });
        for group in 0..threads.groups.count() {
            for _ in 0..THREADS_MIN {
                if let Err(error) = threads.add_thread(group) {
                    threads.stop();
                    return Err(error);
                }
            }
        }
        Ok(threads)
    }

    /// The core groups.
    #[must_use]
    pub fn groups(&self) -> &CoreGroups {
        &self.groups
    }

    /// What is paid for sessions of instances that have no share of their own.
    pub(super) fn session_memory(&self) -> Arc<dyn SessionMemory> {
        self.session_memory.clone()
    }

    /// The shares of one more instance in the threads of each group.
    pub(super) fn join(&self) -> Vec<Arc<Share>> {
        self.state.iter().map(|group| group.shares.join()).collect()
    }

    /// Threads now, of all groups.
    #[must_use]
    pub fn count(&self) -> usize {
        self.state.iter().map(|group| group.threads.load(Ordering::Relaxed)).sum()
    }

    /// Threads started so far, of all groups.
    #[must_use]
    pub fn started(&self) -> usize {
        self.state.iter().map(|group| group.started.load(Ordering::Relaxed)).sum()
    }

    /// Serves a front from now on.
    ///
    /// # Errors
    /// When a thread can sleep on no more queues.
    pub(super) fn add(self: &Arc<Self>, front: Arc<QueueFront>) -> io::Result<()> {
        let mut fronts = lock(&self.fronts);
        if fronts.len() + 1 >= futex::WORDS_MAX {
            let most = futex::WORDS_MAX - 1;
            return Err(io::Error::other(format!("a service has at most {most} instances; use another pool")));
        }
        let before = Arc::clone(&fronts);
        Arc::make_mut(&mut fronts).push(front);
        drop(fronts);
        self.tell(&before);
        // All may be busy with the requests of others.
        for group in 0..self.groups.count() {
            if self.state[group].waiting.load(Ordering::Acquire) == 0
                && let Err(error) = self.add_thread(group)
            {
                warn!(group, %error, "no service thread for one more instance");
            }
        }
        Ok(())
    }

    /// Serves a front no more; requests already taken go on.
    pub(super) fn remove(&self, front: &Arc<QueueFront>) {
        let mut fronts = lock(&self.fronts);
        let before = Arc::clone(&fronts);
        Arc::make_mut(&mut fronts).retain(|other| !Arc::ptr_eq(other, front));
        drop(fronts);
        self.tell(&before);
    }

    /// Has all threads look at what has changed; they sleep on `changes` or on the queues of the fronts `before`.
    fn tell(&self, before: &[Arc<QueueFront>]) {
        self.changes.tell(|| {
            futex::wake_all(self.changes.word());
            for front in before {
                (0..self.groups.count()).for_each(|group| front.endpoint().wake_all(group));
            }
        });
    }

    /// Ends all threads, after the requests they serve.
    pub fn stop(&self) {
        self.ending.store(true, Ordering::Release);
        let fronts = Arc::clone(&lock(&self.fronts));
        self.tell(&fronts);
        let handles = std::mem::take(&mut *lock(&self.handles));
        for handle in handles.into_iter().filter(|handle| handle.thread().id() != std::thread::current().id()) {
            if handle.join().is_err() {
                error!("a service thread panicked");
            }
        }
    }

    fn add_thread(self: &Arc<Self>, group: usize) -> io::Result<()> {
        let state = &self.state[group];
        let number = state.threads.fetch_add(1, Ordering::AcqRel);
        if number >= threads_max(lock(&self.fronts).len()) || self.ending.load(Ordering::Acquire) {
            state.threads.fetch_sub(1, Ordering::AcqRel);
            return Ok(());
        }
        state.waiting.fetch_add(1, Ordering::AcqRel);
        let threads = Arc::clone(self);
        let spawned =
            std::thread::Builder::new().name(format!("serve-{group}-{number}")).spawn(move || threads.run(group));
        match spawned {
            Ok(handle) => {
                state.started.fetch_add(1, Ordering::Relaxed);
                let mut handles = lock(&self.handles);
                handles.retain(|handle| !handle.is_finished());
                handles.push(handle);
                Ok(())
            }
            Err(error) => {
                state.waiting.fetch_sub(1, Ordering::AcqRel);
                state.threads.fetch_sub(1, Ordering::AcqRel);
                Err(error)
            }
        }
    }

    fn run(self: Arc<Self>, group: usize) {
        keep_on(self.groups.cpus(group));
        let state = &self.state[group];
        let mut scratch = PageBuffer::zeroed(DATA_BYTES);
        let mut seen = self.changes.seen();
        let (mut fronts, mut endpoints) = self.fronts_now();
        let mut first = 0;
        let mut searching = None;
        // When the thread served last; nothing while it serves one request after the other.
        let mut idle_since = Some(Instant::now());
        while !self.ending.load(Ordering::Acquire) {
            let now = self.changes.seen();
            if now != seen {
                seen = now;
                (fronts, endpoints) = self.fronts_now();
            }
            if self.serve_one(group, &fronts, &mut first, &mut searching, &mut scratch) {
                idle_since = None;
                continue;
            }
            let idle = idle_since.get_or_insert_with(Instant::now).elapsed();
            if idle >= LINGER && self.is_surplus(group) {
                break;
            }
            // Whose requests have all threads they may have is heeded by those threads.
            let is_full = |front: &Arc<QueueFront>| !front.may_be_served(group);
            let heeded: Vec<_>;
            let heeded = if fronts.iter().any(is_full) {
                let others = fronts.iter().filter(|front| !is_full(front));
                heeded = others.map(|front| Arc::clone(front.endpoint())).collect();
                &heeded
            } else {
                &endpoints
            };
            self.changes.asleep(seen, || {
                let change = self.changes.word();
                wait_for_doorbells(heeded, group, change, seen, SLEEP_MAX, searching.take());
            });
        }
        drop(searching);
        state.waiting.fetch_sub(1, Ordering::AcqRel);
        state.threads.fetch_sub(1, Ordering::AcqRel);
    }

    fn fronts_now(&self) -> (Arc<Fronts>, Vec<Arc<Endpoint<SessionState>>>) {
        let fronts = Arc::clone(&lock(&self.fronts));
        let endpoints = fronts.iter().map(|front| Arc::clone(front.endpoint())).collect();
        (fronts, endpoints)
    }

    /// More threads wait than an idle group keeps. Two that decide so at once leave one too few, which the next request
    /// makes good.
    fn is_surplus(&self, group: usize) -> bool {
        self.state[group].waiting.load(Ordering::Acquire) > THREADS_MIN
    }

    /// Takes and serves a request of one of the fronts, each in its turn.
    fn serve_one(
        self: &Arc<Self>,
        group: usize,
        fronts: &[Arc<QueueFront>],
        first: &mut usize,
        searching: &mut Option<Search<SessionState>>,
        scratch: &mut [u8],
    ) -> bool {
        for step in 0..fronts.len() {
            let index = (*first + step) % fronts.len();
            if !fronts[index].may_be_served(group) {
                continue;
            }
            let Some(called) = fronts[index].called(group) else { continue };
            *first = index + 1;
            *searching = None;
            let state = &self.state[group];
            if state.waiting.fetch_sub(1, Ordering::AcqRel) == 1
                && let Err(error) = self.add_thread(group)
            {
                warn!(group, %error, "no further service thread");
            }
            *searching = fronts[index].answer(called, group, scratch);
            state.waiting.fetch_add(1, Ordering::AcqRel);
            return true;
        }
        false
    }
}
