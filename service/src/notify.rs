//! Notifications to the kernel: invalidation of what it may still show although it has changed.
//!
//! **The danger of a deadlock.** A notification about pages may wait for pages that a READ or WRITE of the kernel holds locked.
//! One about a name may wait for the directory, which the kernel holds locked while it looks up an unknown name in it, lists it
//! or changes it. One about a listing may wait for whoever is being shown it. So no handler of a request of the kernel may wait
//! for a notification (it would wait for itself). Requests of the user-level path do: they answer only when the kernel can no
//! longer show the old state.
//!
//! **Pages.** They are notified by the thread that serves the request, with no lock held but that of the notifications about that
//! file's content: waking another thread takes several times as long. It waits for handlers of the kernel's requests alone, which
//! take no such lock.
//!
//! **Names and listings.** A program can keep a directory locked, by listing it into memory that does not come. So these
//! notifications are sent by threads of their own, and the wait for one is bounded: a directory that nobody can change hurts its
//! own users, not the whole mount for good. There is one such thread for each core group, because waking one elsewhere takes
//! long. Abandoned jobs stay in the queues, which are bounded. Where one is full, nobody waits at all, and what there was to tell
//! is told when the queue has been worked off, each name once. What nobody waits for is sent by threads of their own, too.
//!
//! **Sizes after SETATTR and LINK.** The kernel holds the file locked until it has applied the answer. Who waits for that waits for a thread of its
//! own for each file, and for a bounded time.
//!
//! **Attributes.** Dropping them neither waits nor locks anything, so it is done on the spot, by the thread that changed them.

mod kernel_cache;
mod later;
mod names;
mod unlocking;
mod worker;

use crate::nodes::held::NAMES_HELD_MAX;
pub use kernel_cache::{ByDescriptor, KernelCache};
use kernel_cache::{KernelWork, spawn, spawn_bare};
use later::{ContentLocks, Later, drop_arriving, drop_attributes};
use names::NamesWorker;
use poolfs_ipc::service::CoreGroups;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;
use tracing::warn;
pub use unlocking::ToldUnlocked;
use unlocking::Unlocking;
use worker::Worker;

const JOBS_MAX: usize = 1024;

/// Most names and listings that wait beside a full queue: as many as are noted one by one.
const OVERFLOW_MAX: usize = NAMES_HELD_MAX as usize;

/// How long a change waits until the kernel has taken the notification about its name.
const NAME_WAIT_MAX: Duration = Duration::from_secs(10);

/// How long whoever opens a file waits until the kernel has taken the notification about its size.
const CONTENT_WAIT_MAX: Duration = Duration::from_secs(1);

const PAGE: u64 = 4096;

/// How a name has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameChange {
    /// It stood for nothing, or nobody knows: what may be mounted on it stays.
    Appeared,
    /// What it stood for is no longer there, or elsewhere. What is mounted on it in other mount namespaces goes, as with any
    /// filesystem.
    Left,
}

/// A name that has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameJob {
    /// FUSE's number of the directory.
    pub parent: u64,
    /// The name.
    pub name: Box<[u8]>,
    /// What happened to it.
    pub change: NameChange,
}

/// What has changed in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectoryJob {
    /// What a name stands for.
    Name(NameJob),
    /// Which names there are, in the directory with this number of FUSE's.
    Listing(u64),
}

/// Content that has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// FUSE's number of the node.
    pub number: u64,
    /// Its pages are old.
    pub pages: bool,
    /// It has grown to this size, with this last byte, and somebody goes by the size the kernel knows.
    pub grown_to: Option<(u64, u8)>,
}

fn note(told: io::Result<()>) {
    if let Err(error) = told {
        warn!(%error, "the kernel did not take a notification");
    }
}

/// The way to the kernel, with the threads that tell it what nobody waits for, and names.
pub struct Notifications {
    later: Worker<Later>,
    unlocking: Unlocking,
    content_locks: Arc<ContentLocks>,
    /// by core groups
    names: Vec<NamesWorker>,
    groups: [u8; 64],
    kernel: Arc<dyn KernelCache>,
}

