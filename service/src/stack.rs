//! The stack builder: the only place that names concrete layers.
//!
//! A directory is `local` under a `cache`. A union is made of such branches, and of frozen unions of some of them. A container
//! with a user namespace has `idmap` on top. Branches are shared: instances that use the same lower branch (or the same
//! directory) use one cache, so that its bytes are in memory once. Between any two layers the time is measured, when somebody
//! asks for it; that of `idmap` is negligible.

mod branches;
pub mod check;
pub mod crash_state;
mod error;
mod immutable;
mod memory;
pub mod probe;
mod sources;
mod uppers;
mod written;

pub use error::{Role, StackError};
use immutable::Immutable;

use crate::leases::{LEASES_PER_INSTANCE, LeaseTable, MakeNotice, NoticePage};
use crate::memory::WatchedMemory;
use crate::outside::{Deed, outside};
use crate::shares::{ListingShares, charged};
use crate::spans::Timed;
use crate::sync::lock;
use branches::{Branch, Branches, Kept, Key, Life};
use crash_state::{StateRoot, UpperRoot};
use memory::{EvictableMemory, SourceMemory};
use poolfs_bcow::{Bcow, BcowConfig, Layout};
use poolfs_cache::{Cache, CacheConfig, CacheError, CacheMemory, CachePool, SharedNotice};
use poolfs_idmap::IdMapped;
use poolfs_ipc::segment::FileNotice;
use poolfs_libservice::types::{Errno, IdMap};
use poolfs_libservice::{Headroom, Layered, Libservice, Operation};
use poolfs_local::Descriptors;
use poolfs_quota::{Account, UsageAccounting};
use poolfs_service_protocol::{
    BranchStatus, CacheStatus, Coherence, Layer, SketchDamage, StackSpec, Storage, UnionStatus, UpperFormat,
};
use poolfs_union::{LAYER_ID_MAX, Lower, Union, UnionConfig};
use sources::{Claim, ClaimKind, Directory, ENDING, Unclaimed};
pub(crate) use sources::{Source, received};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;
use tracing::warn;
use watched::Watched;

/// The layers of one instance. A clone stands on the same branches, with all that is not written back yet.
#[derive(Clone)]
pub struct Stack {
    /// The top layer.
    pub(crate) layer: Arc<dyn Libservice>,
    union: Option<Arc<OwnUnion>>,
    branches: Vec<Arc<Branch>>,
    /// Branches whose files have bytes in others that were not given.
    incomplete: Vec<Incomplete>,
    coherence: Coherence,
}

/// A branch whose files need, or needed once, layers that its union has not.
#[derive(Clone)]
struct Incomplete {
    branch: PathBuf,
    missing: Vec<String>,
}

/// A union, whose threads end with the last stack that has it.
struct OwnUnion(Arc<Union>);

impl Drop for OwnUnion {
    fn drop(&mut self) {
        // Without them the union ends here, and not when one of its threads lets it go.
        self.0.end_threads();
    }
}

impl Stack {
    /// A stack of one layer that nobody else uses.
    #[must_use]
    pub fn of(layer: Arc<dyn Libservice>) -> Self {
        Self { layer, union: None, branches: Vec::new(), incomplete: Vec::new(), coherence: Coherence::Exclusive }
    }

    /// The same with owners that are stored as `ids` say; none: as they are.
    #[must_use]
    pub fn with_ids(mut self, ids: Option<&IdMap>) -> Self {
        if let Some(ids) = ids {
            self.layer = IdMapped::new(Arc::clone(&self.layer), ids.clone());
        }
        self
    }

    /// Whether nobody else changes what this one shows: only a directory that is mounted twice is changed by two, and one that anybody may
    /// change by others.
    #[must_use]
    pub fn is_private(&self) -> bool {
        self.branches.iter().all(|branch| match branch.role {
            Role::Directory => Arc::strong_count(branch) == 1,
            Role::TimedDirectory => false,
            Role::Upper | Role::Lower => true,
        })
    }

    /// Whether so little is dirty that nobody who writes waits for what is written back.
    #[must_use]
    pub fn is_at_ease(&self) -> bool {
        self.caches().all(|cache| cache.is_at_ease())
    }

