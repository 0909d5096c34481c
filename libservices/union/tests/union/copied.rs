//! Tests of upper branches that were copied in part, or are opened over other layers than their files need.

use crate::support::*;
use poolfs_libservice::types::{Errno, FileType, NodeId, OpenFlags, RenameFlags, SetAttributes, XattrFlags};
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

/// A branch on a filesystem, over a lower one in memory with the files `f` and `h` of nine blocks.
struct OnDisk {
    place: tempfile::TempDir,
    lowers: [Arc<Memory>; 1],
}

impl OnDisk {
    /// `f` was written in part, of `h` only the mode was changed, so that it has no bitmap yet.
    fn written() -> Self {
        let lowers = [Memory::new()];
        for file in ["f", "h"] {
            put(&*lowers[0], file, &[7; 9 * 4096]);
        }
        let disk = OnDisk { place: tempfile::tempdir().expect("a directory"), lowers };
        disk.run("mkdir up");
        let union = disk.open("up");
        write_at(&*union, "f", 4096, &[1; 4096]);
        let changes = SetAttributes { permissions: Some(0o600), ..SetAttributes::default() };
        union.setattr(ROOT, node(&*union, "h").unwrap(), &changes, None).unwrap();
        close(union);
        disk
    }

    fn run(&self, script: &str) {
        let script = format!("set -e; cd {}; {script}", self.place.path().display());
        let status = std::process::Command::new("sh").args(["-c", &script]).status().expect("a shell");
        assert!(status.success(), "{script}");
    }

    fn upper(&self, name: &str) -> Arc<dyn Libservice> {
        Local::open(&self.place.path().join(name), LocalOptions::default()).expect("the directory opens")
    }

    fn open(&self, name: &str) -> Arc<Union> {
        open_over(self.upper(name), &self.lowers).expect("the union opens")
    }

    /// What a check finds of bitmaps: which files it is about.
    fn found(&self, name: &str) -> Vec<String> {
        let mut found = Vec::new();
        let check = Check { upper: self.upper(name), lowers: None, repair: false, is_whole_below: true };
        let told = check.run(&mut |finding| found.push((finding.path, finding.problem, finding.cause)));
        let _ = told.expect("it can be checked");
        found.retain(|(_, problem, _)| *problem != Problem::UncleanEnd);
        for (_, problem, cause) in &found {
            assert!(*problem == Problem::Bitmap && cause.contains("inode number"), "{problem:?} {cause}");
        }
        found.into_iter().map(|(path, ..)| path).collect()
    }
}

fn shows(union: &Union, path: &str, moved: &[(usize, u8)]) {
    let mut wanted = vec![7; 9 * 4096];
    for &(block, byte) in moved {
        wanted[block * 4096..(block + 1) * 4096].fill(byte);
    }
    assert!(get(union, path).expect("it can be read") == wanted, "{path}");
}

fn is_refused(union: &Union, path: &str, parts: &[&str]) {
    let error = get(union, path).expect_err("it cannot be read");
    assert!(error == Errno::EIO && error.to_string().contains("poolfs fsck"), "{path}: {error}");
    assert!(parts.iter().all(|part| error.to_string().contains(part)), "{path}: {error}");
    let changes = SetAttributes { size: Some(0), ..SetAttributes::default() };
    assert!(union.setattr(ROOT, node(union, path).unwrap(), &changes, None).is_err_and(|error| error == Errno::EIO));
    if let Ok(handle) = open(union, path, OpenFlags::READ_WRITE) {
        assert!(union.write(ROOT, handle, 0, b"x").is_err_and(|error| error == Errno::EIO), "{path}");
        union.release(handle);
    }
}

fn block(union: &Union, path: &str, block: u64, byte: u8) {
    write_at(union, path, block * 4096, &[byte; 4096]);
    fsync(union, path);
}

#[test]
fn a_sketch_that_was_copied_within_the_branch_cannot_be_used_and_the_other_keeps_its_bytes() {
    let disk = OnDisk::written();
    disk.run("cp -a up/f up/g; cp -a up/h up/a; ln up/f up/l; mv up/f up/e");
    let copies = ["a", "g"];
    for round in 0..4 {
        let mut found = disk.found("up");
        found.sort();
        assert_eq!(found.len(), 2, "round {round}: {found:?}");
        assert!(round == 2 || found == copies, "round {round}: {found:?}");
        let union = disk.open("up");
        copies.iter().for_each(|path| is_refused(&union, path, &["copied within the branch", "inode number"]));
        block(&union, "e", 2 + round, 2);
        block(&union, "h", 2 + round, 3);
        copies.iter().for_each(|path| is_refused(&union, path, &[]));
        close(union);
        if round == 1 {
            // An unclean end.
            disk.run("touch up/.poolfs/open");
        }
    }
    let union = disk.open("up");
    union.unlink(ROOT, NodeId::ROOT, name("a")).unwrap();
    union.unlink(ROOT, NodeId::ROOT, name("g")).unwrap();
    close(union);
    assert!(disk.found("up").is_empty());
    let union = disk.open("up");
    shows(&union, "e", &[(1, 1), (2, 2), (3, 2), (4, 2), (5, 2)]);
    shows(&union, "l", &[(1, 1), (2, 2), (3, 2), (4, 2), (5, 2)]);
    shows(&union, "h", &[(2, 3), (3, 3), (4, 3), (5, 3)]);
    close(union);
}

