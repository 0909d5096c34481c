//! A thread that sends notifications, and its bounded queue.

use super::{JOBS_MAX, KernelCache, KernelWork};
use crate::cpus::keep_on;
use crate::sync::lock;
use std::io;
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use tracing::warn;

enum Message<J> {
    Tell(J, Option<Sender<()>>),
    End,
}

type Tell<J> = dyn Fn(&dyn KernelCache, &J) + Send + Sync;

/// How its thread is started.
type Spawn = fn(&Arc<dyn KernelCache>, String, KernelWork) -> io::Result<()>;

type Queue<J> = SyncSender<Message<J>>;

/// A thread that does one job after the other, on these CPUs if there are any. It is started with the first one: most mounts never have
/// any.
pub(super) struct Worker<J> {
    name: String,
    cpus: Vec<u32>,
    kernel: Arc<dyn KernelCache>,
    spawn: Spawn,
    tell: Arc<Tell<J>>,
    queue: OnceLock<Queue<J>>,
    /// Comes to its end with the thread.
    end: Mutex<Option<Receiver<()>>>,
}

impl<J: Send + 'static> Worker<J> {
    pub fn new(
        name: String,
        cpus: &[u32],
        kernel: &Arc<dyn KernelCache>,
        spawn: Spawn,
        tell: impl Fn(&dyn KernelCache, &J) + Send + Sync + 'static,
    ) -> Self {
        let (kernel, tell) = (Arc::clone(kernel), Arc::new(tell));
        Self { name, cpus: cpus.to_vec(), kernel, spawn, tell, queue: OnceLock::new(), end: Mutex::new(None) }
    }

    /// Its queue; nothing when there is no thread to be had.
    fn queue(&self) -> Option<&Queue<J>> {
        if let Some(queue) = self.queue.get() {
            return Some(queue);
        }
        let mut end = lock(&self.end);
        if self.queue.get().is_none() {
            let (queue, jobs): (_, Receiver<Message<J>>) = sync_channel(JOBS_MAX);
            let (tell, cpus) = (Arc::clone(&self.tell), self.cpus.clone());
            let (ending, ended) = channel();
            let work = move |kernel: &dyn KernelCache| {
                let _ending: Sender<()> = ending;
                keep_on(&cpus);
                while let Ok(Message::Tell(job, done)) = jobs.recv() {
                    tell(kernel, &job);
                    let _ = done.map(|done| done.send(()));
                }
            };
            match (self.spawn)(&self.kernel, self.name.clone(), Box::new(work)) {
                Ok(()) => {
                    *end = Some(ended);
                    let _ = self.queue.set(queue);
                }
                Err(error) => warn!(name = self.name, %error, "no thread for notifications of the kernel"),
            }
        }
        self.queue.get()
    }

    /// Has the job done. Its end comes through the channel, or the channel's end when the mount is gone: then the kernel shows
    /// nothing any more.
    ///
    /// Without a thread the caller does it: it would wait for one just as long, but for the bound on waits for names.
    ///
    /// The job comes back when it has too much to do: jobs that nobody waits for any more are among it.
    pub fn ask(&self, job: J) -> Result<Receiver<()>, J> {
        let (done, wait) = channel();
        match self.queue() {
            Some(queue) => match queue.try_send(Message::Tell(job, Some(done))) {
                Err(TrySendError::Full(Message::Tell(job, _))) => return Err(job),
                Ok(()) | Err(TrySendError::Full(Message::End) | TrySendError::Disconnected(_)) => {}
            },
            None => (self.tell)(self.kernel.as_ref(), &job),
        }
        Ok(wait)
    }

    /// Whether it has its thread, which is started if need be.
    pub fn has_thread(&self) -> bool {
        self.queue().is_some()
    }

    /// Has it done without waiting. The job comes back as above, or without a thread.
    pub fn ask_later(&self, job: J) -> Result<(), J> {
        let Some(queue) = self.queue() else { return Err(job) };
        match queue.try_send(Message::Tell(job, None)) {
            Err(TrySendError::Full(Message::Tell(job, _)) | TrySendError::Disconnected(Message::Tell(job, _))) => {
                Err(job)
            }
            _ => Ok(()),
        }
    }
}

impl<J> Drop for Worker<J> {
    fn drop(&mut self) {
        let _ = self.queue.get().map(|queue| queue.send(Message::End));
        let end = self.end.get_mut().unwrap_or_else(PoisonError::into_inner);
        // It ends without a word, once the thread is at its end.
        end.take().map(|end| end.recv());
    }
}
