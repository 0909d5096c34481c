//! The filesystems a suite runs on, and the execution of one run.

use crate::suite::Suite;
use poolfs_tests::{Mounted, PRIVATE_RUN, Pool, Way, populate, run, run_within, shell, workspace};
use serde_json::json;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Where a run says how it went, in its folder; beside it are the script's outputs (`out`, `err`) and the service's `log`.
pub const RESULT: &str = "result.json";

/// The cache of the pools: small enough that the suites exceed it.
const CACHE: &str = "256M";

/// What a suite can run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// the machine's own filesystem
    Disk,
    /// the kernel's overlayfs over it
    Overlayfs,
    /// the same by FUSE
    FuseOverlayfs,
    /// a union of poolfs, by the kernel
    Fuse,
    /// a union of poolfs, by the library
    Library,
}

impl Target {
    const ALL: [(&'static str, Self); 5] = [
        ("disk", Self::Disk),
        ("overlayfs", Self::Overlayfs),
        ("fuse-overlayfs", Self::FuseOverlayfs),
        ("fuse", Self::Fuse),
        ("library", Self::Library),
    ];

    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, target)| *target)
    }

    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, target)| *target == self).map_or("?", |(name, _)| name)
    }
}

/// How a script ended, and how many requests of the library its run took.
struct Run {
    outcome: poolfs_tests::Outcome,
    seconds: f64,
    requests: u64,
}

/// One run, in the namespaces of this process; `folder` is its own, on the disk.
///
/// # Panics
/// When it cannot be prepared or cleaned up.
pub fn run_inside(suite: &Suite, target: Target, folder: &Path) {
    let _ = shell(PRIVATE_RUN).expect("a private /run/poolfs");
    let run = match (target, suite.in_container) {
        (Target::Disk, false) => on_disk(suite, folder),
        (Target::Disk, true) => in_chroot(suite, folder),
        (Target::Overlayfs | Target::FuseOverlayfs, _) => on_overlay(suite, target, folder),
        (Target::Fuse, false) => on_union(suite, Way::Fuse, folder),
        (Target::Library, false) => on_union(suite, Way::Library, folder),
        (Target::Fuse, true) => in_container(suite, Way::Fuse, folder),
        (Target::Library, true) => in_container(suite, Way::Library, folder),
    };
    let Run { outcome, seconds, requests } = run;
    let result = json!({ "code": outcome.code, "text": outcome.out, "seconds": seconds, "requests": requests });
    fs::write(folder.join(RESULT), result.to_string()).expect("the result fits on the disk");
}

/// The suite's command, but for what stands before it.
fn script(suite: &Suite, command: &mut Command, work: &Path) {
    command
        .args(["sh", "-eu"])
        .arg(&suite.script)
        .current_dir(work)
        .env("W", work)
        .env("SUITES", workspace().join("tests/suites"))
        .env("WORKSPACE", workspace());
}

/// Runs the suite, and writes its outputs at once: what comes afterwards may fail.
fn timed(suite: &Suite, mut command: Command, work: &Path, folder: &Path) -> Run {
    let begun = Instant::now();
    let mut outcome = run_within(&mut command, suite.limit);
    outcome.out = outcome.out.replace(&work.display().to_string(), "$W");
    fs::write(folder.join("out"), &outcome.out).expect("the outputs fit on the disk");
    fs::write(folder.join("err"), &outcome.err).expect("the outputs fit on the disk");
    Run { outcome, seconds: begun.elapsed().as_secs_f64(), requests: 0 }
}

/// A working directory in `branch`, with what the suite prepares there.
fn prepare(suite: &Suite, branch: &Path) {
    let work = branch.join("work");
    fs::create_dir_all(&work).expect("a folder");
    if suite.prepares {
        let mut command = Command::new("env");
        script(suite, &mut command, &work);
        let _ = run_within(command.arg("prepare"), suite.limit).expect("what the suite prepares");
    }
}

fn on_disk(suite: &Suite, folder: &Path) -> Run {
    let branch = folder.join("disk");
    prepare(suite, &branch);
    let work = branch.join("work");
    let mut command = Command::new("env");
    script(suite, &mut command, &work);
    timed(suite, command, &work, folder)
}

fn on_overlay(suite: &Suite, target: Target, folder: &Path) -> Run {
    for name in ["lower", "upper", "state", "mnt"] {
        fs::create_dir_all(folder.join(name)).expect("a folder");
    }
    prepare(suite, &folder.join("lower"));
    let place = folder.display();
    let options = format!("lowerdir={place}/lower,upperdir={place}/upper,workdir={place}/state");
    let mount = folder.join("mnt");
    let mut command = Command::new(if target == Target::Overlayfs { "mount" } else { "fuse-overlayfs" });
    if target == Target::Overlayfs {
        command.args(["-t", "overlay", "overlay"]);
    }
    let _ = run(command.arg("-o").arg(options).arg(&mount)).expect("an overlay");
    let work = mount.join("work");
    let mut command = Command::new("env");
    script(suite, &mut command, &work);
    let run = timed(suite, command, &work, folder);
    let _ = shell(&format!("umount {}", mount.display())).expect("umount");
    run
}

