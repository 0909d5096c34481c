//! Temporary objects in the work directory: whatever has not left it when the operation ends is removed.

use crate::work::{Work, remove_tree};
use poolfs_libservice::Result;
use poolfs_types::{FileType, Name, NodeId};

/// A name in the work directory, for one operation.
pub(crate) struct Temporary<'a> {
    work: &'a Work,
    name: Vec<u8>,
    holds: Option<FileType>,
}

impl<'a> Temporary<'a> {
    pub fn new(work: &'a Work) -> Self {
        Temporary { work, name: work.temporary(), holds: None }
    }

    /// The work directory.
    pub fn parent(&self) -> NodeId {
        self.work.work.node()
    }

    pub fn name(&self) -> Result<Name<'_>> {
        Name::new(&self.name).map_err(Into::into)
    }

    /// Says that something of this type has the name now, which has to go with it.
    pub fn holds(&mut self, file_type: FileType) {
        self.holds = Some(file_type);
    }

    /// Says that what had the name has it no more.
    pub fn moved_away(mut self) {
        self.holds = None;
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        let Some(file_type) = self.holds else { return };
        // What stays although nobody can see it is swept at the next opening; the operation is not the worse for it.
        if let Err(error) = self.work.remove(&self.name, file_type) {
            tracing::warn!(%error, "something stays in the work directory of an upper branch");
        }
    }
}

impl Work {
    fn remove(&self, name: &[u8], file_type: FileType) -> Result<()> {
        remove_tree(&self.upper, &self.work, name, file_type)
    }
}
