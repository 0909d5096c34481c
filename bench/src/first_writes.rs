//! First writes of lower files, timed in a process of its own that the parent starts plain or under `poolfs exec`. Each prints nanoseconds.

use crate::worker::{Blocks, median};
use anyhow::{Context, Result};
use rustix::fs::fsync;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Instant;

const BLOCK: usize = 4096;

/// Bytes that are written into each block by [`write_many`]: a tenth of it, as in BAOverlay's measurement.
const PART: usize = 410;

/// The name of a lower file that is written first by [`first_bytes`].
pub fn name(bytes: u64, number: u32) -> String {
    format!("file-{bytes}-{number}")
}

/// Lower files of one size.
#[derive(Clone, Copy, Debug)]
pub struct Files {
    pub bytes: u64,
    pub count: u32,
}

impl FromStr for Files {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (bytes, count) = text.split_once(':').context("BYTES:COUNT")?;
        Ok(Self { bytes: bytes.parse()?, count: count.parse()? })
    }
}

/// Opens each of the files, writes one byte in its middle and closes it: the median of each size. Their names are known before, and the
/// block in the middle is cached. One process writes all of them, so that the largest, of which there are few, do not measure its start.
pub fn first_bytes(directory: &Path, all: &[Files]) -> Result<()> {
    let paths = |files: &Files| (0..files.count).map(|number| directory.join(name(files.bytes, number))).collect();
    let all: Vec<(u64, Vec<PathBuf>)> = all.iter().map(|files| (files.bytes, paths(files))).collect();
    for (bytes, paths) in &all {
        for path in paths {
            File::open(path)?.read_exact_at(&mut [0], bytes / 2)?;
        }
    }
    for (bytes, paths) in &all {
        let first = |path| {
            let begun = Instant::now();
            OpenOptions::new().write(true).open(path)?.write_all_at(b"x", bytes / 2)?;
            Ok(begun.elapsed().as_nanos() as f64)
        };
        println!("{}", median(&mut paths.iter().map(first).collect::<Result<Vec<_>>>()?));
    }
    Ok(())
}

/// Writes a part of each block of a file, from its beginning to its end, and closes it; reads a fifth of the blocks once, in any order; has all
/// brought to disk; reads as many again. Prints the time of each of the four.
pub fn write_many(path: &Path) -> Result<()> {
    let length = std::fs::metadata(path)?.len();
    let begun = Instant::now();
    {
        let file = OpenOptions::new().write(true).open(path)?;
        for at in (0..length).step_by(BLOCK) {
            file.write_all_at(&[0x5a; PART], at + (at / BLOCK as u64 * 97) % (BLOCK - PART) as u64)?;
        }
    }
    println!("{}", begun.elapsed().as_nanos());
    read_some(path)?;
    let begun = Instant::now();
    fsync(OpenOptions::new().write(true).open(path)?)?;
    println!("{}", begun.elapsed().as_nanos());
    read_some(path)
}

/// Reads a fifth of the blocks of a file once, in any order, and prints the time of all.
pub fn read_some(path: &Path) -> Result<()> {
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    let mut blocks = Blocks::new(length, BLOCK, true, &mut 0);
    let mut buffer = [0; BLOCK];
    let begun = Instant::now();
    for _ in 0..length / BLOCK as u64 / 5 {
        file.read_exact_at(&mut buffer, blocks.next_offset())?;
    }
    println!("{}", begun.elapsed().as_nanos());
    Ok(())
}

/// Writes one byte into each of `count` files of so many bytes, and has it brought to disk.
pub fn touch_each(directory: &Path, bytes: u64, count: u32) -> Result<()> {
    for number in 0..count {
        let file = OpenOptions::new().write(true).open(directory.join(name(bytes, number)))?;
        file.write_all_at(b"x", bytes / 2)?;
        fsync(&file)?;
    }
    Ok(())
}
