//! Tests of what becomes of written data when an instance or the service ends.

use crate::harness::{Running, answer_of, eventually, give, isolated, make, mounts, spawn};
use poolfs_service_protocol::{Answer, Command as Order, ServiceConfig, StackSpec, UnmountMode};
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

#[test]
fn an_unmount_flushes_directories_and_unions() {
    isolated("endings::an_unmount_flushes_directories_and_unions", |folder| {
        let service = Running::start(folder);
        let (at, directory) = service.mount_directory("one");
        fs::write(at.join("f"), b"not synced").expect("write");
        assert_eq!(service.unmount("one"), Answer::Done);
        assert_eq!(fs::read(directory.join("f")).expect("there"), b"not synced");
        let (upper, lower) = (make(&folder.join("upper")), make(&folder.join("lower")));
        let at = service.mount("two", StackSpec::union(upper.clone(), vec![lower]));
        fs::write(at.join("g"), b"not synced either").expect("write");
        assert_eq!(service.unmount("two"), Answer::Done);
        assert_eq!(fs::read(upper.join("g")).expect("there"), b"not synced either");
        assert_eq!(service.status().cache.dirty_bytes, 0);
    });
}

#[test]
fn a_mount_that_fails_half_way_leaves_the_branch_free_and_nothing_dirty() {
    isolated("endings::a_mount_that_fails_half_way_leaves_the_branch_free_and_nothing_dirty", |folder| {
        let service = Running::start(folder);
        let (upper, lower) = (make(&folder.join("upper")), make(&folder.join("lower")));
        let union = || StackSpec::union(upper.clone(), vec![lower.clone()]);
        // The stack is built when something turns out to be in the way of the socket.
        let in_the_way = folder.join("run/one.sock");
        fs::create_dir(&in_the_way).expect("made");
        let answer = service.order(&Order::Mount(service.spec("one", union())));
        fs::remove_dir(&in_the_way).expect("removed");
        assert!(matches!(answer, Answer::Failed { ref message, .. } if message.contains("no sessions")), "{answer:?}");
        assert!(mounts(folder).is_empty());
        assert_eq!(service.status().cache.dirty_bytes, 0);
        let at = service.mount("one", union());
        fs::write(at.join("f"), b"x").expect("write");
        assert_eq!(service.unmount("one"), Answer::Done);
    });
}

fn order(stream: &mut UnixStream, order: &Order) -> Answer {
    give(stream, order);
    answer_of(stream)
}

fn run(program: &str, arguments: &[&str], path: &Path) {
    let status = Command::new(program).args(arguments).arg(path).status().expect("util-linux");
    assert!(status.success(), "{program} {arguments:?} {}", path.display());
}

