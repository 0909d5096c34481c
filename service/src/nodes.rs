//! The node table of a mount: FUSE numbers of the nodes that the kernel knows, the kernel's references, and what the kernel may
//! hold of their content.
//!
//! A node's FUSE number is its inode number: the FUSE library puts the same number into both, and `d_ino` of a listing must equal
//! `st_ino`. If two live nodes ever have one inode number, the second gets a number of its own.
//!
//! Two flags decide how the two paths meet on one file. `may_cache`: FUSE has read or written it, so the kernel may hold pages.
//! `may_map`: it is open for writing by somebody who is not known to work by requests, or pages of a mapping have been written
//! back, so that the kernel may hold changes that nobody has told the service of. Which users depend on the size that the kernel
//! knows is in [`content`].
//!
//! What the kernel may keep of attributes and names without asking is noted in [`held`], of listings in [`listings`]; what
//! clients may show of attributes without asking in [`notices`]; which programs the kernel maps by itself in [`passthrough`].

mod admission;
pub mod content;
pub mod held;
pub mod listings;
pub mod notices;
pub mod passthrough;
pub(crate) mod privileges;
pub mod pruning;

use crate::leases::SegmentLease;
use crate::sync::lock;
use content::Counted;
use hashbrown::HashMap;
use held::{Held, NamesHeld};
use listings::Listing;
use passthrough::{Backing, PassthroughFiles, TextState};
use poolfs_ipc::notice::Edition;
use poolfs_libservice::types::{Errno, NodeId};
use poolfs_libservice::{Lease, Share};
use poolfs_service_protocol::NotDirect;
use pruning::Known;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

/// FUSE's number of the root directory.
pub const ROOT_NUMBER: u64 = 1;

/// The user who may have what filesystems keep for root.
const ROOT_USER: u32 = 0;

const SHARDS: usize = 64;

/// Numbers from here on are not inode numbers.
const OWN_NUMBERS: u64 = 1 << 63;

#[derive(Default)]
struct NodeState {
    number: u64,
    /// As the kernel shows it.
    inode: u64,
    kernel_references: u64,
    /// When it was last looked up, counted in look-ups.
    entered: u64,
    open_files: u32,
    /// Files open for writing by FUSE that no session adopted.
    writers: u32,
    /// Open files of which somebody may go by the size the kernel knows: all that are not proved unshared.
    by_size: u32,
    /// Files open to append.
    appenders: u32,
    /// Bytes the kernel has read or written since its pages were last dropped, at most up to the highest of them.
    cached_bytes: u64,
    highest_byte: u64,
    may_cache: bool,
    /// Changes whose notifications about pages are on their way.
    telling_pages: u32,
    /// Changes of the content by the user-level path, and up to which of them the kernel was told the size. In between it may know
    /// an older one: answers with the size are refused by it when they cross a notification.
    changes: u64,
    size_told: u64,
    /// Requests so far (SETATTR, LINK) with the answer to which the kernel takes the size, whatever it was told since that was given; and how many of
    /// them it is known to have done with.
    size_answers: u64,
    size_answers_applied: u64,
    /// Posts have changed the content since the kernel last asked for the size.
    size_unshown: bool,
    /// Pages of a shared mapping were written back; until the last file is closed.
    mapped: bool,
    /// Somebody writes it without waiting for answers: the kernel keeps nothing of it.
    posting: bool,
    /// The last user other than root who has opened it to write, and may have mapped it; until the last file is closed.
    user: Option<u32>,
    /// Pages of a mapping could not be written back, and why; until the last file is closed. The kernel has them, takes them for written,
    /// and reports that once; who closes the file next is told of it, and the service then not of the closing.
    write_back_failed: Option<Errno>,
    /// Known to have neither set-id bits nor capabilities, so that a write need not look.
    unprivileged: bool,
    /// Which change of its privileges was the last.
    privileges: u64,
    held: Held,
    listing: Listing,
    text: TextState,
    /// Clients read its content by themselves.
    lease: Option<Arc<SegmentLease>>,
    /// Of its attributes, as the lease's notice has them.
    edition: Edition,
    /// What tells it from earlier and later ones of the same node.
    born: u64,
}

impl NodeState {
    /// Nobody may take what he reads by himself for the content any more.
    fn revoke(&mut self) {
        if let Some(lease) = self.lease.take() {
            lease.revoke();
        }
    }

