//! Tests of crash recovery: what the next process finds of a cache's dirty data after the cache's process has died.
//!
//! A crash is simulated by a copy of the state directory at one moment: what a process stores there is visible to others at once.

use crate::fault::Fault;
use crate::support::{ROOT, name, patient, pattern};
use poolfs_cache::{BranchKey, Cache, CacheConfig, CachePool, CrashRecovery, Salvaged, StateDirectory};
use poolfs_libservice::random_operations::Comparison;
use poolfs_libservice::walk::{Visited, walk};
use poolfs_libservice::{Held, Libservice, Memory, Opened, conformance};
use poolfs_types::{AllocateMode, Errno, FileType, HandleId, NodeId, OpenFlags, SetAttributes, Timestamp};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const KEY: BranchKey = *b"the branch's key";
const BRANCH: &[u8] = b"the branch";

pub struct Recorded {
    below: Arc<dyn Libservice>,
    pub cache: Arc<Cache>,
    directory: std::path::PathBuf,
    _pool: Arc<CachePool>,
    /// Removed when nothing is mounted in it any more.
    place: TempDir,
}

impl Recorded {
    fn over(below: Arc<dyn Libservice>, limit_bytes: u64) -> Self {
        Self::with(below, patient(limit_bytes))
    }

    pub fn with(below: Arc<dyn Libservice>, config: CacheConfig) -> Self {
        let place = tempfile::tempdir().expect("a directory");
        let config = CacheConfig { kept_at: Some(place.path().join("kept")), ..config };
        let pool = CachePool::new(config).expect("a pool");
        let made = Cache::recorded(&pool, Arc::clone(&below), KEY, BRANCH);
        let directory = pool.kept_directory().expect("mounted").to_owned();
        Self { place, below, cache: made.expect("a place"), directory, _pool: pool }
    }

    fn new() -> Self {
        Self::over(Memory::new(), 8 << 20)
    }

    fn create(&self, text: &str) -> (NodeId, HandleId) {
        let made = self.cache.create(&ROOT, NodeId::ROOT, name(text), 0o644, OpenFlags::READ_WRITE).unwrap();
        (made.0.node, made.1)
    }

    fn state(&self) -> StateDirectory {
        let root = std::fs::File::open(&self.directory).expect("opened");
        StateDirectory::of(root.into(), &self.directory).expect("a service's")
    }

    fn write(&self, handle: HandleId, offset: u64, data: &[u8]) {
        assert_eq!(self.cache.write(&ROOT, handle, offset, data).unwrap().count, data.len());
    }

    /// What there is when the process dies now. A death is one moment, and copying takes longer: the cache's threads may bring something below
    /// meanwhile, after which it is begun again.
    pub fn die(&self) -> Dead {
        let begun = Instant::now();
        loop {
            let dead = Dead(memory().expect("a tmpfs"));
            if let Ok(true) = copy_of_one_moment(&self.directory, &dead.path()) {
                return dead;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "the cache's threads do not come to rest");
        }
    }
}

/// Copies files; whether they were the same all the time.
fn copy_of_one_moment(from: &Path, to: &Path) -> std::io::Result<bool> {
    let names = |folder: &Path| -> std::io::Result<BTreeSet<OsString>> {
        std::fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.file_name())).collect()
    };
    let copied = names(from)?;
    for name in &copied {
        std::fs::copy(from.join(name), to.join(name))?;
    }
    for name in &copied {
        if std::fs::read(from.join(name))? != std::fs::read(to.join(name))? {
            return Ok(false);
        }
    }
    Ok(names(from)? == copied)
}

/// A tmpfs like that of a service, mounted nowhere.
fn memory() -> rustix::io::Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(context.as_fd(), "mode", "0700")?;
    fsconfig_create(context.as_fd())?;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_NODEV)
}

pub struct Dead(OwnedFd);

