//! Tests of the memory monitor, with files for the group's counters and a recording fake of the cache.

use super::*;
use crate::leases::tests::table;
use crate::shares::InstanceShares;
use poolfs_ipc::service::SessionMemory;
use poolfs_libservice::Holder;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

const LIMIT: u64 = 200 << 20;
const CACHE: u64 = 64 << 20;
/// What clients of an instance are asked about at least.
const TAKEN: u64 = 8 << 20;
const WAIT_MAX: Duration = Duration::from_secs(60);

/// A group of version 2 that has what it is told to have.
struct Group(tempfile::TempDir);

impl Group {
    fn new(limit: u64) -> Self {
        let group = Self(tempfile::tempdir().expect("a folder"));
        fs::write(group.0.path().join("memory.stat"), "").expect("written");
        fs::write(group.0.path().join("memory.max"), format!("{limit}\n")).expect("written");
        group.says(&format!("{:20}", 0));
        group
    }

    fn open(&self) -> MemoryGroup {
        MemoryGroup::open(self.0.path()).expect("a group")
    }

    fn has(&self, kept: u64) {
        self.says(&format!("{kept:20}"));
    }

    fn leaves(&self, room: u64) {
        self.has(LIMIT - room);
    }

    /// Of one length always: who reads meanwhile finds a whole number.
    fn says(&self, usage: &str) {
        let file = File::options().create(true).truncate(false).write(true).open(self.0.path().join("memory.current"));
        file.expect("a file").write_all_at(usage.as_bytes(), 0).expect("written");
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    Short(bool),
    LookAfter(u64),
    Retire,
    RetireKept,
    Probe(usize),
}

/// A cache that keeps what it has, whatever it is allowed.
#[derive(Default)]
struct Memory {
    told: Mutex<Vec<Told>>,
    is_told: Condvar,
    is_short: AtomicBool,
    panics: AtomicBool,
    look: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl Memory {
    fn note(&self, told: Told) {
        lock(&self.told).push(told);
        self.is_told.notify_all();
    }

    /// Somebody uses more than was to be used until the next look.
    fn uses_more(&self) {
        self.look.get().expect("watched")();
    }

    /// What it has been told since it was asked last.
    fn told(&self) -> Vec<Told> {
        std::mem::take(&mut *lock(&self.told))
    }

    fn told_of(&self, is_meant: impl Fn(&Told) -> bool) -> Vec<Told> {
        self.told().into_iter().filter(is_meant).collect()
    }

    fn wait_until_told(&self, what: Told) {
        let told = self.is_told.wait_timeout_while(lock(&self.told), WAIT_MAX, |told| !told.contains(&what));
        assert!(!told.expect("nobody panics").1.timed_out(), "nobody says {what:?}");
    }
}

impl PoolMemory for Memory {
    fn charge(&self, _bytes: u64) {}

    fn discharge(&self, _bytes: u64) {}

    fn is_short(&self) -> bool {
        self.is_short.load(Ordering::Relaxed)
    }
}

impl WatchedMemory for Memory {
    fn cache_use(&self) -> CacheUse {
        assert!(!self.panics.swap(false, Ordering::Relaxed), "as a test wants it");
        CacheUse { limit: CACHE, allowed: CACHE, used: 0, of_kernel: 0 }
    }

    fn allow(&self, _bytes: u64) -> u64 {
        CACHE
    }

    fn watch(&self, look: Box<dyn Fn() + Send + Sync>) {
        let _ = self.look.set(look);
    }

    fn weigh_by(&self, _kept: Box<dyn Fn() -> Option<u64> + Send + Sync>) {}

    fn look_after(&self, bytes: u64) {
        self.note(Told::LookAfter(bytes));
    }

    fn set_short(&self, is_short: bool) {
        self.is_short.store(is_short, Ordering::Relaxed);
        self.note(Told::Short(is_short));
    }

    fn retire_segments(&self, _kept: &dyn Fn() -> Option<u64>) {
        self.note(Told::Retire);
    }

    fn retire_kept_segments(&self, _kept: &dyn Fn() -> Option<u64>) {
        self.note(Told::RetireKept);
    }

