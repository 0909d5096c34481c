//! A Ceph cluster on this machine, for tests whose branches are at one.

use crate::{Outcome, Pool, hash, name_of, run, workspace};
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::process::Command;

/// One monitor, one OSD and one metadata server. It ends with the test's namespaces at the latest.
pub struct Cluster {
    place: PathBuf,
    configuration: PathBuf,
    network: Option<Network>,
}

/// A network of its own for a cluster, and the link that leads there from the test's. It ends with the test's namespaces.
struct Network {
    namespace: PathBuf,
    link: String,
    /// The cluster's.
    address: String,
}

impl Network {
    /// A place in the link where nobody is.
    const NOWHERE: &str = "02:00:00:00:00:09";

    fn new(folder: &Path) -> Self {
        let name = name_of(folder);
        let id = &name[name.len().saturating_sub(6)..];
        let (link, peer) = (format!("poolfs-{id}"), format!("cluster-{id}"));
        let namespace = Path::new("/run/netns").join(&peer);
        // Of those for tests of networks (RFC 2544), four for each test.
        let [first, second] = (hash(name.as_bytes()) as u16 & !3).to_be_bytes();
        let (own, there) = (format!("198.18.{first}.{}", second + 1), format!("198.18.{first}.{}", second + 2));
        let script = format!(
            "mkdir -p /run/netns; ip netns add {peer}; ip link add {link} type veth peer name {peer} netns {peer}; \
             ip addr add {own}/30 dev {link}; ip link set {link} up; \
             nsenter --net={} sh -euc 'ip link set lo up; ip addr add {there}/30 dev {peer}; ip link set {peer} up'",
            namespace.display()
        );
        let _ = crate::shell(&script).expect("a network");
        Self { namespace, link, address: there }
    }

    fn enter(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.namespace.display())).arg(program).env("ADDRESS", &self.address);
        command
    }
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

    /// The same in a network of its own, which can be cut off ([`Cluster::cut_off`]).
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn apart(folder: &Path) -> Self {
        Self::made(folder, "bluestore", Some(Network::new(folder)))
    }

    fn stored(folder: &Path, store: &str) -> Self {
        Self::made(folder, store, None)
    }

    fn made(folder: &Path, store: &str, network: Option<Network>) -> Self {
        let place = folder.join("cluster");
        let cluster = Self { configuration: place.join("ceph.conf"), place, network };
        let _ = run(cluster.command("create").env("STORE", store)).expect("a cluster");
        cluster
    }

    fn command(&self, command: &str) -> Command {
        let script = workspace().join("packaging/ceph-cluster.sh");
        let mut made = self.network.as_ref().map_or_else(|| Command::new(&script), |network| network.enter(&script));
        made.arg(command).arg(&self.place);
        made
    }

    /// Runs Ceph's own command line; what it prints.
    ///
    /// # Panics
    /// When it fails.
    #[must_use]
    pub fn ceph(&self, arguments: &[&str]) -> String {
        let program = Path::new("ceph");
        let mut command = self.network.as_ref().map_or_else(|| Command::new(program), |network| network.enter(program));
        run(command.arg("--conf").arg(&self.configuration).args(arguments)).expect("ceph")
    }

    /// From here on nothing that is sent to the cluster arrives, and nobody is told so; or it does again.
    ///
    /// # Panics
    /// When it has no network of its own.
    pub fn cut_off(&self, is_cut_off: bool) {
        let Network { link, address: there, .. } = self.network.as_ref().expect("apart");
        let nowhere = Network::NOWHERE;
        let script = match is_cut_off {
            true => format!("ip neigh replace {there} lladdr {nowhere} dev {link} nud permanent"),
            false => format!("ip neigh del {there} dev {link}"),
        };
        let _ = crate::shell(&script).expect("ip");
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

    /// Bytes that clients and metadata servers have read of its objects so far.
    ///
    /// # Panics
    /// When the OSD does not say.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        let pid = std::fs::read_to_string(self.place.join("run/osd")).expect("it runs");
        let socket = self.place.join(format!("run/osd.0.{}.socket", pid.trim()));
        let said = run(Command::new("ceph").arg("--admin-daemon").arg(socket).args(["perf", "dump", "osd"]));
        let said = said.expect("perf dump");
        let counts: serde_json::Value = serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"));
        counts["osd"]["op_out_bytes"].as_u64().unwrap_or_else(|| panic!("no count in {said}"))
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
        self.authorize_as(user, &format!("allow rw path={directory}"))
    }

    /// The same, with these rights at the metadata server.
    ///
    /// # Panics
    /// When the cluster does not.
    #[must_use]
    pub fn authorize_as(&self, user: &str, rights: &str) -> PathBuf {
        let key = self.place.join(format!("keyring-{user}"));
        let name = format!("client.{user}");
        let place = key.to_str().expect("text");
        let _ = self.ceph(&[
            "auth",
            "get-or-create",
            &name,
            "mon",
            "allow r",
            "osd",
            "allow rw",
            "mds",
            rights,
            "-o",
            place,
        ]);
        key
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // One that stands still is killed as well.
        let _ = self.script(&["destroy"]);
    }
}
