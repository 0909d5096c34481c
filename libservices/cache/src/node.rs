//! One object of the layer below: its cached state, its locks, and the accounting of what it holds.
//!
//! Lock order of a node:
//!
//! ```text
//! writer    one writer or truncation at a time
//! flush     one write-back at a time
//! storing   one thread at a time has the layer below store what it has deferred
//! filling   the ranges of blocks being read from below
//! state
//! ```
//!
//! - A holder of `flush` never waits for a `writer`, and a holder of `storing` waits for neither.
//! - Names change under the `names` of the directories, then the `links` of the object, then `state`. `links` is not taken
//!   together with `writer` or `flush`.
//! - A holder of `names` may wait for a `flush`. No holder of a `flush` or a `writer` changes or looks up names.
//! - Calls below are made under `writer`, `flush`, `storing`, `names` and `links` only, never under `state`, so a cached read
//!   waits for no I/O.
//! - After `state` come the budget's queues, the list of dirty files, and at the very end the lock of what is charged (dropped
//!   answers give it back, [`crate::answers`]). No holder of those waits for a `state`.

use crate::blocks::{BLOCK, Held};
use crate::budget::{Evictable, Evicted, Reservation};
use crate::content::Content;
use crate::core::Core;
use crate::node_state::State;
use crate::sync::{lock, read, try_read, try_write, write};
use poolfs_types::{Attributes, FileType, HandleId, NodeId};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, RwLock, Weak};

/// The handles below, and who uses them.
#[derive(Default)]
pub(crate) struct BelowHandles {
    pub(crate) users: u64,
    /// those of them that write back, for nobody who has it open
    pub(crate) cleaners: u64,
    pub(crate) dead: bool,
    pub(crate) reader: Option<HandleId>,
    pub(crate) writer: Option<HandleId>,
    /// Writes at the end of the file, wherever others have brought that.
    pub(crate) appender: Option<HandleId>,
}

/// One object.
pub(crate) struct Node {
    pub(crate) id: NodeId,
    pub(crate) core: Arc<Core<Self>>,
    me: Weak<Node>,
    /// References of the layer above; changed only under the table's lock.
    pub(crate) refs: AtomicU64,
    /// References this layer holds below.
    pub(crate) below_refs: AtomicU64,
    /// Whether the list of idle nodes has it.
    pub(crate) idle: AtomicBool,
    pub(crate) writer: Mutex<()>,
    pub(crate) flush: Mutex<()>,
    pub(crate) storing: Mutex<()>,
    /// Of a directory: changes of names exclude look-ups below, so that no outdated answer is remembered.
    pub(crate) names: RwLock<()>,
    /// Changes of the number of names of one object, together with what the cache notes of them.
    pub(crate) links: Mutex<()>,
    /// Block ranges being read from below.
    pub(crate) filling: Mutex<Vec<Range<u64>>>,
    pub(crate) filled: Condvar,
    pub(crate) below: Mutex<BelowHandles>,
    /// In memory of its own: the order of eviction may know the node for a while after its end, and then this has gone.
    pub(crate) state: Box<RwLock<State>>,
}

impl Node {
    pub(crate) fn new(core: &Arc<Core<Self>>, id: NodeId, attributes: Attributes, stale: bool) -> Arc<Self> {
        let state = State::new(attributes, stale, core.recorder.is_some());
        Arc::new_cyclic(|me| Self {
            id,
            core: Arc::clone(core),
            me: me.clone(),
            refs: AtomicU64::new(0),
            below_refs: AtomicU64::new(0),
            idle: AtomicBool::new(false),
            writer: Mutex::default(),
            flush: Mutex::default(),
            storing: Mutex::default(),
            names: RwLock::default(),
            links: Mutex::default(),
            filling: Mutex::default(),
            filled: Condvar::new(),
            below: Mutex::default(),
            state: Box::new(RwLock::new(state)),
        })
    }

    pub(crate) fn file_type(&self) -> FileType {
        read(&self.state).attributes.file_type
    }

    /// Changes the state, and books what that did to the budget, the dirty list and the order of eviction.
    pub(crate) fn update<R>(
        &self,
        reservation: Option<&mut Reservation<'_>>,
        change: impl FnOnce(&mut State) -> R,
    ) -> R {
        let mut state = write(&self.state);
        let before = state.held();
        let result = change(&mut state);
        self.settle(&mut state, before, reservation);
        result
    }

    fn settle(&self, state: &mut State, before: Held, reservation: Option<&mut Reservation<'_>>) {
        let core = &self.core;
        let budget = &core.pool.budget;
        if state.is_retiring && state.blocks.counts().resident == 0 {
            // Whatever took the last of it away: eviction, a cut or a punched hole.
            state.empty();
        }
        let after = state.held();
        budget.settle_used(before.cost, after.cost, reservation);
        budget.settle_dirty(before.counts.unsettled() * BLOCK, after.counts.unsettled() * BLOCK);
        core.settle(before, after);
        let changed = state.blocks.take_changed();
        state.publish(&changed);
        if let Some(recorder) = &core.recorder {
            state.record(recorder, &changed);
        }
        for (chunk, ticket) in state.blocks.fresh.drain(..) {
            budget.enter(self.me.clone(), chunk, ticket);
        }
        match (state.is_unsettled(), state.dirty_ticket) {
            (true, None) => state.dirty_ticket = self.me.upgrade().map(|me| core.lists.enqueue_dirty(me)),
            (false, Some(ticket)) => {
                core.lists.dequeue_dirty(ticket);
                state.dirty_ticket = None;
            }
            _ => {}
        }
    }

