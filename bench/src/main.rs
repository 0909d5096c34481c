//! The bench command: paired measurements of every path, medians and ratios of one run.

mod copies;
mod files;
mod overhead;
mod roundtrip;
mod table;
mod targets;
mod transports;
mod worker;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Measures poolfs beside what it competes with, in one run.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// File operations over library, FUSE, ext4, overlayfs and fuse-overlayfs.
    Files {
        /// A folder on the disk to measure on; made and removed.
        #[arg(long)]
        work: PathBuf,
        /// How often every measurement is repeated.
        #[arg(long, default_value_t = 5)]
        rounds: u32,
        /// How long one measurement takes.
        #[arg(long, default_value_t = 300)]
        milliseconds: u64,
    },
    /// A request's round trip beside a futex hand-over and a FUSE getattr, on one core and across cores.
    RoundTrip {
        /// A folder to work in; made and removed.
        #[arg(long)]
        work: PathBuf,
        /// How often every measurement is repeated.
        #[arg(long, default_value_t = 15)]
        rounds: u32,
    },
    /// Requests of the kernel by /dev/fuse beside those by io_uring, which is switched on for a moment.
    Transports {
        /// A folder to work in; made and removed.
        #[arg(long)]
        work: PathBuf,
        /// How often every measurement is repeated.
        #[arg(long, default_value_t = 15)]
        rounds: u32,
    },
    /// What the preloaded library costs on calls that are none of poolfs's, and at the start of a program.
    Overhead {
        /// A folder to work in; made and removed.
        #[arg(long)]
        work: PathBuf,
        /// How often every measurement is repeated.
        #[arg(long, default_value_t = 15)]
        rounds: u32,
        /// How long one measurement takes.
        #[arg(long, default_value_t = 50)]
        milliseconds: u64,
    },
    /// Plain memory copy beside the copy with non-temporal loads and stores, by size.
    Copy,
    /// One operation in this process; prints nanoseconds. The other tasks start it.
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
    },
}

fn main() -> Result<()> {
    match Arguments::parse().task {
        Task::Files { work, rounds, milliseconds } => {
            let poolfs = std::env::current_exe()?.with_file_name("poolfs");
            let work = made(&work)?;
            let mut laboratory = targets::Laboratory::new(&work, &poolfs, "0-1")?;
            let table = files::run(&mut laboratory, rounds, milliseconds);
            drop(laboratory);
            std::fs::remove_dir_all(&work)?;
            print!("{}", table?.markdown());
        }
        Task::RoundTrip { work, rounds } => {
            let poolfs = std::env::current_exe()?.with_file_name("poolfs");
            let work = made(&work)?;
            let table = roundtrip::run(&work, &poolfs, rounds);
            std::fs::remove_dir_all(&work)?;
            print!("{}", table?.markdown());
        }
        Task::Transports { work, rounds } => {
            let poolfs = std::env::current_exe()?.with_file_name("poolfs");
            let work = made(&work)?;
            let table = transports::run(&work, &poolfs, rounds);
            std::fs::remove_dir_all(&work)?;
            print!("{}", table?);
        }
        Task::Overhead { work, rounds, milliseconds } => {
            let poolfs = std::env::current_exe()?.with_file_name("poolfs");
            let work = made(&work)?;
            let table = overhead::run(&work, &poolfs, rounds, milliseconds);
            std::fs::remove_dir_all(&work)?;
            print!("{}", table?);
        }
        Task::Copy => print!("{}", copies::run().markdown()),
        Task::Worker { directory, data, operation, milliseconds, warm } => {
            let operation = worker::Operation::parse(&operation)?;
            println!("{}", worker::run(&directory, &data, operation, Duration::from_millis(milliseconds), warm)?);
        }
    }
    Ok(())
}

/// The folder, made, with its full path: mounts are known by that.
fn made(work: &Path) -> Result<PathBuf> {
    std::fs::create_dir_all(work)?;
    Ok(std::fs::canonicalize(work)?)
}
