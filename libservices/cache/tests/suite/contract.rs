//! The conformance suite and the random-operations test over the cache, with ample memory and with hardly any.

use poolfs_cache::{Cache, CacheConfig, CachePool};
use poolfs_libservice::random_operations::Comparison;
use poolfs_libservice::{Libservice, Memory, conformance};
use std::sync::Arc;

const TINY: u64 = 256 << 10;
const AMPLE: u64 = 64 << 20;

fn pool(limit_bytes: u64) -> Arc<CachePool> {
    CachePool::new(CacheConfig::with_limit(limit_bytes)).unwrap()
}

#[test]
fn conforms_with_ample_memory() {
    let pool = pool(AMPLE);
    conformance::run(&|| Cache::new(&pool, Memory::new()));
}

#[test]
fn conforms_with_tiny_memory() {
    let pool = pool(TINY);
    conformance::run(&|| Cache::new(&pool, Memory::new()));
}

#[test]
fn conforms_over_itself() {
    let pool = pool(AMPLE);
    conformance::run(&|| Cache::new(&pool, Cache::new(&pool, Memory::new())));
}

#[test]
fn random_operations_with_ample_memory() {
    let pool = pool(AMPLE);
    for seed in 1..5 {
        Comparison::new(seed, 5000).run(Cache::new(&pool, Memory::new()));
    }
    assert!(pool.statistics().used_bytes <= AMPLE);
}

#[test]
fn random_operations_with_tiny_memory() {
    let pool = pool(TINY);
    for seed in 11..15 {
        Comparison::new(seed, 5000).run(Cache::new(&pool, Memory::new()));
    }
    assert!(pool.statistics().used_bytes <= TINY);
    assert!(pool.statistics().evictions > 0, "nothing was evicted: the test shows nothing");
}

#[test]
fn random_operations_while_everything_is_written_back_and_dropped() {
    let pool = pool(AMPLE);
    for seed in 21..25 {
        let cache = Cache::new(&pool, Memory::new());
        let dropped = Arc::clone(&cache);
        let disturb = move |layer: &dyn Libservice| {
            layer.sync().unwrap();
            dropped.drop_clean();
        };
        Comparison::new(seed, 5000).disturbing(37, disturb).run(cache);
    }
}
