//! Tests of the real process over real mounts, each in mount and process namespaces of its own, and the comparison of our
//! permission function with the kernel's.

mod absent;
mod access;
#[path = "../../../ipc/tests/session/bare.rs"]
mod bare;
mod branches;
mod caches;
mod coherence;
mod confinement;
mod endings;
mod foreign;
mod harness;
mod idmapped;
mod in_flight;
mod kept;
mod kernel;
mod listings;
mod memory;
mod mounts;
mod over_rings;
mod posting_rights;
mod programs;
mod pruning;
mod queue;
mod shares;
mod sizes;
mod standstill;
mod stolen;
mod storms;
mod taken_away;
mod times;
mod traces;
mod transfers;
mod trap;
mod underway;
mod views;