    fn caches(&self) -> impl Iterator<Item = &Arc<Cache>> {
        self.branches.iter().filter_map(|branch| branch.cache.as_ref())
    }

    /// After how long the changes of others are seen, where anybody may change what it shows.
    #[must_use]
    pub fn timed(&self) -> Option<Duration> {
        self.coherence.timed()
    }

    /// How it stands with the changes of others, of a directory.
    pub(crate) fn coherence(&self) -> Coherence {
        self.coherence
    }

    /// Whether writes are far from being refused because too much would have to be known of where their blocks are.
    #[must_use]
    pub fn knows_few_places(&self) -> bool {
        self.union.as_ref().is_none_or(|union| union.0.knows_few_places())
    }

    /// Where nodes are counted that its union keeps and the kernel does not know. Once, before it is used.
    pub(crate) fn count_pinned(&self, room: Arc<dyn Headroom>) {
        self.union.iter().for_each(|union| union.0.set_pinned_room(Arc::clone(&room)));
    }

    /// Whether another instance can come to change what this one shows.
    #[must_use]
    pub fn can_be_shared(&self) -> bool {
        self.branches.iter().any(|branch| branch.role.is_directory())
    }

    /// Whether `other` changes what this one shows.
    #[must_use]
    pub fn shares_with(&self, other: &Self) -> bool {
        let directories = self.branches.iter().filter(|branch| branch.role.is_directory());
        directories.into_iter().any(|branch| other.branches.iter().any(|theirs| Arc::ptr_eq(branch, theirs)))
    }

    /// Its top layer.
    #[must_use]
    pub fn layer(&self) -> Arc<dyn Libservice> {
        Arc::clone(&self.layer)
    }

    /// Its layer over read-only branches, if it has one.
    #[must_use]
    pub fn layered(&self) -> Option<Arc<dyn Layered>> {
        self.union.as_ref().map(|union| Arc::clone(&union.0) as Arc<dyn Layered>)
    }

    /// What its union did, if it has one.
    #[must_use]
    pub fn union_status(&self) -> Option<UnionStatus> {
        let statistics = self.union.as_ref()?.0.statistics();
        let damage = |damage: poolfs_union::Damage| SketchDamage { path: damage.path, cause: damage.cause };
        let waiting = self.waiting().map(|file| {
            let cause =
                format!("what was accepted for it before a service died cannot be brought to disk: {}", file.cause);
            SketchDamage { path: file.path.clone(), cause }
        });
        Some(UnionStatus {
            sketches: statistics.sketches,
            blocks_moved: statistics.blocks_moved,
            blocks_copied: statistics.blocks_copied,
            blocks_in_transit: statistics.blocks_in_transit,
            copy_ups_deferred: statistics.copy_ups_deferred,
            objects_copied: statistics.objects_copied,
            damaged: statistics.damaged.into_iter().map(damage).chain(waiting).collect(),
        })
    }
}

/// The control side refuses what the cache would.
const _: () = assert!(poolfs_service_protocol::CACHE_BYTES_MIN == poolfs_cache::LIMIT_BYTES_MIN);

/// Where a frozen union is. Held by who makes it, and keeps nobody from others.
type FrozenPlace = Arc<Mutex<Weak<Union>>>;

/// Builds stacks, and holds what they share.
pub struct StackBuilder {
    pool: Arc<CachePool>,
    descriptors: Arc<Descriptors>,
    /// Where services before this one may have left what they had accepted.
    states: Option<StateRoot>,
    listings: Option<ListingShares>,
    branches: Branches,
    /// by their branches, topmost first
    frozen: Mutex<BTreeMap<Vec<Key>, FrozenPlace>>,
}

/// Bytes of a generation of a union's journal: a part of the cache, one in so many, within these bounds.
const JOURNAL_SHARE: u64 = 64;
const JOURNAL_BYTES_MIN: u64 = 16 << 10;
const JOURNAL_BYTES_MAX: u64 = 32 << 20;

/// Most frozen unions that stand one upon the other.
const FROZEN_MAX: usize = 16;