impl Dead {
    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }

    fn directory(&self) -> StateDirectory {
        StateDirectory::of(self.0.try_clone().expect("a descriptor"), &self.path()).expect("a service's")
    }

    fn remains(&self) -> CrashRecovery {
        CrashRecovery::open(self.directory()).unwrap().expect("nobody has it")
    }

    pub fn salvage(&self, below: &Arc<dyn Libservice>) -> Salvaged {
        self.remains().bring_below(&KEY, below, &|_| None).unwrap()
    }
}

pub fn content(layer: &Arc<dyn Libservice>, text: &str) -> Vec<u8> {
    let entry = layer.lookup(&ROOT, NodeId::ROOT, name(text)).unwrap();
    let file = Opened::file(layer, &ROOT, entry.node, OpenFlags::READ_ONLY).unwrap();
    let mut bytes = vec![0; entry.attributes.size as usize];
    assert_eq!(file.read_full(0, &mut bytes).unwrap(), bytes.len());
    bytes
}

#[test]
fn what_was_written_is_found_by_the_next_process_with_its_time() {
    let recorded = Recorded::new();
    let (small, small_handle) = recorded.create("small");
    recorded.write(small_handle, 0, b"a few bytes");
    let (_, large_handle) = recorded.create("large");
    let large = pattern(1, 0, 700_000);
    recorded.write(large_handle, 0, &large);
    recorded.cache.fsync(&ROOT, large_handle, poolfs_libservice::Durability::All).unwrap();
    recorded.write(large_handle, 300_000, b"changed");
    recorded.write(large_handle, 900_001, b"beyond a hole");
    assert_eq!(content(&recorded.below, "small"), b"");
    let shown = recorded.cache.getattr(&ROOT, small).unwrap();

    let dead = recorded.die();
    assert_eq!(
        (dead.directory().branches().unwrap(), dead.directory().branch(&KEY).unwrap()),
        (vec![KEY], BRANCH.into())
    );
    assert_eq!(dead.remains().files(&KEY), 2);
    assert_eq!(dead.remains().files(&[0; 16]), 0);
    let salvaged = dead.salvage(&recorded.below);
    assert_eq!((salvaged.files, salvaged.nameless), (2, 0));
    // A block around each change, and the file's end.
    assert!(salvaged.bytes < 3 * 4096 + 20, "{salvaged:?}: what is below already is left alone");
    assert_eq!(content(&recorded.below, "small"), b"a few bytes");
    let mut expected = large;
    expected[300_000..300_007].copy_from_slice(b"changed");
    expected.resize(900_001, 0);
    expected.extend_from_slice(b"beyond a hole");
    assert_eq!(content(&recorded.below, "large"), expected);
    let below = recorded.below.lookup(&ROOT, NodeId::ROOT, name("small")).unwrap();
    assert_eq!(below.attributes.modified, shown.modified);
    // Once more is the same as once.
    dead.salvage(&recorded.below);
    assert_eq!(content(&recorded.below, "large"), expected);
}

#[test]
fn what_is_below_is_not_noted_any_more_and_nothing_is_left_by_an_orderly_end() {
    let recorded = Recorded::new();
    let (_, handle) = recorded.create("f");
    recorded.write(handle, 0, &pattern(2, 0, 100_000));
    recorded.cache.fsync(&ROOT, handle, poolfs_libservice::Durability::Data).unwrap();
    assert!(recorded.state().has(&KEY) && !recorded.state().has(&[0; 16]));
    assert_eq!(recorded.die().remains().files(&KEY), 0);
    recorded.write(handle, 5000, b"x");
    assert_eq!(recorded.die().remains().files(&KEY), 1);
    let lives = CrashRecovery::open(recorded.state()).err().map(|error| error.kind());
    assert_eq!(lives, Some(std::io::ErrorKind::WouldBlock), "its process lives");
    recorded.cache.release(handle);
    let Recorded { place, cache, directory, _pool, .. } = recorded;
    drop((cache, _pool));
    assert!(!directory.exists() && std::fs::read_dir(place.path()).unwrap().next().is_none(), "it is unmounted");
}

