//! Fuzz targets as ordinary functions: each takes bytes, and panics when the code under test breaks a promise.
//!
//! One file per target; `fuzz_targets/` has the programs. Begin with the target's file, or with [`run`], which runs one without libFuzzer.

#![forbid(unsafe_code)]

mod hostile_branch;
mod kernel_messages;
mod replay;
mod session_edge;
mod upper_branch;

pub use hostile_branch::{clear_ground, hostile_branch};
pub use kernel_messages::kernel_messages;
pub use replay::run;
pub use session_edge::session_edge;
pub use upper_branch::upper_branch;

/// Takes the first `count` bytes away, zeros where there are fewer.
fn take<const COUNT: usize>(bytes: &mut &[u8]) -> [u8; COUNT] {
    let count = COUNT.min(bytes.len());
    let (first, rest) = bytes.split_at(count);
    *bytes = rest;
    let mut taken = [0; COUNT];
    taken[..count].copy_from_slice(first);
    taken
}
