//! Measures file operations on every target, paired: each round runs every target once, in a rotating order.

use crate::table::{Row, Table};
use crate::targets::{Laboratory, Target, drop_caches, turned};
use crate::worker::{copy_up_file, median};
use anyhow::{Context, Result, bail};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

/// (operation, warm, what the table calls it)
const CASES: &[(&str, bool, &str)] = &[
    ("read-512", true, "read 512 B, cached"),
    ("read-4096", true, "read 4 KiB, cached"),
    ("read-65536", true, "read 64 KiB, cached"),
    ("read-1048576", true, "read 1 MiB, cached"),
    ("read-4096", true, BY_TWO),
    ("follow-4096", true, "read 4 KiB at the descriptor's offset, cached"),
    ("fstat", true, "fstat, open for reading"),
    ("write-4096", true, "write 4 KiB, cached"),
    ("write-65536", true, "write 64 KiB, cached"),
    ("read-4096", false, "read 4 KiB, not cached"),
    ("read-65536", false, "read 64 KiB, not cached"),
    ("write-4096", false, "write 4 KiB, not cached"),
    ("write-65536", false, "write 64 KiB, not cached"),
    ("open-close", true, "open and close"),
    ("stat", true, "stat"),
    ("create-unlink", true, "create and unlink"),
    ("create-write-unlink-4096", true, "create, write 4 KiB, close and unlink"),
    ("rename-over", true, "create and rename over a file"),
    ("append-128", true, "append 128 B"),
    ("scattered-20", true, "20 scattered writes of 4 KiB, then fdatasync"),
];

/// The same where the service, the caller and the kernel's flushing of pages share one CPU.
const ON_ONE_CORE: &[(&str, &str)] = &[
    ("write-4096", "write 4 KiB into a cached file of 256 MiB, all on one core"),
    (
        "fileserver",
        "Fileserver: 4 threads, each removes a file, makes it with 1 MiB, appends 16 KiB to another, reads and looks at a third, all on one core",
    ),
];

/// The heading of what reading from mapped memory takes, without any filesystem.
const MAPPED: &str = "mapped memory";

/// The case whose operations two processes do at the same time.
const BY_TWO: &str = "read 4 KiB, cached, each of two processes";

/// Bytes of the file of cached reads.
const LARGE_BYTES: u64 = 256 << 20;

/// Bytes of the file of other reads and writes.
pub const DATA_BYTES: u64 = 64 << 20;

/// Bytes of each file whose first written byte is measured.
const COPY_UP_BYTES: u64 = 64 << 20;

/// Such files of each round: the first on a new mount is not like the others.
const COPY_UPS: u32 = 4;

/// How long what was read is left alone before reads of it are measured. Both caches put small pages together to large ones: the
/// kernel as it reads, the service some seconds later.
pub const SETTLING: Duration = Duration::from_secs(6);

/// Runs all cases `rounds` times in `work`, a folder on the disk to measure on.
pub fn run(work: &Path, poolfs: &Path, rounds: u32, milliseconds: u64) -> Result<Table> {
    let all = Target::all();
    let mut laboratory = Laboratory::new(work, poolfs, "0-1")?;
    let mut rows = on_all_cores(&mut laboratory, rounds, milliseconds)?;
    drop(laboratory);
    let mut laboratory = Laboratory::new(&work.join("one-core"), poolfs, "0")?;
    rows.extend(on_one_core(&mut laboratory, rounds, milliseconds)?);
    let columns: Vec<&str> = all.iter().map(|target| target.title()).chain([MAPPED]).collect();
    Ok(Table::of_operations(&columns, rows))
}

fn on_all_cores(laboratory: &mut Laboratory, rounds: u32, milliseconds: u64) -> Result<Vec<Row>> {
    prepare(laboratory, rounds)?;
    let all = Target::all();
    let memory = Memory::mount(&laboratory.folder().join("memory"))?;
    let mut samples: BTreeMap<(usize, Target), Vec<f64>> = BTreeMap::new();
    let mut mapped: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for round in 0..rounds {
        for (case, (operation, warm, title)) in CASES.iter().enumerate() {
            // What is not cached needs mounts nobody has read from.
            if case == 0 || !warm {
                laboratory.unmount()?;
                laboratory.mount()?;
            }
            if case == 0 {
                settle(laboratory)?;
            }
            eprintln!("round {} of {rounds}: {title}", round + 1);
            let processes = if *title == BY_TWO { 2 } else { 1 };
            for target in turned(&all, round) {
                if !warm {
                    drop_caches()?;
                }
                let work = Work { operation, warm: *warm, milliseconds, cpu: None };
                let times = workers(laboratory, target, &work, processes)?;
                samples.entry((case, target)).or_default().extend(times);
            }
            if let Some(bytes) = operation.strip_prefix("read-").filter(|_| *warm && processes == 1) {
                let time = memory.read(&format!("mapped-{bytes}"), milliseconds)?;
                mapped.entry(case).or_default().push(time);
            }
        }
        eprintln!("round {} of {rounds}: first byte", round + 1);
        for time in round * COPY_UPS..(round + 1) * COPY_UPS {
            for target in turned(&all, time) {
                // The library and FUSE share a mount: each gets a file nobody has written yet.
                let file = 2 * time + u32::from(target == Target::Fuse);
                let operation = format!("one-byte-{file}");
                let work = Work { operation: &operation, warm: false, milliseconds: 0, cpu: None };
                let times = workers(laboratory, target, &work, 1)?;
                samples.entry((CASES.len(), target)).or_default().extend(times);
            }
        }
    }
    laboratory.unmount()?;
    let titles = CASES.iter().map(|case| case.2).chain(["open, write 1 byte into a 64 MiB lower file, close"]);
    let row = |(case, title): (usize, &str)| {
        let middle = |target: &Target| samples.get_mut(&(case, *target)).map_or(0.0, |all| median(all));
        let mut medians: Vec<f64> = all.iter().map(middle).collect();
        medians.push(mapped.get_mut(&case).map_or(0.0, |all| median(all)));
        Row { title: title.to_owned(), medians }
    };
    Ok(titles.enumerate().map(row).collect())
}

