//! Concurrency tests: many threads on the same files. No call waits forever, nothing is lost, and the lower branch stays
//! unchanged.

use crate::script;
use crate::support::*;
use poolfs_libservice::types::{NodeId, OpenFlags, RenameFlags};
use poolfs_libservice::{Durability, Libservice, Memory};
use poolfs_union::{Lower, Union, UnionConfig};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const BLOCKS: u64 = 64;
const BLOCK: u64 = 4096;

#[test]
fn writers_readers_syncs_and_renames_at_once() {
    let branches = Branches::empty(1);
    put(&*branches.lowers[0], "f", &vec![1; (BLOCKS * BLOCK) as usize]);
    mkdir(&*branches.lowers[0], "d");
    put(&*branches.lowers[0], "d/x", b"x");
    let before = fingerprint(&*branches.lowers[0]);
    let lowers = vec![Lower {
        layer_id: "layer-0".into(),
        layer: branches.lowers[0].clone() as Arc<dyn Libservice>,
        is_union: false,
    }];
    let config =
        UnionConfig { flush_interval: Duration::from_millis(5), ..UnionConfig::new(branches.upper.clone(), lowers) };
    let union = Union::open(config).unwrap();
    let file = node(&*union, "f").unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Each writer owns every fourth block, and writes its half of it in two steps.
        for writer in 0..4u64 {
            let (union, stop) = (&union, &stop);
            scope.spawn(move || {
                let handle = union.open(ROOT, file, OpenFlags::READ_WRITE).unwrap();
                let mut round = 0;
                while !stop.load(Ordering::Relaxed) || round < BLOCKS / 4 {
                    let block = (round * 4 + writer) % BLOCKS;
                    let offset = block * BLOCK + 100;
                    union.write(ROOT, handle, offset, &[writer as u8 + 10; 1000]).unwrap();
                    let mut seen = [0; 1102];
                    union.read(ROOT, handle, offset - 1, &mut seen).unwrap();
                    assert_eq!(
                        (seen[0], seen[1], seen[1000], seen[1001]),
                        (1, writer as u8 + 10, writer as u8 + 10, 1)
                    );
                    if round % 9 == writer {
                        union.fsync(ROOT, handle, Durability::Data).unwrap();
                    }
                    round += 1;
                }
                union.release(handle);
            });
        }
        let (union, stop) = (&union, &stop);
        scope.spawn(move || {
            let mut names = ("d", "e");
            while !stop.load(Ordering::Relaxed) {
                let (old, new) = (name(names.0), name(names.1));
                union.rename(ROOT, NodeId::ROOT, old, NodeId::ROOT, new, RenameFlags::empty()).unwrap();
                names = (names.1, names.0);
                assert_eq!(get(&**union, &format!("{}/x", names.0)).unwrap(), b"x");
                assert_eq!(ls(&**union, "").len(), 2);
            }
        });
        let end = Instant::now() + Duration::from_millis(700);
        while Instant::now() < end {
            assert_eq!(union.getattr(ROOT, file).unwrap().size, BLOCKS * BLOCK);
            union.sync().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    let content = get(&*union, "f").unwrap();
    close(union);
    assert_eq!(get(&*branches.open(), "f").unwrap(), content);
    for block in 0..BLOCKS {
        let at = (block * BLOCK) as usize;
        assert_eq!((content[at], content[at + 100], content[at + 1100]), (1, (block % 4) as u8 + 10, 1));
    }
    assert_eq!(fingerprint(&*branches.lowers[0]), before);
}

/// Changes a layer at random by four threads, each in so many steps. None may wait for ever.
pub fn change_at_once(layer: &Arc<dyn Libservice>, seed: u64, steps: u64) {
    let (told, ended) = std::sync::mpsc::channel();
    for thread in 0..4 {
        let (layer, told) = (layer.clone(), told.clone());
        std::thread::spawn(move || {
            let mut script = script::Script::new(seed * 10 + thread);
            for step in 0..steps {
                script.step(&*layer);
                if step % 50 == thread {
                    layer.sync().unwrap();
                }
            }
            script.forget(&*layer);
            drop(layer);
            let _ = told.send(());
        });
    }
    for _ in 0..4 {
        ended.recv_timeout(Duration::from_secs(60)).expect("no thread panics or waits for ever");
    }
}

/// Threads that change the same few names and files at random, while the flusher runs: none waits for ever, and what is left is
/// whole, and the same after a remount.
#[test]
fn random_changes_at_once_leave_a_whole_tree() {
    for seed in 0..20u64 {
        let lower = script::lower();
        let upper = Memory::new();
        let lowers =
            vec![Lower { layer_id: "layer-0".into(), layer: lower.clone() as Arc<dyn Libservice>, is_union: false }];
        let config = UnionConfig {
            flush_interval: Duration::from_millis(1),
            dirty_sketches_max: 2,
            ..UnionConfig::new(upper.clone(), lowers)
        };
        let union = Union::open(config).unwrap();
        change_at_once(&(union.clone() as Arc<dyn Libservice>), seed, 400);
        let what = format!("seed {seed}");
        let shown = script::tree(&*union, &what);
        close(union);
        let union = open_over(upper.clone(), std::slice::from_ref(&lower)).unwrap();
        assert_eq!(script::tree(&*union, &what), shown, "{what}: after a remount");
        script::remove_all(&*union, &what);
        script::nothing_left(&*upper, &what);
    }
}
