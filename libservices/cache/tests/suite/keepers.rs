//! Tests of the search for clients that keep pages of programs and lent files after they are taken away: they are found, and
//! nobody else is.

use crate::fault::Fault;
use crate::support::{ROOT, name, pattern};
use poolfs_cache::{Cache, CacheConfig, CachePool};
use poolfs_libservice::{Holder, Lease, Libservice, Memory, SharedContent, Text};
use poolfs_types::{Errno, HandleId, NodeId, OpenFlags};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const LENGTH: u64 = 2 << 20;
/// What the process is counted for besides the cache.
const BASE: u64 = 100 << 20;

/// Processes of an instance, and what was told of them.
#[derive(Default)]
struct Clients {
    is_suspended: AtomicBool,
    taken: AtomicU64,
    stayed: AtomicU64,
}

impl Holder for Clients {
    fn stayed(&self, taken: u64, stayed: u64) {
        self.taken.fetch_add(taken, Ordering::SeqCst);
        self.stayed.fetch_add(stayed, Ordering::SeqCst);
    }

    fn is_suspended(&self) -> bool {
        self.is_suspended.load(Ordering::SeqCst)
    }
}

impl Clients {
    fn told(&self) -> (u64, u64) {
        (self.taken.load(Ordering::SeqCst), self.stayed.load(Ordering::SeqCst))
    }
}

struct Given(Arc<dyn Holder>);

impl Lease for Given {
    fn revoke(&self) {}

    fn holder(&self) -> Option<Arc<dyn Holder>> {
        Some(Arc::clone(&self.0))
    }
}

struct Stack {
    pool: Arc<CachePool>,
    cache: Arc<Cache>,
}

impl Stack {
    /// With programs of these names below, in a layer in which nothing changes; its threads do nothing by themselves.
    fn with(names: &[&str], length: u64) -> Self {
        let memory = Memory::new();
        for file in names {
            let made = memory.create(&ROOT, NodeId::ROOT, name(file), 0o755, OpenFlags::READ_WRITE).unwrap();
            let mut bytes = pattern(1, 0, length as usize);
            bytes[..4].copy_from_slice(b"\x7fELF");
            assert_eq!(memory.write(&ROOT, made.1, 0, &bytes).unwrap().count, bytes.len());
            memory.release(made.1);
        }
        let hour = Duration::from_secs(3600);
        let pool =
            CachePool::new(CacheConfig { tick: hour, expire: hour, ..CacheConfig::with_limit(64 << 20) }).unwrap();
        let below = Fault::over(memory);
        below.read_only.store(true, Ordering::SeqCst);
        let cache = Cache::new(&pool, below as Arc<dyn Libservice>);
        Self { pool, cache }
    }

    fn open(&self, file: &str) -> HandleId {
        let entry = self.cache.lookup(&ROOT, NodeId::ROOT, name(file)).unwrap();
        self.cache.open(&ROOT, entry.node, OpenFlags::READ_ONLY).unwrap()
    }

    fn text(&self, handle: HandleId, clients: &Arc<Clients>) -> Result<Text, Errno> {
        self.cache.text(handle, Some(&holder(clients))).map_err(|error| error.errno())
    }

    /// Given, and let go.
    fn give(&self, file: &str, clients: &Arc<Clients>) {
        drop(self.text(self.open(file), clients).unwrap());
    }

    fn used(&self) -> u64 {
        self.pool.statistics().used_bytes
    }

    /// The process is counted for what the cache uses, or for as much as it used at most.
    fn probe(&self, stays: bool) {
        let most = self.used();
        self.pool.probe_segments(0, &|| Some(BASE + if stays { most } else { self.used() }));
    }

    /// The same of what is let go later.
    fn weigh(&self, stays: bool) {
        let (cache, most) = (Arc::clone(&self.cache), LENGTH + (1 << 20));
        self.pool.weigh_by(Box::new(move || Some(BASE + if stays { most } else { cache.usage().bytes() })));
    }
}

fn holder(clients: &Arc<Clients>) -> Arc<dyn Holder> {
    Arc::clone(clients) as Arc<dyn Holder>
}

#[test]
fn who_keeps_pages_of_a_program_is_told_from_who_does_not() {
    for (stays, stayed) in [(true, LENGTH), (false, 0)] {
        let (stack, clients) = (Stack::with(&["p"], LENGTH), Arc::<Clients>::default());
        stack.give("p", &clients);
        stack.probe(stays);
        assert_eq!((clients.told(), stack.used()), ((LENGTH, stayed), 0));
    }
}

#[test]
fn who_keeps_pages_of_what_was_lent_is_told_from_who_does_not() {
    for (stays, stayed) in [(true, LENGTH), (false, 0)] {
        let config = CacheConfig { tick: Duration::from_millis(5), ..CacheConfig::with_limit(64 << 20) };
        let stack = Stack { pool: CachePool::new(config).unwrap(), ..Stack::with(&["p"], LENGTH) };
        let below = Memory::new();
        let made = below.create(&ROOT, NodeId::ROOT, name("data"), 0o644, OpenFlags::READ_WRITE).unwrap();
        below.write(&ROOT, made.1, 0, &pattern(2, 0, LENGTH as usize)).unwrap();
        let below = Fault::over(below);
        below.read_only.store(true, Ordering::SeqCst);
        let stack = Stack { cache: Cache::new(&stack.pool, below as Arc<dyn Libservice>), ..stack };
        let clients = Arc::<Clients>::default();
        drop(stack.cache.lend(stack.open("data"), Some(&holder(&clients))).unwrap());
        while stack.pool.statistics().pinned_bytes > 0 {
            std::thread::yield_now();
        }
        stack.probe(stays);
        assert_eq!(clients.told(), (LENGTH, stayed));
    }
}

