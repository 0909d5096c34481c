//! Tests of what the cache saves the layer below, and of its bounds.

use crate::support::{ROOT, Stack, name, patient, pattern};
use poolfs_cache::CacheConfig;
use poolfs_libservice::Libservice;
use poolfs_types::{Errno, NodeId, OpenFlags, SetAttributes, XattrFlags};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[test]
fn more_files_are_cached_than_descriptors_allow() {
    const FILES: usize = 20_001;
    const LENGTH: usize = 33 << 10;
    let stack = Stack::new(patient(1 << 30));
    for n in 0..FILES {
        let (node, handle) = stack.create(&format!("f{n}"));
        stack.write(handle, 0, &pattern(n as u64, 0, LENGTH));
        stack.cache.release(handle);
        stack.cache.forget(node, 1);
    }
    stack.cache.sync().unwrap();
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count();
    assert!(open < 4096, "{open} descriptors are open");
    let reads = stack.below.reads.load(Ordering::SeqCst);
    for n in (0..FILES).step_by(7) {
        let entry = stack.cache.lookup(&ROOT, NodeId::ROOT, name(&format!("f{n}"))).unwrap();
        let handle = stack.cache.open(&ROOT, entry.node, OpenFlags::READ_ONLY).unwrap();
        assert!(stack.read(handle, 0, 1 << 16) == pattern(n as u64, 0, LENGTH));
        stack.cache.release(handle);
        stack.cache.forget(entry.node, 1);
    }
    assert_eq!(stack.below.reads.load(Ordering::SeqCst), reads, "not everything was cached");
}

#[test]
fn what_is_cached_costs_no_call_below() {
    let stack = Stack::new(patient(4 << 20));
    let (node, handle) = stack.create("f");
    stack.write(handle, 0, &pattern(1, 0, 200_000));
    stack.cache.release(handle);
    stack.cache.sync().unwrap();
    assert!(stack.cache.lookup(&ROOT, NodeId::ROOT, name("none")).is_err());
    stack.cache.getattr(&ROOT, NodeId::ROOT).unwrap();
    let calls = |stack: &Stack| {
        let below = &stack.below;
        [&below.reads, &below.lookups, &below.getattrs, &below.opens].map(|count| count.load(Ordering::SeqCst))
    };
    let before = calls(&stack);
    for _ in 0..100 {
        assert!(stack.cache.lookup(&ROOT, NodeId::ROOT, name("none")).is_err());
        assert_eq!(stack.cache.lookup(&ROOT, NodeId::ROOT, name("f")).unwrap().attributes.size, 200_000);
        let handle = stack.cache.open(&ROOT, node, OpenFlags::READ_ONLY).unwrap();
        assert_eq!(stack.read(handle, 77_777, 4096), pattern(1, 77_777, 4096));
        stack.cache.release(handle);
    }
    assert_eq!(calls(&stack), before);
}

#[test]
fn sequential_reads_reach_the_layer_below_in_large_pieces() {
    let stack = Stack::new(patient(64 << 20));
    let (node, handle) = stack.create("f");
    for piece in 0..16_u64 {
        stack.write(handle, piece << 20, &pattern(2, piece << 20, 1 << 20));
    }
    stack.cache.sync().unwrap();
    stack.cache.drop_clean();
    assert!(stack.cache.usage().bytes() < 64 << 10);
    let before = stack.below.reads.load(Ordering::SeqCst);
    let reader = stack.cache.open(&ROOT, node, OpenFlags::READ_ONLY).unwrap();
    for block in 0..4096_u64 {
        assert!(stack.read(reader, block << 12, 4096) == pattern(2, block << 12, 4096));
    }
    let reads = stack.below.reads.load(Ordering::SeqCst) - before;
    assert!(reads <= 64, "{reads} reads below for 16 MiB");
}

#[test]
fn holes_take_no_memory() {
    let stack = Stack::new(patient(4 << 20));
    let (node, handle) = stack.create("f");
    let changes = SetAttributes { size: Some(64 << 20), ..SetAttributes::default() };
    stack.cache.setattr(&ROOT, node, &changes, Some(handle)).unwrap();
    let mut buffer = vec![1; 1 << 20];
    for piece in 0..64 {
        assert_eq!(stack.cache.read(&ROOT, handle, piece << 20, &mut buffer).unwrap(), 1 << 20);
        assert!(buffer.iter().all(|&byte| byte == 0));
    }
    assert!(stack.cache.usage().bytes() < 256 << 10, "{} bytes for zeros", stack.cache.usage().bytes());
}

