//! Access to the host's files from a confined service, for the few operations that need it.
//!
//! A confined service has a mount namespace of its own with an empty root (`confinement/root.rs`), in which every path that its
//! layers, fronts and parsers come to use leads nowhere. Two threads were started before ([`Outside`]), and stay where the host's files are. They
//! start a thread for every operation that is passed to [`outside`], so that none waits for another. What an operation does is
//! said where it is called, and [`Deed`] lists them all: none takes a path that was read from a branch, and none opens what a
//! client names. Branches that are directories of the host are not among them: they come as descriptors (`stack/sources/directory.rs`).
//!
//! A process that is not confined, as those of most tests, does these operations itself.

use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::{io, thread};
use tracing::{debug, error};

/// What is done outside, and whose paths it is done with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Deed {
    /// Mounts an instance, or unmounts it: the control side's path.
    Mount,
    /// Looks at what is mounted at the control side's path, and at the directories that lead a client to a mount, from its root on
    /// (`queue_front/reach.rs`): nothing of them is opened, and no filesystem asked
    /// that a client may have made.
    Reach,
    /// Mounts and unmounts the memory that outlives the service: below the configured directory of sockets.
    Memory,
    /// Makes the file for the archive of a layer, which must not be there before: the control side's path.
    Archive,
    /// Mounts a tree of a cluster: loads Ceph's library and reads its configuration and a key, at the control side's paths or at Ceph's own. The threads
    /// that the library starts for it stay there.
    Cluster,
}

/// Where operations are done that the rest of the service cannot do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outside {
    /// Where mounts can be made.
    Host,
    /// Where connections by network can be made, and libraries be loaded.
    Network,
}

impl Deed {
    fn place(self) -> Outside {
        match self {
            Self::Mount | Self::Reach | Self::Memory | Self::Archive => Outside::Host,
            Self::Cluster => Outside::Network,
        }
    }
}

type Work = Box<dyn FnOnce() + Send>;

impl Outside {
    /// To whom work is given that is done there.
    fn sender(self) -> &'static OnceLock<Sender<Work>> {
        static HOST: OnceLock<Sender<Work>> = OnceLock::new();
        static NETWORK: OnceLock<Sender<Work>> = OnceLock::new();
        match self {
            Self::Host => &HOST,
            Self::Network => &NETWORK,
        }
    }
}

/// Has everything that is passed to [`outside`] from now on and done at `place` done by threads that begin where the calling thread is now.
///
/// # Errors
/// When there is no thread to be had, or `begin` fails, which is the first that it does.
pub(crate) fn stay(place: Outside, begin: impl FnOnce() -> anyhow::Result<()> + Send + 'static) -> anyhow::Result<()> {
    let (sender, works) = channel::<Work>();
    let (begun, answer) = channel();
    thread::Builder::new().name("outside".into()).spawn(move || {
        let has_begun = begin();
        let is_ready = has_begun.is_ok();
        if begun.send(has_begun).is_err() || !is_ready {
            return;
        }
        for work in works {
            // Without a thread the answer's sender is dropped, which says that it was not done.
            if let Err(error) = thread::Builder::new().name("outside".into()).spawn(work) {
                error!(%error, "no thread for a deed on the host");
            }
        }
    })?;
    answer.recv()??;
    place.sender().set(sender).map_err(|_| anyhow::anyhow!("it was left before"))
}

fn lost() -> io::Error {
    io::Error::other("no thread of the service could do that on the host; is it out of memory or of threads?")
}

/// Does `work` where the host's files are, and waits for it.
///
/// # Errors
/// When no thread can be had for it, or it panicked.
pub(crate) fn outside<T: Send + 'static>(deed: Deed, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let Some(outside) = deed.place().sender().get() else { return Ok(work()) };
    debug!(?deed, "on the host");
    let (done, answer) = channel();
    let told = outside.send(Box::new(move || {
        let _ = done.send(work());
    }));
    told.map_err(|_| lost())?;
    answer.recv().map_err(|_| lost())
}

/// Has `work` done there, and does not wait for it: it says itself when it is done. Where no thread can be had later, it is dropped.
///
/// # Errors
/// When nothing is done there any more.
pub(crate) fn outside_later(deed: Deed, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    match deed.place().sender().get() {
        Some(outside) => outside.send(Box::new(work)).map_err(|_| lost()),
        None => thread::Builder::new().name("outside".into()).spawn(work).map(drop),
    }
}
