//! What is kept of a layer that others change, too: until an upcall says so, or as long as the layer below says, when it is asked, that it is
//! as it was ([`Coherence`]). No change of such a layer is delayed.
//!
//! Attributes and content are of one version: the attributes' `change`. When that is another one, content and names go. So also after a change
//! by this layer, as nobody can say whether others have changed something before it.

use crate::core::Core;
use crate::names::Known;
use crate::node::Node;
use crate::node_state::State;
use crate::sync::{lock, read};
use poolfs_libservice::{Result, Stale, Upcalls};
use poolfs_types::{Attributes, Name, NodeId};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

impl State {
    /// Nothing that is kept is so any more, but for what a node always has.
    pub(crate) fn invalidate(&mut self) {
        self.end_view();
        self.blocks.change_existing(0..u64::MAX, |chunk, mask| chunk.clear(mask));
        self.empty();
        self.epoch += 1;
        self.outdate();
    }

    fn outdate(&mut self) {
        self.xattrs = Vec::new();
        self.stale = true;
        self.stamp += 1;
        self.written_back = None;
    }

    /// Goes by an answer that was asked for at that time.
    pub(crate) fn go_by(&mut self, below: &Attributes, asked: Instant) {
        if self.version.becomes(below.change, asked) {
            self.invalidate();
        }
    }

    fn is_known_since(&self, asked: Instant, validity: Duration) -> bool {
        !self.stale && self.version.is_known_since(asked, validity)
    }
}

impl Node {
    /// Before a call uses what is kept: sees to it that it is what the call may go by.
    pub(crate) fn validate(&self) -> Result<()> {
        let coherence = self.core.coherence;
        if !coherence.is_shared() {
            return Ok(());
        }
        let is_valid = {
            let state = read(&self.state);
            match coherence.validity() {
                Some(validity) => state.is_known_since(Instant::now(), validity),
                None => !state.stale,
            }
        };
        if is_valid { Ok(()) } else { self.ask().map(drop) }
    }

    fn mark(&self, mark: impl FnOnce(&mut State)) {
        self.taking_away(|| self.update(None, mark));
    }
}

impl Core<Node> {
    /// What is known of a name.
    pub(crate) fn known(&self, parent: NodeId, name: Name<'_>) -> Option<Known> {
        self.names.get(parent, name, self.epoch_of_names(parent))
    }

    /// What tells, when it is taken before a call below, whether names that it says are so when they are noted.
    pub(crate) fn epoch_of_names(&self, directory: NodeId) -> u64 {
        if !self.coherence.is_shared() {
            return 0;
        }
        self.get(directory).map_or(0, |node| read(&node.state).epoch)
    }

    fn each_above(&self, tell: impl FnOnce(&dyn Upcalls)) {
        let above = lock(&self.above).clone();
        if let Some(above) = above.and_then(|above| above.upgrade()) {
            tell(&*above);
        }
    }

    /// Answers that were asked for before may be outdated.
    fn outdate_answers(&self) {
        self.removals.fetch_add(1, Ordering::AcqRel);
    }
}

impl Upcalls for Core<Node> {
    fn stale(&self, node: NodeId, what: Stale) {
        self.outdate_answers();
        if let Some(kept) = self.get(node) {
            match what {
                Stale::Attributes => kept.mark(State::outdate),
                Stale::Content => kept.mark(State::invalidate),
            }
        }
        self.each_above(|above| above.stale(node, what));
    }

    fn names(&self, directory: NodeId) {
        self.outdate_answers();
        if let Some(kept) = self.get(directory) {
            kept.mark(|state| state.epoch += 1);
        }
        self.each_above(|above| above.names(directory));
    }

    fn lost(&self) {
        self.outdate_answers();
        let nodes: Vec<Arc<Node>> = self.nodes();
        nodes.iter().for_each(|kept| kept.mark(State::invalidate));
        self.each_above(|above| above.lost());
    }
}
