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

#[test]
fn conformance() {
    let cluster = Cluster::new();
    conformance::run_lacking(&|| cluster.fresh(), &LACKING);
}

#[test]
fn random_operations() {
    const OPERATIONS: usize = 4000;
    let cluster = Cluster::new();
    // Those that found faults: parents of removed directories, names lost beside other links, set-id bits.
    for seed in [3, 4, 6] {
        let layer: Arc<dyn Libservice> = cluster.fresh();
        let summary = Comparison::new(seed, OPERATIONS).lacking(&LACKING).run(layer);
        assert!(summary.succeeded > OPERATIONS / 3 && summary.refused > 0, "{summary:?}");
    }
}
