//! What the kernel may keep of directory listings.
//!
//! If a directory was opened for it, the kernel keeps the names as they come, and takes them for the whole listing when an empty
//! answer says that there are no more. The service has a say in both: [`NodeTable::open_listing`] when the directory is opened,
//! [`NodeTable::may_complete`] at the end. The kernel handles its own changes by itself. A change by the user-level path is told,
//! and the kernel drops what it has, before the change is answered.
//!
//! Late names are the danger. An answer from before the change may be inserted by the kernel's thread that waits for it at any
//! time after the notification, unseen, and be completed by the end of another process's walk. So as long as an open directory
//! may still bring names from before a change, no listing of the directory is ever declared whole, and a process that opens it
//! then has the kernel drop what there is.

use super::{NodeState, NodeTable};
use poolfs_libservice::types::NodeId;

/// Of one directory.
#[derive(Default)]
pub(super) struct Listing {
    /// Changes by the user-level path.
    changes: u64,
    /// Open directories that have listed it since the last of them, and such that listed it before.
    walkers: u32,
    stale: u32,
    /// The kernel may have a whole listing.
    held: bool,
    /// Names from before a change may be among what the kernel has.
    dirty: bool,
    /// Changes whose notifications are on their way.
    telling: u32,
}

/// Of one open directory.
#[derive(Debug, Default)]
pub struct ListingUse {
    /// The kernel keeps what it lists.
    keeps: bool,
    /// When it was opened the kernel dropped everything, and nothing from before the change can have come since.
    cleans: bool,
    /// It has listed, for the first time after this many changes.
    walks_since: Option<u64>,
}

/// What the kernel does with the listing of a directory that is being opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// It keeps it, and shows what is kept.
    pub keeps: bool,
    /// It drops what others have left.
    pub drops: bool,
}

impl ListingUse {
    /// Whether the kernel keeps what the open directory lists.
    #[must_use]
    pub fn keeps(&self) -> bool {
        self.keeps
    }
}

impl Listing {
    fn may_complete(&self, used: &ListingUse) -> bool {
        used.keeps && !self.dirty && self.telling == 0
    }

    /// What was kept is old; whether there may be any.
    fn outdate(&mut self) -> bool {
        self.changes += 1;
        self.stale += std::mem::take(&mut self.walkers);
        self.dirty |= self.stale > 0;
        std::mem::take(&mut self.held) || self.dirty || self.telling > 0
    }
}

impl NodeState {
    /// The kernel may keep no listing of it any more; whether it may have one.
    pub(super) fn outdate_listing(&mut self) -> bool {
        self.listing.outdate()
    }
}

impl NodeTable {
    /// A directory was opened by the kernel: what it may do with the listing.
    pub fn open_listing(&self, node: NodeId, used: &mut ListingUse) -> Opening {
        let mut states = self.states(node);
        let keeps = self.is_holding();
        let Some(Listing { dirty, stale, .. }) = states.get_mut(&node).filter(|_| keeps).map(|state| &state.listing)
        else {
            return Opening { keeps: false, drops: true };
        };
        *used = ListingUse { keeps, cleans: *dirty && *stale == 0, walks_since: None };
        Opening { keeps, drops: *dirty }
    }

    /// An open directory is about to be listed. To be called before the layers are asked.
    pub fn walk_listing(&self, node: NodeId, used: &mut ListingUse) {
        if let Some(state) = self.states(node).get_mut(&node).filter(|_| used.keeps) {
            let listing = &mut state.listing;
            // Whoever asks has come back from opening it.
            if std::mem::take(&mut used.cleans) && listing.stale == 0 {
                listing.dirty = false;
            }
            if used.walks_since.is_none() {
                used.walks_since = Some(listing.changes);
                listing.walkers += 1;
            }
        }
    }

    /// A listing is about to be answered to have come to its end; whether the kernel may take what it has for the whole.
    #[must_use]
    pub fn may_complete(&self, node: NodeId, used: &ListingUse) -> bool {
        let mut states = self.states(node);
        let Some(state) = states.get_mut(&node).filter(|_| self.is_holding()) else { return false };
        let may = state.listing.may_complete(used);
        state.listing.held |= may;
        may
    }

