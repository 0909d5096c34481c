//! One mounted filesystem instance: its stack of layers, its open files, and what the kernel knows of it.

mod reporting;
mod telling;
#[cfg(test)]
mod tests;

use crate::exclusion::NodeLocks;
use crate::flushes::Flushes;
use crate::handles::{HandleTable, OpenFile};
use crate::in_doubt::InDoubt;
use crate::in_flight::InFlight;
use crate::jobs::Jobs;
use crate::leases::{LeaseTable, SegmentLease};
use crate::nodes::NodeTable;
use crate::nodes::content::UntoldSize;
use crate::nodes::notices::Changing;
use crate::nodes::pruning::Pruner;
use crate::notify::{DirectoryJob, KernelCache, NameChange, NameJob, Notifications};
use crate::page_expiry::PageExpiry;
use crate::request::{Context, Failure, Kind, Reply, Request};
use crate::shares::InstanceShares;
use crate::spans::{Asked, Measured, Tracer, enter};
use crate::stack::Stack;
use crate::statistics::Statistics;
use crate::sync::lock;
use poolfs_ipc::service::CoreGroups;
use poolfs_ipc::wire::Adopt;
use poolfs_libservice::types::{Attributes, Errno, Name, NodeId};
use poolfs_libservice::{Holder, Lease, Libservice, Segment, fail, shared_content};
use poolfs_service_protocol::{
    Coherence, Layer, MountSpec, NotDirect, NotPosted, OperationPath, Transport, WriteStatus,
};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tracing::warn;

/// The user-level path's side of adoption. The queue front implements it; without one every adoption answers "use the
/// kernel" (handle 0).
pub trait Adopter: Send + Sync {
    /// The thread of `context` asks, through an ioctl on `file`, for a handle bound to its process's session. Called on a
    /// FUSE thread: it must not wait for a notification or for a session.
    ///
    /// # Errors
    /// What the ioctl fails with. "Not to be had" is no error but handle 0.
    fn adopt(&self, context: &Context<'_>, file: &Arc<OpenFile>, asked: Adopt) -> Result<Adopt, Errno>;

    /// The kernel has closed `file` for good: handles on it end.
    fn released(&self, file: &Arc<OpenFile>);

    /// Live sessions.
    fn sessions(&self) -> u64;

    /// Clients that got no session, by what stood against it.
    fn refused(&self) -> BTreeMap<Errno, u64>;

    /// Reads without a request, as the clients tell.
    fn direct_reads(&self) -> u64;

    /// Whether a process has a session, the files that it adopted, and what stood against the last session it asked for.
    fn client(&self, pid: u32) -> (bool, Vec<Adopted>, Option<Errno>);

    /// Serves all writes whose callers have gone on before this call, as far as that does not take long; whether none is left.
    fn settle_posts(&self) -> bool;

    /// The same of one node, or of all, however long it takes.
    fn settle_all_posts(&self, of: Option<NodeId>);

    /// The same for a node, of which no caller goes on any more without an answer.
    fn revoke_posts(&self, node: NodeId);

    /// The same for all nodes, for good.
    fn end_posts(&self);

    /// The same until it is told to go on; whether none is left.
    fn pause_posts(&self, paused: bool) -> bool;

    /// Requests whose callers had gone on, and how often somebody had to wait, by cause.
    fn posted(&self) -> (u64, BTreeMap<NotPosted, u64>);
}

/// A file that a process has adopted.
pub struct Adopted {
    /// The file.
    pub file: Arc<OpenFile>,
    /// The reads of it that the process says it did without a request.
    pub direct_reads: u64,
    /// How its writes are taken.
    pub writes: WriteStatus,
}

/// Names the kernel must be told of, and directories whose listings it must drop.
#[must_use]
#[derive(Default)]
pub(crate) struct ChangedNames<'n>(Vec<(NodeId, Name<'n>, DirectoryJob)>);

/// Attributes that are changing: nobody is shown them who does not ask. Dropped, they have changed.
#[must_use]
pub(crate) struct ChangingAttributes<'i> {
    instance: &'i Instance,
    nodes: [Option<Changing>; 2],
    /// The kernel changes them, or nobody waits for the change.
    is_kernels: bool,
}

impl Drop for ChangingAttributes<'_> {
    fn drop(&mut self) {
        // A layer that panics may have left something locked.
        let may_wait = !self.is_kernels && !std::thread::panicking();
        self.nodes.into_iter().flatten().for_each(|changing| self.instance.attributes_changed(changing, may_wait));
    }
}

