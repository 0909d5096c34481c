//! Upper branches that were copied in part, or are opened over other layers than their files need.

use crate::support::*;
use poolfs_libservice::types::{FileType, NodeId, RenameFlags, SetAttributes, XattrFlags};
use poolfs_libservice::{Libservice, Memory, Outcome};
use poolfs_local::{Local, LocalOptions};
use poolfs_union::check::{Check, Problem};
use poolfs_union::{Lower, Union, UnionConfig};
use std::sync::Arc;

const MARK: &str = "trusted.poolfs.attributed";
const MARKED: &str = ".poolfs/attributed";
const SKETCH: &str = "trusted.poolfs.sketch";

/// A closed branch with a file that was written in part and a name that was removed.
fn written() -> Branches {
    let branches = Branches::empty(1);
    for file in ["f", "gone"] {
        put(&*branches.lowers[0], file, &[7; 9 * 4096]);
    }
    let union = branches.open();
    write_at(&*union, "f", 5000, b"moved");
    union.unlink(ROOT, NodeId::ROOT, name("gone")).unwrap();
    close(union);
    branches
}

fn unset(upper: &dyn Libservice, path: &str, attribute: &str) {
    upper.removexattr(ROOT, node(upper, path).unwrap(), attribute.as_bytes()).unwrap();
}

/// What `tar` makes of a branch without `--xattrs`.
fn strip(upper: &dyn Libservice, directory: NodeId) {
    let clear = |node: NodeId| {
        for name in upper.listxattr(ROOT, node).unwrap() {
            upper.removexattr(ROOT, node, &name).unwrap();
        }
    };
    clear(directory);
    for (name, file_type) in list(upper, directory) {
        let name = poolfs_libservice::types::Name::new(&name).unwrap();
        let node = upper.lookup(ROOT, directory, name).unwrap().node;
        if file_type == FileType::Directory { strip(upper, node) } else { clear(node) }
    }
}

fn check(branches: &Branches, repair: bool) -> Vec<(String, Problem, Outcome, String)> {
    let mut found = Vec::new();
    let check = Check { upper: branches.upper.clone(), lowers: None, repair, is_whole_below: true };
    let told = check.run(&mut |finding| found.push((finding.path, finding.problem, finding.outcome, finding.cause)));
    assert!(told.expect("it can be checked").is_upper);
    found
}

fn refused(branches: &Branches, part: &str) {
    let before = fingerprint(&*branches.upper);
    let error = open_over(branches.upper.clone(), &branches.lowers).err().expect("it is refused").to_string();
    assert!(error.contains(part) && error.contains("`cp -a`"), "{error}");
    assert!(fingerprint(&*branches.upper) == before, "something was written");
}

#[test]
fn a_copy_without_attributes_is_refused_and_never_repaired() {
    for is_unclean in [false, true] {
        let branches = written();
        strip(&*branches.upper, NodeId::ROOT);
        if is_unclean {
            put(&*branches.upper, ".poolfs/open", b"");
        }
        refused(&branches, "without its extended attributes");
        for repair in [false, true] {
            let found = check(&branches, repair);
            let is_damage = |path: &str, problem| {
                found.iter().any(|one| {
                    one.0.starts_with(path)
                        && one.1 == problem
                        && one.2 == Outcome::Damage
                        && one.3.contains("attributes")
                })
            };
            assert!(is_damage(MARKED, Problem::Attributes), "{found:?}");
            assert!(is_damage(".poolfs/bitmaps/", Problem::Orphan), "{found:?}");
        }
        assert_eq!(ls(&*branches.upper, ".poolfs/bitmaps").len(), 1);
    }
}

