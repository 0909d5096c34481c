//! One operation, many times, in a process of its own: what the parent starts plain or under `poolfs exec`.

use anyhow::{Context, Result, bail};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Name of the file that reads and writes use, in the directory under test.
pub const DATA_FILE: &str = "data";

/// Bytes of [`DATA_FILE`].
pub const DATA_BYTES: u64 = 64 << 20;

/// Names of the files whose first byte written is measured.
pub fn copy_up_file(number: u32) -> String {
    format!("copy-up-{number}")
}

/// An operation the worker knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// pread of so many bytes at random aligned offsets
    Read(usize),
    /// pwrite of so many bytes at random aligned offsets
    Write(usize),
    /// open and close
    OpenClose,
    /// stat by path
    Stat,
    /// create, close and unlink
    CreateUnlink,
    /// open, write one byte in the middle, close; a lower file nobody has written yet
    OneByte(u32),
}

impl Operation {
    /// The operation with this name, e.g. `read-4096`, `one-byte-3`.
    pub fn parse(name: &str) -> Result<Self> {
        let number = |prefix: &str| name.strip_prefix(prefix).and_then(|rest| rest.parse::<u32>().ok());
        Ok(match name {
            "open-close" => Self::OpenClose,
            "stat" => Self::Stat,
            "create-unlink" => Self::CreateUnlink,
            _ => {
                if let Some(bytes) = number("read-") {
                    Self::Read(bytes as usize)
                } else if let Some(bytes) = number("write-") {
                    Self::Write(bytes as usize)
                } else if let Some(file) = number("one-byte-") {
                    Self::OneByte(file)
                } else {
                    bail!("unknown operation {name}")
                }
            }
        })
    }
}

/// Runs `operation` in `directory` for about `time` (at least once) and returns the median nanoseconds of one.
pub fn run(directory: &Path, operation: Operation, time: Duration, warm: bool) -> Result<f64> {
    let mut dice = 0x9E37_79B9_7F4A_7C15u64;
    let data = directory.join(DATA_FILE);
    let mut step: Box<dyn FnMut() -> Result<()>> = match operation {
        Operation::Read(bytes) => {
            let file = File::open(&data).with_context(|| format!("{}", data.display()))?;
            let mut buffer = vec![0; bytes];
            if warm {
                for at in (0..DATA_BYTES).step_by(1 << 17) {
                    file.read_exact_at(&mut vec![0; 1 << 17], at)?;
                }
            }
            Box::new(move || Ok(file.read_exact_at(&mut buffer, random_block(&mut dice, bytes))?))
        }
        Operation::Write(bytes) => {
            let file = OpenOptions::new().write(true).open(&data)?;
            let buffer = vec![0x5a; bytes];
            if warm {
                for at in (0..DATA_BYTES).step_by(1 << 17) {
                    file.write_all_at(&vec![1; 1 << 17], at)?;
                }
            }
            Box::new(move || Ok(file.write_all_at(&buffer, random_block(&mut dice, bytes))?))
        }
        Operation::OpenClose => Box::new(move || {
            File::open(&data)?;
            Ok(())
        }),
        Operation::Stat => Box::new(move || {
            fs::metadata(&data)?;
            Ok(())
        }),
        Operation::CreateUnlink => {
            let path = directory.join("created");
            Box::new(move || {
                File::create(&path)?;
                Ok(fs::remove_file(&path)?)
            })
        }
        Operation::OneByte(number) => {
            let path = directory.join(copy_up_file(number));
            let middle = fs::metadata(&path)?.len() / 2;
            let begun = Instant::now();
            OpenOptions::new().write(true).open(&path)?.write_all_at(b"x", middle)?;
            return Ok(begun.elapsed().as_nanos() as f64);
        }
    };
    measure(&mut *step, time, warm)
}

fn random_block(dice: &mut u64, bytes: usize) -> u64 {
    *dice ^= *dice << 13;
    *dice ^= *dice >> 7;
    *dice ^= *dice << 17;
    (*dice % (DATA_BYTES / bytes as u64)) * bytes as u64
}

/// Batches of about a millisecond each, so that the clock costs nothing; the median batch.
fn measure(step: &mut dyn FnMut() -> Result<()>, time: Duration, warm: bool) -> Result<f64> {
    let first = Instant::now();
    step()?;
    let once = first.elapsed().as_nanos().max(1);
    let batch = if warm { (1_000_000 / once).clamp(1, 10_000) as u32 } else { 1 };
    let end = Instant::now() + time;
    let mut batches = Vec::new();
    while batches.len() < 5 || Instant::now() < end {
        let begun = Instant::now();
        for _ in 0..batch {
            step()?;
        }
        batches.push(begun.elapsed().as_nanos() as f64 / f64::from(batch));
        if batches.len() >= 100_000 {
            break;
        }
    }
    Ok(median(&mut batches))
}

/// The median; 0 of nothing.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}
