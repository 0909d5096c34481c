//! Pools and mounts of a test, made through the command line as by a user.

use crate::{Outcome, program, run};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Which way a program's file operations go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// the preloaded library
    Library,
    /// the kernel, by FUSE
    Fuse,
}

impl std::fmt::Display for Way {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(if *self == Self::Library { "by the library" } else { "by FUSE" })
    }
}

/// A pool with state of its own.
pub struct Pool {
    name: String,
    folder: PathBuf,
    timeout_seconds: Option<u64>,
}

/// How long commands of a [`Pool::patient`] one wait for who does not answer, seconds: as long as a machine with much else to do may take.
const TIMEOUT_SECONDS: u64 = 300;

/// The name of the pools of the test with this folder.
#[must_use]
pub fn name_of(folder: &Path) -> String {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or("poolfs-test");
    name.replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "x")
}

impl Pool {
    /// Creates a pool with its state in `folder`.
    ///
    /// # Panics
    /// When the command fails.
    #[must_use]
    pub fn create(folder: &Path, cache: &str) -> Self {
        Self::with_memory(folder, "2G", cache)
    }

    /// The same, with so much memory for its service and its containers together.
    ///
    /// # Panics
    /// When the command fails.
    #[must_use]
    pub fn with_memory(folder: &Path, memory: &str, cache: &str) -> Self {
        Self::made(folder, name_of(folder), "0-1", memory, cache)
    }

    /// The same, on these CPUs.
    ///
    /// # Panics
    /// When the command fails.
    #[must_use]
    pub fn on_cpus(folder: &Path, cpus: &str, memory: &str, cache: &str) -> Self {
        Self::made(folder, name_of(folder), cpus, memory, cache)
    }

    /// The same, of another name: its test's with something added, by which its control groups are found.
    ///
    /// # Panics
    /// When the command fails.
    #[must_use]
    pub fn named(folder: &Path, name: &str, cache: &str) -> Self {
        Self::made(folder, name.to_owned(), "0-1", "2G", cache)
    }

    fn made(folder: &Path, name: String, cpus: &str, memory: &str, cache: &str) -> Self {
        let pool = Self { name, folder: folder.to_path_buf(), timeout_seconds: None };
        let _ = pool
            .poolfs(&["pool", "create", &pool.name, "--cpus", cpus, "--memory", memory, "--cache", cache])
            .expect("pool create");
        pool
    }

    /// The same, with commands that wait longer for who does not answer than a user's: of a test that says nothing of how long that is.
    #[must_use]
    pub fn patient(mut self) -> Self {
        self.timeout_seconds = Some(TIMEOUT_SECONDS);
        self
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A `poolfs` command with the test's own state.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(program("poolfs"));
        command.arg("--state").arg(self.folder.join("state")).arg("--run-dir").arg("/run/poolfs");
        if let Some(seconds) = self.timeout_seconds {
            command.arg("--wait").arg(seconds.to_string());
        }
        command
    }

    /// A command of one line, in which `POOL` is the pool and `@NAME` a path in the test's folder.
    #[must_use]
    pub fn line(&self, line: &str) -> Command {
        let place = format!("{}/", self.folder.display());
        let mut command = self.command();
        command.args(line.split(' ').map(|word| word.replace("POOL", &self.name).replace('@', &place)));
        command
    }

    /// Runs a `poolfs` command to its end.
    #[must_use]
    pub fn poolfs(&self, arguments: &[&str]) -> Outcome {
        run(self.command().args(arguments))
    }

