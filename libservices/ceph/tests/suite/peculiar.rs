//! Where CephFS is unlike a directory of the host.

use crate::cluster::Cluster;
use poolfs_ceph::{Ceph, MountError, Source};
use poolfs_libservice::Libservice;
use poolfs_libservice::types::{
    Caller, Errno, FileType, Name, NodeId, OpenFlags, RenameFlags, SeekTo, SetAttributes, SetTime, Timestamp,
    XattrFlags,
};
use std::error::Error;

const ROOT: Caller = Caller::ROOT;

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).expect("a name")
}

fn find(layer: &Ceph, path: &str) -> Result<NodeId, Errno> {
    path.split('/').try_fold(NodeId::ROOT, |parent, part| {
        layer.lookup(&ROOT, parent, name(part)).map(|entry| entry.node).map_err(|error| error.errno())
    })
}

fn write(layer: &Ceph, text: &str, content: &[u8]) -> NodeId {
    let (entry, handle) = layer.create(&ROOT, NodeId::ROOT, name(text), 0o644, OpenFlags::READ_WRITE).expect("created");
    assert_eq!(layer.write(&ROOT, handle, 0, content).expect("written").count, content.len());
    layer.release(handle);
    entry.node
}

fn content(layer: &Ceph, node: NodeId) -> Vec<u8> {
    let handle = layer.open(&ROOT, node, OpenFlags::READ_ONLY).expect("open");
    let mut buffer = vec![0; 16384];
    let count = layer.read(&ROOT, handle, 0, &mut buffer).expect("read");
    layer.release(handle);
    buffer.truncate(count);
    buffer
}

#[test]
fn names_and_content_of_one_mount_are_seen_by_another_and_outlive_both() {
    let cluster = Cluster::new();
    let (one, two) = (cluster.mount("/tests"), cluster.mount("/tests"));
    write(&one, "f", b"content");
    assert_eq!(content(&two, find(&two, "f").expect("there")), b"content");
    drop((one, two));
    let later = cluster.mount("/");
    assert_eq!(content(&later, find(&later, "tests/f").expect("there")), b"content");
}

/// Its own rename removes a name then.
#[test]
fn renaming_one_name_of_a_file_to_another_changes_nothing() {
    let cluster = Cluster::new();
    let layer = cluster.fresh(false);
    let node = write(&layer, "one", b"content");
    layer.link(&ROOT, node, NodeId::ROOT, name("two")).expect("linked");
    let at = NodeId::ROOT;
    layer.rename(&ROOT, at, name("one"), at, name("two"), RenameFlags::empty()).expect("nothing to do");
    assert_eq!((find(&layer, "one"), find(&layer, "two")), (Ok(node), Ok(node)));
    write(&layer, "three", b"other");
    let refused = layer.rename(&ROOT, at, name("one"), at, name("three"), RenameFlags::NO_REPLACE);
    assert_eq!(refused.expect_err("it exists"), Errno::EEXIST);
    layer.rename(&ROOT, at, name("one"), at, name("four"), RenameFlags::NO_REPLACE).expect("it does not");
    let exchange = layer.rename(&ROOT, at, name("two"), at, name("three"), RenameFlags::EXCHANGE);
    assert_eq!(exchange.expect_err("CephFS has none"), Errno::EINVAL);
}

#[test]
fn a_directory_counts_those_in_it_after_one_was_moved_away() {
    let cluster = Cluster::new();
    let layer = cluster.fresh(false);
    let mkdir = |at, text: &str| layer.mkdir(&ROOT, at, name(text), 0o755).expect("made").node;
    let (from, to) = (mkdir(NodeId::ROOT, "from"), mkdir(NodeId::ROOT, "to"));
    for round in 0..10 {
        mkdir(from, "d");
        let links = |at| layer.getattr(&ROOT, at).expect("known").links;
        assert_eq!((links(from), links(to)), (3, 2 + round));
        layer.rename(&ROOT, from, name("d"), to, name(&format!("d{round}")), RenameFlags::empty()).expect("moved");
        assert_eq!((links(from), links(to)), (2, 3 + round));
    }
}

