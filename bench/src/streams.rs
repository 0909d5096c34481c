//! Measures files read and written sequentially: by several threads at once, and with more or less read-ahead of the kernel.

use crate::files::{SETTLING, fill};
use crate::table::{Row, Table, Unit};
use crate::targets::turned;
use crate::worker::median;
use anyhow::{Context, Result, anyhow};
use rustix::fs::{Advice, fadvise, major, minor};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

/// Bytes of each file.
const BYTES: usize = 32 << 20;

/// Bytes of a call.
const PIECE: usize = 128 << 10;

const THREADS: [usize; 3] = [1, 4, 8];

/// What the kernel reads ahead of its own accord, KiB (`VM_READAHEAD_PAGES` in Linux).
const USUAL_READ_AHEAD: &str = "128";

/// A mount or a plain directory.
#[derive(Clone)]
pub struct Place {
    /// What tables call it.
    pub title: &'static str,
    /// Where it is.
    pub at: PathBuf,
    /// Whether it is a mount.
    pub is_mount: bool,
}

impl Place {
    fn files(&self, count: usize) -> impl Iterator<Item = PathBuf> {
        (0..count).map(|number| self.at.join(format!("stream-{number}")))
    }
}

/// Passes of several threads, each over a file of its own. What is read is in the cache of the service, or else of the kernel.
pub fn at_once(places: &[Place], rounds: u32) -> Result<Table> {
    for place in places {
        for path in place.files(THREADS[THREADS.len() - 1]) {
            fill(&path, BYTES as u64)?;
            File::open(&path)?.sync_all()?;
            read(&File::open(&path)?)?;
        }
    }
    thread::sleep(SETTLING);
    let mut rows = Vec::new();
    for (what, pass) in [("read", read_again as Pass), ("written and synced", write_anew)] {
        for count in THREADS {
            let mut times = vec![Vec::new(); places.len()];
            for round in 0..rounds {
                eprintln!("round {} of {rounds}: {what} by {count}", round + 1);
                for number in turned(&(0..places.len()).collect::<Vec<_>>(), round) {
                    times[number].push(pass(&places[number], count)?);
                }
            }
            let medians = times.iter_mut().map(|times| median(times)).collect();
            rows.push(Row { title: format!("{what}, threads: {count}"), medians });
        }
    }
    let titles: Vec<_> = places.iter().map(|place| place.title).collect();
    Ok(Table::new("32 MiB for each thread", Unit::Milliseconds, &titles, rows))
}

/// Nanoseconds of so many threads at a place.
type Pass = fn(&Place, usize) -> Result<f64>;

fn read_again(place: &Place, count: usize) -> Result<f64> {
    let files = place.files(count).map(|path| {
        let file = File::open(path)?;
        if place.is_mount {
            forget(&file)?;
        }
        Ok(file)
    });
    together(&files.collect::<Result<Vec<_>>>()?, read)
}

fn write_anew(place: &Place, count: usize) -> Result<f64> {
    let paths: Vec<_> = place.files(count).map(|path| path.with_extension("new")).collect();
    let files = paths.iter().map(File::create_new).collect::<std::io::Result<Vec<_>>>()?;
    let time = together(&files, write);
    drop(files);
    paths.iter().try_for_each(fs::remove_file)?;
    time
}

/// From when the first thread begins until the last one has ended.
fn together(files: &[File], work: fn(&File) -> Result<()>) -> Result<f64> {
    let start = &Barrier::new(files.len());
    let times = thread::scope(|scope| {
        let work_on = |file| {
            move || {
                start.wait();
                let begun = Instant::now();
                work(file).map(|()| (begun, Instant::now()))
            }
        };
        let threads: Vec<_> = files.iter().map(|file| scope.spawn(work_on(file))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a thread has panicked"))?)
            .collect::<Result<Vec<_>>>()
    })?;
    let begun = times.iter().map(|time| time.0).min().context("no thread")?;
    let ended = times.iter().map(|time| time.1).max().context("no thread")?;
    Ok((ended - begun).as_nanos() as f64)
}

fn read(mut file: &File) -> Result<()> {
    let mut piece = vec![0; PIECE];
    while file.read(&mut piece)? > 0 {}
    Ok(())
}

fn write(mut file: &File) -> Result<()> {
    let piece = vec![0x5a; PIECE];
    for _ in 0..BYTES / PIECE {
        file.write_all(&piece)?;
    }
    Ok(file.sync_all()?)
}

/// Has the kernel drop the pages it has of a file. Of those behind a mount the service has its own.
fn forget(file: &File) -> Result<()> {
    fadvise(file, 0, None, Advice::DontNeed).context("the kernel keeps its pages")
}

/// Makes the files of [`read_ahead`] in a directory that is not mounted yet, and leaves none of them in memory.
pub fn prepare(below: &Path, rounds: u32) -> Result<()> {
    for number in 0..2 * rounds {
        let path = below.join(new_file(number));
        fill(&path, BYTES as u64)?;
        let file = File::open(path)?;
        file.sync_all()?;
        forget(&file)?;
    }
    Ok(())
}

fn new_file(number: u32) -> String {
    format!("new-{number}")
}

/// One reader, with the read-ahead that a mount has and with the kernel's usual one.
pub fn read_ahead(places: &[Place], rounds: u32) -> Result<Table> {
    let mut rows = Vec::new();
    let mut own = String::new();
    for place in places {
        let setting = setting_of(&place.at)?;
        own = fs::read_to_string(&setting)?.trim().to_owned();
        let settings = [own.as_str(), USUAL_READ_AHEAD];
        let mut times = [[const { Vec::new() }; 2], [const { Vec::new() }; 2]];
        let mut files = (0..).map(|number| place.at.join(new_file(number)));
        for round in 0..rounds {
            eprintln!("round {} of {rounds}: read-ahead, {}", round + 1, place.title);
            for number in turned(&[0, 1], round) {
                fs::write(&setting, settings[number]).context("another read-ahead needs root")?;
                let file = files.next().context("no more files")?;
                for (times, time) in times.iter_mut().zip(read_twice(&file)?) {
                    times[number].push(time);
                }
            }
        }
        fs::write(&setting, &own)?;
        for (title, mut times) in ["cached nowhere", "in the service's cache"].into_iter().zip(times) {
            let medians = times.iter_mut().map(|times| median(times)).collect();
            rows.push(Row { title: format!("{}, {title}", place.title), medians });
        }
    }
    let columns = [format!("read-ahead of {own} KiB, the mount's"), format!("of {USUAL_READ_AHEAD} KiB, the kernel's")];
    Ok(Table::new("32 MiB read by one", Unit::Milliseconds, &columns.each_ref().map(String::as_str), rows))
}

/// Where the kernel has the read-ahead of a mount. What is open already keeps the one it has.
fn setting_of(at: &Path) -> Result<PathBuf> {
    let device = fs::metadata(at)?.dev();
    Ok(format!("/sys/class/bdi/{}:{}/read_ahead_kb", major(device), minor(device)).into())
}

/// Nanoseconds of reading a file that nobody has read yet, from the disk, and once more from the service's cache.
fn read_twice(path: &Path) -> Result<[f64; 2]> {
    let first = together(&[File::open(path)?], read)?;
    let again = File::open(path)?;
    forget(&again)?;
    let second = together(&[again], read)?;
    fs::remove_file(path)?;
    Ok([first, second])
}
