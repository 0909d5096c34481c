//! Adaptive spinning: bounded, and adjusted to how often it has paid.

use crate::sync::{AtomicU32, Ordering, spin_loop};

/// Most rounds of one spin: a few microseconds (a pause takes 40 to 140 cycles), less than waking another CPU costs.
const ROUNDS_MAX: u32 = 400;

/// Rounds tried while spinning has not paid, so that a change is noticed.
const ROUNDS_MIN: u32 = 10;

/// How long to spin, learnt from the spins before. Shared by the threads of a process; races only blur it.
pub struct Spinner(AtomicU32);

impl Default for Spinner {
    fn default() -> Self {
        Self(AtomicU32::new(ROUNDS_MAX / 4))
    }
}

impl Spinner {
    /// Spins until `done` says so; false when it did not within the bound.
    ///
    /// Only for a peer that runs on another CPU: on the peer's own, spinning keeps it from running.
    pub fn spin(&self, mut done: impl FnMut() -> bool) -> bool {
        let limit = self.0.load(Ordering::Relaxed).clamp(ROUNDS_MIN, ROUNDS_MAX);
        for _ in 0..limit {
            if done() {
                self.0.store((limit + limit / 4 + 1).min(ROUNDS_MAX), Ordering::Relaxed);
                return true;
            }
            spin_loop();
        }
        self.0.store(limit - limit / 8, Ordering::Relaxed);
        false
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn spins_less_when_it_does_not_pay_and_more_again_when_it_does() {
        let spinner = Spinner::default();
        let rounds = |spinner: &Spinner| {
            let mut count = 0;
            spinner.spin(|| {
                count += 1;
                false
            });
            count
        };
        for _ in 0..100 {
            rounds(&spinner);
        }
        assert!(rounds(&spinner) <= ROUNDS_MIN);
        for _ in 0..100 {
            assert!(spinner.spin(|| true));
        }
        assert!(rounds(&spinner) > ROUNDS_MAX / 2);
    }
}
