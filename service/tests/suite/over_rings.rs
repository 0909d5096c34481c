//! Tests of FUSE over io_uring: the tests of `/dev/fuse` run again over rings, and those that are specific to rings.
//!
//! Whether the kernel offers rings is one parameter of the whole machine. One test here changes it for its duration, and runs
//! this program again for the others.

use crate::bare::eventually;
use crate::harness::{Running, isolated, make, message, mounts};
use crate::kernel::{MOMENT, Mounted, kill, killed_in_time, shell, threads};
use poolfs_service_protocol::{Answer, Command as Order, InstanceStatus, MountSpec, StackSpec, Transport};
use rustix::fs::FlockOperation;
use rustix::process::{Pid, Signal};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";
const OVER_RINGS: &str = "POOLFS_SERVICE_TEST_OVER_RINGS";

/// Those that run a second time.
const AGAIN: [&str; 11] = [
    "caches::",
    "coherence::",
    "endings::",
    "idmapped::",
    "in_flight::",
    "kernel::",
    "mounts::",
    "over_rings::by_rings_",
    "programs::",
    "pruning::",
    "sizes::",
];

/// Whether this process is one of the second run.
pub fn is_over_rings() -> bool {
    std::env::var_os(OVER_RINGS).is_some()
}

/// In the second run, mounts have rings.
pub fn check<'a>(instances: impl IntoIterator<Item = &'a InstanceStatus>) {
    let expected = |instance: &InstanceStatus| !is_over_rings() || instance.transport == Transport::IoUring;
    assert!(instances.into_iter().all(expected), "the kernel does not use rings");
}

/// As long as this lives, nobody else changes the parameter.
pub fn leave_alone() -> Option<File> {
    (!is_over_rings()).then(|| locked(FlockOperation::LockShared)).flatten()
}

fn locked(operation: FlockOperation) -> Option<File> {
    let file = File::open(PARAMETER).ok()?;
    rustix::fs::flock(&file, operation).expect("a lock");
    Some(file)
}

/// The parameter is on. A process of its own sets it back, also when this one is killed.
struct SwitchedOn {
    keeper: Child,
    _alone: File,
}

impl SwitchedOn {
    fn new() -> Option<Self> {
        let alone = locked(FlockOperation::LockExclusive)?;
        let before = fs::read_to_string(PARAMETER).ok()?;
        let script = "read -r end; printf %s \"$0\" > \"$1\"";
        let mut command = Command::new("setsid");
        command.args(["sh", "-c", script, before.trim(), PARAMETER]).stdin(Stdio::piped());
        let switched = Self { keeper: command.spawn().expect("util-linux"), _alone: alone };
        fs::write(PARAMETER, "Y").ok()?;
        Some(switched)
    }
}

