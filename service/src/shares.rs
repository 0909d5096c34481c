//! The resources that a service's instances share, and the share of each: one that takes all it can leaves every other at least
//! half of an equal share ([`Shares`]).

use crate::memory::level::State;
use crate::pool_memory::PoolMemory;
use crate::transfers::{MountTransfers, PoolTransfers};
use poolfs_ipc::service::SessionMemory;
use poolfs_libservice::{Headroom, Share, Shares, Taken};
use rustix::process::{Resource, getrlimit};
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// What a node that the kernel knows takes of the service's memory, in all layers together.
pub const NODE_BYTES: u64 = 3072;

/// Nodes that the kernel knows of all mounts together, when it can be made to forget those that nobody uses: one for so much of the cache's
/// memory, within bounds.
const CACHE_BYTES_PER_NODE: u64 = 16 << 10;
const NODES: RangeInclusive<u64> = 4096..=1 << 14;

/// Nodes beyond those, which somebody uses or the kernel does not give back: one part in so many of the cache's memory, and what a service
/// has besides its cache carries at least.
const NODES_IN_USE_PART: u64 = 4;
const NODES_IN_USE_MIN: u64 = 1 << 15;

/// What an open file takes of the service's memory, in all layers together.
pub const OPEN_FILE_BYTES: u64 = 5632;

/// Open files of all instances: one part in so many of the cache's memory, within bounds.
const OPEN_FILES_PART: u64 = 4;
const OPEN_FILES: RangeInclusive<u64> = 4096..=1 << 18;

/// Sessions of all instances: each holds some descriptors, and together they take at most a half of those that the process may have.
const SESSIONS_PART: u64 = 8;
const SESSIONS: RangeInclusive<u64> = 128..=8192;

/// Memory of sessions that a service pays for, of all its instances together, in pages.
const SESSION_PAGES: u64 = (128 << 20) / PAGE_BYTES;
const PAGE_BYTES: u64 = 4096;

/// What is noted of names that the kernels of all mounts may keep: one part in so many of the cache's memory, within bounds, in bytes.
const NAMES_PART: u64 = 4;
const NAMES_BYTES: RangeInclusive<u64> = 16 << 20..=128 << 20;

/// Listings of open directories, the same.
const LISTINGS_PART: u64 = 2;
const LISTINGS_BYTES: RangeInclusive<u64> = 64 << 20..=256 << 20;

/// Files that clients of all instances read without requests: as many as the cache has views.
const LEASES: u64 = 1024;

/// What the instances of a service share.
pub struct PoolShares {
    nodes_kept: u64,
    nodes: Arc<Shares>,
    open_files: Arc<Shares>,
    sessions: Arc<Shares>,
    session_pages: Arc<Shares>,
    leases: Arc<Shares>,
    names: Arc<Shares>,
    listings: Arc<Shares>,
    transfers: PoolTransfers,
    memory: Arc<dyn PoolMemory>,
}

impl PoolShares {
    /// For a service with so large a cache, and such a limit of its control group if it has one.
    #[must_use]
    pub fn new(cache_bytes: u64, group_limit: Option<u64>, memory: Arc<dyn PoolMemory>) -> Self {
        let part = |of: u64, bounds: RangeInclusive<u64>| of.clamp(*bounds.start(), *bounds.end());
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let nodes_kept = part(cache_bytes / CACHE_BYTES_PER_NODE, NODES);
        let nodes_in_use = (cache_bytes / NODES_IN_USE_PART / NODE_BYTES).max(NODES_IN_USE_MIN);
        Self {
            nodes_kept,
            nodes: Shares::reclaimable(nodes_kept + nodes_in_use),
            open_files: Shares::new(part(cache_bytes / OPEN_FILES_PART / OPEN_FILE_BYTES, OPEN_FILES)),
            sessions: Shares::new(part(descriptors / SESSIONS_PART, SESSIONS)),
            session_pages: Shares::new(SESSION_PAGES),
            leases: Shares::new(LEASES),
            names: Shares::new(part(cache_bytes / NAMES_PART, NAMES_BYTES)),
            listings: Shares::new(part(cache_bytes / LISTINGS_PART, LISTINGS_BYTES)),
            transfers: PoolTransfers::new(group_limit, Arc::clone(&memory)),
            memory,
        }
    }

    /// Above so many nodes the kernel is asked to forget some, and the pool's memory is charged with them.
    #[must_use]
    pub fn nodes_kept(&self) -> u64 {
        self.nodes_kept
    }

    /// While there is too little memory, nobody has more than what is reserved for it: of what can be done without, in the end of anything.
    pub fn tighten(&self, state: State) {
        [&self.sessions, &self.session_pages].iter().for_each(|shares| shares.tighten(state.is_short()));
        self.transfers.tighten(state.is_short());
        [&self.nodes, &self.open_files, &self.listings]
            .iter()
            .for_each(|shares| shares.tighten(state == State::Exhausted));
    }

    /// What makes the room of each union's listings.
    pub(crate) fn listings(&self) -> ListingShares {
        ListingShares { shares: Arc::clone(&self.listings), memory: Arc::clone(&self.memory) }
    }

