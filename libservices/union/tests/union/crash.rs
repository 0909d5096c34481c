//! Crash tests: power is cut after every change of the upper branch, and the union must then show an allowed state.

use crate::exchange::open_without_exchange;
use crate::script;
use crate::support::*;
use poolfs_bcow::{Bcow, BcowConfig, Layout};
use poolfs_cache::{Cache, CacheConfig, CachePool};
use poolfs_libservice::Recorder;
use poolfs_libservice::types::{NodeId, OpenFlags, RenameFlags, SetAttributes};
use poolfs_libservice::{Libservice, Memory, Result};
use poolfs_union::{Lower, Union, UnionConfig};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: usize = 4096;
/// Sizes and offsets are whole sectors, the unit in which the recorder loses bytes.
const SECTOR: u64 = 512;
/// Every content of a file that may survive: since the last fsync, oldest first.
type History = Vec<Vec<u8>>;

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

fn lower() -> Arc<Memory> {
    let lower = Memory::new();
    put(&*lower, "f", &(0..9 * BLOCK + 1024).map(|at| (at / 512) as u8).collect::<Vec<_>>());
    lower
}

/// One random change of `f`; returns the new content, and whether it is durable now.
fn step(union: &dyn Libservice, random: &mut Random, content: &[u8]) -> (Vec<u8>, bool) {
    let mut content = content.to_vec();
    let handle = open(union, "f", OpenFlags::READ_WRITE).unwrap();
    let mut durable = false;
    match random.below(8) {
        0 | 1 => {
            union.fsync(ROOT, handle, poolfs_libservice::Durability::All).unwrap();
            durable = true;
        }
        2 => {
            let size = SECTOR * random.below(12 * 8);
            let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
            union.setattr(ROOT, node(union, "f").unwrap(), &changes, None).unwrap();
            content.resize(size as usize, 0);
        }
        3 => {
            let changes = SetAttributes { permissions: Some(0o640), ..SetAttributes::default() };
            union.setattr(ROOT, node(union, "f").unwrap(), &changes, None).unwrap();
        }
        _ => {
            let offset = (SECTOR * random.below(11 * 8)) as usize;
            let most = [1, 10, 40][random.below(3) as usize];
            let length = (SECTOR * (1 + random.below(most))) as usize;
            let data = vec![random.below(256) as u8; length];
            assert_eq!(union.write(ROOT, handle, offset as u64, &data).unwrap().count, length);
            if content.len() < offset + length {
                content.resize(offset + length, 0);
            }
            content[offset..offset + length].copy_from_slice(&data);
        }
    }
    union.release(handle);
    (content, durable)
}

fn sector(content: &[u8], at: usize) -> &[u8] {
    content.get(at..content.len().min(at + 512)).unwrap_or(&[])
}

/// Each byte shown must be one that some allowed content has there; and the size lie among theirs (a write that grows the
/// file may have come in part).
fn allowed(shown: &[u8], history: &History, what: &str) {
    let sizes = || history.iter().map(Vec::len);
    let among = sizes().min().is_some_and(|least| least <= shown.len()) && sizes().max() >= Some(shown.len());
    assert!(among, "{what}: size {}", shown.len());
    for from in (0..shown.len()).step_by(SECTOR as usize) {
        let seen = sector(shown, from);
        if history.iter().any(|content| sector(content, from) == seen) {
            continue;
        }
        for (at, &byte) in seen.iter().enumerate() {
            // A part beyond a content's end is a hole: zeros.
            let fits = |content: &Vec<u8>| content.get(from + at).copied().unwrap_or(0) == byte;
            assert!(history.iter().any(fits) || byte == 0 && history.len() > 1, "{what}: byte {} is {byte}", from + at);
        }
    }
}

/// Opens a union over a disk, with what is between the two.
type Open = fn(Arc<dyn Libservice>, &[Arc<Memory>]) -> Result<Arc<Union>>;

