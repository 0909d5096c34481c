//! Runs tests in a virtual machine (QEMU, by interpretation) that has control groups of version 2 only.
//!
//! The machine has the kernel that `packaging/make-guest-kernel.sh` has fetched, and one disk, which is its root: the programs under test
//! at the places they have here, and what they need. Its first process is `programs/guest.c`.

use crate::image::{libraries, put};
use crate::{Pool, compile, program, run, small_root, workspace};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The variable that names the folder of a test's files in a guest.
const INSIDE: &str = "POOLFS_GUEST";
const FOLDER: &str = "/work";
const MEMORY_MIB: &str = "3072";
const DISK_BYTES: u64 = 4 << 30;
/// What the first process says last.
const END: &str = "guest: the test ended with ";

/// Runs `body` in a virtual machine, given a folder on its disk. `name` is the name of the test function that calls this; `prepare` puts into
/// the machine's root what the test needs besides `programs`.
///
/// # Panics
/// When the body does, or does not end within `limit`.
pub fn in_guest(name: &str, limit: Duration, programs: &[&str], prepare: impl FnOnce(&Path), body: impl FnOnce(&Path)) {
    if let Some(folder) = std::env::var_os(INSIDE) {
        body(Path::new(&folder));
        return;
    }
    let folder = tempfile::Builder::new().prefix("poolfs-guest-").tempdir().expect("a temporary folder");
    let root = folder.path().join("root");
    let paths: Vec<PathBuf> = programs.iter().map(|program| found(program)).collect();
    fs::create_dir(&root).expect("a folder");
    prepare(&root);
    small_root(&root, &paths.iter().map(PathBuf::as_path).collect::<Vec<_>>());
    let test = std::env::current_exe().expect("the test's own path");
    equip(&root, &test);
    let init = compile(folder.path(), "guest", true);
    fs::copy(init, root.join("init")).expect("the first process");
    let disk = folder.path().join("disk");
    fs::File::create(&disk).and_then(|file| file.set_len(DISK_BYTES)).expect("a disk");
    let mut make = Command::new("mke2fs");
    let _ = run(make.args(["-q", "-t", "ext4", "-d"]).args([&root, &disk])).expect("a filesystem");
    fs::remove_dir_all(&root).expect("removed");
    let console = boot(&disk, &folder.path().join("console"), &format!("{} {name} {FOLDER}", test.display()), limit);
    let ended = console.lines().find_map(|line| line.split_once(END)).map(|(_, code)| code.trim());
    assert_eq!(ended, Some("0"), "{name} failed in its virtual machine:\n{console}");
}

/// A program of this machine, by its name or its path.
fn found(program: &str) -> PathBuf {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut places = path.split(':').chain(["/usr/sbin", "/sbin"]).map(|place| Path::new(place).join(program));
    places.find(|path| path.is_file()).unwrap_or_else(|| panic!("{program} is missing: run `make packages` first"))
}

/// Puts what is tested, the test and the kernel's modules into a root.
fn equip(root: &Path, test: &Path) {
    let inside = |path: &Path| root.join(path.strip_prefix("/").expect("absolute"));
    let programs = ["poolfs", "poolfs-service", "poolfs-init", "libpoolfs_preload.so"].map(program);
    for path in programs.iter().map(PathBuf::as_path).chain([test]) {
        put(path, &inside(path));
        for library in libraries(path) {
            put(&library, &inside(&library));
        }
    }
    for module in ["fuse.ko", "loop.ko", "overlay.ko"] {
        put(&kernel().join("modules").join(module), &root.join("modules").join(module));
    }
    let folders = ["proc", "sys", "dev", "run", "var/lib/poolfs", "var/tmp"].map(|name| root.join(name));
    for folder in folders.iter().map(PathBuf::as_path).chain([inside(Path::new(FOLDER)).as_path()]) {
        fs::create_dir_all(folder).expect("a folder");
    }
}

fn kernel() -> PathBuf {
    let kernel = workspace().join(".poolfs-demo/guest");
    assert!(kernel.join("vmlinuz").exists(), "{} is missing: run `make test`", kernel.join("vmlinuz").display());
    kernel
}

/// Runs a machine until it switches itself off; what it has said.
fn boot(disk: &Path, console: &Path, arguments: &str, limit: Duration) -> String {
    let line = format!("console=ttyS0 quiet panic=-1 root=/dev/nvme0n1 rootfstype=ext4 rw init=/init -- {arguments}");
    let mut child = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2"])
        .args(["-m", MEMORY_MIB, "-display", "none", "-monitor", "none", "-nic", "none", "-no-reboot", "-kernel"])
        .arg(kernel().join("vmlinuz"))
        .args(["-append", &line, "-drive"])
        .arg(format!("file={},format=raw,if=none,id=disk,cache=writeback", disk.display()))
        .args(["-device", "nvme,drive=disk,serial=1", "-serial"])
        .arg(format!("file:{}", console.display()))
        .stdin(Stdio::null())
        .spawn()
        .expect("qemu-system-x86_64 (package qemu-system-x86) starts");
    let end = Instant::now() + limit;
    let said = || String::from_utf8_lossy(&fs::read(console).unwrap_or_default()).into_owned();
    while child.try_wait().expect("ours").is_none() {
        if Instant::now() > end {
            child.kill().expect("ours");
            child.wait().expect("ours");
            panic!("the virtual machine did not end within {} s:\n{}", limit.as_secs(), said());
        }
        std::thread::park_timeout(Duration::from_millis(100));
    }
    said()
}

/// The path of a process's control group, of version 2.
///
/// # Panics
/// When it has none, or has ended.
#[must_use]
pub fn group_of(pid: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("it lives");
    text.trim().strip_prefix("0::").unwrap_or_else(|| panic!("not of version 2: {text}")).to_owned()
}

/// A file of a pool's control group, of version 2.
///
/// # Panics
/// When it is not there.
#[must_use]
pub fn group_file(pool: &Pool, name: &str) -> String {
    let path = Path::new("/sys/fs/cgroup/poolfs").join(pool.name()).join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).trim().to_owned()
}