/// One filesystem instance. Fronts call [`Instance::dispatch`].
pub struct Instance {
    spec: MountSpec,
    pub(crate) nodes: Arc<NodeTable>,
    pub(crate) handles: HandleTable,
    pub(crate) statistics: Statistics,
    /// Requests that are being served.
    pub(crate) requests: InFlight,
    pub(crate) rights: NodeLocks,
    notifications: OnceLock<Notifications>,
    adopter: OnceLock<Arc<dyn Adopter>>,
    leases: OnceLock<Arc<LeaseTable>>,
    /// Where others change what it shows.
    page_expiry: OnceLock<PageExpiry>,
    shares: OnceLock<Arc<InstanceShares>>,
    pruner: OnceLock<Arc<Pruner>>,
    tracer: OnceLock<Arc<Tracer>>,
    transport: OnceLock<Transport>,
    refusing: AtomicBool,
    /// Changes that are being served, where requests have a time limit.
    pub(crate) in_doubt: Option<InDoubt>,
    /// Requests of the kernel that were answered `EIO` because they took too long.
    pub(crate) timed_out: AtomicU64,
    /// Files of which writes may be posted.
    posting: AtomicUsize,
    /// Another instance changes what this one shows: the kernel may keep nothing.
    shared: AtomicBool,
    /// By directory. Held while a name is taken away, from finding out what it stands for until that is noted; never while
    /// the kernel is told.
    removals: [Mutex<()>; REMOVALS],
    /// How often somebody who asked to read a file by himself may not, by what stood against it.
    not_direct: Mutex<BTreeMap<NotDirect, u64>>,
    jobs: Jobs,
    pub(crate) flushes: Arc<Flushes>,
    /// Dropped after all that has its layer: branches end when what is above them has.
    pub(crate) stack: Stack,
}

/// Locks for [`Instance::lock_removals`].
const REMOVALS: usize = 64;

impl Instance {
    /// An instance over `stack`, not mounted anywhere yet.
    #[must_use]
    pub fn new(spec: MountSpec, stack: Stack) -> Arc<Self> {
        let nodes = Arc::new(NodeTable::default());
        let handles = HandleTable::new(Arc::clone(&stack.layer), Arc::clone(&nodes));
        let in_doubt = spec.timeout.map(|timeout| InDoubt::new(timeout.duration()));
        Arc::new(Self {
            in_doubt,
            spec,
            stack,
            nodes,
            handles,
            statistics: Statistics::default(),
            requests: InFlight::default(),
            rights: NodeLocks::default(),
            notifications: OnceLock::new(),
            adopter: OnceLock::new(),
            leases: OnceLock::new(),
            page_expiry: OnceLock::new(),
            shares: OnceLock::new(),
            pruner: OnceLock::new(),
            tracer: OnceLock::new(),
            transport: OnceLock::new(),
            refusing: AtomicBool::new(false),
            timed_out: AtomicU64::new(0),
            posting: AtomicUsize::new(0),
            shared: AtomicBool::new(false),
            removals: std::array::from_fn(|_| Mutex::default()),
            not_direct: Mutex::default(),
            jobs: Jobs::default(),
            flushes: Arc::default(),
        })
    }

    /// What it was made from.
    #[must_use]
    pub fn spec(&self) -> &MountSpec {
        &self.spec
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.spec.instance
    }

    /// What works on it for long.
    pub(crate) fn jobs(&self) -> &Jobs {
        &self.jobs
    }

    /// The top layer.
    #[must_use]
    pub fn layer(&self) -> &dyn Libservice {
        self.stack.layer.as_ref()
    }

    /// What is open in it.
    #[must_use]
    pub fn handles(&self) -> &HandleTable {
        &self.handles
    }

    /// What the kernel knows of it.
    #[must_use]
    pub fn nodes(&self) -> &NodeTable {
        &self.nodes
    }

    /// What was served.
    #[must_use]
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    /// Gives the user-level path a say in adoption; once per instance.
    pub fn set_adopter(&self, adopter: Arc<dyn Adopter>) {
        let _ = self.adopter.set(adopter);
    }

    /// Lets clients read cached content by themselves, under these leases; once per instance.
    pub fn set_leases(&self, leases: Arc<LeaseTable>) {
        let _ = self.leases.set(leases);
    }

    /// The leases under which clients read by themselves.
    #[must_use]
    pub fn leases(&self) -> Option<&Arc<LeaseTable>> {
        self.leases.get()
    }

