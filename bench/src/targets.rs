//! The filesystems under comparison, all over one lower directory on one disk.

use crate::isolation;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// A way to reach a union (or a plain directory) of the same files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// poolfs by the preloaded library
    Library,
    /// poolfs by FUSE
    Fuse,
    /// the disk's own filesystem, no union
    Ext4,
    /// the kernel's overlayfs
    Overlayfs,
    /// fuse-overlayfs
    FuseOverlayfs,
    /// gVisor's kernel at user level (runsc), which opens the disk's files itself (directfs)
    Gvisor,
    /// the same, with what is written kept in memory
    GvisorOverlay,
}

impl Target {
    /// Those that every machine has, in the order of the tables.
    pub const USUAL: [Target; 5] = [Self::Library, Self::Fuse, Self::Ext4, Self::Overlayfs, Self::FuseOverlayfs];
    /// Those that run in a sandbox of their own.
    pub const SANDBOXES: [Target; 2] = [Self::Gvisor, Self::GvisorOverlay];

    /// Whether this machine has what it needs.
    pub fn is_there(self) -> bool {
        static STARTS: OnceLock<bool> = OnceLock::new();
        !Self::SANDBOXES.contains(&self) || *STARTS.get_or_init(sandboxes_start)
    }

    /// All that this machine has, in the order of the tables.
    pub fn all() -> Vec<Target> {
        Self::USUAL.into_iter().chain(Self::SANDBOXES).filter(|target| target.is_there()).collect()
    }

    /// Whether its files are in a union; else they are in a directory of the disk.
    fn is_union(self) -> bool {
        self != Self::Ext4 && !Self::SANDBOXES.contains(&self)
    }

    /// The column's heading.
    pub fn title(self) -> &'static str {
        match self {
            Self::Library => "library",
            Self::Fuse => "FUSE",
            Self::Ext4 => "ext4",
            Self::Overlayfs => "overlayfs",
            Self::FuseOverlayfs => "fuse-overlayfs",
            Self::Gvisor => "gVisor",
            Self::GvisorOverlay => "gVisor, overlay",
        }
    }
}

/// What every sandbox is started with.
const SANDBOX: [&str; 2] = ["--network=none", "--ignore-cgroups"];

