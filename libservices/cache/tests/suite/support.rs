//! Helper functions and layers shared by the tests.

use crate::fault::Fault;
use poolfs_cache::{Cache, CacheConfig, CachePool};
use poolfs_libservice::{Libservice, Memory};
use poolfs_types::{Caller, HandleId, Name, NodeId, OpenFlags};
use std::sync::Arc;
use std::time::Duration;

pub const ROOT: Caller = Caller::ROOT;

pub fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

/// A configuration whose flushers leave dirty data alone for the length of a test.
pub fn patient(limit_bytes: u64) -> CacheConfig {
    CacheConfig { expire: Duration::from_secs(3600), ..CacheConfig::with_limit(limit_bytes) }
}

pub struct Stack {
    pub pool: Arc<CachePool>,
    pub below: Arc<Fault>,
    pub cache: Arc<Cache>,
}

impl Stack {
    pub fn over(config: CacheConfig, memory: Arc<Memory>) -> Self {
        let pool = CachePool::new(config).unwrap();
        let below = Fault::over(memory);
        let cache = Cache::new(&pool, Arc::clone(&below) as Arc<dyn Libservice>);
        Self { pool, below, cache }
    }

    /// A second layer of the same pool.
    pub fn beside(&self) -> Self {
        let below = Fault::over(Memory::new());
        let cache = Cache::new(&self.pool, Arc::clone(&below) as Arc<dyn Libservice>);
        Self { pool: Arc::clone(&self.pool), below, cache }
    }

    pub fn new(config: CacheConfig) -> Self {
        Self::over(config, Memory::new())
    }

    pub fn create(&self, text: &str) -> (NodeId, HandleId) {
        let made = self.cache.create(&ROOT, NodeId::ROOT, name(text), 0o644, OpenFlags::READ_WRITE).unwrap();
        (made.0.node, made.1)
    }

    pub fn write(&self, handle: HandleId, offset: u64, data: &[u8]) {
        assert_eq!(self.cache.write(&ROOT, handle, offset, data).unwrap().count, data.len());
    }

    pub fn read(&self, handle: HandleId, offset: u64, length: usize) -> Vec<u8> {
        let mut buffer = vec![0xee; length];
        let count = self.cache.read(&ROOT, handle, offset, &mut buffer).unwrap();
        buffer.truncate(count);
        buffer
    }
}

/// Bytes that tell their place and version.
pub fn pattern(seed: u64, offset: u64, length: usize) -> Vec<u8> {
    (offset..offset + length as u64).map(|at| (at.wrapping_mul(31) ^ (at >> 9) ^ seed.wrapping_mul(97)) as u8).collect()
}
