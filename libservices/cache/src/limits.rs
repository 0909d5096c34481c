//! Limits of what a cache keeps beside content: maps for clients, answers, and what clients are given.

use crate::blocks::BLOCK;

/// Most files of a pool that clients read by themselves at a time.
pub(crate) const VIEWS_MAX: usize = 1024;

/// Most holders remembered of a segment. Beyond that, the one who was first given it longest ago is forgotten; to be given it again changes
/// nothing about that.
pub(crate) const GIVEN_MAX: usize = 64;

/// Answers of all layers together, in bytes: one part in so many of the cache's memory, and never more than what serves the nodes that kernels
/// keep without using them.
const ANSWERS_PART: u64 = 8;
const ANSWERS_MAX: u64 = 16 << 20;

/// Bytes of answers with so large a cache.
pub(crate) fn answers_max(limit_bytes: u64) -> u64 {
    (limit_bytes / ANSWERS_PART).min(ANSWERS_MAX)
}

/// The pages of all maps, but for the first two of each, are one part in this many of the cache's limit. Files of which all is cached need one in 1024.
const MAPS_PART: u64 = 16;

/// Most pages of a pool that are divided.
pub(crate) fn pages_max(limit_bytes: u64) -> u64 {
    limit_bytes / MAPS_PART / BLOCK
}

/// What the process is counted for and the kernel cannot drop by itself, for as long as the cache is there.
pub(crate) type Weigh = dyn Fn() -> Option<u64> + Send + Sync;