/// gVisor's program, where `make bench` installs it. Commands that run elsewhere need its whole path.
fn runsc() -> PathBuf {
    let path = Path::new("target/tools/bin/runsc");
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Whether sandboxes start on this machine: not in every container, for example.
fn sandboxes_start() -> bool {
    let state = std::env::temp_dir().join(format!("poolfs-bench-sandbox-{}", std::process::id()));
    let started = Command::new(runsc()).arg("--root").arg(&state).args(SANDBOX).args(["do", "--", "true"]).output();
    let _ = std::fs::remove_dir_all(&state);
    let starts = started.as_ref().is_ok_and(|output| output.status.success());
    if !starts && runsc().exists() {
        eprintln!("gVisor does not start here: {started:?}");
    }
    starts
}

/// The targets in an order of each round's own.
pub fn turned<T: Clone>(targets: &[T], round: u32) -> Vec<T> {
    let mut order = targets.to_vec();
    order.rotate_left(round as usize % targets.len());
    // Two are in another order already.
    if round % 2 == 1 && targets.len() > 2 {
        // Or one would always run after the same other, and find warm what that one has used.
        order.reverse();
    }
    order
}

/// A folder with a lower directory and everything mounted over it.
pub struct Laboratory {
    folder: PathBuf,
    poolfs: PathBuf,
    pool: String,
    mounted: Vec<PathBuf>,
}

impl Laboratory {
    /// Prepares `folder` (on the disk to measure on). `poolfs` is the command line's path.
    pub fn new(folder: &Path, poolfs: &Path, cpus: &str) -> Result<Self> {
        Self::with_memory(folder, poolfs, cpus, "4G")
    }

    /// The same, with so much memory for the service and what runs in the pool.
    pub fn with_memory(folder: &Path, poolfs: &Path, cpus: &str, memory: &str) -> Result<Self> {
        Self::sized(folder, poolfs, cpus, memory, "1G")
    }

    /// The same, with so much of it for cached bytes.
    pub fn sized(folder: &Path, poolfs: &Path, cpus: &str, memory: &str, cache: &str) -> Result<Self> {
        Self::of_pool("", folder, poolfs, cpus, memory, cache)
    }

    /// The same, one of several whose pools' names end differently.
    pub fn of_pool(ending: &str, folder: &Path, poolfs: &Path, cpus: &str, memory: &str, cache: &str) -> Result<Self> {
        std::fs::create_dir_all(folder.join("lower"))?;
        let pool = isolation::pool_name().context("measurements run in namespaces of their own")? + ending;
        let laboratory = Self { folder: folder.to_path_buf(), poolfs: poolfs.to_path_buf(), pool, mounted: Vec::new() };
        succeed(
            laboratory
                .poolfs()
                .args(["pool", "create", &laboratory.pool, "--cpus", cpus])
                .args(["--memory", memory, "--cache", cache]),
        )?;
        Ok(laboratory)
    }

    /// The lower directory: fill it before the first mount.
    pub fn lower(&self) -> PathBuf {
        self.folder.join("lower")
    }

    /// Where a target's files are.
    pub fn directory(&self, target: Target) -> PathBuf {
        match target {
            Target::Library | Target::Fuse => self.folder.join("poolfs"),
            Target::Ext4 => self.folder.join("native"),
            Target::Overlayfs => self.folder.join("overlayfs"),
            Target::FuseOverlayfs => self.folder.join("fuse-overlayfs"),
            Target::Gvisor => self.folder.join("gvisor"),
            Target::GvisorOverlay => self.folder.join("gvisor-overlay"),
        }
    }

    /// A command that runs in the target's way.
    pub fn command(&self, target: Target, program: &Path) -> Command {
        let (mut command, words): (Command, &[&str]) = match target {
            Target::Library => (self.poolfs(), &["exec", &self.pool, "--"]),
            Target::Gvisor => (self.sandbox(), &["--overlay2=none", "do", "-force-overlay=false", "--"]),
            Target::GvisorOverlay => (self.sandbox(), &["do", "--"]),
            _ => return Command::new(program),
        };
        command.args(words).arg(program);
        command
    }

    /// gVisor's program, which has the whole host's files in view.
    fn sandbox(&self) -> Command {
        let mut command = Command::new(runsc());
        command.arg("--root").arg(self.folder.join("gvisor-state")).args(SANDBOX);
        command
    }

    /// Mounts everything with fresh upper directories and nothing cached. The copies for those that are no union are made once.
    pub fn mount(&mut self) -> Result<()> {
        for target in Target::all().into_iter().filter(|target| !target.is_union()) {
            let copy = self.directory(target);
            if !copy.exists() {
                succeed(Command::new("cp").arg("-a").arg(self.lower()).arg(&copy))?;
            }
        }
        for target in [Target::Library, Target::Overlayfs, Target::FuseOverlayfs] {
            let branches = Branches::beside(&self.directory(target))?;
            self.mount_union(target, &branches)?;
            self.mounted.push(branches.at);
        }
        drop_caches()
    }

    /// Mounts one union over the lower directory.
    pub fn mount_union(&self, target: Target, branches: &Branches) -> Result<()> {
        match target {
            Target::Overlayfs => mount_overlayfs(&self.lower(), branches),
            Target::FuseOverlayfs => {
                let options = branches.options(&self.lower());
                succeed(Command::new("fuse-overlayfs").args(["-o", &options]).arg(&branches.at))
            }
            Target::Library | Target::Fuse => self.mount_stored(branches, "sparse"),
            Target::Ext4 | Target::Gvisor | Target::GvisorOverlay => bail!("{} is no union", target.title()),
        }
    }

    /// Mounts a union of poolfs that stores what is written in a format.
    pub fn mount_stored(&self, branches: &Branches, format: &str) -> Result<()> {
        let mut command = self.poolfs();
        command.args(["mount", &self.pool]).arg(&branches.at).arg("--upper").arg(&branches.upper);
        succeed(command.arg("--lower").arg(self.lower()).args(["--upper-format", format]))
    }

    /// Unmounts one union.
    pub fn unmount_union(&self, target: Target, at: &Path) -> Result<()> {
        match target {
            Target::Library | Target::Fuse => succeed(self.poolfs().args(["umount", &self.pool]).arg(at)),
            _ => succeed(Command::new("umount").arg(at)),
        }
    }

    /// Unmounts everything and removes the upper directories.
    pub fn unmount(&mut self) -> Result<()> {
        for at in std::mem::take(&mut self.mounted) {
            let is_own = at == self.directory(Target::Library);
            self.unmount_union(if is_own { Target::Library } else { Target::Overlayfs }, &at)?;
            Branches::beside(&at)?.remove()?;
        }
        Ok(())
    }

    /// The folder on the disk to measure on.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A command that runs in the pool's control group, on its cores, and does without the library.
    pub fn in_group(&self, program: &Path) -> Command {
        let mut command = self.poolfs();
        command.args(["exec", &self.pool, "--legacy", "--"]).arg(program);
        command
    }

    /// The pool's name.
    pub fn pool(&self) -> &str {
        &self.pool
    }

    /// A `poolfs` command with the laboratory's own state.
    pub fn poolfs(&self) -> Command {
        let mut command = Command::new(&self.poolfs);
        command.arg("--state").arg(self.folder.join("state"));
        command
    }
}

impl Drop for Laboratory {
    fn drop(&mut self) {
        for problem in [self.unmount(), succeed(self.poolfs().args(["pool", "rm", &self.pool]))] {
            if let Err(error) = problem {
                eprintln!("cleaning up: {error:#}");
            }
        }
    }
}

/// Where a union is mounted, and its directories for what is written.
pub struct Branches {
    /// Where it is mounted.
    pub at: PathBuf,
    upper: PathBuf,
    work: PathBuf,
}

impl Branches {
    /// The directories of a union at `at`, beside it, made if they are not there.
    pub fn beside(at: &Path) -> Result<Self> {
        let name = at.file_name().context("a name")?.to_string_lossy().into_owned();
        let [upper, work] = ["upper", "work"].map(|kind| at.with_file_name(format!("{name}-{kind}")));
        for folder in [at, &upper, &work] {
            std::fs::create_dir_all(folder)?;
        }
        Ok(Self { at: at.to_path_buf(), upper, work })
    }

    /// The directory of what is written.
    pub fn upper(&self) -> &Path {
        &self.upper
    }

    /// How the kernel is told of them.
    fn options(&self, lower: &Path) -> String {
        let [lower, upper, work] = [lower, &self.upper, &self.work].map(Path::display);
        format!("lowerdir={lower},upperdir={upper},workdir={work}")
    }

    /// Removes what was written.
    pub fn remove(self) -> Result<()> {
        std::fs::remove_dir_all(self.upper)?;
        Ok(std::fs::remove_dir_all(self.work)?)
    }
}

/// Mounts the kernel's overlayfs over a lower directory.
pub fn mount_overlayfs(lower: &Path, branches: &Branches) -> Result<()> {
    let options = branches.options(lower);
    succeed(Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options]).arg(&branches.at))
}

/// Runs a command that must succeed.
pub fn succeed(command: &mut Command) -> Result<()> {
    let text = format!("{command:?}");
    let output = command.output().with_context(|| format!("cannot start {text}"))?;
    if !output.status.success() {
        bail!("{text}: {}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// Writes dirty pages back and empties the kernel's caches.
pub fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "3").context("emptying the kernel's caches needs root")
}