#[test]
fn files_that_are_cut_punched_removed_and_linked_are_found_as_they_were_left() {
    let recorded = Recorded::new();
    let (_, cut) = recorded.create("cut");
    recorded.write(cut, 0, &pattern(3, 0, 50_000));
    let size = |size| SetAttributes { size: Some(size), ..SetAttributes::default() };
    let node = recorded.cache.lookup(&ROOT, NodeId::ROOT, name("cut")).unwrap().node;
    recorded.cache.setattr(&ROOT, node, &size(10_000), Some(cut)).unwrap();
    recorded.cache.setattr(&ROOT, node, &size(20_000), Some(cut)).unwrap();
    let (_, punched) = recorded.create("punched");
    recorded.write(punched, 0, &pattern(4, 0, 50_000));
    let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
    recorded.cache.fallocate(&ROOT, punched, punch, 5000, 20_000).unwrap();
    let (_, gone) = recorded.create("gone");
    recorded.write(gone, 0, b"nobody can read this again");
    recorded.cache.unlink(&ROOT, NodeId::ROOT, name("gone")).unwrap();
    let (nameless, linked) = recorded.cache.tmpfile(&ROOT, NodeId::ROOT, 0o600, OpenFlags::READ_WRITE).unwrap();
    recorded.write(linked, 0, b"named late");
    recorded.cache.link(&ROOT, nameless.node, NodeId::ROOT, name("linked")).unwrap();
    recorded.cache.link(&ROOT, nameless.node, NodeId::ROOT, name("again")).unwrap();
    // What was written before is below with the names.
    recorded.write(linked, 10, b", and written later");

    let salvaged = recorded.die().salvage(&recorded.below);
    assert_eq!((salvaged.files, salvaged.nameless), (3, 1));
    let mut expected = pattern(3, 0, 10_000);
    expected.resize(20_000, 0);
    assert_eq!(content(&recorded.below, "cut"), expected);
    let mut expected = pattern(4, 0, 50_000);
    expected[5000..25_000].fill(0);
    assert_eq!(content(&recorded.below, "punched"), expected);
    assert_eq!(content(&recorded.below, "linked"), b"named late, and written later");
    assert_eq!(content(&recorded.below, "again"), b"named late, and written later");
}

#[test]
fn what_is_on_hold_comes_below_when_all_else_is_durable() {
    let fault = Fault::over(Memory::new());
    let recorded = Recorded::over(fault.clone(), 8 << 20);
    let (_, journal) = recorded.create("journal");
    recorded.cache.hold(&ROOT, journal, 0..8192, true).unwrap();
    recorded.write(journal, 0, b"says that the data is there");
    let (_, data) = recorded.create("data");
    recorded.write(data, 0, b"the data");
    recorded.cache.sync().unwrap();
    assert_eq!((content(&recorded.below, "journal"), content(&recorded.below, "data").len()), (vec![], 8));
    recorded.write(data, 0, b"THE DATA");
    let dead = recorded.die();
    fault.fail_fsyncs.store(Errno::EIO.raw(), Ordering::Relaxed);
    assert!(dead.remains().bring_below(&KEY, &recorded.below, &|_| None).is_err());
    assert_eq!(content(&recorded.below, "data"), b"THE DATA");
    assert_eq!(content(&recorded.below, "journal"), b"", "the data is not durable");
    fault.fail_fsyncs.store(0, Ordering::Relaxed);
    assert_eq!(dead.salvage(&recorded.below).files, 2);
    assert_eq!(content(&recorded.below, "journal"), b"says that the data is there");
}

