//! Conformance cases: which operation sets which of a file's times.

use super::support::*;
use super::{Capability, Case};
use crate::types::{AllocateMode, HandleId, OpenFlags, RenameFlags, SetAttributes, SetTime, Timestamp, XattrFlags};
use std::thread;
use std::time::Duration;

pub(super) const CASES: &[Case] = &[
    Case::new("times/explicit", explicit_times_are_kept),
    Case::new("times/now", now_is_now),
    Case::new("times/content", content_changes_set_modified_and_changed),
    Case::needing("times/allocation", Capability::Allocation, allocating_sets_modified_and_changed),
    Case::new("times/attributes", attribute_changes_set_changed),
    Case::needing("times/xattrs", Capability::UserXattrs, xattr_changes_set_changed),
    Case::new("times/directories", name_changes_set_those_of_the_directory),
    Case::new("times/reading", reading_sets_none_but_the_access),
    Case::new("times/failing", failing_calls_set_none),
];

const OLD: Timestamp = Timestamp { seconds: 300_000_000, nanoseconds: 987_654_321 };

/// Longer than a tick of the coarsest clock a backend stamps files with.
const TICK: Duration = Duration::from_millis(12);

#[track_caller]
fn make_old(layer: Layer<'_>, node: Node) {
    let changes = SetAttributes { modified: Some(SetTime::At(OLD)), ..Default::default() };
    assert_eq!(ok(layer.setattr(&ME, node, &changes, None)).modified, OLD);
}

/// Which times of `node` the operation sets: the modification and the change.
#[track_caller]
fn sets<T>(layer: Layer<'_>, node: Node, operation: impl FnOnce() -> T) -> (bool, bool) {
    make_old(layer, node);
    let before = attributes(layer, node);
    thread::sleep(TICK);
    operation();
    let after = attributes(layer, node);
    assert!(after.changed >= before.changed, "the time of change went back");
    (after.modified != OLD, after.changed > before.changed)
}

fn explicit_times_are_kept(layer: Layer<'_>) {
    let link = ok(layer.symlink(&ME, ROOT, name("link"), b"file")).node;
    for node in [file(layer, ROOT, "file", b"x"), mkdir(layer, ROOT, "directory"), link] {
        let accessed = Timestamp { seconds: 200_000_000, nanoseconds: 1 };
        let changes = SetAttributes { accessed: Some(SetTime::At(accessed)), ..Default::default() };
        ok(layer.setattr(&ME, node, &changes, None));
        make_old(layer, node);
        let found = attributes(layer, node);
        assert_eq!((found.accessed, found.modified), (accessed, OLD));
    }
    let found = lookup(layer, ROOT, "file").attributes;
    assert_eq!(found.modified, OLD);
}

fn now_is_now(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"x");
    let fresh = attributes(layer, node);
    make_old(layer, node);
    let changes = SetAttributes { accessed: Some(SetTime::Now), modified: Some(SetTime::Now), ..Default::default() };
    let found = ok(layer.setattr(&ME, node, &changes, None));
    assert!(found.modified >= fresh.modified && found.accessed >= fresh.modified, "{found:?} after {fresh:?}");
    assert!(found.modified.seconds - fresh.modified.seconds < 600, "{found:?} after {fresh:?}");
}

fn content_changes_set_modified_and_changed(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", &pattern(1, 10_000));
    let handle = open(layer, node, READ_WRITE);
    let both = (true, true);
    assert_eq!(sets(layer, node, || write(layer, handle, 0, b"x")), both, "write");
    assert_eq!(sets(layer, node, || truncate(layer, node, 5000)), both, "truncate");
    assert_eq!(sets(layer, node, || truncate(layer, node, 5000)), both, "truncate to the same size");
    let emptied = || layer.release(open(layer, node, OpenFlags::WRITE_ONLY | OpenFlags::TRUNCATE));
    assert_eq!(sets(layer, node, emptied), both, "open with truncate");
    write(layer, handle, 0, b"content");
    make_old(layer, node);
    ok(layer.fsync(&ME, handle, crate::Durability::All));
    layer.release(handle);
    assert_eq!(attributes(layer, node).modified, OLD, "writing back is no change");
}

