//! Mapped words in a file of the service's own tmpfs: what one process stores there, another finds after its death.

use crate::area::word;
use crate::memory::Mapping;
use core::sync::atomic::{AtomicU64, Ordering};
use poolfs_types::Errno;
use rustix::fd::AsFd;

/// So many words of a file, mapped.
#[derive(Debug)]
pub struct Words {
    mapping: Mapping,
    count: usize,
}

impl Words {
    /// Maps the first `count` words of a file, which nobody makes shorter.
    ///
    /// # Errors
    /// `EPROTO` for a file that is shorter, `EINVAL` for more words than there are addresses, else those of `mmap(2)`.
    pub fn new(file: impl AsFd, count: usize) -> Result<Self, Errno> {
        let length = count.checked_mul(size_of::<u64>()).ok_or(Errno::EINVAL)?;
        Ok(Self { mapping: Mapping::of_segment(file, length, true)?, count })
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// The word at that place; nothing beyond the last.
    #[must_use]
    pub fn load(&self, at: usize) -> Option<u64> {
        (at < self.count).then(|| self.word(at).load(Ordering::Acquire))
    }

    /// Stores a word, after all that was stored before. Beyond the last one nothing is stored.
    pub fn store(&self, at: usize, value: u64) {
        if at < self.count {
            self.word(at).store(value, Ordering::Release);
        }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        word(&self.mapping, at * size_of::<u64>())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    #[test]
    fn words_are_found_by_the_next_who_maps_the_file() {
        let file = memfd_create(c"test", MemfdFlags::CLOEXEC).expect("a memory file");
        ftruncate(&file, 64).expect("sized");
        assert!(Words::new(&file, 9).is_err(), "the file has eight");
        let words = Words::new(&file, 8).expect("mapped");
        words.store(7, 42);
        words.store(8, 43);
        drop(words);
        let words = Words::new(&file, 8).expect("mapped");
        assert_eq!((words.load(0), words.load(7), words.load(8)), (Some(0), Some(42), None));
    }
}
