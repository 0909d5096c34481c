//! The branches of a service: directory trees with their caches, shared by the instances that use them.
//!
//! Making a branch can take long, when it has to be examined as a whole first. So can its end, when much of its cache is not on
//! disk. A request for the same directory meanwhile waits for that; no other does.

use super::crash_state::{self, Carried, Stuck, UpperRoot};
use super::error::{Role, StackError};
use super::immutable::Immutable;
use super::memory::SourceMemory;
use super::sources::{Backend, BranchId, Claim, Lineage, Source};
use crate::in_flight::InFlight;
use crate::spans::Timed;
use crate::sync::lock;
use poolfs_bcow::Bcow;
use poolfs_cache::{BranchKey, Cache, Usage};
use poolfs_libservice::Libservice;
use poolfs_quota::{Accepted, Account, QuotaLimit};
use poolfs_service_protocol::{CephAccess, Layer};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use tracing::error;

/// One directory tree with its cache.
pub(super) struct Branch {
    pub source: Arc<dyn Source>,
    pub role: Role,
    pub backend: Arc<dyn Backend>,
    /// Of a lower branch: what sees to it that nothing changes, once that is asked for.
    pub immutable: Option<Arc<Immutable>>,
    pub bcow: Option<Arc<Bcow>>,
    /// What is directly above the backend and its format.
    pub stored: Arc<dyn Libservice>,
    /// Nothing where others may change the directory.
    pub cache: Option<Arc<Cache>>,
    /// What of the branch is limited, and how.
    pub account: Option<Arc<Account>>,
    pub kept: Kept,
    /// Given up when all is on disk. Of a lower branch: taken when it turns out to have been an upper one.
    pub claim: OnceLock<Claim>,
    /// What its source takes of the pool's memory.
    pub _memory: SourceMemory,
    /// The last to go.
    pub _life: Arc<Life>,
}

/// What outlives a process that a branch is used by.
#[derive(Default)]
pub(super) struct Kept {
    /// Whether what it has accepted does.
    pub is_kept: bool,
    /// Files of which its cache has what the last service had accepted, because it could not be brought to disk.
    pub carried: Vec<Carried>,
    /// The same as it was left, until the branch is in use; and by which key it is kept then.
    pub stuck: Mutex<Option<(Stuck, Option<BranchKey>)>>,
}

/// What makes two uses of a directory uses of one branch. By another path it has another name in what unions note of their lower branches.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    id: BranchId,
    name: PathBuf,
    access: Option<Arc<CephAccess>>,
}

fn key_of(source: &dyn Source) -> Key {
    Key { id: source.lineage().id().clone(), name: source.name().to_owned(), access: source.access() }
}

impl Branch {
    /// What it is called.
    pub fn path(&self) -> &Path {
        self.source.name()
    }

    pub fn key(&self) -> Key {
        key_of(&*self.source)
    }

    fn root(&self) -> Option<UpperRoot<'_>> {
        let directory = self.claim.get().and_then(Claim::directory)?;
        Some(UpperRoot { directory, path: self.path() })
    }

    /// The branch is in use: what its cache carries on is nowhere else any more.
    pub fn begin(&self) {
        if let Some(root) = self.root()
            && let Some((stuck, key)) = lock(&self.kept.stuck).take()
        {
            stuck.give_up(root, key.as_ref());
        }
    }

    /// Without its limit.
    pub fn cache_layer(&self) -> Arc<dyn Libservice> {
        match &self.cache {
            Some(cache) => Timed::over(Layer::Cache, Arc::clone(cache) as Arc<dyn Libservice>),
            None => Arc::clone(&self.stored),
        }
    }

    pub fn layer(&self) -> Arc<dyn Libservice> {
        let Some((account, cache)) = self.account.as_ref().zip(self.cache.as_ref()) else { return self.cache_layer() };
        QuotaLimit::new(self.cache_layer(), account, Box::new(AcceptedBy(Arc::clone(cache))))
    }
}

/// What the cache of a limited branch has accepted.
struct AcceptedBy(Arc<Cache>);

impl Accepted for AcceptedBy {
    fn dirty_bytes(&self) -> u64 {
        self.0.pending_bytes()
    }

    fn wait_for_room(&self, enough: &mut dyn FnMut() -> bool) -> bool {
        self.0.wait_for_room(enough)
    }
}

impl Drop for Branch {
    /// The last stack that used the branch is gone, or was never finished: what its cache still has goes to the disk.
    fn drop(&mut self) {
        let flushed = self.cache.as_ref().map_or(Ok(()), |cache| cache.shutdown());
        if lock(&self.kept.stuck).is_none() {
            if let Err(error) = flushed {
                error!(path = %self.path().display(), %error, "flushing a branch at its end failed; data was lost");
            }
            self.root().filter(|_| self.kept.is_kept).into_iter().for_each(crash_state::unmark);
        }
        self.bcow.iter().for_each(|bcow| bcow.end_thread());
    }
}

