//! Checks that the threads of a client's process still have the rights with which its session was made.
//!
//! Rights, namespaces and root belong to a thread: libc changes them for all threads, a raw system call for one. A request in
//! shared memory does not tell which thread made it, so all threads must have what the session was made with. The kernel reports
//! a change only in a thread's whole status. Reading one takes some 100 microseconds, as the number of groups is bounded. Of a
//! process with many threads, each check covers the first and the next [`THREADS_PER_LOOK_MAX`], in turn.

use crate::service::peer::{PeerFacts, StatusFile, has_ended};
use poolfs_types::Errno;
use rustix::fs::{CWD, Mode, OFlags, RawDir, SeekFrom, openat, readlinkat, seek};
use std::fmt::Write;
use std::fs::File;
use std::io::Read;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// Threads that one look covers.
pub(super) const THREADS_PER_LOOK_MAX: u64 = 128;

/// Most bytes of a thread's status that are looked at. Its groups are in it: that of a thread with more of them than its session was made
/// with may be longer, and is no other one's for that.
const STATUS_BYTES_MAX: u64 = 32 << 10;

/// What a thread sees of the system: its mount and user namespaces, and its root directory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    mounts: Vec<u8>,
    users: Vec<u8>,
    /// The path of its root in the mount namespace. A confined service follows no link of `/proc` to the directory itself.
    root: Vec<u8>,
}

impl Seen {
    /// That of a thread, by its folder in `/proc`.
    ///
    /// # Errors
    /// Those of the system calls, also when it has ended.
    fn of(thread: BorrowedFd<'_>) -> Result<Self, rustix::io::Errno> {
        let link = |name: &str| readlinkat(thread, name, Vec::new()).map(|link| link.into_bytes());
        Ok(Self { mounts: link("ns/mnt")?, users: link("ns/user")?, root: link("root")? })
    }
}

/// What a look at a client's threads has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rights {
    /// They are as they were.
    Held,
    /// One is another.
    Lost,
    /// The process has ended.
    Gone,
}

/// The threads of a client's process.
#[derive(Debug)]
pub(super) struct Tasks {
    process: u32,
    seen: Seen,
    /// How many threads come before those that are looked at next.
    next: AtomicU64,
}

fn open(directory: BorrowedFd<'_>, path: &str) -> rustix::io::Result<OwnedFd> {
    openat(directory, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

fn status(thread: BorrowedFd<'_>) -> std::io::Result<String> {
    let mut text = String::new();
    File::from(open(thread, "status")?).take(STATUS_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

impl Tasks {
    /// Those of the process with these facts.
    ///
    /// # Errors
    /// `ESRCH` when it is gone, `EPERM` when one of the threads has other rights, or sees something else, than the first.
    pub(super) fn of(facts: &PeerFacts) -> Result<Self, Errno> {
        let errno = crate::memory::errno;
        let first = open(CWD, &format!("/proc/{}", facts.process)).map_err(|_| Errno::ESRCH)?;
        let seen = Seen::of(first.as_fd()).map_err(errno)?;
        let tasks = Self { process: facts.process, seen, next: AtomicU64::new(0) };
        if tasks.rights(facts) == Rights::Held { Ok(tasks) } else { Err(Errno::EPERM) }
    }

    /// Whether those looked at now have the rights that the process had, and see what it saw. Of what cannot be found out for want of
    /// descriptors or memory, the last look counts.
    pub(super) fn rights(&self, facts: &PeerFacts) -> Rights {
        let held = |is_held| if is_held { Rights::Held } else { Rights::Lost };
        match open(CWD, &format!("/proc/{}", self.process)) {
            Ok(process) => match self.holds(process.as_fd(), facts) {
                Some(is_held) => held(is_held && self.others_hold(process.as_fd(), facts)),
                None => Rights::Gone,
            },
            Err(error) if has_ended(&error.into()) => Rights::Gone,
            Err(_) => Rights::Held,
        }
    }

    /// Whether a thread, by its folder, is as the process was; nothing when it has ended.
    fn holds(&self, thread: BorrowedFd<'_>, facts: &PeerFacts) -> Option<bool> {
        match status(thread) {
            Ok(text) => {
                let has_rights = StatusFile::parse(&text).is_some_and(|status| facts.are_those_of(&status));
                // A thread that is ending has its rights still, and no namespaces.
                Some(has_rights && Seen::of(thread).ok().is_none_or(|seen| seen == self.seen))
            }
            Err(error) => (!has_ended(&error)).then_some(true),
        }
    }

    fn others_hold(&self, process: BorrowedFd<'_>, facts: &PeerFacts) -> bool {
        let Ok(directory) = open(process, "task") else { return true };
        let start = self.next.load(Ordering::Relaxed);
        // The position in this folder is the number of a thread, behind `.` and `..`.
        if start > 0 && seek(&directory, SeekFrom::Start(start + 2)).is_err() {
            return true;
        }
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut entries = RawDir::new(&directory, &mut buffer);
        let mut looked = 0;
        let mut path = String::new();
        while let Some(Ok(entry)) = entries.next() {
            let Ok(number) = entry.file_name().to_str().unwrap_or("").parse::<u32>() else { continue };
            path.clear();
            let _ = write!(path, "{number}");
            let thread = open(directory.as_fd(), &path);
            if thread.is_ok_and(|thread| self.holds(thread.as_fd(), facts) == Some(false)) {
                return false;
            }
            looked += 1;
            if looked == THREADS_PER_LOOK_MAX {
                self.next.store(start + looked, Ordering::Relaxed);
                return true;
            }
        }
        self.next.store(0, Ordering::Relaxed);
        true
    }
}
