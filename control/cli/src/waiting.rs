//! Waits of the command line, all within the one limit of a command (`--wait`, [`crate::patience`]).
//!
//! When the limit is over, the message names who did not answer, and what to do. Work that takes long is not cut off: a service that writes
//! gigabytes back before it unmounts is waited for as long as it gives signs of life, which are answers to [`Command::Ping`] on another
//! connection. Signals that ask this process to end also end the current wait.

use crate::context::Context;
use crate::failure::{Code, Failure, Result};
use crate::patience::{Patience, Wait};
use crate::record::PoolRecord;
use crate::signals;
use crate::text::complain;
use poolfs_host::mount_table;
use poolfs_local::PrivateMount;
use poolfs_service_protocol::Command;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FlockOperation;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

/// How often it is looked during a wait whether to go on with it.
const PAUSE: Duration = Duration::from_millis(50);
/// Why there is no answer of a service that was there.
pub const HUNG_UP: &str = "it ended before it answered";
/// What comes after the end of a service.
const AFTERWARDS: &str = "the next mount starts another one, and what was written to unions before is not lost";
/// Most characters of a command in a message.
const COMMAND_WIDTH: usize = 120;
/// Most bytes of one answer.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// The answer: nothing else has to be done for it.
    Answered,
    /// The answer, as long as the service gives signs of life.
    Done,
}

fn tell_once(told: &mut bool, what: impl FnOnce() -> String) {
    if !std::mem::replace(told, true) {
        complain(&format!("poolfs: {}", what()));
    }
}

/// The failure of a wait during which this process was asked to end. What it does from here on is for cleaning up, and nobody who does not
/// answer is waited for any longer.
fn interrupted(patience: &Patience, thing: impl Into<String>) -> Failure {
    signals::forget_end();
    patience.give_up();
    Failure::interrupted(thing, "it was waited for until this command was asked to end")
}

/// Connect with a service; `WouldBlock` when it does not accept anybody for so long.
pub fn connect_within(path: &Path, limit: Duration) -> std::io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(limit))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(UnixStream::from(socket))
}

/// Send one command, with the branches that it needs: where its answers come.
pub fn send(
    context: &Context,
    pool: &str,
    command: &Command,
    branches: &[PrivateMount],
    wait: &Wait<'_>,
) -> Result<BufReader<UnixStream>> {
    let path = crate::service::control_socket(context, pool);
    let sent = || {
        let stream = connect_within(&path, wait.left())?;
        stream.set_read_timeout(Some(PAUSE))?;
        let mut line = serde_json::to_string(command)?;
        line.push('\n');
        let branches: Vec<_> = branches.iter().map(AsFd::as_fd).collect();
        poolfs_service_protocol::send(&stream, line.as_bytes(), &branches)?;
        Ok(BufReader::new(stream))
    };
    sent().map_err(|error: std::io::Error| match error.kind() {
        ErrorKind::WouldBlock => stands_still(context, pool),
        _ => silent(context, pool, error),
    })
}

/// Why there is no answer from a service that is not there.
pub fn silent(context: &Context, pool: &str, error: impl std::fmt::Display) -> Failure {
    let path = crate::service::control_socket(context, pool);
    let record = context.pools().and_then(|pools| pools.peek::<PoolRecord>(pool)).ok().flatten();
    let living = record.and_then(|record| record.service).filter(|service| service.is_alive(&*context.host));
    let remedy = match living {
        // Its socket was removed, or is in that directory of another mount namespace.
        Some(service) => format!(
            "the service lives (process {0}), and nobody listens in {1} here: run the command in the mount namespace in which the pool was started; \
             where the socket was removed, `kill -KILL {0}` ends the service: {AFTERWARDS}",
            service.pid,
            context.run.display()
        ),
        None => format!("`poolfs status {pool}` says how it is; a mount starts a new service"),
    };
    Failure::new(format!("service of pool {pool}"), format!("no answer from {}: {error}", path.display()), remedy)
        .with_code(Code::NoAnswer)
}

