//! Tests of file leases (`F_SETLEASE`): a client with a descriptor of the cache's memory cannot make the cache wait.

use crate::fault::Fault;
use crate::support::{ROOT, name, pattern};
use poolfs_cache::{Cache, CacheConfig, CachePool};
use poolfs_libservice::{Lease, Libservice, Memory, SharedContent};
use poolfs_types::{HandleId, NodeId, OpenFlags};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Larger than what is held on the heap.
const LENGTH: usize = 128 << 10;
/// More than there may be descriptors between uses.
const OTHERS: usize = 64;
/// Far less than the kernel has others wait for a lease (45 s).
const SOON: Duration = Duration::from_secs(20);

struct Forever;

impl Lease for Forever {
    fn revoke(&self) {}
}

/// A file of the cache, open; and how to make its descriptors be needed for others.
struct Stack {
    pool: Arc<CachePool>,
    cache: Arc<Cache>,
    node: NodeId,
    handle: HandleId,
}

impl Stack {
    fn new(is_read_only: bool) -> Self {
        let below = Memory::new();
        for number in 0..=OTHERS {
            let (_, handle) =
                below.create(&ROOT, NodeId::ROOT, name(&number.to_string()), 0o644, OpenFlags::READ_WRITE).unwrap();
            assert_eq!(below.write(&ROOT, handle, 0, &pattern(number as u64, 0, LENGTH)).unwrap().count, LENGTH);
            below.release(handle);
        }
        let below = Fault::over(below);
        below.read_only.store(is_read_only, Ordering::SeqCst);
        let config = CacheConfig { descriptors_max: 2, ..CacheConfig::with_limit(256 << 20) };
        let pool = CachePool::new(config).unwrap();
        let cache = Cache::new(&pool, below);
        let flags = if is_read_only { OpenFlags::READ_ONLY } else { OpenFlags::READ_WRITE };
        let node = cache.lookup(&ROOT, NodeId::ROOT, name("0")).unwrap().node;
        let handle = cache.open(&ROOT, node, flags).unwrap();
        Self { pool, cache, node, handle }
    }

    /// Uses all other files, each of which needs a descriptor.
    fn crowd_out(&self, use_one: impl Fn(HandleId)) {
        for number in 1..=OTHERS {
            let node = self.cache.lookup(&ROOT, NodeId::ROOT, name(&number.to_string())).unwrap().node;
            let handle = self.cache.open(&ROOT, node, OpenFlags::READ_ONLY).unwrap();
            use_one(handle);
            self.cache.release(handle);
            self.cache.forget(node, 1);
        }
    }

    fn read(&self, handle: HandleId) {
        let mut buffer = vec![0; LENGTH];
        assert_eq!(self.cache.read(&ROOT, handle, 0, &mut buffer).unwrap(), LENGTH);
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        self.cache.release(self.handle);
        self.cache.forget(self.node, 1);
    }
}

/// Asks for leases by a descriptor, and by one that is opened anew by it; those that are given stay.
fn leases_of(file: &OwnedFd) -> (Vec<&'static str>, File) {
    let again = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).expect("opened anew");
    let ask = |descriptor: i32, kind: libc::c_int| {
        const F_SETSIG: libc::c_int = 10;
        // SAFETY: commands with a number as argument, on a descriptor that is open. The usual signal would end the process.
        unsafe {
            libc::fcntl(descriptor, F_SETSIG, libc::SIGURG) == 0 && libc::fcntl(descriptor, libc::F_SETLEASE, kind) == 0
        }
    };
    let (given, anew) = (file.as_raw_fd(), again.as_raw_fd());
    let asked = [
        ("to read", given, libc::F_RDLCK),
        ("alone", given, libc::F_WRLCK),
        ("to read, anew", anew, libc::F_RDLCK),
        ("alone, anew", anew, libc::F_WRLCK),
    ];
    let taken = asked.into_iter().filter(|&(_, descriptor, kind)| ask(descriptor, kind));
    (taken.map(|(what, ..)| what).collect(), again)
}

#[test]
fn clients_get_no_lease_of_what_they_read_by_themselves() {
    let mut stack = Stack::new(false);
    let lease: Arc<dyn Lease> = Arc::new(Forever);
    stack.read(stack.handle);
    let segment = stack.cache.segment(stack.handle, &lease).unwrap();
    let bytes = pattern(99, 0, LENGTH);
    for is_viewed in [true, false] {
        stack.crowd_out(|handle| stack.read(handle));
        // The map has ended with the view: nobody opens it again.
        let given = if is_viewed { vec![&segment.data, &segment.map] } else { vec![&segment.data] };
        let taken: Vec<_> = given.into_iter().map(leases_of).collect();
        let begun = Instant::now();
        assert_eq!(stack.cache.write(&ROOT, stack.handle, 0, &bytes).unwrap().count, LENGTH);
        stack.read(stack.handle);
        assert!(begun.elapsed() < SOON, "it waited");
        assert!(taken.iter().all(|(taken, _)| taken.is_empty()), "viewed: {is_viewed}, {taken:?}");
        if is_viewed {
            // Nobody reads it by himself any more, but who was given the descriptor still has it.
            stack.cache.release(stack.handle);
            stack.handle = stack.cache.open(&ROOT, stack.node, OpenFlags::READ_WRITE).unwrap();
        }
    }
}

#[test]
fn processes_get_no_lease_of_what_they_are_lent() {
    let stack = Stack::new(true);
    let lent = stack.cache.lend(stack.handle, None).unwrap();
    stack.crowd_out(|handle| drop(stack.cache.lend(handle, None).unwrap()));
    let (taken, again) = leases_of(&lent);
    let begun = Instant::now();
    drop(stack.cache.lend(stack.handle, None).unwrap());
    assert!(begun.elapsed() < SOON, "it waited");
    assert!(taken.is_empty(), "{taken:?}");
    drop((lent, again));
    let deadline = Instant::now() + SOON;
    while stack.pool.statistics().pinned_bytes > 0 {
        assert!(Instant::now() < deadline, "what nobody has any more is kept");
        std::thread::park_timeout(Duration::from_millis(20));
    }
}
