//! Which blocks move ahead of writes ([`Union::move_ahead`](crate::Union::move_ahead)): those behind the end of what a program writes and
//! syncs in small steps, as databases do with their logs.
//!
//! Without it, each step into a new block of such a file costs more than the write. The branch has to allocate the block, and the
//! bitmap has to become durable after it, so that one `fsync` is two of the branch, each with a commit of its journal. Blocks
//! that moved some steps ago are overwritten in place, and one `fsync` of the branch is enough. So when a sketch grows in that
//! way, the next blocks are moved together with those being flushed, more of them the longer it goes on. A file that is synced
//! once, or in large steps, has none moved ahead.

use std::ops::Range;

/// Blocks that move ahead the first time.
const BLOCKS_FIRST: u64 = 4;

/// Most blocks that move ahead at once.
const BLOCKS_MAX: u64 = 64;

/// Most blocks that a step is small with.
const STEP_BLOCKS_MAX: u64 = 16;

/// How the moved blocks of a sketch grow from sync to sync.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ahead {
    /// those that moved last, without a gap
    recent: Range<u64>,
    /// where they ended at the last sync
    synced: Option<u64>,
    blocks: u64,
}

impl Ahead {
    /// Notes that blocks have moved.
    pub fn note(&mut self, blocks: &Range<u64>) {
        if (self.recent.start..=self.recent.end).contains(&blocks.start) {
            self.recent.end = self.recent.end.max(blocks.end);
        } else {
            self.recent = blocks.clone();
        }
    }

    /// The blocks that should move with those that a sync is about to bring to disk.
    pub fn wanted(&mut self) -> Range<u64> {
        let end = self.recent.end;
        let is_step = |synced| (self.recent.start..=end).contains(&synced) && end - synced <= STEP_BLOCKS_MAX;
        let grows = self.synced.is_some_and(is_step);
        self.blocks = if grows { (self.blocks * 2).clamp(BLOCKS_FIRST, BLOCKS_MAX) } else { 0 };
        self.synced = Some(end);
        end..end + self.blocks
    }

    /// Notes that what was wanted has moved.
    pub fn moved(&mut self) {
        self.synced = Some(self.recent.end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What moves ahead at syncs between which these blocks are written, of which those that have moved stay.
    fn ahead(steps: &[Range<u64>]) -> Vec<Range<u64>> {
        let mut ahead = Ahead::default();
        let mut moved = std::collections::BTreeSet::new();
        let mut all = Vec::new();
        for step in steps {
            let fresh: Vec<u64> = step.clone().filter(|block| moved.insert(*block)).collect();
            let (Some(&first), Some(&last)) = (fresh.first(), fresh.last()) else { continue };
            ahead.note(&(first..last + 1));
            let wanted = ahead.wanted();
            if !wanted.is_empty() {
                moved.extend(wanted.clone());
                ahead.note(&wanted);
                ahead.moved();
            }
            all.push(wanted);
        }
        all
    }

    #[test]
    fn logs_have_blocks_move_ahead_and_others_have_none() {
        let log: Vec<_> = (100..400).map(|block| block..block + 1).collect();
        let moved = ahead(&log);
        assert_eq!(moved[..4], [101..101, 102..106, 107..115, 116..132]);
        assert!(moved[4..].iter().all(|wanted| wanted.end - wanted.start == [32, 64][usize::from(wanted.start > 140)]));
        assert!(moved.len() < 12, "of 300 syncs so many have a bitmap to bring to disk: {moved:?}");
        // Two blocks at a time, the second of which comes again.
        let again: Vec<_> = (100..110).map(|block| block..block + 2).collect();
        assert_eq!(ahead(&again)[..2], [102..102, 103..107]);
        let none = |steps: &[Range<u64>]| ahead(steps).iter().all(|wanted| wanted.is_empty());
        assert!(none(&[5..6, 90..91, 3..4, 44..46]), "here and there");
        assert!(none(&[0..256, 256..512, 512..768]), "in large steps");
        assert!(none(&[9..10, 8..9, 7..8]), "backwards");
    }
}
