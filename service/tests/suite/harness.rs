//! Test harness: starts, commands and ends a service; nothing is left behind, also when a test fails.

use crate::over_rings;
use poolfs_local::{Place, PrivateMount};
use poolfs_service_protocol::{
    ALLOCATOR, Answer, Command as Order, Lineage, MountSpec, ServiceConfig, ServiceStatus, StackSpec, UnmountMode,
};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

const INSIDE: &str = "POOLFS_SERVICE_TEST_INSIDE";
const PROGRAM: &str = env!("CARGO_BIN_EXE_poolfs-service");
/// What is waited for comes long before, also on a busy machine.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// What services say, by environment.
const LOG_LEVEL: &str = "POOLFS_LOG";

/// Runs `body` with a folder of its own, in new mount and process namespaces. `name` is the calling test's full name.
pub fn isolated(name: &str, body: impl FnOnce(&Path)) {
    if let Some(folder) = std::env::var_os(INSIDE) {
        return body(Path::new(&folder));
    }
    let _parameter = over_rings::leave_alone();
    let folder = tempfile::Builder::new().prefix("poolfs-service-").tempdir().expect("a temporary folder");
    // The namespaces end with this process, however it ends.
    let status = Command::new("setpriv")
        // What is ignored where the tests run is not ignored by what they start.
        .args(["--pdeathsig", "KILL", "env", "--default-signal", "unshare"])
        .args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"])
        .arg(std::env::current_exe().expect("the test's own path"))
        .args(["--exact", name, "--nocapture", "--test-threads", "1"])
        .env(INSIDE, folder.path())
        .status()
        .expect("setpriv and unshare (package util-linux) run");
    assert!(status.success(), "{name} failed in its namespaces, see above");
}

/// Waits until it is so; with `what` should have come.
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + WAIT_MAX;
    while !is_so() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A running `poolfs-service`.
pub struct Running {
    child: Child,
    config: ServiceConfig,
    folder: PathBuf,
}

impl Running {
    pub fn start(folder: &Path) -> Self {
        Self::start_with(folder, 64 << 20)
    }

    pub fn start_with(folder: &Path, cache_bytes: u64) -> Self {
        Self::start_saying(folder, cache_bytes, Stdio::inherit())
    }

    /// With so many descriptors.
    pub fn start_limited(folder: &Path, descriptors: u64) -> Self {
        let mut program = Command::new("prlimit");
        program.arg(format!("--nofile={descriptors}:{descriptors}")).arg(PROGRAM);
        Self::start_by(folder, 64 << 20, Stdio::inherit(), program)
    }

    /// What it says goes into a file.
    pub fn start_logging(folder: &Path, log: &Path) -> Self {
        Self::start_saying(folder, 64 << 20, File::create(log).expect("a file").into())
    }

    /// With what it says for its developers.
    pub fn start_telling(folder: &Path, log: &Path) -> Self {
        let mut program = Command::new(PROGRAM);
        program.env(LOG_LEVEL, "debug");
        Self::start_by(folder, 64 << 20, File::create(log).expect("a file").into(), program)
    }

    /// In a memory group, which it watches, with what it says in a file.
    pub fn start_in(folder: &Path, cache_bytes: u64, log: &Path, group: &Path) -> Self {
        let mut program = Command::new("sh");
        program.args(["-c", "echo $$ > \"$0\"/cgroup.procs && exec \"$1\""]).arg(group).arg(PROGRAM);
        program.env(LOG_LEVEL, "info");
        Self::start_watching(
            folder,
            cache_bytes,
            File::create(log).expect("a file").into(),
            program,
            Some(group.to_owned()),
        )
    }

    fn start_saying(folder: &Path, cache_bytes: u64, errors: Stdio) -> Self {
        Self::start_by(folder, cache_bytes, errors, Command::new(PROGRAM))
    }

    fn start_by(folder: &Path, cache_bytes: u64, errors: Stdio, program: Command) -> Self {
        Self::start_watching(folder, cache_bytes, errors, program, None)
    }

