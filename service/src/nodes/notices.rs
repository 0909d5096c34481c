//! Attributes that the service vouches for to clients that read them without a request, in the notice of a node's lease.
//!
//! As with what the kernel keeps ([`super::held`]), a change finds whatever may show the old state, whoever makes it. Clients
//! cannot be notified. So the notice is taken back before the layers are asked for the change, and none appears until that is
//! done: nobody is shown old attributes after somebody else has seen newer ones. Attributes that were looked up meanwhile are not
//! noted.

use super::{NodeState, NodeTable};
use crate::leases::SegmentLease;
use poolfs_ipc::notice::Version;
use poolfs_ipc::segment::Noted;
use poolfs_libservice::types::{Attributes, FileType, NodeId};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long after its last change a file may be on its way to the disk.
const UNSETTLED: Duration = Duration::from_secs(30);

/// How long the attributes of a file count that write-back may be busy with: that changes the space the file takes, which
/// nobody is told of.
pub const UNSETTLED_COUNT: Duration = Duration::from_secs(1);

/// Whether write-back may change the space the file takes.
#[must_use]
pub fn is_unsettled(attributes: &Attributes) -> bool {
    let changed = UNIX_EPOCH + Duration::from_secs(u64::try_from(attributes.changed.seconds).unwrap_or(0));
    // A change that is still to come counts as one just now.
    let age = SystemTime::now().duration_since(changed).unwrap_or_default();
    attributes.file_type == FileType::Regular && age <= UNSETTLED
}

/// A change of a node's attributes that is under way, followed by [`NodeTable::attributes_changed`].
#[must_use]
#[derive(Clone, Copy, Debug)]
pub struct Changing {
    /// The node.
    pub node: NodeId,
    /// When what is known of it began to be: it is forgotten, and begun anew, when nobody uses the node.
    born: Option<u64>,
}

/// Attributes that somebody has asked for, to be noted.
pub struct Noting {
    node: NodeId,
    lease: Arc<SegmentLease>,
    version: Version,
}

impl NodeState {
    /// Nobody vouches for the attributes any more.
    pub(super) fn forget_noted(&self) {
        self.lease.iter().for_each(|lease| lease.forget_noted());
    }
}

impl NodeTable {
    /// Attributes are about to change: from here on nobody is shown them who does not ask.
    pub fn attributes_changing(&self, node: NodeId) -> Changing {
        let mut states = self.states(node);
        self.changes_begun.fetch_add(1, Ordering::SeqCst);
        let born = states.get_mut(&node).map(|state| {
            state.edition.begin_change();
            state.forget_noted();
            state.born
        });
        Changing { node, born }
    }

    /// To be called with the node's state locked, when attributes have changed.
    pub(super) fn end_change(state: &mut NodeState, changing: Changing) {
        if changing.born == Some(state.born) {
            state.edition.end_change();
        } else {
            state.edition.changed();
        }
        // Noted by who found nothing known of a change.
        state.forget_noted();
    }

    /// Attributes are about to be looked up, to be noted; nothing where nobody is to be shown them.
    #[must_use]
    pub fn begin_noting(&self, node: NodeId) -> Option<Noting> {
        let states = self.states(node);
        let state = states.get(&node).filter(|state| self.is_holding() && !state.posting)?;
        let lease = state.lease.as_ref().filter(|lease| !lease.is_revoked())?;
        Some(Noting { node, lease: Arc::clone(lease), version: state.edition.version()? })
    }

    /// Vouches for attributes that were found since `noting` was begun, unless they may have changed since.
    pub fn note(&self, noting: Noting, attributes: &Attributes) {
        let until_ns = if is_unsettled(attributes) {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
            let now = Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32);
            (now + UNSETTLED_COUNT).as_nanos() as u64
        } else {
            u64::MAX
        };
        let noted = Noted { attributes: attributes.into(), until_ns };
        let states = self.states(noting.node);
        let state =
            states.get(&noting.node).filter(|state| self.is_holding() && state.edition.still_is(noting.version));
        let lease = state.and_then(|state| state.lease.as_ref());
        lease.filter(|lease| Arc::ptr_eq(lease, &noting.lease)).into_iter().for_each(|lease| lease.note(&noted));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leases::LeaseTable;
    use crate::leases::tests::{notice, table};
    use crate::nodes::content::Counted;
    use poolfs_libservice::types::Timestamp;

    const NODE: NodeId = NodeId(7);

    struct Scene {
        table: NodeTable,
        leases: Arc<LeaseTable>,
    }

