//! Tests of the cache: the suites that every layer must pass, and the tests of what is specific to a cache.

mod bounds;
mod coherence;
mod content_first;
mod contract;
mod crash_recovery;
mod deferred;
mod durability;
mod fault;
mod keepers;
mod leases;
mod leaving;
mod races;
mod segments;
mod shortage;
mod stress;
mod support;
mod texts;
