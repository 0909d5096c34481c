//! The filesystems under comparison, all over one lower directory on one disk.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

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
}

impl Target {
    /// All of them, in the order of the tables.
    pub const ALL: [Target; 5] = [Self::Library, Self::Fuse, Self::Ext4, Self::Overlayfs, Self::FuseOverlayfs];

    /// The column's heading.
    pub fn title(self) -> &'static str {
        match self {
            Self::Library => "library",
            Self::Fuse => "FUSE",
            Self::Ext4 => "ext4",
            Self::Overlayfs => "overlayfs",
            Self::FuseOverlayfs => "fuse-overlayfs",
        }
    }
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
        std::fs::create_dir_all(folder.join("lower"))?;
        let pool = format!("bench-{}", std::process::id());
        let laboratory = Self { folder: folder.to_path_buf(), poolfs: poolfs.to_path_buf(), pool, mounted: Vec::new() };
        succeed(
            laboratory
                .poolfs()
                .args(["pool", "create", &laboratory.pool, "--cpus", cpus])
                .args(["--memory", "4G", "--cache", "1G"]),
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
        }
    }

    /// A command that runs in the target's way.
    pub fn command(&self, target: Target, program: &Path) -> Command {
        if target == Target::Library {
            let mut command = self.poolfs();
            command.args(["exec", &self.pool, "--"]).arg(program);
            return command;
        }
        Command::new(program)
    }

    /// Mounts everything with fresh upper directories and nothing cached. The copy for the disk's own filesystem is made
    /// once.
    pub fn mount(&mut self) -> Result<()> {
        let native = self.directory(Target::Ext4);
        if !native.exists() {
            succeed(Command::new("cp").arg("-a").arg(self.lower()).arg(&native))?;
        }
        for target in [Target::Library, Target::Overlayfs, Target::FuseOverlayfs] {
            let at = self.directory(target);
            let name = at.file_name().context("a name")?.to_string_lossy().into_owned();
            let (upper, work) = (self.folder.join(format!("{name}-upper")), self.folder.join(format!("{name}-work")));
            for folder in [&at, &upper, &work] {
                std::fs::create_dir_all(folder)?;
            }
            let options =
                format!("lowerdir={},upperdir={},workdir={}", self.lower().display(), upper.display(), work.display());
            match target {
                Target::Overlayfs => {
                    succeed(Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options]).arg(&at))?;
                }
                Target::FuseOverlayfs => succeed(Command::new("fuse-overlayfs").args(["-o", &options]).arg(&at))?,
                _ => succeed(
                    self.poolfs()
                        .args(["mount", &self.pool])
                        .arg(&at)
                        .arg("--upper")
                        .arg(&upper)
                        .arg("--lower")
                        .arg(self.lower()),
                )?,
            }
            self.mounted.push(at);
        }
        drop_caches()
    }

    /// Unmounts everything and removes the upper directories.
    pub fn unmount(&mut self) -> Result<()> {
        for at in std::mem::take(&mut self.mounted) {
            if at == self.directory(Target::Library) {
                succeed(self.poolfs().args(["umount", &self.pool]).arg(&at))?;
            } else {
                succeed(Command::new("umount").arg(&at))?;
            }
            let name = at.file_name().context("a name")?.to_string_lossy().into_owned();
            for kind in ["upper", "work"] {
                std::fs::remove_dir_all(self.folder.join(format!("{name}-{kind}")))?;
            }
        }
        Ok(())
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
