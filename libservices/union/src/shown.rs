//! What clients that read a sketch by themselves see of its map: in which of the two files each block is.
//!
//! Written under the lock of the file's state only. A block that is in neither alone (in transit, or cut by a truncation) is asked
//! for.

use poolfs_ipc::segment::{BLOCK, CAPACITY_MAX, Place, SegmentMap, map_length};
use poolfs_libservice::{Error, Result, fail};
use poolfs_types::Errno;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

const _: () = assert!(BLOCK == crate::sketch::BLOCK);

/// Makes files of so many zeros that clients can be shown: the file, and a descriptor of it that nobody can write by. Nothing
/// when clients cannot be shown any.
pub type SharedMemory = Arc<dyn Fn(u64) -> io::Result<Option<(File, OwnedFd)>> + Send + Sync>;

/// The map. Dropped, it ends for all who read by it.
pub(crate) struct Shown {
    map: SegmentMap,
    reader: OwnedFd,
}

impl Shown {
    /// Of a sketch with so many blocks that may be in the lower file.
    pub fn new(
        shared_memory: &SharedMemory,
        blocks: u64,
        is_base: impl Fn(u64) -> bool,
        is_moved: impl Fn(u64) -> bool,
    ) -> Result<Self> {
        // Those behind the map's end are behind the end of what is read without asking, too.
        let capacity = blocks.clamp(1, CAPACITY_MAX);
        let Some((file, reader)) = shared_memory(map_length(capacity) as u64).map_err(failure)? else {
            return fail(Errno::EOPNOTSUPP);
        };
        let map = SegmentMap::new(&file, capacity)?;
        for block in 0..capacity {
            if block >= blocks || is_moved(block) {
                map.publish(block, Place::Resident);
            } else if is_base(block) {
                map.publish(block, Place::Base);
            }
        }
        Ok(Self { map, reader })
    }

    /// These blocks are in the upper file, whole.
    pub fn moved(&self, blocks: Range<u64>) {
        for block in blocks.start..blocks.end.min(self.map.capacity()) {
            self.map.publish(block, Place::Resident);
        }
    }

    /// This block has to be asked for.
    pub fn hide(&self, block: u64) {
        self.map.retract(block..block + 1);
    }

    /// Its blocks.
    pub fn blocks(&self) -> u64 {
        self.map.capacity()
    }

    /// A descriptor for clients.
    pub fn reader(&self) -> Result<OwnedFd> {
        self.reader.try_clone().map_err(failure)
    }
}

fn failure(error: io::Error) -> Error {
    let errno = error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
    Error::new(errno, format!("memory to show clients a sketch: {error}"))
}
