//! Containers of one pool that append to, or read, a file of the image that they share.

use crate::ceph::clones::{CLONES, Clones, Unions};
use crate::danaus::report::Experiment;
use crate::danaus::site::{Site, at_once};
use crate::emptying::emptied;
use crate::groups;
use crate::targets::{Laboratory, Target, turned};
use anyhow::{Context, Result};
use std::path::Path;
use std::time::Instant;

/// How many containers, as the tables say it.
const SETTINGS: [(usize, &str); 2] = [(1, "1 clone"), (CLONES, "4 clones")];

/// The processes, and headings of their times and of memory.
const KINDS: [(&str, &str, &str); 2] =
    [("append", "Fileappend: time", "Fileappend: memory"), ("read-all", "Fileread: time", "Fileread: memory")];

/// The lower branch and its file.
const IMAGE: &str = "/clones";
const FILE: &str = "large";

/// Times and memory of both.
pub fn run(site: &Site) -> Result<Vec<Experiment>> {
    let experiment = |title, unit, about: &str| Experiment {
        title,
        repeats: "section 6.3.2, figure 11",
        about: about.to_owned(),
        unit,
        kept: None,
        series: Vec::new(),
    };
    let laboratory = site.pool("clones", "0-1")?;
    site.cluster.prepare(Path::new(IMAGE), &[(FILE.to_owned(), site.sizes.image << 20)])?;
    let about = format!(
        "Each clone has a union with a writable branch of its own on the disk over one lower branch at the cluster, and opens a file of {} MiB of it \
         (the paper: 2 GB). All run at the same time, from the start of the first to the end of the last.",
        site.sizes.image
    );
    let mut experiments = Vec::new();
    for (kind, time, memory) in KINDS {
        let mut times = experiment(time, "ms", &about);
        let mut used = experiment(
            memory,
            "MiB",
            "What was added to the pool's control groups, page cache included, when the last clone had ended.",
        );
        for round in 0..site.sizes.rounds {
            let present: Vec<_> = Unions::ALL.into_iter().filter(|unions| unions.is_there()).collect();
            for unions in turned(&present, round) {
                for (number, setting) in turned(&SETTINGS, round) {
                    eprintln!("round {} of {}: {time} by {}, {setting}", round + 1, site.sizes.rounds, unions.title());
                    let (milliseconds, mebibytes) = once(site, &laboratory, unions, kind, number)
                        .with_context(|| format!("{kind} over {}", unions.title()))?;
                    times.add(unions.title(), setting, milliseconds);
                    used.add(unions.title(), setting, mebibytes);
                }
            }
        }
        experiments.extend([times, used]);
    }
    Ok(experiments)
}

/// Milliseconds and MiB of so many.
fn once(site: &Site, laboratory: &Laboratory, unions: Unions, kind: &str, number: usize) -> Result<(f64, f64)> {
    let before = emptied(laboratory.pool())?;
    let clones = Clones::mount(laboratory, &site.cluster, unions, Path::new(IMAGE), number)?;
    let program = std::env::current_exe()?;
    let command = |at: &Path| {
        let mut command = match unions {
            Unions::Library => laboratory.command(Target::Library, &program),
            _ => laboratory.in_group(&program),
        };
        command.args(["danaus", kind]).arg(at.join(FILE));
        command
    };
    let begun = Instant::now();
    at_once(clones.places().map(command).collect())?;
    let time = begun.elapsed().as_secs_f64() * 1e3;
    let used = groups::used(laboratory.pool())?.since(before);
    Ok((time, used.all as f64 / 1_048_576.0))
}