#[test]
fn of_two_who_were_given_programs_only_the_one_who_keeps_them_is_taken_for_it() {
    let stack = Stack::with(&["a", "b"], LENGTH);
    let both = [(); 2].map(|()| Arc::<Clients>::default());
    stack.give("a", &both[0]);
    stack.give("b", &both[1]);
    // What is taken away first stays, and the other comes back.
    let most = stack.used();
    let of_one = most / 2;
    stack.pool.probe_segments(0, &|| Some(BASE + most.min(stack.used() + of_one)));
    let mut told = both.each_ref().map(|clients| clients.told());
    told.sort_unstable();
    assert_eq!(told[0], (LENGTH, 0));
    assert!(told[1].0 == LENGTH && told[1].1 > LENGTH / 10 * 9, "{told:?}");
}

#[test]
fn a_program_is_taken_away_only_when_the_kernel_has_let_it_go() {
    let (stack, clients) = (Stack::with(&["p"], LENGTH), Arc::<Clients>::default());
    let text = stack.text(stack.open("p"), &clients).unwrap();
    stack.probe(true);
    stack.pool.retire_segments(&|| Some(BASE));
    assert_eq!((clients.told(), stack.pool.statistics().pinned_bytes), ((0, 0), LENGTH));
    drop(text);
    stack.pool.retire_segments(&|| Some(BASE));
    assert_eq!((clients.told(), stack.used()), ((LENGTH, LENGTH), 0));
}

/// Its memory may be taken for others before anybody looks again.
#[test]
fn what_the_kernel_lets_go_after_a_look_is_taken_away_at_once() {
    for (stays, stayed) in [(true, LENGTH), (false, 0)] {
        let (stack, clients) = (Stack::with(&["p", "q"], LENGTH), Arc::<Clients>::default());
        stack.weigh(stays);
        stack.give("p", &Arc::default());
        assert!(stack.used() >= LENGTH, "nobody has looked yet");
        let text = stack.text(stack.open("q"), &clients).unwrap();
        stack.probe(true);
        assert_eq!(clients.told(), (0, 0));
        drop(text);
        assert_eq!((clients.told(), stack.used()), ((LENGTH, stayed), 0));
    }
}

/// Else programs of those who keep nothing would have to be read again each time, for good.
#[test]
fn not_all_that_the_kernel_lets_go_after_a_look_is_taken_away() {
    let (stack, clients) = (Stack::with(&["p"], LENGTH), Arc::<Clients>::default());
    stack.weigh(false);
    stack.probe(false);
    let times = (1..=100).find(|_| {
        stack.give("p", &clients);
        stack.used() > 0
    });
    assert_eq!(times, Some(33), "64 MiB are");
}

#[test]
fn who_keeps_what_was_taken_away_is_given_no_program_and_lent_nothing_until_it_is_resumed() {
    let (stack, clients) = (Stack::with(&["p", "q"], LENGTH), Arc::<Clients>::default());
    let other = Arc::<Clients>::default();
    let (p, q) = (stack.open("p"), stack.open("q"));
    stack.give("p", &clients);
    clients.is_suspended.store(true, Ordering::SeqCst);
    let refused =
        |handle| (stack.text(handle, &clients).err(), stack.cache.lend(handle, Some(&holder(&clients))).is_err());
    for handle in [p, q] {
        assert_eq!(refused(handle), (Some(Errno::EOPNOTSUPP), true));
    }
    stack.give("q", &other);
    stack.pool.retire_kept_segments(&|| Some(BASE));
    assert_eq!((clients.told(), other.told()), ((LENGTH, LENGTH), (0, 0)), "what it has goes, and nothing else");
    clients.is_suspended.store(false, Ordering::SeqCst);
    assert!(stack.text(p, &clients).is_ok() && stack.cache.lend(q, Some(&holder(&clients))).is_ok());
}

/// Of a small file there is less to be kept, and what is noted of it is not to take more than that.
#[test]
fn as_many_are_remembered_who_were_given_a_program_as_it_has_blocks() {
    let stack = Stack::with(&["p"], 2 * 4096);
    let all = [(); 3].map(|()| Arc::<Clients>::default());
    let handle = stack.open("p");
    drop(all.each_ref().map(|clients| stack.text(handle, clients).unwrap()));
    stack.probe(true);
    assert_eq!(all.each_ref().map(|clients| clients.told().0), [0, 2 * 4096, 2 * 4096]);
}

#[test]
fn who_keeps_pages_of_a_segment_that_a_program_comes_in_place_of_is_known() {
    let (stack, clients) = (Stack::with(&["p"], LENGTH), Arc::<Clients>::default());
    let handle = stack.open("p");
    assert_eq!(stack.cache.read(&ROOT, handle, 0, &mut vec![0; LENGTH as usize]).unwrap(), LENGTH as usize);
    let lease: Arc<dyn Lease> = Arc::new(Given(holder(&clients)));
    drop(stack.cache.segment(handle, &lease).unwrap());
    stack.weigh(true);
    let _text = stack.cache.text(handle, None).map_err(|error| error.errno()).unwrap();
    assert_eq!(clients.told(), (LENGTH, LENGTH));
}