    fn attributes(size: u64, changed: i64) -> Attributes {
        let time = Timestamp { seconds: changed, nanoseconds: 1 };
        Attributes {
            inode: 70,
            file_type: FileType::Regular,
            permissions: 0o4755,
            links: 1,
            uid: 1,
            gid: 2,
            device: 0,
            size,
            blocks: 8,
            accessed: time,
            modified: time,
            changed: time,
            change: 0,
        }
    }

    impl Scene {
        fn new() -> Self {
            let scene = Self { table: NodeTable::default(), leases: table(2).0 };
            scene.table.start_holding();
            scene.open();
            scene
        }

        fn open(&self) {
            let _ = self.table.enter(NODE, 70);
            self.table.opened(NODE, false, false);
            let _ = self.noted();
        }

        /// What clients see that are given a lease now.
        fn noted(&self) -> Option<Noted> {
            let lease = self.table.lease(NODE, || self.leases.lease());
            lease.and_then(|lease| notice(&lease).noted())
        }

        fn forget(&self) {
            self.table.closed(NODE, false, Counted { writer: false, by_size: true });
            let _ = self.table.forget(70, 1);
        }

        fn note(&self, size: u64) {
            self.table.begin_noting(NODE).into_iter().for_each(|noting| self.table.note(noting, &attributes(size, 0)));
        }

        fn size(&self) -> Option<u64> {
            self.noted().map(|noted| noted.attributes.size)
        }

        fn end(&self, changing: Changing) {
            let _ = self.table.attributes_changed(changing);
        }
    }

    #[test]
    fn what_is_noted_is_taken_back_before_a_change_and_is_not_noted_during_it() {
        let scene = Scene::new();
        assert_eq!(scene.size(), None);
        scene.note(1);
        assert_eq!(scene.size(), Some(1));
        let early = scene.table.begin_noting(NODE).expect("a lease");
        let changing = scene.table.attributes_changing(NODE);
        assert_eq!(scene.size(), None);
        scene.note(1);
        assert_eq!(scene.size(), None, "while it changes");
        let other = scene.table.attributes_changing(NODE);
        scene.end(changing);
        scene.note(2);
        assert_eq!(scene.size(), None, "while another change is under way");
        scene.end(other);
        scene.table.note(early, &attributes(1, 0));
        assert_eq!(scene.size(), None, "what was before");
        scene.note(3);
        assert_eq!(scene.size(), Some(3));
    }

    #[test]
    fn a_change_of_a_node_that_nobody_knew_spoils_what_is_noted_meanwhile_and_nothing_else() {
        let scene = Scene::new();
        scene.forget();
        let unseen = scene.table.attributes_changing(NODE);
        scene.open();
        let own = scene.table.attributes_changing(NODE);
        scene.end(unseen);
        scene.note(1);
        assert_eq!(scene.size(), None, "its own change is under way");
        scene.end(own);
        scene.note(1);
        assert_eq!(scene.size(), Some(1));
        scene.end(scene.table.attributes_changing(NODE));
        assert_eq!(scene.size(), None);
    }

    #[test]
    fn nothing_is_noted_without_a_lease_or_where_nobody_may_keep_anything() {
        let scene = Scene::new();
        let early = scene.table.begin_noting(NODE).expect("a lease");
        scene.note(1);
        scene.table.opened(NODE, true, false);
        assert!(scene.table.begin_noting(NODE).is_none(), "its lease was revoked");
        scene.table.note(early, &attributes(1, 0));
        assert_eq!(scene.size(), None);
        scene.table.closed(NODE, false, Counted { writer: true, by_size: true });
        assert_eq!(scene.size(), None);
        scene.note(2);
        let early = scene.table.begin_noting(NODE).expect("a lease");
        assert_eq!(scene.size(), Some(2));
        let _ = scene.table.stop_holding();
        scene.note(3);
        scene.table.note(early, &attributes(3, 0));
        assert_eq!(scene.size(), None);
    }

    #[test]
    fn what_may_change_by_write_back_counts_for_a_moment() {
        let scene = Scene::new();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("later").as_secs() as i64;
        let until = |changed| {
            let noting = scene.table.begin_noting(NODE).expect("a lease");
            scene.table.note(noting, &attributes(1, changed));
            scene.noted().expect("noted").until_ns
        };
        assert_eq!(until(now - 100), u64::MAX);
        let (before, short) = (rustix::time::clock_gettime(rustix::time::ClockId::Monotonic), until(now + 100));
        let after = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let second = |time: rustix::time::Timespec| time.tv_sec as u64;
        assert!((second(before)..=second(after) + 2).contains(&(short / 1_000_000_000)));
    }
}