/// A service that logs into a file, and a connection to it.
fn start(folder: &Path, log: File) -> (Child, UnixStream) {
    let config = ServiceConfig {
        pool: "pool".into(),
        entrances: Vec::new(),
        memory_group: None,
        cpus: vec![0],
        cache_bytes: 16 << 20,
        control_socket: folder.join("run/control.sock"),
        socket_directory: folder.join("run"),
    };
    let child = spawn(&serde_json::to_string(&config).expect("serializable"), log.into());
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match UnixStream::connect(&config.control_socket) {
            Ok(stream) => return (child, stream),
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_log_that_cannot_be_written_ends_nothing() {
    isolated("endings::a_log_that_cannot_be_written_ends_nothing", |folder| {
        let (mut child, mut stream) = start(folder, File::options().write(true).open("/dev/full").expect("opened"));
        let directory = make(&folder.join("dir"));
        let spec = poolfs_service_protocol::MountSpec {
            devices: true,
            suid: true,
            ..poolfs_service_protocol::MountSpec::new("one", folder.join("absent"), StackSpec::directory(directory))
        };
        // What fails is logged.
        for _ in 0..2 {
            let answer = order(&mut stream, &Order::Mount(spec.clone()));
            assert!(matches!(&answer, Answer::Failed { message, .. } if message.contains("absent")), "{answer:?}");
        }
        assert_eq!(order(&mut stream, &Order::Shutdown), Answer::Done);
        assert!(child.wait().expect("ours").success());
    });
}

/// A service over a directory that becomes read-only behind it.
struct Failing {
    directory: PathBuf,
    mount_point: PathBuf,
    stream: UnixStream,
}

impl Failing {
    fn mount(&mut self) {
        let spec = poolfs_service_protocol::MountSpec {
            devices: true,
            suid: true,
            ..poolfs_service_protocol::MountSpec::new(
                "one",
                self.mount_point.clone(),
                StackSpec::directory(self.directory.clone()),
            )
        };
        assert_eq!(order(&mut self.stream, &Order::Mount(spec)), Answer::Done);
    }

    /// Writes a file that cannot reach the disk.
    fn write_and_cut_off(&self, name: &str) {
        fs::write(self.mount_point.join(name), name).expect("write");
        // The close reaches the layers in a moment; a file open for writing forbids the next step.
        let deadline = Instant::now() + Duration::from_secs(4);
        let read_only = || Command::new("mount").args(["-o", "remount,ro"]).arg(&self.directory).status();
        while !read_only().expect("util-linux").success() {
            assert!(Instant::now() < deadline, "the file stays open");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn repair(&self) {
        run("mount", &["-o", "remount,rw"], &self.directory);
    }

    fn unmount(&mut self, ending: UnmountMode) -> Answer {
        order(&mut self.stream, &Order::Unmount { instance: "one".into(), ending })
    }
}

#[test]
fn data_that_cannot_be_flushed_keeps_its_mount_until_somebody_gives_it_up() {
    isolated("endings::data_that_cannot_be_flushed_keeps_its_mount_until_somebody_gives_it_up", |folder| {
        let directory = make(&folder.join("dir"));
        run("mount", &["-t", "tmpfs", "tmpfs"], &directory);
        let log = folder.join("log");
        let (mut child, stream) = start(folder, File::create(&log).expect("created"));
        let mut service = Failing { directory: directory.clone(), mount_point: make(&folder.join("mnt")), stream };
        service.mount();
        service.write_and_cut_off("kept");
        for ending in [UnmountMode::Orderly, UnmountMode::Detached] {
            let answer = service.unmount(ending);
            let place = service.mount_point.display().to_string();
            let told = |message: &str| message.contains(&place) && message.contains("the mount stays");
            assert!(matches!(&answer, Answer::Failed { message, .. } if told(message)), "{ending:?}: {answer:?}");
            assert_eq!(fs::read(service.mount_point.join("kept")).expect("still mounted"), b"kept");
        }
        service.repair();
        assert_eq!(service.unmount(UnmountMode::Orderly), Answer::Done);
        assert_eq!(fs::read(directory.join("kept")).expect("on the disk"), b"kept");

        for (name, ending) in [("forced", UnmountMode::Forced), ("discarded", UnmountMode::Discarded)] {
            service.mount();
            service.write_and_cut_off(name);
            assert_eq!(service.unmount(ending), Answer::Done);
            assert!(mounts(folder).is_empty());
            service.repair();
            assert_eq!(fs::read(directory.join(name)).expect("its name is there"), b"", "its content was given up");
        }

        service.mount();
        service.write_and_cut_off("ended");
        let answer = order(&mut service.stream, &Order::Shutdown);
        assert!(matches!(&answer, Answer::Failed { message, .. } if message.contains("is lost")), "{answer:?}");
        assert!(child.wait().expect("ours").success());
        assert!(mounts(folder).is_empty());
        let said = fs::read_to_string(&log).expect("readable");
        let lines = |words: &str| said.lines().filter(|line| line.contains(words)).count();
        assert_eq!(lines("flushing at the end failed"), 3, "{said}");
        assert_eq!(lines("flushing a branch at its end failed; data was lost"), 3, "{said}");
        assert!(said.contains(directory.to_str().expect("UTF-8")) && said.contains("one"), "{said}");
    });
}

#[test]
fn what_is_written_while_a_mount_goes_brings_it_back_when_it_cannot_be_kept() {
    isolated("endings::what_is_written_while_a_mount_goes_brings_it_back_when_it_cannot_be_kept", |folder| {
        let service = Running::start(folder);
        let directory = make(&folder.join("dir"));
        run("mount", &["-t", "tmpfs", "-o", "size=2M", "tmpfs"], &directory);
        let at = service.mount("one", StackSpec::directory(directory.clone()));
        let file = File::create(at.join("f")).expect("created");
        let content = vec![7; 256 << 10];
        let detached = Order::Unmount { instance: "one".into(), ending: UnmountMode::Detached };
        let answer = std::thread::scope(|scope| {
            let unmounting = scope.spawn(|| service.order(&detached));
            let deadline = Instant::now() + Duration::from_secs(10);
            while !mounts(folder).is_empty() {
                assert!(Instant::now() < deadline, "it is not detached");
                std::thread::sleep(Duration::from_millis(1));
            }
            // Everything was flushed before; now the disk becomes full behind what its last user writes.
            file.write_all_at(&content, 0).expect("there is room");
            let mut ballast = File::create(directory.join("ballast")).expect("created");
            while std::io::Write::write_all(&mut ballast, &[1; 4096]).is_ok() {}
            drop(file);
            unmounting.join().expect("no panic")
        });
        assert!(matches!(&answer, Answer::Failed { message, .. } if message.contains("the mount stays")), "{answer:?}");
        assert_eq!(fs::read(at.join("f")).expect("mounted again"), content);
        fs::remove_file(directory.join("ballast")).expect("removed");
        assert_eq!(service.unmount("one"), Answer::Done);
        assert_eq!(fs::read(directory.join("f")).expect("on the disk"), content);
    });
}

/// How many threads of a process have this name.
fn threads(pid: u32, name: &str) -> usize {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it lives").flatten();
    tasks.filter(|task| fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim() == name)).count()
}

#[test]
fn a_union_that_comes_back_goes_on_with_its_work() {
    isolated("endings::a_union_that_comes_back_goes_on_with_its_work", |folder| {
        let service = Running::start(folder);
        let [branch, lower] = ["branch", "lower"].map(|name| make(&folder.join(name)));
        run("mount", &["-t", "tmpfs", "-o", "size=4M", "tmpfs"], &branch);
        fs::write(lower.join("l"), vec![3; 1 << 20]).expect("written");
        let at = service.mount("one", StackSpec::union(make(&branch.join("upper")), vec![lower]));
        let file = File::create(at.join("f")).expect("created");
        let detached = Order::Unmount { instance: "one".into(), ending: UnmountMode::Detached };
        let content = vec![7; 1 << 20];
        let answer = std::thread::scope(|scope| {
            let unmounting = scope.spawn(|| service.order(&detached));
            eventually("it is detached", || mounts(folder).is_empty());
            file.write_all_at(&content, 0).expect("there is room");
            let mut ballast = File::create(branch.join("ballast")).expect("created");
            while std::io::Write::write_all(&mut ballast, &[1; 4096]).is_ok() {}
            drop(file);
            unmounting.join().expect("no panic")
        });
        assert!(matches!(&answer, Answer::Failed { message, .. } if message.contains("the mount stays")), "{answer:?}");
        fs::remove_file(branch.join("ballast")).expect("removed");
        let changed = fs::OpenOptions::new().write(true).open(at.join("l")).expect("there");
        changed.write_all_at(b"x", 0).expect("written");
        eventually("its sketch is to be flushed", || threads(service.pid(), "union-flush") == 1);
        drop(changed);
        assert_eq!(service.unmount("one"), Answer::Done);
        assert_eq!(fs::read(branch.join("upper/f")).expect("on the disk"), content);
    });
}

#[test]
fn a_busy_mount_stays_unless_its_users_are_to_lose_it() {
    isolated("endings::a_busy_mount_stays_unless_its_users_are_to_lose_it", |folder| {
        let service = Running::start(folder);
        let (at, directory) = service.mount_directory("one");
        let mut file = File::create(at.join("f")).expect("created");
        let answer = service.unmount("one");
        assert!(matches!(&answer, Answer::Failed { message, .. } if message.contains("in use")), "{answer:?}");
        std::io::Write::write_all(&mut file, b"still here").expect("still mounted");
        let detached = Order::Unmount { instance: "one".into(), ending: UnmountMode::Detached };
        assert_eq!(service.order(&detached), Answer::Lingers);
        assert!(mounts(folder).is_empty());
        assert_eq!(fs::read(directory.join("f")).expect("flushed"), b"still here");
    });
}

#[test]
fn a_job_that_is_slow_to_end_holds_up_nothing_but_the_end_of_its_instance() {
    isolated("endings::a_job_that_is_slow_to_end_holds_up_nothing_but_the_end_of_its_instance", |folder| {
        let service = Running::start(folder);
        let (upper, lower) = (make(&folder.join("upper")), make(&folder.join("lower")));
        let at = service.mount("one", StackSpec::union(upper, vec![lower]));
        // More than there is room for on a connection from which nobody reads.
        for number in 0..4000 {
            File::create(at.join(format!("{number:0>200}"))).expect("made");
        }
        let connect = || UnixStream::connect(service.control_socket()).expect("it listens");
        let differences = Order::Differences { instance: "one".into(), parts: false };
        let comparing = connect();
        give(&comparing, &differences);
        assert!(matches!(answer_of(&comparing), Answer::Difference(_)), "it has begun");
        let ending = connect();
        give(&ending, &Order::Unmount { instance: "one".into(), ending: UnmountMode::Orderly });
        eventually("the job is asked to end", || {
            let other = connect();
            give(&other, &differences);
            matches!(answer_of(&other), Answer::Failed { ref message, .. } if message.contains("being unmounted"))
        });
        let _ = service.mount_directory("two");
        assert_eq!(service.unmount("two"), Answer::Done);
        ending.set_nonblocking(true).expect("set");
        let early = (&ending).read(&mut [0]);
        assert!(early.is_err_and(|error| error.kind() == ErrorKind::WouldBlock), "the job goes on");
        ending.set_nonblocking(false).expect("set");
        drop(comparing);
        assert_eq!(answer_of(&ending), Answer::Done);
    });
}