impl StackBuilder {
    /// A builder for a pool with this much cache. What upper branches have accepted outlives this process in a directory of `kept_at`, if
    /// there is one.
    ///
    /// # Errors
    /// When the cache cannot be made.
    pub fn new(cache_bytes: u64, kept_at: Option<PathBuf>) -> Result<Self, StackError> {
        let failed = |error: CacheError| StackError::Cache { bytes: cache_bytes, cause: with_causes(&error) };
        let config = CacheConfig { kept_at, ..CacheConfig::with_limit(cache_bytes) };
        let memory = config.clone();
        let mounted = outside(Deed::Memory, move || CacheMemory::mount(&memory));
        let memory = mounted.unwrap_or_else(|error| Err(CacheError::Mount(error))).map_err(failed)?;
        let pool = CachePool::with_memory(config, memory).map_err(failed)?;
        let descriptors = Descriptors::of_process();
        let (states, listings, branches, frozen) = Default::default();
        Ok(Self { pool, descriptors, states, listings, branches, frozen })
    }

    /// The same, with listings of unions that are counted together.
    pub(crate) fn with_listings(self, listings: ListingShares) -> Self {
        Self { listings: Some(listings), ..self }
    }

    /// The same, and what services have left below a directory (`/run/poolfs`) is brought to disk before their upper branches are used.
    ///
    /// # Errors
    /// When others may change that directory.
    pub fn with_states_of(self, run: &Path) -> Result<Self, StackError> {
        let failed = |error: std::io::Error| StackError::Branch { path: run.to_owned(), cause: error.to_string() };
        // Looked up there, what is mounted in it later is found, too.
        let place = run.to_owned();
        let states = outside(Deed::Memory, move || StateRoot::open(&place)).flatten();
        Ok(Self { states: states.map_err(failed)?, ..self })
    }

    /// The memory of the pool, of which the cache has what others do not use.
    #[must_use]
    pub fn memory(&self) -> Arc<dyn WatchedMemory> {
        Arc::new(EvictableMemory(Arc::clone(&self.pool)))
    }

    /// The process is about to end.
    pub fn end(&self) {
        let pool = Arc::clone(&self.pool);
        if let Err(error) = outside(Deed::Memory, move || pool.end_kept()) {
            warn!(%error, "the cache's memory stays mounted");
        }
    }

    /// Leases for an instance whose clients read the cache by themselves; nothing where the kernel lacks what that needs.
    #[must_use]
    pub fn leases(&self) -> Option<Arc<LeaseTable>> {
        let made = self.pool.leases(LEASES_PER_INSTANCE);
        let made =
            made.inspect_err(|error| warn!(%error, "clients of an instance do not read the cache by themselves"));
        made.ok().flatten().map(|(words, file)| LeaseTable::new(words, file, self.notices()))
    }

    /// Makes the notices of leases.
    fn notices(&self) -> MakeNotice {
        let pool = Arc::clone(&self.pool);
        Box::new(move || Ok(Box::new(pool.notice()?)))
    }

    /// Builds what `spec` says, of the directories at its paths.
    ///
    /// # Errors
    /// When a branch cannot be used; nothing is left behind then.
    pub fn build(&self, spec: &StackSpec) -> Result<Stack, StackError> {
        self.build_of(spec, Directory::open_all(spec)?)
    }

