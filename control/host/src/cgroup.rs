//! Control groups of pools: `poolfs/POOL/service` and `poolfs/POOL/containers/N`.
//!
//! The pool's memory limit is the sum of two: the service and the containers have limits of their own that add up to it. So containers that
//! run out of memory meet their own limit and never take the service down.

mod owner;

use crate::{CpuSet, Host, HostError, ProcessSignal, Result, mount_table};
use owner::Owner;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The directory under which everything of poolfs lives in a hierarchy.
const PARENT: &str = "poolfs";
/// How often a pool's groups are tried to be made while others remove theirs.
const MAKE_ATTEMPTS: usize = 5;
/// How long a killed process is given before its group is looked at again.
const KILL_PAUSE: Duration = Duration::from_millis(10);
/// Deepest level of groups below a pool that is removed: a container may have made groups of its own.
const DEPTH_MAX: u32 = 16;

/// One version 1 hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// Where it is mounted.
    pub mount: PathBuf,
    /// Its controllers; none for a named or a version 2 hierarchy beside version 1.
    pub controllers: Vec<String>,
}

/// How control groups are mounted on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupLayout {
    /// Controllers in hierarchies of their own (also the "hybrid" form with an empty version 2 hierarchy beside).
    V1(Vec<Hierarchy>),
    /// One hierarchy for all.
    V2(PathBuf),
}

/// What a pool may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolLimits {
    /// The CPUs.
    pub cpus: CpuSet,
    /// Memory of service and containers together, bytes.
    pub memory_bytes: u64,
    /// The service's part of it, bytes.
    pub service_bytes: u64,
}

/// A group that processes are put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaf<'a> {
    /// The pool's filesystem service.
    Service,
    /// A container, or another command that runs in the pool.
    Container(&'a str),
}

/// The control groups of pools on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlGroups {
    layout: GroupLayout,
    /// Whose pools are meant, if somebody's: groups are marked with it, as pools of several state directories may have one name.
    owner: Option<Owner>,
}

impl ControlGroups {
    /// Find out from the mount table how control groups are mounted.
    pub fn detect(host: &dyn Host) -> Result<ControlGroups> {
        let mut version_1 = Vec::new();
        let mut version_2 = Vec::new();
        for entry in mount_table(host)? {
            if entry.kind == "cgroup" {
                let known = |option: &&str| !matches!(*option, "rw" | "ro") && !option.contains('=');
                let controllers = entry.super_options.split(',').filter(known).map(str::to_owned).collect();
                version_1.push(Hierarchy { mount: entry.mount_point, controllers });
            } else if entry.kind == "cgroup2" {
                version_2.push(entry.mount_point);
            }
        }
        let serves = |name: &str| version_1.iter().any(|h| h.controllers.iter().any(|c| c == name));
        let layout = if serves("memory") || serves("cpuset") {
            version_1.extend(version_2.into_iter().map(|mount| Hierarchy { mount, controllers: Vec::new() }));
            GroupLayout::V1(version_1)
        } else {
            GroupLayout::V2(version_2.into_iter().next().ok_or(HostError::NoControlGroups)?)
        };
        Ok(ControlGroups { layout, owner: None })
    }

    /// How control groups are mounted.
    #[must_use]
    pub fn layout(&self) -> &GroupLayout {
        &self.layout
    }

