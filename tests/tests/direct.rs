//! Cached reads and attributes without a request: no request is sent, and the result is what a request would have returned.

use poolfs_tests::{Mounted, Pool, Stepper, Way, compile, hash, isolated};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::fs::PermissionsExt;
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
        warm(&mut reader, &model);
        let asked = scene.requests(|| check(&mut reader, &model));
        assert!(asked >= model.len() as u64 / 10_000, "{asked}: the lower file shows what was there before");
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

/// As databases use their files: past the kernel's cache, after they have asked whether they are in persistent memory.
#[test]
fn files_opened_past_the_kernels_cache_go_by_the_library() {
    isolated("files_opened_past_the_kernels_cache_go_by_the_library", |folder| {
        let scene = Scene::new(folder);
        let mount = scene.mount("a");
        let mut model = content();
        let mut cached = scene.start(Way::Fuse, &mount, libc::O_RDWR);
        check(&mut cached, &model);
        for flags in [libc::O_RDWR | libc::O_DIRECT, libc::O_RDWR] {
            let mut database = scene.start(Way::Library, &mount, flags);
            assert_eq!(database.step("persistent 4096"), Err(libc::EOPNOTSUPP));
            // It is adopted when it is used again.
            check(&mut database, &model);
            let mut write = |at: usize, by: &mut Stepper| {
                let byte = (at >> 12) as u8 ^ flags as u8;
                assert_eq!(by.step(&format!("pwrite {at} 4096 {byte}")), Ok(4096));
                model[at..at + 4096].fill(byte);
            };
            let asked = scene.requests(|| (0..20).for_each(|block| write(block * 4096, &mut database)));
            assert_eq!(asked, 20, "writes");
            assert_eq!(scene.requests(|| assert_eq!(database.step("sync"), Ok(0))), 1, "a sync");
            write(30 * 4096, &mut cached);
            check(&mut cached, &model);
            warm(&mut database, &model);
        }
        drop(cached);
        drop(mount);
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
            let mut writer = scene.start(Way::Fuse, &mount, libc::O_RDWR);
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

/// Enough for whoever looks again and again to be told without asking.
const LOOKS: u64 = 100;

/// What `fstat` says, which is what the kernel says.
fn look(reader: &mut Stepper) -> u64 {
    let seen = reader.step("facts");
    assert_ne!(seen, Err(libc::ENOTRECOVERABLE), "the kernel says something else");
    seen.expect("fstat")
}

fn look_long(reader: &mut Stepper) {
    (0..LOOKS).for_each(|_| {
        let _ = look(reader);
    });
}

#[test]
fn attributes_are_looked_at_without_requests_and_are_the_kernels() {
    isolated("attributes_are_looked_at_without_requests_and_are_the_kernels", |folder| {
        let scene = Scene::new(folder);
        for branch in ["lower", "upper-a"] {
            let long = folder.join(branch).join(format!("long-{branch}"));
            fs::write(&long, vec![7; 2 << 20]).expect("a file");
            // The kernel does not keep attributes with such a mode: each time that it is asked, it asks.
            fs::set_permissions(&long, fs::Permissions::from_mode(0o4644)).expect("a mode");
        }
        let mount = scene.mount("a");
        let open = |name: &str, way, flags: i32| {
            let mut process = scene.start(way, &mount, libc::O_RDONLY);
            assert_eq!(process.step(&format!("open {} {flags}", mount.path().join(name).display())), Ok(0));
            process
        };
        // None of them reads. Of what was written a moment ago, as these files were, each asks once a second.
        let of_lower = open("long-lower", Way::Library, libc::O_RDONLY);
        let reader = open("long-upper-a", Way::Library, libc::O_RDONLY);
        let writer = open("long-upper-a", Way::Library, libc::O_RDWR);
        let [mut of_lower, mut reader, mut writer] = [of_lower, reader, writer].map(|mut process| {
            look_long(&mut process);
            process
        });
        for (name, process) in [("lower", &mut of_lower), ("reader", &mut reader), ("writer", &mut writer)] {
            look_long(process);
            let operations = || scene.pool.operations(Way::Library) + scene.pool.operations(Way::Fuse);
            let before = operations();
            for _ in 0..LOOKS {
                assert_eq!(process.step("size"), Ok(2 << 20));
            }
            let asked = operations() - before;
            assert!(asked < LOOKS / 4, "{name}: {asked} requests");
        }

        let mut before = look(&mut reader);
        for change in ["pwrite 3000000 5 9", "truncate 2500000", "cut 2400000"] {
            let _ = writer.step(change).expect(change);
            let now = look(&mut reader);
            assert_ne!(now, before, "after {change}");
            before = now;
            look_long(&mut reader);
        }
        let mut legacy = scene.start(Way::Fuse, &mount, libc::O_RDONLY);
        let path = mount.path().join("long-upper-a").display().to_string();
        for who in [&mut writer, &mut legacy] {
            for change in [
                format!("chmod {path} {}", 0o4711),
                format!("times {path} 1000"),
                format!("chown {path} 7 8"),
                format!("link {path} {path}-2"),
                format!("unlink {path}-2"),
                format!("chown {path} 0 0"),
                format!("chmod {path} {}", 0o644),
            ] {
                let _ = who.step(&change).unwrap_or_else(|errno| panic!("{change}: {errno}"));
                let now = look(&mut reader);
                assert_ne!(now, before, "after {change}");
                before = now;
                look_long(&mut reader);
            }
        }
        // Who maps it for writing changes it unseen: then it is the kernel's to tell.
        let mut mapper = open("long-upper-a", Way::Fuse, libc::O_RDWR);
        assert_eq!((mapper.step("map 200000"), mapper.step("mwrite 0 10 1")), (Ok(0), Ok(0)));
        look_long(&mut reader);
        drop(mapper);
        look_long(&mut reader);
        assert_eq!(legacy.step(&format!("rename {path} {path}-3")), Ok(0));
        look_long(&mut reader);
        assert_eq!(legacy.step(&format!("unlink {path}-3")), Ok(0));
        assert_ne!(look(&mut reader), before, "after its last name went");
        drop((of_lower, reader, writer, legacy));
        drop(mount);
    });
}

#[test]
fn nobody_is_shown_attributes_from_before_a_change() {
    isolated("nobody_is_shown_attributes_from_before_a_change", |folder| {
        const CHANGES: u64 = 3000;
        let scene = Scene::new(folder);
        let (dynamic, fixed) = (compile(folder, "looks", false), compile(folder, "looks", true));
        let mount = scene.mount("a");
        for (name, program, way) in
            [("a", &dynamic, "path"), ("b", &dynamic, "file"), ("c", &dynamic, "raw"), ("d", &fixed, "path")]
        {
            let (path, shared) = (mount.path().join(name), folder.join(format!("shared-{name}")));
            let file = fs::File::create(&path).expect("a file");
            file.set_len(2 << 20).expect("sized");
            file.set_permissions(fs::Permissions::from_mode(0o600)).expect("a mode");
            let times = fs::FileTimes::new().set_accessed(std::time::UNIX_EPOCH);
            file.set_times(times).expect("times");
            drop(file);
            fs::write(&shared, [0; 64]).expect("a file");
            let arguments = format!("{} {} {CHANGES}", path.display(), shared.display());
            let report = folder.join(format!("report-{name}"));
            let script = format!(
                "{} {way} {arguments} & POOLFS_REPORT={} {} look {arguments}; wait",
                program.display(),
                report.display(),
                dynamic.display()
            );
            let said = scene.pool.shell(Way::Library, &script).expect("looks");
            let looks = said.trim().strip_prefix("right ").and_then(|looks| looks.parse::<u64>().ok());
            let looks = looks.unwrap_or_else(|| panic!("{name}: {said}"));
            let report = fs::read_to_string(report).expect("a report");
            let direct = report.split(' ').find_map(|word| word.strip_prefix("direct-stats=")?.parse::<u64>().ok());
            assert!(direct.is_some_and(|direct| direct > looks / 10), "{name}: {looks} looks: {report}");
        }
        drop(mount);
    });
}

#[test]
fn little_reads_by_threads_are_right_whatever_comes_between() {
    isolated("little_reads_by_threads_are_right_whatever_comes_between", |folder| {
        const SECONDS: u64 = 6;
        let pool = Pool::create(folder, "64M");
        let program = compile(folder, "glances", false).display().to_string();
        let (directory, at) = (folder.join("dir"), folder.join("mnt"));
        fs::create_dir(&directory).expect("a folder");
        let mount = pool.mount_directory(&at, &directory);
        let (at, report) = (at.display(), folder.join("report"));
        let _ = pool.shell(Way::Library, &format!("{program} make {at}")).expect("files");
        let script = format!(
            "{program} write {at} {SECONDS} & POOLFS_REPORT={} {program} read {at} {SECONDS}; ended=$?; wait; exit $ended",
            report.display()
        );
        let said = pool.shell(Way::Library, &script).expect("reads");
        let reads = said.trim().strip_prefix("right ").and_then(|reads| reads.parse::<u64>().ok());
        let reads = reads.unwrap_or_else(|| panic!("{said}"));
        let report = fs::read_to_string(report).expect("a report");
        // Its children have ended before it.
        let own = report.lines().last().unwrap_or_default();
        let direct = own.split(' ').find_map(|word| word.strip_prefix("direct=")?.parse::<u64>().ok());
        assert!(direct.is_some_and(|direct| direct > reads / 10), "{reads} reads: {own}");
        drop(mount);
    });
}
