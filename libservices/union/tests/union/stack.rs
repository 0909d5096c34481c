//! The suites over the stack of the product: the union, a cache over each branch, real directories below.

use crate::support::fingerprint;
use poolfs_cache::{Cache, CacheConfig, CachePool};
use poolfs_libservice::random_operations::{Comparison, populate};
use poolfs_libservice::{Libservice, Memory, conformance};
use poolfs_local::{Local, LocalOptions};
use poolfs_union::{Lower, Union, UnionConfig};
use std::path::Path;
use std::sync::Arc;

fn cached(pool: &Arc<CachePool>, path: &Path, read_only: bool) -> Arc<dyn Libservice> {
    let local = Local::open(path, LocalOptions { read_only, ..LocalOptions::default() }).expect("the directory opens");
    Cache::new(pool, local)
}

fn stack(pool: &Arc<CachePool>, top: &Path) -> Arc<dyn Libservice> {
    let lowers = vec![Lower { layer_id: "base".into(), layer: cached(pool, &top.join("lower"), true) }];
    Union::open(UnionConfig::new(cached(pool, &top.join("upper"), false), lowers)).expect("the union opens")
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
        let stack = stack(&pool, top.path());
        places.lock().expect("no panic").push(top);
        stack
    });
}

#[test]
fn random_operations_over_the_stack() {
    for (seed, limit) in [(1, 64 << 20), (2, 1 << 20)] {
        let pool = CachePool::new(CacheConfig::with_limit(limit)).expect("a pool");
        let top = place();
        let lower = Local::open(&top.path().join("lower"), LocalOptions::default()).expect("the directory opens");
        populate(&*lower, seed, 60);
        let before = fingerprint(&*lower);
        let reference = Memory::new();
        populate(&*reference, seed, 60);
        Comparison::new(seed, 3000)
            .starting_from(reference)
            .remounting(400, |layer: Arc<dyn Libservice>| {
                drop(layer);
                stack(&pool, top.path())
            })
            .run(stack(&pool, top.path()));
        assert_eq!(fingerprint(&*lower), before, "the lower branch has changed");
    }
}
