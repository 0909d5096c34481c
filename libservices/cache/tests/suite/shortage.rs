//! Tests of memory shortage: what is no longer given away, what is dropped, and that everything recovers afterwards.

use crate::support::{ROOT, Stack, patient, pattern};
use poolfs_cache::{CacheConfig, CachePool};
use poolfs_libservice::{Durability, Holder, Lease, Libservice, SharedContent};
use poolfs_types::{AllocateMode, Errno, HandleId, NodeId, OpenFlags, SetAttributes};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

const LENGTH: usize = 2 << 20;
const BLOCK: usize = 4096;
const HOUR: Duration = Duration::from_secs(3600);

/// Clients that are given segments, and what was told of them.
#[derive(Default)]
struct Clients {
    is_suspended: AtomicBool,
    taken: AtomicU64,
    /// Of this pool segments are taken away at the last moment before these are given one.
    too_late_in: Option<Weak<CachePool>>,
}

impl Holder for Clients {
    fn stayed(&self, taken: u64, _: u64) {
        self.taken.fetch_add(taken, Ordering::SeqCst);
    }

    fn is_suspended(&self) -> bool {
        self.is_suspended.load(Ordering::SeqCst)
    }
}

struct Given(Arc<Clients>);

impl Lease for Given {
    fn revoke(&self) {}

    fn holder(&self) -> Option<Arc<dyn Holder>> {
        if let Some(pool) = self.0.too_late_in.as_ref().and_then(Weak::upgrade) {
            retire(&pool);
        }
        Some(Arc::clone(&self.0) as Arc<dyn Holder>)
    }
}

fn retire(pool: &CachePool) {
    pool.retire_segments(&|| Some(0));
}

/// Flushers that do nothing by themselves.
fn idle(limit_bytes: u64) -> CacheConfig {
    CacheConfig { tick: HOUR, ..patient(limit_bytes) }
}

/// A file that is not dirty, all of which is cached.
fn clean(stack: &Stack, name: &str) -> (NodeId, HandleId) {
    let (node, handle) = stack.create(name);
    stack.write(handle, 0, &pattern(1, 0, LENGTH));
    stack.cache.fsync(&ROOT, handle, Durability::All).unwrap();
    (node, handle)
}

fn give(stack: &Stack, handle: HandleId, clients: &Arc<Clients>) -> Result<(), Errno> {
    let lease: Arc<dyn Lease> = Arc::new(Given(Arc::clone(clients)));
    stack.cache.segment(handle, &lease).map(drop).map_err(|error| error.errno())
}

/// Whether what is written at a block is kept here for a while.
fn caches_writes(stack: &Stack, handle: HandleId, block: usize) -> bool {
    let before = stack.cache.dirty_bytes();
    stack.write(handle, (block * BLOCK) as u64, &[9; BLOCK]);
    stack.cache.dirty_bytes() > before
}

/// Whether what is read at a block is there when it is read again.
fn caches_reads(stack: &Stack, handle: HandleId, block: usize) -> bool {
    let read = || stack.read(handle, (block * BLOCK) as u64, BLOCK);
    let first = read();
    let before = stack.below.reads.load(Ordering::SeqCst);
    assert_eq!(read(), first);
    stack.below.reads.load(Ordering::SeqCst) == before
}

fn resize(stack: &Stack, node: NodeId, handle: HandleId, size: u64) {
    let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
    stack.cache.setattr(&ROOT, node, &changes, Some(handle)).unwrap();
}

fn allocate(stack: &Stack, handle: HandleId, mode: AllocateMode) {
    stack.cache.fallocate(&ROOT, handle, mode, 0, LENGTH as u64).unwrap();
}

fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn no_segment_is_given_while_memory_is_short() {
    let stack = Stack::new(idle(64 << 20));
    let (_, handle) = clean(&stack, "f");
    stack.pool.set_short(true);
    assert!(stack.pool.is_short());
    assert_eq!(give(&stack, handle, &Arc::default()), Err(Errno::EOPNOTSUPP));
    stack.pool.set_short(false);
    assert_eq!(give(&stack, handle, &Arc::default()), Ok(()));
}

#[test]
fn what_is_dirty_goes_below_at_once_while_memory_is_short() {
    let stack = Stack::new(idle(64 << 20));
    let (node, handle) = stack.create("f");
    stack.write(handle, 0, &pattern(1, 0, LENGTH));
    stack.pool.set_short(true);
    eventually("nobody has it written back", || stack.cache.dirty_bytes() == 0);
    assert!(stack.below.now(node).content == pattern(1, 0, LENGTH));
}

#[test]
fn what_may_not_be_used_any_more_leaves_at_once() {
    let stack = Stack::new(idle(16 << 20));
    for name in ["a", "b", "c", "d"] {
        clean(&stack, name);
    }
    assert!(stack.cache.usage().bytes() > 8 << 20);
    assert_eq!(stack.pool.allow(4 << 20), 4 << 20);
    let used = stack.cache.usage().bytes();
    assert!(used <= 4 << 20 && used > 0, "{used} bytes");
}

#[test]
fn nothing_comes_into_a_segment_that_is_to_go_and_with_what_is_dirty_it_goes() {
    let stack = Stack::new(CacheConfig { tick: Duration::from_millis(5), ..patient(64 << 20) });
    let (node, handle) = clean(&stack, "f");
    assert!(caches_writes(&stack, handle, 0) && caches_reads(&stack, handle, 200));
    assert_eq!(give(&stack, handle, &Arc::default()), Ok(()));
    retire(&stack.pool);
    let left = stack.cache.usage().bytes();
    assert!(left > 0 && left < 64 << 10, "{left} bytes of what was clean but for a block");
    assert_eq!(give(&stack, handle, &Arc::default()), Err(Errno::EOPNOTSUPP));
    assert!(!caches_reads(&stack, handle, 200), "what is read comes into it");
    assert!(!caches_writes(&stack, handle, 300), "what is written comes into it");
    assert_eq!(stack.below.now(node).content[300 * BLOCK..301 * BLOCK], [9; BLOCK], "it went through");
    assert_eq!(stack.cache.usage().bytes(), left);
    stack.cache.fsync(&ROOT, handle, Durability::All).unwrap();
    eventually("what is clean by now stays", || stack.cache.usage().bytes() == 0);
    assert!(caches_reads(&stack, handle, 200) && caches_writes(&stack, handle, 300), "the file has another one");
    assert_eq!(give(&stack, handle, &Arc::default()), Ok(()));
}

/// However the last of it goes: then it is over, and the file is cached as any other.
#[test]
fn a_file_is_cached_again_when_nothing_is_left_of_the_segment_that_is_to_go() {
    type Take = fn(&Stack, NodeId, HandleId);
    let takes: [(&str, Take); 5] = [
        ("cut", |stack, node, handle| resize(stack, node, handle, 0)),
        ("cut to what is not cached", |stack, node, handle| resize(stack, node, handle, 5 * BLOCK as u64)),
        ("cut by who opens it", |stack, node, _| {
            let flags = OpenFlags::READ_WRITE | OpenFlags::TRUNCATE;
            stack.cache.release(stack.cache.open(&ROOT, node, flags).unwrap());
        }),
        ("punched", |stack, _, handle| allocate(stack, handle, AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE)),
        ("zeroed", |stack, _, handle| allocate(stack, handle, AllocateMode::ZERO_RANGE)),
    ];
    for (what, take) in takes {
        let stack = Stack::new(idle(64 << 20));
        let (node, handle) = clean(&stack, "f");
        assert!(caches_writes(&stack, handle, 100));
        assert_eq!(give(&stack, handle, &Arc::default()), Ok(()));
        retire(&stack.pool);
        assert!(!caches_writes(&stack, handle, 300), "{what}: it is over already");
        take(&stack, node, handle);
        assert!(caches_writes(&stack, handle, 2) && caches_reads(&stack, handle, 1), "{what}: nothing of it is cached");
        assert_eq!(give(&stack, handle, &Arc::default()), Ok(()), "{what}");
    }
}

