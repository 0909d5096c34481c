//! Claims of clients against each other, and what is left of a client that died.

use crate::cluster::Cluster;
use poolfs_ceph::{Ceph, ClaimKind, Source};
use poolfs_libservice::Libservice;
use poolfs_libservice::types::{Caller, Errno, Name, NodeId, OpenFlags};

#[test]
fn one_claims_a_tree_alone_or_many_share_it() {
    let cluster = Cluster::new();
    let mounts: Vec<_> = (0..3).map(|_| cluster.mount("/tests")).collect();
    let claim = |at: usize, kind| mounts[at].claim(kind).expect("answered");
    let alone = claim(0, ClaimKind::Alone).expect("free");
    for (at, kind) in [(0, ClaimKind::Alone), (1, ClaimKind::Alone), (1, ClaimKind::Shared), (0, ClaimKind::Shared)] {
        assert!(claim(at, kind).is_none(), "{at} {kind:?}");
    }
    drop(alone);
    let shared = [claim(1, ClaimKind::Shared).expect("free"), claim(2, ClaimKind::Shared).expect("shared")];
    assert!(claim(0, ClaimKind::Alone).is_none());
    drop(shared);
    drop(claim(0, ClaimKind::Alone).expect("given up"));
    // Another tree of the same filesystem is another one.
    let _alone = claim(0, ClaimKind::Alone).expect("free");
    assert!(cluster.fresh().claim(ClaimKind::Alone).expect("answered").is_some());
}

#[test]
fn a_successor_takes_what_its_predecessor_has_and_fences_it() {
    let cluster = Cluster::new();
    let held = |holder: &str| Source { holder: Some(holder.to_owned()), ..cluster.source("/tests") };
    let first = Ceph::mount(&held("one")).expect("mounted");
    let name = Name::new(b"f").expect("a name");
    let (made, file) = first.create(&Caller::ROOT, NodeId::ROOT, name, 0o644, OpenFlags::READ_WRITE).expect("made");
    let _claim = first.claim(ClaimKind::Alone).expect("answered").expect("free");
    let other = Ceph::mount(&held("two")).expect("mounted");
    assert!(other.claim(ClaimKind::Alone).expect("answered").is_none(), "another holder takes nothing");
    let second = Ceph::mount(&held("one")).expect("mounted");
    assert!(second.claim(ClaimKind::Alone).expect("answered").is_some(), "its predecessor's session is over");
    let written = first
        .write(&Caller::ROOT, file, 0, b"late")
        .and_then(|_| first.fsync(&Caller::ROOT, file, poolfs_libservice::Durability::All));
    let found = second.lookup(&Caller::ROOT, NodeId::ROOT, name).expect("found");
    assert_eq!(found.attributes.size, 0, "{written:?}");
    assert_ne!(written.expect_err("it is fenced").errno(), Errno::ESTALE, "{:?}", made.node);
}
