//! Tests of a union's list of differences from its lower branches, of layers made from it, of flattening, and of holding changes.

use crate::script::{Script, Seen, lower, nothing_left, tree};
use crate::support::*;
use poolfs_libservice::types::{
    AllocateMode, Attributes, FileType, Name, NodeId, OpenFlags, RenameFlags, SetAttributes, XattrFlags,
};
use poolfs_libservice::{Difference, Layered, Relation};
use poolfs_libservice::{Libservice, Memory};
use poolfs_union::Union;
use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const BLOCK: usize = 4096;

/// All differences: letter and path.
fn differences(union: &Union) -> Vec<String> {
    let mut all = Vec::new();
    union
        .differences(&mut |path, difference| {
            let letter = match difference {
                Difference::Removed => 'D',
                Difference::Object { relation: Relation::Added, .. } => 'A',
                Difference::Object { relation: Relation::Changed, .. } => 'C',
                Difference::Object { relation: Relation::Replaced, .. } => 'R',
            };
            all.push(format!("{letter} /{}", path.escape_ascii()));
            Ok(ControlFlow::Continue(()))
        })
        .expect("told");
    all
}

fn parts(union: &Union, path: &str) -> Vec<(u64, u64)> {
    let node = node(union, path).expect("it exists");
    let all = union.changed_parts(node, 0, 100).expect("told");
    let mut one_by_one = Vec::new();
    let mut from = 0;
    while let Some(part) = union.changed_parts(node, from, 1).expect("told").pop() {
        assert!(part.start >= from && part.end > part.start, "{part:?} after {from}");
        from = part.end;
        one_by_one.push(part);
    }
    assert_eq!(one_by_one, all, "asked for one at a time");
    union.forget(node, 1);
    all.into_iter().map(|part| (part.start, part.end)).collect()
}

fn rename(layer: &dyn Libservice, from: &str, to: &str) {
    let ((parent, last), (new_parent, new)) = (split(layer, from), split(layer, to));
    layer.rename(ROOT, parent, last, new_parent, new, RenameFlags::empty()).expect("renamed");
}

fn unlink(layer: &dyn Libservice, path: &str) {
    let (parent, last) = split(layer, path);
    layer.unlink(ROOT, parent, last).expect("removed");
}

fn set_size(layer: &dyn Libservice, path: &str, size: u64) {
    let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
    layer.setattr(ROOT, node(layer, path).expect("there"), &changes, None).expect("resized");
}

/// A lower branch made of the differences of a union, as overlayfs has layers.
fn layer_of(union: &Arc<Union>) -> Arc<Memory> {
    let layer = Memory::new();
    let mut first_names: HashMap<u64, NodeId> = HashMap::new();
    union
        .differences(&mut |path, difference| {
            let (parent, last) = match path.iter().rposition(|&byte| byte == b'/') {
                Some(at) => (&path[..at], &path[at + 1..]),
                None => (&b""[..], path),
            };
            let parent = node(&*layer, std::str::from_utf8(parent).expect("plain names")).expect("told before");
            match difference {
                Difference::Removed => {
                    layer.mknod(ROOT, parent, Name::new(last)?, FileType::CharDevice, 0, 0).expect("a whiteout");
                }
                Difference::Object { node, attributes, relation } => {
                    copy(&**union, node, attributes, &layer, parent, last, &mut first_names);
                    if relation == Relation::Replaced && attributes.is_directory() {
                        let made = layer.lookup(ROOT, parent, Name::new(last)?)?.node;
                        layer.setxattr(ROOT, made, b"trusted.overlay.opaque", b"y", XattrFlags::empty())?;
                    }
                }
            }
            Ok(ControlFlow::Continue(()))
        })
        .expect("told");
    layer
}

