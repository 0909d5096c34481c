//! The open files and directories of an instance, of both paths. The key is the FUSE front's file handle.

use crate::nodes::NodeTable;
use crate::nodes::content::Counted;
use crate::nodes::listings::{ListingUse, Opening};
use crate::nodes::passthrough::TextUse;
use crate::shares::{InstanceShares, OpenFileRoom};
use crate::sync::lock;
use hashbrown::HashMap;
use poolfs_libservice::types::{Caller, Errno, HandleId, NodeId, OpenFlags};
use poolfs_libservice::{Libservice, Result};
use poolfs_service_protocol::{NotDirect, NotPosted, OperationPath};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// Most files and directories one instance keeps open.
pub const HANDLES_MAX: usize = 1 << 17;

const SHARDS: usize = 16;

/// Who works on an open file besides the kernel.
#[derive(Default)]
struct Adoption {
    by_sessions: bool,
    given_up: bool,
    closed: bool,
    /// The one session that adopted it vouches that its process alone has the description, and has not mapped it.
    unshared: bool,
    /// Nobody can vouch for that any more.
    shared: bool,
}

impl Adoption {
    fn counts_for_sessions(&self) -> bool {
        self.by_sessions && !self.given_up
    }

    fn is_unshared(&self) -> bool {
        self.counts_for_sessions() && self.unshared && !self.shared
    }
}

/// One open file or directory. It ends in the layers when its last user lets it go, so that a request in service is
/// never left with a handle that was released under it.
pub struct OpenFile {
    key: u64,
    node: NodeId,
    flags: OpenFlags,
    directory: bool,
    handle: HandleId,
    /// A second handle with the opposite of `APPEND`: a description changes that flag while it is open (F_SETFL), and
    /// pages of a mapping are written back at their own offset through any handle.
    other: OnceLock<HandleId>,
    adoption: Mutex<Adoption>,
    announces_closing: AtomicBool,
    /// Of a directory: what the kernel does with its listings.
    listing: Mutex<ListingUse>,
    /// By request, and by the kernel.
    reads: [AtomicU64; 2],
    /// Small writes by request, until its writes may be posted.
    small_writes: AtomicU32,
    /// When its writes may be posted again.
    post_after: Mutex<Option<Instant>>,
    /// Why one failed whose caller had gone on; until somebody is told.
    post_failure: Mutex<Option<Errno>>,
    /// Posts of it that were taken.
    posted: AtomicU64,
    /// Why its writes may not be posted, as it was decided last.
    not_posted: Mutex<Option<NotPosted>>,
    /// Why it was given no segment when somebody last asked for one.
    not_direct: Mutex<Option<NotDirect>>,
    /// How the kernel reads it; until it is closed.
    text_use: Mutex<Option<TextUse>>,
    layer: Arc<dyn Libservice>,
    nodes: Arc<NodeTable>,
    _room: Option<OpenFileRoom>,
}

impl fmt::Debug for OpenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenFile")
            .field("key", &self.key)
            .field("node", &self.node)
            .field("flags", &self.flags)
            .finish()
    }
}

impl OpenFile {
    /// Its key in the instance's table: the FUSE front's file handle.
    #[must_use]
    pub fn key(&self) -> u64 {
        self.key
    }

    /// The file.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// How it was opened.
    #[must_use]
    pub fn flags(&self) -> OpenFlags {
        self.flags
    }