/// Over the layer that stores sketches compactly, as it is opened after a crash.
fn open_compact(disk: Arc<dyn Libservice>, lowers: &[Arc<Memory>]) -> Result<Arc<Union>> {
    let config = BcowConfig { layout: Some(Layout::Space), flush_interval: Duration::ZERO, ..BcowConfig::new(disk) };
    let bcow = Bcow::new(config);
    bcow.repair_all().expect("nothing is damaged");
    open_over(bcow, lowers)
}

/// Over a cache that brings to disk at once whatever is not on hold.
fn open_journaled(disk: Arc<dyn Libservice>, lowers: &[Arc<Memory>]) -> Result<Arc<Union>> {
    let restless =
        CacheConfig { expire: Duration::ZERO, tick: Duration::from_micros(50), ..CacheConfig::with_limit(1 << 20) };
    let pool = CachePool::new(restless).expect("a pool");
    let lower = |(at, layer): (usize, &Arc<Memory>)| Lower {
        layer_id: format!("layer-{at}"),
        layer: layer.clone() as Arc<dyn Libservice>,
        is_union: false,
    };
    let config = UnionConfig::new(Cache::new(&pool, disk), lowers.iter().enumerate().map(lower).collect());
    Union::open(UnionConfig { journal_bytes: 400, flush_interval: Duration::ZERO, ..config })
}

#[test]
fn content_survives_as_promised() {
    content_survives(60, open_over);
}

#[test]
fn content_stored_compactly_survives_as_promised() {
    content_survives(30, open_compact);
}

#[test]
fn content_survives_as_promised_while_a_journal_is_kept_back() {
    content_survives(20, open_journaled);
}

/// The bytes of journals on a disk.
fn journal_bytes(disk: &dyn Libservice) -> u64 {
    let names = node(disk, ".poolfs").map_or(Vec::new(), |directory| list(disk, directory));
    let names = names.iter().map(|(name, _)| String::from_utf8_lossy(name)).filter(|name| name.starts_with("journal-"));
    names.map(|name| stat(disk, &format!(".poolfs/{name}")).size).sum()
}

fn content_survives(seeds: u64, open_over: Open) {
    for seed in 0..seeds {
        let below = lower();
        let recorder = Recorder::new();
        let mut random = Random(seed);
        let mut content = get(&*below, "f").unwrap();
        let mut history: History = vec![content.clone()];
        // For each number of changes: what may be seen when exactly so many reached the disk.
        let mut states: Vec<(usize, usize, History)> = Vec::new();
        let union = open_over(recorder.clone(), std::slice::from_ref(&below)).unwrap();
        for _ in 0..12 {
            let before = recorder.len();
            let (next, durable) = step(&*union, &mut random, &content);
            content = next;
            history.push(content.clone());
            states.push((before, recorder.len(), history.clone()));
            if durable {
                history = vec![content.clone()];
            }
        }
        let end = recorder.len();
        for (step, (from, to, history)) in states.iter().enumerate() {
            for count in *from..=*to.min(&end) {
                // The last change was whole; the next one is the next step's.
                for torn in [false, true].into_iter().filter(|&torn| !torn || count < *to) {
                    let disk = recorder.crashed(count, seed ^ count as u64);
                    if torn {
                        recorder.tear(&disk, count, seed * 37 + count as u64 * 11);
                    }
                    let what = format!("seed {seed}, step {step}, after change {count}, torn {torn}");
                    assert_eq!(journal_bytes(&*disk), 0, "{what}: it says of data that it is there");
                    let union = open_over(disk, std::slice::from_ref(&below)).unwrap();
                    let shown = get(&*union, "f").unwrap_or_else(|error| panic!("{what}: {error}"));
                    allowed(&shown, history, &what);
                }
            }
        }
        // The promise proper: right after an fsync nothing is lost.
        for (from, to, history) in &states {
            let next = states.iter().find(|(start, ..)| start == to);
            if next.is_some_and(|(_, _, later)| later.len() == 2) && from < to {
                let union = open_over(recorder.crashed(*to, seed), std::slice::from_ref(&below)).unwrap();
                assert_eq!(Some(&get(&*union, "f").unwrap()), history.last(), "seed {seed} after change {to}");
            }
        }
    }
}