impl Notifications {
    /// Those of the instance with this name, for requests that are served by these core groups.
    #[must_use]
    pub fn new(instance: &str, kernel: Arc<dyn KernelCache>, groups: &CoreGroups) -> Self {
        let content_locks = Arc::new(ContentLocks::default());
        let locks = Arc::clone(&content_locks);
        let tell = move |kernel: &dyn KernelCache, job: &Later| job.tell(kernel, &locks);
        let of_names = |group| NamesWorker::new(format!("names-{instance}"), groups.cpus(group), &kernel);
        Self {
            later: Worker::new(format!("notify-{instance}"), &[], &kernel, spawn, tell),
            unlocking: Unlocking::new(instance, &kernel, &content_locks),
            content_locks,
            names: (0..groups.count()).map(of_names).collect(),
            groups: groups.table(),
            kernel,
        }
    }

    /// Tells the kernel of the content of a node and comes back when it has understood. What to tell, if anything, is asked for when nobody
    /// else tells of it, and returned. Not for handlers of FUSE requests.
    pub fn tell(&self, number: u64, job: impl FnOnce() -> Option<Job>) -> Option<Job> {
        let _one_at_a_time = self.content_locks.lock(number);
        let job = job()?;
        note(tell(self.kernel.as_ref(), job));
        Some(job)
    }

    /// The same without waiting; whether that will be done.
    #[must_use]
    pub fn tell_later(&self, number: u64, job: impl Fn() -> Option<Job> + Send + Sync + 'static) -> bool {
        self.send_later(Later::Content(number, Box::new(job)))
    }

    /// The same, and comes back when it is done, or after a while; whether it is done. Handlers of FUSE requests may wait for that: should what is
    /// waited for need one of them, it gets it then.
    #[must_use]
    pub fn tell_soon(&self, number: u64, job: impl Fn() -> Option<Job> + Send + Sync + 'static) -> bool {
        let asked = self.later.ask(Later::Content(number, Box::new(job)));
        asked.is_ok_and(|wait| wait.recv_timeout(CONTENT_WAIT_MAX) != Err(RecvTimeoutError::Timeout))
    }

    /// The same without waiting, when the kernel's lock of the file has been free; nothing when too many files are locked.
    #[must_use]
    pub fn tell_unlocked(
        &self,
        number: u64,
        job: impl Fn() -> Option<Job> + Send + Sync + 'static,
    ) -> Option<ToldUnlocked> {
        self.unlocking.tell(number, Box::new(job))
    }

    /// Who tells of names from where this thread is.
    fn names(&self) -> &NamesWorker {
        let group = self.groups.get(rustix::thread::sched_getcpu()).copied().map_or(0, usize::from);
        self.names.get(group).unwrap_or(&self.names[0])
    }

    /// Tells the kernel of names and listings and comes back when it has understood; whether it has, within the time. Not for
    /// handlers of FUSE requests.
    #[must_use]
    pub fn tell_names(&self, jobs: impl IntoIterator<Item = DirectoryJob>) -> bool {
        let jobs: Vec<_> = jobs.into_iter().collect();
        if jobs.is_empty() {
            return true;
        }
        let names = self.names();
        let (told, is_kept) = match names.worker.ask(jobs) {
            Ok(wait) => (wait.recv_timeout(NAME_WAIT_MAX) != Err(RecvTimeoutError::Timeout), true),
            Err(jobs) => (false, names.put_off(jobs)),
        };
        if !told {
            warn!(is_kept, "the kernel does not take a notification about a name: its directory is in use");
        }
        told
    }

    /// Has the kernel told of a name or a listing, without waiting; whether that will be done.
    #[must_use]
    pub fn tell_name_later(&self, job: DirectoryJob) -> bool {
        let names = self.names();
        names.worker.ask_later(vec![job]).or_else(|jobs| names.put_off(jobs).then_some(()).ok_or(())).is_ok()
    }

