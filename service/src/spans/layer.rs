//! A filter that passes everything on and makes the thread's clock count for the layer below it.

use super::clock::enter;
use poolfs_libservice::types::{Caller, HandleId};
use poolfs_libservice::{DirectoryEntry, Filter, Libservice, Operation, Result};
use poolfs_service_protocol::Layer;
use std::ops::ControlFlow;
use std::sync::Arc;

/// A layer whose time is measured.
pub struct Timed {
    layer: Layer,
    inner: Arc<dyn Libservice>,
}

impl Timed {
    /// `inner`, whose time counts as that of `layer`.
    #[must_use]
    pub fn over(layer: Layer, inner: Arc<dyn Libservice>) -> Arc<dyn Libservice> {
        Arc::new(Self { layer, inner })
    }
}

impl Filter for Timed {
    fn below(&self) -> &dyn Libservice {
        &*self.inner
    }

    fn enter(&self, operation: Operation) -> Result<impl Sized> {
        Ok((operation != Operation::Readdir).then(|| enter(self.layer)))
    }

    /// What is done with the entries is the time of whoever asked for them.
    fn readdir(
        &self,
        caller: &Caller,
        handle: HandleId,
        cookie: u64,
        visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        let entered = enter(self.layer);
        let Some(above) = entered.above() else { return self.inner.readdir(caller, handle, cookie, visit) };
        self.inner.readdir(caller, handle, cookie, &mut |entry| {
            let _above = enter(above);
            visit(entry)
        })
    }
}
