//! The cache layer itself: how it is made and shut down, and what several of its calls share.

use crate::cache_pool::CachePool;
use crate::core::{Core, Usage};
use crate::handles::{Handles, Open, OpenFile};
use crate::ledger::Recorder;
use crate::names::Known;
use crate::node::Node;
use crate::node_use::Use;
use crate::read_ahead::Reader;
use crate::state_directory::BranchKey;
use crate::state_directory::branch_name;
use crate::sync::{read, write};
use poolfs_libservice::{Entry, Error, Libservice, Result, fail};
use poolfs_types::{Caller, Errno, FileType, HandleId, Name, NodeId, OpenFlags, SetAttributes};
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLockWriteGuard};

/// The cache over one layer. All instances of a service that use a branch share one, so that its bytes live once.
///
/// The layer below must not be changed by anybody else while the cache is there, unless it says so ([`Libservice::attach`]). [`Cache::shutdown`] comes before the
/// cache is dropped: what is dirty then is still written back, but a failure is only logged, and the data lost.
pub struct Cache {
    pub(crate) core: Arc<Core<Node>>,
    pub(crate) handles: Handles,
    /// The threads must outlive the nodes they serve.
    _pool: Arc<CachePool>,
}

/// A node that a name led to, with a reference of its own.
pub(crate) struct Peeked<'a> {
    core: &'a Core<Node>,
    pub(crate) node: Arc<Node>,
}

impl Drop for Peeked<'_> {
    fn drop(&mut self) {
        self.core.forget(self.node.id, 1);
    }
}

impl Cache {
    /// A cache over `below` with its memory from `pool`.
    #[must_use]
    pub fn new(pool: &Arc<CachePool>, below: Arc<dyn Libservice>) -> Arc<Self> {
        Self::over(pool, below, None)
    }

    /// The same, and what is dirty outlives this process: [`CrashRecovery`](crate::CrashRecovery) of the pool's [directory](CachePool::kept_directory)
    /// have it then, by `key`. `branch` is what they say of which branch that is.
    ///
    /// # Errors
    /// `Unsupported` when the pool is not [kept](crate::CacheConfig::kept_at); else those of making a file there.
    pub fn recorded(
        pool: &Arc<CachePool>,
        below: Arc<dyn Libservice>,
        key: BranchKey,
        branch: &[u8],
    ) -> io::Result<Arc<Self>> {
        let Some(ledger) = &pool.pool.ledger else { return Err(io::ErrorKind::Unsupported.into()) };
        pool.pool.segments.named(&branch_name(&key))?.write_all(branch)?;
        Ok(Self::over(pool, below, Some(Recorder { ledger: Arc::clone(ledger), key })))
    }

    fn over(pool: &Arc<CachePool>, below: Arc<dyn Libservice>, recorder: Option<Recorder>) -> Arc<Self> {
        let core = Core::new(&pool.pool, &pool.background.lists, below, recorder);
        Arc::new(Self { core, handles: Handles::new(), _pool: Arc::clone(pool) })
    }

