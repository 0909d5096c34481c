//! The stages of `make test`: each is timed, the first failure ends the run, and so do 60 minutes in any case.

use crate::leftovers::Run;
use crate::tidy::workspace_root;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60 * 60);

/// A command that has to succeed.
pub struct Stage {
    /// What is shown of it.
    pub name: &'static str,
    /// The program and its arguments.
    pub command: &'static [&'static str],
    /// What is set in its environment.
    pub environment: &'static [(&'static str, &'static str)],
}

/// The stages whose names contain `only`, all without.
///
/// # Errors
/// When there are none: then nothing would have been tested.
pub fn chosen<'a>(stages: &'a [Stage], only: Option<&str>) -> Result<Vec<&'a Stage>> {
    let chosen: Vec<&Stage> = stages.iter().filter(|stage| only.is_none_or(|part| stage.name.contains(part))).collect();
    if let Some(only) = only.filter(|_| chosen.is_empty()) {
        let names: Vec<&str> = stages.iter().map(|stage| stage.name).collect();
        bail!("no stage has \"{only}\" in its name; there are:\n  {}", names.join("\n  "));
    }
    Ok(chosen)
}

/// The tests of all crates but those over real mounts. The two shared objects have none that could be built with the others.
pub const CRATE_TESTS: &[&str] = &[
    "cargo",
    "test",
    "--workspace",
    "--exclude",
    "poolfs-preload",
    "--exclude",
    "poolfs-capi",
    "--exclude",
    "poolfs-tests",
];

const STAGES: &[Stage] = &[
    Stage { name: "unit, conformance and crate tests", command: CRATE_TESTS, environment: &[] },
    Stage {
        name: "models of queue and buffer states (loom)",
        command: &["cargo", "test", "-p", "poolfs-ipc", "--release", "--lib", "loom"],
        environment: &[("RUSTFLAGS", "--cfg loom"), ("CARGO_TARGET_DIR", "target/loom"), ("LOOM_MAX_PREEMPTIONS", "2")],
    },
    Stage {
        name: "fuzzing of the session edge",
        command: &[
            "cargo",
            "run",
            "--quiet",
            "--release",
            "--manifest-path",
            "fuzz/Cargo.toml",
            "--bin",
            "session_edge",
            "--",
            "fuzz/corpus/session_edge",
            "30",
            "7",
        ],
        environment: &[],
    },
    Stage {
        name: "fuzzing of the kernel's messages",
        command: &[
            "cargo",
            "run",
            "--quiet",
            "--release",
            "--manifest-path",
            "fuzz/Cargo.toml",
            "--bin",
            "kernel_messages",
            "--",
            "fuzz/corpus/kernel_messages",
            "30",
            "7",
        ],
        environment: &[],
    },
    Stage {
        name: "fuzzing of what is stored",
        command: &[
            "cargo",
            "run",
            "--quiet",
            "--release",
            "--manifest-path",
            "fuzz/Cargo.toml",
            "--bin",
            "upper_branch",
            "--",
            "fuzz/corpus/upper_branch",
            "30",
            "7",
        ],
        environment: &[],
    },
    Stage {
        name: "fuzzing of branches from elsewhere",
        // What is mounted for an input ends with the stage, however that ends.
        command: &[
            "unshare",
            "--mount",
            "cargo",
            "run",
            "--quiet",
            "--release",
            "--manifest-path",
            "fuzz/Cargo.toml",
            "--bin",
            "hostile_branch",
            "--",
            "fuzz/corpus/hostile_branch",
            "30",
            "7",
        ],
        environment: &[],
    },
    // Up to the last one: it takes long enough to get here that all failures are worth knowing.
    Stage {
        name: "end to end, over real mounts",
        command: &["cargo", "test", "-p", "poolfs-tests", "--no-fail-fast"],
        // Most of them wait most of the time.
        environment: &[("RUST_TEST_THREADS", "4")],
    },
];

/// Builds what tests over real mounts run: else they would show what older programs do.
///
/// # Errors
/// When that fails.
pub fn build_programs(root: &Path) -> Result<()> {
    let built = Command::new("make").arg("build").current_dir(root).status().context("cannot start make")?;
    if built.success() { Ok(()) } else { bail!("`make build` failed") }
}

/// Runs the stages whose names contain `only`, and fails when they leave something on the machine.
pub fn run(only: Option<&str>) -> Result<()> {
    let stages = chosen(STAGES, only)?;
    let root = workspace_root();
    build_programs(&root)?;
    let machine = Run::begin()?;
    let start = Instant::now();
    let mut times = Vec::new();
    let mut failed = None;
    for stage in stages {
        println!("==> {}", stage.name);
        let begun = Instant::now();
        let passed = run_stage(&root, stage, LIMIT.saturating_sub(start.elapsed()))?;
        times.push((stage.name, begun.elapsed()));
        if !passed {
            failed = Some(stage.name);
            break;
        }
    }
    println!();
    for (name, time) in times {
        println!("{:>6.0} s  {name}", time.as_secs_f64());
    }
    let nothing_left = machine.expect_nothing_left();
    match failed {
        Some(name) => {
            if let Err(error) = nothing_left {
                println!("{error}");
            }
            bail!("stage \"{name}\" failed")
        }
        None => nothing_left,
    }
}

fn run_stage(root: &Path, stage: &Stage, left: Duration) -> Result<bool> {
    let mut command = Command::new(stage.command[0]);
    command.args(&stage.command[1..]).current_dir(root);
    for (name, value) in stage.environment {
        let absolute = *name == "CARGO_TARGET_DIR";
        command.env(name, if absolute { root.join(value).into_os_string() } else { value.into() });
    }
    let mut child = command.spawn().with_context(|| format!("cannot start {}", stage.command[0]))?;
    let deadline = Instant::now() + left;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            bail!(
                "stage \"{}\" was still running when the run's {} minutes were over",
                stage.name,
                LIMIT.as_secs() / 60
            );
        }
        std::thread::park_timeout(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_stage_has_is_refused() {
        let names = |only| chosen(STAGES, only).map(|stages| stages.len()).map_err(|error| error.to_string());
        assert_eq!(names(None), Ok(STAGES.len()));
        assert_eq!(names(Some("over real mounts")), Ok(1));
        let refused = names(Some("nonsense")).expect_err("none");
        assert!(refused.contains("nonsense") && refused.contains("end to end, over real mounts"), "{refused}");
    }
}