    fn start_watching(
        folder: &Path,
        cache_bytes: u64,
        errors: Stdio,
        program: Command,
        memory_group: Option<PathBuf>,
    ) -> Self {
        let config = ServiceConfig {
            pool: "pool".into(),
            entrances: Vec::new(),
            memory_group,
            cpus: vec![0],
            cache_bytes,
            control_socket: folder.join("run/control.sock"),
            socket_directory: folder.join("run"),
        };
        let child = spawn_by(program, &serde_json::to_string(&config).expect("serializable"), errors);
        let running = Self { child, config, folder: folder.to_owned() };
        let deadline = Instant::now() + WAIT_MAX;
        while UnixStream::connect(&running.config.control_socket).is_err() {
            assert!(Instant::now() < deadline, "the service does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        running
    }

    pub fn control_socket(&self) -> &Path {
        &self.config.control_socket
    }

    pub fn order(&self, order: &Order) -> Answer {
        let stream = UnixStream::connect(&self.config.control_socket).expect("the service listens");
        give(&stream, order);
        answer_of(&stream)
    }

    /// With other branches than those at its paths.
    pub fn order_with(&self, order: &Order, branches: &[OwnedFd]) -> Answer {
        self.send_with(&serde_json::to_string(order).expect("serializable"), branches)
    }

    pub fn send(&self, line: &str) -> Answer {
        self.send_with(line, &[])
    }

    fn send_with(&self, line: &str, branches: &[OwnedFd]) -> Answer {
        let stream = UnixStream::connect(&self.config.control_socket).expect("the service listens");
        transmit(&stream, line, branches);
        answer_of(&stream)
    }

    pub fn spec(&self, name: &str, stack: StackSpec) -> MountSpec {
        let mount_point = self.folder.join(format!("mnt-{name}"));
        // It may be there with a dead mount on it.
        let _ = std::fs::create_dir_all(&mount_point);
        MountSpec { devices: true, suid: true, ..MountSpec::new(name, mount_point, stack) }
    }

    pub fn mount(&self, name: &str, stack: StackSpec) -> PathBuf {
        let spec = self.spec(name, stack);
        let at = spec.mount_point.clone();
        assert_eq!(self.order(&Order::Mount(spec)), Answer::Done);
        over_rings::check(self.status().instances.iter().filter(|instance| instance.instance == name));
        at
    }

    pub fn mount_directory(&self, name: &str) -> (PathBuf, PathBuf) {
        let directory = make(&self.folder.join(format!("dir-{name}")));
        (self.mount(name, StackSpec::directory(directory.clone())), directory)
    }

    pub fn unmount(&self, name: &str) -> Answer {
        self.order(&Order::Unmount { instance: name.into(), ending: UnmountMode::Orderly })
    }

    pub fn status(&self) -> ServiceStatus {
        match self.order(&Order::Status) {
            Answer::Status(status) => *status,
            other => panic!("{other:?}"),
        }
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("alive");
        self.child.wait().expect("ours");
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + WAIT_MAX;
        loop {
            if let Some(status) = self.child.try_wait().expect("ours") {
                return status;
            }
            assert!(Instant::now() < deadline, "the service does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Private mounts of the branches at their paths; of what is not there, none.
pub fn private_mounts(stack: &StackSpec) -> Vec<OwnedFd> {
    let mount = |branch: poolfs_service_protocol::Branch<'_>| {
        let mount = PrivateMount::of(branch.name, branch.read_only).ok()?;
        Some(mount.as_fd().try_clone_to_owned().expect("a descriptor"))
    };
    stack.branches().into_iter().filter_map(mount).collect()
}

/// Where the branches at its paths lie; of what is not there, nothing.
fn lineages(stack: &StackSpec) -> Vec<Lineage> {
    let lineage = |branch: poolfs_service_protocol::Branch<'_>| Place::open(branch.name).ok()?.lineage().ok();
    stack.branches().into_iter().filter_map(lineage).collect()
}

/// Sends an order, and with it the branches at its paths.
pub fn give(stream: &UnixStream, order: &Order) {
    let mut order = order.clone();
    let branches = match &mut order {
        Order::Mount(spec) => {
            spec.lineages = lineages(&spec.stack);
            private_mounts(&spec.stack)
        }
        _ => Vec::new(),
    };
    transmit(stream, &serde_json::to_string(&order).expect("serializable"), &branches);
}

fn transmit(stream: &UnixStream, line: &str, branches: &[OwnedFd]) {
    let branches: Vec<_> = branches.iter().map(AsFd::as_fd).collect();
    poolfs_service_protocol::send(stream, format!("{line}\n").as_bytes(), &branches).expect("sent");
}

/// The next answer on a connection.
pub fn answer_of(stream: &UnixStream) -> Answer {
    let mut text = String::new();
    BufReader::new(stream).read_line(&mut text).expect("an answer");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// What a failure says, the remedy included.
pub fn message(answer: Answer) -> String {
    match answer {
        Answer::Failed { message, remedy, .. } => {
            [Some(message), remedy].into_iter().flatten().collect::<Vec<_>>().join("; ")
        }
        other => panic!("it should have failed: {other:?}"),
    }
}

/// Starts the service with this text as configuration.
pub fn spawn(config: &str, errors: Stdio) -> Child {
    spawn_by(Command::new(PROGRAM), config, errors)
}

fn spawn_by(mut program: Command, config: &str, errors: Stdio) -> Child {
    if !program.get_envs().any(|(name, _)| name == LOG_LEVEL) {
        program.env(LOG_LEVEL, "warn");
    }
    program.envs([ALLOCATOR]);
    let mut child = program.stdin(Stdio::piped()).stderr(errors).spawn().expect("the service starts");
    child.stdin.take().expect("a pipe").write_all(config.as_bytes()).expect("read by the service");
    child
}

pub fn make(folder: &Path) -> PathBuf {
    std::fs::create_dir_all(folder).expect("a folder");
    folder.to_owned()
}

/// The poolfs mounts below `folder`; the namespace may have begun with others.
pub fn mounts(folder: &Path) -> Vec<String> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").expect("readable");
    let own = folder.to_str().expect("UTF-8");
    table.lines().filter(|line| line.contains("fuse.poolfs") && line.contains(own)).map(str::to_owned).collect()
}
