//! The guard: a process that cuts off the mounts of a service that has died.
//!
//! The kernel ends the requests of a mount when the last descriptor of its connection is closed. A thread that the kernel keeps, because it
//! tells something of a file, a page or a directory that is locked, has it open; and what is locked can be so by the caller of a request that
//! the dead service was to answer: both would wait for good, and with them everybody who comes to the mount, whom no signal ends. So another
//! process knows the way to abort each connection (`abort` of the filesystem `fusectl`), does so when the service dies, and
//! ends. It is given those descriptors, and has the log; it has no capabilities, a root in which there is nothing, and reads nothing but the
//! numbers that the service sends.
//!
//! ```text
//! guard -> service: one byte, when it is ready
//! service -> guard: "7\n" with a descriptor: connection 7 is to be aborted by it; "7\n" without: no longer
//! ```
//!
//! What tells it of the death is the end of the thread that it was started by, not of the process: that is not gone as long as a thread is
//! kept. What the service had sent before counts, also if the guard could not run meanwhile.

use crate::confinement;
use crate::sync::lock;
use anyhow::Context;
use nix::sys::signal::{SigSet, Signal};
use poolfs_service_protocol::{Receiver, send};
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;
use std::{fs::File, thread};
use tracing::warn;

/// The argument with which the service's program is the guard.
pub const JOB: &str = "guard";

/// What it is told of the death by: nobody else sends it that.
const DEATH: Signal = Signal::SIGUSR2;

/// Most bytes of a line.
const LINE_BYTES_MAX: u64 = 32;

/// How long the service waits for it to be ready, and to take a line.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// What it says when it is ready.
const READY: [u8; 1] = *b"r";

/// How long the service waits for its end: somebody may have stopped it.
const END_WAIT_MAX: Duration = Duration::from_secs(2);

static GUARD: OnceLock<Mutex<Connection>> = OnceLock::new();
static NUMBERS: AtomicU64 = AtomicU64::new(0);

/// The way to the guard.
struct Connection {
    stream: UnixStream,
    is_ready: bool,
}

impl Connection {
    /// Waits, for a while, until it is ready: of what it is told before, it might not see the death.
    fn await_ready(&mut self) -> io::Result<()> {
        if self.is_ready {
            return Ok(());
        }
        match self.stream.read_exact(&mut READY.clone()) {
            // It hears of it nevertheless.
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            outcome => outcome.map(|()| self.is_ready = true),
        }
    }
}

/// The guard of this process, for its end.
pub(crate) struct Guard(Child);

/// Starts it, from the thread that lives as long as the service.
///
/// # Errors
/// Those of starting a program.
pub(crate) fn start() -> io::Result<Guard> {
    let (own, other) = UnixStream::pair()?;
    own.set_write_timeout(Some(WAIT_MAX))?;
    own.set_read_timeout(Some(WAIT_MAX))?;
    let program = std::env::current_exe()?;
    let child = Command::new(program).arg(JOB).stdin(OwnedFd::from(other)).stdout(Stdio::null()).spawn()?;
    let _ = GUARD.set(Mutex::new(Connection { stream: own, is_ready: false }));
    Ok(Guard(child))
}

impl Guard {
    /// Has it end, and waits for that, for a while: nothing of the service is left then.
    pub fn end(mut self) {
        let Some(guard) = GUARD.get() else { return };
        let stream = &lock(guard).stream;
        let mut rest = Vec::new();
        let has_ended = stream
            .set_read_timeout(Some(END_WAIT_MAX))
            .and_then(|()| stream.shutdown(Shutdown::Write))
            // Its end of the connection ends with it, and then that of the process does not fail to come.
            .and_then(|()| stream.take(READY.len() as u64 + 1).read_to_end(&mut rest));
        if let Err(error) = has_ended.and_then(|_| self.0.wait()) {
            warn!(%error, guard = self.0.id(), "the end of the guard did not come: it is stopped, or was killed");
        }
    }
}

/// A connection that is aborted at the service's death, as long as this is there.
pub(crate) struct Guarded(u64);

/// Has a connection aborted at the service's death, by a byte that is written to this descriptor. A process without a guard, as that of most
/// tests, does without.
///
/// # Errors
/// Those of telling the guard.
pub(crate) fn watch(abort: BorrowedFd<'_>) -> io::Result<Guarded> {
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    GUARD.get().map_or(Ok(()), |guard| lock(guard).await_ready())?;
    tell(number, &[abort])?;
    Ok(Guarded(number))
}

fn tell(number: u64, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    GUARD.get().map_or(Ok(()), |guard| send(&lock(guard).stream, format!("{number}\n").as_bytes(), descriptors))
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // Should it be gone, there is nothing that it would abort either.
        let _ = tell(self.0, &[]);
    }
}

/// By number, what aborts a connection.
type Aborts = HashMap<u64, OwnedFd>;

