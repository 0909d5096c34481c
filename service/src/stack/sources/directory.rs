//! Directories of the host as sources: private mounts of them, which the control side has sent.

use super::super::{StackError, with_causes};
use super::{Backend, BranchId, Claim, ClaimKind, Lineage, Source, Unclaimed};
use poolfs_local::{Descriptors, DirectoryId, Local, LocalOptions, Place, PrivateMount};
use poolfs_service_protocol::{Layer, MountSpec, StackSpec};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A directory of the host. All use of it is by its private mount.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    mount: Arc<PrivateMount>,
    lineage: Lineage,
    /// Whether disk quotas may refuse what is written to it.
    has_quotas: bool,
}

impl Directory {
    /// One that lies where `lineage` says: nobody knows where, if that is empty.
    fn new(path: PathBuf, mount: PrivateMount, lineage: &[DirectoryId]) -> Result<Self, StackError> {
        let failed = |cause: String| StackError::Branch { path: path.clone(), cause };
        let identity = mount.identity().map_err(|error| failed(error.to_string()))?;
        let id = |(device, inode)| BranchId::Directory { device, inode };
        let above = match lineage.split_first() {
            Some((own, _)) if *own != identity => {
                let cause = "the command says that it lies where another directory does; use the poolfs and the \
                             poolfs-service of one build";
                return Err(failed(cause.to_owned()));
            }
            Some((_, above)) => above.iter().copied().map(id).collect(),
            None => Vec::new(),
        };
        Ok(Self { path, mount: Arc::new(mount), lineage: Lineage { own: id(identity), above }, has_quotas: false })
    }

    /// The directory at a path of this process.
    pub(crate) fn open(path: &Path, read_only: bool) -> Result<Self, StackError> {
        let failed = |cause: String| StackError::Branch { path: path.to_owned(), cause };
        let found = path.canonicalize().map_err(|error| failed(error.to_string()))?;
        let place = Place::open(&found).map_err(|error| failed(with_causes(&error)))?;
        let mount = place.private_mount(&found, read_only).map_err(|error| failed(with_causes(&error)))?;
        let lineage = place.lineage().map_err(|error| failed(error.to_string()))?;
        Self::new(found, mount, &lineage)
    }

    /// All of a stack, each at its path.
    pub(crate) fn open_all(stack: &StackSpec) -> Result<Vec<Arc<dyn Source>>, StackError> {
        let open = |branch: poolfs_service_protocol::Branch<'_>| -> Result<Arc<dyn Source>, StackError> {
            Ok(Arc::new(Self::open(branch.name, branch.read_only)?))
        };
        stack.branches().into_iter().map(open).collect()
    }

    /// Those of a mount's stack, as the control side has sent them.
    pub(super) fn received_all(spec: &MountSpec, descriptors: Vec<OwnedFd>) -> Result<Vec<Self>, StackError> {
        let branches: Vec<_> =
            spec.stack.branches().into_iter().filter(|branch| branch.place().is_directory()).collect();
        let wanted = branches.len();
        for (what, count) in [("descriptors", descriptors.len()), ("places", spec.lineages.len())] {
            if count != wanted && !(what == "places" && count == 0) {
                let cause = format!(
                    "the command came with {what} of {count} directories for {wanted} branches; use the poolfs and the poolfs-service \
                     of one build"
                );
                let path = branches.first().map(|branch| branch.name.to_owned()).unwrap_or_default();
                return Err(StackError::Branch { path, cause });
            }
        }
        let lineages = spec.lineages.iter().map(Vec::as_slice).chain(std::iter::repeat(&[][..]));
        let received = branches.into_iter().zip(descriptors).zip(lineages);
        let received = received.map(|((branch, descriptor), lineage)| -> Result<Self, StackError> {
            let path = branch.name.to_owned();
            let mount = PrivateMount::received(descriptor, &path, branch.read_only)
                .map_err(|error| StackError::Branch { path: path.clone(), cause: with_causes(&error) })?;
            let has_quotas = spec.has_quotas && !branch.read_only;
            Ok(Self { has_quotas, ..Self::new(path, mount, lineage)? })
        });
        received.collect()
    }

    fn failed(&self, error: &dyn std::error::Error) -> StackError {
        StackError::Branch { path: self.path.clone(), cause: with_causes(error) }
    }
}

impl Source for Directory {
    fn name(&self) -> &Path {
        &self.path
    }

    fn lineage(&self) -> &Lineage {
        &self.lineage
    }

    fn layer(&self) -> Layer {
        Layer::Local
    }

    fn claim(&self, kind: ClaimKind, wait: Duration) -> Result<Claim, Unclaimed> {
        Claim::take(&*self.mount, kind, wait)
    }

    fn is_in_memory(&self) -> Result<bool, StackError> {
        Ok(self.mount.in_memory().map_err(|error| self.failed(&error))?.is_some())
    }

    fn open(&self, read_only: bool, descriptors: &Arc<Descriptors>) -> Result<Arc<dyn Backend>, StackError> {
        let options = LocalOptions { read_only, has_quotas: self.has_quotas, descriptors: Arc::clone(descriptors) };
        let local = Local::over(Arc::clone(&self.mount), &self.path, options);
        Ok(local.map_err(|error| self.failed(&error))?)
    }
}

impl Backend for Local {
    fn discard(&self) {
        Local::discard(self);
    }
}
