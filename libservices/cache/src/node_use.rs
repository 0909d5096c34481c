//! Using a node: what keeps it and its handles below while something reads or writes there, and what happens when the last use ends.

use crate::node::Node;
use crate::node_state::State;
use crate::sync::{lock, read};
use poolfs_libservice::{Result, fail};
use poolfs_types::{Caller, Errno, HandleId, OpenFlags};
use std::sync::Arc;

/// Keeps a node and its handles below; everything that reads or writes below works under one.
pub(crate) struct Use(pub(crate) Arc<Node>);

impl Drop for Use {
    fn drop(&mut self) {
        self.0.end_use();
    }
}

/// A [`Use`] by whoever writes back for others.
pub(crate) struct Cleaning(pub(crate) Use);

impl Drop for Cleaning {
    fn drop(&mut self) {
        lock(&self.0.0.below).cleaners -= 1;
    }
}

impl Node {
    /// Begins using the handles below.
    pub(crate) fn begin_use(self: &Arc<Self>) -> Result<Use> {
        let mut below = lock(&self.below);
        if below.dead {
            return fail(Errno::ESTALE);
        }
        below.users += 1;
        Ok(Use(Arc::clone(self)))
    }

    /// Begins to write back for others.
    pub(crate) fn begin_cleaning(self: &Arc<Self>) -> Result<Cleaning> {
        let used = self.begin_use()?;
        lock(&self.below).cleaners += 1;
        Ok(Cleaning(used))
    }

    fn end_use(self: &Arc<Self>) {
        let handles = {
            let mut below = lock(&self.below);
            below.users -= 1;
            if below.users > 0 {
                return;
            }
            [below.reader.take(), below.writer.take(), below.appender.take()]
        };
        if read(&self.state).view.is_some() {
            // Who opens the file again asks again.
            self.update(None, State::end_view);
        }
        for handle in handles.into_iter().flatten() {
            self.core.below.release(handle);
        }
        self.core.reconsider(self);
    }

    /// A handle below that can read. Only under a [`Use`].
    pub(crate) fn reader_below(&self) -> Result<HandleId> {
        let mut below = lock(&self.below);
        if let Some(handle) = below.writer.or(below.reader) {
            return Ok(handle);
        }
        let handle = self.core.below.open(&Caller::ROOT, self.id, OpenFlags::READ_ONLY)?;
        below.reader = Some(handle);
        Ok(handle)
    }

    /// A handle below that can read and write. Only under a [`Use`].
    pub(crate) fn writer_below(&self) -> Result<HandleId> {
        let mut below = lock(&self.below);
        if let Some(handle) = below.writer {
            return Ok(handle);
        }
        let handle = self.core.below.open(&Caller::ROOT, self.id, OpenFlags::READ_WRITE)?;
        below.writer = Some(handle);
        Ok(handle)
    }

    /// A handle below that appends. Only under a [`Use`].
    pub(crate) fn appender_below(&self) -> Result<HandleId> {
        let mut below = lock(&self.below);
        if let Some(handle) = below.appender {
            return Ok(handle);
        }
        let handle = self.core.below.open(&Caller::ROOT, self.id, OpenFlags::WRITE_ONLY | OpenFlags::APPEND)?;
        below.appender = Some(handle);
        Ok(handle)
    }

    /// Takes over the handle that creating the file returned. Only under a [`Use`].
    pub(crate) fn adopt_writer(&self, handle: HandleId) {
        let surplus = {
            let mut below = lock(&self.below);
            if below.writer.is_some() { Some(handle) } else { below.writer.replace(handle) }
        };
        if let Some(handle) = surplus {
            self.core.below.release(handle);
        }
    }
}
