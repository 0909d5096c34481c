//! Memory of a pool's control groups, with the page cache that is charged to them.

use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// Bytes of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Of processes, files and the kernel's own notes together.
    pub all: u64,
    /// Pages of files, those of shared memory among them.
    pub file: u64,
}

impl Memory {
    /// What was added since `before`.
    pub fn since(self, before: Self) -> Self {
        Self { all: self.all.saturating_sub(before.all), file: self.file.saturating_sub(before.file) }
    }
}

/// What a pool's groups use now; nothing when it has none.
pub fn used(pool: &str) -> Result<Memory> {
    let places = [
        ("/sys/fs/cgroup/memory", "memory.usage_in_bytes", "total_cache"),
        ("/sys/fs/cgroup", "memory.current", "file"),
    ];
    for (mount, usage, key) in places {
        let group: PathBuf = Path::new(mount).join("poolfs").join(pool);
        let Ok(all) = fs::read_to_string(group.join(usage)) else { continue };
        let stat = fs::read_to_string(group.join("memory.stat"))?;
        return Ok(Memory { all: all.trim().parse()?, file: value(&stat, key)? });
    }
    Ok(Memory::default())
}

/// Where the groups of pools may be, by the version of the kernel's interface.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"];

/// Bytes that the processes of a pool's groups have in memory, but for those of a program with this name.
pub fn resident(pool: &str, but: &str) -> Result<u64> {
    let groups = MOUNTS.map(|mount| Path::new(mount).join("poolfs").join(pool));
    let group =
        groups.into_iter().find(|group| group.exists()).with_context(|| format!("pool {pool} has no groups"))?;
    let mut pids = Vec::new();
    processes(&group, &mut pids)?;
    let mut bytes = 0;
    for pid in pids {
        let place = Path::new("/proc").join(&pid);
        // It may have ended meanwhile.
        let Ok(name) = fs::read_to_string(place.join("comm")) else { continue };
        let Ok(status) = fs::read_to_string(place.join("status")) else { continue };
        if name.trim() != but {
            bytes += kibibytes(&status, "VmRSS:").unwrap_or(0) << 10;
        }
    }
    Ok(bytes)
}

fn processes(group: &Path, pids: &mut Vec<String>) -> Result<()> {
    pids.extend(fs::read_to_string(group.join("cgroup.procs"))?.lines().map(str::to_owned));
    for entry in fs::read_dir(group)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            processes(&entry.path(), pids)?;
        }
    }
    Ok(())
}

fn kibibytes(status: &str, key: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

fn value(stat: &str, key: &str) -> Result<u64> {
    let line = stat.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
    line.with_context(|| format!("no {key} in memory.stat"))?
        .trim()
        .parse()
        .with_context(|| format!("{key} is no number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_a_whole_word() {
        let stat = "file_mapped 1\nfile 20\ntotal_cache 3\n";
        assert_eq!(value(stat, "file").expect("there"), 20);
        assert_eq!(value(stat, "total_cache").expect("there"), 3);
        assert!(value(stat, "total").is_err() && value(stat, "cache").is_err());
    }

    #[test]
    fn resident_memory_is_read_from_a_status() {
        let status = "VmHWM:\t    9 kB\nVmRSS:\t    7 kB\nRssAnon:\t 3 kB\n";
        assert_eq!(kibibytes(status, "VmRSS:"), Some(7));
        assert_eq!(kibibytes(status, "VmSwap:"), None);
    }
}