    /// Whether it is a directory.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        self.directory
    }

    /// Whether the kernel tells of every descriptor of it that is closed, before that is done: always of one that may be
    /// written, whose closing may have to report an error, and of others when it was asked for as they were opened.
    #[must_use]
    pub fn announces_closing(&self) -> bool {
        self.flags.writable() || self.announces_closing.load(Ordering::Relaxed)
    }

    /// Asks the kernel to tell of its closing. Before it hears of the open file.
    pub(crate) fn announce_closing(&self) {
        self.announces_closing.store(true, Ordering::Relaxed);
    }

    /// What the kernel, which is about to hear of the open directory, may do with its listing.
    pub(crate) fn open_listing(&self) -> Opening {
        self.nodes.open_listing(self.node, &mut self.listing())
    }

    /// The directory is about to be listed.
    pub(crate) fn walk_listing(&self) {
        self.nodes.walk_listing(self.node, &mut self.listing());
    }

    /// Whether the kernel, which keeps what it is listed and is about to hear that this was all, must not take it for the whole.
    pub(crate) fn listing_is_doubtful(&self) -> bool {
        let used = self.listing();
        used.keeps() && !self.nodes.may_complete(self.node, &used)
    }

    fn listing(&self) -> MutexGuard<'_, ListingUse> {
        lock(&self.listing)
    }

    /// Counts a read that was served.
    pub(crate) fn count_read(&self, path: OperationPath) {
        self.reads[usize::from(path == OperationPath::Fuse)].fetch_add(1, Ordering::Relaxed);
    }

    /// Reads by request, and by the kernel.
    #[must_use]
    pub fn reads(&self) -> [u64; 2] {
        self.reads.each_ref().map(|reads| reads.load(Ordering::Relaxed))
    }

    /// Counts a small write by request; whether it is the one of this number or a later one, and writes may be posted now.
    pub(crate) fn count_small_write(&self, from: u32) -> bool {
        let count = self.small_writes.load(Ordering::Relaxed);
        if count < from {
            self.small_writes.store(count + 1, Ordering::Relaxed);
        }
        let is_paused = |until: Option<Instant>| until.is_some_and(|until| Instant::now() < until);
        count + 1 >= from && !is_paused(*lock(&self.post_after))
    }

    /// Nothing is posted for a while.
    pub(crate) fn pause_posts(&self, pause: Duration) {
        *lock(&self.post_after) = Some(Instant::now() + pause);
    }

    /// A write whose caller has gone on has failed.
    pub(crate) fn note_post_failure(&self, errno: Errno) {
        lock(&self.post_failure).get_or_insert(errno);
    }

    /// Tells that a write has failed whose caller had gone on, once.
    pub(crate) fn posted_failure(&self) -> std::result::Result<(), Errno> {
        lock(&self.post_failure).take().map_or(Ok(()), Err)
    }

    /// Counts posts that were taken.
    pub(crate) fn count_posted(&self, count: usize) {
        self.posted.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Posts of it that were taken so far.
    #[must_use]
    pub fn posted(&self) -> u64 {
        self.posted.load(Ordering::Relaxed)
    }

    /// Notes why its writes may not be posted, or that they may.
    pub(crate) fn note_not_posted(&self, cause: Option<NotPosted>) {
        *lock(&self.not_posted) = cause;
    }

    /// Why its writes might not be posted when that was decided last.
    #[must_use]
    pub fn not_posted(&self) -> Option<NotPosted> {
        *lock(&self.not_posted)
    }

    /// Notes why somebody who asked to read it by himself may not, or that he may.
    pub(crate) fn note_not_direct(&self, cause: Option<NotDirect>) {
        *lock(&self.not_direct) = cause;
    }

    /// Why the last one who asked to read it by himself may not, if he may not.
    #[must_use]
    pub fn not_direct(&self) -> Option<NotDirect> {
        *lock(&self.not_direct)
    }

    /// Notes how the kernel reads it.
    pub(crate) fn set_use(&self, text_use: TextUse) {
        *lock(&self.text_use) = Some(text_use);
    }

    /// Whether a session of the user-level path works on it.
    #[must_use]
    pub fn is_adopted(&self) -> bool {
        self.adoption().counts_for_sessions()
    }

    /// Notes that sessions have adopted the file, or that the last of them has let it go. While none has adopted a file that
    /// is open for writing, it may be changed through a mapping of the kernel, and the user-level path keeps off its
    /// content. Answers whether the file counts as adopted now: one that is closed or was given up does not.
    pub fn set_adopted(&self, adopted: bool) -> bool {
        self.change_adoption(|state| {
            state.by_sessions = adopted && !state.closed;
            state.unshared &= state.by_sessions;
            state.counts_for_sessions()
        })
    }

    /// The file is about to be mapped shared and writable: from here on its content is the kernel's for all sessions, and it
    /// is not adopted again.
    pub fn give_up(&self) {
        self.change_adoption(|state| state.given_up = true);
    }

    /// The session that adopted the file vouches that its process alone has the description, and has not mapped it, until it says
    /// that it is shared.
    pub fn vouch_unshared(&self) {
        self.change_adoption(|state| state.unshared = true);
    }

    /// Others than the process that adopted the file may have the description, or it may be mapped: from here on it counts as one by
    /// which somebody goes by the size that the kernel knows. Whether it did not until now.
    pub fn share(&self) -> bool {
        self.change_adoption(|state| {
            let was_unshared = state.is_unshared();
            state.shared = true;
            was_unshared
        })
    }

    /// Whether a session vouches that nobody else has the description.
    #[must_use]
    pub fn is_unshared(&self) -> bool {
        self.adoption().is_unshared()
    }

    /// The kernel has closed the file for good.
    pub(crate) fn close(&self) {
        // Before the node may be forgotten.
        drop(lock(&self.text_use).take());
        let mut state = self.adoption();
        if !std::mem::replace(&mut state.closed, true) {
            let append = self.flags.contains(OpenFlags::APPEND);
            self.nodes.close_listing(self.node, &mut self.listing());
            self.nodes.closed(self.node, append, self.counted(&state));
        }
    }

    fn adoption(&self) -> MutexGuard<'_, Adoption> {
        lock(&self.adoption)
    }

    fn change_adoption<T>(&self, change: impl FnOnce(&mut Adoption) -> T) -> T {
        let mut state = self.adoption();
        let before = self.counted(&state);
        let outcome = change(&mut state);
        let after = self.counted(&state);
        if before != after && !state.closed {
            self.nodes.recount(self.node, before, after);
        }
        outcome
    }

    fn counted(&self, state: &Adoption) -> Counted {
        let may_write = self.flags.writable() && !self.directory;
        Counted { writer: may_write && !state.counts_for_sessions(), by_size: !state.is_unshared() }
    }

    /// The layers' handle.
    pub(crate) fn handle(&self) -> HandleId {
        self.handle
    }

    /// The layers' handle for a write that appends, or does not.
    pub(crate) fn handle_for(&self, caller: &Caller, append: bool) -> Result<HandleId> {
        if append == self.flags.contains(OpenFlags::APPEND) {
            return Ok(self.handle);
        }
        if let Some(&handle) = self.other.get() {
            return Ok(handle);
        }
        let mut flags = layer_flags(self.flags) - OpenFlags::TRUNCATE;
        flags.set(OpenFlags::APPEND, append);
        let opened = self.layer.open(caller, self.node, flags)?;
        let kept = *self.other.get_or_init(|| opened);
        if kept != opened {
            self.layer.release(opened);
        }
        Ok(kept)
    }

    /// All of the layers' handles.
    pub(crate) fn handles(&self) -> impl Iterator<Item = HandleId> {
        [Some(self.handle), self.other.get().copied()].into_iter().flatten()
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.close();
        for handle in self.handles() {
            self.layer.release(handle);
        }
    }
}

