//! The conformance suite and the random-operations test, on every kind of filesystem that a directory may be on.

use crate::support::{Filesystem, in_namespace, open};
use poolfs_libservice::Libservice;
use poolfs_libservice::conformance::{self, Capability};
use poolfs_libservice::random_operations::Comparison;
use poolfs_local::{Descriptors, Local, LocalOptions};
use std::cell::Cell;
use std::sync::Arc;

/// Fresh layers on one filesystem: a directory each.
fn maker(filesystem: &Filesystem) -> impl Fn() -> Arc<dyn Libservice> {
    let base = filesystem.path();
    let next = Cell::new(0);
    move || {
        next.set(next.get() + 1);
        let directory = base.join(format!("layer-{}", next.get()));
        std::fs::create_dir(&directory).expect("a directory for a layer");
        open(&directory)
    }
}

fn judge(kind: &str, lacking: &[Capability]) {
    let filesystem = Filesystem::new(kind, 320);
    conformance::run_lacking(&maker(&filesystem), lacking);
}

#[test]
fn conformance_on_tmpfs() {
    in_namespace("judges::conformance_on_tmpfs", || judge("tmpfs", &[Capability::ZeroRange]));
}

#[test]
fn conformance_on_ext4() {
    in_namespace("judges::conformance_on_ext4", || judge("ext4", &[]));
}

#[test]
fn conformance_on_xfs() {
    in_namespace("judges::conformance_on_xfs", || judge("xfs", &[]));
}

#[test]
fn conformance_on_btrfs() {
    in_namespace("judges::conformance_on_btrfs", || judge("btrfs", &[]));
}

#[test]
fn conformance_without_handles() {
    // overlayfs gives no handles by default; it reserves 0/0 devices, and cannot leave one behind either.
    let lacking = [Capability::ZeroRange, Capability::Devices, Capability::RenameFlags];
    in_namespace("judges::conformance_without_handles", || judge("overlay", &lacking));
}

/// Random programs, compared with the reference; every layer remembers next to no descriptor, and is replaced by a new one
/// over the same directory now and then.
fn compare(kind: &str, lacking: &[Capability]) {
    const OPERATIONS: usize = 4000;
    // 103 and 112 met peculiarities of btrfs and xfs.
    for seed in [1, 103, 112] {
        let filesystem = Filesystem::new(kind, 1024);
        let directory = filesystem.path().join("served");
        std::fs::create_dir(&directory).expect("a directory");
        let fresh = || -> Arc<dyn Libservice> {
            let options = LocalOptions { descriptors: Descriptors::new(4, 1 << 12), ..LocalOptions::default() };
            Local::open(&directory, options).expect("the directory opens")
        };
        let comparison = Comparison::new(seed, OPERATIONS).lacking(lacking).remounting(900, |_| fresh());
        let summary = comparison.run(fresh());
        assert!(summary.succeeded > OPERATIONS / 3 && summary.refused > 0, "{kind}: {summary:?}");
    }
}

#[test]
fn random_operations_on_tmpfs() {
    in_namespace("judges::random_operations_on_tmpfs", || compare("tmpfs", &[Capability::ZeroRange]));
}

#[test]
fn random_operations_on_ext4() {
    in_namespace("judges::random_operations_on_ext4", || compare("ext4", &[]));
}

#[test]
fn random_operations_on_xfs() {
    in_namespace("judges::random_operations_on_xfs", || compare("xfs", &[]));
}

#[test]
fn random_operations_on_btrfs() {
    in_namespace("judges::random_operations_on_btrfs", || compare("btrfs", &[]));
}

#[test]
fn random_operations_without_handles() {
    let lacking = [Capability::ZeroRange, Capability::Devices, Capability::RenameFlags];
    in_namespace("judges::random_operations_without_handles", || compare("overlay", &lacking));
}
