//! A Ceph cluster on this machine, for tests whose branches are at one.

use crate::{Outcome, run, workspace};
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::process::Command;

/// One monitor, one OSD and one metadata server. It ends with the test's namespaces at the latest.
pub struct Cluster {
    place: PathBuf,
}

impl Cluster {
    /// A new one, in `folder`.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn create(folder: &Path) -> Self {
        let cluster = Self { place: folder.join("cluster") };
        let _ = cluster.script(&["create"]).expect("a cluster");
        cluster
    }

    /// Runs a command of the script that makes clusters.
    #[must_use]
    pub fn script(&self, command: &[&str]) -> Outcome {
        let (command, arguments) = command.split_first().expect("a command");
        run(Command::new(workspace().join("packaging/ceph-cluster.sh")).arg(command).arg(&self.place).args(arguments))
    }

    /// From here on the daemon that stores its objects answers nothing, or it goes on.
    ///
    /// # Panics
    /// When there is no such daemon.
    pub fn signal_storage(&self, signal: Signal) {
        let pid = std::fs::read_to_string(self.place.join("run/osd")).expect("it runs");
        let pid = Pid::from_raw(pid.trim().parse().expect("a number")).expect("a number");
        kill_process(pid, signal).expect("ours");
    }

    /// Ceph's configuration for its clients.
    #[must_use]
    pub fn configuration(&self) -> PathBuf {
        self.place.join("ceph.conf")
    }

    /// Makes a user who may only use a directory of the filesystem, and writes that user's key to a file.
    ///
    /// # Panics
    /// When the cluster does not.
    #[must_use]
    pub fn authorize(&self, user: &str, directory: &str) -> PathBuf {
        let key = self.place.join(format!("keyring-{user}"));
        let mut command = Command::new("ceph");
        command.arg("--conf").arg(self.configuration()).args(["auth", "get-or-create", &format!("client.{user}")]);
        command.args(["mon", "allow r", "osd", "allow rw", "mds", &format!("allow rw path={directory}")]);
        let _ = run(command.arg("-o").arg(&key)).expect("ceph auth");
        key
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // One that stands still is killed as well.
        let _ = self.script(&["destroy"]);
    }
}
