//! Mmap exports: files that processes were given to map ([`crate::text`]).
//!
//! No process reports when the last user of such a file is gone, and none could be trusted to: a mapping outlives its descriptor
//! and its process. The kernel knows, and is asked periodically.

use crate::core::Core;
use crate::sync::{lock, try_lock};
use crate::text::Pin;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// What is lent; as many files as may be pinned at most.
#[derive(Default)]
pub(crate) struct MmapExports(Mutex<BTreeMap<usize, Arc<Pin>>>);

impl MmapExports {
    /// Keeps what a descriptor was opened of, which is open still.
    pub(crate) fn note(&self, pin: Arc<Pin>) {
        lock(&self.0).insert(pin.number(), pin);
    }

    /// Lets go what nobody has any more. By one thread at a time.
    pub(crate) fn visit(&self) {
        let Some(mut mmap_exports) = try_lock(&self.0) else { return };
        let over: Vec<_> = mmap_exports.extract_if(.., |_, pin| !pin.is_used()).collect();
        drop(mmap_exports);
        over.iter().for_each(|(_, pin)| pin.let_go());
        drop(over);
    }

    /// Lets go what is of a layer whose end has come.
    pub(crate) fn end(&self, core: &Arc<Core>) {
        let over: Vec<_> = lock(&self.0).extract_if(.., |_, pin| pin.is_of(core)).collect();
        drop(over);
    }
}