#[test]
fn a_file_that_cannot_be_written_keeps_no_other_from_the_disk_and_is_carried_on() {
    let fault = Fault::over(Memory::new());
    let recorded = Recorded::over(fault.clone(), 8 << 20);
    let bytes = pattern(4, 0, 300_000);
    let (bad_node, bad) = recorded.create("bad");
    recorded.write(bad, 0, &bytes);
    let (_, good) = recorded.create("good");
    recorded.write(good, 0, b"good");
    let (_, journal) = recorded.create("journal");
    recorded.cache.hold(&ROOT, journal, 0..8192, true).unwrap();
    recorded.write(journal, 0, b"says that the data is there");
    let modified = recorded.cache.lookup(&ROOT, NodeId::ROOT, name("bad")).unwrap().attributes.modified;
    let dead = recorded.die();
    fault.fail_writes.store(Errno::EIO.raw(), Ordering::SeqCst);
    let none = dead.remains().bring_below(&KEY, &recorded.below, &|_| None).unwrap();
    assert_eq!((none.files, none.waiting.len()), (0, 3), "all wait, and the call does not fail");
    fault.fail_writes.store(0, Ordering::SeqCst);
    fault.fail_writes_of.store(bad_node.0, Ordering::SeqCst);
    let below = Arc::clone(&recorded.below);
    let remains = dead.remains();
    let salvaged = remains.bring_below(&KEY, &below, &|_| None).unwrap();
    let waiting: BTreeSet<_> = salvaged.waiting.iter().map(|file| (&file.path[..], file.cause.is_some())).collect();
    assert_eq!((salvaged.files, waiting), (1, BTreeSet::from([(&b"bad"[..], true), (b"journal", false)])));
    assert_eq!((content(&below, "good"), content(&below, "journal")), (b"good".to_vec(), vec![]));

    let next = Recorded::over(below.clone(), 8 << 20);
    let layer = next.cache.clone() as Arc<dyn Libservice>;
    for file in &salvaged.waiting {
        let _ = remains.carry_on(file, &next.cache).unwrap();
    }
    remains.forget(&KEY).unwrap();
    assert_eq!((content(&layer, "bad"), content(&layer, "journal").len()), (bytes.clone(), 27));
    assert_eq!(next.cache.lookup(&ROOT, NodeId::ROOT, name("bad")).unwrap().attributes.modified, modified);
    let failed = next.cache.sync().expect_err("it cannot be written");
    assert!(failed == Errno::EIO && failed.is_of_files() && next.cache.is_behind(bad_node));
    assert_eq!(content(&below, "journal"), b"", "it is on hold still");
    assert_eq!(next.die().remains().bring_below(&KEY, &below, &|_| None).unwrap().waiting.len(), 2, "once more");
    fault.fail_writes_of.store(0, Ordering::SeqCst);
    next.cache.sync().unwrap();
    assert!(content(&below, "bad") == bytes && !next.cache.is_behind(bad_node));
}

#[test]
fn a_file_that_was_made_later_is_another_one() {
    let recorded = Recorded::new();
    for text in ["same", "other", "set-back"] {
        let (_, handle) = recorded.create(text);
        recorded.write(handle, 0, b"accepted");
    }
    let written = recorded.cache.lookup(&ROOT, NodeId::ROOT, name("set-back")).unwrap().attributes.changed;
    let dead = recorded.die();
    let other = recorded.below.lookup(&ROOT, NodeId::ROOT, name("other")).unwrap().node;
    let mode = SetAttributes { permissions: Some(0o600), ..SetAttributes::default() };
    // The clock may be coarse.
    let later = loop {
        let changed = recorded.below.setattr(&ROOT, other, &mode, None).unwrap().changed;
        if changed > written {
            break changed;
        }
    };
    // One that was changed before it was made says that the clock was set back.
    let born = |path: &[u8]| Some(if path == b"same" { Timestamp::default() } else { later });
    let salvaged = dead.remains().bring_below(&KEY, &recorded.below, &born).unwrap();
    assert_eq!((salvaged.files, salvaged.nameless), (2, 1));
    let sizes = ["same", "other", "set-back"].map(|name| content(&recorded.below, name).len());
    assert_eq!(sizes, [8, 0, 8]);
}

