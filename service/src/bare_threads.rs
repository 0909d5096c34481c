//! Threads that have none of the service's descriptors, but the one that each is started with.
//!
//! A program can have the kernel keep a thread that tells it something for any time (`KernelCache::await_unlocked`, names). A killed service is not
//! gone before, and what that thread shares with the others is not closed: a branch would stay locked, and in use. So it shares nothing. Such
//! threads are started by one that was left behind when the service began, as that of `outside`, and use its table of descriptors: in it
//! are the standard ones, for messages, and those of mounts.
//!
//! A process that is not confined, as those of most tests, starts them itself, with its own table.

use crate::sync::lock;
use nix::sched::{CloneFlags, unshare};
use poolfs_service_protocol::{Receiver, send};
use std::fs::{read_dir, read_link};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock};
use std::{io, thread};

/// Most of them in a service. A mount has few (`notify`), whatever it is asked for.
const THREADS_MAX: usize = 512;

/// The standard descriptors come first.
const STANDARD: RawFd = 2;

static LAUNCHER: OnceLock<Mutex<Launcher>> = OnceLock::new();
static THREADS: AtomicUsize = AtomicUsize::new(0);

type Work = Box<dyn FnOnce(OwnedFd) + Send>;

struct Launch {
    name: String,
    work: Work,
    started: Sender<io::Result<()>>,
}

/// The way to the thread that starts the others. Descriptors come by the connection, in the order of the launches.
struct Launcher {
    launches: Sender<Launch>,
    descriptors: UnixStream,
}

/// One of them; it counts as long as this is there.
struct Counted;

impl Counted {
    fn new() -> io::Result<Self> {
        let counted =
            THREADS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| (now < THREADS_MAX).then_some(now + 1));
        counted.map(|_| Self).map_err(|_| io::Error::other("the kernel keeps as many threads of the service as may be"))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        THREADS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Leaves a thread without descriptors, by which all that are passed to [`spawn`] are started.
///
/// # Errors
/// When there is no thread to be had, or `begin` fails, which is the last that it does before.
pub(crate) fn leave_one(begin: impl FnOnce() -> anyhow::Result<()> + Send + 'static) -> anyhow::Result<()> {
    let (descriptors, received) = UnixStream::pair()?;
    let (launches, asked) = channel::<Launch>();
    let (begun, answer) = channel();
    let here = received.as_raw_fd();
    thread::Builder::new().name("bare".into()).spawn(move || {
        let has_begun = leave_descriptors(&received).map_err(anyhow::Error::from).and_then(|()| begin());
        let is_ready = has_begun.is_ok();
        if begun.send(has_begun).is_err() || !is_ready {
            return;
        }
        let mut received = Receiver::new(received);
        for Launch { name, work, started } in asked {
            let descriptor = received.line(1).and_then(|(_, mut one)| one.pop().ok_or_else(lost));
            let spawn = |descriptor| thread::Builder::new().name(name).spawn(move || work(descriptor)).map(drop);
            let _ = started.send(descriptor.and_then(spawn));
        }
    })?;
    answer.recv()??;
    // The thread has it in its own table.
    nix::unistd::close(here)?;
    LAUNCHER.set(Mutex::new(Launcher { launches, descriptors })).map_err(|_| anyhow::anyhow!("one was left before"))
}

/// Gives the calling thread a table of descriptors of its own, with this one and the standard ones.
fn leave_descriptors(kept: &UnixStream) -> io::Result<()> {
    unshare(CloneFlags::CLONE_FILES)?;
    // No link can be followed there.
    let own = Path::new("/proc").join(read_link("/proc/thread-self")?);
    let listed: Vec<RawFd> =
        read_dir(own.join("fd"))?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    // That of the listing is among them, and closed before.
    listed.iter().filter(|&&one| one > STANDARD && one != kept.as_raw_fd()).for_each(|&one| {
        let _ = nix::unistd::close(one);
    });
    Ok(())
}

fn lost() -> io::Error {
    io::Error::other("no thread of the service could be started; is it out of memory, of threads or of open files?")
}

/// Starts a thread that has a copy of this descriptor, and no other.
///
/// # Errors
/// When there is no thread to be had, or there are too many.
pub(crate) fn spawn(
    name: String,
    descriptor: BorrowedFd<'_>,
    work: impl FnOnce(OwnedFd) + Send + 'static,
) -> io::Result<()> {
    let counted = Counted::new()?;
    let work = move |descriptor| {
        let _counted = counted;
        work(descriptor);
    };
    let Some(launcher) = LAUNCHER.get() else {
        let descriptor = descriptor.try_clone_to_owned()?;
        return thread::Builder::new().name(name).spawn(move || work(descriptor)).map(drop);
    };
    let (started, answer) = channel();
    {
        let launcher = lock(launcher);
        send(&launcher.descriptors, b"\n", &[descriptor])?;
        launcher.launches.send(Launch { name, work: Box::new(work), started }).map_err(|_| lost())?;
    }
    answer.recv().map_err(|_| lost())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    #[test]
    fn a_thread_has_the_descriptor_that_it_is_started_with_and_no_more_than_may_be_are_started() {
        let (mut own, other) = UnixStream::pair().expect("sockets");
        let (begun, has_begun) = channel();
        let work = move |descriptor| begun.send(UnixStream::from(descriptor).write_all(b"x")).expect("waited for");
        spawn("one".into(), other.as_fd(), work).expect("started");
        has_begun.recv().expect("run").expect("written");
        let mut got = [0];
        own.read_exact(&mut got).expect("read");
        assert_eq!(got, *b"x");
        // Until those that were started have ended, and all places are taken.
        let mut all = Vec::new();
        while spawn("more".into(), other.as_fd(), drop).is_ok() {
            all.extend(std::iter::from_fn(|| Counted::new().ok()));
        }
        assert!(!all.is_empty() && all.len() <= THREADS_MAX);
        all.pop();
        spawn("again".into(), other.as_fd(), drop).expect("started");
    }
}
