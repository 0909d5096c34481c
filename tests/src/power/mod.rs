//! Power cuts at a block device, and what a filesystem may show afterwards.
//!
//! [`RecordingDevice`] records every write and every barrier of the disk below an upper branch. [`images_after_cuts`] derives from them
//! what a power cut leaves. [`World`] does random operations and notes at which point of the recording each began and ended, so that it can
//! say of any cut what must be there and what may be. [`PROGRAMS`] replace files, mostly without syncing them.

mod content;
mod cut;
mod disk;
mod file;
mod names;
mod operations;
mod programs;
mod recording_device;
mod world;

pub use content::Content;
pub use cut::{Cut, images_after_cuts};
pub use disk::{Disk, empty_disk};
pub use programs::{PROGRAMS, Program, Until, contents};
pub use recording_device::{Event, RecordingDevice};
pub use world::World;

/// Random numbers that are the same for the same seed.
pub struct Random(u64);

impl Random {
    /// Begins with a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `end`; 0 if that is 0. (`splitmix64`, by Steele, Lea and Flood.)
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % end.max(1) as u64) as usize
    }

    /// Whether something happens that does in `percent` of all cases.
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// So many bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.below(256) as u8).collect()
    }
}
