//! Tests of the check of upper branches: after every power cut, with every single kind of damage, and of hostile trees.

use crate::script;
use crate::support::*;
use poolfs_libservice::types::{FileType, NodeId, RenameFlags, SetAttributes, XattrFlags};
use poolfs_libservice::{Libservice, Memory, Outcome, Recorder};
use poolfs_local::{Local, LocalOptions};
use poolfs_union::Lower;
use poolfs_union::check::{Check, Checked, Problem};
use std::fs;
use std::sync::Arc;

type Found = (String, Problem, Outcome);

const SKETCH: &str = "trusted.poolfs.sketch";
const ORIGIN: &str = "trusted.poolfs.origin";
const METACOPY: &str = "trusted.overlay.metacopy";
const LINKS: &str = "trusted.overlay.nlink";
const BLOCK: usize = 4096;

fn check(upper: Arc<dyn Libservice>, lowers: Option<&[Arc<Memory>]>, repair: bool) -> (Checked, Vec<Found>) {
    let lowers = lowers.map(|lowers| {
        let named = lowers.iter().enumerate();
        named
            .map(|(at, layer)| Lower { layer_id: format!("layer-{at}"), layer: layer.clone(), is_union: false })
            .collect::<Vec<_>>()
    });
    let mut found = Vec::new();
    let check = Check { upper, lowers: lowers.as_deref(), repair, is_whole_below: true };
    let checked = check.run(&mut |finding| found.push((finding.path, finding.problem, finding.outcome)));
    (checked.expect("it can be checked"), found)
}

/// What a power cut leaves is all repaired, the first time, and nothing is written before that is wanted.
fn cut_is_repaired(disk: &Arc<Memory>, lowers: &[Arc<Memory>], what: &str) {
    let before = fingerprint(&**disk);
    let (_, found) = check(disk.clone(), Some(lowers), false);
    assert!(fingerprint(&**disk) == before, "{what}: something was written");
    assert!(found.iter().all(|(_, _, outcome)| *outcome == Outcome::Repairable), "{what}: {found:?}");
    let (checked, repaired) = check(disk.clone(), Some(lowers), true);
    assert!(repaired.iter().all(|(_, _, outcome)| *outcome == Outcome::Repaired), "{what}: {repaired:?}");
    assert!(checked.tally.nothing_left() && repaired.len() >= found.len(), "{what}: {found:?} {repaired:?}");
    let (_, left) = check(disk.clone(), Some(lowers), false);
    assert!(left.is_empty(), "{what}: {left:?}");
}

#[test]
fn what_a_power_cut_leaves_of_a_tree_is_repaired() {
    for seed in 0..25u64 {
        let below = [script::lower()];
        let recorder = Recorder::new();
        let union = open_over(recorder.clone(), &below).unwrap();
        let mut script = script::Script::new(seed);
        for step in 0..25 {
            let before = recorder.len();
            let done = script.step(&*union);
            for count in before..=recorder.len() {
                let what = format!("seed {seed}, step {step} ({done}), change {}", count - before);
                cut_is_repaired(&recorder.crashed(count, seed ^ count as u64), &below, &what);
            }
        }
    }
}

fn file_below() -> Arc<Memory> {
    let below = Memory::new();
    put(&*below, "f", &(0..9 * BLOCK + 1024).map(|at| (at / 512) as u8).collect::<Vec<_>>());
    below
}

#[test]
fn what_a_power_cut_leaves_of_a_sketch_is_repaired_and_its_content_stays() {
    let mut problems = std::collections::HashSet::new();
    for seed in 0..40u64 {
        let below = [file_below()];
        let recorder = Recorder::new();
        let union = open_over(recorder.clone(), &below).unwrap();
        let mut random = script::Random(seed);
        for step in 0..12 {
            let before = recorder.len();
            match random.below(5) {
                0 | 1 => fsync(&*union, "f"),
                2 => {
                    let changes = SetAttributes { size: Some(512 * random.below(80)), ..SetAttributes::default() };
                    union.setattr(ROOT, node(&*union, "f").unwrap(), &changes, None).unwrap();
                }
                _ => write_at(&*union, "f", 512 * random.below(72), &vec![random.below(256) as u8; 700]),
            }
            for (count, is_torn) in (before..=recorder.len()).flat_map(|count| [(count, false), (count, true)]) {
                let what = format!("seed {seed}, step {step}, change {count}, torn {is_torn}");
                let crashed = || {
                    let disk = recorder.crashed(count, seed ^ count as u64);
                    if is_torn {
                        recorder.tear(&disk, count, seed * 37 + count as u64 * 11);
                    }
                    disk
                };
                let disk = crashed();
                let (_, found) = check(disk.clone(), Some(&below), false);
                problems.extend(found.iter().map(|found| found.1));
                cut_is_repaired(&disk, &below, &what);
                // What is mounted after the repair shows what is mounted without it.
                let repaired = open_over(disk, &below).unwrap();
                let mounted = open_over(crashed(), &below).unwrap();
                assert!(get(&*repaired, "f").unwrap() == get(&*mounted, "f").unwrap(), "{what}");
            }
        }
    }
    for wanted in [Problem::Truncation, Problem::BitmapCut, Problem::BitmapUnpromised, Problem::MetacopyLeft] {
        assert!(problems.contains(&wanted), "{wanted:?} is not among {problems:?}");
    }
}

