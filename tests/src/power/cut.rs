//! The model of a power cut: which of the writes to a disk survive it.
//!
//! All writes before the last barrier survive. Of the writes after it each may survive, be missing, or survive in some of its sectors; the
//! one in progress at that moment ends at any byte, even within a sector. Exempt are blocks of ext4 that have a checksum and that it reads
//! before its journal could repair them, and blocks of the journal itself other than copies of blocks: the superblock, the group
//! descriptors behind it, and the journal's own records. A disk that tears the sectors of those is beyond what any filesystem on it can
//! repair.

use super::{Content, Event, Random};

const SECTOR_BYTES: usize = 512;
/// ext4's superblock begins here, whatever the size of its blocks.
const SUPERBLOCK: usize = 1024;
/// What blocks of the journal begin with that are no copies (`JBD2_MAGIC_NUMBER`).
const JOURNAL_MAGIC: [u8; 4] = [0xc0, 0x3b, 0x39, 0x98];

/// When the power is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cut {
    /// so many events have been issued
    pub position: usize,
    /// decides what has become of those no barrier has waited for
    pub seed: u64,
}

/// Makes of the disk's first content and of what was done to it the content after each cut, which are in the order of their positions.
pub fn images_after_cuts(first: &Content, events: &[Event], cuts: &[Cut], mut see: impl FnMut(Cut, Content)) {
    let block_bytes = 1024 << first.read(SUPERBLOCK + 24, 1)[0];
    let mut durable = first.clone();
    let mut done = 0;
    for &cut in cuts {
        let issued = &events[..cut.position];
        let barrier = issued.iter().rposition(|event| matches!(event, Event::Flush)).map_or(0, |at| at + 1);
        for event in &events[done..barrier] {
            if let Event::Write(offset, data) = event {
                durable.write(*offset, data);
            }
        }
        done = barrier;
        let mut image = durable.clone();
        Loss { random: Random::new(cut.seed), block_bytes }.apply(&mut image, &issued[barrier..]);
        see(cut, image);
    }
}

struct Loss {
    random: Random,
    block_bytes: usize,
}

impl Loss {
    fn apply(&mut self, image: &mut Content, pending: &[Event]) {
        // Some disks lose nearly everything, some hardly anything.
        let percent = [0, 15, 50, 85, 100][self.random.below(5)];
        let mut last = None;
        for event in pending {
            if let Event::Write(offset, data) = event
                && self.random.chance(percent)
            {
                // The one before is known not to be the last.
                if let Some((offset, data)) = last.replace((*offset, data)) {
                    self.write(image, offset, data);
                }
            }
        }
        if let Some((offset, data)) = last {
            let end = self.random.below(data.len()) + 1;
            let (whole, torn) = data.split_at(end - end % self.block_bytes);
            image.write(offset, whole);
            let at = offset + whole.len();
            let is_whole = self.is_spared(at, torn);
            let end = if is_whole { torn.len().min(self.block_bytes) } else { end % self.block_bytes };
            image.write(at, &torn[..end]);
        }
    }

    /// Writes all of it, or, in one case of four, some sectors of it.
    fn write(&mut self, image: &mut Content, offset: usize, data: &[u8]) {
        let is_partial = self.random.chance(25);
        for (number, block) in data.chunks(self.block_bytes).enumerate() {
            let at = offset + number * self.block_bytes;
            let unit = if self.is_spared(at, block) { self.block_bytes } else { SECTOR_BYTES };
            for (number, part) in block.chunks(unit).enumerate() {
                if !is_partial || self.random.chance(50) {
                    image.write(at + number * unit, part);
                }
            }
        }
    }

    fn is_spared(&self, at: usize, block: &[u8]) -> bool {
        // The descriptors of a disk as small as those of tests have one block.
        let superblock = SUPERBLOCK / self.block_bytes;
        (superblock..=superblock + 1).contains(&(at / self.block_bytes)) || block.starts_with(&JOURNAL_MAGIC)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_barrier_has_waited_for_is_there_and_the_rest_may_be() {
        let mut first = vec![0; 1 << 16];
        first[SUPERBLOCK + 24] = 2;
        let write = |offset: usize, with: u8| Event::Write(offset, vec![with; 8192]);
        let events = [write(8192, 1), Event::Flush, write(8192, 2), write(32768, 3), write(40960, 4)];
        let cuts: Vec<Cut> = (0..200).map(|seed| Cut { position: 1 + seed as usize / 50, seed }).collect();
        let (mut torn, mut lost) = (0, 0);
        images_after_cuts(&Content::new(&first), &events, &cuts, |cut, image| {
            let image = image.read(0, 1 << 16);
            let parts = [&image[8192..16384], &image[32768..40960], &image[40960..49152]];
            if cut.position >= 2 {
                assert!(parts[0].iter().all(|&byte| byte == 1 || byte == 2 && cut.position > 2), "{cut:?}");
            }
            assert!(image[..8192].iter().sum::<u8>() == 2 && parts[2].iter().all(|&byte| byte == 0), "{cut:?}");
            assert!(cut.position == 4 || parts[1].iter().all(|&byte| byte == 0), "{cut:?}");
            let there = parts[1].iter().filter(|&&byte| byte == 3).count();
            torn += u32::from(!there.is_multiple_of(SECTOR_BYTES));
            lost += u32::from(cut.position == 4 && there == 0);
        });
        assert!(torn > 10 && lost > 5, "{torn} torn, {lost} lost");
    }

    #[test]
    fn the_superblock_and_records_of_the_journal_are_whole() {
        let mut first = vec![0; 1 << 16];
        first[SUPERBLOCK + 24] = 2;
        let mut record = vec![9; 4096];
        record[..4].copy_from_slice(&JOURNAL_MAGIC);
        let events = [Event::Write(0, vec![2; 4096]), Event::Write(8192, record.clone())];
        let cuts: Vec<Cut> = (0..200).map(|seed| Cut { position: 1 + seed as usize / 100, seed }).collect();
        images_after_cuts(&Content::new(&first), &events, &cuts, |cut, image| {
            let image = image.read(0, 1 << 16);
            let superblock = &image[..4096];
            assert!(superblock == [2; 4096] || superblock.iter().filter(|&&byte| byte != 0).count() == 1, "{cut:?}");
            assert!(image[8192..12288] == record || image[8192..12288] == [0; 4096], "{cut:?}");
        });
    }
}
