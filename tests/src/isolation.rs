//! Running a test in namespaces of its own.

use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const INSIDE: &str = "POOLFS_TEST_INSIDE";

/// Gives a mount namespace sockets of its own, which must not outlive a test that is killed. All of `/run`, because a mount on
/// `/run/poolfs` itself would go when somebody outside removes that directory, as the last command of a pool does.
pub const PRIVATE_RUN: &str = "mount -t tmpfs poolfs-test /run && mkdir /run/poolfs";

/// Longest run of one test.
const LIMIT: Duration = Duration::from_secs(600);

/// Runs `body` in new mount, process and IPC namespaces, given a folder on the disk for its files. `name` is the name
/// of the test function that calls this; when the body ends, fails or takes more than ten minutes, everything it started is
/// killed and everything it mounted is gone.
///
/// # Panics
/// When the body does.
pub fn isolated(name: &str, body: impl FnOnce(&Path)) {
    if let Some(folder) = std::env::var_os(INSIDE) {
        let _ = crate::shell(PRIVATE_RUN).expect("a private /run/poolfs");
        body(Path::new(&folder));
        return;
    }
    let folder = tempfile::Builder::new().prefix("poolfs-test-").tempdir().expect("a temporary folder");
    // The namespaces end with this process, however it ends.
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "unshare"])
        .args(["--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"])
        .arg(std::env::current_exe().expect("the test's own path"))
        .args(["--exact", name, "--nocapture", "--test-threads", "1"])
        .env(INSIDE, folder.path())
        .process_group(0);
    let mut child = command.spawn().expect("unshare (package util-linux) runs");
    let outcome = catch_unwind(AssertUnwindSafe(|| wait(&mut child)));
    remove_control_groups(folder.path());
    match outcome {
        Ok(true) => {}
        Ok(false) => panic!("{name} failed in its namespaces, see above"),
        Err(_) => panic!("{name} did not end within {} s", LIMIT.as_secs()),
    }
}

fn wait(child: &mut Child) -> bool {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(status) = child.try_wait().expect("the child is ours") {
            return status.success();
        }
        if Instant::now() > deadline {
            // --kill-child ends the first process of the namespace, and with it all others.
            child.kill().expect("the child is ours");
            child.wait().expect("the child is ours");
            panic!("out of time");
        }
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

/// Control groups are no part of a namespace. Pools of a test carry the name of its folder.
fn remove_control_groups(folder: &Path) {
    let mark = crate::pool::name_of(folder);
    let mut found = Vec::new();
    collect(Path::new("/sys/fs/cgroup"), 6, &mark, &mut found);
    for group in found.iter().rev() {
        for _ in 0..50 {
            // Processes of a killed namespace take a moment to leave their group.
            if std::fs::remove_dir(group).is_ok() || !group.exists() {
                break;
            }
            std::thread::park_timeout(Duration::from_millis(20));
        }
        // The folder common to all pools goes with the last of them.
        if let Some(common) = group.parent() {
            let _ = std::fs::remove_dir(common);
        }
    }
}

fn collect(folder: &Path, depth: u32, mark: &str, found: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) && depth > 0 {
            if path.to_string_lossy().contains(mark) {
                found.push(path.clone());
            }
            collect(&path, depth - 1, mark, found);
        }
    }
}
