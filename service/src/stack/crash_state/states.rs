//! The state directories of a host's services, and the search for one by its key alone.

use crate::sync::lock;
use poolfs_cache::{BranchKey, StateDirectory, open_private};
use poolfs_service_protocol::KEPT_SUFFIX;
use rustix::fs::{AtFlags, Dir, Mode, OFlags, fstat, open, unlinkat};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use tracing::warn;

/// The directory below which all services have their state (`/run/poolfs`): it is opened once, and everything in it is reached from there.
pub struct StateRoot {
    directory: OwnedFd,
    path: PathBuf,
    salvaging: Mutex<()>,
}

/// The state directories of one pool.
pub(super) struct PoolStates {
    directory: OwnedFd,
    path: PathBuf,
}

impl StateRoot {
    /// Nothing when it is not there.
    ///
    /// # Errors
    /// `InvalidData` when others may make names in it; else those of opening it.
    pub fn open(path: &Path) -> io::Result<Option<Self>> {
        let directory = match open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            directory => directory?,
        };
        let status = fstat(&directory)?;
        if status.st_uid != rustix::process::geteuid().as_raw() || status.st_mode & 0o022 != 0 {
            let cause = "others may change it: give it to root, with mode 0755";
            return Err(io::Error::new(io::ErrorKind::InvalidData, cause));
        }
        Ok(Some(Self { directory, path: path.to_owned(), salvaging: Mutex::default() }))
    }

    /// Held by the thread that has a state directory open: it has what is kept of several branches, and is one user's at a time.
    pub(super) fn salvaging(&self) -> MutexGuard<'_, ()> {
        lock(&self.salvaging)
    }

    /// Those of the pool whose directory has this name; nothing when there are none.
    pub(super) fn pool(&self, name: &OsStr) -> io::Result<Option<PoolStates>> {
        let path = self.path.join(name);
        match open_private(&self.directory, name, &path) {
            Ok(directory) => Ok(Some(PoolStates { directory, path })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The state directory, of whatever pool, that has a branch of that key.
    pub(super) fn find(&self, key: &BranchKey) -> io::Result<Option<StateDirectory>> {
        for name in names(&self.directory)?.iter().filter(|name| name.as_bytes().ends_with(KEPT_SUFFIX.as_bytes())) {
            let pool = match self.pool(name) {
                Ok(Some(pool)) => pool,
                Ok(None) => continue,
                Err(error) => {
                    warn!(directory = %self.path.join(name).display(), %error, "what services may have kept there is not looked for");
                    continue;
                }
            };
            // A directory in which nothing is mounted is about to be used, or was.
            let states = pool.names()?.into_iter().filter_map(|name| pool.state(&name).ok());
            if let Some(found) = states.into_iter().find(|state| state.has(key)) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}

impl PoolStates {
    /// The names in it, each of a directory that a service has mounted its state on, or was about to.
    pub(super) fn names(&self) -> io::Result<Vec<OsString>> {
        names(&self.directory)
    }

    /// The state of that name.
    pub(super) fn state(&self, name: &OsStr) -> io::Result<StateDirectory> {
        StateDirectory::open(&self.directory, name, &self.path.join(name))
    }

    /// Removes a directory, if there is nothing in it.
    pub(super) fn remove(&self, name: &OsStr) -> io::Result<()> {
        match unlinkat(&self.directory, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOTEMPTY | Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

fn names(directory: impl AsFd) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if !matches!(&name[..], b"." | b"..") {
            names.push(OsString::from_vec(name));
        }
    }
    Ok(names)
}
