//! The status report of a service.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Which way an operation came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OperationPath {
    /// by request over shared memory
    Library,
    /// by the kernel, through FUSE
    Fuse,
}

/// How the requests of an instance come from the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// read from `/dev/fuse`
    #[default]
    DevFuse,
    /// by rings in shared memory, one queue for each CPU
    IoUring,
}

impl Transport {
    /// Its name, for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::DevFuse => "/dev/fuse",
            Self::IoUring => "io_uring",
        }
    }
}

/// How often one kind of operation was served on one path, and how long it took.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindStatus {
    /// Operations served.
    pub count: u64,
    /// Those that ended with an errno.
    pub errors: u64,
    /// Median service time, nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile of the service time, nanoseconds.
    pub p99_ns: u64,
}

/// Service times by powers of two: bucket n counts times of 2^n up to 2^(n+1)-1 nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram(pub [u64; Self::BUCKETS]);

impl Default for Histogram {
    fn default() -> Self {
        Self([0; Self::BUCKETS])
    }
}

impl Histogram {
    /// How many buckets there are; the last one has no upper edge.
    pub const BUCKETS: usize = 40;

    /// The bucket in which a time of so many nanoseconds falls.
    #[must_use]
    pub fn bucket(nanoseconds: u64) -> usize {
        (nanoseconds.max(1).ilog2() as usize).min(Self::BUCKETS - 1)
    }

    /// Counts a time.
    pub fn record(&mut self, nanoseconds: u64) {
        self.0[Self::bucket(nanoseconds)] += 1;
    }

    /// How many times were counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The upper edge of the bucket in which the `percent`th percentile falls; 0 when nothing was counted.
    #[must_use]
    pub fn percentile(&self, percent: u64) -> u64 {
        let rank = (self.count() * percent).div_ceil(100);
        let mut seen = 0;
        for (bucket, &count) in self.0.iter().enumerate() {
            seen += count;
            if count > 0 && seen >= rank {
                return (2 << bucket) - 1;
            }
        }
        0
    }
}

/// The cache of a service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheStatus {
    /// Most bytes the cache may hold.
    pub limit_bytes: u64,
    /// Of those, what it may hold now: less while there is too little memory.
    #[serde(default)]
    pub allowed_bytes: u64,
    /// Bytes it holds.
    pub used_bytes: u64,
    /// Bytes not yet written back, or not stored yet where they can be found.
    pub dirty_bytes: u64,
    /// Bytes of branches that more than one instance uses.
    pub shared_bytes: u64,
    /// Bytes of branches that one instance uses.
    pub private_bytes: u64,
    /// Block reads answered from the cache.
    pub hits: u64,
    /// Block reads that went below.
    pub misses: u64,
    /// Blocks evicted.
    pub evictions: u64,
    /// Bytes that stay because the kernel maps them by itself.
    #[serde(default)]
    pub pinned_bytes: u64,
}

/// The memory of a service's control group, as of the last look at it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryStatus {
    /// Most bytes that it may have.
    pub limit_bytes: u64,
    /// Bytes that the kernel cannot drop by itself.
    pub kept_bytes: u64,
    /// `plenty`, `reduced` (the cache has less than its limit), `short` (clients are given none of the cache) or `exhausted`.
    pub state: String,
    /// How often it became short.
    pub shortages_total: u64,
    /// How often clients of an instance were found to keep what was taken away of the cache.
    pub segments_kept_total: u64,
    /// Instances whose clients are given none of the cache for that.
    pub instances_without_segments: u64,
}

/// A sketch that cannot be read, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SketchDamage {
    /// The file, relative to the union's root.
    pub path: String,
    /// What is wrong with it.
    pub cause: String,
}

/// What a union did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnionStatus {
    /// Files copied up as sketches.
    pub sketches: u64,
    /// Blocks of 4096 bytes that moved to the upper branch because they were written.
    pub blocks_moved: u64,
    /// Blocks of which a part had to be copied from below.
    pub blocks_copied: u64,
    /// Blocks written in part whose rest is still to be copied from below.
    pub blocks_in_transit: u64,
    /// Files written for the first time that are still to be copied up.
    #[serde(default)]
    pub copy_ups_deferred: u64,
    /// Directories, links and special files copied up.
    pub objects_copied: u64,
    /// Sketches that answer EIO.
    pub damaged: Vec<SketchDamage>,
}

