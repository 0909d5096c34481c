//! Tests of the check of compact files: after every power cut, with each kind of damage, and with every byte changed.

use crate::cold::Counting;
use crate::support::*;
use poolfs_bcow::Layout;
use poolfs_bcow::check::{Checked, Problem};
use poolfs_libservice::types::{AllocateMode, Errno, FileType, NodeId, SetAttributes, XattrFlags};
use poolfs_libservice::{Branch, Libservice, Memory, Outcome, Recorder};
use std::sync::Arc;

const ATTRIBUTE: &[u8] = b"trusted.poolfs.bcow";
const METACOPY: &[u8] = b"trusted.overlay.metacopy";
const BLOCK: usize = 4096;
const LAYOUTS: [Layout; 2] = [Layout::Performance, Layout::Space];

type Found = (String, Problem, Outcome);

fn check(disk: &Branch, is_unclean: bool, repair: bool) -> (Checked, Vec<Found>) {
    let mut found = Vec::new();
    let checked = layer(disk.clone(), Layout::Space, Files::Grown)
        .check(is_unclean, repair, &mut |finding| found.push((finding.path, finding.problem, finding.outcome)))
        .expect("it can be checked");
    (checked, found)
}

/// All that is stored of the file `f`, and when it was changed.
fn stored(disk: &dyn Libservice) -> (Vec<u8>, Vec<u8>, String) {
    let handle = open(disk, "f");
    let attributes = stat(disk, "f");
    let bytes = read(disk, handle, 0, attributes.size as usize);
    disk.release(handle);
    (disk.getxattr(ROOT, node(disk, "f"), ATTRIBUTE).unwrap_or_default(), bytes, format!("{attributes:?}"))
}

#[test]
fn what_a_power_cut_leaves_is_repaired_and_its_content_stays() {
    let mut problems = std::collections::HashSet::new();
    for seed in 0..16_u64 {
        let layout = LAYOUTS[seed as usize % 2];
        let recorder = Recorder::new();
        let bcow = layer(recorder.clone(), layout, Files::All);
        let mut random = Random(seed);
        let handle = create(&*bcow, "f");
        for _ in 0..25 {
            let before = recorder.len();
            let offset = 512 * random.below(12_000);
            match random.below(8) {
                0 | 1 => sync(&*bcow, handle),
                2 => resize(&*bcow, "f", offset),
                3 => {
                    let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
                    bcow.fallocate(ROOT, handle, punch, offset, 50_000).expect("punched");
                }
                _ => {
                    write(&*bcow, handle, offset, &vec![random.below(256) as u8; 512 * (1 + random.below(60) as usize)])
                }
            }
            for (count, is_torn) in (before..=recorder.len()).flat_map(|count| [(count, false), (count, true)]) {
                let what = format!("seed {seed}, {layout:?}, change {count}, torn {is_torn}");
                let crashed = || {
                    let disk = recorder.crashed(count, seed ^ count as u64);
                    if is_torn {
                        recorder.tear(&disk, count, seed * 37 + count as u64 * 11);
                    }
                    disk
                };
                let disk = crashed();
                let branch: Branch = disk.clone();
                let before = stored(&*disk);
                let (_, found) = check(&branch, true, false);
                assert!(stored(&*disk) == before, "{what}: something was written");
                assert!(found.iter().all(|(_, _, outcome)| *outcome == Outcome::Repairable), "{what}: {found:?}");
                problems.extend(found.iter().map(|found| found.1));
                let (checked, repaired) = check(&branch, true, true);
                assert!(checked.tally.nothing_left(), "{what}: {repaired:?}");
                assert_eq!(check(&branch, false, false).1, [], "{what}");
                let content = |disk: Branch| {
                    let bcow = layer(disk, layout, Files::All);
                    bcow.repair(node(&*bcow, "f")).expect("repaired");
                    let size = stat(&*bcow, "f").size as usize;
                    read(&*bcow, open(&*bcow, "f"), 0, size)
                };
                assert!(content(disk) == content(crashed()), "{what}");
            }
        }
    }
    for wanted in [Problem::TableCut, Problem::Truncation] {
        assert!(problems.contains(&wanted), "{wanted:?} is not among {problems:?}");
    }
}