    /// Builds what `spec` says, of these sources.
    pub(crate) fn build_of(&self, spec: &StackSpec, sources: Vec<Arc<dyn Source>>) -> Result<Stack, StackError> {
        let mut sources = sources.into_iter();
        let first = sources
            .next()
            .ok_or_else(|| StackError::Branch { path: PathBuf::new(), cause: "no directory was given".to_owned() })?;
        match spec {
            StackSpec::Directory { coherence, size_bytes, .. } => {
                let (role, kind) = match coherence {
                    Coherence::Exclusive => (Role::Directory, ClaimKind::Alone),
                    Coherence::Uncoordinated => (Role::Directory, ClaimKind::Shared),
                    Coherence::CloseToOpen | Coherence::Strict | Coherence::Timed { .. } => {
                        (Role::TimedDirectory, ClaimKind::Shared)
                    }
                };
                // What others write is not counted.
                let size_bytes = size_bytes.filter(|_| role == Role::Directory);
                let branch = self.branch(&first, role, &Storage { size_bytes, ..Storage::default() }, Some(kind))?;
                uppers::refuse_alone(&branch)?;
                Ok(Stack { branches: vec![Arc::clone(&branch)], coherence: *coherence, ..Stack::of(branch.layer()) })
            }
            StackSpec::Union { storage, immutable_lowers, .. } => {
                let mut branches = vec![self.branch(&first, Role::Upper, storage, Some(ClaimKind::Alone))?];
                for lower in sources {
                    branches.push(self.branch(&lower, Role::Lower, &Storage::default(), None)?);
                }
                let (lowers, mut incomplete) = self.lowers(&branches[1..])?;
                let config = UnionConfig {
                    unlimited_upper: Some(branches[0].cache_layer()),
                    journal_bytes: if branches[0].kept.is_kept { self.journal_bytes() } else { 0 },
                    ..self.union_config(branches[0].layer(), lowers)
                };
                let failed = |cause: String| StackError::Union { upper: branches[0].path().to_owned(), cause };
                let union = Union::open(config).map_err(|error| failed(union_cause(&error)).because(&error))?;
                branches[0].begin();
                if *immutable_lowers {
                    // Only now: with the claims, whoever had one of them as an upper branch has ended, and nothing can fail any more.
                    branches.iter().filter_map(|branch| branch.immutable.as_ref()).for_each(|lower| lower.begin());
                }
                let layer = Timed::over(Layer::Union, Arc::clone(&union) as Arc<dyn Libservice>);
                incomplete.extend(Incomplete::of(&branches[0], &union));
                Ok(Stack { union: Some(Arc::new(OwnUnion(union))), branches, incomplete, ..Stack::of(layer) })
            }
        }
    }

    fn union_config(&self, upper: Arc<dyn Libservice>, lowers: Vec<Lower>) -> UnionConfig {
        let listings_room = self.listings.as_ref().map(|listings| listings.join());
        let paths_room = Some(charged(self.memory()));
        UnionConfig { listings_room, paths_room, ..UnionConfig::new(upper, lowers) }
    }

    /// How long a generation of the journal of a union may become.
    fn journal_bytes(&self) -> u64 {
        (self.pool.statistics().limit_bytes / JOURNAL_SHARE).clamp(JOURNAL_BYTES_MIN, JOURNAL_BYTES_MAX)
    }

    /// The layers of lower branches, topmost first. One that was an upper branch makes a union with those below it, which all stacks share.
    fn lowers(&self, branches: &[Arc<Branch>]) -> Result<(Vec<Lower>, Vec<Incomplete>), StackError> {
        let (mut lowers, mut incomplete) = (Vec::<Lower>::new(), Vec::new());
        let mut depth = 0;
        for (at, branch) in branches.iter().enumerate().rev() {
            let failed = |cause: String| StackError::Branch { path: branch.path().to_owned(), cause };
            let path = branch.path().to_str().filter(|path| path.len() <= LAYER_ID_MAX);
            let cause =
                || failed(format!("its path is longer than {LAYER_ID_MAX} bytes or no UTF-8; move the directory"));
            let layer_id = path.ok_or_else(cause)?.to_owned();
            let layer = branch.layer();
            if !poolfs_union::was_upper(&layer).map_err(|error| failed(with_causes(&error)))? {
                lowers.insert(0, Lower { layer_id, layer, is_union: false });
                continue;
            }
            if branch.claim.get().is_none() {
                let claim = branch.source.claim(ClaimKind::Shared, ENDING);
                let _ = branch.claim.set(claim.map_err(|error| error.of(branch.path()))?);
            }
            depth += 1;
            if depth > FROZEN_MAX {
                return Err(failed(format!("more than {FROZEN_MAX} branches that were uppers; `poolfs flatten` one")));
            }
            let keys: Vec<Key> = branches[at..].iter().map(|branch| branch.key()).collect();
            let place = self.place_of_frozen(keys);
            let mut place = lock(&place);
            let union = match place.upgrade() {
                Some(union) => union,
                None => {
                    let config = self.union_config(layer, std::mem::take(&mut lowers));
                    let union =
                        Union::open_frozen(config).map_err(|error| failed(union_cause(&error)).because(&error))?;
                    *place = Arc::downgrade(&union);
                    union
                }
            };
            incomplete.extend(Incomplete::of(branch, &union));
            lowers = vec![Lower { layer_id, layer: union, is_union: true }];
        }
        Ok((lowers, incomplete))
    }

