//! The instances of a service: their table, and the steps that make and end one.

mod endings;

use crate::ends::Ends;
use crate::failures::ServiceError;
use crate::fuse::{FuseMount, detach_dead};
use crate::instance::Instance;
use crate::memory::MemoryWatch;
use crate::memory::group::MemoryGroup;
use crate::nodes::pruning::Pruner;
use crate::outside::{Deed, outside};
use crate::queue_front::{QueueFront, ServiceThreads};
use crate::shares::PoolShares;
use crate::spans::Tracer;
use crate::stack::crash_state::sweep;
use crate::stack::{Source, Stack, StackBuilder, received};
use crate::sync::lock;
use crate::underway::{Change, Changes, INSTANCES_MAX};
use endings::Left;
use poolfs_libservice::Headroom;
use poolfs_service_protocol::{
    Answer, Command, LOWERS_MAX, MountSpec, Place, ServiceConfig, ServiceStatus, StackSpec, is_valid_name,
};
use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Component, Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// After so long what could not be written back is tried once more, of an instance whose mount is gone.
const RETRY_WAIT: Duration = Duration::from_secs(10);

/// How long a command waits until what others have unmounted is on the disk.
const UNMOUNTED_WAIT: Duration = Duration::from_secs(5);

/// How long a service that begins waits for the branches of which dead ones have left something.
const SWEEP_WAIT: Duration = Duration::from_secs(5);

struct Mounted {
    instance: Arc<Instance>,
    mount: FuseMount,
    front: Arc<QueueFront>,
}

/// A running service.
pub struct Service {
    config: ServiceConfig,
    builder: StackBuilder,
    threads: Arc<ServiceThreads>,
    pruner: Arc<Pruner>,
    shares: Arc<PoolShares>,
    memory: Option<Arc<MemoryWatch>>,
    tracer: Arc<Tracer>,
    started: Instant,
    changes: Changes,
    instances: Mutex<BTreeMap<String, Mounted>>,
    /// Unmounted, but still used from other mount namespaces.
    lingering: Mutex<Vec<Weak<Instance>>>,
    /// Told by mounts that have ended.
    ends: Arc<Ends>,
    /// Whoever ends what others have unmounted. Before [`Service::changes`].
    unmounted: Mutex<()>,
}

impl Service {
    /// A service without instances, in the control group by which its memory is limited.
    ///
    /// # Errors
    /// When the pool's cache or its service threads cannot be made.
    pub fn new(config: ServiceConfig, group: Option<MemoryGroup>) -> Result<Self, ServiceError> {
        let kept_at = config.kept_directory();
        sweep_left(kept_at.clone());
        let builder = StackBuilder::new(config.cache_bytes, Some(kept_at.clone())).or_else(|error| {
            warn!(place = %kept_at.display(), %error, "what is accepted does not outlive the service");
            StackBuilder::new(config.cache_bytes, None)
        })?;
        let builder = builder.with_states_of(&config.socket_directory)?;
        let (tracer, changes, instances, lingering, ends) = Default::default();
        let no_sessions = |cause| ServiceError::Sessions { place: config.socket_directory.clone(), cause };
        let threads = ServiceThreads::start(&config.cpus).map_err(no_sessions)?;
        // A group that cannot be read is told of by who watches it.
        let limit = group.as_ref().and_then(|group| group.read(0).ok()).map(|reading| reading.limit);
        let shares = Arc::new(PoolShares::new(config.cache_bytes, limit, builder.memory()));
        let builder = builder.with_listings(shares.listings());
        let pruner = Pruner::start(shares.nodes_kept(), Arc::clone(shares.memory())).map_err(no_sessions)?;
        let (pruner, started) = (Arc::new(pruner), Instant::now());
        let watch = |group| MemoryWatch::start(group, builder.memory(), &shares);
        let memory = group.map(watch).transpose().map_err(no_sessions)?;
        Ok(Self {
            config,
            builder,
            threads,
            pruner,
            shares,
            memory,
            tracer,
            started,
            changes,
            instances,
            lingering,
            ends,
            unmounted: Mutex::default(),
        })
    }

    /// From here on, and as long as the service is there, instances end by themselves whose mounts are taken away by others.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn watch_mounts(self: &Arc<Self>) -> io::Result<()> {
        let (service, ends) = (Arc::downgrade(self), Arc::clone(&self.ends));
        let watch = move || {
            let mut wait = None;
            loop {
                ends.wait(wait);
                let Some(service) = service.upgrade() else { return };
                wait = service.end_unmounted(&|| true).then_some(RETRY_WAIT);
            }
        };
        std::thread::Builder::new().name("ends".into()).spawn(watch).map(drop)
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &ServiceConfig {
        &self.config
    }

