//! Runs the tests of the crates beside programs that occupy all processors: a test fails that relies on a thread running promptly.

use super::FIGURE;
use crate::stages::CRATE_TESTS;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command};

/// How often all tests run.
const ROUNDS: usize = 3;

/// Programs that never wait, as many as there are processors. They end when this is dropped.
struct BusyPrograms(Vec<Child>);

impl BusyPrograms {
    fn start() -> Result<Self> {
        let mut programs = Self(Vec::new());
        for _ in 0..std::thread::available_parallelism()?.get() {
            // In a session of its own: the scheduler gives each session the same share (sched_autogroup), so that one busy program gets as
            // much as all tests together. With the signal they end also when this process is killed.
            let child = Command::new("setpriv")
                .args(["--pdeathsig", "KILL", "setsid", "sh", "-c", "while :; do :; done"])
                .spawn()
                .context("cannot start setpriv (package util-linux)")?;
            programs.0.push(child);
        }
        Ok(programs)
    }

    /// Fails when one has ended: then the tests had a processor for themselves.
    fn expect_all(&mut self) -> Result<()> {
        for program in &mut self.0 {
            let ended = program.try_wait()?;
            ensure!(ended.is_none(), "a busy program has ended: {ended:?}");
        }
        Ok(())
    }
}

impl Drop for BusyPrograms {
    fn drop(&mut self) {
        for program in &mut self.0 {
            let _ = program.kill();
            let _ = program.wait();
        }
    }
}

/// Runs the tests that often, also when some have failed, and names those.
pub fn run(root: &Path) -> Result<()> {
    // What is to be built is built before.
    let built = tests(root).arg("--no-run").status().context("cannot start cargo")?;
    ensure!(built.success(), "the tests cannot be built");
    let mut programs = BusyPrograms::start()?;
    let (mut passed, mut failed) = (0, Vec::new());
    for round in 1..=ROUNDS {
        let told = run_once(root)?;
        programs.expect_all()?;
        passed += told.passed;
        failed.extend(told.failed.iter().map(|test| format!("run {round}: {test}")));
    }
    println!("{FIGURE}{passed} tests passed in {ROUNDS} runs beside {} busy programs", programs.0.len());
    for test in &failed {
        println!("{FIGURE}failed in {test}");
    }
    if failed.is_empty() { Ok(()) } else { bail!("failed:\n  {}", failed.join("\n  ")) }
}

fn tests(root: &Path) -> Command {
    let mut command = Command::new(CRATE_TESTS[0]);
    command.args(&CRATE_TESTS[1..]).current_dir(root);
    command
}

fn run_once(root: &Path) -> Result<Told> {
    let (output, input) = std::io::pipe()?;
    // The command ends with the statement, and with it what else keeps the pipe open.
    let mut child = tests(root)
        .arg("--no-fail-fast")
        .env("CARGO_TERM_COLOR", "never")
        .stdout(input.try_clone()?)
        .stderr(input)
        .spawn()
        .context("cannot start cargo")?;
    let mut told = Told::default();
    for line in BufReader::new(output).split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        told.line(&line);
    }
    let status = child.wait()?;
    told.end();
    if !status.success() && told.failed.is_empty() {
        told.failed.insert(format!("cargo test: {status}"));
    }
    Ok(told)
}

/// What the output of `cargo test` tells.
#[derive(Default)]
struct Told {
    passed: u64,
    failed: BTreeSet<String>,
    /// The list of names that is being read, or was read last.
    list: Vec<String>,
    /// Failures of a program whose name has not been told yet.
    pending: BTreeSet<String>,
}

impl Told {
    fn line(&mut self, line: &str) {
        if line == "failures:" {
            // Of two such lists the second is that of the names.
            self.list.clear();
        } else if let Some(name) = line.strip_prefix("    ") {
            self.list.push(name.to_owned());
        } else if let Some(result) = line.strip_prefix("test result: ") {
            self.result(result);
        } else if let Some(program) = line.split_once("failed, to rerun pass `").map(|(_, rest)| rest) {
            let program = program.trim_end_matches('`');
            let names = std::mem::take(&mut self.pending);
            if names.is_empty() {
                // It has ended before it could name anything.
                self.failed.insert(program.to_owned());
            }
            self.failed.extend(names.iter().map(|name| format!("{program}: {name}")));
        }
    }

    /// Tests that run one of them in a process of its own show also what that says, which leaves out all others.
    fn result(&mut self, result: &str) {
        let list = std::mem::take(&mut self.list);
        if !result.contains("; 0 filtered out") {
            return;
        }
        let passed = result.split_once(". ").and_then(|(_, counts)| counts.split(' ').next()?.parse::<u64>().ok());
        self.passed += passed.unwrap_or(0);
        if result.starts_with("FAILED") {
            self.pending.extend(list);
        }
    }

    fn end(&mut self) {
        self.failed.append(&mut self.pending);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failure_is_named_with_its_program() {
        let output = "\
running 3 tests
test a::holds ... ok
test a::breaks ... FAILED
test a::alone ... FAILED

failures:

---- a::breaks stdout ----
    a line of its own

failures:
    a::alone

test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 2 filtered out; finished in 0.00s

failures:

---- a::breaks stdout ----
    another

failures:
    a::alone
    a::breaks

test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s

error: test failed, to rerun pass `-p poolfs-union --lib`
test result: ok. 7 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
error: test failed, to rerun pass `-p poolfs-cache --test suite`

Caused by:
  process didn't exit successfully: `suite` (signal: 6, SIGABRT: process abort signal)
error: 2 targets failed:
    `-p poolfs-union --lib`
    `-p poolfs-cache --test suite`
";
        let mut told = Told::default();
        output.lines().for_each(|line| told.line(line));
        told.end();
        let failed: Vec<&str> = told.failed.iter().map(String::as_str).collect();
        let lib = ["-p poolfs-union --lib: a::alone", "-p poolfs-union --lib: a::breaks"];
        assert_eq!(failed, ["-p poolfs-cache --test suite", lib[0], lib[1]]);
        assert_eq!(told.passed, 8);
    }

    #[test]
    fn busy_programs_run_until_they_are_dropped() {
        let mut programs = BusyPrograms::start().expect("started");
        programs.expect_all().expect("busy");
        let first = programs.0[0].id();
        drop(programs);
        assert!(!Path::new(&format!("/proc/{first}")).exists());
    }
}
