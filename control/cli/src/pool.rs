//! The `pool` commands, and the repair of what killed commands left.

use crate::container::ContainerRecord;
use crate::context::Context;
use crate::failure::{Code, Failure, Result};
use crate::outlived;
use crate::record::{PoolRecord, ProcessRecord, RECORD_VERSION, memory_bytes_min};
use crate::service;
use crate::state::Locked;
use crate::text::{complain, count, least_size, pasted, plain, print, print_json, print_table, size, table};
use crate::unmount::has_suspects;
use poolfs_host::{CpuSet, Host, mount_table};
use poolfs_service_protocol::{CACHE_BYTES_MIN, Command, MountSpec, StackSpec, UnmountMode, is_valid_name};
use std::path::{Path, PathBuf};

/// Longest name: instances add a number to it and must stay valid.
const NAME_BYTES_MAX: usize = 48;

/// What a new pool may use.
#[derive(Clone, Debug)]
pub struct NewPool {
    /// Its name.
    pub name: String,
    /// Its CPUs; all that are online if none are given.
    pub cpus: Option<String>,
    /// Memory of service and containers together.
    pub memory_bytes: u64,
    /// The service's cache.
    pub cache_bytes: u64,
    /// A throw-away pool: the command it is made for.
    pub owner: Option<ProcessRecord>,
}

/// Make a pool.
pub fn create(context: &Context, new: NewPool) -> Result<()> {
    if !is_valid_name(&new.name) || new.name.len() > NAME_BYTES_MAX {
        return Err(crate::state::bad_name("pool", &new.name));
    }
    let thing = format!("pool {}", new.name);
    let online = CpuSet::online(&*context.host)?;
    let cpus = match &new.cpus {
        Some(text) => CpuSet::parse(text).map_err(|error| Failure::usage(&thing, error, "write --cpus as in 0-1,3"))?,
        None => online.clone(),
    };
    let missing = cpus.missing_from(&online);
    if !missing.is_empty() {
        let cause = match missing.as_slice() {
            [one] => format!("CPU {one} is not online"),
            [first, .., last] => format!("{} of {first} to {last} are not online", count(missing.len() as u64, "CPU")),
            [] => String::new(),
        };
        return Err(Failure::usage(thing, cause, format!("online are {online}")));
    }
    if new.cache_bytes < CACHE_BYTES_MIN {
        let cause = format!("a cache of {} is too small to work", size(new.cache_bytes));
        return Err(Failure::usage(thing, cause, format!("give it {} of --cache at least", size(CACHE_BYTES_MIN))));
    }
    let memory_min = memory_bytes_min(new.cache_bytes);
    if new.memory_bytes < memory_min {
        let cause = format!("a cache of {} needs {} of memory at least", size(new.cache_bytes), least_size(memory_min));
        return Err(Failure::usage(thing, cause, "give it more --memory or less --cache"));
    }
    if let Ok(groups) = context.groups() {
        groups.check_owner(&*context.host, &new.name)?;
    }
    let others: Vec<PoolRecord> = context.pools()?.peek_all()?;
    // Where the kernel does not say, nothing is known to be too much.
    if let Some(total) = host_memory_bytes(&*context.host) {
        if new.memory_bytes > total {
            let cause = format!("{} of memory are more than the host's {}", size(new.memory_bytes), size(total));
            return Err(Failure::usage(thing, cause, "give it less --memory"));
        }
        let all = others.iter().fold(new.memory_bytes, |all, pool| all.saturating_add(pool.memory_bytes));
        if all > total && new.owner.is_none() {
            let (all, total) = (size(all), size(total));
            complain(&format!("poolfs: all pools together may use {all} of memory, and the host has {total}"));
        }
    }
    let record = PoolRecord {
        version: RECORD_VERSION,
        name: new.name,
        cpus: cpus.to_string(),
        memory_bytes: new.memory_bytes,
        cache_bytes: new.cache_bytes,
        owner: new.owner,
        service: None,
        next_instance: 1,
        instances: Vec::new(),
        in_memory: Vec::new(),
        ceph_holder: None,
    };
    context.pools()?.create(&record.name, &record, |_| Ok(()))
}

