//! The control protocol of a filesystem service: the configuration it starts with, commands and answers, and its status.
//!
//! The command line (and later the engine) starts a service as a process with a [`ServiceConfig`] as JSON on its standard input,
//! and talks to it over the Unix socket named there (`SOCK_STREAM`, root only): one JSON [`Command`] a line, answered by one JSON
//! [`Answer`] a line, [`Command::Trace`] by several. With [`Command::Mount`] the descriptors of its branches are sent ([`send`]).
//! No byte of file data passes here.
//!
//! The same program checks an upper branch that nobody uses, and exits ([`CheckSpec`]), or looks whether branches at a cluster can be had
//! ([`ProbeSpec`]).
//!
//! Only root can connect, so commands are trusted. Begin reading with [`ServiceConfig`] and [`Command`].

mod branch;
mod check;
mod coherence;
mod descriptors;
mod failure;
pub mod ids;
mod probe;
mod status;
mod stored;
mod timeout;
mod trace;
mod trees;
mod upper;

pub use branch::{Branch, CEPH_PREFIX, CephAccess, Place, ceph_name};
pub use check::{CHECK_LINE_BYTES_MAX, CheckFinding, CheckLine, CheckOutcome, CheckSpec, CheckSummary, FINDINGS_MAX};
pub use coherence::{Coherence, NoCoherence, TIMED_MAX};
pub use descriptors::{DESCRIPTORS_MAX, Receiver, send};
pub use failure::FailureCode;
pub use probe::{PROBE_ANSWER_BYTES_MAX, ProbeAnswer, ProbeSpec, ProbedDirectory};
pub use status::{
    AdoptedFile, BranchStatus, CacheStatus, ClientStatus, Histogram, InstanceStatus, KindStatus, MemoryStatus,
    NotDirect, NotPosted, OperationPath, ProgramStatus, ReadCounts, ServiceStatus, SketchDamage, Transport,
    UnionStatus, WaitStatus, WriteStatus,
};
pub use timeout::{NoTimeout, Timeout};
pub use trace::{KindTimes, Layer, Percentiles, Span, TraceSpec};
pub use trees::{Committed, Difference, DifferenceKind, Flattened};
pub use upper::{NoUpperFormat, Storage, UpperFormat};

pub use poolfs_types::{IdMap, IdMapError, IdRange};

use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The allocator's setting in the environment of a service, whoever starts it (glibc's tunables): memory of so many bytes is given back to the kernel
/// when it is freed, and comes from it without being touched; otherwise the first large buffer that is freed, with a mount, has all later ones kept,
/// and filled with zeros in advance. And threads share a few arenas: in one of its own each would keep what others need.
pub const ALLOCATOR: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072:glibc.malloc.arena_max=4");

/// What a service is told at its start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceConfig {
    /// The pool's name.
    pub pool: String,
    /// Files of its control groups, which it enters first of all by writing `0` to each, unless others have put it there.
    #[serde(default)]
    pub entrances: Vec<PathBuf>,
    /// Where its memory's control group is, if it has one: it sees to it that it stays below that group's limit.
    #[serde(default)]
    pub memory_group: Option<PathBuf>,
    /// The CPUs the service's threads run on.
    pub cpus: Vec<u32>,
    /// Most bytes of cached file content.
    pub cache_bytes: u64,
    /// Where the control socket is made.
    pub control_socket: PathBuf,
    /// Where the instances' sockets are made (`INSTANCE.sock`).
    pub socket_directory: PathBuf,
}

impl ServiceConfig {
    /// Where what the pool's services have accepted outlives them, each in a directory of its own.
    #[must_use]
    pub fn kept_directory(&self) -> PathBuf {
        kept_directory(&self.socket_directory, &self.pool)
    }
}

/// How the names of such directories end.
pub const KEPT_SUFFIX: &str = ".memory";

/// [`ServiceConfig::kept_directory`] of a pool.
#[must_use]
pub fn kept_directory(socket_directory: &Path, pool: &str) -> PathBuf {
    socket_directory.join(format!("{pool}{KEPT_SUFFIX}"))
}

/// The least cache that a service works with.
pub const CACHE_BYTES_MIN: u64 = 128 << 10;

