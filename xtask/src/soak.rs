//! The stages of `make soak`, which take hours. The results of each are written to `docs/soak.md`.

mod busy;
mod hostile;

use crate::leftovers::Run;
use crate::stages::{Stage, build_programs, chosen};
use crate::tidy::workspace_root;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Behind this, lines of a stage's output say what is to stand in the table.
const FIGURE: &str = "soak: ";

const HEAD: &str = "# What the long runs have shown\n\n\
    Written by `make soak` (`cargo xtask soak`, one stage with `--only NAME`): each stage with the commit it last ran on.\n\n\
    | stage | commit | outcome | minutes | figures |\n|---|---|---|---|---|\n";

/// One test of a file of tests/tests, as a command.
macro_rules! end_to_end {
    ($file:literal, $name:literal) => {
        ["cargo", "test", "-p", "poolfs-tests", "--test", $file, "--", "--nocapture", "--exact", $name]
    };
}

/// The tests of the service's suite whose names contain this, as a command.
macro_rules! service {
    ($name:literal) => {
        ["cargo", "test", "-p", "poolfs-service", "--test", "suite", "--", "--nocapture", $name]
    };
}

const LONG: (&str, &str) = ("POOLFS_SOAK", "1");

const STAGES: &[Stage] = &[
    // So many operations on each of the three stacks.
    Stage {
        name: "differential",
        command: &end_to_end!("differential", "random_programs_end_as_on_the_disk"),
        environment: &[("POOLFS_DIFFERENTIAL", "350000")],
    },
    Stage {
        name: "killed clients",
        command: &end_to_end!("kills", "clients_killed_at_any_point_leave_everything_whole"),
        environment: &[LONG],
    },
    Stage {
        name: "killed services",
        command: &end_to_end!(
            "kills",
            "a_service_killed_with_everything_open_is_an_end_for_all_and_loses_nothing_synced"
        ),
        environment: &[LONG],
    },
    // All that is in that file of tests, in its long form; so is the next.
    Stage {
        name: "killed services and daemons of a cluster",
        command: &["cargo", "test", "-p", "poolfs-tests", "--test", "ceph_kills", "--", "--nocapture"],
        environment: &[LONG],
    },
    Stage {
        name: "posted writes",
        command: &["cargo", "test", "-p", "poolfs-tests", "--test", "posted", "--", "--nocapture"],
        environment: &[LONG],
    },
    Stage {
        name: "death of a service told in time",
        command: &end_to_end!("death", "a_killed_service_is_an_error_at_once_and_keeps_its_promises"),
        environment: &[LONG],
    },
    Stage {
        name: "hostile clients",
        command: &service!("storms::hostile_clients_hurt_nobody_but_themselves"),
        environment: &[LONG],
    },
    Stage {
        name: "cached reads without a request",
        command: &[
            "cargo",
            "test",
            "-p",
            "poolfs-cache",
            "--test",
            "suite",
            "--",
            "--nocapture",
            "segments::readers_see",
        ],
        environment: &[LONG],
    },
    // At each write of the disk below, of many recordings with each format.
    Stage {
        name: "power cuts: sparse branches",
        command: &end_to_end!("power", "power_cuts_of_sparse_upper_branches"),
        environment: &[LONG],
    },
    Stage {
        name: "power cuts: compact branches with large units",
        command: &end_to_end!("power", "power_cuts_of_compact_upper_branches_with_large_units"),
        environment: &[LONG],
    },
    Stage {
        name: "power cuts: compact branches with small units",
        command: &end_to_end!("power", "power_cuts_of_compact_upper_branches_with_small_units"),
        environment: &[LONG],
    },
    Stage {
        name: "power cuts: programs by the library",
        command: &end_to_end!("power", "programs_that_replace_files_by_the_library"),
        environment: &[LONG],
    },
    Stage {
        name: "power cuts: programs by FUSE",
        command: &end_to_end!("power", "programs_that_replace_files_by_the_kernel"),
        environment: &[LONG],
    },
    // In a virtual machine, by interpretation.
    Stage {
        name: "control groups of version 2",
        command: &["cargo", "test", "-p", "poolfs-tests", "--test", "groups", "--", "--nocapture", "--include-ignored"],
        environment: &[],
    },
    Stage { name: "clients that stand still", command: &service!("standstill::"), environment: &[LONG] },
    // For an hour, with other inputs in each run.
    Stage { name: "hostile branches", command: &["cargo", "xtask", "soak-part", "hostile-branches"], environment: &[] },
    // Not in their long form: that has limits for a machine that does nothing else.
    Stage {
        name: "tests beside busy processors",
        command: &["cargo", "xtask", "soak-part", "busy-processors"],
        environment: &[],
    },
];

