//! Mmap exports: files that processes were given to map ([`crate::text`]).
//!
//! No process reports when the last user of such a file is gone, and none could be trusted to: a mapping outlives its descriptor
//! and its process. The kernel knows, and is asked periodically.

use crate::pins::Pinned;
use crate::sync::{lock, try_lock};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// What is lent; as many files as may be pinned at most.
#[derive(Default)]
pub(crate) struct MmapExports(Mutex<BTreeMap<usize, Arc<dyn Pinned>>>);

impl MmapExports {
    /// Keeps what a descriptor was opened of, which is open still.
    pub(crate) fn note(&self, pin: Arc<dyn Pinned>) {
        lock(&self.0).insert(pin.file(), pin);
    }

    /// Lets go what nobody has any more. By one thread at a time.
    pub(crate) fn visit(&self) {
        let Some(mut mmap_exports) = try_lock(&self.0) else { return };
        let over: Vec<_> = mmap_exports.extract_if(.., |_, pin| !pin.is_used()).collect();
        drop(mmap_exports);
        over.iter().for_each(|(_, pin)| pin.let_go());
        drop(over);
    }

    /// Lets go what is of a layer whose end has come ([`Pinned::layer`]).
    pub(crate) fn end(&self, layer: usize) {
        let over: Vec<_> = lock(&self.0).extract_if(.., |_, pin| pin.layer() == layer).collect();
        drop(over);
    }
}