/// All paths with what they are.
fn tree(layer: &dyn Libservice) -> BTreeMap<String, String> {
    fingerprint(layer)
        .lines()
        .map(|line| {
            let (path, rest) = line.split_once(' ').expect("path and more");
            let kind = if rest.contains("file_type: Directory") { "directory" } else { "file" };
            let content = rest.rsplit_once("} ").map_or("", |(_, tail)| tail);
            (path.to_string(), format!("{kind} {}", if kind == "file" { content } else { "" }))
        })
        .collect()
}

type Step<'a> = Box<dyn Fn(&dyn Libservice) + 'a>;

fn rename_step(from: &'static str, to: &'static str, flags: RenameFlags) -> Step<'static> {
    Box::new(move |layer| {
        let ((old, old_name), (new, new_name)) = (split(layer, from), split(layer, to));
        layer.rename(ROOT, old, old_name, new, new_name, flags).unwrap();
    })
}

fn unlink_step(path: &'static str) -> Step<'static> {
    Box::new(move |layer| {
        let (parent, last) = split(layer, path);
        layer.unlink(ROOT, parent, last).unwrap();
    })
}

fn rmdir_step(path: &'static str) -> Step<'static> {
    Box::new(move |layer| {
        let (parent, last) = split(layer, path);
        layer.rmdir(ROOT, parent, last).unwrap();
    })
}

#[test]
fn names_survive_whole() {
    names_survive(open_over);
}

#[test]
fn names_survive_whole_where_none_are_exchanged() {
    names_survive(open_without_exchange);
}

fn names_survive(open_over: Open) {
    let below = Memory::new();
    for directory in ["d", "d/e", "t", "empty"] {
        mkdir(&*below, directory);
    }
    for file in ["a", "b", "c", "d/x", "d/y", "d/e/z"] {
        put(&*below, file, file.as_bytes());
    }
    let hard = node(&*below, "a").unwrap();
    below.link(ROOT, hard, NodeId::ROOT, name("linked")).unwrap();
    let none = RenameFlags::empty();
    let steps: Vec<Step<'_>> = vec![
        unlink_step("b"),
        Box::new(|layer| put(layer, "b", b"")),
        rename_step("c", "d/c", none),
        rename_step("d/x", "d/y", none),
        rename_step("d", "t/d", none),
        Box::new(|layer| mkdir(layer, "d")),
        rename_step("a", "t/a", none),
        unlink_step("linked"),
        rename_step("t/d/e", "empty", none),
        rename_step("t/a", "empty/z", RenameFlags::EXCHANGE),
        rmdir_step("d"),
        rename_step("empty", "d", none),
        unlink_step("d/z"),
        rmdir_step("d"),
    ];
    let recorder = Recorder::new();
    let union = open_over(recorder.clone(), std::slice::from_ref(&below)).unwrap();
    let mut marks = vec![(recorder.len(), tree(&*union))];
    for step in &steps {
        step(&*union);
        marks.push((recorder.len(), tree(&*union)));
    }
    for (at, pair) in marks.windows(2).enumerate() {
        let ((from, before), (to, after)) = (&pair[0], &pair[1]);
        for count in *from..=*to {
            let disk = recorder.crashed(count, count as u64);
            let shown = tree(&*open_over(disk, std::slice::from_ref(&below)).unwrap());
            let mut both = before.clone();
            both.extend(after.clone());
            let replaced = shown.iter().all(|(path, what)| [before, after].iter().any(|t| t.get(path) == Some(what)));
            let complete = after.iter().filter(|(path, what)| before.get(*path) == Some(what));
            let kept = complete.clone().all(|(path, what)| shown.get(path) == Some(what));
            assert!(
                shown == *before || shown == *after || replaced && kept && shown.len() + 1 >= after.len(),
                "step {at}, change {count}:\nbefore {before:#?}\nshown {shown:#?}\nafter {after:#?}"
            );
        }
        let last = tree(&*open_over(recorder.crashed(*to, 7), std::slice::from_ref(&below)).unwrap());
        assert_eq!(last, *after, "step {at} is done");
    }
}

/// Power is cut after every change of many random ones: whatever is left can be listed, read and removed.
#[test]
fn any_crash_leaves_a_whole_tree() {
    crashes_leave_whole_trees(open_over);
}

#[test]
fn any_crash_leaves_a_whole_tree_where_no_names_are_exchanged() {
    crashes_leave_whole_trees(open_without_exchange);
}

fn crashes_leave_whole_trees(open_over: Open) {
    for seed in 0..40u64 {
        let below = script::lower();
        let recorder = Recorder::new();
        let union = open_over(recorder.clone(), std::slice::from_ref(&below)).unwrap();
        let mut script = script::Script::new(seed);
        let mut history = Vec::new();
        for step in 0..20 {
            let before = recorder.len();
            history.push(script.step(&*union));
            for count in before..=recorder.len() {
                let what = format!(
                    "seed {seed}, step {step}, change {} of {}:\n{}\n",
                    count - before,
                    recorder.len() - before,
                    history.join("\n")
                );
                let disk = recorder.crashed(count, seed ^ count as u64);
                let union = open_over(disk.clone(), std::slice::from_ref(&below)).unwrap();
                script::remove_all(&*union, &what);
                close(union);
                let union = open_over(disk.clone(), std::slice::from_ref(&below)).unwrap();
                assert!(ls(&*union, "").is_empty(), "{what}: something is there again");
                script::nothing_left(&*disk, &what);
            }
        }
    }
}

/// Names deeper than an origin can tell are copied whole: the copy is on disk before it hides the lower file.
#[test]
fn a_file_that_is_copied_whole_survives() {
    let below = Memory::new();
    let mut path = String::new();
    for _ in 0..5 {
        path.push_str(&"d".repeat(250));
        mkdir(&*below, &path);
        path.push('/');
    }
    path.push('f');
    let content = vec![7; 3 * BLOCK + 100];
    put(&*below, &path, &content);
    let recorder = Recorder::new();
    let union = open_over(recorder.clone(), std::slice::from_ref(&below)).unwrap();
    let before = recorder.len();
    let changes = SetAttributes { permissions: Some(0o600), ..SetAttributes::default() };
    union.setattr(ROOT, node(&*union, &path).unwrap(), &changes, None).unwrap();
    for (count, seed) in (before..=recorder.len()).flat_map(|count| (0..4).map(move |seed| (count, seed))) {
        let union = open_over(recorder.crashed(count, seed), std::slice::from_ref(&below)).unwrap();
        assert!(get(&*union, &path).unwrap() == content, "after change {count} of {}", recorder.len());
    }
}

#[test]
fn a_crash_while_the_first_union_opens_is_no_harm() {
    let below = lower();
    let recorder = Recorder::new();
    drop(open_over(recorder.clone(), std::slice::from_ref(&below)).unwrap());
    for (count, seed) in (0..=recorder.len()).flat_map(|count| (0..8).map(move |seed| (count, seed))) {
        let disk = recorder.crashed(count, seed);
        let union = open_over(disk, std::slice::from_ref(&below));
        assert!(union.is_ok(), "after change {count}: {}", union.err().unwrap());
    }
}

#[test]
fn an_unfinished_format_is_completed_and_that_of_another_release_refused() {
    let format = |branches: &Branches| get(&*branches.upper, ".poolfs/format").unwrap();
    for left in [&b""[..], b"poolfs", &[0; 15], b"poolfs-union \0\0"] {
        let branches = Branches::empty(1);
        mkdir(&*branches.upper, ".poolfs");
        put(&*branches.upper, ".poolfs/format", left);
        close(branches.open());
        assert_eq!(format(&branches), b"poolfs-union 1\n", "{}", left.escape_ascii());
    }
    for foreign in [&b"poolfs-union 2\n"[..], b"x", b"poolfs-union 1\nx", &[0; 16]] {
        let branches = Branches::empty(1);
        mkdir(&*branches.upper, ".poolfs");
        put(&*branches.upper, ".poolfs/format", foreign);
        let error = open_over(branches.upper.clone(), &branches.lowers).map(|_| ()).expect_err("another release's");
        assert!(error.to_string().contains("another release"), "{error}");
        assert_eq!(format(&branches), foreign);
    }
}
