//! Conformance cases: the lifetime of handles, and the errors for invalid ones.

use super::Case;
use super::support::*;
use crate::Durability;
use crate::types::{AllocateMode, Errno, OpenFlags, RenameFlags, SeekTo, SetAttributes};
use std::ops::ControlFlow;

pub(super) const CASES: &[Case] = &[
    Case::new("handles/unlinked", a_file_lives_on_without_a_name),
    Case::new("handles/replaced", a_replaced_file_lives_on),
    Case::new("handles/renamed", a_handle_follows_its_file),
    Case::new("handles/forgotten", a_handle_keeps_its_node_alive),
    Case::new("handles/unknown", unknown_handles_are_refused),
    Case::new("handles/released", released_handles_are_refused),
    Case::new("handles/directory", a_directory_handle_is_no_files),
    Case::new("handles/many", many_handles_of_one_file),
];

fn a_file_lives_on_without_a_name(layer: Layer<'_>) {
    let (node, handle) = create(layer, ROOT, "file");
    write(layer, handle, 0, b"before");
    ok(layer.unlink(&ME, ROOT, name("file")));
    assert_eq!(attributes(layer, node).links, 0);
    write(layer, handle, 6, b" and after");
    same_bytes(&read(layer, handle, 0, 100), b"before and after");
    assert_eq!(truncate(layer, node, 6).size, 6);
    assert_eq!(chmod(layer, node, 0o600).permissions, 0o600);
    let second = open(layer, node, OpenFlags::READ_ONLY);
    same_bytes(&read(layer, second, 0, 100), b"before");
    layer.release(second);
    ok(layer.fsync(&ME, handle, Durability::All));
    let namesake = file(layer, ROOT, "file", b"another");
    assert_ne!(namesake, node);
    same_bytes(&read(layer, handle, 0, 100), b"before");
    ok(layer.flush(&ME, handle));
    layer.release(handle);
    layer.forget(node, 1);
    same_bytes(&content(layer, namesake), b"another");
}

fn a_replaced_file_lives_on(layer: Layer<'_>) {
    let (old, handle) = create(layer, ROOT, "target");
    write(layer, handle, 0, b"old");
    let new = file(layer, ROOT, "source", b"new");
    ok(rename(layer, (ROOT, "source"), (ROOT, "target"), RenameFlags::empty()));
    assert_eq!(lookup(layer, ROOT, "target").node, new);
    same_bytes(&read(layer, handle, 0, 100), b"old");
    write(layer, handle, 3, b"er");
    same_bytes(&read(layer, handle, 0, 100), b"older");
    assert_eq!((attributes(layer, old).links, attributes(layer, old).size), (0, 5));
    same_bytes(&content(layer, new), b"new");
    layer.release(handle);
}

fn a_handle_follows_its_file(layer: Layer<'_>) {
    let directory = mkdir(layer, ROOT, "directory");
    let (node, handle) = create(layer, ROOT, "file");
    write(layer, handle, 0, b"one");
    ok(rename(layer, (ROOT, "file"), (directory, "moved"), RenameFlags::empty()));
    write(layer, handle, 3, b"two");
    let found = lookup(layer, directory, "moved");
    assert_eq!((found.node, found.attributes.size), (node, 6));
    same_bytes(&content(layer, node), b"onetwo");
    layer.release(handle);
}

fn a_handle_keeps_its_node_alive(layer: Layer<'_>) {
    let (node, handle) = create(layer, ROOT, "file");
    ok(layer.unlink(&ME, ROOT, name("file")));
    layer.forget(node, 1);
    write(layer, handle, 0, b"content");
    same_bytes(&read(layer, handle, 0, 100), b"content");
    assert_eq!(attributes(layer, node).size, 7);
    let sized = SetAttributes { size: Some(3), ..Default::default() };
    assert_eq!(ok(layer.setattr(&ME, node, &sized, Some(handle))).size, 3);
    layer.release(handle);
}

fn unknown_handles_are_refused(layer: Layer<'_>) {
    refused(layer.read(&ME, NO_HANDLE, 0, &mut [0; 8]), Errno::EBADF);
    refused(layer.write(&ME, NO_HANDLE, 0, b"x"), Errno::EBADF);
    refused(layer.fallocate(&ME, NO_HANDLE, AllocateMode::empty(), 0, 1), Errno::EBADF);
    refused(layer.seek(&ME, NO_HANDLE, 0, SeekTo::Data), Errno::EBADF);
    refused(layer.fsync(&ME, NO_HANDLE, Durability::All), Errno::EBADF);
    refused(layer.flush(&ME, NO_HANDLE), Errno::EBADF);
    refused(layer.flush_range(&ME, NO_HANDLE, 0..1), Errno::EBADF);
    refused(layer.readdir(&ME, NO_HANDLE, 0, &mut |_| ControlFlow::Continue(())), Errno::EBADF);
    refused(layer.copy_range(&ME, NO_HANDLE, 0, NO_HANDLE, 0, 1), Errno::EBADF);
    layer.release(NO_HANDLE);
}

fn released_handles_are_refused(layer: Layer<'_>) {
    let (_, first) = create(layer, ROOT, "file");
    layer.release(first);
    let (_, second) = create(layer, ROOT, "other");
    assert_ne!(first, second, "the number of a released handle came again");
    refused(layer.read(&ME, first, 0, &mut [0; 8]), Errno::EBADF);
    refused(layer.write(&ME, first, 0, b"x"), Errno::EBADF);
    refused(layer.fsync(&ME, first, Durability::Data), Errno::EBADF);
    layer.release(second);
    let listing = ok(layer.opendir(&ME, ROOT));
    layer.release(listing);
    refused(layer.readdir(&ME, listing, 0, &mut |_| ControlFlow::Continue(())), Errno::EBADF);
}

fn a_directory_handle_is_no_files(layer: Layer<'_>) {
    let (_, handle) = create(layer, ROOT, "file");
    let listing = ok(layer.opendir(&ME, ROOT));
    refused(layer.readdir(&ME, handle, 0, &mut |_| ControlFlow::Continue(())), Errno::EBADF);
    refused(layer.read(&ME, listing, 0, &mut [0; 8]), Errno::EBADF);
    refused(layer.write(&ME, listing, 0, b"x"), Errno::EBADF);
    refused(layer.fallocate(&ME, listing, KEEP_SIZE, 0, 1), Errno::EBADF);
    layer.release(listing);
    layer.release(handle);
}

fn many_handles_of_one_file(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", &[0; 200]);
    let handles: Vec<_> = (0..200).map(|_| open(layer, node, READ_WRITE)).collect();
    for (at, &handle) in handles.iter().enumerate() {
        write(layer, handle, at as u64, &[at as u8]);
    }
    let expected: Vec<u8> = (0..200).collect();
    for &handle in &handles {
        same_bytes(&read(layer, handle, 0, 1000), &expected);
        layer.release(handle);
    }
    same_bytes(&content(layer, node), &expected);
}
