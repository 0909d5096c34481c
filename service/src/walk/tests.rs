//! Tests of the walk over the in-memory reference.

use super::*;
use crate::access::Credentials;
use crate::stack::Stack;
use poolfs_libservice::types::{Caller, OpenFlags, SetAttributes};
use poolfs_libservice::{Libservice, Memory};
use poolfs_service_protocol::{MountSpec, StackSpec};
use std::sync::Arc;

const ROOT: Caller = Caller::ROOT;

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).expect("a name")
}

/// `/d/e/f`, `/link -> d`, `/d/absolute -> /x/y`, and `/private` that only its owner may search.
fn instance(is_root: bool) -> (Arc<Memory>, Arc<Instance>) {
    let layer = Memory::new();
    let d = layer.mkdir(&ROOT, NodeId::ROOT, name("d"), 0o755).expect("room").node;
    let e = layer.mkdir(&ROOT, d, name("e"), 0o755).expect("room").node;
    let (f, handle) = layer.create(&ROOT, e, name("f"), 0o644, OpenFlags::READ_WRITE).expect("room");
    layer.release(handle);
    let link = layer.symlink(&ROOT, NodeId::ROOT, name("link"), b"d").expect("room").node;
    let absolute = layer.symlink(&ROOT, d, name("absolute"), b"/x/y").expect("room").node;
    let private = layer.mkdir(&ROOT, NodeId::ROOT, name("private"), 0o700).expect("room").node;
    for node in [d, e, f.node, link, absolute, private] {
        layer.forget(node, 1);
    }
    let stack = StackSpec::directory("/");
    let spec = MountSpec { devices: true, suid: true, is_root, ..MountSpec::new("x", "/", stack) };
    (Arc::clone(&layer), Instance::new(spec, Stack::of(layer)))
}

fn somebody() -> Credentials {
    Credentials { uid: 1000, gid: 1000, groups: vec![], capabilities: 0, user_namespace: None }
}

/// The attributes' inode number, or what went wrong.
fn walk(instance: &Instance, path: &str, follow: bool) -> Result<u64, WalkError> {
    let credentials = somebody();
    let context = Context::library(&credentials, 0);
    instance.walk(&context, NodeId::ROOT, path.as_bytes(), follow).map(|found| found.attributes.inode)
}

fn errno(errno: Errno) -> Result<u64, WalkError> {
    Err(errno.into())
}

fn redirect(path: &str) -> Result<u64, WalkError> {
    Err(WalkError::Redirect(path.as_bytes().to_vec()))
}

#[test]
fn names_dots_and_slashes_lead_where_they_should() {
    let (layer, instance) = instance(true);
    let file = walk(&instance, "/d/e/f", true).expect("there");
    for path in ["d/e/f", "//d///e/./f", "d/e/../e/f", "../../d/e/f", "d/../d/e/f"] {
        assert_eq!(walk(&instance, path, true), Ok(file), "{path}");
    }
    assert!(walk(&instance, "/", true).is_ok() && walk(&instance, "d/e/", true).is_ok());
    assert_eq!(walk(&instance, "d/e/f/", true), errno(Errno::ENOTDIR));
    assert_eq!(walk(&instance, "d/e/f/.", true), errno(Errno::ENOTDIR));
    assert_eq!(walk(&instance, "d/e/f/../f", true), errno(Errno::ENOTDIR));
    assert_eq!(walk(&instance, "d/missing/f", true), errno(Errno::ENOENT));
    assert_eq!(walk(&instance, "", true), errno(Errno::ENOENT));
    assert_eq!(walk(&instance, &"x".repeat(256), true), errno(Errno::ENAMETOOLONG));
    assert_eq!(walk(&instance, &"x/".repeat(3000), true), errno(Errno::ENAMETOOLONG));
    assert_eq!(layer.outstanding(), (0, 0), "every reference was given back");
}

#[test]
fn strangers_links_in_a_directory_for_everybody_are_the_kernels() {
    let (layer, instance) = instance(true);
    let shared = layer.mkdir(&ROOT, NodeId::ROOT, name("shared"), 0o1777).expect("room").node;
    for (link, owner) in [("stranger", 2000), ("own", 1000), ("root", 0)] {
        let node = layer.symlink(&ROOT, shared, name(link), b"target").expect("room").node;
        let changes = SetAttributes { uid: Some(owner), ..SetAttributes::default() };
        layer.setattr(&ROOT, node, &changes, None).expect("changed");
        layer.forget(node, 1);
    }
    layer.forget(shared, 1);
    assert_eq!(walk(&instance, "shared/stranger", true), Err(WalkError::Failure(Failure::UseKernel)));
    assert!(walk(&instance, "shared/stranger", false).is_ok());
    assert_eq!(walk(&instance, "shared/own", true), redirect("shared/target"));
    assert_eq!(walk(&instance, "shared/root", true), redirect("shared/target"));
    assert_eq!(layer.outstanding(), (0, 0), "every reference was given back");
}

#[test]
fn links_are_reported_with_the_path_to_go_on_with() {
    let (layer, instance) = instance(true);
    assert_eq!(walk(&instance, "/link/e/f", false), redirect("/d/e/f"));
    assert_eq!(walk(&instance, "link", true), redirect("d"));
    assert_eq!(walk(&instance, "link/", false), redirect("d/"));
    assert_eq!(walk(&instance, "d/../link/e", true), redirect("d/../d/e"));
    assert_eq!(walk(&instance, "d/absolute/z", true), redirect("/x/y/z"));
    assert!(walk(&instance, "link", false).is_ok());
    assert_eq!(layer.outstanding(), (0, 0));
}

#[test]
fn every_directory_passed_must_be_searchable() {
    let (_, instance) = instance(true);
    assert_eq!(walk(&instance, "private/x", true), errno(Errno::EACCES));
    assert_eq!(walk(&instance, "private/..", true), errno(Errno::EACCES));
    assert!(walk(&instance, "private", true).is_ok());
}

#[test]
fn what_leaves_the_instance_is_left_to_the_kernel() {
    let (_, instance) = instance(false);
    let kernel = Err(WalkError::Failure(Failure::UseKernel));
    assert_eq!(walk(&instance, "..", true), kernel);
    assert_eq!(walk(&instance, "d/../../x", true), kernel);
    assert!(walk(&instance, "d/..", true).is_ok());
}

#[test]
fn the_parent_of_a_name_is_found_whether_the_name_exists_or_not() {
    let (layer, instance) = instance(true);
    let credentials = somebody();
    let context = Context::library(&credentials, 0);
    let place = |path: &'static str| {
        let place = instance.walk_to_parent(&context, NodeId::ROOT, path.as_bytes());
        place.map(|place| (String::from_utf8_lossy(place.name.as_bytes()).into_owned(), place.must_be_directory))
    };
    assert_eq!(place("d/e/new"), Ok(("new".into(), false)));
    assert_eq!(place("new//"), Ok(("new".into(), true)));
    assert_eq!(place("link"), Ok(("link".into(), false)));
    assert_eq!(place("link/new"), Err(WalkError::Redirect(b"d/new".to_vec())));
    assert_eq!(place("d/e/f/new"), Err(Errno::ENOTDIR.into()));
    for path in ["/", ".", "d/..", "d/."] {
        assert_eq!(place(path), Err(WalkError::Failure(Failure::UseKernel)), "{path}");
    }
    assert_eq!(layer.outstanding(), (0, 0));
}
