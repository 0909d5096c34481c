//! Measures the memory of several containers that read or map one file of their image.

use crate::containers::{POOL_MEMORY, TARGETS, Unions, tell};
use crate::emptying::emptied;
use crate::files::fill;
use crate::groups;
use crate::mapped::Mapped;
use crate::targets::{Laboratory, Target};
use anyhow::{Context, Result, ensure};
use std::fmt::Write;
use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Stdio};

/// How many read the file.
const NUMBERS: [usize; 3] = [1, 4, 8];

/// Bytes of the file: what is mapped from a cache of 1 GiB stays there, an eighth of it at most.
const BYTES: u64 = 96 << 20;

/// Its name.
const FILE: &str = "large";

/// Bytes read at once.
const PIECE: usize = 1 << 20;

/// The table: pages of files of the pool's groups for one, and how many more there are for several.
pub fn run(work: &Path, poolfs: &Path) -> Result<String> {
    let laboratory = Laboratory::with_memory(work, poolfs, "0-1", POOL_MEMORY)?;
    fill(&laboratory.lower().join(FILE), BYTES)?;
    let [one, several @ ..] = NUMBERS;
    let mut text = format!("| pages of files, MiB | {one} container |");
    for number in several {
        let _ = write!(text, " {number} containers: more |");
    }
    let _ = writeln!(text, "\n|---|---|{}", "---|".repeat(several.len()));
    for target in TARGETS {
        for (mapped, way) in [(false, "read"), (true, "mapped")] {
            eprintln!("clones: {}, {way}", target.title());
            let first = pages(&laboratory, target, mapped, one)?;
            let _ = write!(text, "| {}, {way} | {:.1} |", target.title(), mebibytes(first));
            for number in several {
                let more = pages(&laboratory, target, mapped, number)?.saturating_sub(first);
                let _ = write!(text, " {:.1} |", mebibytes(more));
            }
            text.push('\n');
        }
    }
    Ok(text)
}

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Bytes of files in memory for so many containers that have all read the whole file and still have it open.
fn pages(laboratory: &Laboratory, target: Target, mapped: bool, number: usize) -> Result<u64> {
    let before = emptied(laboratory.pool())?;
    let (unions, _) = Unions::mount(laboratory, target, number)?;
    let mut readers = Vec::new();
    let read = unions.places().try_for_each(|at| {
        readers.push(reader(laboratory, target, &at.join(FILE), mapped)?);
        Ok(())
    });
    let after = groups::used(laboratory.pool());
    for mut child in readers {
        drop(child.stdin.take());
        let status = child.wait()?;
        ensure!(status.success(), "a reader over {}: {status}", target.title());
    }
    read.and(after).map(|after| after.since(before).file)
}

/// A process in the pool's group that has read the file and waits.
pub fn reader(laboratory: &Laboratory, target: Target, file: &Path, mapped: bool) -> Result<Child> {
    let program = std::env::current_exe()?;
    let mut command = match target {
        Target::Library => laboratory.command(target, &program),
        _ => laboratory.in_group(&program),
    };
    command.arg("hold").arg(file);
    if mapped {
        command.arg("--mapped");
    }
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let _ = tell(&mut BufReader::new(child.stdout.take().context("an output")?), 1)?;
    Ok(child)
}

/// What `reader` runs: reads the whole file, says how long it is, and keeps it until its input ends.
pub fn hold(path: &Path, mapped: bool) -> Result<()> {
    let file = File::open(path).with_context(|| format!("{}", path.display()))?;
    let length = file.metadata()?.len();
    let mapping = mapped.then(|| Mapped::new(&file, false)).transpose()?;
    let mut buffer = vec![0; PIECE];
    let mut at = 0;
    while at < length {
        let piece = PIECE.min(usize::try_from(length - at)?);
        match &mapping {
            Some(mapping) => mapping.read(at, &mut buffer[..piece])?,
            None => file.read_exact_at(&mut buffer[..piece], at)?,
        }
        at += piece as u64;
    }
    println!("{length}");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