#[test]
fn one_lost_mark_is_enough_and_what_was_left_out_is_named() {
    for path in ["", MARKED] {
        let branches = written();
        unset(&*branches.upper, path, MARK);
        refused(&branches, "without its extended attributes");
    }
    let branches = written();
    mkdir(&*branches.upper, "aside");
    let (there, old) = (node(&*branches.upper, "aside").unwrap(), name(".poolfs"));
    branches.upper.rename(ROOT, NodeId::ROOT, old, there, name("aside"), RenameFlags::empty()).unwrap();
    refused(&branches, "without its .poolfs");
    let found = check(&branches, true);
    assert!(found.iter().any(|one| one.0 == ".poolfs" && one.1 == Problem::Attributes), "{found:?}");

    // Nothing is in it: it is a new branch.
    let branches = Branches::empty(1);
    close(branches.open());
    assert_eq!(ls(&*branches.upper, ""), [".poolfs"]);
    let emptied = Memory::new();
    emptied.setxattr(ROOT, NodeId::ROOT, MARK.as_bytes(), b"durable", XattrFlags::empty()).unwrap();
    close(open_over(emptied.clone(), &branches.lowers).unwrap());
    close(open_over(emptied, &branches.lowers).unwrap());
}

#[test]
fn a_frozen_copy_without_attributes_is_refused() {
    let top = tempfile::tempdir().expect("a directory");
    let open = |read_only| -> Arc<dyn Libservice> {
        Local::open(top.path(), LocalOptions { read_only, ..LocalOptions::default() }).expect("the directory opens")
    };
    close(open_over(open(false), &[Memory::new()]).unwrap());
    let lower = || Lower { layer_id: "layer-0".into(), layer: Memory::new(), is_union: false };
    let frozen = || Union::open_frozen(UnionConfig::new(open(true), vec![lower()]));
    drop(frozen().expect("it is whole"));
    unset(&*open(false), MARKED, MARK);
    let error = frozen().err().expect("it is refused").to_string();
    assert!(error.contains("without its extended attributes"), "{error}");
}

/// Some files only, or a branch that an earlier release wrote, which has no marks.
#[test]
fn a_bitmap_whose_file_has_lost_its_attributes_is_removed_only_after_an_unclean_end() {
    for (is_marked, is_unclean) in [(true, false), (true, true), (false, false), (false, true)] {
        let branches = written();
        if !is_marked {
            let directory = node(&*branches.upper, ".poolfs").unwrap();
            branches.upper.unlink(ROOT, directory, name("attributed")).unwrap();
            unset(&*branches.upper, "", MARK);
            close(branches.open());
            assert!(!ls(&*branches.upper, ".poolfs").contains(&"attributed".to_owned()), "it has bitmaps");
        }
        for attribute in [SKETCH, "trusted.overlay.metacopy"] {
            unset(&*branches.upper, "f", attribute);
        }
        if is_unclean {
            put(&*branches.upper, ".poolfs/open", b"");
        }
        let found = check(&branches, true);
        let outcome = found.iter().find(|one| one.1 == Problem::Orphan).expect("one").2;
        assert_eq!(outcome, if is_unclean { Outcome::Repaired } else { Outcome::Damage }, "{found:?}");
        assert_eq!(ls(&*branches.upper, ".poolfs/bitmaps").len(), usize::from(!is_unclean));
    }
}

#[test]
fn layers_that_files_need_are_missed() {
    let missing = |union: Arc<Union>| {
        let missing = union.missing_layers().to_vec();
        close(union);
        missing
    };
    let branches = Branches::empty(3);
    for (at, file) in ["a", "b", "c"].into_iter().enumerate() {
        put(&*branches.lowers[at], file, &[7; 9 * 4096]);
    }
    let union = branches.open();
    write_at(&*union, "b", 5000, b"moved");
    union.unlink(ROOT, NodeId::ROOT, name("c")).unwrap();
    let changes = SetAttributes { permissions: Some(0o600), ..SetAttributes::default() };
    union.setattr(ROOT, node(&*union, "b").unwrap(), &changes, None).unwrap();
    assert!(missing(union).is_empty());
    assert!(missing(branches.open()).is_empty());
    assert_eq!(missing(open_over(branches.upper.clone(), &branches.lowers[..1]).unwrap()), ["layer-1"]);
    assert!(missing(branches.open()).is_empty());
}
