//! The command `mount`: has a pool's service mount an instance.

use crate::arguments::MountArguments;
use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::places::{self, Found};
use crate::record::{InstanceRecord, MemoryRecord, PoolRecord, ProcessRecord};
use crate::state::Locked;
use crate::text::pasted;
use crate::unmount::unmount_instance;
use crate::{branches, ceph, memory, pool, service, signals, waiting};
use poolfs_host::{MountEntry, mount_table, pool_mounts};
use poolfs_local::PrivateMount;
use poolfs_service_protocol::{
    CEPH_PREFIX, CONTAINER_SOCKETS, CephAccess, Command, IdMap, LOWERS_MAX, MountSpec, Place, StackSpec, Storage,
    Timeout, Transport, UnmountMode, ceph_name,
};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Most commands that have a pool's service mount something at the same time: it has connections for some more, by which it is reached
/// meanwhile.
const MOUNTS_AT_ONCE_MAX: usize = 16;
/// How often it is looked whether one of them has ended.
const TURN_PAUSE: Duration = Duration::from_millis(10);

/// What is to be mounted, and for whom.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Where.
    pub mount_point: PathBuf,
    /// What.
    pub stack: StackSpec,
    /// The command it is for.
    pub owner: Option<ProcessRecord>,
    /// The container whose root it is.
    pub container: Option<String>,
    /// The ids of the host that stand for stored owners, when they are not the same.
    pub ids: Option<IdMap>,
    /// Whether set-id bits and capabilities of files have effect.
    pub suid: bool,
    /// Whether device files of it can be opened.
    pub devices: bool,
    /// How the kernel's requests are to come.
    pub transport: Option<Transport>,
    /// Whether all writes of the library wait for their answers.
    pub wait_for_writes: bool,
    /// How long a request may take before it fails.
    pub timeout: Option<Timeout>,
    /// How the cluster is reached that has its Ceph branches.
    pub ceph: Option<CephAccess>,
    /// Whether it is a store of images that is to be changed: see [`InstanceRecord::is_store`].
    pub is_store: bool,
}

impl Wanted {
    /// A mount for everybody, as a user wants it who says nothing else.
    pub fn new(mount_point: PathBuf, stack: StackSpec) -> Wanted {
        let (owner, container, ids, transport, timeout, ceph) = (None, None, None, None, None, None);
        let (suid, devices, wait_for_writes, is_store) = (false, false, false, false);
        Wanted {
            mount_point,
            stack,
            owner,
            container,
            ids,
            suid,
            devices,
            transport,
            wait_for_writes,
            timeout,
            ceph,
            is_store,
        }
    }
}

/// The command `mount`.
pub fn mount(context: &Context, arguments: MountArguments) -> Result<()> {
    let coherence = arguments.coherence();
    let stack = match (arguments.dir, arguments.upper, !arguments.lower.is_empty()) {
        (Some(directory), None, false) => StackSpec::Directory { directory, coherence, size_bytes: None },
        (None, Some(upper), true) => {
            let storage = Storage { format: arguments.upper_format, size_bytes: arguments.upper_size };
            let lowers = arguments.lower.iter().flat_map(|list| split_lowers(list)).collect();
            StackSpec::Union { upper, lowers, storage, immutable_lowers: arguments.immutable }
        }
        _ => {
            return Err(Failure::usage(
                "mount",
                "neither a directory nor a union",
                "give --dir, or --upper and --lower",
            ));
        }
    };
    let wanted = Wanted {
        suid: arguments.suid,
        devices: arguments.dev,
        transport: arguments.fuse_transport.chosen(),
        wait_for_writes: arguments.wait_for_writes,
        timeout: arguments.timeout,
        ceph: arguments.ceph.access(&[&stack], |path| file_to_read(context, path))?,
        ..Wanted::new(arguments.mount_point, stack)
    };
    mount_instance(context, &arguments.pool, wanted).map(|_| ())
}

/// A file that the service is to read.
pub fn file_to_read(context: &Context, path: &Path) -> Result<PathBuf> {
    let path = std::path::absolute(path).map_err(|error| Failure::file(path, error))?;
    let looked_at = path.clone();
    let is_file = waiting::within(context, &path, move || std::fs::metadata(looked_at).map(|found| found.is_file()))?;
    match is_file {
        Ok(true) => Ok(path),
        Ok(false) => Err(Failure::file(&path, "it is no file").with_remedy("name a file")),
        Err(error) => Err(Failure::file(&path, error).with_remedy("check the path")),
    }
}

