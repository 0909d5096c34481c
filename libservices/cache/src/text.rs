//! Whole-file segments for files that others map: all of the file in a segment of its own, as long as the file, which stays
//! unchanged while it is pinned.
//!
//! Programs are mapped by the kernel, which reports when it has released them. Files that processes map are mmap exports
//! ([`crate::mmap_exports`]).
//!
//! These segments are in a tmpfs of their own: what the kernel still maps after the service has died keeps only that tmpfs in
//! memory, not everything that was cached. Pages of zeros are allocated there too: a fault on a hole would be charged to the
//! process that maps it.

use crate::blocks::{BLOCK, Chunk, blocks_for, cost_of};
use crate::content::Content;
use crate::core::Core;
use crate::failure::cache_failure;
use crate::limits::GIVEN_MAX;
use crate::node::Node;
use crate::node_state::State;
use crate::pins::{Permit, Pinned, Refusal};
use crate::segments::Segment;
use crate::sync::{lock, read, write};
use poolfs_libservice::{Holder, Result, Text, fail};
use poolfs_types::{Errno, FileType};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

/// How programs begin.
const ELF: &[u8; 4] = b"\x7fELF";

/// How much is read at once to find that out: as much as whoever has opened the file is about to ask for first.
const FIRST_BYTES: u64 = 128 << 10;

/// A file of up to so many bytes is read as a whole for who maps it; of a larger one, at least half has to be cached.
const READ_FOR_LOAN_MAX: u64 = 4 << 20;

/// Keeps a file's content where it is, all of it.
pub(crate) struct Pin {
    core: Arc<Core<Node>>,
    node: Arc<Node>,
    permit: Permit,
}

impl Drop for Pin {
    fn drop(&mut self) {
        // From here on it may leave, and there may be no other moment to see who keeps it.
        self.node.weigh_if_due();
        self.core.forget(self.node.id, 1);
    }
}

impl Pinned for Pin {
    fn bytes(&self) -> u64 {
        self.permit.bytes()
    }

    fn file(&self) -> usize {
        Arc::as_ptr(&self.node).addr()
    }

    fn layer(&self) -> usize {
        Arc::as_ptr(&self.core).addr()
    }

    fn is_used(&self) -> bool {
        // Nobody is given it meanwhile.
        match &write(&self.node.state).content {
            Content::Segment(segment) => segment.is_used().unwrap_or(true),
            _ => false,
        }
    }

    fn let_go(&self) {
        if let Content::Segment(segment) = &mut write(&self.node.state).content {
            segment.let_go();
        }
    }
}

impl State {
    /// Drops what was cached of a file in which nothing changes. Who reads that by themselves asks again.
    fn leave_segment(&mut self) {
        self.end_view();
        self.blocks.change_existing(0..u64::MAX, Chunk::clear);
        self.empty();
    }
}

/// Whether it would go on with other files as it did with what was taken away.
fn is_suspended(holder: Option<&Arc<dyn Holder>>) -> bool {
    holder.is_some_and(|holder| holder.is_suspended())
}

impl Node {
    /// All of the file for the kernel, if it is a program. Only under a [`Use`](crate::node_use::Use), of a layer that nothing is
    /// changed in.
    pub(crate) fn text(self: &Arc<Self>, holder: Option<&Arc<dyn Holder>>) -> Result<Text> {
        let attributes = self.attributes()?;
        if attributes.file_type != FileType::Regular || is_suspended(holder) || !self.is_program()? {
            return fail(Errno::EOPNOTSUPP);
        }
        let (file, pin) = self.whole(attributes.size, holder, |_| Ok(()))?;
        Ok(Text { file, bytes: pin.bytes(), pin })
    }

    /// All of the file for a process. Only as [`Self::text`].
    pub(crate) fn lend(self: &Arc<Self>, holder: Option<&Arc<dyn Holder>>) -> Result<OwnedFd> {
        let attributes = self.attributes()?;
        let pool = &self.core.pool;
        let is_cached = || {
            let state = read(&self.state);
            state.is_pinned() || state.blocks.counts().resident >= blocks_for(attributes.size) / 2
        };
        let is_worth_it = attributes.size > 0 && (attributes.size <= READ_FOR_LOAN_MAX || is_cached());
        let is_refused = is_suspended(holder) || !is_worth_it || !pool.texts.tells_use();
        if attributes.file_type != FileType::Regular || is_refused {
            return fail(Errno::EOPNOTSUPP);
        }
        let (file, pin) = self.whole(attributes.size, holder, Segment::hold)?;
        pool.mmap_exports.note(pin);
        Ok(file)
    }

