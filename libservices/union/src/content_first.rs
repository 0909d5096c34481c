//! Content before names: the content of a file that replaces another is in the upper branch before its name is.
//!
//! A power cut may preserve any change of names that was made and nothing of what the layers above the disk still delay. So
//! before a rename replaces a file, or exchanges two, the moved file's content is written: a deferred copy-up is made, a sketch
//! is flushed together with the bits that show its blocks, and of an ordinary file the upper layer writes what it delays. The
//! upper branch may have no object to replace, where the replaced file is only a lower one, and an exchange replaces none. Its
//! filesystem then has no reason to write the content first, so it is told ([`NameChange::Replaces`]).

use crate::Union;
use crate::copyup::Bytes;
use crate::node::{Content, Node};
use crate::resolve::Referenced;
use poolfs_libservice::{Durability, NameChange, Result};
use poolfs_types::{Caller, FileType};
use std::sync::Arc;

impl Union {
    /// Those of `nodes` whose content has to be written before their names change. With the list of those that were `written` before the
    /// namespace lock was taken, a rename by somebody else has come between: the others are written now.
    pub(crate) fn unwritten(
        &self,
        nodes: &[&Referenced<'_>],
        written: Option<&[Referenced<'_>]>,
    ) -> Result<Vec<Referenced<'_>>> {
        let is_written = |node: &Node| written.is_some_and(|written| written.iter().any(|other| other.id == node.id));
        let waits = nodes.iter().filter(|node| has_content_above(node) && !is_written(node));
        if written.is_none() {
            return Ok(waits.map(|node| self.refer(node)).collect());
        }
        for node in waits {
            if node.read().first_write.is_some() {
                self.copy_up(node, Bytes::Sketch)?;
            }
            self.write_content(node)?;
        }
        Ok(Vec::new())
    }

    /// Writes what is delayed of a file that is about to take another's place.
    pub(crate) fn write_content(&self, node: &Arc<Node>) -> Result<()> {
        self.complete_deferred(node)?;
        let Some(held) = node.upper() else { return Ok(()) };
        let is_behind = matches!(&node.read().content, Content::Sketch(sketch) if sketch.is_dirty());
        if is_behind {
            return self.flush_sketch(node, Durability::Data);
        }
        self.upper.write_before_names(&Caller::ROOT, held.node(), NameChange::Replaces)
    }

    /// Writes what the upper layer delays of a file that is about to get another name, without the namespace lock, which that may take
    /// long under. Content of a lower file is not lost with a name.
    pub(crate) fn write_before_link(&self, node: &Node) -> Result<()> {
        match node.upper() {
            Some(held) if node.file_type == FileType::Regular => {
                self.upper.write_before_names(&Caller::ROOT, held.node(), NameChange::Adds)
            }
            _ => Ok(()),
        }
    }
}

/// Whether something of a node's content is not the lower file's.
fn has_content_above(node: &Node) -> bool {
    let state = node.read();
    node.file_type == FileType::Regular && (state.upper.is_some() || state.first_write.is_some())
}
