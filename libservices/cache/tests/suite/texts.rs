//! Tests of whole-file segments for programs and lent files: complete, as long as the file, and present for as long as they are
//! pinned.

use crate::fault::Fault;
use crate::support::{ROOT, name, pattern};
use poolfs_cache::{Cache, CacheConfig, CachePool};
use poolfs_ipc::memory::Mapping;
use poolfs_ipc::segment::SegmentView;
use poolfs_libservice::{Lease, Libservice, Memory, SharedContent, Text};
use poolfs_types::{Errno, HandleId, NodeId, OpenFlags};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::{Duration, Instant};

const BLOCK: u64 = 4096;

struct Stack {
    pool: Arc<CachePool>,
    below: Arc<Fault>,
    cache: Arc<Cache>,
}

fn program(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = pattern(seed, 0, length);
    bytes[..4].copy_from_slice(b"\x7fELF");
    // Pages of zeros are to be there too.
    let zeros = length.min(BLOCK as usize)..length.min(3 * BLOCK as usize);
    bytes[zeros].fill(0);
    bytes
}

impl Stack {
    /// Over a layer with these files, in which nothing changes any more.
    fn of(limit_bytes: u64, files: &[(&str, &[u8])]) -> Self {
        let memory = Memory::new();
        for (file, content) in files {
            let made = memory.create(&ROOT, NodeId::ROOT, name(file), 0o755, OpenFlags::READ_WRITE).unwrap();
            assert_eq!(memory.write(&ROOT, made.1, 0, content).unwrap().count, content.len());
            memory.release(made.1);
        }
        let pool = CachePool::new(CacheConfig::with_limit(limit_bytes)).unwrap();
        let below = Fault::over(memory);
        below.read_only.store(true, Ordering::SeqCst);
        let cache = Cache::new(&pool, Arc::clone(&below) as Arc<dyn Libservice>);
        Self { pool, below, cache }
    }

    fn open(&self, file: &str) -> (NodeId, HandleId) {
        let entry = self.cache.lookup(&ROOT, NodeId::ROOT, name(file)).unwrap();
        (entry.node, self.cache.open(&ROOT, entry.node, OpenFlags::READ_ONLY).unwrap())
    }

    fn text(&self, handle: HandleId) -> Result<Text, Errno> {
        self.cache.text(handle, None).map_err(|error| error.errno())
    }

    fn close(&self, (node, handle): (NodeId, HandleId)) {
        self.cache.release(handle);
        self.cache.forget(node, 1);
    }
}

