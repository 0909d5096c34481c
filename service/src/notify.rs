//! Telling the kernel what the user-level path changed, from a thread of its own.
//!
//! A notification may wait for pages that a READ or WRITE of the kernel holds locked, so no handler of such a request may
//! wait for one (it would wait for itself). Requests of the user-level path do wait: they answer only when the kernel can
//! no longer show the old content. Every waiter has at most one job queued, so the queue is as long as there are service
//! threads at most; it is bounded anyway.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};
use tracing::warn;

const JOBS_MAX: usize = 1024;
const PAGE: u64 = 4096;

/// The kernel's side of a mount, as far as notifications go.
pub trait KernelCache: Send + Sync {
    /// Drops the pages of `number` that hold the byte range (a negative length: to the end), and its attributes.
    ///
    /// # Errors
    /// Those of the device; an unknown node is none.
    fn invalidate(&self, number: u64, offset: i64, length: i64) -> io::Result<()>;

    /// Puts bytes into the kernel's cache, which raises the size it knows.
    ///
    /// # Errors
    /// Those of the device; an unknown node is none.
    fn store(&self, number: u64, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Drops a name of the directory `parent`, and unmounts what is mounted on it or below, in every mount namespace.
    ///
    /// # Errors
    /// Those of the device; an unknown name is none.
    fn invalidate_name(&self, parent: u64, name: &[u8]) -> io::Result<()>;

    /// Has a name of the directory `parent` looked up at its next use. What is mounted on it stays.
    ///
    /// # Errors
    /// Those of the device; [`io::ErrorKind::Unsupported`] before Linux 6.2; an unknown name is none.
    fn expire_name(&self, parent: u64, name: &[u8]) -> io::Result<()>;

    /// Asks the kernel to forget those of these nodes that nobody uses.
    ///
    /// # Errors
    /// Those of the device; `EINVAL` before Linux 6.18; unknown nodes are none.
    fn prune(&self, numbers: &[u64]) -> io::Result<()>;
}

/// One thing to tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// FUSE's number of the node.
    pub number: u64,
    /// Its pages are old.
    pub pages: bool,
    /// It has grown to this size, with this last byte, and somebody goes by the size the kernel knows.
    pub grown_to: Option<(u64, u8)>,
}

enum Message {
    Tell(Job, Sender<()>),
    End,
}

/// The thread that tells the kernel.
pub struct Notifications {
    queue: SyncSender<Message>,
    thread: Option<JoinHandle<()>>,
}

impl Notifications {
    /// Starts the thread.
    ///
    /// # Errors
    /// When no thread can be had.
    pub fn start(instance: &str, kernel: Arc<dyn KernelCache>) -> io::Result<Self> {
        let (queue, jobs) = sync_channel(JOBS_MAX);
        let name = format!("notify-{instance}");
        let thread = thread::Builder::new().name(name).spawn(move || serve(&jobs, kernel.as_ref()))?;
        Ok(Self { queue, thread: Some(thread) })
    }

    /// Tells the kernel and comes back when it has understood. Not for handlers of FUSE requests.
    pub fn tell(&self, job: Job) {
        let (done, wait) = channel();
        // Either end is gone only when the mount is: then the kernel shows nothing any more.
        if self.queue.send(Message::Tell(job, done)).is_ok() {
            let _ = wait.recv();
        }
    }
}

impl Drop for Notifications {
    fn drop(&mut self) {
        let _ = self.queue.send(Message::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(jobs: &Receiver<Message>, kernel: &dyn KernelCache) {
    while let Ok(Message::Tell(job, done)) = jobs.recv() {
        if let Err(error) = tell(kernel, job) {
            warn!(node = job.number, %error, "the kernel did not take a notification");
        }
        let _ = done.send(());
    }
}

fn tell(kernel: &dyn KernelCache, job: Job) -> io::Result<()> {
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
    use super::*;
    use std::sync::Mutex;

    #[derive(Clone, Default)]
    struct Recorder(Arc<Mutex<Vec<String>>>);

    impl KernelCache for Recorder {
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
        let notifications = Notifications::start("x", Arc::new(recorder.clone())).expect("a thread");
        notifications.tell(Job { number: 7, pages: true, grown_to: None });
        assert_eq!(*recorder.0.lock().expect("unpoisoned"), ["invalidate 7 0 -1"]);
        notifications.tell(Job { number: 8, pages: false, grown_to: Some((5000, b'x')) });
        notifications.tell(Job { number: 9, pages: true, grown_to: None });
        assert_eq!(
            *recorder.0.lock().expect("unpoisoned"),
            ["invalidate 7 0 -1", "store 8 4999 1", "invalidate 9 0 -1"]
        );
    }
}