/// The failure that a service is there and does not answer.
fn stands_still(context: &Context, pool: &str) -> Failure {
    if context.patience.is_given_up() {
        return interrupted(&context.patience, format!("service of pool {pool}"));
    }
    let cause = format!("it does not answer within {}", within_text(context));
    let record = context.pools().and_then(|pools| pools.peek::<PoolRecord>(pool));
    let Some(process) = record.ok().flatten().and_then(|record| record.service) else {
        return Failure::new(format!("service of pool {pool}"), cause, "try again, with a longer --wait")
            .with_code(Code::NoAnswer);
    };
    let pid = process.pid;
    let (cause, remedy) = if is_stopped(&*context.host, pid) {
        let remedy = format!("`kill -CONT {pid}` lets it go on; `kill -KILL {pid}` ends it: {AFTERWARDS}");
        (format!("{cause}: it is stopped"), remedy)
    } else {
        (cause, format!("try again, with a longer --wait; `kill -KILL {pid}` ends it: {AFTERWARDS}"))
    };
    Failure::new(format!("service of pool {pool} (process {pid})"), cause, remedy).with_code(Code::NoAnswer)
}

/// The limit, for a message.
fn within_text(context: &Context) -> String {
    format!("the {} s that a command waits", context.patience.limit().as_secs_f64())
}

/// Whether a process was stopped, by a signal or by a debugger.
pub fn is_stopped(host: &dyn poolfs_host::Host, pid: u32) -> bool {
    let stat = host.read_text(Path::new(&format!("/proc/{pid}/stat"))).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with(['T', 't']))
}

/// Find out whether a service answers, whatever it is busy with.
pub fn ping(context: &Context, pool: &str) -> Result<()> {
    ping_within(context, pool, &context.patience.begin())
}

/// The same as a part of a wait.
pub fn ping_within(context: &Context, pool: &str, wait: &Wait<'_>) -> Result<()> {
    let mut input = send(context, pool, &Command::Ping, &[], wait)?;
    let mut line = Vec::new();
    while !read_answer(context, pool, &mut input, &mut line)? {
        if wait.is_over() {
            return Err(stands_still(context, pool));
        }
    }
    if line.is_empty() { Err(silent(context, pool, HUNG_UP)) } else { Ok(()) }
}

/// What a service does that carries out a command.
fn work_of(command: &Command) -> String {
    match command {
        Command::Mount(spec) => format!("mounts {}", spec.mount_point.display()),
        Command::Flush { instance } => format!("brings what was written to {instance} to the disk"),
        Command::Unmount { instance, .. } => {
            format!("brings what was written to {instance} to the disk and unmounts it")
        }
        Command::Instances => "ends what others have unmounted".to_owned(),
        Command::Differences { instance, .. } => format!("compares {instance} with its lower branches"),
        Command::Commit { instance, .. } => format!("makes a layer of {instance}"),
        Command::Flatten { instance } => format!("copies what files of {instance} have in lower branches"),
        Command::Shutdown => "brings what was written to the disk and ends".to_owned(),
        Command::Ping | Command::Status | Command::Client { .. } | Command::Trace(_) => "answers".to_owned(),
    }
}

/// The next answer to a command, with its line end; nothing when the service has closed the connection.
pub fn answer_line(
    context: &Context,
    pool: &str,
    input: &mut BufReader<UnixStream>,
    (until, command): (Until, &Command),
    wait: &mut Wait<'_>,
) -> Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut is_told = false;
    while !read_answer(context, pool, input, &mut line)? {
        match until {
            Until::Answered if wait.is_over() => return Err(stands_still(context, pool)),
            Until::Done if wait.is_half_over() => {
                ping_within(context, pool, wait)?;
                wait.heard();
                tell_once(&mut is_told, || {
                    format!("the service of pool {pool} is alive, and still {}", work_of(command))
                });
            }
            _ => {}
        }
    }
    if until == Until::Done {
        // It was at work.
        wait.heard();
    }
    Ok(line)
}

