//! Stress test: all calls from many threads over few files and a tiny cache. No call waits forever, and the final state is
//! consistent.

use crate::fault::Fault;
use crate::support::{ROOT, Stack, name, pattern};
use poolfs_cache::{Cache, CacheConfig};
use poolfs_libservice::{Durability, Libservice, Result};
use poolfs_types::{
    AllocateMode, Errno, FileType, NodeId, OpenFlags, RenameFlags, SeekTo, SetAttributes, SetTime, Timestamp,
    XattrFlags,
};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const LIMIT: u64 = 256 << 10;
const THREADS: u64 = 8;
const NAMES: u64 = 6;
const LENGTH_MAX: u64 = 200_000;
const RUNNING: Duration = Duration::from_secs(10);
/// No call may take longer; a writer's patience ends after five seconds a step.
const CALL_MAX: Duration = Duration::from_secs(60);

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

struct World {
    cache: Arc<Cache>,
    directories: [NodeId; 3],
}

impl World {
    /// What may go wrong when others change the same names at the same time.
    fn settle<T>(result: Result<T>) -> Option<T> {
        use Errno as E;
        const EXPECTED: [Errno; 7] = [E::ENOENT, E::EEXIST, E::ESTALE, E::ENXIO, E::EINVAL, E::ENODATA, E::ENOSPC];
        match result {
            Ok(value) => Some(value),
            Err(error) if EXPECTED.contains(&error.errno()) => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn one(&self, random: &mut Random) {
        let parent = self.directories[random.below(3) as usize];
        let text = format!("f{}", random.below(NAMES));
        match random.below(10) {
            0 => self.change_names(random, parent, &text),
            1 => drop(Self::settle(self.cache.unlink(&ROOT, parent, name(&text)))),
            2 => self.list(parent),
            3 => self.whole(random),
            _ => self.use_file(random, parent, &text),
        }
    }

    fn change_names(&self, random: &mut Random, parent: NodeId, text: &str) {
        let (other, other_name) = (self.directories[random.below(3) as usize], format!("f{}", random.below(NAMES)));
        let flags = [RenameFlags::empty(), RenameFlags::EXCHANGE, RenameFlags::NO_REPLACE][random.below(3) as usize];
        if random.below(2) == 0 {
            Self::settle(self.cache.rename(&ROOT, parent, name(text), other, name(&other_name), flags));
        } else if let Some(entry) = Self::settle(self.cache.lookup(&ROOT, parent, name(text))) {
            if let Some(linked) = Self::settle(self.cache.link(&ROOT, entry.node, other, name(&other_name))) {
                self.cache.forget(linked.node, 1);
            }
            self.cache.forget(entry.node, 1);
        }
    }

    fn list(&self, directory: NodeId) {
        let handle = self.cache.opendir(&ROOT, directory).unwrap();
        let mut count = 0;
        let visit = &mut |_: poolfs_libservice::DirectoryEntry<'_>| {
            count += 1;
            ControlFlow::Continue(())
        };
        self.cache.readdir(&ROOT, handle, 0, visit).unwrap();
        self.cache.fsync(&ROOT, handle, Durability::All).unwrap();
        self.cache.release(handle);
        assert!(count <= NAMES + 5);
    }

    fn whole(&self, random: &mut Random) {
        match random.below(8) {
            0 => self.cache.sync().unwrap(),
            1 => self.cache.drop_clean(),
            _ => drop(self.cache.statfs(&ROOT, NodeId::ROOT).unwrap()),
        }
    }

    fn use_file(&self, random: &mut Random, parent: NodeId, text: &str) {
        let cache = &self.cache;
        let append = if random.below(4) == 0 { OpenFlags::APPEND } else { OpenFlags::empty() };
        let truncate = if random.below(16) == 0 { OpenFlags::TRUNCATE } else { OpenFlags::empty() };
        let flags = OpenFlags::READ_WRITE | append | truncate;
        let (node, handle) = match cache.lookup(&ROOT, parent, name(text)) {
            Ok(entry) => match Self::settle(cache.open(&ROOT, entry.node, flags)) {
                Some(handle) => (entry.node, handle),
                None => return cache.forget(entry.node, 1),
            },
            Err(_) => match Self::settle(cache.create(&ROOT, parent, name(text), 0o644, flags)) {
                Some((entry, handle)) => (entry.node, handle),
                None => return,
            },
        };
        for _ in 0..random.below(12) {
            self.touch(random, node, handle);
        }
        Self::settle(cache.flush(&ROOT, handle));
        cache.release(handle);
        cache.forget(node, 1);
    }

    fn touch(&self, random: &mut Random, node: NodeId, handle: poolfs_types::HandleId) {
        let cache = &self.cache;
        let offset = random.below(LENGTH_MAX);
        let length = if random.below(2) == 0 { random.below(3000) } else { random.below(60_000) } + 1;
        match random.below(16) {
            0..=3 => drop(Self::settle(cache.write(&ROOT, handle, offset, &pattern(7, offset, length as usize)))),
            4..=7 => drop(cache.read(&ROOT, handle, offset, &mut vec![0; length as usize]).unwrap()),
            8 => {
                let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
                let mode = [punch, AllocateMode::ZERO_RANGE, AllocateMode::empty()][random.below(3) as usize];
                Self::settle(cache.fallocate(&ROOT, handle, mode, offset, length));
            }
            9 => {
                let to = if random.below(2) == 0 { SeekTo::Data } else { SeekTo::Hole };
                Self::settle(cache.seek(&ROOT, handle, offset, to));
            }
            10 => cache.fsync(&ROOT, handle, Durability::All).unwrap(),
            11 => cache.flush_range(&ROOT, handle, offset..offset + length).unwrap(),
            12 => {
                let held = offset..offset + length.min(8192);
                Self::settle(cache.hold(&ROOT, handle, held.clone(), true));
                Self::settle(cache.write(&ROOT, handle, offset, &pattern(7, offset, 100)));
                cache.hold(&ROOT, handle, held, false).unwrap();
            }
            13 => {
                let size = (random.below(2) == 0).then(|| random.below(LENGTH_MAX));
                let modified = Some(SetTime::At(Timestamp { seconds: offset as i64, nanoseconds: 0 }));
                let changes = SetAttributes { size, modified, ..SetAttributes::default() };
                cache.setattr(&ROOT, node, &changes, size.map(|_| handle)).unwrap();
            }
            14 => {
                Self::settle(cache.copy_range(&ROOT, handle, offset, handle, offset + LENGTH_MAX / 2, length));
            }
            _ => {
                Self::settle(cache.setxattr(&ROOT, node, b"user.x", b"1", XattrFlags::empty()));
                Self::settle(cache.getxattr(&ROOT, node, b"user.x"));
                Self::settle(cache.removexattr(&ROOT, node, b"user.x"));
                assert_eq!(cache.getattr(&ROOT, node).unwrap().file_type, FileType::Regular);
            }
        }
    }

    /// What the cache shows is what is below, for every name.
    fn check(&self, below: &Fault) {
        for parent in self.directories {
            for n in 0..NAMES {
                let text = format!("f{n}");
                let Some(entry) = Self::settle(self.cache.lookup(&ROOT, parent, name(&text))) else {
                    assert!(below.lookup(&ROOT, parent, name(&text)).is_err());
                    continue;
                };
                let found = below.lookup(&ROOT, parent, name(&text)).unwrap();
                assert_eq!(found.node, entry.node);
                let (ours, theirs) = (entry.attributes, found.attributes);
                assert_eq!(
                    (ours.size, ours.links, ours.modified),
                    (theirs.size, theirs.links, theirs.modified),
                    "{parent:?}/{text}"
                );
                let handle = self.cache.open(&ROOT, entry.node, OpenFlags::READ_ONLY).unwrap();
                let mut content = vec![0; entry.attributes.size as usize];
                assert_eq!(self.cache.read(&ROOT, handle, 0, &mut content).unwrap(), content.len());
                assert!(content == below.now(entry.node).content, "{parent:?}/{text} differs");
                self.cache.release(handle);
                self.cache.forget(entry.node, 1);
                below.forget(entry.node, 1);
            }
        }
    }
}

#[test]
fn nobody_waits_for_ever_and_what_is_left_is_true() {
    let config = CacheConfig {
        expire: Duration::from_millis(2),
        tick: Duration::from_millis(1),
        idle_nodes_max: 2,
        names_max: 8,
        descriptors_max: 2,
        ..CacheConfig::with_limit(LIMIT)
    };
    let Stack { pool, below, cache } = Stack::new(config);
    let made = ["x", "y"].map(|text| cache.mkdir(&ROOT, NodeId::ROOT, name(text), 0o755).unwrap().node);
    let world = Arc::new(World { cache, directories: [NodeId::ROOT, made[0], made[1]] });
    let stop = Arc::new(AtomicBool::new(false));
    let operations = Arc::new(AtomicU64::new(0));
    let began: Arc<Vec<Mutex<(Instant, u64)>>> =
        Arc::new((0..THREADS).map(|_| Mutex::new((Instant::now(), 0))).collect());
    let (told, ended) = channel();
    for thread in 0..THREADS {
        let (world, stop, operations) = (Arc::clone(&world), Arc::clone(&stop), Arc::clone(&operations));
        let (began, told) = (Arc::clone(&began), told.clone());
        std::thread::spawn(move || {
            let mut random = Random(thread * 7919 + 1);
            while !stop.load(Ordering::Relaxed) {
                *began[thread as usize].lock().unwrap() = (Instant::now(), random.0);
                world.one(&mut random);
                operations.fetch_add(1, Ordering::Relaxed);
            }
            drop(world);
            told.send(()).unwrap();
        });
    }
    drop(told);
    let start = Instant::now();
    let mut left = THREADS;
    // Not a scope: a thread that never ends must fail the test, not hold it.
    while left > 0 {
        match ended.recv_timeout(Duration::from_millis(5)) {
            Ok(()) => left -= 1,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => panic!("a thread panicked, see above"),
        }
        if start.elapsed() > RUNNING {
            stop.store(true, Ordering::Relaxed);
        }
        for (thread, began) in began.iter().enumerate() {
            let (since, seed) = *began.lock().unwrap();
            let limit = if start.elapsed() > RUNNING { RUNNING + CALL_MAX } else { CALL_MAX };
            assert!(since.elapsed() < limit, "thread {thread} is stuck in the calls of seed {seed}");
        }
        let used = pool.statistics().used_bytes;
        // What is no content is charged before content makes room for it.
        assert!(used <= LIMIT + LIMIT / 4, "{used} bytes are used of {LIMIT}");
    }
    let operations = operations.load(Ordering::Relaxed);
    assert!(operations > 500, "only {operations} operations");
    world.cache.shutdown().unwrap();
    assert_eq!(world.cache.dirty_bytes(), 0);
    world.check(&below);
    for directory in made {
        world.cache.forget(directory, 1);
    }
    drop(world);
    let start = Instant::now();
    while below.memory.outstanding() != (0, 0) && start.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(below.memory.outstanding(), (0, 0));
    assert_eq!(pool.statistics().used_bytes, 0);
}
