//! Requests of the kernel by `/dev/fuse` beside those by io_uring: while the other core is asleep, and one after the other.

use crate::roundtrip::pin;
use crate::table::{Row, Table};
use crate::targets::{Laboratory, succeed};
use crate::worker::median;
use anyhow::{Context, Result, ensure};
use rustix::fs::{AtFlags, StatxFlags, statx};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";

/// Names of the ways, as `poolfs status --json` tells them, and headings of the columns.
const TRANSPORTS: [(&str, &str); 2] = [("dev-fuse", "/dev/fuse"), ("io-uring", "io_uring")];

/// A core with nothing to do sleeps long before.
const PAUSE: Duration = Duration::from_millis(1);

const TRIPS: usize = 200;

/// The kernel offers rings to mounts that are made while this lives.
pub struct Offered(String);

impl Offered {
    /// Whether this kernel has such rings.
    pub fn is_known() -> bool {
        Path::new(PARAMETER).exists()
    }

    /// Offers them (`Y`) or does not (`N`).
    pub fn set(value: &str) -> Result<Self> {
        let before = fs::read_to_string(PARAMETER).context("this kernel has no FUSE over io_uring")?;
        fs::write(PARAMETER, value).context("switching it on needs root")?;
        Ok(Self(before))
    }
}

impl Drop for Offered {
    fn drop(&mut self) {
        if let Err(error) = fs::write(PARAMETER, &self.0) {
            eprintln!("{PARAMETER} is not as it was: {error}");
        }
    }
}

/// Medians over `rounds` rounds, as text. The service has both CPUs, the caller is on CPU 1.
pub fn run(work: &Path, poolfs: &Path, rounds: u32) -> Result<String> {
    if !Offered::is_known() {
        return Ok("This kernel does not offer FUSE over io_uring.\n".to_owned());
    }
    let laboratory = Laboratory::new(work, poolfs, "0-1")?;
    let places = TRANSPORTS.map(|(name, _)| work.join(name));
    let mut mounted = Vec::new();
    let measured = mount_all(&laboratory, &places, &mut mounted).and_then(|()| measure(&places, rounds));
    for at in mounted {
        succeed(laboratory.poolfs().args(["umount", laboratory.pool()]).arg(at))?;
    }
    Ok(measured?.markdown())
}

fn mount_all<'a>(laboratory: &Laboratory, places: &'a [PathBuf], mounted: &mut Vec<&'a Path>) -> Result<()> {
    for (at, offered) in places.iter().zip(["N", "Y"]) {
        mount(laboratory, at, offered)?;
        mounted.push(at);
    }
    check(laboratory, places)
}

fn mount(laboratory: &Laboratory, at: &Path, offered: &str) -> Result<()> {
    let directory = laboratory.lower().join(at.file_name().context("a name")?);
    fs::create_dir_all(at)?;
    fs::create_dir_all(&directory)?;
    fs::write(directory.join("file"), "x")?;
    let _offered = Offered::set(offered)?;
    succeed(laboratory.poolfs().args(["mount", laboratory.pool()]).arg(at).arg("--dir").arg(directory))
}

/// Every mount goes the way it is to go.
fn check(laboratory: &Laboratory, places: &[PathBuf]) -> Result<()> {
    let told = laboratory.poolfs().args(["--json", "status", laboratory.pool()]).output()?;
    let status: serde_json::Value = serde_json::from_slice(&told.stdout)?;
    for (at, (name, _)) in places.iter().zip(TRANSPORTS) {
        let instances = status["service"]["instances"].as_array().context("no instances")?;
        let instance = instances.iter().find(|instance| instance["mount_point"].as_str() == at.to_str());
        let transport = instance.context("no such mount")?["transport"].as_str();
        ensure!(transport == Some(name), "{} goes by {transport:?} instead of {name}", at.display());
    }
    Ok(())
}

fn measure(places: &[PathBuf], rounds: u32) -> Result<Table> {
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
            for (at, times) in places.iter().zip(&mut all) {
                times.push(round(&at.join("file"), pause, trip)?);
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
