//! What runs in the pools: each prints what it has done.

use crate::fileserver::FileServer;
use crate::worker::Blocks;
use anyhow::{Context, Result, anyhow, ensure};
use clap::Subcommand;
use rustix::fs::{Advice, fadvise};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// What is read ahead of each random read, and the bytes of each random read or write.
const READ_AHEAD: u64 = 64 << 10;
const RANDOM_BYTES: usize = 512;

/// Threads of the random reads and writes, and of sequential ones.
const RANDOM_THREADS: u64 = 2;
const SEQUENTIAL_THREADS: u64 = 4;

/// Bytes of a sequential read or write, and of what is appended.
const PIECE: u64 = 1 << 20;

/// A process in a pool.
#[derive(Subcommand)]
pub enum Worker {
    /// Rounds of the file server for some seconds; prints rounds per second.
    Fileserver {
        /// Where its files are made.
        directory: PathBuf,
        /// How long.
        #[arg(long)]
        milliseconds: u64,
    },
    /// Random reads and writes of a file until the input ends; prints a line when they have begun, and how many there were per second.
    Random {
        /// The file.
        file: PathBuf,
    },
    /// A file written from its beginning to its end again and again by several threads; prints MB/s.
    Write {
        /// The file; it is made.
        file: PathBuf,
        /// Its length, bytes.
        bytes: u64,
        /// How long.
        #[arg(long)]
        milliseconds: u64,
    },
    /// The same, read.
    Read {
        /// The file.
        file: PathBuf,
        /// Its length, bytes.
        bytes: u64,
        /// How long.
        #[arg(long)]
        milliseconds: u64,
    },
    /// 1 MiB at the end of a file.
    Append {
        /// The file.
        file: PathBuf,
    },
    /// A file from its beginning to its end, in pieces of 1 MiB.
    ReadAll {
        /// The file.
        file: PathBuf,
    },
}

impl Worker {
    /// Does it.
    pub fn run(&self) -> Result<()> {
        match self {
            Self::Fileserver { directory, milliseconds } => {
                println!("{}", fileserver(directory, Duration::from_millis(*milliseconds))?);
            }
            Self::Random { file } => random(file)?,
            Self::Write { file, bytes, milliseconds } => {
                let file = File::create(file).with_context(|| format!("{}", file.display()))?;
                let write = |buffer: &mut [u8], at| Ok(file.write_all_at(buffer, at)?);
                println!("{}", sequential(*bytes, Duration::from_millis(*milliseconds), write)?);
            }
            Self::Read { file, bytes, milliseconds } => {
                let file = File::open(file).with_context(|| format!("{}", file.display()))?;
                let read = |buffer: &mut [u8], at| Ok(file.read_exact_at(buffer, at)?);
                // Once through, so that all of it is cached that has room.
                sequential_pass(*bytes, read)?;
                println!("{}", sequential(*bytes, Duration::from_millis(*milliseconds), read)?);
            }
            Self::Append { file } => {
                OpenOptions::new().append(true).open(file)?.write_all(&vec![0x5a; PIECE as usize])?;
            }
            Self::ReadAll { file } => {
                let (mut file, mut buffer) = (File::open(file)?, vec![0; PIECE as usize]);
                while file.read(&mut buffer)? > 0 {}
            }
        }
        Ok(())
    }
}

fn fileserver(directory: &Path, time: Duration) -> Result<f64> {
    let mut server = FileServer::new(directory)?;
    // What was made before the measurement is not written back in it.
    server.files().try_for_each(|file| File::open(file)?.sync_all())?;
    server.round()?;
    let (begun, mut rounds) = (Instant::now(), 0);
    while begun.elapsed() < time {
        server.round()?;
        rounds += 1;
    }
    Ok(f64::from(rounds) / begun.elapsed().as_secs_f64())
}

fn random(file: &Path) -> Result<()> {
    let (ended, done) = (&AtomicBool::new(false), &AtomicU64::new(0));
    let length = std::fs::metadata(file)?.len();
    let work = |thread: u64| -> Result<()> {
        let file = File::options().read(true).write(true).open(file)?;
        let (mut buffer, mut most) = ([0x5a; RANDOM_BYTES], usize::MAX);
        let mut blocks = Blocks::new(length, RANDOM_BYTES, true, &mut most);
        // Another place of the same order.
        (0..thread * length / RANDOM_BYTES as u64 / RANDOM_THREADS).for_each(|_| {
            blocks.next_offset();
        });
        while !ended.load(Ordering::Relaxed) {
            let at = blocks.next_offset();
            fadvise(&file, at, NonZeroU64::new(READ_AHEAD), Advice::WillNeed)?;
            file.read_exact_at(&mut buffer, at)?;
            file.write_all_at(&buffer, at)?;
            done.fetch_add(2, Ordering::Relaxed);
        }
        Ok(())
    };
    let begun = Instant::now();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..RANDOM_THREADS).map(|thread| scope.spawn(move || work(thread))).collect();
        println!("begun");
        std::io::stdin().read_to_end(&mut Vec::new())?;
        ended.store(true, Ordering::Relaxed);
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread has panicked"))?)
    })?;
    println!("{}", done.load(Ordering::Relaxed) as f64 / begun.elapsed().as_secs_f64());
    Ok(())
}

/// MB/s of threads that each take the next piece of the file in turn.
fn sequential(bytes: u64, time: Duration, work: impl Fn(&mut [u8], u64) -> Result<()> + Sync) -> Result<f64> {
    ensure!(bytes >= PIECE && bytes.is_multiple_of(PIECE), "{bytes} bytes are no pieces of 1 MiB");
    let (next, begun, work) = (&AtomicU64::new(0), Instant::now(), &work);
    thread::scope(|scope| {
        let all = || -> Result<()> {
            let mut buffer = vec![0x5a; PIECE as usize];
            while begun.elapsed() < time {
                work(&mut buffer, next.fetch_add(1, Ordering::Relaxed) * PIECE % bytes)?;
            }
            Ok(())
        };
        let threads: Vec<_> = (0..SEQUENTIAL_THREADS).map(|_| scope.spawn(all)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread has panicked"))?)
    })?;
    Ok((next.load(Ordering::Relaxed) * PIECE) as f64 / 1e6 / begun.elapsed().as_secs_f64())
}

fn sequential_pass(bytes: u64, work: impl Fn(&mut [u8], u64) -> Result<()>) -> Result<()> {
    let mut buffer = vec![0; PIECE as usize];
    (0..bytes).step_by(PIECE as usize).try_for_each(|at| work(&mut buffer, at))
}
