//! The monitor: the process that supervises a detached container and holds its output, its exit code and its mount.

use crate::container::create::START_NAME;
use crate::container::record::ContainerRecord;
use crate::container::supervise::{self, Places, Start};
use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::inherited::with_used_variables;
use crate::record::ProcessRecord;
use crate::signals::Signals;
use crate::text::complain;
use poolfs_host::{ProcessIdentity, ProcessSignal};
use rustix::fs::{Mode, OFlags};
use rustix::pty::OpenptFlags;
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

/// What the monitor says when the container runs.
const STARTED: &str = "started\n";
/// Most bytes of a log; then it becomes the old one, and the one before that goes.
const LOG_BYTES_MAX: u64 = 64 << 20;
const PUMP_BYTES: usize = 64 << 10;
/// How often it is looked, while a container starts, whether a signal has come.
const SIGNAL_PAUSE: Duration = Duration::from_millis(50);
const DETACHED_SIZE: Winsize = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };

/// Start the monitor of a container and wait until the container runs.
pub fn launch(context: &Context, name: &str, signals: &mut Signals) -> Result<()> {
    let mut child = with_used_variables(&mut Command::new(context.program()))
        .arg("--state")
        .arg(&context.state)
        .arg("--run-dir")
        .arg(&context.run)
        .args(["--wait", &context.patience.limit().as_secs().to_string(), "--json"])
        .args(["__monitor", name, "--left-ms", &context.patience.left().as_millis().to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .current_dir("/")
        .process_group(0)
        .spawn()
        .map_err(|error| Failure::file(&context.program(), error))?;
    let monitor = context.host.identify(child.id());
    let mut complaint = String::new();
    let failed = |error: std::io::Error| Failure::new(format!("container {name}"), error, "");
    // Both are closed by the monitor as soon as the container runs, or by its end. Its own waits are limited.
    let said = match child.stdout.take() {
        Some(output) => read_passing_on(context, output, monitor.as_ref(), signals).map_err(failed)?,
        None => String::new(),
    };
    if said == STARTED {
        return Ok(());
    }
    if let Some(mut errors) = child.stderr.take() {
        errors.read_to_string(&mut complaint).map_err(failed)?;
    }
    let status = child.wait().map_err(failed)?;
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(125);
    Err(told(name, &complaint).with_status(code))
}

/// The failure that a monitor told of, with what else it said.
fn told(name: &str, complaint: &str) -> Failure {
    let thing = format!("container {name}");
    let mut others = Vec::new();
    let mut failure = None;
    for line in complaint.lines() {
        let object: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
        match (Failure::of_json(&object), object["note"].as_str()) {
            (Some(told), _) => failure = Some(told),
            (None, Some(note)) => complain(&format!("poolfs: {note}")),
            (None, None) => others.push(line),
        }
    }
    failure.unwrap_or_else(|| Failure::new(thing, format!("its monitor ended: {}", others.join("\n")), ""))
}

/// Read all of it; whoever asks this process to end meanwhile asks the monitor.
fn read_passing_on(
    context: &Context,
    mut output: impl Read + Send + 'static,
    monitor: Option<&ProcessIdentity>,
    signals: &mut Signals,
) -> std::io::Result<String> {
    let (send, read) = sync_channel(1);
    std::thread::spawn(move || {
        let mut text = String::new();
        send.send(output.read_to_string(&mut text).map(|_| text))
    });
    loop {
        match read.recv_timeout(SIGNAL_PAUSE) {
            Ok(read) => return read,
            Err(RecvTimeoutError::Disconnected) => return Err(ErrorKind::BrokenPipe.into()),
            Err(RecvTimeoutError::Timeout) => {
                if let Some(monitor) = monitor.filter(|_| signals.end_was_asked()) {
                    // It may have ended meanwhile.
                    let _ = context.host.signal(monitor, ProcessSignal::Terminate);
                }
            }
        }
    }
}

/// Be the monitor of a container.
pub fn watch(context: &Context, name: &str) -> Result<u8> {
    // Fails only where this process leads a session already.
    let _ = rustix::process::setsid();
    rustix::process::set_child_subreaper(rustix::process::Pid::from_raw(1))
        .map_err(|errno| Failure::new("monitor", errno, ""))?;
    let mut signals = Signals::catch()?;
    let containers = context.containers()?;
    let places = Places::of(&containers.path(name));
    let start = read_start(&containers.path(name).join(START_NAME))?;
    let record = {
        let mut locked = containers.lock::<ContainerRecord>(name)?;
        locked.record.monitor = ProcessRecord::of(&*context.host, std::process::id());
        locked.note()?;
        locked.record.clone()
    };
    let log = places.log.clone();
    let mut pump = None;
    let connect = |command: &mut Command| -> Result<()> {
        let failed = |error: std::io::Error| Failure::new("output", error, "");
        let source = if record.tty {
            connect_terminal(command)?
        } else {
            connect_pipe(command, record.host_root()).map_err(failed)?
        };
        pump = Some(std::thread::spawn(move || write_log(source, &log)));
        Ok(())
    };
    let result = supervise::run(context, name, &start, &mut signals, connect, say_started);
    if let Some(Ok(Err(error))) = pump.map(std::thread::JoinHandle::join) {
        tracing::warn!(%error, "the log is not complete");
    }
    result
}

fn read_start(path: &Path) -> Result<Start> {
    let text = std::fs::read_to_string(path).map_err(|error| Failure::file(path, error))?;
    serde_json::from_str(&text).map_err(|error| Failure::file(path, error))
}

/// Tell whoever launched this, and let go of what came from there.
fn say_started() {
    // Nobody may be listening any more.
    let _ = crate::text::print(STARTED);
    if let Ok(null) = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        let _ = rustix::stdio::dup2_stdout(&null);
        let _ = rustix::stdio::dup2_stderr(&null);
    }
}

/// The pipe belongs to `owner`, as whom the container may open it once more (`/dev/stdout`).
fn connect_pipe(command: &mut Command, owner: Option<u32>) -> std::io::Result<File> {
    let (reader, writer) = std::io::pipe()?;
    std::os::unix::fs::fchown(&writer, owner, owner)?;
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    Ok(File::from(std::os::fd::OwnedFd::from(reader)))
}

/// A terminal that nobody sits at: its other end goes to the log.
fn connect_terminal(command: &mut Command) -> Result<File> {
    let failed = |errno: rustix::io::Errno| Failure::new("terminal", errno, "mount /dev/pts");
    let master = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).map_err(failed)?;
    rustix::pty::grantpt(&master).and_then(|()| rustix::pty::unlockpt(&master)).map_err(failed)?;
    tcsetwinsize(&master, DETACHED_SIZE).map_err(failed)?;
    let name = rustix::pty::ptsname(&master, Vec::new()).map_err(failed)?;
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let slave = rustix::fs::open(name.as_c_str(), flags, Mode::empty()).map_err(failed)?;
    let again =
        |descriptor: &std::os::fd::OwnedFd| descriptor.try_clone().map_err(|error| Failure::new("terminal", error, ""));
    command.stdin(again(&slave)?).stdout(again(&slave)?).stderr(slave);
    Ok(File::from(master))
}

