//! The contents that a file may have after a power cut, by what was done to it and what was promised.

use super::content::{BLOCK_BYTES, Content};
use std::collections::HashMap;
use std::ops::{Range, RangeInclusive};

struct Version {
    /// events before the change that made it
    begun: usize,
    content: Content,
}

/// The first change of a block.
#[derive(Clone, Copy)]
struct Moved {
    version: usize,
    /// it was a block of the lower file until then, which is shown as long as not all of it has moved
    from_lower: bool,
}

/// Blocks that a union moves ahead of a writer at most, where it finds that a file grows into its sketch in small steps.
const AHEAD_BLOCKS: usize = 64;
/// From the end of what a step has moved, and of what was moved ahead then, to the end of the next small step.
const STEP_BLOCKS: usize = 16 + AHEAD_BLOCKS;

/// A file with all contents it had.
pub struct FileHistory {
    versions: Vec<Version>,
    /// from an event on, a version is on the disk
    promises: Vec<(usize, usize)>,
    /// bytes of the lower file that can be seen
    limit: usize,
    moved: HashMap<usize, Moved>,
    /// for each change that may have moved blocks, the version it made and where these blocks end
    steps: Vec<(usize, usize)>,
}

impl FileHistory {
    /// A file of a lower branch.
    pub fn of_lower(bytes: &[u8]) -> Self {
        let versions = vec![Version { begun: 0, content: Content::new(bytes) }];
        Self { versions, promises: vec![(0, 0)], limit: bytes.len(), moved: HashMap::new(), steps: Vec::new() }
    }

    /// A file that was made after so many events.
    pub fn made(begun: usize) -> Self {
        let versions = vec![Version { begun, content: Content::default() }];
        Self { versions, promises: Vec::new(), limit: 0, moved: HashMap::new(), steps: Vec::new() }
    }

    /// What it holds now.
    pub fn content(&self) -> &Content {
        &self.versions.last().expect("at least one").content
    }

    /// Bytes were written by an operation that began after so many events.
    pub fn write(&mut self, begun: usize, offset: usize, bytes: &[u8]) {
        self.note_moved(offset, bytes.len());
        self.change(begun, |content| content.write(offset, bytes));
    }

    /// A hole was punched.
    pub fn punch(&mut self, begun: usize, offset: usize, length: usize) {
        let length = length.min(self.content().size().saturating_sub(offset));
        self.note_moved(offset, length);
        self.change(begun, |content| content.punch(offset, length));
    }

    /// It was cut or made longer. Of the block in which the lower file's bytes end from then on the rest is zeros: it moves as it was, for that.
    pub fn truncate(&mut self, begun: usize, size: usize) {
        if size < self.limit && !size.is_multiple_of(BLOCK_BYTES) {
            let moved = Moved { version: self.versions.len() - 1, from_lower: true };
            self.moved.entry(size / BLOCK_BYTES).or_insert(moved);
            self.steps.push((self.versions.len(), size / BLOCK_BYTES + 1));
        }
        self.limit = self.limit.min(size);
        self.change(begun, |content| content.truncate(size));
    }

    fn change(&mut self, begun: usize, change: impl FnOnce(&mut Content)) {
        let mut content = self.content().clone();
        change(&mut content);
        self.versions.push(Version { begun, content });
    }

    fn note_moved(&mut self, offset: usize, length: usize) {
        let version = self.versions.len();
        let blocks_of_lower = self.limit.div_ceil(BLOCK_BYTES);
        let blocks = offset / BLOCK_BYTES..(offset + length).div_ceil(BLOCK_BYTES);
        self.steps.push((version, blocks.end.min(blocks_of_lower)));
        for block in blocks {
            self.moved.entry(block).or_insert(Moved { version, from_lower: block < blocks_of_lower });
        }
    }

    /// Whether this block may have moved, with what the lower file has, before the change that made a version: two steps before that end a
    /// little before it, the second one not far behind the first, which is what a union moves blocks ahead for.
    fn may_have_moved_ahead(&self, number: usize, version: usize) -> bool {
        let before = self.steps.iter().take_while(|(made, _)| *made < version).enumerate();
        before.filter(|(_, (_, end))| (*end..*end + AHEAD_BLOCKS).contains(&number)).any(|(step, (_, end))| {
            self.steps[..step].iter().any(|(_, earlier)| (*earlier..=*earlier + STEP_BLOCKS).contains(end))
        })
    }

