//! Tests of the real process over real mounts, each in mount and process namespaces of its own, and the comparison of
//! our permission function with the kernel's.

mod access;
mod caches;
mod coherence;
mod endings;
mod harness;
mod in_flight;
mod kernel;
mod mounts;
mod queue;
mod sizes;
mod times;
mod trap;
