//! Callers that are killed while they wait for an answer.
//!
//! Once a request is being served, the kernel lets its caller go only when it is answered, whatever signals come. A caller that
//! was killed is therefore answered `EINTR` at once. The request is served to its end, and what its late answer would have given
//! to the kernel is taken back. Other signals interrupt nobody: a program would see `EINTR` where a disk has none.
//!
//! The kernel sends a message when a waiting caller gets its first signal. That message finds no reader while all threads are
//! serving, and a second signal sends none. So messages and a lack of threads only wake a watcher, which then examines the
//! callers itself, as long as there are requests that it has seen before. Meanwhile it also ensures that somebody reads, when no
//! further thread could be had at first.

use crate::sync::lock;
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How often the watcher looks.
const PERIOD: Duration = Duration::from_millis(50);

/// `SIGKILL` in the masks of `/proc/PID/status`.
const KILLED: u64 = 1 << 8;

#[derive(Clone, Copy)]
struct Waiting {
    unique: u64,
    thread: u32,
}

#[derive(Default)]
struct Watch {
    /// There is a watcher.
    started: bool,
    asked: bool,
    ended: bool,
}

/// The requests in service: at most one of each thread.
pub(super) struct InService {
    places: Vec<Mutex<Option<Waiting>>>,
    taken: AtomicUsize,
    watch: Mutex<Watch>,
    changed: Condvar,
}

/// A request in service, until it is dropped.
pub(super) struct Entered<'a> {
    of: &'a InService,
    place: usize,
    unique: u64,
}

