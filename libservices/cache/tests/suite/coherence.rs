//! Tests of caches over a layer that others change: each mode of coherence keeps its promises, as the table of the interface has them.

use crate::support::{ROOT, name};
use poolfs_cache::{Cache, CacheConfig, CachePool};
use poolfs_ipc::segment::SegmentView;
use poolfs_libservice::{Coherence, Libservice, Memory, Result};
use poolfs_types::{AllocateMode, Errno, HandleId, NodeId, OpenFlags, RenameFlags, SeekTo, SetAttributes, XattrFlags};
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const TABLE: &str = include_str!("../../../api/src/coherence.md");

/// A promise of the timed mode that a test can wait for.
const SHORT: Duration = Duration::from_millis(20);
/// And one that no test lives to see.
const LONG: Duration = Duration::from_secs(100_000);

const BYTES: usize = 3 * 4096 + 100;
/// More than any file here has.
const READ_BYTES: usize = 64 << 10;

/// Several layers over one filesystem, with a cache for each.
struct Scene {
    pool: Arc<CachePool>,
    memory: Arc<Memory>,
}

/// What a layer has of the files of a scene.
struct Eyes {
    layer: Arc<dyn Libservice>,
    file: NodeId,
    open: HandleId,
}

impl Scene {
    /// With a file of some blocks and another one, both in the root, an extended attribute and a directory.
    fn new() -> Self {
        let scene = Self { pool: CachePool::new(CacheConfig::with_limit(64 << 20)).unwrap(), memory: Memory::new() };
        let memory = &*scene.memory;
        for (text, byte) in [("file", 1), ("other", 2)] {
            let (entry, handle) = memory.create(&ROOT, NodeId::ROOT, name(text), 0o644, OpenFlags::READ_WRITE).unwrap();
            memory.write(&ROOT, handle, 0, &[byte; BYTES]).unwrap();
            memory.setxattr(&ROOT, entry.node, b"user.set", b"old", XattrFlags::empty()).unwrap();
            memory.release(handle);
            memory.forget(entry.node, 1);
        }
        let made = memory.mkdir(&ROOT, NodeId::ROOT, name("directory"), 0o755).unwrap();
        memory.forget(made.node, 1);
        scene
    }

    fn cache(&self, coherence: Coherence) -> Eyes {
        Eyes::of(Cache::new(&self.pool, self.memory.view(coherence)))
    }

    /// Who goes by nothing that was kept.
    fn truth(&self) -> Eyes {
        Eyes::of(self.memory.view(Coherence::Validated))
    }
}

fn pattern(count: usize, byte: u8) -> Vec<u8> {
    vec![byte; count]
}

impl Eyes {
    fn of(layer: Arc<dyn Libservice>) -> Self {
        let file = layer.lookup(&ROOT, NodeId::ROOT, name("file")).unwrap().node;
        let open = layer.open(&ROOT, file, OpenFlags::READ_WRITE).unwrap();
        Self { layer, file, open }
    }

    fn read(&self, handle: HandleId) -> Result<Vec<u8>> {
        let mut buffer = vec![0xee; READ_BYTES];
        let count = self.layer.read(&ROOT, handle, 0, &mut buffer)?;
        buffer.truncate(count);
        Ok(buffer)
    }

    fn found<R>(&self, text: &str, ask: impl FnOnce(NodeId) -> Result<R>) -> Result<R> {
        let entry = self.layer.lookup(&ROOT, NodeId::ROOT, name(text))?;
        let answer = ask(entry.node);
        self.layer.forget(entry.node, 1);
        answer
    }

