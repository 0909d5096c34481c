//! Measures the cost of one request: a bare futex hand-over and back, an echo through a session, a getattr through FUSE; and of reads of a cached
//! file by both.

use crate::table::{Row, Table};
use crate::targets::{Laboratory, Target, succeed};
use crate::worker::median;
use anyhow::{Context, Result};
use poolfs_ipc::memory::PAGE;
use poolfs_ipc::wire::{ADOPT, Adopt, MOUNT_SOURCE_PREFIX, Operation, Request, SOCKET_DIRECTORY, SOCKET_SUFFIX};
use poolfs_ipc::{Connection, futex};
use rustix::fs::{AtFlags, StatxFlags, statx};
use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const TRIPS: u32 = 2_000;

/// Of reads by request; the largest is what one request can read.
const LENGTHS: [usize; 3] = [4 << 10, 64 << 10, 128 << 10];

/// Medians over `rounds` rounds, the service on CPU 0, the caller on CPU 0 and on CPU 1.
pub fn run(work: &Path, poolfs: &Path, rounds: u32) -> Result<Table> {
    let laboratory = Laboratory::new(work, poolfs, "0")?;
    let at = laboratory.directory(Target::Library);
    std::fs::create_dir_all(&at)?;
    std::fs::write(laboratory.lower().join("file"), vec![b'x'; LENGTHS[2]])?;
    succeed(laboratory.poolfs().args(["mount", laboratory.pool()]).arg(&at).arg("--dir").arg(laboratory.lower()))?;
    let union = work.join("round-trip-union");
    let measured = mount_union(&laboratory, work, &union).and_then(|()| measure(&at, &union, rounds));
    let unmounted = [&at, &union].map(|at| succeed(laboratory.poolfs().args(["umount", laboratory.pool()]).arg(at)));
    let table = measured?;
    unmounted.into_iter().collect::<Result<()>>()?;
    Ok(table)
}

/// A union with a file of which two blocks were copied up.
fn mount_union(laboratory: &Laboratory, work: &Path, at: &Path) -> Result<()> {
    let [upper, lower] = ["round-trip-upper", "round-trip-lower"].map(|name| work.join(name));
    for directory in [&upper, &lower, &at.to_owned()] {
        // Of a run that did not end.
        let _ = std::fs::remove_dir_all(directory);
        std::fs::create_dir_all(directory)?;
    }
    std::fs::write(lower.join("file"), vec![b'x'; LENGTHS[2]])?;
    let mut command = laboratory.poolfs();
    command.args(["mount", laboratory.pool()]).arg(at).arg("--upper").arg(&upper).arg("--lower").arg(&lower);
    succeed(&mut command)?;
    let file = File::options().write(true).open(at.join("file"))?;
    for block in [1, 9] {
        file.write_all_at(b"y", (block * PAGE) as u64)?;
    }
    Ok(file.sync_all()?)
}

fn connect(at: &Path) -> Result<Connection> {
    let socket = CString::new(format!("{SOCKET_DIRECTORY}/{}{SOCKET_SUFFIX}", instance_at(at)?))?;
    Connection::open(&socket).map_err(|errno| anyhow::anyhow!("{socket:?}: {errno}"))
}

fn measure(at: &Path, union: &Path, rounds: u32) -> Result<Table> {
    let mut rows = Vec::new();
    for (cpu, title) in [(0, "same core"), (1, "across cores")] {
        pin(cpu)?;
        let connection = connect(at)?;
        let file = File::open(at.join("file"))?;
        let (mut bare, mut echo, mut fuse) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            bare.push(hand_over(cpu)?);
            echo.push(per_trip(|| {
                let request = Request { operation: Operation::Echo as u32, offset: 7, ..Request::default() };
                let reply =
                    connection.call(&request, &[], &mut []).map_err(|error| anyhow::anyhow!("echo: {error:?}"))?;
                anyhow::ensure!(reply.value == 7, "the echo answered {}", reply.value);
                Ok(())
            })?);
            fuse.push(per_trip(|| {
                // What the kernel remembers does not count.
                statx(&file, "", AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS)?;
                Ok(())
            })?);
        }
        rows.push(Row {
            title: title.to_owned(),
            medians: vec![median(&mut bare), median(&mut echo), median(&mut fuse)],
        });
        connection.close();
        for (place, what) in [(at, ""), (union, " of a file that was copied up in part")] {
            let connection = connect(place)?;
            for length in LENGTHS {
                let title = format!("{title}, read {} KiB{what}", length >> 10);
                rows.push(reads(title, &connection, &place.join("file"), length, rounds)?);
            }
            connection.close();
        }
    }
    Ok(Table::of_operations(&["futex hand-over and back", "request", "FUSE"], rows))
}

