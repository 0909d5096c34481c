//! Dirty data of a dead process that cannot be written back now: the next cache takes it over as its own dirty data.
//!
//! So its write-back is retried, readers of the file see it, whoever unmounts is told of it, and it goes away with the file.

use crate::blocks::{BLOCK, CHUNK_BLOCKS};
use crate::buffer::BufferStore;
use crate::cache::Cache;
use crate::crash_recovery::{CrashRecovery, PIECE_BLOCKS, Waiting, unreadable};
use crate::node::Node;
use crate::sync;
use poolfs_libservice::{Error, Held, Libservice, Result, read_with_zeros};
use poolfs_types::{Caller, Errno, Name, NodeId, SetAttributes};
use std::fs::File;
use std::sync::Arc;

impl CrashRecovery {
    /// Takes a file that waits into a cache over the branch. It may be done twice, and what is left stays as it is. Returns what the file is there.
    ///
    /// # Errors
    /// When it cannot be found or read, or the cache has no room for it.
    pub fn carry_on(&self, waiting: &Waiting, cache: &Arc<Cache>) -> Result<NodeId> {
        let layer = Arc::clone(cache) as Arc<dyn Libservice>;
        let mut held = Held::new(&layer, NodeId::ROOT);
        for name in waiting.path.split(|&byte| byte == b'/') {
            let entry = layer.lookup(&Caller::ROOT, held.node(), Name::new(name)?)?;
            held = Held::new(&layer, entry.node);
        }
        let using = cache.node(held.node())?.begin_use()?;
        let (node, file) = (&using.0, &waiting.dirty.file);
        let segment = self.segment(file)?;
        if let Some(segment) = &segment {
            self.carry_bytes(waiting, segment, node)?;
            if sync::read(&node.state).attributes.size < file.size {
                let size = SetAttributes { size: Some(file.size), ..SetAttributes::default() };
                if let Err(error) = node.set_attributes(&Caller::ROOT, &size, None) {
                    let (path, size) = (waiting.path.escape_ascii(), file.size);
                    tracing::warn!(%path, size, %error, "a file that cannot be written is shorter than it was");
                }
            }
        }
        if segment.is_some() || file.segment == 0 {
            node.update(None, |state| {
                state.attributes.modified = file.modified;
                state.written_back = None;
                state.stamp += 1;
                state.time_dirty = true;
            });
        }
        Ok(held.node())
    }

    fn carry_bytes(&self, waiting: &Waiting, segment: &File, node: &Node) -> Result<()> {
        let Waiting { dirty, .. } = waiting;
        if dirty.file.holds
            && let Some((last, _)) = dirty.chunks.last()
        {
            node.hold(0..(last + 1) * CHUNK_BLOCKS, true)?;
        }
        // One that was being cut has its old size as long as it cannot be cut, and whole blocks are written without a look at what is below.
        let size = dirty.file.size.max(node.attributes()?.size);
        let buffers = BufferStore::default();
        let mut buffer = buffers.take((PIECE_BLOCKS + CHUNK_BLOCKS) as usize);
        let mut from = 0;
        while let Some(run) = dirty.next_run(from) {
            from = run.end;
            let offset = run.start * BLOCK;
            let length = (run.end * BLOCK).min(size).saturating_sub(offset) as usize;
            let bytes = &mut buffer[..length];
            read_with_zeros(segment, bytes, offset).map_err(|error| unreadable(&error))?;
            let mut done = 0;
            while done < length {
                let count = node.write(false, offset + done as u64, &bytes[done..])?.count;
                if count == 0 {
                    return Err(Error::new(Errno::ENOSPC, "the cache has no room for it"));
                }
                done += count;
            }
        }
        Ok(())
    }
}

impl Cache {
    /// Whether something of a file is newer here than below.
    #[must_use]
    pub fn is_behind(&self, node: NodeId) -> bool {
        self.core.get(node).is_some_and(|node| {
            let state = sync::read(&node.state);
            state.is_unsettled() && !state.orphan
        })
    }
}
