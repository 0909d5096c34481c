//! Tests of the space that compact files take, of its reuse, and of the bounds on tables in memory.

use crate::support::*;
use poolfs_bcow::Layout;
use poolfs_libservice::types::{AllocateMode, Errno, SeekTo, XattrFlags};
use poolfs_libservice::{Libservice, Memory, Recorder};
use poolfs_local::{Local, LocalOptions};

const BLOCK: u64 = 4096;

/// The size of the file below.
fn below(memory: &Memory, file: &str) -> u64 {
    stat(memory, file).size
}

#[test]
fn a_byte_in_a_large_file_takes_a_unit() {
    for (layout, most) in [(Layout::Space, 2 * BLOCK), (Layout::Performance, BLOCK + (16 << 20))] {
        let memory = Memory::new();
        let bcow = layer(memory.clone(), layout, Files::Grown);
        let handle = create(&*bcow, "f");
        resize(&*bcow, "f", 4 << 30);
        write(&*bcow, handle, (4 << 30) - 1, b"x");
        sync(&*bcow, handle);
        assert_eq!(stat(&*bcow, "f").size, 4 << 30);
        assert!(below(&memory, "f") <= most, "{layout:?}: {}", below(&memory, "f"));
        assert_eq!(read(&*bcow, handle, (4 << 30) - 2, 9), b"\0x");
        assert_eq!(bcow.seek(ROOT, handle, 0, SeekTo::Hole).expect("a hole"), 0);
        let data = bcow.seek(ROOT, handle, 0, SeekTo::Data).expect("data");
        assert!(data > 3 << 30 && data < 4 << 30, "{layout:?}: {data}");
        assert_eq!(bcow.seek(ROOT, handle, data, SeekTo::Hole).expect("the end"), 4 << 30);
    }
}

#[test]
fn one_block_of_a_file_of_a_mebibyte_takes_two() {
    for layout in [Layout::Performance, Layout::Space] {
        let memory = Memory::new();
        let bcow = layer(memory.clone(), layout, Files::Grown);
        let handle = create(&*bcow, "f");
        resize(&*bcow, "f", 1 << 20);
        write(&*bcow, handle, 77 * BLOCK + 5, b"x");
        sync(&*bcow, handle);
        assert_eq!(below(&memory, "f").div_ceil(BLOCK), 2);
        assert_eq!(stored_levels(&*memory, "f"), (0, 1));
    }
}

#[test]
fn a_file_of_few_units_has_no_table_and_one_of_more_has_as_many_as_it_needs() {
    for units in [1, INLINE_MAX, INLINE_MAX + 1] {
        for (size, most) in [(1 << 20, 1), (1 << 29, 2)] {
            let memory = Memory::new();
            let bcow = layer(memory.clone(), Layout::Space, Files::Grown);
            let handle = create(&*bcow, "f");
            resize(&*bcow, "f", size);
            (0..units).for_each(|unit| write(&*bcow, handle, unit * 3 * BLOCK, &[unit as u8 + 1; BLOCK as usize]));
            sync(&*bcow, handle);
            let (levels, tables) = match units {
                ..=INLINE_MAX => ((0, units as usize), 0),
                _ => ((most, 0), u64::from(most) - 1),
            };
            assert_eq!(stored_levels(&*memory, "f"), levels, "{units} units of {size} bytes");
            // Block 0 is there in any case, with nothing in it as long as there is no table.
            assert_eq!(below(&memory, "f"), (1 + units + tables) * BLOCK, "{units} units of {size} bytes");
            bcow.release(handle);
            drop(bcow);
            let bcow = layer(memory, Layout::Space, Files::Grown);
            let handle = open(&*bcow, "f");
            for unit in 0..units {
                assert_eq!(read(&*bcow, handle, unit * 3 * BLOCK, BLOCK as usize), [unit as u8 + 1; BLOCK as usize]);
                assert_eq!(read(&*bcow, handle, (unit * 3 + 1) * BLOCK, 2), b"\0\0");
                assert_eq!(
                    bcow.seek(ROOT, handle, (unit * 3 + 1) * BLOCK, SeekTo::Hole).expect("a hole"),
                    (unit * 3 + 1) * BLOCK
                );
            }
        }
    }
}