    /// Who wants to hear of its requests.
    #[must_use]
    pub fn tracer(&self) -> &Arc<Tracer> {
        &self.tracer
    }

    /// Has the callers of all instances say when they submit a request, while somebody wants to hear of them.
    pub fn want_stamps(&self) {
        lock(&self.instances).values().for_each(|mounted| mounted.front.want_stamps(self.tracer.is_on()));
    }

    /// Headroom for what one job keeps of a tree: of what listings share, as those are all that such a job is about.
    pub(crate) fn room_of_job(&self) -> Arc<dyn Headroom> {
        self.shares.listings().join()
    }

    /// The instance of that name.
    pub(crate) fn instance(&self, name: &str) -> Option<Arc<Instance>> {
        lock(&self.instances).get(name).map(|mounted| Arc::clone(&mounted.instance))
    }

    /// Carries a command out, with the descriptors that came with it; [`Command::Shutdown`] is for whoever owns the process, those that are answered
    /// while they are carried out for whoever owns the connection. What takes long comes to nothing where it is not `wanted` by anybody when that is done.
    #[must_use]
    pub fn command(&self, command: Command, descriptors: Vec<OwnedFd>, is_wanted: &dyn Fn() -> bool) -> Answer {
        let done = match command {
            Command::Mount(spec) => {
                let name = spec.instance.clone();
                let mounted = self.mount(spec, descriptors, is_wanted);
                let notes =
                    self.instance(&name).filter(|_| mounted.is_ok()).map_or_else(Vec::new, |own| own.stack.notes());
                if !notes.is_empty() {
                    return Answer::Mounted { notes };
                }
                mounted
            }
            Command::Unmount { instance, ending } => match self.unmount(&instance, ending, is_wanted) {
                Ok(Left::Used) => return Answer::Lingers,
                other => other.map(|_| ()),
            },
            Command::Flush { instance } => self.flush(&instance, is_wanted),
            Command::Ping => Ok(()),
            Command::Instances => return Answer::Instances { instances: self.settled(is_wanted) },
            Command::Status => return Answer::Status(Box::new(self.status())),
            Command::Client { pid } => {
                let all: Vec<_> = lock(&self.instances).values().map(|m| Arc::clone(&m.instance)).collect();
                return Answer::Client { instances: all.iter().map(|instance| instance.client(pid)).collect() };
            }
            Command::Shutdown
            | Command::Trace(_)
            | Command::Differences { .. }
            | Command::Commit { .. }
            | Command::Flatten { .. } => Ok(()),
        };
        match done {
            Ok(()) => Answer::Done,
            Err(error) => {
                warn!(%error, "a command failed");
                error.answer()
            }
        }
    }

