//! Conformance cases: renaming.

use super::support::*;
use super::{Capability, Case};
use crate::types::{Errno, FileType, RenameFlags};

pub(super) const CASES: &[Case] = &[
    Case::new("rename/moves", moves_names),
    Case::new("rename/directories", moves_directories_with_what_is_in_them),
    Case::new("rename/replaces_files", replaces_files),
    Case::new("rename/replaces_directories", replaces_empty_directories),
    Case::new("rename/kinds", files_and_directories_do_not_replace_each_other),
    Case::new("rename/missing", missing_sources_are_refused),
    Case::new("rename/same_file", two_names_of_one_file_stay),
    Case::new("rename/into_itself", a_directory_does_not_move_into_itself),
    Case::needing("rename/no_replace", Capability::RenameFlags, no_replace_refuses_taken_names),
    Case::needing("rename/exchange", Capability::RenameFlags, exchange_swaps),
    Case::needing("rename/exchange_kinds", Capability::RenameFlags, exchange_swaps_files_with_directories),
    Case::needing("rename/whiteout", Capability::RenameFlags, whiteout_leaves_a_device),
    Case::needing("rename/contradictions", Capability::RenameFlags, contradicting_flags_are_refused),
];

const PLAIN: RenameFlags = RenameFlags::empty();

fn moves_names(layer: Layer<'_>) {
    let directory = mkdir(layer, ROOT, "directory");
    let node = file(layer, ROOT, "a", b"content");
    ok(rename(layer, (ROOT, "a"), (ROOT, "b"), PLAIN));
    missing(layer, ROOT, "a");
    ok(rename(layer, (ROOT, "b"), (directory, "c"), PLAIN));
    missing(layer, ROOT, "b");
    let found = lookup(layer, directory, "c");
    assert_eq!((found.node, found.attributes.links), (node, 1));
    same_bytes(&content(layer, node), b"content");
    ok(rename(layer, (directory, "c"), (directory, "c"), PLAIN));
    assert_eq!(names(layer, directory), ["c"]);
    let link = ok(layer.symlink(&ME, ROOT, name("link"), b"target")).node;
    ok(rename(layer, (ROOT, "link"), (directory, "link"), PLAIN));
    assert_eq!(ok(layer.readlink(&ME, link)), b"target");
    assert_eq!(names(layer, ROOT), ["directory"]);
}

fn moves_directories_with_what_is_in_them(layer: Layer<'_>) {
    let from = mkdir(layer, ROOT, "from");
    let to = mkdir(layer, ROOT, "to");
    let moved = mkdir(layer, from, "moved");
    let deep = mkdir(layer, moved, "deep");
    let node = file(layer, deep, "file", b"content");
    ok(rename(layer, (from, "moved"), (to, "here"), PLAIN));
    assert!(names(layer, from).is_empty());
    assert_eq!(lookup(layer, to, "here").node, moved);
    assert_eq!(lookup(layer, moved, "deep").node, deep);
    assert_eq!(lookup(layer, deep, "file").node, node);
    same_bytes(&content(layer, node), b"content");
    file(layer, deep, "new", b"x");
    assert_eq!(names(layer, deep), ["file", "new"]);
    ok(layer.rmdir(&ME, ROOT, name("from")));
    refused(layer.rmdir(&ME, ROOT, name("to")), Errno::ENOTEMPTY);
}

fn replaces_files(layer: Layer<'_>) {
    let source = file(layer, ROOT, "source", b"new");
    let target = file(layer, ROOT, "target", b"old");
    ok(layer.link(&ME, target, ROOT, name("also target")));
    ok(rename(layer, (ROOT, "source"), (ROOT, "target"), PLAIN));
    missing(layer, ROOT, "source");
    assert_eq!(lookup(layer, ROOT, "target").node, source);
    assert_eq!(attributes(layer, target).links, 1);
    same_bytes(&content(layer, target), b"old");
    let link = ok(layer.symlink(&ME, ROOT, name("link"), b"target")).node;
    ok(rename(layer, (ROOT, "link"), (ROOT, "target"), PLAIN));
    assert_eq!(lookup(layer, ROOT, "target").node, link);
    assert_eq!(names(layer, ROOT), ["also target", "target"]);
}

