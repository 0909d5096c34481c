//! The real host: every question goes to the kernel.

use crate::process::parse_start_time;
use crate::{Host, HostError, ProcessIdentity, ProcessSignal, Result, boot_id};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::OwnedFd;
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, PidfdFlags, Signal};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Most bytes of a text file of the kernel; a mount table with tens of thousands of lines still fits.
const TEXT_BYTES_MAX: u64 = 16 << 20;
/// Longest attribute that is read: it holds a path.
const ATTRIBUTE_BYTES_MAX: usize = 8192;

/// The host as it is: every question goes to the kernel.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinuxHost;

impl LinuxHost {
    /// A descriptor of exactly this process, or none when it has ended.
    fn open(&self, process: &ProcessIdentity) -> Result<Option<OwnedFd>> {
        let refused =
            |action, source: rustix::io::Errno| HostError::Process { action, pid: process.pid, source: source.into() };
        let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw) else {
            return Ok(None);
        };
        let descriptor = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            Ok(descriptor) => descriptor,
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(errno) => return Err(refused("open", errno)),
        };
        // Checked after the descriptor was opened: from here on the number cannot come to mean somebody else.
        Ok(process.is_alive(self).then_some(descriptor))
    }
}

impl Host for LinuxHost {
    fn read_text(&self, path: &Path) -> Result<String> {
        let mut bytes = Vec::new();
        std::fs::File::open(path)
            .and_then(|file| file.take(TEXT_BYTES_MAX).read_to_end(&mut bytes))
            .map_err(|source| HostError::io("read", path, source))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn write_text(&self, path: &Path, text: &str) -> Result<()> {
        std::fs::OpenOptions::new()
            .write(true)
            .open(path)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .map_err(|source| HostError::io("write", path, source))
    }

    fn attribute(&self, path: &Path, name: &str) -> Option<String> {
        let mut value = vec![0; ATTRIBUTE_BYTES_MAX];
        let length = rustix::fs::getxattr(path, name, &mut value[..]).ok()?;
        value.truncate(length);
        String::from_utf8(value).ok()
    }

    fn create_attribute(&self, path: &Path, name: &str, value: &str) -> Result<bool> {
        match rustix::fs::setxattr(path, name, value.as_bytes(), rustix::fs::XattrFlags::CREATE) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::EXIST) => Ok(false),
            Err(source) => Err(HostError::io("mark", path, source)),
        }
    }

    fn directory_id(&self, path: &Path) -> Option<String> {
        let found = std::fs::metadata(path).ok()?;
        // A filesystem may give a new directory the number of one that was removed.
        let born = found.created().ok().and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
        Some(format!("{}:{}:{}", found.dev(), found.ino(), born.unwrap_or_default().as_nanos()))
    }

    fn make_directory(&self, path: &Path) -> Result<()> {
        match std::fs::create_dir(path) {
            Err(source) if source.kind() != ErrorKind::AlreadyExists => Err(HostError::io("make", path, source)),
            _ => Ok(()),
        }
    }

    fn remove_directory(&self, path: &Path) -> Result<()> {
        match std::fs::remove_dir(path) {
            Err(source) if source.kind() != ErrorKind::NotFound => Err(HostError::io("remove", path, source)),
            _ => Ok(()),
        }
    }

    fn list_directories(&self, path: &Path) -> Result<Vec<String>> {
        let entries = match std::fs::read_dir(path) {
            Ok(entries) => entries,
            Err(source) if source.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(HostError::io("list", path, source)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = match entry {
                Ok(entry) => entry,
                // It was removed while it was read.
                Err(source) if source.kind() == ErrorKind::NotFound => break,
                Err(source) => return Err(HostError::io("list", path, source)),
            };
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                names.push(entry.file_name().to_string_lossy().into_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    fn detach(&self, mount_point: &Path) -> Result<()> {
        rustix::mount::unmount(mount_point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
            .map_err(|source| HostError::io("detach", mount_point, source))
    }

    fn identify(&self, pid: u32) -> Option<ProcessIdentity> {
        let stat = self.read_text(Path::new(&format!("/proc/{pid}/stat"))).ok()?;
        Some(ProcessIdentity { pid, start_ticks: parse_start_time(&stat)?, boot_id: boot_id(self).ok()? })
    }

    fn signal(&self, process: &ProcessIdentity, signal: ProcessSignal) -> Result<bool> {
        let Some(descriptor) = self.open(process)? else { return Ok(false) };
        let number = match signal {
            ProcessSignal::Terminate => Signal::TERM,
            ProcessSignal::Kill => Signal::KILL,
            ProcessSignal::Other(number) => Signal::from_named_raw(number)
                .ok_or_else(|| HostError::Malformed { what: "a signal", text: number.to_string() })?,
        };
        match rustix::process::pidfd_send_signal(descriptor, number) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::SRCH) => Ok(false),
            Err(errno) => Err(HostError::Process { action: "signal", pid: process.pid, source: errno.into() }),
        }
    }

    fn wait_end(&self, process: &ProcessIdentity, limit: Duration) -> Result<bool> {
        let Some(descriptor) = self.open(process)? else { return Ok(true) };
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let timeout = rustix::time::Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
            match rustix::event::poll(&mut polled, Some(&timeout)) {
                Ok(0) => return Ok(false),
                Ok(_) => return Ok(true),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => {
                    return Err(HostError::Process { action: "wait for", pid: process.pid, source: errno.into() });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_of_ours_is_identified_ended_and_then_gone() {
        let host = LinuxHost;
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep exists");
        let identity = host.identify(child.id()).expect("running");
        assert!(identity.is_alive(&host));
        assert!(!host.wait_end(&identity, Duration::from_millis(1)).expect("a wait"));
        let stranger = ProcessIdentity { start_ticks: identity.start_ticks + 1, ..identity.clone() };
        assert!(!host.signal(&stranger, ProcessSignal::Kill).expect("no error"), "another start time is not ours");
        assert!(host.signal(&identity, ProcessSignal::Kill).expect("a signal"));
        assert!(host.wait_end(&identity, Duration::from_secs(10)).expect("a wait"));
        child.wait().expect("reaped");
        assert!(!identity.is_alive(&host));
        assert!(!host.signal(&identity, ProcessSignal::Kill).expect("no error"));
    }

    #[test]
    fn directories_are_made_listed_and_removed_again() {
        let host = LinuxHost;
        let place = tempfile::tempdir().expect("a directory");
        let child = place.path().join("a");
        host.make_directory(&child).expect("made");
        host.make_directory(&child).expect("made again");
        assert_eq!(host.list_directories(place.path()).expect("listed"), vec!["a"]);
        host.remove_directory(&child).expect("removed");
        host.remove_directory(&child).expect("removed again");
        assert!(host.list_directories(&child).expect("nothing").is_empty());
        assert!(host.write_text(&child, "x").expect_err("no file is made").is_absent());
    }
}