#[test]
fn a_slow_read_delays_no_cached_one() {
    let stack = Stack::new(patient(4 << 20));
    let (_, cold) = stack.create("cold");
    stack.write(cold, 0, &pattern(1, 0, 100_000));
    stack.cache.sync().unwrap();
    stack.cache.drop_clean();
    let (_, warm) = stack.create("warm");
    stack.write(warm, 0, &pattern(2, 0, 100_000));
    let before = stack.below.reads.load(Ordering::SeqCst);
    stack.below.reads_allowed.store(before, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| assert_eq!(stack.read(cold, 0, 100), pattern(1, 0, 100)));
        while stack.below.reads.load(Ordering::SeqCst) == before {
            std::thread::yield_now();
        }
        let cached = scope.spawn(|| assert_eq!(stack.read(warm, 5000, 4096), pattern(2, 5000, 4096)));
        let begun = Instant::now();
        while !cached.is_finished() && begun.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let is_delayed = !cached.is_finished() || slow.is_finished();
        stack.below.reads_allowed.store(u64::MAX, Ordering::SeqCst);
        assert!(!is_delayed, "it waits for what another one reads");
    });
}

#[test]
fn a_writer_waits_for_room_and_not_for_all_of_a_write_back() {
    const PIECE: u64 = 1 << 20;
    // Half of it may be dirty; with a quarter a thread begins to write back.
    let stack = Stack::new(patient(64 * PIECE));
    let (_, handle) = stack.create("f");
    let piece = pattern(1, 0, PIECE as usize);
    let write = |number: u64| stack.write(handle, number * PIECE, &piece);
    stack.below.writes_allowed.store(0, Ordering::SeqCst);
    (0..20).for_each(write);
    while stack.below.writes.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    std::thread::scope(|scope| {
        // There comes to be room for these; what is dirty is not all below by then.
        stack.below.writes_allowed.store(12, Ordering::SeqCst);
        let writer = scope.spawn(|| (20..40).for_each(write));
        let begun = Instant::now();
        while !writer.is_finished() && begun.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let is_done = writer.is_finished();
        stack.below.writes_allowed.store(u64::MAX, Ordering::SeqCst);
        assert!(is_done, "it waits for what somebody else writes back");
    });
    stack.cache.sync().unwrap();
    assert_eq!(stack.read(handle, 39 * PIECE, piece.len()), piece);
}

/// Writers stamp whole blocks of their own with a version and a checksum, readers check them, while the cache is much
/// smaller than the files and everything clean is dropped again and again.
#[test]
fn threads_agree_while_blocks_come_and_go() {
    const BLOCKS: u64 = 256;
    const THREADS: u64 = 4;
    let stack = Stack::new(patient(512 << 10));
    let files: Vec<_> = (0..3).map(|n| stack.create(&format!("f{n}")).1).collect();
    let stop = AtomicBool::new(false);
    let operations = AtomicU64::new(0);
    let check = |file: u64, block: u64, bytes: &[u8], at_least: u64| {
        let version = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert!(version >= at_least, "file {file} block {block}: version {version} after {at_least}");
        if version > 0 {
            assert!(bytes[8..] == pattern(version ^ file << 32, block, 4088), "file {file} block {block} is torn");
        }
    };
    for &handle in &files {
        stack.write(handle, BLOCKS * 4096 - 1, &[0]);
    }
    let (stack, files, stop, operations, check) = (&stack, &files, &stop, &operations, &check);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let mut versions = vec![0_u64; (BLOCKS * 3) as usize];
                let mut random = 12345 + thread;
                while !stop.load(Ordering::Relaxed) {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let file = (random >> 33) % 3;
                    let own = (random >> 40) % (BLOCKS / THREADS) * THREADS + thread;
                    let known = &mut versions[(file * BLOCKS + own) as usize];
                    let handle = files[file as usize];
                    if random >> 60 < 6 {
                        *known += 1;
                        let mut bytes = known.to_le_bytes().to_vec();
                        bytes.extend(pattern(*known ^ file << 32, own, 4088));
                        stack.write(handle, own * 4096, &bytes);
                    }
                    check(file, own, &stack.read(handle, own * 4096, 4096), *known);
                    if random >> 60 == 15 {
                        let foreign = (random >> 20) % BLOCKS;
                        let bytes = stack.read(handle, foreign * 4096, 4096);
                        check(file, foreign, &bytes, 0);
                    }
                    operations.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        scope.spawn(move || {
            let start = Instant::now();
            while start.elapsed() < Duration::from_secs(5) {
                stack.cache.drop_clean();
                assert!(stack.pool.statistics().used_bytes <= (512 << 10) * 5 / 4);
                std::thread::sleep(Duration::from_millis(1));
                if start.elapsed().as_millis().is_multiple_of(7) {
                    stack.cache.sync().unwrap();
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    });
    assert!(operations.load(Ordering::Relaxed) > 1000);
    stack.cache.shutdown().unwrap();
    assert_eq!(stack.cache.dirty_bytes(), 0);
}

#[test]
fn appends_of_many_threads_lose_nothing() {
    let stack = Stack::new(patient(512 << 10));
    let (node, handle) = stack.create("f");
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let stack = &stack;
            scope.spawn(move || {
                let flags = OpenFlags::WRITE_ONLY | OpenFlags::APPEND;
                let handle = stack.cache.open(&ROOT, node, flags).unwrap();
                for _ in 0..200 {
                    stack.write(handle, 0, &[thread + 1; 1000]);
                }
                stack.cache.release(handle);
            });
        }
    });
    let content = stack.read(handle, 0, 1 << 20);
    assert_eq!(content.len(), 800_000);
    let mut counts = [0; 5];
    for record in content.chunks(1000) {
        assert!(record.iter().all(|&byte| byte == record[0]), "records are mixed");
        counts[record[0] as usize] += 1;
    }
    assert_eq!(counts, [0, 200, 200, 200, 200]);
}

