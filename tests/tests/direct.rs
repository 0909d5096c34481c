//! Cached reads without a request: they are none, and what they bring is what a request would have brought.

use poolfs_tests::{Mounted, Pool, Stepper, Way, compile, hash, isolated};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const SIZE: u64 = 200_000;

/// More reads than it takes to get a file's segment.
const WARM: u64 = 40;

fn content() -> Vec<u8> {
    (0..SIZE).map(|at| (at >> 10) as u8 + 1).collect()
}

struct Scene {
    folder: PathBuf,
    pool: Pool,
}

impl Scene {
    fn new(folder: &Path) -> Self {
        for name in ["lower", "upper-a", "upper-b"] {
            fs::create_dir_all(folder.join(name)).expect("a folder");
        }
        fs::write(folder.join("lower/file"), content()).expect("a file");
        let _ = compile(folder, "steps", false);
        let _ = compile(folder, "steps", true);
        Self { folder: folder.to_owned(), pool: Pool::create(folder, "64M") }
    }

    fn mount(&self, name: &str) -> Mounted<'_> {
        let upper = self.folder.join(format!("upper-{name}"));
        self.pool.mount_union(&self.folder.join(format!("mnt-{name}")), &upper, &[&self.folder.join("lower")])
    }

    fn start(&self, way: Way, mount: &Mounted<'_>, flags: i32) -> Stepper {
        let program = self.folder.join(if way == Way::Library { "steps" } else { "steps-static" });
        let mut process = Stepper::start(&self.pool, &program, way);
        assert_eq!(process.step(&format!("open {} {flags}", mount.path().join("file").display())), Ok(0));
        process
    }

    /// Operations that were served while `work` was done.
    fn requests(&self, work: impl FnOnce()) -> u64 {
        let before = self.pool.operations(Way::Library);
        work();
        self.pool.operations(Way::Library) - before
    }
}

/// Reads all of it, in pieces; it has to be `model`.
fn check(reader: &mut Stepper, model: &[u8]) {
    for at in (0..model.len() + 1).step_by(10_000) {
        let end = model.len().min(at + 10_000);
        assert_eq!(reader.step(&format!("pread {at} 10000")), Ok(hash(&model[at..end])), "at {at}");
    }
}

fn warm(reader: &mut Stepper, model: &[u8]) {
    for _ in 0..WARM {
        check(reader, model);
    }
}

#[test]
fn what_is_cached_is_read_without_requests_until_it_moves() {
    isolated("what_is_cached_is_read_without_requests_until_it_moves", |folder| {
        let scene = Scene::new(folder);
        let (mount, other) = (scene.mount("a"), scene.mount("b"));
        let mut model = content();
        let mut reader = scene.start(Way::Library, &mount, libc::O_RDONLY);
        let mut clone = scene.start(Way::Library, &other, libc::O_RDONLY);
        for reader in [&mut reader, &mut clone] {
            warm(reader, &model);
            let asked = scene.requests(|| check(reader, &model));
            assert_eq!(asked, 0, "of a file of a lower branch");
        }
        // One byte of it moves to the upper branch.
        let mut writer = scene.start(Way::Library, &mount, libc::O_RDWR);
        for at in [5_000, 100_000] {
            assert_eq!(writer.step(&format!("pwrite {at} 1 200")), Ok(1));
            model[at] = 200;
            check(&mut reader, &model);
        }
        check(&mut clone, &content());
        assert_eq!(
            scene.requests(|| check(&mut clone, &content())),
            0,
            "another instance's copy-up is none of its business"
        );
        // When all of it has moved it is an ordinary file.
        for at in (0..SIZE as usize).step_by(50_000) {
            assert_eq!(writer.step(&format!("pwrite {at} 50000 9")), Ok(50_000));
            model[at..at + 50_000].fill(9);
            check(&mut reader, &model);
        }
        assert_eq!(writer.step("sync"), Ok(0));
        warm(&mut reader, &model);
        assert_eq!(scene.requests(|| check(&mut reader, &model)), 0, "of an upper file");
        for (step, at, length, byte) in [("pwrite", 100, 20_000, 3), ("pwrite", SIZE, 5_000, 4)] {
            assert_eq!(writer.step(&format!("{step} {at} {length} {byte}")), Ok(length as u64));
            let (at, end) = (at as usize, at as usize + length);
            model.resize(model.len().max(end), 0);
            model[at..end].fill(byte);
            assert_eq!(scene.requests(|| check(&mut reader, &model)), 0, "an ordinary write changes it in its place");
        }
        for size in [70_001, 150_000] {
            assert_eq!(writer.step(&format!("truncate {size}")), Ok(0));
            model.resize(size, 0);
            check(&mut reader, &model);
        }
        drop((reader, clone, writer));
        drop((mount, other));
    });
}

#[test]
fn who_may_change_it_through_the_kernel_is_seen() {
    isolated("who_may_change_it_through_the_kernel_is_seen", |folder| {
        let scene = Scene::new(folder);
        let mount = scene.mount("a");
        let mut model = content();
        let mut reader = scene.start(Way::Library, &mount, libc::O_RDONLY);
        warm(&mut reader, &model);
        for round in 0..20 {
            let mut writer = scene.start(Way::Legacy, &mount, libc::O_RDWR);
            let (at, length) = (round * 9_000, 100 + round * 50);
            if round % 2 == 0 {
                assert_eq!(writer.step("map 200000"), Ok(0));
                assert_eq!(writer.step(&format!("mwrite {at} {length} {}", 100 + round)), Ok(0));
            } else {
                assert_eq!(writer.step(&format!("pwrite {at} {length} {}", 100 + round)), Ok(length as u64));
            }
            model[at..at + length].fill(100 + round as u8);
            check(&mut reader, &model);
            drop(writer);
            warm(&mut reader, &model);
        }
        drop(reader);
        drop(mount);
    });
}

#[test]
fn a_dead_service_is_an_end_also_for_who_asks_it_nothing() {
    isolated("a_dead_service_is_an_end_also_for_who_asks_it_nothing", |folder| {
        let scene = Scene::new(folder);
        let mount = scene.mount("a");
        let mut reader = scene.start(Way::Library, &mount, libc::O_RDONLY);
        warm(&mut reader, &content());
        kill_process(Pid::from_raw(scene.pool.service_pid()).expect("a process"), Signal::KILL).expect("it is ours");
        let deadline = Instant::now() + Duration::from_secs(20);
        while reader.step("pread 0 10").is_ok() {
            assert!(Instant::now() < deadline, "it goes on reading what nobody keeps true");
            std::thread::park_timeout(Duration::from_millis(1));
        }
        drop(reader);
        std::mem::drop(mount.unmount());
    });
}

#[test]
fn a_number_that_stands_for_something_else_is_seen_without_a_look_at_it() {
    isolated("a_number_that_stands_for_something_else_is_seen_without_a_look_at_it", |folder| {
        let scene = Scene::new(folder);
        for name in ["X", "Y"] {
            fs::write(folder.join("lower").join(name), name.repeat(2 << 20)).expect("a file");
        }
        let mount = scene.mount("a");
        let program = compile(folder, "closings", false);
        let path = |name: &str| mount.path().join(name).display().to_string();
        let script = format!("{} {} {}", program.display(), path("X"), path("Y"));
        assert_eq!(scene.pool.shell(Way::Library, &script).expect("closings").trim(), "right");
        drop(mount);
    });
}
