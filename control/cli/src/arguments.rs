//! The command-line grammar: every command with its options, and the help texts.

use crate::ceph::CephArguments;
use crate::text::{parse_duration, parse_size, parse_upper_size};
use clap::{Args, Parser, Subcommand, ValueEnum};
use poolfs_service_protocol::{Coherence, IdRange, Timeout, Transport, UpperFormat};
use std::path::PathBuf;
use std::time::Duration;

mod image;

pub use image::ImageCommand;

/// What options are listed under that every command has, apart from its own.
const EVERY_COMMAND: &str = "Options of every command";

/// Filesystems at user level, one service for each pool of containers.
#[derive(Debug, Parser)]
#[command(name = "poolfs", version, propagate_version = true, disable_help_subcommand = true)]
pub struct Arguments {
    /// The directory of pools, images and containers
    #[arg(long, global = true, help_heading = EVERY_COMMAND, value_name = "DIR", default_value = "/var/lib/poolfs")]
    pub state: PathBuf,
    /// The directory of sockets
    #[arg(long, global = true, help_heading = EVERY_COMMAND, value_name = "DIR", default_value = "/run/poolfs")]
    pub run_dir: PathBuf,
    /// Print JSON instead of tables and messages
    #[arg(long, global = true, help_heading = EVERY_COMMAND)]
    pub json: bool,
    /// How long a command waits, in all its steps together, for who gives no sign of life
    #[arg(long, global = true, help_heading = EVERY_COMMAND, value_name = "SECONDS", default_value_t = crate::patience::LIMIT_SECONDS, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub wait: u64,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make, list and remove pools
    #[command(subcommand)]
    Pool(PoolCommand),
    /// Mount a directory or a union of directories
    Mount(MountArguments),
    /// Unmount what was mounted with `mount`
    Umount {
        /// The pool
        pool: String,
        /// Where it is mounted
        mount_point: PathBuf,
        /// Also when it is in use, and when what was written cannot be put on the disk: that is lost then
        #[arg(long)]
        force: bool,
    },
    /// List what a union differs in from its lower branches: A added, C changed, R replaced by something else, D removed
    Diff {
        /// The pool
        pool: String,
        /// Where it is mounted, or the container whose root it is
        #[arg(value_name = "MOUNTPOINT|CONTAINER")]
        place: String,
        /// Also which parts of files: offset and length of each
        #[arg(long)]
        blocks: bool,
    },
    /// Make an image of a union: the layers it stands on, and a new one of what differs from them
    Commit {
        /// The pool
        pool: String,
        /// Where it is mounted, or the container whose root it is
        #[arg(value_name = "MOUNTPOINT|CONTAINER")]
        place: String,
        /// The image's name
        #[arg(value_name = "NAME")]
        image: String,
    },
    /// Complete files of which only some blocks have moved, so that the upper branch of a union needs no lower one for them
    Flatten {
        /// The pool
        pool: String,
        /// Where it is mounted, or the container whose root it is
        #[arg(value_name = "MOUNTPOINT|CONTAINER")]
        place: String,
    },
    /// Check an upper branch that is mounted nowhere. Ends with 0 when nothing is wrong, 1 when all was repaired, 4 when something is left, 8 when it could
    /// not be checked
    Fsck {
        /// The upper branch: a directory of the host, or ceph:/PATH
        upper: PathBuf,
        /// The lower branches, to look at the lower files of partly written ones as well: topmost first
        #[arg(long, value_name = "DIR[:DIR...]")]
        lower: Vec<String>,
        /// Repair what can be without guessing; else nothing is written
        #[arg(long)]
        repair: bool,
        /// How a cluster is reached
        #[command(flatten)]
        ceph: CephArguments,
    },
    /// Run a command on a pool's cores with the library preloaded
    Exec(ExecArguments),
    /// Import, list and remove images
    #[command(subcommand)]
    Image(ImageCommand),
    /// Run a container. SIGINT (Ctrl-C) and SIGTERM are passed on to its command, which may take its time; the third of them kills it
    Run(RunArguments),
    /// List the containers
    Ps,
    /// Print what a container wrote to its output (containers that run detached)
    Logs {
        /// The container
        container: String,
    },
    /// Ask a container to end, and end it after ten seconds
    Stop {
        /// The container
        container: String,
        /// Seconds to wait before it is killed
        #[arg(long, default_value_t = 10)]
        time: u64,
    },
    /// Remove a container that has ended, with what it wrote
    Rm {
        /// The container
        container: String,
        /// Also when what it wrote could not be put on the disk, or when processes of it live that nobody watches over: they are killed
        #[arg(long)]
        force: bool,
    },
    /// Show services, instances, caches and operations
    Status {
        /// Only this pool
        pool: Option<String>,
        /// Again and again, what was done in between: every so many seconds [default: 2]
        #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = clap::value_parser!(u64).range(1..=3600))]
        watch: Option<u64>,
    },
    /// Show requests as they end: how long each waited, and its time in each layer
    Trace {
        /// The pool
        pool: String,
        /// Only those that took at least so long, such as 10ms
        #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "0ms")]
        slower: Duration,
        /// For so long [default: until a signal ends it; 10 with --summary]
        #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=86_400))]
        seconds: Option<u32>,
        /// Percentiles of all at the end instead
        #[arg(long)]
        summary: bool,
    },
    /// Say which way the file operations of a process go, and why
    Why {
        /// The process
        pid: u32,
        /// Only this descriptor
        fd: Option<u32>,
    },
    /// Say what this host lacks and what follows from it
    Doctor {
        /// A directory of a cluster, ceph:/PATH, that is mounted for a moment as well
        #[arg(value_name = "ceph:/PATH")]
        directory: Option<PathBuf>,
        /// How a cluster is reached
        #[command(flatten)]
        ceph: CephArguments,
    },
    /// Show the main job: two containers of one image in one pool, at work
    Demo(DemoArguments),
    /// Enter a control group and become another program
    #[command(name = "__enter", hide = true)]
    Enter(EnterArguments),
    /// Become a program that is killed when its parent ends
    #[command(name = "__tied", hide = true)]
    Tied {
        /// The parent's number
        #[arg(long)]
        parent: u32,
        /// A container's root, shown to that program alone at a place that everybody can reach
        #[arg(long, num_args = 2, value_names = ["ROOT", "PLACE"])]
        show: Vec<PathBuf>,
        /// The program
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Watch over a container that runs detached
    #[command(name = "__monitor", hide = true)]
    Monitor {
        /// The container
        container: String,
        /// What is left of the time that the command waits which started this
        #[arg(long)]
        left_ms: Option<u64>,
    },
}

/// Commands on pools.
#[derive(Debug, Subcommand)]
pub enum PoolCommand {
    /// Make a pool
    Create {
        /// Its name
        name: String,
        /// Its CPUs, such as 0-1 [default: all that are online]
        #[arg(long)]
        cpus: Option<String>,
        /// Memory of service and containers together
        #[arg(long, value_parser = parse_size, default_value = "2G")]
        memory: u64,
        /// The service's cache, a part of the memory
        #[arg(long, value_parser = parse_size, default_value = "512M")]
        cache: u64,
    },
    /// List the pools
    Ls,
    /// Show everything about a pool
    Inspect {
        /// The pool
        name: String,
    },
    /// Remove a pool in which nothing is mounted and nobody runs. Mounts of a service that has died do not count: what it had not put on the disk
    /// waits for the next mount of its branch, in any pool
    Rm {
        /// The pool
        name: String,
        /// Kill what commands (`poolfs exec`) have left running in it
        #[arg(long)]
        force: bool,
    },
}

/// Arguments of `mount`.
#[derive(Debug, Args)]
#[command(
    override_usage = "poolfs mount POOL MOUNTPOINT --dir DIR\n       \
                            poolfs mount POOL MOUNTPOINT --upper DIR --lower DIR[:DIR...]",
    after_help = "DIR is a directory of this host, or as ceph:/PATH one of a CephFS; of this host it is ./ceph:/PATH."
)]
pub struct MountArguments {
    /// The pool
    pub pool: String,
    /// Where to mount
    pub mount_point: PathBuf,
    /// One directory, no union
    #[arg(long, conflicts_with_all = ["upper", "lower"], required_unless_present_any = ["upper", "lower"])]
    pub dir: Option<PathBuf>,
    /// Also when other pools have that directory, all with --shared: what one of them writes, the others may not see for long, or overwrite
    #[arg(long, requires = "dir", conflicts_with = "upper")]
    pub shared: bool,
    /// Who else changes that directory: exclusive or private (nobody), uncoordinated (as --shared), or anybody, which is seen at once (strict), when
    /// a file is opened after it was closed (close-to-open), or after a time at the latest (timed:TIME). What anybody changes is not kept in the
    /// pool's cache
    #[arg(long, visible_alias = "consistency", value_name = "MODE", requires = "dir", conflicts_with_all = ["upper", "shared"])]
    pub coherence: Option<Coherence>,
    /// The writable branch of a union
    #[arg(long, requires = "lower")]
    pub upper: Option<PathBuf>,
    /// The read-only branches of a union, topmost first: DIR[:DIR...], or again for each. `\:` is a colon in a name
    #[arg(long, value_name = "DIR[:DIR...]", requires = "upper")]
    pub lower: Vec<String>,
    /// Nothing in the read-only branches changes any more: what does is not served, but fails with EIO
    #[arg(long, requires = "lower", conflicts_with = "dir")]
    pub immutable: bool,
    /// How the writable branch stores files of which some blocks have moved: sparse, bcow, bcow-performance or bcow-space
    #[arg(long, value_name = "FORMAT", default_value_t, conflicts_with = "dir")]
    pub upper_format: UpperFormat,
    /// Most that the writable branch may take on disk, as 10G: then ENOSPC [default: what its filesystem has]
    #[arg(long, value_name = "SIZE", value_parser = parse_upper_size, conflicts_with = "dir")]
    pub upper_size: Option<u64>,
    /// Let set-id bits and capabilities of its programs have effect
    #[arg(long)]
    pub suid: bool,
    /// Let its device files be opened
    #[arg(long)]
    pub dev: bool,
    /// How the kernel's requests come to the service; auto: by io-uring where it can be had
    #[arg(long, value_name = "WAY", value_enum, default_value_t)]
    pub fuse_transport: FuseTransport,
    /// Have every write of the library wait for its answer
    #[arg(long)]
    pub wait_for_writes: bool,
    /// Fail a request that takes longer, as when a branch does not answer, with EIO: 100ms to 3600s, as 30s [default: it waits]
    #[arg(long, value_name = "TIME")]
    pub timeout: Option<Timeout>,
    /// How a cluster is reached
    #[command(flatten)]
    pub ceph: CephArguments,
}