    /// Where the frozen union of these branches is, or is to be.
    fn place_of_frozen(&self, keys: Vec<Key>) -> FrozenPlace {
        let mut frozen = lock(&self.frozen);
        frozen.retain(|_, place| Arc::strong_count(place) > 1 || lock(place).strong_count() > 0);
        Arc::clone(frozen.entry(keys).or_default())
    }

    /// The branch of a directory: the one in use, or a new one, claimed so.
    fn branch(
        &self,
        source: &Arc<dyn Source>,
        role: Role,
        storage: &Storage,
        claim_as: Option<ClaimKind>,
    ) -> Result<Arc<Branch>, StackError> {
        self.branches.get_or_make(&**source, role, |life| self.make(source, role, storage, claim_as, life))
    }

    fn make(
        &self,
        source: &Arc<dyn Source>,
        role: Role,
        storage: &Storage,
        claim_as: Option<ClaimKind>,
        life: Arc<Life>,
    ) -> Result<Branch, StackError> {
        let path = source.name();
        let failed = |cause: String| StackError::Branch { path: path.to_owned(), cause };
        let claim = OnceLock::new();
        if let Some(kind) = claim_as {
            match source.claim(kind, ENDING) {
                Ok(taken) => drop(claim.set(taken)),
                Err(Unclaimed::NoLocks(error)) if role.is_directory() => {
                    warn!(directory = %path.display(), %error, "whether other services have it mounted cannot be found out");
                }
                Err(error) => return Err(error.of(path)),
            }
        }
        let backend = source.open(role == Role::Lower, &self.descriptors)?;
        let below = Timed::over(source.layer(), Arc::clone(&backend) as Arc<dyn Libservice>);
        let below = Watched::over(below, &life.calls);
        let is_in_memory = source.is_in_memory()?;
        if role == Role::TimedDirectory && is_in_memory {
            return Err(failed("it is in memory, which what others write there would take without a limit".to_owned()));
        }
        let account = storage.size_bytes.map(if is_in_memory { Account::in_memory } else { Account::new });
        let below = match &account {
            Some(account) => UsageAccounting::open(below, account).map_err(|error| failed(with_causes(&error)))?,
            None => below,
        };
        let immutable = (role == Role::Lower).then(|| Immutable::over(Arc::clone(&below), path.to_owned()));
        let below = immutable.clone().map_or(below, |immutable| immutable as Arc<dyn Libservice>);
        let bcow = bcow(&below, role, storage.format).map_err(|error| failed(with_causes(&error)))?;
        let stored = bcow.clone().map_or(below, |bcow| bcow as Arc<dyn Libservice>);
        let below = Arc::clone(&stored);
        // What is stored at a cluster may be written by the next host: nothing that this one keeps in memory is a part of it.
        let (cache, kept) = match claim.get().filter(|_| role == Role::Upper).and_then(Claim::directory) {
            Some(directory) => {
                let upper = UpperRoot { directory, path };
                let (cache, kept) = self.upper_cache(upper, below).map_err(failed)?;
                (Some(cache), kept)
            }
            None => ((role != Role::TimedDirectory).then(|| Cache::new(&self.pool, below)), Kept::default()),
        };
        let source = Arc::clone(source);
        let _memory = SourceMemory::take(&self.pool, source.memory_bytes());
        Ok(Branch { source, role, backend, immutable, bcow, stored, cache, account, kept, claim, _memory, _life: life })
    }

    /// The cache over an upper branch, with what the last service had accepted below it on disk, or in it.
    fn upper_cache(&self, upper: UpperRoot<'_>, below: Arc<dyn Libservice>) -> Result<(Arc<Cache>, Kept), String> {
        let own = self.pool.kept_directory();
        let salvaged = self.states.as_ref().map(|states| crash_state::salvage(upper, &below, states, own));
        let stuck = salvaged.transpose()?.flatten();
        let made = own.map(|_| crash_state::new_key(upper)).transpose();
        let made = made.inspect_err(|error| crash_state::does_not_outlive(upper, error)).ok().flatten();
        let cache = match &made {
            Some((key, branch)) => Cache::recorded(&self.pool, below, *key, branch)
                .map_err(|error| format!("what is written cannot be noted: {error}"))?,
            None => Cache::new(&self.pool, below),
        };
        let key = made.map(|(key, _)| key);
        let carried = stuck.as_ref().map(|stuck| stuck.carry_on(upper, &cache)).transpose()?.unwrap_or_default();
        let is_kept = match (&key, &stuck) {
            (None, _) => false,
            (Some(key), None) => {
                crash_state::mark(upper, key).inspect_err(|error| crash_state::does_not_outlive(upper, error)).is_ok()
            }
            // Whoever comes after a death before it is in use finds what was left before.
            (Some(_), Some(_)) => true,
        };
        Ok((cache, Kept { is_kept, carried, stuck: Mutex::new(stuck.map(|stuck| (stuck, key))) }))
    }

