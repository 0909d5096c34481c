//! The background threads of a union. Each is started when there is work for it and not before, because most unions of a host
//! never change.

use crate::Union;
use crate::sync::lock;
use crate::{deferred, durable, transit};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};

/// Which threads there are.
#[derive(Default)]
pub(crate) struct Background {
    flushes: AtomicBool,
    copies: AtomicBool,
    copy_ups: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Background {
    /// Starts a thread unless it is `there`. Without it all is done by whoever needs it done, and the next who comes here tries again.
    fn have(&self, there: &AtomicBool, name: &str, work: impl FnOnce() + Send + 'static) {
        if there.load(Ordering::Relaxed) || there.swap(true, Ordering::AcqRel) {
            return;
        }
        match Builder::new().name(name.into()).spawn(work) {
            Ok(thread) => lock(&self.threads).push(thread),
            Err(error) => {
                there.store(false, Ordering::Release);
                tracing::debug!(name, %error, "a thread of the union did not start");
            }
        }
    }

    /// Waits for the threads, which have been told to end.
    pub fn join(&self) {
        loop {
            let Some(thread) = lock(&self.threads).pop() else { return };
            // A thread may be the last owner; it ends by itself then.
            let own = thread.thread().id() == std::thread::current().id();
            if !own && thread.join().is_err() {
                tracing::error!("a thread of the union panicked");
            }
        }
    }
}

impl Union {
    /// Sketches wait to be brought to disk.
    pub(crate) fn have_flushed(&self) {
        if self.flush_interval.is_zero() {
            return;
        }
        let (union, calls, interval) = (self.own.clone(), self.calls.clone(), self.flush_interval);
        self.background.have(&self.background.flushes, "union-flush", move || durable::run(&union, &calls, interval));
    }

    /// Files wait to be copied up.
    pub(crate) fn have_copied_up(&self) {
        let (union, deferred) = (self.own.clone(), self.deferred.clone());
        self.background.have(&self.background.copy_ups, "union-copy-up", move || deferred::run(&union, &deferred));
    }

    /// Blocks are in transit.
    pub(crate) fn have_copied(&self) {
        let copies: Arc<transit::Copies> = self.copies.clone();
        self.background.have(&self.background.copies, "union-copy", move || copies.run());
    }
}
