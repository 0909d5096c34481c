//! Containers: a root filesystem that is a union over an image's layers, run by an OCI runtime.
//!
//! A container has a directory in the state: its record, its upper branch (kept until it is removed), its log, and while it runs its
//! mounted root and its bundle. One process watches over it from before the mount to after the unmount: the command itself in the
//! foreground, a monitor when detached. A command that finds that process dead cleans up in its stead.

mod commands;
mod create;
mod ended;
mod monitor;
mod record;
mod runtime;
mod seccomp;
mod spec;
mod supervise;
mod user;

pub use commands::{list, logs, remove, stop};
pub use create::{START_NAME, run};
pub use ended::with_ended_root;
pub use monitor::watch;
pub use record::ContainerRecord;
pub use runtime::{find_program, tie};

use std::path::{Path, PathBuf};

/// The upper branch of the container whose directory this is.
pub fn upper_of(directory: &Path) -> PathBuf {
    supervise::Places::of(directory).upper
}
