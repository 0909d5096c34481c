//! Keeping what was read from below after its reader has got it, by a thread of the pool.
//!
//! Memory for what becomes cached costs about as much as reading it from a fast disk. The thread waits for nobody: whoever waits for
//! blocks that are to be kept, waits for it.

use crate::read::Read;
use crate::sync::lock;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};

/// Most reads that wait to be kept; further ones are kept by their reader.
const QUEUE_MAX: usize = 8;

#[derive(Default)]
struct Queue {
    reads: VecDeque<Read>,
    /// whether there is a thread
    works: bool,
    stop: bool,
}

/// What is still to be kept.
#[derive(Default)]
pub(crate) struct Keeper {
    queue: Mutex<Queue>,
    wake: Condvar,
}

impl Keeper {
    /// Has `read` kept later, or gives it back.
    pub fn submit(&self, read: Read) -> Option<Read> {
        let mut queue = lock(&self.queue);
        if !queue.works || queue.stop || queue.reads.len() >= QUEUE_MAX {
            return Some(read);
        }
        queue.reads.push_back(read);
        self.wake.notify_one();
        None
    }

    /// The thread has ended: whoever waits for what it had not kept reads for itself.
    fn give_up(&self) {
        let left = {
            let mut queue = lock(&self.queue);
            queue.works = false;
            std::mem::take(&mut queue.reads)
        };
        drop(left);
    }

    /// From here on nothing is taken; what was taken is kept.
    pub fn stop(&self) {
        lock(&self.queue).stop = true;
        self.wake.notify_all();
    }

    /// The thread's life.
    pub fn work(&self) {
        struct AtTheEnd<'a>(&'a Keeper);
        impl Drop for AtTheEnd<'_> {
            fn drop(&mut self) {
                self.0.give_up();
            }
        }
        lock(&self.queue).works = true;
        let _at_the_end = AtTheEnd(self);
        loop {
            let idle = |queue: &mut Queue| queue.reads.is_empty() && !queue.stop;
            let mut queue = self.wake.wait_while(lock(&self.queue), idle).unwrap_or_else(PoisonError::into_inner);
            let Some(read) = queue.reads.pop_front() else { return };
            drop(queue);
            read.keep();
        }
    }
}