    /// Whether this is a block of the first of these versions, without what was cut off since: a truncation can reach the disk before a
    /// write that it came after.
    fn is_cut_of(&self, versions: Range<usize>, number: usize, shown: &[u8]) -> bool {
        let block = self.versions[versions.start].content.block(number);
        let mut least = usize::MAX;
        self.versions[versions].iter().any(|version| {
            least = least.min(version.content.size());
            let cut = least.saturating_sub(number * BLOCK_BYTES).min(shown.len());
            shown[..cut] == block[..cut] && shown[cut..].iter().all(|&byte| byte == 0)
        })
    }

    /// What it holds now is on the disk from so many events on.
    pub fn promise(&mut self, position: usize) {
        self.promises.push((position, self.versions.len() - 1));
    }

    /// The versions of which something may be there when the power is cut after so many events.
    fn candidates(&self, position: usize) -> RangeInclusive<usize> {
        let promised = self.promises.iter().filter(|(from, _)| *from <= position).map(|(_, version)| *version);
        let first = promised.max().unwrap_or(0);
        let begun = self.versions.iter().rposition(|version| version.begun < position);
        first..=begun.unwrap_or(0).max(first)
    }

    /// Whether these bytes may be there when the power is cut after so many events.
    ///
    /// # Errors
    /// What of them may not.
    pub fn check(&self, shown: &[u8], position: usize) -> Result<(), String> {
        let candidates = self.candidates(position);
        let sizes = || self.versions[candidates.clone()].iter().map(|version| version.content.size());
        let (least, most) = (sizes().min().unwrap_or(0), sizes().max().unwrap_or(0));
        if !(least..=most).contains(&shown.len()) {
            return Err(format!("size {} is not within {least} and {most} (versions {candidates:?})", shown.len()));
        }
        for (number, block) in shown.chunks(BLOCK_BYTES).enumerate() {
            self.check_block(number, block, &candidates)
                .map_err(|what| format!("block {number} of {} bytes: {what} (versions {candidates:?})", shown.len()))?;
        }
        Ok(())
    }

    /// A block that was the lower file's at the last promise is wholly as before its move, or made of what it was since.
    /// Of any other block, and of one that was perhaps moved ahead of its writer, each byte is one that it had.
    fn check_block(&self, number: usize, shown: &[u8], candidates: &RangeInclusive<usize>) -> Result<(), String> {
        let (first, end) = (*candidates.start(), *candidates.end() + 1);
        let (of_lower, mixed) = match self.moved.get(&number) {
            None => (first..end, end..end),
            Some(moved) if moved.from_lower && moved.version > first => {
                let from =
                    if self.may_have_moved_ahead(number, moved.version) { first } else { moved.version.min(end) };
                (first..moved.version.min(end), from..end)
            }
            Some(_) => (first..first, first..end),
        };
        if { of_lower }.any(|version| self.is_cut_of(version..end, number, shown)) {
            return Ok(());
        }
        let stranger = shown.iter().enumerate().find(|&(at, byte)| {
            !self.versions[mixed.clone()].iter().any(|version| version.content.block(number)[at] == *byte)
        });
        stranger.map_or(Ok(()), |(at, byte)| {
            let wanted: Vec<u8> =
                self.versions[first..end].iter().map(|version| version.content.block(number)[at]).collect();
            let unlike: Vec<Range<usize>> = self.versions[first..end].iter().map(|version| unlike(shown, version.content.block(number))).collect();
            Err(format!(
                "byte {at} is {byte:#04x}, but was {wanted:02x?}; mixed may be versions {mixed:?}; bytes unlike each version are within {unlike:?}"
            ))
        })
    }
}

