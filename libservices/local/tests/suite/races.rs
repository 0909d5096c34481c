//! Race tests: what is held stays what it is, while others create and remove names concurrently.

use crate::support::{Filesystem, ROOT, in_namespace, name};
use poolfs_libservice::Libservice;
use poolfs_local::{Descriptors, Local, LocalOptions};
use poolfs_types::{Errno, FileType, NodeId, OpenFlags, RenameFlags};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Whether the one who makes and removes has another `round` to go: there are at least `rounds`, and more for as long
/// as the one who looks has `found` nothing, because nobody promises that two threads run at the same time.
fn goes_on(round: usize, rounds: usize, found: &AtomicUsize, began: Instant) -> bool {
    let missed = found.load(Ordering::Relaxed) == 0;
    assert!(!missed || began.elapsed() < Duration::from_secs(60), "the race did not happen in {round} rounds");
    round < rounds || missed
}

/// Says that one of two threads is done when it ends, also by a failed assertion, so that the other ends too.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A layer that remembers next to no descriptor, so that every use of a node has to find its inode again.
fn forgetful(filesystem: &Filesystem) -> std::sync::Arc<Local> {
    let options = LocalOptions { descriptors: Descriptors::new(1, 1 << 12), ..LocalOptions::default() };
    Local::open(&filesystem.path(), options).expect("open")
}

#[test]
fn a_held_node_outlives_its_name() {
    in_namespace("races::a_held_node_outlives_its_name", || {
        for kind in ["tmpfs", "ext4", "xfs", "btrfs", "overlay"] {
            let filesystem = Filesystem::new(kind, 320);
            let layer = forgetful(&filesystem);
            let other = layer.mkdir(&ROOT, NodeId::ROOT, name("other"), 0o755).expect("mkdir").node;
            let done = AtomicBool::new(false);
            let found = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let _done = Done(&done);
                    let began = Instant::now();
                    for round in (0..).take_while(|&round| goes_on(round, 600, &found, began)) {
                        let made = layer.mknod(&ROOT, NodeId::ROOT, name("x"), FileType::Regular, 0o600, 0);
                        layer.forget(made.expect("mknod").node, 1);
                        match round % 3 {
                            0 => layer.unlink(&ROOT, NodeId::ROOT, name("x")).expect("unlink"),
                            1 => {
                                let to = (other, name("y"));
                                let moved =
                                    layer.rename(&ROOT, NodeId::ROOT, name("x"), to.0, to.1, RenameFlags::empty());
                                moved.expect("rename");
                            }
                            _ => {
                                let made = layer.mknod(&ROOT, other, name("z"), FileType::Regular, 0o600, 0);
                                layer.forget(made.expect("mknod").node, 1);
                                let from = (other, name("z"));
                                let moved =
                                    layer.rename(&ROOT, from.0, from.1, NodeId::ROOT, name("x"), RenameFlags::empty());
                                moved.expect("rename over");
                                layer.unlink(&ROOT, NodeId::ROOT, name("x")).expect("unlink");
                            }
                        }
                    }
                });
                while !done.load(Ordering::Acquire) {
                    match layer.lookup(&ROOT, NodeId::ROOT, name("x")) {
                        Ok(entry) => {
                            found.fetch_add(1, Ordering::Relaxed);
                            // Pushes the descriptor of `x` out of what is remembered.
                            layer.getattr(&ROOT, other).expect("getattr");
                            for _ in 0..3 {
                                let now = layer.getattr(&ROOT, entry.node).expect("a held node");
                                assert_eq!(now.inode, entry.attributes.inode, "{kind}");
                            }
                            let handle = layer.open(&ROOT, entry.node, OpenFlags::READ_ONLY).expect("open");
                            layer.forget(entry.node, 1);
                            layer.getattr(&ROOT, entry.node).expect("an open node");
                            layer.release(handle);
                        }
                        Err(error) => assert_eq!(error.errno(), Errno::ENOENT, "{kind}"),
                    }
                }
            });
        }
    });
}

/// Whoever has made something holds it, also when its name goes at once.
#[test]
fn what_was_made_outlives_a_name_that_is_removed_at_once() {
    in_namespace("races::what_was_made_outlives_a_name_that_is_removed_at_once", || {
        for kind in ["tmpfs", "ext4", "xfs", "btrfs", "overlay"] {
            let filesystem = Filesystem::new(kind, 320);
            let layer = forgetful(&filesystem);
            let other = layer.mkdir(&ROOT, NodeId::ROOT, name("other"), 0o755).expect("mkdir").node;
            let done = AtomicBool::new(false);
            let removed = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let _done = Done(&done);
                    let began = Instant::now();
                    for round in (0..).take_while(|&round| goes_on(round, 200, &removed, began)) {
                        let (made, handle) = if round % 2 == 0 {
                            let made = layer.create(&ROOT, NodeId::ROOT, name("x"), 0o600, OpenFlags::READ_WRITE);
                            made.map(|(entry, handle)| (entry, Some(handle))).expect("create")
                        } else {
                            let made = layer.mknod(&ROOT, NodeId::ROOT, name("x"), FileType::Regular, 0o600, 0);
                            (made.expect("mknod"), None)
                        };
                        if let Some(handle) = handle {
                            layer.release(handle);
                        }
                        while layer.lookup(&ROOT, NodeId::ROOT, name("x")).is_ok_and(|found| {
                            layer.forget(found.node, 1);
                            true
                        }) {}
                        // Pushes its descriptor out of what is remembered.
                        layer.getattr(&ROOT, other).expect("getattr");
                        let now = layer.getattr(&ROOT, made.node).expect("a held node");
                        assert_eq!((now.inode, now.links), (made.attributes.inode, 0), "{kind}");
                        layer.forget(made.node, 1);
                    }
                });
                while !done.load(Ordering::Acquire) {
                    match layer.unlink(&ROOT, NodeId::ROOT, name("x")) {
                        Ok(()) => drop(removed.fetch_add(1, Ordering::Relaxed)),
                        Err(error) => assert_eq!(error.errno(), Errno::ENOENT, "{kind}"),
                    }
                }
            });
        }
    });
}

/// Whoever finds a name finds it complete: never with the owner or mode it had for a moment.
#[test]
fn nobody_sees_a_name_without_its_owner() {
    in_namespace("races::nobody_sees_a_name_without_its_owner", || {
        let filesystem = Filesystem::new("tmpfs", 64);
        let layer = forgetful(&filesystem);
        let caller = poolfs_types::Caller { uid: 77, gid: 78, umask: 0 };
        let done = AtomicBool::new(false);
        let found = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _done = Done(&done);
                let began = Instant::now();
                for _ in (0..).take_while(|&round| goes_on(round, 3000, &found, began)) {
                    let made = layer.mkdir(&caller, NodeId::ROOT, name("x"), 0o2755).expect("mkdir");
                    layer.forget(made.node, 1);
                    layer.rmdir(&ROOT, NodeId::ROOT, name("x")).expect("rmdir");
                }
            });
            while !done.load(Ordering::Acquire) {
                if let Ok(entry) = layer.lookup(&ROOT, NodeId::ROOT, name("x")) {
                    let seen = entry.attributes;
                    assert_eq!((seen.uid, seen.gid, seen.permissions), (77, 78, 0o2755));
                    layer.forget(entry.node, 1);
                    found.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    });
}
