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
use report::{Experiment, Report};
use site::{Site, Sizes};
use std::fs;
use std::path::Path;
pub use workers::Worker;

/// Programs that may be missing.
const PEERS: [Peer; 5] = [
    MANAGER,
    ("ceph-fuse", "ceph-fuse", "nothing that goes by it is measured"),
    ("unionfs", "unionfs-fuse", "clones by it over ceph-fuse are not measured"),
    ("fuse-overlayfs", "fuse-overlayfs", "clones by it over ceph-fuse are not measured"),
    (rocksdb::PROGRAM.0, rocksdb::PROGRAM.1, "RocksDB is not measured"),
];

/// An experiment, which may have several tables.
type Run = fn(&Site) -> Result<Vec<Experiment>>;

/// What the paper compares with, and this does not.
const NOT_COMPARED: &str = "Not compared: the kernel's CephFS client and AUFS (K and K/K of the paper).";

/// The tables as Markdown; all samples are written as JSON to the file `json`, and plots to the file `html`, where these are given.
pub fn run(work: &Path, poolfs: &Path, quick: bool, json: Option<&Path>, html: Option<&Path>) -> Result<String> {
    let site = Site::new(work, poolfs, if quick { Sizes::QUICK } else { Sizes::FULL })?;
    let absent = missing(&PEERS);
    let mut report = Report {
        paper: "Danaus (Middleware '21)",
        machine: machine(&site)?,
        missing: absent.lines().map(str::to_owned).chain([NOT_COMPARED.to_owned()]).collect(),
        experiments: Vec::new(),
    };
    let mut experiments: Vec<Run> = vec![neighbours::run];
    if is_installed(rocksdb::PROGRAM.0) {
        experiments.push(rocksdb::run);
    }
    experiments.extend([sequential::run as Run, clones::run]);
    for experiment in experiments {
        report.experiments.extend(experiment(&site)?);
        // What was measured stays if a later one fails.
        let written = |file: &Path, text: String| {
            fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
        };
        if let Some(json) = json {
            written(json, serde_json::to_string_pretty(&report)? + "\n")?;
        }
        if let Some(html) = html {
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
        "{} CPUs ({model}), Linux {}; a Ceph cluster on the same machine (one monitor, one OSD with BlueStore in memory, one metadata server, one manager); \
         medians of {rounds} rounds, each of which runs every system once, in turn",
        models.len(),
        kernel.trim()
    ))
}
