//! Memory of containers whose unions share a lower branch at the cluster, each of which has read the same file.

use crate::ceph::clients::{Mounted, System, branch, clean, end, wait_for};
use crate::ceph::cluster::{Cluster, is_installed};
use crate::clones::reader;
use crate::emptying::emptied;
use crate::groups::{self, Memory};
use crate::targets::{Laboratory, Target, succeed};
use anyhow::{Context, Result, ensure};
use std::fmt::Write;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Containers.
pub const CLONES: usize = 4;

/// The lower branch, its file, and the file's length, MiB.
const IMAGE: &str = "/images/x";
const FILE: &str = "large";
const MEBIBYTES: u64 = 300;

/// Who mounts the unions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unions {
    /// poolfs, read by the library
    Library,
    /// poolfs, read by FUSE
    Fuse,
    /// unionfs-fuse over one ceph-fuse
    Unionfs,
    /// the same, both without the kernel's page cache
    UnionfsDirect,
    /// fuse-overlayfs over one ceph-fuse
    FuseOverlayfs,
}

impl Unions {
    /// All, in the order of the table.
    pub const ALL: [Unions; 5] = [Self::Library, Self::Fuse, Self::Unionfs, Self::UnionfsDirect, Self::FuseOverlayfs];

    /// What tables call it.
    pub fn title(self) -> &'static str {
        match self {
            Self::Library => "poolfs, library",
            Self::Fuse => "poolfs, FUSE",
            Self::Unionfs => "ceph-fuse and unionfs-fuse",
            Self::UnionfsDirect => "ceph-fuse and unionfs-fuse, no page cache",
            Self::FuseOverlayfs => "ceph-fuse and fuse-overlayfs",
        }
    }

    /// Whether this machine has it.
    pub fn is_there(self) -> bool {
        match self {
            Self::Library | Self::Fuse => true,
            Self::Unionfs | Self::UnionfsDirect => is_installed("ceph-fuse") && is_installed("unionfs"),
            Self::FuseOverlayfs => is_installed("ceph-fuse") && is_installed("fuse-overlayfs"),
        }
    }

    /// The client below, where the unions have one of its own.
    fn below(self) -> Option<System> {
        match self {
            Self::Library | Self::Fuse => None,
            Self::Unionfs | Self::FuseOverlayfs => Some(System::CephFuse),
            Self::UnionfsDirect => Some(System::CephFuseDirect),
        }
    }
}

/// Unions with writable branches of their own on the disk over one lower branch at the cluster; unmounted at their end.
pub struct Clones<'l> {
    laboratory: &'l Laboratory,
    mounted: Vec<(PathBuf, Option<Child>)>,
    // After the unions that lie over it.
    _below: Option<Mounted<'l>>,
}

impl<'l> Clones<'l> {
    /// Mounts so many over the directory `image` of the cluster, with new writable branches.
    pub fn mount(
        laboratory: &'l Laboratory,
        cluster: &Cluster,
        unions: Unions,
        image: &Path,
        number: usize,
    ) -> Result<Self> {
        let folder = laboratory.folder().join("clones");
        let lower = folder.join("image");
        let below = unions.below().map(|system| Mounted::new(laboratory, cluster, system, image, &lower, &[]));
        let mut clones = Self { laboratory, mounted: Vec::new(), _below: below.transpose()? };
        for number in 0..number {
            let [at, upper, work] = ["at", "upper", "work"].map(|kind| folder.join(format!("{kind}-{number}")));
            for made in [&upper, &work] {
                if made.exists() {
                    fs::remove_dir_all(made)?;
                }
            }
            for made in [&at, &upper, &work] {
                fs::create_dir_all(made)?;
            }
            let process = match unions {
                Unions::Library | Unions::Fuse => {
                    let mut command = laboratory.poolfs();
                    command.args(["mount", laboratory.pool()]).arg(&at).arg("--upper").arg(&upper);
                    command.arg("--lower").arg(branch(image));
                    succeed(command.arg("--ceph-conf").arg(cluster.configuration()))?;
                    None
                }
                Unions::Unionfs | Unions::UnionfsDirect => {
                    let mut command = laboratory.in_group(Path::new("unionfs"));
                    let direct = if unions == Unions::UnionfsDirect { ",direct_io" } else { "" };
                    command.args(["-f", "-o", &format!("cow{direct}")]);
                    command.arg(format!("{}=RW:{}=RO", upper.display(), lower.display()));
                    Some(command)
                }
                Unions::FuseOverlayfs => {
                    let mut command = laboratory.in_group(Path::new("fuse-overlayfs"));
                    let branches = [&lower, &upper, &work].map(|path| path.display());
                    let [lower, upper, work] = branches;
                    command.args(["-f", "-o", &format!("lowerdir={lower},upperdir={upper},workdir={work}")]);
                    Some(command)
                }
            };
            let process = process.map(|command| serve(command, &at)).transpose()?;
            clones.mounted.push((at, process));
        }
        Ok(clones)
    }

