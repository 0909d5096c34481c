//! Supervision of a container by one process, from mounting its root to unmounting it.

use crate::container::record::{ContainerRecord, ContainerState};
use crate::container::runtime::Runtime;
use crate::container::spec::{self, Library, Wanted};
use crate::container::user;
use crate::context::{Context, SHOWN_ROOTS};
use crate::failure::{Failure, Result};
use crate::mount::{self, is_recorded, mount_instance};
use crate::record::{PoolRecord, ProcessRecord};
use crate::service;
use crate::signals::{self, Signals, status_code};
use crate::state::Locked;
use crate::text::{complain, pasted};
use crate::unmount::unmount_flushed;
use crate::waiting;
use poolfs_host::{ControlGroups, GroupLayout, mount_table, remove_tree};
use poolfs_image::ImageConfig;
use poolfs_service_protocol::{MountSpec, StackSpec, UnmountMode};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

/// The request to end, by signal, at which a container in the foreground is killed: its first process ignores them.
const KILLING_REQUEST: u32 = 3;
/// Longest wait for a container's killed processes to be gone.
const KILL_WAIT: Duration = Duration::from_secs(10);

/// The directories and files of a container.
pub struct Places {
    /// Its upper branch.
    pub upper: PathBuf,
    /// Where its root is mounted.
    pub root: PathBuf,
    /// The bundle, and the files that are mounted into it.
    pub bundle: PathBuf,
    /// What it wrote when it ran detached.
    pub log: PathBuf,
}

impl Places {
    /// Of the container whose directory this is.
    pub fn of(directory: &Path) -> Places {
        Places {
            upper: directory.join("upper"),
            root: directory.join("rootfs"),
            bundle: directory.join("bundle"),
            log: directory.join("log"),
        }
    }
}

/// What was asked for and is needed once only.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// The image's configuration.
    pub image: ImageConfig,
    /// Variables that were asked for.
    pub env: Vec<String>,
    /// Whether its command runs under an init process.
    #[serde(default)]
    pub init: bool,
}

/// Run a container to its end and clean up after it; its exit status. `connect` gives the runtime its input and output,
/// `started` is called when the first process runs.
pub fn run(
    context: &Context,
    name: &str,
    start: &Start,
    signals: &mut Signals,
    connect: impl FnOnce(&mut Command) -> Result<()>,
    started: impl FnOnce(),
) -> Result<u8> {
    let result =
        mount_root(context, name).and_then(|spec| run_mounted(context, name, start, &spec, signals, connect, started));
    let code = result.as_ref().map_or_else(Failure::status, |code| *code);
    let cleaned = lock(context, name).and_then(|own| finish(context, own, Some(code), UnmountMode::Detached));
    result.and_then(|code| cleaned.map(|()| code))
}

fn lock(context: &Context, name: &str) -> Result<Locked<ContainerRecord>> {
    context.containers()?.lock(name)
}

/// What a container's root is made of, and where it is mounted.
pub fn root_of(context: &Context, container: &Locked<ContainerRecord>) -> Result<mount::Wanted> {
    let places = Places::of(container.path());
    let lowers = container.record.lowers(&context.images()?);
    Ok(mount::Wanted {
        mount_point: places.root,
        stack: StackSpec::Union {
            upper: container.record.upper.clone().unwrap_or(places.upper),
            lowers,
            storage: container.record.storage,
            immutable_lowers: false,
        },
        owner: None,
        container: Some(container.record.name.clone()),
        ids: container.record.userns.clone(),
        transport: container.record.transport,
        wait_for_writes: container.record.wait_for_writes,
        timeout: container.record.timeout,
        suid: true,
        devices: true,
        ceph: container.record.ceph.as_deref().cloned(),
        is_store: false,
    })
}

fn mount_root(context: &Context, name: &str) -> Result<MountSpec> {
    let mut container = lock(context, name)?;
    let (wanted, pool) = (root_of(context, &container)?, container.record.pool.clone());
    container.record.monitor = ProcessRecord::of(&*context.host, std::process::id());
    container.note()?;
    // Others find in the record who starts it; the service may take long to look at its branches.
    drop(container);
    let spec = mount_instance(context, &pool, wanted)?;
    let mut container = lock(context, name)?;
    container.record.instance = Some(spec.instance.clone());
    container.note()?;
    Ok(spec)
}