#[test]
fn what_is_dealt_with_is_given_up_and_with_the_last_branch_all() {
    let recorded = Recorded::new();
    let (_, handle) = recorded.create("f");
    recorded.write(handle, 0, &pattern(5, 0, 100_000));
    let (_, clean) = recorded.create("clean");
    recorded.write(clean, 0, &pattern(5, 0, 100_000));
    recorded.cache.fsync(&ROOT, clean, poolfs_libservice::Durability::Data).unwrap();
    let dead = recorded.die();
    let names = || std::fs::read_dir(dead.path()).unwrap().count();
    let before = names();
    dead.remains().drop_clean().unwrap();
    assert_eq!(names(), before - 1);
    let other = Memory::new() as Arc<dyn Libservice>;
    let salvaged = dead.salvage(&other);
    assert_eq!((salvaged.files, salvaged.bytes, salvaged.nameless), (0, 0, 1), "it has no such file");
    dead.remains().end().unwrap();
    assert_eq!(dead.salvage(&recorded.below).files, 1);
    dead.remains().forget(&KEY).unwrap();
    assert_eq!(dead.remains().files(&KEY), 0);
    assert_eq!(names(), 1, "the ledger");
}

/// The content, size and time of every file of a layer, by path.
fn everything(layer: &Arc<dyn Libservice>) -> BTreeMap<Vec<u8>, (Vec<u8>, Timestamp)> {
    let mut files = BTreeMap::new();
    let mut visit = |path: &[u8], visited: Visited<'_>| {
        let (held, attributes) = visited?;
        if attributes.file_type == FileType::Regular {
            let file = Opened::file(layer, &ROOT, held.node(), OpenFlags::READ_ONLY)?;
            let mut bytes = vec![0; attributes.size as usize];
            assert_eq!(file.read_full(0, &mut bytes)?, bytes.len());
            files.insert(path.to_vec(), (bytes, attributes.modified));
        }
        Ok(true)
    };
    walk(layer, Held::new(layer, NodeId::ROOT), b"", &mut visit).unwrap();
    files
}

#[test]
fn whatever_happens_before_a_death_is_found_after_it() {
    for seed in 0..6 {
        let recorded = Arc::new(Recorded::over(Memory::new(), if seed % 2 == 0 { 64 << 20 } else { 1 << 20 }));
        let (same, found) = (Arc::clone(&recorded), Arc::new(AtomicU64::new(0)));
        let counted = Arc::clone(&found);
        let disturb = move |_: &dyn Libservice| {
            let salvaged = same.die().salvage(&same.below);
            counted.fetch_add(salvaged.bytes, Ordering::Relaxed);
            let cache = Arc::clone(&same.cache) as Arc<dyn Libservice>;
            assert!(everything(&cache) == everything(&same.below), "seed {seed}");
        };
        let cache = Arc::clone(&recorded.cache);
        Comparison::new(seed, 3000).disturbing(31, disturb).run(cache);
        assert!(found.load(Ordering::Relaxed) > 0, "nothing was dirty: the test shows nothing");
    }
}

#[test]
fn conforms_recorded() {
    let made = std::cell::RefCell::new(Vec::new());
    conformance::run(&|| {
        let recorded = Recorded::new();
        let cache = Arc::clone(&recorded.cache);
        made.borrow_mut().push(recorded);
        cache
    });
}

#[test]
fn damaged_ledgers_are_refused_or_say_nothing_wrong() {
    let recorded = Recorded::new();
    let (_, handle) = recorded.create("f");
    recorded.write(handle, 0, &pattern(6, 0, 10_000));
    for seed in 0..300 {
        let mut random = fastrand::Rng::with_seed(seed);
        let dead = recorded.die();
        let path = dead.path().join("ledger");
        let mut bytes = std::fs::read(&path).unwrap();
        let end = if random.bool() { 24 } else { bytes.len() };
        for _ in 0..random.usize(1..4) {
            bytes[random.usize(..end)] = random.u8(..);
        }
        if random.u8(..4) == 0 {
            bytes.truncate(random.usize(..bytes.len()));
        }
        std::fs::write(&path, bytes).unwrap();
        let Ok(remains) = CrashRecovery::open(dead.directory()) else { continue };
        let below = Memory::new() as Arc<dyn Libservice>;
        below.create(&ROOT, NodeId::ROOT, name("g"), 0o644, OpenFlags::READ_WRITE).unwrap();
        let _ = remains.expect("nobody has it").bring_below(&KEY, &below, &|_| None);
    }
}
