//! Measures programs that write data of an image, by scripts that print their own times.
//!
//! A script (`bench/image-data/NAME.sh`) is run as `sh -eu NAME.sh prepare` with `$W`, an empty directory of the lower branch, and `$S`,
//! one on the disk. Then it is run as `sh -eu NAME.sh` for each target, with `$W` as that target shows it and nothing cached. What it
//! prints then and how it begins is as in [`crate::databases`].

use crate::databases::{self, scripts_in};
use crate::table::{Row, Table, Unit};
use crate::targets::{Branches, Laboratory, Target, drop_caches, succeed, turned};
use crate::worker::median;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The disk first: the others are compared with it.
const TARGETS: [Target; 4] = [Target::Ext4, Target::Library, Target::Fuse, Target::Overlayfs];

/// Memory of the pool, and of it cache: what the scripts write has room there, as it has in the kernel's cache.
const MEMORY: (&str, &str) = ("12G", "6G");

/// The longest run of a script.
const LIMIT: &str = "600";

/// Medians of `rounds` rounds of the scripts in a folder.
pub fn run(work: &Path, poolfs: &Path, scripts: &Path, rounds: u32) -> Result<Table> {
    let scripts = scripts_in(&fs::canonicalize(scripts)?)?;
    let laboratory = Laboratory::sized(work, poolfs, "0-1", MEMORY.0, MEMORY.1)?;
    let scratch = work.join("scratch");
    fs::create_dir_all(&scratch)?;
    let mut titles: Vec<String> = Vec::new();
    let mut samples: BTreeMap<(usize, Target), Vec<f64>> = BTreeMap::new();
    for script in &scripts {
        let name = script.file_stem().context("a name")?;
        eprintln!("{}: preparing", script.display());
        let lower = laboratory.lower().join(name);
        fs::create_dir(&lower)?;
        let mut command = Command::new("sh");
        succeed(command.arg("-eu").arg(script).arg("prepare").current_dir(&lower).env("W", &lower).env("S", &scratch))?;
        for round in 0..rounds {
            for target in turned(&TARGETS, round) {
                eprintln!("round {} of {rounds}: {}, {}", round + 1, script.display(), target.title());
                let branches = Branches::beside(&work.join("target"))?;
                if target == Target::Ext4 {
                    succeed(Command::new("cp").arg("-a").arg(&lower).arg(&branches.at))?;
                } else {
                    laboratory.mount_union(target, &branches)?;
                }
                drop_caches()?;
                let place = branches.at.join(name);
                let measured = databases::measure(&laboratory, target, script, &place, &scratch, LIMIT);
                if target == Target::Ext4 {
                    fs::remove_dir_all(&branches.at)?;
                } else {
                    laboratory.unmount_union(target, &branches.at)?;
                }
                branches.remove()?;
                databases::note(&mut titles, &mut samples, target, measured?);
            }
        }
        fs::remove_dir_all(&lower)?;
    }
    let row = |(number, title): (usize, String)| {
        let medians = TARGETS.map(|target| samples.get_mut(&(number, target)).map_or(0.0, |all| median(all)));
        Row { title, medians: medians.to_vec() }
    };
    let rows = titles.into_iter().enumerate().map(row).collect();
    Ok(Table::new("program", Unit::Milliseconds, &TARGETS.map(Target::title), rows))
}
