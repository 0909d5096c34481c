//! Callers that wait no longer for an answer: because they are killed, or because the mount's time limit is over.
//!
//! Once a request is being served, the kernel lets its caller go only when it is answered, whatever signals come. A caller that
//! was killed is therefore answered `EINTR` at once. The request is served to its end, and what its late answer would have given
//! to the kernel is taken back. Other signals interrupt nobody: a program would see `EINTR` where a disk has none.
//!
//! A request that takes longer than the mount's time limit is answered `EIO` in the same way, by whatever its caller is held up. Where
//! there is a limit, the watcher looks from the start of the mount on.
//!
//! The kernel sends a message when a waiting caller gets its first signal. That message finds no reader while all threads are
//! serving, and a second signal sends none. So messages and a lack of threads only wake a watcher, which then examines the
//! callers itself, as long as there are requests that it has seen before. Meanwhile it also ensures that somebody reads, when no
//! further thread could be had at first.

use crate::in_flight::now_ms;
use crate::sync::lock;
use poolfs_libservice::types::Errno;
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How often the watcher looks.
const PERIOD: Duration = Duration::from_millis(50);

/// How often it looks at least where requests have a time limit: so many times in that time, within these bounds.
const LOOKS: u32 = 8;
const LOOK_MAX: Duration = Duration::from_secs(1);

/// `SIGKILL` in the masks of `/proc/PID/status`.
const KILLED: u64 = 1 << 8;

/// The caller of requests that the kernel makes by itself: no thread has this number.
const NOBODY: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Waiting {
    unique: u64,
    /// 0: nobody waits any more.
    thread: u32,
    /// When it began, where requests have a time limit.
    since_ms: u64,
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
    /// The last is a spare one ([`InService::spare`]).
    places: Vec<Mutex<Option<Waiting>>>,
    taken: AtomicUsize,
    /// How long one of them may take.
    timeout: Option<Duration>,
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
    pub(super) fn new(threads: usize, timeout: Option<Duration>) -> Self {
        let places = (0..=threads).map(|_| Mutex::new(None)).collect();
        Self { places, taken: AtomicUsize::new(0), timeout, watch: Mutex::default(), changed: Condvar::new() }
    }

    /// The place for a thread beyond the others.
    pub(super) fn spare(&self) -> usize {
        self.places.len() - 1
    }

    /// Whether requests have a time limit.
    pub(super) fn has_timeout(&self) -> bool {
        self.timeout.is_some()
    }

    fn since_ms(&self) -> u64 {
        self.timeout.map_or(0, |_| now_ms())
    }

    /// In how many of the places from `first` on, without the spare one, there are requests that nobody waits for any more.
    pub(super) fn given_up(&self, first: usize) -> usize {
        let places = self.places.iter().take(self.spare()).skip(first);
        places.filter(|place| lock(place).is_some_and(|waiting| waiting.thread == 0)).count()
    }

    /// The thread with number `place` begins to serve a request of the caller `thread`. Whether no place is left, so that somebody has to
    /// [look](Self::look).
    pub(super) fn enter(&self, place: usize, unique: u64, thread: u32) -> (Entered<'_>, bool) {
        // The kernel's own requests have no thread.
        let thread = if thread == 0 { NOBODY } else { thread };
        *lock(&self.places[place]) = Some(Waiting { unique, thread, since_ms: self.since_ms() });
        let is_last = self.taken.fetch_add(1, Ordering::Relaxed) + 1 == self.spare();
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

    /// Watches until [`InService::end`]: `answer` is called with the place and the number of each request whose caller waits no longer, and the
    /// errno for it, and again later when it cannot answer yet; `stay` each time that requests stay.
    pub(super) fn watch(&self, answer: impl Fn(usize, u64, Errno) -> bool, stay: impl Fn()) {
        let mut seen = Vec::new();
        let mut again = false;
        while let Some(asked) = self.wait(again) {
            let mut now = Vec::new();
            for (at, place) in self.places.iter().enumerate() {
                let Some(waiting @ Waiting { unique, .. }) = *lock(place) else { continue };
                now.push(unique);
                let errno = self.given_up_for(waiting, seen.contains(&unique));
                if errno.is_some_and(|errno| answer(at, unique, errno)) {
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

    /// Why nobody waits for a request any more; nothing while somebody does, or where that is known.
    fn given_up_for(&self, waiting: Waiting, was_seen: bool) -> Option<Errno> {
        let is_over = |timeout: Duration| Duration::from_millis(now_ms().saturating_sub(waiting.since_ms)) >= timeout;
        match waiting.thread {
            0 => None,
            _ if self.timeout.is_some_and(is_over) => Some(Errno::EIO),
            thread => (was_seen && is_killed(thread)).then_some(Errno::EINTR),
        }
    }

    /// For a period, or until asked; whether somebody has asked, nothing at the end.
    fn wait(&self, period: bool) -> Option<bool> {
        let watch = lock(&self.watch);
        let is_idle = |watch: &mut Watch| !watch.asked && !watch.ended;
        let mut watch = match self.timeout {
            _ if period => {
                let waited = self.changed.wait_timeout_while(watch, PERIOD, |watch| !watch.ended);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            Some(timeout) => {
                let pause = (timeout / LOOKS).clamp(PERIOD, LOOK_MAX);
                let waited = self.changed.wait_timeout_while(watch, pause, is_idle);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            None => self.changed.wait_while(watch, is_idle).unwrap_or_else(PoisonError::into_inner),
        };
        let asked = std::mem::take(&mut watch.asked);
        (!watch.ended).then_some(asked)
    }
}

/// Whether a thread that still waits was killed: the signal stays pending until the thread comes back from the kernel.
fn is_killed(thread: u32) -> bool {
    thread != NOBODY
        && fs::read_to_string(format!("/proc/{thread}/status")).is_ok_and(|status| has_kill_pending(&status))
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
        let in_service = Arc::new(InService::new(2, None));
        let (answered, answers) = channel();
        let (watched, mut watcher) = (Arc::clone(&in_service), None);
        assert_eq!(in_service.look(|| Err("no thread")), Err("no thread"));
        let start = || {
            watcher = Some(thread::spawn(move || watched.watch(|_, unique, _| answered.send(unique).is_ok(), || ())));
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

    #[test]
    fn callers_are_answered_once_when_their_time_is_over_whoever_they_are() {
        let in_service = Arc::new(InService::new(3, Some(Duration::from_millis(20))));
        assert!(in_service.has_timeout());
        let (answered, answers) = channel();
        let watched = Arc::clone(&in_service);
        let watcher = thread::spawn(move || {
            watched.watch(|place, unique, errno| answered.send((place, unique, errno)).is_ok(), || ());
        });
        let (own, kernels) = (in_service.enter(0, 10, std::process::id()).0, in_service.enter(2, 12, 0).0);
        let mut both = [(); 2].map(|()| answers.recv().expect("answered"));
        both.sort_unstable();
        assert_eq!(both, [(0, 10, Errno::EIO), (2, 12, Errno::EIO)]);
        // Noted after they are answered.
        while in_service.given_up(0) < 2 {
            thread::yield_now();
        }
        assert_eq!((in_service.given_up(1), in_service.given_up(3)), (1, 0));
        assert!(answers.recv_timeout(6 * PERIOD).is_err(), "each is answered once");
        assert!(own.leave());
        drop(kernels);
        assert_eq!(in_service.given_up(0), 0);
        in_service.end();
        watcher.join().expect("ended");
    }
}
