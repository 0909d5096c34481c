//! Commands on pools, and the repair of what killed commands left.

use crate::container::ContainerRecord;
use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::record::{PoolRecord, ProcessRecord, RECORD_VERSION, memory_bytes_min};
use crate::service;
use crate::state::Locked;
use crate::text::{print, print_json, print_table, size, table};
use poolfs_host::CpuSet;
use poolfs_service_protocol::is_valid_name;

/// Longest name: instances add a number to it and must stay valid.
const NAME_BYTES_MAX: usize = 48;

/// What a new pool may use.
#[derive(Clone, Debug)]
pub struct NewPool {
    /// Its name.
    pub name: String,
    /// Its CPUs; all that are online if none are given.
    pub cpus: Option<String>,
    /// Memory of service and containers together.
    pub memory_bytes: u64,
    /// The service's cache.
    pub cache_bytes: u64,
    /// A throw-away pool: the command it is made for.
    pub owner: Option<ProcessRecord>,
}

/// Make a pool.
pub fn create(context: &Context, new: NewPool) -> Result<()> {
    if !is_valid_name(&new.name) || new.name.len() > NAME_BYTES_MAX {
        return Err(crate::state::bad_name("pool", &new.name));
    }
    let thing = format!("pool {}", new.name);
    let online = CpuSet::online(&*context.host)?;
    let cpus = match &new.cpus {
        Some(text) => CpuSet::parse(text).map_err(|error| Failure::new(&thing, error, "write --cpus as in 0-1,3"))?,
        None => online.clone(),
    };
    let missing = cpus.missing_from(&online);
    if !missing.is_empty() {
        return Err(Failure::new(thing, format!("CPUs {missing:?} are not online"), format!("online are {online}")));
    }
    let memory_min = memory_bytes_min(new.cache_bytes);
    if new.memory_bytes < memory_min {
        let cause = format!("a cache of {} needs {} of memory at least", size(new.cache_bytes), size(memory_min));
        return Err(Failure::new(thing, cause, "give it more --memory or less --cache"));
    }
    let record = PoolRecord {
        version: RECORD_VERSION,
        name: new.name,
        cpus: cpus.to_string(),
        memory_bytes: new.memory_bytes,
        cache_bytes: new.cache_bytes,
        owner: new.owner,
        service: None,
        next_instance: 1,
        instances: Vec::new(),
    };
    context.pools()?.create(&record.name, &record, |_| Ok(()))
}

/// Print the pools.
pub fn list(context: &Context) -> Result<()> {
    let pools: Vec<PoolRecord> = context.pools()?.peek_all()?;
    if context.json {
        return print_json(&pools);
    }
    let mut table = table(&["name", "cpus", "memory", "cache", "service", "mounts"]);
    for pool in &pools {
        let service = service_state(context, pool);
        let (memory, cache) = (size(pool.memory_bytes), size(pool.cache_bytes));
        table.add_row([&pool.name, &pool.cpus, &memory, &cache, service, &pool.instances.len().to_string()]);
    }
    print_table(&table)
}

/// In a word, how a pool's service is.
pub fn service_state(context: &Context, pool: &PoolRecord) -> &'static str {
    match pool.service_alive(&*context.host) {
        None => "not running",
        Some(true) => "running",
        Some(false) => "dead",
    }
}

/// Print everything about a pool.
pub fn inspect(context: &Context, name: &str) -> Result<()> {
    let pools = context.pools()?;
    let pool: PoolRecord = pools.peek(name)?.ok_or_else(|| pools.absent(name))?;
    if context.json {
        return print_json(&pool);
    }
    let mut text = format!(
        "pool      {}\ncpus      {}\nmemory    {}\ncache     {}\nservice   {}",
        pool.name,
        pool.cpus,
        size(pool.memory_bytes),
        size(pool.cache_bytes),
        service_state(context, &pool)
    );
    if let Some(process) = &pool.service {
        text += &format!(" (process {})", process.pid);
    }
    for instance in &pool.instances {
        text += &format!("\nmounted   {} at {}", instance.spec.instance, instance.spec.mount_point.display());
    }
    print(&(text + "\n"))
}

/// Remove a pool.
pub fn remove(context: &Context, name: &str) -> Result<()> {
    let mut pool = context.pools()?.lock::<PoolRecord>(name)?;
    let containers: Vec<ContainerRecord> = context.containers()?.peek_all()?;
    if let Some(container) = containers.iter().find(|container| container.pool == name) {
        let remedy = format!("end and remove it with `poolfs stop {0}` and `poolfs rm {0}`", container.name);
        return Err(Failure::new(format!("pool {name}"), format!("it has the container {}", container.name), remedy));
    }
    let alive = pool.record.service_alive(&*context.host) == Some(true);
    if let Some(instance) = pool.record.instances.first().filter(|_| alive) {
        let place = instance.spec.mount_point.display();
        let remedy = format!("unmount it with `poolfs umount {name} {place}`");
        return Err(Failure::new(format!("pool {name}"), format!("it is mounted at {place}"), remedy));
    }
    service::end(context, &mut pool)?;
    pool.remove()
}

/// Lock a pool and forget what killed commands left in it.
pub fn lock(context: &Context, name: &str) -> Result<Locked<PoolRecord>> {
    let mut pool = context.pools()?.lock::<PoolRecord>(name)?;
    repair(context, &mut pool)?;
    Ok(pool)
}

/// Unmount what was mounted for commands that are dead.
fn repair(context: &Context, pool: &mut Locked<PoolRecord>) -> Result<()> {
    let orphaned = |owner: &Option<ProcessRecord>| owner.as_ref().is_some_and(|owner| !owner.is_alive(&*context.host));
    let orphans: Vec<String> = pool
        .record
        .instances
        .iter()
        .filter(|instance| orphaned(&instance.owner))
        .map(|instance| instance.spec.instance.clone())
        .collect();
    for instance in orphans {
        crate::mount::unmount_instance(context, pool, &instance)?;
    }
    Ok(())
}

/// Remove throw-away pools whose commands were killed. Failures are left for the next time.
pub fn sweep(context: &Context) {
    let swept = || -> Result<()> {
        let pools = context.pools()?;
        for pool in pools.peek_all::<PoolRecord>()? {
            let dead = |record: &PoolRecord| record.owner.as_ref().is_some_and(|o| !o.is_alive(&*context.host));
            if !dead(&pool) {
                continue;
            }
            if let Some(mut locked) = pools.try_lock::<PoolRecord>(&pool.name)?.filter(|locked| dead(&locked.record)) {
                service::end(context, &mut locked)?;
                locked.remove()?;
            }
        }
        Ok(())
    };
    if let Err(failure) = swept() {
        tracing::warn!(%failure, "what a killed command left could not be removed");
    }
}
