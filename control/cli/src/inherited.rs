//! Descriptors and variables inherited from the caller, and which child processes get them.
//!
//! A service and the monitor of a container outlive the command that started them. What they inherited from its caller would be held as
//! long: a lock, the other end of a pipe, a directory of the host in a process that has given up the host's files. So no child of this
//! process has a descriptor that it was not given. The exception is the program of `poolfs exec`, which inherits from the caller as if it
//! had been run directly.

use crate::failure::{Failure, Result};
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

/// Where the descriptors of this process are listed.
const LIST: &str = "/proc/self/fd";
/// What the search path, the log, messages of a panic and the C library's memory depend on: all that services and monitors read.
const USED: [&str; 4] = ["PATH", "POOLFS_LOG", "RUST_BACKTRACE", "GLIBC_TUNABLES"];

/// The inherited descriptors but standard input, output and error.
pub struct Descriptors(Vec<BorrowedFd<'static>>);

impl Descriptors {
    /// Withhold them from all children of this process. To be called before it opens anything.
    pub fn withhold() -> Result<Descriptors> {
        let failed = |error: std::io::Error| Failure::new(LIST, error, "mount /proc");
        let mut inherited = Vec::new();
        for entry in std::fs::read_dir(LIST).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let Some(number) = name.to_str().and_then(|name| name.parse().ok()).filter(|number| *number > 2) else {
                continue;
            };
            // SAFETY: it is open, as it is listed, by the list itself or since before this process began; and as nothing here has opened
            // the latter, which alone are kept, nothing here closes them.
            let descriptor: BorrowedFd<'static> = unsafe { BorrowedFd::borrow_raw(number) };
            let flags = fcntl_getfd(descriptor).map_err(|errno| failed(errno.into()))?;
            if !flags.contains(FdFlags::CLOEXEC) {
                inherited.push(descriptor);
            }
        }
        let inherited = Descriptors(inherited);
        inherited.mark(FdFlags::CLOEXEC).map_err(failed)?;
        Ok(inherited)
    }

    /// Start a program that has them.
    pub fn spawn(&self, command: &mut Command) -> std::io::Result<Child> {
        self.mark(FdFlags::empty())?;
        let child = command.spawn();
        self.mark(FdFlags::CLOEXEC)?;
        child
    }

    /// Become a program that has them; returns only when that fails.
    pub fn exec(&self, command: &mut Command) -> std::io::Error {
        self.mark(FdFlags::empty()).err().unwrap_or_else(|| command.exec())
    }

    fn mark(&self, flags: FdFlags) -> std::io::Result<()> {
        self.0.iter().try_for_each(|descriptor| Ok(fcntl_setfd(descriptor, flags)?))
    }
}

/// Have a program that may outlive this process started with the variables that it uses only. `NOTIFY_SOCKET` of a service manager is not
/// among them: with it the runtime would wait for a message of the container, beyond its end, and nobody wait for that any more.
pub fn with_used_variables(command: &mut Command) -> &mut Command {
    let used = USED.iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
    command.env_clear().envs(used)
}
