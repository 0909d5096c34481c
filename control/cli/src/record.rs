//! The saved state of a pool: its limits, service and instances, as a JSON document.

use crate::places::Whereabouts;
use poolfs_host::{CpuSet, Host, PoolLimits, ProcessIdentity};
use poolfs_local::DirectoryId;
use poolfs_service_protocol::MountSpec;
use serde::{Deserialize, Serialize};

/// The version of the documents' form.
pub const RECORD_VERSION: u32 = 1;
/// What a service needs besides its cache: threads, names, attributes.
const SERVICE_BASE_BYTES: u64 = 128 << 20;
/// The least that must be left for containers.
const CONTAINERS_BYTES_MIN: u64 = 64 << 20;

/// A process, so that a later one with the same number is not mistaken for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessRecord {
    /// Its number.
    pub pid: u32,
    /// When it started.
    pub start_ticks: u64,
    /// Since which boot.
    pub boot_id: String,
}

impl ProcessRecord {
    /// Of a living process.
    pub fn of(host: &dyn Host, pid: u32) -> Option<ProcessRecord> {
        let ProcessIdentity { pid, start_ticks, boot_id } = host.identify(pid)?;
        Some(ProcessRecord { pid, start_ticks, boot_id })
    }

    /// The process itself.
    pub fn identity(&self) -> ProcessIdentity {
        ProcessIdentity { pid: self.pid, start_ticks: self.start_ticks, boot_id: self.boot_id.clone() }
    }

    /// Whether it is alive.
    pub fn is_alive(&self, host: &dyn Host) -> bool {
        self.identity().is_alive(host)
    }
}

/// A mounted instance of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InstanceRecord {
    /// What it is and where.
    pub spec: MountSpec,
    /// The command it was mounted for: when that has died, nobody needs it.
    pub owner: Option<ProcessRecord>,
    /// The container whose root it is.
    pub container: Option<String>,
    /// The command that mounts it, until it is mounted. See [`InstanceRecord::is_being_mounted`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mounter: Option<ProcessRecord>,
    /// Where its directories lie, in the order of [`StackSpec::branches`](poolfs_service_protocol::StackSpec::branches).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub places: Vec<Whereabouts>,
    /// The device of its filesystem, as the kernel writes it, once it is mounted. What has files of it open is found by that when it is in no mount table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Whether it is a store of images that a command changes: the layers that lie in it stay as they are, so others may use them meanwhile.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_store: bool,
}

impl InstanceRecord {
    /// Whether a command mounts it now: that command does not have the pool's lock meanwhile, and the service may or may not have the instance.
    /// Of one that was killed meanwhile, the next command on the pool leaves nothing.
    pub fn is_being_mounted(&self, host: &dyn Host) -> bool {
        self.mounter.as_ref().is_some_and(|mounter| mounter.is_alive(host))
    }

    /// Whether the command that was to mount it has ended without that: nobody was told that it is there.
    pub fn was_given_up(&self, host: &dyn Host) -> bool {
        self.mounter.is_some() && !self.is_being_mounted(host)
    }
}

/// A pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolRecord {
    /// The version of this form.
    pub version: u32,
    /// Its name.
    pub name: String,
    /// Its CPUs.
    pub cpus: String,
    /// Memory of service and containers together.
    pub memory_bytes: u64,
    /// The service's cache.
    pub cache_bytes: u64,
    /// A throw-away pool: the command it was made for.
    pub owner: Option<ProcessRecord>,
    /// The service that was started last and not ended in order.
    pub service: Option<ProcessRecord>,
    /// The number of the next instance.
    pub next_instance: u64,
    /// What is mounted.
    pub instances: Vec<InstanceRecord>,
    /// Directories in memory (tmpfs) to which its service has written since it has its control group: they count there until that goes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub in_memory: Vec<MemoryRecord>,
    /// What Ceph clusters know it by, once it has mounted something of one: no other pool has this name, on any host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceph_holder: Option<String>,
}

/// A directory in memory, and how much of the pool's memory it may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryRecord {
    /// Device and inode.
    pub directory: DirectoryId,
    /// The most that it may take.
    pub bytes: u64,
}

impl PoolRecord {
    /// A pool with this service, for tests.
    #[cfg(test)]
    pub fn for_test(service: Option<ProcessRecord>) -> PoolRecord {
        PoolRecord {
            version: RECORD_VERSION,
            name: "web".into(),
            cpus: "0".into(),
            memory_bytes: 1 << 30,
            cache_bytes: 64 << 20,
            owner: None,
            service,
            next_instance: 1,
            instances: Vec::new(),
            in_memory: Vec::new(),
            ceph_holder: None,
        }
    }

    /// What the control groups of the pool are given.
    pub fn limits(&self) -> poolfs_host::Result<PoolLimits> {
        Ok(PoolLimits {
            cpus: CpuSet::parse(&self.cpus)?,
            memory_bytes: self.memory_bytes,
            service_bytes: service_bytes(self.cache_bytes).saturating_add(self.in_memory_bytes()),
        })
    }

    /// The part of its memory that is set aside for directories in memory.
    pub fn in_memory_bytes(&self) -> u64 {
        self.in_memory.iter().fold(0, |sum, record| sum.saturating_add(record.bytes))
    }

    /// Whether its service is alive; none when it has none.
    pub fn service_alive(&self, host: &dyn Host) -> Option<bool> {
        self.service.as_ref().map(|service| service.is_alive(host))
    }
}

/// The service's part of a pool's memory.
pub fn service_bytes(cache_bytes: u64) -> u64 {
    cache_bytes.saturating_add(cache_bytes / 8).saturating_add(SERVICE_BASE_BYTES)
}

/// The least memory of a pool with such a cache.
pub fn memory_bytes_min(cache_bytes: u64) -> u64 {
    service_bytes(cache_bytes).saturating_add(CONTAINERS_BYTES_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_numbers_fit() {
        assert!(memory_bytes_min(512 << 20) < 2 << 30);
        assert_eq!(memory_bytes_min(u64::MAX), u64::MAX);
    }
}