    /// Mounts an instance of these private mounts, which the control side has made: those of its branches, in their order.
    ///
    /// # Errors
    /// Nothing has changed then.
    pub fn mount(
        &self,
        spec: MountSpec,
        descriptors: Vec<OwnedFd>,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<(), ServiceError> {
        check_stack(&spec.stack)?;
        let sources = received(&spec, descriptors)?;
        let given_up = || ServiceError::GivenUp(spec.instance.clone());
        let begun = Instant::now();
        self.end_unmounted(&|| is_wanted() && begun.elapsed() < UNMOUNTED_WAIT);
        let underway = self.changes.enter(&spec).ok_or(ServiceError::TooManyUnderway)?;
        let change = underway
            .turn(|other, is_given_up| is_related(&spec, other, is_given_up))
            .filter(|_| is_wanted())
            .ok_or_else(given_up)?;
        self.check(&spec, &sources, &change)?;
        check_place(&spec.mount_point)?;
        let (stack, is_given_up, mut change) = underway.beside(change, || self.builder.build_of(&spec.stack, sources));
        let refused = match is_given_up || !is_wanted() {
            true => Err(given_up()),
            // Something else may be there by now.
            false => check_place(&spec.mount_point),
        };
        if let Err(refused) = refused {
            // To let go of it may take as long as to look at it, and who needs its branches waits for that.
            drop(change);
            drop(stack?);
            return Err(refused);
        }
        let stack = stack?.with_ids(spec.ids.as_ref());
        underway.end(&mut change);
        self.mount_stack(spec, stack)
    }

    fn mount_stack(&self, spec: MountSpec, stack: Stack) -> Result<(), ServiceError> {
        let instance = Instance::new(spec, stack);
        instance.set_pruner(&self.pruner);
        instance.set_tracer(&self.tracer);
        if let Some(leases) = self.builder.leases() {
            self.memory.iter().for_each(|memory| memory.add(&leases));
            instance.set_leases(leases);
        }
        instance.set_shares(&self.shares.join());
        self.announce(&instance);
        let sockets = instance.spec().socket_directory(&self.config.socket_directory);
        let private = instance.spec().is_root;
        let front = make_directory(&sockets, private)
            .and_then(|()| QueueFront::start(&instance, &sockets, &self.threads))
            .map_err(|cause| ServiceError::Sessions { place: sockets.clone(), cause })?;
        let ends = Arc::clone(&self.ends);
        let on_end = Box::new(move || ends.tell());
        let mount = FuseMount::start(&instance, &self.config.cpus, on_end);
        let mount = mount.inspect_err(|_| front.close(&self.threads))?;
        front.want_stamps(self.tracer.is_on());
        info!(instance = instance.name(), mount_point = %instance.spec().mount_point.display(), "mounted");
        lock(&self.instances).insert(instance.name().to_owned(), Mounted { instance, mount, front });
        Ok(())
    }

    /// Before `instance` can change anything: whoever shows the same has the kernel keep nothing of it from here on.
    fn announce(&self, instance: &Instance) {
        let mut others: Vec<_> = lock(&self.instances).values().map(|other| Arc::clone(&other.instance)).collect();
        others.extend(lock(&self.lingering).iter().filter_map(Weak::upgrade));
        for other in others.iter().filter(|other| instance.stack.shares_with(&other.stack)) {
            instance.share();
            other.share();
        }
    }

    fn check(&self, spec: &MountSpec, sources: &[Arc<dyn Source>], change: &Change<'_>) -> Result<(), ServiceError> {
        refuse_last(change)?;
        if !is_valid_name(&spec.instance) {
            return Err(ServiceError::Name(spec.instance.clone()));
        }
        check_path("mount point", &spec.mount_point)?;
        let instances = lock(&self.instances);
        if instances.contains_key(&spec.instance) {
            return Err(ServiceError::Exists(spec.instance.clone()));
        }
        // This one is under way as well.
        if instances.len() + change.mounts().count() > INSTANCES_MAX {
            return Err(ServiceError::TooMany);
        }
        let own: Vec<&Path> = instances.values().map(|own| own.instance.spec().mount_point.as_path()).collect();
        check_branches(&spec.stack, sources, &own)
    }

    /// The instances, when none is being ended, and those that are about to be mounted: whoever asks must not take them for gone.
    fn settled(&self, is_wanted: &dyn Fn() -> bool) -> Vec<String> {
        let begun = Instant::now();
        self.end_unmounted(&|| is_wanted() && begun.elapsed() < UNMOUNTED_WAIT);
        let change = self.changes.begin();
        let underway = change.mounts().map(str::to_owned);
        lock(&self.instances).keys().cloned().chain(underway).collect()
    }

    /// What the service does and holds.
    #[must_use]
    pub fn status(&self) -> ServiceStatus {
        let instances = lock(&self.instances);
        ServiceStatus {
            pool: self.config.pool.clone(),
            pid: std::process::id(),
            uptime_seconds: self.started.elapsed().as_secs(),
            cache: self.builder.cache_status(),
            memory: self.memory.as_ref().and_then(|memory| memory.status()),
            unresponsive_branches: self.builder.unresponsive_branches(),
            instances: instances.values().map(|mounted| mounted.instance.status()).collect(),
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.threads.stop();
        self.memory.iter().for_each(|memory| memory.end());
        // Whoever waits for it finds the service gone.
        self.ends.tell();
    }
}

/// Gives back what dead services have left, or has that done when the branches answer that it is of.
fn sweep_left(place: PathBuf) {
    let (done, swept_all) = sync_channel::<()>(1);
    let spawned = std::thread::Builder::new().name("sweep".into()).spawn(move || {
        let _done = done;
        let swept = place.clone();
        match outside(Deed::Memory, move || sweep(&swept)).flatten() {
            Ok(kept) => kept.iter().for_each(|(upper, files)| {
                warn!(upper = %upper.display(), files, "files that a service had accepted before it died wait for the next mount");
            }),
            Err(error) => warn!(place = %place.display(), %error, "what dead services have left cannot be looked at"),
        }
    });
    if let Err(error) = spawned {
        warn!(%error, "no thread to look at what dead services have left");
    }
    if matches!(swept_all.recv_timeout(SWEEP_WAIT), Err(RecvTimeoutError::Timeout)) {
        warn!("a branch does not answer of which a dead service has left something");
    }
}

/// A directory of sockets: of containers' only for root, others are found there.
fn make_directory(path: &Path, private: bool) -> io::Result<()> {
    if !private {
        return Ok(());
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Whether a mount may only be looked at when another one, which is under way, has come to its end: it is to have the same name or place, or lies behind
/// the other. Or the other was given up because what is written does not answer, and whoever tries it again would wait where he cannot be told that he is
/// given up, too.
fn is_related(mount: &MountSpec, other: &MountSpec, is_given_up: bool) -> bool {
    let (place, of_other) = (&mount.mount_point, &other.mount_point);
    let mut branches = mount.stack.branches().into_iter();
    mount.instance == other.instance
        || place.starts_with(of_other)
        || of_other.starts_with(place)
        || branches.any(|branch| branch.name.starts_with(of_other))
        || is_given_up && written(&mount.stack) == written(&other.stack)
}

/// The directory that a stack writes to.
fn written(stack: &StackSpec) -> Option<PathBuf> {
    stack.branches().into_iter().next().map(|branch| branch.name.to_owned())
}

fn refuse_last(change: &Change<'_>) -> Result<(), ServiceError> {
    if change.is_last() { Err(ServiceError::Ending) } else { Ok(()) }
}

/// Whether something can be mounted there, when what died there is gone.
fn check_place(mount_point: &Path) -> Result<(), ServiceError> {
    detach_dead(mount_point).map_err(|cause| path_error("mount point", mount_point, cause.to_string()))?;
    let place = mount_point.to_owned();
    let checked = outside(Deed::Mount, move || check_directory("mount point", &place));
    checked.map_err(|error| path_error("mount point", mount_point, error.to_string()))?
}

fn path_error(what: &'static str, path: &Path, cause: impl Into<String>) -> ServiceError {
    ServiceError::Path { what, path: path.to_owned(), cause: cause.into() }
}

fn check_path(what: &'static str, path: &Path) -> Result<(), ServiceError> {
    if !path.is_absolute() {
        return Err(path_error(what, path, "it is not absolute; give the whole path"));
    }
    if path.components().any(|component| component == Component::ParentDir) {
        return Err(path_error(what, path, "it contains \"..\"; give the path without"));
    }
    Ok(())
}

fn check_directory(what: &'static str, path: &Path) -> Result<(), ServiceError> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Ok(()),
        Ok(_) => Err(path_error(what, path, "it is no directory; name one")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(path_error(what, path, "it does not exist; create the directory"))
        }
        Err(error) => Err(path_error(what, path, error.to_string())),
    }
}

/// The names of the branches of a stack, and what they are for.
fn named(stack: &StackSpec) -> Vec<(&'static str, &Path)> {
    let upper = if matches!(stack, StackSpec::Union { .. }) { "upper" } else { "directory" };
    let names = std::iter::once(upper).chain(std::iter::repeat("lower"));
    names.zip(stack.branches()).map(|(what, branch)| (what, branch.name)).collect()
}

fn check_stack(stack: &StackSpec) -> Result<(), ServiceError> {
    if let StackSpec::Union { upper, lowers, .. } = stack
        && (lowers.is_empty() || lowers.len() > LOWERS_MAX)
    {
        let cause = format!("a union of {} lower branches; give 1 to {LOWERS_MAX}", lowers.len());
        return Err(path_error("upper", upper, cause));
    }
    named(stack).into_iter().try_for_each(|(what, name)| match Place::of(name) {
        Place::Directory(path) | Place::Ceph(path) => check_path(what, path),
    })
}

/// Whether the branches can be used together, and none is served by this very service (it would wait for itself).
fn check_branches(stack: &StackSpec, sources: &[Arc<dyn Source>], own_mounts: &[&Path]) -> Result<(), ServiceError> {
    for (at, ((what, path), source)) in named(stack).into_iter().zip(sources).enumerate() {
        if own_mounts.iter().any(|mount| path.starts_with(mount)) {
            return Err(path_error(what, path, "it is served by this pool itself; name the directory behind it"));
        }
        if sources[..at].iter().any(|other| other.lineage().overlaps(source.lineage())) {
            return Err(path_error(what, path, "it contains, or lies in, another branch; keep them apart"));
        }
    }
    Ok(())
}
