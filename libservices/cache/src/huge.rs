//! Selects the ranges of a segment to hold in huge pages: those whose blocks are all there, and were at the previous visit.

use crate::blocks::{BLOCK, BlockMap};
use poolfs_ipc::memory::HUGE_PAGE;
use std::ops::Range;

/// Blocks of a huge page.
const HUGE_BLOCKS: u64 = HUGE_PAGE as u64 / BLOCK;

/// Most huge pages made at a time: making the first of them costs more than each further one.
const RUN_MAX: usize = 8;

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Form {
    /// not all there, or not looked at yet
    #[default]
    Loose,
    /// all there since the last visit
    Whole,
    /// in a huge page
    Huge,
}

/// The ranges of one segment.
#[derive(Default)]
pub(crate) struct HugeRanges {
    forms: Vec<Form>,
    /// Blocks that were there at the last visit.
    resident: u64,
    /// A visit may find something to do, even if as many blocks are there.
    is_pending: bool,
}

impl HugeRanges {
    /// The segment is looked at up to so many blocks at least.
    pub(crate) fn reach(&mut self, capacity: u64) {
        let count = (capacity / HUGE_BLOCKS) as usize;
        if count > self.forms.len() {
            self.forms.resize(count, Form::default());
            self.is_pending = true;
        }
    }

    /// Bytes were taken away: what was a huge page is none any more.
    pub(crate) fn note_loss(&mut self, blocks: &Range<u64>) {
        let (first, end) = ((blocks.start / HUGE_BLOCKS) as usize, blocks.end.div_ceil(HUGE_BLOCKS) as usize);
        let known = self.forms.len();
        self.forms[first.min(known)..end.min(known)].fill(Form::Loose);
        self.is_pending = true;
    }

    /// The blocks that should be held in huge pages now, in runs; to be followed by [`Self::note_huge`].
    pub(crate) fn visit(&mut self, blocks: &BlockMap) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        let resident = blocks.counts().resident;
        if self.resident == resident && !self.is_pending {
            return runs;
        }
        (self.resident, self.is_pending) = (resident, false);
        for (range, form) in (0..).zip(&mut self.forms) {
            let (start, end) = (range * HUGE_BLOCKS, (range + 1) * HUGE_BLOCKS);
            match form {
                Form::Whole => match runs.last_mut() {
                    Some(last) if last.end == start && last.end - last.start < RUN_MAX as u64 * HUGE_BLOCKS => {
                        last.end = end;
                    }
                    _ => runs.push(start..end),
                },
                Form::Loose if blocks.run(start, HUGE_BLOCKS, true, |chunk| chunk.resident) == HUGE_BLOCKS => {
                    *form = Form::Whole;
                    self.is_pending = true;
                }
                Form::Loose | Form::Huge => {}
            }
        }
        runs
    }

    /// The run has become huge pages, unless some of it was lost meanwhile.
    pub(crate) fn note_huge(&mut self, run: &Range<u64>) {
        let (first, end) = ((run.start / HUGE_BLOCKS) as usize, (run.end / HUGE_BLOCKS) as usize);
        let whole = self.forms[first..end].iter_mut().filter(|form| **form == Form::Whole);
        whole.for_each(|form| *form = Form::Huge);
    }

    /// The visit's other runs were left for the next.
    pub(crate) fn note_rest(&mut self) {
        self.is_pending = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::Chunk;
    use std::iter::once;

    fn resident(blocks: &mut BlockMap, range: Range<u64>) {
        blocks.change(range, |chunk, mask| chunk.resident |= mask);
    }

    #[test]
    fn what_is_whole_for_a_while_becomes_huge_once() {
        let mut blocks = BlockMap::default();
        let mut ranges = HugeRanges::default();
        ranges.reach(4 * HUGE_BLOCKS + 7);
        resident(&mut blocks, 0..2 * HUGE_BLOCKS);
        resident(&mut blocks, 3 * HUGE_BLOCKS..4 * HUGE_BLOCKS - 1);
        assert!(ranges.visit(&blocks).is_empty(), "not yet");
        assert!(ranges.visit(&blocks).into_iter().eq(once(0..2 * HUGE_BLOCKS)));
        ranges.note_huge(&(0..2 * HUGE_BLOCKS));
        resident(&mut blocks, 4 * HUGE_BLOCKS - 1..4 * HUGE_BLOCKS);
        assert!(ranges.visit(&blocks).is_empty());
        assert!(ranges.visit(&blocks).into_iter().eq(once(3 * HUGE_BLOCKS..4 * HUGE_BLOCKS)));
        assert!(ranges.visit(&blocks).is_empty(), "one that could not be made is left alone");
    }

    #[test]
    fn what_is_lost_begins_anew() {
        let mut blocks = BlockMap::default();
        let mut ranges = HugeRanges::default();
        ranges.reach(2 * HUGE_BLOCKS);
        resident(&mut blocks, 0..2 * HUGE_BLOCKS);
        ranges.visit(&blocks);
        let run = ranges.visit(&blocks).remove(0);
        ranges.note_loss(&(5..6));
        ranges.note_huge(&run);
        assert!(ranges.visit(&blocks).is_empty());
        assert!(ranges.visit(&blocks).into_iter().eq(once(0..HUGE_BLOCKS)), "the other one is huge already");
        blocks.change_existing(0..1, Chunk::clear);
        ranges.note_loss(&(0..1));
        assert!(ranges.visit(&blocks).is_empty() && ranges.visit(&blocks).is_empty(), "no more whole");
        ranges.note_loss(&(HUGE_BLOCKS..u64::MAX));
        assert!(ranges.visit(&blocks).is_empty());
        assert!(ranges.visit(&blocks).into_iter().eq(once(HUGE_BLOCKS..2 * HUGE_BLOCKS)));
        ranges.note_rest();
        assert!(ranges.visit(&blocks).into_iter().eq(once(HUGE_BLOCKS..2 * HUGE_BLOCKS)));
    }

    #[test]
    fn runs_are_bounded() {
        let mut blocks = BlockMap::default();
        let count = 2 * RUN_MAX as u64 + 1;
        let mut ranges = HugeRanges::default();
        ranges.reach(count * HUGE_BLOCKS);
        resident(&mut blocks, 0..count * HUGE_BLOCKS);
        ranges.visit(&blocks);
        let runs: Vec<_> = ranges.visit(&blocks).iter().map(|run| (run.end - run.start) / HUGE_BLOCKS).collect();
        assert_eq!(runs, [RUN_MAX as u64, RUN_MAX as u64, 1]);
    }
}
