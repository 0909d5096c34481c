//! The command-line grammar: every command with its options, and the help texts.

use crate::ceph::CephArguments;
use crate::text::{parse_duration, parse_size, parse_upper_size};
use clap::{Args, Parser, Subcommand, ValueEnum};
use poolfs_service_protocol::{Coherence, IdRange, Timeout, Transport, UpperFormat};
use std::path::PathBuf;
use std::time::Duration;

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
        /// The upper branch
        upper: PathBuf,
        /// The lower branches, to look at the lower files of partly written ones as well: topmost first
        #[arg(long, value_name = "DIR[:DIR...]")]
        lower: Vec<String>,
        /// Repair what can be without guessing; else nothing is written
        #[arg(long)]
        repair: bool,
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
    Doctor,
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

/// Commands on images.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Import an image
    Import {
        /// Its name here
        name: String,
        /// oci:DIR[:TAG], oci-archive:FILE, docker-archive:FILE, tar:FILE (plain, gzip or zstd) or dir:DIR
        source: String,
    },
    /// List the images
    Ls,
    /// Show everything about an image
    Inspect {
        /// The image
        name: String,
    },
    /// Remove an image, and the layers nobody else uses
    Rm {
        /// The image
        name: String,
        /// Also when containers were made of it: they keep its layers
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
    /// How its cluster is reached
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
mod tests {
    use super::*;
    use clap::CommandFactory;
    use std::path::Path;

    fn parse(line: &str) -> Result<Arguments, clap::Error> {
        Arguments::try_parse_from(line.split(' '))
    }

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn every_form_is_understood() {
        for line in [
            "poolfs pool create web --cpus 0-1 --memory 2G --cache 512M",
            "poolfs pool ls --json",
            "poolfs pool rm web --force",
            "poolfs mount web /mnt --dir /data",
            "poolfs mount web /mnt --dir /data --shared",
            "poolfs mount web /mnt --dir /data --coherence timed:1s",
            "poolfs mount web /mnt --dir ceph:/data --consistency strict",
            "poolfs image rm debian --force",
            "poolfs mount web /mnt --upper /u --lower /l1:/l2",
            "poolfs mount web /mnt --upper /u --lower /l1 --lower /l2 --suid --dev",
            "poolfs umount web /mnt",
            "poolfs umount web /mnt --force",
            "poolfs rm --force c",
            "poolfs diff web /mnt",
            "poolfs diff web c --blocks --json",
            "poolfs commit web c image:2",
            "poolfs flatten web /mnt",
            "poolfs exec -- ls -l",
            "poolfs exec web --mount at=/a,dir=/b --mount at=/c,upper=/u,lower=/l --fuse -- sh -c true",
            "poolfs image import debian oci:/x:v1",
            "poolfs run web debian --name n --env A=B --memory 100M --legacy -i -t -d --rm -- sh",
            "poolfs run web debian -it",
            "poolfs run web debian --init -- sh",
            "poolfs run web debian --userns 0:100000:65536 --userns 70000:5:1 -- sh",
            "poolfs ps --state /tmp/s",
            "poolfs status web",
            "poolfs status web --wait 2",
            "poolfs status --watch",
            "poolfs status web --watch 5 --json",
            "poolfs trace web",
            "poolfs trace web --slower 10ms --seconds 60 --json",
            "poolfs trace web --summary",
            "poolfs why 42",
            "poolfs why 42 3 --json",
            "poolfs doctor",
            "poolfs demo --root-image root.tar --work w",
        ] {
            parse(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }

    /// The help of a command and of all below it.
    fn help(command: &mut clap::Command, text: &mut String) {
        *text += &command.render_long_help().to_string();
        command.get_subcommands_mut().filter(|below| !below.is_hide_set()).for_each(|below| help(below, text));
    }

    /// What is before the tests of each source file, by the file's name.
    fn read_sources(directory: &Path, sources: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(directory).expect("listed") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                read_sources(&path, sources);
            } else {
                let text = std::fs::read_to_string(&path).expect("read");
                let name = path.file_name().expect("a name").to_string_lossy().into_owned();
                sources.push((name, text.split("#[cfg(test)]\nmod tests").next().expect("a part").to_owned()));
            }
        }
    }

    #[test]
    fn help_lists_what_messages_tell_to_use() {
        let mut text = String::new();
        help(&mut Arguments::command(), &mut text);
        let mut sources = Vec::new();
        read_sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut sources);
        // What is understood is no message.
        sources.retain(|(name, _)| name != "arguments.rs");
        assert!(sources.len() > 30, "{}", sources.len());
        let mut found = 0;
        for (name, line) in sources.iter().flat_map(|(name, source)| source.lines().map(move |line| (name, line))) {
            // What is passed to other programs, and what the tests write, is no message.
            let is_message = line.contains('"') && !line.contains(".arg") && !line.contains("cargo build");
            for word in line.split(|c: char| !c.is_ascii_lowercase() && c != '-').filter(|_| is_message) {
                if word.len() > 3 && word.starts_with("--") {
                    assert!(text.contains(word), "{word} in {name}: {line}");
                    found += 1;
                }
            }
        }
        assert!(found > 5 && text.contains("upper-format=FORMAT"), "{found}");
    }

    #[test]
    fn wrong_combinations_are_refused() {
        for line in [
            "poolfs mount web /mnt",
            "poolfs mount web /mnt --upper /u",
            "poolfs mount web /mnt --upper /u --lower /l --shared",
            "poolfs mount web /mnt --upper /u --lower /l --coherence timed:1s",
            "poolfs mount web /mnt --dir /data --shared --coherence timed:1s",
            "poolfs mount web /mnt --dir ceph:/data --consistency strict --coherence timed:1s",
            "poolfs mount web /mnt --upper ceph:/u --lower ceph:/l --consistency close-to-open",
            "poolfs mount web /mnt --dir /data --coherence timed",
            "poolfs mount web /mnt --dir /d --upper /u --lower /l",
            "poolfs exec web",
            "poolfs pool create web --memory lots",
            "poolfs trace web --slower 10",
            "poolfs trace web --seconds 0",
            "poolfs run web debian --userns 0:100000",
            "poolfs run web debian --userns 0:4294967295:2",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn a_branch_that_is_missing_is_named_alone() {
        for (line, missing) in [
            ("poolfs mount web /mnt --upper /u", "--lower"),
            ("poolfs mount web /mnt --lower /l", "--upper"),
            ("poolfs mount web /mnt", "--dir"),
        ] {
            let told = parse(line).expect_err("one is missing").to_string();
            let named: Vec<&str> = told.lines().filter(|line| line.starts_with("  --")).collect();
            assert!(matches!(named[..], [one] if one.contains(missing)), "{told}");
        }
    }
}
