//! Branches by their names: a directory of the host by its path, or one of a CephFS as `ceph:/PATH`.

use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// How names of directories of a CephFS begin: a `/` follows. A directory of the host has an absolute path.
pub const CEPH_PREFIX: &str = "ceph:";

/// A branch of a [`crate::StackSpec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Branch<'a> {
    /// What it is called.
    pub name: &'a Path,
    /// Whether it is only read.
    pub read_only: bool,
}

/// Where a branch is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place<'a> {
    /// In a directory of the host.
    Directory(&'a Path),
    /// In a directory of a CephFS, from that filesystem's root.
    Ceph(&'a Path),
}

impl<'a> Place<'a> {
    /// The place that a name says.
    #[must_use]
    pub fn of(name: &'a Path) -> Self {
        match name.as_os_str().as_bytes().strip_prefix(CEPH_PREFIX.as_bytes()) {
            Some(path) if path.starts_with(b"/") => Self::Ceph(Path::new(OsStr::from_bytes(path))),
            _ => Self::Directory(name),
        }
    }

    /// Whether its descriptor is sent with the command that mounts it.
    #[must_use]
    pub fn is_directory(self) -> bool {
        matches!(self, Self::Directory(_))
    }
}

impl<'a> Branch<'a> {
    /// Where it is stored.
    #[must_use]
    pub fn place(self) -> Place<'a> {
        Place::of(self.name)
    }
}

/// The one name of a directory of a CephFS: without what a path can have that leads nowhere else. None where it goes up (`..`).
#[must_use]
pub fn ceph_name(path: &Path) -> Option<PathBuf> {
    let mut name = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(part) => name.push(part),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    let mut whole = std::ffi::OsString::from(CEPH_PREFIX);
    whole.push(name);
    Some(whole.into())
}

/// How the cluster is reached that has a mount's Ceph branches. What is left out is what Ceph's own programs take then.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CephAccess {
    /// Ceph's `ceph.conf`, absolute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configuration: Option<PathBuf>,
    /// The user, without `client.`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The file with the user's key, absolute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keyring: Option<PathBuf>,
    /// The filesystem's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filesystem: Option<String>,
    /// The cluster's own id (`fsid`), where its configuration says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
    /// The pool, by a name that no other pool has on any host: what an earlier service of this pool has left at the cluster is ended by the next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
}

impl CephAccess {
    /// Whether both may lead to one filesystem, by whatever files: they do not if they have the ids of two clusters, or name two filesystems.
    #[must_use]
    pub fn may_be_one(&self, other: &Self) -> bool {
        let differ = |one: &Option<String>, other: &Option<String>| one.is_some() && other.is_some() && one != other;
        !differ(&self.cluster, &other.cluster) && !differ(&self.filesystem, &other.filesystem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_where_a_branch_is() {
        let of = |name| Place::of(Path::new(name));
        assert_eq!(of("ceph:/"), Place::Ceph(Path::new("/")));
        assert_eq!(of("ceph:/a/b"), Place::Ceph(Path::new("/a/b")));
        for directory in ["/ceph:/a", "ceph:a", "ceph", "./ceph:/a", "/a"] {
            assert_eq!(of(directory), Place::Directory(Path::new(directory)));
        }
    }

    #[test]
    fn a_directory_of_a_cephfs_has_one_name() {
        let name = |path| ceph_name(Path::new(path)).map(|name| name.to_str().expect("text").to_owned());
        for (path, expected) in [("/", "ceph:/"), ("//a//b/", "ceph:/a/b"), ("/a/./b", "ceph:/a/b")] {
            assert_eq!(name(path).as_deref(), Some(expected), "{path}");
        }
        assert_eq!(name("/a/../b"), None);
    }
}