    /// The answer to a question of the table, in words that differ when it does.
    fn ask(&self, question: &str) -> String {
        let layer = &*self.layer;
        let inode =
            |text| format!("{:?}", self.found(text, |node| layer.getattr(&ROOT, node).map(|found| found.inode)));
        let attributes = || layer.getattr(&ROOT, self.file);
        match question {
            "content" => format!("{:?}", self.read(self.open)),
            "content by name" => {
                let content = self.found("file", |node| {
                    let handle = layer.open(&ROOT, node, OpenFlags::READ_ONLY)?;
                    let content = self.read(handle);
                    layer.release(handle);
                    content
                });
                format!("{content:?}")
            }
            "times" | "times of an open file" => {
                format!("{:?}", attributes().map(|found| (found.modified, found.changed)))
            }
            "size" => format!("{:?}", attributes().map(|found| found.size)),
            "mode" => format!("{:?}", attributes().map(|found| found.permissions)),
            "links" => format!("{:?}", attributes().map(|found| found.links)),
            "data and holes" => {
                let seek = |to| layer.seek(&ROOT, self.open, 0, to).map_err(|error| error.errno());
                format!("{:?} {:?}", seek(SeekTo::Data), seek(SeekTo::Hole))
            }
            "extended attribute" => format!("{:?}", layer.getxattr(&ROOT, self.file, b"user.set")),
            "list of extended attributes" => format!("{:?}", layer.listxattr(&ROOT, self.file)),
            "name" => inode("other"),
            "name of a directory" => inode("directory"),
            "absent name" => inode("new"),
            "listing" => {
                let handle = layer.opendir(&ROOT, NodeId::ROOT).unwrap();
                let mut names = BTreeSet::new();
                let visit = &mut |entry: poolfs_libservice::DirectoryEntry<'_>| {
                    names.insert(entry.name.as_bytes().to_vec());
                    ControlFlow::Continue(())
                };
                layer.readdir(&ROOT, handle, 0, visit).unwrap();
                layer.release(handle);
                format!("{names:?}")
            }
            "times of the directory" => format!("{:?}", layer.getattr(&ROOT, NodeId::ROOT).map(|found| found.changed)),
            "links of the directory" => format!("{:?}", layer.getattr(&ROOT, NodeId::ROOT).map(|found| found.links)),
            other => panic!("nobody knows how to ask for {other:?}"),
        }
    }

    /// Makes a change of the table.
    fn make(&self, change: &str) {
        let (layer, root) = (&*self.layer, NodeId::ROOT);
        let made = |result: Result<poolfs_libservice::Entry>| layer.forget(result.unwrap().node, 1);
        match change {
            "write" => drop(layer.write(&ROOT, self.open, 4000, &pattern(5000, 7)).unwrap()),
            "append" => {
                let handle = layer.open(&ROOT, self.file, OpenFlags::WRITE_ONLY | OpenFlags::APPEND).unwrap();
                assert_eq!(layer.write(&ROOT, handle, 0, &pattern(300, 8)).unwrap().offset, BYTES as u64);
                layer.release(handle);
            }
            "truncate" => {
                let changes = SetAttributes { size: Some(5000), ..SetAttributes::default() };
                layer.setattr(&ROOT, self.file, &changes, None).unwrap();
            }
            "punch" => {
                let mode = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
                layer.fallocate(&ROOT, self.open, mode, 0, 8192).unwrap();
            }
            "change of the mode" => {
                let changes = SetAttributes { permissions: Some(0o600), ..SetAttributes::default() };
                layer.setattr(&ROOT, self.file, &changes, None).unwrap();
            }
            "set an extended attribute" => {
                layer.setxattr(&ROOT, self.file, b"user.set", b"new", XattrFlags::empty()).unwrap();
                layer.setxattr(&ROOT, self.file, b"user.more", b"new", XattrFlags::empty()).unwrap();
            }
            "remove an extended attribute" => layer.removexattr(&ROOT, self.file, b"user.set").unwrap(),
            "create" => {
                let (entry, handle) = layer.create(&ROOT, root, name("new"), 0o644, OpenFlags::READ_WRITE).unwrap();
                layer.release(handle);
                layer.forget(entry.node, 1);
            }
            "unlink" => layer.unlink(&ROOT, root, name("other")).unwrap(),
            "link" => made(layer.link(&ROOT, self.file, root, name("new"))),
            "rename over" => {
                layer.rename(&ROOT, root, name("other"), root, name("file"), RenameFlags::empty()).unwrap();
            }
            "exchange" => layer.rename(&ROOT, root, name("other"), root, name("file"), RenameFlags::EXCHANGE).unwrap(),
            "make a directory" => made(layer.mkdir(&ROOT, root, name("new"), 0o755)),
            "remove a directory" => layer.rmdir(&ROOT, root, name("directory")).unwrap(),
            "make a symbolic link" => made(layer.symlink(&ROOT, root, name("new"), b"file")),
            other => panic!("nobody knows how to {other:?}"),
        }
    }
}