fn run_mounted(
    context: &Context,
    name: &str,
    start: &Start,
    spec: &MountSpec,
    signals: &mut Signals,
    connect: impl FnOnce(&mut Command) -> Result<()>,
    started: impl FnOnce(),
) -> Result<u8> {
    let containers = context.containers()?;
    let record: ContainerRecord = containers.peek(name)?.ok_or_else(|| containers.absent(name))?;
    let places = Places::of(&containers.path(name));
    let shown_root = record.userns.is_some().then(|| make_shown_root(context, &spec.instance)).transpose()?;
    let root = shown_root.as_deref().unwrap_or(&spec.mount_point);
    write_bundle(context, &record, start, spec, root, &places)?;
    let runtime = Runtime::find(context)?;
    let shown = shown_root.as_deref().map(|place| (spec.mount_point.as_path(), place));
    let mut command = runtime.run(context, &places.bundle, &spec.instance, shown);
    connect(&mut command)?;
    if signals.end_was_asked() {
        return Err(Failure::interrupted(format!("container {name}"), "it was asked to end before it began"));
    }
    let mut child = command.spawn().map_err(|error| Failure::host("OCI runtime", error, "apt-get install runc"))?;
    // The command holds the container's ends of pipes and terminals.
    drop(command);
    if let Err(failure) = await_start(context, &record.pool, &places.bundle, &mut child) {
        // What it has made so far goes with the rest.
        waiting::end_child(context, &mut child);
        return Err(failure.of(format!("container {name}")));
    }
    if Runtime::has_started(&places.bundle) {
        let mut container = lock(context, name)?;
        container.record.state = ContainerState::Running;
        // One that is to be kept must not be taken for one that never ran.
        if container.record.remove_at_end { container.note() } else { container.save() }?;
        started();
    }
    // It may run for hours.
    context.begin_anew();
    let status = signals.wait(&*context.host, &mut child, |asked| {
        match asked {
            _ if asked < KILLING_REQUEST => {
                let more = KILLING_REQUEST - asked;
                let times = if more == 1 { "once more".to_owned() } else { format!("{more} times more") };
                complain(&format!(
                    "poolfs: container {name} was asked to end, and may take its time; asked {times}, it is killed"
                ));
            }
            KILLING_REQUEST => {
                complain(&format!("poolfs: container {name} was asked to end {KILLING_REQUEST} times, and is killed"));
                kill(context, &record.pool, name, &runtime, &spec.instance)?;
            }
            // Who waits for a filesystem that does not answer cannot be ended.
            _ => {
                signals::forget_end();
                waiting::ping(context, &record.pool)?;
            }
        }
        Ok(())
    })?;
    context.begin_anew();
    Runtime::start_failure(&places.bundle, name, status).map_or_else(|| Ok(status_code(status)), Err)
}

/// Wait until the first process runs, or the runtime has ended.
fn await_start(context: &Context, pool: &str, bundle: &Path, child: &mut Child) -> Result<()> {
    let mut wait = context.patience.begin();
    while !Runtime::has_started(bundle) && child.try_wait().is_ok_and(|status| status.is_none()) {
        // Looked at in this order: a signal to what runs already is passed on later.
        if signals::end_came() && !Runtime::has_started(bundle) {
            return Err(Failure::interrupted("start", "it was asked to end before it began"));
        }
        if wait.is_half_over() {
            // It waits for its root.
            waiting::ping_within(context, pool, &wait)?;
            wait.heard();
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    wait.heard();
    Ok(())
}

/// End whatever a container runs.
fn kill(context: &Context, pool: &str, name: &str, runtime: &Runtime, instance: &str) -> Result<()> {
    if runtime.kill(instance, "KILL").is_err() {
        let groups = context.groups()?;
        groups.kill_container(&*context.host, pool, name, KILL_WAIT)?;
    }
    Ok(())
}

/// Take away everything of a container but its record, its upper branch and its log; or all, if that was asked for or it
/// never started. When what it wrote cannot be put on the disk, its root stays mounted unless `ending` gives that up.
pub fn finish(
    context: &Context,
    mut container: Locked<ContainerRecord>,
    code: Option<u8>,
    ending: UnmountMode,
) -> Result<()> {
    let name = container.record.name.clone();
    let name = name.as_str();
    let is_thrown_away = container.record.remove_at_end || container.record.state == ContainerState::Created;
    // What somebody else's directory was given stays.
    let ending = if is_thrown_away && container.record.upper.is_none() { UnmountMode::Discarded } else { ending };
    container.record.exit_code = code.or(container.record.exit_code);
    container.record.monitor = None;
    let mut result = Ok(());
    let pool_name = container.record.pool.clone();
    if let Some(record) = context.pools()?.peek::<PoolRecord>(&pool_name)?
        && let Some(instance) = container.record.instance.clone().or_else(|| instance_of(&record, name))
    {
        if let Ok(runtime) = Runtime::find(context) {
            runtime.delete(&instance);
        }
        // Absent is what is wanted.
        let _ = std::fs::remove_dir(shown_root(context, &instance));
        let groups = context.groups()?;
        let kill = || groups.kill_container(&*context.host, &pool_name, name, KILL_WAIT);
        let killed = kill();
        // Nobody writes any more.
        let flushed = if ending.is_forced() { Ok(()) } else { service::flush(context, &pool_name, &instance, false) };
        let is_left = match context.pools()?.try_lock::<PoolRecord>(&pool_name) {
            Ok(Some(mut pool)) => {
                result = unmount_flushed(context, &mut pool, &instance, ending, flushed);
                is_recorded(&pool, &instance)
            }
            Ok(None) => false,
            // What the flush said may never be said again.
            Err(failure) => return flushed.and(Err(failure)),
        };
        // What never was mounted holds nothing: the pool's next command forgets it.
        let was_mounted = container.record.state != ContainerState::Created || is_mounted(context, &container)?;
        if result.is_err() && is_left && was_mounted {
            container.record.state = ContainerState::Unwritten;
            // That is the failure to report, also when nothing can be saved any more.
            let _ = container.save();
            // Before anything else it has to answer.
            waiting::ping(context, &pool_name).map_err(|failure| failure.of(format!("container {name}")))?;
            let next = format!("`poolfs stop {name}`; `poolfs rm --force {name}` gives it up");
            return result.map_err(|failure| failure.of(format!("container {name}")).then(&next));
        }
        if killed.is_err() {
            // What waited for its filesystem to answer ends when that has gone.
            kill()?;
        }
    }
    let places = Places::of(container.path());
    remove_root(&places.root)?;
    remove_tree(&places.bundle)?;
    if is_thrown_away {
        return result.and(container.remove());
    }
    container.record.state = ContainerState::Ended;
    container.record.instance = None;
    result.and(container.save())
}

/// Whether something is mounted where the root of a container is to be.
fn is_mounted(context: &Context, container: &Locked<ContainerRecord>) -> Result<bool> {
    // Without links, as the mount table has it.
    let above = container.path().canonicalize().map_err(|error| Failure::file(container.path(), error))?;
    let root = Places::of(&above).root;
    Ok(mount_table(&*context.host)?.iter().any(|entry| entry.mount_point == root))
}

/// The instance that was mounted for a container by a command that was killed before it could note that.
fn instance_of(pool: &PoolRecord, container: &str) -> Option<String> {
    let found = pool.instances.iter().find(|instance| instance.container.as_deref() == Some(container));
    found.map(|instance| instance.spec.instance.clone())
}

/// Remove the mount point only, never what may still be mounted on it.
pub fn remove_root(root: &Path) -> Result<()> {
    match std::fs::remove_dir(root) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            let remedy = format!("`umount {}`, then try again", pasted(root));
            Err(Failure::file(root, error).with_remedy(remedy))
        }
        _ => Ok(()),
    }
}

