//! A Ceph cluster on this machine, for tests whose branches are at one.

use crate::{Outcome, Pool, name_of, run, workspace};
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::process::Command;

/// One monitor, one OSD and one metadata server. It ends with the test's namespaces at the latest.
pub struct Cluster {
    place: PathBuf,
    configuration: PathBuf,
}

/// A daemon of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Daemon {
    /// stores objects
    Osd,
    /// keeps names and attributes
    Mds,
}

impl Daemon {
    fn name(self) -> &'static str {
        match self {
            Self::Osd => "osd",
            Self::Mds => "mds",
        }
    }
}

impl Cluster {
    /// A new one, in `folder`.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn create(folder: &Path) -> Self {
        Self::stored(folder, "memstore")
    }

    /// The same, which keeps what it stores also when its daemons are killed.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn lasting(folder: &Path) -> Self {
        Self::stored(folder, "bluestore")
    }

    fn stored(folder: &Path, store: &str) -> Self {
        let place = folder.join("cluster");
        let cluster = Self { configuration: place.join("ceph.conf"), place };
        let _ = run(cluster.command("create").env("STORE", store)).expect("a cluster");
        cluster
    }

    fn command(&self, command: &str) -> Command {
        let mut made = Command::new(workspace().join("packaging/ceph-cluster.sh"));
        made.arg(command).arg(&self.place);
        made
    }

    /// Runs a command of the script that makes clusters.
    #[must_use]
    pub fn script(&self, command: &[&str]) -> Outcome {
        let (command, arguments) = command.split_first().expect("a command");
        run(self.command(command).args(arguments))
    }

    /// Makes directories.
    ///
    /// # Panics
    /// When they cannot be made.
    pub fn make_directories(&self, directories: &[&str]) {
        let folder = self.place.parent().expect("the test's");
        // Whose control groups no other test has.
        let pool = Pool::named(folder, &format!("{}-maker", name_of(folder)), "16M");
        let root = pool.mount(&folder.join("root"), &[&["--dir", "ceph:/"], &self.access()[..]].concat());
        for directory in directories {
            std::fs::create_dir_all(root.path().join(directory)).expect("made");
        }
        let _ = root.unmount().expect("umount");
    }

    /// The options of a mount that say how it is reached.
    ///
    /// # Panics
    /// When its place is no text.
    #[must_use]
    pub fn access(&self) -> [&str; 2] {
        ["--ceph-conf", self.configuration.to_str().expect("text")]
    }

    /// Kills a daemon, and starts it again; it serves when this returns.
    ///
    /// # Panics
    /// When it does not start.
    pub fn kill(&self, daemon: Daemon) {
        let _ = self.script(&["kill", daemon.name()]).expect("killed");
        let _ = self.script(&["start", daemon.name()]).expect("started");
    }

    /// From here on a daemon answers nothing, or it goes on.
    ///
    /// # Panics
    /// When there is no such daemon.
    pub fn signal(&self, daemon: Daemon, signal: Signal) {
        let pid = std::fs::read_to_string(self.place.join("run").join(daemon.name())).expect("it runs");
        let pid = Pid::from_raw(pid.trim().parse().expect("a number")).expect("a number");
        kill_process(pid, signal).expect("ours");
    }

    /// Ceph's configuration for its clients.
    #[must_use]
    pub fn configuration(&self) -> &Path {
        &self.configuration
    }

    /// Makes a user who may only use a directory of the filesystem, and writes that user's key to a file.
    ///
    /// # Panics
    /// When the cluster does not.
    #[must_use]
    pub fn authorize(&self, user: &str, directory: &str) -> PathBuf {
        let key = self.place.join(format!("keyring-{user}"));
        let mut command = Command::new("ceph");
        command.arg("--conf").arg(&self.configuration).args(["auth", "get-or-create", &format!("client.{user}")]);
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