    /// All of the file, and what keeps it; `prepare` comes before there is a descriptor, from which on it is known who has it: whoever reads by it may keep
    /// its pages for longer than the pin is there.
    fn whole(
        self: &Arc<Self>,
        size: u64,
        holder: Option<&Arc<dyn Holder>>,
        prepare: impl FnOnce(&mut Segment) -> io::Result<()>,
    ) -> Result<(OwnedFd, Arc<dyn Pinned>)> {
        // One fills it, the others have it from him. There are no writers in such a layer.
        let _one_at_a_time = lock(&self.writer);
        let known = read(&self.state).program.pin.as_ref().and_then(Weak::upgrade);
        let pin = match known {
            Some(pin) => pin,
            None => self.pin(size)?,
        };
        let mut state = write(&self.state);
        let Content::Segment(segment) = &mut state.content else { return fail(Errno::ESTALE) };
        prepare(segment).map_err(|_| Errno::EOPNOTSUPP)?;
        let file = segment.reader().map_err(|error| cache_failure(&error))?;
        if let Some(holder) = holder {
            // What is noted of a small file takes less than the file.
            state.note_given(holder, GIVEN_MAX.min(blocks_for(size) as usize));
            drop(state);
            self.core.lists.viewed(self);
        }
        Ok((file, pin))
    }

    fn is_program(&self) -> Result<bool> {
        let known = read(&self.state).program.is_one;
        if let Some(is_one) = known {
            return Ok(is_one);
        }
        let mut begin = [0; ELF.len()];
        let is_one = self.read(0, &mut &mut begin[..], FIRST_BYTES)?.0 == begin.len() && &begin == ELF;
        self.update(None, |state| state.program.is_one = Some(is_one));
        Ok(is_one)
    }

    /// Brings all of the file into a segment of its own.
    fn pin(self: &Arc<Self>, size: u64) -> Result<Arc<dyn Pinned>> {
        let pool = &self.core.pool;
        if !pool.texts.is_shared() {
            return fail(Errno::EOPNOTSUPP);
        }
        // As when others have the room: the kernel is asked for what nobody uses.
        if pool.is_short() {
            return fail(Errno::ENOMEM);
        }
        let blocks = blocks_for(size);
        let permit = pool.pins.take(blocks * BLOCK).map_err(|refusal| match refusal {
            Refusal::TooLarge => Errno::EOPNOTSUPP,
            Refusal::NoRoom => Errno::ENOMEM,
        })?;
        let cost = cost_of(blocks, &(0..blocks));
        let Some(mut reservation) = pool.budget.reserve(cost) else { return fail(Errno::ENOMEM) };
        let segment = self.copy_whole(size)?;
        // The pin refers to the node as a user of the layer does.
        let Some(node) = self.core.reference(self.id) else { return fail(Errno::ESTALE) };
        let pin: Arc<dyn Pinned> = Arc::new(Pin { core: Arc::clone(&self.core), node, permit });
        // What clients have of another segment goes, and is seen to go.
        self.taking_away(|| self.update(None, State::leave_segment));
        self.update(Some(&mut reservation), |state| {
            state.leave_segment();
            state.content = Content::Segment(segment);
            state.blocks.change(0..blocks, |chunk, mask| chunk.resident |= mask);
            state.program.pin = Some(Arc::downgrade(&pin));
        });
        Ok(pin)
    }

    /// A segment with all of the file.
    fn copy_whole(&self, size: u64) -> Result<Segment> {
        let pool = &self.core.pool;
        let segment = pool.texts.create_with_length(size).map_err(|error| cache_failure(&error))?;
        let step = pool.step_bytes().min(size);
        let mut buffer = pool.buffers.take((step / BLOCK).max(1) as usize);
        let mut at = 0;
        while at < size {
            let count = (size - at).min(buffer.len() as u64) as usize;
            self.read_past_cache(at, &mut buffer[..count])?;
            segment.write(at, &buffer[..count]).map_err(|error| cache_failure(&error))?;
            at += count as u64;
        }
        Ok(segment)
    }
}