    /// Whom they go to.
    pub(crate) fn kernel(&self) -> &Arc<dyn KernelCache> {
        &self.kernel
    }

    /// The kernel drops the attributes of a node at once; whether it knows the node. For everybody.
    pub fn drop_attributes(&self, number: u64) -> bool {
        drop_attributes(self.kernel.as_ref(), number)
    }

    /// The kernel drops the attributes of a node that it gets to know just now, with an answer from before the change, for as long as
    /// `is_arriving`; whether that is done, within the time. Not for handlers of FUSE requests.
    #[must_use]
    pub fn drop_arriving(&self, number: u64, is_arriving: impl Fn() -> bool) -> bool {
        drop_arriving(self.kernel.as_ref(), number, &is_arriving)
    }

    /// The same, without waiting; whether it will be done.
    #[must_use]
    pub fn drop_arriving_later(&self, number: u64, is_arriving: impl Fn() -> bool + Send + Sync + 'static) -> bool {
        self.send_later(Later::Arriving(number, Box::new(is_arriving)))
    }

    fn send_later(&self, job: Later) -> bool {
        self.later.ask_later(job).is_ok()
    }
}

fn tell_directory(kernel: &dyn KernelCache, job: &DirectoryJob) -> io::Result<()> {
    match job {
        DirectoryJob::Name(NameJob { parent, name, change: NameChange::Appeared }) => kernel.expire_name(*parent, name),
        DirectoryJob::Name(NameJob { parent, name, change: NameChange::Left }) => kernel.invalidate_name(*parent, name),
        DirectoryJob::Listing(number) => kernel.invalidate(*number, 0, -1),
    }
}

