//! What the union holds of its branches: nodes, open handles and directories, each given back when dropped.

use poolfs_libservice::{Libservice, Result};
use poolfs_types::{Caller, Errno, HandleId, NodeId, OpenFlags};
use std::sync::Arc;

/// One branch's layer.
pub(crate) type Branch = Arc<dyn Libservice>;

/// A reference on a node of a branch.
pub(crate) struct Held {
    branch: Branch,
    node: NodeId,
}

impl Held {
    /// Takes over a reference that the branch has given.
    pub fn new(branch: &Branch, node: NodeId) -> Self {
        Held { branch: branch.clone(), node }
    }

    pub fn node(&self) -> NodeId {
        self.node
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.node != NodeId::ROOT {
            self.branch.forget(self.node, 1);
        }
    }
}

/// An open file or directory of a branch.
pub(crate) struct Opened {
    branch: Branch,
    handle: HandleId,
}

impl Opened {
    /// Takes over a handle that the branch has given.
    pub fn new(branch: &Branch, handle: HandleId) -> Self {
        Opened { branch: branch.clone(), handle }
    }

    pub fn file(branch: &Branch, caller: &Caller, node: NodeId, flags: OpenFlags) -> Result<Self> {
        Ok(Self::new(branch, branch.open(caller, node, flags)?))
    }

    pub fn directory(branch: &Branch, node: NodeId) -> Result<Self> {
        Ok(Self::new(branch, branch.opendir(&Caller::ROOT, node)?))
    }

    pub fn branch(&self) -> &Branch {
        &self.branch
    }

    pub fn id(&self) -> HandleId {
        self.handle
    }

    /// Reads until `buffer` is full or the file ends; returns how many bytes.
    pub fn read_full(&self, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            match self.branch.read(&Caller::ROOT, self.handle, offset + done as u64, &mut buffer[done..])? {
                0 => break,
                count => done += count,
            }
        }
        Ok(done)
    }

    /// Writes all of `data` or fails.
    pub fn write_full(&self, offset: u64, data: &[u8]) -> Result<()> {
        let mut done = 0;
        while done < data.len() {
            done += self.write_some(offset + done as u64, &data[done..])?;
        }
        Ok(())
    }

    /// Writes at least one byte of `data`, which is not empty, or fails; returns how many.
    pub fn write_some(&self, offset: u64, data: &[u8]) -> Result<usize> {
        match self.branch.write(&Caller::ROOT, self.handle, offset, data)?.count {
            0 => Err(Errno::ENOSPC.into()),
            count => Ok(count),
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.branch.release(self.handle);
    }
}

/// A node of a lower branch and where it was found.
#[derive(Clone)]
pub(crate) struct LowerNode {
    /// index of the branch, 0 the topmost
    pub layer: usize,
    pub held: Arc<Held>,
    /// from the branch's root, without a leading slash
    pub path: Arc<[u8]>,
}

/// `parent/name`, or `name` in the root.
pub(crate) fn join(parent: &[u8], name: &[u8]) -> Arc<[u8]> {
    if parent.is_empty() { Arc::from(name) } else { [parent, b"/", name].concat().into() }
}
