//! Tests over a layer that accepts content at once and stores its place later (compact files): what was accepted in between
//! survives the death of the process.
//!
//! A death is a moment from which on nothing more reaches the branch: all calls below fail, and the next process goes on with
//! what is there.

use crate::crash_recovery::{Dead, Recorded, content};
use crate::support::{ROOT, name, patient, pattern};
use poolfs_bcow::{Bcow, BcowConfig, Layout};
use poolfs_cache::CacheConfig;
use poolfs_libservice::{Branch, Durability, Filter, Libservice, Memory, Result, Written, fail, write_whole};
use poolfs_local::{Local, LocalOptions};
use poolfs_types::{
    AllocateMode, Attributes, Caller, Errno, FileSystemStatistics, HandleId, NodeId, OpenFlags, SetAttributes,
    XattrFlags,
};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

const LAYOUTS: [Layout; 2] = [Layout::Performance, Layout::Space];
const BLOCK: u64 = 4096;

/// A branch until the process dies.
struct Mortal {
    below: Branch,
    dead: RwLock<bool>,
    fails_to_sync: AtomicBool,
    /// It says that there is no room in it, and takes what is written nevertheless.
    is_full: AtomicBool,
    /// Whoever syncs waits, and how many do.
    is_slow: Mutex<bool>,
    hurried: Condvar,
    waiting: AtomicU64,
}

impl Mortal {
    fn over(below: Branch) -> Arc<Self> {
        Arc::new(Self {
            below,
            dead: RwLock::default(),
            fails_to_sync: AtomicBool::default(),
            is_full: AtomicBool::default(),
            is_slow: Mutex::default(),
            hurried: Condvar::default(),
            waiting: AtomicU64::default(),
        })
    }

    fn alive(&self) -> Result<RwLockReadGuard<'_, bool>> {
        let dead = self.dead.read().expect("nobody panics");
        if *dead { fail(Errno::EIO) } else { Ok(dead) }
    }

    fn set_slow(&self, is_slow: bool) {
        *self.is_slow.lock().expect("nobody panics") = is_slow;
        self.hurried.notify_all();
    }
}

impl Filter for Mortal {
    fn below(&self) -> &dyn Libservice {
        &*self.below
    }

    fn setattr(
        &self,
        caller: &Caller,
        node: NodeId,
        changes: &SetAttributes,
        handle: Option<HandleId>,
    ) -> Result<Attributes> {
        let _alive = self.alive()?;
        self.below.setattr(caller, node, changes, handle)
    }

    fn write(&self, caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        let _alive = self.alive()?;
        self.below.write(caller, handle, offset, data)
    }

    fn write_pieces(&self, caller: &Caller, handle: HandleId, pieces: &[(u64, &[u8])]) -> Result<()> {
        pieces.iter().try_for_each(|&(offset, data)| write_whole(self, caller, handle, offset, data))
    }

    fn fallocate(&self, caller: &Caller, handle: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        let _alive = self.alive()?;
        self.below.fallocate(caller, handle, mode, offset, length)
    }

    fn setxattr(&self, caller: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        let _alive = self.alive()?;
        self.below.setxattr(caller, node, name, value, flags)
    }

    fn fsync(&self, caller: &Caller, handle: HandleId, durability: Durability) -> Result<()> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let is_slow = self.is_slow.lock().expect("nobody panics");
        drop(self.hurried.wait_while(is_slow, |is_slow| *is_slow).expect("nobody panics"));
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        let _alive = self.alive()?;
        if self.fails_to_sync.load(Ordering::SeqCst) {
            return fail(Errno::EIO);
        }
        self.below.fsync(caller, handle, durability)
    }

    fn statfs(&self, caller: &Caller, node: NodeId) -> Result<FileSystemStatistics> {
        let statistics = self.below.statfs(caller, node)?;
        let none = FileSystemStatistics { blocks_free: 0, blocks_available: 0, ..statistics };
        Ok(if self.is_full.load(Ordering::SeqCst) { none } else { statistics })
    }
}

fn compact(below: Branch, layout: Layout, all_files: bool) -> Arc<Bcow> {
    let config = BcowConfig::new(below);
    Bcow::new(BcowConfig { layout: Some(layout), all_files, flush_interval: Duration::ZERO, ..config })
}