/// Most lower branches of one union.
pub const LOWERS_MAX: usize = 128;

/// What a filesystem instance is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", from = "stored::Stored")]
pub enum StackSpec {
    /// One directory, no union.
    Directory {
        /// The directory, by its path or, of a CephFS, by its name ([`Place`]); so are those below.
        directory: PathBuf,
        /// Who else may change it, and how soon that is seen.
        #[serde(default)]
        coherence: Coherence,
        /// The most that its files may take, bytes: where its filesystem keeps everything in the pool's memory.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        size_bytes: Option<u64>,
    },
    /// A union.
    Union {
        /// The writable branch.
        upper: PathBuf,
        /// The read-only branches, topmost first.
        lowers: Vec<PathBuf>,
        /// How the writable branch stores what is written.
        #[serde(default, skip_serializing_if = "Storage::is_default")]
        storage: Storage,
        /// Whether the read-only branches fail what has changed in them since (`EIO`).
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        immutable_lowers: bool,
    },
}

/// Device and inode of a directory, and of those that it lies in, as far up as its filesystem is mounted anywhere: where it lies, whatever paths lead there.
pub type Lineage = Vec<(u64, u64)>;

impl StackSpec {
    /// Its branches: the one that is written first. Of those that are directories of the host the descriptors are sent, in this order.
    #[must_use]
    pub fn branches(&self) -> Vec<Branch<'_>> {
        let (written, lowers) = match self {
            Self::Directory { directory, .. } => (directory, &[][..]),
            Self::Union { upper, lowers, .. } => (upper, lowers.as_slice()),
        };
        let lowers = lowers.iter().map(|name| Branch { name, read_only: true });
        std::iter::once(Branch { name: written, read_only: false }).chain(lowers).collect()
    }

    /// A directory that nobody else changes.
    #[must_use]
    pub fn directory(directory: impl Into<PathBuf>) -> Self {
        Self::Directory { directory: directory.into(), coherence: Coherence::default(), size_bytes: None }
    }

    /// A union of these branches, whose upper one stores as usual.
    #[must_use]
    pub fn union(upper: impl Into<PathBuf>, lowers: Vec<PathBuf>) -> Self {
        Self::Union { upper: upper.into(), lowers, storage: Storage::default(), immutable_lowers: false }
    }
}

/// One filesystem instance to be mounted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MountSpec {
    /// The instance's name, unique on the host (`POOL-N`): letters, digits, `-`, `_`, `.`; at most 64 bytes.
    pub instance: String,
    /// Where the FUSE filesystem is mounted; an existing directory, absolute.
    pub mount_point: PathBuf,
    /// The layers.
    pub stack: StackSpec,
    /// Whether device files of it can be opened (containers: yes).
    pub devices: bool,
    /// Whether set-id bits and capabilities of its programs have effect (containers: yes).
    #[serde(default)]
    pub suid: bool,
    /// The root of the applications that will use the instance: the mount point itself for a container, `/` otherwise.
    /// Absolute symbolic links are followed from there.
    pub is_root: bool,
    /// The ids of the host that stand for stored owners, and who else is nobody there; none: stored owners are the host's.
    #[serde(default, with = "ids", skip_serializing_if = "Option::is_none")]
    pub ids: Option<IdMap>,
    /// How the kernel's requests are to come, or the mount fails; none: by io_uring where it can be had, else from `/dev/fuse`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,
    /// Whether every write of the library waits for its answer; else those that nobody can tell the difference of do not.
    #[serde(default)]
    pub wait_for_writes: bool,
    /// How long a request may take before it fails with `EIO`; none: as long as its branches take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Timeout>,
    /// Whether the filesystem of what is written has disk quotas: no write is accepted there before it is stored.
    #[serde(default)]
    pub has_quotas: bool,
    /// Where its directories of the host lie, in the order of [`StackSpec::branches`]; none: of each is known only which directory it is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lineages: Vec<Lineage>,
    /// How the cluster is reached that has its Ceph branches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceph: Option<Box<CephAccess>>,
}