    /// Where they are mounted.
    pub fn places(&self) -> impl Iterator<Item = &Path> {
        self.mounted.iter().map(|(at, _)| at.as_path())
    }
}

/// Starts what mounts a union at a directory, and waits until it has.
fn serve(mut command: Command, at: &Path) -> Result<Child> {
    let device = fs::metadata(at)?.dev();
    let mut process = command.arg(at).stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
    let mounted = wait_for("the union's program", &mut process, || Ok(fs::metadata(at)?.dev() != device));
    if mounted.is_err() {
        clean(&end(at, &mut process));
    }
    mounted.map(|_| process)
}

impl Drop for Clones<'_> {
    fn drop(&mut self) {
        for (at, process) in &mut self.mounted {
            match process {
                Some(process) => clean(&end(at, process)),
                None => clean(&self.laboratory.unmount_union(Target::Library, at)),
            }
        }
    }
}

/// The table: what the daemons have resident, and what all of the pool's control groups use, in MiB.
pub fn run(laboratory: &Laboratory, cluster: &Cluster) -> Result<String> {
    cluster.prepare(Path::new(IMAGE), &[(FILE.to_owned(), MEBIBYTES << 20)])?;
    let mut text = format!(
        "| {CLONES} clones that have read the same {MEBIBYTES} MiB; MiB | resident in the service or the daemons | control groups of the pool |\n|---|---|---|\n"
    );
    for unions in Unions::ALL {
        eprintln!("memory of clones: {}", unions.title());
        let (resident, charged) =
            if unions.is_there() { used(laboratory, cluster, unions)? } else { (0, Memory::default()) };
        let shown = |bytes: u64| if bytes == 0 { "-".to_owned() } else { format!("{:.0}", bytes as f64 / 1_048_576.0) };
        let _ = writeln!(text, "| {} | {} | {} |", unions.title(), shown(resident), shown(charged.all));
    }
    Ok(text)
}

/// Resident bytes of who serves, and what was added to the pool's groups, while all readers have the file open.
fn used(laboratory: &Laboratory, cluster: &Cluster, unions: Unions) -> Result<(u64, Memory)> {
    let before = emptied(laboratory.pool())?;
    let clones = Clones::mount(laboratory, cluster, unions, Path::new(IMAGE), CLONES)?;
    let target = if unions == Unions::Library { Target::Library } else { Target::Fuse };
    let mut readers = Vec::new();
    let read: Result<()> = clones.places().try_for_each(|at| {
        readers.push(reader(laboratory, target, &at.join(FILE), false)?);
        Ok(())
    });
    let resident = groups::resident(laboratory.pool(), "poolfs-bench");
    let after = groups::used(laboratory.pool());
    for mut child in readers {
        drop(child.stdin.take());
        let status = child.wait()?;
        ensure!(status.success(), "a reader over {}: {status}", unions.title());
    }
    read.with_context(|| format!("over {}", unions.title()))?;
    Ok((resident?, after?.since(before)))
}
