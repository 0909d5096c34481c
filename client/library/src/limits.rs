//! How many instances and segments a process uses at a time.

use poolfs_ipc::area::COUNTED_MAX;

/// Instances one process can talk to at a time; with further ones the kernel talks.
pub const INSTANCES_MAX: usize = 16;

/// Segments one session has at a time: a handle has its place by its number.
pub const SEGMENTS_MAX: usize = COUNTED_MAX;
