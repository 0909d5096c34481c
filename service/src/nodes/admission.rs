//! Admission of nodes: how many nodes of an instance the kernel may know.
//!
//! Each instance has a share ([`NodeTable::admits`]). Nodes above the bound of [`super::pruning`] are charged to the pool's
//! memory.

use super::pruning::{Known, PASS_PAUSE};
use super::{NodeTable, lock};
use poolfs_libservice::types::NodeId;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long somebody waits whose node finds no room, and who has the kernel asked for others meanwhile.
const ROOM_WAIT_MAX: Duration = Duration::from_millis(500);

/// How many wait so of a mount at most: somebody has to receive what the kernel forgets.
const WAITING_MAX: u64 = 2;

/// How long nobody waits of a mount after somebody has waited in vain.
const ROOM_PAUSE: Duration = Duration::from_secs(1);

impl NodeTable {
    /// Whether the kernel may know one node more.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.share.get().is_none_or(|share| share.may_take(1))
    }

    /// The same, when the kernel has been asked for others: that may take a while.
    #[must_use]
    pub fn finds_room(&self) -> bool {
        if self.has_room() {
            return true;
        }
        let may_help = || lock(&self.in_vain).is_none_or(|ended| ended.elapsed() >= ROOM_PAUSE);
        let Some(known) = self.known.get().filter(|_| may_help()) else { return false };
        let may_wait = self.waiting.fetch_add(1, Ordering::Relaxed) < WAITING_MAX;
        let found = may_wait && self.wait_for_room(known);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        found
    }

    fn wait_for_room(&self, known: &Known) -> bool {
        known.ask_now();
        let start = Instant::now();
        while start.elapsed() < ROOM_WAIT_MAX {
            std::thread::sleep(PASS_PAUSE);
            if self.has_room() {
                return true;
            }
        }
        *lock(&self.in_vain) = Some(Instant::now());
        false
    }

    /// Whether the kernel may be told of this node: it knows it already, or finds room for it.
    #[must_use]
    pub fn admits(&self, node: NodeId) -> bool {
        let knows = || self.states(node).get(&node).is_some_and(|state| state.kernel_references > 0);
        node == NodeId::ROOT || self.has_room() || knows() || self.finds_room()
    }
}
