//! The queue front of one instance: its socket, its sessions, and adoption.

use crate::handles::OpenFile;
use crate::instance::{Adopted, Adopter, Instance};
use crate::queue_front::adoptions::Adoptions;
use crate::queue_front::message::kind;
use crate::queue_front::posts::Posts;
use crate::queue_front::reach;
use crate::queue_front::serve::serve;
use crate::queue_front::session::SessionState;
use crate::queue_front::threads::ServiceThreads;
use crate::queue_front::view::View;
use crate::request::Context;
use crate::shares::InstanceShares;
use crate::spans::Measured;
use crate::sync::lock;
use poolfs_ipc::service::{
    Acquired, Admission, Called, Endpoint, EndpointConfig, PeerFacts, Reception, Search, Session, Stop, Summoned,
};
use poolfs_ipc::wire::{Adopt, Operation, Reply, SOCKET_SUFFIX, Status};
use poolfs_libservice::Share;
use poolfs_libservice::types::{Errno, NodeId};
use poolfs_service_protocol::{NotPosted, OperationPath, Timeout};
use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tracing::{debug, error, warn};

/// How long an instance that ends waits for requests under way.
const CLOSE_WAIT: Duration = Duration::from_secs(5);
const CLOSE_PAUSE: Duration = Duration::from_micros(250);

/// The groups of a client are kept with its session, for either kind of rights, and with its facts.
const COPIES_OF_GROUPS: usize = 3;

/// One instance's queue front.
pub struct QueueFront {
    instance: Weak<Instance>,
    endpoint: Arc<Endpoint<SessionState>>,
    adoptions: Arc<Adoptions>,
    pub(super) posts: Arc<Posts>,
    serving: AtomicUsize,
    /// By group: its part of the threads.
    threads: Vec<Arc<Share>>,
    reception: Mutex<Option<(Stop, JoinHandle<()>)>>,
}

impl QueueFront {
    /// Makes the instance's socket in `directory` and serves its sessions with `threads`; the instance's adoptions come here
    /// from now on. Once per instance.
    ///
    /// # Errors
    /// When memory, socket or thread cannot be had; nothing is left behind then.
    pub fn start(instance: &Arc<Instance>, directory: &Path, threads: &Arc<ServiceThreads>) -> io::Result<Arc<Self>> {
        let shares = instance.shares().cloned();
        let memory = shares.as_ref().map_or_else(|| threads.session_memory(), |shares| shares.session_memory());
        let leases = instance.leases().map(|leases| leases.shared());
        let timeout = instance.spec().timeout.map(Timeout::duration);
        let config = EndpointConfig { memory, leases, timeout, ..EndpointConfig::new(threads.groups().clone()) };
        let endpoint = Endpoint::new(config).map_err(|errno| io::Error::from_raw_os_error(errno.raw()))?;
        let endpoint = Arc::new(endpoint);
        let socket = directory.join(format!("{}{SOCKET_SUFFIX}", instance.name()));
        let reception = Reception::bind(&socket, Arc::clone(&endpoint))?;
        let front = Arc::new(Self {
            instance: Arc::downgrade(instance),
            endpoint,
            adoptions: Arc::new(Adoptions::of(Arc::downgrade(instance))),
            posts: Posts::new(&Arc::downgrade(instance)),
            serving: AtomicUsize::new(0),
            threads: threads.join(),
            reception: Mutex::default(),
        });
        let posts = Arc::clone(&front.posts);
        front.endpoint.set_on_dismiss(move |session| posts.end_session(session));
        let (posts, adoptions, of) = (Arc::clone(&front.posts), Arc::clone(&front.adoptions), Arc::downgrade(instance));
        front.endpoint.set_on_over(move |session| {
            let left = catch_unwind(AssertUnwindSafe(|| leave_to_kernel(session, &posts, &adoptions, &of)));
            if left.is_err() {
                error!("a layer panicked; the kernel may go by old sizes of what a client had open");
            }
        });
        threads.add(Arc::clone(&front))?;
        let (adoptions, of) = (Arc::clone(&front.adoptions), Arc::downgrade(instance));
        let stop = reception.stop();
        let name = instance.name().to_owned();
        let leases = instance.leases().cloned();
        let receiving = std::thread::Builder::new().name("reception".into()).spawn(move || {
            // As long as clients can come: when this thread is killed with the service, the kernel says so to all who read by
            // themselves.
            let _life = leases.as_ref().map(|leases| {
                leases.live().inspect_err(|error| warn!(%error, "clients will not read the cache by themselves"))
            });
            let admitted = |facts: &PeerFacts| admit(facts, &adoptions, &of, shares.as_deref());
            if let Err(error) = reception.run(admitted) {
                error!(instance = name, %error, "no more sessions are let in");
            }
        });
        match receiving {
            Ok(handle) => *lock(&front.reception) = Some((stop, handle)),
            Err(error) => {
                threads.remove(&front);
                return Err(error);
            }
        }
        instance.set_adopter(Arc::clone(&front) as Arc<dyn Adopter>);
        Ok(front)
    }

