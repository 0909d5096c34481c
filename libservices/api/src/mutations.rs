//! Mutation tests of the conformance suite and the random-operations test: each must catch every one of a set of faulty layers.

mod faulty;

use crate::conformance;
use crate::random_operations::{Comparison, populate};
use crate::{Libservice, Memory};
use faulty::{Bug, Faulty};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

fn is_caught<T>(judge: impl FnOnce() -> T) -> bool {
    catch_unwind(AssertUnwindSafe(judge)).is_err()
}

fn with(bug: Bug) -> Arc<dyn Libservice> {
    Faulty::over(Memory::new(), bug)
}

#[test]
fn the_faultless_wrapper_passes() {
    conformance::run(&|| with(Bug::None));
    for seed in 0..5 {
        Comparison::new(seed, 1000).run(with(Bug::None));
    }
}

#[test]
fn conformance_catches_every_bug() {
    for bug in Bug::ALL {
        assert!(is_caught(|| conformance::run(&|| with(bug))), "{bug:?} was not caught");
    }
}

#[test]
fn random_operations_catch_every_bug() {
    for bug in Bug::ALL {
        let caught = (0..10).filter(|&seed| is_caught(|| Comparison::new(seed, 4000).run(with(bug))));
        assert!(caught.count() >= 5, "{bug:?} was caught by less than half of the seeds");
    }
}

#[test]
fn random_operations_catch_a_difference_at_the_start() {
    let (subject, reference) = (Memory::new(), Memory::new());
    populate(&*subject, 1, 30);
    populate(&*reference, 2, 30);
    assert!(is_caught(|| Comparison::new(1, 0).starting_from(reference).run(subject)));
}

#[test]
fn a_remount_that_loses_something_is_caught() {
    let fresh = |_| -> Arc<dyn Libservice> { Memory::new() };
    assert!(is_caught(|| Comparison::new(1, 400).remounting(200, fresh).run(Memory::new())));
}
