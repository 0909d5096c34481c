//! What the control side asks of the host: control groups, mounts, processes, behind one trait.
//!
//! Begin with [`Host`], which has all the questions and changes. [`LinuxHost`] asks the kernel; [`RecordingHost`] answers from a recorded
//! tree and records the changes, so that everything above can be tested without root. Control groups ([`ControlGroups`]), mount tables
//! ([`MountEntry`]) and process identities ([`ProcessIdentity`]) are plain logic over it.
//!
//! **Assumptions.** One administrator at a time changes a pool (the caller holds the pool's lock). Nobody else makes directories under
//! `poolfs/` in the control-group hierarchies. Nothing here is persistent state.

mod cgroup;
mod cpus;
mod error;
mod linux;
mod mounts;
mod process;
mod quotas;
mod recording;
mod remove;

pub use cgroup::{ControlGroups, GroupLayout, Leaf, PoolLimits};
pub use cpus::CpuSet;
pub use error::{HostError, Result};
pub use linux::LinuxHost;
pub use mounts::{MountEntry, mount_table, mounted_inside, mounted_over, parse_mount_table, pool_mounts};
pub use process::{ProcessIdentity, ProcessSignal, boot_id, parse_start_time};
pub use recording::RecordingHost;
pub use remove::remove_tree;

use std::path::Path;
use std::time::Duration;

/// What the control side asks of the host.
pub trait Host: Send + Sync {
    /// The content of a small text file of the kernel.
    fn read_text(&self, path: &Path) -> Result<String>;
    /// Write a value into an existing control file of the kernel.
    fn write_text(&self, path: &Path, text: &str) -> Result<()>;
    /// An extended attribute of a directory, if it has that.
    fn attribute(&self, path: &Path, name: &str) -> Option<String>;
    /// Give a directory an extended attribute; false when it has it already.
    fn create_attribute(&self, path: &Path, name: &str, value: &str) -> Result<bool>;
    /// What tells a directory from all others of the host, also from those it had; none when nothing is there.
    fn directory_id(&self, path: &Path) -> Option<String>;
    /// Make a directory; one that exists already is fine.
    fn make_directory(&self, path: &Path) -> Result<()>;
    /// Remove an empty directory; one that does not exist is fine.
    fn remove_directory(&self, path: &Path) -> Result<()>;
    /// The names of the directories in a directory; none when it does not exist.
    fn list_directories(&self, path: &Path) -> Result<Vec<String>>;
    /// Detach what is mounted there (lazily, so that a dead filesystem cannot make it fail).
    fn detach(&self, mount_point: &Path) -> Result<()>;
    /// Which process now has this number; none when there is none or it is a zombie.
    fn identify(&self, pid: u32) -> Option<ProcessIdentity>;
    /// Send a signal to exactly this process; false when it has ended already.
    fn signal(&self, process: &ProcessIdentity, signal: ProcessSignal) -> Result<bool>;
    /// Wait until exactly this process has ended, at most so long; whether it has.
    fn wait_end(&self, process: &ProcessIdentity, limit: Duration) -> Result<bool>;
}

/// A host may be shared: who records it also looks at the record.
impl<H: Host + ?Sized> Host for std::sync::Arc<H> {
    fn read_text(&self, path: &Path) -> Result<String> {
        (**self).read_text(path)
    }
    fn write_text(&self, path: &Path, text: &str) -> Result<()> {
        (**self).write_text(path, text)
    }
    fn attribute(&self, path: &Path, name: &str) -> Option<String> {
        (**self).attribute(path, name)
    }

    fn create_attribute(&self, path: &Path, name: &str, value: &str) -> Result<bool> {
        (**self).create_attribute(path, name, value)
    }

    fn directory_id(&self, path: &Path) -> Option<String> {
        (**self).directory_id(path)
    }

    fn make_directory(&self, path: &Path) -> Result<()> {
        (**self).make_directory(path)
    }
    fn remove_directory(&self, path: &Path) -> Result<()> {
        (**self).remove_directory(path)
    }
    fn list_directories(&self, path: &Path) -> Result<Vec<String>> {
        (**self).list_directories(path)
    }
    fn detach(&self, mount_point: &Path) -> Result<()> {
        (**self).detach(mount_point)
    }
    fn identify(&self, pid: u32) -> Option<ProcessIdentity> {
        (**self).identify(pid)
    }
    fn signal(&self, process: &ProcessIdentity, signal: ProcessSignal) -> Result<bool> {
        (**self).signal(process, signal)
    }
    fn wait_end(&self, process: &ProcessIdentity, limit: Duration) -> Result<bool> {
        (**self).wait_end(process, limit)
    }
}
