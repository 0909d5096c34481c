//! The names of a directory that are still to come in a walk which lists each directory in order.
//!
//! All directories on the way down have some, and how many is up to whoever made them. So they count as listings do, from the first on,
//! together with what else a directory on the way takes.

use crate::listing::{Counted, Memory};
use poolfs_libservice::Result;
use std::sync::Arc;

/// What a directory on the way takes besides its names: its nodes in all layers.
const DIRECTORY_COST: usize = 3072;

pub(crate) struct PendingNames {
    bytes: Vec<u8>,
    /// where each one begins, and how long it is; once they are in order, the last one first
    places: Vec<(usize, u8)>,
    counted: Counted,
}

impl PendingNames {
    pub fn new(memory: &Arc<Memory>) -> Self {
        PendingNames { bytes: Vec::new(), places: Vec::new(), counted: Counted::new(memory) }
    }

    fn cost(&self) -> usize {
        self.bytes.len() + self.places.len() * size_of::<(usize, u8)>() + DIRECTORY_COST
    }

    /// One more, in any order; it may have come before.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn push(&mut self, name: &[u8]) -> Result<()> {
        self.places.push((self.bytes.len(), name.len() as u8));
        self.bytes.extend_from_slice(name);
        self.counted.grow(self.cost())
    }

    /// Nothing more comes: from here on they can be taken, in order and each once.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn finish(mut self) -> Result<Self> {
        let name = |&(start, length): &(usize, u8)| &self.bytes[start..start + usize::from(length)];
        self.places.sort_unstable_by(|one, other| name(other).cmp(name(one)));
        self.places.dedup_by(|one, other| name(one) == name(other));
        self.places.shrink_to_fit();
        self.bytes.shrink_to_fit();
        self.counted.set(self.cost())?;
        Ok(self)
    }

    pub fn pop(&mut self) -> Option<&[u8]> {
        let (start, length) = self.places.pop()?;
        Some(&self.bytes[start..start + usize::from(length)])
    }
}
