//! Conformance cases: files created without a name (`tmpfile`).

use super::support::*;
use super::{Capability, Case};
use crate::Durability;
use crate::types::{Caller, Errno, FileType, HandleId, OpenFlags};

pub(super) const CASES: &[Case] = &[
    Case::needing("nameless/file", Capability::NamelessFiles, it_is_a_file_like_others),
    Case::needing("nameless/owner", Capability::NamelessFiles, it_has_an_owner_and_a_mode),
    Case::needing("nameless/first_name", Capability::NamelessFiles, a_link_is_its_first_name),
    Case::needing("nameless/exclusive", Capability::NamelessFiles, an_exclusive_one_never_has_a_name),
    Case::new("nameless/errors", it_needs_a_directory_and_a_writer),
];

#[track_caller]
fn nameless(layer: Layer<'_>, parent: Node, flags: OpenFlags) -> (Node, HandleId) {
    let (entry, handle) = ok(layer.tmpfile(&ME, parent, 0o644, flags));
    let found = entry.attributes;
    assert_eq!((found.file_type, found.links, found.size), (FileType::Regular, 0, 0));
    (entry.node, handle)
}

fn it_is_a_file_like_others(layer: Layer<'_>) {
    let directory = mkdir(layer, ROOT, "directory");
    let (node, handle) = nameless(layer, directory, READ_WRITE);
    let (other, other_handle) = nameless(layer, directory, READ_WRITE);
    assert_ne!(node, other);
    let text = vec![7; 10_000];
    write(layer, handle, 3, &text);
    write(layer, other_handle, 0, b"other");
    same_bytes(&read(layer, handle, 3, 20_000), &text);
    let second = open(layer, node, OpenFlags::READ_ONLY);
    ok(layer.fsync(&ME, handle, Durability::All));
    layer.release(handle);
    same_bytes(&read(layer, second, 0, 3), &[0; 3]);
    layer.release(second);
    same_bytes(&content(layer, other), b"other");
    assert_eq!(truncate(layer, node, 100).size, 100);
    assert_eq!(content(layer, node).len(), 100);
    assert_eq!(attributes(layer, node).links, 0);
    assert!(names(layer, directory).is_empty());
    layer.release(other_handle);
    layer.forget(node, 1);
    layer.forget(other, 1);
    ok(layer.rmdir(&ME, ROOT, name("directory")));
    ok(layer.sync());
}

fn it_has_an_owner_and_a_mode(layer: Layer<'_>) {
    let caller = Caller { uid: 7, gid: 8, umask: 0o027 };
    let (entry, handle) = ok(layer.tmpfile(&caller, ROOT, 0o666, READ_WRITE));
    let found = attributes(layer, entry.node);
    assert_eq!((found.uid, found.gid, found.permissions), (7, 8, 0o640));
    assert_eq!(chmod(layer, entry.node, 0o600).permissions, 0o600);
    layer.release(handle);
}

fn a_link_is_its_first_name(layer: Layer<'_>) {
    let directory = mkdir(layer, ROOT, "directory");
    let (node, handle) = nameless(layer, ROOT, READ_WRITE);
    write(layer, handle, 0, b"before");
    let linked = ok(layer.link(&ME, node, directory, name("name")));
    assert_eq!((linked.node, linked.attributes.links, linked.attributes.size), (node, 1, 6));
    layer.forget(node, 1);
    write(layer, handle, 6, b" and after");
    layer.release(handle);
    let found = lookup(layer, directory, "name");
    assert_eq!((found.node, found.attributes.links), (node, 1));
    same_bytes(&content(layer, node), b"before and after");
    assert_eq!(names(layer, directory), ["name"]);
    refused(layer.link(&ME, node, directory, name("name")), Errno::EEXIST);
    assert_eq!(ok(layer.link(&ME, node, ROOT, name("second"))).attributes.links, 2);
    layer.forget(node, 3);
    let found = lookup(layer, ROOT, "second");
    same_bytes(&content(layer, found.node), b"before and after");
    let handle = open(layer, found.node, READ_WRITE);
    ok(layer.unlink(&ME, ROOT, name("second")));
    ok(layer.unlink(&ME, directory, name("name")));
    assert_eq!(attributes(layer, found.node).links, 0);
    refused(layer.link(&ME, found.node, ROOT, name("again")), Errno::ENOENT);
    layer.release(handle);
    // A name that was there before is no hindrance, whatever it has left behind.
    let (node, handle) = nameless(layer, directory, OpenFlags::WRITE_ONLY);
    write(layer, handle, 0, b"new");
    ok(layer.link(&ME, node, directory, name("name")));
    layer.release(handle);
    same_bytes(&content(layer, lookup(layer, directory, "name").node), b"new");
}

fn an_exclusive_one_never_has_a_name(layer: Layer<'_>) {
    let (node, handle) = nameless(layer, ROOT, READ_WRITE | OpenFlags::EXCLUSIVE);
    write(layer, handle, 0, b"content");
    refused(layer.link(&ME, node, ROOT, name("name")), Errno::ENOENT);
    missing(layer, ROOT, "name");
    same_bytes(&read(layer, handle, 0, 100), b"content");
    layer.release(handle);
}

fn it_needs_a_directory_and_a_writer(layer: Layer<'_>) {
    let regular = file(layer, ROOT, "file", b"");
    refused(layer.tmpfile(&ME, regular, 0o644, READ_WRITE), Errno::ENOTDIR);
    refused(layer.tmpfile(&ME, ROOT, 0o644, OpenFlags::READ_ONLY), Errno::EINVAL);
    refused(layer.tmpfile(&ME, NO_NODE, 0o644, READ_WRITE), Errno::ESTALE);
}
