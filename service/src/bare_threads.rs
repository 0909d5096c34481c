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

/// Most of them that a service has because of what programs keep. A mount has few (`notify`), whatever it is asked for.
const PLACES_MAX: usize = 512;

/// The standard descriptors come first.
const STANDARD: RawFd = 2;

static LAUNCHER: OnceLock<Mutex<Launcher>> = OnceLock::new();
static PLACES: Places = Places { taken: AtomicUsize::new(0), most: PLACES_MAX };

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

/// So many that there may be at a time.
struct Places {
    taken: AtomicUsize,
    most: usize,
}

impl Places {
    fn take(&'static self) -> io::Result<Place> {
        let more = |now| (now < self.most).then_some(now + 1);
        let taken = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken
            .map(|_| Place(self))
            .map_err(|_| io::Error::other("programs keep as many threads of the service as may be"))
    }
}

/// Held by one of those threads of which there may be no more than so many. The others are one for each mount and core group.
pub(crate) struct Place(&'static Places);

impl Place {
    /// Takes one.
    ///
    /// # Errors
    /// When there is none.
    pub fn take() -> io::Result<Self> {
        PLACES.take()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
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
/// When there is no thread to be had.
pub(crate) fn spawn(
    name: String,
    descriptor: BorrowedFd<'_>,
    work: impl FnOnce(OwnedFd) + Send + 'static,
) -> io::Result<()> {
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
    fn a_thread_has_the_descriptor_that_it_is_started_with() {
        let (mut own, other) = UnixStream::pair().expect("sockets");
        let (begun, has_begun) = channel();
        let work = move |descriptor| begun.send(UnixStream::from(descriptor).write_all(b"x")).expect("waited for");
        spawn("one".into(), other.as_fd(), work).expect("started");
        has_begun.recv().expect("run").expect("written");
        let mut got = [0];
        own.read_exact(&mut got).expect("read");
        assert_eq!(got, *b"x");
    }

    #[test]
    fn there_are_no_more_places_than_may_be_taken() {
        static FEW: Places = Places { taken: AtomicUsize::new(0), most: 2 };
        let first = FEW.take().expect("one");
        let second = FEW.take().expect("another one");
        assert!(FEW.take().is_err());
        drop(first);
        let third = FEW.take().expect("what is given up is free");
        assert!(FEW.take().is_err());
        drop((second, third));
    }
}
