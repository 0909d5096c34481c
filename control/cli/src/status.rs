//! The command `status`: what services report of themselves.

use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::outlived::{self, PoolProcess};
use crate::patience::Wait;
use crate::record::{InstanceRecord, PoolRecord};
use crate::service;
use crate::text::{duration, pasted, plain, print, print_json, size, table};
use poolfs_host::{ControlGroups, MountEntry, mount_table};
use poolfs_service_protocol::{
    BranchStatus, InstanceStatus, MemoryStatus, OperationPath, ProgramStatus, ReadCounts, ServiceStatus, SketchDamage,
    StackSpec, WaitStatus,
};
use serde::Serialize;
use std::fmt::Write;

/// A pool as `status --json` shows it.
#[derive(Serialize)]
struct PoolStatus {
    name: String,
    /// `running`, `dead`, `silent` (alive, but it does not answer) or `not running`.
    state: &'static str,
    /// Why it is silent.
    cause: Option<String>,
    /// What can be done about that.
    remedy: Option<String>,
    memory_limit_bytes: u64,
    memory_used_bytes: Option<u64>,
    /// What a dead service had mounted.
    dead_mounts: Vec<DeadMount>,
    /// What commands have started in it, and what of that outlives them.
    processes: Vec<PoolProcess>,
    service: Option<ServiceStatus>,
    /// Its instances whose directories others may change: programs of these are not mapped from the cache, whatever the kernel can do.
    #[serde(skip)]
    timed: Vec<String>,
}

/// What a dead service had mounted, and what takes it away.
#[derive(Serialize)]
struct DeadMount {
    mount_point: String,
    /// It is still in the table of mounts, and answers with errors.
    is_mounted: bool,
    remedy: String,
}

/// Print how all pools are, or one.
pub fn status(context: &Context, wanted: Option<&str>) -> Result<()> {
    let pools = context.pools()?;
    let records: Vec<PoolRecord> = match wanted {
        Some(name) => vec![pools.peek(name)?.ok_or_else(|| pools.absent(name))?],
        None => pools.peek_all()?,
    };
    let groups = context.groups()?;
    // At once: some may be silent.
    let groups = &groups;
    let all: Vec<PoolStatus> = std::thread::scope(|scope| {
        let asked: Vec<_> = records.iter().map(|record| scope.spawn(|| pool_status(context, groups, record))).collect();
        asked.into_iter().filter_map(|asked| asked.join().ok()).collect()
    });
    match (context.json, wanted, all.first()) {
        (true, Some(_), Some(one)) => print_json(one),
        (true, ..) => print_json(&all),
        (false, ..) if all.is_empty() => print("there is no pool\n"),
        (false, ..) => print(&all.iter().map(readable).collect::<Vec<_>>().join("\n")),
    }
}

fn timed_instances(record: &PoolRecord) -> Vec<String> {
    let is_timed = |instance: &&InstanceRecord| matches!(&instance.spec.stack, StackSpec::Directory { coherence, .. } if coherence.timed().is_some());
    record.instances.iter().filter(is_timed).map(|instance| instance.spec.instance.clone()).collect()
}

fn pool_status(context: &Context, groups: &ControlGroups, record: &PoolRecord) -> PoolStatus {
    let mut status = PoolStatus {
        name: record.name.clone(),
        state: "not running",
        cause: None,
        remedy: None,
        memory_limit_bytes: record.memory_bytes,
        memory_used_bytes: groups.memory_used(&*context.host, &record.name),
        dead_mounts: Vec::new(),
        processes: outlived::processes(context, groups, &record.name),
        service: None,
        timed: timed_instances(record),
    };
    let found = Found::of(context, record, &mut context.patience.begin());
    status.state = found.name();
    match found {
        Found::NotRunning => {}
        Found::Dead => {
            let table = mount_table(&*context.host).ok();
            let is_there = |instance: &InstanceRecord| {
                let is_its = |entry: &MountEntry| entry.instance() == Some(&instance.spec.instance);
                table.as_ref().is_none_or(|table| table.iter().any(is_its))
            };
            let dead = |instance| dead_mount(&record.name, instance, is_there(instance));
            status.dead_mounts = record.instances.iter().map(dead).collect();
        }
        Found::Running(told) => status.service = Some(*told),
        Found::Silent(failure) => {
            (status.cause, status.remedy) = (Some(failure.summary()), failure.remedy().map(str::to_owned));
        }
    }
    status
}

/// How a pool's service was found.
pub enum Found {
    /// There is none.
    NotRunning,
    /// It has ended, and nobody has asked for that.
    Dead,
    /// It is alive, and does not answer.
    Silent(Failure),
    /// It answers.
    Running(Box<ServiceStatus>),
}

