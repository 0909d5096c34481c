//! The conformance suite and the random-operations test.

use crate::cluster::Cluster;
use poolfs_libservice::Libservice;
use poolfs_libservice::conformance::{self, Capability};
use poolfs_libservice::random_operations::Comparison;
use std::sync::Arc;

const LACKING: [Capability; 5] = [
    Capability::Allocation,
    Capability::Holes,
    Capability::NamelessFiles,
    Capability::RenameFlags,
    Capability::ZeroRange,
];

fn conforms(is_shared: bool) {
    let cluster = Cluster::new();
    conformance::run_lacking(&|| cluster.fresh(is_shared), &LACKING);
}

#[test]
fn conformance() {
    conforms(false);
}

#[test]
fn conformance_where_others_change_the_tree() {
    conforms(true);
}

/// With these seeds.
fn compare(is_shared: bool, seeds: &[u64]) {
    const OPERATIONS: usize = 4000;
    let cluster = Cluster::new();
    for &seed in seeds {
        let layer: Arc<dyn Libservice> = cluster.fresh(is_shared);
        let summary = Comparison::new(seed, OPERATIONS).lacking(&LACKING).run(layer);
        assert!(summary.succeeded > OPERATIONS / 3 && summary.refused > 0, "{summary:?}");
    }
}

#[test]
fn random_operations() {
    // Those that found faults: parents of removed directories, names lost beside other links, set-id bits.
    compare(false, &[3, 4, 6]);
}

#[test]
fn random_operations_where_others_change_the_tree() {
    compare(true, &[1, 2]);
}