fn replaces_empty_directories(layer: Layer<'_>) {
    let source = mkdir(layer, ROOT, "source");
    file(layer, source, "file", b"x");
    let full = mkdir(layer, ROOT, "full");
    file(layer, full, "file", b"y");
    mkdir(layer, ROOT, "empty");
    refused(rename(layer, (ROOT, "source"), (ROOT, "full"), PLAIN), Errno::ENOTEMPTY);
    ok(rename(layer, (ROOT, "source"), (ROOT, "empty"), PLAIN));
    assert_eq!(lookup(layer, ROOT, "empty").node, source);
    assert_eq!(names(layer, source), ["file"]);
    assert_eq!(names(layer, ROOT), ["empty", "full"]);
}

fn files_and_directories_do_not_replace_each_other(layer: Layer<'_>) {
    mkdir(layer, ROOT, "directory");
    file(layer, ROOT, "file", b"x");
    ok(layer.symlink(&ME, ROOT, name("link"), b"directory"));
    for other in ["file", "link"] {
        refused(rename(layer, (ROOT, other), (ROOT, "directory"), PLAIN), Errno::EISDIR);
        refused(rename(layer, (ROOT, "directory"), (ROOT, other), PLAIN), Errno::ENOTDIR);
    }
    assert_eq!(names(layer, ROOT), ["directory", "file", "link"]);
}

fn missing_sources_are_refused(layer: Layer<'_>) {
    file(layer, ROOT, "file", b"x");
    let gone = mkdir(layer, ROOT, "gone");
    ok(layer.rmdir(&ME, ROOT, name("gone")));
    refused(rename(layer, (ROOT, "missing"), (ROOT, "new"), PLAIN), Errno::ENOENT);
    refused(rename(layer, (ROOT, "missing"), (ROOT, "file"), PLAIN), Errno::ENOENT);
    refused(rename(layer, (ROOT, "missing"), (ROOT, "missing"), PLAIN), Errno::ENOENT);
    refused(rename(layer, (gone, "missing"), (ROOT, "new"), PLAIN), Errno::ENOENT);
    refused(rename(layer, (NO_NODE, "file"), (ROOT, "new"), PLAIN), Errno::ESTALE);
    refused(rename(layer, (ROOT, "file"), (NO_NODE, "new"), PLAIN), Errno::ESTALE);
    assert_eq!(names(layer, ROOT), ["file"]);
}

fn two_names_of_one_file_stay(layer: Layer<'_>) {
    let node = file(layer, ROOT, "a", b"x");
    ok(layer.link(&ME, node, ROOT, name("b")));
    ok(rename(layer, (ROOT, "a"), (ROOT, "b"), PLAIN));
    assert_eq!(names(layer, ROOT), ["a", "b"]);
    assert_eq!(attributes(layer, node).links, 2);
}

fn a_directory_does_not_move_into_itself(layer: Layer<'_>) {
    let outer = mkdir(layer, ROOT, "outer");
    let inner = mkdir(layer, outer, "inner");
    let deep = mkdir(layer, inner, "deep");
    refused(rename(layer, (ROOT, "outer"), (outer, "new"), PLAIN), Errno::EINVAL);
    refused(rename(layer, (ROOT, "outer"), (deep, "new"), PLAIN), Errno::EINVAL);
    refused(rename(layer, (ROOT, "outer"), (outer, "inner"), PLAIN), Errno::EINVAL);
    refused(rename(layer, (inner, "deep"), (ROOT, "outer"), PLAIN), Errno::ENOTEMPTY);
    file(layer, inner, "file", b"x");
    assert_eq!(names(layer, ROOT), ["outer"]);
    assert_eq!(names(layer, outer), ["inner"]);
    assert_eq!(names(layer, inner), ["deep", "file"]);
}

