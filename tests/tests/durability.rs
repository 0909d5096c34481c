//! Every way to ask for durability: after it has answered, the power is cut at the disk below the upper branch, and the data it was asked
//! for is there. The table in docs/semantics.md names these ways.

use poolfs_tests::power::{Content, Cut, Disk, RecordingDevice, empty_disk, images_after_cuts};
use poolfs_tests::{Pool, Stepper, Way, compile, isolated};
use std::fs;
use std::path::Path;

/// With so much room that writes of the library are posted.
const DISK_MEBIBYTES: u32 = 160;
const PAGE: usize = 4096;
/// Ways that ask for nothing by FUSE, where the kernel does not tell the service.
const BY_LIBRARY_ONLY: [&str; 2] = ["sync", "syncfs"];
const NAMES: [&str; 4] = ["name-link", "name-rename", "name-unlink", "name-make"];
/// Different losses of what no barrier has waited for, at each cut.
const LOSSES: u64 = 5;

#[test]
fn what_was_asked_to_be_durable_is_there_after_a_power_cut_by_fuse() {
    check("what_was_asked_to_be_durable_is_there_after_a_power_cut_by_fuse", Way::Fuse);
}

#[test]
fn what_was_asked_to_be_durable_is_there_after_a_power_cut_by_the_library() {
    check("what_was_asked_to_be_durable_is_there_after_a_power_cut_by_the_library", Way::Library);
}

/// A way that has answered, and how much had been done to the disk by then.
struct Answered {
    way: String,
    position: usize,
}

fn check(name: &str, way: Way) {
    isolated(name, |folder| {
        let disk = empty_disk(folder, DISK_MEBIBYTES, 4096);
        let device = RecordingDevice::serve(&folder.join("device"), disk.clone());
        let answered = ask(folder, &device, way);
        let events = device.end();
        let cuts = |answered: &Answered| (0..LOSSES).map(|seed| Cut { position: answered.position, seed }).collect();
        let all: Vec<Vec<Cut>> = answered.iter().map(cuts).collect();
        let mut images = answered.iter().flat_map(|answered| (0..LOSSES).map(|_| answered.way.as_str()));
        let mut lost = Vec::new();
        images_after_cuts(&disk, &events, &all.concat(), |_, image| {
            let way = images.next().expect("as many as cuts");
            if let Err(what) = is_there(folder, way, image)
                && lost.last().is_none_or(|(last, _)| last != way)
            {
                lost.push((way.to_owned(), what));
            }
        });
        assert!(lost.is_empty(), "lost by {way:?}: {lost:#?}");
    });
}

/// Asks in all ways, one after the other.
fn ask(folder: &Path, device: &RecordingDevice, way: Way) -> Vec<Answered> {
    let pool = Pool::create(folder, "16M");
    let disk = Disk::mount(&device.path(), &folder.join("disk")).expect("an ext4");
    let (lower, mounted) = (folder.join("lower"), folder.join("mnt"));
    fs::create_dir(&lower).expect("a folder");
    let union = pool.mount_union(&mounted, &disk.branch(), &[&lower]);
    let program = compile(folder, "durable", way == Way::Fuse);
    let mut process = Stepper::start(&pool, &program, way);
    let mut answered = Vec::new();
    for name in ways() {
        if way == Way::Fuse && BY_LIBRARY_ONLY.contains(&name.as_str()) {
            continue;
        }
        let path = mounted.join(&name);
        if NAMES.contains(&name.as_str()) {
            fs::create_dir(&path).expect("a folder");
        }
        assert_eq!(process.step(&format!("{name} {}", path.display())), Ok(0), "{name}");
        answered.push(Answered { way: name, position: device.position() });
    }
    drop(process);
    let _ = union.unmount().expect("umount");
    disk.unmount();
    answered
}

/// The names of all ways.
fn ways() -> Vec<String> {
    let list = fs::read_to_string(poolfs_tests::workspace().join("tests/programs/durable-ways.h")).expect("readable");
    let ways = list.lines().filter_map(|line| Some(line.strip_prefix("WAY(")?.split_once(',')?.0.to_owned()));
    ways.chain(NAMES.map(str::to_owned)).collect()
}

/// What the disk shows after the cut is what was asked for in this way.
fn is_there(folder: &Path, way: &str, image: Content) -> Result<(), String> {
    let device = RecordingDevice::serve(&folder.join("after"), image);
    let disk = Disk::mount(&device.path(), &folder.join("disk"))?;
    let path = disk.branch().join(way);
    let found = if NAMES.contains(&way) { are_named(way, &path) } else { is_written(way, &path) };
    disk.unmount();
    found
}

fn is_written(way: &str, path: &Path) -> Result<(), String> {
    let content = fs::read(path).map_err(|error| error.to_string())?;
    let second = if way.starts_with("size_") { 0 } else { b'b' };
    let wanted = [[b'a'; PAGE], [second; PAGE]].concat();
    if content == wanted {
        return Ok(());
    }
    let good = content.iter().zip(&wanted).take_while(|(found, wanted)| found == wanted).count();
    Err(format!("{} bytes, of which the first {good} are as they should be", content.len()))
}

fn are_named(way: &str, path: &Path) -> Result<(), String> {
    let (old, new) = match way {
        "name-link" => (true, true),
        "name-rename" | "name-make" => (way == "name-make", true),
        _ => (false, false),
    };
    // What a union hides it may leave a mark of; there is nothing below that could show.
    let found = (path.join("old").is_file(), path.join("new").exists());
    if found == (old, new) { Ok(()) } else { Err(format!("old and new name: {found:?}")) }
}
