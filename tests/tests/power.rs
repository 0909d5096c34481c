//! Power cuts at the disk below an upper branch, between any two of its writes: the next mount shows only what was promised or allowed, and
//! nothing is damaged.
//!
//! `POOLFS_POWER_SEED` sets another first seed than the usual one. The interleaving of threads still differs between two runs.

use poolfs_tests::power::{
    Content, Cut, Disk, Event, PROGRAMS, Random, RecordingDevice, Until, World, contents, empty_disk, images_after_cuts,
};
use poolfs_tests::{Mounted, Pool, Stepper, Way, compile, is_soak, isolated_for};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// With so much room that writes of the library are posted.
const DISK_MEBIBYTES: u32 = 160;
/// What upper branches with a limit may take of it.
const UPPER_SIZE: &str = "24M";
const OPERATIONS: usize = 120;
/// Operations after which everything is left alone once, in the long one of the recordings.
const LEFT_ALONE_AFTER: usize = 70;
/// Recordings for each format, and in the long form.
const RECORDINGS: (u64, u64) = (4, 24);
/// Cuts of one recording, but in the long form, which has one at each event.
const CUTS: usize = 26;
/// Cuts while a program runs that replaces a file, and until the disk holds it; in the long form there is one at each event.
const CUTS_OF_PROGRAM: usize = 2;
/// Last lines of the service's log that a failure shows, the last one first.
const LOG_LINES_MAX: usize = 12;

#[test]
fn power_cuts_of_sparse_upper_branches() {
    power_cuts("power_cuts_of_sparse_upper_branches", "sparse", 1024);
}

#[test]
fn power_cuts_of_compact_upper_branches_with_large_units() {
    power_cuts("power_cuts_of_compact_upper_branches_with_large_units", "bcow-performance", 4096);
}

#[test]
fn power_cuts_of_compact_upper_branches_with_small_units() {
    power_cuts("power_cuts_of_compact_upper_branches_with_small_units", "bcow-space", 4096);
}

#[test]
fn programs_that_replace_files_by_the_library() {
    replacing("programs_that_replace_files_by_the_library", Way::Library, "sparse");
}

#[test]
fn programs_that_replace_files_by_the_kernel() {
    replacing("programs_that_replace_files_by_the_kernel", Way::Fuse, "bcow-space");
}

/// The places of a test.
struct Places<'f> {
    folder: &'f Path,
    format: &'static str,
    /// as much as the upper branch may take
    upper_size: Option<&'static str>,
}

impl Places<'_> {
    fn of(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn lower(&self) -> PathBuf {
        self.of("lower")
    }

    fn mounted(&self) -> PathBuf {
        self.of("mnt")
    }

    /// Mounts the union.
    fn mount<'p>(&self, pool: &'p Pool, disk: &Disk) -> Mounted<'p> {
        let (upper, lower) = (disk.branch(), self.lower());
        let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
        let (upper, lower) = (text(&upper), text(&lower));
        let mut stack = vec!["--upper", &upper, "--lower", &lower, "--upper-format", self.format];
        stack.extend(self.upper_size.iter().flat_map(|size| ["--upper-size", size]));
        pool.mount(&self.mounted(), &stack)
    }
}