/// What a stage does where one command is not enough.
#[derive(Clone, Copy, clap::Subcommand)]
pub enum Part {
    /// Run the fuzz target hostile_branch with a new seed.
    HostileBranches,
    /// Run the tests of the crates beside programs that take the processors away.
    BusyProcessors,
}

impl Part {
    /// Does it.
    ///
    /// # Errors
    /// When something failed; what, has been printed as a figure, too.
    pub fn run(self) -> Result<()> {
        let root = workspace_root();
        match self {
            Self::HostileBranches => hostile::run(&root),
            Self::BusyProcessors => busy::run(&root),
        }
    }
}

/// Runs the stages whose names contain `only`, and fails when they leave something on the machine.
pub fn run(only: Option<&str>) -> Result<()> {
    let stages = chosen(STAGES, only)?;
    let root = workspace_root();
    build_programs(&root)?;
    // The guest of one stage is given tests that none of them builds.
    let built = Command::new("cargo").args(["test", "-p", "poolfs-tests", "--no-run"]).current_dir(&root).status();
    if !built.context("cannot start cargo")?.success() {
        bail!("the end-to-end tests cannot be built");
    }
    let machine = Run::begin()?;
    let mut failed = Vec::new();
    for stage in stages {
        println!("==> {}", stage.name);
        let begun = Instant::now();
        let (passed, figures) = run_stage(&root, stage)?;
        let minutes = begun.elapsed().as_secs_f64() / 60.0;
        println!("{minutes:>6.1} min  {}", stage.name);
        let outcome = if passed { "clean" } else { "failed" };
        let row = format!(
            "| {} | {} | {outcome} | {minutes:.1} | {} |",
            stage.name,
            commit(&root)?,
            figures.join("; ").replace('|', "\\|")
        );
        write_row(&root.join("docs/soak.md"), stage.name, row)?;
        if !passed {
            failed.push(stage.name);
        }
    }
    let nothing_left = machine.expect_nothing_left();
    if failed.is_empty() { nothing_left } else { bail!("failed: {}", failed.join(", ")) }
}

/// Whether it passed, and the figures it told.
fn run_stage(root: &Path, stage: &Stage) -> Result<(bool, Vec<String>)> {
    let mut command = Command::new(stage.command[0]);
    command.args(&stage.command[1..]).current_dir(root).stdout(Stdio::piped());
    command.envs(stage.environment.iter().copied().filter(|(name, _)| std::env::var_os(name).is_none()));
    let mut child = command.spawn().with_context(|| format!("cannot start {}", stage.command[0]))?;
    let mut figures = Vec::new();
    for line in BufReader::new(child.stdout.take().context("piped")?).lines() {
        let line = line?;
        println!("{line}");
        figures.extend(line.split_once(FIGURE).map(|(_, figure)| figure.to_owned()));
    }
    Ok((child.wait()?.success(), figures))
}

fn commit(root: &Path) -> Result<String> {
    let git = |arguments: &[&str]| -> Result<String> {
        let output = Command::new("git").args(arguments).current_dir(root).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    // Tables that the long runs write do not count.
    let changed = !git(&["status", "--porcelain", "--", ".", ":!docs"])?.is_empty();
    Ok(format!("{}{}", git(&["rev-parse", "--short", "HEAD"])?, if changed { " and changes" } else { "" }))
}

/// Puts a stage's row into the table, in place of the one it had.
fn write_row(path: &Path, stage: &str, row: String) -> Result<()> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    std::fs::write(path, with_row(&text, stage, row)).with_context(|| format!("cannot write {}", path.display()))
}

fn with_row(text: &str, stage: &str, row: String) -> String {
    let name_of = |line: &str| Some(line.strip_prefix("| ")?.split(" |").next()?.to_owned());
    let rows = text.lines().filter_map(|line| Some((name_of(line)?, line.to_owned())));
    let mut rows: BTreeMap<String, String> = rows.filter(|(name, _)| name != "stage").collect();
    rows.insert(stage.to_owned(), row);
    rows.values().fold(HEAD.to_owned(), |mut text, row| {
        let _ = writeln!(text, "{row}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_has_one_row() {
        let one = with_row("", "b", "| b | old |".into());
        let two = with_row(&one, "a", "| a | x |".into());
        let three = with_row(&two, "b", "| b | new |".into());
        assert_eq!(three, format!("{HEAD}| a | x |\n| b | new |\n"));
    }
}