    /// Gives the instance its shares of what the instances of a service have together; once per instance, after its leases, before it is
    /// mounted.
    pub fn set_shares(&self, shares: &Arc<InstanceShares>) {
        self.handles.set_shares(shares);
        self.nodes.set_share(shares.nodes());
        self.stack.count_pinned(shares.pinned_nodes());
        self.nodes.set_names_room(shares.names());
        self.leases.get().into_iter().for_each(|leases| leases.set_share(shares.leases()));
        let _ = self.shares.set(Arc::clone(shares));
    }

    /// Its shares, if it has others beside it.
    pub(crate) fn shares(&self) -> Option<&Arc<InstanceShares>> {
        self.shares.get()
    }

    /// The segment of an open file, and the lease under which it is the file's content.
    ///
    /// # Errors
    /// `EOPNOTSUPP` when there is none now, `EBADF` when the file may not be read, and those of the layers.
    pub(crate) fn segment(&self, file: &OpenFile) -> poolfs_libservice::Result<(Segment, Arc<SegmentLease>)> {
        if !file.flags().readable() || file.is_directory() {
            return fail(Errno::EBADF);
        }
        if self.timed().is_some() {
            return self.refuse_segment(file, NotDirect::Coherence);
        }
        let Some(leases) = self.leases.get() else { return self.refuse_segment(file, NotDirect::Host) };
        if leases.is_suspended() {
            return self.refuse_segment(file, NotDirect::Kept);
        }
        if self.shares.get().is_some_and(|shares| shares.is_memory_short()) {
            return self.refuse_segment(file, NotDirect::Memory);
        }
        let Some(lease) = self.nodes.lease(file.node(), || leases.lease()) else {
            let cause = self.nodes.without_lease(file.node()).unwrap_or(NotDirect::Leases);
            return self.refuse_segment(file, cause);
        };
        let lender = Arc::clone(&lease) as Arc<dyn Lease>;
        match shared_content(self.layer()).and_then(|content| content.segment(file.handle(), &lender)) {
            Ok(segment) => {
                file.note_not_direct(None);
                Ok((segment, lease))
            }
            Err(error) if error.errno() == Errno::EOPNOTSUPP => self.refuse_segment(file, NotDirect::Layers),
            Err(error) => Err(error),
        }
    }

    fn refuse_segment<T>(&self, file: &OpenFile, cause: NotDirect) -> poolfs_libservice::Result<T> {
        file.note_not_direct(Some(cause));
        *lock(&self.not_direct).entry(cause).or_default() += 1;
        fail(Errno::EOPNOTSUPP)
    }

    /// The user-level path, if there is one.
    #[must_use]
    pub fn adopter(&self) -> Option<&Arc<dyn Adopter>> {
        self.adopter.get()
    }

    /// Counts what the kernel will know of the instance with what it knows of others. To be called before
    /// [`Instance::attach_kernel`].
    pub fn set_pruner(&self, pruner: &Arc<Pruner>) {
        let _ = self.pruner.set(Arc::clone(pruner));
    }

    /// The thread that has the kernel forget what is too much.
    pub(crate) fn pruner(&self) -> Option<&Arc<Pruner>> {
        self.pruner.get()
    }

    /// The way to the kernel's caches, once it is mounted.
    pub(crate) fn notifications(&self) -> Option<&Notifications> {
        self.notifications.get()
    }

    /// Gives whoever listens to `tracer` a say in what is measured; once per instance.
    pub fn set_tracer(&self, tracer: &Arc<Tracer>) {
        let _ = self.tracer.set(Arc::clone(tracer));
    }