impl Found {
    /// Look at it.
    pub fn of(context: &Context, record: &PoolRecord, wait: &mut Wait<'_>) -> Found {
        match record.service_alive(&*context.host) {
            None => Found::NotRunning,
            Some(false) => Found::Dead,
            Some(true) => match service::status_within(context, &record.name, wait) {
                Ok(told) => Found::Running(Box::new(told)),
                // It may have ended while it was asked.
                Err(_) if record.service_alive(&*context.host) == Some(false) => Found::Dead,
                Err(failure) => Found::Silent(failure),
            },
        }
    }

    /// As `--json` calls it.
    pub fn name(&self) -> &'static str {
        match self {
            Found::NotRunning => "not running",
            Found::Dead => "dead",
            Found::Silent(_) => "silent",
            Found::Running(_) => "running",
        }
    }
}

fn dead_mount(pool: &str, instance: &InstanceRecord, is_mounted: bool) -> DeadMount {
    let mount_point = instance.spec.mount_point.display().to_string();
    let remedy = match &instance.container {
        Some(container) => format!("poolfs stop {container}"),
        None => format!("poolfs umount {pool} {}", pasted(&instance.spec.mount_point)),
    };
    DeadMount { mount_point, is_mounted, remedy }
}

fn readable(pool: &PoolStatus) -> String {
    let mut text = format!("pool {}: service {}", pool.name, pool.state);
    if let Some(service) = &pool.service {
        let _ = write!(text, " (process {}, {} s)", service.pid, service.uptime_seconds);
    }
    let used = pool.memory_used_bytes.map_or_else(|| "-".to_owned(), size);
    let _ = writeln!(text, ", memory {used} of {}", size(pool.memory_limit_bytes));
    if let Some(cause) = &pool.cause {
        let _ = writeln!(text, "  it does not answer: {}", plain(cause));
    }
    if let Some(remedy) = &pool.remedy {
        let _ = writeln!(text, "  remedy: {}", plain(remedy));
    }
    if pool.dead_mounts.iter().any(|mount| mount.is_mounted) {
        let _ = writeln!(
            text,
            "  the service is dead: its mounts answer with errors until they are taken away or mounted again"
        );
    } else if pool.state == "dead" {
        let _ = writeln!(text, "  the service has ended, and what it had mounted with it");
    }
    for DeadMount { mount_point, is_mounted, remedy } in &pool.dead_mounts {
        let _ = match is_mounted {
            true => writeln!(text, "  dead mount {mount_point}: `{remedy}`"),
            false => writeln!(
                text,
                "  nothing is mounted at {mount_point} any more: what is written there goes into the directory below; mount it again, or forget it with `{remedy}`"
            ),
        };
    }
    for process in &pool.processes {
        let since =
            if process.outlived_exec { "left running by a `poolfs exec` that has ended" } else { "by `poolfs exec`" };
        let _ = writeln!(text, "  process {process}: {since}");
    }
    if let Some(service) = &pool.service {
        service.memory.iter().for_each(|memory| text += &memory_line(memory));
        text += &cache_lines(service);
        service.unresponsive_branches.iter().for_each(|branch| text += &branch_line(branch));
        service.instances.iter().for_each(|instance| {
            text += &instance_lines(instance, pool.timed.contains(&instance.instance));
        });
    }
    text
}

fn memory_line(memory: &MemoryStatus) -> String {
    let mut text = format!(
        "  memory of the service {} of {}, {}; short {} times",
        size(memory.kept_bytes),
        size(memory.limit_bytes),
        memory.state,
        memory.shortages_total,
    );
    if memory.instances_without_segments > 0 {
        let _ = write!(text, "; clients of {} instances keep some of it", memory.instances_without_segments);
    }
    text + "\n"
}

fn cache_lines(service: &ServiceStatus) -> String {
    let cache = &service.cache;
    let reads = cache.hits + cache.misses;
    let rate = if reads == 0 { "-".to_owned() } else { format!("{:.1} %", 100.0 * cache.hits as f64 / reads as f64) };
    format!(
        "  cache {} of {}{}, dirty {}, pinned {}, shared {}, private {}; {reads} block reads, {rate} from the cache, {} \
         evicted\n",
        size(cache.used_bytes),
        size(cache.limit_bytes),
        if cache.allowed_bytes < cache.limit_bytes {
            format!(" ({} now, for lack of memory)", size(cache.allowed_bytes))
        } else {
            String::new()
        },
        size(cache.dirty_bytes),
        size(cache.pinned_bytes),
        size(cache.shared_bytes),
        size(cache.private_bytes),
        cache.evictions,
    )
}