fn copy(
    union: &dyn Libservice,
    node: NodeId,
    attributes: &Attributes,
    layer: &Memory,
    parent: NodeId,
    last: &[u8],
    first_names: &mut HashMap<u64, NodeId>,
) {
    let permissions = SetAttributes { permissions: Some(attributes.permissions), ..SetAttributes::default() };
    if last.is_empty() {
        layer.setattr(ROOT, NodeId::ROOT, &permissions, None).expect("set");
        return;
    }
    let name = Name::new(last).expect("a name");
    if let Some(first) = first_names.get(&attributes.inode) {
        layer.link(ROOT, *first, parent, name).expect("linked");
        return;
    }
    let made = match attributes.file_type {
        FileType::Directory => layer.mkdir(ROOT, parent, name, 0o755).expect("made").node,
        FileType::Symlink => {
            layer.symlink(ROOT, parent, name, &union.readlink(ROOT, node).expect("read")).expect("made").node
        }
        _ => {
            let (entry, handle) = layer.create(ROOT, parent, name, 0o644, OpenFlags::READ_WRITE).expect("made");
            let from = union.open(ROOT, node, OpenFlags::READ_ONLY).expect("opened");
            let mut content = vec![0; attributes.size as usize];
            assert_eq!(union.read(ROOT, from, 0, &mut content).expect("read"), content.len());
            union.release(from);
            layer.write(ROOT, handle, 0, &content).expect("written");
            layer.release(handle);
            entry.node
        }
    };
    if attributes.file_type != FileType::Symlink {
        layer.setattr(ROOT, made, &permissions, None).expect("set");
    }
    for name in union.listxattr(ROOT, node).expect("listed") {
        let value = union.getxattr(ROOT, node, &name).expect("read");
        layer.setxattr(ROOT, made, &name, &value, XattrFlags::empty()).expect("set");
    }
    if attributes.links > 1 && !attributes.is_directory() {
        first_names.insert(attributes.inode, made);
    }
}

/// What users see, without the numbers.
fn seen(layer: &dyn Libservice, what: &str) -> BTreeMap<String, Seen> {
    let mut all = tree(layer, what);
    all.values_mut().for_each(|seen| seen.inode = 0);
    all
}

#[test]
fn differences_have_letters() {
    let branches = Branches::empty(1);
    let below = &*branches.lowers[0];
    for directory in ["kept", "changed", "gone", "moved", "moved/in"] {
        mkdir(below, directory);
    }
    for file in ["kept/f", "changed/f", "changed/g", "changed/h", "moved/f", "moved/in/f", "removed", "replaced"] {
        put(below, file, &[1; 3 * BLOCK]);
    }
    let union = branches.open();
    assert_eq!(differences(&union), ["C /"]);
    assert_eq!(get(&*union, "kept/f").expect("there"), [1; 3 * BLOCK]);
    write_at(&*union, "changed/f", 5000, b"x");
    rename(&*union, "changed/g", "changed/new-name");
    unlink(&*union, "removed");
    put(&*union, "added", b"x");
    put(&*union, "temporary", b"x");
    rename(&*union, "temporary", "replaced");
    let (root, gone) = split(&*union, "gone");
    union.rmdir(ROOT, root, gone).expect("removed");
    mkdir(&*union, "gone");
    put(&*union, "gone/f", b"x");
    rename(&*union, "moved", "there");
    let wanted = [
        "C /",
        "A /added",
        "C /changed",
        "C /changed/f",
        "D /changed/g",
        "A /changed/new-name",
        "R /gone",
        "A /gone/f",
        "D /moved",
        "D /removed",
        "R /replaced",
        "A /there",
        "A /there/f",
        "A /there/in",
        "A /there/in/f",
    ];
    assert_eq!(differences(&union), wanted);
    close(union);
    assert_eq!(differences(&branches.open()), wanted, "after a remount");
}

#[test]
fn a_root_differs_by_its_own_attributes_only() {
    let branches = Branches::empty(1);
    let (union, root) = (branches.open(), NodeId::ROOT);
    let differs = || union.root_differs().expect("told");
    assert!(!differs());
    put(&*union, "added", b"x");
    assert!(!differs(), "what is in it is told of by itself");
    let permissions = union.getattr(ROOT, root).expect("there").permissions;
    let change = |permissions| SetAttributes { permissions: Some(permissions), ..SetAttributes::default() };
    union.setattr(ROOT, root, &change(permissions ^ 0o4), None).expect("set");
    assert!(differs());
    union.setattr(ROOT, root, &change(permissions), None).expect("set");
    assert!(!differs());
    union.setxattr(ROOT, root, b"user.x", b"y", XattrFlags::empty()).expect("set");
    assert!(differs());
    branches.lowers[0].setxattr(ROOT, root, b"user.x", b"y", XattrFlags::empty()).expect("set");
    assert!(!differs());
}

