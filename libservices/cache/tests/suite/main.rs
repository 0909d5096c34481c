//! The cache judged by the suites that judge every layer, and by what only a cache can get wrong.

mod bounds;
mod content_first;
mod contract;
mod deferred;
mod durability;
mod fault;
mod keepers;
mod leases;
mod leaving;
mod races;
mod remains;
mod segments;
mod shortage;
mod stress;
mod support;
mod texts;