    /// Puts a file that could not be cleaned now at the end of the dirty list.
    pub(crate) fn requeue_dirty(&self) {
        self.update(None, |state| {
            if let Some(ticket) = state.dirty_ticket.take() {
                self.core.lists.dequeue_dirty(ticket);
            }
        });
    }

    /// Drops every clean block, hot or not.
    pub(crate) fn drop_clean(&self) {
        self.drop_clean_from(0, u64::MAX);
    }

    /// The same until so many bytes of content have gone, beginning with any of its chunks.
    pub(crate) fn drop_clean_from(&self, first: usize, most: u64) {
        let mut indices = read(&self.state).blocks.indices();
        let count = indices.len();
        indices.rotate_left(first.checked_rem(count).unwrap_or(0));
        let mut gone = 0;
        for index in indices {
            let Some(ticket) = read(&self.state).blocks.chunk(index).map(|chunk| chunk.ticket) else { continue };
            let evicted = match self.evict_chunk(index, ticket) {
                Evicted::Hot => self.evict_chunk(index, ticket),
                other => other,
            };
            // Of what is known to be zeros nothing has gone, however many chunks there are.
            if let Evicted::Blocks { blocks, .. } = evicted {
                gone += blocks * BLOCK;
            }
            if gone >= most {
                return;
            }
        }
    }

    /// Drops all content, dirty or not: the node is leaving, or nobody can reach the file any more.
    pub(crate) fn drop_content(&self) {
        self.update(None, |state| {
            state.end_view();
            if let (true, Content::Segment(segment)) = (state.is_pinned(), &state.content) {
                // The kernel may go on with it for as long as programs do.
                segment.leave();
            }
            state.blocks.change_existing(0..u64::MAX, |chunk, mask| {
                chunk.clear(mask);
                chunk.held &= !mask;
            });
            state.empty();
            state.time_dirty = false;
            state.epoch += 1;
        });
    }

    /// Whether nobody can come to read what is written back: it has no name, and nobody has it open.
    pub(crate) fn is_abandoned(&self) -> bool {
        read(&self.state).orphan && {
            let below = lock(&self.below);
            below.users == below.cleaners
        }
    }

    /// Has those who find no room wait for the file, if it has no name, or no more.
    pub(crate) fn note_whether_leaving(&self) {
        let mut state = write(&self.state);
        if state.orphan == state.is_leaving {
            return;
        }
        state.is_leaving = state.orphan;
        let leaving = &self.core.leaving;
        if state.orphan { leaving.enter() } else { leaving.leave() }
    }

    /// Marks the node dead if nobody uses it.
    pub(crate) fn try_kill(&self) -> bool {
        let mut below = lock(&self.below);
        if below.users == 0 && self.refs.load(Ordering::Acquire) == 0 {
            below.dead = true;
        }
        below.dead
    }

    /// Nobody may begin to use the node any more.
    pub(crate) fn kill(&self) {
        lock(&self.below).dead = true;
    }

    pub(crate) fn in_use(&self) -> bool {
        lock(&self.below).users > 0
    }
}

impl Evictable for Node {
    fn may_have_chunk(&self, index: u64, ticket: u64) -> bool {
        // Who calls this holds the queues, for which `settle` waits under `state`.
        let Some(state) = try_read(&self.state) else { return true };
        state.blocks.chunk(index).is_some_and(|chunk| chunk.ticket == ticket)
    }

    fn evict_chunk(&self, index: u64, ticket: u64) -> Evicted {
        let Some(mut state) = try_write(&self.state) else { return Evicted::Nothing };
        let state = &mut *state;
        let Some(chunk) = state.blocks.chunk(index).filter(|chunk| chunk.ticket == ticket) else {
            return Evicted::Gone;
        };
        if state.is_pinned() {
            return Evicted::Nothing;
        }
        if chunk.cool() {
            return Evicted::Hot;
        }
        let gone = chunk.evictable();
        // Heap content is freed as a whole or not at all.
        let on_heap = matches!(state.content, Content::Heap(_));
        if gone == 0 || (on_heap && chunk.pinned() != 0) {
            return Evicted::Nothing;
        }
        let (bytes_gone, rewritten) = (gone & chunk.resident, gone & chunk.rewritten & chunk.resident);
        if state.punch(index, bytes_gone).is_err() {
            state.publish(&[]);
            return Evicted::Nothing;
        }
        let before = state.held();
        state.epoch += u64::from(rewritten != 0);
        state.blocks.change_chunk(index, |chunk| chunk.clear(gone));
        if state.blocks.counts().resident == 0 && state.view.is_none() {
            state.empty();
        }
        let rest = state.blocks.chunk(index).is_some();
        let after = state.held();
        self.settle(state, before, None);
        let blocks = before.counts.resident - after.counts.resident;
        Evicted::Blocks { bytes: before.cost.bytes - after.cost.bytes, blocks, rest }
    }
}