#[test]
fn other_names_of_a_changed_file_are_told_of_with_what_leads_to_them() {
    let branches = Branches::empty(1);
    let below = &*branches.lowers[0];
    mkdir(below, "d");
    mkdir(below, "d/e");
    put(below, "f", &[1; BLOCK]);
    let (parent, last) = split(below, "d/e/g");
    below.link(ROOT, node(below, "f").expect("there"), parent, last).expect("linked");
    put(below, "d/other", b"x");
    let union = branches.open();
    write_at(&*union, "f", 0, b"x");
    assert_eq!(differences(&union), ["C /", "C /d", "C /d/e", "C /d/e/g", "C /f"]);
}

#[test]
fn changed_parts_are_the_blocks_that_moved() {
    let branches = Branches::empty(1);
    for file in ["f", "cut", "grown", "same"] {
        put(&*branches.lowers[0], file, &[1; 20 * BLOCK + 10]);
    }
    let union = branches.open();
    assert_eq!(parts(&union, "f"), []);
    write_at(&*union, "f", 5000, b"x");
    assert_eq!(parts(&union, "f"), [(4096, 8192)], "in transit");
    fsync(&*union, "f");
    assert_eq!(parts(&union, "f"), [(4096, 8192)]);
    write_at(&*union, "f", 2 * 4096, &[7; 2 * BLOCK]);
    write_at(&*union, "f", 20 * 4096 + 9, b"x");
    assert_eq!(parts(&union, "f"), [(4096, 4 * 4096), (20 * 4096, 20 * 4096 + 10)]);
    set_size(&*union, "cut", 2 * 4096 + 100);
    assert_eq!(parts(&union, "cut"), [(2 * 4096, 2 * 4096 + 100)]);
    set_size(&*union, "cut", 5 * 4096);
    write_at(&*union, "cut", 0, b"x");
    assert_eq!(parts(&union, "cut"), [(0, 4096), (2 * 4096, 5 * 4096)]);
    write_at(&*union, "grown", 30 * 4096, b"x");
    assert_eq!(parts(&union, "grown"), [(21 * 4096, 30 * 4096 + 1)]);
    let changes = SetAttributes { permissions: Some(0o600), ..SetAttributes::default() };
    union.setattr(ROOT, node(&*union, "same").expect("there"), &changes, None).expect("set");
    assert_eq!(parts(&union, "same"), []);
    put(&*union, "new", b"");
    let handle = open(&*union, "new", OpenFlags::READ_WRITE).expect("opened");
    for at in [4096, 40_000] {
        union.write(ROOT, handle, at, b"x").expect("written");
    }
    union.release(handle);
    assert_eq!(parts(&union, "new"), [(4096, 8192), (36_864, 40_001)]);
    let before = parts(&union, "f");
    close(union);
    let union = branches.open();
    assert_eq!(parts(&union, "f"), before, "after a remount");
    let root = union.changed_parts(NodeId::ROOT, 0, 1);
    assert!(root.is_err_and(|error| error == poolfs_libservice::types::Errno::EINVAL));
}

#[test]
fn a_layer_of_the_differences_shows_what_the_union_shows() {
    for seed in 0..40 {
        let mut branches = Branches { upper: Memory::new(), lowers: vec![lower()] };
        let union = branches.open();
        let mut script = Script::new(seed);
        (0..250).for_each(|_| drop(script.step(&*union)));
        script.forget(&*union);
        let what = format!("seed {seed}");
        let wanted = seen(&*union, &what);
        let layer = layer_of(&union);
        assert_eq!(seen(&*union, &what), wanted, "telling changes nothing");
        close(union);
        branches.upper = Memory::new();
        branches.lowers.insert(0, layer);
        let shown = branches.open();
        assert_eq!(seen(&*shown, &what), wanted, "{what}: {:#?}", differences(&shown));
    }
}

