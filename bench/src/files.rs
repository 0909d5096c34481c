//! File operations over every target, paired: each round runs every target once, in a turning order.

use crate::table::{Row, Table};
use crate::targets::{Laboratory, Target, drop_caches};
use crate::worker::{DATA_BYTES, copy_up_file, median};
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fs;

/// (operation, warm, what the table calls it)
const CASES: &[(&str, bool, &str)] = &[
    ("read-4096", true, "read 4 KiB, cached"),
    ("read-65536", true, "read 64 KiB, cached"),
    ("write-4096", true, "write 4 KiB, cached"),
    ("write-65536", true, "write 64 KiB, cached"),
    ("read-4096", false, "read 4 KiB, not cached"),
    ("read-65536", false, "read 64 KiB, not cached"),
    ("write-4096", false, "write 4 KiB, not cached"),
    ("write-65536", false, "write 64 KiB, not cached"),
    ("open-close", true, "open and close"),
    ("stat", true, "stat"),
    ("create-unlink", true, "create and unlink"),
];

/// Bytes of each file whose first written byte is measured.
const COPY_UP_BYTES: u64 = 64 << 20;

/// Such files of each round: the first on a new mount is not like the others.
const COPY_UPS: u32 = 4;

/// Runs all cases `rounds` times.
pub fn run(laboratory: &mut Laboratory, rounds: u32, milliseconds: u64) -> Result<Table> {
    prepare(laboratory, rounds)?;
    let mut samples: BTreeMap<(usize, Target), Vec<f64>> = BTreeMap::new();
    for round in 0..rounds {
        for (case, (operation, warm, title)) in CASES.iter().enumerate() {
            // What is not cached needs mounts nobody has read from.
            if case == 0 || !warm {
                laboratory.unmount()?;
                laboratory.mount()?;
            }
            eprintln!("round {} of {rounds}: {title}", round + 1);
            for target in turned(round) {
                if !warm {
                    drop_caches()?;
                }
                let sample = worker(laboratory, target, operation, *warm, milliseconds)?;
                samples.entry((case, target)).or_default().push(sample);
            }
        }
        eprintln!("round {} of {rounds}: first byte", round + 1);
        for time in round * COPY_UPS..(round + 1) * COPY_UPS {
            for target in turned(time) {
                // The library and FUSE share a mount: each gets a file nobody has written yet.
                let file = 2 * time + u32::from(target == Target::Fuse);
                let sample = worker(laboratory, target, &format!("one-byte-{file}"), false, 0)?;
                samples.entry((CASES.len(), target)).or_default().push(sample);
            }
        }
    }
    laboratory.unmount()?;
    let titles = CASES.iter().map(|case| case.2).chain(["open, write 1 byte into a 64 MiB lower file, close"]);
    let rows = titles
        .enumerate()
        .map(|(case, title)| Row {
            title: title.to_owned(),
            medians: Target::ALL.map(|target| samples.get_mut(&(case, target)).map_or(0.0, |all| median(all))).to_vec(),
        })
        .collect();
    Ok(Table { columns: Target::ALL.iter().map(|target| target.title().to_owned()).collect(), rows })
}

/// The file that reads and writes use: the library and FUSE share a service, and its cache would be warm for the second.
fn data_file(target: Target) -> &'static str {
    if target == Target::Fuse { "data-1" } else { "data-0" }
}

fn turned(round: u32) -> Vec<Target> {
    let mut order = Target::ALL.to_vec();
    order.rotate_left(round as usize % Target::ALL.len());
    if round % 2 == 1 {
        // Or one would always run after the same other, and find warm what that one has used.
        order.reverse();
    }
    order
}

fn prepare(laboratory: &Laboratory, rounds: u32) -> Result<()> {
    let block: Vec<u8> = (0..1u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let fill = |name: &str, bytes: u64| -> Result<()> {
        let path = laboratory.lower().join(name);
        let content: Vec<u8> = block.iter().copied().cycle().take(bytes as usize).collect();
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))
    };
    fill(data_file(Target::Library), DATA_BYTES)?;
    fill(data_file(Target::Fuse), DATA_BYTES)?;
    for file in 0..2 * rounds * COPY_UPS {
        fill(&copy_up_file(file), COPY_UP_BYTES)?;
    }
    Ok(())
}

fn worker(laboratory: &Laboratory, target: Target, operation: &str, warm: bool, milliseconds: u64) -> Result<f64> {
    let mut command = laboratory.command(target, &std::env::current_exe()?);
    command.arg("worker").arg(laboratory.directory(target)).args([
        data_file(target),
        operation,
        "--milliseconds",
        &milliseconds.to_string(),
    ]);
    if warm {
        command.arg("--warm");
    }
    let output = command.output()?;
    if !output.status.success() {
        bail!("{operation} over {}: {}", target.title(), String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().with_context(|| format!("{operation} over {} said {text:?}", target.title()))
}
