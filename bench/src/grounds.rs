//! Fresh filesystems for a measurement, each in an image on the disk to measure on.
//!
//! What is on the disk already does not count, and filesystems that copy by reference (reflink) are compared as well.

use crate::targets::{Branches, succeed};
use anyhow::{Context, Result};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes that a filesystem may have; only what is written takes room.
const IMAGE_BYTES: u64 = 48 << 30;

/// A kind of filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// ext4, which copies
    Ext4,
    /// XFS, which copies by reference
    Xfs,
    /// btrfs, which copies by reference
    Btrfs,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 3] = [Kind::Ext4, Kind::Xfs, Kind::Btrfs];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Ext4 => "ext4",
            Kind::Xfs => "xfs",
            Kind::Btrfs => "btrfs",
        }
    }
}

/// A mounted filesystem, which goes with the namespaces of the measurement.
pub struct Ground {
    folder: PathBuf,
}

impl Ground {
    /// Makes one in `work`, empty but for the directory `lower`.
    pub fn new(work: &Path, kind: Kind) -> Result<Self> {
        let image = work.join(format!("{}.image", kind.name()));
        File::create(&image)
            .and_then(|file| file.set_len(IMAGE_BYTES))
            .with_context(|| format!("{}", image.display()))?;
        succeed(Command::new(format!("mkfs.{}", kind.name())).arg("-q").arg(&image))?;
        let folder = work.join(kind.name());
        std::fs::create_dir_all(&folder)?;
        succeed(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&folder))?;
        let ground = Self { folder };
        std::fs::create_dir(ground.lower())?;
        Ok(ground)
    }

    /// Where it is mounted.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The lower directory of what is mounted over it.
    pub fn lower(&self) -> PathBuf {
        self.folder.join("lower")
    }

    /// Directories of a union, new ones for each `name`.
    pub fn branches(&self, name: &str) -> Result<Branches> {
        Branches::beside(&self.folder.join(name))
    }
}
