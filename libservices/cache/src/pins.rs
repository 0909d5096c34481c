//! The bound on pinned memory: whole files that the kernel or other processes map. Their memory cannot be evicted before the
//! kernel has released it.

use crate::sync::lock;
use std::any::Any;
use std::sync::{Arc, Mutex};

/// One part in so many of the cache may be pinned.
const PART: u64 = 4;
/// And of that, one part in so many by a single file.
const FILE_PART: u64 = 2;
/// Most files pinned at a time.
const FILES_MAX: u64 = 4096;

#[derive(Default)]
struct Taken {
    bytes: u64,
    files: u64,
}

/// What is pinned, and how much may be.
pub(crate) struct Pins {
    bytes_max: u64,
    taken: Mutex<Taken>,
}

/// Why nothing can be pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// it never can
    TooLarge,
    /// others have taken the room
    NoRoom,
}

/// What keeps all of a file's content in a segment of its own.
pub(crate) trait Pinned: Any + Send + Sync {
    /// How many bytes that is.
    fn bytes(&self) -> u64;

    /// What tells the file from all others that are pinned.
    fn file(&self) -> usize;

    /// What tells the layer of the file from all others.
    fn layer(&self) -> usize;

    /// Whether anybody has what is pinned open or mapped.
    fn is_used(&self) -> bool;

    /// No process has it any more.
    fn let_go(&self);
}

/// The room of one file; given back when dropped.
pub(crate) struct Permit {
    pins: Arc<Pins>,
    bytes: u64,
}

impl Pins {
    /// Those of a cache of so many bytes.
    pub(crate) fn new(limit_bytes: u64) -> Arc<Self> {
        Arc::new(Self { bytes_max: limit_bytes / PART, taken: Mutex::default() })
    }

    /// Room for a file of so many bytes.
    pub(crate) fn take(self: &Arc<Self>, bytes: u64) -> Result<Permit, Refusal> {
        if bytes > self.bytes_max / FILE_PART {
            return Err(Refusal::TooLarge);
        }
        let mut taken = lock(&self.taken);
        if taken.bytes + bytes > self.bytes_max || taken.files >= FILES_MAX {
            return Err(Refusal::NoRoom);
        }
        taken.bytes += bytes;
        taken.files += 1;
        Ok(Permit { pins: Arc::clone(self), bytes })
    }

    /// Bytes that are pinned.
    pub(crate) fn bytes(&self) -> u64 {
        lock(&self.taken).bytes
    }

    /// Most bytes that may be.
    pub(crate) fn bytes_max(&self) -> u64 {
        self.bytes_max
    }
}

impl Permit {
    /// How many bytes it is for.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut taken = lock(&self.pins.taken);
        taken.bytes -= self.bytes;
        taken.files -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_bytes_are_bounded_and_given_back() {
        let pins = Pins::new(64 << 20);
        assert_eq!(pins.take((8 << 20) + 1).err(), Some(Refusal::TooLarge));
        let first = pins.take(8 << 20).expect("room");
        let second = pins.take(8 << 20).expect("room");
        assert_eq!((pins.bytes(), pins.take(1).err()), (pins.bytes_max(), Some(Refusal::NoRoom)));
        drop(first);
        assert!(pins.take((8 << 20) + 1).is_err() && pins.take(8 << 20).is_ok());
        drop(second);
        assert_eq!(pins.bytes(), 0);
    }

    #[test]
    fn pinned_files_are_bounded() {
        let pins = Pins::new(64 << 20);
        let taken: Vec<_> = (0..FILES_MAX).map(|_| pins.take(1).expect("room")).collect();
        assert_eq!(pins.take(1).err(), Some(Refusal::NoRoom));
        drop(taken);
        assert!(pins.take(1).is_ok());
    }
}
