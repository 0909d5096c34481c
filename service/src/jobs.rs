//! Long jobs on an instance, which end before it does.

use crate::sync::lock;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Between two looks whether whoever waits for their end goes on with that.
const PAUSE: Duration = Duration::from_millis(5);

/// The works on one instance.
#[derive(Default)]
pub(crate) struct Jobs(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// The last one that ran is over.
    is_idle: Condvar,
}

#[derive(Default)]
struct State {
    running: usize,
    /// Those who have asked them to end, and none to begin.
    stopping: usize,
    has_ended: bool,
}

/// One of them; it is over when this is dropped.
pub(crate) struct Job(Arc<Shared>);

/// None runs, and none begins while this is there. It outlives the instance, whose branches it does not hold.
pub(crate) struct Stopped {
    shared: Arc<Shared>,
    is_final: bool,
}

impl State {
    fn is_ending(&self) -> bool {
        self.has_ended || self.stopping > 0
    }
}

impl Jobs {
    /// Begins one, unless the instance is about to end.
    pub(crate) fn begin(&self) -> Option<Job> {
        let mut state = lock(&self.0.state);
        if state.is_ending() {
            return None;
        }
        state.running += 1;
        Some(Job(Arc::clone(&self.0)))
    }

    /// Asks all to end, and waits for that as long as `goes_on` says; none if it was in vain.
    pub(crate) fn stop(&self, mut goes_on: impl FnMut() -> bool) -> Option<Stopped> {
        lock(&self.0.state).stopping += 1;
        // Whatever comes of it, that is taken back where this is dropped.
        let stopped = Stopped { shared: Arc::clone(&self.0), is_final: false };
        let mut state = lock(&self.0.state);
        while state.running > 0 {
            if !goes_on() {
                return None;
            }
            state = self.0.is_idle.wait_timeout(state, PAUSE).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        Some(stopped)
    }

    /// Asks all to end, and for none to begin ever after.
    pub(crate) fn end(&self) {
        lock(&self.0.state).has_ended = true;
    }

    /// They may begin again.
    pub(crate) fn begin_again(&self) {
        lock(&self.0.state).has_ended = false;
    }
}

impl Job {
    /// Whether nobody has asked it to end. It has to look at this often.
    pub(crate) fn goes_on(&self) -> bool {
        !lock(&self.0.state).is_ending()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.running -= 1;
        if state.running == 0 {
            self.0.is_idle.notify_all();
        }
    }
}

impl Stopped {
    /// None begins ever after.
    pub(crate) fn for_good(mut self) {
        self.is_final = true;
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        state.stopping -= 1;
        state.has_ended |= self.is_final;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_stops_them_waits_for_those_that_run() {
        let jobs = Jobs::default();
        let job = jobs.begin().expect("nothing stands against it");
        assert!(jobs.begin().is_some(), "there may be several");
        std::thread::scope(|scope| {
            assert!(jobs.stop(|| false).is_none() && job.goes_on(), "nobody waited for it");
            let stopping = scope.spawn(|| drop(jobs.stop(|| true).expect("it waits")));
            while job.goes_on() {
                std::thread::yield_now();
            }
            assert!(jobs.begin().is_none());
            assert!(!stopping.is_finished());
            drop(job);
            stopping.join().expect("no panic");
        });
        assert!(jobs.begin().is_some(), "the instance did not end");
        jobs.stop(|| true).expect("none runs").for_good();
        assert!(jobs.begin().is_none());
        let jobs = Jobs::default();
        jobs.end();
        assert!(jobs.begin().is_none());
    }

    #[test]
    fn who_gives_up_to_stop_them_does_not_let_them_begin_beside_another_who_has() {
        let jobs = Jobs::default();
        let first = jobs.stop(|| true).expect("none runs");
        drop(jobs.stop(|| true).expect("none runs"));
        assert!(jobs.begin().is_none(), "the first one stands");
        drop(first);
        let job = jobs.begin().expect("nothing stands against it");
        assert!(jobs.stop(|| false).is_none() && job.goes_on());
        drop(job);
        let (one, other) = (jobs.stop(|| true).expect("none runs"), jobs.stop(|| true).expect("none runs"));
        one.for_good();
        drop(other);
        assert!(jobs.begin().is_none(), "they ended for good");
    }
}