fn read(text: Text) -> (Vec<u8>, Arc<dyn std::any::Any + Send + Sync>) {
    let file = File::from(text.file);
    let mut bytes = vec![1; file.metadata().unwrap().size() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    (bytes, text.pin)
}

#[test]
fn a_program_is_as_long_as_its_file_whole_and_read_only() {
    let bytes = program(1, 100_003);
    let stack = Stack::of(64 << 20, &[("p", &bytes), ("small", b"\x7fELFs"), ("script", b"#!/bin/sh"), ("empty", b"")]);
    let (opened, small) = (stack.open("p"), stack.open("small"));
    let text = stack.text(opened.1).unwrap();
    let file = File::from(text.file.try_clone().unwrap());
    assert_eq!((file.metadata().unwrap().size(), text.bytes), (100_003, 25 * BLOCK));
    assert_eq!(file.metadata().unwrap().blocks() * 512, 25 * BLOCK, "no fault has to make a page");
    let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    assert!(File::options().write(true).open(again).is_err(), "it comes by a read-only mount");
    assert_eq!(read(text).0, bytes);
    assert_eq!(read(stack.text(small.1).unwrap()).0, b"\x7fELFs", "also what would be on the heap");
    for other in ["script", "empty"] {
        let other = stack.open(other);
        assert_eq!(stack.text(other.1).err(), Some(Errno::EOPNOTSUPP));
        stack.close(other);
    }
    stack.below.read_only.store(false, Ordering::SeqCst);
    assert_eq!(stack.text(opened.1).err(), Some(Errno::EOPNOTSUPP), "what may change is never given");
}

#[test]
fn what_is_pinned_stays_and_leaves_when_it_is_not() {
    let (bytes, filler) = (program(2, 300_000), pattern(3, 0, 8 << 20));
    let stack = Stack::of(4 << 20, &[("p", &bytes), ("filler", &filler)]);
    let (opened, other) = (stack.open("p"), stack.open("filler"));
    let text = stack.text(opened.1).unwrap();
    let file = File::from(text.file.try_clone().unwrap());
    stack.close(opened);
    let mut buffer = vec![0; filler.len()];
    for _ in 0..3 {
        assert_eq!(stack.cache.read(&ROOT, other.1, 0, &mut buffer).unwrap(), filler.len());
        stack.cache.drop_clean();
    }
    let mut seen = vec![0; bytes.len()];
    file.read_exact_at(&mut seen, 0).unwrap();
    assert!(seen == bytes, "evicted, though the kernel may have it mapped");
    let statistics = stack.pool.statistics();
    assert_eq!(statistics.pinned_bytes, 74 * BLOCK);
    assert!(statistics.used_bytes >= 74 * BLOCK);
    drop(text);
    stack.cache.drop_clean();
    assert_eq!((stack.pool.statistics().pinned_bytes, stack.pool.statistics().used_bytes), (0, 0));
}

#[test]
fn all_who_ask_have_the_same_and_the_layer_below_is_read_once() {
    let bytes = program(4, 200_000);
    let stack = Stack::of(64 << 20, &[("p", &bytes)]);
    let opened = stack.open("p");
    let inodes: Vec<u64> = std::thread::scope(|scope| {
        let ask = || {
            let text = stack.text(opened.1).unwrap();
            (File::from(text.file).metadata().unwrap().ino(), text.pin)
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
        let found: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        found.iter().map(|(inode, _)| *inode).collect()
    });
    assert!(inodes.iter().all(|inode| *inode == inodes[0]));
    assert_eq!(stack.pool.statistics().pinned_bytes, 0);
}

#[test]
fn there_is_a_bound_and_a_file_that_is_too_large() {
    let (large, small) = (program(5, (512 << 10) + 1), program(6, 500 << 10));
    let stack = Stack::of(4 << 20, &[("large", &large), ("a", &small), ("b", &small), ("c", &small)]);
    assert_eq!(stack.text(stack.open("large").1).err(), Some(Errno::EOPNOTSUPP));
    let [a, b, c] = ["a", "b", "c"].map(|file| stack.open(file));
    let first = stack.text(a.1).unwrap();
    let _second = stack.text(b.1).unwrap();
    assert_eq!(stack.text(c.1).err(), Some(Errno::ENOMEM));
    assert!(stack.text(a.1).is_ok(), "what is there costs nothing more");
    drop(first);
    assert_eq!(read(stack.text(c.1).unwrap()).0, small);
}

struct Forever;

impl Lease for Forever {
    fn revoke(&self) {}
}

fn view(stack: &Stack, handle: HandleId) -> SegmentView {
    let lease: Arc<dyn Lease> = Arc::new(Forever);
    let segment = stack.cache.segment(handle, &lease).unwrap();
    SegmentView::new(&segment.map, &segment.data, segment.capacity).unwrap()
}

/// What is read without asking.
fn direct(view: &SegmentView) -> Vec<u8> {
    let mut buffer = vec![0; 60_000];
    // SAFETY: the vector has that many bytes.
    let read = unsafe { view.read(0, buffer.as_mut_ptr(), buffer.len(), || true) };
    buffer.truncate(read.count);
    buffer
}

#[test]
fn clients_read_a_program_by_themselves_and_its_end_stays_where_it_is() {
    let bytes = program(7, 50_001);
    let stack = Stack::of(64 << 20, &[("p", &bytes)]);
    let opened = stack.open("p");
    let view = || view(&stack, opened.1);
    let before = view();
    let text = stack.text(opened.1).unwrap();
    assert_eq!(direct(&before), b"", "it has been moved");
    assert_eq!(direct(&view()), bytes);
    assert_eq!(File::from(text.file.try_clone().unwrap()).metadata().unwrap().size(), 50_001);
    // The layer's end takes nothing from who runs it.
    let Stack { pool, below, cache } = stack;
    cache.release(opened.1);
    drop((cache, below, pool));
    assert_eq!(read(text).0, bytes);
}

#[test]
fn what_is_pinned_stays_when_other_segments_go() {
    let bytes = program(11, 50_001);
    let stack = Stack::of(64 << 20, &[("p", &bytes)]);
    let opened = stack.open("p");
    let text = stack.text(opened.1).unwrap();
    let seen = view(&stack, opened.1);
    stack.pool.retire_segments(&|| Some(0));
    assert_eq!(direct(&seen), bytes);
    assert_eq!(read(text).0, bytes);
    stack.pool.retire_segments(&|| Some(0));
    assert_eq!(direct(&seen), b"", "nobody has it any more");
    assert_eq!(stack.cache.usage().bytes(), 0);
}

#[test]
fn no_program_is_given_while_memory_is_short() {
    let bytes = program(12, 50_001);
    let stack = Stack::of(64 << 20, &[("p", &bytes)]);
    let opened = stack.open("p");
    stack.pool.set_short(true);
    assert_eq!(stack.text(opened.1).err(), Some(Errno::ENOMEM), "the kernel is asked for one that nobody uses");
    assert!(stack.cache.lend(opened.1, None).is_err());
    assert_eq!(stack.pool.statistics().pinned_bytes, 0);
    stack.pool.set_short(false);
    assert_eq!(read(stack.text(opened.1).unwrap()).0, bytes);
}

#[test]
fn a_layer_that_fails_leaves_nothing_behind() {
    let bytes = program(8, 200_000);
    let stack = Stack::of(64 << 20, &[("p", &bytes)]);
    let opened = stack.open("p");
    stack.below.fail_reads.store(Errno::EIO.raw(), Ordering::SeqCst);
    assert_eq!(stack.text(opened.1).err(), Some(Errno::EIO));
    stack.below.fail_reads.store(0, Ordering::SeqCst);
    assert_eq!(stack.pool.statistics().pinned_bytes, 0);
    assert_eq!(read(stack.text(opened.1).unwrap()).0, bytes);
}

fn used_until(stack: &Stack, bytes: u64) -> bool {
    let end = Instant::now() + Duration::from_secs(20);
    while stack.pool.statistics().pinned_bytes != bytes {
        if Instant::now() > end {
            return false;
        }
        sleep(Duration::from_millis(50));
    }
    true
}

#[test]
fn what_is_lent_stays_until_nobody_has_it_open_or_mapped() {
    let (bytes, filler) = (pattern(9, 0, 300_000), pattern(3, 0, 8 << 20));
    let stack = Stack::of(4 << 20, &[("data", &bytes), ("filler", &filler), ("empty", b"")]);
    let (opened, other) = (stack.open("data"), stack.open("filler"));
    let lend = |handle| stack.cache.lend(handle, None).map(File::from).map_err(|error| error.errno());
    let first = lend(opened.1).unwrap();
    let mapping = Mapping::of_segment(&first, 300_000, false).unwrap();
    drop(first);
    stack.close(opened);
    let mut buffer = vec![0; filler.len()];
    let flood = |buffer: &mut [u8]| {
        assert_eq!(stack.cache.read(&ROOT, other.1, 0, buffer).unwrap(), filler.len());
        stack.cache.drop_clean();
    };
    // The threads of the pool look for what is used no more at every tick.
    for _ in 0..5 {
        sleep(CacheConfig::with_limit(4 << 20).tick / 2);
        flood(&mut buffer);
    }
    // SAFETY: as many bytes as are mapped, which nobody writes.
    let seen = unsafe { std::slice::from_raw_parts(mapping.base().as_ptr(), bytes.len()) };
    assert!(seen == bytes, "evicted, though it is mapped");
    assert_eq!(stack.pool.statistics().pinned_bytes, 74 * BLOCK);
    let again = stack.open("data");
    let second = lend(again.1).unwrap();
    drop(mapping);
    sleep(3 * CacheConfig::with_limit(4 << 20).tick);
    let mut seen = vec![0; bytes.len()];
    second.read_exact_at(&mut seen, 0).unwrap();
    assert!(seen == bytes, "evicted, though it is open");
    drop(second);
    assert!(used_until(&stack, 0), "pinned, though nobody has it");
    assert!(lend(again.1).is_ok(), "and once more");
    assert_eq!(lend(stack.open("empty").1).err(), Some(Errno::EOPNOTSUPP));
    stack.below.read_only.store(false, Ordering::SeqCst);
    assert_eq!(lend(again.1).err(), Some(Errno::EOPNOTSUPP), "what may change is never lent");
}

#[test]
fn a_large_file_is_lent_when_it_is_cached_and_the_layers_end_takes_nothing() {
    let bytes = pattern(10, 0, 6 << 20);
    let stack = Stack::of(64 << 20, &[("data", &bytes)]);
    let opened = stack.open("data");
    assert_eq!(stack.cache.lend(opened.1, None).err().map(|error| error.errno()), Some(Errno::EOPNOTSUPP));
    let mut buffer = vec![0; bytes.len()];
    assert_eq!(stack.cache.read(&ROOT, opened.1, 0, &mut buffer).unwrap(), bytes.len());
    let lent = File::from(stack.cache.lend(opened.1, None).unwrap());
    assert!(used_until(&stack, bytes.len() as u64));
    let Stack { pool, below, cache } = stack;
    let watched = Arc::downgrade(&pool);
    cache.release(opened.1);
    drop((cache, below, pool));
    assert!(watched.upgrade().is_none(), "a loan keeps the cache");
    let mut seen = vec![0; bytes.len()];
    lent.read_exact_at(&mut seen, 0).unwrap();
    assert!(seen == bytes);
}