/// The flags the layers see: the kernel has dealt with `O_DIRECT` and `O_NOFOLLOW`, the service itself with the sync bits.
pub(crate) fn layer_flags(flags: OpenFlags) -> OpenFlags {
    flags & (OpenFlags::WRITE_ONLY | OpenFlags::READ_WRITE | OpenFlags::APPEND | OpenFlags::TRUNCATE)
}

/// The open files of an instance.
pub struct HandleTable {
    shards: [RwLock<HashMap<u64, Arc<OpenFile>>>; SHARDS],
    next: AtomicU64,
    count: AtomicUsize,
    layer: Arc<dyn Libservice>,
    nodes: Arc<NodeTable>,
    shares: OnceLock<Arc<InstanceShares>>,
}

impl HandleTable {
    pub(crate) fn new(layer: Arc<dyn Libservice>, nodes: Arc<NodeTable>) -> Self {
        Self {
            shards: std::array::from_fn(|_| RwLock::new(HashMap::new())),
            next: AtomicU64::new(1),
            count: AtomicUsize::new(0),
            layer,
            nodes,
            shares: OnceLock::new(),
        }
    }

    /// From now on open files are those of an instance that shares the pool with others; once.
    pub(crate) fn set_shares(&self, shares: &Arc<InstanceShares>) {
        let _ = self.shares.set(Arc::clone(shares));
    }

    fn shard(&self, key: u64) -> &RwLock<HashMap<u64, Arc<OpenFile>>> {
        &self.shards[key as usize % SHARDS]
    }

    /// Reserves room for one more file, before the layers open it.
    pub(crate) fn reserve(&self) -> std::result::Result<Reservation<'_>, Errno> {
        let is_full = self.count.fetch_add(1, Ordering::Relaxed) >= HANDLES_MAX;
        // Dropped, it counts one less.
        let mut reservation = Reservation { table: self, room: None, used: false };
        if is_full {
            return Err(Errno::ENFILE);
        }
        if let Some(shares) = self.shares.get() {
            reservation.room = Some(shares.open_file().ok_or(Errno::ENFILE)?);
        }
        Ok(reservation)
    }

    /// The open file with this key.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn get(&self, key: u64) -> std::result::Result<Arc<OpenFile>, Errno> {
        let shard = self.shard(key).read().unwrap_or_else(PoisonError::into_inner);
        shard.get(&key).cloned().ok_or(Errno::EBADF)
    }

    /// Takes the file out of the table.
    pub(crate) fn remove(&self, key: u64) -> Option<Arc<OpenFile>> {
        let removed = self.shard(key).write().unwrap_or_else(PoisonError::into_inner).remove(&key);
        if removed.is_some() {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        removed
    }

    /// Takes all files out of the table.
    pub(crate) fn clear(&self) {
        for shard in &self.shards {
            let files = std::mem::take(&mut *shard.write().unwrap_or_else(PoisonError::into_inner));
            self.count.fetch_sub(files.len(), Ordering::Relaxed);
        }
    }

    /// Open files now.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether nothing is open.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Room for one file in the table, given back unless it is used.
pub(crate) struct Reservation<'a> {
    table: &'a HandleTable,
    room: Option<OpenFileRoom>,
    used: bool,
}