fn power_cuts(name: &str, format: &'static str, block_bytes: u32) {
    let (seeds, limit) = if is_soak() { (RECORDINGS.1, 4 * 3600) } else { (RECORDINGS.0, 600) };
    isolated_for(name, Duration::from_secs(limit), |folder| {
        let first = std::env::var("POOLFS_POWER_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
        let pool = Pool::create(folder, "16M").patient();
        let disk = empty_disk(folder, DISK_MEBIBYTES, block_bytes);
        let (mut cuts_made, mut posted) = (0, 0);
        for seed in first..first + seeds {
            let places = Places { folder, format, upper_size: None };
            let (world, events, posted_now) = record(&places, &pool, disk.clone(), seed);
            let cuts = cuts(&events, world.promised(), seed);
            cuts_made += cuts.len();
            posted += posted_now;
            images_after_cuts(&disk, &events, &cuts, |cut, image| {
                if let Err(what) = check(&places, &pool, &world, cut, image) {
                    let log = pool.service_log();
                    let log: Vec<&str> = log.lines().rev().take(LOG_LINES_MAX).collect();
                    panic!("{format}, seed {seed}, {cut:?} of {}: {what}\n{}", events.len(), log.join("\n"));
                }
            });
            fs::remove_dir_all(places.lower()).expect("removed");
        }
        assert!(posted > 0, "{format}: no write was posted");
        println!("soak: {format}: {cuts_made} power cuts in {seeds} recordings, {posted} posted writes");
    });
}

/// Where in a recording a program ran.
struct Run {
    begun: usize,
    /// from here on the disk holds what it has done
    held: usize,
}

/// Cuts the power while programs replace files, and right after the disk has committed the names that they gave, long before the service
/// brings anything there by itself.
fn replacing(name: &str, way: Way, format: &'static str) {
    let formats = if is_soak() { &["sparse", "bcow-performance", "bcow-space"][..] } else { &[format] };
    isolated_for(name, Duration::from_secs(if is_soak() { 4 * 3600 } else { 600 }), |folder| {
        let pool = Pool::create(folder, "16M").patient();
        let disk = empty_disk(folder, DISK_MEBIBYTES, 4096);
        let new = folder.join("new-content");
        fs::write(&new, &contents()[1]).expect("a file");
        let mut cuts_made = 0;
        for &format in formats {
            let upper_size = (way == Way::Fuse).then_some(UPPER_SIZE);
            let places = Places { folder, format, upper_size };
            PROGRAMS.iter().for_each(|program| program.lay_out(&places.lower()));
            let (runs, events) = record_programs(&places, &pool, disk.clone(), way, &new);
            let cuts = cuts_of_programs(&runs);
            cuts_made += cuts.len();
            images_after_cuts(&disk, &events, &cuts, |cut, image| {
                if let Err(what) = check_programs(&places, &pool, &runs, cut, image) {
                    panic!("{format}, {way:?}, {cut:?} of {}: {what}", events.len());
                }
            });
            fs::remove_dir_all(places.lower()).expect("removed");
        }
        println!("soak: programs {way}: {cuts_made} power cuts in {} recordings", formats.len());
    });
}

fn record_programs(places: &Places<'_>, pool: &Pool, first: Content, way: Way, new: &Path) -> (Vec<Run>, Vec<Event>) {
    let device = RecordingDevice::serve(&places.of("device"), first);
    let disk = Disk::mount(&device.path(), &places.of("disk")).expect("an ext4");
    let mounted = places.mounted();
    let union = places.mount(pool, &disk);
    for program in &PROGRAMS {
        let _ = pool.shell(way, &program.with_variables(program.prepare, &mounted, new)).expect(program.name);
    }
    let _ = pool.shell(Way::Library, &format!("sync -f {}", mounted.display())).expect("sync");
    disk.write_back();
    let run = |program: &poolfs_tests::power::Program| {
        let begun = device.position();
        let _ = pool.shell(way, &program.with_variables(program.script, &mounted, new)).expect(program.name);
        match program.until {
            Until::Commit => disk.commit(),
            Until::WriteBack => disk.write_back(),
        }
        Run { begun, held: device.position() }
    };
    let runs = PROGRAMS.iter().map(run).collect();
    let _ = union.unmount().expect("umount");
    disk.unmount();
    (runs, device.end())
}

fn cuts_of_programs(runs: &[Run]) -> Vec<Cut> {
    let mut random = Random::new(1);
    let mut cuts = Vec::new();
    for run in runs {
        let during = run.begun + 1..run.held;
        let positions: Vec<usize> = if is_soak() {
            during.collect()
        } else {
            (0..CUTS_OF_PROGRAM).map(|_| during.start + random.below(during.len())).collect()
        };
        let cut = |position| Cut { position, seed: random.below(usize::MAX) as u64 };
        cuts.extend(positions.into_iter().chain([run.held]).map(cut));
    }
    cuts.sort();
    cuts
}

/// Mounts the disk and the union as after a power cut, and looks at what the programs have replaced.
fn check_programs(places: &Places<'_>, pool: &Pool, runs: &[Run], cut: Cut, image: Content) -> Result<(), String> {
    let device = RecordingDevice::serve(&places.of("device"), image);
    let disk = Disk::mount(&device.path(), &places.of("disk")).map_err(|error| format!("ext4: {error}"))?;
    let mounted = places.mounted();
    let union = places.mount(pool, &disk);
    for (program, run) in PROGRAMS.iter().zip(runs) {
        // Those that have to be asked are looked at when it is about them.
        if program.ask.is_none() || (run.begun..=run.held).contains(&cut.position) {
            program.check(&mounted, cut.position >= run.held)?;
        }
    }
    let _ = union.unmount().expect("umount");
    disk.unmount();
    Ok(())
}

/// Does random operations on a union and ends it in good order; all that the disk below was told.
fn record(places: &Places<'_>, pool: &Pool, first: Content, seed: u64) -> (World, Vec<Event>, u64) {
    let device = RecordingDevice::serve(&places.of("device"), first);
    let disk = Disk::mount(&device.path(), &places.of("disk")).expect("an ext4");
    let mounted = places.mounted();
    let is_long = seed.is_multiple_of(RECORDINGS.0);
    let mut world = World::new(seed, is_long, &places.lower(), &mounted);
    let union = places.mount(pool, &disk);
    if seed.is_multiple_of(2) {
        world.write_by(Stepper::start(pool, &compile(places.folder, "steps", false), Way::Library));
    }
    world.begin(&device);
    for step in 0..OPERATIONS {
        world.step(&device, &disk, pool);
        if step == LEFT_ALONE_AFTER && is_long {
            world.leave_alone(&device);
        }
    }
    world.close();
    let posted = posted_requests(pool);
    let _ = union.unmount().expect("umount");
    world.promise_all(&device);
    disk.unmount();
    (world, device.end(), posted)
}

/// Writes of the mounted union that did not wait for their answer.
fn posted_requests(pool: &Pool) -> u64 {
    pool.status()["service"]["instances"][0]["posted_requests"].as_u64().expect("counted")
}

/// Cuts right after a promise, when nothing else has helped to keep it, before barriers, when most is on its way, and at any other point.
fn cuts(events: &[Event], promised: &[usize], seed: u64) -> Vec<Cut> {
    let mut random = Random::new(seed);
    let barriers: Vec<usize> = (0..events.len()).filter(|&at| matches!(events[at], Event::Flush)).collect();
    let all: Vec<usize> = (0..=events.len()).collect();
    let positions: Vec<usize> = if is_soak() {
        all
    } else {
        let of = |number: usize| [promised, &barriers, promised, &all][number % 4];
        (0..CUTS).map(|number| of(number)[number * of(number).len() / CUTS]).collect()
    };
    let cut = |position| Cut { position, seed: random.below(usize::MAX) as u64 };
    let mut cuts: Vec<Cut> = positions.into_iter().map(cut).collect();
    cuts.sort();
    cuts
}

/// Mounts the disk and the union as after a power cut.
fn check(places: &Places<'_>, pool: &Pool, world: &World, cut: Cut, image: Content) -> Result<(), String> {
    let device = RecordingDevice::serve(&places.of("device"), image);
    let disk = Disk::mount(&device.path(), &places.of("disk")).map_err(|error| format!("ext4: {error}"))?;
    let upper = disk.branch();
    check_branch(pool, &upper, &places.lower(), "repairable")?;
    let mounted = places.mounted();
    let union = places.mount(pool, &disk);
    let shown = world.check(&mounted, cut.position)?;
    World::check_use(&mounted, &shown, cut.seed)?;
    let _ = union.unmount().expect("umount");
    check_branch(pool, &upper, &places.lower(), "nothing")?;
    disk.unmount();
    Ok(())
}

/// `poolfs fsck` finds only what has this outcome.
fn check_branch(pool: &Pool, upper: &Path, lower: &Path, outcome: &str) -> Result<(), String> {
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let found = pool.poolfs(&["fsck", &text(upper), "--lower", &text(lower), "--json"]);
    let is_fine = |line: &str| {
        serde_json::from_str(line).is_ok_and(|line: Value| line.get("outcome").is_none_or(|value| value == outcome))
    };
    // With 8 it could not be checked.
    let is_checked = [0, 1, 4].contains(&found.code);
    if is_checked && found.out.lines().all(is_fine) { Ok(()) } else { Err(format!("fsck: {found:?}")) }
}
