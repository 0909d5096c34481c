//! Damaged compact files: their users get an error or bytes, and nothing else happens.

use crate::support::*;
use poolfs_bcow::Layout;
use poolfs_libservice::types::{AllocateMode, Errno, NodeId, OpenFlags, SeekTo, SetAttributes, XattrFlags};
use poolfs_libservice::{Durability, Libservice, Memory};
use std::sync::Arc;

/// A file of some regions, as it is stored: its record and its bytes. Of few units its record has the places, of many there are tables.
fn stored(layout: Layout, few: bool) -> (Vec<u8>, Vec<u8>) {
    let memory = Memory::new();
    let bcow = layer(memory.clone(), layout, Files::Grown);
    let handle = create(&*bcow, "f");
    resize(&*bcow, "f", 8 << 20);
    for offset in [0, 5000, 1 << 20, 3 << 20, (8 << 20) - 10] {
        write(&*bcow, handle, offset, b"0123456789");
    }
    if !few {
        (0..60).for_each(|at| write(&*bcow, handle, at * 100_000, b"0123456789"));
    }
    sync(&*bcow, handle);
    bcow.release(handle);
    drop(bcow);
    assert_eq!(stored_levels(&*memory, "f").0 == 0, few);
    let record = memory.getxattr(ROOT, node(&*memory, "f"), ATTRIBUTE).expect("a record");
    let handle = open(&*memory, "f");
    let size = stat(&*memory, "f").size;
    (record, read(&*memory, handle, 0, size as usize))
}

/// Has a record with a right checksum, whatever else is wrong with it.
fn seal(record: &mut [u8]) {
    if record.len() >= 64 {
        record[60..64].fill(0);
        let crc = crc32c::crc32c(record);
        record[60..64].copy_from_slice(&crc.to_le_bytes());
    }
}

fn disk(record: &[u8], bytes: &[u8]) -> Arc<Memory> {
    let memory = Memory::new();
    let handle = create(&*memory, "f");
    write(&*memory, handle, 0, bytes);
    memory.release(handle);
    memory.setxattr(ROOT, node(&*memory, "f"), ATTRIBUTE, record, XattrFlags::empty()).expect("set");
    memory
}

/// Everything that can be done with a file; whether any of it met damage.
fn use_it(bcow: &dyn Libservice) -> bool {
    let mut met = false;
    let mut note = |errno: Option<Errno>| match errno {
        None | Some(Errno::ENXIO | Errno::EFBIG) => {}
        Some(Errno::EIO) => met = true,
        Some(other) => panic!("{other}"),
    };
    let node = bcow.lookup(ROOT, NodeId::ROOT, name("f")).expect("it has a name").node;
    let handle = bcow.open(ROOT, node, OpenFlags::READ_WRITE).expect("opened");
    let mut buffer = vec![0; 100_000];
    for offset in [0, 4000, 1 << 20, 3 << 20, (8 << 20) - 100, 1 << 40] {
        note(bcow.read(ROOT, handle, offset, &mut buffer).err().map(|error| error.errno()));
    }
    note(bcow.seek(ROOT, handle, 0, SeekTo::Data).err().map(|error| error.errno()));
    note(bcow.seek(ROOT, handle, 0, SeekTo::Hole).err().map(|error| error.errno()));
    note(bcow.write(ROOT, handle, 2 << 20, b"x").err().map(|error| error.errno()));
    let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
    note(bcow.fallocate(ROOT, handle, punch, 1 << 20, 4096).err().map(|error| error.errno()));
    note(bcow.fsync(ROOT, handle, Durability::All).err().map(|error| error.errno()));
    for size in [5 << 20, 20 << 20, 0] {
        let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
        note(bcow.setattr(ROOT, node, &changes, Some(handle)).err().map(|error| error.errno()));
    }
    bcow.release(handle);
    met
}

#[test]
fn damage_is_an_error_of_the_file() {
    let mut random = Random(1);
    let mut met = 0;
    const ROUNDS: u32 = 3000;
    for round in 0..ROUNDS {
        let layout = [Layout::Performance, Layout::Space][round as usize % 2];
        let few = round % 4 < 2;
        let (mut record, mut bytes) = stored(layout, few);
        for _ in 0..=random.below(3) {
            let target = if random.below(if few { 2 } else { 4 }) == 0 { &mut record } else { &mut bytes };
            let table = target.len().min(4096) as u64;
            let among = [table, target.len() as u64][random.below(2) as usize];
            let at = random.below(among.max(1)) as usize;
            match random.below(3) {
                0 if !target.is_empty() => target[at] ^= 1 << random.below(8),
                1 => target.truncate(at),
                _ => {
                    let end = target.len().min(at + 600);
                    target[at..end].iter_mut().for_each(|byte| *byte = random.below(256) as u8);
                }
            }
        }
        if random.below(2) == 0 {
            seal(&mut record);
        }
        let memory = disk(&record, &bytes);
        met += u32::from(use_it(&*layer(memory, layout, Files::Grown)));
        let memory = disk(&record, &bytes);
        let bcow = layer(memory, layout, Files::Grown);
        if let Err(error) = bcow.repair(node(&*bcow, "f")) {
            assert_eq!(error.errno(), Errno::EIO);
        }
        let _ = use_it(&*bcow);
    }
    assert!(met > ROUNDS / 4, "damage was met {met} times");
}

