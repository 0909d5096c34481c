//! The beginning and the end of an instance's queue front: its socket, its reception of clients, and its place among the service threads.

use crate::instance::{Adopter, Instance};
use crate::queue_front::adoptions::Adoptions;
use crate::queue_front::front::QueueFront;
use crate::queue_front::posts::Posts;
use crate::queue_front::reach;
use crate::queue_front::session::{HandleRecord, SessionState};
use crate::queue_front::threads::ServiceThreads;
use crate::queue_front::view::View;
use crate::shares::InstanceShares;
use crate::sync::lock;
use poolfs_ipc::service::{Admission, Endpoint, EndpointConfig, PeerFacts, Reception, Session};
use poolfs_ipc::wire::SOCKET_SUFFIX;
use poolfs_libservice::types::Errno;
use poolfs_service_protocol::{NotPosted, Timeout};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tracing::{debug, error, warn};

/// How long an instance that ends waits for requests under way.
const CLOSE_WAIT: Duration = Duration::from_secs(5);
const CLOSE_PAUSE: Duration = Duration::from_micros(250);

/// The groups of a client are kept with its session, for either kind of rights, and with its facts.
const COPIES_OF_GROUPS: usize = 3;

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
        let front = Self::new(instance, endpoint, threads.join());
        let posts = Arc::clone(&front.posts);
        front.endpoint().set_on_dismiss(move |session| posts.end_session(session));
        let (posts, adoptions, of) = (Arc::clone(&front.posts), Arc::clone(&front.adoptions), Arc::downgrade(instance));
        front.endpoint().set_on_over(move |session| {
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
        let counters = self.endpoint().counters();
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
    let content = SessionState::new(
        facts,
        Some(Arc::clone(adoptions) as Arc<dyn HandleRecord>),
        Some(Arc::clone(&view)),
        (room, kept),
    );
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
