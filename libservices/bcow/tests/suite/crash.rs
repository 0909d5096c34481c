//! Power is cut after every single change of the layer below, and the sector that was being written is torn; what the file then shows has
//! to be an allowed state, and what was synced is there.

use crate::support::*;
use poolfs_bcow::Layout;
use poolfs_libservice::types::{AllocateMode, HandleId, NodeId, OpenFlags};
use poolfs_libservice::{Libservice, Memory, Recorder};
use std::sync::Arc;

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

/// One random change; the new content, and what is certain then.
fn step(bcow: &dyn Libservice, handle: HandleId, random: &mut Random, content: &[u8]) -> (Vec<u8>, Certain) {
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
            let size = SECTOR as u64 * random.below(SIZE_MAX / SECTOR as u64);
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
            let most = [40, 400, SIZE_MAX / SECTOR as u64 - 300][random.below(3) as usize];
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

#[test]
fn content_survives_as_promised() {
    for seed in 0..24_u64 {
        let layout = [Layout::Performance, Layout::Space][seed as usize % 2];
        let recorder = Recorder::new();
        let bcow = layer(recorder.clone(), layout, Files::All);
        let mut random = Random(seed);
        let handle = create(&*bcow, "f");
        let made = recorder.len();
        let mut history = vec![Vec::new()];
        let mut states = vec![(made, made, history.clone())];
        for _ in 0..30 {
            let before = recorder.len();
            let (content, certain) = step(&*bcow, handle, &mut random, history.last().expect("some"));
            history.push(content.clone());
            states.push((before, recorder.len(), history.clone()));
            match certain {
                Certain::Nothing => continue,
                Certain::Content => history = vec![content],
                Certain::Size => history.iter_mut().for_each(|before| before.resize(content.len(), 0)),
            }
            states.push((recorder.len(), recorder.len(), history.clone()));
        }
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