    /// What of the pool's memory this layer's files use, also for who does not keep the layer.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.core.usage()
    }

    /// Bytes of this layer's files that are not below yet, or not stored there where they can be found.
    #[must_use]
    pub fn dirty_bytes(&self) -> u64 {
        self.core.unsettled_bytes()
    }

    /// Those of them that are not below, and go there by themselves: not what is on hold.
    #[must_use]
    pub fn pending_bytes(&self) -> u64 {
        self.core.pending_bytes()
    }

    /// Whether so little is dirty, of all layers together, that a writer waits for nobody, and is far from it.
    #[must_use]
    pub fn is_at_ease(&self) -> bool {
        let budget = &self.core.pool.budget;
        budget.dirty() <= budget.dirty_max() / 4 * 3
    }

    /// Bytes that were written back so far, ever.
    #[must_use]
    pub fn taken_bytes(&self) -> u64 {
        self.core.taken_bytes()
    }

    /// Waits, for a bounded time, as long as files without a name may be about to end, until there is `enough` room; whether there is.
    pub fn wait_for_room(&self, enough: &mut dyn FnMut() -> bool) -> bool {
        self.core.leaving.wait(enough)
    }

    /// Ends the layer in order: everything dirty goes below and is made durable there. The layer may still be used
    /// afterwards, but nobody waits for what is written then.
    ///
    /// # Errors
    /// The first failure; the rest is still tried.
    pub fn shutdown(&self) -> Result<()> {
        let result = self.sync();
        for node in self.core.dirty_files() {
            let orphan = read(&node.state).orphan;
            if !orphan {
                tracing::error!(node = node.id.0, "data could not be written back before the end");
            }
        }
        result
    }

    /// Forgets everything clean: content, names, attributes. What is dirty or in use stays.
    pub fn drop_clean(&self) {
        self.core.names.clear();
        for node in self.core.nodes() {
            node.drop_clean();
            node.outdate();
        }
        self.core.trim_all();
    }

    pub(crate) fn node(&self, id: NodeId) -> Result<Arc<Node>> {
        self.core.get(id).map_or_else(|| fail(Errno::ESTALE), Ok)
    }

    /// The same; what is kept of it may be used.
    pub(crate) fn fresh(&self, id: NodeId) -> Result<Arc<Node>> {
        let node = self.node(id)?;
        node.validate()?;
        Ok(node)
    }

    pub(crate) fn directory(&self, id: NodeId) -> Result<Arc<Node>> {
        let node = self.node(id)?;
        if node.file_type() == FileType::Directory { Ok(node) } else { fail(Errno::ENOTDIR) }
    }

    /// The entry of a node whose reference the caller has just been given; without attributes there is no reference.
    pub(crate) fn entry(&self, node: &Arc<Node>) -> Result<Entry> {
        match node.validate().and_then(|()| node.attributes()) {
            Ok(attributes) => Ok(Entry { node: node.id, attributes }),
            Err(error) => {
                self.core.forget(node.id, 1);
                Err(error)
            }
        }
    }

    /// Makes something new in a directory by `make`, which asks the layer below.
    pub(crate) fn make<T>(
        &self,
        parent: NodeId,
        name: Name<'_>,
        make: impl Fn(&dyn Libservice) -> Result<(Entry, T)>,
    ) -> Result<(Arc<Node>, T)> {
        self.core.with_room(|| self.make_once(parent, name, &make))
    }

    fn make_once<T>(
        &self,
        parent: NodeId,
        name: Name<'_>,
        make: impl Fn(&dyn Libservice) -> Result<(Entry, T)>,
    ) -> Result<(Arc<Node>, T)> {
        let directory = self.directory(parent)?;
        let _changing = write(&directory.names);
        let (removals, epoch) = (self.core.removals(), self.core.epoch_of_names(parent));
        let (entry, with) = make(&*self.core.below)?;
        let node = self.core.adopt(&entry, removals);
        self.core.names.set(parent, name, Known::Present(node.id), epoch);
        directory.outdate();
        Ok((node, with))
    }

    /// What a name leads to, under the directory's lock; nothing when there is no such name. The node stays known while
    /// the answer is kept, so that nobody learns its number of names from an answer that the change to come overtakes.
    pub(crate) fn peek(
        &self,
        _changing: &RwLockWriteGuard<'_, ()>,
        parent: NodeId,
        name: Name<'_>,
    ) -> Result<Option<Peeked<'_>>> {
        let known = match self.core.known(parent, name).filter(|_| !self.core.coherence.is_shared()) {
            Some(Known::Absent) => return Ok(None),
            Some(Known::Present(id)) => self.core.reference(id),
            None => None,
        };
        if let Some(node) = known {
            return Ok(Some(Peeked { core: &self.core, node }));
        }
        let removals = self.core.removals();
        match self.core.below.lookup(&Caller::ROOT, parent, name) {
            Ok(entry) => Ok(Some(Peeked { core: &self.core, node: self.core.adopt(&entry, removals) })),
            // Such a name cannot be changed either, and the layer below says why.
            Err(error) if [Errno::ENOENT, Errno::ENAMETOOLONG].contains(&error.errno()) => Ok(None),
            // Whose name it is would stay unknown, and with it that the file has one fewer.
            Err(error) => Err(error),
        }
    }

    /// What a name leads to, where that is known here.
    pub(crate) fn peek_known(&self, parent: NodeId, name: Name<'_>) -> Option<Peeked<'_>> {
        match self.core.known(parent, name)? {
            Known::Present(id) => self.core.reference(id).map(|node| Peeked { core: &self.core, node }),
            Known::Absent => None,
        }
    }

    /// Removes a name by `remove`, which asks the layer below, and is told what the name is of and whether that has no other, where it is
    /// known.
    pub(crate) fn remove_name(
        &self,
        parent: NodeId,
        name: Name<'_>,
        remove: impl FnOnce(&dyn Libservice, Option<(NodeId, Option<bool>)>) -> Result<()>,
    ) -> Result<()> {
        let directory = self.directory(parent)?;
        let changing = write(&directory.names);
        let victim = self.peek(&changing, parent, name)?;
        let (below, epoch) = (&*self.core.below, self.core.epoch_of_names(parent));
        match &victim {
            // Others may give the name to something else before it goes.
            Some(Peeked { node, .. }) if self.core.coherence.is_shared() => node.lose_name(|_| remove(below, None))?,
            Some(Peeked { node, .. }) => node.lose_name(|is_last| remove(below, Some((node.id, is_last))))?,
            None => remove(below, None)?,
        }
        self.core.names.set(parent, name, Known::Absent, epoch);
        directory.outdate();
        Ok(())
    }

    /// Whether what a file has at any time it has for good.
    pub(crate) fn never_changes(&self) -> bool {
        !self.core.coherence.is_shared() && self.core.below.read_only()
    }

    pub(crate) fn insert_file(&self, node: Use, flags: OpenFlags) -> HandleId {
        let seen = AtomicU64::new(read(&node.0.state).error.sequence);
        self.handles.insert(Open::File(OpenFile { node, flags, seen, reader: Reader::default() }))
    }

    pub(crate) fn truncate_on_open(&self, caller: &Caller, node: &Use) -> Result<()> {
        let changes = SetAttributes { size: Some(0), ..SetAttributes::default() };
        let handle = node.0.writer_below()?;
        node.0.set_attributes(caller, &changes, Some(handle)).map(drop)
    }
}

impl OpenFile {
    /// The failure of an earlier write-back that this handle has not told yet; from now on it has.
    pub(crate) fn report(&self) -> Result<()> {
        let state = read(&self.node.0.state);
        let seen = self.seen.swap(state.error.sequence, Ordering::AcqRel);
        state.unreported(seen).map_or(Ok(()), Err)
    }

    /// The outcome of a write-back on behalf of this handle: its own failure counts as told.
    pub(crate) fn settle(&self, result: Result<()>) -> Result<()> {
        let earlier = self.report();
        match result {
            Ok(()) => earlier,
            Err(error) => Err(Error::new(error.errno(), format!("{:?} is not durable: {error}", self.node.0.id))),
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.handles.clear();
        if !self.core.dirty_files().is_empty()
            && let Err(error) = self.shutdown()
        {
            tracing::error!(%error, "a cache was dropped while dirty, and not everything could be written back");
        }
        self.core.clear();
        self.core.pool.mmap_exports.end(Arc::as_ptr(&self.core).addr());
        if let Some(recorder) = &self.core.recorder
            && let Err(error) = self.core.pool.segments.remove_named(&branch_name(&recorder.key))
        {
            tracing::warn!(%error, "the name of a branch stays in the cache's memory");
        }
    }
}