impl MountArguments {
    /// Who else changes the directory.
    pub fn coherence(&self) -> Coherence {
        let uncoordinated = self.shared.then_some(Coherence::Uncoordinated);
        self.coherence.or(uncoordinated).unwrap_or_default()
    }
}

/// How the kernel's requests come to the service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum FuseTransport {
    /// By io-uring where it can be had
    #[default]
    Auto,
    /// From /dev/fuse
    DevFuse,
    /// By io-uring, or not at all
    IoUring,
}

impl FuseTransport {
    /// The one that it has to be, if any.
    pub fn chosen(self) -> Option<Transport> {
        match self {
            FuseTransport::Auto => None,
            FuseTransport::DevFuse => Some(Transport::DevFuse),
            FuseTransport::IoUring => Some(Transport::IoUring),
        }
    }
}

/// Arguments of `exec`.
#[derive(Debug, Args)]
#[command(
    override_usage = "poolfs exec [POOL] [--mount SPEC ...] [--fuse] -- CMD ...",
    after_help = "The library needs /run/poolfs to be reachable for the program; where it is not, the program goes by the kernel's path (FUSE)."
)]
pub struct ExecArguments {
    /// The pool [default: one that is thrown away afterwards]
    pub pool: Option<String>,
    /// Mount this for the command: at=DIR,dir=DIR[,shared=yes|,coherence=MODE] or at=DIR,upper=DIR,lower=DIR[:DIR...][,immutable=yes][,upper-format=FORMAT][,upper-size=SIZE]. `\,` is a comma in a name, `\\` a backslash
    #[arg(long = "mount", value_name = "SPEC")]
    pub mounts: Vec<String>,
    /// Without the library: everything by FUSE
    #[arg(long = "fuse", alias = "legacy")]
    pub legacy: bool,
    /// How the kernel's requests to what is mounted come to the service
    #[arg(long, value_name = "WAY", value_enum, default_value_t)]
    pub fuse_transport: FuseTransport,
    /// Have every write of the library to what `--mount` mounts wait for its answer
    #[arg(long, requires = "mounts")]
    pub wait_for_writes: bool,
    /// Fail a request to what `--mount` mounts that takes longer with EIO: 100ms to 3600s, as 30s [default: it waits]
    #[arg(long, value_name = "TIME", requires = "mounts")]
    pub timeout: Option<Timeout>,
    /// How the cluster is reached of branches that `--mount` names
    #[command(flatten)]
    pub ceph: CephArguments,
    /// The command
    #[arg(last = true, required = true)]
    pub command: Vec<String>,
}

