//! Tests of fsync's promises, of failures, and of a nearly full backend.

use crate::support::{ROOT, Stack, name, patient, pattern};
use poolfs_cache::CacheConfig;
use poolfs_libservice::{Durability, Libservice, Memory};
use poolfs_types::{AllocateMode, Errno, NodeId, OpenFlags, SetAttributes, SetTime, Timestamp};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

#[test]
fn after_fsync_a_power_cut_loses_neither_content_nor_size_nor_time() {
    let stack = Stack::new(patient(1 << 20));
    let (node, handle) = stack.create("f");
    let mut model = Vec::new();
    for round in 0..200_u64 {
        let offset = round * 7919 % 300_000;
        let data = pattern(round, offset, (round * 613 % 30_000) as usize + 1);
        let end = offset as usize + data.len();
        stack.write(handle, offset, &data);
        if model.len() < end {
            model.resize(end, 0);
        }
        model[offset as usize..end].copy_from_slice(&data);
        if round % 11 == 0 {
            let size = round * 1000;
            let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
            stack.cache.setattr(&ROOT, node, &changes, Some(handle)).unwrap();
            model.resize(size as usize, 0);
        }
        if round % 5 == 0 {
            stack.cache.fsync(&ROOT, handle, Durability::All).unwrap();
            let durable = stack.below.durable(node);
            assert!(durable.content == model, "round {round}: the durable content is another");
            assert_eq!(durable.modified, stack.cache.getattr(&ROOT, node).unwrap().modified);
        }
    }
}

#[test]
fn places_far_from_each_other_are_written_below_together_and_none_is_lost_when_some_of_them_fail() {
    const BLOCK: u64 = 4096;
    let stack = Stack::new(patient(1 << 20));
    let (node, handle) = stack.create("f");
    let mut model = vec![0; 100 * BLOCK as usize];
    for round in 0..2 {
        for number in 0..40 {
            let offset = (number * 7 % 50) * 2 * BLOCK;
            let data = pattern(round, offset, 3000);
            stack.write(handle, offset, &data);
            model[offset as usize..offset as usize + 3000].copy_from_slice(&data);
        }
        let before = stack.below.scattered_writes.load(Ordering::SeqCst);
        if round == 1 {
            stack.below.writes_spared.store(10, Ordering::SeqCst);
            stack.below.fail_writes.store(Errno::EIO.raw(), Ordering::SeqCst);
            let failed = stack.cache.fsync(&ROOT, handle, Durability::Data).unwrap_err();
            assert_eq!(failed.errno(), Errno::EIO);
            stack.below.fail_writes.store(0, Ordering::SeqCst);
        }
        stack.cache.fsync(&ROOT, handle, Durability::Data).unwrap();
        let calls = stack.below.scattered_writes.load(Ordering::SeqCst) - before;
        assert_eq!(calls, 2 + round, "40 places, 32 at a time, and those that failed once more");
        let durable = stack.below.durable(node).content;
        assert!(durable == model[..durable.len()] && durable.len() > 98 * BLOCK as usize, "round {round}");
    }
}

#[test]
fn writing_back_moves_no_time() {
    let stack = Stack::new(patient(1 << 20));
    let (node, handle) = stack.create("f");
    stack.write(handle, 0, b"abc");
    let written = stack.cache.getattr(&ROOT, node).unwrap().modified;
    std::thread::sleep(Duration::from_millis(20));
    stack.cache.sync().unwrap();
    assert_eq!(stack.cache.getattr(&ROOT, node).unwrap().modified, written);
    assert_eq!(stack.below.now(node).modified, written);
    let then = Timestamp { seconds: 1_000_000, nanoseconds: 7 };
    stack.write(handle, 1, b"x");
    let changes = SetAttributes { modified: Some(SetTime::At(then)), ..SetAttributes::default() };
    assert_eq!(stack.cache.setattr(&ROOT, node, &changes, None).unwrap().modified, then);
    stack.cache.sync().unwrap();
    stack.cache.drop_clean();
    assert_eq!(stack.cache.getattr(&ROOT, node).unwrap().modified, then);
    assert_eq!(stack.below.now(node).content, b"axc");
}

