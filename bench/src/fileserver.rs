//! The Fileserver personality of Filebench, scaled down: threads that create, write, append to, read, stat and remove whole files.

use anyhow::{Result, anyhow, ensure};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::thread;

/// Threads, each with files of its own.
const THREADS: usize = 4;

/// Files of a thread.
const FILES: usize = 50;

/// Bytes of a file as it is made.
const FILE_BYTES: usize = 1 << 20;

/// Bytes that are appended at a time.
const APPENDED_BYTES: usize = 16 << 10;

/// How far the files apart are that a thread uses in one round.
const STRIDE: usize = 17;

/// The files of all threads.
pub struct FileServer {
    directory: PathBuf,
    round: usize,
}

impl FileServer {
    /// Makes the files, in a directory of their own below this one.
    pub fn new(below: &Path) -> Result<Self> {
        let directory = below.join("fileserver");
        fs::create_dir_all(&directory)?;
        let server = Self { directory, round: 0 };
        for thread in 0..THREADS {
            (0..FILES).try_for_each(|number| make(&server.file(thread, number)))?;
        }
        Ok(server)
    }

    /// All files.
    pub fn files(&self) -> impl Iterator<Item = PathBuf> {
        (0..THREADS).flat_map(move |thread| (0..FILES).map(move |number| self.file(thread, number)))
    }

    fn file(&self, thread: usize, number: usize) -> PathBuf {
        self.directory.join(format!("{thread}-{}", number % FILES))
    }

    /// Every thread does each of the operations once.
    pub fn round(&mut self) -> Result<()> {
        self.round += 1;
        let server = &*self;
        thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || server.operations(thread))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread has panicked"))?)
        })
    }

    fn operations(&self, thread: usize) -> Result<()> {
        let file = |number: usize| self.file(thread, self.round + number * STRIDE);
        fs::remove_file(file(0))?;
        make(&file(0))?;
        OpenOptions::new().append(true).open(file(1))?.write_all(&[0x5b; APPENDED_BYTES])?;
        let mut bytes = Vec::with_capacity(2 * FILE_BYTES);
        let read = File::open(file(2))?.read_to_end(&mut bytes)?;
        ensure!(read >= FILE_BYTES, "a file of {read} bytes");
        ensure!(fs::metadata(file(2))?.len() == read as u64, "it has changed");
        Ok(())
    }
}

fn make(path: &Path) -> Result<()> {
    Ok(File::create(path)?.write_all(&vec![0x5a; FILE_BYTES])?)
}
