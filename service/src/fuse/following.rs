//! CPU placement of the threads that read a mount's device: they follow the caller, while one caller at a time asks that may run
//! on no other CPU.
//!
//! A caller sleeps until it has its answer, so its own CPU is free for the thread that serves it. The scheduler does not know
//! that, and wakes the reader on an idle CPU. That takes several times as long as most requests are served in, and longer still
//! in a virtual machine, where the host has to wake a processor first. A thread that serves a message by a ring of the kernel's
//! is on the caller's CPU already ([`super::rings`]). For the device the kernel does not say where a caller is, so it is looked
//! up now and then. A caller that may run elsewhere is not followed: the answer wakes it on an idle CPU in its turn, because the
//! reader still runs on its own, and following it made an open 1.3 to 1.6 times slower.
//!
//! Calls that are in service at the same time should be served in parallel, by all CPUs of the pool: then no caller is followed.
//! Messages that nobody waits for count neither way.

use super::incoming::{Call, Operation};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity};
use std::sync::atomic::{AtomicU32, Ordering};

/// So many calls come one after the other before anybody is followed.
const SCORE_MIN: u32 = 64;
const SCORE_MAX: u32 = 128;
/// What one call that came while another was in service counts against those.
const BESIDE: u32 = 16;
/// Calls between two looks where the caller may be, which is one system call more.
const LOOK_EVERY: u32 = 64;
/// No CPU.
const NONE: u32 = u32::MAX;

/// Where the readers of a device are to be. What they note may be lost when they note it at the same time: that only delays what follows.
pub(super) struct Following {
    /// those of the pool
    cpus: Vec<u32>,
    /// in service
    calls: AtomicU32,
    score: AtomicU32,
    noted: AtomicU32,
    /// the caller's CPU at the last look
    seen: AtomicU32,
    followed: AtomicU32,
}

impl Following {
    /// Nobody is followed yet, and nobody will be beyond `cpus`.
    pub(super) fn new(cpus: &[u32]) -> Self {
        let [calls, score, noted] = [0, 0, 0].map(AtomicU32::new);
        let [seen, followed] = [NONE, NONE].map(AtomicU32::new);
        Self { cpus: cpus.to_vec(), calls, score, noted, seen, followed }
    }

    /// A call has come, which is in service as long as there is what is returned: until just before its answer.
    pub(super) fn enter(&self, call: &Call<'_>) -> Option<Entered<'_>> {
        let is_waited_for = call.thread != 0 && !matches!(call.operation, Ok(Operation::Release { .. }));
        if self.cpus.len() < 2 || !is_waited_for {
            return None;
        }
        let beside = self.calls.fetch_add(1, Ordering::Relaxed) > 0;
        self.note(beside, || only_cpu_of(call.thread));
        Some(Entered(self))
    }

    /// A call has come, `beside` others that are in service or not; `look` tells the CPU that its caller is confined to.
    fn note(&self, beside: bool, look: impl FnOnce() -> Option<u32>) {
        let before = self.score.load(Ordering::Relaxed);
        let score = if beside { before.saturating_sub(BESIDE) } else { (before + 1).min(SCORE_MAX) };
        if score != before {
            self.score.store(score, Ordering::Relaxed);
        }
        if score < SCORE_MIN {
            if self.followed.load(Ordering::Relaxed) != NONE {
                self.followed.store(NONE, Ordering::Relaxed);
            }
            return;
        }
        if !self.noted.fetch_add(1, Ordering::Relaxed).is_multiple_of(LOOK_EVERY) {
            return;
        }
        let now = look().filter(|cpu| self.cpus.contains(cpu)).unwrap_or(NONE);
        // Callers that take turns on several CPUs are not followed to and fro.
        let is_settled = self.seen.swap(now, Ordering::Relaxed) == now;
        self.followed.store(if is_settled { now } else { NONE }, Ordering::Relaxed);
    }

    /// Those of the pool.
    pub(super) fn all(&self) -> &[u32] {
        &self.cpus
    }

    /// The CPUs to be on.
    pub(super) fn cpus(&self) -> (u32, &[u32]) {
        let followed = self.followed.load(Ordering::Relaxed);
        let at = self.cpus.iter().position(|&cpu| cpu == followed);
        (followed, at.map_or(&self.cpus, |at| &self.cpus[at..=at]))
    }
}

/// A call in service.
pub(super) struct Entered<'a>(&'a Following);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Where one reader is kept. A new one is wherever the one was that started it.
#[derive(Default)]
pub(super) struct Kept(Option<u32>);