/// Symbolic links that are followed for one path, as by the kernel.
const LINKS_MAX: usize = 40;

/// What a pool has mounted at a place, the topmost.
pub fn instance_at<'p>(context: &Context, pool: &'p PoolRecord, mount_point: &Path) -> Result<&'p InstanceRecord> {
    let absolute = std::path::absolute(mount_point).map_err(|error| Failure::file(mount_point, error))?;
    let looked_at = absolute.clone();
    let resolved = waiting::within(context, &absolute, move || resolved(looked_at))?;
    let fits =
        |instance: &&InstanceRecord| instance.spec.mount_point == resolved || instance.spec.mount_point == absolute;
    pool.instances.iter().rev().find(fits).ok_or_else(|| {
        let name = &pool.name;
        let remedy = format!("`poolfs pool inspect {name}` lists what is mounted");
        Failure::not_found(mount_point.display().to_string(), format!("pool {name} has no mount there"), remedy)
    })
}

/// Where a path leads. What is there is not looked at: it may be a dead mount, or one whose service stands still.
fn resolved(path: PathBuf) -> PathBuf {
    let mut path = path;
    for _ in 0..LINKS_MAX {
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else { break };
        let Ok(above) = above.canonicalize() else { break };
        let place = above.join(name);
        match std::fs::read_link(&place) {
            Ok(target) => path = above.join(target),
            Err(_) => return place,
        }
    }
    path
}

/// `DIR[:DIR...]`, topmost first. As for overlayfs, a backslash takes from the next character what it means here: `\:` is a colon in a name. So is the one
/// of `ceph:/PATH`, a directory at a cluster.
pub fn split_lowers(text: &str) -> Vec<PathBuf> {
    let (mut parts, mut part) = (Vec::new(), String::new());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            ':' if part == "ceph" && characters.as_str().starts_with('/') => part.push(':'),
            ':' => parts.push(std::mem::take(&mut part)),
            '\\' => part.extend(characters.next()),
            _ => part.push(character),
        }
    }
    parts.push(part);
    parts.into_iter().filter(|part| !part.is_empty()).map(PathBuf::from).collect()
}

/// Mount an instance in a pool, whose service is started when it does not run. On failure nothing stays of it, but for its record where the pool's
/// lock is not to be had: that the next command removes.
///
/// The service may take long to look at the branches. Other commands have the pool's lock meanwhile, and find in its record who mounts what.
pub fn mount_instance(context: &Context, name: &str, wanted: Wanted) -> Result<MountSpec> {
    let begun = begin(context, &mut turn(context, name)?, wanted)?;
    let told = tell_to_mount(context, name, &begun);
    let is_there = told.is_ok();
    let mounted = told.and_then(|()| confirm_visible(context, &begun.spec));
    let mut pool = match context.pools()?.lock::<PoolRecord>(name) {
        Ok(pool) => pool,
        Err(failure) => {
            let _ = begun.forget_in_service(context, name);
            return Err(mounted.err().unwrap_or(failure).of(begun.place()));
        }
    };
    match mounted.and_then(|device| begun.settle(&mut pool, device)) {
        Ok(()) => {
            branches::note_limit(&begun.spec.stack, &begun.found);
            Ok(begun.spec)
        }
        Err(failure) => {
            // The first failure is the one to report.
            let _ = begun.take_back(context, &mut pool, is_there);
            Err(failure.of(begun.place()))
        }
    }
}

/// Have the service mount what was begun.
fn tell_to_mount(context: &Context, pool: &str, begun: &Begun) -> Result<()> {
    // Nobody takes a directory of sockets away in which one is being made.
    let _run_directory = context.make_run_directory()?;
    // The service has no way to the host's files: what it is to serve goes with the command.
    let lineages = begun.found.iter().filter_map(|found| Some(found.on_host()?.lineage().to_vec())).collect();
    let spec = MountSpec { lineages, ..begun.spec.clone() };
    service::tell_with(context, pool, &Command::Mount(spec), &begun.mounts)
}

