//! Runs programs with a time limit.

use std::fmt::Write;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Between two looks whether a program has ended: at first, and at most.
const PAUSES: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(5));

/// How a program ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Exit code; 128 and the signal's number when a signal ended it.
    pub code: i32,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl Outcome {
    /// The output of a program that must succeed.
    ///
    /// # Panics
    /// When it failed, with all it said.
    #[must_use]
    pub fn expect(self, what: &str) -> String {
        assert_eq!(self.code, 0, "{what} failed\n--- output\n{}\n--- errors\n{}", self.out, self.err);
        self.out
    }
}

/// Runs a program to its end; at most fifteen minutes: a machine may have much else to do.
///
/// # Panics
/// When it does not start or does not end.
#[must_use]
pub fn run(command: &mut Command) -> Outcome {
    run_within(command, Duration::from_secs(900))
}

/// Runs a program to its end, which must come within `limit`.
///
/// # Panics
/// When it does not start or does not end.
#[must_use]
pub fn run_within(command: &mut Command, limit: Duration) -> Outcome {
    let text = format!("{command:?}");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{text}: {error}"));
    let mut out = child.stdout.take().expect("piped");
    let mut err = child.stderr.take().expect("piped");
    let (out, err) = (std::thread::spawn(move || read_all(&mut out)), std::thread::spawn(move || read_all(&mut err)));
    let deadline = Instant::now() + limit;
    let mut pause = PAUSES.0;
    let status = loop {
        if let Some(status) = child.try_wait().expect("the child is ours") {
            break status;
        }
        if Instant::now() > deadline {
            let living = processes();
            child.kill().expect("the child is ours");
            panic!("{text} did not end within {} s; what lives:\n{living}", limit.as_secs());
        }
        std::thread::park_timeout(pause);
        pause = PAUSES.1.min(pause * 2);
    };
    use std::os::unix::process::ExitStatusExt;
    Outcome {
        code: status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)),
        out: out.join().expect("reading ends"),
        err: err.join().expect("reading ends"),
    }
}

/// All processes but those of the kernel, each thread with where in the kernel it is.
fn processes() -> String {
    let entries =
        |path: &Path| std::fs::read_dir(path).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    // Whatever ends meanwhile says nothing.
    let text = |path: PathBuf| {
        std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    };
    let mut all = String::new();
    for process in entries(Path::new("/proc")) {
        let line = text(process.join("cmdline")).replace('\0', " ");
        if line.is_empty() {
            continue;
        }
        let status = text(process.join("status"));
        let of = |name: &str| status.lines().find(|line| line.starts_with(name)).unwrap_or_default().replace('\t', " ");
        let _ = writeln!(all, "{} ({}, {}): {line}", process.display(), of("PPid"), of("VmRSS"));
        for thread in entries(&process.join("task")) {
            let stat = text(thread.join("stat"));
            let state = stat.rsplit(") ").next().and_then(|rest| rest.get(..1)).unwrap_or_default();
            let stack = text(thread.join("stack")).replace("[<0>] ", "").replace('\n', " < ");
            let _ = writeln!(all, "    {} {state} {stack}", text(thread.join("comm")).trim());
        }
    }
    all
}

/// Runs a shell script.
#[must_use]
pub fn shell(script: &str) -> Outcome {
    run(Command::new("sh").args(["-euc", script]))
}

fn read_all(stream: &mut dyn Read) -> String {
    let mut bytes = Vec::new();
    // A stream that breaks off has said what it said.
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}
