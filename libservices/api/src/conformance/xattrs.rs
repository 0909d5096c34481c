//! Conformance cases: extended attributes.

use super::support::*;
use super::{Capability, Case};
use crate::types::{Errno, RenameFlags, XattrFlags};

pub(super) const CASES: &[Case] = &[
    Case::needing("xattrs/user", Capability::UserXattrs, |layer| values_are_kept(layer, "user.")),
    Case::needing("xattrs/trusted", Capability::TrustedXattrs, |layer| values_are_kept(layer, "trusted.")),
    Case::needing("xattrs/security", Capability::SecurityXattrs, |layer| values_are_kept(layer, "security.")),
    Case::needing("xattrs/flags", Capability::UserXattrs, flags_ask_for_existence),
    Case::needing("xattrs/objects", Capability::UserXattrs, they_belong_to_the_object),
    Case::needing("xattrs/limits", Capability::UserXattrs, limits_are_kept),
    Case::new("xattrs/unknown_namespace", unknown_namespaces_are_refused),
];

const NO_FLAGS: XattrFlags = XattrFlags::empty();

/// The names of an object's xattrs in one namespace, sorted: backends add others of their own.
#[track_caller]
fn listed(layer: Layer<'_>, node: Node, prefix: &str) -> Vec<String> {
    let all = ok(layer.listxattr(&ME, node));
    let mut own: Vec<String> = all.into_iter().map(|name| name.escape_ascii().to_string()).collect();
    own.retain(|name| name.starts_with(prefix) && name != "security.selinux");
    own.sort();
    own
}

fn values_are_kept(layer: Layer<'_>, prefix: &str) {
    let nodes = [file(layer, ROOT, "file", b"x"), mkdir(layer, ROOT, "directory")];
    let [a, b] = ["a", "b"].map(|text| format!("{prefix}poolfs-test-{text}"));
    for node in nodes {
        refused(layer.getxattr(&ME, node, a.as_bytes()), Errno::ENODATA);
        refused(layer.removexattr(&ME, node, a.as_bytes()), Errno::ENODATA);
        assert!(listed(layer, node, prefix).is_empty());
        ok(layer.setxattr(&ME, node, a.as_bytes(), b"one\0two\xff", NO_FLAGS));
        ok(layer.setxattr(&ME, node, b.as_bytes(), b"", NO_FLAGS));
        assert_eq!(ok(layer.getxattr(&ME, node, a.as_bytes())), b"one\0two\xff");
        assert_eq!(ok(layer.getxattr(&ME, node, b.as_bytes())), b"");
        assert_eq!(listed(layer, node, prefix), [a.clone(), b.clone()]);
        let long = pattern(1, 2000);
        ok(layer.setxattr(&ME, node, a.as_bytes(), &long, NO_FLAGS));
        same_bytes(&ok(layer.getxattr(&ME, node, a.as_bytes())), &long);
        ok(layer.removexattr(&ME, node, a.as_bytes()));
        refused(layer.getxattr(&ME, node, a.as_bytes()), Errno::ENODATA);
        assert_eq!(listed(layer, node, prefix), [b.as_str()]);
    }
}

fn flags_ask_for_existence(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"x");
    refused(layer.setxattr(&ME, node, b"user.a", b"1", XattrFlags::REPLACE), Errno::ENODATA);
    ok(layer.setxattr(&ME, node, b"user.a", b"1", XattrFlags::CREATE));
    refused(layer.setxattr(&ME, node, b"user.a", b"2", XattrFlags::CREATE), Errno::EEXIST);
    assert_eq!(ok(layer.getxattr(&ME, node, b"user.a")), b"1");
    ok(layer.setxattr(&ME, node, b"user.a", b"3", XattrFlags::REPLACE));
    assert_eq!(ok(layer.getxattr(&ME, node, b"user.a")), b"3");
}

fn they_belong_to_the_object(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"x");
    ok(layer.setxattr(&ME, node, b"user.a", b"value", NO_FLAGS));
    ok(layer.link(&ME, node, ROOT, name("other")));
    ok(rename(layer, (ROOT, "file"), (ROOT, "moved"), RenameFlags::empty()));
    for text in ["other", "moved"] {
        assert_eq!(ok(layer.getxattr(&ME, lookup(layer, ROOT, text).node, b"user.a")), b"value");
    }
    let fresh = file(layer, ROOT, "file", b"x");
    refused(layer.getxattr(&ME, fresh, b"user.a"), Errno::ENODATA);
    let (open, handle) = create(layer, ROOT, "unlinked");
    ok(layer.unlink(&ME, ROOT, name("unlinked")));
    ok(layer.setxattr(&ME, open, b"user.a", b"late", NO_FLAGS));
    assert_eq!(ok(layer.getxattr(&ME, open, b"user.a")), b"late");
    layer.release(handle);
}

fn limits_are_kept(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"x");
    let longest = [b"user.".to_vec(), vec![b'n'; 250]].concat();
    ok(layer.setxattr(&ME, node, &longest, b"value", NO_FLAGS));
    assert_eq!(ok(layer.getxattr(&ME, node, &longest)), b"value");
    let too_long = [longest, b"n".to_vec()].concat();
    refused(layer.setxattr(&ME, node, &too_long, b"value", NO_FLAGS), Errno::ERANGE);
    refused(layer.setxattr(&ME, node, b"", b"value", NO_FLAGS), Errno::ERANGE);
    refused(layer.setxattr(&ME, node, b"user.big", &[0; 65_537], NO_FLAGS), Errno::E2BIG);
    assert_eq!(listed(layer, node, "user.").len(), 1);
}

fn unknown_namespaces_are_refused(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"x");
    for text in [b"nonsense.a".as_slice(), b"a", b"system.nonsense"] {
        refused(layer.setxattr(&ME, node, text, b"value", NO_FLAGS), Errno::EOPNOTSUPP);
        refused(layer.getxattr(&ME, node, text), Errno::EOPNOTSUPP);
        refused(layer.removexattr(&ME, node, text), Errno::EOPNOTSUPP);
    }
}
