//! Measures the kernel's requests by `/dev/fuse` beside those by io_uring: while the other core is asleep, one after the other, and in
//! streams.

use crate::roundtrip::pin;
use crate::streams::{self, Place};
use crate::table::{Row, Table};
use crate::targets::{Laboratory, succeed};
use crate::worker::median;
use anyhow::{Context, Result};
use rustix::fs::{AtFlags, FlockOperation, StatxFlags, flock, statx};
use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";

/// Names of the ways, as `--fuse-transport` has them, and headings of the columns.
const TRANSPORTS: [(&str, &str); 2] = [("dev-fuse", "/dev/fuse"), (RINGS, "io_uring")];

const RINGS: &str = "io-uring";

/// Has room for all files of both mounts.
const CACHE: &str = "2G";

/// A core with nothing to do sleeps long before.
const PAUSE: Duration = Duration::from_millis(1);

const TRIPS: usize = 200;

/// The kernel offers rings to mounts that are made while this lives, and no test changes that meanwhile.
pub struct Offered {
    before: String,
    _alone: File,
}

impl Offered {
    /// Whether this kernel has such rings.
    pub fn is_known() -> bool {
        Path::new(PARAMETER).exists()
    }

    /// Offers them (`Y`) or does not (`N`).
    pub fn set(value: &str) -> Result<Self> {
        let alone = File::open(PARAMETER).context("this kernel has no FUSE over io_uring")?;
        if flock(&alone, FlockOperation::NonBlockingLockExclusive).is_err() {
            eprintln!("waiting for tests that need {PARAMETER} as it is");
            flock(&alone, FlockOperation::LockExclusive)?;
        }
        let before = fs::read_to_string(PARAMETER)?;
        fs::write(PARAMETER, value).context("switching it on needs root")?;
        Ok(Self { before, _alone: alone })
    }
}

impl Drop for Offered {
    fn drop(&mut self) {
        if let Err(error) = fs::write(PARAMETER, &self.before) {
            eprintln!("{PARAMETER} is not as it was: {error}");
        }
    }
}

/// Medians over `rounds` rounds, of what takes longer over a third of them, as text. The service has both CPUs.
pub fn run(work: &Path, poolfs: &Path, rounds: u32) -> Result<String> {
    if !Offered::is_known() {
        return Ok("This kernel does not offer FUSE over io_uring.\n".to_owned());
    }
    let laboratory = Laboratory::sized(work, poolfs, "0-1", "4G", CACHE)?;
    let places = TRANSPORTS.map(|(name, title)| Place { title, at: work.join(name), is_mount: true });
    let of_streams = rounds.div_ceil(3);
    for (name, _) in TRANSPORTS {
        let directory = laboratory.lower().join(name);
        fs::create_dir_all(&directory)?;
        fs::write(directory.join("file"), "x")?;
        streams::prepare(&directory, of_streams)?;
    }
    let mut mounted = Vec::new();
    let measured = mount_all(&laboratory, &places, &mut mounted).and_then(|()| {
        let streams = tables_of_streams(work, &places, of_streams)?;
        // Last, because from here on this thread has one CPU.
        Ok([measure(&places, rounds)?.markdown(), streams].join("\n"))
    });
    for at in mounted {
        succeed(laboratory.poolfs().args(["umount", laboratory.pool()]).arg(at))?;
    }
    measured
}

fn mount_all<'a>(laboratory: &Laboratory, places: &'a [Place], mounted: &mut Vec<&'a Path>) -> Result<()> {
    for (place, (name, _)) in places.iter().zip(TRANSPORTS) {
        mount(laboratory, &place.at, name)?;
        mounted.push(&place.at);
    }
    Ok(())
}

/// A mount that goes this way, or none.
fn mount(laboratory: &Laboratory, at: &Path, name: &str) -> Result<()> {
    fs::create_dir_all(at)?;
    let _offered = if name == RINGS { Some(Offered::set("Y")?) } else { None };
    let mut command = laboratory.poolfs();
    command.args(["mount", laboratory.pool()]).arg(at).arg("--dir").arg(laboratory.lower().join(name));
    succeed(command.args(["--fuse-transport", name]))
}

fn tables_of_streams(work: &Path, places: &[Place], rounds: u32) -> Result<String> {
    let plain = Place { title: "ext4", at: work.join("ext4"), is_mount: false };
    fs::create_dir_all(&plain.at)?;
    let with_plain: Vec<_> = places.iter().cloned().chain([plain]).collect();
    let at_once = streams::at_once(&with_plain, rounds)?.markdown();
    Ok([at_once, streams::read_ahead(places, rounds)?.markdown()].join("\n"))
}

fn measure(places: &[Place], rounds: u32) -> Result<Table> {
    pin(1)?;
    let rows = [
        ("GETATTR, the other core asleep", PAUSE, get_attributes as Trip),
        ("open and close, the other core asleep", PAUSE, open_and_close),
        ("GETATTR, one after the other", Duration::ZERO, get_attributes),
        ("open and close, one after the other", Duration::ZERO, open_and_close),
    ];
    let rows = rows.into_iter().map(|(title, pause, trip)| {
        let mut all = [Vec::new(), Vec::new()];
        for _ in 0..rounds {
            for (place, times) in places.iter().zip(&mut all) {
                times.push(round(&place.at.join("file"), pause, trip)?);
            }
        }
        Ok(Row { title: title.to_owned(), medians: all.iter_mut().map(|times| median(times)).collect() })
    });
    let rows = rows.collect::<Result<_>>()?;
    Ok(Table::of_operations(&TRANSPORTS.map(|(_, title)| title), rows))
}

type Trip = fn(&Path, &File) -> Result<()>;

fn get_attributes(_: &Path, file: &File) -> Result<()> {
    // What the kernel remembers does not count.
    statx(file, "", AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS)?;
    Ok(())
}

fn open_and_close(path: &Path, _: &File) -> Result<()> {
    drop(File::open(path)?);
    Ok(())
}

/// The median time of a trip, each after a pause in which this core, and no other, has something to do.
fn round(path: &Path, pause: Duration, trip: Trip) -> Result<f64> {
    let file = File::open(path)?;
    let mut times = Vec::with_capacity(TRIPS);
    for _ in 0..TRIPS {
        let rest = Instant::now();
        while rest.elapsed() < pause {
            std::hint::spin_loop();
        }
        let begun = Instant::now();
        trip(path, &file)?;
        times.push(begun.elapsed().as_nanos() as f64);
    }
    Ok(median(&mut times))
}
