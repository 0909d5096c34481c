//! Reads the memory counters of the process's control group, by descriptors that were opened before the process was confined.

use rustix::io::{Errno, pread};
use std::fs::File;
use std::io;
use std::path::Path;

/// Most bytes read of `memory.stat`, which has less than half of that.
const STATISTICS_BYTES_MAX: usize = 16 << 10;

/// Of the kernel's memory version 1 does not say how much can be dropped: most of it are names and inodes of branches, which can. One part in so
/// many of the limit is taken for what cannot.
const KERNEL_PART: u64 = 16;

/// A control group of either version.
pub struct MemoryGroup {
    usage: File,
    limit: File,
    statistics: File,
    /// Of version 1, which tells of it nowhere else.
    kernel: Option<File>,
}

/// What a group had at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Most bytes that it may have.
    pub limit: u64,
    /// Bytes that the kernel cannot drop by itself: all but cached files of branches, and what it knows of their names.
    pub kept: u64,
}

impl MemoryGroup {
    /// The group at this place of a mounted hierarchy.
    ///
    /// # Errors
    /// Those of opening its files.
    pub fn open(place: &Path) -> io::Result<Self> {
        let open = |name: &str| File::open(place.join(name));
        let statistics = open("memory.stat")?;
        match open("memory.usage_in_bytes") {
            Ok(usage) => {
                let kernel = open("memory.kmem.usage_in_bytes").ok();
                Ok(Self { usage, limit: open("memory.limit_in_bytes")?, statistics, kernel })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Ok(Self { usage: open("memory.current")?, limit: open("memory.max")?, statistics, kernel: None })
            }
            Err(error) => Err(error),
        }
    }

    /// What it has now. Of the kernel's memory, `of_content` bytes are there for content in memory files and go only with that.
    ///
    /// # Errors
    /// Those of reading, and of a number that is none.
    pub fn read(&self, of_content: u64) -> io::Result<Reading> {
        let mut text = [0; STATISTICS_BYTES_MAX];
        let statistics = read(&self.statistics, &mut text)?;
        let (limit, usage) = (number(&self.limit)?, number(&self.usage)?);
        let kernel = self.kernel.as_ref().map(number).transpose()?;
        Ok(Reading { limit, kept: kept(usage, limit, statistics, kernel, of_content) })
    }
}

/// Of what is used, what cannot be dropped. Pages of memory files count, also when a hole is where they were and somebody keeps them.
fn kept(usage: u64, limit: u64, statistics: &str, kernel: Option<u64>, of_content: u64) -> u64 {
    let sum = |names: &[&str]| -> u64 {
        let lines = statistics.lines().filter_map(|line| line.split_once(' ')).filter(|(name, _)| names.contains(name));
        lines.filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok()).sum()
    };
    let files = sum(&["active_file", "inactive_file"]);
    let of_kernel =
        kernel.map_or_else(|| sum(&["slab_reclaimable"]), |bytes| bytes.saturating_sub(limit / KERNEL_PART));
    usage.saturating_sub(files).saturating_sub(of_kernel.saturating_sub(of_content))
}

fn read<'b>(file: &File, buffer: &'b mut [u8]) -> io::Result<&'b str> {
    let mut length = 0;
    while length < buffer.len() {
        match pread(file, &mut buffer[length..], length as u64) {
            Ok(0) => break,
            Ok(count) => length += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    std::str::from_utf8(&buffer[..length]).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// A number, or the word for none.
fn number(file: &File) -> io::Result<u64> {
    let mut text = [0; 32];
    match read(file, &mut text)?.trim() {
        "max" => Ok(u64::MAX),
        text => text.parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::write;

    const OLD: &str = "cache 100\ninactive_anon 5000\nactive_anon 20\ninactive_file 300\nactive_file 40\n\
                       total_inactive_file 300\ntotal_active_file 40\n";
    const NEW: &str = "anon 5\nactive_file 40\ninactive_file 300\nslab_reclaimable 60\nslab_unreclaimable 7\n";

    #[test]
    fn groups_of_both_versions_are_read() {
        let place = tempfile::tempdir().expect("a folder");
        let file = |name: &str, text: &str| write(place.path().join(name), text).expect("written");
        assert!(MemoryGroup::open(place.path()).is_err());
        file("memory.stat", NEW);
        file("memory.current", "10000\n");
        file("memory.max", "max\n");
        let group = MemoryGroup::open(place.path()).expect("a group");
        assert_eq!(group.read(0).expect("read"), Reading { limit: u64::MAX, kept: 9600 });
        file("memory.max", "16000\n");
        assert_eq!(group.read(0).expect("again"), Reading { limit: 16000, kept: 9600 });
        let of_content = [20, 60, 90].map(|bytes| group.read(bytes).expect("read").kept);
        assert_eq!(of_content, [9620, 9660, 9660], "content keeps what the kernel could drop otherwise");
        file("memory.stat", OLD);
        file("memory.usage_in_bytes", "10000\n");
        file("memory.limit_in_bytes", "16000\n");
        file("memory.kmem.usage_in_bytes", "2500\n");
        let group = MemoryGroup::open(place.path()).expect("a group");
        assert_eq!(group.read(0).expect("read"), Reading { limit: 16000, kept: 10000 - 340 - 1500 });
        let of_content = [700, 1500, 2500].map(|bytes| group.read(bytes).expect("read").kept);
        assert_eq!(of_content, [10000 - 340 - 800, 10000 - 340, 10000 - 340]);
        file("memory.usage_in_bytes", "what");
        assert!(group.read(0).is_err());
    }
}
