//! One operation, repeated in a process of its own that the parent starts plain or under `poolfs exec`.

use crate::fileserver::FileServer;
use crate::mapped::Mapped;
use anyhow::{Context, Result, anyhow, bail};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Most bytes of the file that is appended to, before it begins anew.
const APPENDED_MAX: u64 = 64 << 20;
/// Bytes of each of several writes before a sync.
pub const SCATTERED_BYTES: usize = 4096;
/// Bytes of each call of a stream.
pub const STREAMED_BYTES: usize = 1 << 20;

/// Names of the files whose first byte written is measured.
pub fn copy_up_file(number: u32) -> String {
    format!("copy-up-{number}")
}

/// An operation the worker knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// pread of so many bytes at random aligned offsets
    Read(usize),
    /// the same from a mapping of the file that has all its pages
    Mapped(usize),
    /// pwrite of so many bytes at random aligned offsets
    Write(usize),
    /// read of so many bytes where the last one ended
    Follow(usize),
    /// fstat
    FileStat,
    /// open and close
    OpenClose,
    /// stat by path
    Stat,
    /// stat by a path relative to the working directory
    RelativeStat,
    /// create, close and unlink
    CreateUnlink,
    /// create, write so many bytes, close and unlink
    CreateWriteUnlink(usize),
    /// create an empty file and rename it over another one
    RenameOver,
    /// write of so many bytes to a descriptor opened with `O_APPEND`
    Append(usize),
    /// so many pwrites of 4 KiB to random blocks, then fdatasync
    Scattered(usize),
    /// a new file of so many bytes, written from its beginning to its end and synced: once
    StreamOut(u64),
    /// a file, read from its beginning to its end: once
    StreamIn,
    /// a round of all threads of a file server
    FileServer,
    /// open, write one byte in the middle, close; a lower file nobody has written yet
    OneByte(u32),
}

impl Operation {
    /// The operation with this name, e.g. `read-4096`, `one-byte-3`.
    pub fn parse(name: &str) -> Result<Self> {
        let number = |prefix: &str| name.strip_prefix(prefix).and_then(|rest| rest.parse::<u32>().ok());
        Ok(match name {
            "open-close" => Self::OpenClose,
            "fstat" => Self::FileStat,
            "stat" => Self::Stat,
            "relative-stat" => Self::RelativeStat,
            "create-unlink" => Self::CreateUnlink,
            "rename-over" => Self::RenameOver,
            "fileserver" => Self::FileServer,
            "stream-in" => Self::StreamIn,
            _ => {
                if let Some(bytes) = number("read-") {
                    Self::Read(bytes as usize)
                } else if let Some(bytes) = number("mapped-") {
                    Self::Mapped(bytes as usize)
                } else if let Some(bytes) = number("follow-") {
                    Self::Follow(bytes as usize)
                } else if let Some(bytes) = number("write-") {
                    Self::Write(bytes as usize)
                } else if let Some(bytes) = number("create-write-unlink-") {
                    Self::CreateWriteUnlink(bytes as usize)
                } else if let Some(bytes) = number("append-") {
                    Self::Append(bytes as usize)
                } else if let Some(writes) = number("scattered-") {
                    Self::Scattered(writes as usize)
                } else if let Some(mebibytes) = number("stream-out-") {
                    Self::StreamOut(u64::from(mebibytes) << 20)
                } else if let Some(file) = number("one-byte-") {
                    Self::OneByte(file)
                } else {
                    bail!("unknown operation {name}")
                }
            }
        })
    }
}