/// The lock of a pool in which one more instance can be mounted at the same time as others.
fn turn(context: &Context, name: &str) -> Result<Locked<PoolRecord>> {
    let (mut wait, mut seen) = (context.patience.begin(), Vec::new());
    loop {
        let pool = pool::lock(context, name)?;
        let mounters = pool.record.instances.iter().filter(|known| known.is_being_mounted(&*context.host));
        let pids: Vec<u32> = mounters.filter_map(|known| Some(known.mounter.as_ref()?.pid)).collect();
        let Some(one) = pids.first().filter(|_| pids.len() >= MOUNTS_AT_ONCE_MAX) else { return Ok(pool) };
        if wait.is_over() || signals::end_came() {
            let cause = format!("{} commands are about to mount something in it, process {one} among them", pids.len());
            let remedy = format!("wait until one of them has ended; `kill {one}` ends that");
            return Err(Failure::in_use(format!("pool {name}"), cause, remedy));
        }
        if pids != seen {
            // They come on.
            wait.heard();
            seen = pids;
        }
        drop(pool);
        std::thread::sleep(TURN_PAUSE);
    }
}

/// An instance that is recorded, and not yet mounted.
struct Begun {
    spec: MountSpec,
    found: Vec<Found>,
    mounts: Vec<PrivateMount>,
    /// This process.
    mounter: Option<ProcessRecord>,
    /// The pool's service.
    service: Option<ProcessRecord>,
    /// What was set aside for directories in memory before.
    set_aside: Vec<MemoryRecord>,
}

impl Begun {
    /// For messages.
    fn place(&self) -> String {
        self.spec.mount_point.display().to_string()
    }

    /// Its record, if the pool still has it. Another pool may have been made under the name of the one in which it was begun, with an instance of this name.
    fn record<'p>(&self, pool: &'p mut PoolRecord) -> Option<&'p mut InstanceRecord> {
        let is_own =
            |known: &&mut InstanceRecord| known.spec.instance == self.spec.instance && known.mounter == self.mounter;
        pool.instances.iter_mut().find(is_own)
    }

    /// Note that it is mounted.
    fn settle(&self, pool: &mut Locked<PoolRecord>, device: String) -> Result<()> {
        let Some(record) = self.record(&mut pool.record) else {
            let cause = "it is not in the pool's record any more, as after the death of the pool's service";
            return Err(Failure::new("mount", cause, "mount it again"));
        };
        record.mounter = None;
        record.device = Some(device);
        pool.note()
    }

    /// Leave nothing of it; `is_there`: the service has said that it has it.
    fn take_back(&self, context: &Context, pool: &mut Locked<PoolRecord>, is_there: bool) -> Result<()> {
        let name = pool.record.name.clone();
        if self.record(&mut pool.record).is_some() {
            let unmounted = unmount_instance(context, pool, &self.spec.instance, UnmountMode::Forced);
            let directory = self.found.first().and_then(|found| found.whereabouts().id());
            return unmounted.and(memory::give_back(context, pool, directory, &self.set_aside));
        }
        // One of this name that another service has is somebody else's.
        if is_there || pool.record.service == self.service {
            return self.forget_in_service(context, &name);
        }
        Ok(())
    }

    /// See to it that the service has nothing of it, though nothing of it is in the pool's record.
    fn forget_in_service(&self, context: &Context, pool: &str) -> Result<()> {
        let command = Command::Unmount { instance: self.spec.instance.clone(), ending: UnmountMode::Forced };
        service::tell(context, pool, &command)
    }
}

/// Refuse a time limit where requests are to come by io_uring: there the number of requests that can be given up is bounded.
pub fn refuse_limited_ring(transport: Option<Transport>, timeout: Option<Timeout>) -> Result<()> {
    match (transport, timeout) {
        (Some(Transport::IoUring), Some(_)) => Err(Failure::usage(
            "--timeout",
            "a time limit needs requests from /dev/fuse",
            "leave out --fuse-transport io-uring, or --timeout",
        )),
        _ => Ok(()),
    }
}