impl MountSpec {
    /// A mount whose device files cannot be opened, without set-id bits, with owners as they are stored, and however the kernel's requests come.
    #[must_use]
    pub fn new(instance: impl Into<String>, mount_point: impl Into<PathBuf>, stack: StackSpec) -> Self {
        let (instance, mount_point) = (instance.into(), mount_point.into());
        Self {
            instance,
            mount_point,
            stack,
            devices: false,
            suid: false,
            is_root: false,
            ids: None,
            transport: None,
            wait_for_writes: false,
            timeout: None,
            has_quotas: false,
            lineages: Vec::new(),
            ceph: None,
        }
    }
}

/// Where containers' sockets are, below the directory of sockets: only root may look into it, because only root may look into
/// the directories above a container's root, and a socket asks for no way to it.
pub const CONTAINER_SOCKETS: &str = "containers";

impl MountSpec {
    /// The directory in which the instance's socket (`INSTANCE.sock`) is made.
    #[must_use]
    pub fn socket_directory(&self, sockets: &Path) -> PathBuf {
        if self.is_root { sockets.join(CONTAINER_SOCKETS) } else { sockets.to_path_buf() }
    }

    /// The instance's socket.
    #[must_use]
    pub fn socket(&self, sockets: &Path) -> PathBuf {
        self.socket_directory(sockets).join(format!("{}.sock", self.instance))
    }
}

/// A control message. Of whoever has hung up before its turn has come nothing is done, nor is anything mounted for whoever hangs up before that is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Command {
    /// Mount an instance. Those of its branches that are directories of the host come with the command in the order of [`StackSpec::branches`], each as
    /// the descriptor of a private mount (`poolfs_local::PrivateMount`); paths say what they are called.
    Mount(MountSpec),
    /// Write what an instance has accepted to its branch, and make it durable, beside whatever else is done. One that does not exist is fine.
    Flush {
        /// Its name.
        instance: String,
    },
    /// Flush and unmount an instance. One that does not exist is fine; one that is about to be mounted will not be, which is answered at once.
    Unmount {
        /// Its name.
        instance: String,
        /// What may stand in the way.
        ending: UnmountMode,
    },
    /// Say that the service is there: answered by [`Answer::Done`], whatever else is being done.
    Ping,
    /// Tell which instances there are, or are about to be mounted, when none is being ended. One whose mount others have taken away ends before.
    Instances,
    /// Tell what is going on.
    Status,
    /// Tell what is known of a process that may use the library.
    Client {
        /// Its number, as the service sees it.
        pid: u32,
    },
    /// Tell of single requests while they are served: [`Answer::Span`]s, and at the end [`Answer::Traced`].
    Trace(TraceSpec),
    /// Tell in what a union differs from its lower branches: [`Answer::Difference`]s, each followed by [`Answer::Parts`] if it has many, and at the end
    /// [`Answer::Done`] or [`Answer::Failed`]. Whoever hangs up ends it.
    Differences {
        /// The instance.
        instance: String,
        /// Whether to tell which parts of files differ.
        parts: bool,
    },
    /// Make a layer of what differs: an archive as the OCI image specification has it, with changed files whole, and names that hide
    /// others. Whoever wants to change the union meanwhile waits.
    Commit {
        /// The instance.
        instance: String,
        /// The archive, a file that does not exist yet. After a failure it may be there, unfinished.
        archive: PathBuf,
    },
    /// Complete all sketches of a union, so that no file of the upper branch needs a lower one. Whoever hangs up ends it.
    Flatten {
        /// The instance.
        instance: String,
    },
    /// Unmount everything, flush, end.
    Shutdown,
}

/// What an unmount gives way to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnmountMode {
    /// It fails while somebody uses the mount, and while something cannot be written to the branch: the mount stays then.
    Orderly,
    /// Who uses the mount loses it. It fails while something cannot be written to the branch: the mount stays then.
    Detached,
    /// In any case. What cannot be written to the branch is lost.
    Forced,
    /// In any case, and nobody looks at the branch again: nothing is made durable.
    Discarded,
}

impl UnmountMode {
    /// Whether it ends whatever is lost.
    #[must_use]
    pub fn is_forced(self) -> bool {
        matches!(self, Self::Forced | Self::Discarded)
    }
}