impl Kept {
    /// Has the calling thread go where it is to be, if it is not there.
    pub(super) fn follow(&mut self, following: &Following) {
        let (followed, cpus) = following.cpus();
        if self.0 != Some(followed) {
            self.0 = Some(followed);
            crate::cpus::keep_on(cpus);
        }
    }
}

/// The only CPU on which a thread may run.
fn only_cpu_of(thread: u32) -> Option<u32> {
    let thread = Pid::from_raw(i32::try_from(thread).ok()?)?;
    let allowed = sched_getaffinity(Some(thread)).ok()?;
    let only = (0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu)).filter(|_| allowed.count() == 1)?;
    u32::try_from(only).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(following: &Following, times: u32, cpu: Option<u32>) -> u32 {
        (0..times).for_each(|_| following.note(false, || cpu));
        following.cpus().0
    }

    #[test]
    fn one_caller_at_a_time_is_followed_where_it_is_confined_to() {
        let following = Following::new(&[2, 3]);
        assert_eq!(ask(&following, SCORE_MIN - 1, Some(3)), NONE, "not yet");
        assert_eq!(ask(&following, 2 * LOOK_EVERY + 1, Some(3)), 3);
        assert_eq!(following.cpus().1, [3]);
        assert_eq!(ask(&following, LOOK_EVERY, Some(2)), NONE, "it has moved");
        assert_eq!(ask(&following, LOOK_EVERY, Some(2)), 2);
        assert_eq!(ask(&following, 2 * LOOK_EVERY, Some(7)), NONE, "not the pool's");
        assert_eq!(ask(&following, 2 * LOOK_EVERY, None), NONE, "nobody knows");
        assert_eq!(following.cpus().1, [2, 3]);
    }

    #[test]
    fn callers_that_ask_at_the_same_time_or_take_turns_are_not_followed() {
        let following = Following::new(&[0, 1]);
        for turn in 0..10 {
            assert_eq!(ask(&following, LOOK_EVERY, Some(turn % 2)), NONE);
        }
        assert_eq!(ask(&following, 3 * LOOK_EVERY, Some(1)), 1);
        // Now and then a call comes beside another.
        for _ in 0..100 {
            following.note(true, || Some(1));
            assert_eq!(ask(&following, BESIDE, Some(1)), 1);
        }
        for _ in 0..SCORE_MAX {
            following.note(true, || Some(1));
            following.note(false, || Some(1));
        }
        assert_eq!(following.cpus().0, NONE);
    }

    #[test]
    fn what_nobody_waits_for_and_what_comes_to_a_pool_of_one_cpu_counts_neither_way() {
        let call = |thread, operation| Call::for_tests(thread, operation);
        let own = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        let following = Following::new(&[0, 1]);
        assert!(following.enter(&call(own, Operation::Release { handle: 1 })).is_none());
        assert!(following.enter(&call(0, Operation::Destroy)).is_none());
        for _ in 0..3 {
            let first = following.enter(&call(own, Operation::Destroy));
            assert!(first.is_some() && following.score.load(Ordering::Relaxed) == 1);
            let _second = following.enter(&call(own, Operation::Destroy)).expect("it counts");
            assert_eq!(following.score.load(Ordering::Relaxed), 0);
        }
        assert!(Following::new(&[4]).enter(&call(own, Operation::Destroy)).is_none());
    }

    #[test]
    fn whoever_may_run_on_several_cpus_is_confined_to_none() {
        let confined = std::thread::spawn(|| {
            let mut one = CpuSet::new();
            let allowed = sched_getaffinity(None).expect("known");
            let first = (0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu)).expect("it has one");
            one.set(first);
            rustix::thread::sched_setaffinity(None, &one).expect("it may run there");
            let this = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
            let (alone, another) = (only_cpu_of(this), if first == 0 { 1 } else { 0 });
            one.set(another);
            let is_several = allowed.is_set(another) && rustix::thread::sched_setaffinity(None, &one).is_ok();
            (alone, first, is_several.then(|| only_cpu_of(this)))
        });
        let (alone, cpu, several) = confined.join().expect("no panic");
        assert_eq!((alone, several.unwrap_or(None)), (u32::try_from(cpu).ok(), None));
        assert_eq!((only_cpu_of(u32::MAX), only_cpu_of(i32::MAX.unsigned_abs())), (None, None));
    }
}
