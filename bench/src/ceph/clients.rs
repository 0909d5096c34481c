//! The ways to a directory of a cluster that are compared, and mounts of them.

use crate::ceph::cluster::{Cluster, is_installed};
use crate::targets::{Laboratory, Target, succeed};
use anyhow::{Context, Result, bail, ensure};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The longest wait for ceph-fuse to show its mount, and the pause between two looks.
const MOUNT_WAIT: Duration = Duration::from_secs(60);
const MOUNT_PAUSE: Duration = Duration::from_millis(5);

/// What mounts a directory of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    /// poolfs; this pool alone writes the directory
    Exclusive,
    /// poolfs; anybody writes it, and each use asks the cluster
    Strict,
    /// ceph-fuse
    CephFuse,
    /// ceph-fuse without the kernel's page cache
    CephFuseDirect,
}

impl System {
    /// All of them.
    pub const ALL: [System; 4] = [Self::Exclusive, Self::Strict, Self::CephFuse, Self::CephFuseDirect];

    /// Whether this machine has it.
    pub fn is_there(self) -> bool {
        matches!(self, Self::Exclusive | Self::Strict) || is_installed("ceph-fuse")
    }

    /// The directory of the cluster's filesystem that it mounts: each has one, so that none takes capabilities from another.
    pub fn tree(self) -> &'static Path {
        Path::new(match self {
            Self::Exclusive => "/exclusive",
            Self::Strict => "/strict",
            Self::CephFuse => "/ceph-fuse",
            Self::CephFuseDirect => "/ceph-fuse-direct",
        })
    }
}

/// A column of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Client {
    /// by the preloaded library
    Library(System),
    /// by the kernel
    Kernel(System),
    /// by no mount, but by libcephfs in the program itself
    Libcephfs,
}

impl Client {
    /// All, in the order of the tables.
    pub const ALL: [Client; 7] = [
        Self::Library(System::Exclusive),
        Self::Kernel(System::Exclusive),
        Self::Library(System::Strict),
        Self::Kernel(System::Strict),
        Self::Kernel(System::CephFuse),
        Self::Kernel(System::CephFuseDirect),
        Self::Libcephfs,
    ];

    /// Those that this machine has.
    pub fn present() -> Vec<Client> {
        Self::ALL.into_iter().filter(|client| client.system().is_none_or(System::is_there)).collect()
    }

    /// The column's heading.
    pub fn title(self) -> &'static str {
        match self {
            Self::Library(System::Exclusive) => "library",
            Self::Kernel(System::Exclusive) => "FUSE",
            Self::Library(_) => "library, strict",
            Self::Kernel(System::Strict) => "FUSE, strict",
            Self::Kernel(System::CephFuse) => "ceph-fuse",
            Self::Kernel(System::CephFuseDirect) => "ceph-fuse, no page cache",
            Self::Libcephfs => "libcephfs",
        }
    }

    /// What mounts for it.
    pub fn system(self) -> Option<System> {
        match self {
            Self::Library(system) | Self::Kernel(system) => Some(system),
            Self::Libcephfs => None,
        }
    }

    /// Its directory in the cluster.
    pub fn tree(self) -> &'static Path {
        self.system().map_or(Path::new("/libcephfs"), System::tree)
    }

    /// A command in the laboratory's pool that uses files in this way.
    pub fn command(self, laboratory: &Laboratory, program: &Path) -> Command {
        match self {
            Self::Library(_) => laboratory.command(Target::Library, program),
            _ => laboratory.in_group(program),
        }
    }
}

/// A directory of a cluster, mounted; unmounted at its end.
pub struct Mounted<'l> {
    laboratory: &'l Laboratory,
    at: PathBuf,
    /// ceph-fuse, which runs in the pool as what uses it does.
    process: Option<Child>,
}

impl<'l> Mounted<'l> {
    /// Mounts `tree` of the cluster at `at`, which is made. ceph-fuse gets `settings`, too: names of Ceph's configuration, and values.
    pub fn new(
        laboratory: &'l Laboratory,
        cluster: &Cluster,
        system: System,
        tree: &Path,
        at: &Path,
        settings: &[(&str, &str)],
    ) -> Result<Self> {
        std::fs::create_dir_all(at)?;
        let mut mounted = Self { laboratory, at: at.to_path_buf(), process: None };
        if matches!(system, System::Exclusive | System::Strict) {
            let coherence = if system == System::Strict { "strict" } else { "exclusive" };
            let mut command = laboratory.poolfs();
            command.args(["mount", laboratory.pool()]).arg(at).args(["--coherence", coherence, "--dir"]);
            command.arg(branch(tree)).arg("--ceph-conf").arg(cluster.configuration());
            succeed(&mut command)?;
            return Ok(mounted);
        }
        let device = std::fs::metadata(at)?.dev();
        let mut command = laboratory.in_group(Path::new("ceph-fuse"));
        command.arg("-f").arg("-c").arg(cluster.configuration()).arg("-r").arg(tree);
        if system == System::CephFuseDirect {
            command.arg("--fuse_disable_pagecache=true");
        }
        command.args(settings.iter().map(|(name, value)| format!("--{name}={value}")));
        let output = || std::fs::File::options().create(true).append(true).open(at.with_extension("log"));
        let command = command.arg(at).stdin(Stdio::null()).stdout(output()?).stderr(output()?);
        let process = mounted.process.insert(command.spawn()?);
        wait_for("ceph-fuse", process, || Ok(std::fs::metadata(at)?.dev() != device))?;
        Ok(mounted)
    }

    /// Where it is mounted.
    pub fn at(&self) -> &Path {
        &self.at
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let Some(process) = &mut self.process else {
            clean(&self.laboratory.unmount_union(Target::Library, &self.at));
            return;
        };
        clean(&end(&self.at, process));
    }
}

/// Unmounts what a process serves, and waits for the process, which does not outlive a failure.
pub fn end(at: &Path, process: &mut Child) -> Result<()> {
    if process.try_wait()?.is_some() {
        return Ok(());
    }
    let unmounted = succeed(Command::new("umount").arg(at));
    if unmounted.is_err() {
        process.kill()?;
    }
    process.wait()?;
    unmounted.map(drop)
}

/// Says what went wrong while something was cleaned up.
pub fn clean(done: &Result<()>) {
    if let Err(error) = done {
        eprintln!("cleaning up: {error:#}");
    }
}

/// How `poolfs` is told of a directory of a cluster.
pub fn branch(tree: &Path) -> String {
    format!("ceph:{}", tree.display())
}

/// Waits until what a process is to do is done.
pub fn wait_for(name: &str, process: &mut Child, mut is_done: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + MOUNT_WAIT;
    while !is_done()? {
        if let Some(status) = process.try_wait().context("a child")? {
            bail!("{name} has ended: {status}");
        }
        ensure!(Instant::now() < end, "{name} has not mounted within {} s", MOUNT_WAIT.as_secs());
        std::thread::sleep(MOUNT_PAUSE);
    }
    Ok(())
}