    /// Mounts a directory.
    #[must_use]
    pub fn mount_directory(&self, at: &Path, directory: &Path) -> Mounted<'_> {
        self.mount(at, &["--dir", path(directory)])
    }

    /// Mounts a union.
    #[must_use]
    pub fn mount_union(&self, at: &Path, upper: &Path, lowers: &[&Path]) -> Mounted<'_> {
        let lowers: Vec<&str> = lowers.iter().map(|lower| path(lower)).collect();
        self.mount(at, &["--upper", path(upper), "--lower", &lowers.join(":")])
    }

    /// Mounts a union whose upper branch stores new sketches in a format.
    #[must_use]
    pub fn mount_stored(&self, at: &Path, upper: &Path, lower: &Path, format: &str) -> Mounted<'_> {
        self.mount(at, &["--upper", path(upper), "--lower", path(lower), "--upper-format", format])
    }

    /// Mounts what these arguments of the command say.
    ///
    /// # Panics
    /// When the command fails.
    #[must_use]
    pub fn mount(&self, at: &Path, stack: &[&str]) -> Mounted<'_> {
        std::fs::create_dir_all(at).expect("a mount point");
        let mut arguments = vec!["mount", &self.name, path(at)];
        arguments.extend_from_slice(stack);
        let _ = self.poolfs(&arguments).expect("mount");
        Mounted { pool: self, at: at.to_path_buf() }
    }

    /// What a command has mounted here, to be unmounted at its end.
    #[must_use]
    pub fn mounted(&self, at: &Path) -> Mounted<'_> {
        Mounted { pool: self, at: at.to_path_buf() }
    }

    /// Runs a shell script on the pool's cores, by the library or by the kernel.
    #[must_use]
    pub fn shell(&self, way: Way, script: &str) -> Outcome {
        let mut command = self.command();
        command.args(["exec", &self.name]);
        if way == Way::Fuse {
            command.arg("--fuse");
        }
        run(command.args(["--", "sh", "-euc", script]))
    }

    /// `poolfs status POOL --json`.
    ///
    /// # Panics
    /// When it fails or prints no JSON.
    #[must_use]
    pub fn status(&self) -> Value {
        let text = self.poolfs(&["status", &self.name, "--json"]).expect("status");
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("status --json: {error}\n{text}"))
    }

    /// Operations the pool's instances have served by this way.
    ///
    /// # Panics
    /// When its service does not say: that it is not asked or silent does not mean that it served nothing.
    #[must_use]
    pub fn operations(&self, way: Way) -> u64 {
        let key = if way == Way::Library { "library" } else { "fuse" };
        let status = self.status();
        assert_eq!(status["state"], "running", "no operations are told of: {status}");
        sum_counts(&status, key)
    }

    /// What the pool's service logged.
    #[must_use]
    pub fn service_log(&self) -> String {
        let path = self.folder.join("state/pools").join(&self.name).join("service.log");
        std::fs::read_to_string(&path).unwrap_or_else(|error| format!("{}: {error}", path.display()))
    }

    /// The service's process.
    ///
    /// # Panics
    /// When no service runs.
    #[must_use]
    pub fn service_pid(&self) -> i32 {
        let status = self.status();
        status["service"]["pid"].as_i64().unwrap_or_else(|| panic!("no service in {status}")) as i32
    }

    /// Kills the pool's service; it is gone when this returns.
    ///
    /// # Panics
    /// When none runs.
    pub fn kill_service(&self) {
        self.kill_service_after(|| {});
    }

    /// The same as soon as `moment` has come.
    ///
    /// # Panics
    /// When none runs.
    pub fn kill_service_after(&self, moment: impl FnOnce()) {
        let pid = Pid::from_raw(self.service_pid()).expect("a process");
        let process = pidfd_open(pid, PidfdFlags::empty()).expect("it runs");
        moment();
        kill_process(pid, Signal::KILL).expect("it is ours");
        assert_eq!(poll(&mut [PollFd::new(&process, PollFlags::IN)], None), Ok(1));
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // On a failure the namespaces end everything; a failing removal on success is seen by the leftovers check.
        if !std::thread::panicking() {
            let removed = self.poolfs(&["pool", "rm", &self.name]);
            assert_eq!(removed.code, 0, "pool rm: {}", removed.err);
        }
    }
}

/// A mount that is unmounted at the end of its scope.
pub struct Mounted<'a> {
    pool: &'a Pool,
    at: PathBuf,
}

impl Mounted<'_> {
    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.at
    }

    /// Leaves it mounted: the test unmounts it in its own way.
    pub fn keep(mut self) {
        self.at = PathBuf::new();
    }

    /// Unmounts and says how that went.
    #[must_use]
    pub fn unmount(mut self) -> Outcome {
        let at = std::mem::take(&mut self.at);
        self.pool.poolfs(&["umount", &self.pool.name, path(&at)])
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        if !self.at.as_os_str().is_empty() && !std::thread::panicking() {
            let _ = self.pool.poolfs(&["umount", &self.pool.name, path(&self.at)]).expect("umount");
        }
    }
}

fn path(path: &Path) -> &str {
    path.to_str().expect("paths of tests are text")
}

fn sum_counts(value: &Value, path_key: &str) -> u64 {
    match value {
        Value::Object(map) => map
            .iter()
            .map(|(key, inner)| match (key.as_str(), inner) {
                ("operations", Value::Object(paths)) => paths.get(path_key).map_or(0, |kinds| {
                    kinds.as_object().map_or(0, |kinds| {
                        kinds.values().filter_map(|kind| kind.get("count").and_then(Value::as_u64)).sum()
                    })
                }),
                _ => sum_counts(inner, path_key),
            })
            .sum(),
        Value::Array(items) => items.iter().map(|inner| sum_counts(inner, path_key)).sum(),
        _ => 0,
    }
}