impl Drop for SwitchedOn {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

#[test]
fn what_the_kernel_asks_is_the_same_by_rings() {
    if is_over_rings() {
        return;
    }
    let Some(_on) = SwitchedOn::new() else { return eprintln!("this kernel does not offer rings, or not to us") };
    let itself = std::env::current_exe().expect("the test's own path");
    let status = Command::new(itself).args(AGAIN).env(OVER_RINGS, "1").status().expect("this program");
    assert!(status.success(), "by rings something is different, see above");
}

/// Runs a test of rings only, if this is the second run.
fn by_rings(name: &str, body: impl FnOnce(&Path)) {
    if is_over_rings() {
        isolated(name, body);
    }
}

/// A shell whose program runs on CPU 0.
fn on_first(script: &str, path: &Path) -> Child {
    shell(&format!("exec taskset -c 0 {script}"), path)
}

/// An order for a mount whose requests are to come in this way, and its name.
fn by(service: &Running, folder: &Path, name: &str, transport: Transport) -> Order {
    let stack = StackSpec::directory(make(&folder.join(format!("{name}-directory"))));
    Order::Mount(MountSpec { transport: Some(transport), ..service.spec(name, stack) })
}

#[test]
fn by_rings_and_by_dev_fuse_is_what_was_asked_for() {
    by_rings("over_rings::by_rings_and_by_dev_fuse_is_what_was_asked_for", |folder| {
        let service = Running::start(folder);
        for (name, transport) in [("one", Transport::DevFuse), ("two", Transport::IoUring)] {
            assert_eq!(service.order(&by(&service, folder, name, transport)), Answer::Done);
            fs::write(folder.join(format!("mnt-{name}/f")), name).expect("written");
            let status = service.status();
            let instance = status.instances.iter().find(|instance| instance.instance == name).expect("mounted");
            assert_eq!(instance.transport, transport);
        }
    });
}

#[test]
fn rings_that_are_not_offered_cannot_be_asked_for() {
    isolated("over_rings::rings_that_are_not_offered_cannot_be_asked_for", |folder| {
        let service = Running::start(folder);
        let answer = service.order(&by(&service, folder, "one", Transport::IoUring));
        if fs::read_to_string(PARAMETER).is_ok_and(|text| text.trim() == "Y") {
            assert_eq!(answer, Answer::Done);
            return;
        }
        let said = message(answer);
        assert!(said.contains("cannot come by io_uring") && said.contains("poolfs doctor"), "{said}");
        assert!(mounts(folder).is_empty());
        assert_eq!(service.order(&by(&service, folder, "two", Transport::DevFuse)), Answer::Done);
    });
}

#[test]
fn by_rings_whoever_is_killed_leaves_room_for_others_while_its_request_goes_on() {
    by_rings("over_rings::by_rings_whoever_is_killed_leaves_room_for_others_while_its_request_goes_on", |folder| {
        let mounted = Mounted::new(folder);
        let rounds = 5;
        for round in 1..=rounds {
            let wait = |n| on_first("test -e \"$1\"", &mounted.at.join(format!("wait-{round}-{n}")));
            let mut children: Vec<Child> = (0..threads()).map(wait).collect();
            mounted.trap.wait_for(round * threads());
            for child in &mut children {
                kill(child, Signal::KILL);
                killed_in_time(child);
            }
        }
        // All are stuck in the layer, and others are served.
        let mut other = on_first("test ! -e \"$1\"", &mounted.at.join("other"));
        assert_eq!(other.wait().expect("ours").code(), Some(0));
        mounted.trap.wait_for(rounds * threads());
        mounted.trap.let_go();
        let entries = threads() + 2 * (queues() - 1);
        eventually("the others have ended", || rings_of(std::process::id()) == entries);
    });
}

/// One for each CPU there may ever be.
fn queues() -> usize {
    let list = fs::read_to_string("/sys/devices/system/cpu/possible").expect("sysfs");
    list.trim().rsplit('-').next().and_then(|last| last.parse::<usize>().ok()).expect("a list") + 1
}

/// Threads of a process that serve rings.
fn rings_of(process: u32) -> usize {
    let threads = fs::read_dir(format!("/proc/{process}/task")).expect("alive").flatten();
    let names = threads.map(|thread| fs::read_to_string(thread.path().join("comm")).unwrap_or_default());
    names.filter(|name| name.starts_with("fuse-ring-")).count()
}

#[test]
fn by_rings_what_a_killed_caller_wrote_is_not_mixed_with_what_others_write() {
    by_rings("over_rings::by_rings_what_a_killed_caller_wrote_is_not_mixed_with_what_others_write", |folder| {
        const LENGTH: usize = 256 << 10;
        let mounted = Mounted::new(folder);
        let copy = |byte: u8, name: &str| {
            let from = folder.join(byte.to_string());
            fs::write(&from, vec![byte; LENGTH]).expect("written");
            let script = format!("dd if={} of=\"$1\" bs={LENGTH} conv=notrunc status=none", from.display());
            on_first(&script, &mounted.at.join(name))
        };
        mounted.trap.make("killed");
        mounted.trap.hold_back_next_write();
        let mut killed = copy(1, "killed");
        mounted.trap.wait_for(1);
        kill(&killed, Signal::KILL);
        killed_in_time(&mut killed);
        for name in ["other", "another", "one-more"] {
            mounted.trap.make(name);
            assert!(copy(2, name).wait().expect("ours").success());
        }
        mounted.trap.let_go();
        for (name, byte) in [("killed", 1), ("other", 2), ("another", 2), ("one-more", 2)] {
            assert_eq!(fs::read(mounted.at.join(name)).expect("read"), vec![byte; LENGTH], "{name}");
        }
    });
}

#[test]
fn by_rings_no_thread_is_left_when_the_mount_is_gone() {
    by_rings("over_rings::by_rings_no_thread_is_left_when_the_mount_is_gone", |folder| {
        let mut mounted = Mounted::new(folder);
        let own = std::process::id();
        assert!(rings_of(own) >= threads());
        let mut child = on_first("test -e \"$1\"", &mounted.at.join("wait"));
        mounted.trap.wait_for(1);
        mounted.mount.detach().expect("detached");
        kill(&child, Signal::KILL);
        killed_in_time(&mut child);
        std::thread::sleep(MOMENT);
        mounted.trap.let_go();
        assert!(mounted.mount.wait(Duration::from_secs(10)), "the mount lives on");
        eventually("every thread has ended", || rings_of(own) == 0);
    });
}

#[test]
fn by_rings_nobody_waits_for_a_service_that_was_killed() {
    by_rings("over_rings::by_rings_nobody_waits_for_a_service_that_was_killed", |folder| {
        let mut service = Running::start(folder);
        let (at, directory) = service.mount_directory("one");
        fs::write(at.join("f"), "x").expect("written");
        let process = Pid::from_raw(service.pid() as i32).expect("a number");
        rustix::process::kill_process(process, Signal::STOP).expect("ours");
        let look = |n| {
            shell(
                "for cpu in 0 1; do taskset -c $cpu test -e \"$1\" && exit 7; done; exit 0",
                &at.join(format!("new-{n}")),
            )
        };
        let mut children: Vec<Child> = (0..8).map(look).collect();
        std::thread::sleep(MOMENT);
        service.kill();
        let deadline = Instant::now() + Duration::from_secs(10);
        for child in &mut children {
            loop {
                if let Some(status) = child.try_wait().expect("ours") {
                    break assert_eq!(status.code(), Some(0), "there is nobody to say that it exists");
                }
                assert!(Instant::now() < deadline, "somebody waits for the dead");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        assert!(fs::metadata(at.join("anew")).is_err());
        // What the kernel still has to clear away for the dead is in nobody's way.
        let service = Running::start(folder);
        assert_eq!(service.mount("one", StackSpec::directory(directory)), at);
        for cpu in 0..2 {
            let script = format!("taskset -c {cpu} cp /bin/sh \"$1\" && taskset -c {cpu} cmp /bin/sh \"$1\"");
            assert!(shell(&script, &at.join("g")).wait().expect("ours").success());
        }
    });
}
