//! Processes that outlive the `exec` that brought them into a pool, and the end of the pool's control groups.
//!
//! They stay in its control group. The next command that looks at the pool after the last of them has ended removes the group.

use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::record::PoolRecord;
use crate::state::Locked;
use crate::text::complain;
use crate::waiting;
use poolfs_host::{ControlGroups, Leaf, ProcessIdentity};
use serde::Serialize;
use std::path::Path;
use std::time::{Duration, Instant};

/// What the group of an `exec` begins with; the number of its process and when that started follow.
const GROUP_PREFIX: &str = "exec-";
/// Longest wait for a group to be empty after its last process ended: it counts for a moment more.
const EMPTY_WAIT: Duration = Duration::from_secs(5);
const EMPTY_PAUSE: Duration = Duration::from_millis(5);
/// Longest wait for killed processes to be gone.
const KILL_WAIT: Duration = Duration::from_secs(10);

/// A process that runs in a pool outside of containers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PoolProcess {
    /// Its number.
    pub pid: u32,
    /// The name of its program.
    pub name: String,
    /// Whether the `exec` that started it has ended.
    pub outlived_exec: bool,
}

impl std::fmt::Display for PoolProcess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.pid, self.name)
    }
}

/// The name of the group of an `exec`, which nobody else has: numbers of processes are given again, and to others in other namespaces.
pub fn group_name(exec: &ProcessIdentity) -> String {
    format!("{GROUP_PREFIX}{}-{}", exec.pid, exec.start_ticks)
}

/// Whether the `exec` that made a group is over; none when the group is not of one.
fn has_ended(context: &Context, group: &str) -> Option<bool> {
    let (pid, start) = group.strip_prefix(GROUP_PREFIX)?.split_once('-')?;
    let (pid, start) = (pid.parse::<u32>().ok()?, start.parse::<u64>().ok()?);
    Some(context.host.identify(pid).is_none_or(|process| process.start_ticks != start))
}

/// The processes that commands have started in a pool.
pub fn processes(context: &Context, groups: &ControlGroups, pool: &str) -> Vec<PoolProcess> {
    let mut all = Vec::new();
    for group in groups.containers(&*context.host, pool) {
        let Some(outlived_exec) = has_ended(context, &group) else { continue };
        let alive = groups
            .members(&*context.host, pool, Leaf::Container(&group))
            .into_iter()
            .filter(|pid| is_alive(context, *pid));
        all.extend(alive.map(|pid| {
            let name = match pid {
                0 => Ok("in another process namespace".to_owned()),
                _ => context.host.read_text(Path::new(&format!("/proc/{pid}/comm"))),
            };
            PoolProcess {
                pid,
                name: name.map_or_else(|_| "?".to_owned(), |name| name.trim().to_owned()),
                outlived_exec,
            }
        }));
    }
    all.sort_by_key(|process| process.pid);
    all
}

/// Whether the member of a group with this number has not ended.
fn is_alive(context: &Context, pid: u32) -> bool {
    pid == 0 || context.host.identify(pid).is_some()
}

/// Remove the group of a command that is over, unless processes that outlive it are in it; whether it is gone.
pub fn remove_if_empty(context: &Context, groups: &ControlGroups, pool: &str, group: &str) -> bool {
    let end = Instant::now() + EMPTY_WAIT;
    loop {
        if groups.remove_container(&*context.host, pool, group).is_ok() {
            return true;
        }
        let members = groups.members(&*context.host, pool, Leaf::Container(group));
        // One that is seen but not alive is about to leave.
        if members.iter().any(|pid| is_alive(context, *pid)) || Instant::now() >= end {
            return false;
        }
        std::thread::sleep(EMPTY_PAUSE);
    }
}

/// Remove the groups of commands that are over and that nobody outlives; whether the pool has no group of a container or a command
/// any more.
pub fn reap(context: &Context, groups: &ControlGroups, pool: &str) -> bool {
    let mut all_gone = true;
    for group in groups.containers(&*context.host, pool) {
        let is_over = has_ended(context, &group) == Some(true);
        all_gone &= is_over && remove_if_empty(context, groups, pool, &group);
    }
    all_gone
}