    /// The controllers poolfs needs that this host does not offer.
    pub fn lacking(&self, host: &dyn Host) -> Result<Vec<&'static str>> {
        let offered = match &self.layout {
            GroupLayout::V1(hierarchies) => hierarchies.iter().flat_map(|h| h.controllers.clone()).collect(),
            GroupLayout::V2(mount) => host
                .read_text(&mount.join("cgroup.controllers"))?
                .split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>(),
        };
        Ok(["cpuset", "memory"].into_iter().filter(|need| !offered.iter().any(|have| have == need)).collect())
    }

    /// The path of a container's group as an OCI runtime wants it: from the root of every hierarchy.
    #[must_use]
    pub fn container_path(pool: &str, container: &str) -> PathBuf {
        Path::new("/").join(PARENT).join(pool).join("containers").join(container)
    }

    /// Make a pool's groups with their limits; limits are renewed when they exist.
    pub fn make_pool(&self, host: &dyn Host, pool: &str, limits: &PoolLimits) -> Result<()> {
        let containers_bytes = limits.memory_bytes.saturating_sub(limits.service_bytes);
        let levels = [
            (PathBuf::from(PARENT), None),
            (Path::new(PARENT).join(pool), Some(limits.memory_bytes)),
            (Path::new(PARENT).join(pool).join("service"), Some(limits.service_bytes)),
            (Path::new(PARENT).join(pool).join("containers"), Some(containers_bytes)),
        ];
        let make_all = || {
            self.make_place(host, &levels[0].0)?;
            self.make_place(host, &levels[1].0)?;
            self.claim(host, pool)?;
            levels.iter().try_for_each(|(relative, memory)| {
                let cpus = if memory.is_some() { Some(&limits.cpus) } else { None };
                self.make_group(host, relative, cpus, *memory)
            })
        };
        // Whoever removes the last other pool may take the common parent away just now.
        let mut result = make_all();
        for _ in 1..MAKE_ATTEMPTS {
            if !matches!(&result, Err(error) if error.is_absent()) {
                break;
            }
            result = make_all();
        }
        result
    }

    /// Make the group of a container in a pool whose groups exist; without `memory_bytes` it shares the containers' part.
    pub fn make_container(&self, host: &dyn Host, pool: &str, name: &str, memory_bytes: Option<u64>) -> Result<()> {
        self.check_owner(host, pool)?;
        self.make_group(host, &leaf_path(pool, Leaf::Container(name)), None, memory_bytes)
    }

    /// Put a process into a group.
    pub fn attach(&self, host: &dyn Host, pool: &str, leaf: Leaf<'_>, pid: u32) -> Result<()> {
        self.check_owner(host, pool)?;
        let relative = leaf_path(pool, leaf);
        for (mount, _) in self.limiting() {
            host.write_text(&mount.join(&relative).join("cgroup.procs"), &pid.to_string())?;
        }
        Ok(())
    }

    /// Files by which a process that has one thread yet enters a group, by writing `0` to each; none in version 2, where others put it
    /// there. Putting another process into a group, the kernel waits until no processor can be looking at processes, which takes as
    /// long as ten milliseconds.
    #[must_use]
    pub fn entrances(&self, pool: &str, leaf: Leaf<'_>) -> Option<Vec<PathBuf>> {
        let relative = leaf_path(pool, leaf);
        let files = self.limiting().into_iter().map(|(mount, _)| mount.join(&relative).join("tasks"));
        matches!(self.layout, GroupLayout::V1(_)).then(|| files.collect())
    }

    /// Where the memory of a group is counted and limited; none where that is not done.
    #[must_use]
    pub fn memory_place(&self, pool: &str, leaf: Leaf<'_>) -> Option<PathBuf> {
        let mount = match &self.layout {
            GroupLayout::V1(hierarchies) => Self::memory_of(hierarchies)?,
            GroupLayout::V2(mount) => mount,
        };
        Some(mount.join(leaf_path(pool, leaf)))
    }

    /// Bytes of memory a pool's groups use now, with the page cache charged to them; none when there are no groups.
    #[must_use]
    pub fn memory_used(&self, host: &dyn Host, pool: &str) -> Option<u64> {
        self.used_by(host, &Path::new(PARENT).join(pool)).filter(|_| self.other(host, pool).is_none())
    }

    /// The same of its containers and commands together, without cached files, which the kernel drops where memory is needed.
    #[must_use]
    pub fn containers_memory_kept(&self, host: &dyn Host, pool: &str) -> Option<u64> {
        let group = Path::new(PARENT).join(pool).join("containers");
        let used = self.used_by(host, &group)?;
        let (mount, prefix) = match &self.layout {
            GroupLayout::V1(hierarchies) => (Self::memory_of(hierarchies)?, "total_"),
            GroupLayout::V2(mount) => (mount, ""),
        };
        let told = host.read_text(&mount.join(&group).join("memory.stat")).ok()?;
        let is_cached = |name: &str| matches!(name.strip_prefix(prefix), Some("active_file" | "inactive_file"));
        let cached = told.lines().filter_map(|line| line.split_once(' ')).filter(|(name, _)| is_cached(name));
        Some(used.saturating_sub(cached.filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok()).sum()))
    }

    fn memory_of(hierarchies: &[Hierarchy]) -> Option<&PathBuf> {
        Some(&hierarchies.iter().find(|h| h.controllers.iter().any(|c| c == "memory"))?.mount)
    }

    fn used_by(&self, host: &dyn Host, group: &Path) -> Option<u64> {
        let (mount, file) = match &self.layout {
            GroupLayout::V1(hierarchies) => (Self::memory_of(hierarchies)?, "memory.usage_in_bytes"),
            GroupLayout::V2(mount) => (mount, "memory.current"),
        };
        host.read_text(&mount.join(group).join(file)).ok()?.trim().parse().ok()
    }

    /// Remove a container's group and what it made below, from every hierarchy.
    pub fn remove_container(&self, host: &dyn Host, pool: &str, name: &str) -> Result<()> {
        if self.other(host, pool).is_some() {
            return Ok(());
        }
        self.remove_everywhere(host, &leaf_path(pool, Leaf::Container(name)))
    }

    /// The groups of containers and commands that a pool has.
    #[must_use]
    pub fn containers(&self, host: &dyn Host, pool: &str) -> Vec<String> {
        let relative = Path::new(PARENT).join(pool).join("containers");
        if self.other(host, pool).is_some() {
            return Vec::new();
        }
        let mounts = self.mounts();
        let listed = mounts.iter().flat_map(|mount| host.list_directories(&mount.join(&relative)).unwrap_or_default());
        let mut names: Vec<String> = listed.collect();
        names.sort();
        names.dedup();
        names
    }

    /// Kill whatever is in a container's group, then remove the group; what has not ended after so long keeps it.
    pub fn kill_container(&self, host: &dyn Host, pool: &str, name: &str, limit: Duration) -> Result<()> {
        if self.other(host, pool).is_some() {
            return Ok(());
        }
        let relative = leaf_path(pool, Leaf::Container(name));
        let end = Instant::now() + limit;
        loop {
            for mount in self.mounts() {
                kill_members(host, &mount.join(&relative), DEPTH_MAX)?;
            }
            match self.remove_everywhere(host, &relative) {
                Err(_) if Instant::now() < end => std::thread::sleep(KILL_PAUSE),
                result => return result,
            }
        }
    }

    /// The processes in a group of a pool and in the groups below it, ascending; 0 stands for those of other process
    /// namespaces.
    #[must_use]
    pub fn members(&self, host: &dyn Host, pool: &str, leaf: Leaf<'_>) -> Vec<u32> {
        let relative = leaf_path(pool, leaf);
        let mut members = BTreeSet::new();
        if self.other(host, pool).is_some() {
            return Vec::new();
        }
        self.mounts().iter().for_each(|mount| collect_members(host, &mount.join(&relative), DEPTH_MAX, &mut members));
        members.into_iter().collect()
    }

    /// Remove a pool's groups, and the common parent when it was the last one.
    pub fn remove_pool(&self, host: &dyn Host, pool: &str) -> Result<()> {
        if self.other(host, pool).is_some() {
            return Ok(());
        }
        self.remove_everywhere(host, &Path::new(PARENT).join(pool))?;
        for mount in self.mounts() {
            let parent = mount.join(PARENT);
            if host.list_directories(&parent)?.is_empty() {
                // Another command may be making its pool there just now.
                let _ = host.remove_directory(&parent);
            }
        }
        Ok(())
    }

    fn mounts(&self) -> Vec<&Path> {
        match &self.layout {
            GroupLayout::V1(hierarchies) => hierarchies.iter().map(|h| h.mount.as_path()).collect(),
            GroupLayout::V2(mount) => vec![mount],
        }
    }

    /// The hierarchies in which poolfs sets limits, with what each can limit.
    fn limiting(&self) -> Vec<(&Path, Vec<&str>)> {
        let wanted = |name: &&str| matches!(*name, "cpuset" | "memory");
        match &self.layout {
            GroupLayout::V1(hierarchies) => hierarchies
                .iter()
                .map(|h| {
                    (h.mount.as_path(), h.controllers.iter().map(String::as_str).filter(wanted).collect::<Vec<_>>())
                })
                .filter(|(_, controllers)| !controllers.is_empty())
                .collect(),
            GroupLayout::V2(mount) => vec![(mount, vec!["cpuset", "memory"])],
        }
    }

    fn make_group(&self, host: &dyn Host, relative: &Path, cpus: Option<&CpuSet>, memory: Option<u64>) -> Result<()> {
        self.make_place(host, relative)?;
        for (mount, controllers) in self.limiting() {
            let group = mount.join(relative);
            host.make_directory(&group)?;
            match &self.layout {
                GroupLayout::V1(_) => limit_v1(host, &group, &controllers, cpus, memory)?,
                GroupLayout::V2(_) => limit_v2(host, &group, cpus, memory)?,
            }
        }
        Ok(())
    }

    /// Also where nothing is limited: an OCI runtime makes a container's group in every hierarchy, and cannot deal with the
    /// common parent going away when another pool ends.
    fn make_place(&self, host: &dyn Host, relative: &Path) -> Result<()> {
        for mount in self.mounts() {
            match host.make_directory(&mount.join(relative)) {
                Err(error) if error.is_absent() => return Err(error),
                // Where it matters it is tried again, and told.
                _ => {}
            }
        }
        Ok(())
    }

    fn remove_everywhere(&self, host: &dyn Host, relative: &Path) -> Result<()> {
        // What says whose they are goes last: before that, nobody else's are made at the same place.
        let marked = self.limiting().first().map(|(mount, _)| *mount);
        let mut mounts = self.mounts();
        mounts.sort_by_key(|mount| Some(*mount) == marked);
        mounts.into_iter().try_for_each(|mount| remove_tree(host, &mount.join(relative), DEPTH_MAX))
    }
}

