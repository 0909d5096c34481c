//! Tests of the quota layers: the suites that every layer must pass, exact accounting, and refusal before acceptance.

mod exact;
mod full;
mod support;

use poolfs_libservice::random_operations::Comparison;
use poolfs_libservice::{Memory, conformance};
use support::Stack;

#[test]
fn conforms() {
    conformance::run(&|| Stack::over(Memory::new(), u64::MAX).top);
}

#[test]
fn random_operations() {
    for seed in 1..5 {
        let memory = Memory::new();
        Comparison::new(seed, 3000).run(Stack::over(memory.clone(), u64::MAX).top);
        assert_eq!(memory.outstanding(), (0, 0));
    }
}
