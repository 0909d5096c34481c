//! Deferred blocks: they are written back, but the layer below has not stored yet where they are. They stay cached, and in the
//! ledger, until it has.
//!
//! The layer below stores the places on request: by the flushers after each round of write-back, by any sync, and by a writer
//! that finds no room, because deferred blocks count like dirty ones. For content that the cache does not keep, because it is
//! written through or removed, the places are stored before that call returns.

use crate::blocks::{CHUNK_BLOCKS, Chunk};
use crate::node::Node;
use crate::node_state::State;
use crate::sync::{lock, read, try_lock};
use poolfs_libservice::Result;
use std::sync::{Arc, MutexGuard};

impl State {
    pub(crate) fn has_deferred(&self) -> bool {
        self.blocks.counts().deferred > 0
    }

    /// Changes the chunks in which `pick` finds blocks.
    fn change_picked(&mut self, pick: fn(&Chunk) -> u64, change: fn(&mut Chunk)) {
        let mut from = 0;
        while let Some(block) = self.blocks.next(from, pick) {
            let index = block / CHUNK_BLOCKS;
            self.blocks.change_chunk(index, change);
            from = (index + 1) * CHUNK_BLOCKS;
        }
    }
}

impl Node {
    /// Has the layer below store what it has deferred of the file by now. Only under a [`Use`](crate::node_use::Use).
    pub(crate) fn store_deferred(&self) -> Result<()> {
        self.store_with(&lock(&self.storing), || self.core.below.store_deferred(self.id))
    }

    /// The same for the file's writer, who only waits when it is being done already: there is room then, and the rest is stored beside what is
    /// written into it. How many blocks are stored; nothing when those who did it stored none.
    pub(crate) fn store_or_wait(&self) -> Option<Result<u64>> {
        let deferred = || read(&self.state).blocks.counts().deferred;
        let before = deferred();
        if before == 0 {
            return Some(Ok(0));
        }
        let Some(storing) = try_lock(&self.storing) else {
            drop(lock(&self.storing));
            return Some(before.saturating_sub(deferred())).filter(|&stored| stored > 0).map(Ok);
        };
        let stored = self.store_with(&storing, || self.core.below.store_deferred(self.id));
        Some(stored.map(|()| before.saturating_sub(deferred())))
    }

    /// The same for another file's writer, without waiting for whoever does it already; how many blocks are stored.
    pub(crate) fn store_other(self: &Arc<Self>) -> Option<Result<u64>> {
        let cleaning = self.begin_cleaning().ok()?;
        let node = &cleaning.0.0;
        let storing = try_lock(&node.storing)?;
        let before = read(&node.state).blocks.counts().deferred;
        let stored = node.store_with(&storing, || node.core.below.store_deferred(node.id));
        let after = read(&node.state).blocks.counts().deferred;
        Some(stored.map(|()| before.saturating_sub(after)))
    }

    /// What a flusher does with a file that it has written back.
    pub(crate) fn store_in_background(self: &Arc<Self>) {
        let (has_deferred, orphan) = {
            let state = read(&self.state);
            (state.has_deferred(), state.orphan)
        };
        if !has_deferred || orphan && !self.in_use() {
            return;
        }
        if let Some(Err(error)) = self.store_other() {
            tracing::warn!(node = self.id.0, %error, "where the content of a file is could not be stored; it is tried again");
        }
    }

    /// Does something that makes the layer below store what it has deferred. Nobody waits here for whoever has it stored already: what is not
    /// known to be stored stays until the next time.
    pub(crate) fn stored_by(&self, store: impl FnOnce() -> Result<()>) -> Result<()> {
        match try_lock(&self.storing) {
            Some(storing) if self.core.keeps_deferred => self.store_with(&storing, store),
            _ => store(),
        }
    }

    fn store_with(&self, _storing: &MutexGuard<'_, ()>, store: impl FnOnce() -> Result<()>) -> Result<()> {
        let is_any = read(&self.state).has_deferred();
        if is_any {
            self.update(None, |state| {
                state.change_picked(
                    |chunk| chunk.deferred,
                    |chunk| chunk.storing |= std::mem::take(&mut chunk.deferred),
                );
            });
        }
        let result = store();
        if is_any {
            let settle: fn(&mut Chunk) = match result {
                Ok(()) => |chunk| chunk.storing = 0,
                Err(_) => |chunk| chunk.deferred |= std::mem::take(&mut chunk.storing),
            };
            self.update(None, |state| state.change_picked(|chunk| chunk.storing, settle));
        }
        result
    }
}