    fn probe_segments(&self, turn: usize, _kept: &dyn Fn() -> Option<u64>) {
        self.note(Told::Probe(turn));
    }
}

fn memory_and_shares() -> (Arc<Memory>, Arc<PoolShares>) {
    let memory = Arc::new(Memory::default());
    let shares = Arc::new(PoolShares::new(CACHE, None, Arc::clone(&memory) as Arc<dyn PoolMemory>));
    (memory, shares)
}

/// A watch without a thread: its turns are taken by the test.
fn watched(group: &Group) -> (Arc<Memory>, Arc<PoolShares>, Arc<MemoryWatch>) {
    let (memory, shares) = memory_and_shares();
    let watch = MemoryWatch::new(group.open(), Arc::clone(&memory) as Arc<dyn WatchedMemory>, &shares);
    (memory, shares, watch)
}

/// How much of each the first of two instances gets: sessions, pages of sessions, open files, nodes, MiB of listings and of names.
fn gets(shares: &PoolShares) -> [u64; 6] {
    let [first, _second]: [Arc<InstanceShares>; 2] = [shares.join(), shares.join()];
    let listings = [shares.listings().join(), shares.listings().join()];
    let (pages, names) = (first.session_memory(), first.names());
    let sessions = std::iter::from_fn(|| first.session()).collect::<Vec<_>>().len();
    let files = std::iter::from_fn(|| first.open_file()).collect::<Vec<_>>().len();
    let count = |take: &dyn Fn() -> bool| (0..u64::MAX).take_while(|_| take()).count() as u64;
    let pages = count(&|| SessionMemory::take(&*pages, 1));
    let nodes = count(&|| first.nodes().add(1));
    let (listed, named) = (count(&|| listings[0].add(1 << 20)), count(&|| names.add(1 << 20)));
    listings[0].subtract(listed << 20);
    names.subtract(named << 20);
    [sessions as u64, pages, files as u64, nodes, listed, named]
}

#[test]
fn a_look_that_panics_is_not_the_last_one() {
    let group = Group::new(LIMIT);
    let (memory, _, watch) = watched(&group);
    assert_eq!(watch.status(), None, "nobody has looked");
    memory.panics.store(true, Ordering::Relaxed);
    assert!(catch_unwind(AssertUnwindSafe(|| memory.uses_more())).is_err());
    group.leaves(level::EXHAUSTED - 1);
    memory.uses_more();
    assert!(memory.is_short(), "nobody looks any more");
    assert_eq!(watch.status().expect("it was looked at").state, "exhausted");
}

#[test]
fn a_panic_does_not_end_the_thread_that_looks() {
    let group = Group::new(LIMIT);
    group.leaves(level::RESERVE - 1);
    let (memory, shares) = memory_and_shares();
    memory.panics.store(true, Ordering::Relaxed);
    let watch = MemoryWatch::start(group.open(), Arc::clone(&memory) as Arc<dyn WatchedMemory>, &shares);
    memory.wait_until_told(Told::Retire);
    assert!(memory.is_short() && !memory.panics.load(Ordering::Relaxed));
    watch.expect("a thread").end();
}

/// Counts what is said to the operator.
struct Warnings(Arc<AtomicUsize>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, _event: &Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

#[test]
fn a_group_that_cannot_be_read_is_told_of_each_time_it_begins() {
    let group = Group::new(LIMIT);
    let (memory, _, _watch) = watched(&group);
    let warnings = Arc::new(AtomicUsize::new(0));
    tracing::subscriber::with_default(Warnings(Arc::clone(&warnings)), || {
        let look = |usage: &str| {
            group.says(usage);
            memory.uses_more();
            warnings.load(Ordering::Relaxed)
        };
        let (good, bad) = (format!("{:20}", 4096), format!("{:20}", "what"));
        assert_eq!([&good, &bad, &bad, &good, &bad].map(|usage| look(usage)), [0, 1, 1, 1, 2]);
    });
    assert_eq!(memory.told_of(|told| matches!(told, Told::LookAfter(_))).len(), 5, "it is tried again");
}

#[test]
fn the_less_there_is_the_more_is_refused() {
    let group = Group::new(LIMIT);
    let (memory, shares, watch) = watched(&group);
    let plenty = gets(&shares);
    let look = |room: u64| {
        group.leaves(room);
        memory.uses_more();
        (
            memory.told_of(|told| matches!(told, Told::Short(_))),
            watch.status().expect("it was looked at").state,
            gets(&shares),
        )
    };
    // One of two has a quarter reserved, and gets half of all beyond that.
    let reserved = |at: usize| plenty[at] / 3;
    assert_eq!(look(level::RESERVE), (vec![], "plenty".into(), plenty));
    let short = [reserved(0), reserved(1), plenty[2], plenty[3], plenty[4], 0];
    assert_eq!(look(level::RESERVE - 1), (vec![Told::Short(true)], "short".into(), short));
    let exhausted = [reserved(0), reserved(1), reserved(2), reserved(3), reserved(4), 0];
    assert_eq!(look(level::EXHAUSTED - 1), (vec![Told::Short(true)], "exhausted".into(), exhausted));
    assert_eq!(look(level::RECOVERED - 1), (vec![Told::Short(true)], "short".into(), short));
    assert_eq!(look(level::RECOVERED), (vec![Told::Short(false)], "reduced".into(), plenty));
    assert_eq!(
        (
            watch.status().expect("it was looked at").shortages_total,
            watch.status().expect("it was looked at").limit_bytes
        ),
        (1, LIMIT)
    );
}

#[test]
fn whoever_uses_more_looks_again_and_one_at_a_time() {
    let group = Group::new(LIMIT);
    let (memory, _, watch) = watched(&group);
    group.leaves(level::RESERVE + (16 << 20));
    memory.uses_more();
    assert_eq!(memory.told(), [Told::LookAfter(4 << 20)], "a quarter of what is left until it is short");
    let looking = lock(&watch.level);
    group.leaves(0);
    memory.uses_more();
    assert_eq!(memory.told(), [Told::LookAfter(SKIPPED_BYTES)]);
    drop(looking);
    memory.uses_more();
    assert_eq!(memory.told(), [Told::LookAfter(level::EXHAUSTED / 4), Told::Short(true)]);
}

#[test]
fn it_is_looked_more_often_while_memory_may_soon_be_short() {
    // The numbers of a small group are smaller: it is not near all the time.
    for (limit, near) in [(LIMIT, level::NEAR), (40 << 20, 24 << 20)] {
        let group = Group::new(limit);
        let (memory, _, watch) = watched(&group);
        let pause_with = |room: u64| {
            group.has(limit - room);
            memory.uses_more();
            lock(&watch.level).pause()
        };
        assert_eq!(lock(&watch.level).pause(), PAUSE_NEAR, "nobody has looked yet");
        assert_eq!([near, near - 1, near].map(pause_with), [PAUSE, PAUSE_NEAR, PAUSE], "{limit}");
        assert_eq!(pause_with(0), PAUSE_NEAR);
    }
}

#[test]
fn segments_are_taken_away_from_all_while_it_is_short() {
    let group = Group::new(LIMIT);
    let (memory, _, watch) = watched(&group);
    let is_of_segments = |told: &Told| matches!(told, Told::Retire | Told::RetireKept | Told::Probe(_));
    let mut past = Past::default();
    let mut turn = |number: usize| {
        watch.turn(number, &mut past);
        memory.told_of(is_of_segments)
    };
    assert_eq!(turn(0), []);
    group.leaves(level::RESERVE - 1);
    assert_eq!([turn(1), turn(2)], [[Told::Retire], [Told::Retire]]);
}

#[test]
fn who_keeps_what_was_taken_away_is_looked_for_and_given_no_more_until_it_lets_go() {
    let group = Group::new(LIMIT);
    let (memory, _, watch) = watched(&group);
    let tables = [table(2).0, table(2).0];
    tables.iter().for_each(|table| watch.add(table));
    let is_of_segments = |told: &Told| matches!(told, Told::Retire | Told::RetireKept | Told::Probe(_));
    let mut past = Past::default();
    let mut turn = |number: usize, kept: u64| {
        group.has(kept);
        watch.turn(number, &mut past);
        let without = watch.status().expect("it was looked at").instances_without_segments;
        (memory.told_of(is_of_segments), tables.each_ref().map(|table| table.is_suspended()), without)
    };
    assert_eq!(turn(0, 10 << 20), (vec![], [false; 2], 0));
    assert_eq!(turn(1, 40 << 20), (vec![Told::Probe(1)], [false; 2], 0), "there is more beside the cache");
    assert_eq!(turn(2, 40 << 20), (vec![], [false; 2], 0));
    tables[0].stayed(TAKEN, TAKEN);
    tables[1].stayed(TAKEN, 0);
    assert_eq!(turn(3, 40 << 20), (vec![Told::RetireKept], [true, false], 1));
    assert_eq!(turn(4, 33 << 20), (vec![Told::RetireKept], [true, false], 1), "it has not let go");
    assert_eq!(turn(5, 32 << 20), (vec![], [false; 2], 0));
    assert_eq!(watch.status().expect("it was looked at").segments_kept_total, 1);
}