#[test]
fn what_was_ended_in_order_has_nothing() {
    for seed in 0..20_u64 {
        let memory = Memory::new();
        let bcow = layer(memory.clone(), LAYOUTS[seed as usize % 2], Files::All);
        let mut random = Random(seed);
        for file in ["f", "g"] {
            let handle = create(&*bcow, file);
            for _ in 0..40 {
                let offset = random.below(6 << 20);
                match random.below(4) {
                    0 => resize(&*bcow, file, offset),
                    _ => write(&*bcow, handle, offset, &vec![1; random.below(30_000) as usize]),
                }
            }
            bcow.release(handle);
        }
        drop(bcow);
        let (checked, found) = check(&(memory as Branch), false, false);
        assert_eq!((checked.files, found), (2, vec![]), "seed {seed}");
    }
}

/// A file with bytes in so many regions that it has tables.
fn image(layout: Layout) -> Arc<Memory> {
    image_of(layout, &(0..64).map(|at| at << 17).collect::<Vec<_>>())
}

/// One with the places of its units in its record.
fn small_image(layout: Layout) -> Arc<Memory> {
    image_of(layout, &[0, 5000, 1 << 20, 3 << 20])
}

fn image_of(layout: Layout, offsets: &[u64]) -> Arc<Memory> {
    let memory = Memory::new();
    let bcow = layer(memory.clone(), layout, Files::Grown);
    let handle = create(&*bcow, "f");
    resize(&*bcow, "f", 8 << 20);
    for &offset in offsets {
        write(&*bcow, handle, offset, b"0123456789");
    }
    sync(&*bcow, handle);
    bcow.release(handle);
    memory
}

/// Changes a byte whatever it was: checksums and tags are others in each run.
fn flip(disk: &dyn Libservice, at: usize) {
    put(disk, at, &[stored(disk).1[at] ^ 1]);
}

fn put(disk: &dyn Libservice, at: usize, bytes: &[u8]) {
    let handle = open(disk, "f");
    write(disk, handle, at as u64, bytes);
    disk.release(handle);
}

/// The record with other bytes and a right sum.
fn set_record(disk: &dyn Libservice, change: impl FnOnce(&mut [u8])) {
    let mut record = stored(disk).0;
    change(&mut record);
    record[60..64].fill(0);
    let sum = crc32c::crc32c(&record).to_le_bytes();
    record[60..64].copy_from_slice(&sum);
    disk.setxattr(ROOT, node(disk, "f"), ATTRIBUTE, &record, XattrFlags::empty()).expect("set");
}

/// A sector of the table `number` at `at` in which the first entry is another one, with right seals.
fn set_entry(disk: &dyn Libservice, number: u64, at: usize, block: u32) {
    let (record, bytes, _) = stored(disk);
    let seal = |place: u64, piece: &[u8]| {
        let all = [&record[8..16], &number.to_le_bytes(), &place.to_le_bytes(), piece].concat();
        crc32c::crc32c(&all).to_le_bytes()
    };
    let mut sector = bytes[at..at + 512].to_vec();
    sector[..4].copy_from_slice(&block.to_le_bytes());
    let entry = seal(0, &block.to_le_bytes());
    sector[4..8].copy_from_slice(&entry);
    sector[504..508].copy_from_slice(b"PFBT");
    let whole = seal(504, &sector[..504]);
    sector[508..].copy_from_slice(&whole);
    put(disk, at, &sector);
}

/// The record with another place of the unit at that number in it, and a right sum.
fn set_place(disk: &dyn Libservice, number: usize, block: u32) {
    set_record(disk, |record| record[68 + number * 8..][..4].copy_from_slice(&block.to_le_bytes()));
}

