//! The bench command: paired measurements of every path, medians and ratios of one run.

mod ceph;
mod clones;
mod containers;
mod copies;
mod copy_up;
mod danaus;
mod databases;
mod emptying;
mod files;
mod fileserver;
mod first_writes;
mod grounds;
mod groups;
mod image_data;
mod isolation;
mod mapped;
mod overhead;
mod roots;
mod roundtrip;
mod starts;
mod streams;
mod table;
mod targets;
mod transports;
mod worker;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Measures poolfs beside what it competes with, in one run.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    #[command(flatten)]
    Measurement(Measurement),
    /// Plain memory copy beside the copy with non-temporal loads and stores, by size.
    Copy,
    #[command(flatten)]
    Part(Part),
}

/// Where a measurement works.
#[derive(Args)]
struct Place {
    /// A folder on the disk to measure on; made and removed.
    #[arg(long)]
    work: PathBuf,
}

/// Measurements that mount.
#[derive(Subcommand)]
enum Measurement {
    /// File operations over library, FUSE, ext4, overlayfs and fuse-overlayfs.
    Files {
        #[command(flatten)]
        place: Place,
        /// How often every measurement is repeated.
        #[arg(long, default_value_t = 5)]
        rounds: u32,
        /// How long one measurement takes.
        #[arg(long, default_value_t = 300)]
        milliseconds: u64,
    },
    /// A request's round trip beside a futex hand-over and a FUSE getattr, on one core and across cores.
    RoundTrip {
        #[command(flatten)]
        place: Place,
        /// How often every measurement is repeated.
        #[arg(long, default_value_t = 15)]
        rounds: u32,
    },
    /// Requests of the kernel by /dev/fuse beside those by io_uring, which is switched on for a moment: one at a time, in streams of
    /// several threads, and with more or less read ahead.
    Transports {
        #[command(flatten)]
        place: Place,
        /// How often every measurement is repeated.
        #[arg(long, default_value_t = 15)]
        rounds: u32,
    },
    /// What the preloaded library costs on calls that are none of poolfs's, and at the start of a program.
    Overhead {
        #[command(flatten)]
        place: Place,
        /// How often every measurement is repeated. Many short ones: a virtual processor changes its pace every few hundred milliseconds,
        /// and both halves of most pairs should see the same.
        #[arg(long, default_value_t = 120)]
        rounds: u32,
        /// How long one measurement takes.
        #[arg(long, default_value_t = 10)]
        milliseconds: u64,
    },
    /// First writes of lower files by their size, a large file written all over in parts, and room, beside overlayfs on ext4, XFS and btrfs.
    CopyUp {
        #[command(flatten)]
        place: Place,
        /// How often every measurement is repeated.
        #[arg(long, default_value_t = 3)]
        rounds: u32,
    },
    /// fio and MariaDB, which must be installed, on data of a lower branch.
    ImageData {
        #[command(flatten)]
        place: Place,
        /// The folder of the scripts that run them.
        #[arg(long)]
        scripts: PathBuf,
        /// How often every measurement is repeated.
        #[arg(long, default_value_t = 2)]
        rounds: u32,
    },
    /// Starts of programs of an image, and of containers, over all targets.
    Starts {
        #[command(flatten)]
        place: Place,
        /// A tar of a root file system with python3, apt and lighttpd.
        #[arg(long)]
        image: PathBuf,
        /// How often every measurement is repeated.
        #[arg(long, default_value_t = 5)]
        rounds: u32,
    },
    /// 1, 8 and 64 servers of one image: time until all have answered, and memory.
    Containers {
        #[command(flatten)]
        place: Place,
        /// A tar of a root file system with lighttpd.
        #[arg(long)]
        image: PathBuf,
        /// How often every measurement is repeated.
        #[arg(long, default_value_t = 3)]
        rounds: u32,
    },
    /// Memory of 1, 4 and 8 containers that read one file.
    Clones {
        #[command(flatten)]
        place: Place,
    },
    /// A directory of a Ceph cluster of its own by library and FUSE, beside ceph-fuse and libcephfs; memory of unions over one.
    Ceph {
        #[command(flatten)]
        place: Place,
        /// How often every measurement is repeated.
        #[arg(long, default_value_t = 5)]
        rounds: u32,
        /// How long one measurement takes.
        #[arg(long, default_value_t = 300)]
        milliseconds: u64,
    },
    /// Experiments of papers, repeated on this machine.
    #[command(subcommand)]
    Paper(Paper),
    /// RocksDB, SQLite, Redis and PostgreSQL, which must be installed, over all targets.
    Databases {
        #[command(flatten)]
        place: Place,
        /// The folder of the scripts that run them.
        #[arg(long)]
        scripts: PathBuf,
        /// How often every measurement is repeated.
        #[arg(long, default_value_t = 3)]
        rounds: u32,
    },
}

