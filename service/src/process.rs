//! Process setup: its configuration, the pool's CPUs, descriptors, signals.

use crate::confinement;
use crate::control::{self, ControlSocket};
use crate::failures::ServiceError;
use crate::guard;
use crate::memory::group::MemoryGroup;
use crate::service::Service;
use crate::stack;
use anyhow::{Context, bail, ensure};
use nix::sys::signal::{SigSet, Signal};
use poolfs_service_protocol::{Answer, ServiceConfig, is_valid_name};
use rustix::process::{Resource, Rlimit};
use rustix::thread::CpuSet;
use std::fs::DirBuilder;
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread;
use tracing::{info, warn};

/// Most bytes of a configuration.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Reads and checks a configuration.
///
/// # Errors
/// What is wrong with it, by name.
pub fn read_config(input: impl Read) -> anyhow::Result<ServiceConfig> {
    let mut text = Vec::new();
    input.take(CONFIG_BYTES_MAX).read_to_end(&mut text).context("reading the configuration from standard input")?;
    let config: ServiceConfig =
        serde_json::from_slice(&text).context("the configuration on standard input is not a ServiceConfig")?;
    ensure!(is_valid_name(&config.pool), "\"{}\" is no name for a pool", config.pool);
    ensure!(!config.cpus.is_empty(), "the pool has no CPUs; give at least one");
    if let Some(cpu) = config.cpus.iter().find(|&&cpu| cpu as usize >= CpuSet::MAX_CPU) {
        bail!("there is no CPU {cpu}; the highest is {}", CpuSet::MAX_CPU - 1);
    }
    for path in [&config.control_socket, &config.socket_directory] {
        ensure!(path.is_absolute(), "{} is not absolute; give the whole path", path.display());
    }
    Ok(config)
}

fn prepare(config: &ServiceConfig) -> anyhow::Result<()> {
    // There is only this thread yet: the others begin where it is.
    for file in &config.entrances {
        std::fs::write(file, "0").with_context(|| format!("entering a control group by {}", file.display()))?;
    }
    let mut cpus = CpuSet::new();
    config.cpus.iter().for_each(|&cpu| cpus.set(cpu as usize));
    rustix::thread::sched_setaffinity(None, &cpus)
        .with_context(|| format!("running on the CPUs {:?}; are they online and in the cpuset?", config.cpus))?;
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    rustix::process::setrlimit(Resource::Nofile, raised).context("raising the limit of open files")?;
    // Modes are decided by the callers' umasks, never by ours. What the service makes itself while it serves is its owner's alone
    // (the cache's memory, archives) or is given its mode afterwards (sockets, the memory of sessions), so that a thread may have the umask
    // of whoever it worked for last.
    rustix::process::umask(rustix::fs::Mode::empty());
    stack::leave_umasks();
    Ok(())
}

/// The control group by which its memory is watched, if it can be.
fn memory_group(place: &Path) -> Option<MemoryGroup> {
    let opened = MemoryGroup::open(place);
    opened.inspect_err(|error| warn!(place = %place.display(), %error, "its memory is not watched")).ok()
}

/// Runs a service until it is told to end.
///
/// # Errors
/// When it cannot start; nothing is left behind then.
pub fn run(config: ServiceConfig) -> anyhow::Result<()> {
    let ending = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    ending.thread_block().context("blocking signals")?;
    prepare(&config)?;
    for directory in config.control_socket.parent().into_iter().chain([config.socket_directory.as_path()]) {
        // The modes do not come from a umask: see `prepare`.
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(directory)
            .with_context(|| format!("making {}", directory.display()))?;
    }
    let guard = guard::start().context("starting the guard of its mounts")?;
    let socket = ControlSocket::bind(&config.control_socket)
        .with_context(|| format!("listening at {}", config.control_socket.display()))?;
    // From here on there is nothing at its place.
    let group = config.memory_group.as_deref().and_then(memory_group);
    confinement::enter(Some(&config.socket_directory))?;
    let service = Arc::new(Service::new(config, group)?);
    service.watch_mounts().context("watching mounts")?;
    info!(pool = service.config().pool, "serving");

    let (shutdown, asked) = sync_channel::<Option<UnixStream>>(1);
    let by_signal = shutdown.clone();
    thread::Builder::new().name("signals".into()).spawn(move || {
        while let Ok(signal) = ending.wait() {
            info!(%signal, "ending");
            let _ = by_signal.try_send(None);
        }
    })?;
    let socket = Arc::new(socket);
    let (listening, serving) = (Arc::clone(&socket), Arc::clone(&service));
    thread::Builder::new().name("listen".into()).spawn(move || listening.serve(&serving, &shutdown))?;

    let asked_by = asked.recv().ok().flatten();
    let ended = service.shut_down();
    guard.end();
    socket.remove();
    if let Some(stream) = asked_by {
        let failed = |error: ServiceError| error.answer();
        // Who asked may be gone: what was lost is in the log as well.
        let _ = control::answer(&stream, &ended.map_or_else(failed, |()| Answer::Done));
    }
    info!("ended");
    Ok(())
}
