//! Ownership of control groups: pools of several state directories may have one name, and a mark on their groups tells them apart.

use super::{ControlGroups, DEPTH_MAX, PARENT, collect_members};
use crate::{Host, HostError, Result};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The attribute of a pool's group that says whose it is: what tells the state directory from others, a blank, its path.
const MARK: &str = "trusted.poolfs.state";

/// A state directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    /// What tells it from all others of the host.
    id: String,
    path: PathBuf,
}

impl ControlGroups {
    /// Those of the pools of one state directory. What belongs to another's pool of the same
    /// name is not seen, not limited and not removed.
    #[must_use]
    pub fn of_state(self, host: &dyn Host, path: &Path) -> ControlGroups {
        // Without a state directory there are no pools that have any.
        let owner = host.directory_id(path).map(|id| Owner { id, path: path.to_owned() });
        ControlGroups { owner, ..self }
    }

    /// Where the mark of a pool's groups is: in one hierarchy, as one mark only can be made in one step.
    pub(super) fn marked_group(&self, pool: &str) -> Option<PathBuf> {
        Some(self.limiting().first()?.0.join(PARENT).join(pool))
    }

    /// Who else has the groups of this name, if it is so.
    pub(super) fn other(&self, host: &dyn Host, pool: &str) -> Option<Owner> {
        let owner = self.owner.as_ref()?;
        let mark = host.attribute(&self.marked_group(pool)?, MARK)?;
        let (id, path) = mark.split_once(' ')?;
        (id != owner.id).then(|| Owner { id: id.to_owned(), path: path.into() })
    }

    /// Makes the groups of a pool that are there those of its state directory.
    ///
    /// # Errors
    /// As [`ControlGroups::check_owner`]; [`HostError::is_absent`] when they are not there any more, or were nobody's and are removed.
    pub(super) fn claim(&self, host: &dyn Host, pool: &str) -> Result<()> {
        let (Some(owner), Some(group)) = (&self.owner, self.marked_group(pool)) else { return Ok(()) };
        let mark = format!("{} {}", owner.id, owner.path.display());
        match host.create_attribute(&group, MARK, &mark) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) if error.is_unsupported() => {
                tracing::warn!(group = %group.display(), "control groups carry no attributes here: those of a pool are anybody's");
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        self.check_owner(host, pool)?;
        if self.other(host, pool).is_none() {
            return Ok(());
        }
        // The kernel removes no group that a process is in, also when it came just now.
        self.remove_everywhere(host, &Path::new(PARENT).join(pool))?;
        Err(HostError::io("mark", &group, std::io::Error::from(std::io::ErrorKind::NotFound)))
    }

    /// Whether a pool can have its groups: they are not there, are its own, or are left over from a state directory that is gone.
    ///
    /// # Errors
    /// [`HostError::OthersGroups`] when they are another's; [`HostError::LeftGroups`] when their state directory is gone and processes
    /// are in them.
    pub fn check_owner(&self, host: &dyn Host, pool: &str) -> Result<()> {
        let Some(other) = self.other(host, pool) else { return Ok(()) };
        let (pool_name, state) = (pool.to_owned(), other.path.display().to_string());
        if host.directory_id(&other.path).is_some_and(|now| now == other.id) {
            return Err(HostError::OthersGroups { pool: pool_name, state });
        }
        let mut members = BTreeSet::new();
        for mount in self.mounts() {
            collect_members(host, &mount.join(PARENT).join(pool), DEPTH_MAX, &mut members);
        }
        if members.is_empty() { Ok(()) } else { Err(HostError::LeftGroups { pool: pool_name, state, members }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::tests::{HYBRID, limits};
    use crate::{Leaf, RecordingHost};

    #[test]
    fn groups_of_another_state_directory_are_not_seen_and_not_touched() {
        let host = RecordingHost::from_tree(HYBRID);
        for state in ["/first/x", "/second/x"] {
            host.set_file(state, "");
        }
        let of = |state: &str| ControlGroups::detect(&host).expect("detected").of_state(&host, Path::new(state));
        let (first, second) = (of("/first"), of("/second"));
        first.make_pool(&host, "web", &limits()).expect("made");
        first.make_container(&host, "web", "exec-1-1", None).expect("made");
        let before = host.log();
        let refused = second.make_pool(&host, "web", &limits()).expect_err("another's");
        assert!(matches!(&refused, HostError::OthersGroups { state, .. } if state == "/first"), "{refused}");
        assert_eq!(second.containers(&host, "web"), [] as [&str; 0]);
        // A record of a container of the same name, from before a reboot, does not reach it.
        assert!(second.members(&host, "web", Leaf::Container("exec-1-1")).is_empty());
        second.kill_container(&host, "web", "exec-1-1", std::time::Duration::ZERO).expect("none of its own");
        second.remove_container(&host, "web", "exec-1-1").expect("none of its own");
        second.make_container(&host, "web", "exec-2-2", None).expect_err("another's");
        second.attach(&host, "web", crate::Leaf::Container("exec-1-1"), 7).expect_err("another's");
        second.remove_pool(&host, "web").expect("none of its own");
        assert_eq!((second.memory_used(&host, "web"), host.log()), (None, before));
        assert_eq!(first.containers(&host, "web"), ["exec-1-1"]);
        first.make_pool(&host, "web", &limits()).expect("again");
        // Those of a state directory that is gone are left as they are while processes are in them.
        host.remove_directory(Path::new("/first")).expect("removed");
        let member = "/sys/fs/cgroup/memory/poolfs/web/containers/exec-1-1/cgroup.procs";
        host.set_file(member, "7\n");
        let before = host.log();
        let refused = second.make_pool(&host, "web", &limits()).expect_err("in use");
        assert!(matches!(&refused, HostError::LeftGroups { members, .. } if members.contains(&7)), "{refused}");
        assert!(matches!(second.check_owner(&host, "web"), Err(HostError::LeftGroups { .. })));
        assert_eq!((second.containers(&host, "web"), host.log()), (Vec::new(), before));
        // Then they are nobody's.
        host.set_file(member, "");
        second.make_pool(&host, "web", &limits()).expect("made");
        assert_eq!(second.containers(&host, "web"), [] as [&str; 0]);
        second.make_pool(&host, "web", &limits()).expect("its own");
    }

    #[test]
    fn one_of_two_state_directories_that_make_the_same_groups_at_once_has_them() {
        let host = RecordingHost::from_tree(HYBRID);
        let states = ["/first", "/second"];
        for state in states {
            host.set_file(format!("{state}/x"), "");
        }
        for round in 0..200 {
            let pool = format!("web-{round}");
            let start = std::sync::Barrier::new(states.len());
            let made = std::thread::scope(|scope| {
                let makers = states.map(|state| {
                    let (host, pool, start) = (&host, &pool, &start);
                    scope.spawn(move || {
                        let groups = ControlGroups::detect(host).expect("detected").of_state(host, Path::new(state));
                        start.wait();
                        groups.make_pool(host, pool, &limits()).is_ok()
                    })
                });
                makers.map(|maker| maker.join().expect("no panic"))
            });
            assert_eq!(made.iter().filter(|made| **made).count(), 1, "{made:?}");
        }
    }
}