fn no_replace_refuses_taken_names(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"x");
    file(layer, ROOT, "taken", b"y");
    mkdir(layer, ROOT, "directory");
    for taken in ["taken", "directory", "file"] {
        refused(rename(layer, (ROOT, "file"), (ROOT, taken), RenameFlags::NO_REPLACE), Errno::EEXIST);
    }
    ok(rename(layer, (ROOT, "file"), (ROOT, "free"), RenameFlags::NO_REPLACE));
    assert_eq!(lookup(layer, ROOT, "free").node, node);
    assert_eq!(names(layer, ROOT), ["directory", "free", "taken"]);
}

fn exchange_swaps(layer: Layer<'_>) {
    let directory = mkdir(layer, ROOT, "directory");
    let a = file(layer, ROOT, "a", b"content of a");
    let b = file(layer, directory, "b", b"content of b");
    ok(rename(layer, (ROOT, "a"), (directory, "b"), RenameFlags::EXCHANGE));
    assert_eq!((lookup(layer, ROOT, "a").node, lookup(layer, directory, "b").node), (b, a));
    same_bytes(&content(layer, a), b"content of a");
    refused(rename(layer, (ROOT, "a"), (ROOT, "missing"), RenameFlags::EXCHANGE), Errno::ENOENT);
    refused(rename(layer, (ROOT, "missing"), (ROOT, "a"), RenameFlags::EXCHANGE), Errno::ENOENT);
    ok(rename(layer, (ROOT, "a"), (ROOT, "a"), RenameFlags::EXCHANGE));
    assert_eq!((attributes(layer, a).links, attributes(layer, b).links), (1, 1));
}

fn exchange_swaps_files_with_directories(layer: Layer<'_>) {
    let parent = mkdir(layer, ROOT, "parent");
    let directory = mkdir(layer, parent, "x");
    file(layer, directory, "inside", b"x");
    let node = file(layer, ROOT, "y", b"y");
    ok(rename(layer, (parent, "x"), (ROOT, "y"), RenameFlags::EXCHANGE));
    assert_eq!((lookup(layer, parent, "x").node, lookup(layer, ROOT, "y").node), (node, directory));
    assert_eq!(names(layer, directory), ["inside"]);
    // The directory now lies beside its old parent, so that this one may move into it.
    ok(rename(layer, (ROOT, "parent"), (directory, "parent"), PLAIN));
    refused(rename(layer, (ROOT, "y"), (parent, "x"), RenameFlags::EXCHANGE), Errno::EINVAL);
    refused(rename(layer, (parent, "x"), (ROOT, "y"), RenameFlags::EXCHANGE), Errno::EINVAL);
    assert_eq!(names(layer, ROOT), ["y"]);
}

fn whiteout_leaves_a_device(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"x");
    ok(rename(layer, (ROOT, "file"), (ROOT, "moved"), RenameFlags::WHITEOUT));
    assert_eq!(lookup(layer, ROOT, "moved").node, node);
    let left = lookup(layer, ROOT, "file").attributes;
    assert_eq!((left.file_type, left.device, left.links), (FileType::CharDevice, 0, 1));
    file(layer, ROOT, "other", b"y");
    ok(rename(layer, (ROOT, "other"), (ROOT, "moved"), RenameFlags::WHITEOUT));
    assert_eq!(names(layer, ROOT), ["file", "moved", "other"]);
    let flags = RenameFlags::WHITEOUT | RenameFlags::NO_REPLACE;
    refused(rename(layer, (ROOT, "moved"), (ROOT, "other"), flags), Errno::EEXIST);
}

fn contradicting_flags_are_refused(layer: Layer<'_>) {
    file(layer, ROOT, "a", b"a");
    file(layer, ROOT, "b", b"b");
    for with in [RenameFlags::NO_REPLACE, RenameFlags::WHITEOUT] {
        refused(rename(layer, (ROOT, "a"), (ROOT, "b"), RenameFlags::EXCHANGE | with), Errno::EINVAL);
    }
    same_bytes(&content(layer, lookup(layer, ROOT, "a").node), b"a");
}