#[test]
fn dirty_data_goes_below_when_it_expires() {
    let config = CacheConfig {
        expire: Duration::from_millis(300),
        tick: Duration::from_millis(50),
        ..CacheConfig::with_limit(1 << 20)
    };
    let stack = Stack::new(config);
    let (node, handle) = stack.create("f");
    stack.write(handle, 0, &pattern(1, 0, 10_000));
    assert_eq!(stack.below.writes.load(Ordering::SeqCst), 0, "written before its time");
    let start = Instant::now();
    while stack.cache.dirty_bytes() > 0 && start.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(stack.below.now(node).content, pattern(1, 0, 10_000));
    assert_eq!(stack.below.writes.load(Ordering::SeqCst), 1, "the blocks were not written together");
}

#[test]
fn a_failed_write_back_is_told_once_to_each_handle_and_loses_nothing() {
    let stack = Stack::new(patient(1 << 20));
    let (node, handle) = stack.create("f");
    let other = stack.cache.open(&ROOT, node, OpenFlags::READ_ONLY).unwrap();
    stack.write(handle, 0, &pattern(3, 0, 20_000));
    stack.below.fail_writes.store(Errno::EIO.raw(), Ordering::SeqCst);
    assert_eq!(stack.cache.fsync(&ROOT, handle, Durability::All).unwrap_err().errno(), Errno::EIO);
    let later = stack.cache.open(&ROOT, node, OpenFlags::READ_ONLY).unwrap();
    assert_eq!(stack.cache.flush(&ROOT, other).unwrap_err().errno(), Errno::EIO);
    assert!(stack.cache.flush(&ROOT, other).is_ok(), "told twice");
    assert!(stack.cache.flush(&ROOT, handle).is_ok(), "told twice");
    assert!(stack.cache.flush(&ROOT, later).is_ok(), "it happened before the open");
    assert_eq!(stack.read(later, 0, 20_000), pattern(3, 0, 20_000));
    stack.below.fail_writes.store(0, Ordering::SeqCst);
    stack.cache.fsync(&ROOT, handle, Durability::Data).unwrap();
    assert_eq!(stack.below.durable(node).content, pattern(3, 0, 20_000));
    stack.below.fail_fsyncs.store(Errno::ENOSPC.raw(), Ordering::SeqCst);
    assert_eq!(stack.cache.fsync(&ROOT, handle, Durability::All).unwrap_err().errno(), Errno::ENOSPC);
    stack.below.fail_fsyncs.store(0, Ordering::SeqCst);
    assert_eq!(stack.cache.fsync(&ROOT, other, Durability::All).unwrap_err().errno(), Errno::ENOSPC);
    stack.cache.fsync(&ROOT, other, Durability::All).unwrap();
}

#[test]
fn a_backend_that_takes_nothing_stops_writers_with_its_error() {
    let stack = Stack::new(patient(1 << 20));
    let (node, handle) = stack.create("f");
    stack.below.fail_writes.store(Errno::ENOSPC.raw(), Ordering::SeqCst);
    let mut accepted = 0;
    let error = loop {
        match stack.cache.write(&ROOT, handle, accepted, &pattern(4, accepted, 8192)) {
            Ok(written) => accepted += written.count as u64,
            Err(error) => break error,
        }
        assert!(accepted < 1 << 20, "more is dirty than the cache is large");
    };
    assert_eq!(error.errno(), Errno::ENOSPC);
    assert!(accepted > 0);
    assert!(stack.cache.dirty_bytes() <= 512 << 10);
    assert_eq!(stack.read(handle, 0, 1 << 20), pattern(4, 0, accepted as usize));
    stack.below.fail_writes.store(0, Ordering::SeqCst);
    stack.cache.shutdown().unwrap();
    assert_eq!(stack.below.now(node).content, pattern(4, 0, accepted as usize));
}

