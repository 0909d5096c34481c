//! Who waits for files that the kernel keeps locked, before it is told of their content: a thread for each such file, up to a bound.
//!
//! A program can keep a file locked for any time, by writing to it from memory that does not come. Its own file's users wait for it then, and no
//! others. The threads are not waited for at the end of the mount either: the kernel does not let go of them before. So they have
//! none of the service's descriptors (`bare_threads`), and what is to be told then is told by one thread of the mount.

use super::later::{ContentJob, Later};
use super::worker::Worker;
use super::{JOBS_MAX, KernelCache, note, spawn_bare};
use crate::sync::lock;
use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use tracing::warn;

/// Files of a mount that are waited for at a time.
const FILES_MAX: usize = 8;

/// What waits for one of them.
const FILE_JOBS_MAX: usize = JOBS_MAX / FILES_MAX;

/// A thread that has had no file to wait for for so long ends.
const KEPT_FOR: Duration = Duration::from_secs(5);

/// What is told when a file is unlocked.
pub struct ToldUnlocked {
    done: Receiver<()>,
    since: Instant,
}

impl ToldUnlocked {
    /// Waits until that is done, or the file has been waited for so long; whether it is done.
    #[must_use]
    pub fn is_done_within(&self, most: Duration) -> bool {
        self.done.recv_timeout(most.saturating_sub(self.since.elapsed())) != Err(RecvTimeoutError::Timeout)
    }
}

/// A file that is waited for.
struct Waiting {
    since: Instant,
    jobs: Vec<(ContentJob, Sender<()>)>,
}

#[derive(Default)]
struct Files {
    /// By number; no more than [`FILES_MAX`].
    waiting: HashMap<u64, Waiting>,
    /// Those of them that no thread waits for yet.
    unattended: VecDeque<u64>,
    /// As many as [`FILES_MAX`] at most.
    threads: usize,
    /// Threads that have no file.
    idle: usize,
    /// The mount is at its end.
    ended: bool,
}

struct Shared {
    name: String,
    files: Mutex<Files>,
    changed: Condvar,
    teller: Weak<Worker<Later>>,
}

/// The files of a mount that are waited for.
pub(super) struct Unlocking {
    shared: Arc<Shared>,
    kernel: Arc<dyn KernelCache>,
}

impl Unlocking {
    pub fn new(name: String, kernel: &Arc<dyn KernelCache>, teller: &Arc<Worker<Later>>) -> Self {
        let (files, changed) = (Mutex::default(), Condvar::new());
        let shared = Shared { name, files, changed, teller: Arc::downgrade(teller) };
        Self { shared: Arc::new(shared), kernel: Arc::clone(kernel) }
    }

    /// Has this told when the file has been unlocked once from now on; nothing when there is too much to wait for.
    pub fn tell(&self, number: u64, job: ContentJob) -> Option<ToldUnlocked> {
        let (end, done) = channel();
        let mut files = lock(&self.shared.files);
        if let Some(waiting) = files.waiting.get_mut(&number) {
            let has_room = waiting.jobs.len() < FILE_JOBS_MAX;
            return has_room.then(|| {
                waiting.jobs.push((job, end));
                ToldUnlocked { done, since: waiting.since }
            });
        }
        if files.waiting.len() >= FILES_MAX {
            return None;
        }
        // One that is started by a thread without descriptors has none either.
        if !self.shared.teller.upgrade().is_some_and(|teller| teller.has_thread()) {
            return None;
        }
        // There is a thread for each of the unattended: where there are as many as may be, one of them is just done with its file.
        if files.idle > files.unattended.len() || files.threads == FILES_MAX {
            self.shared.changed.notify_one();
        } else {
            let shared = Arc::clone(&self.shared);
            let started = spawn_bare(&self.kernel, shared.name.clone(), Box::new(move |kernel| shared.attend(kernel)));
            if let Err(error) = started {
                warn!(name = self.shared.name, %error, "no thread for notifications of the kernel");
                return None;
            }
            files.threads += 1;
        }
        let since = Instant::now();
        files.waiting.insert(number, Waiting { since, jobs: vec![(job, end)] });
        files.unattended.push_back(number);
        Some(ToldUnlocked { done, since })
    }
}

