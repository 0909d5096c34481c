//! The state of the tender, the thread that takes posts nobody asks for: whether it is there, and whether it looks or sleeps until it is called.

use super::granted::Granted;
use crate::sync::lock;
use std::io;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Whoever rings again within this is one of many: then the thread looks by itself for a while. Who writes now and then rings each time, which costs less than looking.
const RUNG_OFTEN: Duration = Duration::from_millis(4);

#[derive(Default)]
pub(super) struct TenderState {
    state: Mutex<State>,
    called: Condvar,
}

#[derive(Default)]
struct State {
    thread: Option<JoinHandle<()>>,
    /// It looks again and again, and need not be called.
    is_awake: bool,
    is_called: bool,
    /// When a doorbell came last.
    rung_at: Option<Instant>,
}

impl TenderState {
    /// Has the thread made, if there is none.
    pub fn start(&self, make: impl FnOnce() -> io::Result<JoinHandle<()>>) -> io::Result<()> {
        let mut state = lock(&self.state);
        if state.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            state.thread = Some(make()?);
        }
        Ok(())
    }

    /// Says for a new grant whether the thread looks at it without being called. When it goes to sleep it takes that back, of all there are.
    pub fn tend(&self, granted: &Granted) {
        let state = lock(&self.state);
        granted.session.tend_posts(granted.slot, state.is_awake);
    }

    /// A doorbell has come: whether there was another just before it.
    pub fn is_rung_often(&self) -> bool {
        let now = Instant::now();
        let before = lock(&self.state).rung_at.replace(now);
        before.is_some_and(|before| now.saturating_duration_since(before) <= RUNG_OFTEN)
    }

    /// Wakes the thread, if it sleeps.
    pub fn call(&self) {
        let mut state = lock(&self.state);
        if !state.is_awake {
            state.is_called = true;
            self.called.notify_all();
        }
    }

    /// Wakes the thread for the last time; nothing when there is none.
    pub fn call_to_end(&self) -> Option<JoinHandle<()>> {
        let mut state = lock(&self.state);
        state.is_called = true;
        self.called.notify_all();
        state.thread.take()
    }

    /// Sleeps until it is called, or so long; whether it was called.
    pub fn sleep(&self, longest: Duration) -> bool {
        let mut state = lock(&self.state);
        if !state.is_called {
            state = self.called.wait_timeout(state, longest).unwrap_or_else(PoisonError::into_inner).0;
        }
        std::mem::take(&mut state.is_called)
    }

    /// It looks again and again from here on, or does not any more.
    pub fn set_awake(&self, is_awake: bool) {
        lock(&self.state).is_awake = is_awake;
    }
}