/// The papers.
#[derive(Subcommand)]
enum Paper {
    /// Danaus (Middleware '21): poolfs over Ceph beside ceph-fuse, in pools that are neighbours, scale out, or share an image.
    Danaus {
        /// A folder on the disk to measure on; made and removed.
        #[arg(long, default_value = "target/bench-danaus")]
        work: PathBuf,
        #[command(flatten)]
        options: danaus::Options,
    },
}

/// What measurements start.
#[derive(Subcommand)]
enum Part {
    /// One operation in this process; prints nanoseconds. The other tasks start it.
    #[command(hide = true)]
    Worker {
        /// Where.
        directory: PathBuf,
        /// The file there that reads and writes use.
        data: String,
        /// What.
        operation: String,
        /// How long.
        #[arg(long)]
        milliseconds: u64,
        /// Touch everything first.
        #[arg(long)]
        warm: bool,
        /// On this CPU only.
        #[arg(long)]
        cpu: Option<usize>,
        /// By so many threads at the same time.
        #[arg(long, default_value_t = 1)]
        threads: u32,
    },
    /// The same over libcephfs.
    #[command(hide = true)]
    CephWorker(ceph::Worker),
    /// Makes a directory of a cluster with files.
    #[command(hide = true)]
    CephPrepare {
        /// The cluster's configuration.
        configuration: PathBuf,
        /// The directory.
        directory: PathBuf,
        /// Names and lengths of the files: NAME:BYTES.
        files: Vec<String>,
    },
    /// What runs in the pools of that paper.
    #[command(subcommand, hide = true)]
    Danaus(danaus::Worker),
    /// Starts of one program in a root directory; prints nanoseconds of each.
    #[command(hide = true)]
    Start {
        /// The root directory.
        root: PathBuf,
        /// How often, besides the first time.
        #[arg(long)]
        times: u32,
        /// With the library preloaded.
        #[arg(long)]
        library: bool,
        /// The program is a server and has this socket.
        #[arg(long)]
        socket: Option<PathBuf>,
        /// The program.
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Servers in root directories, until the input ends; prints nanoseconds until all have answered, twice.
    #[command(hide = true)]
    Serve {
        /// With the library preloaded.
        #[arg(long)]
        library: bool,
        /// Root directories and sockets in turn.
        places: Vec<PathBuf>,
    },
    /// First bytes of lower files.
    #[command(hide = true)]
    FirstBytes {
        /// Where they are.
        directory: PathBuf,
        /// How long each is, and how many: BYTES:COUNT.
        files: Vec<first_writes::Files>,
    },
    /// A part of each block of a file.
    #[command(hide = true)]
    WriteMany {
        /// The file.
        file: PathBuf,
    },
    /// A fifth of the blocks of a file.
    #[command(hide = true)]
    ReadSome {
        /// The file.
        file: PathBuf,
    },
    /// A byte of each lower file, brought to disk.
    #[command(hide = true)]
    TouchEach {
        /// Where they are.
        directory: PathBuf,
        /// How long each is.
        bytes: u64,
        /// How many.
        count: u32,
    },
    /// Reads a file, prints its length, and keeps it until the input ends.
    #[command(hide = true)]
    Hold {
        /// The file.
        file: PathBuf,
        /// By a mapping.
        #[arg(long)]
        mapped: bool,
    },
    /// Removes what a measurement has left, when the input ends.
    #[command(hide = true)]
    RemoveLeft {
        /// How its pools are called.
        name: String,
        /// Its folder.
        work: PathBuf,
    },
}

impl Measurement {
    fn work(&self) -> &Path {
        match self {
            Self::Files { place, .. }
            | Self::RoundTrip { place, .. }
            | Self::Transports { place, .. }
            | Self::Overhead { place, .. }
            | Self::CopyUp { place, .. }
            | Self::ImageData { place, .. }
            | Self::Starts { place, .. }
            | Self::Containers { place, .. }
            | Self::Clones { place }
            | Self::Ceph { place, .. }
            | Self::Databases { place, .. } => &place.work,
            Self::Paper(Paper::Danaus { work, .. }) => work,
        }
    }