/// How many reads were done which way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReadCounts {
    /// By the library without a request, as the clients tell.
    pub direct: u64,
    /// By request.
    pub library: u64,
    /// By the kernel's requests; what it had in its pages is not among them.
    #[serde(rename = "fuse")]
    pub kernel: u64,
}

/// Programs that the kernel maps and reads by itself, from the pool's cache. Of those reads nobody hears.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramStatus {
    /// How often one was opened so.
    pub opens: u64,
    /// Files that may be mapped so now.
    pub files: u64,
    /// Their bytes, which stay in the cache.
    pub bytes: u64,
}

/// Why a client that asked to read a file without requests may not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NotDirect {
    /// this kernel cannot show the cache to clients read-only
    Host,
    /// somebody has the file open for writing without the library
    Writers,
    /// somebody has written through a mapping of it
    Mapped,
    /// what somebody wrote through a mapping of it could not be written back
    WriteBackFailed,
    /// the instance has no lease left
    Leases,
    /// there is too little memory
    Memory,
    /// clients of the instance keep what was taken away of what they were given
    Kept,
    /// others may change the directory: nothing of it is cached
    Coherence,
    /// its bytes are in two branches, or so many files are read that way that there is no room for another
    Layers,
}

impl NotDirect {
    /// The cause, for people.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Host => "this kernel cannot show the cache to clients read-only",
            Self::Writers => "somebody has the file open for writing without the library",
            Self::Mapped => "somebody has written through a mapping of it",
            Self::WriteBackFailed => "what somebody wrote through a mapping of it could not be written back",
            Self::Leases => "the instance has no lease left",
            Self::Memory => "the pool's service has too little memory",
            Self::Kept => "clients of the instance keep memory that was taken away",
            Self::Coherence => "others may change the directory (--coherence)",
            Self::Layers => "its bytes are in two branches, or too many files are read that way",
        }
    }
}

/// Why somebody who wrote had to wait for the answer, or must again from here on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NotPosted {
    /// the mount does not allow it
    Switched,
    /// other instances can show the same directory, or others may change it
    SharedBranch,
    /// the file was opened with `O_SYNC`, `O_DSYNC` or `O_DIRECT`
    Flags,
    /// others have the file open, or may have the description, or the kernel holds pages of it
    Shared,
    /// somebody else came to have to do with the file, or a descriptor of it was closed
    Observed,
    /// there is too little room in the branch
    Room,
    /// disk quotas of the branch may refuse what it has room for
    Quotas,
    /// as many files are written that way as may be, or the file is too long for it, or its union knows the places of so many blocks that
    /// further ones may be refused
    Limit,
    /// what was written took long, as when the branch cannot take more
    Slow,
    /// a posted write failed
    Failed,
}

impl NotPosted {
    /// The cause, for people.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Switched => "the mount has posted writes switched off",
            Self::SharedBranch => "other instances can show the same directory, or others may change it",
            Self::Flags => "the file was opened with O_SYNC, O_DSYNC or O_DIRECT",
            Self::Shared => "others have the file or its description, or the kernel holds pages of it",
            Self::Observed => "somebody else came to use the file, or a descriptor of it was closed",
            Self::Room => "there is too little room in the branch",
            Self::Quotas => "the filesystem of the branch has disk quotas, which may refuse what it has room for",
            Self::Limit => {
                "as many files are written that way as may be, or the file or what is known of its blocks is too large for it"
            }
            Self::Slow => "the branch takes what is written too slowly",
            Self::Failed => "a posted write failed",
        }
    }
}