fn branch_line(branch: &BranchStatus) -> String {
    let BranchStatus { path, waiting: WaitStatus { calls, longest_ms, operation } } = branch;
    format!(
        "  branch {}: no answer to {operation} for {}; {calls} calls wait for it\n",
        path.display(),
        duration(longest_ms.saturating_mul(1_000_000))
    )
}

fn instance_lines(instance: &InstanceStatus, is_timed: bool) -> String {
    let mut text = format!(
        "  {} at {}: {} sessions, {} handles, {} nodes; asked by {}; the kernel caches {} besides\n",
        instance.instance,
        instance.mount_point.display(),
        instance.sessions,
        instance.handles,
        instance.nodes,
        instance.transport.name(),
        size(instance.kernel_cached_bytes),
    );
    if !instance.sessions_refused.is_empty() {
        let causes = instance.sessions_refused.iter().map(|(cause, count)| format!("{cause} {count}"));
        let causes = causes.collect::<Vec<_>>().join(", ");
        let _ = writeln!(text, "    sessions refused, left to FUSE: {causes}");
    }
    if let Some(WaitStatus { calls, longest_ms, operation }) = &instance.waiting {
        let longest = duration(longest_ms.saturating_mul(1_000_000));
        let _ = writeln!(text, "    waiting: {calls} requests, the longest ({operation}) for {longest}");
    }
    if let Some(timed_out) = instance.timed_out.filter(|&timed_out| timed_out > 0) {
        let _ = writeln!(text, "    failed because they took longer than --timeout: {timed_out} requests by FUSE");
    }
    let ReadCounts { direct, library, kernel } = instance.reads;
    if direct > 0 || library > 0 || kernel > 0 {
        let _ = writeln!(text, "    reads: {direct} without a request, {library} by request, {kernel} by FUSE");
    }
    match instance.programs {
        Some(ProgramStatus { opens: 0, .. }) => {}
        Some(ProgramStatus { opens, files, bytes }) => {
            let bytes = size(bytes);
            let _ =
                writeln!(text, "    passthrough: {opens} opens of programs; {files} mapped from the cache, {bytes}");
        }
        None if is_timed => text += "    no passthrough: others may change the directory (--coherence)\n",
        None => text += "    no passthrough: the kernel caches programs itself (poolfs doctor)\n",
    }
    if instance.posted_requests > 0 {
        let _ = writeln!(text, "    posted writes: {} requests nobody waited for", instance.posted_requests);
    }
    for (cause, count) in &instance.not_posted {
        let _ = writeln!(text, "    not posted, {count} times: {}", cause.text());
    }
    for (cause, count) in &instance.not_direct {
        let _ = writeln!(text, "    not without a request, {count} times: {}", cause.text());
    }
    if let Some(union) = &instance.union {
        let _ = writeln!(
            text,
            "    union: {} sketches, {} blocks moved ({}), {} partly copied, {} in transit, {} files still to be copied up, {} objects copied up",
            union.sketches,
            union.blocks_moved,
            size(union.blocks_moved.saturating_mul(4096)),
            union.blocks_copied,
            union.blocks_in_transit,
            union.copy_ups_deferred,
            union.objects_copied,
        );
        for SketchDamage { path, cause } in &union.damaged {
            let _ = writeln!(text, "    damaged: {path}: {cause}");
        }
    }
    let mut operations = table(&["operation", "path", "count", "errors", "p50", "p99"]);
    for (path, kinds) in &instance.operations {
        let path = match path {
            OperationPath::Library => "library",
            OperationPath::Fuse => "FUSE",
        };
        for (kind, counted) in kinds.iter().filter(|(_, counted)| counted.count > 0) {
            let (count, errors) = (counted.count.to_string(), counted.errors.to_string());
            let (p50, p99) = (duration(counted.p50_ns), duration(counted.p99_ns));
            operations.add_row([kind.as_str(), path, &count, &errors, &p50, &p99]);
        }
    }
    if !operations.is_empty() {
        operations.to_string().lines().for_each(|line| text += &format!("   {}\n", line.trim_end()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_service_protocol::{
        BranchStatus, CacheStatus, KindStatus, NotDirect, NotPosted, Transport, UnionStatus, WaitStatus,
    };
    use std::collections::BTreeMap;

    fn example() -> PoolStatus {
        let counted = KindStatus { count: 12, errors: 1, p50_ns: 2047, p99_ns: 65_535 };
        let kinds = BTreeMap::from([("read".to_owned(), counted), ("write".to_owned(), KindStatus::default())]);
        let damage = SketchDamage { path: "usr/a".into(), cause: "its bitmap is missing".into() };
        let union = UnionStatus { sketches: 1, blocks_moved: 2, damaged: vec![damage], ..UnionStatus::default() };
        let instance = InstanceStatus {
            instance: "web-1".into(),
            mount_point: "/mnt".into(),
            transport: Transport::IoUring,
            sessions: 1,
            sessions_refused: BTreeMap::from([("EUSERS".to_owned(), 4)]),
            handles: 2,
            nodes: 3,
            kernel_cached_bytes: 4096,
            operations: BTreeMap::from([(OperationPath::Library, kinds)]),
            reads: ReadCounts { direct: 77, library: 12, kernel: 5 },
            programs: Some(ProgramStatus { opens: 13, files: 2, bytes: 8 << 20 }),
            not_direct: BTreeMap::from([(NotDirect::Writers, 6)]),
            posted_requests: 12,
            not_posted: BTreeMap::from([(NotPosted::Observed, 2)]),
            waiting: Some(WaitStatus { calls: 3, longest_ms: 4500, operation: "write".into() }),
            timed_out: Some(7),
            union: Some(union),
        };
        let cache =
            CacheStatus { limit_bytes: 2 << 20, allowed_bytes: 1 << 20, hits: 3, misses: 1, ..CacheStatus::default() };
        let memory = MemoryStatus {
            limit_bytes: 200 << 20,
            kept_bytes: 180 << 20,
            state: "short".into(),
            shortages_total: 3,
            instances_without_segments: 1,
            ..MemoryStatus::default()
        };
        let service = ServiceStatus {
            pool: "web".into(),
            pid: 42,
            uptime_seconds: 5,
            cache,
            memory: Some(memory),
            unresponsive_branches: vec![BranchStatus {
                path: "/srv/nfs".into(),
                waiting: WaitStatus { calls: 2, longest_ms: 12_000, operation: "fsync".into() },
            }],
            instances: vec![instance],
        };
        PoolStatus {
            name: "web".into(),
            state: "running",
            cause: None,
            remedy: None,
            memory_limit_bytes: 1 << 30,
            memory_used_bytes: Some(1 << 20),
            dead_mounts: Vec::new(),
            processes: vec![
                PoolProcess { pid: 43, name: "postgres".into(), outlived_exec: true },
                PoolProcess { pid: 44, name: "psql".into(), outlived_exec: false },
            ],
            service: Some(service),
            timed: Vec::new(),
        }
    }

    #[test]
    fn everything_that_was_counted_is_shown() {
        let text = readable(&example());
        for part in [
            "process 42",
            "process 43 (postgres): left running",
            "process 44 (psql): by `poolfs exec`",
            "by io_uring",
            "EUSERS 4",
            "75.0 %",
            "web-1 at /mnt",
            "usr/a: its bitmap is missing",
            "2.0 us",
            "library",
            "77 without a request, 12 by request, 5 by FUSE",
            "6 times: somebody has the file open for writing",
            "13 opens of programs; 2 mapped from the cache, 8.0 MiB",
            "memory of the service 180 MiB of 200 MiB, short; short 3 times; clients of 1 instances keep",
            "of 2.0 MiB (1.0 MiB now, for lack of memory)",
            "posted writes: 12 requests",
            "waiting: 3 requests, the longest (write) for 4.5 s",
            "failed because they took longer than --timeout: 7 requests by FUSE",
            "branch /srv/nfs: no answer to fsync for 12.0 s; 2 calls wait for it",
            "2 times: somebody else came to use the file",
        ] {
            assert!(text.contains(part), "{part} in:\n{text}");
        }
        assert!(!text.contains("write "), "nothing was written:\n{text}");
    }

    #[test]
    fn a_kernel_that_maps_nothing_from_the_cache_is_told_of() {
        let mut status = example();
        let service = status.service.as_mut().expect("there is one");
        service.instances[0].programs = None;
        assert!(readable(&status).contains("no passthrough: the kernel caches programs itself (poolfs doctor)"));
        status.timed = vec!["web-1".into()];
        let text = readable(&status);
        assert!(text.contains("no passthrough: others may change the directory") && !text.contains("doctor"), "{text}");
    }

    #[test]
    fn a_dead_service_is_called_dead() {
        for (is_mounted, says) in [(true, "dead mount /mnt"), (false, "nothing is mounted at /mnt any more")] {
            let mount = DeadMount { mount_point: "/mnt".into(), is_mounted, remedy: "poolfs umount web /mnt".into() };
            let dead = PoolStatus { state: "dead", service: None, dead_mounts: vec![mount], ..example() };
            let text = readable(&dead);
            assert!(text.contains("dead") && text.contains(says) && text.contains("poolfs umount web /mnt"), "{text}");
        }
    }
}
