//! The queue front of one instance: its requests, its sessions, and adoption.

use crate::handles::OpenFile;
use crate::instance::{Adopted, Adopter, Instance};
use crate::queue_front::adoptions::Adoptions;
use crate::queue_front::message::kind;
use crate::queue_front::posts::Posts;
use crate::queue_front::serve::serve;
use crate::queue_front::session::SessionState;
use crate::request::Context;
use crate::spans::Measured;
use poolfs_ipc::service::{Acquired, Called, Endpoint, Search, Session, Stop, Summoned};
use poolfs_ipc::wire::{Adopt, Operation, Reply, Status};
use poolfs_libservice::Share;
use poolfs_libservice::types::{Errno, NodeId};
use poolfs_service_protocol::{NotPosted, OperationPath};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use tracing::error;

/// One instance's queue front.
pub struct QueueFront {
    instance: Weak<Instance>,
    endpoint: Arc<Endpoint<SessionState>>,
    pub(super) adoptions: Arc<Adoptions>,
    pub(super) posts: Arc<Posts>,
    pub(super) serving: AtomicUsize,
    /// By group: its part of the threads.
    threads: Vec<Arc<Share>>,
    pub(super) reception: Mutex<Option<(Stop, JoinHandle<()>)>>,
}

impl QueueFront {
    /// That of an instance, which has these shares of the threads of each group.
    pub(super) fn new(
        instance: &Arc<Instance>,
        endpoint: Arc<Endpoint<SessionState>>,
        threads: Vec<Arc<Share>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            instance: Arc::downgrade(instance),
            endpoint,
            adoptions: Arc::new(Adoptions::of(Arc::downgrade(instance))),
            posts: Posts::new(&Arc::downgrade(instance)),
            serving: AtomicUsize::new(0),
            threads,
            reception: Mutex::default(),
        })
    }

    /// Has callers say when they submit a request, or no more.
    pub fn want_stamps(&self, wanted: bool) {
        self.endpoint.want_stamps(wanted);
    }

    pub(super) fn endpoint(&self) -> &Arc<Endpoint<SessionState>> {
        &self.endpoint
    }

    /// Whether one more of the group's threads may serve its requests.
    pub(super) fn may_be_served(&self, group: usize) -> bool {
        self.threads.get(group).is_none_or(|share| share.may_take(1))
    }

    /// What there is to be done for the queue of `group`; it counts as under way until [`QueueFront::answer`] has ended.
    pub(super) fn called(&self, group: usize) -> Option<Called<SessionState>> {
        self.serving.fetch_add(1, Ordering::AcqRel);
        let called = self.endpoint.called(group);
        if called.is_none() {
            self.serving.fetch_sub(1, Ordering::AcqRel);
        }
        called
    }

    /// Serves the request that was called for, if there is one, and publishes its reply: `EIO` when the instance is gone or a layer panics. The
    /// calling thread then searches for the next one, of `group`. Of the instance's share of threads it takes one for all of that, for
    /// the look at the client, too.
    pub(super) fn answer(
        &self,
        called: Called<SessionState>,
        group: usize,
        scratch: &mut [u8],
    ) -> Option<Search<SessionState>> {
        let _thread = Thread::of(&self.threads, group);
        let searching = match self.endpoint.acquire(called) {
            Some(Summoned::Request(acquired)) => self.serve(acquired, group, scratch),
            Some(Summoned::Posts(session, slot)) => {
                self.posts.answer(&session, slot);
                Some(self.endpoint.search(group))
            }
            None => None,
        };
        self.serving.fetch_sub(1, Ordering::AcqRel);
        searching
    }

    fn serve(
        &self,
        acquired: Acquired<SessionState>,
        group: usize,
        scratch: &mut [u8],
    ) -> Option<Search<SessionState>> {
        let instance = self.instance.upgrade()?;
        let session = Arc::clone(acquired.session());
        let request = *acquired.request();
        let operation = Operation::from_number(request.operation).and_then(kind);
        let mut measured =
            instance.measure(OperationPath::Library, session.facts().process, request.submitted_ns, operation);
        let served =
            catch_unwind(AssertUnwindSafe(|| serve(&instance, session.content(), &request, &acquired, scratch)));
        match served {
            Ok(mut reply) => {
                self.posts.consider(&session, &request, &mut reply);
                let searching = self.endpoint.search(group);
                measured.iter_mut().for_each(Measured::stop);
                acquired.finish(&reply);
                measured.into_iter().for_each(|measured| measured.end(outcome(&reply)));
                Some(searching)
            }
            Err(_) => {
                error!(instance = instance.name(), ?request, "a layer panicked; the request failed");
                None
            }
        }
    }
}

