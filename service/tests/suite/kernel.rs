//! Tests of the FUSE front, in this process, over a layer that does what a test asks for: panics, callers that are killed while
//! they wait, notifications to the kernel.

use crate::harness::{isolated, make};
use crate::over_rings::{self, is_over_rings};
use crate::trap::Trap;
use poolfs_libservice::Libservice;
use poolfs_service::fuse::FuseMount;
use poolfs_service::shares::InstanceShares;
use poolfs_service::stack::Stack;
use poolfs_service::{Instance, ROOT_NUMBER};
use poolfs_service_protocol::{MountSpec, OperationPath, StackSpec};
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use rustix::process::{Pid, Signal};
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A mount of one CPU has as many; by rings, that CPU has.
pub fn threads() -> usize {
    if is_over_rings() { 4 } else { 6 }
}

const WAIT_MAX: Duration = Duration::from_secs(10);

/// Longer than the service takes to notice a killed caller.
pub const MOMENT: Duration = Duration::from_millis(400);

pub struct Mounted {
    pub trap: Arc<Trap>,
    pub instance: Arc<Instance>,
    pub mount: FuseMount,
    pub at: PathBuf,
}

impl Mounted {
    pub fn new(folder: &Path) -> Self {
        Self::with(folder, None)
    }

    /// One that shares with others.
    pub fn with_shares(folder: &Path, shares: &Arc<InstanceShares>) -> Self {
        Self::with(folder, Some(shares))
    }

    fn with(folder: &Path, shares: Option<&Arc<InstanceShares>>) -> Self {
        let at = make(&folder.join("mnt"));
        let stack = StackSpec::directory("/");
        let spec = MountSpec { devices: true, suid: true, ..MountSpec::new("x", at.clone(), stack) };
        let trap = Trap::new();
        let instance = Instance::new(spec, Stack::of(Arc::clone(&trap) as Arc<dyn Libservice>));
        shares.into_iter().for_each(|shares| instance.set_shares(shares));
        let mount = FuseMount::start(&instance, &[0], Box::new(|| {})).expect("mounted");
        over_rings::check([&instance.status()]);
        Self { trap, instance, mount, at }
    }

