//! Long jobs on an instance, which end before it does.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};
use std::thread;
use std::time::Duration;

/// Between two looks whether the last of them has ended.
const PAUSE: Duration = Duration::from_millis(5);

/// The works on one instance.
#[derive(Default)]
pub(crate) struct Jobs {
    running: RwLock<()>,
    is_ending: AtomicBool,
}

/// One of them; it is over when this is dropped.
pub(crate) struct Job<'a> {
    jobs: &'a Jobs,
    _running: RwLockReadGuard<'a, ()>,
}

/// None runs, and none begins while this is there.
pub(crate) struct Stopped<'a> {
    jobs: &'a Jobs,
    _alone: RwLockWriteGuard<'a, ()>,
    is_final: bool,
}

impl Jobs {
    /// Begins one, unless the instance is about to end.
    pub(crate) fn begin(&self) -> Option<Job<'_>> {
        let running = self.running.try_read().ok()?;
        let job = Job { jobs: self, _running: running };
        job.goes_on().then_some(job)
    }

    /// Asks all to end, and waits for that as long as `goes_on` says; none if it was in vain.
    pub(crate) fn stop(&self, mut goes_on: impl FnMut() -> bool) -> Option<Stopped<'_>> {
        self.is_ending.store(true, Ordering::SeqCst);
        loop {
            let alone = match self.running.try_write() {
                Ok(alone) => alone,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) if goes_on() => {
                    thread::sleep(PAUSE);
                    continue;
                }
                Err(TryLockError::WouldBlock) => {
                    self.is_ending.store(false, Ordering::SeqCst);
                    return None;
                }
            };
            return Some(Stopped { jobs: self, _alone: alone, is_final: false });
        }
    }

    /// Asks all to end, and for none to begin ever after.
    pub(crate) fn end(&self) {
        self.is_ending.store(true, Ordering::SeqCst);
    }

    /// They may begin again.
    pub(crate) fn begin_again(&self) {
        self.is_ending.store(false, Ordering::SeqCst);
    }
}

impl Job<'_> {
    /// Whether nobody has asked it to end. It has to look at this often.
    pub(crate) fn goes_on(&self) -> bool {
        !self.jobs.is_ending.load(Ordering::SeqCst)
    }
}

impl Stopped<'_> {
    /// None begins ever after.
    pub(crate) fn for_good(mut self) {
        self.is_final = true;
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.jobs.is_ending.store(self.is_final, Ordering::SeqCst);
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
}
