//! Runs a test in namespaces of its own.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const INSIDE: &str = "POOLFS_TEST_INSIDE";

/// Gives a mount namespace sockets of its own, which must not outlive a test that is killed. All of `/run`, because a mount on
/// `/run/poolfs` itself would go when somebody outside removes that directory, as the last command of a pool does.
pub const PRIVATE_RUN: &str = "mount -t tmpfs poolfs-test /run && mkdir /run/poolfs";

/// Longest run of one test.
const LIMIT: Duration = Duration::from_secs(1200);

/// Runs `body` in new mount, process and IPC namespaces, given a folder on the disk for its files. `name` is the name
/// of the test function that calls this; when the body ends, fails or takes more than twenty minutes, everything it started is
/// killed and everything it mounted is gone.
///
/// # Panics
/// When the body does.
pub fn isolated(name: &str, body: impl FnOnce(&Path)) {
    isolated_for(name, LIMIT, body);
}

/// As [`isolated`], with another limit.
///
/// # Panics
/// When the body does.
pub fn isolated_for(name: &str, limit: Duration, body: impl FnOnce(&Path)) {
    if let Some(folder) = std::env::var_os(INSIDE) {
        let _ = crate::shell(PRIVATE_RUN).expect("a private /run/poolfs");
        body(Path::new(&folder));
        return;
    }
    let folder = tempfile::Builder::new().prefix(&folder_prefix()).tempdir().expect("a temporary folder");
    let mut command = in_namespaces();
    command
        .arg(std::env::current_exe().expect("the test's own path"))
        .args(["--exact", name, "--nocapture", "--test-threads", "1"])
        .env(INSIDE, folder.path());
    match run_in_namespaces(&mut command, folder.path(), limit) {
        Some(0) => {}
        Some(_) => panic!("{name} failed in its namespaces, see above"),
        None => panic!("{name} did not end within {} s", limit.as_secs()),
    }
}

/// How the names of folders of tests begin: with the identifier of the run, by which `cargo xtask test` knows what it has left, as
/// pools, and with them control groups and sockets, have the name of their test's folder.
fn folder_prefix() -> String {
    std::env::var("POOLFS_RUN").map_or_else(|_| "poolfs-test-".to_owned(), |run| format!("poolfs-test-{run}-"))
}

/// Takes away what libraries get sessions by: programs that start from here on have none.
///
/// # Panics
/// When that is not possible.
pub fn remove_sockets() {
    let sockets = std::fs::read_dir("/run/poolfs").expect("readable").map(|entry| entry.expect("readable").path());
    for socket in sockets.filter(|path| path.extension().is_some_and(|extension| extension == "sock")) {
        std::fs::remove_file(socket).expect("removable");
    }
}

/// A command to which a program and its arguments are to be added: it runs in new mount, process and IPC namespaces, which end with
/// it, however it ends.
#[must_use]
pub fn in_namespaces() -> Command {
    let mut command = Command::new("setpriv");
    command
        // Whoever runs the tests in the background may ignore SIGINT, which everything that is started here would inherit.
        .args(["--pdeathsig", "KILL", "env", "--default-signal", "unshare"])
        .args(["--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"])
        // It reaps what is left to it: thousands of services, in a long run.
        .arg(crate::program("poolfs-init"))
        .process_group(0);
    command
}

/// Runs such a command and takes the control groups of its pools away, whose state is in `folder`. Its exit code (-1 when a signal
/// ended it), or nothing when it was killed after `limit`.
///
/// # Panics
/// When it does not start.
pub fn run_in_namespaces(command: &mut Command, folder: &Path, limit: Duration) -> Option<i32> {
    let mut child = command.spawn().expect("unshare (package util-linux) runs");
    let outcome = wait(&mut child, limit);
    remove_control_groups(folder);
    outcome
}

fn wait(child: &mut Child, limit: Duration) -> Option<i32> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().expect("the child is ours") {
            return Some(status.code().unwrap_or(-1));
        }
        if Instant::now() > deadline {
            // --kill-child ends the first process of the namespace, and with it all others.
            child.kill().expect("the child is ours");
            child.wait().expect("the child is ours");
            return None;
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