    /// Waits until the kernel knows `count` nodes and has `open` files.
    fn wait_for_nodes(&self, count: u64, open: usize) {
        let now = || (self.instance.nodes().len(), self.instance.handles().len());
        let deadline = Instant::now() + WAIT_MAX;
        while now() != (count, open) {
            assert!(Instant::now() < deadline, "{:?} instead of {:?}", now(), (count, open));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn error(&self, name: &str) -> Option<i32> {
        fs::symlink_metadata(self.at.join(name)).err().and_then(|error| error.raw_os_error())
    }
}

pub fn shell(script: &str, path: &Path) -> Child {
    Command::new("sh").args(["-c", script, "sh"]).arg(path).spawn().expect("sh")
}

pub fn kill(child: &Child, signal: Signal) {
    rustix::process::kill_process(Pid::from_child(child), signal).expect("ours");
}

pub fn killed_in_time(child: &mut Child) {
    let deadline = Instant::now() + WAIT_MAX;
    loop {
        if let Some(status) = child.try_wait().expect("ours") {
            return assert_eq!(status.signal(), Some(Signal::KILL.as_raw()));
        }
        assert!(Instant::now() < deadline, "a killed process lives on");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn only_who_may_write_hears_at_close() {
    isolated("kernel::only_who_may_write_hears_at_close", |folder| {
        let mounted = Mounted::new(folder);
        let path = mounted.at.join("f");
        fs::write(&path, "x").expect("written");
        let flushes = || mounted.instance.status().operations[&OperationPath::Fuse]["flush"].count;
        let before = flushes();
        drop(fs::File::open(&path).expect("opened"));
        assert_eq!(flushes(), before);
        drop(fs::OpenOptions::new().write(true).open(&path).expect("opened"));
        assert_eq!(flushes(), before + 1);
    });
}

/// The kernel would take them after it has been told that they have changed.
#[test]
fn attributes_of_what_was_made_are_asked_for_and_those_of_what_was_found_are_kept() {
    isolated("kernel::attributes_of_what_was_made_are_asked_for_and_those_of_what_was_found_are_kept", |folder| {
        let mounted = Mounted::new(folder);
        let requests = || {
            let status = mounted.instance.status();
            let of_attributes = |(name, _): &(&String, _)| ["getattr", "stat"].contains(&name.as_str());
            status.operations[&OperationPath::Fuse].iter().filter(of_attributes).map(|(_, all)| all.count).sum::<u64>()
        };
        let asks = |name: &str| {
            let before = requests();
            // The standard library asks for the time of birth as well, which no name comes with.
            rustix::fs::statat(rustix::fs::CWD, mounted.at.join(name), AtFlags::SYMLINK_NOFOLLOW).expect("there");
            requests() > before
        };
        fs::File::create(mounted.at.join("file")).expect("made");
        fs::create_dir(mounted.at.join("directory")).expect("made");
        std::os::unix::fs::symlink("x", mounted.at.join("link")).expect("made");
        for name in ["file", "directory", "link"] {
            assert_eq!([asks(name), asks(name)], [true, false], "{name}");
        }
        mounted.trap.make("found");
        assert!(!asks("found"), "they came with the name");
    });
}

#[test]
fn a_layer_that_panics_costs_the_request_and_no_thread() {
    isolated("kernel::a_layer_that_panics_costs_the_request_and_no_thread", |folder| {
        let mounted = Mounted::new(folder);
        fs::write(mounted.at.join("f"), b"fine").expect("write");
        for round in 0..3 * threads() {
            assert_eq!(mounted.error(&format!("panic-{round}")), Some(libc::EIO));
        }
        assert_eq!(fs::read(mounted.at.join("f")).expect("the service lives on"), b"fine");
    });
}

#[test]
fn a_name_that_cannot_be_looked_up_is_listed() {
    isolated("kernel::a_name_that_cannot_be_looked_up_is_listed", |folder| {
        let mounted = Mounted::new(folder);
        for name in ["a", "fails", "z"] {
            mounted.trap.make(name);
        }
        let names = fs::read_dir(&mounted.at).expect("listing");
        let mut names: Vec<_> = names.map(|entry| entry.expect("listing").file_name()).collect();
        names.sort();
        assert_eq!(names, ["a", "fails", "z"]);
        assert_eq!(mounted.error("fails"), Some(libc::EIO));
    });
}

#[test]
fn a_layer_that_lacks_a_call_does_not_take_it_from_the_whole_mount() {
    isolated("kernel::a_layer_that_lacks_a_call_does_not_take_it_from_the_whole_mount", |folder| {
        let mounted = Mounted::new(folder);
        let create = |name: &str| fs::File::create(mounted.at.join(name)).err().and_then(|error| error.raw_os_error());
        assert_eq!(create("lacks"), Some(libc::EOPNOTSUPP));
        assert_eq!(create("f"), None);
        let operations = &mounted.instance.status().operations[&OperationPath::Fuse];
        assert_eq!(operations["create"].count, 2, "{operations:?}");
        assert!(!operations.contains_key("mknod"), "{operations:?}");
    });
}

#[test]
fn whoever_waits_in_the_service_can_be_killed_and_nothing_is_left_of_it() {
    isolated("kernel::whoever_waits_in_the_service_can_be_killed_and_nothing_is_left_of_it", |folder| {
        let mounted = Mounted::new(folder);
        let before = mounted.trap.memory.outstanding();
        mounted.trap.make("wait-for-lookup");
        for (script, name) in [("test -e \"$1\"", "wait-for-lookup"), (": > \"$1\"", "wait-for-create")] {
            let mut child = shell(script, &mounted.at.join(name));
            mounted.trap.wait_for(1);
            kill(&child, Signal::KILL);
            killed_in_time(&mut child);
            mounted.trap.wait_for(1);
            mounted.trap.let_go();
        }
        mounted.wait_for_nodes(0, 0);
        assert_eq!(mounted.trap.memory.outstanding(), before, "the late answers were taken back");
    });
}

#[test]
fn killing_works_also_when_every_thread_waits() {
    isolated("kernel::killing_works_also_when_every_thread_waits", |folder| {
        let mounted = Mounted::new(folder);
        let look = |name: &str| shell("exec taskset -c 0 test -e \"$1\"", &mounted.at.join(name));
        let mut children: Vec<Child> = (0..threads()).map(|n| look(&format!("wait-{n}"))).collect();
        mounted.trap.wait_for(threads());
        children.push(look("behind-them"));
        std::thread::sleep(MOMENT);
        // By rings, the last one is served as soon as another has been killed.
        for child in children.iter_mut().rev() {
            kill(child, Signal::KILL);
            killed_in_time(child);
        }
        mounted.trap.wait_for(threads());
        mounted.trap.let_go();
        assert_eq!(mounted.error("behind-them"), Some(libc::ENOENT), "the service lives on");
    });
}

#[test]
fn a_signal_that_does_not_kill_interrupts_nobody_and_killing_still_works() {
    isolated("kernel::a_signal_that_does_not_kill_interrupts_nobody_and_killing_still_works", |folder| {
        let mounted = Mounted::new(folder);
        let script = "trap : USR1; : < \"$1\" || exit 7";
        mounted.trap.make("wait");
        let mut child = shell(script, &mounted.at.join("wait"));
        mounted.trap.wait_for(1);
        kill(&child, Signal::USR1);
        std::thread::sleep(MOMENT);
        assert_eq!(child.try_wait().expect("ours"), None);
        mounted.trap.let_go();
        assert_eq!(child.wait().expect("ours").code(), Some(0), "no EINTR");
        // The kernel remembers the first name.
        mounted.trap.make("wait-again");
        let mut child = shell(script, &mounted.at.join("wait-again"));
        mounted.trap.wait_for(1);
        kill(&child, Signal::USR1);
        std::thread::sleep(MOMENT);
        kill(&child, Signal::KILL);
        killed_in_time(&mut child);
        mounted.trap.let_go();
    });
}

#[test]
fn the_kernel_forgets_what_it_is_told_to() {
    isolated("kernel::the_kernel_forgets_what_it_is_told_to", |folder| {
        let mounted = Mounted::new(folder);
        let kernel = mounted.mount.kernel();
        fs::write(mounted.at.join("f"), b"x").expect("write");
        let (directory, other) = (make(&mounted.at.join("d")), make(&mounted.at.join("other")));
        fs::write(other.join("below"), b"").expect("write");
        mounted.wait_for_nodes(4, 0);
        rustix::mount::mount_bind(&other, &directory).expect("root");

        kernel.expire_name(ROOT_NUMBER, b"d").expect("told");
        assert!(directory.join("below").exists(), "what is mounted on it stays");
        kernel.invalidate_name(ROOT_NUMBER, b"d").expect("told");
        assert!(!directory.join("below").exists(), "what is mounted on it goes");

        let number = fs::metadata(mounted.at.join("f")).expect("stat").ino();
        kernel.store(number, 4, b"y").expect("told");
        kernel.invalidate(number, 0, -1).expect("told");
        assert_eq!(fs::read(mounted.at.join("f")).expect("read"), b"x");

        mounted.wait_for_nodes(4, 0);
        kernel.prune(&[number]).expect("told");
        mounted.wait_for_nodes(3, 0);
        let number = fs::metadata(mounted.at.join("f")).expect("still there").ino();
        mounted.wait_for_nodes(4, 0);
        kernel.invalidate_name(ROOT_NUMBER, b"f").expect("told");
        mounted.wait_for_nodes(3, 0);
        // What the kernel does not know is nothing to complain of.
        kernel.expire_name(ROOT_NUMBER, b"nowhere").expect("told");
        kernel.invalidate_name(number + 1000, b"nowhere").expect("told");
        kernel.invalidate(number + 1000, 0, -1).expect("told");
    });
}

#[test]
fn files_begin_without_a_name_and_get_one_by_either_way() {
    isolated("kernel::files_begin_without_a_name_and_get_one_by_either_way", |folder| {
        let mounted = Mounted::new(folder);
        let open = |more| {
            let flags = OFlags::TMPFILE | OFlags::RDWR | more;
            fs::File::from(rustix::fs::open(&mounted.at, flags, Mode::from_raw_mode(0o640)).expect("a file"))
        };
        let by_number = |file: &fs::File, name: &str| {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            rustix::fs::linkat(rustix::fs::CWD, path, rustix::fs::CWD, mounted.at.join(name), AtFlags::SYMLINK_FOLLOW)
        };
        let by_descriptor = |file: &fs::File, name: &str| {
            rustix::fs::linkat(file, "", rustix::fs::CWD, mounted.at.join(name), AtFlags::EMPTY_PATH)
        };
        let (first, second, exclusive) = (open(OFlags::empty()), open(OFlags::empty()), open(OFlags::EXCL));
        for (file, text) in [(&first, "first"), (&second, "second"), (&exclusive, "exclusive")] {
            file.write_all_at(text.as_bytes(), 0).expect("written");
            let metadata = file.metadata().expect("attributes");
            assert_eq!((metadata.nlink(), metadata.mode(), metadata.len()), (0, 0o100_640, text.len() as u64));
        }
        assert_eq!(fs::read_dir(&mounted.at).expect("a listing").count(), 0);
        by_number(&first, "by-number").expect("linked");
        by_descriptor(&second, "by-descriptor").expect("linked");
        assert_eq!(by_number(&exclusive, "never"), Err(rustix::io::Errno::NOENT));
        assert_eq!(by_descriptor(&exclusive, "never"), Err(rustix::io::Errno::NOENT));
        for (file, name, text) in [(first, "by-number", "first"), (second, "by-descriptor", "second")] {
            let found = fs::metadata(mounted.at.join(name)).expect("a name");
            assert_eq!((found.nlink(), found.ino()), (1, file.metadata().expect("attributes").ino()));
            drop(file);
            assert_eq!(fs::read(mounted.at.join(name)).expect("readable"), text.as_bytes());
        }
        drop(exclusive);
        assert_eq!(fs::read_dir(&mounted.at).expect("a listing").count(), 2);
        let missing = rustix::fs::open(mounted.at.join("none"), OFlags::TMPFILE | OFlags::RDWR, Mode::empty());
        assert_eq!(missing.err(), Some(rustix::io::Errno::NOENT));
    });
}

#[test]
fn statx_tells_what_stat_does() {
    isolated("kernel::statx_tells_what_stat_does", |folder| {
        let mounted = Mounted::new(folder);
        fs::write(mounted.at.join("f"), b"seven b").expect("write");
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let stat = rustix::fs::statx(rustix::fs::CWD, mounted.at.join("f"), AtFlags::empty(), wanted).expect("statx");
        assert_eq!((stat.stx_size, stat.stx_mask & StatxFlags::BTIME.bits()), (7, 0));
        let metadata = fs::metadata(mounted.at.join("f")).expect("stat");
        assert_eq!((stat.stx_ino, u32::from(stat.stx_mode)), (metadata.ino(), metadata.mode()));
        assert_eq!(
            (stat.stx_mtime.tv_sec, i64::from(stat.stx_mtime.tv_nsec)),
            (metadata.mtime(), metadata.mtime_nsec())
        );
    });
}