/// A thread of a group that serves a request.
struct Thread<'a>(Option<&'a Share>);

impl<'a> Thread<'a> {
    fn of(shares: &'a [Arc<Share>], group: usize) -> Self {
        let share = shares.get(group).map(|share| &**share);
        share.into_iter().for_each(|share| share.force(1));
        Self(share)
    }
}

impl Drop for Thread<'_> {
    fn drop(&mut self) {
        self.0.into_iter().for_each(|share| share.subtract(1));
    }
}

/// How a request ended, in words.
fn outcome(reply: &Reply) -> &'static str {
    match Status::from_number(reply.status) {
        Some(Status::Done) => "done",
        Some(Status::Failed) => Errno::from_raw(reply.errno).name(),
        Some(Status::UseKernel | Status::Ended) | None => "left to the kernel",
        Some(Status::Redirect | Status::RedirectSecond) => "symbolic link",
    }
}

impl Adopter for QueueFront {
    fn adopt(&self, context: &Context<'_>, file: &Arc<OpenFile>, asked: Adopt) -> Result<Adopt, Errno> {
        let refused = Adopt { handle: 0, ..asked };
        if asked.handle != 0 {
            // Whoever has the description may give it up: all it does is leave the file to the kernel.
            file.give_up();
            self.posts.revoke(file.node(), NotPosted::Shared);
            self.adoptions.released(file);
            return Ok(refused);
        }
        let (Some(instance), Some(session)) = (self.instance.upgrade(), self.endpoint.session(asked.session)) else {
            return Ok(refused);
        };
        // A process that has become somebody else should have ended its session; this one forgot.
        let credentials = session.content().credentials();
        let same = (context.caller.uid, context.caller.gid) == (credentials.uid, credentials.gid);
        if !same || !session.owns_thread(context.thread) {
            return Ok(refused);
        }
        let caller = poolfs_libservice::types::Caller::ROOT;
        let attributes = instance.layer().getattr(&caller, file.node()).map_err(|error| error.errno())?;
        let handle = self.adoptions.adopt(&session, file, asked.unshared != 0);
        self.posts.revoke(file.node(), NotPosted::Shared);
        let Some(handle) = handle else { return Ok(refused) };
        Ok(Adopt {
            handle,
            inode: attributes.inode,
            open_flags: file.flags().bits(),
            mode: attributes.mode(),
            announces_closing: file.announces_closing().into(),
            ..asked
        })
    }

    fn released(&self, file: &Arc<OpenFile>) {
        self.adoptions.released(file);
    }

    fn settle_posts(&self) -> bool {
        self.posts.settle()
    }

    fn settle_all_posts(&self, of: Option<NodeId>) {
        self.posts.settle_all(of);
    }

    fn revoke_posts(&self, node: NodeId) {
        self.posts.revoke(node, NotPosted::Observed);
    }

    fn end_posts(&self) {
        self.posts.close();
    }

    fn pause_posts(&self, paused: bool) -> bool {
        if paused {
            return self.posts.pause();
        }
        self.posts.go_on();
        true
    }

    fn posted(&self) -> (u64, BTreeMap<NotPosted, u64>) {
        self.posts.counts()
    }

    fn sessions(&self) -> u64 {
        self.endpoint.sessions().len() as u64
    }

    fn refused(&self) -> BTreeMap<Errno, u64> {
        self.endpoint.counters().refused()
    }

    fn direct_reads(&self) -> u64 {
        self.endpoint.direct_reads()
    }

    fn client(&self, pid: u32) -> (bool, Vec<Adopted>, Option<Errno>) {
        let sessions = self.endpoint.sessions();
        let mut own = sessions.iter().filter(|session| session.facts().process == pid).peekable();
        let has_session = own.peek().is_some();
        let counted = |session: &Arc<Session<SessionState>>| {
            let reads = session.direct_reads();
            let files = session.content().files().into_iter();
            let told = |file: Arc<OpenFile>| Adopted {
                direct_reads: reads.of(file.key()),
                writes: self.posts.standing(session, &file),
                file,
            };
            files.map(told).collect::<Vec<_>>()
        };
        let files = own.flat_map(counted).collect();
        (has_session, files, self.endpoint.counters().refused_last(pid))
    }
}
