//! The conformance suite and the random-operations test over the layer. They use host ids only; the map has a counterpart for
//! each.

use poolfs_idmap::IdMapped;
use poolfs_libservice::random_operations::Comparison;
use poolfs_libservice::types::{Caller, IdMap, IdRange, NO_ID, NodeId, SetAttributes};
use poolfs_libservice::{Libservice, Memory, conformance};
use std::sync::Arc;

/// The low ids stand for high ones, and the other way round.
fn layer() -> Arc<dyn Libservice> {
    const HALF: u32 = 100_000;
    let range = |inside, host, count| IdRange { inside, host, count };
    let ranges = [range(HALF, 0, HALF), range(0, HALF, HALF), range(2 * HALF, 2 * HALF, NO_ID - 2 * HALF)];
    let layer = IdMapped::new(Memory::new(), IdMap::new(ranges).expect("a map"));
    let of_root = SetAttributes { uid: Some(0), gid: Some(0), ..SetAttributes::default() };
    layer.setattr(&Caller::ROOT, NodeId::ROOT, &of_root, None).expect("mapped");
    layer
}

#[test]
fn conforms() {
    conformance::run(&layer);
}

#[test]
fn random_operations() {
    for seed in 1..5 {
        Comparison::new(seed, 3000).run(layer());
    }
}
