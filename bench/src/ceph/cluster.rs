//! A Ceph cluster of a measurement's own, on this machine, and what is missing of the programs to compare with.

use crate::targets::succeed;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The script that makes clusters, from the workspace, where `make bench` runs.
const SCRIPT: &str = "packaging/ceph-cluster.sh";

/// What the OSD may store; only what is written takes room on the disk.
const STORED: &str = "24G";

/// One monitor, one OSD with BlueStore and one metadata server. It ends with this value, or with the measurement's namespaces.
pub struct Cluster {
    place: PathBuf,
}

impl Cluster {
    /// Starts one in a new folder inside of `folder`. Fails when the Debian packages of Ceph's daemons are missing.
    pub fn start(folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        let cluster = Self { place: folder.join("cluster") };
        let mut command = cluster.script("create");
        succeed(command.env("STORE", "bluestore").env("SIZE", STORED))
            .context("no Ceph cluster; `make ceph` installs what it needs")?;
        Ok(cluster)
    }

    fn script(&self, what: &str) -> Command {
        let mut command = Command::new(SCRIPT);
        command.arg(what).arg(&self.place);
        command
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

/// A line for each of these (program, its Debian package, what is left out without it) that is not installed.
pub fn missing(peers: &[(&str, &str, &str)]) -> String {
    let absent = peers.iter().filter(|(program, ..)| !is_installed(program));
    absent
        .map(|(program, package, without)| {
            format!("Missing: `{program}` (Debian package {package}), so {without} was not measured.\n")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_said() {
        assert_eq!(missing(&[("sh", "dash", "the shell")]), "");
        let said = missing(&[("sh", "dash", "the shell"), ("no-such-program", "nothing", "the column of it")]);
        assert_eq!(
            said,
            "Missing: `no-such-program` (Debian package nothing), so the column of it was not measured.\n"
        );
    }
}