#[test]
fn a_file_without_tables_uses_its_room_again_and_overwrites_without_a_word() {
    let recorder = Recorder::new();
    let bcow = layer(recorder.clone(), Layout::Space, Files::Grown);
    let handle = create(&*bcow, "f");
    resize(&*bcow, "f", 1 << 20);
    let fill = |bcow: &dyn Libservice, handle, blocks: std::ops::Range<u64>| {
        blocks.for_each(|block| write(bcow, handle, block * BLOCK, &[block as u8; BLOCK as usize]));
        sync(bcow, handle);
    };
    fill(&*bcow, handle, 0..20);
    let before = recorder.len();
    write(&*bcow, handle, 3 * BLOCK, &[3; BLOCK as usize]);
    sync(&*bcow, handle);
    assert_eq!(recorder.len() - before, 2, "a write and a sync, and nothing else");
    let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
    bcow.fallocate(ROOT, handle, punch, 5 * BLOCK, 5 * BLOCK).expect("punched");
    // What the stored record still names is not used for anything else.
    fill(&*bcow, handle, 100..103);
    assert_eq!(stat(&*recorder, "f").size, 24 * BLOCK);
    fill(&*bcow, handle, 103..105);
    bcow.release(handle);
    drop(bcow);
    let bcow = layer(recorder.clone(), Layout::Space, Files::Grown);
    let handle = open(&*bcow, "f");
    // The rest of it is found again by who did not let it go.
    fill(&*bcow, handle, 105..108);
    assert_eq!(stat(&*recorder, "f").size, 24 * BLOCK, "five blocks were free");
    assert_eq!(stored_levels(&*recorder, "f"), (0, 23));
    for block in (0..20).filter(|block| !(5..10).contains(block)).chain(100..108) {
        assert_eq!(read(&*bcow, handle, block * BLOCK, BLOCK as usize), [block as u8; BLOCK as usize], "{block}");
    }
}

/// Attributes that fill what a filesystem has for those of one file leave no room for places: such a file gets a table.
#[test]
fn a_file_with_attributes_to_the_brim_can_be_synced() {
    let place = tempfile::tempdir().expect("a directory");
    let local = Local::open(place.path(), LocalOptions::default()).expect("opened");
    let bcow = layer(local.clone(), Layout::Space, Files::Grown);
    let handle = create(&*bcow, "f");
    resize(&*bcow, "f", 1 << 20);
    // Where attributes have more room than a block, or none is left by this, places go into the record.
    let node = node(&*bcow, "f");
    let is_full = (1..200).any(|at| {
        let name = format!("trusted.filler{at}");
        bcow.setxattr(ROOT, node, name.as_bytes(), &[at; 20], XattrFlags::empty()).is_err()
    });
    (0..20).for_each(|block| write(&*bcow, handle, block * BLOCK, &[block as u8; BLOCK as usize]));
    sync(&*bcow, handle);
    assert_eq!(stored_levels(&*local, "f"), if is_full { (1, 0) } else { (0, 20) });
    bcow.release(handle);
    drop(bcow);
    let bcow = layer(local, Layout::Space, Files::Grown);
    let handle = open(&*bcow, "f");
    for block in 0..20 {
        assert_eq!(read(&*bcow, handle, block * BLOCK, BLOCK as usize), [block as u8; BLOCK as usize]);
    }
}

#[test]
fn what_is_reserved_beyond_what_a_file_can_have_takes_no_room() {
    let memory = Memory::new();
    let bcow = layer(memory.clone(), Layout::Space, Files::Grown);
    let handle = create(&*bcow, "f");
    resize(&*bcow, "f", 1 << 20);
    sync(&*bcow, handle);
    let before = stat(&*memory, "f").size;
    // A root of 1024 blocks, of 504 tables of 504 units of a block.
    let (most, length) = ((1024_u64 * 504 * 504) << 12, 65 << 20);
    let reserve = |offset| bcow.fallocate(ROOT, handle, AllocateMode::KEEP_SIZE, offset, length);
    assert!(reserve(most - length + 1).expect_err("one byte too many") == Errno::EFBIG);
    sync(&*bcow, handle);
    assert_eq!(stat(&*memory, "f").size, before);
    reserve(most - length).expect("as much as can be found");
}

