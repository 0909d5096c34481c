//! Moves blocks of a sketch before their writer comes to them, as its [`Ahead`](crate::ahead::Ahead) says.

use crate::Union;
use crate::flatten::Zeros;
use crate::format::BLOCK;
use crate::node::Node;
use crate::sketch::Sketch;
use poolfs_libservice::{Held, PageBuffer};

impl Union {
    /// Moves the blocks of a sketch, whose lock is held, that are about to be written if its writer goes on as before. It is only a guess: when it
    /// fails, they move when they are written.
    pub(crate) fn move_ahead(&self, node: &Node, held: &Held, sketch: &mut Sketch) {
        let wanted = sketch.ahead.wanted();
        let Ok((map, _)) = sketch.parts() else { return };
        // The last block may be shorter than others, and grow.
        let end = wanted.end.min(sketch.record.limit.min(sketch.record.size) / BLOCK);
        // What could not be completed has its new bytes where others would be put.
        if wanted.start >= end || !sketch.transit.is_empty() {
            return;
        }
        let blocks = wanted.start..map.bitmap.run_end(wanted.start, end, false);
        match self.move_blocks(node, held, sketch, blocks, &mut PageBuffer::default(), Zeros::Stored) {
            Ok(_) => sketch.ahead.moved(),
            Err(error) => tracing::debug!(inode = node.inode, %error, "blocks did not move ahead of their writer"),
        }
    }
}