type Case = (&'static str, Layout, bool, fn(&dyn Libservice), (&'static str, Problem, Outcome));

const CASES: &[Case] = &[
    (
        "a record of another version",
        Layout::Space,
        false,
        |disk| set_record(disk, |record| record[4] = 2),
        ("f", Problem::Record, Outcome::Damage),
    ),
    (
        "a record on a directory",
        Layout::Space,
        false,
        |disk| {
            let directory = disk.mkdir(ROOT, NodeId::ROOT, name("d"), 0o755).expect("made").node;
            disk.setxattr(ROOT, directory, ATTRIBUTE, b"x", XattrFlags::empty()).expect("set");
        },
        ("d", Problem::Record, Outcome::Damage),
    ),
    (
        "a mark of the branch that is none",
        Layout::Space,
        false,
        |disk| disk.setxattr(ROOT, NodeId::ROOT, ATTRIBUTE, b"2", XattrFlags::empty()).expect("set"),
        ("", Problem::Record, Outcome::Damage),
    ),
    (
        "no mark of the branch",
        Layout::Space,
        false,
        |disk| disk.removexattr(ROOT, NodeId::ROOT, ATTRIBUTE).expect("removed"),
        ("", Problem::MarkMissing, Outcome::Repaired),
    ),
    (
        "no metacopy",
        Layout::Space,
        false,
        |disk| disk.removexattr(ROOT, node(disk, "f"), METACOPY).expect("removed"),
        ("f", Problem::MetacopyMissing, Outcome::Repaired),
    ),
    (
        "a truncation that has not come to the tables",
        Layout::Space,
        false,
        |disk| set_record(disk, |record| record[24..32].copy_from_slice(&(2_u64 << 20).to_le_bytes())),
        ("f", Problem::Truncation, Outcome::Repaired),
    ),
    (
        "a truncation of all",
        Layout::Performance,
        false,
        |disk| set_record(disk, |record| record[24..32].fill(0)),
        ("f", Problem::Truncation, Outcome::Repaired),
    ),
    (
        "a cut table after a clean end",
        Layout::Performance,
        false,
        |disk| flip(disk, 508),
        ("f", Problem::Table, Outcome::Damage),
    ),
    (
        "a cut table after an unclean end",
        Layout::Performance,
        true,
        |disk| flip(disk, 508),
        ("f", Problem::TableCut, Outcome::Repaired),
    ),
    (
        "more than a cut after an unclean end",
        Layout::Performance,
        true,
        |disk| put(disk, 0, &[0xee; 100]),
        ("f", Problem::Table, Outcome::Damage),
    ),
    (
        "a unit behind the end",
        Layout::Performance,
        false,
        |disk| set_entry(disk, 0, 0, 1_000_000),
        ("f", Problem::Place, Outcome::Damage),
    ),
    (
        "the last unit there can be",
        Layout::Performance,
        true,
        |disk| set_entry(disk, 0, 0, u32::MAX),
        ("f", Problem::Place, Outcome::Damage),
    ),
    (
        "a unit that is named twice",
        Layout::Performance,
        false,
        |disk| {
            let other = u32::from_le_bytes(stored(disk).1[512..516].try_into().expect("four"));
            let (_, bytes, _) = stored(disk);
            let named =
                (0..63).map(|at| at * 8).map(|at| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four")));
            let twice = named.skip(1).find(|&block| block != 0).unwrap_or(other);
            set_entry(disk, 0, 0, twice);
        },
        ("f", Problem::Place, Outcome::Damage),
    ),
    (
        "a table behind the end",
        Layout::Space,
        false,
        |disk| set_entry(disk, 1 << 63, root(disk), 1_000_000),
        ("f", Problem::Place, Outcome::Damage),
    ),
    (
        "a table that is none",
        Layout::Space,
        false,
        |disk| set_entry(disk, 1 << 63, root(disk), (stored(disk).1.len() / BLOCK) as u32 - 1),
        ("f", Problem::Table, Outcome::Damage),
    ),
    (
        "a file that was cut",
        Layout::Space,
        false,
        |disk| {
            let changes = SetAttributes { size: Some(root(disk) as u64 + 4096), ..SetAttributes::default() };
            disk.setattr(ROOT, node(disk, "f"), &changes, None).expect("cut");
        },
        ("f", Problem::Place, Outcome::Damage),
    ),
];

/// Of a file with places in its record.
const SMALL_CASES: &[Case] = &[
    (
        "a unit behind the end",
        Layout::Space,
        false,
        |disk| set_place(disk, 2, 1_000_000),
        ("f", Problem::Place, Outcome::Damage),
    ),
    (
        "a unit that is named twice",
        Layout::Performance,
        true,
        |disk| {
            let first = stored(disk).0[68..72].try_into().expect("four");
            set_place(disk, 1, u32::from_le_bytes(first));
        },
        ("f", Problem::Record, Outcome::Damage),
    ),
    (
        "a truncation that has not come to the places",
        Layout::Space,
        true,
        |disk| {
            set_place(disk, 3, 1_000_000);
            set_record(disk, |record| record[24..32].copy_from_slice(&(2_u64 << 20).to_le_bytes()));
        },
        ("f", Problem::Truncation, Outcome::Repaired),
    ),
];

/// Where the root is.
fn root(disk: &dyn Libservice) -> usize {
    u32::from_le_bytes(stored(disk).0[32..36].try_into().expect("four")) as usize * BLOCK
}

#[test]
fn every_single_thing_is_found_and_repaired_where_that_is_safe() {
    type Image = fn(Layout) -> Arc<Memory>;
    let cases = CASES.iter().map(|case| (image as Image, case));
    for (image, case) in cases.chain(SMALL_CASES.iter().map(|case| (small_image as Image, case))) {
        let (what, layout, is_unclean, change, expected) = case;
        let disk = image(*layout);
        let branch: Branch = disk.clone();
        assert_eq!(check(&branch, *is_unclean, false).1, [], "{what}: before");
        change(&*disk);
        let before = stored(&*disk);
        let (_, found) = check(&branch, *is_unclean, false);
        assert!(stored(&*disk) == before, "{what}: something was written");
        assert_eq!(found.len(), 1, "{what}: {found:?}");
        let (checked, repaired) = check(&branch, *is_unclean, true);
        let (path, problem, outcome) = *expected;
        assert_eq!(repaired, [(path.to_owned(), problem, outcome)], "{what}");
        let left = check(&branch, false, false).1;
        assert_eq!((left.is_empty(), checked.tally.nothing_left()), [outcome == Outcome::Repaired; 2].into(), "{what}");
    }
}

#[test]
fn no_changed_byte_of_a_record_or_a_table_is_missed() {
    for (layout, is_small) in LAYOUTS.into_iter().flat_map(|layout| [(layout, false), (layout, true)]) {
        let disk = if is_small { small_image(layout) } else { image(layout) };
        let branch: Branch = disk.clone();
        let (record, bytes, _) = stored(&*disk);
        for is_unclean in [false, true] {
            for at in 0..record.len() {
                let mut changed = record.clone();
                changed[at] ^= 1 << (at % 8);
                let set = |value: &[u8]| disk.setxattr(ROOT, node(&*disk, "f"), ATTRIBUTE, value, XattrFlags::empty());
                set(&changed).expect("set");
                assert_eq!(check(&branch, is_unclean, false).1.len(), 1, "{layout:?}: byte {at} of the record");
                set(&record).expect("set");
            }
            // The blocks that begin as those of tables do.
            let tables = (0..bytes.len() / BLOCK).map(|block| block * BLOCK);
            let tables = tables.filter(|at| (1..=8).any(|sector| bytes[at + sector * 512 - 8..][..4] == *b"PFBT"));
            let mut count = 0;
            for at in tables.flat_map(|table| (table..table + BLOCK).step_by(3)) {
                put(&*disk, at, &[bytes[at] ^ 1 << (at % 8)]);
                assert_eq!(check(&branch, is_unclean, false).1.len(), 1, "{layout:?}: byte {at} of the tables");
                put(&*disk, at, &[bytes[at]]);
                count += 1;
            }
            assert!(count > 1000 || is_small);
        }
    }
}

#[test]
fn a_directory_without_compact_files_is_left_alone() {
    let memory = Memory::new();
    memory.mknod(ROOT, NodeId::ROOT, name("f"), FileType::Regular, 0o600, 0).expect("made");
    let branch: Branch = memory.clone();
    assert_eq!(check(&branch, true, true), (Checked::default(), vec![]));
    assert!(memory.getxattr(ROOT, NodeId::ROOT, ATTRIBUTE).is_err_and(|error| error == Errno::ENODATA));
}

/// A file as nobody makes one: its root names as many tables as it can, all of them in the hole that the file is for the rest.
fn of_empty_tables(memory: &Memory, root_blocks: u64) {
    const TAG: u64 = 5;
    let seal = |number: u64, place: u64, piece: &[u8]| {
        let all = [&TAG.to_le_bytes()[..], &number.to_le_bytes(), &place.to_le_bytes(), piece].concat();
        crc32c::crc32c(&all).to_le_bytes()
    };
    let handle = create(memory, "f");
    resize(memory, "f", 1 << 40);
    for number in 0..root_blocks {
        let of_root = number | 1 << 63;
        let sectors = (0..8).flat_map(|sector| {
            let entries = (63 * sector..63 * (sector + 1)).flat_map(|entry| {
                let block = (2000 + number * 504 + entry) as u32;
                [block.to_le_bytes(), seal(of_root, entry, &block.to_le_bytes())].concat()
            });
            let mut bytes: Vec<u8> = entries.chain(*b"PFBT").collect();
            // As the checksum covers all before the mark.
            let sum = seal(of_root, 504 + sector, &bytes[..504]);
            bytes.extend(sum);
            bytes
        });
        let sectors: Vec<u8> = sectors.collect();
        write(memory, handle, (1 + number) * BLOCK as u64, &sectors);
    }
    memory.release(handle);
    let mut record = vec![0; 64];
    record[..8].copy_from_slice(b"PFBC\x01\x00\x0c\x02");
    record[8..16].copy_from_slice(&TAG.to_le_bytes());
    record[16..24].copy_from_slice(&(1_u64 << 30).to_le_bytes());
    record[24..32].fill(0xff);
    record[32..36].copy_from_slice(&1_u32.to_le_bytes());
    record[36..40].copy_from_slice(&(root_blocks as u32).to_le_bytes());
    let sum = crc32c::crc32c(&record).to_le_bytes();
    record[60..].copy_from_slice(&sum);
    for (attribute, value) in [(ATTRIBUTE, &record[..]), (METACOPY, &[])] {
        memory.setxattr(ROOT, node(memory, "f"), attribute, value, XattrFlags::empty()).expect("set");
    }
    memory.setxattr(ROOT, NodeId::ROOT, ATTRIBUTE, b"1", XattrFlags::empty()).expect("set");
}

#[test]
fn tables_that_take_no_room_take_no_time() {
    let memory = Memory::new();
    of_empty_tables(&memory, 4);
    let counting = Counting::over(memory.clone());
    let branch: Branch = counting.clone();
    let (checked, found) = check(&branch, true, false);
    assert_eq!((checked.files, &found[..]), (1, &[][..]));
    let bytes = counting.bytes();
    assert!((4 * BLOCK as u64..=8 * BLOCK as u64).contains(&bytes), "{bytes} bytes were read for a root of 4 blocks");
    // What is wrong there is found as ever.
    put(&*memory, 2500 * BLOCK, &[1]);
    assert_eq!(check(&branch, false, false).1, [("f".to_owned(), Problem::Table, Outcome::Damage)]);
}
