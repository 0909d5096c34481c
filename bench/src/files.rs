//! File operations over every target, paired: each round runs every target once, in a turning order.

use crate::table::{Row, Table};
use crate::targets::{Laboratory, Target, drop_caches};
use crate::worker::{copy_up_file, median};
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fs;
use std::process::Stdio;

/// (operation, warm, what the table calls it)
const CASES: &[(&str, bool, &str)] = &[
    ("read-512", true, "read 512 B, cached"),
    ("read-4096", true, "read 4 KiB, cached"),
    ("read-65536", true, "read 64 KiB, cached"),
    ("read-1048576", true, "read 1 MiB, cached"),
    ("read-4096", true, BY_TWO),
    ("follow-4096", true, "read 4 KiB at the descriptor's offset, cached"),
    ("fstat", true, "fstat, open for reading"),
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

/// The case whose operations two processes do at the same time.
const BY_TWO: &str = "read 4 KiB, cached, each of two processes";

/// Bytes of the file of cached reads.
const LARGE_BYTES: u64 = 256 << 20;

/// Bytes of the file of other reads and writes.
pub const DATA_BYTES: u64 = 64 << 20;

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
                let processes = if *title == BY_TWO { 2 } else { 1 };
                let times = workers(laboratory, target, operation, *warm, milliseconds, processes)?;
                samples.entry((case, target)).or_default().extend(times);
            }
        }
        eprintln!("round {} of {rounds}: first byte", round + 1);
        for time in round * COPY_UPS..(round + 1) * COPY_UPS {
            for target in turned(time) {
                // The library and FUSE share a mount: each gets a file nobody has written yet.
                let file = 2 * time + u32::from(target == Target::Fuse);
                let times = workers(laboratory, target, &format!("one-byte-{file}"), false, 0, 1)?;
                samples.entry((CASES.len(), target)).or_default().extend(times);
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
fn data_file(target: Target, is_large: bool) -> &'static str {
    match (target == Target::Fuse, is_large) {
        (false, false) => "data-0",
        (true, false) => "data-1",
        (false, true) => "large-0",
        (true, true) => "large-1",
    }
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
    for target in [Target::Library, Target::Fuse] {
        fill(data_file(target, false), DATA_BYTES)?;
        fill(data_file(target, true), LARGE_BYTES)?;
    }
    for file in 0..2 * rounds * COPY_UPS {
        fill(&copy_up_file(file), COPY_UP_BYTES)?;
    }
    Ok(())
}

/// So many processes that do the same at the same time; the time of one operation in each.
fn workers(
    laboratory: &Laboratory,
    target: Target,
    operation: &str,
    warm: bool,
    milliseconds: u64,
    processes: usize,
) -> Result<Vec<f64>> {
    let is_large = warm && ["read-", "follow-", "fstat"].iter().any(|prefix| operation.starts_with(prefix));
    let start = |_| {
        let mut command = laboratory.command(target, &std::env::current_exe()?);
        command.arg("worker").arg(laboratory.directory(target)).args([
            data_file(target, is_large),
            operation,
            "--milliseconds",
            &milliseconds.to_string(),
        ]);
        if warm {
            command.arg("--warm");
        }
        Ok(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
    };
    let started: Result<Vec<_>> = (0..processes).map(start).collect();
    let time = |child: std::process::Child| {
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!("{operation} over {}: {}", target.title(), String::from_utf8_lossy(&output.stderr));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        text.trim().parse().with_context(|| format!("{operation} over {} said {text:?}", target.title()))
    };
    started?.into_iter().map(time).collect()
}
