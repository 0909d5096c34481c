//! First writes of lower files, in a process of its own: what the parent starts plain or under `poolfs exec`. Each prints nanoseconds.

use crate::worker::{Blocks, median};
use anyhow::Result;
use rustix::fs::fsync;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

const BLOCK: usize = 4096;

/// Bytes that are written into each block by [`write_many`]: a tenth of it, as in BAOverlay's measurement.
const PART: usize = 410;

/// The name of a lower file that is written first by [`first_bytes`].
pub fn name(bytes: u64, number: u32) -> String {
    format!("file-{bytes}-{number}")
}

/// Opens each of `count` files of so many bytes, writes one byte in its middle and closes it: the median. Their names are known before,
/// and the block in the middle is cached.
pub fn first_bytes(directory: &Path, bytes: u64, count: u32) -> Result<()> {
    let paths: Vec<_> = (0..count).map(|number| directory.join(name(bytes, number))).collect();
    for path in &paths {
        File::open(path)?.read_exact_at(&mut [0], bytes / 2)?;
    }
    let first = |path| {
        let begun = Instant::now();
        OpenOptions::new().write(true).open(path)?.write_all_at(b"x", bytes / 2)?;
        Ok(begun.elapsed().as_nanos() as f64)
    };
    println!("{}", median(&mut paths.iter().map(first).collect::<Result<Vec<_>>>()?));
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