/// What has to be done for a mount under the pool's lock, up to its record.
fn begin(context: &Context, pool: &mut Locked<PoolRecord>, wanted: Wanted) -> Result<Begun> {
    refuse_limited_ring(wanted.transport, wanted.timeout)?;
    let stack = checked_stack(context, wanted.stack)?;
    // From here on it is these directories, whatever comes to their paths.
    let ceph =
        wanted.ceph.map(|access| ceph::held(&*context.host, &mut pool.record.ceph_holder, access)).transpose()?;
    let (found, mounts) = places::find(context, stack.branches(), ceph.as_ref())?;
    branches::refuse_overlaps(&pool.record, &stack, &found)?;
    branches::refuse_served(context, &pool.record, &stack, &found)?;
    let stack = memory::limited(&pool.record, stack, memory::written(&found, &mounts))?;
    detach_dead(context, &wanted.mount_point)?;
    let mount_point = mount_point(context, &wanted.mount_point)?;
    service::ensure(context, pool)?;
    let spec = MountSpec {
        instance: next_instance(context, pool)?,
        mount_point,
        stack,
        devices: wanted.devices,
        suid: wanted.suid,
        is_root: wanted.container.is_some(),
        ids: wanted.ids,
        transport: wanted.transport,
        wait_for_writes: wanted.wait_for_writes,
        timeout: wanted.timeout,
        has_quotas: found
            .first()
            .and_then(|found| found.on_host()?.mount.as_ref())
            .is_some_and(|mount| mount.has_quotas(&*context.host)),
        lineages: Vec::new(),
        ceph: ceph.map(Box::new),
    };
    // Recorded before it is mounted: whatever happens from here on can be undone by the next command.
    let places = found.iter().map(Found::whereabouts).collect();
    let Wanted { owner, container, is_store, .. } = wanted;
    let mounter = ProcessRecord::of(&*context.host, std::process::id());
    let record = InstanceRecord {
        spec: spec.clone(),
        owner,
        container,
        mounter: mounter.clone(),
        places,
        device: None,
        is_store,
    };
    pool.record.instances.push(record.clone());
    let (service, set_aside) = (pool.record.service.clone(), pool.record.in_memory.clone());
    let begun = pool
        .note()
        .map_err(|failure| failure.of(spec.mount_point.display().to_string()))
        .and_then(|()| branches::refuse_conflicts(context, &pool.record, &record, &found))
        .and_then(|()| memory::set_aside(context, pool, &spec.stack, memory::written(&found, &mounts)));
    match begun {
        Ok(()) => Ok(Begun { spec, found, mounts, mounter, service, set_aside }),
        Err(failure) => {
            // The first failure is the one to report.
            let _ = unmount_instance(context, pool, &spec.instance, UnmountMode::Forced);
            Err(failure)
        }
    }
}

/// Whether an instance is in the pool's record, mounted or about to be.
pub fn is_recorded(pool: &Locked<PoolRecord>, instance: &str) -> bool {
    pool.record.instances.iter().any(|known| known.spec.instance == instance)
}

/// Take a dead mount away from a place where something new is to be mounted.
fn detach_dead(context: &Context, place: &Path) -> Result<()> {
    let absolute = std::path::absolute(place).map_err(|error| Failure::file(place, error))?;
    let looked_at = absolute.clone();
    let place = waiting::within(context, &absolute, move || resolved(looked_at))?;
    for entry in mount_table(&*context.host)?.iter().rev().filter(|entry| entry.mount_point == place) {
        let Some(instance) = entry.instance() else { continue };
        let looked_at = place.clone();
        if waiting::within(context, &place, move || std::fs::metadata(looked_at).is_ok())? {
            let pool = instance.rsplit_once('-').map_or(instance, |(pool, _)| pool);
            let remedy = format!("unmount it first with `poolfs umount {pool} {}`", pasted(&place));
            return Err(Failure::in_use(place.display().to_string(), format!("{instance} is mounted there"), remedy));
        }
        context.host.detach(&place)?;
    }
    Ok(())
}

fn next_instance(context: &Context, pool: &mut Locked<PoolRecord>) -> Result<String> {
    let table = mount_table(&*context.host)?;
    loop {
        let name = format!("{}-{}", pool.record.name, pool.record.next_instance);
        pool.record.next_instance += 1;
        let socket = format!("{name}.sock");
        let mut places = [context.run.join(&socket), context.run.join(CONTAINER_SOCKETS).join(&socket)].into_iter();
        if pool_mounts(&table, &name).is_empty() && !places.any(|place| place.exists()) {
            return Ok(name);
        }
    }
}