    /// Ends all sessions and waits, for a while, for the requests under way. Then nothing of this front uses the instance.
    pub fn close(self: &Arc<Self>, threads: &ServiceThreads) {
        self.posts.close();
        if let Some((stop, handle)) = lock(&self.reception).take() {
            stop.stop();
            end_reception(handle);
        }
        threads.remove(self);
        self.posts.join();
        let counters = self.endpoint.counters();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (rejected, stray, repeated) =
            (count(&counters.rejected), count(&counters.stray), count(&counters.repeated));
        debug!(rejected, stray, repeated, "doorbells that were none, that led nowhere, that had to be rung again");
        let give_up = Instant::now() + CLOSE_WAIT;
        while self.serving.load(Ordering::Acquire) > 0 {
            if Instant::now() > give_up {
                warn!("requests of the user-level path are still under way");
                return;
            }
            std::thread::sleep(CLOSE_PAUSE);
        }
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

/// Has the kernel know all that was done by a session that is over, of files that the client goes on with by the kernel.
fn leave_to_kernel(
    session: &Arc<Session<SessionState>>,
    posts: &Posts,
    adoptions: &Adoptions,
    instance: &Weak<Instance>,
) {
    // Of a branch that does not answer: what is left is taken by the session's handles, when it does.
    if posts.may_have_posts_of(session) {
        return;
    }
    for file in adoptions.session_over(session) {
        posts.revoke_soon(file.node(), NotPosted::Shared);
        instance.upgrade().into_iter().for_each(|instance| instance.tell_size(file.node()));
    }
}

/// What a new client is told, and what is kept with its session.
pub(super) fn admit(
    facts: &PeerFacts,
    adoptions: &Arc<Adoptions>,
    instance: &Weak<Instance>,
    shares: Option<&InstanceShares>,
) -> Result<Admission<SessionState>, Errno> {
    let room = shares.map(|shares| shares.session().ok_or(Errno::EUSERS)).transpose()?;
    let instance = instance.upgrade().ok_or(Errno::ENOTCONN)?;
    let device = reach::device(&instance.spec().mount_point)?;
    let view = Arc::new(View::of(facts, device, &instance)?);
    let kept = size_of_val(facts.groups.as_slice()) * COPIES_OF_GROUPS + view.bytes_max();
    let kept = shares.map(|shares| shares.client(kept as u64).ok_or(Errno::ENOMEM)).transpose()?;
    let content = SessionState::new(facts, adoptions, Some(Arc::clone(&view)), (room, kept));
    Ok(Admission { content, device, recheck: Some(Box::new(move || view.look())) })
}

/// The reception closes descriptors, which may wait on kernels that let clients send some: it is waited for, for a while.
fn end_reception(handle: JoinHandle<()>) {
    let give_up = Instant::now() + CLOSE_WAIT;
    while !handle.is_finished() {
        if Instant::now() > give_up {
            return warn!("sessions are still being let go");
        }
        std::thread::sleep(CLOSE_PAUSE);
    }
    if handle.join().is_err() {
        error!("a reception thread panicked");
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
