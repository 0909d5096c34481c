//! What is told by a thread of its own: content that nobody, or not everybody, waits for, and attributes of nodes that the kernel gets to know.

use super::{Job, KernelCache, note, tell};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;

/// How long a change of attributes waits until who looked the node up has got them from before it: he has been answered, and needs a
/// processor only.
const ARRIVAL_WAIT_MAX: Duration = Duration::from_secs(10);
const ARRIVAL_PAUSE_MIN: Duration = Duration::from_micros(20);
const ARRIVAL_PAUSE_MAX: Duration = Duration::from_millis(1);

/// Locks of content; nodes share them.
const CONTENT_LOCKS: usize = 64;

/// What to tell of a file's content, if anything, as it is when it is told.
pub(super) type ContentJob = Box<dyn Fn() -> Option<Job> + Send + Sync>;

/// What is told without anybody waiting.
pub(super) enum Later {
    /// Of the node with this number: what to tell is asked for when it is told.
    Content(u64, ContentJob),
    /// The attributes of the node with this number, as long as this is true.
    Arriving(u64, Box<dyn Fn() -> bool + Send + Sync>),
}

/// Held by who tells of a file's content, so that two do not cross: an old byte would stand in a page that is new, or the size of one come
/// after a newer one's.
pub(super) struct ContentLocks([Mutex<()>; CONTENT_LOCKS]);

impl Default for ContentLocks {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Mutex::default()))
    }
}

impl ContentLocks {
    pub fn lock(&self, number: u64) -> MutexGuard<'_, ()> {
        self.0[number as usize % CONTENT_LOCKS].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Later {
    pub fn tell(&self, kernel: &dyn KernelCache, content_locks: &ContentLocks) {
        match self {
            Later::Content(number, job) => {
                let _one_at_a_time = content_locks.lock(*number);
                job().into_iter().for_each(|job| note(tell(kernel, job)));
            }
            Later::Arriving(number, is_arriving) => {
                let _ = drop_arriving(kernel, *number, is_arriving);
            }
        }
    }
}

pub(super) fn drop_attributes(kernel: &dyn KernelCache, number: u64) -> bool {
    kernel.drop_attributes(number).unwrap_or_else(|error| {
        warn!(node = number, %error, "the kernel did not drop attributes");
        true
    })
}

/// Nothing tells when the kernel has taken an answer, so it is asked again and again.
pub(super) fn drop_arriving(kernel: &dyn KernelCache, number: u64, is_arriving: &dyn Fn() -> bool) -> bool {
    let (end, mut pause) = (Instant::now() + ARRIVAL_WAIT_MAX, ARRIVAL_PAUSE_MIN);
    while !drop_attributes(kernel, number) && is_arriving() {
        if Instant::now() >= end {
            warn!(node = number, "whoever looked a name up does not take the answer");
            return false;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(ARRIVAL_PAUSE_MAX);
    }
    true
}