#[test]
fn near_full_the_writer_sees_it_and_what_was_accepted_fits() {
    for limit in [256 << 10, 64 << 20] {
        let stack = Stack::over(patient(limit), Memory::with_capacity(4 << 20));
        let (node, handle) = stack.create("f");
        let mut accepted = 0;
        let error = loop {
            match stack.cache.write(&ROOT, handle, accepted, &pattern(5, accepted, 10_000)) {
                Ok(written) => accepted += written.count as u64,
                Err(error) => break error,
            }
            assert!(accepted < 5 << 20, "more was accepted than fits");
        };
        assert_eq!(error.errno(), Errno::ENOSPC);
        assert!(accepted > 3 << 20, "only {accepted} bytes were accepted");
        stack.cache.fsync(&ROOT, handle, Durability::All).unwrap();
        assert!(stack.below.durable(node).content == pattern(5, 0, accepted as usize));
        let (_, second) = stack.create("g");
        match stack.cache.write(&ROOT, second, 0, &[1; 1 << 20]) {
            Ok(written) => assert!(written.count < 1 << 20, "more was accepted than fits"),
            Err(error) => assert_eq!(error.errno(), Errno::ENOSPC),
        }
        stack.cache.unlink(&ROOT, NodeId::ROOT, name("f")).unwrap();
        stack.cache.release(handle);
        stack.cache.forget(node, 1);
        stack.write(second, 0, &[2; 1 << 20]);
        stack.cache.fsync(&ROOT, second, Durability::All).unwrap();
    }
}

#[test]
fn what_is_accepted_after_room_was_allocated_fits() {
    let stack = Stack::over(patient(64 << 20), Memory::with_capacity(8 << 20));
    let (node, handle) = stack.create("f");
    // There is much room now.
    stack.write(handle, 0, &pattern(5, 0, 10_000));
    let (_, allocated) = stack.create("g");
    stack.cache.fallocate(&ROOT, allocated, AllocateMode::KEEP_SIZE, 0, 6 << 20).unwrap();
    let mut accepted = 10_000;
    while accepted < 4 << 20 {
        match stack.cache.write(&ROOT, handle, accepted, &pattern(5, accepted, 10_000)) {
            Ok(written) => accepted += written.count as u64,
            Err(error) => {
                assert_eq!(error.errno(), Errno::ENOSPC);
                break;
            }
        }
    }
    stack.cache.fsync(&ROOT, handle, Durability::All).unwrap();
    assert!(stack.below.durable(node).content == pattern(5, 0, accepted as usize));
}

#[test]
fn held_blocks_wait_for_their_release() {
    let stack = Stack::new(patient(1 << 20));
    let (node, handle) = stack.create("f");
    stack.cache.hold(&ROOT, handle, 4096..8192, true).unwrap();
    stack.write(handle, 0, &pattern(6, 0, 12_288));
    stack.cache.fsync(&ROOT, handle, Durability::All).unwrap();
    let mut expected = pattern(6, 0, 12_288);
    expected[4096..8192].fill(0);
    assert!(stack.below.durable(node).content == expected);
    stack.cache.drop_clean();
    assert_eq!(stack.read(handle, 0, 12_288), pattern(6, 0, 12_288));
    stack.cache.hold(&ROOT, handle, 0..12_288, false).unwrap();
    stack.cache.fsync(&ROOT, handle, Durability::All).unwrap();
    assert!(stack.below.durable(node).content == pattern(6, 0, 12_288));
}

#[test]
fn synchronous_writes_are_durable_when_they_return() {
    let stack = Stack::new(patient(1 << 20));
    let (node, handle) = stack.create("f");
    let sync = OpenFlags::READ_WRITE | OpenFlags::DATA_SYNC | OpenFlags::APPEND;
    let synchronous = stack.cache.open(&ROOT, node, sync).unwrap();
    stack.write(handle, 0, b"one");
    stack.write(synchronous, 0, b"two");
    assert_eq!(stack.below.durable(node).content, b"onetwo");
}

