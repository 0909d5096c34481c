//! Cached answers of the layer below beside a node: a symbolic link's target, and extended attributes.
//!
//! They are not content: a container has as many nodes as it can hold, each with some kilobytes of answers. So they are charged
//! to the budget. All answers together are limited to a part of it, of which each layer has its share. Beyond that nothing is
//! cached, and the layer below is asked each time. While memory is short no answers are cached, and those already cached are
//! dropped.

use crate::core::Core;
use crate::node::Node;
use crate::pool::Pool;
use crate::sync::write;
use std::sync::Arc;

/// What one takes beside its bytes: its place in the node, what the C library adds to its pieces, and what counts it.
const ANSWER_COST: u64 = 192;

/// Room for an answer; given back when it is dropped, whatever drops it.
pub(crate) struct AnswerRoom {
    core: Arc<Core>,
    bytes: u64,
}

impl AnswerRoom {
    /// Room for one of so many bytes, if there is some. Not to be called with a state locked: content may have to leave for it.
    pub(crate) fn take(core: &Arc<Core>, length: usize) -> Option<Self> {
        let bytes = length as u64 + ANSWER_COST;
        if core.pool.is_short() || !core.answers.add(bytes) {
            return None;
        }
        core.pool.budget.charge(bytes);
        Some(Self { core: Arc::clone(core), bytes })
    }
}

impl Drop for AnswerRoom {
    fn drop(&mut self) {
        self.core.answers.subtract(self.bytes);
        self.core.pool.budget.discharge(self.bytes);
    }
}

/// A symbolic link's target.
pub(crate) struct Target {
    pub(crate) bytes: Box<[u8]>,
    pub(crate) _room: AnswerRoom,
}

/// An extended attribute's value as last seen below; `None`: there is none.
pub(crate) struct CachedXattr {
    pub(crate) name: Box<[u8]>,
    pub(crate) value: Option<Box<[u8]>>,
    pub(crate) _room: AnswerRoom,
}

impl Node {
    fn give_up_answers(&self) {
        let mut state = write(&self.state);
        (state.target, state.xattrs) = (None, Vec::new());
    }
}

impl Pool {
    /// Gives up all answers, of all layers.
    pub(crate) fn give_up_answers(&self) {
        let layers = self.idle.layers();
        let with_answers = layers.iter().filter(|layer| layer.answers.used() > 0);
        with_answers.flat_map(|layer| layer.nodes()).for_each(|node| node.give_up_answers());
    }
}
