//! Name lookup: from a directory node and one component to a node.

use crate::error::backend;
use crate::filesystem::{device_of, is_connected, open_name, stat};
use crate::local::Local;
use crate::nodes::Node;
use poolfs_libservice::{Entry, Result, fail};
use poolfs_types::{Errno, FileType, Name, NodeId};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags, Statx};
use std::sync::{Arc, PoisonError};

/// The type in a `stat` of the kernel.
pub(crate) fn type_of(stat: &Statx) -> FileType {
    FileType::from_mode(u32::from(stat.stx_mode)).unwrap_or(FileType::Regular)
}

impl Local {
    /// The node, if it is a directory.
    pub(crate) fn directory(&self, id: NodeId) -> Result<Arc<Node>> {
        let node = self.nodes.get(id)?;
        if node.file_type == FileType::Directory { Ok(node) } else { fail(Errno::ENOTDIR) }
    }

    /// A descriptor of a directory that is still inside the tree.
    pub(crate) fn entered(&self, node: &Node) -> Result<Arc<OwnedFd>> {
        let descriptor = self.nodes.descriptor(node)?;
        if node.id != NodeId::ROOT
            && !is_connected(&descriptor).map_err(|raw| backend("checking a directory's place", raw))?
        {
            return fail(Errno::ESTALE);
        }
        Ok(descriptor)
    }

    pub(crate) fn find(&self, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        let parent = self.directory(parent)?;
        let _names = parent.names.read().unwrap_or_else(PoisonError::into_inner);
        let directory = self.entered(&parent)?;
        let found = self
            .nodes
            .with_room(|| open_name(&directory, name.as_bytes(), OFlags::PATH, Mode::empty()))
            .map_err(|raw| backend("looking a name up", raw))?;
        let first = stat(&found).map_err(|raw| backend("identifying a file", raw))?;
        self.entry(&Arc::new(found), &first)
    }

    /// The entry of what the `O_PATH` descriptor `found` is; `first` is what a look at it has said. It is looked at again after
    /// its node is in the table: whoever removes the last name either finds the node there, or is noticed here.
    pub(crate) fn entry(&self, found: &Arc<OwnedFd>, first: &Statx) -> Result<Entry> {
        self.admitted(found, first, || stat(found))
    }

    /// The entry of what the caller has made, as it was `made`. There is no second look: what got a name cannot have lost it, because
    /// the caller has kept those who remove names from the directory, and what got none has none to lose.
    pub(crate) fn entry_of_new(&self, found: &Arc<OwnedFd>, made: &Statx) -> Result<Entry> {
        self.admitted(found, made, || Ok(*made))
    }

    /// The entry of an inode, whose node and descriptor are remembered; `now` says what it is when the node is in the table.
    fn admitted(
        &self,
        found: &Arc<OwnedFd>,
        first: &Statx,
        now: impl FnOnce() -> rustix::io::Result<Statx>,
    ) -> Result<Entry> {
        let fault = |raw| backend("identifying a file", raw);
        let identity = self.backing.identity(found, first).map_err(fault)?;
        let node = self.nodes.acquire(identity, type_of(first), device_of(first), || Ok(Arc::clone(found)))?;
        let remembered = now().map_err(fault).and_then(|now| {
            if now.stx_nlink == 0 && !node.is_kept() {
                self.nodes.keep(&node, found, self.nodes.permit()?);
            }
            self.nodes.remember(&node, found);
            Ok(Entry { node: node.id, attributes: self.attributes(&now) })
        });
        remembered.inspect_err(|_| self.nodes.forget(node.id, 1))
    }
}