/// From the first to the last byte that differs.
fn unlike(shown: &[u8], block: &[u8]) -> Range<usize> {
    let differs = |&at: &usize| shown[at] != block[at];
    let first = (0..shown.len()).find(differs).unwrap_or(0);
    first..(0..shown.len()).rev().find(differs).map_or(first, |last| last + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOWER: [u8; 3 * BLOCK_BYTES] = [7; 3 * BLOCK_BYTES];

    fn with(mut content: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
        content[at..at + bytes.len()].copy_from_slice(bytes);
        content
    }

    #[test]
    fn a_block_moves_wholly_or_not_at_all_and_is_mixed_only_then() {
        let mut file = FileHistory::of_lower(&LOWER);
        file.write(10, 100, &[1; 200]);
        file.write(20, 1000, &[2; 200]);
        let first = with(LOWER.to_vec(), 100, &[1; 200]);
        let second = with(first.clone(), 1000, &[2; 200]);
        for shown in [&LOWER.to_vec(), &first, &second, &with(first.clone(), 1000, &[2; 100])] {
            assert_eq!(file.check(shown, 30), Ok(()));
        }
        let parts =
            [with(LOWER.to_vec(), 100, &[1; 100]), with(LOWER.to_vec(), 1000, &[2; 200]), with(first, 5000, &[0])];
        for shown in &parts {
            assert!(file.check(shown, 30).is_err());
        }
        assert!(file.check(&second, 20).is_err(), "that has not begun");
        file.promise(30);
        assert!(file.check(&second, 30).is_ok() && file.check(&LOWER, 29).is_ok());
        assert!(file.check(&LOWER, 30).is_err(), "a promise is kept");
        file.write(40, 0, &[3; BLOCK_BYTES]);
        assert!(file.check(&with(second, 512, &[3; 700]), 50).is_ok(), "what has moved may be torn");
    }

    #[test]
    fn a_block_that_may_have_moved_ahead_of_its_writer_may_be_torn() {
        let mut file = FileHistory::of_lower(&LOWER);
        let torn = with(LOWER.to_vec(), 2 * BLOCK_BYTES, &[9; 100]);
        let write_last = |file: &mut FileHistory| file.write(50, 2 * BLOCK_BYTES, &[9; BLOCK_BYTES]);
        file.write(10, BLOCK_BYTES, &LOWER[..10]);
        file.promise(20);
        // One step is none that goes on.
        write_last(&mut file);
        assert!(file.check(&torn, 60).is_err());
        let mut file = FileHistory::of_lower(&LOWER);
        file.write(10, 0, &LOWER[..10]);
        file.promise(20);
        file.write(30, BLOCK_BYTES, &LOWER[..10]);
        file.promise(40);
        write_last(&mut file);
        assert_eq!(file.check(&torn, 60), Ok(()));
        file.promise(60);
        assert!(file.check(&torn, 60).is_err());
    }

    #[test]
    fn the_block_in_which_a_truncation_ends_has_moved_and_may_be_torn() {
        let mut file = FileHistory::of_lower(&LOWER);
        file.truncate(10, BLOCK_BYTES + 100);
        let zeros = |from: usize, to: usize| with(LOWER.to_vec(), BLOCK_BYTES + from, &vec![0; to - from]);
        // Its zeros are there before its size is.
        assert_eq!(file.check(&zeros(100, 512), 20), Ok(()));
        assert!(file.check(&zeros(99, 512), 20).is_err(), "no version had that");
        file.write(30, BLOCK_BYTES, &[3; 100]);
        file.write(30, BLOCK_BYTES + 100, &[4; 2 * BLOCK_BYTES - 100]);
        assert_eq!(file.check(&with(LOWER.to_vec(), BLOCK_BYTES, &[3; 50]), 40), Ok(()));
        // One that it leaves whole stays the lower file's.
        let mut file = FileHistory::of_lower(&LOWER);
        file.truncate(10, 2 * BLOCK_BYTES);
        file.write(20, BLOCK_BYTES, &[3; BLOCK_BYTES]);
        assert!(file.check(&with(LOWER.to_vec(), BLOCK_BYTES, &[3; 50])[..2 * BLOCK_BYTES], 30).is_err());
    }

    #[test]
    fn a_truncation_may_come_before_a_write_and_cuts_off_for_ever() {
        let mut file = FileHistory::of_lower(&LOWER);
        file.write(10, BLOCK_BYTES, &[1; BLOCK_BYTES]);
        file.truncate(20, BLOCK_BYTES + 10);
        file.truncate(30, 3 * BLOCK_BYTES);
        let cut = |end: usize| with(LOWER.to_vec(), end, &vec![0; LOWER.len() - end]);
        assert_eq!(file.check(&cut(BLOCK_BYTES + 10), 40), Ok(()));
        assert!(file.check(&cut(BLOCK_BYTES + 11), 40).is_err());
        file.promise(40);
        assert!(file.check(&LOWER, 40).is_err());
    }

    #[test]
    fn what_grows_may_be_zeros_until_it_is_promised_and_bytes_of_others_are_never_there() {
        let mut file = FileHistory::made(5);
        file.write(10, 0, &[1; 5000]);
        for (shown, is_allowed) in
            [(vec![0; 5000], true), (vec![1; 100], true), (vec![2; 5000], false), (vec![1; 5001], false)]
        {
            assert_eq!(file.check(&shown, 20).is_ok(), is_allowed);
        }
        file.promise(20);
        assert!(file.check(&[0; 5000], 20).is_err() && file.check(&[1; 5000], 20).is_ok());
    }
}