    /// The branches that have not answered a call for more than a second.
    #[must_use]
    pub fn unresponsive_branches(&self) -> Vec<BranchStatus> {
        self.branches
            .calls()
            .into_iter()
            .filter_map(|(path, calls)| {
                let waiting = calls.waiting()?;
                let operation = Operation::ALL.get(usize::from(waiting.code)).map_or("", |operation| operation.name());
                Some(BranchStatus { path, waiting: waiting.status(operation) })
            })
            .collect()
    }

    /// The cache of the pool.
    #[must_use]
    pub fn cache_status(&self) -> CacheStatus {
        let statistics = self.pool.statistics();
        let (mut shared_bytes, mut private_bytes) = (0, 0);
        for (users, usage) in self.branches.caches() {
            *(if users > 1 { &mut shared_bytes } else { &mut private_bytes }) += usage.bytes();
        }
        CacheStatus {
            limit_bytes: statistics.limit_bytes,
            allowed_bytes: statistics.allowed_bytes,
            used_bytes: statistics.used_bytes,
            dirty_bytes: statistics.dirty_bytes,
            shared_bytes,
            private_bytes,
            hits: statistics.hits,
            misses: statistics.misses,
            evictions: statistics.evictions,
            pinned_bytes: statistics.pinned_bytes,
        }
    }
}

/// Whether links of `/proc` must be followed for what layers do: on kernels before Linux 6.13.
pub(crate) fn needs_links_of_proc() -> bool {
    poolfs_local::needs_links_of_proc()
}

/// Finds what layers need of `/proc` before the process loses sight of it.
pub(crate) fn keep_own_descriptors() -> Result<(), String> {
    poolfs_local::keep_own_descriptors().map_err(|error| with_causes(&error))
}

/// Lets threads go on with the umask of the last caller: nothing that the service makes itself depends on it.
pub(crate) fn leave_umasks() {
    poolfs_local::leave_umasks();
}

/// What stores files of a branch compactly: where that is wanted for new ones, or there are some. After a crash of an upper branch all of
/// them are looked at, as nobody can know which were being written.
fn bcow(
    below: &Arc<dyn Libservice>,
    role: Role,
    format: UpperFormat,
) -> Result<Option<Arc<Bcow>>, poolfs_libservice::Error> {
    let layout = match format {
        UpperFormat::Sparse => None,
        UpperFormat::Bcow => BcowConfig::new(Arc::clone(below)).layout,
        UpperFormat::BcowPerformance => Some(Layout::Performance),
        UpperFormat::BcowSpace => Some(Layout::Space),
    };
    if layout.is_none() && !Bcow::is_used(below)? {
        return Ok(None);
    }
    let bcow = Bcow::new(BcowConfig { layout, ..BcowConfig::new(Arc::clone(below)) });
    if role == Role::Upper && !poolfs_union::has_ended_cleanly(below)? {
        bcow.repair_all()?;
    }
    Ok(Some(bcow))
}

/// Why a union cannot be opened. Of what is damaged the words say all.
fn union_cause(error: &poolfs_libservice::Error) -> String {
    match error.message().filter(|_| error.errno() == Errno::EUCLEAN) {
        Some(message) => message.to_owned(),
        None => with_causes(error),
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

impl NoticePage for SharedNotice {
    fn notice(&self) -> &FileNotice {
        self.notice()
    }

    fn reader(&self) -> std::io::Result<OwnedFd> {
        self.reader()
    }
}

#[cfg(test)]
mod tests;
mod watched;
