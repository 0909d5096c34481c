//! Tests of files that have lost their last name: their space is available to others as soon as nobody holds them.

use crate::support::{ROOT, Stack, name, pattern};
use poolfs_cache::CacheConfig;
use poolfs_libservice::Libservice;
use poolfs_types::{Errno, NodeId};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn nobody_writes_a_file_back_to_its_end_that_was_removed_meanwhile() {
    let config =
        CacheConfig { expire: Duration::ZERO, tick: Duration::from_millis(1), ..CacheConfig::with_limit(64 << 20) };
    let stack = Stack::new(config);
    stack.below.writes_allowed.store(1, Ordering::SeqCst);
    let (node, handle) = stack.create("f");
    stack.write(handle, 0, &pattern(1, 0, 16 << 20));
    wait_until("nobody writes back", || stack.below.writes.load(Ordering::SeqCst) > 1);
    stack.cache.unlink(&ROOT, NodeId::ROOT, name("f")).unwrap();
    stack.cache.release(handle);
    stack.cache.forget(node, 1);
    assert!(stack.below.memory.outstanding().1 > 0, "it is being written back");
    stack.below.writes_allowed.store(u64::MAX, Ordering::SeqCst);
    wait_until("it is held", || stack.below.memory.outstanding() == (0, 0));
    assert!(stack.below.writes.load(Ordering::SeqCst) < 8, "it was written to its end");
    assert_eq!(stack.cache.dirty_bytes(), 0);
}

#[test]
fn whoever_finds_no_room_below_waits_for_what_is_about_to_end() {
    // Whoever is to let it go may have to wait for a processor.
    let stack = Stack::new(CacheConfig { leaving_wait_max: LIMIT, ..crate::support::patient(1 << 20) });
    let (node, handle) = stack.create("old");
    stack.write(handle, 0, b"x");
    stack.cache.unlink(&ROOT, NodeId::ROOT, name("old")).unwrap();
    stack.cache.forget(node, 1);
    let (_, writing) = stack.create("new");
    stack.below.fail_writes.store(Errno::ENOSPC.raw(), Ordering::SeqCst);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait_until("nobody writes", || stack.below.writes.load(Ordering::SeqCst) > 2);
            // The room is there before the file has ended.
            stack.below.fail_writes.store(0, Ordering::SeqCst);
            stack.cache.release(handle);
        });
        for step in 0..512 {
            stack.write(writing, step * 8192, &pattern(2, step, 8192));
        }
    });
}
