//! Who waits for files that the kernel keeps locked, before it is told of their content: a thread for each such file, up to a bound.
//!
//! A program can keep a file locked for any time, by writing to it from memory that does not come. Its own file's users wait for it then, and no
//! others. The threads are not waited for at the end of the mount either: the kernel does not let go of them before. So they have
//! none of the service's descriptors (`bare_threads`), and no part in anything whose end closes one: they know numbers of files alone. What is to
//! be told then is told, and dropped, by one more thread of the mount, or by whoever ends it.

use super::later::{ContentJob, ContentLocks, Later};
use super::{JOBS_MAX, KernelCache, note, spawn, spawn_bare};
use crate::bare_threads::Place;
use crate::sync::lock;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{io, mem};
use tracing::{error, warn};

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

type Asked = (ContentJob, Sender<()>);

/// A file that is waited for.
struct Waiting {
    since: Instant,
    /// What is to be told when the wait that has begun is over.
    awaited: Vec<Asked>,
    /// What has come since it began: for that it begins again.
    later: Vec<Asked>,
}

impl Waiting {
    fn new(asked: Asked) -> Self {
        Self { since: Instant::now(), awaited: Vec::new(), later: vec![asked] }
    }
}

#[derive(Default)]
struct Files {
    /// By number; no more than [`FILES_MAX`].
    waiting: HashMap<u64, Waiting>,
    /// Those of them that no thread waits for yet.
    unattended: VecDeque<u64>,
    /// What can be told now, each with its file's number. No more come as long as there are [`JOBS_MAX`].
    unlocked: Vec<(u64, Asked)>,
    /// As many as [`FILES_MAX`] at most.
    threads: usize,
    /// Threads that have no file.
    idle: usize,
    /// The mount is at its end: there are no jobs any more.
    ended: bool,
}

#[derive(Default)]
struct Shared {
    files: Mutex<Files>,
    /// For threads that wait for files.
    changed: Condvar,
    /// For the one that tells.
    is_unlocked: Condvar,
}

/// The files of a mount that are waited for.
pub(super) struct Unlocking {
    name: String,
    shared: Arc<Shared>,
    kernel: Arc<dyn KernelCache>,
    locks: Arc<ContentLocks>,
    /// The end of the thread that tells, which is started with the first file.
    teller: Mutex<Option<Receiver<()>>>,
}

impl Unlocking {
    pub fn new(instance: &str, kernel: &Arc<dyn KernelCache>, locks: &Arc<ContentLocks>) -> Self {
        let (name, kernel, locks) = (instance.to_owned(), Arc::clone(kernel), Arc::clone(locks));
        Self { name, shared: Arc::default(), kernel, locks, teller: Mutex::default() }
    }

    /// Has this told when the file has been unlocked once from now on; nothing when there is too much to wait for.
    pub fn tell(&self, number: u64, job: ContentJob) -> Option<ToldUnlocked> {
        let (end, done) = channel();
        let mut files = lock(&self.shared.files);
        if files.unlocked.len() >= JOBS_MAX {
            return None;
        }
        if let Some(waiting) = files.waiting.get_mut(&number) {
            let has_room = waiting.later.len() < FILE_JOBS_MAX;
            return has_room.then(|| {
                waiting.later.push((job, end));
                ToldUnlocked { done, since: waiting.since }
            });
        }
        if files.waiting.len() >= FILES_MAX {
            return None;
        }
        // There is a thread for each of the unattended: where there are as many as may be, one of them is just done with its file.
        if files.idle > files.unattended.len() || files.threads == FILES_MAX {
            self.shared.changed.notify_one();
        } else {
            if let Err(error) = self.start_teller().and_then(|()| self.start_thread()) {
                warn!(instance = self.name, %error, "no thread for notifications of the kernel");
                return None;
            }
            files.threads += 1;
        }
        let waiting = Waiting::new((job, end));
        let since = waiting.since;
        files.waiting.insert(number, waiting);
        files.unattended.push_back(number);
        Some(ToldUnlocked { done, since })
    }

    /// A thread that waits for files.
    fn start_thread(&self) -> io::Result<()> {
        let (place, shared) = (Place::take()?, Arc::clone(&self.shared));
        let work = move |kernel: &dyn KernelCache| {
            let _place = place;
            shared.attend(kernel);
        };
        spawn_bare(&self.kernel, format!("locked-{}", self.name), Box::new(work))
    }

    /// The thread that tells, unless it is there.
    fn start_teller(&self) -> io::Result<()> {
        let mut teller = lock(&self.teller);
        if teller.is_none() {
            let (shared, locks) = (Arc::clone(&self.shared), Arc::clone(&self.locks));
            let (ending, ended) = channel::<()>();
            let work = move |kernel: &dyn KernelCache| {
                let _ending = ending;
                while let Some(unlocked) = shared.next_unlocked() {
                    for (number, (job, done)) in unlocked {
                        let tell = || Later::Content(number, job).tell(kernel, &locks);
                        // A layer may be asked for the size; there is no other thread for the next file.
                        if catch_unwind(AssertUnwindSafe(tell)).is_err() {
                            error!(node = number, "the kernel is not told a size because of a fault of the service");
                        }
                        let _ = done.send(());
                    }
                }
            };
            spawn(&self.kernel, format!("sizes-{}", self.name), Box::new(work))?;
            *teller = Some(ended);
        }
        Ok(())
    }
}

impl Drop for Unlocking {
    fn drop(&mut self) {
        let mut files = lock(&self.shared.files);
        files.ended = true;
        // With the mount there is nothing more to tell. What is dropped may end much, and nobody is to wait for that.
        let (waiting, unlocked) = (mem::take(&mut files.waiting), mem::take(&mut files.unlocked));
        drop(files);
        self.shared.changed.notify_all();
        self.shared.is_unlocked.notify_all();
        drop((waiting, unlocked));
        let teller = self.teller.get_mut().unwrap_or_else(PoisonError::into_inner);
        // It ends without a word, once the thread is at its end.
        teller.take().map(|ended| ended.recv());
    }
}

impl Shared {
    /// A thread: waits for one file after the other.
    fn attend(&self, kernel: &dyn KernelCache) {
        while let Some(number) = self.next_file() {
            while self.begin_to_wait(number) {
                note(kernel.await_unlocked(number));
                self.has_been_unlocked(number);
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

    /// Whether something came while the file was waited for last; else it is no longer waited for.
    fn begin_to_wait(&self, number: u64) -> bool {
        let mut files = lock(&self.files);
        let Some(waiting) = files.waiting.get_mut(&number) else { return false };
        waiting.since = Instant::now();
        waiting.awaited = mem::take(&mut waiting.later);
        if waiting.awaited.is_empty() {
            files.waiting.remove(&number);
            return false;
        }
        true
    }

    /// What was waited for can be told.
    fn has_been_unlocked(&self, number: u64) {
        let mut files: MutexGuard<'_, Files> = lock(&self.files);
        let awaited = files.waiting.get_mut(&number).map(|waiting| mem::take(&mut waiting.awaited));
        files.unlocked.extend(awaited.into_iter().flatten().map(|asked| (number, asked)));
        self.is_unlocked.notify_one();
    }

    /// What can be told; nothing when no more will come.
    fn next_unlocked(&self) -> Option<Vec<(u64, Asked)>> {
        let is_idle = |files: &mut Files| files.unlocked.is_empty() && !files.ended;
        let files = self.is_unlocked.wait_while(lock(&self.files), is_idle);
        let unlocked = mem::take(&mut files.unwrap_or_else(PoisonError::into_inner).unlocked);
        (!unlocked.is_empty()).then_some(unlocked)
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
