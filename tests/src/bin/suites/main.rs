//! `make suites`: runs long program lists on the disk, on poolfs by FUSE and on poolfs by the library, and compares the outcomes.
//!
//! The outcomes must be the same. The tables are docs/suites.md and, for pjdfstest, in docs/semantics.md.
//!
//! A suite is a shell script (`tests/suites/NAME.sh`, see [`suite`]). Each of its runs has namespaces of its own, which end with it, and
//! with them every server it started.

mod suite;
mod tables;
mod target;

use poolfs_tests::{in_namespaces, run_in_namespaces, workspace};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;
use suite::Suite;
use target::Target;
use tempfile::TempDir;

/// What mounting, unmounting and removing may take besides the script.
const MARGIN: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["--inside", suite, target, folder] => {
            let target = Target::of_name(target).expect("the caller knows its targets");
            target::run_inside(&Suite::load(suite), target, Path::new(folder));
            ExitCode::SUCCESS
        }
        [] => run_all(&suite::names()),
        ["--only", names @ ..] if !names.is_empty() => {
            if let Some(unknown) = names.iter().find(|name| !suite::names().iter().any(|known| known == *name)) {
                eprintln!("there is no suite {unknown}; there are: {}", suite::names().join(" "));
                return ExitCode::from(2);
            }
            run_all(&names.iter().map(ToString::to_string).collect::<Vec<_>>())
        }
        _ => {
            eprintln!("usage: poolfs-suites [--only NAME...]\nsuites: {}", suite::names().join(" "));
            ExitCode::from(2)
        }
    }
}

/// Runs suites one after the other; the tables are written after each.
fn run_all(names: &[String]) -> ExitCode {
    let mut differing = Vec::new();
    let mut folders = Vec::new();
    for name in names {
        forget(&mut folders);
        let suite = Suite::load(name);
        if !suite.install_packages() {
            eprintln!("{name}: its packages cannot be installed");
            differing.push(name.as_str());
            continue;
        }
        let results: Vec<(Target, Value)> =
            suite.targets().into_iter().map(|target| (target, run_one(&suite, target, &mut folders))).collect();
        if !tables::report(&suite, &results) {
            differing.push(name.as_str());
        }
    }
    if differing.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!("not run, or not the same everywhere: {}", differing.join(" "));
    ExitCode::FAILURE
}

/// For so long ext4 does not use the inode of a removed file again, and looks at each such inode before it makes another file (`recently_deleted` in its
/// `ialloc.c`; longer where the block of the inode is not on disk yet).
const RECENTLY: Duration = Duration::from_secs(61);

/// Removes the files of earlier runs. No run is measured while the filesystem has to remember them: with some ten thousand each new file takes 2 ms.
fn forget(folders: &mut Vec<TempDir>) {
    if !folders.is_empty() {
        folders.clear();
        rustix::fs::sync();
        std::thread::sleep(RECENTLY);
    }
}

/// One run in namespaces of its own: what it wrote about itself.
fn run_one(suite: &Suite, target: Target, folders: &mut Vec<TempDir>) -> Value {
    println!("==> {} {}", suite.name, target.name());
    let folder = tempfile::Builder::new().prefix("poolfs-test-").tempdir().expect("a temporary folder");
    // Servers run as users of their own, and reach their files from the root.
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
    let mut command = in_namespaces();
    command.arg(std::env::current_exe().expect("the program's own path"));
    command.args(["--inside", &suite.name, target.name()]).arg(folder.path());
    let code = run_in_namespaces(&mut command, folder.path(), suite.limit + MARGIN);
    let written = fs::read_to_string(folder.path().join(target::RESULT)).ok();
    keep_output(suite, target, folder.path());
    folders.push(folder);
    written.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_else(|| {
        let cause = code.map_or("did not end in time".to_owned(), |code| format!("ended with {code}"));
        serde_json::json!({ "code": -1, "text": format!("the run itself {cause}"), "seconds": 0.0, "requests": 0 })
    })
}

/// Both outputs of a run stay in `target/suites` until its next one.
fn keep_output(suite: &Suite, target: Target, folder: &Path) {
    let kept = workspace().join("target/suites");
    fs::create_dir_all(&kept).expect("a folder");
    for stream in ["out", "err", "log"] {
        let to = kept.join(format!("{}-{}.{stream}", suite.name, target.name()));
        if fs::copy(folder.join(stream), &to).is_err() {
            // A run that was killed has not written all of them; those of the run before would mislead.
            let _ = fs::remove_file(&to);
        }
    }
}

/// Runs a command of this machine for what it prints; nothing when it fails.
fn ask(script: &str) -> String {
    let output = Command::new("sh").args(["-c", script]).output().expect("sh starts");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}