#[test]
fn a_segment_that_no_client_was_given_does_not_go() {
    let stack = Stack::new(idle(64 << 20));
    let (node, first) = stack.create("f");
    resize(&stack, node, first, LENGTH as u64);
    assert_eq!(give(&stack, first, &Arc::default()), Ok(()));
    // With the last who has it open, the one that was given goes.
    stack.cache.release(first);
    let handle = stack.cache.open(&ROOT, node, OpenFlags::READ_WRITE).unwrap();
    stack.write(handle, 0, &pattern(1, 0, LENGTH));
    let before = stack.cache.usage().bytes();
    retire(&stack.pool);
    assert!(caches_writes(&stack, handle, LENGTH / BLOCK), "nothing comes into it");
    stack.cache.fsync(&ROOT, handle, Durability::All).unwrap();
    retire(&stack.pool);
    assert!(stack.cache.usage().bytes() > before, "it went");
}

#[test]
fn only_the_segments_of_those_who_keep_what_is_taken_away_go_if_memory_is_not_short() {
    let stack = Stack::new(idle(64 << 20));
    let (first, second) = (clean(&stack, "a").1, clean(&stack, "b").1);
    let (one, other) = (Arc::<Clients>::default(), Arc::<Clients>::default());
    assert_eq!((give(&stack, first, &one), give(&stack, second, &other)), (Ok(()), Ok(())));
    let before = stack.cache.usage().bytes();
    stack.pool.retire_kept_segments(&|| Some(0));
    assert_eq!(stack.cache.usage().bytes(), before, "nobody keeps anything");
    one.is_suspended.store(true, Ordering::SeqCst);
    stack.pool.retire_kept_segments(&|| Some(0));
    let told = |clients: &Clients| clients.taken.load(Ordering::SeqCst);
    assert_eq!((told(&one), told(&other)), (LENGTH as u64, 0));
    assert!(stack.cache.usage().bytes() >= before / 2 - (64 << 10), "the other's has gone too");
}

#[test]
fn nobody_is_blamed_for_a_segment_that_went_before_he_was_given_it() {
    let stack = Stack::new(idle(64 << 20));
    let (_, handle) = clean(&stack, "f");
    let late = Clients { too_late_in: Some(Arc::downgrade(&stack.pool)), ..Clients::default() };
    let (late, other) = (Arc::new(late), Arc::<Clients>::default());
    assert_eq!(give(&stack, handle, &late), Err(Errno::EOPNOTSUPP));
    assert_eq!(stack.read(handle, 0, LENGTH).len(), LENGTH);
    assert_eq!(give(&stack, handle, &other), Ok(()));
    let told = |clients: &Clients| clients.taken.load(Ordering::SeqCst);
    retire(&stack.pool);
    assert_eq!((told(&late), told(&other)), (0, LENGTH as u64));
}

/// Also of those who are given it when others have been, and when they have been before.
#[test]
fn all_who_are_given_a_segment_are_told_of() {
    let stack = Stack::new(idle(64 << 20));
    let (_, handle) = clean(&stack, "f");
    let all: Vec<_> = (0..3).map(|_| Arc::<Clients>::default()).collect();
    for clients in all.iter().chain(&all) {
        assert_eq!(give(&stack, handle, clients), Ok(()));
    }
    retire(&stack.pool);
    let told: Vec<_> = all.iter().map(|clients| clients.taken.load(Ordering::SeqCst)).collect();
    assert_eq!(told, [LENGTH as u64; 3]);
}
