//! The filesystem table of a service: which instances there are, and the steps that make and end one.

use crate::ends::Ends;
use crate::failures::ServiceError;
use crate::instance::Instance;
use crate::legacy::{LegacyMount, MountError, detach_dead};
use crate::memory::MemoryWatch;
use crate::memory::group::MemoryGroup;
use crate::nodes::pruning::Pruner;
use crate::outside::{Deed, outside};
use crate::queue_front::{QueueFront, ServiceThreads};
use crate::shares::PoolShares;
use crate::spans::Tracer;
use crate::stack::kept::sweep;
use crate::stack::{Given, Stack, StackBuilder};
use crate::underway::{Change, Changes};
use poolfs_libservice::Error;
use poolfs_service_protocol::{
    Answer, Command, Ending, LOWERS_MAX, MountSpec, ServiceConfig, ServiceStatus, StackSpec, is_valid_name,
};
use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Component, Path};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use tracing::{error, info, warn};

/// Most instances of one service.
pub const INSTANCES_MAX: usize = 1024;

/// How long an unmount waits for the kernel to let go, before the rest is left to the background.
const UNMOUNT_WAIT: Duration = Duration::from_secs(5);

/// The same when the whole service ends: then nobody is waited for much longer than a program needs to notice.
const SHUTDOWN_WAIT: Duration = Duration::from_millis(500);

/// How long an unmount of a busy mount is repeated: a program that has just ended may hold it for a moment.
const BUSY_WAIT: Duration = Duration::from_millis(500);
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// After so long what could not be written back is tried once more, of an instance whose mount is gone.
const RETRY_WAIT: Duration = Duration::from_secs(10);

