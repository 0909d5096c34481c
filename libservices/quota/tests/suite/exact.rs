//! Tests of exactness: after any operations, the account equals what `du` counts, and what a new account counts.

use crate::support::{BLOCK, ROOT, Stack, name, on_disk};
use poolfs_bcow::Layout;
use poolfs_libservice::conformance::Capability;
use poolfs_libservice::random_operations::Comparison;
use poolfs_libservice::types::{AllocateMode, NodeId, OpenFlags};
use std::sync::Arc;

const LAYOUTS: [Option<Layout>; 3] = [None, Some(Layout::Performance), Some(Layout::Space)];

#[test]
fn after_random_operations() {
    for (seed, layout) in (0..6).zip(LAYOUTS.iter().cycle()) {
        let folder = tempfile::tempdir().expect("a folder");
        let stack = Stack::at(folder.path(), *layout, u64::MAX);
        Comparison::new(seed, 2000).run(Arc::clone(&stack.top));
        stack.top.sync().expect("written");
        let account = Arc::clone(&stack.account);
        // What somebody holds is as the backend had it when it changed: ext4 decides later how many blocks it takes to find the others.
        drop(stack);
        assert_eq!(account.used(), on_disk(folder.path()), "seed {seed}, {layout:?}");
        let again = Stack::at(folder.path(), *layout, u64::MAX);
        assert_eq!(again.account.used(), account.used(), "seed {seed}, {layout:?}");
    }
}

#[test]
fn in_memory_after_random_operations() {
    for seed in 0..3 {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let stack = Stack::in_memory(folder.path(), u64::MAX);
        let lacking = [Capability::Allocation, Capability::ZeroRange];
        Comparison::new(seed, 2000).lacking(&lacking).run(Arc::clone(&stack.top));
        stack.top.sync().expect("written");
        let account = Arc::clone(&stack.account);
        drop(stack);
        assert_eq!(Stack::in_memory(folder.path(), u64::MAX).account.used(), account.used(), "seed {seed}");
    }
}

#[test]
fn what_was_removed_is_counted_until_nobody_holds_it() {
    for layout in LAYOUTS {
        let folder = tempfile::tempdir().expect("a folder");
        let stack = Stack::at(folder.path(), layout, 1 << 20);
        let empty = stack.account.used();
        let (node, handle) = stack.create("f");
        assert_eq!(stack.fill(handle, 0, 64), 64);
        stack.top.fsync(ROOT, handle, poolfs_libservice::Durability::All).expect("written");
        assert!(stack.account.used() >= empty + 64 * BLOCK);
        stack.top.unlink(ROOT, NodeId::ROOT, name("f")).expect("there");
        stack.top.forget(node, 1);
        assert!(stack.account.used() >= empty + 64 * BLOCK, "open, so still there");
        stack.top.release(handle);
        assert_eq!(stack.account.used(), empty);
    }
}

#[test]
fn room_that_was_asked_for_is_counted() {
    let folder = tempfile::tempdir().expect("a folder");
    let stack = Stack::at(folder.path(), None, 2 << 20);
    let (_, handle) = stack.create("f");
    let before = stack.account.used();
    let keep = AllocateMode::KEEP_SIZE;
    stack.top.fallocate(ROOT, handle, keep, 0, 512 << 10).expect("room");
    assert_eq!(stack.account.used(), before + (512 << 10));
    assert!(stack.top.fallocate(ROOT, handle, keep, 512 << 10, 1600 << 10).is_err());
    stack.top.fallocate(ROOT, handle, AllocateMode::empty(), 0, 512 << 10).expect("there already");
    stack.top.fallocate(ROOT, handle, keep | AllocateMode::PUNCH_HOLE, 0, 512 << 10).expect("given back");
    assert_eq!(stack.account.used(), before);
}

#[test]
fn a_replaced_file_is_counted_no_more() {
    let folder = tempfile::tempdir().expect("a folder");
    let stack = Stack::at(folder.path(), None, 1 << 20);
    for round in 0..20 {
        let (node, handle) = stack.create("new");
        assert_eq!(stack.fill(handle, 0, 32), 32, "round {round}");
        stack.top.release(handle);
        stack.top.forget(node, 1);
        let flags = poolfs_libservice::types::RenameFlags::empty();
        stack.top.rename(ROOT, NodeId::ROOT, name("new"), NodeId::ROOT, name("f"), flags).expect("renamed");
    }
    stack.top.sync().expect("written");
    assert_eq!(stack.account.used(), on_disk(folder.path()));
    let entry = stack.top.lookup(ROOT, NodeId::ROOT, name("f")).expect("there");
    let handle = stack.top.open(ROOT, entry.node, OpenFlags::READ_WRITE | OpenFlags::TRUNCATE).expect("there");
    stack.top.release(handle);
    stack.top.forget(entry.node, 1);
    assert_eq!(stack.account.used(), on_disk(folder.path()));
}