    #[cfg(test)]
    pub(crate) fn names_used(&self) -> u64 {
        self.names.used()
    }

    /// The memory of the pool.
    #[must_use]
    pub fn memory(&self) -> &Arc<dyn PoolMemory> {
        &self.memory
    }

    /// The shares of one more instance.
    #[must_use]
    pub fn join(&self) -> Arc<InstanceShares> {
        Arc::new(InstanceShares {
            nodes: self.nodes.join(),
            open_files: self.open_files.join(),
            sessions: self.sessions.join(),
            session_pages: SessionPages { share: self.session_pages.join(), memory: Arc::clone(&self.memory) },
            leases: self.leases.join(),
            names: self.names.join(),
            transfers: self.transfers.join(),
            memory: Arc::clone(&self.memory),
        })
    }
}

/// What one instance has of it.
pub struct InstanceShares {
    nodes: Arc<Share>,
    open_files: Arc<Share>,
    sessions: Arc<Share>,
    session_pages: SessionPages,
    leases: Arc<Share>,
    names: Arc<Share>,
    transfers: Arc<MountTransfers>,
    memory: Arc<dyn PoolMemory>,
}

impl InstanceShares {
    /// Headroom for an open file, which the pool's memory is charged with.
    pub(crate) fn open_file(&self) -> Option<OpenFileRoom> {
        let taken = self.open_files.take(1)?;
        self.memory.charge(OPEN_FILE_BYTES);
        Some(OpenFileRoom { _taken: taken, memory: Arc::clone(&self.memory) })
    }

    /// Its share of the nodes that the kernel may know.
    pub(crate) fn nodes(&self) -> &Arc<Share> {
        &self.nodes
    }

    /// Where nodes are counted that the kernel does not know and a layer keeps: as those that it knows.
    pub(crate) fn pinned_nodes(&self) -> Arc<dyn Headroom> {
        Arc::new(PinnedNodes { share: Arc::clone(&self.nodes), memory: Arc::clone(&self.memory) })
    }

    /// Headroom for a session.
    pub(crate) fn session(&self) -> Option<Taken> {
        self.sessions.take(1)
    }

    /// Its share of the leases under which clients read without requests.
    pub(crate) fn leases(&self) -> &Arc<Share> {
        &self.leases
    }

    /// Headroom for what is noted of names that the kernel may keep: it can do without, when there is too little memory.
    pub(crate) fn names(&self) -> Arc<dyn Headroom> {
        let (share, memory) = (Arc::clone(&self.names), Arc::clone(&self.memory));
        Arc::new(ChargedRoom { share, memory, can_be_done_without: true })
    }

    /// What the service may pay for the memory of its sessions.
    pub(crate) fn session_memory(&self) -> Arc<dyn SessionMemory> {
        Arc::new(self.session_pages.clone())
    }

    /// Headroom for what is kept of a session's client.
    pub(crate) fn client(&self, bytes: u64) -> Option<Taken> {
        let pages = bytes.div_ceil(PAGE_BYTES);
        self.memory.grew(bytes);
        self.session_pages.share.take(pages)
    }

    /// What threads and rings of its mount may take.
    pub(crate) fn transfers(&self) -> &Arc<MountTransfers> {
        &self.transfers
    }

    /// Whether there is too little memory to give any of it away.
    pub(crate) fn is_memory_short(&self) -> bool {
        self.memory.is_short()
    }
}

/// Headroom for an open file, given back when dropped.
pub(crate) struct OpenFileRoom {
    _taken: Taken,
    memory: Arc<dyn PoolMemory>,
}

impl Drop for OpenFileRoom {
    fn drop(&mut self) {
        self.memory.discharge(OPEN_FILE_BYTES);
    }
}

/// What the listings of unions share.
pub(crate) struct ListingShares {
    shares: Arc<Shares>,
    memory: Arc<dyn PoolMemory>,
}

impl ListingShares {
    /// The room of one more union.
    pub(crate) fn join(&self) -> Arc<dyn Headroom> {
        let (share, memory) = (self.shares.join(), Arc::clone(&self.memory));
        Arc::new(ChargedRoom { share, memory, can_be_done_without: false })
    }
}

/// Where bytes are charged to the pool's memory that nobody is refused.
pub(crate) fn charged(memory: Arc<dyn PoolMemory>) -> Arc<dyn Headroom> {
    Arc::new(Charged(memory))
}

struct Charged(Arc<dyn PoolMemory>);

impl Headroom for Charged {
    fn add(&self, amount: u64) -> bool {
        self.0.charge(amount);
        true
    }

    fn force(&self, amount: u64) {
        self.0.charge(amount);
    }

    fn subtract(&self, amount: u64) {
        self.0.discharge(amount);
    }
}

struct PinnedNodes {
    share: Arc<Share>,
    memory: Arc<dyn PoolMemory>,
}

impl Headroom for PinnedNodes {
    fn add(&self, amount: u64) -> bool {
        self.force(amount);
        true
    }

