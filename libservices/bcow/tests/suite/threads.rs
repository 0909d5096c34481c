//! Concurrency tests: several threads use one compact file while it is flushed.

use crate::support::*;
use poolfs_bcow::Layout;
use poolfs_libservice::types::AllocateMode;
use poolfs_libservice::{Libservice, Memory};
use poolfs_local::{Local, LocalOptions};
use std::sync::atomic::{AtomicBool, Ordering};

const BLOCK: u64 = 4096;
const THREADS: u64 = 4;
/// Blocks of a file: one that never has tables, some that get one while they are used, and one that has some early.
const BLOCKS: [u64; 4] = [36, 44, 60, 1200];

/// Writes, reads and punches the blocks that are this thread's; what the last change of each left in it.
fn change(bcow: &dyn Libservice, count: u64, number: u64) -> Vec<(u64, u8)> {
    let mut random = Random(number);
    let handle = open(bcow, "f");
    let mut blocks: Vec<(u64, u8)> =
        (0..count).filter(|block| block % THREADS == number).map(|block| (block, 0)).collect();
    for round in 0..if count > 1000 { 3000 } else { 1000 } {
        // What is let go is there again after that: the room taken depends on nobody's speed.
        if round % 100 == 99 {
            bcow.sync().expect("synced");
        }
        let chosen = random.below(blocks.len() as u64) as usize;
        let (block, fill) = &mut blocks[chosen];
        match random.below(4) {
            0 => {
                let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
                bcow.fallocate(ROOT, handle, punch, *block * BLOCK, BLOCK).expect("punched");
                *fill = 0;
            }
            1 => assert_eq!(read(bcow, handle, *block * BLOCK, BLOCK as usize), vec![*fill; BLOCK as usize]),
            _ => {
                *fill = 1 + random.below(255) as u8;
                write(bcow, handle, *block * BLOCK, &vec![*fill; BLOCK as usize]);
            }
        }
    }
    bcow.release(handle);
    blocks
}

#[test]
fn threads_do_not_lose_each_others_blocks() {
    let layouts = [Layout::Performance, Layout::Space];
    for (layout, count) in layouts.into_iter().flat_map(|layout| BLOCKS.map(|count| (layout, count))) {
        let memory = Memory::new();
        let bcow = layer(memory.clone(), layout, Files::Grown);
        let handle = create(&*bcow, "f");
        resize(&*bcow, "f", count * BLOCK);
        let done = AtomicBool::new(false);
        let blocks: Vec<(u64, u8)> = std::thread::scope(|scope| {
            let syncing = scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    bcow.sync().expect("synced");
                }
            });
            let bcow = &bcow;
            let workers: Vec<_> =
                (0..THREADS).map(|number| scope.spawn(move || change(&**bcow, count, number))).collect();
            let blocks = workers.into_iter().flat_map(|worker| worker.join().expect("done")).collect();
            done.store(true, Ordering::Relaxed);
            syncing.join().expect("done");
            blocks
        });
        bcow.release(handle);
        drop(bcow);
        let bcow = layer(memory.clone(), layout, Files::Grown);
        let handle = open(&*bcow, "f");
        for (block, fill) in blocks {
            assert_eq!(
                read(&*bcow, handle, block * BLOCK, BLOCK as usize),
                vec![fill; BLOCK as usize],
                "{layout:?}, {count}: {block}"
            );
        }
        // In a small one more is let go at once than is in use.
        let room = stat(&*memory, "f").size;
        assert!(count < 1000 || room <= 2 * count * BLOCK, "{layout:?}: {room} bytes for {count} blocks");
        let levels = stored_levels(&*memory, "f").0;
        assert!(if count <= INLINE_MAX { levels == 0 } else { count < 1000 || levels > 0 }, "{count}: {levels} levels");
    }
}

/// Ends a thread that goes on until this is set, also when the test fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_file_is_emptied_and_filled_while_it_is_brought_to_disk() {
    for seed in 0..3 {
        // Of which bringing something to disk takes its time.
        let place = tempfile::tempdir().expect("a directory");
        let local = Local::open(place.path(), LocalOptions::default()).expect("opened");
        let bcow = layer(local, Layout::Space, Files::Grown);
        let handle = create(&*bcow, "f");
        resize(&*bcow, "f", 24 << 20);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    sync(&*bcow, handle);
                }
            });
            let _end = End(&done);
            let mut random = Random(seed);
            for round in 0..60_u8 {
                resize(&*bcow, "f", 0);
                resize(&*bcow, "f", 24 << 20);
                let blocks: Vec<u64> = (0..60).map(|_| random.below(6000)).collect();
                for &block in &blocks {
                    write(&*bcow, handle, block * BLOCK, &[round + 1; BLOCK as usize]);
                }
                for &block in &blocks {
                    let seen = read(&*bcow, handle, block * BLOCK, BLOCK as usize);
                    assert_eq!(seen, [round + 1; BLOCK as usize], "seed {seed}, round {round}, block {block}");
                }
            }
        });
        bcow.release(handle);
    }
}
