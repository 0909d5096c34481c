//! Measuring whether memory comes back when content is taken away, and telling that to those whose clients had it.

use crate::blocks::BLOCK;
use crate::content::Content;
use crate::node::Node;
use crate::sync::read;
use poolfs_libservice::Holder;
use std::sync::Weak;
use std::sync::atomic::Ordering;

/// How much of a file is taken away to see whether its memory comes back.
const PROBE_BYTES: u64 = 8 << 20;
/// It is taken away in pieces, each of which is looked at by itself: several times what the kernel counts late, on a few processors.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;

/// What the process is counted for, and the kernel cannot drop by itself.
pub(crate) type Kept<'a> = dyn Fn() -> Option<u64> + 'a;

/// What came of taking a piece away.
struct Piece {
    taken: u64,
    /// Of that.
    stayed: u64,
}

impl Piece {
    fn part(&self) -> f64 {
        self.stayed as f64 / self.taken as f64
    }

    /// Whether so much was taken that what stayed of it says something.
    fn is_large(&self) -> bool {
        self.taken >= PIECE_BYTES / 2
    }

    /// Whether less stayed of it than of the other one. Beside a large one, a small one says nothing: a few pages that others free hide what stays.
    fn says_more_than(&self, other: &Self) -> bool {
        if self.is_large() == other.is_large() { self.part() < other.part() } else { self.is_large() }
    }
}

impl Node {
    /// Drops a part of what clients read by themselves, to see whether its memory comes back; how much that was.
    pub(crate) fn probe(&self, first: usize, kept: &Kept<'_>) -> u64 {
        let given = self.given();
        if given.is_empty() { 0 } else { self.take_away(&given, kept, first, PROBE_BYTES) }
    }

    /// Probes what is no longer pinned, if somebody looks who keeps what is taken away.
    pub(crate) fn weigh_if_due(&self) {
        let pool = &self.core.pool;
        if pool.weighing_due.load(Ordering::Relaxed) == 0 {
            return;
        }
        let Some(kept) = pool.kept.get() else { return };
        let taken = self.probe(0, kept);
        let less = |due: u64| Some(due.saturating_sub(taken));
        let _ = pool.weighing_due.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Those who may keep pages of what can be taken away.
    fn given(&self) -> Vec<Weak<dyn Holder>> {
        let state = read(&self.state);
        let is_segment = matches!(state.content, Content::Segment(_));
        if is_segment && !state.is_pinned() { state.given.clone() } else { Vec::new() }
    }

    /// Drops what is clean, up to `most` bytes, and tells those who were given it how much of that stayed in memory. How much was dropped.
    ///
    /// What others do at the same moment is counted for the process as well. So it is done piece by piece, and what is told is what stayed of the piece of which
    /// least did, of the small ones only if there is no large one: nobody is taken for one who keeps pages because others do, or because they fill the
    /// cache just then.
    pub(crate) fn take_away(&self, given: &[Weak<dyn Holder>], kept: &Kept<'_>, first: usize, most: u64) -> u64 {
        let (mut taken, mut least) = (0, None::<Piece>);
        while taken < most {
            let Some(piece) = self.take_piece_away(kept, first) else { break };
            taken += piece.taken;
            if least.as_ref().is_none_or(|least| piece.says_more_than(least)) {
                least = Some(piece);
            }
        }
        if let Some(least) = least {
            let stayed = (taken as f64 * least.part()) as u64;
            given.iter().filter_map(Weak::upgrade).for_each(|holder| holder.stayed(taken, stayed));
        }
        taken
    }

    fn take_piece_away(&self, kept: &Kept<'_>, first: usize) -> Option<Piece> {
        self.weighed(kept, || self.drop_clean_from(first, PIECE_BYTES)).1
    }

    /// Does what takes content away, and looks how much of it stays in memory.
    fn weighed<R>(&self, kept: &Kept<'_>, take: impl FnOnce() -> R) -> (R, Option<Piece>) {
        let budget = &self.core.pool.budget;
        let resident = || read(&self.state).blocks.counts().resident * BLOCK;
        let now = || kept().map(|kept| (kept, budget.used()));
        let (before, had) = (now(), resident());
        let result = take();
        let taken = had.saturating_sub(resident());
        let (Some((before, used_before)), Some((after, used_after))) = (before, now()) else { return (result, None) };
        // It has not become less for the process; and it has become more beside the cache. Whatever else comes into the cache meanwhile does the first, and
        // whatever else leaves it the second.
        let of_process = (after + taken).saturating_sub(before);
        let of_others = after.saturating_sub(used_after).saturating_sub(before.saturating_sub(used_before));
        (result, (taken > 0).then(|| Piece { taken, stayed: of_process.min(of_others).min(taken) }))
    }

    /// Does what takes content away for good, because its file is cut, punched or gone: nothing will be left by which could be seen later who keeps it.
    pub(crate) fn taking_away<R>(&self, take: impl FnOnce() -> R) -> R {
        let Some(kept) = self.core.pool.kept.get() else { return take() };
        let given = {
            let state = read(&self.state);
            let is_much = state.blocks.counts().resident * BLOCK >= PIECE_BYTES && !state.is_pinned();
            if is_much && matches!(state.content, Content::Segment(_)) { state.given.clone() } else { Vec::new() }
        };
        if given.is_empty() {
            return take();
        }
        let (result, piece) = self.weighed(kept, take);
        if let Some(Piece { taken, stayed }) = piece.filter(|piece| piece.taken >= PIECE_BYTES) {
            given.iter().filter_map(Weak::upgrade).for_each(|holder| holder.stayed(taken, stayed));
        }
        result
    }
}
