//! Conformance cases: modes, owners, inode numbers and filesystem statistics.

use super::Case;
use super::support::*;
use crate::types::{Errno, FileType, SetAttributes, SetTime, Timestamp};

pub(super) const CASES: &[Case] = &[
    Case::new("attributes/mode", all_twelve_bits_are_kept),
    Case::new("attributes/owner", owners_are_kept),
    Case::new("attributes/together", several_changes_at_once),
    Case::new("attributes/nothing", an_empty_change_changes_nothing),
    Case::new("attributes/blocks", content_takes_room),
    Case::new("attributes/inodes", inode_numbers_tell_objects_apart),
    Case::new("attributes/statfs", statfs_is_plausible),
];

fn all_twelve_bits_are_kept(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"x");
    let directory = mkdir(layer, ROOT, "directory");
    for permissions in [0, 0o7777, 0o4755, 0o2755, 0o1777, 0o644] {
        for node in [node, directory] {
            assert_eq!(chmod(layer, node, permissions).permissions, permissions);
            assert_eq!(attributes(layer, node).permissions, permissions);
        }
    }
    assert_eq!(lookup(layer, ROOT, "file").attributes.mode(), 0o100_644);
    assert_eq!(chmod(layer, ROOT, 0o711).permissions, 0o711);
}

fn owners_are_kept(layer: Layer<'_>) {
    let pipe = ok(layer.mknod(&ME, ROOT, name("pipe"), FileType::Fifo, 0o600, 0)).node;
    let link = ok(layer.symlink(&ME, ROOT, name("link"), b"pipe")).node;
    for node in [file(layer, ROOT, "file", b"x"), mkdir(layer, ROOT, "directory"), pipe, link] {
        let owned = SetAttributes { uid: Some(1000), ..Default::default() };
        let changed = ok(layer.setattr(&ME, node, &owned, None));
        assert_eq!((changed.uid, changed.gid), (1000, 0));
        let owned = SetAttributes { gid: Some(2000), ..Default::default() };
        let changed = ok(layer.setattr(&ME, node, &owned, None));
        assert_eq!((changed.uid, changed.gid), (1000, 2000));
        assert_eq!(attributes(layer, node), changed);
    }
    assert_eq!(ok(layer.readlink(&ME, link)), b"pipe");
}

fn several_changes_at_once(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"content");
    let time = Timestamp { seconds: 500_000_000, nanoseconds: 123_456_789 };
    let changes = SetAttributes {
        permissions: Some(0o6711),
        uid: Some(7),
        gid: Some(8),
        size: Some(3),
        accessed: Some(SetTime::At(Timestamp { seconds: 400_000_000, nanoseconds: 5 })),
        modified: Some(SetTime::At(time)),
    };
    let changed = ok(layer.setattr(&ME, node, &changes, None));
    assert_eq!((changed.permissions, changed.uid, changed.gid, changed.size), (0o6711, 7, 8, 3));
    assert_eq!(changed.modified, time, "an explicit time wins over that of the truncate");
    assert_eq!((changed.accessed.seconds, changed.accessed.nanoseconds), (400_000_000, 5));
    assert_eq!(attributes(layer, node), changed);
    same_bytes(&content(layer, node), b"con");
}

fn an_empty_change_changes_nothing(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"content");
    let before = attributes(layer, node);
    assert_eq!(ok(layer.setattr(&ME, node, &SetAttributes::default(), None)), before);
    refused(layer.setattr(&ME, NO_NODE, &SetAttributes::default(), None), Errno::ESTALE);
}

fn content_takes_room(layer: Layer<'_>) {
    let (node, handle) = create(layer, ROOT, "file");
    assert_eq!(attributes(layer, node).blocks, 0);
    write(layer, handle, 0, &pattern(1, 1 << 20));
    ok(layer.fsync(&ME, handle, crate::Durability::All));
    let blocks = attributes(layer, node).blocks;
    assert!(blocks > 0, "no blocks for 1 MiB");
    layer.release(handle);
}

fn inode_numbers_tell_objects_apart(layer: Layer<'_>) {
    let mut seen = vec![attributes(layer, ROOT).inode];
    for at in 0..50 {
        let node = file(layer, ROOT, &format!("file {at}"), b"x");
        seen.push(attributes(layer, node).inode);
        seen.push(attributes(layer, mkdir(layer, ROOT, &format!("directory {at}"))).inode);
    }
    let count = seen.len();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), count, "two live objects share an inode number");
}

fn statfs_is_plausible(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"x");
    for node in [ROOT, node] {
        let found = ok(layer.statfs(&ME, node));
        assert!(found.block_size.is_power_of_two(), "{found:?}");
        assert!(found.blocks > 0 && found.blocks_free <= found.blocks, "{found:?}");
        assert!(found.blocks_available <= found.blocks_free && found.files_free <= found.files, "{found:?}");
        assert_eq!(found.name_max, 255);
    }
}
