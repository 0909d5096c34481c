//! The conformance suite and the random-operations test over the cache, with ample memory and with hardly any.

use poolfs_cache::{Cache, CacheConfig, CachePool};
use poolfs_libservice::random_operations::Comparison;
use poolfs_libservice::{Coherence, Libservice, Memory, conformance};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The smallest cache that can keep what the operations hold back from write-back at one time.
const TINY: u64 = 1 << 20;
/// Less than some single writes and reads.
const MINUTE: u64 = 256 << 10;
const AMPLE: u64 = 64 << 20;

/// Four seeds, or as many as a longer run asks for.
fn seeds(first: u64) -> std::ops::Range<u64> {
    let count = std::env::var("POOLFS_TEST_SEEDS").ok().and_then(|count| count.parse().ok()).unwrap_or(4);
    first..first + count
}

/// Others may change what is below, and do not.
const SHARED: [Coherence; 3] = [Coherence::Leased, Coherence::Validated, Coherence::Timed(Duration::from_secs(1000))];

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
    let pool = pool(MINUTE);
    conformance::run(&|| Cache::new(&pool, Memory::new()));
}

#[test]
fn conforms_over_itself() {
    let pool = pool(AMPLE);
    conformance::run(&|| Cache::new(&pool, Cache::new(&pool, Memory::new())));
}

#[test]
fn conforms_over_a_layer_that_others_change() {
    let pool = pool(AMPLE);
    for coherence in SHARED {
        conformance::run(&|| Cache::new(&pool, Memory::new().view(coherence)));
    }
}

#[test]
fn random_operations_over_a_layer_that_others_change() {
    let pool = pool(AMPLE);
    for seed in seeds(9001) {
        for coherence in SHARED {
            Comparison::new(seed, 2000).run(Cache::new(&pool, Memory::new().view(coherence)));
        }
    }
}

#[test]
fn random_operations_with_ample_memory() {
    let pool = pool(AMPLE);
    for seed in seeds(1) {
        Comparison::new(seed, 5000).run(Cache::new(&pool, Memory::new()));
    }
    assert!(pool.statistics().used_bytes <= AMPLE);
}

#[test]
fn random_operations_with_tiny_memory() {
    let pool = pool(TINY);
    for seed in seeds(1001) {
        Comparison::new(seed, 5000).run(Cache::new(&pool, Memory::new()));
    }
    assert!(pool.statistics().used_bytes <= TINY);
    assert!(pool.statistics().evictions > 0, "nothing was evicted: the test shows nothing");
}

#[test]
fn random_operations_while_everything_is_written_back_and_dropped() {
    let pool = pool(AMPLE);
    for seed in seeds(2001) {
        let cache = Cache::new(&pool, Memory::new());
        let dropped = Arc::clone(&cache);
        let disturb = move |layer: &dyn Libservice| {
            layer.sync().unwrap();
            dropped.drop_clean();
        };
        Comparison::new(seed, 5000).disturbing(37, disturb).run(cache);
    }
}

#[test]
fn random_operations_while_the_flushers_never_rest() {
    let restless = CacheConfig {
        expire: Duration::ZERO,
        tick: Duration::from_micros(200),
        small_file_bytes: 8192,
        idle_nodes_max: 4,
        names_max: 8,
        descriptors_max: 2,
        ..CacheConfig::with_limit(TINY)
    };
    let pool = CachePool::new(restless).unwrap();
    for seed in seeds(3001) {
        let memory = Memory::new();
        let cache = Cache::new(&pool, Arc::clone(&memory) as Arc<dyn Libservice>);
        Comparison::new(seed, 5000).run(Arc::clone(&cache) as Arc<dyn Libservice>);
        drop(cache);
        // A flusher that was at work may need a moment to close what it has open.
        let start = Instant::now();
        while memory.outstanding() != (0, 0) && start.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(memory.outstanding(), (0, 0), "seed {seed}");
    }
}
