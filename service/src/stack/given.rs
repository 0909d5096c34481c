//! Branches as they are given to the service: private mounts of directories, with the names to call them by.

use super::{StackError, with_causes};
use poolfs_local::PrivateMount;
use poolfs_service_protocol::{MountSpec, StackSpec};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Which directory it is, whatever its path: device and inode.
pub(super) type Identity = (u64, u64);

/// The directory of a branch.
#[derive(Clone)]
pub(crate) struct Given {
    /// What it is called, without links: in messages, and in notes of what is below a union.
    pub path: PathBuf,
    pub mount: Arc<PrivateMount>,
    pub identity: Identity,
    /// Whether disk quotas may refuse what is written to it.
    pub has_quotas: bool,
}

impl Given {
    fn new(path: PathBuf, mount: PrivateMount) -> Result<Self, StackError> {
        match mount.identity() {
            Ok(identity) => Ok(Self { path, mount: Arc::new(mount), identity, has_quotas: false }),
            Err(error) => Err(StackError::Branch { path, cause: error.to_string() }),
        }
    }

    /// The directory at a path of this process.
    pub(crate) fn open(path: &Path, read_only: bool) -> Result<Self, StackError> {
        let failed = |cause: String| StackError::Branch { path: path.to_owned(), cause };
        let found = path.canonicalize().map_err(|error| failed(error.to_string()))?;
        let mount = PrivateMount::of(&found, read_only).map_err(|error| failed(with_causes(&error)))?;
        Self::new(found, mount)
    }

    /// All of a stack, each at its path.
    pub(crate) fn open_all(stack: &StackSpec) -> Result<Vec<Self>, StackError> {
        stack.branches().into_iter().map(|branch| Self::open(branch.directory, branch.read_only)).collect()
    }

    /// All of a mount's stack, as the control side has sent them.
    pub(crate) fn from_control(spec: &MountSpec, descriptors: Vec<OwnedFd>) -> Result<Vec<Self>, StackError> {
        let branches = spec.stack.branches();
        if branches.len() != descriptors.len() {
            let (count, wanted) = (descriptors.len(), branches.len());
            let cause = format!(
                "the command came with descriptors of {count} directories for {wanted} branches; use the poolfs and the poolfs-service \
                 of one build"
            );
            let path = branches.first().map(|branch| branch.directory.to_owned()).unwrap_or_default();
            return Err(StackError::Branch { path, cause });
        }
        let given = branches.into_iter().zip(descriptors).map(|(branch, descriptor)| {
            let path = branch.directory.to_owned();
            match PrivateMount::received(descriptor, &path, branch.read_only) {
                Ok(mount) => {
                    let given = Self::new(path, mount)?;
                    Ok(Self { has_quotas: spec.has_quotas && !branch.read_only, ..given })
                }
                Err(error) => Err(StackError::Branch { path, cause: with_causes(&error) }),
            }
        });
        given.collect()
    }
}