/// Wait a little for the rest of an answer; whether it is whole.
fn read_answer(context: &Context, pool: &str, input: &mut BufReader<UnixStream>, line: &mut Vec<u8>) -> Result<bool> {
    if input.buffer().is_empty() {
        // A read would begin its time anew at each signal.
        let pause = Timespec { tv_sec: 0, tv_nsec: i64::from(PAUSE.subsec_nanos()) };
        let come = poll(&mut [PollFd::new(input.get_ref(), PollFlags::IN)], Some(&pause));
        if signals::end_came() {
            return Err(interrupted(&context.patience, format!("service of pool {pool}")));
        }
        if !matches!(come, Ok(ready) if ready > 0) {
            return Ok(false);
        }
    }
    // What there is of a line stays for the next time.
    match input.by_ref().take(ANSWER_BYTES_MAX).read_until(b'\n', line) {
        Ok(_) => Ok(true),
        Err(error) if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Err(silent(context, pool, error))
        }
        Err(_) => Ok(false),
    }
}

/// Do what may wait for the filesystem in which `thing` is. One of a service that does not answer is not even asked: the kernel may not
/// let go of who waits for it before it does.
pub fn within<T: Send + 'static>(
    context: &Context,
    thing: &Path,
    act: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let table = mount_table(&*context.host)?;
    let wait = context.patience.begin();
    for entry in table.iter().filter(|entry| thing.starts_with(&entry.mount_point)) {
        let Some(instance) = entry.instance() else { continue };
        for pool in context.pools()?.peek_all::<PoolRecord>()? {
            let is_its = pool.instances.iter().any(|known| known.spec.instance == instance);
            if is_its && pool.service_alive(&*context.host) == Some(true) {
                // What a service that is just ending leaves there answers with an error.
                if let Err(failure) = ping_within(context, &pool.name, &wait)
                    && !crate::service::is_ending_within(context, &pool, &wait)?
                {
                    return Err(failure.of(thing.display().to_string()));
                }
            }
        }
    }
    let (send, done) = sync_channel(1);
    // Should it never end, it ends with this process.
    std::thread::spawn(move || send.send(act()));
    let goes_on = || {
        if !wait.is_over() {
            return Ok(());
        }
        // The command was asked to end before, and what it cleans up has little time.
        if context.patience.is_given_up() {
            return Err(interrupted(&context.patience, thing.display().to_string()));
        }
        let cause = format!("its filesystem does not answer within {}", within_text(context));
        let remedy = "`poolfs status` says which service does not answer";
        Err(Failure::new(thing.display().to_string(), cause, remedy).with_code(Code::NoAnswer))
    };
    receive(&context.patience, &done, thing, goes_on)
}

/// Do what may wait for the service of a pool, as long as that gives signs of life.
pub fn while_alive<T: Send + 'static>(
    context: &Context,
    pool: &str,
    thing: &Path,
    act: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    ping(context, pool)?;
    let (send, done) = sync_channel(1);
    std::thread::spawn(move || send.send(act()));
    let mut wait = context.patience.begin();
    let done = receive(&context.patience, &done, thing, || {
        if wait.is_half_over() {
            ping_within(context, pool, &wait)?;
            wait.heard();
        }
        Ok(())
    })?;
    wait.heard();
    Ok(done)
}

/// Kill a child of this process. One that waits for a filesystem that does not answer ends when that does.
pub fn end_child(context: &Context, child: &mut Child) {
    let _ = child.kill();
    let wait = context.patience.begin();
    while child.try_wait().is_ok_and(|status| status.is_none()) && !wait.is_over() {
        std::thread::sleep(PAUSE);
    }
}

/// Wait for a message as long as `goes_on` says, and until this process is asked to end.
fn receive<T>(
    patience: &Patience,
    messages: &Receiver<T>,
    thing: &Path,
    mut goes_on: impl FnMut() -> Result<()>,
) -> Result<T> {
    loop {
        match messages.recv_timeout(PAUSE) {
            Ok(message) => return Ok(message),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::new(thing.display().to_string(), "whoever waited for it has ended", ""));
            }
            Err(RecvTimeoutError::Timeout) if signals::end_came() => {
                return Err(interrupted(patience, thing.display().to_string()));
            }
            Err(RecvTimeoutError::Timeout) => goes_on()?,
        }
    }
}