pub(crate) fn tell(kernel: &dyn KernelCache, job: Job) -> io::Result<()> {
    if job.pages {
        kernel.invalidate(job.number, 0, -1)?;
    }
    if let Some((size, byte)) = job.grown_to
        && let Some(last) = size.checked_sub(1)
    {
        // What is stored may be old by the time it arrives, so its page is dropped again: the size stays.
        kernel.store(job.number, last, &[byte])?;
        let page = i64::try_from(last & !(PAGE - 1)).unwrap_or(0);
        kernel.invalidate(job.number, page, -1)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::names::Overflow;
    use super::*;
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread;

    #[derive(Clone, Default)]
    struct Recorder(Arc<Mutex<Vec<String>>>);

    impl KernelCache for Recorder {
        fn expires_names(&self) -> bool {
            true
        }

        fn drop_attributes(&self, number: u64) -> io::Result<bool> {
            self.0.lock().expect("unpoisoned").push(format!("drop {number}"));
            Ok(true)
        }

        fn invalidate(&self, number: u64, offset: i64, length: i64) -> io::Result<()> {
            self.0.lock().expect("unpoisoned").push(format!("invalidate {number} {offset} {length}"));
            Ok(())
        }

        fn store(&self, number: u64, offset: u64, bytes: &[u8]) -> io::Result<()> {
            self.0.lock().expect("unpoisoned").push(format!("store {number} {offset} {}", bytes.len()));
            Err(io::Error::other("no"))
        }

        fn invalidate_name(&self, parent: u64, name: &[u8]) -> io::Result<()> {
            self.0.lock().expect("unpoisoned").push(format!("invalidate {parent} {name:?}"));
            Ok(())
        }

        fn expire_name(&self, parent: u64, name: &[u8]) -> io::Result<()> {
            self.0.lock().expect("unpoisoned").push(format!("expire {parent} {name:?}"));
            Ok(())
        }

        fn prune(&self, numbers: &[u64]) -> io::Result<()> {
            self.0.lock().expect("unpoisoned").push(format!("prune {numbers:?}"));
            Ok(())
        }
    }

    #[test]
    fn telling_comes_back_after_the_kernel_was_told_and_survives_its_errors() {
        let recorder = Recorder::default();
        let notifications = Notifications::new("x", Arc::new(recorder.clone()), &CoreGroups::of_cpus(&[0, 1]));
        let _ = notifications.tell(7, || Some(Job { number: 7, pages: true, grown_to: None }));
        assert_eq!(*recorder.0.lock().expect("unpoisoned"), ["invalidate 7 0 -1"]);
        let _ = notifications.tell(8, || Some(Job { number: 8, pages: false, grown_to: Some((5000, b'x')) }));
        assert_eq!(notifications.tell(8, || None), None);
        let _ = notifications.tell(9, || Some(Job { number: 9, pages: true, grown_to: None }));
        assert_eq!(
            *recorder.0.lock().expect("unpoisoned"),
            ["invalidate 7 0 -1", "store 8 4999 1", "invalidate 9 0 -1"]
        );
    }

    /// Stays in the notification about node 7, and in the wait for it, until it is let go.
    pub(super) struct Gate {
        entered: Mutex<Sender<()>>,
        open: Mutex<Receiver<()>>,
        names: Mutex<Vec<String>>,
    }

    impl Gate {
        pub(in crate::notify) fn new(entered: Sender<()>, open: Receiver<()>) -> Arc<Self> {
            Arc::new(Self { entered: Mutex::new(entered), open: Mutex::new(open), names: Mutex::default() })
        }

        fn note(&self, what: &str, name: &[u8]) {
            self.names.lock().expect("unpoisoned").push(format!("{what} {}", name.escape_ascii()));
        }
    }

    impl KernelCache for Gate {
        fn expires_names(&self) -> bool {
            true
        }

        fn await_unlocked(&self, number: u64) -> io::Result<()> {
            self.invalidate(number, 0, 0)
        }

        fn drop_attributes(&self, _: u64) -> io::Result<bool> {
            Ok(true)
        }

        fn invalidate(&self, number: u64, _: i64, _: i64) -> io::Result<()> {
            if number == 7 {
                let _ = self.entered.lock().expect("unpoisoned").send(());
                let _ = self.open.lock().expect("unpoisoned").recv();
            }
            Ok(())
        }

        fn store(&self, _: u64, _: u64, _: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn invalidate_name(&self, _: u64, name: &[u8]) -> io::Result<()> {
            self.note("invalidate", name);
            Ok(())
        }

        fn expire_name(&self, _: u64, name: &[u8]) -> io::Result<()> {
            self.note("expire", name);
            Ok(())
        }

        fn prune(&self, _: &[u64]) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_to_tell_of_a_file_is_asked_for_when_nobody_else_tells_of_it() {
        let ((entered, has_entered), (let_go, open)) = (channel(), channel());
        let notifications = Notifications::new("x", Gate::new(entered, open), &CoreGroups::of_cpus(&[]));
        let pages = |number| Some(Job { number, pages: true, grown_to: None });
        let log = Mutex::new(Vec::new());
        let note = |what| log.lock().expect("unpoisoned").push(what);
        thread::scope(|scope| {
            scope.spawn(|| notifications.tell(7, || pages(7)));
            has_entered.recv().expect("it tells");
            let (starting, started) = channel();
            let (second, note) = (&notifications, &note);
            scope.spawn(move || {
                let _ = starting.send(());
                second.tell(7, || {
                    note("asked");
                    None
                })
            });
            started.recv().expect("it starts");
            // Of another file it is told meanwhile.
            assert!(notifications.tell(8, || pages(8)).is_some());
            note("let go");
            let_go.send(()).expect("it waits");
        });
        assert_eq!(*log.lock().expect("unpoisoned"), ["let go", "asked"]);
    }

    #[test]
    fn who_finds_too_many_names_waiting_does_not_wait_and_the_kernel_is_told_later() {
        let ((entered, has_entered), (let_go, open)) = (channel(), channel());
        let kernel = Gate::new(entered, open);
        let notifications = Notifications::new("x", kernel.clone(), &CoreGroups::of_cpus(&[]));
        assert!(notifications.tell_name_later(DirectoryJob::Listing(7)));
        has_entered.recv().expect("it tells");
        (0..JOBS_MAX).for_each(|_| assert!(notifications.tell_name_later(DirectoryJob::Listing(8))));
        let job = |name: &[u8], change| DirectoryJob::Name(NameJob { parent: 1, name: name.into(), change });
        assert!(!notifications.tell_names([job(b"a", NameChange::Left), job(b"b", NameChange::Appeared)]));
        assert!(!notifications.tell_names([job(b"a", NameChange::Appeared)]));
        assert!(notifications.tell_name_later(job(b"b", NameChange::Left)));
        assert_eq!(*kernel.names.lock().expect("unpoisoned"), [""; 0]);
        let_go.send(()).expect("it waits");
        // With its end all has been told.
        drop(notifications);
        let mut told = std::mem::take(&mut *kernel.names.lock().expect("unpoisoned"));
        told.sort();
        assert_eq!(told, ["invalidate a", "invalidate b"], "each once");
    }

    #[test]
    fn beside_a_full_queue_no_more_wait_than_may() {
        let overflow = Overflow::default();
        let listings = |from: usize, count: usize| (from..from + count).map(|at| DirectoryJob::Listing(at as u64));
        assert!(overflow.add(listings(0, OVERFLOW_MAX).collect()));
        assert!(!overflow.add(listings(0, 1).collect()));
        assert_eq!((overflow.take().len(), overflow.take().len()), (OVERFLOW_MAX, 0));
        assert!(overflow.add(listings(0, 1).collect()));
    }

    /// A kernel that knows a node from the second time on that it is told of it.
    #[derive(Default)]
    struct Late(std::sync::atomic::AtomicU64);

    impl KernelCache for Late {
        fn expires_names(&self) -> bool {
            true
        }

        fn drop_attributes(&self, _: u64) -> io::Result<bool> {
            Ok(self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst) >= 2)
        }

        fn invalidate(&self, _: u64, _: i64, _: i64) -> io::Result<()> {
            Ok(())
        }

        fn store(&self, _: u64, _: u64, _: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn invalidate_name(&self, _: u64, _: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn expire_name(&self, _: u64, _: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn prune(&self, _: &[u64]) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn who_changes_what_the_kernel_gets_to_know_just_now_tells_it_until_it_does_or_never_will() {
        let asked = |kernel: &Arc<Late>| kernel.0.load(std::sync::atomic::Ordering::SeqCst);
        let kernel = Arc::new(Late::default());
        let notifications = Notifications::new("x", kernel.clone(), &CoreGroups::of_cpus(&[]));
        assert!(notifications.drop_arriving(5, || true));
        assert_eq!(asked(&kernel), 3);
        let kernel = Arc::new(Late::default());
        let notifications = Notifications::new("x", kernel.clone(), &CoreGroups::of_cpus(&[]));
        assert!(notifications.drop_arriving(5, || false));
        assert_eq!(asked(&kernel), 1);
        assert!(notifications.drop_arriving_later(5, || true));
        drop(notifications);
        assert_eq!(asked(&kernel), 3, "what was to be done later is done by the end");
    }

    #[test]
    fn names_that_left_are_invalidated_others_expire_and_listings_are_dropped() {
        let recorder = Recorder::default();
        let notifications = Notifications::new("x", Arc::new(recorder.clone()), &CoreGroups::of_cpus(&[0, 1]));
        let job = |name: &[u8], change| DirectoryJob::Name(NameJob { parent: 1, name: name.into(), change });
        assert!(notifications.tell_names([job(b"a", NameChange::Appeared), job(b"b", NameChange::Left)]));
        assert!(notifications.drop_attributes(5));
        assert!(notifications.tell_names([DirectoryJob::Listing(6)]));
        let expected = ["expire 1 [97]", "invalidate 1 [98]", "drop 5", "invalidate 6 0 -1"];
        assert_eq!(*recorder.0.lock().expect("unpoisoned"), expected);
    }
}