/// Where a runtime finds the root of a container with a user namespace. The directories above the root are for the host's root
/// alone, which the runtime no longer is when it goes there. On the host nothing is mounted here: see [`Runtime::run`].
fn shown_root(context: &Context, instance: &str) -> PathBuf {
    context.run.join(SHOWN_ROOTS).join(instance)
}

fn make_shown_root(context: &Context, instance: &str) -> Result<PathBuf> {
    // Nobody takes it away meanwhile.
    let _run_directory = context.make_run_directory()?;
    let place = shown_root(context, instance);
    // Without links, as the mount table has it.
    std::fs::create_dir_all(&place).and_then(|()| place.canonicalize()).map_err(|error| Failure::file(&place, error))
}

fn write_bundle(
    context: &Context,
    record: &ContainerRecord,
    start: &Start,
    spec: &MountSpec,
    root: &Path,
    places: &Places,
) -> Result<()> {
    let user = user::look_up(context, &spec.mount_point, &start.image.user)?;
    if let Some(map) = &record.userns {
        user.check_known(map)?;
    }
    let library = if record.legacy {
        None
    } else {
        Some(Library { preload: context.preload_library()?, socket: spec.socket(&context.run) })
    };
    let init = start.init.then(|| context.init_program()).transpose()?;
    write_network_files(&places.bundle, record)?;
    let groups = context.groups()?;
    let specification = spec::specification(&Wanted {
        name: &record.name,
        root,
        command: &record.command,
        image: &start.image,
        env: &start.env,
        user: &user,
        tty: record.tty,
        group: ControlGroups::container_path(&record.pool, &record.name),
        memory_bytes: record.memory_bytes,
        files: &places.bundle,
        library,
        init: init.as_deref(),
        capabilities: own_capabilities(context),
        is_unified: matches!(groups.layout(), GroupLayout::V2(_)),
        userns: record.userns.as_ref(),
    });
    let path = places.bundle.join("config.json");
    std::fs::write(&path, specification.to_string()).map_err(|error| Failure::file(&path, error))
}

/// Name resolution as the host has it: containers use the host's network. The files are the container's.
fn write_network_files(bundle: &Path, record: &ContainerRecord) -> Result<()> {
    let name = &record.name;
    let of_host = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let hosts = format!("{}\n127.0.1.1\t{name}\n", of_host("/etc/hosts").trim_end());
    for (file, content) in
        [("hosts", hosts), ("hostname", format!("{name}\n")), ("resolv.conf", of_host("/etc/resolv.conf"))]
    {
        let path = bundle.join(file);
        std::fs::write(&path, content)
            .and_then(|()| std::os::unix::fs::chown(&path, record.host_root(), record.host_root()))
            .map_err(|error| Failure::file(&path, error))?;
    }
    Ok(())
}

/// The capabilities this process may pass on: its bounding set.
fn own_capabilities(context: &Context) -> u64 {
    let status = context.host.read_text(Path::new("/proc/self/status")).unwrap_or_default();
    let bounding = status.lines().find_map(|line| line.strip_prefix("CapBnd:"));
    bounding.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(u64::MAX)
}
