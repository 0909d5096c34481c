//! Tests of two views of one tree through different maps: both see the same stored ids, each in its own.

use poolfs_idmap::IdMapped;
use poolfs_libservice::types::{
    Attributes, Caller, Errno, FileType, IdMap, NO_ID, Name, NodeId, OpenFlags, RenameFlags, SetAttributes, XattrFlags,
};
use poolfs_libservice::{Libservice, Memory};
use std::sync::Arc;

const LIST: &[u8] = b"system.posix_acl_access";

fn views() -> (Arc<Memory>, [Arc<IdMapped>; 2]) {
    let below = Memory::new();
    let views = ["0 100000 1000", "0 200000 500"]
        .map(|map| IdMapped::new(Arc::clone(&below) as _, IdMap::parse_proc(map).expect("a map")));
    (below, views)
}

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).expect("a name")
}

fn by(uid: u32, gid: u32) -> Caller {
    Caller { uid, gid, umask: 0 }
}

fn owners(attributes: Attributes) -> (u32, u32) {
    (attributes.uid, attributes.gid)
}

fn chown(uid: u32, gid: u32) -> SetAttributes {
    SetAttributes { uid: Some(uid), gid: Some(gid), ..SetAttributes::default() }
}

#[test]
fn each_sees_its_own_ids_of_what_either_made() {
    let (below, [one, other]) = views();
    let made = one.mkdir(&by(100_000, 100_033), NodeId::ROOT, name("d"), 0o755).expect("room");
    assert_eq!(owners(made.attributes), (100_000, 100_033));
    assert_eq!(owners(below.getattr(&Caller::ROOT, made.node).expect("there")), (0, 33));
    let seen = other.lookup(&by(200_000, 200_000), NodeId::ROOT, name("d")).expect("there");
    assert_eq!(owners(seen.attributes), (200_000, 200_033));
    let changed = other.setattr(&by(200_000, 200_000), made.node, &chown(200_007, 200_008), None).expect("mapped");
    assert_eq!(owners(changed), (200_007, 200_008));
    assert_eq!(owners(one.getattr(&Caller::ROOT, made.node).expect("there")), (100_007, 100_008));
}

#[test]
fn an_owner_outside_the_map_is_nobody() {
    let (below, [one, other]) = views();
    let made = one.mkdir(&by(100_999, 100_499), NodeId::ROOT, name("d"), 0o755).expect("room");
    assert_eq!(owners(other.getattr(&Caller::ROOT, made.node).expect("there")), (NO_ID, 200_499));
    for (uid, gid) in [(0, 100_000), (100_000, 0), (101_000, 100_000), (100_000, NO_ID)] {
        let errno = one.setattr(&Caller::ROOT, made.node, &chown(uid, gid), None).expect_err("not mapped").errno();
        assert_eq!(errno, Errno::EOVERFLOW, "{uid}:{gid}");
    }
    assert_eq!(owners(below.getattr(&Caller::ROOT, made.node).expect("there")), (999, 499), "all or nothing");
}

#[test]
fn who_is_not_in_the_map_makes_nothing_and_may_replace_what_is_there() {
    let (below, [one, _]) = views();
    let (root, file) = (NodeId::ROOT, name("file"));
    let (entry, handle) = one.create(&by(100_000, 100_000), root, file, 0o644, OpenFlags::READ_WRITE).expect("room");
    one.release(handle);
    for stranger in [by(0, 0), by(100_000, 0), by(0, 100_000), by(NO_ID, NO_ID)] {
        let refused = [
            one.mkdir(&stranger, root, name("x"), 0o755).map(drop),
            one.create(&stranger, root, name("x"), 0o644, OpenFlags::READ_WRITE).map(drop),
            one.tmpfile(&stranger, root, 0o644, OpenFlags::READ_WRITE).map(drop),
            one.symlink(&stranger, root, name("x"), b"target").map(drop),
            one.link(&stranger, entry.node, root, name("x")).map(drop),
            one.rename(&stranger, root, file, root, name("x"), RenameFlags::empty()),
            one.rename(&stranger, root, file, root, file, RenameFlags::WHITEOUT),
        ];
        assert!(refused.iter().all(|result| result.as_ref().is_err_and(|error| *error == Errno::EOVERFLOW)));
    }
    let absent = one.rename(&by(0, 0), root, name("x"), root, name("y"), RenameFlags::empty());
    assert_eq!(absent.expect_err("nothing to rename").errno(), Errno::ENOENT);
    let made = one.mknod(&by(100_005, 100_005), root, name("other"), FileType::Regular, 0o600, 0).expect("room");
    one.rename(&by(0, 0), root, name("other"), root, file, RenameFlags::empty()).expect("no name is new");
    one.unlink(&by(0, 0), root, file).expect("there");
    assert_eq!(owners(below.getattr(&Caller::ROOT, made.node).expect("held")), (5, 5));
}

#[test]
fn lists_are_stored_with_stored_ids() {
    let (below, [one, other]) = views();
    let node = one.mkdir(&by(100_000, 100_000), NodeId::ROOT, name("d"), 0o755).expect("room").node;
    let list = |users: &[u32]| {
        let named = users.iter().map(|&user| (2u16, user));
        let entries = [(1, NO_ID)].into_iter().chain(named).chain([(4, NO_ID), (16, NO_ID), (32, NO_ID)]);
        let entry = |(tag, id): (u16, u32)| [&tag.to_le_bytes()[..], &[5, 0], &id.to_le_bytes()].concat();
        [2u32.to_le_bytes().to_vec(), entries.flat_map(entry).collect()].concat()
    };
    one.setxattr(&Caller::ROOT, node, LIST, &list(&[100_033, 100_700]), XattrFlags::empty()).expect("mapped");
    assert_eq!(below.getxattr(&Caller::ROOT, node, LIST).expect("set"), list(&[33, 700]));
    assert_eq!(one.getxattr(&Caller::ROOT, node, LIST).expect("set"), list(&[100_033, 100_700]));
    assert_eq!(other.getxattr(&Caller::ROOT, node, LIST).expect("set"), list(&[200_033]), "700 is nobody there");
    let refused = one.setxattr(&Caller::ROOT, node, LIST, &list(&[33]), XattrFlags::empty());
    assert_eq!(refused.expect_err("an id of the host that is not the container's").errno(), Errno::EINVAL);
}
