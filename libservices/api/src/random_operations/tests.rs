//! Tests of the random-operations test: the reference compared with itself, and the hooks between operations.

use super::*;

#[test]
fn the_reference_agrees_with_itself() {
    for seed in 0..20 {
        let subject = Memory::new();
        let layer: Arc<dyn Libservice> = subject.clone();
        let summary = compare(layer, seed, 2000);
        assert!(summary.succeeded > 1000 && summary.refused > 50, "{summary:?} is no test");
        assert_eq!(subject.outstanding(), (0, 0), "references or handles are left");
    }
}

#[test]
fn populated_trees_are_equal_and_stay_so() {
    for seed in 0..3 {
        let (subject, reference) = (Memory::new(), Memory::new());
        populate(&*subject, seed, 60);
        populate(&*reference, seed, 60);
        assert_eq!(subject.outstanding(), (0, 0));
        compare_with(subject, reference, seed, 1500);
    }
}

#[test]
fn hooks_are_called() {
    let mut disturbed = 0;
    let mut remounted = 0;
    Comparison::new(7, 1000)
        .disturbing(10, |_| disturbed += 1)
        .remounting(100, |layer| {
            remounted += 1;
            layer
        })
        .run(Memory::new());
    assert_eq!((disturbed, remounted), (100, 10));
}