/// Runs `operation` in `directory`, on the file `data` there, for about `time` (at least once) and returns the median
/// nanoseconds of one. What is not `warm` touches nothing twice, and ends when there is nothing left.
pub fn run(directory: &Path, data: &str, operation: Operation, time: Duration, warm: bool) -> Result<f64> {
    let data = directory.join(data);
    let mut most = usize::MAX;
    let mut step: Box<dyn FnMut() -> Result<()>> = match operation {
        Operation::Read(bytes) => {
            let (file, length) = opened(&data, warm)?;
            let mut buffer = vec![0; bytes];
            let mut blocks = Blocks::new(length, bytes, warm, &mut most);
            Box::new(move || Ok(file.read_exact_at(&mut buffer, blocks.next_offset())?))
        }
        Operation::Mapped(bytes) => {
            let mapped = Mapped::new(&File::open(&data)?, true)?;
            let mut buffer = vec![0; bytes];
            let mut blocks = Blocks::new(mapped.length(), bytes, warm, &mut most);
            Box::new(move || mapped.read(blocks.next_offset(), &mut buffer))
        }
        Operation::Follow(bytes) => {
            let (mut file, length) = opened(&data, warm)?;
            let mut buffer = vec![0; bytes];
            let mut at = 0;
            Box::new(move || {
                if at + bytes as u64 > length {
                    file.rewind()?;
                    at = 0;
                }
                at += bytes as u64;
                Ok(file.read_exact(&mut buffer)?)
            })
        }
        Operation::FileStat => {
            let (file, _) = opened(&data, false)?;
            Box::new(move || {
                file.metadata()?;
                Ok(())
            })
        }
        Operation::Write(bytes) => {
            let file = OpenOptions::new().write(true).open(&data)?;
            let length = file.metadata()?.len();
            let buffer = vec![0x5a; bytes];
            if warm {
                for at in (0..length).step_by(1 << 17) {
                    file.write_all_at(&vec![1; 1 << 17], at)?;
                }
            }
            let mut blocks = Blocks::new(length, bytes, warm, &mut most);
            Box::new(move || Ok(file.write_all_at(&buffer, blocks.next_offset())?))
        }
        Operation::OpenClose => Box::new(move || {
            File::open(&data)?;
            Ok(())
        }),
        Operation::Stat => Box::new(move || {
            fs::metadata(&data)?;
            Ok(())
        }),
        Operation::RelativeStat => {
            let name = data.file_name().context("a name")?.to_owned();
            Box::new(move || {
                fs::metadata(&name)?;
                Ok(())
            })
        }
        Operation::CreateUnlink => {
            let path = directory.join("created");
            Box::new(move || {
                File::create(&path)?;
                Ok(fs::remove_file(&path)?)
            })
        }
        Operation::CreateWriteUnlink(bytes) => {
            let (path, buffer) = (directory.join("created"), vec![0x5a; bytes]);
            Box::new(move || {
                File::create(&path)?.write_all(&buffer)?;
                Ok(fs::remove_file(&path)?)
            })
        }
        Operation::RenameOver => {
            let [from, to] = ["renamed", "replaced"].map(|name| directory.join(name));
            File::create(&to)?;
            Box::new(move || {
                File::create(&from)?;
                Ok(fs::rename(&from, &to)?)
            })
        }
        Operation::Append(bytes) => {
            let path = directory.join("appended");
            let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
            let buffer = vec![0x5a; bytes];
            let mut length = 0;
            Box::new(move || {
                length += bytes as u64;
                if length > APPENDED_MAX {
                    file.set_len(0)?;
                    length = 0;
                }
                Ok(file.write_all(&buffer)?)
            })
        }
        Operation::Scattered(writes) => {
            let file = OpenOptions::new().write(true).open(&data)?;
            let length = file.metadata()?.len();
            let buffer = vec![0x5a; SCATTERED_BYTES];
            let mut blocks = Blocks::new(length, SCATTERED_BYTES, true, &mut most);
            Box::new(move || {
                for _ in 0..writes {
                    file.write_all_at(&buffer, blocks.next_offset())?;
                }
                Ok(file.sync_data()?)
            })
        }
        Operation::StreamOut(bytes) => {
            let path = directory.join("streamed");
            let begun = Instant::now();
            let mut file = File::create_new(&path)?;
            let buffer = vec![0x5a; STREAMED_BYTES];
            for _ in (0..bytes).step_by(STREAMED_BYTES) {
                file.write_all(&buffer)?;
            }
            file.sync_all()?;
            let time = begun.elapsed().as_nanos() as f64;
            fs::remove_file(&path)?;
            return Ok(time);
        }
        Operation::StreamIn => {
            let mut buffer = vec![0; STREAMED_BYTES];
            let begun = Instant::now();
            let mut file = File::open(&data)?;
            while file.read(&mut buffer)? > 0 {}
            return Ok(begun.elapsed().as_nanos() as f64);
        }
        Operation::FileServer => {
            let mut server = FileServer::new(directory)?;
            Box::new(move || server.round())
        }
        Operation::OneByte(number) => {
            let path = directory.join(copy_up_file(number));
            // Names are warm everywhere: of the library's stat the kernel, which opens, learns nothing.
            let middle = File::open(&path)?.metadata()?.len() / 2;
            let begun = Instant::now();
            OpenOptions::new().write(true).open(&path)?.write_all_at(b"x", middle)?;
            return Ok(begun.elapsed().as_nanos() as f64);
        }
    };
    measure(&mut *step, time, warm, most)
}

/// The same by so many threads at the same time, which share all that a process has: the time that passes for each operation of any of them.
/// What is `warm` is so before they begin.
pub fn by_threads(threads: u32, time: Duration, run: impl Fn(Duration) -> Result<f64> + Sync) -> Result<f64> {
    if threads == 1 {
        return run(time);
    }
    run(Duration::ZERO)?;
    let mut times = thread::scope(|scope| {
        let started: Vec<_> = (0..threads).map(|_| scope.spawn(|| run(time))).collect();
        started
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a thread has panicked"))?)
            .collect::<Result<Vec<_>>>()
    })?;
    Ok(median(&mut times) / f64::from(threads))
}

/// The file, read from beginning to end when it is to be warm, and its length.
fn opened(data: &Path, warm: bool) -> Result<(File, u64)> {
    let file = File::open(data).with_context(|| format!("{}", data.display()))?;
    let length = file.metadata()?.len();
    if warm {
        let mut piece = vec![0; 1 << 17];
        for at in (0..length).step_by(piece.len()) {
            file.read_exact_at(&mut piece, at)?;
        }
    }
    Ok((file, length))
}

/// The blocks of a data file in a random order, again and again.
pub struct Blocks {
    order: Vec<u64>,
    next: usize,
}

impl Blocks {
    /// Blocks of so many bytes in a file of `length`. Unless `warm`, no more than `most` steps find one that was not touched yet.
    pub fn new(length: u64, bytes: usize, warm: bool, most: &mut usize) -> Self {
        let mut order: Vec<u64> = (0..length).step_by(bytes).collect();
        let mut dice = 0x9E37_79B9_7F4A_7C15u64;
        for left in (1..order.len()).rev() {
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            order.swap(left, (dice % (left as u64 + 1)) as usize);
        }
        if !warm {
            *most = order.len();
        }
        Self { order, next: 0 }
    }

    /// Where the next one begins.
    pub fn next_offset(&mut self) -> u64 {
        let offset = self.order[self.next];
        self.next = (self.next + 1) % self.order.len();
        offset
    }
}

/// Batches of about a millisecond each, so that the clock costs nothing, of `most` steps in all; the median batch.
pub fn measure(step: &mut dyn FnMut() -> Result<()>, time: Duration, warm: bool, most: usize) -> Result<f64> {
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
        // The first step was not measured.
        if batches.len() >= 100_000.min(most - 1) {
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