/// The lines of the table.
fn promises() -> Vec<[&'static str; 5]> {
    let lines = TABLE.lines().filter(|line| line.starts_with('|')).skip(2);
    let cells = |line: &'static str| line.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>();
    lines.map(|line| cells(line).try_into().expect("five columns")).collect()
}

#[test]
fn each_mode_keeps_exactly_what_it_promises() {
    let promises = promises();
    assert!(promises.len() >= 25, "the table has {} lines", promises.len());
    for [change, question, leased, validated, timed] in promises {
        for maker in [Coherence::Leased, Coherence::Validated, Coherence::Timed(LONG)] {
            for (coherence, promise) in [
                (Coherence::Leased, leased),
                (Coherence::Validated, validated),
                (Coherence::Timed(SHORT), timed),
                (Coherence::Timed(LONG), timed),
            ] {
                let told = format!("{change}, by {maker:?}: {question}, {coherence:?}");
                let scene = Scene::new();
                let (observer, truth) = (scene.cache(coherence), scene.truth());
                let maker = scene.cache(maker);
                let before = observer.ask(question);
                assert_eq!(before, truth.ask(question), "{told}: before");
                maker.make(change);
                let after = truth.ask(question);
                assert_ne!(before, after, "{told}: it changes nothing");
                match (promise, coherence) {
                    ("at once", _) => {}
                    ("in time", Coherence::Timed(LONG)) => {
                        assert_eq!(observer.ask(question), before, "{told}: nobody was to be asked");
                        continue;
                    }
                    ("in time", Coherence::Timed(time)) => std::thread::sleep(time),
                    _ => panic!("{told}: {promise:?} is no promise of that mode"),
                }
                assert_eq!(observer.ask(question), after, "{told}");
                // Whoever has made it sees it, too.
                let own = maker.ask(question);
                assert_eq!(own, after, "{told}: by itself");
            }
        }
    }
}

/// What is kept of a file that nobody changes is not read below again.
#[test]
fn what_is_as_it_was_is_kept() {
    for coherence in [Coherence::Leased, Coherence::Validated, Coherence::Timed(SHORT)] {
        let scene = Scene::new();
        let observer = scene.cache(coherence);
        let content = observer.ask("content");
        let misses = scene.pool.statistics().misses;
        for _ in 0..3 {
            std::thread::sleep(SHORT);
            assert_eq!(observer.ask("content"), content);
        }
        assert_eq!(scene.pool.statistics().misses, misses, "{coherence:?}");
    }
}

#[test]
fn no_change_waits_here_where_others_look_for_it() {
    for coherence in [Coherence::Leased, Coherence::Validated, Coherence::Timed(LONG)] {
        let scene = Scene::new();
        let (own, truth) = (scene.cache(coherence), scene.truth());
        own.make("write");
        own.make("append");
        assert_eq!(truth.ask("content"), own.ask("content"), "{coherence:?}");
        assert_eq!(scene.pool.statistics().dirty_bytes, 0, "{coherence:?}");
    }
}