impl Drop for Unlocking {
    fn drop(&mut self) {
        lock(&self.shared.files).ended = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    /// A thread: waits for one file after the other.
    fn attend(&self, kernel: &dyn KernelCache) {
        while let Some(number) = self.next_file() {
            while let Some(jobs) = self.next_jobs(number) {
                note(kernel.await_unlocked(number));
                // With the mount there is nothing more to tell.
                let Some(teller) = self.teller.upgrade() else { continue };
                jobs.into_iter().for_each(|(job, done)| teller.order(Later::Content(number, job), done));
            }
        }
    }

    /// One that no other thread waits for; nothing when there is none for long, or no more will come.
    fn next_file(&self) -> Option<u64> {
        let mut files = lock(&self.files);
        files.idle += 1;
        let is_idle = |files: &mut Files| files.unattended.is_empty() && !files.ended;
        let waited = self.changed.wait_timeout_while(files, KEPT_FOR, is_idle);
        files = waited.unwrap_or_else(PoisonError::into_inner).0;
        files.idle -= 1;
        let next = files.unattended.pop_front();
        files.threads -= usize::from(next.is_none());
        next
    }

    /// What came while the last was waited for; nothing any more, and then the file is no longer waited for.
    fn next_jobs(&self, number: u64) -> Option<Vec<(ContentJob, Sender<()>)>> {
        let mut files = lock(&self.files);
        let jobs = files.waiting.get_mut(&number).map(|waiting| {
            waiting.since = Instant::now();
            std::mem::take(&mut waiting.jobs)
        });
        let jobs = jobs.filter(|jobs| !jobs.is_empty());
        if jobs.is_none() {
            files.waiting.remove(&number);
        }
        jobs
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Gate;
    use super::*;
    use crate::notify::{CoreGroups, Job, Notifications};
    use std::sync::mpsc::RecvTimeoutError::Timeout;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_file_that_stays_locked_holds_up_no_other_and_what_waits_is_bounded() {
        let ((entered, has_entered), (let_go, open)) = (channel(), channel());
        let notifications = Notifications::new("x", Gate::new(entered, open), &CoreGroups::of_cpus(&[]));
        let tell =
            |number| notifications.tell_unlocked(number, move || Some(Job { number, pages: false, grown_to: None }));
        let first = tell(7).expect("room");
        has_entered.recv().expect("it waits for it");
        assert!(tell(8).expect("room").is_done_within(LONG), "another file");
        assert!(!first.is_done_within(Duration::ZERO));
        let later = tell(7).expect("room");
        assert_eq!(later.done.try_recv().err().map(|_| ()), Some(()));
        assert_eq!(later.done.recv_timeout(Duration::from_millis(1)), Err(Timeout));
        let more = (0..FILE_JOBS_MAX - 1).map(|_| tell(7).expect("room")).collect::<Vec<_>>();
        assert!(tell(7).is_none(), "too many for one file");
        // Once for those that came first, and once for all others.
        let_go.send(()).expect("it waits");
        assert!(first.is_done_within(LONG));
        has_entered.recv().expect("it waits for it again");
        let_go.send(()).expect("it waits");
        assert!(later.is_done_within(LONG) && more.iter().all(|told| told.is_done_within(LONG)));
    }

    #[test]
    fn the_end_of_a_mount_does_not_wait_for_a_file_that_stays_locked() {
        let ((entered, has_entered), (let_go, open)) = (channel(), channel());
        let notifications = Notifications::new("x", Gate::new(entered, open), &CoreGroups::of_cpus(&[]));
        let told = notifications.tell_unlocked(7, || None).expect("room");
        has_entered.recv().expect("it waits for it");
        drop(notifications);
        let_go.send(()).expect("it still waits");
        assert!(told.is_done_within(LONG));
    }
}
