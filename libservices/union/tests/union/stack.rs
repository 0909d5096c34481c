//! The suites over the product's stack: the union, a cache over each branch, real directories below.

use crate::script::{fill_lower, nothing_left, remove_all, tree};
use crate::support::*;
use crate::threads::change_at_once;
use poolfs_bcow::{Bcow, BcowConfig, Layout};
use poolfs_cache::{Cache, CacheConfig, CachePool};
use poolfs_libservice::random_operations::{Comparison, populate};
use poolfs_libservice::types::{NodeId, OpenFlags, RenameFlags, SetAttributes, SetTime, XattrFlags};
use poolfs_libservice::{Libservice, Memory, conformance};
use poolfs_local::{Local, LocalOptions};
use poolfs_union::{Lower, Union, UnionConfig};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

fn cached(pool: &Arc<CachePool>, path: &Path, read_only: bool) -> Arc<dyn Libservice> {
    let local = Local::open(path, LocalOptions { read_only, ..LocalOptions::default() }).expect("the directory opens");
    Cache::new(pool, local)
}

fn stack(pool: &Arc<CachePool>, top: &Path) -> Arc<Union> {
    let lowers =
        vec![Lower { layer_id: "base".into(), layer: cached(pool, &top.join("lower"), true), is_union: false }];
    Union::open(UnionConfig::new(cached(pool, &top.join("upper"), false), lowers)).expect("the union opens")
}

/// The same with an upper branch that stores sketches compactly.
fn compact_stack(pool: &Arc<CachePool>, top: &Path) -> Arc<Union> {
    stack_of_layout(pool, top, Layout::Space, true)
}

fn stack_of_layout(pool: &Arc<CachePool>, top: &Path, layout: Layout, all_files: bool) -> Arc<Union> {
    let local = Local::open(&top.join("upper"), LocalOptions::default()).expect("the directory opens");
    let bcow = Bcow::new(BcowConfig { layout: Some(layout), all_files, ..BcowConfig::new(local) });
    let lowers =
        vec![Lower { layer_id: "base".into(), layer: cached(pool, &top.join("lower"), true), is_union: false }];
    Union::open(UnionConfig::new(Cache::new(pool, bcow), lowers)).expect("the union opens")
}

fn place() -> tempfile::TempDir {
    let top = tempfile::tempdir().expect("a directory");
    for name in ["lower", "upper"] {
        std::fs::create_dir(top.path().join(name)).expect("made");
    }
    top
}

#[test]
fn conformance_of_the_stack() {
    let pool = CachePool::new(CacheConfig::with_limit(64 << 20)).expect("a pool");
    let places = std::sync::Mutex::new(Vec::new());
    conformance::run(&|| {
        let top = place();
        let stack: Arc<dyn Libservice> = stack(&pool, top.path());
        places.lock().expect("no panic").push(top);
        stack
    });
}

#[test]
fn conformance_of_the_compact_stack() {
    let pool = CachePool::new(CacheConfig::with_limit(64 << 20)).expect("a pool");
    let places = std::sync::Mutex::new(Vec::new());
    conformance::run(&|| {
        let top = place();
        let stack: Arc<dyn Libservice> = compact_stack(&pool, top.path());
        places.lock().expect("no panic").push(top);
        stack
    });
}

#[test]
fn random_operations_over_the_stack() {
    random_operations(&[(1, 64 << 20), (2, 1 << 20)], stack);
}

#[test]
fn random_operations_over_the_compact_stack() {
    random_operations(&[(3, 64 << 20), (4, 1 << 20)], compact_stack);
}

fn random_operations(runs: &[(u64, u64)], stack: fn(&Arc<CachePool>, &Path) -> Arc<Union>) {
    for &(seed, limit) in runs {
        let pool = CachePool::new(CacheConfig::with_limit(limit)).expect("a pool");
        let top = place();
        let lower = Local::open(&top.path().join("lower"), LocalOptions::default()).expect("the directory opens");
        populate(&*lower, seed, 60);
        let before = fingerprint(&*lower);
        let reference = Memory::new();
        populate(&*reference, seed, 60);
        let mut mounted = Remounted::default();
        let first = mounted.open(None, || stack(&pool, top.path()));
        Comparison::new(seed, 3000)
            .starting_from(reference)
            .remounting(400, |layer| mounted.open(Some(layer), || stack(&pool, top.path())))
            .run(first);
        assert_eq!(fingerprint(&*lower), before, "the lower branch has changed");
    }
}