#[test]
fn a_segment_ends_with_the_change_of_others_and_is_not_given_where_nobody_tells_of_them() {
    for (coherence, is_given) in
        [(Coherence::Leased, true), (Coherence::Validated, false), (Coherence::Timed(LONG), false)]
    {
        let scene = Scene::new();
        let observer = scene.cache(coherence);
        assert_eq!(observer.layer.shared_content().is_some(), is_given, "{coherence:?}");
        if let Some(shared) = observer.layer.shared_content() {
            observer.ask("content");
            let segment = shared.segment(observer.open, &crate::segments::lease()).unwrap();
            let view = SegmentView::new(&segment.map, &segment.data, segment.capacity).unwrap();
            let read = || crate::segments::read(&view, 0, READ_BYTES);
            assert_eq!(read(), (pattern(BYTES, 1), true));
            scene.cache(Coherence::Leased).make("change of the mode");
            assert_eq!(read(), (pattern(BYTES, 1), true));
            scene.cache(Coherence::Leased).make("write");
            assert_eq!(read(), (vec![], false));
            assert_eq!(shared.text(observer.open, None).map(drop).unwrap_err().errno(), Errno::EOPNOTSUPP);
        }
    }
}

/// Two caches make changes in turn, at random, and after each of them both say what is there.
#[test]
fn changes_in_turn_at_random_are_seen_at_once() {
    const QUESTIONS: [&str; 13] = [
        "content",
        "content by name",
        "times",
        "size",
        "mode",
        "links",
        "data and holes",
        "extended attribute",
        "name",
        "absent name",
        "listing",
        "times of the directory",
        "links of the directory",
    ];
    const CHANGES: [&str; 9] = [
        "write",
        "truncate",
        "punch",
        "change of the mode",
        "set an extended attribute",
        "create",
        "unlink",
        "link",
        "rename over",
    ];
    for (seed, modes) in [
        [Coherence::Leased, Coherence::Leased],
        [Coherence::Validated, Coherence::Validated],
        [Coherence::Leased, Coherence::Validated],
    ]
    .into_iter()
    .cycle()
    .take(12)
    .enumerate()
    {
        let mut random = seed as u64 * 2 + 1;
        let mut next = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % below
        };
        let scene = Scene::new();
        // One that keeps to the promise of the other hears of changes by both.
        let (caches, truth) = (modes.map(|mode| scene.cache(mode)), scene.truth());
        for step in 0..400 {
            let (who, change) = (&caches[next(2)], CHANGES[next(CHANGES.len())]);
            let is_there = |text| truth.found(text, |_| Ok(())).is_ok();
            match change {
                "create" | "link" if is_there("new") => who.layer.unlink(&ROOT, NodeId::ROOT, name("new")).unwrap(),
                "link" if truth.layer.getattr(&ROOT, truth.file).unwrap().links == 0 => continue,
                "unlink" | "rename over" if !is_there("other") => {
                    let (flags, root) = (OpenFlags::READ_WRITE, NodeId::ROOT);
                    let (entry, handle) = who.layer.create(&ROOT, root, name("other"), 0o644, flags).unwrap();
                    who.layer.write(&ROOT, handle, 0, &pattern(next(20_000), step as u8)).unwrap();
                    who.layer.release(handle);
                    who.layer.forget(entry.node, 1);
                }
                "write" => {
                    let (at, count) = (next(20_000) as u64, 1 + next(9000));
                    who.layer.write(&ROOT, who.open, at, &pattern(count, step as u8)).unwrap();
                }
                change => who.make(change),
            }
            for question in QUESTIONS {
                let answer = truth.ask(question);
                for (cache, mode) in caches.iter().zip(modes) {
                    assert_eq!(cache.ask(question), answer, "seed {seed}, step {step}: {change}, {question}, {mode:?}");
                }
            }
        }
    }
}

