//! Tests of change times: they move when a user changes something, and not when the union does.

use crate::support::*;
use poolfs_libservice::types::{
    FileType, NodeId, OpenFlags, RenameFlags, SetAttributes, SetTime, Timestamp, XattrFlags,
};
use poolfs_libservice::{Libservice, Memory, Result};
use std::collections::BTreeMap;

const BLOCK: usize = 4096;

fn fill(layer: &dyn Libservice) {
    for path in ["d", "d/e", "d/e/f", "other"] {
        mkdir(layer, path);
    }
    for path in ["d/x", "d/y", "d/e/f/deep", "other/linked"] {
        put(layer, path, &[1; 10 * BLOCK]);
    }
    let (linked, to) = (node(layer, "other/linked").unwrap(), node(layer, "d").unwrap());
    for twin in ["h1", "h2"] {
        layer.link(ROOT, linked, to, name(twin)).unwrap();
    }
    layer.symlink(ROOT, to, name("symlink"), b"x").unwrap();
    layer.setxattr(ROOT, node(layer, "d/x").unwrap(), b"user.there", b"1", XattrFlags::empty()).unwrap();
}

/// The time of change of every path but the root, which nobody is left to refer to.
fn changed(layer: &dyn Libservice) -> BTreeMap<String, Timestamp> {
    let mut found = BTreeMap::new();
    let mut pending = vec![(String::new(), NodeId::ROOT)];
    while let Some((path, directory)) = pending.pop() {
        for (last, file_type) in list(layer, directory) {
            let last = String::from_utf8(last).expect("text");
            let entry = layer.lookup(ROOT, directory, name(&last)).expect("it is listed");
            let path = format!("{path}/{last}");
            found.insert(path.clone(), entry.attributes.changed);
            match file_type {
                FileType::Directory => pending.push((path, entry.node)),
                _ => layer.forget(entry.node, 1),
            }
        }
        if directory != NodeId::ROOT {
            layer.forget(directory, 1);
        }
    }
    found
}

/// The object at a path, which is forgotten afterwards.
fn at<T>(layer: &dyn Libservice, path: &str, work: impl FnOnce(NodeId) -> T) -> T {
    let mut way = vec![NodeId::ROOT];
    for part in path.split('/').filter(|part| !part.is_empty()) {
        way.push(layer.lookup(ROOT, way[way.len() - 1], name(part)).expect("it exists").node);
    }
    let result = work(way[way.len() - 1]);
    for node in way.into_iter().skip(1).rev() {
        layer.forget(node, 1);
    }
    result
}

fn on_file(layer: &dyn Libservice, path: &str, work: impl FnOnce(poolfs_libservice::types::HandleId)) {
    let handle = at(layer, path, |node| layer.open(ROOT, node, OpenFlags::READ_WRITE)).expect("opened");
    work(handle);
    layer.release(handle);
}

fn rename(layer: &dyn Libservice, from: &str, to: &str, flags: RenameFlags) {
    let [(parent, last), (new_parent, new_last)] = [from, to].map(|path| path.rsplit_once('/').unwrap_or(("", path)));
    at(layer, parent, |parent| {
        at(layer, new_parent, |new_parent| {
            layer.rename(ROOT, parent, name(last), new_parent, name(new_last), flags).expect("renamed");
        });
    });
}

fn set(layer: &dyn Libservice, path: &str, changes: SetAttributes) {
    at(layer, path, |node| layer.setattr(ROOT, node, &changes, None)).expect("set");
}

fn setxattr(layer: &dyn Libservice, path: &str, attribute: &[u8], flags: XattrFlags) -> Result<()> {
    at(layer, path, |node| layer.setxattr(ROOT, node, attribute, b"2", flags))
}

fn chmod(layer: &dyn Libservice, path: &str) {
    set(layer, path, SetAttributes { permissions: Some(0o640), ..SetAttributes::default() });
}

fn write(layer: &dyn Libservice, path: &str, offset: u64) {
    on_file(layer, path, |handle| {
        layer.write(ROOT, handle, offset, b"new").expect("written");
    });
}

type Change = fn(&dyn Libservice);

