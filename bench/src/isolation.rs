//! Runs a measurement in namespaces of its own and cleans up after it, even when it fails or is interrupted.
//!
//! Whatever it mounts and starts ends with the namespaces. What no namespace holds (its folder, its control groups) is removed by a process
//! that outlives it.

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, mount};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

/// Tells a process that it is inside, and how its pools are to be called.
const INSIDE: &str = "POOLFS_BENCH_INSIDE";

/// How often what cannot be removed yet is tried again, and the pause between.
const ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(20);

/// The name of this measurement's pools; none outside of its namespaces.
pub fn pool_name() -> Option<String> {
    std::env::var(INSIDE).ok()
}

/// Runs this program with the same arguments in new mount, process and IPC namespaces, and removes `work` when it has ended.
pub fn run(work: &Path) -> Result<ExitCode> {
    let program = std::env::current_exe()?;
    std::fs::create_dir_all(work)?;
    let name = format!("bench-{}", std::process::id());
    // It learns of this process's end, of whatever kind, by the end of its input.
    let mut remover = Command::new(&program)
        .args(["remove-left", &name])
        .arg(std::fs::canonicalize(work)?)
        .stdin(Stdio::piped())
        .process_group_of_its_own()
        .spawn()?;
    let status = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "unshare"])
        .args(["--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"])
        .arg(&program)
        .args(std::env::args_os().skip(1))
        .env(INSIDE, &name)
        .process_group_of_its_own()
        .status();
    drop(remover.stdin.take());
    remover.wait()?;
    let code = status.context("cannot start setpriv (package util-linux)")?.code();
    Ok(code.and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

trait Apart {
    fn process_group_of_its_own(&mut self) -> &mut Self;
}

impl Apart for Command {
    /// What interrupts this process from a terminal does not reach the child.
    fn process_group_of_its_own(&mut self) -> &mut Self {
        std::os::unix::process::CommandExt::process_group(self, 0)
    }
}

/// Gives the namespaces sockets of their own. All of `/run`, because a mount on `/run/poolfs` itself would go when somebody outside
/// removes that directory, as the last command of a pool does.
pub fn enter() -> Result<()> {
    mount("poolfs-bench", "/run", "tmpfs", MountFlags::empty(), None).context("a /run of its own")?;
    Ok(std::fs::create_dir("/run/poolfs")?)
}

/// Waits until the input ends, and removes the folder and the control groups of the pools that begin with `name`.
pub fn remove_left(name: &str, work: &Path) -> Result<()> {
    std::io::stdin().read_to_end(&mut Vec::new())?;
    let mut groups = Vec::new();
    collect(Path::new("/sys/fs/cgroup"), 6, name, false, &mut groups);
    for group in groups.iter().rev() {
        // Processes of a killed namespace take a moment to leave their group.
        again_and_again(|| std::fs::remove_dir(group));
        // The folder common to all pools goes with the last of them.
        if let Some(common) = group.parent() {
            let _ = std::fs::remove_dir(common);
        }
    }
    if !again_and_again(|| std::fs::remove_dir_all(work)) {
        eprintln!("{} could not be removed", work.display());
    }
    Ok(())
}

fn again_and_again(mut remove: impl FnMut() -> std::io::Result<()>) -> bool {
    for _ in 0..ATTEMPTS {
        match remove() {
            Ok(()) => return true,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return true,
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
    false
}

/// The groups of pools with this name or one that it begins, and those inside, parents first.
fn collect(folder: &Path, depth: u32, name: &str, inside: bool, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if depth == 0 || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let own = inside || belongs(&entry.file_name().to_string_lossy(), name);
        if own {
            found.push(path.clone());
        }
        collect(&path, depth - 1, name, own, found);
    }
}

fn belongs(group: &str, name: &str) -> bool {
    group.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_measurements_own_groups_are_found() {
        let place = tempfile::tempdir().expect("a directory");
        for folder in ["a/poolfs/bench-7/containers/x", "a/poolfs/bench-7-one", "b/bench-77/x", "a/poolfs/other"] {
            std::fs::create_dir_all(place.path().join(folder)).expect("a folder");
        }
        let mut found = Vec::new();
        collect(place.path(), 6, "bench-7", false, &mut found);
        let mut names: Vec<_> = found.iter().map(|path| path.strip_prefix(place.path()).expect("inside")).collect();
        names.sort();
        let wanted = [
            "a/poolfs/bench-7",
            "a/poolfs/bench-7/containers",
            "a/poolfs/bench-7/containers/x",
            "a/poolfs/bench-7-one",
        ];
        let mut wanted = wanted.map(Path::new);
        wanted.sort();
        assert_eq!(names, wanted);
    }
}
