//! Claims on branches that are written, or were upper branches: exclusive or shared, across processes.

use super::super::StackError;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, openat};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// A wait that is enough for one that is about to be given up: by an unmount, or by a process that was killed.
pub(crate) const ENDING: Duration = Duration::from_secs(2);
pub(super) const PAUSE: Duration = Duration::from_millis(5);

/// What is to be done with the branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClaimKind {
    /// It is changed.
    Alone,
    /// It is read as it is, or written by several who know that.
    Shared,
}

/// Why a branch cannot be claimed.
#[derive(Debug)]
pub(crate) enum Unclaimed {
    /// Somebody else has it.
    Held(&'static str),
    /// Its filesystem has no locks.
    NoLocks(Errno),
    /// It cannot be opened.
    Unusable(Errno),
    /// It cannot be reached.
    Failed(StackError),
}

impl Unclaimed {
    /// The failure, of this directory.
    pub fn of(self, directory: &Path) -> StackError {
        let path = directory.to_owned();
        match self {
            Self::Held(cause) => StackError::Held { path, cause },
            Self::NoLocks(errno) => StackError::Branch { path, cause: format!("it cannot be locked: {errno}") },
            Self::Failed(error) => error,
            Self::Unusable(errno) => StackError::Branch { path, cause: errno.to_string() },
        }
    }
}

/// As long as it is there, nobody has one that contradicts it. It ends with the process that has it at the latest.
pub(crate) struct Claim(Held);

enum Held {
    Directory(OwnedFd),
    Ceph(#[expect(dead_code, reason = "it is held")] poolfs_ceph::Claim),
}

impl Claim {
    /// The directory, if it is one of the host.
    pub fn directory(&self) -> Option<BorrowedFd<'_>> {
        match &self.0 {
            Held::Directory(directory) => Some(directory.as_fd()),
            Held::Ceph(_) => None,
        }
    }

    /// One at a cluster.
    pub fn of_ceph(claim: poolfs_ceph::Claim) -> Self {
        Self(Held::Ceph(claim))
    }

    /// Claims a directory, if need be after so long; the cause when it cannot be had.
    pub fn take(directory: impl AsFd, kind: ClaimKind, wait: Duration) -> Result<Self, Unclaimed> {
        let file = opened(directory)?;
        let operation = match kind {
            ClaimKind::Alone => FlockOperation::NonBlockingLockExclusive,
            ClaimKind::Shared => FlockOperation::NonBlockingLockShared,
        };
        let begun = Instant::now();
        loop {
            match flock(&file, operation) {
                Ok(()) => return Ok(Claim(Held::Directory(file))),
                Err(Errno::WOULDBLOCK) if begun.elapsed() < wait => std::thread::sleep(PAUSE),
                Err(Errno::WOULDBLOCK) => {
                    let cause = match kind {
                        ClaimKind::Alone => {
                            "another process has it mounted, or uses it as a branch of a union; unmount that first"
                        }
                        ClaimKind::Shared => {
                            "another process has it mounted for itself, or uses it as the upper branch of a union; unmount that first"
                        }
                    };
                    return Err(Unclaimed::Held(cause));
                }
                Err(errno) => return Err(Unclaimed::NoLocks(errno)),
            }
        }
    }
}

/// A lock belongs to an opening, and is given up with its last descriptor: this one is nobody else's.
fn opened(directory: impl AsFd) -> Result<OwnedFd, Unclaimed> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(directory, c".", flags, Mode::empty()).map_err(Unclaimed::Unusable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_writes_or_many_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let directory = std::fs::File::open(folder.path()).expect("a folder");
        let take = |kind| Claim::take(&directory, kind, ENDING);
        let readers = [take(ClaimKind::Shared).expect("free"), take(ClaimKind::Shared).expect("for reading")];
        assert!(
            take(ClaimKind::Alone)
                .is_err_and(|cause| matches!(cause, Unclaimed::Held(cause) if cause.contains("unmount")))
        );
        drop(readers);
        let writer = take(ClaimKind::Alone).expect("given up");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| take(ClaimKind::Shared));
            drop(writer);
            waiting.join().expect("no panic").expect("after a moment");
        });
    }
}
