//! Measures databases on every target, by scripts that print their own times.
//!
//! A script (`bench/databases/NAME.sh`) is run as `sh -eu NAME.sh` with `$W`, an empty directory on the target, and `$S`, one on the disk.
//! It prints lines of a title, a tab and nanoseconds. Its line `# packages:` names what must be installed.

use crate::table::{Row, Table};
use crate::targets::{Laboratory, Target, turned};
use crate::worker::median;
use anyhow::{Context, Result, bail, ensure};
use rustix::mount::mount_bind;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The disk first: the others are compared with it.
fn targets() -> Vec<Target> {
    let others = Target::all().into_iter().filter(|target| *target != Target::Ext4);
    std::iter::once(Target::Ext4).chain(others).collect()
}

/// Where the folder to work in is shown: databases that do not run as root reach it there wherever it is.
const SHOWN: &str = "/run/disk";

/// The longest run of a script.
const LIMIT: &str = "120";

/// Medians of `rounds` rounds of the scripts in a folder.
pub fn run(work: &Path, poolfs: &Path, scripts: &Path, rounds: u32) -> Result<Table> {
    let (scripts, targets) = (scripts_in(&fs::canonicalize(scripts)?)?, targets());
    fs::create_dir_all(SHOWN)?;
    mount_bind(work, SHOWN)?;
    let folder = Path::new(SHOWN);
    let mut laboratory = Laboratory::new(folder, poolfs, "0-1")?;
    fs::create_dir_all(folder.join("scratch"))?;
    let mut titles: Vec<String> = Vec::new();
    let mut samples: BTreeMap<(usize, Target), Vec<f64>> = BTreeMap::new();
    for round in 0..rounds {
        for script in &scripts {
            eprintln!("round {} of {rounds}: {}", round + 1, script.display());
            laboratory.mount()?;
            for target in turned(&targets, round) {
                // The library and FUSE share a mount.
                // PostgreSQL takes a comma in the name of its directory for the end of it.
                let place =
                    laboratory.directory(target).join(format!("database-{}", target.title().replace(", ", "-")));
                fs::create_dir_all(&place)?;
                let measured = measure(&laboratory, target, script, &place, &folder.join("scratch"), LIMIT);
                let removed = fs::remove_dir_all(&place);
                note(&mut titles, &mut samples, target, measured?);
                removed.with_context(|| format!("cannot remove {}", place.display()))?;
            }
            laboratory.unmount()?;
        }
    }
    let row = |(number, title): (usize, String)| {
        let middle = |target: &Target| samples.get_mut(&(number, *target)).map_or(0.0, |all| median(all));
        Row { title, medians: targets.iter().map(middle).collect() }
    };
    let rows = titles.into_iter().enumerate().map(row).collect();
    let columns: Vec<&str> = targets.iter().map(|target| target.title()).collect();
    Ok(Table::of_operations(&columns, rows))
}

/// Puts times to those of other rounds and targets, each to its title's row.
pub fn note(
    titles: &mut Vec<String>,
    samples: &mut BTreeMap<(usize, Target), Vec<f64>>,
    target: Target,
    times: Vec<(String, f64)>,
) {
    for (title, time) in times {
        let row = titles.iter().position(|known| *known == title).unwrap_or_else(|| {
            titles.push(title);
            titles.len() - 1
        });
        samples.entry((row, target)).or_default().push(time);
    }
}

/// The scripts in a folder, by name.
pub fn scripts_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("{}", folder.display()))?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let mut scripts: Vec<_> =
        paths.into_iter().filter(|path| path.extension().is_some_and(|end| end == "sh")).collect();
    scripts.sort();
    ensure!(!scripts.is_empty(), "no scripts in {}", folder.display());
    Ok(scripts)
}

/// One run of a script in the directory `place` of a target, of at most `limit` seconds.
pub fn measure(
    laboratory: &Laboratory,
    target: Target,
    script: &Path,
    place: &Path,
    scratch: &Path,
    limit: &str,
) -> Result<Vec<(String, f64)>> {
    let mut command = laboratory.command(target, Path::new("timeout"));
    command.args(["--kill-after", "5", limit, "sh", "-eu"]).arg(script);
    command.current_dir(place).env("W", place).env("S", scratch);
    let output = command.stdin(Stdio::null()).output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{} over {}: {}\n{said}", script.display(), target.title(), output.status);
    }
    // What one leaves to be written back is no other's.
    ensure!(Command::new("sync").status()?.success(), "sync failed");
    times(&String::from_utf8_lossy(&output.stdout))
        .with_context(|| format!("{} over {}", script.display(), target.title()))
}

fn times(text: &str) -> Result<Vec<(String, f64)>> {
    ensure!(!text.is_empty(), "it said nothing");
    let time = |line: &str| {
        let (title, time) = line.split_once('\t').with_context(|| format!("no time in {line:?}"))?;
        let time: f64 = time.parse().with_context(|| format!("{line:?}"))?;
        ensure!(time > 0.0, "{line:?} took no time");
        Ok((title.to_owned(), time))
    };
    text.lines().map(time).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_understood_or_refused() {
        assert_eq!(times("a b\t1500\nc\t2\n").expect("two"), [("a b".to_owned(), 1500.0), ("c".to_owned(), 2.0)]);
        for bad in ["", "a 5\n", "a\tx\n", "a\t0\n"] {
            assert!(times(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn every_script_names_its_packages() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let scripts = ["databases", "image-data"].map(|name| scripts_in(&folder.join(name)).expect("scripts"));
        for script in scripts.iter().flatten() {
            let text = fs::read_to_string(script).expect("a script");
            assert!(text.starts_with("# packages: "), "{}", script.display());
        }
    }
}