    /// Begins to measure a request that this thread serves, if anybody wants to know.
    #[must_use]
    pub(crate) fn measure(
        &self,
        path: OperationPath,
        process: u32,
        submitted_ns: u64,
        kind: Option<Kind>,
    ) -> Option<Measured<'_>> {
        self.tracer.get()?.begin(Asked { instance: self.name(), path, process, submitted_ns, kind })
    }

    /// Connects the instance, whose requests are served on these CPUs, to the kernel's caches of its mount.
    pub fn attach_kernel(&self, kernel: Arc<dyn KernelCache>, cpus: &[u32]) {
        // Without names that expire, a name could only be dropped with what is mounted on it.
        let may_keep = kernel.expires_names();
        self.pruner.get().into_iter().for_each(|pruner| pruner.add(&self.nodes, &kernel));
        if let Some(time) = self.timed() {
            let looks = (self.stack.layer(), Arc::clone(&self.nodes), Arc::clone(&kernel));
            match PageExpiry::start(self.name(), time, looks) {
                Ok(expiry) => drop(self.page_expiry.set(expiry)),
                Err(error) => warn!(instance = self.name(), %error, "pages that others change stay with the kernel"),
            }
        }
        let _ = self.notifications.set(Notifications::new(self.name(), kernel, &CoreGroups::of_cpus(cpus)));
        if may_keep && !self.shared.load(Ordering::Acquire) {
            self.nodes.start_holding();
        }
    }

    /// Notes how the kernel's requests come; once per instance.
    pub(crate) fn set_transport(&self, transport: Transport) {
        let _ = self.transport.set(transport);
    }

    /// How the kernel's requests come.
    pub(crate) fn transport(&self) -> Transport {
        self.transport.get().copied().unwrap_or_default()
    }

    /// Another instance is about to show the same: from here on the kernel keeps nothing of this one, for good.
    pub fn share(&self) {
        self.shared.store(true, Ordering::Release);
        self.adopter.get().into_iter().for_each(|adopter| adopter.end_posts());
        let rest = self.nodes.stop_holding();
        let Some(notifications) = self.notifications.get() else { return };
        for number in rest.attributes {
            let is_arriving = || self.nodes.node(number).is_some_and(|node| self.nodes.is_arriving(node));
            let _ = notifications.drop_arriving(number, is_arriving);
        }
        for (parent, name) in rest.names {
            let job = DirectoryJob::Name(NameJob { parent, name, change: NameChange::Appeared });
            if !notifications.tell_names([job]) {
                warn!(instance = self.name(), "names of a directory in use stay as they were");
                return;
            }
        }
        if !notifications.tell_names(rest.listings.into_iter().map(DirectoryJob::Listing)) {
            warn!(instance = self.name(), "the listing of a directory in use stays as it was");
        }
    }

    /// Notes of how many files writes may be posted.
    pub(crate) fn count_posting(&self, files: usize) {
        self.posting.store(files, Ordering::SeqCst);
    }

    fn poster(&self) -> Option<&Arc<dyn Adopter>> {
        self.adopter.get().filter(|_| self.posting.load(Ordering::SeqCst) > 0)
    }

    /// Serves all writes whose callers have gone on before this call, so that whoever asks next finds what they wrote. Whether none is left:
    /// a branch may not answer.
    pub(crate) fn settle_posts(&self) -> bool {
        self.poster().is_none_or(|poster| poster.settle_posts())
    }

    /// The same of one node, or of all, for who has to do with it: however long it takes.
    pub(crate) fn settle_all_posts(&self, of: Option<NodeId>) {
        self.poster().into_iter().for_each(|poster| poster.settle_all_posts(of));
    }

    /// The same for a node, of which no caller goes on any more without an answer.
    pub(crate) fn revoke_posts(&self, node: NodeId) {
        self.poster().into_iter().for_each(|poster| poster.revoke_posts(node));
    }

    /// Does something while every write of the library waits for its answer, and all are served whose callers have gone on before; nothing when a branch does not
    /// answer.
    pub(crate) fn without_posts<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        struct Paused<'a>(Option<&'a Arc<dyn Adopter>>);
        impl Drop for Paused<'_> {
            fn drop(&mut self) {
                self.0.into_iter().for_each(|adopter| _ = adopter.pause_posts(false));
            }
        }
        let paused = Paused(self.adopter.get());
        paused.0.is_none_or(|adopter| adopter.pause_posts(true)).then(act)
    }

    /// From here on every request fails: what is flushed next is all there will be.
    pub fn refuse(&self) {
        self.adopter.get().into_iter().for_each(|adopter| adopter.end_posts());
        self.refusing.store(true, Ordering::Release);
    }

    pub(crate) fn is_refusing(&self) -> bool {
        self.refusing.load(Ordering::Acquire)
    }

    /// Ends an open file for good. Unknown keys are ignored.
    pub fn release(&self, key: u64) {
        if let Ok(file) = self.handles.get(key) {
            self.revoke_posts(file.node());
        }
        if let Some(file) = self.handles.remove(key) {
            file.close();
            self.revoke_posts(file.node());
            self.forget_lost_pages(file.node());
            if let Some(adopter) = self.adopter.get() {
                adopter.released(&file);
            }
        }
    }

    /// Attributes of these nodes are about to change, until what this answers is dropped.
    pub(crate) fn change_attributes(
        &self,
        context: &Context<'_>,
        nodes: [Option<NodeId>; 2],
    ) -> ChangingAttributes<'_> {
        let nodes = nodes.map(|node| node.map(|node| self.nodes.attributes_changing(node)));
        ChangingAttributes { instance: self, nodes, is_kernels: !context.is_library() || context.is_posted }
    }

    /// Attributes have changed: the kernel drops what it has before this returns.
    ///
    /// It does so also for its own changes. It knows of those, but an answer that was under way meanwhile, with the
    /// attributes from before, is refused by the kernel only after a notification.
    ///
    /// What it refuses is also the size. It goes on with the one it knew, so it is told the newest before, if somebody `may_wait` for
    /// that: not when the change is the kernel's own.
    fn attributes_changed(&self, changing: Changing, may_wait: bool) {
        let (Some(view), Some(notifications)) = (self.nodes.attributes_changed(changing), self.notifications.get())
        else {
            return;
        };
        let node = changing.node;
        let _kernel = enter(Layer::Kernel);
        if let Some(change) = view.size_since.filter(|_| may_wait) {
            self.tell_end(notifications, node, UntoldSize { number: view.number, change });
        }
        if notifications.drop_attributes(view.number) || self.drop_arriving(notifications, node, view.number, may_wait)
        {
            self.nodes.attributes_told(node);
        }
    }

    /// The kernel did not know the node when it was told that its attributes have changed. Whether there is nothing more to tell.
    fn drop_arriving(&self, notifications: &Notifications, node: NodeId, number: u64, may_wait: bool) -> bool {
        let nodes = Arc::clone(&self.nodes);
        let is_arriving = move || nodes.is_arriving(node);
        if may_wait {
            notifications.drop_arriving(number, is_arriving)
        } else {
            // Until then later changes have to be told as well.
            let has_gone = !is_arriving();
            if !has_gone && !notifications.drop_arriving_later(number, is_arriving) {
                warn!(instance = self.name(), number, "the kernel could not be told of a change of attributes");
            }
            has_gone
        }
    }

    /// Attributes, which clients are shown from here on that have a lease of the node, as long as they do not change.
    pub(crate) fn stat(&self, context: &Context<'_>, node: NodeId) -> Result<Attributes, Failure> {
        let noting = self.nodes.begin_noting(node);
        match self.dispatch(context, Request::Stat { node })? {
            Reply::Attributes(attributes) => {
                noting.into_iter().for_each(|noting| self.nodes.note(noting, &attributes));
                Ok(attributes)
            }
            _ => Err(Failure::Errno(Errno::EIO)),
        }
    }

    /// Locks the removal of names from these directories, so that what a name stood for is what was removed, and what the
    /// kernel holds of it is noted along with that.
    pub(crate) fn lock_removals(&self, one: NodeId, other: NodeId) -> [Option<MutexGuard<'_, ()>>; 2] {
        let lock = |at: usize| self.removals[at].lock().unwrap_or_else(PoisonError::into_inner);
        let [first, second] = [one.0.min(other.0), one.0.max(other.0)].map(|node| node as usize % REMOVALS);
        let (first, second) = (first.min(second), first.max(second));
        [Some(lock(first)), (second != first).then(|| lock(second))]
    }

    /// Whether another instance shows what this one shows, or did.
    pub(crate) fn is_shared(&self) -> bool {
        self.shared.load(Ordering::Acquire)
    }

    /// After how long the changes of others are seen, where anybody may change what it shows.
    pub(crate) fn timed(&self) -> Option<Duration> {
        self.stack.timed()
    }

    /// The same of names.
    pub(crate) fn names_timed(&self) -> Option<Duration> {
        self.stack.coherence().names_timed()
    }

    /// Whether what was written is durable when a close returns.
    pub(crate) fn closes_durably(&self) -> bool {
        self.stack.coherence() == Coherence::CloseToOpen
    }

    /// Whether other instances can come to show what this one shows.
    pub(crate) fn can_be_shared(&self) -> bool {
        self.stack.can_be_shared()
    }

    /// The mount is gone: everything the kernel and the sessions held is let go, then the layers are flushed.
    ///
    /// # Errors
    /// The first failure to make something durable.
    pub fn wind_up(&self) -> poolfs_libservice::Result<()> {
        if self.is_refusing() {
            // Who still runs a program of the mount goes on with it.
            self.nodes.leave_texts();
        }
        self.handles.clear();
        for (node, count) in self.nodes.forget_all() {
            self.layer().forget(node, count);
        }
        self.layer().sync()
    }
}