    fn may_map(&self) -> bool {
        self.writers > 0 || self.mapped
    }

    fn is_idle(&self) -> bool {
        !self.posting && self.kernel_references == 0 && self.open_files == 0 && self.number != ROOT_NUMBER
    }
}

/// The nodes the kernel knows.
pub struct NodeTable {
    states: [Mutex<HashMap<NodeId, NodeState>>; SHARDS],
    numbers: [Mutex<HashMap<u64, NodeId>>; SHARDS],
    next_own: AtomicU64,
    /// Changes of privileges, and states made, so far.
    privileges: AtomicU64,
    /// Changes of privileges alone.
    privileges_changes: AtomicU64,
    count: AtomicU64,
    /// The count of all mounts together.
    known: OnceLock<Arc<Known>>,
    /// What it may have of what the instances share.
    share: OnceLock<Arc<Share>>,
    /// Who waits for the kernel to forget some.
    waiting: AtomicU64,
    /// When somebody last has waited in vain.
    in_vain: Mutex<Option<Instant>>,
    entries: AtomicU64,
    cached_bytes: AtomicU64,
    /// The kernel may keep attributes and names at all.
    holding: AtomicBool,
    /// Changes of attributes, of all nodes together.
    changes_begun: AtomicU64,
    changes_ended: AtomicU64,
    names_held: NamesHeld,
    texts: PassthroughFiles,
}

impl Default for NodeTable {
    fn default() -> Self {
        let table = Self {
            states: std::array::from_fn(|_| Mutex::default()),
            numbers: std::array::from_fn(|_| Mutex::default()),
            next_own: AtomicU64::new(OWN_NUMBERS),
            privileges: AtomicU64::new(1),
            privileges_changes: AtomicU64::new(0),
            count: AtomicU64::new(0),
            known: OnceLock::new(),
            share: OnceLock::new(),
            waiting: AtomicU64::new(0),
            in_vain: Mutex::default(),
            entries: AtomicU64::new(0),
            cached_bytes: AtomicU64::new(0),
            holding: AtomicBool::new(false),
            changes_begun: AtomicU64::new(0),
            changes_ended: AtomicU64::new(0),
            names_held: NamesHeld::default(),
            texts: PassthroughFiles::default(),
        };
        // The kernel knows the root from the start, without a reference.
        table.states(NodeId::ROOT).insert(NodeId::ROOT, NodeState { number: ROOT_NUMBER, ..NodeState::default() });
        table
    }
}

