//! Conformance cases: POSIX access control lists, as extended attributes and in their effect on modes.

use super::support::*;
use super::{Capability, Case};
use crate::types::{Caller, Errno, FileType, OpenFlags, XattrFlags};

pub(super) const CASES: &[Case] = &[
    Case::needing("acls/stored", Capability::Acls, lists_are_stored_and_removed),
    Case::needing("acls/mode", Capability::Acls, lists_and_mode_follow_each_other),
    Case::needing("acls/minimal", Capability::Acls, lists_that_say_no_more_than_the_mode_vanish),
    Case::needing("acls/inherited", Capability::Acls, default_lists_are_inherited),
    Case::needing("acls/inherited_minimal", Capability::Acls, minimal_default_lists_replace_the_umask),
    Case::needing("acls/wrong", Capability::Acls, wrong_lists_are_refused),
];

const ACCESS: &[u8] = b"system.posix_acl_access";
const DEFAULT: &[u8] = b"system.posix_acl_default";
const NO_FLAGS: XattrFlags = XattrFlags::empty();
const NOBODY: u32 = u32::MAX;

/// A list with entries for the owner, user 1000, the group, a mask and others.
fn named(owner: u16, user: u16, group: u16, mask: u16, others: u16) -> Vec<u8> {
    list(&[(1, owner, NOBODY), (2, user, 1000), (4, group, NOBODY), (0x10, mask, NOBODY), (0x20, others, NOBODY)])
}

/// A list that says what a mode can say.
fn minimal(owner: u16, group: u16, others: u16) -> Vec<u8> {
    list(&[(1, owner, NOBODY), (4, group, NOBODY), (0x20, others, NOBODY)])
}

fn list(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&permissions.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    value
}

#[track_caller]
fn set(layer: Layer<'_>, node: Node, attribute: &[u8], value: &[u8]) {
    ok(layer.setxattr(&ME, node, attribute, value, NO_FLAGS));
}

#[track_caller]
fn get(layer: Layer<'_>, node: Node, attribute: &[u8]) -> Vec<u8> {
    ok(layer.getxattr(&ME, node, attribute))
}

fn lists_are_stored_and_removed(layer: Layer<'_>) {
    let node = mkdir(layer, ROOT, "directory");
    refused(layer.getxattr(&ME, node, ACCESS), Errno::ENODATA);
    for attribute in [ACCESS, DEFAULT] {
        set(layer, node, attribute, &named(7, 6, 5, 7, 1));
        assert_eq!(get(layer, node, attribute), named(7, 6, 5, 7, 1));
        assert!(ok(layer.listxattr(&ME, node)).contains(&attribute.to_vec()));
        ok(layer.removexattr(&ME, node, attribute));
        refused(layer.getxattr(&ME, node, attribute), Errno::ENODATA);
        assert!(!ok(layer.listxattr(&ME, node)).contains(&attribute.to_vec()));
    }
}

fn lists_and_mode_follow_each_other(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"x");
    chmod(layer, node, 0o4600);
    set(layer, node, ACCESS, &named(6, 7, 4, 5, 1));
    assert_eq!(attributes(layer, node).permissions, 0o4651, "the group bits show the mask");
    chmod(layer, node, 0o4732);
    assert_eq!(get(layer, node, ACCESS), named(7, 7, 4, 3, 2), "chmod changes owner, mask and others");
    assert_eq!(attributes(layer, node).permissions, 0o4732);
}

fn lists_that_say_no_more_than_the_mode_vanish(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"x");
    set(layer, node, ACCESS, &named(6, 7, 4, 5, 1));
    set(layer, node, ACCESS, &minimal(7, 5, 0));
    refused(layer.getxattr(&ME, node, ACCESS), Errno::ENODATA);
    assert_eq!(attributes(layer, node).permissions, 0o750);
}

fn default_lists_are_inherited(layer: Layer<'_>) {
    let caller = Caller { uid: 0, gid: 0, umask: 0o777 };
    let parent = mkdir(layer, ROOT, "parent");
    let default = named(7, 6, 5, 7, 4);
    set(layer, parent, DEFAULT, &default);
    assert_eq!(attributes(layer, parent).permissions, 0o755, "a default list says nothing of the directory itself");

    let (made, handle) = ok(layer.create(&caller, parent, name("file"), 0o646, OpenFlags::WRITE_ONLY));
    layer.release(handle);
    assert_eq!(made.attributes.permissions, 0o644, "{:o}", made.attributes.permissions);
    assert_eq!(get(layer, made.node, ACCESS), named(6, 6, 5, 4, 4));
    refused(layer.getxattr(&ME, made.node, DEFAULT), Errno::ENODATA);

    let made = ok(layer.mkdir(&caller, parent, name("directory"), 0o1777));
    assert_eq!(made.attributes.permissions, 0o1774);
    assert_eq!(get(layer, made.node, ACCESS), default);
    assert_eq!(get(layer, made.node, DEFAULT), default);

    let made = ok(layer.mknod(&caller, parent, name("pipe"), FileType::Fifo, 0o600, 0));
    assert_eq!(made.attributes.permissions, 0o600);
    assert_eq!(get(layer, made.node, ACCESS), named(6, 6, 5, 0, 0));

    let link = ok(layer.symlink(&caller, parent, name("link"), b"file"));
    assert_eq!(link.attributes.permissions, 0o777);
}

fn minimal_default_lists_replace_the_umask(layer: Layer<'_>) {
    let caller = Caller { uid: 0, gid: 0, umask: 0o077 };
    let parent = mkdir(layer, ROOT, "parent");
    set(layer, parent, DEFAULT, &minimal(7, 5, 4));
    let (made, handle) = ok(layer.create(&caller, parent, name("file"), 0o666, OpenFlags::WRITE_ONLY));
    layer.release(handle);
    assert_eq!(made.attributes.permissions, 0o644);
    refused(layer.getxattr(&ME, made.node, ACCESS), Errno::ENODATA);
    let made = ok(layer.mkdir(&caller, parent, name("directory"), 0o777));
    assert_eq!(made.attributes.permissions, 0o754);
    assert_eq!(get(layer, made.node, DEFAULT), minimal(7, 5, 4));
}

fn wrong_lists_are_refused(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"x");
    let without_mask = list(&[(1, 7, NOBODY), (2, 6, 1000), (4, 5, NOBODY), (0x20, 0, NOBODY)]);
    let without_owner = list(&[(4, 5, NOBODY), (0x20, 0, NOBODY)]);
    for wrong in [&without_mask, &without_owner, &named(8, 0, 0, 0, 0), &named(7, 7, 7, 7, 7)[..30].to_vec()] {
        refused(layer.setxattr(&ME, node, ACCESS, wrong, NO_FLAGS), Errno::EINVAL);
    }
    refused(layer.setxattr(&ME, node, DEFAULT, &named(7, 7, 7, 7, 7), NO_FLAGS), Errno::EACCES);
    assert_eq!(attributes(layer, node).permissions, 0o644);
    refused(layer.getxattr(&ME, node, ACCESS), Errno::ENODATA);
}
