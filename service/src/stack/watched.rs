//! A filter that watches the calls into a branch, so that one which does not respond is found.

use crate::in_flight::InFlight;
use poolfs_libservice::{Filter, Libservice, Operation, Result};
use std::sync::Arc;

/// A layer whose calls are watched.
pub(super) struct Watched {
    below: Arc<dyn Libservice>,
    calls: Arc<InFlight>,
}

impl Watched {
    /// `below`, with its calls noted in `calls` while they are in flight, by the position of their [`Operation`].
    pub fn over(below: Arc<dyn Libservice>, calls: &Arc<InFlight>) -> Arc<dyn Libservice> {
        Arc::new(Self { below, calls: Arc::clone(calls) })
    }
}

impl Filter for Watched {
    fn below(&self) -> &dyn Libservice {
        &*self.below
    }

    #[inline]
    fn enter(&self, operation: Operation) -> Result<impl Sized> {
        Ok(self.calls.begin(operation as u8))
    }
}