fn leaf_path(pool: &str, leaf: Leaf<'_>) -> PathBuf {
    let pool = Path::new(PARENT).join(pool);
    match leaf {
        Leaf::Service => pool.join("service"),
        Leaf::Container(name) => pool.join("containers").join(name),
    }
}

fn limit_v1(host: &dyn Host, group: &Path, has: &[&str], cpus: Option<&CpuSet>, memory: Option<u64>) -> Result<()> {
    if has.contains(&"cpuset") {
        // A new cpuset group of version 1 is empty and takes no process before both files are written.
        let parent = group.parent().unwrap_or(group);
        let inherited = |file: &str| host.read_text(&parent.join(file));
        let cpus = cpus.map_or_else(|| inherited("cpuset.cpus"), |cpus| Ok(cpus.to_string()))?;
        host.write_text(&group.join("cpuset.mems"), inherited("cpuset.mems")?.trim())?;
        host.write_text(&group.join("cpuset.cpus"), cpus.trim())?;
    }
    if let Some(bytes) = memory.filter(|_| has.contains(&"memory")) {
        host.write_text(&group.join("memory.limit_in_bytes"), &bytes.to_string())?;
    }
    Ok(())
}

fn limit_v2(host: &dyn Host, group: &Path, cpus: Option<&CpuSet>, memory: Option<u64>) -> Result<()> {
    // A controller must be handed down by the parent before its files appear in the group.
    let parent = group.parent().unwrap_or(group);
    let enabled = host.read_text(&parent.join("cgroup.controllers")).unwrap_or_default();
    for controller in ["cpuset", "memory"].into_iter().filter(|c| enabled.split_whitespace().any(|e| e == *c)) {
        host.write_text(&parent.join("cgroup.subtree_control"), &format!("+{controller}"))?;
    }
    if let Some(cpus) = cpus {
        host.write_text(&group.join("cpuset.cpus"), &cpus.to_string())?;
    }
    if let Some(bytes) = memory {
        host.write_text(&group.join("memory.max"), &bytes.to_string())?;
    }
    Ok(())
}

