//! Processes that outlive the `exec` that brought them into a pool.
//!
//! They stay in its control group. The next command that looks at the pool after the last of them has ended removes the group.

use crate::context::Context;
use crate::failure::Result;
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

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_host::{Host, RecordingHost};

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
}