#[test]
fn a_branch_that_was_closed_has_nothing() {
    for seed in 0..40u64 {
        let below = [script::lower()];
        let upper = Memory::new();
        let union = open_over(upper.clone(), &below).unwrap();
        let mut script = script::Script::new(seed);
        for _ in 0..60 {
            let _ = script.step(&*union);
        }
        script.forget(&*union);
        close(union);
        let (checked, found) = check(upper, Some(&below), false);
        assert!(found.is_empty() && checked.is_upper, "seed {seed}: {found:?}");
    }
}

#[test]
fn a_directory_that_never_was_an_upper_branch_is_told_as_such() {
    let plain = Memory::new();
    mkdir(&*plain, "d");
    put(&*plain, "d/f", b"x");
    let (checked, found) = check(plain, None, true);
    assert!(!checked.is_upper && checked.objects == 2 && found.is_empty());
}

/// A closed branch with a sketch `s` whose bitmap was promised, one of two names (`hard`), directories, and a whiteout.
fn image() -> Branches {
    let branches = Branches::empty(1);
    let below = &branches.lowers[0];
    for (file, blocks) in [("s", 9), ("hard", 3), ("gone", 1)] {
        put(&**below, file, &vec![7; blocks * BLOCK]);
    }
    below.link(ROOT, node(&**below, "hard").unwrap(), NodeId::ROOT, name("soft")).unwrap();
    mkdir(&**below, "d");
    put(&**below, "d/x", b"x");
    let union = branches.open();
    for file in ["s", "hard"] {
        write_at(&*union, file, 4096, b"moved");
        fsync(&*union, file);
    }
    union.unlink(ROOT, NodeId::ROOT, name("gone")).unwrap();
    union.rename(ROOT, NodeId::ROOT, name("d"), NodeId::ROOT, name("e"), RenameFlags::empty()).unwrap();
    close(union);
    branches
}

fn value(upper: &dyn Libservice, path: &str, attribute: &str) -> Vec<u8> {
    upper.getxattr(ROOT, node(upper, path).unwrap(), attribute.as_bytes()).unwrap()
}

fn set(upper: &dyn Libservice, path: &str, attribute: &str, value: &[u8]) {
    upper.setxattr(ROOT, node(upper, path).unwrap(), attribute.as_bytes(), value, XattrFlags::empty()).unwrap();
}

fn unset(upper: &dyn Libservice, path: &str, attribute: &str) {
    upper.removexattr(ROOT, node(upper, path).unwrap(), attribute.as_bytes()).unwrap();
}

fn unlink(upper: &dyn Libservice, path: &str) {
    let (parent, last) = split(upper, path);
    upper.unlink(ROOT, parent, last).unwrap();
}

/// The bitmap of the sketch at a path.
fn bitmap_of(upper: &dyn Libservice, path: &str) -> String {
    let id = value(upper, path, SKETCH)[8..24].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!(".poolfs/bitmaps/{id}")
}

/// A record with other bytes from `at` on, and a right sum.
fn record_with(upper: &dyn Libservice, path: &str, at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut record = value(upper, path, SKETCH);
    record[at..at + bytes.len()].copy_from_slice(bytes);
    record[60..].fill(0);
    let sum = crc32c::crc32c(&record).to_le_bytes();
    record[60..].copy_from_slice(&sum);
    record
}