    /// Its table. `work` is its folder, with its full path: mounts are known by that.
    fn measure(&self, work: &Path) -> Result<String> {
        let poolfs = &std::env::current_exe()?.with_file_name("poolfs");
        Ok(match self {
            Self::Files { rounds, milliseconds, .. } => files::run(work, poolfs, *rounds, *milliseconds)?.markdown(),
            Self::RoundTrip { rounds, .. } => roundtrip::run(work, poolfs, *rounds)?.markdown(),
            Self::Transports { rounds, .. } => transports::run(work, poolfs, *rounds)?,
            Self::Overhead { rounds, milliseconds, .. } => overhead::run(work, poolfs, *rounds, *milliseconds)?,
            Self::CopyUp { rounds, .. } => copy_up::run(work, poolfs, *rounds)?,
            Self::ImageData { scripts, rounds, .. } => image_data::run(work, poolfs, scripts, *rounds)?.markdown(),
            Self::Starts { image, rounds, .. } => starts::run(work, poolfs, image, *rounds)?.markdown(),
            Self::Containers { image, rounds, .. } => containers::run(work, poolfs, image, *rounds)?,
            Self::Clones { .. } => clones::run(work, poolfs)?,
            Self::Ceph { rounds, milliseconds, .. } => ceph::run(work, poolfs, *rounds, *milliseconds)?,
            Self::Paper(Paper::Danaus { options, .. }) => danaus::run(work, poolfs, options)?,
            Self::Databases { scripts, rounds, .. } => databases::run(work, poolfs, scripts, *rounds)?.markdown(),
        })
    }
}

impl Part {
    fn run(self) -> Result<()> {
        match self {
            Self::Danaus(worker) => worker.run(),
            Self::CephWorker(worker) => worker.run(),
            Self::CephPrepare { configuration, directory, files } => ceph::prepare(&configuration, &directory, &files),
            Self::Worker { directory, data, operation, milliseconds, warm, cpu, threads } => {
                if let Some(cpu) = cpu {
                    roundtrip::pin(cpu)?;
                }
                let operation = worker::Operation::parse(&operation)?;
                let run = |time| worker::run(&directory, &data, operation, time, warm);
                println!("{}", worker::by_threads(threads, Duration::from_millis(milliseconds), run)?);
                Ok(())
            }
            Self::Start { root, times, library, socket, command } => {
                starts::start(&root, &command, times, library, socket.as_deref())
            }
            Self::Serve { library, places } => containers::serve(&places, library),
            Self::FirstBytes { directory, files } => first_writes::first_bytes(&directory, &files),
            Self::WriteMany { file } => first_writes::write_many(&file),
            Self::ReadSome { file } => first_writes::read_some(&file),
            Self::TouchEach { directory, bytes, count } => first_writes::touch_each(&directory, bytes, count),
            Self::Hold { file, mapped } => clones::hold(&file, mapped),
            Self::RemoveLeft { name, work } => isolation::remove_left(&name, &work),
        }
    }
}

fn main() -> Result<ExitCode> {
    match Arguments::parse().task {
        Task::Measurement(measurement) if isolation::pool_name().is_none() => {
            return isolation::run(measurement.work());
        }
        Task::Measurement(measurement) => {
            isolation::enter()?;
            print!("{}", measurement.measure(&std::fs::canonicalize(measurement.work())?)?);
        }
        Task::Copy => print!("{}", copies::run().markdown()),
        Task::Part(part) => part.run()?,
    }
    Ok(ExitCode::SUCCESS)
}