/// One filesystem instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InstanceStatus {
    /// Its name.
    pub instance: String,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// How the kernel's requests come.
    pub transport: Transport,
    /// Sessions of the library now.
    pub sessions: u64,
    /// Clients that got no session and were left to the kernel, by the name of the errno that stood against it.
    pub sessions_refused: BTreeMap<String, u64>,
    /// Open handles.
    pub handles: u64,
    /// Nodes the kernel knows.
    pub nodes: u64,
    /// Bytes of its files the kernel's page cache holds besides, for FUSE readers (an estimate from what it read).
    pub kernel_cached_bytes: u64,
    /// By path, then by kind of operation.
    pub operations: BTreeMap<OperationPath, BTreeMap<String, KindStatus>>,
    /// Reads, by the way they took.
    #[serde(default)]
    pub reads: ReadCounts,
    /// Programs that the kernel maps and reads by itself; nothing where this kernel cannot.
    #[serde(default)]
    pub programs: Option<ProgramStatus>,
    /// How often a client that asked to read a file without requests may not, by cause.
    #[serde(default)]
    pub not_direct: BTreeMap<NotDirect, u64>,
    /// Writes of the library that did not wait for their answers; it counts the writes that it posted, of which a request may have carried several.
    #[serde(default)]
    pub posted_requests: u64,
    /// How often somebody who wrote had to wait for the answer, or must again, by cause.
    #[serde(default)]
    pub not_posted: BTreeMap<NotPosted, u64>,
    /// Requests that wait; nothing without one.
    #[serde(default)]
    pub waiting: Option<WaitStatus>,
    /// Requests of the kernel that failed because they took longer than the mount's time limit; nothing where it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timed_out: Option<u64>,
    /// Of a union.
    pub union: Option<UnionStatus>,
}

/// Calls that have been in flight for more than a second.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitStatus {
    /// How many there are; of more than 128 only so many.
    pub calls: u64,
    /// Milliseconds since the longest of them began.
    pub longest_ms: u64,
    /// What that one does.
    pub operation: String,
}

/// A branch that does not respond.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BranchStatus {
    /// Its directory, as it was named by the mount that first used it.
    pub path: PathBuf,
    /// Its calls that wait.
    pub waiting: WaitStatus,
}

/// What a service knows of how the writes of an adopted file are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WriteStatus {
    /// The session may post: small writes return before the service has taken them, as far as the library does not decide otherwise.
    pub granted: bool,
    /// Posted requests of this open file that were taken, of which each may have carried several writes.
    pub posted_requests: u64,
    /// Why the session may not post, if it may not: what stands against it now, or stood when that was decided last. Nothing also where that was never to be decided.
    pub not_posted: Option<NotPosted>,
}

/// A file that a process's session has adopted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptedFile {
    /// Its inode number, as the process sees it.
    pub inode: u64,
    /// Whether it may be written through this description.
    pub writable: bool,
    /// Its content is left to the kernel all the same: somebody has it open for writing without the library, or mapped.
    pub left_to_kernel: bool,
    /// Reads, by the way they took.
    #[serde(default)]
    pub reads: ReadCounts,
    /// Why it is not read without requests, when somebody has asked for that and may not.
    #[serde(default)]
    pub not_direct: Option<NotDirect>,
    /// How its writes are taken.
    #[serde(default)]
    pub writes: WriteStatus,
}

/// What one instance knows of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// The instance's name.
    pub instance: String,
    /// Whether the process has a session.
    pub has_session: bool,
    /// What the session has adopted.
    pub adopted: Vec<AdoptedFile>,
    /// The name of the errno its last request for a session was refused with. Only the latest refusals are remembered.
    pub refused: Option<String>,
    /// Inode numbers of the programs that the kernel maps and reads by itself for whoever has them open.
    #[serde(default)]
    pub passed_through: Vec<u64>,
}

/// A whole service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServiceStatus {
    /// The pool's name.
    pub pool: String,
    /// Its process.
    pub pid: u32,
    /// Seconds since its start.
    pub uptime_seconds: u64,
    /// The cache.
    pub cache: CacheStatus,
    /// Its memory; nothing where it has no control group for it, and until it has first looked at that.
    #[serde(default)]
    pub memory: Option<MemoryStatus>,
    /// Branches that have not answered a call for more than a second.
    #[serde(default)]
    pub unresponsive_branches: Vec<BranchStatus>,
    /// The instances.
    pub instances: Vec<InstanceStatus>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_fall_into_the_right_bucket() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.percentile(50), 0);
        histogram.0[3] = 98;
        histogram.0[10] = 2;
        assert_eq!(histogram.percentile(50), 15);
        assert_eq!(histogram.percentile(99), 2047);
    }
}
