//! Blocks in transit (BAOverlay's copy-after-write): a partial write to a block that is still in the lower file stores its bytes
//! at once, and the rest of the block is copied later, so that no writer waits for a read.
//!
//! The new bytes are at their place in the upper file, among zeros. Nobody sees those zeros: the block counts as one of the lower
//! file until the rest has been copied around the new bytes. The first that needs the block before that (a reader, a second
//! writer, fsync) copies the rest itself; otherwise a thread of the union does. A crash of the machine before that loses what no
//! fsync has promised, as with every other write; the death of the service alone does not, where there is a
//! [journal](crate::journal).

use crate::format::BLOCK;
use crate::in_transit::Permit;
use crate::journal::Journal;
use crate::journal_records::Change;
use crate::node::{Content, Node, State};
use crate::sketch::Sketch;
use crate::statistics::Counters;
use crate::sync::lock;
use poolfs_libservice::{Branch, Error, Opened, Result, Spending};
use poolfs_types::{Caller, Errno, SetAttributes, SetTime};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

/// How long the thread lets a file rest before it copies: the writes that follow find their block still in transit, and
/// what fills a block needs no copy at all.
const LINGER: Duration = Duration::from_millis(2);

/// The moves of blocks that a union has not finished, and who finishes them.
pub(crate) struct Copies {
    upper: Branch,
    statistics: Arc<Counters>,
    /// the sketches with blocks in transit, for the thread that copies
    queue: Mutex<Queue>,
    wake: Condvar,
    blocks: Arc<AtomicUsize>,
    blocks_max: usize,
    pub journal: Arc<Journal>,
}

/// What a run of blocks is put together from; the thread that copies keeps it from one run to the next.
#[derive(Default)]
struct Pieces {
    below: Vec<u8>,
    written: Vec<u8>,
}

#[derive(Default)]
struct Queue {
    nodes: VecDeque<Weak<Node>>,
    stop: bool,
}

impl Copies {
    pub fn new(upper: &Branch, statistics: &Arc<Counters>, blocks_max: usize, journal: &Arc<Journal>) -> Self {
        let (upper, statistics, journal) = (upper.clone(), statistics.clone(), journal.clone());
        let (queue, wake, blocks) = Default::default();
        Copies { upper, statistics, queue, wake, blocks, blocks_max, journal }
    }

    /// Headroom for one more block in transit, here and in the journal.
    pub fn permit(&self) -> Option<Permit> {
        if !self.journal.has_room() {
            return None;
        }
        let room = |blocks: usize| (blocks < self.blocks_max).then_some(blocks + 1);
        self.blocks.fetch_update(Ordering::AcqRel, Ordering::Acquire, room).ok()?;
        Some(Permit::counted(&self.blocks))
    }

