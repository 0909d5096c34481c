//! One operation over libcephfs, repeated in a process of its own: what [`crate::worker`] does by the kernel's calls.

use crate::ceph::libcephfs::Mount;
use crate::worker::{Blocks, Operation, SCATTERED_BYTES, STREAMED_BYTES, measure};
use anyhow::{Result, bail};
use libc::{O_CREAT, O_EXCL, O_RDONLY, O_WRONLY};
use std::path::Path;
use std::time::{Duration, Instant};

/// Permissions of what it makes.
const MODE: libc::mode_t = 0o644;

/// Runs `operation` in the cluster's `directory`, on the file `data` there, for about `time` and returns the median nanoseconds of one.
pub fn run(
    mount: &Mount,
    directory: &Path,
    data: &str,
    operation: Operation,
    time: Duration,
    warm: bool,
) -> Result<f64> {
    let data = &directory.join(data);
    let mut most = usize::MAX;
    let mut step: Box<dyn FnMut() -> Result<()>> = match operation {
        Operation::Read(bytes) => {
            let (file, length) = (mount.open(data, O_RDONLY, 0)?, mount.length(data)?);
            if warm {
                let mut piece = vec![0; 1 << 17];
                (0..length).step_by(piece.len()).try_for_each(|at| file.read_exact_at(&mut piece, at))?;
            }
            let mut buffer = vec![0; bytes];
            let mut blocks = Blocks::new(length, bytes, warm, &mut most);
            Box::new(move || file.read_exact_at(&mut buffer, blocks.next_offset()))
        }
        Operation::Write(bytes) => {
            let (file, length) = (mount.open(data, O_WRONLY, 0)?, mount.length(data)?);
            if warm {
                let piece = vec![1; 1 << 17];
                (0..length).step_by(piece.len()).try_for_each(|at| file.write_all_at(&piece, at))?;
            }
            let buffer = vec![0x5a; bytes];
            let mut blocks = Blocks::new(length, bytes, warm, &mut most);
            Box::new(move || file.write_all_at(&buffer, blocks.next_offset()))
        }
        Operation::OpenClose => Box::new(|| mount.open(data, O_RDONLY, 0).map(drop)),
        Operation::Stat => Box::new(|| mount.length(data).map(drop)),
        Operation::CreateUnlink => {
            let path = directory.join("created");
            Box::new(move || {
                drop(mount.open(&path, O_WRONLY | O_CREAT, MODE)?);
                mount.remove(&path)
            })
        }
        Operation::Scattered(writes) => {
            let (file, length) = (mount.open(data, O_WRONLY, 0)?, mount.length(data)?);
            let buffer = vec![0x5a; SCATTERED_BYTES];
            let mut blocks = Blocks::new(length, SCATTERED_BYTES, true, &mut most);
            Box::new(move || {
                for _ in 0..writes {
                    file.write_all_at(&buffer, blocks.next_offset())?;
                }
                file.sync(true)
            })
        }
        Operation::StreamOut(bytes) => {
            let path = directory.join("streamed");
            let begun = Instant::now();
            fill(mount, &path, bytes)?;
            let time = begun.elapsed().as_nanos() as f64;
            mount.remove(&path)?;
            return Ok(time);
        }
        Operation::StreamIn => {
            let mut buffer = vec![0; STREAMED_BYTES];
            let begun = Instant::now();
            let (file, length) = (mount.open(data, O_RDONLY, 0)?, mount.length(data)?);
            (0..length).step_by(STREAMED_BYTES).try_for_each(|at| file.read_exact_at(&mut buffer, at))?;
            return Ok(begun.elapsed().as_nanos() as f64);
        }
        _ => bail!("{operation:?} is not measured over libcephfs"),
    };
    measure(&mut *step, time, warm, most)
}

/// Makes a file of so many bytes (a multiple of 1 MiB), and has the cluster store it.
fn fill(mount: &Mount, path: &Path, bytes: u64) -> Result<()> {
    let file = mount.open(path, O_WRONLY | O_CREAT | O_EXCL, MODE)?;
    let buffer = vec![0x5a; STREAMED_BYTES];
    (0..bytes).step_by(STREAMED_BYTES).try_for_each(|at| file.write_all_at(&buffer, at))?;
    file.sync(false)
}

/// Makes a directory, and files in it: a name and how many bytes, for each.
pub fn prepare(mount: &Mount, directory: &Path, files: &[(String, u64)]) -> Result<()> {
    mount.make_directories(directory)?;
    files.iter().try_for_each(|(name, bytes)| fill(mount, &directory.join(name), *bytes))
}
