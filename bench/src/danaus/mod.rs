//! Repeats experiments of "Experience Paper: Danaus: Isolation and Efficiency of Container I/O at the Client Side of Network Storage" (Middleware '21),
//! scaled down to one small machine.

mod clones;
mod neighbours;
mod plots;
mod report;
mod rocksdb;
mod sequential;
mod site;
mod workers;

use crate::ceph::cluster::{MANAGER, Peer, is_installed, missing};
use anyhow::{Context, Result};
use clap::ValueEnum;
use report::{Experiment, Report};
use site::{Site, Sizes};
use std::fs;
use std::path::{Path, PathBuf};
pub use workers::Worker;

/// Programs that may be missing.
const PEERS: [Peer; 5] = [
    MANAGER,
    ("ceph-fuse", "ceph-fuse", "nothing that goes by it is measured"),
    ("unionfs", "unionfs-fuse", "clones by it over ceph-fuse are not measured"),
    ("fuse-overlayfs", "fuse-overlayfs", "clones by it over ceph-fuse are not measured"),
    (rocksdb::PROGRAM.0, rocksdb::PROGRAM.1, "RocksDB is not measured"),
];

/// What the paper compares with, and this does not.
const NOT_COMPARED: &str = "Not compared: the kernel's CephFS client and AUFS (K and K/K of the paper).";

/// How the experiments are repeated.
#[derive(clap::Args)]
pub struct Options {
    /// One round of everything, with small data.
    #[arg(long)]
    quick: bool,
    /// This experiment, and others that are named so, instead of all.
    #[arg(long)]
    only: Vec<Name>,
    /// Where all samples are written.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Where a page with plots is written.
    #[arg(long)]
    html: Option<PathBuf>,
}

/// The experiments, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Name {
    /// A file server beside random reads and writes in another pool.
    Fileserver,
    /// RocksDB put and get in one and two pools.
    Rocksdb,
    /// Sequential writes and reads in one and two pools.
    Sequential,
    /// Clones that append to or read a file of their image.
    Clones,
}

impl Name {
    fn run(self, site: &Site) -> Result<Vec<Experiment>> {
        match self {
            Self::Fileserver => neighbours::run(site),
            Self::Rocksdb if !is_installed(rocksdb::PROGRAM.0) => Ok(Vec::new()),
            Self::Rocksdb => rocksdb::run(site),
            Self::Sequential => sequential::run(site),
            Self::Clones => clones::run(site),
        }
    }
}

/// The tables as Markdown; samples and plots are written to the files that are named.
pub fn run(work: &Path, poolfs: &Path, options: &Options) -> Result<String> {
    let site = Site::new(work, poolfs, if options.quick { Sizes::QUICK } else { Sizes::FULL })?;
    let absent = missing(&PEERS);
    let mut report = Report {
        paper: "Danaus (Middleware '21)",
        machine: machine(&site)?,
        missing: absent.lines().map(str::to_owned).chain([NOT_COMPARED.to_owned()]).collect(),
        experiments: Vec::new(),
    };
    let chosen = Name::value_variants().iter().filter(|name| options.only.is_empty() || options.only.contains(name));
    for name in chosen {
        report.experiments.extend(name.run(&site)?);
        // What was measured stays if a later one fails.
        let written = |file: &Path, text: String| {
            fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
        };
        if let Some(json) = &options.json {
            written(json, serde_json::to_string_pretty(&report)? + "\n")?;
        }
        if let Some(html) = &options.html {
            written(html, plots::html(&report))?;
        }
    }
    Ok(report.markdown())
}

fn machine(site: &Site) -> Result<String> {
    let processors = fs::read_to_string("/proc/cpuinfo")?;
    let models: Vec<_> = processors.lines().filter(|line| line.starts_with("model name")).collect();
    let model = models.first().and_then(|line| line.split_once(": ")).map_or("unknown", |(_, model)| model);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let rounds = site.sizes.rounds;
    Ok(format!(
        "{} CPUs ({model}), Linux {}; a Ceph cluster on the same machine (one monitor, one OSD with BlueStore in memory, one metadata server{}); \
         medians of {rounds} rounds, each of which runs every system once, in turn",
        models.len(),
        kernel.trim().split('-').next().unwrap_or_default(),
        if is_installed("ceph-mgr") { ", one manager" } else { "" }
    ))
}