/// A cache over compact files of a branch that can die.
struct Service {
    recorded: Recorded,
    mortal: Arc<Mortal>,
}

impl Service {
    fn new(branch: Branch, layout: Layout, all_files: bool, config: CacheConfig) -> Self {
        let mortal = Mortal::over(branch);
        let recorded = Recorded::with(compact(mortal.clone(), layout, all_files), config);
        Self { recorded, mortal }
    }

    fn cache(&self) -> &dyn Libservice {
        &*self.recorded.cache
    }

    fn create(&self, text: &str, flags: OpenFlags) -> (NodeId, HandleId) {
        let flags = OpenFlags::READ_WRITE | flags;
        let made = self.cache().create(&ROOT, NodeId::ROOT, name(text), 0o644, flags).expect("created");
        (made.0.node, made.1)
    }

    fn resize(&self, node: NodeId, size: u64) {
        let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
        self.cache().setattr(&ROOT, node, &changes, None).expect("resized");
    }

    fn write(&self, handle: HandleId, offset: u64, data: &[u8]) {
        let mut done = 0;
        while done < data.len() {
            done += self.cache().write(&ROOT, handle, offset + done as u64, &data[done..]).expect("written").count;
        }
    }

    /// Has all of a file written back, and nothing more.
    fn write_back(&self, node: NodeId, link: &str) {
        self.cache().link(&ROOT, node, NodeId::ROOT, name(link)).expect("linked");
    }

    fn die(self) -> Dead {
        let mut dead = self.mortal.dead.write().expect("nobody panics");
        *dead = true;
        self.recorded.die()
    }
}

impl Drop for Service {
    /// Whoever waits for it to sync ends before it does.
    fn drop(&mut self) {
        self.mortal.set_slow(false);
    }
}

/// Compact files of the branch with what the last service has left.
fn after(dead: &Dead, branch: Branch, layout: Layout) -> Branch {
    let bcow = compact(branch, layout, false);
    bcow.repair_all().expect("looked at");
    let bcow: Branch = bcow;
    dead.salvage(&bcow);
    bcow
}

fn assert_content(layer: &Branch, text: &str, expected: &[u8], what: &str) {
    let found = content(layer, text);
    assert_eq!(found.len(), expected.len(), "{what}: the size of {text}");
    let first = found.iter().zip(expected).position(|(found, expected)| found != expected);
    assert_eq!(first, None, "{what}: {text} differs from there on");
}

#[test]
fn what_the_layer_below_has_not_stored_yet_is_found_here() {
    for (layout, all_files) in LAYOUTS.into_iter().flat_map(|layout| [(layout, false), (layout, true)]) {
        let what = format!("{layout:?}, all files: {all_files}");
        let memory = Memory::new();
        let service = Service::new(memory.clone(), layout, all_files, patient(64 << 20));
        // Of few units, of many; one that grows at its end; one that is stored, and changed then.
        let (small, small_handle) = service.create("small", OpenFlags::empty());
        let (large, large_handle) = service.create("large", OpenFlags::empty());
        let (grown, grown_handle) = service.create("grown", OpenFlags::APPEND);
        let (kept, kept_handle) = service.create("kept", OpenFlags::empty());
        [(small, 100_000), (large, 10_000_000), (grown, 20_000), (kept, 3_000_000)]
            .into_iter()
            .for_each(|(node, size)| service.resize(node, size));
        let old = pattern(1, 0, 3_000_000);
        service.write(kept_handle, 0, &old);
        service.cache().sync().expect("stored");
        service.mortal.fails_to_sync.store(true, Ordering::SeqCst);

        service.write(small_handle, 5000, b"some bytes");
        let mut smalls = vec![0; 100_000];
        smalls[5000..5010].copy_from_slice(b"some bytes");
        let larges = pattern(2, 0, 10_000_000);
        larges
            .chunks(2 << 20)
            .enumerate()
            .for_each(|(at, piece)| service.write(large_handle, (at << 21) as u64, piece));
        let mut growns = vec![0; 20_000];
        for piece in 0..20 {
            let piece = pattern(piece, 0, 7777);
            service.write(grown_handle, 0, &piece);
            growns.extend_from_slice(&piece);
        }
        service.resize(kept, 1_000_001);
        service.write(kept_handle, 1_500_000, b"behind what was cut");
        service.write(kept_handle, 10_000, b"over what was there");
        let mut kepts = old[..1_000_001].to_vec();
        kepts.resize(1_500_000, 0);
        kepts.extend_from_slice(b"behind what was cut");
        kepts[10_000..10_019].copy_from_slice(b"over what was there");
        for (node, link) in [(small, "s"), (large, "l"), (grown, "g"), (kept, "k")] {
            service.write_back(node, link);
        }

        let dead = service.die();
        let layer = after(&dead, memory, layout);
        for (text, expected) in [("small", &smalls), ("large", &larges), ("grown", &growns), ("kept", &kepts)] {
            assert_content(&layer, text, expected, &what);
        }
    }
}

