//! One mounted filesystem: a stack of layers, what is open in it, what the kernel knows of it.

use crate::exclusion::NodeLocks;
use crate::handles::{HandleTable, OpenFile};
use crate::nodes::NodeTable;
use crate::notify::{Job, KernelCache, Notifications};
use crate::request::Context;
use crate::stack::Stack;
use crate::statistics::Statistics;
use poolfs_ipc::wire::Adopt;
use poolfs_libservice::Libservice;
use poolfs_libservice::types::{Caller, Errno, NodeId};
use poolfs_service_protocol::{InstanceStatus, MountSpec};
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

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
}

/// One filesystem instance. Fronts call [`Instance::dispatch`].
pub struct Instance {
    spec: MountSpec,
    pub(crate) stack: Stack,
    pub(crate) nodes: Arc<NodeTable>,
    pub(crate) handles: HandleTable,
    pub(crate) statistics: Statistics,
    pub(crate) rights: NodeLocks,
    notifications: OnceLock<Notifications>,
    adopter: OnceLock<Arc<dyn Adopter>>,
    refusing: AtomicBool,
}

impl Instance {
    /// An instance over `stack`, not mounted anywhere yet.
    #[must_use]
    pub fn new(spec: MountSpec, stack: Stack) -> Arc<Self> {
        let nodes = Arc::new(NodeTable::default());
        let handles = HandleTable::new(Arc::clone(&stack.layer), Arc::clone(&nodes));
        Arc::new(Self {
            spec,
            stack,
            nodes,
            handles,
            statistics: Statistics::default(),
            rights: NodeLocks::default(),
            notifications: OnceLock::new(),
            adopter: OnceLock::new(),
            refusing: AtomicBool::new(false),
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

    /// The user-level path, if there is one.
    #[must_use]
    pub fn adopter(&self) -> Option<&Arc<dyn Adopter>> {
        self.adopter.get()
    }

    /// Connects the instance to the kernel's caches of its mount.
    ///
    /// # Errors
    /// When no thread can be had.
    pub fn attach_kernel(&self, kernel: Arc<dyn KernelCache>) -> io::Result<()> {
        let _ = self.notifications.set(Notifications::start(self.name(), kernel)?);
        Ok(())
    }

    /// From here on every request fails: what is flushed next is all there will be.
    pub fn refuse(&self) {
        self.refusing.store(true, Ordering::Release);
    }

    pub(crate) fn is_refusing(&self) -> bool {
        self.refusing.load(Ordering::Acquire)
    }

    /// Ends an open file for good. Unknown keys are ignored.
    pub fn release(&self, key: u64) {
        if let Some(file) = self.handles.remove(key) {
            file.close();
            if let Some(adopter) = self.adopter.get() {
                adopter.released(&file);
            }
        }
    }

    /// The user-level path changed the content of `node`, or its size to `grown_to` (with the last byte there): the kernel
    /// is told before this returns. Not for handlers of FUSE requests.
    pub(crate) fn content_changed(&self, node: NodeId, grown_to: Option<(u64, u8)>) {
        let (Some(view), Some(notifications)) = (self.nodes.changed(node), self.notifications.get()) else {
            return;
        };
        // Whoever wrote up to the end has made it the end, or has only overwritten it; all others need not tell the size.
        let is_the_end = |end| self.layer().getattr(&Caller::ROOT, node).map_or(true, |now| now.size == end);
        let grown_to = grown_to.filter(|&(end, _)| view.goes_by_size && is_the_end(end));
        if view.may_cache || grown_to.is_some() {
            notifications.tell(Job { number: view.number, pages: view.may_cache, grown_to });
        }
    }

    /// The mount is gone: everything the kernel and the sessions held is let go, then the layers are flushed.
    ///
    /// # Errors
    /// The first failure to make something durable.
    pub fn wind_up(&self) -> poolfs_libservice::Result<()> {
        self.handles.clear();
        for (node, count) in self.nodes.forget_all() {
            self.layer().forget(node, count);
        }
        self.layer().sync()
    }

    /// What it does and holds.
    #[must_use]
    pub fn status(&self) -> InstanceStatus {
        InstanceStatus {
            instance: self.spec.instance.clone(),
            mount_point: self.spec.mount_point.clone(),
            sessions: self.adopter.get().map_or(0, |adopter| adopter.sessions()),
            sessions_refused: self.adopter.get().map_or_else(BTreeMap::new, |adopter| {
                adopter.refused().into_iter().map(|(errno, count)| (errno.name().to_owned(), count)).collect()
            }),
            handles: self.handles.len() as u64,
            nodes: self.nodes.len(),
            kernel_cached_bytes: self.nodes.cached_bytes(),
            operations: self.statistics.report(),
            union: self.stack.union_status(),
        }
    }
}