#[test]
fn snapshots_are_read_and_not_changed() {
    let cluster = Cluster::new();
    let layer = cluster.fresh(false);
    let node = write(&layer, "f", b"before");
    let inode = layer.getattr(&ROOT, node).expect("known").inode;
    let snapshots = find(&layer, ".snap").expect("in every directory");
    assert_eq!(layer.mkdir(&ROOT, snapshots, name("mine"), 0o755).expect_err("not by a name"), Errno::EROFS);
    cluster.run(&["snapshot", "/tests/fresh-0", "first"]);
    let handle = layer.open(&ROOT, node, OpenFlags::WRITE_ONLY).expect("open");
    layer.write(&ROOT, handle, 0, b"after!").expect("written");
    layer.release(handle);
    let old = find(&layer, ".snap/first/f").expect("in the snapshot");
    assert_eq!((content(&layer, old).as_slice(), content(&layer, node).as_slice()), (&b"before"[..], &b"after!"[..]));
    assert_ne!(layer.getattr(&ROOT, old).expect("known").inode, inode, "two files at once");
    assert_eq!(layer.open(&ROOT, old, OpenFlags::WRITE_ONLY).expect_err("a snapshot"), Errno::EROFS);
    let inside = find(&layer, ".snap/first").expect("the snapshot");
    assert_eq!(layer.unlink(&ROOT, inside, name("f")).expect_err("a snapshot"), Errno::EROFS);
    assert_eq!(layer.rmdir(&ROOT, snapshots, name("first")).expect_err("not by a name"), Errno::EROFS);
    let mknod = layer.mknod(&ROOT, inside, name("new"), FileType::Fifo, 0o600, 0);
    assert_eq!(mknod.expect_err("a snapshot"), Errno::EROFS);
}

#[test]
fn what_the_cluster_does_with_a_file_is_not_set_by_an_attribute() {
    let cluster = Cluster::new();
    let layer = cluster.fresh(false);
    let set = |attribute: &[u8]| layer.setxattr(&ROOT, NodeId::ROOT, attribute, b"1000000", XattrFlags::empty());
    assert_eq!(set(b"ceph.quota.max_bytes").expect_err("an operator's"), Errno::EOPNOTSUPP);
    set(b"user.mine").expect("anybody's");
    assert_eq!(set(b"user.").expect_err("no name"), Errno::EINVAL);
    assert_eq!(layer.listxattr(&ROOT, NodeId::ROOT).expect("listed"), [b"user.mine".to_vec()]);
    let node = write(&layer, "f", b"12345");
    let long = vec![7; 3000];
    layer.setxattr(&ROOT, node, b"user.long", &long, XattrFlags::empty()).expect("anybody's");
    assert_eq!(layer.getxattr(&ROOT, node, b"user.long").expect("there"), long);
    let handle = layer.open(&ROOT, node, OpenFlags::READ_ONLY).expect("open");
    assert_eq!(layer.seek(&ROOT, handle, 2, SeekTo::Hole).expect("the end"), 5);
    layer.release(handle);
    // The limit of the directory above it.
    let space = layer.statfs(&ROOT, node).expect("known");
    assert_eq!(space.blocks * u64::from(space.block_size), 1 << 30);
}

#[test]
fn to_set_what_is_so_already_is_a_change() {
    let cluster = Cluster::new();
    // By another client than who made it, and by that.
    let maker = cluster.mount("/tests");
    let made = write(&maker, "f", b"content");
    let other = cluster.mount("/tests");
    let found = find(&other, "f").expect("there");
    for (layer, node) in [(&other, found), (&maker, made), (&maker, made)] {
        sets_what_is_so(layer, node);
    }
}

#[test]
fn times_that_cannot_be_kept_become_the_nearest_that_can() {
    let cluster = Cluster::new();
    let layer = cluster.fresh(false);
    let node = write(&layer, "f", b"content");
    let last = i64::from(u32::MAX);
    for (seconds, kept) in
        [(-1, 0), (i64::MIN, 0), (0, 0), (1 << 31, 1 << 31), (last, last), (last + 1, last), (i64::MAX, last)]
    {
        let at = Some(SetTime::At(Timestamp { seconds, nanoseconds: 7 }));
        let changes = SetAttributes { accessed: at, modified: at, ..SetAttributes::default() };
        layer.setattr(&ROOT, node, &changes, None).expect("set");
        let shown = layer.getattr(&ROOT, node).expect("known");
        let nanoseconds = if seconds == kept { 7 } else { 0 };
        let expected = Timestamp { seconds: kept, nanoseconds };
        assert_eq!((shown.accessed, shown.modified), (expected, expected), "{seconds}");
    }
}

