//! The stack builder: the only place that names concrete layers.
//!
//! A directory is `local` under a `cache`; a union is made of such branches. Branches are shared: instances that use the
//! same lower branch (or the same directory) stand on one cache, so that its bytes are there once.

use poolfs_libservice::Libservice;
use poolfs_local::{Local, LocalOptions};
use poolfs_service_protocol::{CacheStatus, StackSpec, UnionStatus};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Why a stack cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum StackError {
    /// A branch cannot be used.
    #[error("the directory {path} cannot be opened: {cause}")]
    Branch {
        /// the directory
        path: PathBuf,
        /// what is wrong
        cause: String,
    },
    /// Two uses of a branch exclude each other.
    #[error(
        "{path} cannot be {wanted} while {other} is {used}; unmount the instance that uses it, or name another directory"
    )]
    Conflict {
        /// the directory
        path: PathBuf,
        /// what it should become
        wanted: Role,
        /// the directory in use: the same, one above or one below
        other: PathBuf,
        /// what it is
        used: Role,
    },
}

/// What a branch is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// mounted by itself
    Directory,
    /// the writable branch of a union
    Upper,
    /// a read-only branch of unions
    Lower,
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Role::Directory => "a mounted directory",
            Role::Upper => "the upper branch of a union",
            Role::Lower => "a lower branch of a union",
        })
    }
}

/// One directory tree with its cache, shared by the instances that use it.
struct Branch {
    path: PathBuf,
    role: Role,
    layer: Arc<dyn Libservice>,
}

/// The layers of one instance.
pub struct Stack {
    /// The top layer.
    pub(crate) layer: Arc<dyn Libservice>,
    branches: Vec<Arc<Branch>>,
}

impl Stack {
    /// A stack of one layer that nobody else uses.
    #[must_use]
    pub fn of(layer: Arc<dyn Libservice>) -> Self {
        Self { layer, branches: Vec::new() }
    }

    /// Whether no other instance changes what this one shows: only a directory that is mounted twice is changed by two.
    #[must_use]
    pub fn is_private(&self) -> bool {
        self.branches.iter().all(|branch| branch.role != Role::Directory || Arc::strong_count(branch) == 1)
    }

    /// What its union did, if it has one.
    #[must_use]
    pub fn union_status(&self) -> Option<UnionStatus> {
        None
    }
}

/// Builds stacks, and holds what they share.
pub struct StackBuilder {
    cache_bytes: u64,
    branches: Mutex<BTreeMap<PathBuf, Weak<Branch>>>,
}

impl StackBuilder {
    /// A builder for a pool with this much cache.
    ///
    /// # Errors
    /// When the cache cannot be made.
    pub fn new(cache_bytes: u64) -> Result<Self, StackError> {
        Ok(Self { cache_bytes, branches: Mutex::default() })
    }

    /// Builds what `spec` says.
    ///
    /// # Errors
    /// When a branch cannot be used; nothing is left behind then.
    pub fn build(&self, spec: &StackSpec) -> Result<Stack, StackError> {
        match spec {
            StackSpec::Directory { directory } => {
                let branch = self.branch(directory, Role::Directory)?;
                Ok(Stack { layer: Arc::clone(&branch.layer), branches: vec![branch] })
            }
            StackSpec::Union { upper, lowers } => {
                let mut branches = vec![self.branch(upper, Role::Upper)?];
                for lower in lowers {
                    branches.push(self.branch(lower, Role::Lower)?);
                }
                Ok(Stack { layer: Arc::clone(&branches[0].layer), branches })
            }
        }
    }

    fn branches(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Weak<Branch>>> {
        self.branches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The branch at `path`: the one in use, or a new one.
    fn branch(&self, path: &Path, role: Role) -> Result<Arc<Branch>, StackError> {
        let failed = |cause: String| StackError::Branch { path: path.to_owned(), cause };
        let path = path.canonicalize().map_err(|error| failed(error.to_string()))?;
        let mut branches = self.branches();
        branches.retain(|_, branch| branch.strong_count() > 0);
        for branch in branches.values().filter_map(Weak::upgrade) {
            let same = branch.path == path && branch.role == role && role != Role::Upper;
            let readers = branch.role == Role::Lower && role == Role::Lower;
            let related = branch.path.starts_with(&path) || path.starts_with(&branch.path);
            if related && !same && !readers {
                let (other, used) = (branch.path.clone(), branch.role);
                return Err(StackError::Conflict { path, wanted: role, other, used });
            }
        }
        if let Some(branch) = branches.get(&path).and_then(Weak::upgrade) {
            return Ok(branch);
        }
        let options = LocalOptions { read_only: role == Role::Lower, ..LocalOptions::default() };
        let local = Local::open(&path, options).map_err(|error| failed(with_causes(&error)))?;
        let branch = Arc::new(Branch { path: path.clone(), role, layer: local });
        branches.insert(path, Arc::downgrade(&branch));
        Ok(branch)
    }

    /// The cache of the pool.
    #[must_use]
    pub fn cache_status(&self) -> CacheStatus {
        CacheStatus { limit_bytes: self.cache_bytes, ..CacheStatus::default() }
    }
}

/// An error with what caused it, in one line.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(" ({error})"));
        cause = error.source();
    }
    text
}