/// The host's memory; none where it is not told.
pub fn host_memory_bytes(host: &dyn Host) -> Option<u64> {
    let text = host.read_text(Path::new("/proc/meminfo")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Print the pools.
pub fn list(context: &Context) -> Result<()> {
    let pools: Vec<PoolRecord> = context.pools()?.peek_all()?;
    if context.json {
        return print_json(&pools.iter().map(|pool| json(context, pool)).collect::<Result<Vec<_>>>()?);
    }
    let mut table = table(&["name", "cpus", "memory", "cache", "service", "mounts"]);
    for pool in &pools {
        let service = service_state(context, pool);
        let (memory, cache) = (size(pool.memory_bytes), size(pool.cache_bytes));
        let mounts =
            pool.instances.iter().filter(|instance| !instance.was_given_up(&*context.host)).count().to_string();
        table.add_row([&pool.name, &pool.cpus, &memory, &cache, service, &mounts]);
    }
    print_table(&table)
}

/// What is recorded of a pool, and the state of its service that the table shows.
fn json(context: &Context, pool: &PoolRecord) -> Result<serde_json::Value> {
    let mut pool = pool.clone();
    pool.instances.retain(|instance| !instance.was_given_up(&*context.host));
    let mut object = serde_json::to_value(&pool).map_err(|error| Failure::new("output", error, ""))?;
    object["state"] = service_state(context, &pool).into();
    Ok(object)
}

/// In a word, how a pool's service is.
pub fn service_state(context: &Context, pool: &PoolRecord) -> &'static str {
    match pool.service_alive(&*context.host) {
        None => "not running",
        Some(true) => "running",
        Some(false) => "dead",
    }
}

/// Print everything about a pool.
pub fn inspect(context: &Context, name: &str) -> Result<()> {
    let pools = context.pools()?;
    let pool: PoolRecord = pools.peek(name)?.ok_or_else(|| pools.absent(name))?;
    if context.json {
        return print_json(&json(context, &pool)?);
    }
    let mut text = format!(
        "pool      {}\ncpus      {}\nmemory    {}\ncache     {}\nservice   {}",
        pool.name,
        pool.cpus,
        size(pool.memory_bytes),
        size(pool.cache_bytes),
        service_state(context, &pool)
    );
    if let Some(process) = &pool.service {
        text += &format!(" (process {})", process.pid);
    }
    for instance in &pool.instances {
        let (name, place) = (&instance.spec.instance, instance.spec.mount_point.display());
        text += &match instance {
            known if known.is_being_mounted(&*context.host) => format!("\nmounting  {name} at {place}"),
            known if known.was_given_up(&*context.host) => {
                format!(
                    "\nfailed    {name} at {place}: the next command on the pool that its service answers forgets it"
                )
            }
            _ => format!("\nmounted   {name} at {place}"),
        };
        text += &format!("\n          {}", settings(&instance.spec));
    }
    print(&(text + "\n"))
}

/// What an instance was mounted with, in words.
fn settings(spec: &MountSpec) -> String {
    let at_most = |bytes: &Option<u64>| bytes.map(|bytes| format!("at most {}", size(bytes)));
    let shown = |path: &Path| plain(&path.display().to_string());
    let mut parts = Vec::new();
    match &spec.stack {
        StackSpec::Directory { directory, coherence, size_bytes } => {
            parts.push(format!("directory {}", shown(directory)));
            parts.push(format!("coherence {coherence}"));
            parts.extend(at_most(size_bytes));
        }
        StackSpec::Union { upper, lowers, storage, immutable_lowers } => {
            parts.push(format!("upper branch {}", shown(upper)));
            parts.push(format!("format {}", storage.format));
            parts.extend(at_most(&storage.size_bytes));
            let immutable = if *immutable_lowers { "immutable " } else { "" };
            parts.extend(lowers.iter().map(|lower| format!("{immutable}lower branch {}", shown(lower))));
        }
    }
    let ceph = spec.ceph.iter().flat_map(|ceph| {
        let file = |path: &Option<PathBuf>| path.as_deref().map(shown);
        [
            ("configuration", file(&ceph.configuration)),
            ("user", ceph.user.as_deref().map(plain)),
            ("keyring", file(&ceph.keyring)),
            ("filesystem", ceph.filesystem.as_deref().map(plain)),
        ]
    });
    parts.extend(ceph.filter_map(|(name, value)| Some(format!("Ceph {name} {}", value?))));
    parts.extend(spec.timeout.map(|timeout| format!("timeout {timeout}")));
    let switches =
        [(spec.wait_for_writes, "waits for writes"), (spec.suid, "set-id bits"), (spec.devices, "device files")];
    parts.extend(switches.into_iter().filter(|(is_set, _)| *is_set).map(|(_, name)| name.to_owned()));
    parts.join(", ")
}

/// Remove a pool; with `force` also what commands have left running in it.
pub fn remove(context: &Context, name: &str, force: bool) -> Result<()> {
    let mut pool = lock(context, name)?;
    let containers: Vec<ContainerRecord> = context.containers()?.peek_all()?;
    if let Some(container) = containers.iter().find(|container| container.pool == name) {
        let stop = format!("`poolfs stop {}`", container.name);
        let remedy = match container.remove_at_end
            && container.monitor.as_ref().is_some_and(|monitor| monitor.is_alive(&*context.host))
        {
            true => format!("end it with {stop}, which removes it"),
            false => format!("end and remove it with {stop} and `poolfs rm {}`", container.name),
        };
        return Err(Failure::in_use(
            format!("pool {name}"),
            format!("it has the container {}", container.name),
            remedy,
        ));
    }
    let alive = pool.record.service_alive(&*context.host) == Some(true);
    if let Some(instance) = pool.record.instances.first().filter(|_| alive) {
        let place = instance.spec.mount_point.display();
        let remedy = format!("unmount it with `poolfs umount {name} {}`", pasted(&instance.spec.mount_point));
        return Err(Failure::in_use(format!("pool {name}"), format!("it is mounted at {place}"), remedy));
    }
    let groups = context.groups()?;
    if force {
        outlived::kill(context, &groups, name)?;
    }
    let running = outlived::processes(context, &groups, name);
    if !running.is_empty() {
        let named: Vec<String> = running.iter().map(ToString::to_string).collect();
        let cause = format!("in it run processes of `poolfs exec`: {}", named.join(", "));
        let remedy = format!("end them, or have them killed with `poolfs pool rm --force {name}`");
        return Err(Failure::in_use(format!("pool {name}"), cause, remedy));
    }
    service::end(context, &mut pool)?;
    outlived::remove_pool(context, pool)
}

/// Lock a pool and forget what killed commands left in it.
pub fn lock(context: &Context, name: &str) -> Result<Locked<PoolRecord>> {
    let mut pool = context.pools()?.lock::<PoolRecord>(name)?;
    repair(context, &mut pool);
    Ok(pool)
}

/// Bring the record to what is so: unmount what was mounted for commands that are dead, and what commands were about to mount that died before
/// they could say that it is there (nobody was told that it can be used), forget what is unmounted, and remove the groups
/// of commands that nobody outlives.
fn repair(context: &Context, pool: &mut Locked<PoolRecord>) {
    let pool_name = pool.record.name.clone();
    let warn = |failure: Failure| {
        // That a service stands still is told by whoever needs it.
        if !matches!(failure.code(), Code::NoAnswer | Code::Interrupted) {
            let cause = failure.summary();
            complain(&format!("poolfs: what an earlier command left in pool {pool_name} stays for now: {cause}"));
        }
    };
    if let Ok(groups) = context.groups() {
        outlived::reap(context, &groups, &pool.record.name);
    }
    let orphaned = |by: &Option<ProcessRecord>| by.as_ref().is_some_and(|process| !process.is_alive(&*context.host));
    let orphans: Vec<String> = pool
        .record
        .instances
        .iter()
        .filter(|instance| orphaned(&instance.owner) || orphaned(&instance.mounter))
        .map(|instance| instance.spec.instance.clone())
        .collect();
    let is_alive = pool.record.service_alive(&*context.host) == Some(true);
    for instance in orphans {
        // It may have to write for long: the service goes on with that by itself, and the next command finds it done.
        let command = Command::Unmount { instance: instance.clone(), ending: UnmountMode::Detached };
        let told = if is_alive { service::tell_briefly(context, &pool_name, &command) } else { Ok(()) };
        if let Err(failure) =
            told.and_then(|()| crate::unmount::unmount_instance(context, pool, &instance, UnmountMode::Detached))
        {
            // What is wrong with this mount is nothing to other commands on the pool; the next one tries again.
            warn(failure);
        }
    }
    if let Err(failure) = crate::unmount::forget_unserved(context, pool) {
        warn(failure);
    }
    let is_alive = pool.record.service_alive(&*context.host) == Some(true);
    if pool.record.instances.is_empty() && is_alive {
        // Whoever unmounted the last of them was killed before it could end the service.
        service::end(context, pool).unwrap_or_else(warn);
    }
}

/// Bring the records of all pools to what is so, and remove throw-away pools whose commands were killed. What somebody else works on,
/// and failures, are left for the next time.
pub fn sweep(context: &Context) {
    let _kept_back = context.patience.keep_most_back();
    let swept = || -> Result<()> {
        let pools = context.pools()?;
        let table = mount_table(&*context.host)?;
        for pool in pools.peek_all::<PoolRecord>()? {
            let dead = |record: &PoolRecord| record.owner.as_ref().is_some_and(|o| !o.is_alive(&*context.host));
            let is_alive = pool.service_alive(&*context.host) == Some(true);
            let is_to_be_repaired = dead(&pool) || (is_alive && has_suspects(&*context.host, &table, &pool));
            if !is_to_be_repaired {
                continue;
            }
            let Some(mut locked) = pools.lock_now::<PoolRecord>(&pool.name)? else { continue };
            // What cannot be written back keeps its mount, and its pool with it. So does who outlives the command.
            repair(context, &mut locked);
            if dead(&locked.record) && locked.record.instances.is_empty() {
                service::end(context, &mut locked)?;
                let groups = context.groups()?;
                if outlived::processes(context, &groups, &pool.name).is_empty() {
                    outlived::remove_pool(context, locked)?;
                }
            }
        }
        Ok(())
    };
    if let Err(failure) = swept() {
        complain(&format!("poolfs: what a killed command left stays for now: {}", failure.summary()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::InstanceRecord;
    use poolfs_host::RecordingHost;
    use poolfs_service_protocol::{Coherence, Storage, UpperFormat};

    const HYBRID: &str = include_str!("../../host/fixtures/cgroup-hybrid.tree");

    fn host() -> RecordingHost {
        let host = RecordingHost::from_tree(HYBRID);
        host.set_file("/sys/devices/system/cpu/online", "0-1\n");
        host.set_file("/proc/meminfo", "MemTotal:       25165824 kB\nMemFree:        1 kB\n");
        host
    }

    fn new(name: &str, cpus: &str, memory_bytes: u64) -> NewPool {
        let (name, cpus) = (name.to_owned(), Some(cpus.to_owned()));
        NewPool { name, cpus, memory_bytes, cache_bytes: 64 << 20, owner: None }
    }

    #[test]
    fn inspect_says_what_an_instance_was_mounted_with() {
        let storage = Storage { format: UpperFormat::ALL[1].1, size_bytes: Some(300 << 20) };
        let lowers = vec!["/a".into(), "/b".into()];
        let stack = StackSpec::Union { upper: "/up".into(), lowers, storage, immutable_lowers: false };
        let mut spec = MountSpec::new("web-1", "/mnt", stack);
        spec.timeout = Some("30s".parse().expect("a time"));
        spec.suid = true;
        assert_eq!(
            settings(&spec),
            "upper branch /up, format bcow, at most 300 MiB, lower branch /a, lower branch /b, timeout 30s, set-id bits"
        );
        let (upper, lowers) = ("/up".into(), vec!["/a".into()]);
        spec.stack = StackSpec::Union { upper, lowers, storage: Storage::default(), immutable_lowers: true };
        (spec.timeout, spec.suid) = (None, false);
        assert_eq!(settings(&spec), "upper branch /up, format sparse, immutable lower branch /a");
        let coherence = Coherence::Timed { milliseconds: 1000 };
        spec.stack = StackSpec::Directory { directory: "/d".into(), coherence, size_bytes: None };
        assert_eq!(settings(&spec), "directory /d, coherence timed:1s");
    }

    #[test]
    fn a_pool_that_cannot_be_is_refused_with_cause_and_remedy() {
        let place = tempfile::tempdir().expect("a directory");
        let context = Context::for_test(place.path(), host());
        create(&context, new("web", "0-1", 1 << 30)).expect("made");
        for (wrong, part) in [
            (new("web", "0", 1 << 30), "the name is taken"),
            (new("../web", "0", 1 << 30), "not allowed"),
            (new(&"x".repeat(49), "0", 1 << 30), "not allowed"),
            (new("b", "1-2", 1 << 30), "CPU 2 is not online"),
            (new("b", "0-99", 1 << 30), "98 CPUs of 2 to 99 are not online"),
            (NewPool { cache_bytes: 1 << 20, ..new("b", "0", 193 << 20) }, "needs 194 MiB of memory"),
            (new("b", "first", 1 << 30), "list of CPUs"),
            (NewPool { cache_bytes: CACHE_BYTES_MIN - 1, ..new("b", "0", 1 << 30) }, "too small to work"),
            (new("b", "0", 64 << 20), "needs 264 MiB of memory"),
            (new("b", "0", 1000 << 30), "1000 GiB of memory are more than the host's 24.0 GiB"),
        ] {
            let text = create(&context, wrong).expect_err(part).to_string();
            assert!(text.contains(part) && text.contains("remedy"), "{text}");
        }
        remove(&context, "web", false).expect("removed");
        assert!(remove(&context, "web", false).expect_err("gone").to_string().contains("no such pool"));
    }

    /// A pool whose service (process 42, started at 777) has one mount, at /mnt/a.
    fn with_mount(place: &Path) -> (Context, std::sync::Arc<RecordingHost>) {
        let recorded = host();
        recorded.set_process(42, 777);
        let table = "90 27 0:40 / /mnt/a rw - fuse.poolfs poolfs:web-1 rw\n";
        let mounted = HYBRID.lines().next().and_then(|line| line.split_once('\t')).expect("a table").1;
        recorded.set_file("/proc/self/mountinfo", &(mounted.replace("\\n", "\n") + table));
        let recorded = std::sync::Arc::new(recorded);
        let mut context = Context::for_test(place, RecordingHost::new());
        context.host = Box::new(std::sync::Arc::clone(&recorded));
        create(&context, new("web", "0-1", 1 << 30)).expect("made");
        let mut pool = context.pools().expect("opened").lock::<PoolRecord>("web").expect("locked");
        pool.record.service = ProcessRecord::of(&*context.host, 42);
        let stack = StackSpec::directory("/data");
        let spec = MountSpec::new("web-1", "/mnt/a", stack);
        pool.record.instances.push(InstanceRecord {
            spec,
            owner: None,
            container: None,
            mounter: None,
            places: Vec::new(),
            device: None,
            is_store: false,
        });
        pool.save().expect("saved");
        drop(pool);
        (context, recorded)
    }

    #[test]
    fn what_a_dead_service_left_is_detached_and_its_number_is_never_signalled() {
        let place = tempfile::tempdir().expect("a directory");
        let (context, recorded) = with_mount(place.path());
        let pool = context.pools().expect("opened").peek::<PoolRecord>("web").expect("read").expect("there");
        assert_eq!(service_state(&context, &pool), "running");
        assert!(remove(&context, "web", false).expect_err("mounted").to_string().contains("/mnt/a"));
        // The number now means another process.
        recorded.set_process(42, 900);
        assert_eq!(service_state(&context, &pool), "dead");
        remove(&context, "web", false).expect("removed");
        let log = recorded.log();
        assert!(log.contains(&"detach /mnt/a".to_owned()), "{log:?}");
        assert!(log.iter().all(|line| !line.starts_with("signal")), "{log:?}");
    }

    #[test]
    fn a_mount_is_unmounted_though_its_service_dies_when_it_is_asked_for_a_sign_of_life() {
        let place = tempfile::tempdir().expect("a directory");
        let (context, recorded) = with_mount(place.path());
        std::fs::create_dir_all(&context.run).expect("made");
        let path = service::control_socket(&context, "web");
        let listener = std::os::unix::net::UnixListener::bind(path).expect("bound");
        let dying = std::sync::Arc::clone(&recorded);
        let service = std::thread::spawn(move || {
            let asked = listener.accept().expect("somebody asks");
            dying.set_process(42, 900);
            drop(asked);
        });
        crate::unmount::umount(&context, "web", Path::new("/mnt/a"), false).expect("unmounted");
        service.join().expect("it was asked");
        let log = recorded.log();
        assert!(log.contains(&"detach /mnt/a".to_owned()), "{log:?}");
    }

    #[test]
    fn a_throw_away_pool_goes_with_its_command() {
        let place = tempfile::tempdir().expect("a directory");
        let recorded = host();
        recorded.set_process(7, 1);
        let recorded = std::sync::Arc::new(recorded);
        let mut context = Context::for_test(place.path(), RecordingHost::new());
        context.host = Box::new(std::sync::Arc::clone(&recorded));
        let owner = ProcessRecord::of(&*context.host, 7);
        create(&context, NewPool { owner, ..new("exec-7-1", "0", 1 << 30) }).expect("made");
        create(&context, new("kept", "0", 1 << 30)).expect("made");
        sweep(&context);
        assert_eq!(context.pools().expect("opened").names().expect("listed"), ["exec-7-1", "kept"]);
        recorded.set_process(7, 2);
        sweep(&context);
        assert_eq!(context.pools().expect("opened").names().expect("listed"), ["kept"]);
    }
}
