//! Cached answers of the layer below beside a node: a symbolic link's target, and extended attributes.
//!
//! They are not content: a container has as many nodes as it can hold, each with some kilobytes of answers. So they are charged
//! to the budget. All answers together are limited to a part of it, of which each layer has its share. Beyond that nothing is
//! cached, and the layer below is asked each time. While memory is short no answers are cached, and those already cached are
//! dropped.

use crate::pool::Pool;
use poolfs_libservice::Share;
use std::sync::Arc;

/// What one takes beside its bytes: its place in the node, what the C library adds to its pieces, and what counts it.
const ANSWER_COST: u64 = 192;

/// Room for an answer; given back when it is dropped, whatever drops it.
pub(crate) struct AnswerRoom {
    pool: Arc<Pool>,
    share: Arc<Share>,
    bytes: u64,
}

impl AnswerRoom {
    /// Room for one of so many bytes in the share of its layer, if there is some. Not to be called with a state locked: content may have to leave
    /// for it.
    pub(crate) fn take(pool: &Arc<Pool>, share: &Arc<Share>, length: usize) -> Option<Self> {
        let bytes = length as u64 + ANSWER_COST;
        if pool.is_short() || !share.add(bytes) {
            return None;
        }
        pool.budget.charge(bytes);
        Some(Self { pool: Arc::clone(pool), share: Arc::clone(share), bytes })
    }
}

impl Drop for AnswerRoom {
    fn drop(&mut self) {
        self.share.subtract(self.bytes);
        self.pool.budget.discharge(self.bytes);
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
