//! Measures what the preloaded library costs a program on calls that do not concern poolfs, and at its start.

use crate::targets::{Laboratory, Target, succeed};
use crate::worker::median;
use anyhow::{Context, Result, bail};
use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// (operation of the worker, what the table calls it)
const CALLS: &[(&str, &str)] = &[
    ("stat", "stat, absolute path"),
    ("relative-stat", "stat, path from the working directory"),
    ("open-close", "open and close"),
    ("read-512", "pread of 512 bytes"),
    ("write-512", "pwrite of 512 bytes"),
];

/// Starts of a program for each other sample.
const STARTS: u32 = 10;

/// The table of `rounds` pairs of samples for each call, with and without the library in turn.
pub fn run(work: &Path, poolfs: &Path, rounds: u32, milliseconds: u64) -> Result<String> {
    let laboratory = Laboratory::new(work, poolfs, "0-1")?;
    let at = laboratory.directory(Target::Library);
    std::fs::create_dir_all(&at)?;
    // A mount there is, so that the library has something to look for.
    succeed(laboratory.poolfs().args(["mount", laboratory.pool()]).arg(&at).arg("--dir").arg(laboratory.lower()))?;
    let measured = measure(work, &poolfs.with_file_name("libpoolfs_preload.so"), rounds, milliseconds);
    let unmounted = succeed(laboratory.poolfs().args(["umount", laboratory.pool()]).arg(&at));
    let table = measured?;
    unmounted?;
    Ok(table)
}

fn measure(work: &Path, library: &Path, rounds: u32, milliseconds: u64) -> Result<String> {
    let elsewhere = work.join("elsewhere");
    std::fs::create_dir_all(&elsewhere)?;
    std::fs::write(elsewhere.join("data"), vec![0; crate::files::DATA_BYTES as usize])?;
    let mut text = "| call, ns | without the library | with it | more |\n|---|---|---|---|\n".to_owned();
    for (call, title) in CALLS {
        let pairs = Pairs::of(rounds, |library| worker(&elsewhere, call, library, milliseconds), library)?;
        pairs.write(title, &mut text);
    }
    let pairs = Pairs::of(rounds * STARTS, start, library)?;
    pairs.write("start and end of /bin/true", &mut text);
    Ok(text)
}

/// Samples taken without and with the library, one right after the other.
struct Pairs(Vec<(f64, f64)>);

impl Pairs {
    fn of(count: u32, mut sample: impl FnMut(Option<&Path>) -> Result<f64>, library: &Path) -> Result<Self> {
        let mut pair = |turn: u32| {
            if turn.is_multiple_of(2) {
                let without = sample(None)?;
                Ok((without, sample(Some(library))?))
            } else {
                let with = sample(Some(library))?;
                Ok((sample(None)?, with))
            }
        };
        (0..count).map(&mut pair).collect::<Result<_>>().map(Self)
    }

    /// A line of the table. What is more is the median of the pairs' differences: the machine changes its pace between pairs.
    fn write(&self, title: &str, text: &mut String) {
        let of = |pick: fn(&(f64, f64)) -> f64| median(&mut self.0.iter().map(pick).collect::<Vec<_>>());
        let (without, with, more) = (of(|pair| pair.0), of(|pair| pair.1), of(|pair| pair.1 - pair.0));
        let _ = writeln!(text, "| {title} | {without:.0} | {with:.0} | {more:.0} |");
    }
}

fn preloading<'c>(command: &'c mut Command, library: Option<&Path>) -> &'c mut Command {
    match library {
        Some(library) => command.env("LD_PRELOAD", library),
        None => command.env_remove("LD_PRELOAD"),
    }
}

/// Nanoseconds of one call, in a process of its own.
fn worker(directory: &Path, call: &str, library: Option<&Path>, milliseconds: u64) -> Result<f64> {
    let mut command = Command::new(std::env::current_exe()?);
    command.current_dir(directory).arg("worker").arg(directory).args(["data", call, "--warm"]);
    command.arg("--milliseconds").arg(milliseconds.to_string());
    let output = preloading(&mut command, library).output()?;
    if !output.status.success() {
        bail!("{call}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().with_context(|| format!("{call} said {text:?}"))
}

/// Nanoseconds from the start of a program that does nothing to its end.
fn start(library: Option<&Path>) -> Result<f64> {
    let mut command = Command::new("/bin/true");
    preloading(&mut command, library);
    let begun = Instant::now();
    let status = command.status()?;
    let time = begun.elapsed().as_nanos() as f64;
    if !status.success() {
        bail!("/bin/true: {status}");
    }
    Ok(time)
}