/// From when on somebody makes a branch until nothing of it is left.
pub(super) struct Life {
    table: Arc<Table>,
    /// Calls that its directory has not answered yet.
    pub calls: Arc<InFlight>,
}

impl Drop for Life {
    fn drop(&mut self) {
        // Whoever has looked and not found it gone waits by now.
        drop(self.table.lock());
        self.table.changed.notify_all();
    }
}

struct Known {
    role: Role,
    lineage: Lineage,
    life: Weak<Life>,
    calls: Arc<InFlight>,
    /// Nothing as long as it is being made; what its cache uses, if it has one.
    branch: Option<Weak<Branch>>,
    cache: Option<Usage>,
}

impl Known {
    fn is_in_use(&self) -> bool {
        self.branch.as_ref().is_some_and(|branch| branch.strong_count() > 0)
    }
}

#[derive(Default)]
struct Table {
    known: Mutex<BTreeMap<Key, Known>>,
    changed: Condvar,
}

impl Table {
    /// No branch may be let go of while this is held: that takes the lock.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, Known>> {
        lock(&self.known)
    }
}

/// The branches that there are.
#[derive(Default)]
pub(super) struct Branches(Arc<Table>);

impl Branches {
    /// The branch of a directory: the one in use, or the one that `make` makes. Waits as long as somebody else makes or ends one that excludes
    /// it, or is it.
    ///
    /// # Errors
    /// When a branch in use excludes it; those of `make`.
    pub fn get_or_make(
        &self,
        source: &dyn Source,
        role: Role,
        make: impl FnOnce(Arc<Life>) -> Result<Branch, StackError>,
    ) -> Result<Arc<Branch>, StackError> {
        let life = match self.find(source, role)? {
            Found::Made(branch) => return Ok(branch),
            Found::ToBeMade(life) => life,
        };
        let branch = Arc::new(make(life)?);
        if let Some(known) = self.0.lock().get_mut(&branch.key()) {
            known.branch = Some(Arc::downgrade(&branch));
            known.cache = branch.cache.as_ref().map(|cache| cache.usage());
        }
        self.0.changed.notify_all();
        Ok(branch)
    }

    fn find(&self, source: &dyn Source, role: Role) -> Result<Found, StackError> {
        let key = key_of(source);
        let mut known = self.0.lock();
        loop {
            known.retain(|_, branch| branch.life.strong_count() > 0);
            let mut has_to_wait = false;
            for (other, branch) in &*known {
                let is_same = *other == key && branch.role == role && role != Role::Upper;
                let are_readers = branch.role == Role::Lower && role == Role::Lower;
                if !branch.lineage.overlaps(source.lineage()) || are_readers && !is_same {
                    continue;
                }
                if !branch.is_in_use() {
                    has_to_wait = true;
                } else if !is_same {
                    let (other, used) = (other.name.clone(), branch.role);
                    return Err(StackError::Conflict { path: key.name, wanted: role, other, used });
                }
            }
            if !has_to_wait {
                let Some(own) = known.get(&key) else {
                    let calls = Arc::new(InFlight::default());
                    let lineage = source.lineage().clone();
                    let life = Arc::new(Life { table: Arc::clone(&self.0), calls: Arc::clone(&calls) });
                    known.insert(
                        key,
                        Known { role, lineage, life: Arc::downgrade(&life), calls, branch: None, cache: None },
                    );
                    return Ok(Found::ToBeMade(life));
                };
                // Else it has begun to end.
                if let Some(branch) = own.branch.as_ref().and_then(Weak::upgrade) {
                    return Ok(Found::Made(branch));
                }
            }
            known = self.0.changed.wait(known).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// What the caches of those that are made use, each with the number of stacks that use it. Whoever asks keeps none of them alive, so that none
    /// ends, which may take long, in his hands.
    pub fn caches(&self) -> Vec<(usize, Usage)> {
        let known = self.0.lock();
        let made = known.values().filter_map(|known| known.branch.as_ref().zip(known.cache.clone()));
        made.map(|(branch, cache)| (branch.strong_count(), cache)).collect()
    }

    /// The directories of all branches, also those that are being made or that end, with the calls that they have not answered.
    pub fn calls(&self) -> Vec<(PathBuf, Arc<InFlight>)> {
        let known = self.0.lock();
        let living = known.iter().filter(|(_, branch)| branch.life.strong_count() > 0);
        living.map(|(key, branch)| (key.name.clone(), Arc::clone(&branch.calls))).collect()
    }
}

enum Found {
    Made(Arc<Branch>),
    ToBeMade(Arc<Life>),
}