/// Arguments of `run`.
#[derive(Debug, Args)]
#[command(override_usage = "poolfs run POOL IMAGE [OPTIONS] [-- CMD ...]")]
pub struct RunArguments {
    /// The pool
    pub pool: String,
    /// The image
    pub image: String,
    /// The container's name [default: made up]
    #[arg(long)]
    pub name: Option<String>,
    /// Set a variable of the environment
    #[arg(long, short, value_name = "K=V")]
    pub env: Vec<String>,
    /// Most memory of the container
    #[arg(long, value_parser = parse_size)]
    pub memory: Option<u64>,
    /// Without the library: everything by FUSE
    #[arg(long = "fuse", alias = "legacy")]
    pub legacy: bool,
    /// A user namespace of its own, with these ids of the host for its users and groups; again for further ranges
    #[arg(long, value_name = "CONTAINER:HOST:COUNT")]
    pub userns: Vec<IdRange>,
    /// Keep what it writes in this directory, or ceph:/PATH, as its upper branch: it stays when the container is removed, and goes on in the next
    /// [default: a directory of the container's]
    #[arg(long, value_name = "DIR")]
    pub upper_dir: Option<PathBuf>,
    /// How its cluster is reached, and the image's [default: as the image was imported or added]
    #[command(flatten)]
    pub ceph: CephArguments,
    /// How it stores files of which some blocks have moved: sparse, bcow, bcow-performance or bcow-space
    #[arg(long, value_name = "FORMAT", default_value_t)]
    pub upper_format: UpperFormat,
    /// Most that what it writes may take on disk, as 10G: then ENOSPC [default: what the filesystem has]
    #[arg(long, value_name = "SIZE", value_parser = parse_upper_size)]
    pub upper_size: Option<u64>,
    /// How the kernel's requests come to the service
    #[arg(long, value_name = "WAY", value_enum, default_value_t)]
    pub fuse_transport: FuseTransport,
    /// Have every write of the library wait for its answer
    #[arg(long)]
    pub wait_for_writes: bool,
    /// Fail a request that takes longer, as when a branch does not answer, with EIO: 100ms to 3600s, as 30s [default: it waits]
    #[arg(long, value_name = "TIME")]
    pub timeout: Option<Timeout>,
    /// Keep the standard input open
    #[arg(short)]
    pub interactive: bool,
    /// Give it a terminal
    #[arg(short)]
    pub tty: bool,
    /// Run the command under a small first process that passes signals on and reaps what ends
    #[arg(long)]
    pub init: bool,
    /// Leave it running and return
    #[arg(short)]
    pub detach: bool,
    /// Remove it when it ends
    #[arg(long)]
    pub rm: bool,
    /// The command [default: the image's]
    #[arg(last = true)]
    pub command: Vec<String>,
}

/// Arguments of `demo`.
#[derive(Debug, Args)]
pub struct DemoArguments {
    /// A root filesystem with Python, git and a C compiler: a directory or a tar archive
    #[arg(long, value_name = "DIR_OR_TAR")]
    pub root_image: PathBuf,
    /// Where images and containers are kept meanwhile
    #[arg(long, value_name = "DIR")]
    pub work: PathBuf,
    /// Without the library: everything by FUSE
    #[arg(long = "fuse", alias = "legacy")]
    pub legacy: bool,
}

/// Arguments of the step between `exec` and its command.
#[derive(Debug, Args)]
pub struct EnterArguments {
    /// The pool
    #[arg(long)]
    pub pool: String,
    /// The group in it
    #[arg(long)]
    pub group: String,
    /// The library to preload
    #[arg(long)]
    pub preload: Option<PathBuf>,
    /// The program
    #[arg(last = true, required = true)]
    pub command: Vec<String>,
}

#[cfg(test)]
mod tests;
