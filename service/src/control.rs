//! The control socket: commands and answers, one JSON text a line, from root only.

mod trace;
mod trees;

use crate::failures::failure;
use crate::outside::{Deed, outside};
use crate::service::Service;
use poolfs_service_protocol::{Answer, Command, FailureCode, Receiver};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use std::io::{self, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::thread;
use std::time::Duration;
use tracing::warn;

/// Most bytes of one command.
const COMMAND_BYTES_MAX: u64 = 1 << 20;

/// Most connections at once.
const CONNECTIONS_MAX: usize = 32;

/// A connection that says nothing for so long is closed.
const SILENCE_MAX: Duration = Duration::from_secs(600);

/// A connection that does not read its answer for so long is closed.
const DEAFNESS_MAX: Duration = Duration::from_secs(10);

/// The socket; its file goes when it is dropped.
pub struct ControlSocket {
    path: PathBuf,
    listener: UnixListener,
}

impl ControlSocket {
    /// Makes the socket at `path`, only for root. What a dead service left there is replaced.
    ///
    /// # Errors
    /// When the directory is missing, or a live service listens there.
    pub fn bind(path: &Path) -> io::Result<Self> {
        if UnixStream::connect(path).is_ok() {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, "another service listens there"));
        }
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let before = rustix::process::umask(Mode::from_raw_mode(0o177));
        let listener = UnixListener::bind(path);
        rustix::process::umask(before);
        Ok(Self { path: path.to_owned(), listener: listener? })
    }

    /// Takes the socket's file away: nobody new finds the service.
    pub fn remove(&self) {
        let path = self.path.clone();
        let _ = outside(Deed::Mount, move || std::fs::remove_file(path));
    }

    /// Serves connections, each on a thread of its own, until the process ends. [`Command::Shutdown`] is passed to `shutdown`
    /// with the way to answer it when it is done.
    pub fn serve(&self, service: &Arc<Service>, shutdown: &SyncSender<Option<UnixStream>>) {
        let open = Arc::new(AtomicUsize::new(0));
        for stream in self.listener.incoming() {
            let stream = match stream {
                Ok(stream) => stream,
                Err(error) => {
                    warn!(%error, "accepting a control connection failed");
                    thread::sleep(Duration::from_millis(100));
                    continue;
                }
            };
            if open.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
                open.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let (service, shutdown, count) = (Arc::clone(service), shutdown.clone(), Arc::clone(&open));
            let spawned = thread::Builder::new().name("control".into()).spawn(move || {
                if let Err(error) = converse(stream, &service, &shutdown) {
                    warn!(%error, "a control connection failed");
                }
                count.fetch_sub(1, Ordering::Relaxed);
            });
            if spawned.is_err() {
                open.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.remove();
    }
}

fn converse(stream: UnixStream, service: &Service, shutdown: &SyncSender<Option<UnixStream>>) -> io::Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(&stream)?;
    if !peer.uid.is_root() {
        return failed(&stream, FailureCode::Host, "only root may command a service");
    }
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    stream.set_write_timeout(Some(DEAFNESS_MAX))?;
    let mut input = Receiver::new(stream.try_clone()?);
    loop {
        let (line, descriptors) = match input.line(COMMAND_BYTES_MAX) {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return failed(&stream, FailureCode::Usage, error.to_string());
            }
            read => read?,
        };
        if line.is_empty() {
            return Ok(());
        }
        if line.len() as u64 == COMMAND_BYTES_MAX && !line.ends_with(b"\n") {
            let message = format!("a command is longer than {COMMAND_BYTES_MAX} bytes");
            return failed(&stream, FailureCode::Usage, message);
        }
        if has_closed(&stream)? {
            // Whoever asked has given up, and takes note of what there is instead.
            return Ok(());
        }
        match serde_json::from_slice(&line) {
            Ok(command) if !descriptors.is_empty() && !matches!(command, Command::Mount(_)) => {
                let message = "descriptors came with a command that takes none".to_owned();
                failed(&stream, FailureCode::Usage, message)?;
            }
            Ok(Command::Shutdown) => {
                // A second one finds the channel full: the first is being carried out, and the process ends.
                let _ = shutdown.try_send(Some(stream.try_clone()?));
            }
            Ok(Command::Trace(spec)) => trace::tell(&stream, service, spec)?,
            Ok(Command::Differences { instance, parts }) => trees::differences(&stream, service, &instance, parts)?,
            Ok(Command::Commit { instance, archive }) => trees::commit(&stream, service, &instance, &archive)?,
            Ok(Command::Flatten { instance }) => trees::flatten(&stream, service, &instance)?,
            Ok(command) => answer(&stream, &service.command(command, descriptors, &|| is_open(&stream)))?,
            Err(error) => failed(&stream, FailureCode::Usage, format!("not a command: {error}"))?,
        }
    }
}

/// Whoever asked has closed its end, or says something: it wants no more.
fn has_hung_up(stream: &UnixStream) -> io::Result<bool> {
    let mut polled = [PollFd::new(stream, PollFlags::IN | PollFlags::RDHUP)];
    Ok(poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? > 0)
}

/// Whoever asked is gone, and not just silent.
fn has_closed(stream: &UnixStream) -> io::Result<bool> {
    let mut polled = [PollFd::new(stream, PollFlags::empty())];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    Ok(polled[0].revents().contains(PollFlags::HUP))
}

/// Somebody waits for the answer.
fn is_open(stream: &UnixStream) -> bool {
    !has_closed(stream).unwrap_or(false)
}

fn failed(stream: &UnixStream, code: FailureCode, message: impl Into<String>) -> io::Result<()> {
    answer(stream, &failure(code, message))
}

/// Sends one answer.
///
/// # Errors
/// Those of the connection.
pub fn answer(mut stream: &UnixStream, answer: &Answer) -> io::Result<()> {
    let mut text = serde_json::to_vec(answer)?;
    text.push(b'\n');
    stream.write_all(&text)
}
