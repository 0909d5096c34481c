//! The memory of a pool, as seen by everything that takes some of it besides the cache.

/// The memory of a pool.
pub trait PoolMemory: Send + Sync {
    /// So much is used from now on, which the cache does without.
    fn charge(&self, bytes: u64);

    /// It is used no more.
    fn discharge(&self, bytes: u64);

    /// So much is used from now on which the cache need not do without.
    fn grew(&self, bytes: u64) {
        let _ = bytes;
    }

    /// There is too little: nothing is to be given away that can be done without.
    fn is_short(&self) -> bool {
        false
    }
}
