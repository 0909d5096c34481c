//! The time limit of a command's waits: one limit for all of them together, not for each.
//!
//! A wait counts from its beginning, or from the last sign of life of the process that is waited for, to its end. Waits at the same time
//! count once.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The limit unless another is asked for, seconds.
pub const LIMIT_SECONDS: u64 = 10;
/// Whoever answers within this has answered at once, and costs nothing. A wait has as much when nothing is left.
pub const MOMENT: Duration = Duration::from_millis(100);

/// Longest wait, unless the limit is small, for what a command does aside.
const ASIDE_MAX: Duration = Duration::from_secs(1);

/// What a command has left for waits.
#[derive(Debug)]
pub struct Patience {
    limit: Duration,
    spent: Mutex<Spent>,
    /// What is not for the waits of now, milliseconds.
    kept_back_ms: AtomicU64,
}

#[derive(Debug, Default)]
struct Spent {
    time: Duration,
    /// Up to when all is counted.
    until: Option<Instant>,
    /// Whether somebody has asked not to wait any longer.
    is_given_up: bool,
}

/// One wait; what it took is counted when it ends.
#[derive(Debug)]
pub struct Wait<'p> {
    patience: &'p Patience,
    begun: Instant,
    given: Duration,
}

/// As long as it lives, a part of the patience is kept for what comes later.
#[derive(Debug)]
pub struct KeptBack<'p>(&'p Patience);

impl Patience {
    /// Of a command with this limit.
    pub fn new(limit: Duration) -> Arc<Patience> {
        Patience::with_left(limit, limit)
    }

    /// The same, of which `left` is left.
    pub fn with_left(limit: Duration, left: Duration) -> Arc<Patience> {
        let spent = Spent { time: limit.saturating_sub(left), ..Spent::default() };
        Arc::new(Patience { limit, spent: Mutex::new(spent), kept_back_ms: AtomicU64::new(0) })
    }

    /// All of it.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// What is left of it.
    pub fn left(&self) -> Duration {
        let kept_back = Duration::from_millis(self.kept_back_ms.load(Ordering::Relaxed));
        self.limit.saturating_sub(self.lock().time).saturating_sub(kept_back)
    }

    /// Begin a wait, for as long as is left.
    pub fn begin(&self) -> Wait<'_> {
        Wait { patience: self, begun: Instant::now(), given: self.left().max(MOMENT) }
    }

    /// The same, for so long at most.
    pub fn begin_short(&self, longest: Duration) -> Wait<'_> {
        let mut wait = self.begin();
        wait.given = wait.given.min(longest.max(MOMENT));
        wait
    }

    /// The command has done one thing and begins another: nothing is spent.
    pub fn renew(&self) {
        *self.lock() = Spent { until: Some(Instant::now()), ..Spent::default() };
    }

    /// Nothing is left, because this process was asked to end.
    pub fn give_up(&self) {
        let mut spent = self.lock();
        (spent.time, spent.is_given_up) = (self.limit, true);
    }

    /// Whether it was given up.
    pub fn is_given_up(&self) -> bool {
        self.lock().is_given_up
    }

    /// Until the result is dropped, waits take little: they are for what can be left to the next command.
    pub fn keep_most_back(&self) -> KeptBack<'_> {
        let most = self.limit - ASIDE_MAX.min(self.limit / 4);
        self.kept_back_ms.store(u64::try_from(most.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
        KeptBack(self)
    }

    fn count(&self, begun: Instant) {
        let now = Instant::now();
        let mut spent = self.lock();
        let since = spent.until.map_or(begun, |until| until.max(begun));
        if now.saturating_duration_since(begun) > MOMENT {
            spent.time += now.saturating_duration_since(since);
            spent.until = Some(now);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Spent> {
        self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for KeptBack<'_> {
    fn drop(&mut self) {
        self.0.kept_back_ms.store(0, Ordering::Relaxed);
    }
}

impl Wait<'_> {
    /// Whether nobody is waited for any longer.
    pub fn is_over(&self) -> bool {
        self.begun.elapsed() >= self.given
    }

    /// Whether it is time to look for signs of life: early enough to be told within the limit.
    pub fn is_half_over(&self) -> bool {
        self.begun.elapsed() >= self.given / 2
    }

    /// How long it may go on: never nothing, which the kernel takes for no limit.
    pub fn left(&self) -> Duration {
        self.given.saturating_sub(self.begun.elapsed()).max(Duration::from_millis(1))
    }

    /// There was a sign of life: what was waited until now does not count.
    pub fn heard(&mut self) {
        self.begun = Instant::now();
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.patience.count(self.begun);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(100);
    const LONG: Duration = Duration::from_secs(30);

    /// A wait that began so long ago, and all before it earlier still.
    fn begun_before(patience: &Patience, time: Duration) -> Wait<'_> {
        let earlier = |instant: Instant| instant.checked_sub(time).expect("the host is up for longer");
        let mut wait = patience.begin();
        wait.begun = earlier(wait.begun);
        let mut spent = patience.lock();
        spent.until = spent.until.map(earlier);
        drop(spent);
        wait
    }

    #[test]
    fn all_waits_together_have_one_limit() {
        let patience = Patience::new(LIMIT);
        let wait = begun_before(&patience, LONG);
        assert!(!wait.is_over() && !wait.is_half_over() && wait.left() <= LIMIT - LONG);
        drop(wait);
        assert!(patience.left() <= LIMIT - LONG);
        // The next has what is left of it.
        let next = begun_before(&patience, LIMIT - LONG);
        assert!(next.is_over() && next.left() > Duration::ZERO);
        drop(next);
        assert_eq!(patience.left(), Duration::ZERO);
        let last = patience.begin();
        assert!(last.given == MOMENT, "who answers at once is still heard");
        drop(last);
        patience.renew();
        assert_eq!(patience.left(), LIMIT);
    }

    #[test]
    fn signs_of_life_and_answers_at_once_cost_nothing() {
        let patience = Patience::new(LIMIT);
        let mut wait = begun_before(&patience, LONG);
        wait.heard();
        drop(wait);
        drop(patience.begin());
        assert_eq!(patience.left(), LIMIT);
    }

    #[test]
    fn waits_at_the_same_time_count_once() {
        let patience = Patience::new(LIMIT);
        let (one, other) = (begun_before(&patience, LONG), begun_before(&patience, LONG));
        drop(one);
        drop(other);
        assert!(patience.left() > LIMIT - 2 * LONG);
    }

    #[test]
    fn what_can_be_left_to_the_next_command_takes_a_part_only() {
        let patience = Patience::new(LIMIT);
        let kept = patience.keep_most_back();
        assert_eq!(patience.left(), ASIDE_MAX);
        drop(begun_before(&patience, ASIDE_MAX));
        drop(kept);
        assert!(patience.left() > LIMIT / 2);
    }
}