impl Reservation<'_> {
    /// Enters an open file.
    pub(crate) fn enter(mut self, node: NodeId, handle: HandleId, flags: OpenFlags, directory: bool) -> Arc<OpenFile> {
        self.used = true;
        self.table.nodes.opened(node, flags.writable() && !directory, flags.contains(OpenFlags::APPEND));
        let key = self.table.next.fetch_add(1, Ordering::Relaxed);
        let file = Arc::new(OpenFile {
            key,
            node,
            flags,
            directory,
            handle,
            other: OnceLock::new(),
            adoption: Mutex::default(),
            announces_closing: AtomicBool::new(false),
            listing: Mutex::default(),
            reads: Default::default(),
            small_writes: AtomicU32::new(0),
            post_after: Mutex::default(),
            post_failure: Mutex::default(),
            posted: AtomicU64::new(0),
            not_posted: Mutex::default(),
            not_direct: Mutex::default(),
            text_use: Mutex::default(),
            layer: Arc::clone(&self.table.layer),
            nodes: Arc::clone(&self.table.nodes),
            _room: self.room.take(),
        });
        let mut shard = self.table.shard(key).write().unwrap_or_else(PoisonError::into_inner);
        shard.insert(key, Arc::clone(&file));
        file
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if !self.used {
            self.table.count.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_libservice::memory::Memory;
    use poolfs_libservice::types::Name;

    const ROOT: Caller = Caller::ROOT;

    fn table() -> (Arc<Memory>, HandleTable) {
        let layer = Memory::new();
        (Arc::clone(&layer), HandleTable::new(layer, Arc::new(NodeTable::default())))
    }

    fn create(layer: &Memory, table: &HandleTable, flags: OpenFlags) -> Arc<OpenFile> {
        let name = Name::new(b"a").expect("a name");
        let (entry, handle) = layer.create(&ROOT, NodeId::ROOT, name, 0o600, flags).expect("room");
        table.nodes.enter(entry.node, entry.attributes.inode);
        table.reserve().expect("room").enter(entry.node, handle, flags, false)
    }

    #[test]
    fn a_writer_belongs_to_the_kernel_until_all_is_adopted_and_after_it_is_given_up() {
        let (layer, table) = table();
        let file = create(&layer, &table, OpenFlags::READ_WRITE);
        assert!(table.nodes.may_map(file.node()));
        assert!(file.set_adopted(true) && file.set_adopted(true));
        assert!(!table.nodes.may_map(file.node()));
        assert!(!file.set_adopted(false));
        assert!(table.nodes.may_map(file.node()));
        assert!(file.set_adopted(true));
        file.give_up();
        assert!(table.nodes.may_map(file.node()) && !file.is_adopted() && !file.set_adopted(true));
        file.close();
        assert!(!table.nodes.may_map(file.node()) && !file.set_adopted(true));
    }

    #[test]
    fn a_description_that_was_shared_once_stays_shared() {
        let (layer, table) = table();
        let file = create(&layer, &table, OpenFlags::READ_WRITE);
        let goes_by_size = || {
            let view = table.nodes.changed(file.node());
            view.inspect(|_| table.nodes.told(file.node())).is_some_and(|view| view.goes_by_size)
        };
        file.vouch_unshared();
        assert!(goes_by_size(), "nobody has adopted it");
        assert!(file.set_adopted(true) && !goes_by_size());
        assert!(!file.set_adopted(false) && goes_by_size());
        assert!(file.set_adopted(true) && goes_by_size(), "a new session has to vouch for it");
        file.vouch_unshared();
        assert!(file.is_unshared() && !goes_by_size());
        assert!(file.share() && !file.share());
        file.vouch_unshared();
        assert!(goes_by_size());
    }

    #[test]
    fn appending_can_be_switched_on_an_open_file_and_all_handles_end() {
        let (layer, table) = table();
        let file = create(&layer, &table, OpenFlags::READ_WRITE);
        layer.write(&ROOT, file.handle_for(&ROOT, false).expect("open"), 0, b"ab").expect("room");
        layer.write(&ROOT, file.handle_for(&ROOT, true).expect("open"), 0, b"cd").expect("room");
        let mut bytes = [0; 8];
        assert_eq!(layer.read(&ROOT, file.handle(), 0, &mut bytes).expect("readable"), 4);
        assert_eq!(&bytes[..4], b"abcd");
        assert_eq!(layer.outstanding().1, 2);
        let key = file.key();
        drop(file);
        assert!(table.remove(key).is_some() && table.get(key).is_err() && table.is_empty());
        assert_eq!(layer.outstanding().1, 0);
    }

    #[test]
    fn room_that_is_not_used_is_given_back() {
        let (_, table) = table();
        drop(table.reserve().expect("room"));
        assert!(table.is_empty());
    }
}