    /// An open directory was closed by the kernel, which has put into place all that it was answered.
    pub fn close_listing(&self, node: NodeId, used: &mut ListingUse) {
        let Some(since) = used.walks_since.take() else { return };
        if let Some(state) = self.states(node).get_mut(&node) {
            let Listing { changes, walkers, stale, .. } = &mut state.listing;
            let counted = if since == *changes { walkers } else { stale };
            *counted = counted.saturating_sub(1);
        }
    }

    /// Somebody else than the kernel has changed which names there are in a directory: its number, if the kernel must drop what it
    /// has of the listing; followed by [`NodeTable::listing_told`].
    #[must_use]
    pub fn listing_changed(&self, node: NodeId) -> Option<u64> {
        let mut states = self.states(node);
        let state = states.get_mut(&node)?;
        let tells = state.outdate_listing();
        state.listing.telling += u32::from(tells);
        tells.then_some(state.number)
    }

    /// The kernel has dropped what it had of a listing.
    pub fn listing_told(&self, node: NodeId) {
        if let Some(state) = self.states(node).get_mut(&node) {
            state.listing.telling = state.listing.telling.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::ROOT_NUMBER;

    const DIRECTORY: NodeId = NodeId::ROOT;
    const KEPT: Opening = Opening { keeps: true, drops: false };
    const DROPPED: Opening = Opening { keeps: true, drops: true };

    fn holding() -> NodeTable {
        let table = NodeTable::default();
        table.start_holding();
        table
    }

    struct Open<'t>(&'t NodeTable, ListingUse);

    impl Open<'_> {
        fn asks(&mut self) {
            self.0.walk_listing(DIRECTORY, &mut self.1);
        }

        fn ends(&mut self) -> bool {
            self.asks();
            self.0.may_complete(DIRECTORY, &self.1)
        }

        fn closes(mut self) {
            self.0.close_listing(DIRECTORY, &mut self.1);
        }
    }

    fn open(table: &NodeTable, expected: Opening) -> Open<'_> {
        let mut used = ListingUse::default();
        assert_eq!(table.open_listing(DIRECTORY, &mut used), expected);
        Open(table, used)
    }

    fn change(table: &NodeTable) -> bool {
        let told = table.listing_changed(DIRECTORY);
        assert!(told.is_none_or(|number| number == ROOT_NUMBER));
        told.inspect(|_| table.listing_told(DIRECTORY)).is_some()
    }

    #[test]
    fn the_kernel_is_told_of_what_it_has_and_of_nothing_else() {
        let table = holding();
        assert!(!change(&table));
        let unread = open(&table, KEPT);
        assert!(!change(&table), "nobody has listed it");
        unread.closes();
        let mut reader = open(&table, KEPT);
        assert!(reader.ends());
        reader.closes();
        assert!(change(&table));
        assert!(!change(&table));
    }

    #[test]
    fn nothing_is_whole_while_names_from_before_a_change_may_come() {
        let table = holding();
        let mut early = open(&table, KEPT);
        early.asks();
        assert!(change(&table));
        assert!(!early.ends(), "it began before the change");
        let mut late = open(&table, DROPPED);
        assert!(!late.ends(), "the first one's names may still be on their way");
        early.closes();
        assert!(!late.ends(), "they may have come");
        let mut clean = open(&table, DROPPED);
        let mut other = open(&table, DROPPED);
        assert!(clean.ends() && other.ends());
        [late, clean, other].into_iter().for_each(Open::closes);
        assert!(open(&table, KEPT).ends() && change(&table));
    }

    #[test]
    fn nothing_is_whole_until_the_kernel_was_told() {
        let table = holding();
        let mut reader = open(&table, KEPT);
        assert!(reader.ends());
        reader.closes();
        assert!(table.listing_changed(DIRECTORY).is_some());
        let mut reader = open(&table, KEPT);
        assert!(!reader.ends());
        assert!(table.listing_changed(DIRECTORY).is_some(), "the first is still on its way");
        reader.closes();
        table.listing_told(DIRECTORY);
        assert!(!open(&table, DROPPED).ends());
        table.listing_told(DIRECTORY);
        assert!(open(&table, KEPT).ends());
    }

    #[test]
    fn nothing_is_kept_after_the_end_and_what_was_is_told() {
        let table = holding();
        let mut reader = open(&table, KEPT);
        assert!(reader.ends());
        assert_eq!(table.stop_holding().listings, [ROOT_NUMBER]);
        assert!(!reader.ends());
        open(&table, Opening { keeps: false, drops: true });
    }
}
