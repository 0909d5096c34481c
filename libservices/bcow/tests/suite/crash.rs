//! Crash tests: power is cut after every change of the layer below, with the sector being written torn. The file must then show
//! an allowed state, with everything that was synced.

use crate::support::*;
use poolfs_bcow::Layout;
use poolfs_libservice::types::{AllocateMode, Caller, HandleId, NodeId, OpenFlags, XattrFlags};
use poolfs_libservice::{Branch, Durability, Filter, Libservice, Memory, Recorder, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const SECTOR: usize = 512;
const SIZE_MAX: u64 = 6 << 20;

/// What is certain after a step.
enum Certain {
    Nothing,
    /// All of the content is on disk.
    Content,
    /// The size is, and nothing reappears that it cut off: changes of attributes survive in their order.
    Size,
}

/// One random change of a file of less than `most` bytes; the new content, and what is certain then.
fn step(bcow: &dyn Libservice, handle: HandleId, random: &mut Random, most: u64, content: &[u8]) -> (Vec<u8>, Certain) {
    let mut content = content.to_vec();
    match random.below(10) {
        0 | 1 => {
            sync(bcow, handle);
            return (content, Certain::Content);
        }
        2 => {
            bcow.sync().expect("synced");
            return (content, Certain::Content);
        }
        3 => {
            let size = SECTOR as u64 * random.below(most / SECTOR as u64);
            resize(bcow, "f", size);
            content.resize(size as usize, 0);
            return (content, Certain::Size);
        }
        4 => {
            let (offset, length) = (SECTOR as u64 * random.below(4000), SECTOR as u64 * (1 + random.below(200)));
            let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
            bcow.fallocate(ROOT, handle, punch, offset, length).expect("punched");
            let end = content.len().min((offset + length) as usize);
            if (offset as usize) < end {
                content[offset as usize..end].fill(0);
            }
        }
        _ => {
            // Most near the begin, so that places are written more than once.
            let most = [40, 400, most / SECTOR as u64 - 300][random.below(3) as usize];
            let offset = SECTOR * random.below(most) as usize;
            let sectors = [1, 8, 60][random.below(3) as usize];
            let length = SECTOR * (1 + random.below(sectors) as usize);
            let data = vec![1 + random.below(255) as u8; length];
            write(bcow, handle, offset as u64, &data);
            let end = offset + data.len();
            if content.len() < end {
                content.resize(end, 0);
            }
            content[offset..end].copy_from_slice(&data);
        }
    }
    (content, Certain::Nothing)
}

/// Each byte shown is one that some allowed content has there, or zero where anything has changed; and the size one of theirs.
fn allowed(shown: &[u8], history: &[Vec<u8>], what: &str) {
    let sizes = || history.iter().map(Vec::len);
    assert!(sizes().min() <= Some(shown.len()) && sizes().max() >= Some(shown.len()), "{what}: size {}", shown.len());
    for (sector, seen) in shown.chunks(SECTOR).enumerate() {
        let from = sector * SECTOR;
        if history.iter().any(|content| content.get(from..from + seen.len()) == Some(seen)) {
            continue;
        }
        for (at, &byte) in seen.iter().enumerate() {
            let of = |content: &Vec<u8>| content.get(from + at).copied().unwrap_or(0);
            let changed = history.iter().any(|content| of(content) != of(&history[0]));
            let fits = history.iter().any(|content| of(content) == byte);
            assert!(fits || changed && byte == 0, "{what}: byte {at} of sector {sector} is {byte}");
        }
    }
}

fn shown(disk: Arc<Memory>, layout: Layout, what: &str) -> Vec<u8> {
    let bcow = layer(disk, layout, Files::All);
    let entry = bcow.lookup(ROOT, NodeId::ROOT, name("f")).unwrap_or_else(|error| panic!("{what}: {error}"));
    bcow.repair(entry.node).unwrap_or_else(|error| panic!("{what}: {error}"));
    let handle = bcow.open(ROOT, entry.node, OpenFlags::READ_WRITE).expect("opened");
    let content = read(&*bcow, handle, 0, entry.attributes.size as usize);
    assert_eq!(content.len() as u64, entry.attributes.size, "{what}");
    // What comes afterwards works on it as on any other.
    resize(&*bcow, "f", SIZE_MAX);
    assert!(
        read(&*bcow, handle, content.len() as u64, 1 << 16).iter().all(|&byte| byte == 0),
        "{what}: cut off, and there again"
    );
    write(&*bcow, handle, SIZE_MAX / 2 + 5, b"afterwards");
    sync(&*bcow, handle);
    assert_eq!(read(&*bcow, handle, SIZE_MAX / 2 + 5, 10), b"afterwards", "{what}");
    content
}

/// How many units a file begins with: of some the record has all places to the end, some soon get a table, some have one, or two and a root.
const BEGINS: [&[u64]; 4] = [&[0], &[INLINE_MAX - 2], &[INLINE_MAX + 10], &[30, 30]];

/// What the file has before its changes are watched.
fn begin(bcow: &dyn Libservice, handle: HandleId, units: &[u64]) -> Vec<u8> {
    let mut content = Vec::new();
    for (region, &units) in units.iter().enumerate() {
        for unit in 0..units {
            // Every second one, so that there is something between them.
            let (offset, data) = ((region << 22) + (unit as usize) * 8192, [unit as u8 + 1; 4096]);
            write(bcow, handle, offset as u64, &data);
            content.resize(offset + data.len(), 0);
            content[offset..].copy_from_slice(&data);
        }
    }
    sync(bcow, handle);
    content
}

#[test]
fn content_survives_as_promised() {
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..32_u64 {
        let layout = [Layout::Performance, Layout::Space][seed as usize % 2];
        let units = BEGINS[seed as usize / 2 % 4];
        // What one table reaches, or more.
        let most = if seed / 8 % 2 == 0 && units.len() == 1 { 1 << 20 } else { SIZE_MAX };
        let recorder = Recorder::new();
        let bcow = layer(recorder.clone(), layout, Files::All);
        let mut random = Random(seed);
        let handle = create(&*bcow, "f");
        let content = begin(&*bcow, handle, units);
        let before = stored_levels(&*recorder, "f").0;
        let made = recorder.len();
        let mut history = vec![content];
        let mut states = vec![(made, made, history.clone())];
        for _ in 0..25 {
            let before = recorder.len();
            let (content, certain) = step(&*bcow, handle, &mut random, most, history.last().expect("some"));
            history.push(content.clone());
            states.push((before, recorder.len(), history.clone()));
            match certain {
                Certain::Nothing => continue,
                Certain::Content => history = vec![content],
                Certain::Size => history.iter_mut().for_each(|before| before.resize(content.len(), 0)),
            }
            states.push((recorder.len(), recorder.len(), history.clone()));
        }
        seen.insert((before, stored_levels(&*recorder, "f").0));
        for (from, to, history) in &states {
            for count in *from..=*to {
                // The last change was whole; the next one is the next step's.
                for torn in [false, true].into_iter().filter(|&torn| !torn || count < *to) {
                    let what = format!("seed {seed}, {layout:?}, change {count}, torn {torn}");
                    let disk = recorder.crashed(count, seed ^ count as u64);
                    if torn {
                        recorder.tear(&disk, count, seed * 37 + count as u64 * 11);
                    }
                    let content = shown(disk, layout, &what);
                    allowed(&content, history, &what);
                }
            }
        }
    }
    // Without tables to the end, going over to one and to two levels, and having them from the begin.
    for form in [(0, 0), (0, 1), (0, 2), (1, 1), (2, 2)] {
        assert!(seen.contains(&form), "no file like {form:?} among {seen:?}");
    }
}

#[test]
fn a_file_goes_over_to_tables_as_a_whole() {
    for (layout, far) in
        [(Layout::Performance, 0), (Layout::Space, 0), (Layout::Space, 5 << 20), (Layout::Space, 3 << 30)]
    {
        for units in [INLINE_MAX - 1, INLINE_MAX] {
            let recorder = Recorder::new();
            let bcow = layer(recorder.clone(), layout, Files::All);
            let handle = create(&*bcow, "f");
            (0..units).for_each(|unit| write(&*bcow, handle, unit * 8192, &[unit as u8 + 1; 4096]));
            sync(&*bcow, handle);
            assert_eq!(stored_levels(&*recorder, "f"), (0, units as usize));
            let before = recorder.len();
            // Two more, of which the second is one too many in any case.
            write(&*bcow, handle, far + 8192 * 60, &[77; 4096]);
            write(&*bcow, handle, far + 8192 * 61, &[78; 4096]);
            sync(&*bcow, handle);
            assert!(stored_levels(&*recorder, "f").0 > 0);
            for count in before..=recorder.len() {
                for seed in 0..8 {
                    let what = format!("{layout:?}, {far}, {units} units, change {count}, seed {seed}");
                    let disk = recorder.crashed(count, seed ^ count as u64);
                    if seed % 2 == 1 && count < recorder.len() {
                        recorder.tear(&disk, count, seed * 37 + count as u64 * 11);
                    }
                    let bcow = layer(disk, layout, Files::All);
                    let (handle, size) = (open(&*bcow, "f"), stat(&*bcow, "f").size);
                    bcow.repair(node(&*bcow, "f")).unwrap_or_else(|error| panic!("{what}: {error}"));
                    for unit in 0..units {
                        let expected = [unit as u8 + 1; 4096];
                        assert!(read(&*bcow, handle, unit * 8192, 4096) == expected, "{what}: unit {unit}");
                    }
                    for (at, fill) in [(far + 8192 * 60, 77), (far + 8192 * 61, 78)] {
                        let seen = read(&*bcow, handle, at, 4096);
                        let is_there = seen.len() == 4096 && seen.iter().all(|&byte| byte == fill);
                        let is_not = seen.iter().all(|&byte| byte == 0);
                        assert!(is_there || is_not && count < recorder.len(), "{what}: at {at} of {size}");
                    }
                }
            }
        }
    }
}

#[test]
fn what_was_cut_off_does_not_come_back_with_the_file_growing_again() {
    for layout in [Layout::Performance, Layout::Space] {
        for seed in 0..20_u64 {
            let recorder = Recorder::new();
            let bcow = layer(recorder.clone(), layout, Files::All);
            let handle = create(&*bcow, "f");
            // The whole of the last region goes with its table.
            for offset in [0, 3 << 20, 5 << 20] {
                write(&*bcow, handle, offset, &[7; 8192]);
            }
            sync(&*bcow, handle);
            resize(&*bcow, "f", 1 << 20);
            let cut = recorder.len();
            resize(&*bcow, "f", 6 << 20);
            sync(&*bcow, handle);
            for count in cut..=recorder.len() {
                let what = format!("{layout:?}, seed {seed}, change {count}");
                let content = shown(recorder.crashed(count, seed ^ count as u64), layout, &what);
                assert!(content[..8192] == [7; 8192] && content[8192..].iter().all(|&byte| byte == 0), "{what}");
            }
        }
    }
}

#[test]
fn what_is_written_synchronously_is_on_disk() {
    let recorder = Recorder::new();
    let bcow = layer(recorder.clone(), Layout::Space, Files::All);
    let handle = create(&*bcow, "f");
    write(&*bcow, handle, 0, &[1; 8192]);
    sync(&*bcow, handle);
    let flags = OpenFlags::READ_WRITE | OpenFlags::DATA_SYNC;
    let synchronous = bcow.open(ROOT, node(&*bcow, "f"), flags).expect("opened");
    write(&*bcow, synchronous, 4096, &[2; 4096]);
    for seed in 0..10 {
        let content = shown(recorder.crashed(recorder.len(), seed), Layout::Space, "at the end");
        assert!(content[..4096] == [1; 4096] && content[4096..] == [2; 4096], "seed {seed}");
    }
}

/// A layer that knows whether an attribute was set since all attributes were made durable. Like ext4, it does not take `fdatasync` for that.
struct Attributed {
    below: Branch,
    is_ahead: AtomicBool,
}

impl Filter for Attributed {
    fn below(&self) -> &dyn Libservice {
        &*self.below
    }

    fn setxattr(&self, caller: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        self.is_ahead.store(true, Ordering::Relaxed);
        self.below.setxattr(caller, node, name, value, flags)
    }

    fn fsync(&self, caller: &Caller, handle: HandleId, durability: Durability) -> Result<()> {
        if durability == Durability::All {
            self.is_ahead.store(false, Ordering::Relaxed);
        }
        self.below.fsync(caller, handle, durability)
    }
}

#[test]
fn fdatasync_waits_for_a_size_that_only_an_attribute_tells() {
    let attributed = Arc::new(Attributed { below: Memory::new(), is_ahead: AtomicBool::new(false) });
    let bcow = layer(attributed.clone(), Layout::Space, Files::Grown);
    let handle = create(&*bcow, "f");
    let is_synced = || {
        bcow.fsync(ROOT, handle, Durability::Data).expect("synced");
        !attributed.is_ahead.load(Ordering::Relaxed)
    };
    // Longer, so that it comes to be of the format; longer again; of no length.
    for size in [1 << 20, 2 << 20, 0, 4096, 0] {
        resize(&*bcow, "f", size);
        assert!(is_synced(), "{size}");
    }
    bcow.fallocate(ROOT, handle, AllocateMode::empty(), 0, 100).expect("allocated");
    assert!(is_synced());
    bcow.fallocate(ROOT, handle, AllocateMode::empty(), 0, 200).expect("only longer");
    assert!(is_synced());
    write(&*bcow, handle, 0, &[1; 100]);
    assert!(is_synced());
    resize(&*bcow, "f", 300);
    bcow.release(handle);
    let flags = OpenFlags::READ_WRITE | OpenFlags::DATA_SYNC;
    let handle = bcow.open(ROOT, node(&*bcow, "f"), flags).expect("opened");
    write(&*bcow, handle, 0, &[2; 100]);
    assert!(!attributed.is_ahead.load(Ordering::Relaxed), "a write that waits for its data waits for the size too");
}

/// The file as it is shown of what is in `disk` by now, by a layer that comes after the death of the one that used it.
fn after_death(disk: &Arc<Memory>, size: usize) -> Vec<u8> {
    let next = layer(disk.clone(), Layout::Space, Files::All);
    next.repair_all().expect("repaired");
    let handle = open(&*next, "f");
    read(&*next, handle, 0, size)
}

#[test]
fn what_is_appended_in_the_unit_of_a_cut_is_found_after_a_sync_and_a_death() {
    let disk = Memory::new();
    let first = layer(disk.clone(), Layout::Space, Files::All);
    let handle = create(&*first, "f");
    write(&*first, handle, 0, &[b'A'; 20_000]);
    sync(&*first, handle);
    resize(&*first, "f", 7004);
    // The first layer does nothing more before the test is over, and a layer that died does nothing either.
    let second = layer(disk.clone(), Layout::Space, Files::All);
    second.repair_all().expect("repaired");
    resize(&*second, "f", 7014);
    let handle = open(&*second, "f");
    write(&*second, handle, 4096, &[b'B'; 7014 - 4096]);
    second.sync().expect("synced");
    let mut expected = vec![b'A'; 4096];
    expected.resize(7014, b'B');
    assert!(after_death(&disk, 8000) == expected, "what was appended is gone");
}