const CHANGES: &[(&str, Change)] = &[
    ("chmod", |layer| chmod(layer, "d/e/f/deep")),
    ("chmod of a directory", |layer| chmod(layer, "d/e")),
    ("a time", |layer| {
        let modified = Some(SetTime::At(Timestamp { seconds: 1, nanoseconds: 0 }));
        set(layer, "d/symlink", SetAttributes { modified, ..SetAttributes::default() });
    }),
    ("write", |layer| write(layer, "d/e/f/deep", 5)),
    ("write, then sync", |layer| {
        write(layer, "d/x", 5);
        layer.sync().expect("synced");
    }),
    ("two writes of one block, then sync", |layer| {
        write(layer, "d/h1", 5);
        write(layer, "d/h1", 50);
        layer.sync().expect("synced");
    }),
    ("truncate", |layer| set(layer, "d/x", SetAttributes { size: Some(5000), ..SetAttributes::default() })),
    ("truncate to nothing", |layer| set(layer, "d/y", SetAttributes { size: Some(0), ..SetAttributes::default() })),
    ("create", |layer| {
        at(layer, "d/e/f", |parent| {
            let (entry, handle) = layer.create(ROOT, parent, name("new"), 0o644, OpenFlags::READ_WRITE).expect("made");
            layer.release(handle);
            layer.forget(entry.node, 1);
        });
    }),
    ("mkdir", |layer| {
        let made = at(layer, "other", |parent| layer.mkdir(ROOT, parent, name("new"), 0o755)).expect("made");
        layer.forget(made.node, 1);
    }),
    ("setxattr", |layer| setxattr(layer, "d/x", b"user.new", XattrFlags::empty()).expect("set")),
    ("setxattr that is refused", |layer| {
        setxattr(layer, "d/x", b"user.there", XattrFlags::CREATE).expect_err("it is there");
        setxattr(layer, "d/e/f/deep", b"user.there", XattrFlags::REPLACE).expect_err("it is not there");
    }),
    ("removexattr", |layer| at(layer, "d/x", |node| layer.removexattr(ROOT, node, b"user.there")).expect("removed")),
    ("link", |layer| {
        let linked = at(layer, "d/x", |node| at(layer, "other", |to| layer.link(ROOT, node, to, name("x"))));
        layer.forget(linked.expect("linked").node, 1);
    }),
    ("write by one of three names", |layer| write(layer, "d/h2", 0)),
    ("unlink of one of three names", |layer| at(layer, "d", |d| layer.unlink(ROOT, d, name("h1"))).expect("removed")),
    ("unlink of another", |layer| at(layer, "d", |d| layer.unlink(ROOT, d, name("h2"))).expect("removed")),
    ("rename", |layer| rename(layer, "d/x", "d/z", RenameFlags::empty())),
    ("rename over a file", |layer| rename(layer, "d/z", "d/y", RenameFlags::empty())),
    ("rename of a directory", |layer| rename(layer, "d/e/f", "other/f", RenameFlags::empty())),
    ("exchange", |layer| rename(layer, "other/f/deep", "d/symlink", RenameFlags::EXCHANGE)),
    ("rename of one of the names", |layer| rename(layer, "other/linked", "linked", RenameFlags::empty())),
    ("unlink", |layer| at(layer, "d", |d| layer.unlink(ROOT, d, name("y"))).expect("removed")),
];

/// What has another time, or is there only before or only after.
fn moved(before: &BTreeMap<String, Timestamp>, after: &BTreeMap<String, Timestamp>) -> Vec<String> {
    let all = before.keys().chain(after.keys().filter(|path| !before.contains_key(*path)));
    let mut moved: Vec<_> = all.filter(|path| before.get(*path) != after.get(*path)).cloned().collect();
    moved.sort();
    moved
}

fn compare(union: &dyn Libservice, plain: &dyn Libservice, what: &str, change: Change) {
    let before = [union, plain].map(changed);
    [union, plain].into_iter().for_each(change);
    let after = [union, plain].map(changed);
    let [ours, theirs] = [0, 1].map(|side| moved(&before[side], &after[side]));
    assert_eq!(ours, theirs, "{what}: where the time of change has moved, and where it should");
}

#[test]
fn a_change_moves_the_time_of_what_it_changes_and_of_nothing_else() {
    let plain = Memory::new();
    fill(&*plain);
    for (what, change) in CHANGES.iter().take_while(|(what, _)| *what != "rename over a file") {
        let branches = Branches::empty(1);
        fill(&*branches.lowers[0]);
        let plain = Memory::new();
        fill(&*plain);
        compare(&*branches.open(), &*plain, what, *change);
    }
    // One after another, each over what those before it have left.
    let branches = Branches::empty(1);
    fill(&*branches.lowers[0]);
    let union = branches.open();
    for (what, change) in CHANGES {
        compare(&*union, &*plain, &format!("{what}, after others"), *change);
    }
}

/// Several threads sync, and meet at a file that nobody refers to any more.
#[test]
fn a_file_is_copied_up_by_one_and_awaited_by_others_who_sync() {
    const FILES: usize = 8;
    for round in 0..200 {
        let branches = Branches::empty(1);
        let paths: Vec<_> = (0..FILES).map(|number| number.to_string()).collect();
        paths.iter().for_each(|path| put(&*branches.lowers[0], path, &[1; 2 * BLOCK]));
        let union = branches.open();
        paths.iter().for_each(|path| write(&*union, path, 5));
        let before = changed(&*union);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| union.sync().expect("synced"));
            }
        });
        union.sync().expect("synced");
        assert_eq!(moved(&before, &changed(&*union)), [""; 0], "round {round}");
        for path in &paths {
            let mut bytes = [0; 5];
            on_file(&*union, path, |handle| assert_eq!(union.read(ROOT, handle, 4, &mut bytes).expect("read"), 5));
            assert_eq!(&bytes, b"\x01new\x01", "{path}, round {round}");
        }
    }
}

#[test]
fn who_has_it_open_sees_when_a_lower_object_went() {
    let branches = Branches::empty(1);
    fill(&*branches.lowers[0]);
    let union = branches.open();
    let kept = ["d/y", "d/symlink", "other"].map(|path| node(&*union, path).unwrap());
    let before = kept.map(|node| union.getattr(ROOT, node).unwrap().changed);
    at(&*union, "d", |d| {
        union.unlink(ROOT, d, name("y")).unwrap();
        union.unlink(ROOT, d, name("symlink")).unwrap();
    });
    at(&*union, "other", |other| union.unlink(ROOT, other, name("linked"))).unwrap();
    union.rmdir(ROOT, NodeId::ROOT, name("other")).unwrap();
    let after = kept.map(|node| union.getattr(ROOT, node).unwrap().changed);
    for (before, after) in before.into_iter().zip(after) {
        assert!(after > before, "{after:?} is not after {before:?}");
    }
}