    /// Blocks in transit.
    pub fn len(&self) -> usize {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Has the thread look at `node`, if it is not too busy: what it never sees is completed when the sketch is brought to
    /// disk.
    pub fn submit(&self, node: &Arc<Node>) {
        let mut queue = lock(&self.queue);
        if queue.nodes.len() < self.blocks_max && !queue.stop {
            queue.nodes.push_back(Arc::downgrade(node));
            self.wake.notify_one();
        }
    }

    pub fn stop(&self) {
        lock(&self.queue).stop = true;
        self.wake.notify_all();
    }

    /// The next sketches to copy; `None` when the end has come.
    fn next(&self) -> Option<VecDeque<Weak<Node>>> {
        let queue = lock(&self.queue);
        let idle = |queue: &mut Queue| queue.nodes.is_empty() && !queue.stop;
        let queue = self.wake.wait_while(queue, idle).unwrap_or_else(PoisonError::into_inner);
        let resting = |queue: &mut Queue| !queue.stop;
        let (mut queue, _) =
            self.wake.wait_timeout_while(queue, LINGER, resting).unwrap_or_else(PoisonError::into_inner);
        (!queue.stop).then(|| std::mem::take(&mut queue.nodes))
    }

    /// The life of the thread that copies what nobody waits for.
    pub fn run(&self) {
        let mut pieces = Pieces::default();
        while let Some(nodes) = self.next() {
            for node in nodes.iter().filter_map(Weak::upgrade).filter(|node| !node.read().removed) {
                // It stays in transit: the next who needs it tries again, and fsync and close report it.
                if let Err(error) = self.complete_with(&node, 0..u64::MAX, &mut pieces) {
                    node.stuck.store(true, Ordering::Release);
                    tracing::warn!(inode = node.inode, %error, "the rest of a block could not be copied from below");
                }
            }
        }
    }

    /// Completes those of `blocks` that are in transit. The lower file is read without the node's lock: it does not change, and those who
    /// use other blocks go on.
    pub fn complete(&self, node: &Node, blocks: Range<u64>) -> Result<()> {
        self.complete_with(node, blocks, &mut Pieces::default())
    }

    /// What the thread that copies could not complete of a file, whose writers were answered; it is tried again.
    pub fn report_stuck(&self, node: &Node) -> Result<()> {
        if !node.stuck.load(Ordering::Acquire) || !node.stuck.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        self.complete(node, 0..u64::MAX).inspect_err(|_| node.stuck.store(true, Ordering::Release))
    }

    /// Completes what is in transit now, as [`Self::complete`] does. Its errors are met again by who settles after it.
    pub fn complete_most(&self, node: &Node) {
        let end = match &node.read().content {
            Content::Sketch(sketch) => sketch.transit.end(),
            _ => 0,
        };
        if let Err(error) = self.complete(node, 0..end) {
            tracing::debug!(inode = node.inode, %error, "blocks could not be completed");
        }
    }

    fn complete_with(&self, node: &Node, blocks: Range<u64>, pieces: &mut Pieces) -> Result<()> {
        loop {
            let (run, files) = {
                let state = node.read();
                let Content::Sketch(sketch) = &state.content else { return Ok(()) };
                match (sketch.transit.run(blocks.clone()), &sketch.files) {
                    (Some(run), Some(files)) => (run, files.clone()),
                    _ => return Ok(()),
                }
            };
            read_run(&files.lower, &run, &mut pieces.below)?;
            self.settle_with(node, &mut node.write(), run.clone(), pieces, Some(run))?;
            self.statistics.settled();
        }
    }

    /// As [`Self::complete`], for who has the node's lock and must not give it up.
    pub fn settle(&self, node: &Node, state: &mut State, blocks: Range<u64>) -> Result<()> {
        self.settle_with(node, state, blocks, &mut Pieces::default(), None)
    }

    /// Completes blocks, which is no change that a user sees; `pieces` may have the lower content of the blocks `known`.
    fn settle_with(
        &self,
        node: &Node,
        state: &mut State,
        blocks: Range<u64>,
        pieces: &mut Pieces,
        known: Option<Range<u64>>,
    ) -> Result<()> {
        let State { upper: Some(held), content: Content::Sketch(sketch), .. } = state else { return Ok(()) };
        if !sketch.transit.any(blocks.clone()) {
            return Ok(());
        }
        let before = self.upper.getattr(&Caller::ROOT, held.node())?;
        let result = self.put_together(sketch, blocks, pieces, known);
        let modified = Some(SetTime::At(before.modified));
        let times = SetAttributes { modified, ..SetAttributes::default() };
        let after = self.upper.setattr(&Caller::ROOT, held.node(), &times, None)?;
        node.changed.hide(before.changed, after.changed);
        self.journal.record(node.id, sketch).and(result)
    }

    fn put_together(
        &self,
        sketch: &mut Sketch,
        blocks: Range<u64>,
        pieces: &mut Pieces,
        known: Option<Range<u64>>,
    ) -> Result<()> {
        // Whoever needs the blocks: their writes were accepted.
        let _spending = Spending::of_service();
        let Pieces { below, written } = pieces;
        while let Some(run) = sketch.transit.run(blocks.clone()) {
            let (_, files) = sketch.parts()?;
            let copied = {
                let new = sketch.transit.new_bytes(run.clone());
                let copied = new.clone().filter(|new| *new != (0..BLOCK as usize)).count() as u64;
                if copied > 0 {
                    let first = match &known {
                        Some(known) => run.start - known.start,
                        None => {
                            read_run(&files.lower, &run, below)?;
                            0
                        }
                    };
                    let bytes = |blocks: u64| (blocks * BLOCK) as usize;
                    let whole = &mut below[bytes(first)..bytes(first + run.end - run.start)];
                    read_run(&files.upper, &run, written)?;
                    for (number, new) in (0..).zip(new) {
                        let new = bytes(number) + new.start..bytes(number) + new.end;
                        whole[new.clone()].copy_from_slice(&written[new]);
                    }
                    files.upper.write_full(run.start * BLOCK, whole)?;
                }
                copied
            };
            for block in run.clone() {
                sketch.transit.remove(block);
            }
            let fresh = sketch.set_moved(run);
            self.statistics.moved(fresh, copied);
        }
        Ok(())
    }

    /// A write into one block in transit that begins in or at the end of what is new there, which becomes more; returns
    /// how many bytes were taken. `None` when it is no such write.
    pub fn extend(sketch: &mut Sketch, offset: u64, data: &[u8]) -> Result<Option<usize>> {
        let block = offset / BLOCK;
        let from = (offset - block * BLOCK) as usize;
        let Some(new) = sketch.transit.new_bytes_mut(block).map(|new| new.clone()) else { return Ok(None) };
        if from < new.start || from > new.end || from + data.len() > BLOCK as usize {
            return Ok(None);
        }
        let (_, files) = sketch.parts()?;
        let count = files.upper.write_some(offset, data)?;
        if let Some(known) = sketch.transit.new_bytes_mut(block) {
            known.end = new.end.max(from + count);
            let new = known.clone();
            sketch.unrecorded.push(Change::InTransit(block, new));
        }
        Ok(Some(count))
    }
}

/// Reads blocks that are in transit, which neither file is shorter than.
fn read_run(file: &Opened, run: &Range<u64>, whole: &mut Vec<u8>) -> Result<()> {
    whole.resize(((run.end - run.start) * BLOCK) as usize, 0);
    if file.read_full(run.start * BLOCK, whole)? < whole.len() {
        return Err(Error::new(Errno::EIO, "a file became shorter while it was in use"));
    }
    Ok(())
}