#[test]
fn what_goes_through_is_stored_before_it_is_answered() {
    for layout in LAYOUTS {
        let memory = Memory::new();
        let service = Service::new(memory.clone(), layout, false, patient(64 << 20));
        let (node, handle) = service.create("f", OpenFlags::empty());
        service.resize(node, 5_000_000);
        service.mortal.is_full.store(true, Ordering::SeqCst);
        let data = pattern(3, 0, 1_500_000);
        service.write(handle, 100_000, &data);
        let mut expected = vec![0; 5_000_000];
        expected[100_000..1_600_000].copy_from_slice(&data);
        let dead = service.die();
        assert_content(&after(&dead, memory.clone(), layout), "f", &expected, &format!("{layout:?}"));

        // Whoever cannot be told that it is stored is told that it is not.
        let service = Service::new(memory, layout, false, patient(64 << 20));
        let (node, handle) = service.create("g", OpenFlags::empty());
        service.resize(node, 5_000_000);
        service.mortal.is_full.store(true, Ordering::SeqCst);
        service.mortal.fails_to_sync.store(true, Ordering::SeqCst);
        let refused = service.cache().write(&ROOT, handle, 0, b"x").map_err(|error| error.errno());
        assert_eq!(refused, Err(Errno::EIO));
    }
}

#[test]
fn what_is_punched_does_not_come_back() {
    for layout in LAYOUTS {
        let memory = Memory::new();
        let service = Service::new(memory.clone(), layout, false, patient(64 << 20));
        let (node, handle) = service.create("f", OpenFlags::empty());
        service.resize(node, 5_000_000);
        let mut expected = pattern(4, 0, 5_000_000);
        service.write(handle, 0, &expected);
        service.cache().fsync(&ROOT, handle, Durability::All).expect("stored");
        for (mode, bytes) in [
            (AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE, 100_000..900_000),
            (AllocateMode::ZERO_RANGE, 2_000_000..2_300_000),
        ] {
            let length = (bytes.end - bytes.start) as u64;
            service.cache().fallocate(&ROOT, handle, mode, bytes.start as u64, length).expect("punched");
            expected[bytes].fill(0);
        }
        let dead = service.die();
        assert_content(&after(&dead, memory, layout), "f", &expected, &format!("{layout:?}"));
    }
}

#[test]
fn what_is_not_stored_yet_is_bounded_and_writers_wait_for_it() {
    const LIMIT: u64 = 4 << 20;
    const BYTES: usize = 20 << 20;
    let memory = Memory::new();
    let service = Service::new(memory.clone(), Layout::Space, false, patient(LIMIT));
    let (node, handle) = service.create("f", OpenFlags::empty());
    service.resize(node, BYTES as u64);
    service.mortal.set_slow(true);
    let data = pattern(5, 0, BYTES);
    let is_written = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            service.write(handle, 0, &data);
            is_written.store(true, Ordering::SeqCst);
        });
        let begun = Instant::now();
        while service.mortal.waiting.load(Ordering::SeqCst) == 0 {
            assert!(!is_written.load(Ordering::SeqCst), "nobody has waited for it");
            assert!(begun.elapsed() < Duration::from_secs(60), "nobody asks for it to be stored");
            std::thread::sleep(Duration::from_millis(1));
        }
        let noted = service.recorded.cache.dirty_bytes();
        assert!(noted > 0 && noted <= LIMIT / 2, "{noted} bytes are noted");
        assert!(service.recorded.cache.usage().bytes() <= LIMIT);
        service.mortal.set_slow(false);
        writer.join().expect("written");
    });
    service.cache().sync().expect("stored");
    assert_eq!(service.recorded.cache.dirty_bytes(), 0);
    let dead = service.die();
    assert_content(&after(&dead, memory, Layout::Space), "f", &data, "all of it");
}