#[test]
fn a_sound_file_has_no_damage() {
    for layout in [Layout::Performance, Layout::Space] {
        for few in [true, false] {
            let (mut record, bytes) = stored(layout, few);
            seal(&mut record);
            assert!(!use_it(&*layer(disk(&record, &bytes), layout, Files::Grown)));
        }
    }
}

#[test]
fn a_record_with_places_that_cannot_be_is_damage_and_says_what() {
    let (sound, bytes) = stored(Layout::Space, true);
    let number = |record: &[u8], at: usize| u32::from_le_bytes(record[at..at + 4].try_into().expect("four bytes"));
    let put = |record: &mut Vec<u8>, at: usize, value: u32| record[at..at + 4].copy_from_slice(&value.to_le_bytes());
    // Place 1 is at 72: its unit, and its block at 76.
    type Change<'a> = &'a dyn Fn(&mut Vec<u8>);
    let wrong: [(Change<'_>, &str); 8] = [
        (&|record| put(record, 72, number(record, 64)), "names unit 0 behind unit 0"),
        (&|record| put(record, 64, 1 << 29), "names unit"),
        (&|record| put(record, 76, 0), "at block 0"),
        (&|record| put(record, 76, number(record, 68)), "two units in block"),
        (&|record| put(record, 76, 1 << 20), "behind its end"),
        (&|record| record.truncate(72), "bytes for 5 places"),
        (&|record| record.extend([0; 8]), "bytes for 5 places"),
        (&|record| record[7] = 2, "bytes for 5 places"),
    ];
    for (change, cause) in wrong {
        let mut record = sound.clone();
        change(&mut record);
        seal(&mut record);
        let bcow = layer(disk(&record, &bytes), Layout::Space, Files::Grown);
        let error = bcow.read(ROOT, open(&*bcow, "f"), 0, &mut [0; 10]).expect_err(cause);
        assert_eq!(error.errno(), Errno::EIO);
        assert!(error.to_string().contains(cause), "{cause}: {error}");
    }
    let mut record = sound;
    record[80] ^= 1;
    let bcow = layer(disk(&record, &bytes), Layout::Space, Files::Grown);
    let error = bcow.read(ROOT, open(&*bcow, "f"), 0, &mut [0; 10]).expect_err("a wrong sum");
    assert!(error.to_string().contains("checksum"), "{error}");
}

#[test]
fn a_record_of_64_bytes_with_a_table_is_read_as_ever() {
    // Unit 3 at block 1, by a table in block 0.
    let tag = 5_u64;
    let mut record = vec![0; 64];
    record[..8].copy_from_slice(b"PFBC\x01\0\x0c\x01");
    record[8..16].copy_from_slice(&tag.to_le_bytes());
    record[16..24].copy_from_slice(&(1_u64 << 20).to_le_bytes());
    record[24..32].fill(0xff);
    record[36] = 1;
    seal(&mut record);
    let sealed = |place: u64, bytes: &[u8]| {
        let crc = [tag, 0, place].iter().fold(0, |crc, part| crc32c::crc32c_append(crc, &part.to_le_bytes()));
        crc32c::crc32c_append(crc, bytes).to_le_bytes()
    };
    let mut bytes = vec![0; 8192];
    bytes[24] = 1;
    let seal_of_entry = sealed(3, &bytes[24..28]);
    bytes[28..32].copy_from_slice(&seal_of_entry);
    bytes[504..508].copy_from_slice(b"PFBT");
    let seal_of_sector = sealed(504, &bytes[..504]);
    bytes[508..512].copy_from_slice(&seal_of_sector);
    bytes[4096..].fill(9);
    let memory = disk(&record, &bytes);
    let bcow = layer(memory.clone(), Layout::Space, Files::Grown);
    let handle = open(&*bcow, "f");
    assert_eq!(read(&*bcow, handle, 3 * 4096 - 1, 4098), [&[0][..], &[9; 4096], &[0]].concat());
    write(&*bcow, handle, 0, b"more");
    sync(&*bcow, handle);
    assert_eq!(stored_levels(&*memory, "f"), (1, 0), "what has a table keeps it");
    bcow.release(handle);
    drop(bcow);
    let bcow = layer(memory, Layout::Space, Files::Grown);
    assert_eq!(read(&*bcow, open(&*bcow, "f"), 0, 5), b"more\0");
}