    fn force(&self, amount: u64) {
        self.share.force(amount);
        self.memory.charge(amount * NODE_BYTES);
    }

    fn subtract(&self, amount: u64) {
        self.share.subtract(amount);
        self.memory.discharge(amount * NODE_BYTES);
    }
}

/// A share of bytes, with which the pool's memory is charged.
struct ChargedRoom {
    share: Arc<Share>,
    memory: Arc<dyn PoolMemory>,
    can_be_done_without: bool,
}

impl Headroom for ChargedRoom {
    fn add(&self, amount: u64) -> bool {
        let is_refused = self.can_be_done_without && self.memory.is_short();
        let has_room = !is_refused && self.share.add(amount);
        if has_room {
            self.memory.charge(amount);
        }
        has_room
    }

    fn force(&self, amount: u64) {
        self.share.force(amount);
        self.memory.charge(amount);
    }

    fn subtract(&self, amount: u64) {
        self.share.subtract(amount);
        self.memory.discharge(amount);
    }
}

#[derive(Clone)]
struct SessionPages {
    share: Arc<Share>,
    memory: Arc<dyn PoolMemory>,
}

impl fmt::Debug for SessionPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SessionPages").field(&self.share.used()).finish()
    }
}

impl SessionMemory for SessionPages {
    fn take(&self, pages: usize) -> bool {
        self.memory.grew(pages as u64 * PAGE_BYTES);
        self.share.add(pages as u64)
    }

    fn give(&self, pages: usize) {
        self.share.subtract(pages as u64);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A pool's memory that counts what is charged.
    #[derive(Default)]
    pub(crate) struct Memory(pub(crate) AtomicU64);

    impl PoolMemory for Memory {
        fn charge(&self, bytes: u64) {
            self.0.fetch_add(bytes, Ordering::Relaxed);
        }

        fn discharge(&self, bytes: u64) {
            self.0.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    #[test]
    fn open_files_are_charged_and_divided() {
        let memory = Arc::new(Memory::default());
        let shares = PoolShares::new(64 << 20, None, Arc::clone(&memory) as Arc<dyn PoolMemory>);
        let [one, other] = [shares.join(), shares.join()];
        let all = |instance: &InstanceShares| std::iter::from_fn(|| instance.open_file()).collect::<Vec<_>>();
        let (first, second) = (all(&one), all(&other));
        assert_eq!((first.len(), second.len()), (3072, 1024));
        assert_eq!(memory.0.load(Ordering::Relaxed), 4096 * OPEN_FILE_BYTES);
        drop((first, second));
        assert_eq!(memory.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn listings_are_charged_and_divided() {
        let memory = Arc::new(Memory::default());
        let shares = PoolShares::new(64 << 20, None, Arc::clone(&memory) as Arc<dyn PoolMemory>);
        let [one, other] = [shares.listings().join(), shares.listings().join()];
        let all = |room: &Arc<dyn Headroom>| (0..1000).take_while(|_| room.add(1 << 20)).count();
        assert_eq!((all(&one), all(&other)), (48, 16));
        assert_eq!(memory.0.load(Ordering::Relaxed), 64 << 20);
        one.subtract(48 << 20);
        assert_eq!((memory.0.load(Ordering::Relaxed), all(&other)), (16 << 20, 32));
    }

    /// One that counts what it need not do without.
    #[derive(Default)]
    struct Grown(AtomicU64);

    impl PoolMemory for Grown {
        fn charge(&self, _bytes: u64) {}

        fn discharge(&self, _bytes: u64) {}

        fn grew(&self, bytes: u64) {
            self.0.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Memory of sessions is no part of what the cache makes room for: without that nobody would look in time.
    #[test]
    fn who_looks_at_the_memory_is_told_of_sessions_and_their_clients() {
        let memory = Arc::new(Grown::default());
        let instance = PoolShares::new(64 << 20, None, Arc::clone(&memory) as Arc<dyn PoolMemory>).join();
        let grown = || memory.0.swap(0, Ordering::Relaxed);
        assert!(instance.session_memory().take(3));
        assert_eq!(grown(), 3 * PAGE_BYTES);
        let client = instance.client(PAGE_BYTES + 1);
        assert_eq!((client.is_some(), grown()), (true, PAGE_BYTES + 1));
        assert_eq!(instance.session_pages.share.used(), 5);
        drop(client);
        assert_eq!(instance.session_pages.share.used(), 3);
    }

    #[test]
    fn sessions_and_their_memory_are_divided() {
        let shares = PoolShares::new(64 << 20, None, Arc::new(Memory::default()));
        let [one, other] = [shares.join(), shares.join()];
        let sessions = std::iter::from_fn(|| one.session()).collect::<Vec<_>>();
        assert!(!sessions.is_empty() && other.session().is_some());
        let (hostile, victim) = (one.session_memory(), other.session_memory());
        while hostile.take(16) {}
        let pages = SESSION_PAGES as usize;
        assert!(victim.take(pages / 4) && !victim.take(pages / 4));
        victim.give(pages / 4);
        assert!(victim.take(pages / 4));
    }
}
