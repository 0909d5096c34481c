//! Errors of requests to the host.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// So many processes are named in a message.
const NAMED_MAX: usize = 10;

/// A request to the host failed.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The kernel refused an operation on a path.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted, as a verb.
        action: &'static str,
        /// On which path.
        path: PathBuf,
        /// The kernel's reason.
        source: std::io::Error,
    },
    /// The kernel refused an operation on a process.
    #[error("cannot {action} process {pid}: {source}")]
    Process {
        /// What was attempted, as a verb.
        action: &'static str,
        /// On which process.
        pid: u32,
        /// The kernel's reason.
        source: std::io::Error,
    },
    /// Text of the kernel or of a user that cannot be understood.
    #[error("{what} is not understood: {text:?}")]
    Malformed {
        /// What it should have been.
        what: &'static str,
        /// What it was.
        text: String,
    },
    /// A pool of the same name, of another state directory, has the control groups.
    #[error("the control groups of pool {pool} are those of the pool of this name in {state}")]
    OthersGroups {
        /// The name of both.
        pool: String,
        /// The other's state directory.
        state: String,
    },
    /// Processes are in control groups of this name, and the state directory whose they are is gone.
    #[error(
        "in the control groups of pool {pool} run processes of a pool whose state directory {state} is not there, or was made anew: {}",
        listed(members)
    )]
    LeftGroups {
        /// The name of both.
        pool: String,
        /// Where the state directory was.
        state: String,
        /// The processes.
        members: BTreeSet<u32>,
    },
    /// The host has no control groups that poolfs can use.
    #[error("no usable control groups are mounted")]
    NoControlGroups,
}

impl HostError {
    /// An operation on a path that the kernel refused.
    pub fn io(action: &'static str, path: &Path, source: impl Into<std::io::Error>) -> Self {
        HostError::Io { action, path: path.to_path_buf(), source: source.into() }
    }

    /// Whether the reason is that something does not exist.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(self, HostError::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound)
    }

    /// Whether the reason is that the kernel, or a filesystem, cannot do such a thing.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        matches!(self, HostError::Io { source, .. } if source.raw_os_error() == Some(rustix::io::Errno::OPNOTSUPP.raw_os_error()))
    }
}

fn listed(members: &BTreeSet<u32>) -> String {
    let name = |pid: &u32| if *pid == 0 { "some of other process namespaces".to_owned() } else { pid.to_string() };
    let named: Vec<String> = members.iter().take(NAMED_MAX).map(name).collect();
    let others = members.len().saturating_sub(NAMED_MAX);
    if others == 0 { named.join(", ") } else { format!("{} and {others} others", named.join(", ")) }
}

/// The result of asking the host.
pub type Result<T> = std::result::Result<T, HostError>;
