//! The OCI runtime that runs containers: runc, or crun.

use crate::context::Context;
use crate::failure::{Code, Failure, Result};
use poolfs_host::{mount_table, remove_tree};
use rustix::mount::{MountPropagationFlags, mount_bind, mount_change};
use serde::Deserialize;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

/// The runtimes that will do, the preferred one first.
const RUNTIMES: [&str; 2] = ["runc", "crun"];
/// Where it says what went wrong.
const LOG_NAME: &str = "runtime.log";
/// Where it writes the first process's number.
const PID_NAME: &str = "pid";
/// What a service manager says of descriptors that it gave to this process, and that the runtime does not have.
const OF_DESCRIPTORS: [&str; 3] = ["LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"];
/// Exit statuses as Docker gives them.
const STATUS_RUNTIME: u8 = 125;
const STATUS_NOT_EXECUTABLE: u8 = 126;
const STATUS_NOT_FOUND: u8 = 127;

/// An OCI runtime with the directory of its own state.
pub struct Runtime {
    program: PathBuf,
    root: PathBuf,
}

/// One line of its log.
#[derive(Deserialize)]
struct LogLine {
    #[serde(default)]
    level: String,
    #[serde(default)]
    msg: String,
}

impl Runtime {
    /// Find one in the search path.
    pub fn find(context: &Context) -> Result<Runtime> {
        let program = RUNTIMES.iter().find_map(|name| find_program(name)).ok_or_else(|| {
            Failure::host("OCI runtime", "neither runc nor crun is installed", "apt-get install runc")
        })?;
        Ok(Runtime { program, root: context.run.join("runtime") })
    }

    /// The command that runs a bundle to its end. It passes signals on, and moves a terminal's bytes and size. It ends with
    /// this process: a runtime that is half way must not go on behind whoever cleans up after this process was killed.
    ///
    /// With `shown`, the runtime and the container's first process have a mount namespace in which the root, the first, is at a
    /// place, the second, that they reach whoever they have become. Nobody else sees it there.
    pub fn run(&self, context: &Context, bundle: &Path, id: &str, shown: Option<(&Path, &Path)>) -> Command {
        let mut command = Command::new(context.program());
        for name in OF_DESCRIPTORS {
            command.env_remove(name);
        }
        if context.json {
            command.arg("--json");
        }
        command.args(["__tied", "--parent", &std::process::id().to_string()]);
        if let Some((root, place)) = shown {
            command.arg("--show").args([root, place]);
        }
        command.arg("--").arg(&self.program).arg("--root").arg(&self.root);
        command.arg("--log").arg(bundle.join(LOG_NAME)).args(["--log-format", "json"]);
        command.arg("run").arg("--bundle").arg(bundle).arg("--pid-file").arg(bundle.join(PID_NAME)).arg(id);
        command
    }

    /// Whether the container of a bundle has got as far as its first process.
    pub fn has_started(bundle: &Path) -> bool {
        bundle.join(PID_NAME).exists()
    }

