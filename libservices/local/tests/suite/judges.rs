//! The contract's judge, on every kind of filesystem that a directory may lie on.

use crate::support::{Filesystem, in_namespace, open};
use poolfs_libservice::Libservice;
use poolfs_libservice::conformance::{self, Capability};
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
