//! Runs the fuzz target `hostile_branch` for an hour, with other inputs in each run.

use super::FIGURE;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long inputs are made of those in `fuzz/corpus/hostile_branch`.
const TIME: Duration = Duration::from_secs(60 * 60);

/// What is mounted for an input ends with the target, however that ends. So does its directory in memory.
const ALONE: [&str; 6] =
    ["unshare", "--mount", "sh", "-c", "mount -t tmpfs poolfs-hostile /dev/shm && exec \"$@\"", "hostile_branch"];

/// Runs it. The target tells how many inputs it has executed; the seed is said at once, too.
pub fn run(root: &Path) -> Result<()> {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?.as_secs();
    println!("seed {seed}");
    // Git does not see an input that is left here: the commit stays the one that was tested.
    let place = root.join("target");
    fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
    let status = Command::new(ALONE[0])
        .args(&ALONE[1..])
        .args(["cargo", "run", "--quiet", "--release", "--bin", "hostile_branch", "--manifest-path"])
        .arg(root.join("fuzz/Cargo.toml"))
        .arg("--")
        .arg(root.join("fuzz/corpus/hostile_branch"))
        .args([TIME.as_secs().to_string(), seed.to_string()])
        .current_dir(&place)
        .status()
        .context("cannot start unshare (package util-linux)")?;
    if status.success() {
        return Ok(());
    }
    let said = failure(&place, seed, status);
    println!("{FIGURE}{said}");
    bail!("{said}")
}

/// What is known of a failure. The target leaves the input under which it ended, whatever ended it.
fn failure(place: &Path, seed: u64, status: ExitStatus) -> String {
    let input = place.join(format!("crash-{seed}"));
    if input.exists() {
        format!("seed {seed}: {status}; the input is in {}", input.display())
    } else {
        format!("seed {seed}: {status}, before there was an input")
    }
}