fn on_union(suite: &Suite, way: Way, folder: &Path) -> Run {
    let lower = folder.join("lower");
    populate(&lower);
    prepare(suite, &lower);
    let upper = folder.join("upper");
    fs::create_dir_all(&upper).expect("a folder");
    fs::set_permissions(&upper, fs::Permissions::from_mode(0o755)).expect("a mode");
    let pool = Pool::create(folder, CACHE);
    let mount: Mounted = pool.mount_union(&folder.join("mnt"), &upper, &[&lower]);
    let work = mount.path().join("work");
    let mut command = pool.command();
    command.args(["exec", pool.name()]);
    if way == Way::Fuse {
        command.arg("--legacy");
    }
    script(suite, command.arg("--").arg("env"), &work);
    let mut run = timed(suite, command, &work, folder);
    let _ = fs::write(folder.join("log"), format!("{}\n{}", pool.service_log(), pool.status()));
    run.requests = pool.operations(Way::Library);
    end_users_of(mount.path());
    drop(mount);
    run
}

/// Ends what a script left running in its working directory (CPython's tests do), and says what it was.
fn end_users_of(mount: &Path) {
    let uses = |process: &Path| {
        let links = fs::read_dir(process.join("fd")).into_iter().flatten().flatten().map(|entry| entry.path());
        links.chain([process.join("cwd")]).any(|link| fs::read_link(link).is_ok_and(|to| to.starts_with(mount)))
    };
    for entry in fs::read_dir("/proc").expect("/proc").flatten().filter(|entry| uses(&entry.path())) {
        let number = entry.file_name().to_string_lossy().parse().ok().and_then(rustix::process::Pid::from_raw);
        let Some(pid) = number.filter(|pid| *pid != rustix::process::getpid()) else { continue };
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        println!("left running: {} ({})", pid, String::from_utf8_lossy(&command).replace('\0', " "));
        // It may have ended meanwhile.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        let gone = || !entry.path().join("exe").exists();
        for _ in 0..100 {
            if gone() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
}

/// The root file system that `make run` uses.
fn root_image() -> PathBuf {
    workspace().join(".poolfs-demo/root.tar")
}

/// The script is a container's program, given as text: the container sees no file of this machine.
fn container_script(suite: &Suite) -> String {
    fs::read_to_string(&suite.script).expect("the suite's script")
}

fn in_chroot(suite: &Suite, folder: &Path) -> Run {
    let root = folder.join("root");
    fs::create_dir_all(&root).expect("a folder");
    let place = root.display();
    let _ = run(Command::new("tar").arg("-C").arg(&root).args(["--xattrs", "-xpf"]).arg(root_image())).expect("tar");
    let _ = shell(&format!(
        "mount -t proc proc {place}/proc; mount --rbind /dev {place}/dev; cp -L /etc/resolv.conf {place}/etc/resolv.conf"
    ))
    .expect("what a chroot needs");
    let mut command = Command::new("chroot");
    command.arg(&root).args([
        "env",
        "-i",
        "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
        "sh",
        "-euc",
        &container_script(suite),
    ]);
    timed(suite, command, Path::new("/nowhere"), folder)
}

fn in_container(suite: &Suite, way: Way, folder: &Path) -> Run {
    let pool = Pool::create(folder, CACHE);
    let _ = pool.poolfs(&["image", "import", "suite", &format!("tar:{}", root_image().display())]).expect("import");
    let mut command = pool.command();
    command.args(["run", pool.name(), "suite", "--name", "suite", "--env", "POOLFS_TRACE=/run/poolfs-trace"]);
    if way == Way::Fuse {
        command.arg("--legacy");
    }
    // What was mounted for a container, and its counts, are gone when it ends: its processes tell of their requests.
    let sum = "test ! -e /run/poolfs-trace || sed 's/.*library=\\([0-9]*\\).*/requests \\1/' /run/poolfs-trace >&2";
    command.args(["--", "sh", "-euc", &format!("{}\n{sum}", container_script(suite))]);
    let mut run = timed(suite, command, Path::new("/nowhere"), folder);
    let told = run.outcome.err.lines().filter_map(|line| line.strip_prefix("requests ")?.parse::<u64>().ok());
    run.requests = told.sum();
    let _ = fs::write(folder.join("log"), pool.service_log());
    let _ = pool.poolfs(&["rm", "--force", "suite"]).expect("rm");
    let _ = pool.poolfs(&["image", "rm", "suite"]).expect("image rm");
    run
}