#[test]
fn what_is_punched_or_cut_off_is_used_again_also_by_the_next_layer() {
    let memory = Memory::new();
    let bcow = layer(memory.clone(), Layout::Space, Files::Grown);
    let handle = create(&*bcow, "f");
    resize(&*bcow, "f", 1 << 20);
    let fill = |bcow: &dyn Libservice, handle, from: u64| {
        for block in from..from + 50 {
            write(bcow, handle, block * BLOCK, &[block as u8; BLOCK as usize]);
        }
        sync(bcow, handle);
    };
    fill(&*bcow, handle, 0);
    let room = below(&memory, "f");
    assert_eq!(room, 51 * BLOCK);
    let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
    bcow.fallocate(ROOT, handle, punch, 0, 25 * BLOCK).expect("punched");
    resize(&*bcow, "f", 30 * BLOCK);
    sync(&*bcow, handle);
    drop(bcow);
    let bcow = layer(memory.clone(), Layout::Space, Files::Grown);
    let handle = open(&*bcow, "f");
    resize(&*bcow, "f", 1 << 20);
    let expected: Vec<u8> = (0..50).map(|block| if (25..30).contains(&block) { block } else { 0 }).collect();
    let seen: Vec<u8> = (0..50).map(|block| read(&*bcow, handle, block * BLOCK + 9, 1)[0]).collect();
    assert_eq!(seen, expected);
    for block in 60..105_u64 {
        write(&*bcow, handle, block * BLOCK + 1, b"y");
    }
    sync(&*bcow, handle);
    assert_eq!(below(&memory, "f").div_ceil(BLOCK), room / BLOCK, "45 blocks were free");
    assert_eq!(read(&*bcow, handle, 60 * BLOCK, 4), b"\0y\0\0", "nothing of what was there before");
    fill(&*bcow, handle, 110);
    assert_eq!(below(&memory, "f"), room + 50 * BLOCK);
}

#[test]
fn no_room_is_given_twice() {
    let memory = Memory::new();
    let bcow = layer(memory.clone(), Layout::Space, Files::Grown);
    let handle = create(&*bcow, "f");
    resize(&*bcow, "f", 1 << 20);
    let fill = |bcow: &dyn Libservice, handle, blocks: std::ops::Range<u64>| {
        blocks.for_each(|block| write(bcow, handle, block * BLOCK, &[block as u8; BLOCK as usize]));
        sync(bcow, handle);
    };
    let punch = |bcow: &dyn Libservice, handle, first: u64| {
        let mode = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
        bcow.fallocate(ROOT, handle, mode, first * BLOCK, 10 * BLOCK).expect("punched");
        sync(bcow, handle);
    };
    fill(&*bcow, handle, 0..100);
    punch(&*bcow, handle, 10);
    bcow.release(handle);
    drop(bcow);
    // What was free before is found when room is needed first, and some is known by then.
    let bcow = layer(memory, Layout::Space, Files::Grown);
    let handle = open(&*bcow, "f");
    punch(&*bcow, handle, 50);
    fill(&*bcow, handle, 100..150);
    for block in (0..150).filter(|block| !(10..20).contains(block) && !(50..60).contains(block)) {
        assert_eq!(read(&*bcow, handle, block * BLOCK, BLOCK as usize), [block as u8; BLOCK as usize], "{block}");
    }
}

#[test]
fn a_file_outgrows_its_table_and_its_root() {
    for layout in [Layout::Performance, Layout::Space] {
        let memory = Memory::new();
        let bcow = layer(memory.clone(), layout, Files::All);
        let handle = create(&*bcow, "f");
        // The first table, the second one, the second block of a root, and one of a root that had to be moved again.
        let places = [0_u64, 3 << 20, 900 << 20, 5 << 30, 200 << 30];
        for (at, &offset) in places.iter().enumerate() {
            write(&*bcow, handle, offset, &[at as u8 + 1; 10_000]);
            if at % 2 == 0 {
                sync(&*bcow, handle);
            }
        }
        let check = |bcow: &dyn Libservice, handle| {
            for (at, &offset) in places.iter().enumerate() {
                assert_eq!(read(bcow, handle, offset, 10_000), vec![at as u8 + 1; 10_000], "{layout:?}: {offset}");
                assert_eq!(read(bcow, handle, offset + 10_000, 1), if at == 4 { &b""[..] } else { b"\0" });
            }
        };
        check(&*bcow, handle);
        bcow.release(handle);
        drop(bcow);
        assert!(below(&memory, "f") < 2 << 20);
        let bcow = layer(memory.clone(), layout, Files::All);
        check(&*bcow, open(&*bcow, "f"));
        let too_far = bcow.write(ROOT, open(&*bcow, "f"), 2 << 40, b"x").expect_err("too far");
        assert_eq!(too_far.errno(), Errno::EFBIG);
    }
}

#[test]
fn an_emptied_file_takes_nothing() {
    let memory = Memory::new();
    let bcow = layer(memory.clone(), Layout::Space, Files::Grown);
    let handle = create(&*bcow, "f");
    resize(&*bcow, "f", 8 << 30);
    write(&*bcow, handle, 7 << 30, &[7; 100_000]);
    sync(&*bcow, handle);
    resize(&*bcow, "f", 0);
    assert_eq!(below(&memory, "f"), 0);
    assert_eq!(stored_levels(&*memory, "f"), (0, 0), "and begins again without tables");
    write(&*bcow, handle, 10, b"again");
    sync(&*bcow, handle);
    bcow.release(handle);
    drop(bcow);
    let bcow = layer(memory, Layout::Space, Files::Grown);
    assert_eq!(read(&*bcow, open(&*bcow, "f"), 0, 99), b"\0\0\0\0\0\0\0\0\0\0again");
}