/// While one writes, others read: nobody sees anything older than what was written when his call began.
#[test]
fn nothing_old_is_seen_beside_a_writer() {
    const ROUNDS: u64 = 1500;
    for coherence in [Coherence::Leased, Coherence::Validated] {
        let scene = Scene::new();
        let (writer, readers) = (scene.cache(coherence), [scene.cache(coherence), scene.cache(coherence)]);
        let written = AtomicU64::new(0);
        writer.layer.write(&ROOT, writer.open, 4096, &0_u64.to_le_bytes()).unwrap();
        std::thread::scope(|scope| {
            for reader in &readers {
                scope.spawn(|| {
                    loop {
                        let before = written.load(Ordering::Acquire);
                        let mut bytes = [0; 8];
                        assert_eq!(reader.layer.read(&ROOT, reader.open, 4096, &mut bytes).unwrap(), 8);
                        let seen = u64::from_le_bytes(bytes);
                        assert!(seen >= before, "{seen} was read when {before} had been written, {coherence:?}");
                        let made = reader.found(&format!("f{before}"), |_| Ok(()));
                        assert!(
                            before == 0 || before == ROUNDS || made.is_ok() || written.load(Ordering::Acquire) > before
                        );
                        if before == ROUNDS {
                            return;
                        }
                    }
                });
            }
            for round in 1..=ROUNDS {
                let made = writer.layer.mkdir(&ROOT, NodeId::ROOT, name(&format!("f{round}")), 0o755).unwrap();
                writer.layer.forget(made.node, 1);
                writer.layer.write(&ROOT, writer.open, 4096, &round.to_le_bytes()).unwrap();
                written.store(round, Ordering::Release);
                if round > 1 {
                    writer.layer.rmdir(&ROOT, NodeId::ROOT, name(&format!("f{}", round - 1))).unwrap();
                }
            }
        });
    }
}

/// Whoever appends does so behind what others have appended.
#[test]
fn appends_of_several_do_not_meet() {
    for coherence in [Coherence::Leased, Coherence::Validated, Coherence::Timed(LONG)] {
        let scene = Scene::new();
        let caches = [scene.cache(coherence), scene.cache(coherence)];
        std::thread::scope(|scope| {
            for (cache, byte) in caches.iter().zip([b'a', b'b']) {
                scope.spawn(move || {
                    let flags = OpenFlags::READ_WRITE | OpenFlags::APPEND;
                    let handle = cache.layer.open(&ROOT, cache.file, flags).unwrap();
                    for _ in 0..200 {
                        assert_eq!(cache.layer.write(&ROOT, handle, 0, &pattern(37, byte)).unwrap().count, 37);
                    }
                    cache.layer.release(handle);
                });
            }
        });
        let truth = scene.truth();
        let content = truth.read(truth.open).unwrap();
        let count = |byte| content.iter().filter(|&&found| found == byte).count();
        assert_eq!(
            (content.len(), count(b'a'), count(b'b')),
            (BYTES + 2 * 200 * 37, 200 * 37, 200 * 37),
            "{coherence:?}"
        );
    }
}

#[test]
fn when_upcalls_were_lost_nothing_that_was_kept_counts() {
    use poolfs_libservice::{Stale, Upcalls};
    #[derive(Default)]
    struct Above(AtomicU64);
    impl Upcalls for Above {
        fn stale(&self, _: NodeId, _: Stale) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn names(&self, _: NodeId) {
            self.0.fetch_add(100, Ordering::Relaxed);
        }
        fn lost(&self) {
            self.0.fetch_add(10_000, Ordering::Relaxed);
        }
    }
    let scene = Scene::new();
    let observer = scene.cache(Coherence::Leased);
    let above = Arc::new(Above::default());
    let weak: std::sync::Weak<Above> = Arc::downgrade(&above);
    assert_eq!(observer.layer.attach(weak), Coherence::Leased);
    for question in ["content", "absent name", "mode"] {
        observer.ask(question);
    }
    // Of these changes nobody is told.
    let silent = Eyes::of(Arc::clone(&scene.memory) as Arc<dyn Libservice>);
    for change in ["write", "create", "change of the mode"] {
        silent.make(change);
    }
    assert_ne!(observer.ask("content"), silent.ask("content"));
    scene.memory.lose_upcalls();
    for question in ["content", "absent name", "mode"] {
        assert_eq!(observer.ask(question), silent.ask(question), "{question}");
    }
    assert_eq!(above.0.load(Ordering::Relaxed), 10_000);
    scene.cache(Coherence::Leased).make("write");
    assert!(above.0.load(Ordering::Relaxed) > 10_000, "what is told goes on to whoever is above");
}