/// The service mounts where it lives: in the mount namespace of the command that started it. The device of what is mounted.
fn confirm_visible(context: &Context, spec: &MountSpec) -> Result<String> {
    let table = mount_table(&*context.host)?;
    let own = pool_mounts(&table, &spec.instance);
    let Some(newest) = own.first() else {
        let remedy = "run all commands on one pool in one mount namespace";
        return Err(Failure::new("mount", "the pool's service mounted it in another mount namespace", remedy));
    };
    // Another command may have mounted there since this one has looked: who came first stays.
    let is_below =
        |other: &&MountEntry| own.iter().any(|own| other.id == own.parent && other.mount_point == own.mount_point);
    match table.iter().find(is_below).and_then(MountEntry::instance) {
        None => Ok(newest.device.clone()),
        Some(first) => {
            let place = spec.mount_point.display().to_string();
            Err(Failure::in_use(place, format!("{first} is mounted there"), "mount it at another place"))
        }
    }
}

fn checked_stack(context: &Context, stack: StackSpec) -> Result<StackSpec> {
    match stack {
        StackSpec::Directory { directory: path, coherence, size_bytes } => {
            Ok(StackSpec::Directory { directory: branch(context, &path)?, coherence, size_bytes })
        }
        StackSpec::Union { upper, lowers, storage, immutable_lowers } => {
            let upper = branch(context, &upper)?;
            let lowers = lowers.iter().map(|lower| lower_branch(context, lower)).collect::<Result<Vec<_>>>()?;
            if lowers.is_empty() || lowers.len() > LOWERS_MAX {
                let cause = format!("{} lower branches", lowers.len());
                return Err(Failure::usage("union", cause, format!("give one to {LOWERS_MAX}")));
            }
            for lower in &lowers {
                if lower.starts_with(&upper) || upper.starts_with(lower) {
                    let cause = format!("it overlaps the branch {}", lower.display());
                    return Err(Failure::usage(
                        upper.display().to_string(),
                        cause,
                        "use directories apart from each other",
                    ));
                }
            }
            Ok(StackSpec::Union { upper, lowers, storage, immutable_lowers })
        }
    }
}

/// A directory to mount on.
fn mount_point(context: &Context, path: &Path) -> Result<PathBuf> {
    let place = directory(context, path)?;
    if place.parent().is_none() {
        let cause = "a mount there would cover everything that this host has, its branches too";
        return Err(Failure::usage(place.display().to_string(), cause, "name another directory"));
    }
    Ok(place)
}

/// A lower branch. One that is not there may be a part of a list in which a colon is part of a name.
fn lower_branch(context: &Context, path: &Path) -> Result<PathBuf> {
    branch(context, path).map_err(|failure| {
        let remedy = failure.remedy().unwrap_or("check the path").to_owned();
        failure.with_remedy(remedy + r"; a colon in a name is written `\:`")
    })
}

/// What a branch is called: the path of a directory that is there, or a name at a cluster.
pub fn branch(context: &Context, name: &Path) -> Result<PathBuf> {
    let path = match Place::of(name) {
        Place::Directory(path) if path.as_os_str().as_encoded_bytes().starts_with(CEPH_PREFIX.as_bytes()) => {
            return directory(context, path)
                .map_err(|failure| failure.with_remedy("write a directory of a cluster as ceph:/PATH"));
        }
        Place::Directory(path) => return directory(context, path),
        Place::Ceph(path) => path,
    };
    let refused = |cause, remedy| Failure::usage(name.display().to_string(), cause, remedy);
    let name = ceph_name(path).ok_or_else(|| refused("its path goes up (\"..\")", "write the path without"))?;
    if name.to_str().is_none() {
        return Err(refused("its path is no UTF-8", "rename what is not"));
    }
    Ok(name)
}