#[test]
fn what_nobody_can_reach_is_not_written() {
    let stack = Stack::new(patient(1 << 20));
    let (node, handle) = stack.create("f");
    stack.write(handle, 0, &pattern(7, 0, 100_000));
    stack.cache.unlink(&ROOT, NodeId::ROOT, name("f")).unwrap();
    assert_eq!(stack.read(handle, 0, 100_000), pattern(7, 0, 100_000));
    stack.cache.release(handle);
    stack.cache.forget(node, 1);
    assert_eq!(stack.cache.dirty_bytes(), 0);
    assert_eq!(stack.cache.usage().bytes(), 0);
    stack.cache.sync().unwrap();
    assert_eq!(stack.below.writes.load(Ordering::SeqCst), 0);
    assert_eq!(stack.below.memory.outstanding(), (0, 0));
}

#[test]
fn everything_is_given_back_below() {
    let stack = Stack::new(patient(1 << 20));
    let memory = Arc::clone(&stack.below.memory);
    for n in 0..50 {
        let (node, handle) = stack.create(&format!("f{n}"));
        stack.write(handle, 0, &pattern(n, 0, 50_000));
        stack.cache.release(handle);
        stack.cache.forget(node, 1);
    }
    stack.cache.shutdown().unwrap();
    drop(stack);
    assert_eq!(memory.outstanding(), (0, 0));
}

#[test]
fn a_cache_that_is_dropped_writes_back_what_it_can() {
    for errno in [0, Errno::EIO.raw()] {
        let stack = Stack::new(patient(1 << 20));
        let (node, handle) = stack.create("f");
        let (gone, _) = stack.create("gone");
        stack.write(handle, 0, &pattern(8, 0, 100_000));
        stack.cache.forget(node, 1);
        stack.cache.unlink(&ROOT, NodeId::ROOT, name("gone")).unwrap();
        stack.cache.forget(gone, 1);
        stack.below.fail_writes.store(errno, Ordering::SeqCst);
        let Stack { pool, below, cache } = stack;
        drop(cache);
        assert_eq!(pool.statistics().dirty_bytes, 0);
        assert_eq!(pool.statistics().used_bytes, 0);
        assert_eq!(below.memory.outstanding(), (0, 0));
        let node = below.memory.lookup(&ROOT, NodeId::ROOT, name("f")).unwrap().node;
        let expected = if errno == 0 { pattern(8, 0, 100_000) } else { Vec::new() };
        assert!(below.now(node).content == expected);
    }
}

#[test]
fn branches_that_do_not_answer_keep_no_other_from_being_written() {
    const HANGING: usize = 3;
    let soon = Duration::from_millis(10);
    let config = CacheConfig { expire: soon, tick: soon, ..CacheConfig::with_limit(32 << 20) };
    let healthy = Stack::new(config);
    let hanging: Vec<Stack> = (0..HANGING).map(|_| healthy.beside()).collect();
    for stack in &hanging {
        stack.below.writes_allowed.store(0, Ordering::SeqCst);
        for number in 0..8 {
            let (_, handle) = stack.create(&format!("f{number}"));
            stack.write(handle, 0, b"waits");
        }
    }
    let begun = Instant::now();
    let wait = |what: &str, is_done: &dyn Fn() -> bool| {
        while !is_done() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::yield_now();
        }
    };
    let (_, handle) = healthy.create("f");
    for round in 0..20u64 {
        let before = healthy.below.writes.load(Ordering::SeqCst);
        healthy.write(handle, round * 4096, b"written");
        wait("write-back", &|| healthy.below.writes.load(Ordering::SeqCst) > before);
    }
    for stack in &hanging {
        stack.below.writes_allowed.store(u64::MAX, Ordering::SeqCst);
    }
    let count = |stack: &Stack| stack.pool.statistics().dirty_bytes;
    wait("all of it, when they go on", &|| count(&healthy) == 0);
}
