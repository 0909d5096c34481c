//! Where the experiments run: a cluster whose OSD stores into memory, as the paper's do, and a pool of its own for each tenant.

use crate::ceph::clients::{Client, Mounted, System};
use crate::ceph::cluster::Cluster;
use crate::targets::Laboratory;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Memory of a tenant's pool, and how much of it is for cached bytes: with ceph-fuse as with poolfs. The half may be dirty with ceph-fuse.
pub const POOL_GIBIBYTES: u32 = 4;
const POOL_CACHE: &str = "512M";
const CEPH_FUSE_CACHE: [(&str, &str); 2] = [("client_oc_size", "536870912"), ("client_oc_max_dirty", "268435456")];

/// Where the cluster stores: the measurement's own `/run`, which is in memory.
const STORE: &str = "/run/poolfs-bench";
const STORED: &str = "8G";

/// How much is done.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// How often every measurement is repeated.
    pub rounds: u32,
    /// How long what repeats itself goes on.
    pub milliseconds: u64,
    /// MiB of the file of random reads and writes.
    pub random: u64,
    /// Values of 128 KiB that are put.
    pub puts: u32,
    /// Values that gets find, all of which they read.
    pub gets: u32,
    /// MiB of a file that is read or written sequentially.
    pub sequential: u64,
    /// MiB of a file of the clones' image.
    pub image: u64,
}

impl Sizes {
    /// A full run.
    pub const FULL: Sizes =
        Sizes { rounds: 4, milliseconds: 6000, random: 1024, puts: 1024, gets: 2048, sequential: 256, image: 300 };
    /// A run that shows that everything works.
    pub const QUICK: Sizes =
        Sizes { rounds: 1, milliseconds: 2000, random: 256, puts: 256, gets: 512, sequential: 64, image: 64 };
}

/// Everything that all experiments use.
pub struct Site {
    work: PathBuf,
    poolfs: PathBuf,
    /// The cluster.
    pub cluster: Cluster,
    /// How much is done.
    pub sizes: Sizes,
}

impl Site {
    /// Starts the cluster. `work` is on the disk that is not the cluster's.
    pub fn new(work: &Path, poolfs: &Path, sizes: Sizes) -> Result<Self> {
        let cluster = Cluster::start(Path::new(STORE), STORED)?;
        Ok(Self { work: work.to_path_buf(), poolfs: poolfs.to_path_buf(), cluster, sizes })
    }

    /// A pool on some CPUs.
    pub fn pool(&self, name: &str, cpus: &str) -> Result<Laboratory> {
        let ending = format!("-{name}");
        let memory = format!("{POOL_GIBIBYTES}G");
        Laboratory::of_pool(&ending, &self.work.join(name), &self.poolfs, cpus, &memory, POOL_CACHE)
    }

    /// A directory of the cluster, mounted for a client in a pool: its own for each client, each pool, and each experiment.
    pub fn mount<'l>(&self, laboratory: &'l Laboratory, client: Client, experiment: &str) -> Result<Mounted<'l>> {
        let system = client.system().context("a client that mounts")?;
        let pool = laboratory.pool().rsplit('-').next().context("a name")?;
        let tree = PathBuf::from(format!("/{experiment}/{pool}{}", client.tree().display()));
        self.cluster.prepare(&tree, &[])?;
        let at = laboratory.folder().join("at");
        Mounted::new(laboratory, &self.cluster, system, &tree, &at, &CEPH_FUSE_CACHE)
    }
}

/// Removes what was made in a mounted directory: the cluster has no room for all of it.
pub fn empty(mounted: &Mounted<'_>) -> Result<()> {
    for entry in std::fs::read_dir(mounted.at())? {
        let path = entry?.path();
        let removed = if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
        removed.with_context(|| format!("{} cannot be removed", path.display()))?;
    }
    Ok(())
}

/// Clients that are compared, of those that this machine has.
pub fn clients() -> Vec<Client> {
    let all = [
        Client::Library(System::Exclusive),
        Client::Kernel(System::Exclusive),
        Client::Kernel(System::CephFuse),
        Client::Kernel(System::CephFuseDirect),
    ];
    all.into_iter().filter(|client| client.system().is_none_or(System::is_there)).collect()
}

/// What tables call a client.
pub fn title(client: Client) -> &'static str {
    match client {
        Client::Library(_) => "poolfs, library",
        Client::Kernel(System::Exclusive) => "poolfs, FUSE",
        other => other.title(),
    }
}

/// Starts this program in a client's way, as the paper's worker of that name.
pub fn worker(laboratory: &Laboratory, client: Client, name: &str) -> Result<Command> {
    let mut command = client.command(laboratory, &std::env::current_exe()?);
    command.args(["danaus", name]);
    Ok(command)
}

/// Runs commands at the same time; what each has printed.
pub fn at_once(commands: Vec<Command>) -> Result<Vec<String>> {
    let start = |mut command: Command| {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().with_context(|| format!("{command:?}"))
    };
    let started: Vec<Result<Child>> = commands.into_iter().map(start).collect();
    let ended: Vec<Result<String>> = started.into_iter().map(|child| printed(child?)).collect();
    ended.into_iter().collect()
}

fn printed(child: Child) -> Result<String> {
    let output = child.wait_with_output()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() {
        bail!("{}: {text}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(text)
}

/// The numbers that workers have printed.
pub fn numbers(texts: &[String]) -> Result<Vec<f64>> {
    texts.iter().map(|text| text.parse().with_context(|| format!("{text:?} is no number"))).collect()
}