fn directory(context: &Context, path: &Path) -> Result<PathBuf> {
    let path = &std::path::absolute(path).map_err(|error| Failure::file(path, error))?;
    let looked_at = path.clone();
    let resolved = waiting::within(context, path, move || looked_at.canonicalize().map(|path| (path.is_dir(), path)))?;
    let (is_directory, resolved) = resolved.map_err(|error| match error.kind() {
        ErrorKind::NotFound => Failure::file(path, error)
            .with_remedy(format!("check the path, or make it with `mkdir -p {}`", pasted(path))),
        _ => Failure::file(path, error),
    })?;
    if !is_directory {
        return Err(Failure::file(path, "it is not a directory").with_remedy("name a directory"));
    }
    if resolved.to_str().is_none() {
        return Err(Failure::usage(resolved.display().to_string(), "its path is no UTF-8", "rename what is not"));
    }
    Ok(resolved)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Code;

    /// Of a host that has nothing mounted.
    fn context(place: &tempfile::TempDir) -> Context {
        let host = poolfs_host::RecordingHost::new();
        host.set_file("/proc/self/mountinfo", "");
        Context::for_test(place.path(), host)
    }

    #[test]
    fn overlapping_branches_are_refused() {
        let place = tempfile::tempdir().expect("a directory");
        let make = |name: &str| {
            let path = place.path().join(name);
            std::fs::create_dir_all(&path).expect("made");
            path
        };
        let context = context(&place);
        let (upper, lower, inside) = (make("upper"), make("lower"), make("lower/inside"));
        let union = |upper: &Path, lowers: &[&Path]| {
            let lowers = lowers.iter().map(|lower| lower.to_path_buf()).collect();
            checked_stack(&context, StackSpec::union(upper, lowers))
        };
        assert!(union(&upper, &[&lower]).is_ok());
        assert!(union(&inside, &[&lower]).is_err());
        assert!(union(&lower, &[&inside]).is_err());
        assert!(union(&upper, &[]).is_err());
        assert!(union(&upper, &[&place.path().join("absent")]).is_err());
    }

    #[test]
    fn the_root_of_the_host_is_not_mounted_on() {
        let place = tempfile::tempdir().expect("a directory");
        let context = context(&place);
        std::os::unix::fs::symlink("/", place.path().join("link")).expect("made");
        for root in [Path::new("/"), Path::new("//./"), &place.path().join("link")] {
            let refused = mount_point(&context, root).expect_err("it covers all there is");
            assert_eq!(refused.code(), Code::Usage, "{}", refused.summary());
        }
        assert!(mount_point(&context, place.path()).is_ok());
    }

    #[test]
    fn who_names_a_part_of_a_name_with_a_colon_is_told_how_to_write_it() {
        let place = tempfile::tempdir().expect("a directory");
        let context = context(&place);
        let named = place.path().join("a:b");
        std::fs::create_dir(&named).expect("made");
        let text = named.to_str().expect("text");
        let told = lower_branch(&context, &split_lowers(text)[0]).expect_err("no such directory");
        assert!(told.remedy().expect("a remedy").contains(r"`\:`"));
        let escaped = text.replace(':', r"\:");
        assert_eq!(
            lower_branch(&context, &split_lowers(&escaped)[0]).expect("there"),
            named.canonicalize().expect("there")
        );
    }

    #[test]
    fn lists_of_branches_are_split() {
        assert_eq!(split_lowers("/a:/b"), [PathBuf::from("/a"), PathBuf::from("/b")]);
        assert!(split_lowers("::").is_empty());
        assert_eq!(
            split_lowers(r"/a:ceph:/b:ceph:/c/d:/xceph:/e:ceph:f"),
            ["/a", "ceph:/b", "ceph:/c/d", "/xceph", "/e", "ceph", "f"].map(PathBuf::from)
        );
        assert_eq!(split_lowers(r"/a\:b:/c\\d\e"), [PathBuf::from("/a:b"), PathBuf::from(r"/c\de")]);
    }

    #[test]
    fn a_mount_point_is_found_by_every_path_that_leads_to_it() {
        let place = tempfile::tempdir().expect("a directory");
        let place = place.path().canonicalize().expect("there");
        let (at, link) = (place.join("m"), place.join("link"));
        std::fs::create_dir(&at).expect("made");
        std::os::unix::fs::symlink("m", &link).expect("made");
        std::os::unix::fs::symlink(&link, place.join("other")).expect("made");
        std::os::unix::fs::symlink("round", place.join("round")).expect("made");
        for path in [&at, &link, &place.join("other"), &place.join("link/"), &place.join("m/../link")] {
            assert_eq!(resolved(path.clone()), at, "{}", path.display());
        }
        assert_eq!(resolved(place.join("round")), place.join("round"));
        assert_eq!(resolved(place.join("none/x")), place.join("none/x"));
    }
}