    /// Why a container did not start, when the runtime ended so; none when it did.
    pub fn start_failure(bundle: &Path, name: &str, status: ExitStatus) -> Option<Failure> {
        if Runtime::has_started(bundle) {
            return None;
        }
        let text = std::fs::read_to_string(bundle.join(LOG_NAME)).unwrap_or_default();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<LogLine>(line).ok());
        let told = lines.filter(|line| line.level == "error").map(|line| line.msg).next_back();
        let cause =
            told.unwrap_or_else(|| format!("the OCI runtime ended before it began, and did not say why ({status})"));
        let is_of_program = cause.contains("exec: ") || cause.contains("executable file");
        let says = |part: &str| is_of_program && cause.to_lowercase().contains(part);
        let (code, status, remedy) = if says("not found") || says("no such file") {
            (Code::NotFound, STATUS_NOT_FOUND, "check the command's name: the image does not have it")
        } else if says("permission denied") {
            (Code::File, STATUS_NOT_EXECUTABLE, "make the command executable in the image")
        } else {
            (Code::Host, STATUS_RUNTIME, "`poolfs doctor` says what this host lacks")
        };
        Some(Failure::new(format!("container {name}"), cause, remedy).with_code(code).with_status(status))
    }

    /// Send a signal to a container's first process.
    pub fn kill(&self, id: &str, signal: &str) -> Result<()> {
        let output = self.command().args(["kill", id, signal]).stdin(Stdio::null()).output();
        let output = output.map_err(|error| Failure::file(&self.program, error))?;
        if output.status.success() {
            return Ok(());
        }
        let cause = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(Failure::new("OCI runtime", cause, "the container may have ended meanwhile: `poolfs ps`"))
    }

    /// Whether it has not forgotten a container, as it does when that has ended.
    pub fn knows(&self, id: &str) -> bool {
        self.root.join(id).exists()
    }

    /// End and forget a container, whatever state it is in; one that does not exist is fine.
    pub fn delete(&self, id: &str) {
        if self.knows(id) {
            // What it says is of no use: that it is gone is seen by the next steps.
            let _ = self.command().args(["delete", "--force", id]).stdin(Stdio::null()).output();
            // A runtime that was killed at its start left less than it understands.
            if let Err(error) = remove_tree(&self.root.join(id)) {
                tracing::debug!(%error, "the runtime's state of a container stays");
            }
        }
        // Not empty means that other containers run.
        let _ = std::fs::remove_dir(&self.root);
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--root").arg(&self.root);
        command
    }
}

/// Become a program that is killed when its parent, the process `parent`, ends; with a root and a place in `show`, in a mount
/// namespace in which the root is there.
pub fn tie(context: &Context, parent: u32, show: &[PathBuf], command: &[String]) -> Result<u8> {
    let [program, arguments @ ..] = command else {
        return Err(Failure::new("OCI runtime", "there is no command", "give one after --"));
    };
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|errno| Failure::new("OCI runtime", errno, ""))?;
    // It may have ended before that.
    if rustix::process::getppid().is_none_or(|now| now.as_raw_nonzero().get().unsigned_abs() != parent) {
        return Err(Failure::new("OCI runtime", "whoever started it has ended", ""));
    }
    if let [root, place] = show {
        show_root(context, root, place)?;
    }
    let error = Command::new(program).args(arguments).exec();
    Err(Failure::new(program, error, "apt-get install runc"))
}

fn show_root(context: &Context, root: &Path, place: &Path) -> Result<()> {
    let failed = |error: std::io::Error| Failure::file(place, error);
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).map_err(|errno| failed(errno.into()))?;
    // What happens here stays here; what the host unmounts goes here too.
    let flags = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    mount_change("/", flags).and_then(|()| mount_bind(root, place)).map_err(|errno| failed(errno.into()))?;
    // Of other instances nothing is held that they would have to wait for. What cannot be detached has just gone.
    for entry in mount_table(&*context.host)?.iter().rev() {
        if entry.instance().is_some() && entry.mount_point != place {
            let _ = context.host.detach(&entry.mount_point);
        }
    }
    Ok(())
}

/// A program in the search path.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let fixed = ["/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/local/sbin", "/usr/local/bin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(fixed).map(|directory| directory.join(name)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_runtime_logs_becomes_a_status() {
        let bundle = tempfile::tempdir().expect("a directory");
        let log = |text: &str| std::fs::write(bundle.path().join(LOG_NAME), text).expect("written");
        let failure = || Runtime::start_failure(bundle.path(), "c", ExitStatus::default());
        assert_eq!(failure().expect("a failure that says nothing").status(), STATUS_RUNTIME);
        log("{\"level\":\"error\",\"msg\":\"exec: \\\"x\\\": executable file not found in $PATH\"}\nnoise\n");
        assert_eq!(failure().expect("a failure").status(), STATUS_NOT_FOUND);
        log("{\"level\":\"error\",\"msg\":\"mkdir /sys/fs/cgroup/x: no such file or directory\"}\n");
        assert_eq!(failure().expect("a failure").status(), STATUS_RUNTIME);
        std::fs::write(bundle.path().join(PID_NAME), "1").expect("written");
        assert!(failure().is_none(), "it started: the code is its own");
    }

    #[test]
    fn programs_are_found_in_the_search_path() {
        assert!(find_program("sh").is_some());
        assert!(find_program("no-such-program-here").is_none());
    }
}
