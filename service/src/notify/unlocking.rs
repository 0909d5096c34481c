//! Who waits for files that the kernel keeps locked, to tell of their content then: a thread for each such file, up to a bound.
//!
//! A program can keep a file locked for any time, by writing to it from memory that does not come. Its own file's users wait for it then, and no
//! others. The threads are not waited for at the end of the mount either: the kernel does not let go of them before.

use super::JOBS_MAX;
use super::later::{ContentJob, LaterTeller};
use crate::sync::lock;
use std::collections::HashMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;

/// Files of a mount that are waited for at a time.
const FILES_MAX: usize = 8;

/// What waits for one of them.
const FILE_JOBS_MAX: usize = JOBS_MAX / FILES_MAX;

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

struct Shared {
    name: String,
    teller: LaterTeller,
    files: Mutex<HashMap<u64, Waiting>>,
}

/// The files of a mount that are waited for, by number.
pub(super) struct Unlocking(Arc<Shared>);

impl Unlocking {
    pub fn new(name: String, teller: LaterTeller) -> Self {
        Self(Arc::new(Shared { name, teller, files: Mutex::default() }))
    }

    /// Has this told when the file has been unlocked once from now on; nothing when there is too much to wait for.
    pub fn tell(&self, number: u64, job: ContentJob) -> Option<ToldUnlocked> {
        let (end, done) = channel();
        let mut files = lock(&self.0.files);
        if let Some(waiting) = files.get_mut(&number) {
            let has_room = waiting.jobs.len() < FILE_JOBS_MAX;
            return has_room.then(|| {
                waiting.jobs.push((job, end));
                ToldUnlocked { done, since: waiting.since }
            });
        }
        if files.len() >= FILES_MAX {
            return None;
        }
        let since = Instant::now();
        files.insert(number, Waiting { since, jobs: vec![(job, end)] });
        let shared = Arc::clone(&self.0);
        match thread::Builder::new().name(self.0.name.clone()).spawn(move || shared.wait_for(number)) {
            Ok(_) => Some(ToldUnlocked { done, since }),
            Err(error) => {
                files.remove(&number);
                warn!(name = self.0.name, %error, "no thread for notifications of the kernel");
                None
            }
        }
    }
}

impl Shared {
    fn wait_for(&self, number: u64) {
        while let Some(jobs) = self.next_jobs(number) {
            self.teller.await_unlocked(number);
            for (job, done) in jobs {
                self.teller.tell_content(number, &job);
                let _ = done.send(());
            }
        }
    }

    /// What came while the last was waited for; nothing any more, and then the file is no longer waited for.
    fn next_jobs(&self, number: u64) -> Option<Vec<(ContentJob, Sender<()>)>> {
        let mut files = lock(&self.files);
        let jobs = files.get_mut(&number).map(|waiting| {
            waiting.since = Instant::now();
            std::mem::take(&mut waiting.jobs)
        });
        let jobs = jobs.filter(|jobs| !jobs.is_empty());
        if jobs.is_none() {
            files.remove(&number);
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