/// Kill what commands have started in a pool, and remove their groups.
pub fn kill(context: &Context, groups: &ControlGroups, pool: &str) -> Result<()> {
    for group in groups.containers(&*context.host, pool) {
        if has_ended(context, &group).is_some() {
            groups.kill_container(&*context.host, pool, &group, KILL_WAIT)?;
        }
    }
    Ok(())
}

/// Longest wait for a group to be empty after its last process ended.
const GROUP_WAIT: Duration = Duration::from_secs(5);

/// Forget a pool, which has no service any more. Without its control groups: nobody would come to remove them.
pub fn remove_pool(context: &Context, pool: Locked<PoolRecord>) -> Result<()> {
    remove_groups(context, &pool.record.name)?;
    pool.remove()
}

/// Remove the control groups of a pool as far as that can be done: the kernel may take long to let go of what has ended in them, and a later command does it then.
pub fn clear_groups(context: &Context, pool: &str) {
    if let Err(failure) = remove_groups(context, pool) {
        complain(&format!("poolfs: control groups of pool {pool} stay for now: {}", failure.summary()));
    }
}

/// Remove the control groups of a pool, unless somebody still runs in it: a later command does it then.
fn remove_groups(context: &Context, pool: &str) -> Result<()> {
    let groups = context.groups()?;
    if !reap(context, &groups, pool) {
        return Ok(());
    }
    let end = Instant::now() + GROUP_WAIT;
    loop {
        match groups.remove_pool(&*context.host, pool) {
            Ok(()) => return Ok(()),
            // A process that has just ended still counts for a moment.
            Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(10)),
            Err(error) => return Err(kept_service(context, &groups, pool).unwrap_or_else(|| error.into())),
        }
    }
}

/// Threads of a service that the kernel keeps for as long as a program has a file or a directory of a mount locked begin with one of these.
const KEPT_BY_PROGRAMS: [&str; 2] = ["locked-", "names-"];

/// What is said of a pool whose service has ended, and is still there.
fn kept_service(context: &Context, groups: &ControlGroups, pool: &str) -> Option<Failure> {
    let kept = groups.members(&*context.host, pool, Leaf::Service);
    let first = *kept.first()?;
    let thing = format!("pool {pool}");
    if let Some(pid) = kept.iter().find(|&&pid| waiting::is_stopped(&*context.host, pid)) {
        let cause = format!("process {pid} of its service is stopped and cannot end");
        return Some(Failure::in_use(thing, cause, format!("`kill -CONT {pid}` lets it end")));
    }
    let held: Vec<(u32, String)> =
        kept.iter().flat_map(|&pid| threads_in_calls(context, pid).into_iter().map(move |name| (pid, name))).collect();
    let is_of_program = |(_, name): &&(u32, String)| KEPT_BY_PROGRAMS.iter().any(|kind| name.starts_with(kind));
    let gone = |pid| format!("its service (process {pid}) has ended and is not gone");
    let (cause, remedy) = if let Some((pid, _)) = held.iter().find(is_of_program) {
        let cause = format!("{}: a program keeps a file or a directory of its mounts locked in the kernel", gone(*pid));
        (cause, "end the program that is in a call on one of its mounts (state D in `ps`), then try again".to_owned())
    } else if let Some((pid, name)) = held.first() {
        let cause = format!("{}: a call of its thread {name} does not return from the kernel", gone(*pid));
        let remedy = "see whether the disk or the server behind its branches answers, then try again";
        (cause, remedy.to_owned())
    } else if first == 0 {
        let cause = "a process of another process namespace is in the group of its service";
        (cause.to_owned(), "end it from there, then try again".to_owned())
    } else {
        (gone(first), format!("`cat /proc/{first}/task/*/stack` says what it waits for"))
    };
    Some(Failure::in_use(thing, cause, remedy))
}