#[test]
fn set_id_bits_stay_until_somebody_takes_them() {
    let cluster = Cluster::new();
    let layer = cluster.fresh(false);
    let node = write(&layer, "f", b"content");
    let set = |changes: &SetAttributes| layer.setattr(&ROOT, node, changes, None).expect("changed").permissions;
    let none = SetAttributes::default();
    for mode in [0o6755, 0o2346, 0o4600] {
        assert_eq!(set(&SetAttributes { permissions: Some(mode), ..none }), mode);
        for changes in [
            SetAttributes { uid: Some(1000), ..none },
            SetAttributes { gid: Some(7), ..none },
            SetAttributes { gid: Some(7), ..none },
            SetAttributes { size: Some(u64::from(mode)), ..none },
            SetAttributes { uid: Some(0), gid: Some(0), size: Some(3), ..none },
        ] {
            assert_eq!(set(&changes), mode, "{changes:?}");
        }
    }
}

fn sets_what_is_so(layer: &Ceph, node: NodeId) {
    let mut last = layer.getattr(&ROOT, node).expect("known");
    let set = SetAttributes::default();
    for changes in [
        SetAttributes { uid: Some(last.uid), ..set },
        SetAttributes { gid: Some(last.gid), ..set },
        SetAttributes { permissions: Some(last.permissions), ..set },
        SetAttributes { modified: Some(SetTime::At(last.modified)), ..set },
        SetAttributes { size: Some(last.size), ..set },
    ] {
        let next = layer.setattr(&ROOT, node, &changes, None).expect("changed");
        assert!(next.changed > last.changed, "{changes:?}: {last:?} {next:?}");
        assert!(changes.size.is_some() || next.modified == last.modified, "{changes:?}");
        last = next;
    }
}

#[test]
fn a_mount_that_is_not_possible_says_why() {
    let cluster = Cluster::new();
    let why = |source| match Ceph::mount(&source) {
        Ok(_) => panic!("mounted"),
        Err(error) => (error.to_string(), error.source().map(ToString::to_string)),
    };
    let (text, cause) = why(cluster.source("/missing"));
    assert!(text.contains("/missing") && cause.is_some_and(|cause| cause.contains("ENOENT")), "{text}");
    let mut source = cluster.source("/");
    source.user = Some("nobody".into());
    let (text, _) = why(source);
    assert!(text.contains("client.nobody"), "{text}");
    let mut source = cluster.source("/");
    source.configuration = Some("/missing/ceph.conf".into());
    assert!(matches!(Ceph::mount(&source), Err(MountError::Configuration { .. })));
}

#[test]
fn a_read_only_one_refuses_every_change() {
    let cluster = Cluster::new();
    write(&cluster.mount("/tests"), "f", b"content");
    let mut source = cluster.source("/tests");
    source.read_only = true;
    let layer = Ceph::mount(&source).expect("mounted");
    let node = find(&layer, "f").expect("there");
    assert_eq!(content(&layer, node), b"content");
    assert!(layer.read_only());
    assert_eq!(layer.open(&ROOT, node, OpenFlags::WRITE_ONLY).expect_err("read-only"), Errno::EROFS);
    assert_eq!(layer.mkdir(&ROOT, NodeId::ROOT, name("f"), 0o755).expect_err("a name"), Errno::EEXIST);
    assert_eq!(layer.mkdir(&ROOT, NodeId::ROOT, name("g"), 0o755).expect_err("read-only"), Errno::EROFS);
    assert_eq!(layer.unlink(&ROOT, NodeId::ROOT, name("f")).expect_err("read-only"), Errno::EROFS);
}

/// The end of a file is looked at, and written at, in two steps.
#[test]
fn what_two_clients_append_to_one_file_is_all_there() {
    const LINES: u64 = 150;
    let cluster = Cluster::new();
    let source = Source { is_shared: true, ..cluster.source("/tests") };
    let clients = [cluster.mounted(&source), cluster.mounted(&source)];
    let _ = write(&clients[0], "f", b"");
    std::thread::scope(|scope| {
        for (number, client) in clients.iter().enumerate() {
            scope.spawn(move || {
                let line = [b'a' + number as u8; 20];
                for _ in 0..LINES {
                    let node = find(client, "f").expect("there");
                    let flags = OpenFlags::WRITE_ONLY | OpenFlags::APPEND;
                    let handle = client.open(&Caller::ROOT, node, flags).expect("opened");
                    assert_eq!(client.write(&Caller::ROOT, handle, 0, &line).expect("written").count, line.len());
                    client.release(handle);
                }
            });
        }
    });
    let found = content(&clients[0], find(&clients[0], "f").expect("there"));
    let lines = |byte: u8| found.chunks(20).filter(|line| line.iter().all(|one| *one == byte)).count() as u64;
    assert_eq!((lines(b'a'), lines(b'b'), found.len() as u64), (LINES, LINES, 2 * 20 * LINES));
}