#[test]
fn whatever_happens_over_compact_files_before_a_death_is_found_after_it() {
    for seed in 0..12 {
        let mut random = fastrand::Rng::with_seed(seed);
        let layout = LAYOUTS[seed as usize % 2];
        let place = tempfile::tempdir().expect("a directory");
        let memory = Memory::new();
        let branch = || -> Branch {
            let options = LocalOptions::default();
            if seed < 8 { memory.clone() } else { Local::open(place.path(), options).expect("a directory") }
        };
        let mut models = [vec![], vec![]];
        for death in 0..5 {
            let limit = if random.bool() { 1 << 20 } else { 16 << 20 };
            let config = CacheConfig {
                expire: Duration::from_millis(random.u64(0..20)),
                tick: Duration::from_millis(1),
                ..CacheConfig::with_limit(limit)
            };
            let service = Service::new(branch(), layout, seed % 4 == 0, config);
            let files: [_; 2] = std::array::from_fn(|at| {
                let text = format!("f{at}");
                if death == 0 {
                    let (node, handle) = service.create(&text, OpenFlags::empty());
                    service.resize(node, 1 << 20);
                    models[at].resize(1 << 20, 0);
                    return (node, handle);
                }
                let node = service.cache().lookup(&ROOT, NodeId::ROOT, name(&text)).expect("there").node;
                (node, service.cache().open(&ROOT, node, OpenFlags::READ_WRITE).expect("opened"))
            });
            for step in 0..random.u64(20..120) {
                let at = random.usize(0..2);
                let ((node, handle), model) = (files[at], &mut models[at]);
                let offset = random.usize(0..model.len().max(1));
                match random.u8(0..20) {
                    0 => {
                        let size = random.usize(0..3 << 20);
                        service.resize(node, size as u64);
                        model.resize(size, 0);
                    }
                    1 | 2 if offset < model.len() => {
                        let end = model.len().min(offset + random.usize(1..200_000));
                        let mode = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
                        let mode = if random.bool() { mode } else { AllocateMode::ZERO_RANGE };
                        let length = (end - offset) as u64;
                        service.cache().fallocate(&ROOT, handle, mode, offset as u64, length).expect("punched");
                        model[offset..end].fill(0);
                    }
                    3 => service.cache().fsync(&ROOT, handle, Durability::Data).expect("stored"),
                    4 => service.cache().sync().expect("stored"),
                    5 => service.recorded.cache.drop_clean(),
                    6 => service.mortal.is_full.store(random.bool(), Ordering::SeqCst),
                    7 => std::thread::sleep(Duration::from_millis(random.u64(0..10))),
                    kind => {
                        let offset = if kind < 12 { model.len() } else { offset };
                        let length = if random.bool() { random.usize(1..5000) } else { random.usize(1..200_000) };
                        let data = pattern(seed * 1000 + step, offset as u64, length);
                        service.write(handle, offset as u64, &data);
                        model.resize(model.len().max(offset + length), 0);
                        model[offset..offset + length].copy_from_slice(&data);
                    }
                }
            }
            let dead = service.die();
            let layer = after(&dead, branch(), layout);
            for (at, model) in models.iter().enumerate() {
                assert_content(&layer, &format!("f{at}"), model, &format!("seed {seed}, {layout:?}, death {death}"));
            }
        }
    }
}

#[test]
fn blocks_of_a_file_are_noted_in_whole() {
    // A file that ends within a block, of which more is written when it is below already.
    for layout in LAYOUTS {
        let memory = Memory::new();
        let service = Service::new(memory.clone(), layout, true, patient(64 << 20));
        let (node, handle) = service.create("f", OpenFlags::APPEND);
        let mut expected = Vec::new();
        for round in 0..50 {
            let line = pattern(round, 0, 1 + round as usize * 131 % (3 * BLOCK as usize));
            service.write(handle, 0, &line);
            expected.extend_from_slice(&line);
            service.write_back(node, &format!("link-{round}"));
        }
        let dead = service.die();
        assert_content(&after(&dead, memory, layout), "f", &expected, &format!("{layout:?}"));
    }
}