fn on_one_core(laboratory: &mut Laboratory, rounds: u32, milliseconds: u64) -> Result<Vec<Row>> {
    for target in [Target::Library, Target::Fuse] {
        fill(&laboratory.lower().join(data_file(target, true)), LARGE_BYTES)?;
    }
    let (all, mut rows) = (Target::all(), Vec::new());
    for (operation, title) in ON_ONE_CORE {
        let mut samples: BTreeMap<Target, Vec<f64>> = BTreeMap::new();
        for round in 0..rounds {
            eprintln!("round {} of {rounds}: {title}", round + 1);
            laboratory.unmount()?;
            laboratory.mount()?;
            for target in turned(&all, round) {
                let work = Work { operation, warm: true, milliseconds, cpu: Some(0) };
                samples.entry(target).or_default().extend(workers(laboratory, target, &work, 1)?);
            }
        }
        let middle = |target: &Target| samples.get_mut(target).map_or(0.0, |all| median(all));
        let mut medians: Vec<f64> = all.iter().map(middle).collect();
        medians.push(0.0);
        rows.push(Row { title: (*title).to_owned(), medians });
    }
    laboratory.unmount()?;
    Ok(rows)
}

/// A tmpfs with a copy of what is read, unmounted at its end.
struct Memory(PathBuf);

impl Memory {
    fn mount(at: &Path) -> Result<Self> {
        fs::create_dir_all(at)?;
        // Large pages, as the service asks for its segments: the limit is what the machine can do.
        mount("poolfs-bench", at, "tmpfs", MountFlags::empty(), Some(c"huge=within_size"))
            .with_context(|| format!("a tmpfs at {}", at.display()))?;
        let memory = Self(at.to_path_buf());
        fill(&at.join("large-0"), LARGE_BYTES)?;
        Ok(memory)
    }

    fn read(&self, operation: &str, milliseconds: u64) -> Result<f64> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("worker").arg(&self.0).args(["large-0", operation, "--warm"]);
        let child = command.args(["--milliseconds", &milliseconds.to_string()]);
        time(child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?, operation, MAPPED)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Err(error) = unmount(&self.0, UnmountFlags::empty()) {
            eprintln!("{} cannot be unmounted: {error}", self.0.display());
        }
    }
}

/// The file that reads and writes use: the library and FUSE share a service, and its cache would be warm for the second.
fn data_file(target: Target, is_large: bool) -> &'static str {
    match (target == Target::Fuse, is_large) {
        (false, false) => "data-0",
        (true, false) => "data-1",
        (false, true) => "large-0",
        (true, true) => "large-1",
    }
}

fn prepare(laboratory: &Laboratory, rounds: u32) -> Result<()> {
    let lower = laboratory.lower();
    for target in [Target::Library, Target::Fuse] {
        fill(&lower.join(data_file(target, false)), DATA_BYTES)?;
        fill(&lower.join(data_file(target, true)), LARGE_BYTES)?;
    }
    for file in 0..2 * rounds * COPY_UPS {
        fill(&lower.join(copy_up_file(file)), COPY_UP_BYTES)?;
    }
    Ok(())
}

/// Has every target read what is measured as cached.
fn settle(laboratory: &Laboratory) -> Result<()> {
    for target in Target::all() {
        workers(laboratory, target, &Work { operation: "read-1048576", warm: true, milliseconds: 0, cpu: None }, 1)?;
    }
    sleep(SETTLING);
    Ok(())
}

/// A file of so many bytes.
pub fn fill(path: &Path, bytes: u64) -> Result<()> {
    let block: Vec<u8> = (0..1u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    // A tmpfs gives large pages only below the file's size.
    file.set_len(bytes)?;
    let mut left = usize::try_from(bytes)?;
    while left > 0 {
        let piece = left.min(block.len());
        file.write_all(&block[..piece]).with_context(|| format!("cannot write {}", path.display()))?;
        left -= piece;
    }
    Ok(())
}

/// What a worker is to do.
struct Work<'w> {
    operation: &'w str,
    warm: bool,
    milliseconds: u64,
    cpu: Option<usize>,
}

/// So many processes that do the same at the same time; the time of one operation in each.
fn workers(laboratory: &Laboratory, target: Target, work: &Work<'_>, processes: usize) -> Result<Vec<f64>> {
    let is_read = ["read-", "follow-", "fstat"].iter().any(|prefix| work.operation.starts_with(prefix));
    let is_large = work.warm && (is_read || work.cpu.is_some());
    let start = |_| {
        let mut command = laboratory.command(target, &std::env::current_exe()?);
        command.arg("worker").arg(laboratory.directory(target)).args([
            data_file(target, is_large),
            work.operation,
            "--milliseconds",
            &work.milliseconds.to_string(),
        ]);
        if work.warm {
            command.arg("--warm");
        }
        if let Some(cpu) = work.cpu {
            command.args(["--cpu", &cpu.to_string()]);
        }
        Ok(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
    };
    let started: Result<Vec<_>> = (0..processes).map(start).collect();
    started?.into_iter().map(|child| time(child, work.operation, target.title())).collect()
}

/// The time a worker tells at its end.
fn time(child: Child, operation: &str, place: &str) -> Result<f64> {
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("{operation} over {place}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().with_context(|| format!("{operation} over {place} said {text:?}"))
}
