//! Limits of writable directories on a tmpfs: their content is memory of the pool's service.
//!
//! The kernel kills a service that has too much memory. So each such directory gets a limit, the service gets as much more memory, and the
//! containers have as much less. What was written stays the service's memory when the directory is unmounted, until the pool's control
//! groups go with its last mount.

use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::places::{Found, FoundOnHost};
use crate::record::{InstanceRecord, MemoryRecord, PoolRecord, memory_bytes_min};
use crate::state::Locked;
use crate::text::{UPPER_SIZE_MIN, complain, size};
use poolfs_host::MountEntry;
use poolfs_local::{DirectoryId, InMemory, PrivateMount};
use poolfs_service_protocol::{StackSpec, Storage};
use std::path::Path;

/// One in so many parts of the memory that is left is what a directory gets when nobody says how much.
const PART: u64 = 2;

/// Options of a tmpfs by which it takes 2 MiB for a byte.
const HUGE_PAGES: [&str; 2] = ["huge=always", "huge=within_size"];

/// What limits are multiples of.
const UNIT: u64 = 1 << 20;

/// The directory of a stack that is written to, if it is one of the host: opened, and as its service is given it.
pub type Written<'a> = Option<(&'a FoundOnHost, &'a PrivateMount)>;

/// [`Written`] of what was found of a stack.
pub fn written<'a>(found: &'a [Found], mounts: &'a [PrivateMount]) -> Written<'a> {
    found.first().and_then(Found::on_host).zip(mounts.first())
}

/// The stack with the limit that it needs where what it writes is in memory, which is said.
pub fn limited(pool: &PoolRecord, stack: StackSpec, written: Written<'_>) -> Result<StackSpec> {
    let (path, wanted) = match &stack {
        StackSpec::Union { upper, storage, .. } => (upper, storage.size_bytes),
        StackSpec::Directory { directory, .. } => (directory, None),
    };
    let Some((found, mount)) = written else { return Ok(stack) };
    let own_size = match mount.in_memory().map_err(|error| Failure::file(path, error))? {
        None => return Ok(stack),
        Some(InMemory::Tmpfs { size_bytes }) => size_bytes,
        Some(InMemory::Ramfs) => {
            let cause = "it is on a ramfs: what is written there is the pool's memory, and has no limit";
            return Err(Failure::usage(path.display().to_string(), cause, "use a directory of a disk, or of a tmpfs"));
        }
    };
    if matches!(&stack, StackSpec::Directory { coherence, .. } if coherence.timed().is_some()) {
        let cause = "it is on a tmpfs: what others write there would be the pool's memory, and has no limit";
        let remedy = "use a directory of a disk, or mount it with --coherence exclusive";
        return Err(Failure::usage(path.display().to_string(), cause, remedy));
    }
    if found.mount.iter().flat_map(MountEntry::options).any(|option| HUGE_PAGES.contains(&option)) {
        let cause =
            "it is on a tmpfs with huge pages: what is written there takes more of the pool's memory than it is long";
        let remedy = "use a directory of a disk, or of a tmpfs that is mounted without huge=";
        return Err(Failure::usage(path.display().to_string(), cause, remedy));
    }
    let room = Room::of(pool, found);
    let bytes = room.part(path, wanted, own_size)?;
    let is_union = matches!(stack, StackSpec::Union { .. });
    if wanted.is_none() {
        let more =
            if is_union { format!("; --upper-size sets another, up to {}", size(room.left)) } else { String::new() };
        complain(&format!(
            "poolfs: {} is on a tmpfs, which takes the pool's memory: it has a limit of {}{more}",
            path.display(),
            size(bytes)
        ));
    }
    Ok(match stack {
        StackSpec::Union { upper, lowers, storage, immutable_lowers } => {
            let storage = Storage { size_bytes: Some(bytes), ..storage };
            StackSpec::Union { upper, lowers, storage, immutable_lowers }
        }
        StackSpec::Directory { directory, coherence, .. } => {
            StackSpec::Directory { directory, coherence, size_bytes: Some(bytes) }
        }
    })
}

/// What of a pool's memory a directory can have.
struct Room {
    /// All that is neither the service's, nor the least of the containers, nor another directory's.
    left: u64,
    /// What it has already.
    own: Option<u64>,
}

impl Room {
    fn of(pool: &PoolRecord, found: &FoundOnHost) -> Room {
        let is_own = |record: &&MemoryRecord| record.directory == found.id();
        let own = pool.in_memory.iter().find(is_own).map(|record| record.bytes);
        let others = pool.in_memory_bytes() - own.unwrap_or(0);
        let taken = memory_bytes_min(pool.cache_bytes).saturating_add(others);
        Room { left: pool.memory_bytes.saturating_sub(taken) / UNIT * UNIT, own }
    }

