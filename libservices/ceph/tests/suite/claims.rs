//! Claims of clients against each other, and what is left of a client that died.

use crate::cluster::Cluster;
use poolfs_ceph::{Ceph, ClaimKind, Source};
use poolfs_libservice::types::{Caller, Errno, Name, NodeId, OpenFlags};
use poolfs_libservice::{Durability, Libservice};

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
    assert!(cluster.fresh(false).claim(ClaimKind::Alone).expect("answered").is_some());
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
    let written =
        first.write(&Caller::ROOT, file, 0, b"late").and_then(|_| first.fsync(&Caller::ROOT, file, Durability::All));
    let second = Ceph::mount(&held("three")).expect("mounted");
    let found = second.lookup(&Caller::ROOT, NodeId::ROOT, name).expect("found");
    assert_eq!(found.attributes.size, 0, "{written:?}");
    assert_ne!(written.expect_err("it is fenced").errno(), Errno::ESTALE, "{:?}", made.node);
}

/// libcephfs answers such calls with success: it has thrown away what they were to make durable.
fn nothing_is_called_durable_by_a_fenced_client(is_shared: bool) {
    let cluster = Cluster::new();
    let held = |holder: &str| Source { holder: Some(holder.to_owned()), is_shared, ..cluster.source("/tests") };
    let first = Ceph::mount(&held("one")).expect("mounted");
    let make = |name: &[u8]| {
        let name = Name::new(name).expect("a name");
        first.create(&Caller::ROOT, NodeId::ROOT, name, 0o644, OpenFlags::READ_WRITE).expect("made").1
    };
    let (file, untouched) = (make(b"f"), make(b"g"));
    first.fsync(&Caller::ROOT, file, Durability::All).expect("durable");
    first.write(&Caller::ROOT, file, 0, b"accepted").expect("written");
    let _second = Ceph::mount(&held("one")).expect("mounted");
    for _ in 0..2 {
        for handle in [file, untouched] {
            for durability in [Durability::All, Durability::Data] {
                let refused = first.fsync(&Caller::ROOT, handle, durability).expect_err("it has thrown that away");
                assert_eq!(refused.errno(), Errno::EIO);
                assert!(refused.message().is_some_and(|text| text.contains("mount again")), "{refused}");
            }
        }
        assert_eq!(first.sync().expect_err("nor all of it").errno(), Errno::EIO);
        assert_eq!(first.write(&Caller::ROOT, untouched, 0, b"late").expect_err("fenced").errno(), Errno::EIO);
    }
}

#[test]
fn what_a_fenced_client_had_accepted_is_never_called_durable() {
    nothing_is_called_durable_by_a_fenced_client(false);
}

#[test]
fn nor_what_libcephfs_had_kept_of_it() {
    nothing_is_called_durable_by_a_fenced_client(true);
}
