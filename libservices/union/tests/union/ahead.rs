//! Tests of blocks that move ahead of a writer that syncs in small steps.

use crate::hooked::{Call, Hooked};
use crate::support::*;
use poolfs_libservice::types::OpenFlags;
use poolfs_libservice::{Durability, Libservice, Memory};
use poolfs_union::{Lower, Union, UnionConfig};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const BLOCK: usize = 4096;
const BLOCKS: usize = 200;

#[test]
fn a_log_that_is_overwritten_and_synced_needs_one_sync_of_the_branch_and_stays_what_it_is() {
    let lower = Memory::new();
    let mut content: Vec<u8> = (0..BLOCKS * BLOCK + 100).map(|at| (at / 1000) as u8).collect();
    // Zeros are room as well.
    content[90 * BLOCK..110 * BLOCK].fill(0);
    put(&*lower, "log", &content);
    let upper = Hooked::over(Memory::new());
    let syncs = Arc::new(AtomicU64::new(0));
    let count = syncs.clone();
    upper.hook(move |call| {
        if call == Call::SyncFile {
            count.fetch_add(1, Ordering::SeqCst);
        }
        Ok(())
    });
    let open_union = || {
        let lowers = vec![Lower { layer_id: "layer-0".into(), layer: lower.clone(), is_union: false }];
        let config = UnionConfig { flush_interval: Duration::ZERO, ..UnionConfig::new(upper.clone(), lowers) };
        Union::open(config).expect("the union opens")
    };
    let union = open_union();
    let handle = open(&*union, "log", OpenFlags::READ_WRITE).unwrap();
    let mut steps = 0;
    for offset in (3 * BLOCK + 512..BLOCKS * BLOCK - 512).step_by(3000) {
        assert_eq!(union.write(ROOT, handle, offset as u64, &[steps as u8; 512]).unwrap().count, 512);
        content[offset..offset + 512].fill(steps as u8);
        let written = stat(&*union, "log");
        union.fsync(ROOT, handle, Durability::Data).unwrap();
        let synced = stat(&*union, "log");
        assert_eq!((synced.modified, synced.changed, synced.size), (written.modified, written.changed, written.size));
        steps += 1;
    }
    let syncs = syncs.load(Ordering::SeqCst);
    assert!(syncs < steps + 40, "{syncs} syncs of the branch for {steps}");
    assert!(get(&*union, "log").unwrap() == content);
    union.release(handle);
    close(union);
    let union = open_union();
    assert!(get(&*union, "log").unwrap() == content);
    close(union);
}

#[test]
fn what_is_synced_here_and_there_has_no_block_moved_that_was_not_written() {
    let branches = Branches::empty(1);
    put(&*branches.lowers[0], "data", &vec![7; BLOCKS * BLOCK]);
    let union = branches.open();
    let handle = open(&*union, "data", OpenFlags::READ_WRITE).unwrap();
    for (step, block) in [50, 20, 120, 3, 90, 91].into_iter().enumerate() {
        let _ = union.write(ROOT, handle, (block * BLOCK) as u64 + 9, b"x").unwrap();
        union.fsync(ROOT, handle, Durability::All).unwrap();
        let moved = union.statistics().blocks_moved;
        // The last is the first that goes on where the one before has ended.
        assert_eq!(moved, if block == 91 { 6 + 4 } else { step as u64 + 1 });
    }
    union.release(handle);
    close(union);
}