#[test]
fn a_layer_that_is_not_written_back_leaves_others_their_share() {
    const LIMIT: u64 = 64 << 20;
    const PIECE: u64 = 64 << 10;
    let hostile = Stack::new(CacheConfig { flush_threads: 1, ..patient(LIMIT) });
    let other = hostile.beside();
    hostile.below.writes_allowed.store(0, Ordering::SeqCst);
    let (_, filling) = hostile.create("f");
    let (_, handle) = other.create("g");
    let written = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for at in 0..LIMIT / PIECE {
                hostile.write(filling, at * PIECE, &pattern(1, at * PIECE, PIECE as usize));
                written.fetch_add(PIECE, Ordering::SeqCst);
            }
        });
        let start = Instant::now();
        // Three quarters of what may be dirty, which is half of the cache.
        while written.load(Ordering::SeqCst) < LIMIT / 8 * 3 - PIECE {
            if start.elapsed() > Duration::from_secs(60) {
                hostile.below.writes_allowed.store(u64::MAX, Ordering::SeqCst);
                panic!("{written:?}");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        for at in 0..LIMIT / 8 / PIECE - 1 {
            other.write(handle, at * PIECE, &pattern(2, at * PIECE, PIECE as usize));
        }
        let written_back = other.below.writes.load(Ordering::SeqCst);
        let (dirty, taken) = (other.cache.dirty_bytes(), written.load(Ordering::SeqCst));
        // What is beyond its own, whoever waits for room writes back: it, or the other.
        for at in LIMIT / 8 / PIECE - 1..LIMIT / 4 / PIECE {
            other.write(handle, at * PIECE, &pattern(2, at * PIECE, PIECE as usize));
        }
        let written_back_beyond = other.below.writes.load(Ordering::SeqCst);
        // Before anything is compared: a failure would wait for the writer for good.
        hostile.below.writes_allowed.store(u64::MAX, Ordering::SeqCst);
        assert_eq!(written_back, 0, "what is its own was written back to make room for the other");
        assert!(dirty == LIMIT / 8 - PIECE && taken < LIMIT / 2, "{dirty} and {taken} bytes");
        assert!(written_back_beyond > 0);
    });
    assert!(other.read(handle, LIMIT / 8, 100) == pattern(2, LIMIT / 8, 100));
}

#[test]
fn content_makes_room_for_what_else_uses_the_memory() {
    const LIMIT: u64 = 8 << 20;
    const CHARGE: u64 = 5632;
    let stack = Stack::new(patient(LIMIT));
    let (_, handle) = stack.create("f");
    for at in (0..LIMIT / 8 * 7).step_by(64 << 10) {
        stack.write(handle, at, &pattern(3, at, 64 << 10));
    }
    stack.cache.sync().unwrap();
    let before = stack.pool.statistics().used_bytes;
    assert!(before > LIMIT / 4 * 3);
    let charges = LIMIT / 2 / CHARGE;
    (0..charges).for_each(|_| stack.pool.charge(CHARGE));
    // A little is charged before anything leaves.
    assert!(stack.pool.statistics().used_bytes <= LIMIT + (256 << 10), "{:?}", stack.pool.statistics());
    assert!(stack.read(handle, 1 << 20, 100) == pattern(3, 1 << 20, 100));
    (0..charges).for_each(|_| stack.pool.discharge(CHARGE));
    assert!(stack.pool.statistics().used_bytes < before);
}

