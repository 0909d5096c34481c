//! The threads that send notifications about names and listings, and what waits for that.

use super::worker::Worker;
use super::{DirectoryJob, KernelCache, NameChange, NameJob, OVERFLOW_MAX, note, spawn_bare, tell_directory};
use crate::sync::lock;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

/// What a full queue of names had no room for: each name and each listing once, however often it has changed.
#[derive(Default)]
pub(super) struct Overflow(Mutex<Overflowed>);

#[derive(Default)]
struct Overflowed {
    names: HashMap<(u64, Box<[u8]>), NameChange>,
    listings: HashSet<u64>,
}

impl Overflow {
    /// Whether there was room.
    pub fn add(&self, jobs: Vec<DirectoryJob>) -> bool {
        let mut overflowed = lock(&self.0);
        if overflowed.names.len() + overflowed.listings.len() + jobs.len() > OVERFLOW_MAX {
            return false;
        }
        for job in jobs {
            match job {
                DirectoryJob::Listing(number) => {
                    overflowed.listings.insert(number);
                }
                DirectoryJob::Name(NameJob { parent, name, change }) => {
                    let known = overflowed.names.entry((parent, name)).or_insert(change);
                    if change == NameChange::Left {
                        *known = change;
                    }
                }
            }
        }
        true
    }

    pub fn take(&self) -> Vec<DirectoryJob> {
        let taken = std::mem::take(&mut *lock(&self.0));
        let names = taken.names.into_iter();
        let names = names.map(|((parent, name), change)| DirectoryJob::Name(NameJob { parent, name, change }));
        names.chain(taken.listings.into_iter().map(DirectoryJob::Listing)).collect()
    }
}

/// The thread that tells of names from one core group, and what waits for it beside its queue.
pub(super) struct NamesWorker {
    pub worker: Worker<Vec<DirectoryJob>>,
    overflow: Arc<Overflow>,
}

impl NamesWorker {
    pub fn new(name: String, cpus: &[u32], kernel: &Arc<dyn KernelCache>) -> Self {
        let overflow = Arc::new(Overflow::default());
        let waiting = Arc::clone(&overflow);
        let tell = move |kernel: &dyn KernelCache, jobs: &Vec<DirectoryJob>| {
            let tell = |job: &DirectoryJob| note(tell_directory(kernel, job));
            jobs.iter().for_each(tell);
            waiting.take().iter().for_each(tell);
        };
        Self { worker: Worker::new(name, cpus, kernel, spawn_bare, tell), overflow }
    }

    /// Has these told when there is time; whether that will be done: not without a thread.
    pub fn put_off(&self, jobs: Vec<DirectoryJob>) -> bool {
        let is_kept = self.worker.has_thread() && self.overflow.add(jobs);
        // Should it have worked off its queue meanwhile, this has it look. If the queue is still full, it will.
        let _ = self.worker.ask_later(Vec::new());
        is_kept
    }
}
