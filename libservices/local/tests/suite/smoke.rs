//! Smoke tests of the layer on every kind of filesystem.

use crate::support::{Filesystem, ROOT, create, in_namespace, name, open, read, write};
use poolfs_libservice::{Durability, Libservice};
use poolfs_types::{Caller, NodeId, OpenFlags, SeekTo};
use std::ops::ControlFlow;

fn walk(kind: &str) {
    let filesystem = Filesystem::new(kind, 320);
    let layer = open(&filesystem.path());
    let caller = Caller { uid: 1000, gid: 1001, umask: 0o027 };
    let directory = layer.mkdir(&caller, NodeId::ROOT, name("d"), 0o777).expect("mkdir");
    let a = directory.attributes;
    assert_eq!((a.uid, a.gid, a.permissions), (1000, 1001, 0o750), "{kind}");
    let (file, handle) = create(&layer, directory.node, "f");
    let data: Vec<u8> = (0..200_001u32).map(|i| ((i * 7) >> 3) as u8).collect();
    write(&layer, handle, 0, &data);
    assert_eq!(read(&layer, handle, 0, 300_000), data, "{kind}");
    assert_eq!(read(&layer, handle, 5, 190_000), data[5..190_005], "{kind}");
    write(&layer, handle, 1 << 20, b"end");
    assert_eq!(layer.seek(&ROOT, handle, 0, SeekTo::Data).expect("seek"), 0);
    layer.fsync(&ROOT, handle, Durability::All).expect("fsync");
    assert_eq!(layer.getattr(&ROOT, file).expect("getattr").size, (1 << 20) + 3);
    let again = layer.lookup(&ROOT, directory.node, name("f")).expect("lookup");
    assert_eq!(again.node, file);
    layer.setxattr(&ROOT, file, b"trusted.x", b"v", poolfs_types::XattrFlags::empty()).expect("setxattr");
    assert_eq!(layer.getxattr(&ROOT, file, b"trusted.x").expect("getxattr"), b"v");
    layer.unlink(&ROOT, directory.node, name("f")).expect("unlink");
    assert_eq!(layer.getattr(&ROOT, file).expect("still held").links, 0);
    assert_eq!(read(&layer, handle, 1 << 20, 10), b"end");
    let other = layer.open(&ROOT, file, OpenFlags::READ_ONLY).expect("open of a removed file");
    assert_eq!(read(&layer, other, 0, 100), data[..100]);
    layer.release(handle);
    layer.release(other);
    layer.forget(file, 2);
    assert!(layer.getattr(&ROOT, file).is_err_and(|e| e == poolfs_types::Errno::ESTALE));
    let list = layer.opendir(&ROOT, NodeId::ROOT).expect("opendir");
    let mut names = Vec::new();
    layer
        .readdir(&ROOT, list, 0, &mut |entry| {
            names.push((entry.name.as_bytes().to_vec(), entry.inode));
            ControlFlow::Continue(())
        })
        .expect("readdir");
    assert!(names.contains(&(b"d".to_vec(), a.inode)), "{kind}: {names:?}");
    layer.release(list);
}

#[test]
fn tmpfs() {
    in_namespace("smoke::tmpfs", || walk("tmpfs"));
}

#[test]
fn ext4() {
    in_namespace("smoke::ext4", || walk("ext4"));
}

#[test]
fn xfs() {
    in_namespace("smoke::xfs", || walk("xfs"));
}

#[test]
fn btrfs() {
    in_namespace("smoke::btrfs", || walk("btrfs"));
}

#[test]
fn overlay_without_handles() {
    in_namespace("smoke::overlay_without_handles", || walk("overlay"));
}