/// Reads of the beginning of the file, by request and by the kernel.
fn reads(title: String, connection: &Connection, path: &Path, length: usize, rounds: u32) -> Result<Row> {
    let file = File::open(path)?;
    let handle = adopt(&file, connection)?;
    let past_pages = File::options().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let (mut by_request, mut by_fuse) = (Vec::new(), Vec::new());
    // As O_DIRECT wants it.
    let mut memory = vec![0; length + PAGE];
    let begin = memory.as_ptr().align_offset(PAGE);
    let bytes = &mut memory[begin..begin + length];
    for _ in 0..rounds {
        by_request.push(per_trip(|| {
            let operation = Operation::Read as u32;
            let request = Request { operation, handle, length: length as u64, ..Request::default() };
            let reply = connection.call(&request, &[], bytes).map_err(|error| anyhow::anyhow!("read: {error:?}"))?;
            anyhow::ensure!(reply.length == length as u64, "read: {reply:?}");
            Ok(())
        })?);
        by_fuse.push(per_trip(|| Ok(past_pages.read_exact_at(bytes, 0)?))?);
    }
    Ok(Row { title, medians: vec![0.0, median(&mut by_request), median(&mut by_fuse)] })
}

/// The file's handle in the session.
fn adopt(file: &File, connection: &Connection) -> Result<u64> {
    let mut message = Adopt::asking(connection.session());
    // SAFETY: the ioctl reads and writes exactly the bytes of the message.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), u64::from(ADOPT), &raw mut message) };
    anyhow::ensure!(done == 0 && message.handle != 0, "the file is not adopted: {}", std::io::Error::last_os_error());
    Ok(message.handle)
}

fn per_trip(mut trip: impl FnMut() -> Result<()>) -> Result<f64> {
    let begun = Instant::now();
    for _ in 0..TRIPS {
        trip()?;
    }
    Ok(begun.elapsed().as_nanos() as f64 / f64::from(TRIPS))
}

/// Two threads that wake each other in turn, the other one on CPU 0.
fn hand_over(cpu: usize) -> Result<f64> {
    let turn = AtomicU32::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Without its CPU the thread still answers; the caller's own pin has been checked.
            let _ = pin(0);
            for trip in 0..TRIPS {
                await_turn(&turn, trip * 2 + 1);
                turn.store(trip * 2 + 2, Ordering::SeqCst);
                futex::wake_one(&turn);
            }
        });
        pin(cpu)?;
        let begun = Instant::now();
        for trip in 0..TRIPS {
            turn.store(trip * 2 + 1, Ordering::SeqCst);
            futex::wake_one(&turn);
            await_turn(&turn, trip * 2 + 2);
        }
        Ok(begun.elapsed().as_nanos() as f64 / f64::from(TRIPS))
    })
}

fn await_turn(turn: &AtomicU32, wanted: u32) {
    loop {
        let now = turn.load(Ordering::SeqCst);
        if now >= wanted {
            return;
        }
        futex::wait(turn, now, Duration::from_millis(50));
    }
}

/// Keeps the calling thread on a CPU.
pub fn pin(cpu: usize) -> Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).with_context(|| format!("cannot run on CPU {cpu}"))
}

fn instance_at(at: &Path) -> Result<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    mounts
        .lines()
        .filter(|line| line.split(' ').nth(4) == at.to_str())
        .find_map(|line| line.split(' ').find_map(|field| field.strip_prefix(MOUNT_SOURCE_PREFIX)))
        .map(str::to_owned)
        .with_context(|| format!("no poolfs mount at {}", at.display()))
}
