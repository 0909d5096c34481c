//! The harness of the end-to-end tests, which run over real mounts. The tests themselves are in `tests/`, one file per subject.
//!
//! **Assumption.** The programs under test are those `make build` put into `target/release`.
//!
//! Every test runs itself again in mount, process and IPC namespaces of its own ([`isolated`]), so that whatever it mounts and starts ends
//! with it, even when it fails or hangs. Begin with [`isolated`] and [`Pool`].

mod cluster;
mod command;
pub mod differential;
mod foreign;
mod guest;
mod image;
mod isolation;
mod pool;
pub mod power;
mod steps;
mod tree;

pub use cluster::{Cluster, Daemon};
pub use command::{Outcome, run, run_within, shell};
pub use foreign::{Foreign, is_mounted};
pub use guest::{group_file, group_of, in_guest};
pub use image::{import_small, small_root};
pub use isolation::{PRIVATE_RUN, in_namespaces, isolated, isolated_for, remove_sockets, run_in_namespaces};
pub use pool::{Mounted, Pool, Way, name_of};
pub use steps::{Stepper, compile, hash};
pub use tree::{checksum, populate};

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What is waited for comes long before, also on a busy machine.
const WAIT_MAX: Duration = Duration::from_secs(120);

/// Waits until it is so.
///
/// # Panics
/// When it is not within two minutes; with `what` should have come.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + WAIT_MAX;
    while !is_so() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether tests run in their long and strict form, alone on the machine (`make soak`).
#[must_use]
pub fn is_soak() -> bool {
    std::env::var_os("POOLFS_SOAK").is_some()
}

/// The workspace's folder.
#[must_use]
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace").to_path_buf()
}

/// A program that `make build` built.
///
/// # Panics
/// When it is not there: the tests do not build what they test.
#[must_use]
pub fn program(name: &str) -> PathBuf {
    let path = workspace().join("target/release").join(name);
    assert!(path.exists(), "{} is missing: run `make build` first", path.display());
    path
}

/// A tool that `make tools` installed.
///
/// # Panics
/// When it is not there.
#[must_use]
pub fn tool(name: &str) -> PathBuf {
    let path = workspace().join("target/tools/bin").join(name);
    assert!(path.exists(), "{} is missing: run `make tools` first", path.display());
    path
}