struct Mounted {
    instance: Arc<Instance>,
    mount: LegacyMount,
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
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Service {
    /// A service without instances, in the control group by which its memory is limited.
    ///
    /// # Errors
    /// When the pool's cache or its service threads cannot be made.
    pub fn new(config: ServiceConfig, group: Option<MemoryGroup>) -> Result<Self, ServiceError> {
        let kept_at = config.kept_directory();
        let place = kept_at.clone();
        match outside(Deed::Memory, move || sweep(&place)).flatten() {
            Ok(kept) => kept.iter().for_each(|(upper, files)| {
                warn!(upper = %upper.display(), files, "files that a service had accepted before it died wait for the next mount");
            }),
            Err(error) => warn!(place = %kept_at.display(), %error, "what dead services have left cannot be looked at"),
        }
        let builder = StackBuilder::new(config.cache_bytes, Some(kept_at.clone())).or_else(|error| {
            warn!(place = %kept_at.display(), %error, "what is accepted does not outlive the service");
            StackBuilder::new(config.cache_bytes, None)
        })?;
        let builder = builder.with_states_of(&config.socket_directory)?;
        let (tracer, changes, instances, lingering, ends) = Default::default();
        let no_sessions = |cause| ServiceError::Sessions { place: config.socket_directory.clone(), cause };
        let threads = ServiceThreads::start(&config.cpus).map_err(no_sessions)?;
        let shares = Arc::new(PoolShares::new(config.cache_bytes, builder.memory()));
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
                let _one_at_a_time = service.changes.begin();
                wait = service.end_unmounted().then_some(RETRY_WAIT);
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

    /// The instance of that name.
    pub(crate) fn instance(&self, name: &str) -> Option<Arc<Instance>> {
        lock(&self.instances).get(name).map(|mounted| Arc::clone(&mounted.instance))
    }

    /// Carries a command out, with the descriptors that came with it; [`Command::Shutdown`] is for whoever owns the process, those that are answered
    /// while they are carried out for whoever owns the connection. What takes long comes to nothing where it is not `wanted` by anybody when that is done.
    #[must_use]
    pub fn command(&self, command: Command, descriptors: Vec<OwnedFd>, is_wanted: &dyn Fn() -> bool) -> Answer {
        let done = match command {
            Command::Mount(spec) => self.mount(spec, descriptors, is_wanted),
            Command::Unmount { instance, ending } => self.unmount(&instance, ending),
            Command::Ping => Ok(()),
            Command::Instances => return Answer::Instances { instances: self.settled() },
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
        let given = Given::from_control(&spec.stack, descriptors)?;
        let given_up = || ServiceError::GivenUp(spec.instance.clone());
        let underway = self.changes.enter(&spec).ok_or(ServiceError::TooManyUnderway)?;
        let change = underway.turn(|other| is_related(&spec, other)).filter(|_| is_wanted()).ok_or_else(given_up)?;
        self.end_unmounted();
        self.check(&spec, &given, &change)?;
        check_place(&spec.mount_point)?;
        let (stack, is_given_up, mut change) = underway.beside(change, || self.builder.build_of(&spec.stack, given));
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
        let mount = LegacyMount::start(&instance, &self.config.cpus, on_end);
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

    fn check(&self, spec: &MountSpec, given: &[Given], change: &Change<'_>) -> Result<(), ServiceError> {
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
        check_branches(&spec.stack, given, &own)
    }

    /// Flushes and unmounts an instance. One that does not exist (any more) is fine; one that is about to be mounted will not be.
    ///
    /// # Errors
    /// It is still mounted then, unless the error says that something is lost.
    pub fn unmount(&self, name: &str, ending: Ending) -> Result<(), ServiceError> {
        let mut one_at_a_time = self.changes.begin();
        if one_at_a_time.give_up(name) {
            info!(instance = name, "its mount is given up");
            return Ok(());
        }
        self.end_instance(name, ending)
    }

    /// The instances, when none is being ended, and those that are about to be mounted: whoever asks must not take them for gone.
    fn settled(&self) -> Vec<String> {
        let change = self.changes.begin();
        self.end_unmounted();
        let underway = change.mounts().map(str::to_owned);
        lock(&self.instances).keys().cloned().chain(underway).collect()
    }

    /// Ends the instances whose mounts others have taken away. Whether one stays, because what was written to it cannot be put on the
    /// disk. Whoever calls has `changes`.
    fn end_unmounted(&self) -> bool {
        let over = |mounted: &Mounted| mounted.mount.is_over();
        let names: Vec<String> =
            lock(&self.instances).iter().filter(|(_, mounted)| over(mounted)).map(|(name, _)| name.clone()).collect();
        let mut is_left = false;
        for name in names {
            info!(instance = name, "its mount was taken away");
            if let Err(error) = self.end_instance(&name, Ending::Orderly) {
                warn!(instance = name, %error, "an instance without a mount stays");
                is_left = true;
            }
        }
        is_left
    }

    /// Flushes and unmounts an instance. Whoever calls has `changes`.
    fn end_instance(&self, name: &str, ending: Ending) -> Result<(), ServiceError> {
        let Some(instance) = self.instance(name) else { return Ok(()) };
        let stopped = instance.jobs().stop();
        if ending == Ending::Discarded {
            instance.stack.discard();
        }
        if let Err(cause) = instance.layer().sync() {
            let error = ServiceError::NotWritten { path: instance.spec().mount_point.clone(), cause };
            if !ending.is_forced() {
                return Err(error);
            }
            warn!(instance = name, %error, "unmounted all the same, as was asked for");
        }
        match self.take_away(name, ending)? {
            Some(mounted) => {
                stopped.for_good();
                self.linger(mounted, ending)
            }
            None => Ok(()),
        }
    }

    /// Takes the mount of an instance from its place.
    fn take_away(&self, name: &str, ending: Ending) -> Result<Option<Mounted>, ServiceError> {
        let give_up = Instant::now() + BUSY_WAIT;
        loop {
            let mut instances = lock(&self.instances);
            let Some(mounted) = instances.get_mut(name) else { return Ok(None) };
            let taken = match mounted.mount.unmount() {
                Err(MountError::Busy { .. }) if Instant::now() < give_up => {
                    drop(instances);
                    std::thread::sleep(BUSY_PAUSE);
                    continue;
                }
                Err(MountError::Busy { .. }) if ending != Ending::Orderly => mounted.mount.detach(),
                other => other,
            };
            taken?;
            return Ok(instances.remove(name));
        }
    }

    /// After the mount is gone from its place: waits for its last users, then flushes. Whoever has files of it open in another mount
    /// namespace keeps the instance, if it is to end in order; a mount that is only seen there goes on in the background until the service
    /// ends.
    fn linger(&self, mounted: Mounted, ending: Ending) -> Result<(), ServiceError> {
        mounted.front.close(&self.threads);
        let is_over = mounted.mount.wait(UNMOUNT_WAIT);
        let files = mounted.instance.handles.len();
        if !is_over && ending == Ending::Orderly && files > 0 {
            let path = mounted.instance.spec().mount_point.clone();
            lock(&self.instances).insert(mounted.instance.name().to_owned(), mounted);
            return Err(ServiceError::UsedElsewhere { path, files });
        }
        let Mounted { instance, mount, .. } = mounted;
        if is_over {
            return match wind_up(&instance) {
                Err(cause) if !ending.is_forced() => Err(self.mount_again(&instance, cause)),
                _ => Ok(()),
            };
        }
        warn!(instance = instance.name(), "the mount is still used elsewhere and ends with its last user");
        let mut lingering = lock(&self.lingering);
        lingering.retain(|instance| instance.strong_count() > 0);
        lingering.push(Arc::downgrade(&instance));
        drop(lingering);
        let spawned = std::thread::Builder::new().name("lingering".into()).spawn(move || {
            while !mount.wait(Duration::from_secs(3600)) {}
            // What fails is in the log: whoever asked for the unmount has had an answer.
            let _ = wind_up(&instance);
        });
        if let Err(error) = spawned {
            error!(%error, "no thread for a mount that lingers");
        }
        Ok(())
    }

    /// Something was written between the flush before the unmount and the unmount, and cannot be written back: it must not
    /// be forgotten, and whoever wrote it must be able to reach it.
    fn mount_again(&self, instance: &Instance, cause: Error) -> ServiceError {
        let path = instance.spec().mount_point.clone();
        match self.mount_stack(instance.spec().clone(), instance.stack.clone()) {
            Ok(()) => ServiceError::NotWritten { path, cause },
            Err(again) => ServiceError::Lost { path, cause, again: Box::new(again) },
        }
    }

    /// Unmounts everything, whoever uses it, and flushes. Who still has something open finds it gone (`ENOTCONN`).
    ///
    /// # Errors
    /// The first failure to write something back, which is lost. Everything is unmounted all the same.
    pub fn shut_down(&self) -> Result<(), ServiceError> {
        let _last = self.changes.begin_last();
        let mut all = std::mem::take(&mut *lock(&self.instances));
        for (name, mounted) in &mut all {
            if let Err(error) = mounted.mount.detach() {
                warn!(instance = name, %error, "unmounting at the end failed");
            }
        }
        let mut result = Ok(());
        let mut end = |instance: &Instance| {
            let lost = |cause| ServiceError::LostAtEnd { instance: instance.name().to_owned(), cause };
            let ended = wind_up(instance).map_err(lost);
            if result.is_ok() {
                result = ended;
            }
        };
        let deadline = Instant::now() + SHUTDOWN_WAIT;
        for Mounted { instance, mount, front } in all.into_values() {
            instance.jobs().stop().for_good();
            front.close(&self.threads);
            if !mount.wait(deadline.saturating_duration_since(Instant::now())) {
                warn!(instance = instance.name(), "the mount is still used; its users lose it");
                instance.refuse();
            }
            end(&instance);
        }
        for instance in lock(&self.lingering).drain(..).filter_map(|instance| instance.upgrade()) {
            instance.refuse();
            end(&instance);
        }
        self.builder.end();
        result
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
            memory: self.memory.as_ref().map(|memory| memory.status()),
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

fn wind_up(instance: &Instance) -> Result<(), Error> {
    instance
        .wind_up()
        .inspect(|()| info!(instance = instance.name(), "unmounted"))
        .inspect_err(|error| error!(instance = instance.name(), %error, "flushing at the end failed"))
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
/// the other.
fn is_related(mount: &MountSpec, other: &MountSpec) -> bool {
    let (place, of_other) = (&mount.mount_point, &other.mount_point);
    let mut branches = mount.stack.branches().into_iter();
    mount.instance == other.instance
        || place.starts_with(of_other)
        || of_other.starts_with(place)
        || branches.any(|branch| branch.directory.starts_with(of_other))
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
    names.zip(stack.branches()).map(|(what, branch)| (what, branch.directory)).collect()
}

fn check_stack(stack: &StackSpec) -> Result<(), ServiceError> {
    if let StackSpec::Union { upper, lowers, .. } = stack
        && (lowers.is_empty() || lowers.len() > LOWERS_MAX)
    {
        let cause = format!("a union of {} lower branches; give 1 to {LOWERS_MAX}", lowers.len());
        return Err(path_error("upper", upper, cause));
    }
    named(stack).into_iter().try_for_each(|(what, path)| check_path(what, path))
}

/// Whether the branches can be used together, and none is served by this very service (it would wait for itself).
fn check_branches(stack: &StackSpec, given: &[Given], own_mounts: &[&Path]) -> Result<(), ServiceError> {
    let mut seen = Vec::new();
    for ((what, path), given) in named(stack).into_iter().zip(given) {
        if own_mounts.iter().any(|mount| path.starts_with(mount)) {
            return Err(path_error(what, path, "it is served by this pool itself; name the directory behind it"));
        }
        let identity = given.identity;
        let overlaps =
            |&(other, same): &(&Path, _)| path.starts_with(other) || other.starts_with(path) || same == identity;
        if seen.iter().any(overlaps) {
            return Err(path_error(what, path, "it contains, or lies in, another branch; keep them apart"));
        }
        seen.push((path, identity));
    }
    Ok(())
}
