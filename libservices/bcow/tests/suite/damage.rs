//! Files of the format with anything wrong in them: whoever uses them gets an error or bytes, and nothing else happens.

use crate::support::*;
use poolfs_bcow::Layout;
use poolfs_libservice::types::{AllocateMode, Errno, NodeId, OpenFlags, SeekTo, SetAttributes, XattrFlags};
use poolfs_libservice::{Durability, Libservice, Memory};
use std::sync::Arc;

const ATTRIBUTE: &[u8] = b"trusted.poolfs.bcow";

/// A file of some regions, as it is stored: its record and its bytes.
fn stored(layout: Layout) -> (Vec<u8>, Vec<u8>) {
    let memory = Memory::new();
    let bcow = layer(memory.clone(), layout, Files::Grown);
    let handle = create(&*bcow, "f");
    resize(&*bcow, "f", 8 << 20);
    for offset in [0, 5000, 1 << 20, 3 << 20, (8 << 20) - 10] {
        write(&*bcow, handle, offset, b"0123456789");
    }
    sync(&*bcow, handle);
    bcow.release(handle);
    drop(bcow);
    let record = memory.getxattr(ROOT, node(&*memory, "f"), ATTRIBUTE).expect("a record");
    let handle = open(&*memory, "f");
    let size = stat(&*memory, "f").size;
    (record, read(&*memory, handle, 0, size as usize))
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
        let (mut record, mut bytes) = stored(layout);
        for _ in 0..=random.below(3) {
            let target = if random.below(4) == 0 { &mut record } else { &mut bytes };
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
        let (record, bytes) = stored(layout);
        assert!(!use_it(&*layer(disk(&record, &bytes), layout, Files::Grown)));
    }
}