/// Take a lock (`flock`) on what is open there. Another command that has it is waited for as long as it is not stopped: it has a
/// limit of its own.
pub fn lock(
    patience: &Patience,
    host: &dyn poolfs_host::Host,
    path: &Path,
    file: File,
    operation: FlockOperation,
) -> Result<File> {
    let at_once = match operation {
        FlockOperation::LockShared => FlockOperation::NonBlockingLockShared,
        _ => FlockOperation::NonBlockingLockExclusive,
    };
    match rustix::fs::flock(&file, at_once) {
        Ok(()) => return Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => {}
        Err(errno) => return Err(Failure::file(path, errno)),
    }
    let identity = file.metadata().map_err(|error| Failure::file(path, error))?;
    let (send, locked) = sync_channel(1);
    // Those who wait for it take turns. Nobody may be waiting any more: then it is given up again.
    std::thread::spawn(move || send.send(rustix::fs::flock(&file, operation).map(|()| file)));
    let (begun, mut wait, mut is_told) = (Instant::now(), patience.begin(), false);
    let goes_on = || {
        let table = host.read_text(Path::new("/proc/locks")).unwrap_or_default();
        let holders: Vec<Holder> =
            holders(&table, identity.dev(), identity.ino()).into_iter().map(|pid| Holder::look_at(host, pid)).collect();
        match holders.iter().find(|holder| holder.is_stopped) {
            None if !holders.is_empty() => wait.heard(),
            stopped if wait.is_over() => return Err(stopped_or_unseen(path, stopped)),
            _ => {}
        }
        if let Some(holder) = holders.first().filter(|_| begun.elapsed() >= patience.limit() / 2) {
            tell_once(&mut is_told, || format!("waiting for process {} ({})", holder.pid, holder.command));
        }
        Ok(())
    };
    let locked = receive(patience, &locked, path, goes_on)?;
    locked.map_err(|errno| Failure::file(path, errno))
}

/// The failure that somebody does not give a lock back.
fn stopped_or_unseen(path: &Path, stopped: Option<&Holder>) -> Failure {
    let (cause, remedy) = match stopped {
        Some(Holder { pid, command, .. }) => (
            format!("process {pid} ({command}) works on it, and is stopped"),
            format!("`kill -CONT {pid}` lets it go on; `kill -KILL {pid}` ends it"),
        ),
        None => (
            "somebody works on it who cannot be seen from here, perhaps in another process namespace".to_owned(),
            "try again, with a longer --wait".to_owned(),
        ),
    };
    Failure::in_use(path.display().to_string(), cause, remedy)
}

/// A process that has a lock.
struct Holder {
    pid: u32,
    command: String,
    is_stopped: bool,
}

impl Holder {
    fn look_at(host: &dyn poolfs_host::Host, pid: u32) -> Holder {
        let text = host.read_text(Path::new(&format!("/proc/{pid}/cmdline"))).unwrap_or_default();
        let words = text.trim_end_matches('\0').replace(|c: char| c.is_control(), " ");
        Holder { pid, command: words.chars().take(COMMAND_WIDTH).collect(), is_stopped: is_stopped(host, pid) }
    }
}