/// The answer to a [`Command`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum Answer {
    /// Done, and everything is on the disk.
    Done,
    /// To [`Command::Mount`], in the place of [`Self::Done`]: it is mounted, and there is something to say of it.
    Mounted {
        /// What, each a sentence or two for people.
        notes: Vec<String>,
    },
    /// To [`Command::Unmount`], in the place of [`Self::Done`]: it is gone from its place, and what was accepted is on the disk. Others have the mount all the same, and
    /// the instance ends, and its branch is free, when the last of them lets it go.
    Lingers,
    /// Not done. Nothing changed, unless the message says so.
    Failed {
        /// What kind of failure it is.
        #[serde(default)]
        code: FailureCode,
        /// The thing and the cause.
        message: String,
        /// What can be done about it, where that is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        remedy: Option<String>,
    },
    /// To [`Command::Instances`].
    Instances {
        /// Their names.
        instances: Vec<String>,
    },
    /// To [`Command::Status`].
    Status(Box<ServiceStatus>),
    /// To [`Command::Client`]: of every instance.
    Client {
        /// What each knows.
        instances: Vec<ClientStatus>,
    },
    /// To [`Command::Differences`]: one of them.
    Difference(Difference),
    /// Further parts of the file that was told of last.
    Parts {
        /// Offset and length of each.
        parts: Vec<(u64, u64)>,
    },
    /// To [`Command::Commit`].
    Committed(Committed),
    /// To [`Command::Flatten`].
    Flattened(Flattened),
    /// To [`Command::Trace`]: one request.
    Span(Box<Span>),
    /// To [`Command::Trace`]: the end.
    Traced {
        /// Requests that were served meanwhile and were slow enough.
        requests: u64,
        /// Those of them that there was no time to tell of.
        lost: u64,
        /// All of them by kind and path, if asked for.
        summary: Vec<KindTimes>,
    },
}

/// Whether `name` may name an instance or a pool: 1 to 64 bytes of ASCII letters, digits, `-`, `_` and `.`, beginning with a
/// letter or digit. Such a name is safe as a file name, in mountinfo and in a shell.
#[must_use]
pub fn is_valid_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 64
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && name.as_bytes()[0].is_ascii_alphanumeric()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe() {
        assert!(is_valid_name("pool-1.a_b"));
        for bad in ["", ".", "..", "-x", "a/b", "a b", "ü", &"x".repeat(65)] {
            assert!(!is_valid_name(bad), "{bad}");
        }
    }

    #[test]
    fn commands_survive_a_round_trip_and_strangers_are_refused() {
        let command = Command::Mount(MountSpec {
            instance: "p-1".into(),
            mount_point: "/mnt/a".into(),
            stack: StackSpec::Union {
                upper: "/u".into(),
                lowers: vec!["/l1".into(), "/l2".into()],
                storage: Storage { format: UpperFormat::BcowSpace, size_bytes: Some(1 << 30) },
                immutable_lowers: true,
            },
            devices: true,
            suid: true,
            is_root: true,
            ids: Some(IdMap::parse_proc("0 100000 65536\n70000 5 1").expect("a map")),
            transport: Some(Transport::IoUring),
            wait_for_writes: true,
            timeout: Some("30s".parse().expect("a time")),
            has_quotas: true,
            lineages: vec![vec![(1, 2), (1, u64::MAX)], vec![(3, 4)], vec![(5, 6)]],
            ceph: Some(Box::new(CephAccess {
                configuration: Some("/etc/ceph/ceph.conf".into()),
                user: Some("tenant".to_owned()),
                keyring: Some("/k".into()),
                filesystem: Some("fs".to_owned()),
                cluster: Some("5ab".to_owned()),
                holder: Some("pool".to_owned()),
            })),
        });
        let text = serde_json::to_string(&command).expect("serializable");
        assert_eq!(serde_json::from_str::<Command>(&text).expect("its own output"), command);
        let overlapping = text.replace("70000:5:1", "7:5:1");
        assert_ne!(overlapping, text);
        assert!(serde_json::from_str::<Command>(&overlapping).expect_err("no map").to_string().contains("overlap"));
        assert!(serde_json::from_str::<Command>(r#"{"command":"reboot"}"#).is_err());
    }
}
