//! Tests of frozen upper branches: what a union has written, used as a lower branch of others.

use crate::script::{Script, Seen, fill_lower, tree};
use crate::support::*;
use poolfs_bcow::{Bcow, BcowConfig, Layout};
use poolfs_libservice::random_operations::{Comparison, populate};
use poolfs_libservice::types::{Errno, FileType, NodeId, OpenFlags, SeekTo, SetAttributes, SetTime, XattrFlags};
use poolfs_libservice::{Libservice, Memory, conformance};
use poolfs_local::{Local, LocalOptions};
use poolfs_union::{Lower, Union, UnionConfig, was_upper};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// A place with a lower branch `base` and as many uppers as wanted.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let place = Place(tempfile::tempdir().expect("a directory"));
        std::fs::create_dir(place.path("base")).expect("made");
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The branch of that name: for writing, new files in compact form or not.
    fn upper(&self, name: &str, compact: bool) -> Arc<dyn Libservice> {
        let path = self.path(name);
        if !path.exists() {
            std::fs::create_dir(&path).expect("made");
        }
        let local = local(&path, false);
        if !compact {
            return local;
        }
        Bcow::new(BcowConfig { layout: Some(Layout::Space), all_files: true, ..BcowConfig::new(local) })
    }

    fn base(&self) -> Lower {
        Lower { layer_id: "base".into(), layer: local(&self.path("base"), true), is_union: false }
    }

    /// What the union with that upper branch shows, for reading.
    fn frozen(&self, name: &str, lowers: Vec<Lower>) -> Lower {
        let below = local(&self.path(name), true);
        let is_compact = Bcow::is_used(&below).expect("known");
        let upper = if is_compact { Bcow::new(BcowConfig::new(below)) } else { below };
        assert!(was_upper(&upper).expect("known"));
        let layer = Union::open_frozen(UnionConfig::new(upper, lowers)).expect("it opens");
        Lower { layer_id: name.into(), layer, is_union: true }
    }
}

fn local(path: &Path, read_only: bool) -> Arc<dyn Libservice> {
    Local::open(path, LocalOptions { read_only, ..LocalOptions::default() }).expect("the directory opens")
}

fn union(upper: Arc<dyn Libservice>, lowers: Vec<Lower>) -> Arc<Union> {
    Union::open(UnionConfig::new(upper, lowers)).expect("the union opens")
}

fn fill(union: &Union, seed: u64, steps: usize) {
    let mut script = Script::new(seed);
    (0..steps).for_each(|_| drop(script.step(union)));
    script.forget(union);
}

/// What users see, but for inode numbers, which are each union's own.
fn seen(union: &Union, what: &str) -> BTreeMap<String, Seen> {
    let mut all = tree(union, what);
    all.values_mut().for_each(|one| one.inode = 0);
    all
}

#[test]
fn clones_share_a_frozen_upper_branch_and_change_nothing_of_it() {
    for seed in 0..12 {
        let (place, what) = (Place::new(), format!("seed {seed}"));
        fill_lower(&*local(&place.path("base"), false));
        let first = union(place.upper("first", seed % 2 == 0), vec![place.base()]);
        fill(&first, seed, 250);
        let wanted = seen(&first, &what);
        close(first);
        let before = fingerprint(&*local(&place.path("first"), true));

        let frozen = place.frozen("first", vec![place.base()]);
        let below = || vec![Lower { layer_id: "first".into(), layer: frozen.layer.clone(), is_union: true }];
        let open = |name: &str| union(place.upper(name, seed % 3 == 0), below());
        let (one, other) = (open("one"), open("other"));
        assert_eq!((seen(&one, &what), seen(&other, &what)), (wanted.clone(), wanted.clone()), "{what}");
        fill(&one, seed + 100, 250);
        assert_eq!(seen(&other, &what), wanted, "{what}: what another clone has changed");
        let changed = tree(&*one, &what);
        close(one);
        assert_eq!(tree(&*open("one"), &what), changed, "{what}: after a remount");

        // A frozen clone is a branch for others as well.
        let second = place.frozen("one", below());
        let top = union(place.upper("top", false), vec![second]);
        let mut shown = changed;
        shown.values_mut().for_each(|one| one.inode = 0);
        assert_eq!(seen(&top, &what), shown, "{what}: a clone of a clone");
        fill(&top, seed + 200, 100);
        close(top);
        assert_eq!(fingerprint(&*local(&place.path("first"), true)), before, "{what}: the frozen branch has changed");
    }
}

#[test]
fn blocks_of_frozen_files_move_one_by_one() {
    let place = Place::new();
    put(&*local(&place.path("base"), false), "f", &[1; 100 * 4096]);
    let first = union(place.upper("first", true), vec![place.base()]);
    write_at(&*first, "f", 50 * 4096, &[2; 4096]);
    close(first);
    let frozen = place.frozen("first", vec![place.base()]);
    let clone = union(place.upper("clone", false), vec![frozen]);
    write_at(&*clone, "f", 50 * 4096 + 1, &[3; 1]);
    fsync(&*clone, "f");
    let content = get(&*clone, "f").expect("there");
    assert_eq!(content[50 * 4096 - 1..50 * 4096 + 4], [1, 2, 3, 2, 2]);
    let upper = local(&place.path("clone"), true);
    let handle = open(&*upper, "f", OpenFlags::READ_ONLY).expect("there");
    assert_eq!(upper.seek(ROOT, handle, 0, SeekTo::Data).expect("data"), 50 * 4096);
    assert!(upper.seek(ROOT, handle, 51 * 4096, SeekTo::Data).is_err_and(|error| error == Errno::ENXIO));
    upper.release(handle);
}