/// Is the guard, whose commands come by standard input, until the service has ended or died.
///
/// # Errors
/// When it cannot begin.
pub fn run() -> anyhow::Result<()> {
    let death = SigSet::from_iter([DEATH]);
    // The service's own end may be asked for in the same way, and it may have much to bring to disk yet.
    let with_the_service = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];
    SigSet::from_iter(with_the_service.into_iter().chain([DEATH])).thread_block().context("blocking signals")?;
    let signal = rustix::process::Signal::USR2;
    rustix::process::set_parent_process_death_signal(Some(signal)).context("waiting for the death of the service")?;
    let commands = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    confinement::enter_as_guard()?;
    let (died, has_died) = channel();
    let connection = commands.try_clone()?;
    thread::Builder::new().name("death".into()).spawn(move || {
        while death.wait().is_err() {}
        end_of_commands(&connection);
        let _ = died.send(());
    })?;
    // From here on no death is missed. Should there have been one before, nobody reads this.
    let _ = (&commands).write_all(&READY);
    let mut aborts = Aborts::new();
    if let Err(error) = follow(commands, &mut aborts) {
        warn!(%error, "the guard hears nothing more of its service, but of its death");
        has_died.recv().context("waiting for the death of the service")?;
    }
    abort_all(aborts);
    Ok(())
}

/// No more commands come: whoever follows them takes those that were sent, and is at the end.
fn end_of_commands(connection: &UnixStream) {
    if let Err(error) = connection.shutdown(Shutdown::Read) {
        warn!(%error, "the guard's connection stays");
    }
}

/// Takes commands until there are no more. What cannot be taken is left out: it is no reason to cut anybody off.
fn follow(commands: UnixStream, aborts: &mut Aborts) -> io::Result<()> {
    let mut commands = Receiver::new(commands);
    loop {
        let (line, mut descriptors) = match commands.line(LINE_BYTES_MAX) {
            Ok((line, _)) if line.is_empty() => return Ok(()),
            Ok(command) => command,
            Err(error) if matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::OutOfMemory) => {
                warn!(%error, "the guard cannot take a command: should the service die, a mount of it may not be cut off");
                continue;
            }
            Err(error) => return Err(error),
        };
        let number = std::str::from_utf8(&line).ok().and_then(|line| line.trim_end().parse().ok());
        let Some(number) = number else {
            warn!(line = %line.escape_ascii(), "the guard does not know this command");
            continue;
        };
        match descriptors.pop() {
            Some(abort) => aborts.insert(number, abort),
            None => aborts.remove(&number),
        };
    }
}

fn abort_all(aborts: Aborts) {
    for abort in aborts.into_values() {
        // It fails where the connection is at its end, which is what is wanted.
        let _ = File::from(abort).write_all(b"1");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_service_protocol::DESCRIPTORS_MAX;
    use std::io::Read;

    #[test]
    fn what_is_watched_is_aborted_at_the_end_and_what_is_no_longer_is_not() {
        let (own, other) = UnixStream::pair().expect("sockets");
        let mut heard = [0, 1, 2].map(|number| {
            let (read, write) = io::pipe().expect("a pipe");
            send(&own, format!("{number}\n").as_bytes(), &[write.as_fd()]).expect("sent");
            read
        });
        send(&own, b"1\n", &[]).expect("sent");
        drop(own);
        let mut aborts = Aborts::new();
        follow(other, &mut aborts).expect("the end");
        assert_eq!(aborts.len(), 2);
        abort_all(aborts);
        let texts = heard.each_mut().map(|read| {
            let mut text = String::new();
            read.read_to_string(&mut text).expect("read");
            text
        });
        assert_eq!(texts, ["1", "", "1"]);
    }

    #[test]
    fn what_cannot_be_taken_cuts_nobody_off() {
        let (own, other) = UnixStream::pair().expect("sockets");
        let (_read, write) = io::pipe().expect("a pipe");
        let write = write.as_fd();
        send(&own, b"1\n", &[write]).expect("sent");
        send(&own, b"no number\n", &[]).expect("sent");
        // One command with more descriptors than any has.
        send(&own, b"4", &[write; DESCRIPTORS_MAX]).expect("sent");
        send(&own, b"\n", &[write]).expect("sent");
        send(&own, b"2\n", &[write]).expect("sent");
        drop(own);
        let mut aborts = Aborts::new();
        follow(other, &mut aborts).expect("the end");
        let mut numbers: Vec<u64> = aborts.into_keys().collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [1, 2]);
    }

    #[test]
    fn what_was_sent_before_the_death_is_taken_after_it() {
        let (own, other) = UnixStream::pair().expect("sockets");
        let (_read, write) = io::pipe().expect("a pipe");
        let connection = other.try_clone().expect("the same");
        for number in 0..50 {
            send(&own, format!("{number}\n").as_bytes(), &[write.as_fd()]).expect("sent");
        }
        end_of_commands(&connection);
        let mut aborts = Aborts::new();
        // The service's end stays open, as the kernel may keep it.
        follow(other, &mut aborts).expect("the end");
        assert_eq!(aborts.len(), 50);
        assert!(send(&own, b"50\n", &[]).is_err(), "nobody listens");
    }
}