impl Entered<'_> {
    /// The request has been served. Whether it is still to be answered: nobody else has taken it.
    pub(super) fn leave(self) -> bool {
        self.of.take(self.place, self.unique, || Ok::<_, ()>(())).is_some()
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let _ = self.of.take(self.place, self.unique, || Ok::<_, ()>(()));
        self.of.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

impl InService {
    pub(super) fn new(threads: usize) -> Self {
        let places = (0..threads).map(|_| Mutex::new(None)).collect();
        Self { places, taken: AtomicUsize::new(0), watch: Mutex::default(), changed: Condvar::new() }
    }

    /// The thread with number `place` begins to serve a request of the caller `thread`. Whether no place is left, so that somebody has to
    /// [look](Self::look).
    pub(super) fn enter(&self, place: usize, unique: u64, thread: u32) -> (Entered<'_>, bool) {
        *lock(&self.places[place]) = Some(Waiting { unique, thread });
        let is_last = self.taken.fetch_add(1, Ordering::Relaxed) + 1 == self.places.len();
        (Entered { of: self, place, unique }, is_last)
    }

    /// Takes a request out of service, unless it is out already, when `then` succeeds; nobody else can take it meanwhile.
    pub(super) fn take<T, E>(
        &self,
        place: usize,
        unique: u64,
        then: impl FnOnce() -> Result<T, E>,
    ) -> Option<Result<T, E>> {
        let mut waiting = lock(&self.places[place]);
        waiting.filter(|waiting| waiting.unique == unique)?;
        let outcome = then();
        if outcome.is_ok() {
            *waiting = None;
        }
        Some(outcome)
    }

    /// Wakes the watcher, which is started by `start` when there is none.
    ///
    /// # Errors
    /// Those of `start`.
    pub(super) fn look<E>(&self, start: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let mut watch = lock(&self.watch);
        if !watch.started {
            start()?;
            watch.started = true;
        }
        if !std::mem::replace(&mut watch.asked, true) {
            self.changed.notify_one();
        }
        Ok(())
    }

    /// Ends the watcher.
    pub(super) fn end(&self) {
        lock(&self.watch).ended = true;
        self.changed.notify_one();
    }

    /// Watches until [`InService::end`]: `answer` is called with the place and the number of each request whose caller was
    /// killed, and again later when it cannot answer yet; `stay` each time that requests stay.
    pub(super) fn watch(&self, answer: impl Fn(usize, u64) -> bool, stay: impl Fn()) {
        let mut seen = Vec::new();
        let mut again = false;
        while let Some(asked) = self.wait(again) {
            let mut now = Vec::new();
            for (at, place) in self.places.iter().enumerate() {
                let Some(Waiting { unique, thread }) = *lock(place) else { continue };
                now.push(unique);
                if seen.contains(&unique) && is_killed(thread) && answer(at, unique) {
                    // The number of the thread may be another's before the request is served.
                    if let Some(waiting) = lock(place).as_mut().filter(|waiting| waiting.unique == unique) {
                        waiting.thread = 0;
                    }
                }
            }
            // Whoever asked may speak of a request that is only now being entered.
            let is_any_left = now.iter().any(|unique| seen.contains(unique));
            if is_any_left {
                stay();
            }
            again = asked || is_any_left;
            seen = now;
        }
    }

    /// For a period, or until asked; whether somebody has asked, nothing at the end.
    fn wait(&self, period: bool) -> Option<bool> {
        let watch = lock(&self.watch);
        let mut watch = if period {
            let waited = self.changed.wait_timeout_while(watch, PERIOD, |watch| !watch.ended);
            waited.unwrap_or_else(PoisonError::into_inner).0
        } else {
            let waited = self.changed.wait_while(watch, |watch| !watch.asked && !watch.ended);
            waited.unwrap_or_else(PoisonError::into_inner)
        };
        let asked = std::mem::take(&mut watch.asked);
        (!watch.ended).then_some(asked)
    }
}

/// Whether a thread that still waits was killed: the signal stays pending until the thread comes back from the kernel.
fn is_killed(thread: u32) -> bool {
    thread != 0 && fs::read_to_string(format!("/proc/{thread}/status")).is_ok_and(|status| has_kill_pending(&status))
}

fn has_kill_pending(status: &str) -> bool {
    status.lines().any(|line| {
        let mask = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"));
        mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & KILLED != 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::thread;

    #[test]
    fn a_pending_kill_is_found_in_either_mask() {
        assert!(has_kill_pending("Name:\tx\nSigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n"));
        assert!(has_kill_pending("SigPnd:\t0000000000000000\nShdPnd:\t0000000000000101\n"));
        assert!(!has_kill_pending("SigPnd:\t0000000000004000\nShdPnd:\t0000000000000002\nSigCgt:\tfff\n"));
        assert!(!has_kill_pending("SigPnd:\tzz\n"));
    }

    struct Sleeper(Child);

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn callers_that_live_are_never_answered_for_them_and_the_watcher_ends() {
        let sleeper = Sleeper(Command::new("sleep").arg("60").spawn().expect("coreutils"));
        let in_service = Arc::new(InService::new(2));
        let (answered, answers) = channel();
        let (watched, mut watcher) = (Arc::clone(&in_service), None);
        assert_eq!(in_service.look(|| Err("no thread")), Err("no thread"));
        let start = || {
            watcher = Some(thread::spawn(move || watched.watch(|_, unique| answered.send(unique).is_ok(), || ())));
            Ok::<_, ()>(())
        };
        in_service.look(start).expect("started");
        let first = in_service.enter(0, 10, sleeper.0.id()).0;
        let (second, is_last) = in_service.enter(1, 12, 0);
        assert!(is_last);
        in_service.look(|| -> Result<(), ()> { panic!("there is a watcher") }).expect("asked");
        assert!(answers.recv_timeout(6 * PERIOD).is_err());
        assert!(first.leave());
        assert_eq!(in_service.take(1, 12, || Err::<(), _>("not yet")), Some(Err("not yet")));
        assert_eq!(in_service.take(1, 12, || Ok::<_, ()>("now")), Some(Ok("now")));
        let (third, _) = in_service.enter(1, 14, 0);
        assert!(!second.leave(), "it was taken");
        assert!(third.leave(), "what is in its place now is not");
        in_service.end();
        watcher.expect("started").join().expect("ended");
    }
}