#[test]
fn a_device_of_no_number_is_no_whiteout_of_a_frozen_branch() {
    let place = Place::new();
    put(&*local(&place.path("base"), false), "gone", b"x");
    let first = union(place.upper("first", false), vec![place.base()]);
    first.mknod(ROOT, NodeId::ROOT, name("device"), FileType::CharDevice, 0o600, 0).expect("made");
    first.unlink(ROOT, NodeId::ROOT, name("gone")).expect("removed");
    close(first);
    let clone = union(place.upper("clone", false), vec![place.frozen("first", vec![place.base()])]);
    assert_eq!(ls(&*clone, ""), ["device"]);
    assert_eq!(stat(&*clone, "device").file_type, FileType::CharDevice);
}

#[test]
fn a_branch_in_use_or_of_an_unclean_end_is_refused() {
    let place = Place::new();
    let open_frozen = || {
        let config = UnionConfig::new(local(&place.path("first"), true), vec![place.base()]);
        Union::open_frozen(config).map(drop)
    };
    let first = union(place.upper("first", false), vec![place.base()]);
    assert!(open_frozen().is_err_and(|error| error == Errno::EBUSY && error.to_string().contains("in use")));
    close(first);
    open_frozen().expect("closed");
    std::fs::write(place.path("first/.poolfs/journal-0"), "").expect("written");
    assert!(open_frozen().is_err_and(|error| error == Errno::EBUSY), "what a service had accepted waits in it");
    std::fs::remove_file(place.path("first/.poolfs/journal-0")).expect("removed");
    assert!(Union::open_frozen(UnionConfig::new(local(&place.path("first"), false), vec![place.base()])).is_err());
    std::fs::write(place.path("first/.poolfs/format"), "poolfs-union 9\n").expect("written");
    assert!(open_frozen().is_err_and(|error| error == Errno::EIO && error.to_string().contains("another release")));
    assert!(was_upper(&local(&place.path("first"), true)).is_err());
    assert!(!was_upper(&local(&place.path("base"), true)).expect("known"));
}

#[test]
fn nothing_of_a_frozen_union_can_be_changed() {
    let place = Place::new();
    put(&*local(&place.path("base"), false), "f", &[1; 10_000]);
    close(union(place.upper("first", false), vec![place.base()]));
    let frozen = place.frozen("first", vec![place.base()]).layer;
    let refused = |result: poolfs_libservice::Result<()>| result.is_err_and(|error| error == Errno::EROFS);
    assert!(frozen.read_only());
    assert!(refused(frozen.mkdir(ROOT, NodeId::ROOT, name("new"), 0o700).map(drop)));
    assert!(refused(frozen.unlink(ROOT, NodeId::ROOT, name("f"))));
    assert!(refused(frozen.setxattr(ROOT, node(&*frozen, "f").expect("there"), b"user.a", b"b", XattrFlags::empty())));
    assert_eq!(get(&*frozen, "f").expect("there"), [1; 10_000]);
}

/// A union over a frozen one, in which every file is a sketch with one block of its own, and all is as in the base.
fn over_frozen(place: &Place) -> Lower {
    let first = union(place.upper("first", false), vec![place.base()]);
    for (path, seen) in tree(&*first, "populated") {
        if seen.file_type == FileType::Regular && seen.size > 0 {
            let path = path.trim_start_matches('/');
            let content = get(&*first, path).expect("there");
            let last = content.len() - 1;
            let before = stat(&*first, path).modified;
            write_at(&*first, path, last as u64, &content[last..]);
            let changes = SetAttributes { modified: Some(SetTime::At(before)), ..SetAttributes::default() };
            let node = node(&*first, path).expect("there");
            first.setattr(ROOT, node, &changes, None).expect("set");
            first.forget(node, 1);
        }
    }
    close(first);
    place.frozen("first", vec![place.base()])
}

#[test]
fn random_operations_over_a_frozen_branch() {
    for seed in [5, 6] {
        let place = Place::new();
        populate(&*local(&place.path("base"), false), seed, 60);
        let reference = Memory::new();
        populate(&*reference, seed, 60);
        let frozen = over_frozen(&place);
        let before = fingerprint(&*local(&place.path("first"), true));
        let mut mounted = Remounted::default();
        let open = || {
            let lower = Lower { layer_id: "first".into(), layer: frozen.layer.clone(), is_union: true };
            union(place.upper("clone", seed % 2 == 0), vec![lower])
        };
        let first = mounted.open(None, open);
        Comparison::new(seed, 3000)
            .starting_from(reference)
            .remounting(400, |layer| mounted.open(Some(layer), open))
            .run(first);
        assert_eq!(fingerprint(&*local(&place.path("first"), true)), before, "the frozen branch has changed");
    }
}

#[test]
fn conformance_over_a_frozen_branch() {
    let places = Mutex::new(Vec::new());
    conformance::run(&|| {
        let place = Place::new();
        close(union(place.upper("first", false), vec![place.base()]));
        let layer: Arc<dyn Libservice> =
            union(place.upper("clone", false), vec![place.frozen("first", vec![place.base()])]);
        places.lock().expect("no panic").push(place);
        layer
    });
}
