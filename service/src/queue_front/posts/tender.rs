//! The tender: the thread of an instance that takes posts nobody asks for.

use crate::queue_front::posts::granted::Granted;
use crate::queue_front::posts::{Posts, lock};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tracing::{error, warn};

/// How long a post waits to be taken where nobody asks.
const TEND_EVERY: Duration = Duration::from_millis(1);

/// After so many looks that found nothing the thread sleeps until it is called.
const IDLE_LOOKS_MAX: u32 = 8;

/// Whoever rings again within this is one of many: then the thread looks by itself for a while. Who writes now and then rings each time, which costs less than looking.
const RUNG_OFTEN: Duration = Duration::from_millis(4);

/// How long an instance that ends waits for that thread.
const END_MAX: Duration = Duration::from_secs(5);

/// How long the thread that takes posts sleeps before it looks whether it is needed, and whether there is room for what may be posted.
const TENDER_LOOK: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Tender {
    thread: Option<JoinHandle<()>>,
    /// It looks again and again, and need not be called.
    is_awake: bool,
    is_called: bool,
    /// When a doorbell came last.
    rung_at: Option<Instant>,
}

impl Posts {
    /// Waits, for a while, for the thread that takes posts. After [`Posts::close`].
    pub(in crate::queue_front) fn join(&self) {
        let thread = {
            let mut tender = lock(&self.tender);
            tender.is_called = true;
            self.called.notify_all();
            tender.thread.take()
        };
        let Some(thread) = thread else { return };
        // It may be with a branch that does not answer any more.
        let give_up = Instant::now() + END_MAX;
        while !thread.is_finished() {
            if Instant::now() > give_up {
                return warn!("posted writes are still being taken");
            }
            std::thread::sleep(TEND_EVERY);
        }
        if thread.join().is_err() {
            error!("the thread that takes posted writes panicked");
        }
    }

    /// Whether the thread that takes posts looks at a new grant without being called. When it goes to sleep it takes that back, of all there are.
    pub(super) fn tend(&self, granted: &Granted) {
        let tender = lock(&self.tender);
        granted.session.tend_posts(granted.slot, tender.is_awake);
    }

    /// A doorbell has come: whether there was another just before it.
    pub(super) fn is_rung_often(&self) -> bool {
        let now = Instant::now();
        let before = lock(&self.tender).rung_at.replace(now);
        before.is_some_and(|before| now.saturating_duration_since(before) <= RUNG_OFTEN)
    }

    /// Wakes the thread that takes what was posted, if it sleeps.
    pub(super) fn call_tender(&self) {
        let mut tender = lock(&self.tender);
        if !tender.is_awake {
            tender.is_called = true;
            self.called.notify_all();
        }
    }

    /// Makes the thread that takes what was posted, if there is none; whether there is one.
    pub(super) fn start_tender(self: &Arc<Self>) -> bool {
        let mut tender = lock(&self.tender);
        if tender.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return true;
        }
        let posts = Arc::downgrade(self);
        let started = std::thread::Builder::new().name("posts".into()).spawn(move || run(&posts));
        match started {
            Ok(thread) => tender.thread = Some(thread),
            Err(error) => {
                warn!(%error, "no thread to take posted writes: all wait for their answers");
                return false;
            }
        }
        true
    }

    /// Looks again and again, until nothing has come for a while.
    fn look(&self) {
        lock(&self.tender).is_awake = true;
        let mut idle = 0;
        while idle < IDLE_LOOKS_MAX && !self.closed.load(Ordering::SeqCst) {
            std::thread::sleep(TEND_EVERY);
            self.serve_others();
            let grants = self.grants();
            grants.iter().for_each(|granted| granted.session.tend_posts(granted.slot, true));
            let taken: usize = grants.iter().map(|granted| self.take_if_free(granted)).sum();
            idle = if taken > 0 { 0 } else { idle + 1 };
        }
        lock(&self.tender).is_awake = false;
        for granted in self.grants() {
            granted.session.tend_posts(granted.slot, false);
            // Posted before it was seen that nobody looks any more.
            self.take_if_free(&granted);
            granted.rest();
        }
        self.serve_others();
    }
}

/// The thread that takes posts nobody asks for.
fn run(posts: &Weak<Posts>) {
    loop {
        let Some(posts) = posts.upgrade() else { return };
        let mut tender = lock(&posts.tender);
        if !tender.is_called {
            tender = posts.called.wait_timeout(tender, TENDER_LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
        if posts.closed.load(Ordering::SeqCst) {
            drop(tender);
            return posts.serve_others();
        }
        let is_called = std::mem::take(&mut tender.is_called);
        drop(tender);
        if is_called {
            posts.look();
        } else {
            posts.look_for_room();
        }
    }
}