#[test]
fn flattened_files_need_no_lower_branch() {
    for seed in 0..20 {
        let branches = Branches { upper: Memory::new(), lowers: vec![lower()] };
        let union = branches.open();
        let mut script = Script::new(seed);
        (0..250).for_each(|_| drop(script.step(&*union)));
        script.forget(&*union);
        let what = format!("seed {seed}");
        let wanted = tree(&*union, &what);
        let done = union.flatten(&|| true).expect("done");
        assert_eq!((done.failed, union.flatten(&|| true).expect("done").files), (0, 0), "{what}");
        assert_eq!(tree(&*union, &what), wanted, "{what}");
        assert!(ls(&*branches.upper, ".poolfs/bitmaps").is_empty(), "{what}");
        close(union);
        assert!(!fingerprint(&*branches.upper).contains(&format!("{:?}", b"trusted.poolfs.sketch")), "{what}");
        assert_eq!(tree(&*branches.open(), &what), wanted, "{what}, after a remount");
    }
}

#[test]
fn flattening_is_seen_by_nobody_and_keeps_holes() {
    let branches = Branches::empty(1);
    let below = &*branches.lowers[0];
    put(below, "f", &[5; 3 * BLOCK]);
    let handle = open(below, "f", OpenFlags::READ_WRITE).expect("opened");
    below.write(ROOT, handle, 1000 * 4096, &[6; 2 * BLOCK]).expect("written");
    below.release(handle);
    let union = branches.open();
    write_at(&*union, "f", 999 * 4096 + 5, b"x");
    let handle = open(&*union, "f", OpenFlags::READ_WRITE).expect("opened");
    let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
    union.fallocate(ROOT, handle, punch, 4096, 4096).expect("punched");
    let (before, content) = (stat(&*union, "f"), get(&*union, "f").expect("there"));
    let done = union.flatten(&|| true).expect("done");
    assert_eq!((done.files, done.failed, done.bytes), (1, 0, 4 * 4096));
    let after = stat(&*union, "f");
    assert_eq!((after.modified, after.changed, after.size), (before.modified, before.changed, before.size));
    assert_eq!(get(&*union, "f").expect("there"), content);
    assert!(stat(&*branches.upper, "f").blocks <= 5 * 8, "{}", stat(&*branches.upper, "f").blocks);
    union.write(ROOT, handle, 7, b"still open").expect("written");
    union.release(handle);
    nothing_left(&*branches.upper, "flattened");
}

#[test]
fn flattening_ends_when_it_is_told_to_and_names_what_it_cannot_complete() {
    let branches = Branches::empty(1);
    for file in ["a", "b"] {
        put(&*branches.lowers[0], file, &[5; 600 * BLOCK]);
    }
    let union = branches.open();
    write_at(&*union, "a", 0, b"x");
    write_at(&*union, "b", 0, b"x");
    let asked = AtomicU64::new(0);
    let done = union.flatten(&|| asked.fetch_add(1, Ordering::Relaxed) < 4).expect("ended");
    assert_eq!(done.files, 0);
    close(union);
    write_at(&*branches.lowers[0], "a", 0, b"y");
    let union = branches.open();
    let done = union.flatten(&|| true).expect("done");
    assert_eq!((done.files, done.failed), (1, 1));
    assert!(done.failures[0].0 == b"a" && done.failures[0].1.contains("has changed"), "{:?}", done.failures);
    let mut content = vec![5; 600 * BLOCK];
    content[0] = b'x';
    assert_eq!(get(&*union, "b").expect("there"), content);
}

#[test]
fn whoever_holds_changes_sees_none() {
    let branches = Branches::empty(1);
    put(&*branches.lowers[0], "f", &[1; BLOCK]);
    let union = branches.open();
    let is_held = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let held = union.hold_changes();
        is_held.store(true, Ordering::SeqCst);
        let others: [fn(&Union); 4] = [
            |union| write_at(union, "f", 0, b"x"),
            |union| put(union, "new", b"x"),
            |union| set_size(union, "f", 10),
            |union| mkdir(union, "directory"),
        ];
        let waiting = others.map(|change| {
            let (union, is_held) = (&union, &is_held);
            scope.spawn(move || {
                change(union);
                assert!(!is_held.load(Ordering::SeqCst), "a change went on");
            })
        });
        // Who only reads does not wait.
        assert_eq!(get(&*union, "f").expect("there"), [1; BLOCK]);
        assert_eq!(differences(&union), ["C /"]);
        is_held.store(false, Ordering::SeqCst);
        drop(held);
        waiting.into_iter().for_each(|one| one.join().expect("done"));
    });
    assert_eq!(differences(&union), ["C /", "A /directory", "C /f", "A /new"]);
}
