//! The conformance suite and the random-operations test, over unions of in-memory branches: empty ones and populated ones.

use crate::support::{Branches, Remounted, fingerprint};
use poolfs_libservice::random_operations::{Comparison, populate};
use poolfs_libservice::{Memory, conformance};

#[test]
fn conformance_over_empty_branches() {
    conformance::run(&|| Branches::empty(2).open());
}

#[test]
fn random_operations_over_an_empty_union() {
    for seed in 0..6 {
        let branches = Branches::empty(1);
        Comparison::new(seed, 3000).run(branches.open());
    }
}

fn over_lowers(seed: u64, operations: usize, remount_every: Option<usize>) {
    let branches = Branches::empty(3);
    populate(&*branches.lowers[1], seed, 60);
    let reference = Memory::new();
    populate(&*reference, seed, 60);
    let before: Vec<_> = branches.lowers.iter().map(|lower| fingerprint(&**lower)).collect();
    let mut mounted = Remounted::default();
    let first = mounted.open(None, || branches.open());
    let mut comparison = Comparison::new(seed, operations).starting_from(reference);
    if let Some(every) = remount_every {
        comparison = comparison.remounting(every, |layer| mounted.open(Some(layer), || branches.open()));
    }
    let summary = comparison.run(first);
    assert!(summary.succeeded > operations / 4, "{summary:?}");
    let after: Vec<_> = branches.lowers.iter().map(|lower| fingerprint(&**lower)).collect();
    assert_eq!(before, after, "a lower branch has changed (seed {seed})");
}

#[test]
fn random_operations_over_populated_lowers() {
    for seed in 100..110 {
        over_lowers(seed, 3000, None);
    }
}

#[test]
fn random_operations_with_remounts() {
    for seed in 200..210 {
        over_lowers(seed, 2000, Some(150));
    }
}

#[test]
fn nothing_of_the_branches_is_kept() {
    let branches = Branches::empty(2);
    populate(&*branches.lowers[0], 5, 40);
    assert_eq!(branches.lowers[0].outstanding(), (0, 0));
    let reference = Memory::new();
    populate(&*reference, 5, 40);
    Comparison::new(5, 1500).starting_from(reference).run(branches.open());
    for (at, branch) in branches.lowers.iter().chain([&branches.upper]).enumerate() {
        assert_eq!(branch.outstanding(), (0, 0), "branch {at}");
    }
}