/// The processes that have locks on a file, by the text of `/proc/locks`; not those that wait for one.
fn holders(table: &str, device: u64, inode: u64) -> Vec<u32> {
    let file = format!("{:02x}:{:02x}:{inode}", rustix::fs::major(device), rustix::fs::minor(device));
    let holder = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let (kind, pid) = (fields.next()?, fields.nth(2)?.parse().ok()?);
        (kind == "FLOCK" && fields.next()? == file && pid != std::process::id()).then_some(pid)
    };
    table.lines().filter_map(holder).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_host::LinuxHost;
    use std::io::Write;

    #[test]
    fn holders_of_a_lock_are_found_by_the_file() {
        let table = "1: FLOCK  ADVISORY  WRITE 4000042 08:01:1311 0 EOF\n\
                     1: -> FLOCK  ADVISORY  WRITE 4000043 08:01:1311 0 EOF\n\
                     2: POSIX  ADVISORY  READ 4000044 08:01:1311 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 4000045 08:02:1311 0 EOF\nbroken\n";
        assert_eq!(holders(table, rustix::fs::makedev(8, 1), 1311), [4_000_042]);
    }

    #[test]
    fn whoever_is_alive_is_waited_for_and_nobody_else() {
        let place = tempfile::tempdir().expect("a directory");
        let mut context = Context::for_test(place.path(), poolfs_host::RecordingHost::new());
        context.patience = Patience::new(Duration::from_millis(200));
        std::fs::create_dir_all(&context.run).expect("made");
        let path = crate::service::control_socket(&context, "web");
        let listener = std::os::unix::net::UnixListener::bind(path).expect("bound");
        std::thread::scope(|scope| {
            // It answers when it was asked three times whether it is alive.
            scope.spawn(|| {
                let accept = || {
                    let (stream, _) = listener.accept().expect("somebody asks");
                    let mut asked = String::new();
                    BufReader::new(&stream).read_line(&mut asked).expect("a line");
                    (stream, asked)
                };
                let (mut busy, asked) = accept();
                assert!(asked.contains("shutdown"), "{asked}");
                for time in 1..=3 {
                    let (mut stream, asked) = accept();
                    assert!(asked.contains("ping"), "{asked}");
                    if time == 3 {
                        busy.write_all(b"at last\n").expect("taken");
                    }
                    stream.write_all(b"{\"answer\":\"done\"}\n").expect("taken");
                }
            });
            let mut wait = context.patience.begin();
            let mut input = send(&context, "web", &Command::Shutdown, &[], &wait).expect("sent");
            let answer = answer_line(&context, "web", &mut input, (Until::Done, &Command::Ping), &mut wait);
            assert_eq!(answer.expect("alive"), b"at last\n");
        });
        // Nobody accepts from here on.
        let failure = crate::service::status(&context, "web").expect_err("silent");
        assert!(failure.to_string().contains("does not answer"), "{failure}");
        assert_eq!(failure.code(), Code::NoAnswer);
    }

    #[test]
    fn all_steps_of_a_command_have_one_limit() {
        const LIMIT: Duration = Duration::from_secs(4);
        let place = tempfile::tempdir().expect("a directory");
        let command = || {
            let mut context = Context::for_test(place.path(), poolfs_host::RecordingHost::new());
            context.patience = Patience::new(LIMIT);
            context
        };
        let context = command();
        std::fs::create_dir_all(&context.run).expect("made");
        let path = crate::service::control_socket(&context, "web");
        let listener = std::os::unix::net::UnixListener::bind(path).expect("bound");
        let order = std::sync::Mutex::new(Vec::new());
        let ended = |who: &'static str| order.lock().expect("no panic").push(who);
        let (command, ended, order, listener) = (&command, &ended, &order, &listener);
        std::thread::scope(|scope| {
            // It answers once, late, and never again.
            scope.spawn(move || {
                let (stream, _) = listener.accept().expect("somebody asks");
                std::thread::sleep(LIMIT * 3 / 4);
                // Whoever begins now has all of its time.
                scope.spawn(move || {
                    ping(&command(), "web").expect_err("silent");
                    ended("witness");
                });
                let _witness = listener.accept().expect("the witness asks");
                (&stream).write_all(b"{\"answer\":\"done\"}\n").expect("taken");
                let _command = listener.accept().expect("it asks once more");
                while order.lock().expect("no panic").len() < 2 {
                    std::thread::sleep(PAUSE);
                }
            });
            ping(&context, "web").expect("late");
            let failure = ping(&context, "web").expect_err("silent");
            assert_eq!(failure.code(), Code::NoAnswer);
            ended("command");
        });
        let order = order.lock().expect("no panic");
        assert_eq!(*order, ["command", "witness"], "the second step had all of the time once more");
    }

    #[test]
    fn a_lock_goes_from_one_to_the_next() {
        let place = tempfile::tempdir().expect("a directory");
        let open = || File::open(place.path()).expect("opened");
        let patience = Patience::new(Duration::from_secs(60));
        let take = || lock(&patience, &LinuxHost, place.path(), open(), FlockOperation::LockExclusive).expect("locked");
        let first = take();
        std::thread::scope(|scope| {
            let second = scope.spawn(take);
            drop(first);
            drop(second.join().expect("no panic"));
        });
        drop(take());
    }

    #[test]
    fn what_is_done_at_once_is_not_waited_for() {
        let place = tempfile::tempdir().expect("a directory");
        let host = poolfs_host::RecordingHost::new();
        host.set_file("/proc/self/mountinfo", "");
        let context = Context::for_test(place.path(), host);
        assert_eq!(within(&context, Path::new("/"), || 7).expect("done"), 7);
    }
}