/// The names of a process's threads that no signal ends now.
fn threads_in_calls(context: &Context, pid: u32) -> Vec<String> {
    let tasks = format!("/proc/{pid}/task");
    let threads = context.host.list_directories(Path::new(&tasks)).unwrap_or_default();
    let stats = threads.iter().filter_map(|thread| {
        let stat = context.host.read_text(Path::new(&format!("{tasks}/{thread}/stat"))).ok()?;
        let (name, fields) = stat.split_once('(')?.1.rsplit_once(") ")?;
        fields.starts_with('D').then(|| name.to_owned())
    });
    stats.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_host::{CpuSet, Host, PoolLimits, RecordingHost};

    const HYBRID: &str = include_str!("../../host/fixtures/cgroup-hybrid.tree");

    #[test]
    fn a_group_is_of_the_exec_that_is_its_name() {
        let place = tempfile::tempdir().expect("a directory");
        let host = RecordingHost::from_tree(HYBRID);
        host.set_process(42, 777);
        let groups = ControlGroups::detect(&host).expect("detected");
        let memory = "/sys/fs/cgroup/memory/poolfs/web/containers";
        for (group, pids) in [("exec-42-777", "7\n"), ("exec-42-776", "8\n9\n"), ("container", "10\n")] {
            host.set_file(format!("{memory}/{group}/cgroup.procs"), pids);
        }
        // Of them the process 9 has ended.
        for (pid, name) in [(7, "here"), (8, "left"), (10, "sh")] {
            host.set_process(pid, 1);
            host.set_file(format!("/proc/{pid}/comm"), &format!("{name}\n"));
        }
        let own = host.identify(42).expect("just set");
        assert_eq!(group_name(&own), "exec-42-777");
        let context = Context::for_test(place.path(), host);
        assert_eq!(has_ended(&context, "exec-42-777"), Some(false));
        assert_eq!(has_ended(&context, "exec-42-776"), Some(true));
        assert_eq!(has_ended(&context, "container"), None);
        let seen: Vec<String> = processes(&context, &groups, "web").iter().map(ToString::to_string).collect();
        assert_eq!(seen, ["7 (here)", "8 (left)"]);
        kill(&context, &groups, "web").expect("killed");
        assert_eq!(groups.containers(&*context.host, "web"), ["container"]);
        assert!(context.host.identify(8).is_none() && context.host.identify(10).is_some());
    }

    #[test]
    fn a_dead_service_that_the_kernel_keeps_is_named() {
        let place = tempfile::tempdir().expect("a directory");
        let host = RecordingHost::from_tree(include_str!("../../host/fixtures/cgroup-hybrid.tree"));
        host.set_file("/proc/77/stat", "77 (poolfs-service) Z 1");
        for (thread, name) in [(77, "poolfs-service"), (78, "fuse web-1"), (79, "names-web-1")] {
            host.set_file(format!("/proc/77/task/{thread}/stat"), &format!("{thread} ({name}) Z 1"));
        }
        let context = Context::for_test(place.path(), host);
        let groups = context.groups().expect("detected");
        let cpus = CpuSet::parse("0-1").expect("valid");
        let limits = PoolLimits { cpus, memory_bytes: 2 << 30, service_bytes: 1 << 30 };
        groups.make_pool(&*context.host, "web", &limits).expect("made");
        assert!(kept_service(&context, &groups, "web").is_none());
        let procs = Path::new("/sys/fs/cgroup/memory/poolfs/web/service/cgroup.procs");
        context.host.write_text(procs, "77\n").expect("written");
        let said = || kept_service(&context, &groups, "web").expect("it is there").to_string();
        assert!(said().contains("pool web: its service (process 77)") && said().contains("task/*/stack"), "{}", said());
        let thread = |number: u32, stat: &str| {
            let at = format!("/proc/77/task/{number}/stat");
            context.host.write_text(Path::new(&at), &format!("{number} {stat} 1")).expect("written");
        };
        thread(78, "(fuse web-1) D");
        assert!(said().contains("thread fuse web-1") && said().contains("disk"), "{}", said());
        thread(79, "(names-web-1) D");
        assert!(said().contains("a program keeps") && said().contains("state D"), "{}", said());
        context.host.write_text(Path::new("/proc/77/stat"), "77 (poolfs-service) T 1").expect("written");
        assert!(
            said().contains("process 77 of its service is stopped") && said().contains("kill -CONT 77"),
            "{}",
            said()
        );
    }
}
