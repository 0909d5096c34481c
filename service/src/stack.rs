//! The stack builder: the only place that names concrete layers.

use poolfs_libservice::Libservice;
use poolfs_local::{Local, LocalOptions};
use poolfs_service_protocol::{CacheStatus, StackSpec, UnionStatus};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why a stack cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum StackError {
    /// A branch cannot be used.
    #[error("the directory {path} cannot be opened ({cause}); create it, or name another")]
    Branch {
        /// the directory
        path: PathBuf,
        /// what is wrong
        cause: String,
    },
}

/// The layers of one instance.
pub struct Stack {
    /// The top layer.
    pub(crate) layer: Arc<dyn Libservice>,
    /// No other instance changes what this one shows.
    pub(crate) private: bool,
}

impl Stack {
    /// A stack of one layer that nobody else uses.
    #[must_use]
    pub fn of(layer: Arc<dyn Libservice>) -> Self {
        Self { layer, private: true }
    }

    /// What its union did, if it has one.
    #[must_use]
    pub fn union_status(&self) -> Option<UnionStatus> {
        None
    }
}

/// Builds stacks.
pub struct StackBuilder {
    cache_bytes: u64,
}

impl StackBuilder {
    /// A builder for a pool with this much cache.
    ///
    /// # Errors
    /// When the cache cannot be made.
    pub fn new(cache_bytes: u64) -> Result<Self, StackError> {
        Ok(Self { cache_bytes })
    }

    /// Builds what `spec` says.
    ///
    /// # Errors
    /// When a branch cannot be used; nothing is left behind then.
    pub fn build(&self, spec: &StackSpec) -> Result<Stack, StackError> {
        match spec {
            StackSpec::Directory { directory } => Ok(Stack::of(local(directory, false)?)),
            StackSpec::Union { upper, .. } => Ok(Stack::of(local(upper, false)?)),
        }
    }

    /// The cache of the pool.
    #[must_use]
    pub fn cache_status(&self) -> CacheStatus {
        CacheStatus { limit_bytes: self.cache_bytes, ..CacheStatus::default() }
    }
}

fn local(path: &Path, read_only: bool) -> Result<Arc<dyn Libservice>, StackError> {
    let branch = |cause: String| StackError::Branch { path: path.to_owned(), cause };
    let options = LocalOptions { read_only, ..LocalOptions::default() };
    let local: Arc<Local> = Local::open(path, options).map_err(|error| branch(error.to_string()))?;
    Ok(local)
}
