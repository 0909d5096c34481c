//! Conformance cases: hard links.

use super::Case;
use super::support::*;
use crate::types::{Errno, FileType, OpenFlags};

pub(super) const CASES: &[Case] = &[
    Case::new("links/one_object", all_names_lead_to_one_object),
    Case::new("links/types", everything_but_directories_has_links),
    Case::new("links/nameless", a_file_without_names_gets_none),
    Case::new("links/removal", the_last_name_counts),
];

fn all_names_lead_to_one_object(layer: Layer<'_>) {
    let directory = mkdir(layer, ROOT, "directory");
    let node = file(layer, ROOT, "first", b"content");
    let linked = ok(layer.link(&ME, node, directory, name("second")));
    assert_eq!((linked.node, linked.attributes.links), (node, 2));
    let found = lookup(layer, directory, "second");
    assert_eq!((found.node, found.attributes.inode), (node, attributes(layer, node).inode));
    assert_eq!(lookup(layer, ROOT, "first").attributes, found.attributes);
    let handle = open(layer, found.node, OpenFlags::WRITE_ONLY);
    write(layer, handle, 0, b"CON");
    layer.release(handle);
    same_bytes(&content(layer, lookup(layer, ROOT, "first").node), b"CONtent");
    chmod(layer, node, 0o600);
    assert_eq!(lookup(layer, directory, "second").attributes.permissions, 0o600);
}

fn everything_but_directories_has_links(layer: Layer<'_>) {
    let directory = mkdir(layer, ROOT, "directory");
    refused(layer.link(&ME, directory, ROOT, name("new")), Errno::EPERM);
    refused(layer.link(&ME, ROOT, directory, name("new")), Errno::EPERM);
    let link = ok(layer.symlink(&ME, ROOT, name("symlink"), b"directory")).node;
    let pipe = ok(layer.mknod(&ME, ROOT, name("pipe"), FileType::Fifo, 0o644, 0)).node;
    for (node, text) in [(link, "symlink too"), (pipe, "pipe too")] {
        assert_eq!(ok(layer.link(&ME, node, directory, name(text))).node, node);
        assert_eq!(attributes(layer, node).links, 2);
    }
    assert_eq!(ok(layer.readlink(&ME, lookup(layer, directory, "symlink too").node)), b"directory");
}

fn a_file_without_names_gets_none(layer: Layer<'_>) {
    let (node, handle) = create(layer, ROOT, "file");
    ok(layer.unlink(&ME, ROOT, name("file")));
    refused(layer.link(&ME, node, ROOT, name("again")), Errno::ENOENT);
    missing(layer, ROOT, "again");
    layer.release(handle);
}

fn the_last_name_counts(layer: Layer<'_>) {
    let node = file(layer, ROOT, "0", b"content");
    for at in 1..10 {
        ok(layer.link(&ME, node, ROOT, name(&at.to_string())));
    }
    for at in 0..9 {
        assert_eq!(attributes(layer, node).links, 10 - at);
        ok(layer.unlink(&ME, ROOT, name(&at.to_string())));
    }
    same_bytes(&content(layer, lookup(layer, ROOT, "9").node), b"content");
    ok(layer.unlink(&ME, ROOT, name("9")));
    assert_eq!(attributes(layer, node).links, 0);
    assert!(names(layer, ROOT).is_empty());
}
