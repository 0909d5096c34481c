//! The tender: the thread of an instance that takes posts nobody asks for.

use crate::queue_front::posts::Posts;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tracing::{error, warn};

/// How long a post waits to be taken where nobody asks.
const TEND_EVERY: Duration = Duration::from_millis(1);

/// After so many looks that found nothing the thread sleeps until it is called.
const IDLE_LOOKS_MAX: u32 = 8;

/// How long an instance that ends waits for that thread.
const END_MAX: Duration = Duration::from_secs(5);

/// How long the thread that takes posts sleeps before it looks whether it is needed, and whether there is room for what may be posted.
const TENDER_LOOK: Duration = Duration::from_secs(1);

impl Posts {
    /// Waits, for a while, for the thread that takes posts. After [`Posts::close`].
    pub(in crate::queue_front) fn join(&self) {
        let Some(thread) = self.tender.call_to_end() else { return };
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

    /// Makes the thread that takes what was posted, if there is none; whether there is one.
    pub(super) fn start_tender(self: &Arc<Self>) -> bool {
        let posts = Arc::downgrade(self);
        let started = self.tender.start(|| std::thread::Builder::new().name("posts".into()).spawn(move || run(&posts)));
        if let Err(error) = &started {
            warn!(%error, "no thread to take posted writes: all wait for their answers");
        }
        started.is_ok()
    }

    /// Looks again and again, until nothing has come for a while.
    fn look(&self) {
        self.tender.set_awake(true);
        let mut idle = 0;
        while idle < IDLE_LOOKS_MAX && !self.closed.load(Ordering::SeqCst) {
            std::thread::sleep(TEND_EVERY);
            self.serve_others();
            let grants = self.grants();
            grants.iter().for_each(|granted| granted.session.tend_posts(granted.slot, true));
            let taken: usize = grants.iter().map(|granted| self.take_if_free(granted)).sum();
            idle = if taken > 0 { 0 } else { idle + 1 };
        }
        self.tender.set_awake(false);
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
        let is_called = posts.tender.sleep(TENDER_LOOK);
        if posts.closed.load(Ordering::SeqCst) {
            return posts.serve_others();
        }
        if is_called {
            posts.look();
        } else {
            posts.look_for_room();
        }
    }
}