fn collect_members(host: &dyn Host, group: &Path, depth_left: u32, members: &mut BTreeSet<u32>) {
    if depth_left > 0 {
        for child in host.list_directories(group).unwrap_or_default() {
            collect_members(host, &group.join(child), depth_left - 1, members);
        }
    }
    let listed = host.read_text(&group.join("cgroup.procs")).unwrap_or_default();
    members.extend(listed.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
}

fn kill_members(host: &dyn Host, group: &Path, depth_left: u32) -> Result<()> {
    if depth_left > 0 {
        for child in host.list_directories(group)? {
            kill_members(host, &group.join(child), depth_left - 1)?;
        }
    }
    let procs = group.join("cgroup.procs");
    let members = || host.read_text(&procs).unwrap_or_default();
    for line in members().lines() {
        let Some(process) = line.trim().parse().ok().and_then(|pid| host.identify(pid)) else { continue };
        // Still in the group: the number had not been given to somebody else when the process was looked at.
        if members().lines().any(|member| member == line) {
            host.signal(&process, ProcessSignal::Kill)?;
        }
    }
    Ok(())
}

fn remove_tree(host: &dyn Host, group: &Path, depth_left: u32) -> Result<()> {
    if depth_left > 0 {
        for child in host.list_directories(group)? {
            remove_tree(host, &group.join(child), depth_left - 1)?;
        }
    }
    host.remove_directory(group)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub const HYBRID: &str = include_str!("../fixtures/cgroup-hybrid.tree");
    const UNIFIED: &str = include_str!("../fixtures/cgroup-unified.tree");

    pub fn limits() -> PoolLimits {
        let cpus = CpuSet::parse("0-1").expect("valid");
        PoolLimits { cpus, memory_bytes: 2 << 30, service_bytes: 640 << 20 }
    }

    fn content(host: &RecordingHost, path: &str) -> String {
        host.read_text(Path::new(path)).unwrap_or_else(|error| panic!("{error}"))
    }

    use crate::RecordingHost;

    #[test]
    fn version_1_limits_add_up_and_vanish_again() {
        let host = RecordingHost::from_tree(HYBRID);
        let groups = ControlGroups::detect(&host).expect("detected");
        assert!(matches!(groups.layout(), GroupLayout::V1(h) if h.len() == 10));
        assert!(groups.lacking(&host).expect("known").is_empty());
        groups.make_pool(&host, "web", &limits()).expect("made");
        let memory = "/sys/fs/cgroup/memory/poolfs/web";
        let total: u64 = content(&host, &format!("{memory}/memory.limit_in_bytes")).parse().expect("a number");
        let part = |name: &str| -> u64 {
            content(&host, &format!("{memory}/{name}/memory.limit_in_bytes")).parse().expect("a number")
        };
        assert_eq!(total, part("service") + part("containers"));
        assert_eq!(content(&host, "/sys/fs/cgroup/cpuset/poolfs/web/service/cpuset.cpus"), "0-1");
        assert_eq!(content(&host, "/sys/fs/cgroup/cpuset/poolfs/web/service/cpuset.mems"), "0");
        groups.attach(&host, "web", Leaf::Service, 42).expect("attached");
        assert_eq!(content(&host, &format!("{memory}/service/cgroup.procs")), "42");
        let entrances = groups.entrances("web", Leaf::Service).expect("version 1 has them");
        assert!(entrances.contains(&PathBuf::from(format!("{memory}/service/tasks"))), "{entrances:?}");
        host.set_file(format!("{memory}/containers/memory.usage_in_bytes"), "1000\n");
        let told = "active_file 1\ninactive_file 2\ntotal_active_file 100\ntotal_inactive_file 200\n";
        host.set_file(format!("{memory}/containers/memory.stat"), told);
        assert_eq!(groups.containers_memory_kept(&host, "web"), Some(700));
        groups.make_container(&host, "web", "c1", Some(1 << 20)).expect("made");
        // An OCI runtime makes the container's group in the other hierarchies too, also while other pools come and go.
        groups.make_pool(&host, "other", &limits()).expect("made");
        groups.remove_pool(&host, "other").expect("removed");
        let path = Path::new("/sys/fs/cgroup/devices/poolfs/web/containers/c1");
        host.make_directory(path).expect("its place is there");
        assert_eq!(groups.containers(&host, "web"), ["c1"]);
        assert!(groups.members(&host, "web", Leaf::Container("c1")).is_empty());
        // What a runtime that was killed left is killed, and nobody else.
        host.set_process(7, 1);
        host.set_process(8, 1);
        host.set_file("/sys/fs/cgroup/devices/poolfs/web/containers/c1/cgroup.procs", "7\n9\n");
        host.set_file("/sys/fs/cgroup/memory/poolfs/web/containers/c1/below/cgroup.procs", "8\n7\n");
        assert_eq!(groups.members(&host, "web", Leaf::Container("c1")), [7, 8, 9]);
        host.remove_directory(Path::new("/sys/fs/cgroup/memory/poolfs/web/containers/c1/below")).expect("removed");
        groups.kill_container(&host, "web", "c1", Duration::ZERO).expect("killed and removed");
        let killed: Vec<String> = host.log().into_iter().filter(|line| line.starts_with("signal")).collect();
        assert_eq!(killed, ["signal 7 Kill"]);
        assert!(groups.containers(&host, "web").is_empty());
        groups.remove_pool(&host, "web").expect("removed");
        let left = host.directories_below("/sys/fs/cgroup");
        assert!(left.iter().all(|d| !d.to_string_lossy().contains("poolfs")), "{left:?}");
    }

    #[test]
    fn version_2_hands_controllers_down_before_limits() {
        let host = RecordingHost::from_tree(UNIFIED);
        let groups = ControlGroups::detect(&host).expect("detected");
        assert_eq!(groups.layout(), &GroupLayout::V2("/sys/fs/cgroup".into()));
        groups.make_pool(&host, "web", &limits()).expect("made");
        groups.attach(&host, "web", Leaf::Container("c1"), 7).expect_err("there is no such group yet");
        groups.make_container(&host, "web", "c1", None).expect("made");
        assert_eq!(groups.entrances("web", Leaf::Container("c1")), None);
        groups.attach(&host, "web", Leaf::Container("c1"), 7).expect("attached");
        assert_eq!(content(&host, "/sys/fs/cgroup/poolfs/web/memory.max"), (2u64 << 30).to_string());
        let log = host.log();
        let at =
            |wanted: &str| log.iter().position(|line| line == wanted).unwrap_or_else(|| panic!("{wanted}: {log:?}"));
        assert!(
            at("write /sys/fs/cgroup/cgroup.subtree_control +memory")
                < at(&format!("write /sys/fs/cgroup/poolfs/web/memory.max {}", 2u64 << 30))
        );
        host.set_file("/sys/fs/cgroup/poolfs/web/containers/memory.current", "1000\n");
        host.set_file("/sys/fs/cgroup/poolfs/web/containers/memory.stat", "active_file 100\ninactive_file 200\n");
        assert_eq!(groups.containers_memory_kept(&host, "web"), Some(700));
        groups.remove_container(&host, "web", "c1").expect("removed");
        groups.remove_pool(&host, "web").expect("removed");
        assert_eq!(host.directories_below("/sys/fs/cgroup").len(), 1);
    }

    #[test]
    fn the_parent_stays_while_another_pool_lives() {
        let host = RecordingHost::from_tree(UNIFIED);
        let groups = ControlGroups::detect(&host).expect("detected");
        groups.make_pool(&host, "a", &limits()).expect("made");
        groups.make_pool(&host, "b", &limits()).expect("made");
        groups.remove_pool(&host, "a").expect("removed");
        assert!(host.directories_below("/sys/fs/cgroup/poolfs").iter().any(|d| d.ends_with("poolfs/b/service")));
    }

    #[test]
    fn no_groups_is_a_named_error() {
        let host = RecordingHost::new();
        host.set_file("/proc/self/mountinfo", "");
        assert!(matches!(ControlGroups::detect(&host), Err(HostError::NoControlGroups)));
    }
}
