//! Test of how much is read to find a block in a file that has not been opened before.

use crate::support::*;
use poolfs_bcow::Layout;
use poolfs_libservice::types::{Caller, HandleId, NodeId};
use poolfs_libservice::{Branch, Filter, Libservice, Memory, ReadTarget};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const BLOCK: u64 = 4096;
const SIZE: u64 = 40 << 30;

/// A layer that counts the bytes that are read.
pub struct Counting {
    below: Branch,
    bytes: AtomicU64,
}

impl Counting {
    pub fn over(below: Branch) -> Arc<Self> {
        Arc::new(Counting { below, bytes: AtomicU64::new(0) })
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Filter for Counting {
    fn below(&self) -> &dyn Libservice {
        &*self.below
    }

    fn read_into(
        &self,
        caller: &Caller,
        handle: HandleId,
        offset: u64,
        target: &mut dyn ReadTarget,
    ) -> poolfs_libservice::Result<usize> {
        let count = self.below.read_into(caller, handle, offset, target)?;
        self.bytes.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

#[test]
fn a_block_of_a_file_of_40_gib_is_found_by_the_root_and_one_table() {
    let memory = Memory::new();
    let bcow = layer(memory.clone(), Layout::Space, Files::Grown);
    let handle = create(&*bcow, "f");
    resize(&*bcow, "f", SIZE);
    // Some units of every table.
    let stride = 701 * BLOCK;
    for offset in (0..SIZE).step_by(stride as usize) {
        write(&*bcow, handle, offset, b"x");
    }
    sync(&*bcow, handle);
    bcow.release(handle);
    drop(bcow);
    assert_eq!(stored_levels(&*memory, "f").0, 2);
    let record = memory.getxattr(ROOT, node(&*memory, "f"), ATTRIBUTE).expect("a record");
    let root = u64::from(u32::from_le_bytes(record[36..40].try_into().expect("four bytes"))) * BLOCK;
    assert!(root < 256 << 10, "{root} bytes for the places of 10,403 tables");
    let counting = Counting::over(memory);
    let bcow = usual(counting.clone());
    let handle = open(&*bcow, "f");
    for (number, offset) in [stride * 5000, stride * 10].into_iter().enumerate() {
        assert_eq!(read(&*bcow, handle, offset, 1), b"x");
        let most = root + (number as u64 + 1) * 2 * BLOCK;
        let bytes = counting.bytes();
        assert!(bytes <= most, "{bytes} bytes were read for {} blocks, of at most {most}", number + 1);
    }
    assert_eq!(bcow.lookup(ROOT, NodeId::ROOT, name("f")).expect("there").attributes.size, SIZE);
}
