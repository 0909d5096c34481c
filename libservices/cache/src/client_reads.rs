//! Giving a file's segment to clients that read it without requests, and what becomes of it while they have it: memory that
//! their faults bring back is freed, and what is whole is held in huge pages.

use crate::blocks::{BLOCK, blocks_for};
use crate::content::Content;
use crate::failure::cache_failure;
use crate::limits::GIVEN_MAX;
use crate::node::Node;
use crate::node_state::State;
use crate::sync::{read, try_write, write};
use crate::view::{STRAY_BYTES_MAX, View};
use poolfs_ipc::segment::{CAPACITY_MAX, collapse};
use poolfs_libservice::{Lease, Result, Segment as Shared, fail};
use poolfs_types::{Errno, FileType};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Instant;

impl State {
    /// What a client is given to read it by itself.
    fn descriptors(&self) -> Result<Shared> {
        let (Some(view), Content::Segment(segment)) = (&self.view, &self.content) else {
            return fail(Errno::EOPNOTSUPP);
        };
        let files = view.reader().and_then(|map| Ok((map, segment.reader()?)));
        let (map, data) = files.map_err(|error| cache_failure(&error))?;
        Ok(Shared { map, data, capacity: view.capacity() })
    }

    /// Frees what readers' faults have brought back of blocks that are not there. Nobody copies from those.
    fn sweep(&mut self) {
        if let Some(view) = &self.view {
            view.sweep();
        }
        let (Some(view), Content::Segment(segment)) = (&self.view, &self.content) else { return };
        let held = self.blocks.counts().resident * BLOCK;
        if !segment.allocated().is_ok_and(|bytes| bytes > held + STRAY_BYTES_MAX) {
            return;
        }
        let capacity = view.capacity();
        let mut at = 0;
        while at < capacity {
            let gone = self.blocks.run(at, capacity - at, false, |chunk| chunk.resident);
            if gone > 0
                && let Err(error) = segment.punch(at * BLOCK, gone * BLOCK)
            {
                tracing::warn!(%error, "what readers brought back of a cache segment could not be freed");
                return;
            }
            at += gone;
            at += self.blocks.run(at, capacity - at, true, |chunk| chunk.resident);
        }
    }
}

impl Node {
    /// The file's segment with a map, which is made if there is none that is large enough. Only under a [`Use`](crate::node_use::Use).
    pub(crate) fn segment(self: &Arc<Self>, lease: &Arc<dyn Lease>) -> Result<Shared> {
        let pool = &self.core.pool;
        if pool.is_short() {
            return fail(Errno::EOPNOTSUPP);
        }
        let attributes = self.attributes()?;
        if attributes.file_type != FileType::Regular || !pool.segments.is_shared() {
            return fail(Errno::EOPNOTSUPP);
        }
        let is_enough = |state: &State| {
            let blocks = blocks_for(state.attributes.size).min(CAPACITY_MAX);
            state.view.as_ref().is_some_and(|view| view.capacity() >= blocks)
        };
        let is_new = !is_enough(&read(&self.state));
        if is_new {
            let mut view = View::new(pool, &self.core.map_pages, attributes.size)?;
            self.update(None, |state| {
                // Another one may have come meanwhile.
                if is_enough(state) {
                    return Ok(());
                }
                if state.is_retiring {
                    return Err(io::ErrorKind::Unsupported.into());
                }
                // Before there is a segment, which goes with the view when nothing is cached.
                state.end_view();
                let segment = state.content.promote(&pool.segments)?;
                segment.hold()?;
                segment.share(view.capacity() * BLOCK)?;
                view.publish_all(&state.blocks);
                state.blocks.note_changes(true);
                state.huge.get_or_insert_default().reach(view.capacity());
                state.view = Some(Box::new(view));
                Ok(())
            })
            .map_err(|error: io::Error| match error.kind() {
                io::ErrorKind::Unsupported => Errno::EOPNOTSUPP.into(),
                _ => cache_failure(&error),
            })?;
            self.core.lists.viewed(self);
        }
        self.give(lease)
    }

    /// The descriptors of what there is by now, which may be nothing any more; from then on it is known who has them.
    fn give(&self, lease: &Arc<dyn Lease>) -> Result<Shared> {
        let holder = lease.holder();
        {
            let state = read(&self.state);
            if holder.as_ref().is_none_or(|holder| state.was_given(holder)) {
                return state.descriptors();
            }
        }
        let mut state = write(&self.state);
        let shared = state.descriptors()?;
        holder.iter().for_each(|holder| state.note_given(holder, GIVEN_MAX));
        Ok(shared)
    }

    /// Looks for memory that readers brought back, and whether there still are any after the view's end, unless the file is busy.
    pub(crate) fn sweep_segment(&self) {
        if let Some(mut state) = try_write(&self.state) {
            state.sweep();
            let State { view, content, .. } = &mut *state;
            if let (None, Content::Segment(segment)) = (view, content) {
                segment.let_go();
            }
        }
    }

    /// Has what clients read of it held in huge pages, until it is `end`; what is left then is taken up the next time. Not under the state's lock, for the kernel takes its time: what is taken away meanwhile is found by the sweep.
    ///
    /// # Errors
    /// Those of the kernel; what it did not do is left alone until something comes or goes.
    pub(crate) fn hold_in_huge_pages(&self, end: Instant) -> io::Result<()> {
        let (runs, file) = {
            let Some(mut state) = try_write(&self.state) else { return Ok(()) };
            let state = &mut *state;
            let (Some(huge), Content::Segment(segment)) = (&mut state.huge, &state.content) else { return Ok(()) };
            let runs = huge.visit(&state.blocks);
            if runs.is_empty() {
                return Ok(());
            }
            (runs, segment.with_file(File::try_clone)?)
        };
        for run in runs {
            let is_late = Instant::now() >= end;
            if !is_late {
                collapse(&file, run.start * BLOCK, ((run.end - run.start) * BLOCK) as usize)?;
            }
            let mut state = write(&self.state);
            let Some(huge) = &mut state.huge else { return Ok(()) };
            if is_late {
                huge.note_rest();
                return Ok(());
            }
            huge.note_huge(&run);
        }
        Ok(())
    }

    /// Whether clients read it by themselves, or did while what is cached of it came, or it was given as a whole.
    pub(crate) fn was_viewed(&self) -> bool {
        let state = read(&self.state);
        state.huge.is_some() || !state.given.is_empty()
    }
}
