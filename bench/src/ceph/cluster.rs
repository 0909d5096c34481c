//! A Ceph cluster of a measurement's own, on this machine, and what is missing of the programs to compare with.

use crate::targets::succeed;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The script that makes clusters, from the workspace, where `make bench` runs.
const SCRIPT: &str = "packaging/ceph-cluster.sh";

/// The daemon by which a cluster says how much room it has, as real ones do, and without which poolfs posts no writes.
pub const MANAGER: Peer =
    ("ceph-mgr", "ceph-mgr", "the cluster does not say how much room it has, and poolfs posts no writes");

/// A program that may be missing, its Debian package, and what that means.
pub type Peer = (&'static str, &'static str, &'static str);

/// One monitor, one OSD with BlueStore, one metadata server, and a manager where that is installed. It ends with this value, or with the measurement's namespaces.
pub struct Cluster {
    place: PathBuf,
}

impl Cluster {
    /// Starts one in a new folder inside of `folder`, which stores `size` at most (such as `8G`) and in time takes all of it there. Fails when
    /// the Debian packages of Ceph's daemons are missing.
    pub fn start(folder: &Path, size: &str) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        let cluster = Self { place: folder.join("cluster") };
        let mut command = cluster.script("create");
        let manager = if is_installed(MANAGER.0) { "yes" } else { "no" };
        succeed(command.env("STORE", "bluestore").env("SIZE", size).env("MANAGER", manager))
            .context("no Ceph cluster; `make ceph` installs what it needs")?;
        Ok(cluster)
    }

    fn script(&self, what: &str) -> Command {
        let mut command = Command::new(SCRIPT);
        command.arg(what).arg(&self.place);
        command
    }

    /// Makes a directory of its filesystem with files: a name and how many bytes, a multiple of 1 MiB, for each.
    pub fn prepare(&self, tree: &Path, files: &[(String, u64)]) -> Result<()> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("ceph-prepare").arg(self.configuration()).arg(tree);
        command.args(files.iter().map(|(name, bytes)| format!("{name}:{bytes}")));
        succeed(&mut command)
    }

    /// The configuration of its clients.
    pub fn configuration(&self) -> PathBuf {
        self.place.join("ceph.conf")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = succeed(&mut self.script("destroy")) {
            eprintln!("cleaning up: {error:#}");
        }
    }
}

/// Whether a program can be started by its name.
pub fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// A line for each of these that is not installed.
pub fn missing(peers: &[Peer]) -> String {
    let absent = peers.iter().filter(|(program, ..)| !is_installed(program));
    absent
        .map(|(program, package, without)| format!("Missing: `{program}` (Debian package {package}): {without}.\n"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_said() {
        assert_eq!(missing(&[("sh", "dash", "no shell")]), "");
        let said = missing(&[("sh", "dash", "no shell"), ("no-such-program", "nothing", "no column of it")]);
        assert_eq!(said, "Missing: `no-such-program` (Debian package nothing): no column of it.\n");
    }
}