/// The log before the present one.
pub fn old_log(log: &Path) -> PathBuf {
    log.with_extension("1")
}

/// Copy everything to the log until all writers have closed; the last so many bytes of it stay. What cannot be written is
/// dropped, and the first cause of that is returned: a full disk must not break the container's output.
fn write_log(mut source: impl Read, log: &Path) -> std::io::Result<()> {
    let mut result = Ok(());
    let mut buffer = vec![0; PUMP_BYTES];
    loop {
        let count = match source.read(&mut buffer) {
            Ok(0) => return result,
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            // The last process has closed its end of the terminal.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error()) => return result,
            Err(error) => return Err(error),
        };
        result = result.and(append(log, &buffer[..count]));
    }
}

fn append(log: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if std::fs::metadata(log).is_ok_and(|status| status.len() + bytes.len() as u64 > LOG_BYTES_MAX) {
        std::fs::rename(log, old_log(log))?;
    }
    File::options().create(true).append(true).open(log)?.write_all(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_monitor_tells_of_is_the_failure() {
        let own = Failure::not_found("container c", "exec: \"x\"", "look for it").of("d");
        let failure = told("c", &format!("{}\n", own.json()));
        assert_eq!((failure.json(), failure.to_string()), (own.json(), own.to_string()));
        let other = told("c", "Killed\n").json();
        assert_eq!((&other["error"]["code"], &other["error"]["thing"]), (&"failed".into(), &"container c".into()));
        assert!(other["error"]["cause"].as_str().is_some_and(|cause| cause.contains("Killed")), "{other}");
    }

    #[test]
    fn a_full_disk_does_not_break_the_output() {
        let mut command = Command::new("sh");
        // More than a pipe holds: whoever writes it would meet a closed pipe, or wait for ever.
        command.args(["-c", "head -c 1000000 /dev/zero && exit 7"]);
        let source = connect_pipe(&mut command, None).expect("opened");
        let mut child = command.spawn().expect("sh exists");
        drop(command);
        let error = write_log(source, Path::new("/dev/full")).expect_err("nothing was written");
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
        assert_eq!(child.wait().expect("ended").code(), Some(7));
    }

    #[test]
    fn output_of_pipe_and_terminal_reaches_the_log() {
        let place = tempfile::tempdir().expect("a directory");
        for tty in [false, true] {
            let log = place.path().join(format!("log-{tty}"));
            let mut command = Command::new("sh");
            command.args(["-c", "echo out; echo err >&2; test -t 1 && echo terminal"]);
            let source = if tty {
                connect_terminal(&mut command).expect("opened")
            } else {
                connect_pipe(&mut command, None).expect("opened")
            };
            let mut child = command.spawn().expect("sh exists");
            drop(command);
            write_log(source, &log).expect("copied");
            child.wait().expect("ended");
            let text = std::fs::read_to_string(&log).expect("written").replace('\r', "");
            assert_eq!(text, if tty { "out\nerr\nterminal\n" } else { "out\nerr\n" });
        }
    }
}