/// The blocks on disk of the regular files in a tree.
fn blocks_of(directory: &Path) -> u64 {
    let (mut sectors, mut pending) = (0, vec![directory.to_path_buf()]);
    while let Some(directory) = pending.pop() {
        for entry in std::fs::read_dir(directory).expect("listed") {
            let entry = entry.expect("an entry");
            let attributes = entry.metadata().expect("attributes");
            if attributes.is_dir() {
                pending.push(entry.path());
            } else {
                sectors += attributes.blocks();
            }
        }
    }
    sectors * 512 / 4096
}

#[test]
fn a_touched_block_takes_three_of_the_upper_branch_in_every_form() {
    const FILES: u64 = 1000;
    let layouts = [None, Some(Layout::BySize(16 << 20)), Some(Layout::Performance), Some(Layout::Space)];
    for layout in layouts {
        let pool = CachePool::new(CacheConfig::with_limit(64 << 20)).expect("a pool");
        let top = place();
        for number in 0..FILES {
            let file = std::fs::File::create(top.path().join("lower").join(number.to_string())).expect("made");
            file.set_len(1 << 20).expect("grown");
        }
        let mount = || match layout {
            None => stack(&pool, top.path()),
            Some(layout) => stack_of_layout(&pool, top.path(), layout, false),
        };
        let union = mount();
        (0..FILES).for_each(|number| write_at(&*union, &number.to_string(), number % 256 * 4096 + 9, b"touched"));
        union.sync().expect("synced");
        close(union);
        let taken = blocks_of(&top.path().join("upper"));
        // Less would be sketches that do not say which block has moved. What the union keeps of itself takes one.
        let expected = 2 * FILES..=3 * FILES + 1;
        assert!(expected.contains(&taken), "{layout:?}: {taken} blocks for {FILES} files");
        let union = mount();
        for number in 0..FILES {
            let (at, mut seen) = (number % 256 * 4096 + 8, [1; 9]);
            let handle = open(&*union, &number.to_string(), OpenFlags::READ_ONLY).expect("opened");
            union.read(ROOT, handle, at, &mut seen).expect("read");
            union.release(handle);
            assert_eq!(&seen, b"\0touched\0", "{layout:?}: {number}");
        }
        close(union);
    }
}

/// Permissions of a file's capabilities: revision 2 with the effective bit, and CAP_NET_RAW.
const CAPABILITIES: [u8; 20] = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// A program keeps the rights of its file when something else about it changes.
#[test]
fn capabilities_survive_a_copy_up() {
    let top = place();
    let lower = Local::open(&top.path().join("lower"), LocalOptions::default()).expect("the directory opens");
    put(&*lower, "ping", &[1; 10_000]);
    let (file, attribute) = (node(&*lower, "ping").unwrap(), b"security.capability");
    lower.setxattr(ROOT, file, attribute, &CAPABILITIES, XattrFlags::empty()).unwrap();
    let pool = CachePool::new(CacheConfig::with_limit(1 << 20)).expect("a pool");
    let union = stack(&pool, top.path());
    let file = node(&*union, "ping").unwrap();
    let changes = SetAttributes { modified: Some(SetTime::Now), ..SetAttributes::default() };
    union.setattr(ROOT, file, &changes, None).unwrap();
    assert_eq!(union.getxattr(ROOT, file, attribute).unwrap(), CAPABILITIES);
    union.rename(ROOT, NodeId::ROOT, name("ping"), NodeId::ROOT, name("pong"), RenameFlags::empty()).unwrap();
    assert_eq!(union.getxattr(ROOT, file, attribute).unwrap(), CAPABILITIES);
}

#[test]
fn random_changes_at_once_over_the_stack() {
    for seed in 0..3 {
        let pool = CachePool::new(CacheConfig::with_limit(1 << 20)).expect("a pool");
        let top = place();
        let lower = Local::open(&top.path().join("lower"), LocalOptions::default()).expect("the directory opens");
        fill_lower(&*lower);
        drop(lower);
        let union = stack(&pool, top.path());
        change_at_once(&(union.clone() as Arc<dyn Libservice>), seed, 300);
        let what = format!("seed {seed}");
        let shown = tree(&*union, &what);
        close(union);
        let union = stack(&pool, top.path());
        assert_eq!(tree(&*union, &what), shown, "{what}: after a remount");
        remove_all(&*union, &what);
        close(union);
        let upper = Local::open(&top.path().join("upper"), LocalOptions::default()).expect("the directory opens");
        nothing_left(&*upper, &what);
    }
}
