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
}