    fn part(&self, path: &Path, wanted: Option<u64>, own_size: Option<u64>) -> Result<u64> {
        let usual = self.own.unwrap_or((self.left / PART / UNIT * UNIT).min(own_size.unwrap_or(u64::MAX)));
        let bytes = wanted.unwrap_or(usual.max(UPPER_SIZE_MIN));
        if bytes <= self.left {
            return Ok(bytes);
        }
        let left = size(self.left);
        let cause = format!("it is on a tmpfs, which takes the pool's memory, and {left} of that are left for it");
        let smaller =
            if wanted.is_some() && self.left >= UPPER_SIZE_MIN { "give it a smaller --upper-size, " } else { "" };
        let remedy = format!("{smaller}use a directory of a disk, or a pool with more --memory");
        Err(Failure::usage(path.display().to_string(), cause, remedy))
    }
}

/// Give the pool's service the memory for a stack that [`limited`] has limited.
pub fn set_aside(
    context: &Context,
    pool: &mut Locked<PoolRecord>,
    stack: &StackSpec,
    written: Written<'_>,
) -> Result<()> {
    let (path, bytes) = match stack {
        StackSpec::Union { upper, storage, .. } => (upper, storage.size_bytes),
        StackSpec::Directory { directory, size_bytes, .. } => (directory, *size_bytes),
    };
    let Some(((found, mount), bytes)) = written.zip(bytes) else { return Ok(()) };
    if mount.in_memory().map_err(|error| Failure::file(path, error))?.is_none() {
        return Ok(());
    }
    let before = pool.record.in_memory.clone();
    let directory = found.id();
    match pool.record.in_memory.iter_mut().find(|record| record.directory == directory) {
        Some(record) => record.bytes = record.bytes.max(bytes),
        None => pool.record.in_memory.push(MemoryRecord { directory, bytes }),
    }
    if pool.record.in_memory == before {
        return Ok(());
    }
    pool.note().and_then(|()| set_limits(context, &pool.record)).inspect_err(|_| {
        pool.record.in_memory = before;
        // The first failure is the one to report.
        let _ = pool.note().and_then(|()| set_limits(context, &pool.record));
    })
}

/// What was set aside for a directory is as it was `before`, unless another mount has it: what it was set aside for was not mounted.
pub fn give_back(
    context: &Context,
    pool: &mut Locked<PoolRecord>,
    directory: Option<DirectoryId>,
    before: &[MemoryRecord],
) -> Result<()> {
    let is_its = |record: &&MemoryRecord| Some(record.directory) == directory;
    let is_used = |known: &InstanceRecord| known.places.first().is_some_and(|place| place.id() == directory);
    let earlier = before.iter().find(is_its).copied();
    let now = pool.record.in_memory.iter().find(is_its).copied();
    if now == earlier || now.is_none() || pool.record.instances.iter().any(is_used) {
        return Ok(());
    }
    pool.record.in_memory.retain(|record| !is_its(&record));
    pool.record.in_memory.extend(earlier);
    pool.note().and_then(|()| set_limits(context, &pool.record))
}

/// Divide the pool's memory between its service and its containers as the record says.
fn set_limits(context: &Context, pool: &PoolRecord) -> Result<()> {
    let groups = context.groups()?;
    let limits = pool.limits()?;
    let containers = limits.memory_bytes.saturating_sub(limits.service_bytes);
    let used = groups.containers_memory_kept(&*context.host, &pool.name).unwrap_or(0);
    if used > containers {
        // Where the kernel does not refuse such a limit, it kills for it.
        let (used, containers) = (size(used), size(containers));
        let cause = format!(
            "its containers have {used} of memory now, and would have a limit of {containers} beside such a tmpfs"
        );
        let remedy = "give a smaller --upper-size, use a directory of a disk, or end something that runs in the pool";
        return Err(Failure::in_use(format!("pool {}", pool.name), cause, remedy));
    }
    Ok(groups.make_pool(&*context.host, &pool.name, &limits)?)
}

/// Where the pool's control groups have gone, nothing counts there any more.
pub fn forget(context: &Context, pool: &mut Locked<PoolRecord>) -> Result<()> {
    if pool.record.in_memory.is_empty() {
        return Ok(());
    }
    let groups = context.groups()?;
    if groups.memory_used(&*context.host, &pool.record.name).is_some() {
        return Ok(());
    }
    pool.record.in_memory.clear();
    pool.note()
}