fn allocating_sets_modified_and_changed(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"x");
    let handle = open(layer, node, READ_WRITE);
    let allocate = || ok(layer.fallocate(&ME, handle, AllocateMode::empty(), 0, 20_000));
    assert_eq!(sets(layer, node, allocate), (true, true));
    layer.release(handle);
}

fn attribute_changes_set_changed(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"x");
    let attributes_only = (false, true);
    let owned = SetAttributes { uid: Some(5), gid: Some(6), ..Default::default() };
    assert_eq!(sets(layer, node, || chmod(layer, node, 0o600)), attributes_only, "chmod");
    assert_eq!(sets(layer, node, || ok(layer.setattr(&ME, node, &owned, None))), attributes_only, "chown");
    assert_eq!(sets(layer, node, || ok(layer.link(&ME, node, ROOT, name("a")))), attributes_only, "link");
    assert_eq!(sets(layer, node, || ok(layer.unlink(&ME, ROOT, name("a")))), attributes_only, "unlink");
}

fn xattr_changes_set_changed(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"x");
    let set = || ok(layer.setxattr(&ME, node, b"user.a", b"value", XattrFlags::empty()));
    assert_eq!(sets(layer, node, set), (false, true), "setxattr");
    let remove = || ok(layer.removexattr(&ME, node, b"user.a"));
    assert_eq!(sets(layer, node, remove), (false, true), "removexattr");
}

fn name_changes_set_those_of_the_directory(layer: Layer<'_>) {
    let here = mkdir(layer, ROOT, "here");
    let there = mkdir(layer, ROOT, "there");
    let other = file(layer, ROOT, "other", b"x");
    let plain = RenameFlags::empty();
    let both = (true, true);
    let created = || file(layer, here, "file", b"x");
    assert_eq!(sets(layer, here, created), both, "create");
    assert_eq!(sets(layer, here, || mkdir(layer, here, "directory")), both, "mkdir");
    let symlink = || ok(layer.symlink(&ME, here, name("symlink"), b"x"));
    assert_eq!(sets(layer, here, symlink), both, "symlink");
    let link = || ok(layer.link(&ME, other, here, name("link")));
    assert_eq!(sets(layer, here, link), both, "link");
    assert_eq!(sets(layer, here, || ok(layer.unlink(&ME, here, name("link")))), both, "unlink");
    assert_eq!(sets(layer, here, || ok(layer.rmdir(&ME, here, name("directory")))), both, "rmdir");
    let within = || ok(rename(layer, (here, "symlink"), (here, "renamed"), plain));
    assert_eq!(sets(layer, here, within), both, "rename within");
    make_old(layer, there);
    let away = || ok(rename(layer, (here, "file"), (there, "file"), plain));
    assert_eq!(sets(layer, here, away), both, "rename away");
    assert_ne!(attributes(layer, there).modified, OLD, "rename to");
}

fn reading_sets_none_but_the_access(layer: Layer<'_>) {
    let directory = mkdir(layer, ROOT, "directory");
    let node = file(layer, directory, "file", b"content");
    assert_eq!(sets(layer, node, || content(layer, node)), (false, false), "read");
    assert_eq!(sets(layer, directory, || names(layer, directory)), (false, false), "readdir");
    assert_eq!(sets(layer, directory, || lookup(layer, directory, "file")), (false, false), "lookup");
}

fn failing_calls_set_none(layer: Layer<'_>) {
    let directory = mkdir(layer, ROOT, "directory");
    let node = file(layer, directory, "file", b"content");
    let reader: HandleId = open(layer, node, OpenFlags::READ_ONLY);
    let attempts = || {
        assert!(layer.unlink(&ME, directory, name("missing")).is_err());
        assert!(layer.mkdir(&ME, directory, name("file"), 0o755).is_err());
        assert!(rename(layer, (directory, "missing"), (directory, "x"), RenameFlags::empty()).is_err());
    };
    assert_eq!(sets(layer, directory, attempts), (false, false));
    assert_eq!(sets(layer, node, || assert!(layer.write(&ME, reader, 0, b"x").is_err())), (false, false));
    layer.release(reader);
}