#[test]
fn content_has_room_however_much_else_is_charged() {
    const LIMIT: u64 = 256 << 10;
    const PIECE: u64 = 4096;
    let stack = Stack::new(patient(LIMIT));
    let (_, handle) = stack.create("f");
    stack.pool.charge(4 * LIMIT);
    // Three quarters may be content; half of all may be dirty.
    for at in (0..LIMIT / 4).step_by(PIECE as usize) {
        stack.write(handle, at, &pattern(4, at, PIECE as usize));
    }
    assert_eq!(stack.cache.dirty_bytes(), LIMIT / 4, "it was written through");
    stack.pool.charge(LIMIT);
    stack.pool.discharge(5 * LIMIT);
    stack.cache.sync().unwrap();
    stack.cache.drop_clean();
    assert_eq!(stack.pool.statistics().used_bytes, stack.cache.usage().bytes());
}

#[test]
fn what_is_on_hold_counts_before_it_has_content() {
    const LIMIT: u64 = 256 << 10;
    let stack = Stack::new(patient(LIMIT));
    let mut refused = None;
    for number in 0..LIMIT / 1024 {
        let (_, handle) = stack.create(&format!("f{number}"));
        let held = stack.cache.hold(&ROOT, handle, 0..1, true);
        let used = stack.pool.statistics().used_bytes;
        assert!(used <= LIMIT, "{used} bytes are used of {LIMIT}");
        if held.is_err() {
            refused = held.err();
            break;
        }
    }
    assert_eq!(refused.expect("there is an end").errno(), Errno::ENOSPC);
}

/// Symbolic links that somebody holds, of each of which all is asked that may be kept beside it.
fn ask_of_links(stack: &Stack, nodes: &[NodeId], target: &[u8]) {
    for &node in nodes {
        assert_eq!(stack.cache.readlink(&ROOT, node).unwrap(), target);
        for number in 0..8 {
            let absent = format!("trusted.{}", number.to_string().repeat(240));
            let answer = stack.cache.getxattr(&ROOT, node, absent.as_bytes());
            assert_eq!(answer.map_err(|error| error.errno()), Err(Errno::ENODATA));
        }
    }
}

fn make_links(stack: &Stack, count: usize, target: &[u8]) -> Vec<NodeId> {
    let link = |number| stack.cache.symlink(&ROOT, NodeId::ROOT, name(&format!("l{number}")), target).unwrap().node;
    (0..count).map(link).collect()
}

#[test]
fn answers_beside_nodes_are_charged_bounded_and_divided() {
    const LIMIT: u64 = 8 << 20;
    let stack = Stack::new(patient(LIMIT));
    let other = stack.beside();
    let used = || stack.pool.statistics().used_bytes;
    let target = vec![b't'; 4000];
    let before = used();
    let nodes = make_links(&stack, 1000, &target);
    ask_of_links(&stack, &nodes, &target);
    let kept = used() - before;
    assert!((LIMIT / 16..=LIMIT / 8).contains(&kept), "{kept} bytes are charged for 6 MB");
    ask_of_links(&stack, &nodes, &target);
    assert_eq!(used() - before, kept, "nothing is kept beyond that");
    let of_other = make_links(&other, 20, &target);
    ask_of_links(&other, &of_other, &target);
    let more = used() - before - kept;
    assert!(more >= 20 * 4000, "another layer has its share: {more} bytes");
    let xattr = stack.cache.setxattr(&ROOT, nodes[0], b"trusted.here", b"x", XattrFlags::empty());
    assert!(xattr.is_ok() && used() < before + kept + more, "what is outdated is given back");
    nodes.iter().for_each(|&node| stack.cache.forget(node, 1));
    of_other.iter().for_each(|&node| other.cache.forget(node, 1));
    stack.cache.drop_clean();
    other.cache.drop_clean();
    assert_eq!(used(), before, "what went with its nodes is given back");
}

#[test]
fn answers_beside_nodes_are_given_up_while_memory_is_short() {
    let stack = Stack::new(patient(8 << 20));
    let used = || stack.pool.statistics().used_bytes;
    let target = vec![b't'; 1000];
    let before = used();
    let nodes = make_links(&stack, 50, &target);
    ask_of_links(&stack, &nodes, &target);
    assert!(used() >= before + 50 * 1000);
    stack.pool.set_short(true);
    let start = Instant::now();
    while used() > before {
        assert!(start.elapsed() < Duration::from_secs(60), "{} bytes are still kept", used() - before);
        std::thread::sleep(Duration::from_millis(1));
    }
    ask_of_links(&stack, &nodes, &target);
    assert_eq!(used(), before, "nor is anything kept anew");
    stack.pool.set_short(false);
    ask_of_links(&stack, &nodes, &target);
    assert!(used() >= before + 50 * 1000);
}