fn overwrite(upper: &dyn Libservice, path: &str, at: usize, change: impl FnOnce(&mut u8)) {
    let mut bytes = get(upper, path).unwrap();
    change(&mut bytes[at]);
    write_at(upper, path, 0, &bytes);
}

/// What is done to an image, what is found then, where (a part of the path), and what a repair makes of it.
type Case = (&'static str, fn(&Branches), &'static [(&'static str, Problem, Outcome)]);

const fn mended(path: &'static str, problem: Problem) -> (&'static str, Problem, Outcome) {
    (path, problem, Outcome::Repaired)
}

const fn damage(path: &'static str, problem: Problem) -> (&'static str, Problem, Outcome) {
    (path, problem, Outcome::Damage)
}

fn first_in(upper: &dyn Libservice, directory: &str) -> String {
    format!("{directory}/{}", ls(upper, directory)[0])
}

const CASES: &[Case] = &[
    ("no format", |b| unlink(&*b.upper, ".poolfs/format"), &[mended(".poolfs/format", Problem::Format)]),
    ("a cut format", |b| resize(&*b.upper, ".poolfs/format", 4), &[mended(".poolfs/format", Problem::Format)]),
    (
        "another release",
        |b| overwrite(&*b.upper, ".poolfs/format", 13, |byte| *byte = b'2'),
        &[damage(".poolfs/format", Problem::Release)],
    ),
    ("unclean", |b| put(&*b.upper, ".poolfs/open", b""), &[mended(".poolfs/open", Problem::UncleanEnd)]),
    (
        "leftovers",
        |b| {
            mkdir(&*b.upper, ".poolfs/work/w1");
            put(&*b.upper, ".poolfs/work/w1/x", b"x");
            put(&*b.upper, ".poolfs/work/w2", b"x");
        },
        &[mended(".poolfs/work/w1", Problem::Leftover), mended(".poolfs/work/w2", Problem::Leftover)],
    ),
    (
        "an orphaned bitmap",
        |b| put(&*b.upper, ".poolfs/bitmaps/00000000000000000000000000000001", b"x"),
        &[damage(".poolfs/bitmaps/0", Problem::Orphan)],
    ),
    (
        "an orphaned bitmap after an unclean end",
        |b| {
            put(&*b.upper, ".poolfs/bitmaps/00000000000000000000000000000001", b"x");
            put(&*b.upper, ".poolfs/open", b"");
        },
        &[mended(".poolfs/bitmaps/0", Problem::Orphan), mended(".poolfs/open", Problem::UncleanEnd)],
    ),
    (
        "an orphan that may belong to what is damaged",
        |b| {
            put(&*b.upper, ".poolfs/bitmaps/00000000000000000000000000000001", b"x");
            set(&*b.upper, "s", SKETCH, b"short");
        },
        &[damage("s", Problem::Record), damage(".poolfs/b", Problem::Orphan), damage(".poolfs/b", Problem::Orphan)],
    ),
    (
        "strangers",
        |b| {
            put(&*b.upper, ".poolfs/bitmaps/mine", b"x");
            put(&*b.upper, ".poolfs/index/mine", b"x");
        },
        &[damage(".poolfs/bitmaps/mine", Problem::Stranger), damage(".poolfs/index/mine", Problem::Stranger)],
    ),
    (
        "a removed name that the index still has",
        |b| {
            unlink(&*b.upper, "hard");
            set(&*b.upper, &first_in(&*b.upper, ".poolfs/index"), LINKS, b"U-1");
        },
        &[mended(".poolfs/index", Problem::Orphan), mended(".poolfs/bitmaps", Problem::Orphan)],
    ),
    ("links that are too many", |b| set(&*b.upper, "hard", LINKS, b"U+7"), &[damage(".poolfs/index", Problem::Links)]),
    ("links that are too few", |b| set(&*b.upper, "hard", LINKS, b"U-2"), &[damage(".poolfs/index", Problem::Links)]),
    ("links that are none", |b| set(&*b.upper, "hard", LINKS, b"many"), &[damage("hard", Problem::Mark)]),
    ("no links", |b| unset(&*b.upper, "hard", LINKS), &[damage(".poolfs/index", Problem::Links)]),
    (
        "no longer in the index",
        |b| unlink(&*b.upper, &first_in(&*b.upper, ".poolfs/index")),
        &[damage("hard", Problem::Links)],
    ),
    (
        "a name beside the branch",
        |b| {
            let hard = node(&*b.upper, "hard").unwrap();
            unlink(&*b.upper, "hard");
            b.upper.link(ROOT, hard, node(&*b.upper, ".poolfs").unwrap(), name("aside")).unwrap();
        },
        &[damage(".poolfs/index", Problem::Links)],
    ),
    (
        "an unfinished truncation",
        |b| {
            let (size, epoch) = (5000u64.to_le_bytes(), 1u64.to_le_bytes());
            let record = record_with(&*b.upper, "s", 24, &[size, size, epoch].concat());
            set(&*b.upper, "s", SKETCH, &record);
        },
        &[mended("s", Problem::Truncation)],
    ),
    (
        "an unfinished truncation with the last epoch there is",
        |b| {
            let record = record_with(&*b.upper, "s", 40, &u64::MAX.to_le_bytes());
            set(&*b.upper, "s", SKETCH, &record);
        },
        &[mended("s", Problem::Truncation)],
    ),
    (
        "a truncation to what no file can have",
        |b| {
            let (size, epoch) = (u64::MAX.to_le_bytes(), 1u64.to_le_bytes());
            set(&*b.upper, "s", SKETCH, &record_with(&*b.upper, "s", 32, &[size, epoch].concat()));
        },
        &[damage("s", Problem::Truncation)],
    ),
    (
        "a limit beyond the lower file",
        |b| set(&*b.upper, "s", SKETCH, &record_with(&*b.upper, "s", 24, &(1u64 << 40).to_le_bytes())),
        &[damage("s", Problem::Record)],
    ),
    (
        "a newer record",
        |b| set(&*b.upper, "s", SKETCH, &record_with(&*b.upper, "s", 4, &[2])),
        &[damage("s", Problem::Record)],
    ),
    ("no origin", |b| unset(&*b.upper, "s", ORIGIN), &[damage("s", Problem::Origin)]),
    ("no origin of a directory", |b| set(&*b.upper, "e", ORIGIN, b"PFOR"), &[damage("e", Problem::Origin)]),
    ("no metacopy", |b| unset(&*b.upper, "s", METACOPY), &[mended("s", Problem::MetacopyMissing)]),
    (
        "no sketch",
        |b| unset(&*b.upper, "s", SKETCH),
        &[mended("s", Problem::MetacopyLeft), damage(".poolfs/bitmaps", Problem::Orphan)],
    ),
    ("no bitmap", |b| unlink(&*b.upper, &bitmap_of(&*b.upper, "s")), &[damage("s", Problem::Bitmap)]),
    ("a short bitmap", |b| resize(&*b.upper, &bitmap_of(&*b.upper, "s"), 100), &[damage("s", Problem::Bitmap)]),
    (
        "a cut sector after a clean end",
        |b| overwrite(&*b.upper, &bitmap_of(&*b.upper, "s"), 28, |byte| *byte ^= 1),
        &[damage("s", Problem::Bitmap)],
    ),
    (
        "a cut sector after an unclean end",
        |b| {
            overwrite(&*b.upper, &bitmap_of(&*b.upper, "s"), 28, |byte| *byte ^= 1);
            put(&*b.upper, ".poolfs/open", b"");
        },
        &[mended("s", Problem::BitmapCut), mended(".poolfs/open", Problem::UncleanEnd)],
    ),
    (
        "blocks beyond the file after an unclean end",
        |b| {
            overwrite(&*b.upper, &bitmap_of(&*b.upper, "s"), 200, |byte| *byte ^= 1);
            put(&*b.upper, ".poolfs/open", b"");
        },
        &[damage("s", Problem::Bitmap), mended(".poolfs/open", Problem::UncleanEnd)],
    ),
    (
        "a broken bitmap that was not promised",
        |b| {
            overwrite(&*b.upper, &bitmap_of(&*b.upper, "s"), 2, |byte| *byte ^= 1);
            set(&*b.upper, "s", SKETCH, &record_with(&*b.upper, "s", 6, &[0]));
        },
        &[mended("s", Problem::BitmapUnpromised)],
    ),
    (
        "another file's bitmap",
        |b| {
            let bytes = get(&*b.upper, &bitmap_of(&*b.upper, "hard")).unwrap();
            write_at(&*b.upper, &bitmap_of(&*b.upper, "s"), 0, &bytes);
        },
        &[damage("s", Problem::Bitmap)],
    ),
    (
        "a copied sketch",
        |b| {
            put(&*b.upper, "t", &[0; 9 * BLOCK]);
            for attribute in [ORIGIN, SKETCH, METACOPY] {
                set(&*b.upper, "t", attribute, &value(&*b.upper, "s", attribute));
            }
        },
        &[damage("t", Problem::Bitmap)],
    ),
    ("a changed lower file", |b| write_at(&*b.lowers[0], "s", 9 * 4096, b"x"), &[damage("s", Problem::Lower)]),
    ("a missing lower file", |b| unlink(&*b.lowers[0], "s"), &[damage("s", Problem::Lower)]),
    (
        "marks that say nothing",
        |b| {
            for (path, attribute, value) in [
                ("e", "trusted.overlay.opaque", "z"),
                ("e", "trusted.overlay.redirect", "a/../b"),
                ("e", "trusted.overlay.impure", ""),
                ("hard", "trusted.overlay.whiteout", ""),
                ("gone", "trusted.overlay.whiteout", "x"),
                ("hard", "trusted.overlay.opaque", "y"),
                ("e", SKETCH, ""),
            ] {
                set(&*b.upper, path, attribute, value.as_bytes());
            }
        },
        &[damage("", Problem::Mark); 7],
    ),
    (
        "files where directories are to be",
        |b| {
            for place in ["bitmaps", "index"] {
                let from = node(&*b.upper, ".poolfs").unwrap();
                let (old, aside) = (name(place), format!("{place}-aside"));
                b.upper.rename(ROOT, from, old, from, name(&aside), RenameFlags::empty()).unwrap();
                put(&*b.upper, &format!(".poolfs/{place}"), b"");
            }
        },
        &[
            damage(".poolfs/bitmaps", Problem::Stranger),
            damage(".poolfs/index", Problem::Stranger),
            damage("s", Problem::Bitmap),
            damage("hard", Problem::Bitmap),
            damage("hard", Problem::Links),
        ],
    ),
];

#[test]
fn every_single_thing_is_found_and_repaired_where_that_is_safe() {
    for (what, change, expected) in CASES {
        let branches = image();
        let (_, found) = check(branches.upper.clone(), Some(&branches.lowers), false);
        assert!(found.is_empty(), "before: {found:?}");
        change(&branches);
        let before = fingerprint(&*branches.upper);
        let (_, found) = check(branches.upper.clone(), Some(&branches.lowers), false);
        assert!(fingerprint(&*branches.upper) == before, "{what}: something was written");
        let (checked, mut repaired) = check(branches.upper.clone(), Some(&branches.lowers), true);
        for (path, problem, outcome) in *expected {
            let fits = |found: &Found| found.0.starts_with(path) && found.1 == *problem;
            // What only a repair can find out to be damage is told as repairable before.
            assert!(found.iter().any(&fits), "{what}: {problem:?} is not among {found:?}");
            let at = repaired.iter().position(|found| fits(found) && found.2 == *outcome);
            let at = at.unwrap_or_else(|| panic!("{what}: {problem:?} is not {outcome:?} in {repaired:?}"));
            repaired.swap_remove(at);
        }
        assert!(repaired.is_empty(), "{what}: also {repaired:?}");
        let is_repaired = expected.iter().all(|(_, _, outcome)| *outcome == Outcome::Repaired);
        assert_eq!(checked.tally.nothing_left(), is_repaired, "{what}");
        let (_, left) = check(branches.upper.clone(), Some(&branches.lowers), false);
        let damaged = expected.iter().filter(|(_, _, outcome)| *outcome == Outcome::Damage).count();
        assert_eq!(left.len(), damaged, "{what}: {left:?}");
    }
}

#[test]
fn no_changed_byte_of_a_record_an_origin_or_a_bitmap_is_missed() {
    let reference = image();
    let bitmap = bitmap_of(&*reference.upper, "s");
    for is_unclean in [false, true] {
        let found = |change: &dyn Fn(&Branches), what: &str| {
            let branches = &reference;
            let attributes = [SKETCH, ORIGIN].map(|attribute| value(&*branches.upper, "s", attribute));
            let bytes = get(&*branches.upper, &bitmap).unwrap();
            change(branches);
            if is_unclean {
                put(&*branches.upper, ".poolfs/open", b"");
            }
            let (_, found) = check(branches.upper.clone(), Some(&branches.lowers), false);
            assert!(found.iter().any(|(path, ..)| path == "s"), "{what}: {found:?}");
            if is_unclean {
                unlink(&*branches.upper, ".poolfs/open");
            }
            for (attribute, value) in [SKETCH, ORIGIN].iter().zip(attributes) {
                set(&*branches.upper, "s", attribute, &value);
            }
            write_at(&*branches.upper, &bitmap, 0, &bytes);
        };
        for attribute in [SKETCH, ORIGIN] {
            for at in 0..value(&*reference.upper, "s", attribute).len() {
                let change = |branches: &Branches| {
                    let mut bytes = value(&*branches.upper, "s", attribute);
                    bytes[at] ^= 1 << (at % 8);
                    set(&*branches.upper, "s", attribute, &bytes);
                };
                found(&change, &format!("byte {at} of {attribute}"));
            }
        }
        for at in 0..get(&*reference.upper, &bitmap).unwrap().len() {
            let change = |b: &Branches| overwrite(&*b.upper, &bitmap, at, |byte| *byte ^= 1 << (at % 8));
            found(&change, &format!("byte {at} of the bitmap"));
        }
    }
}

/// Deep, wide, and with attributes as large as they can be, on a real directory.
#[test]
fn hostile_trees_are_checked() {
    let top = tempfile::tempdir().expect("a directory");
    let open = |read_only| {
        Local::open(top.path(), LocalOptions { read_only, ..LocalOptions::default() }).expect("the directory opens")
    };
    let local = open(false);
    let mut directory = NodeId::ROOT;
    for _ in 0..2000 {
        directory = local.mkdir(ROOT, directory, name("d"), 0o755).expect("made").node;
    }
    let deepest = local.mknod(ROOT, directory, name("f"), FileType::Regular, 0o600, 0).expect("made").node;
    local.setxattr(ROOT, deepest, SKETCH.as_bytes(), &[0xff; 2000], XattrFlags::empty()).expect("set");
    fs::create_dir(top.path().join("wide")).expect("made");
    for number in 0..10_000 {
        fs::write(top.path().join(format!("wide/{number}")), b"").expect("written");
    }
    for (link, target) in [("loop", "loop"), ("up", ".."), ("etc", "/etc/passwd")] {
        std::os::unix::fs::symlink(target, top.path().join(link)).expect("a link");
    }
    set(&*local, "loop", ORIGIN, &[b'P'; 2000]);
    set(&*local, "wide/7", METACOPY, &[1; 1500]);
    drop(local);
    let (checked, found) = check(open(true), None, false);
    let deep = format!("{}...", "d/".repeat(512));
    let mut expected = vec![
        (deep, Problem::Record, Outcome::Damage),
        ("loop".to_owned(), Problem::Origin, Outcome::Damage),
        ("wide/7".to_owned(), Problem::Mark, Outcome::Damage),
        ("wide/7".to_owned(), Problem::MetacopyLeft, Outcome::Repairable),
    ];
    let mut found = found;
    let order = |found: &Found| (found.0.clone(), found.1.name());
    found.sort_by_key(order);
    expected.sort_by_key(order);
    assert_eq!(found, expected);
    assert_eq!((checked.objects, checked.sketches), (2001 + 10_001 + 3, 1));
    // The directory cannot be removed by its path.
    let _ = Opened(open(false));
}

/// Empties a tree that is too deep for paths.
struct Opened(Arc<Local>);

impl Drop for Opened {
    fn drop(&mut self) {
        let mut way = vec![NodeId::ROOT];
        while let Ok(entry) = self.0.lookup(ROOT, *way.last().expect("some"), name("d")) {
            way.push(entry.node);
        }
        let _ = self.0.unlink(ROOT, *way.last().expect("some"), name("f"));
        for pair in way.windows(2).rev() {
            let _ = self.0.rmdir(ROOT, pair[0], name("d"));
        }
    }
}

#[test]
fn a_check_without_repair_needs_no_branch_that_can_be_written() {
    let top = tempfile::tempdir().expect("a directory");
    let below = file_below();
    let open = |read_only| {
        Local::open(top.path(), LocalOptions { read_only, ..LocalOptions::default() }).expect("the directory opens")
    };
    let union = open_over(open(false), std::slice::from_ref(&below)).unwrap();
    write_at(&*union, "f", 4096, b"moved");
    fsync(&*union, "f");
    close(union);
    fs::write(top.path().join(".poolfs/open"), b"").expect("written");
    let (checked, found) = check(open(true), Some(std::slice::from_ref(&below)), false);
    assert_eq!((checked.sketches, found.len()), (1, 1));
}
