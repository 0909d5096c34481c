//! Credentials of a caller: ids, groups and capabilities, as the kernel vouched for them.

use poolfs_libservice::types::{Attributes, IdMap, NO_ID, OVERFLOW_ID};
use std::fs;

/// The capabilities a filesystem asks for; values of Linux's `CAP_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Capability {
    /// ignores permission bits
    DacOverride = 1,
    /// reads and searches whatever the permission bits say
    DacReadSearch = 2,
    /// acts as owner of every file
    FileOwner = 3,
    /// keeps set-id bits
    FileSetId = 4,
    /// administers the system
    SystemAdmin = 21,
    /// gives programs capabilities
    SetFileCapabilities = 31,
}

/// Credentials of a process or session, in the host's ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The user the filesystem sees (fsuid).
    pub uid: u32,
    /// The group the filesystem sees (fsgid).
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Effective capabilities, one bit each, in the caller's own user namespace.
    pub capabilities: u64,
    /// The uids and gids its user namespace maps; `None` in the initial one, which maps all.
    pub user_namespace: Option<(IdMap, IdMap)>,
}

impl Credentials {
    /// The service itself: root with everything.
    #[must_use]
    pub fn root() -> Self {
        Self { uid: 0, gid: 0, groups: Vec::new(), capabilities: u64::MAX, user_namespace: None }
    }

    /// Whether `gid` is the caller's group or one of its supplementary ones.
    #[must_use]
    pub fn in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    /// Owner and group of the host as the caller sees them: in its user namespace.
    #[must_use]
    pub fn as_seen(&self, uid: u32, gid: u32) -> (u32, u32) {
        let seen = |id| if id == NO_ID { OVERFLOW_ID } else { id };
        match &self.user_namespace {
            None => (seen(uid), seen(gid)),
            Some((uids, gids)) => (uids.inside(uid).unwrap_or(OVERFLOW_ID), gids.inside(gid).unwrap_or(OVERFLOW_ID)),
        }
    }

    fn holds(&self, capability: Capability) -> bool {
        self.capabilities >> (capability as u32) & 1 == 1
    }

    /// Whether the capability holds on the host (`capable`).
    #[must_use]
    pub fn capable(&self, capability: Capability) -> bool {
        self.user_namespace.is_none() && self.holds(capability)
    }

    /// Whether the capability holds for this object: its owner and group exist in the caller's user namespace
    /// (`capable_wrt_inode_uidgid`).
    #[must_use]
    pub fn capable_for(&self, capability: Capability, object: &Attributes) -> bool {
        let mapped = match &self.user_namespace {
            None => !object.is_foreign(),
            Some((uids, gids)) => uids.contains(object.uid) && gids.contains(object.gid),
        };
        mapped && self.holds(capability)
    }

    /// The credentials of a live thread, from `/proc`; `None` when it is gone.
    #[must_use]
    pub fn of_thread(thread: u32) -> Option<Self> {
        if thread == 0 {
            return None;
        }
        let mut credentials = Self::parse_status(&fs::read_to_string(format!("/proc/{thread}/status")).ok()?)?;
        let own = fs::read_link(format!("/proc/{}/ns/user", std::process::id())).ok()?;
        if fs::read_link(format!("/proc/{thread}/ns/user")).ok()? != own {
            let map = |file: &str| IdMap::parse_proc(&fs::read_to_string(format!("/proc/{thread}/{file}")).ok()?);
            credentials.user_namespace = Some((map("uid_map")?, map("gid_map")?));
        }
        Some(credentials)
    }

    /// The credentials in the text of `/proc/PID/status`, as of the initial user namespace.
    #[must_use]
    pub fn parse_status(status: &str) -> Option<Self> {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let fourth = |name: &str| field(name)?.split_ascii_whitespace().nth(3)?.parse().ok();
        Some(Self {
            uid: fourth("Uid")?,
            gid: fourth("Gid")?,
            groups: field("Groups")?.split_ascii_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?,
            capabilities: u64::from_str_radix(field("CapEff")?.trim(), 16).ok()?,
            user_namespace: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_shown_as_the_callers_user_namespace_has_them() {
        let map = IdMap::parse_proc("0 100000 65536\n70000 5 1\n").expect("well-formed");
        let inside = Credentials { user_namespace: Some((map.clone(), map)), ..Credentials::root() };
        assert_eq!((inside.as_seen(100_000, 5), inside.as_seen(1, NO_ID)), ((0, 70_000), (OVERFLOW_ID, OVERFLOW_ID)));
        assert_eq!(Credentials::root().as_seen(7, NO_ID), (7, OVERFLOW_ID));
    }

    #[test]
    fn a_status_file_tells_the_filesystem_ids() {
        let text = "Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nGroups:\t9 10 \nCapEff:\t0000000000000002\n";
        let credentials = Credentials::parse_status(text).expect("well-formed");
        assert_eq!((credentials.uid, credentials.gid), (4, 8));
        assert!(credentials.in_group(10) && credentials.in_group(8) && !credentials.in_group(5));
        assert!(credentials.capable(Capability::DacOverride) && !credentials.capable(Capability::FileOwner));
        assert_eq!(Credentials::parse_status("Uid:\t1"), None);
    }

    #[test]
    fn this_thread_is_who_it_is() {
        let own = Credentials::of_thread(std::process::id()).expect("alive");
        assert_eq!(own.uid, rustix::process::geteuid().as_raw());
        assert_eq!(Credentials::of_thread(0), None);
    }
}