#[test]
fn copies_of_the_whole_branch_and_files_that_are_put_back_with_it_can_be_used() {
    let disk = OnDisk::written();
    disk.run("cp -a up copy; cp -a copy another; mkdir there; mv up there/up");
    for name in ["copy", "another", "there/up"] {
        for round in 0..2 {
            let union = disk.open(name);
            block(&union, "f", 2 + round, 2);
            block(&union, "h", 2 + round, 3);
            close(union);
            assert!(disk.found(name).is_empty());
        }
        let union = disk.open(name);
        shows(&union, "f", &[(1, 1), (2, 2), (3, 2)]);
        shows(&union, "h", &[(2, 3), (3, 3)]);
        close(union);
    }
    // What `rsync` does that brings back what was there before: only what differs gets another inode.
    disk.run("cp -a copy/f copy/new; mv copy/new copy/f; touch -d 2020-01-01 copy/.poolfs");
    let union = disk.open("copy");
    shows(&union, "f", &[(1, 1), (2, 2), (3, 2)]);
    close(union);
    // Over its own place, whatever numbers files get there.
    disk.run("cp -a copy kept; rm -r copy; cp -a kept copy; rm -r copy; cp -a kept copy");
    let union = disk.open("copy");
    shows(&union, "h", &[(2, 3), (3, 3)]);
    close(union);
}

#[test]
fn of_two_in_a_copy_of_the_branch_none_is_used_until_one_is_gone() {
    let disk = OnDisk::written();
    disk.run("cp -a up/f up/g; cp -a up copy");
    for round in 0..2 {
        assert_eq!(disk.found("copy").len(), 1);
        let union = disk.open("copy");
        ["f", "g"].iter().for_each(|path| is_refused(&union, path, &["nobody can tell"]));
        block(&union, "h", round, 3);
        close(union);
    }
    disk.run("rm copy/g");
    let union = disk.open("copy");
    shows(&union, "h", &[(0, 3), (1, 3)]);
    shows(&union, "f", &[(1, 1)]);
    block(&union, "f", 2, 2);
    close(union);
    assert!(disk.found("copy").is_empty());
    disk.run("cp -a copy/f copy/g");
    let union = disk.open("copy");
    is_refused(&union, "g", &["copied within the branch"]);
    shows(&union, "f", &[(1, 1), (2, 2)]);
    close(union);
}

/// Records without the number of their file, and nothing that says where the branch is.
#[test]
fn what_an_earlier_release_wrote_can_be_used_but_for_two_of_one_bitmap() {
    let make_old = |disk: &OnDisk| {
        let upper = disk.upper("up");
        for path in ["f", "h"] {
            let node = node(&*upper, path).unwrap();
            let mut record = upper.getxattr(ROOT, node, SKETCH.as_bytes()).unwrap();
            record[48..].fill(0);
            let sum = crc32c::crc32c(&record);
            record[60..].copy_from_slice(&sum.to_le_bytes());
            upper.setxattr(ROOT, node, SKETCH.as_bytes(), &record, XattrFlags::empty()).unwrap();
        }
    };
    for has_place in [false, true] {
        let disk = OnDisk::written();
        make_old(&disk);
        if !has_place {
            disk.run("rm up/.poolfs/place; setfattr -x trusted.poolfs.place up");
        }
        disk.run("touch up/.poolfs; cp -a up/h up/a");
        for _ in 0..2 {
            assert_eq!(disk.found("up").len(), 1);
            let union = disk.open("up");
            shows(&union, "f", &[(1, 1)]);
            ["a", "h"].iter().for_each(|path| is_refused(&union, path, &[]));
            close(union);
        }
    }
}

#[test]
fn a_frozen_branch_shows_no_copy_of_one_of_its_sketches() {
    let disk = OnDisk::written();
    disk.run("cp -a up/f up/g; cp -a up copy");
    let frozen = |name: &str| {
        let options = LocalOptions { read_only: true, ..LocalOptions::default() };
        let upper = Local::open(&disk.place.path().join(name), options).expect("the directory opens");
        let lower = Lower { layer_id: "layer-0".into(), layer: disk.lowers[0].clone(), is_union: false };
        Union::open_frozen(UnionConfig::new(upper, vec![lower])).expect("it opens")
    };
    let union = frozen("up");
    shows(&union, "f", &[(1, 1)]);
    assert!(get(&*union, "g").is_err_and(|error| error == Errno::EIO));
    // In a copy nobody has looked yet.
    shows(&frozen("copy"), "f", &[(1, 1)]);
}