#[test]
fn tables_in_memory_are_bounded_however_scattered_a_file_is_written() {
    const REGION: u64 = 504 * BLOCK;
    const WRITES: u64 = 4000;
    let memory = Memory::new();
    let bcow = usual(memory.clone());
    let handle = create(&*bcow, "f");
    resize(&*bcow, "f", REGION * WRITES);
    for at in 0..WRITES {
        write(&*bcow, handle, at * REGION, &[at as u8 | 1]);
        assert!(bcow.tables_in_memory() <= 1024 + 1, "{} after {at} writes", bcow.tables_in_memory());
    }
    let all_there = |bcow: &poolfs_bcow::Bcow, handle| {
        for at in 0..WRITES {
            assert_eq!(read(bcow, handle, at * REGION, 2), [at as u8 | 1, 0], "region {at}");
            assert!(bcow.tables_in_memory() <= 1024 + 1);
        }
    };
    all_there(&bcow, handle);
    bcow.release(handle);
    drop(bcow);
    let bcow = usual(memory);
    let handle = open(&*bcow, "f");
    all_there(&bcow, handle);
    let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
    bcow.fallocate(ROOT, handle, punch, 0, REGION * WRITES).expect("punched");
    assert!(bcow.tables_in_memory() <= 1024 + 16, "{} after a hole", bcow.tables_in_memory());
    assert_eq!(read(&*bcow, handle, REGION * 5, 2), [0, 0]);
}

#[test]
fn tables_in_memory_are_bounded_for_all_files_together() {
    const REGION: u64 = 504 * BLOCK;
    let bcow = usual(Memory::new());
    let files: Vec<_> = (0..12_u8).map(|number| (number, format!("f{number}"))).collect();
    let mut handles = Vec::new();
    for (number, file) in &files {
        let handle = create(&*bcow, file);
        resize(&*bcow, file, REGION * 600);
        for at in 0..600 {
            write(&*bcow, handle, at * REGION, &[number + 1]);
            assert!(bcow.tables_in_memory() <= 4096 + 41, "{} in file {number}", bcow.tables_in_memory());
        }
        handles.push((*number, handle));
    }
    for (number, handle) in handles {
        for at in 0..600 {
            assert_eq!(read(&*bcow, handle, at * REGION, 1), [number + 1]);
            assert!(bcow.tables_in_memory() <= 4096 + 41);
        }
    }
}

#[test]
fn roots_in_memory_are_bounded_for_all_files_together() {
    const REGION: u64 = 504 * BLOCK;
    const LENGTH: u64 = 1 << 40;
    let memory = Memory::new();
    let bcow = usual(memory.clone());
    let mut handles = Vec::new();
    for number in 0..60_u8 {
        let file = format!("f{number}");
        let handle = create(&*bcow, &file);
        resize(&*bcow, &file, LENGTH);
        for at in 0..50 {
            write(&*bcow, handle, at * REGION, &[number + 1]);
        }
        write(&*bcow, handle, LENGTH - BLOCK, &[number + 1]);
        let count = bcow.root_tables_in_memory();
        assert!(count <= 8192 + 1024, "{count} after file {number}");
        handles.push((number, handle));
    }
    let all_there = |bcow: &poolfs_bcow::Bcow, number: u8, handle| {
        for at in [0, REGION, 49 * REGION, LENGTH - BLOCK] {
            assert_eq!(read(bcow, handle, at, 1), [number + 1], "file {number} at {at}");
        }
        let count = bcow.root_tables_in_memory();
        assert!(count <= 8192 + 1024, "{count} with file {number}");
    };
    for &(number, handle) in &handles {
        all_there(&bcow, number, handle);
        write(&*bcow, handle, 50 * REGION, &[number + 1]);
    }
    for (number, handle) in handles {
        sync(&*bcow, handle);
        bcow.release(handle);
        assert_eq!(read(&*bcow, open(&*bcow, &format!("f{number}")), 50 * REGION, 1), [number + 1]);
    }
    drop(bcow);
    let bcow = usual(memory);
    for number in 0..60 {
        all_there(&bcow, number, open(&*bcow, &format!("f{number}")));
    }
}