impl NodeTable {
    fn states(&self, node: NodeId) -> MutexGuard<'_, HashMap<NodeId, NodeState>> {
        lock(&self.states[node.0 as usize % SHARDS])
    }

    fn numbers(&self, number: u64) -> MutexGuard<'_, HashMap<u64, NodeId>> {
        lock(&self.numbers[number as usize % SHARDS])
    }

    /// Notes one reference of the kernel (the layers' one is its counterpart) and answers the node's FUSE number.
    pub fn enter(&self, node: NodeId, inode: u64) -> u64 {
        if node == NodeId::ROOT {
            return ROOT_NUMBER;
        }
        let mut states = self.states(node);
        let state = states.entry(node).or_insert_with(|| self.new_state());
        if state.number == 0 {
            state.number = self.number_for(node, inode);
        }
        state.inode = inode;
        let is_new = state.kernel_references == 0;
        state.kernel_references += 1;
        state.entered = self.entries.fetch_add(1, Ordering::Relaxed);
        if is_new {
            self.count_entered();
        }
        state.number
    }

    /// The inode number of a node that the kernel knows, as it was looked up; no layer is asked.
    #[must_use]
    pub fn inode(&self, node: NodeId) -> Option<u64> {
        self.states(node).get(&node).map(|state| state.inode).filter(|&inode| inode != 0)
    }

    /// Gives it a share of the nodes that the kernel may know; once, and before it knows any.
    pub(crate) fn set_share(&self, share: &Arc<Share>) {
        let _ = self.share.set(Arc::clone(share));
    }

    /// The kernel knows one more.
    fn count_entered(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.share.get().into_iter().for_each(|share| share.force(1));
        self.known.get().into_iter().for_each(|known| known.entered());
    }

    /// The kernel knows fewer by so many.
    fn count_left(&self, nodes: u64) {
        self.count.fetch_sub(nodes, Ordering::Relaxed);
        self.share.get().into_iter().for_each(|share| share.subtract(nodes));
        self.known.get().into_iter().for_each(|known| known.left(nodes));
    }

    /// A state that nobody has looked at: nobody knows its version.
    fn new_state(&self) -> NodeState {
        let born = self.privileges.fetch_add(1, Ordering::Relaxed);
        NodeState { privileges: born, born, ..NodeState::default() }
    }

    fn number_for(&self, node: NodeId, inode: u64) -> u64 {
        if inode > ROOT_NUMBER && inode < OWN_NUMBERS {
            let mut numbers = self.numbers(inode);
            if !numbers.contains_key(&inode) {
                numbers.insert(inode, node);
                return inode;
            }
        }
        self.own_number(node)
    }

    /// A number for the node that no inode has.
    fn own_number(&self, node: NodeId) -> u64 {
        let own = self.next_own.fetch_add(1, Ordering::Relaxed);
        self.numbers(own).insert(own, node);
        own
    }

    /// The node with this FUSE number.
    #[must_use]
    pub fn node(&self, number: u64) -> Option<NodeId> {
        if number == ROOT_NUMBER {
            return Some(NodeId::ROOT);
        }
        self.numbers(number).get(&number).copied()
    }

    /// The kernel gives back `count` references of the node with this number; answers the node and how many references
    /// the layers are owed.
    pub fn forget(&self, number: u64, count: u64) -> Option<(NodeId, u64)> {
        if number == ROOT_NUMBER {
            return None;
        }
        if let Some(owed) = self.forget_retired(number, count) {
            return Some(owed);
        }
        let node = self.node(number)?;
        let mut states = self.states(node);
        let state = states.get_mut(&node)?;
        let given_back = count.min(state.kernel_references);
        state.kernel_references -= given_back;
        if state.kernel_references == 0 && given_back > 0 {
            self.count_left(1);
        }
        let gone = self.tidy(&mut states, node);
        drop(states);
        drop(gone);
        Some((node, given_back))
    }

    /// Forgets every reference of the kernel: the mount is gone. Answers what the layers are owed.
    pub fn forget_all(&self) -> Vec<(NodeId, u64)> {
        let mut owed = Vec::new();
        let mut backings = Vec::new();
        for shard in &self.states {
            let mut states = lock(shard);
            backings.extend(states.values_mut().filter_map(|state| state.text.take_backing()));
            let referenced = states.iter().filter(|(_, state)| state.kernel_references > 0);
            owed.extend(referenced.map(|(&node, state)| (node, state.kernel_references)));
            states.values_mut().for_each(NodeState::revoke);
            states.clear();
        }
        for shard in &self.numbers {
            lock(shard).clear();
        }
        self.count_left(owed.len() as u64);
        self.cached_bytes.store(0, Ordering::Relaxed);
        self.names_held.clear();
        owed.extend(self.forget_all_retired());
        owed
    }

    /// Forgets the node if nobody uses it; what the kernel had of it is to be dropped when nothing is locked.
    #[must_use]
    fn tidy(&self, states: &mut HashMap<NodeId, NodeState>, node: NodeId) -> Option<Arc<Backing>> {
        let state = states.get(&node).filter(|state| state.is_idle())?;
        let (number, cached) = (state.number, state.cached_bytes);
        let mut gone = states.remove(&node);
        gone.iter_mut().for_each(NodeState::revoke);
        self.cached_bytes.fetch_sub(cached, Ordering::Relaxed);
        gone.iter().for_each(|state| self.names_held.forget(&state.held));
        if number != 0 {
            self.numbers(number).remove(&number);
        }
        gone.and_then(|mut state| state.text.take_backing())
    }

    /// A file of the node was opened by FUSE.
    pub fn opened(&self, node: NodeId, writable: bool, append: bool) {
        let mut states = self.states(node);
        let state = states.entry(node).or_insert_with(|| self.new_state());
        state.open_files += 1;
        state.by_size += 1;
        state.writers += u32::from(writable);
        state.appenders += u32::from(append);
        if writable {
            state.revoke();
        }
    }

    /// Whoever opened a file of the node to write may come to map it: the kernel does not tell whose the pages are that it writes back.
    pub(crate) fn opened_to_write_by(&self, node: NodeId, user: u32) {
        if user != ROOT_USER
            && let Some(state) = self.states(node).get_mut(&node)
        {
            state.user = Some(user);
        }
    }

    /// For whom pages of mappings of the node are stored: root, where nobody else has opened it to write.
    pub(crate) fn user_of_mappings(&self, node: NodeId) -> u32 {
        self.states(node).get(&node).and_then(|state| state.user).unwrap_or(ROOT_USER)
    }

    /// A file of the node was closed for good, that counted so.
    pub fn closed(&self, node: NodeId, append: bool, counted: Counted) {
        let mut states = self.states(node);
        if let Some(state) = states.get_mut(&node) {
            state.open_files = state.open_files.saturating_sub(1);
            state.by_size = state.by_size.saturating_sub(u32::from(counted.by_size));
            state.writers = state.writers.saturating_sub(u32::from(counted.writer));
            state.appenders = state.appenders.saturating_sub(u32::from(append));
            state.mapped &= state.open_files > 0;
            state.user = state.user.filter(|_| state.open_files > 0);
            if state.open_files == 0 {
                state.revoke();
            }
        }
        let gone = self.tidy(&mut states, node);
        drop(states);
        drop(gone);
    }

    /// An open file counts differently from here on: a session has adopted it or let it go, or it has come to be shared.
    pub(crate) fn recount(&self, node: NodeId, before: Counted, after: Counted) {
        if let Some(state) = self.states(node).get_mut(&node) {
            let change = |before: bool, after: bool| i32::from(after) - i32::from(before);
            state.by_size = state.by_size.saturating_add_signed(change(before.by_size, after.by_size));
            state.writers = state.writers.saturating_add_signed(change(before.writer, after.writer));
            if state.writers > 0 {
                state.revoke();
            }
        }
    }

    /// A lease for those who read the node's content by themselves, unless the kernel may hold changes of it: the node's own,
    /// or the one that `make` brings.
    pub(crate) fn lease(
        &self,
        node: NodeId,
        make: impl FnOnce() -> Option<Arc<SegmentLease>>,
    ) -> Option<Arc<SegmentLease>> {
        let mut states = self.states(node);
        let state = states
            .get_mut(&node)
            .filter(|state| !state.may_map() && state.write_back_failed.is_none() && state.open_files > 0)?;
        if state.lease.as_ref().is_none_or(|lease| lease.is_revoked()) {
            state.lease = make();
        }
        state.lease.clone()
    }

    /// Why the node has no lease to give, if that is known.
    pub(crate) fn without_lease(&self, node: NodeId) -> Option<NotDirect> {
        let states = self.states(node);
        let state = states.get(&node)?;
        match state {
            NodeState { mapped: true, .. } => Some(NotDirect::Mapped),
            NodeState { write_back_failed: Some(_), .. } => Some(NotDirect::WriteBackFailed),
            state if state.writers > 0 => Some(NotDirect::Writers),
            _ => None,
        }
    }

    /// Pages of a mapping of the node could not be written back: nobody reads it by himself, and nobody is told that it is durable, as long
    /// as it is open.
    pub(crate) fn write_back_failed(&self, node: NodeId, cause: Errno) {
        if let Some(state) = self.states(node).get_mut(&node) {
            state.write_back_failed = Some(cause);
            state.revoke();
        }
    }

    /// Why not all that was stored in mappings of the node is in the layers.
    pub(crate) fn failed_write_back(&self, node: NodeId) -> Option<Errno> {
        self.states(node).get(&node).and_then(|state| state.write_back_failed)
    }

    /// The number of a node that nobody has open any more and whose pages could not be written back: the kernel has to drop them. Told once.
    pub(crate) fn lost_pages(&self, node: NodeId) -> Option<u64> {
        let mut states = self.states(node);
        let state = states.get_mut(&node).filter(|state| state.open_files == 0)?;
        state.write_back_failed.take().map(|_| state.number)
    }

    /// A descriptor of the node is being closed: who reads it by himself verifies anew what his descriptors stand for.
    pub(crate) fn closing(&self, node: NodeId) {
        if let Some(lease) = self.states(node).get(&node).and_then(|state| state.lease.as_ref()) {
            lease.count_closing();
        }
    }

    /// Whether the kernel may hold changes of the content that the service does not know.
    #[must_use]
    pub fn may_map(&self, node: NodeId) -> bool {
        self.states(node).get(&node).is_some_and(NodeState::may_map)
    }

    /// FUSE is about to read or write `bytes` of the node. To be called before the layers are, so that whoever changes the
    /// content afterwards sees the flag.
    pub fn touched(&self, node: NodeId, offset: u64, bytes: u64, from_mapping: bool) {
        if let Some(state) = self.states(node).get_mut(&node) {
            state.may_cache = true;
            state.mapped |= from_mapping;
            if from_mapping {
                state.revoke();
            }
            state.highest_byte = state.highest_byte.max(offset.saturating_add(bytes));
            let cached = state.cached_bytes.saturating_add(bytes).min(state.highest_byte);
            self.cached_bytes.fetch_add(cached - state.cached_bytes, Ordering::Relaxed);
            state.cached_bytes = cached;
        }
    }

    /// Nodes the kernel knows.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether it knows none but the root.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes the kernel has read or written since it was last told to drop them: at most what it caches of these files.
    #[must_use]
    pub fn cached_bytes(&self) -> u64 {
        self.cached_bytes.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_inode_numbers_unless_taken() {
        let table = NodeTable::default();
        assert_eq!(table.enter(NodeId(7), 70), 70);
        assert_eq!(table.enter(NodeId(7), 70), 70);
        let second = table.enter(NodeId(8), 70);
        assert!(second >= OWN_NUMBERS);
        assert!(table.enter(NodeId(9), 1) >= OWN_NUMBERS);
        assert_eq!((table.node(70), table.node(second)), (Some(NodeId(7)), Some(NodeId(8))));
        assert_eq!(table.len(), 3);
        assert_eq!(table.forget(70, 1), Some((NodeId(7), 1)));
        assert_eq!(table.forget(70, 5), Some((NodeId(7), 1)));
        assert_eq!((table.node(70), table.forget(70, 1)), (None, None));
        assert_eq!(table.len(), 2);
        assert_eq!(table.enter(NodeId::ROOT, 2), ROOT_NUMBER);
    }

    #[test]
    fn nobody_reads_by_himself_what_the_kernel_could_not_write_back() {
        let table = NodeTable::default();
        table.enter(NodeId(7), 70);
        table.opened(NodeId(7), false, false);
        let is_considered = || {
            let mut asked = false;
            let none = table.lease(NodeId(7), || {
                asked = true;
                None
            });
            assert!(none.is_none());
            asked
        };
        assert!(is_considered());
        table.write_back_failed(NodeId(7), Errno::ENOSPC);
        assert!(!is_considered());
        assert_eq!((table.failed_write_back(NodeId(7)), table.lost_pages(NodeId(7))), (Some(Errno::ENOSPC), None));
        table.closed(NodeId(7), false, Counted { writer: false, by_size: true });
        assert_eq!((table.lost_pages(NodeId(7)), table.lost_pages(NodeId(7))), (Some(70), None));
        assert_eq!(table.failed_write_back(NodeId(7)), None);
    }

    #[test]
    fn pages_of_mappings_are_those_of_whoever_may_have_mapped_the_file_and_is_not_root() {
        let table = NodeTable::default();
        let node = NodeId(7);
        table.enter(node, 70);
        let open = |user| {
            table.opened(node, true, false);
            table.opened_to_write_by(node, user);
        };
        let close = || table.closed(node, false, Counted { writer: true, by_size: true });
        open(0);
        assert_eq!(table.user_of_mappings(node), 0);
        open(1000);
        open(0);
        assert_eq!(table.user_of_mappings(node), 1000);
        close();
        close();
        assert_eq!(table.user_of_mappings(node), 1000, "root's may be the one that was closed");
        close();
        open(0);
        assert_eq!(table.user_of_mappings(node), 0);
    }

    #[test]
    fn an_open_file_outlives_the_kernels_references() {
        let table = NodeTable::default();
        table.enter(NodeId(7), 70);
        table.opened(NodeId(7), false, false);
        table.forget(70, 1);
        assert_eq!(table.node(70), Some(NodeId(7)));
        table.closed(NodeId(7), false, Counted { writer: false, by_size: true });
        assert_eq!(table.node(70), None);
        assert!(table.forget_all().is_empty());
    }
}
