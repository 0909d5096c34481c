//! Guards for what a layer holds in the layer below: node references, open files and open directories, each released on drop.

use crate::{Libservice, PartOf, ReadTarget, Result, Written};
use poolfs_types::{Caller, Errno, HandleId, NodeId, OpenFlags};
use std::sync::Arc;

/// A layer below another.
pub type Branch = Arc<dyn Libservice>;

/// A reference on a node of a branch.
pub struct Held {
    branch: Branch,
    node: NodeId,
}

impl Held {
    /// Takes over a reference that the branch has given.
    #[must_use]
    pub fn new(branch: &Branch, node: NodeId) -> Self {
        Held { branch: branch.clone(), node }
    }

    /// The node.
    #[must_use]
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
pub struct Opened {
    branch: Branch,
    handle: HandleId,
}

impl Opened {
    /// Takes over a handle that the branch has given.
    #[must_use]
    pub fn new(branch: &Branch, handle: HandleId) -> Self {
        Opened { branch: branch.clone(), handle }
    }

    /// Opens a regular file.
    ///
    /// # Errors
    /// Those of [`Libservice::open`].
    pub fn file(branch: &Branch, caller: &Caller, node: NodeId, flags: OpenFlags) -> Result<Self> {
        Ok(Self::new(branch, branch.open(caller, node, flags)?))
    }

    /// Opens a directory for listing.
    ///
    /// # Errors
    /// Those of [`Libservice::opendir`].
    pub fn directory(branch: &Branch, node: NodeId) -> Result<Self> {
        Ok(Self::new(branch, branch.opendir(&Caller::ROOT, node)?))
    }

    /// The layer it is open in.
    #[must_use]
    pub fn branch(&self) -> &Branch {
        &self.branch
    }

    /// The handle.
    #[must_use]
    pub fn id(&self) -> HandleId {
        self.handle
    }

    /// One read of the layer.
    ///
    /// # Errors
    /// Those of [`Libservice::read`].
    pub fn read(&self, caller: &Caller, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        self.branch.read(caller, self.handle, offset, buffer)
    }

    /// The same into a target.
    ///
    /// # Errors
    /// Those of [`Libservice::read_into`].
    pub fn read_into(&self, caller: &Caller, offset: u64, target: &mut dyn ReadTarget) -> Result<usize> {
        self.branch.read_into(caller, self.handle, offset, target)
    }

    /// One write of the layer.
    ///
    /// # Errors
    /// Those of [`Libservice::write`].
    pub fn write(&self, caller: &Caller, offset: u64, data: &[u8]) -> Result<Written> {
        self.branch.write(caller, self.handle, offset, data)
    }

    /// Reads until `buffer` is full or the file ends; returns how many bytes.
    ///
    /// # Errors
    /// Those of [`Libservice::read`].
    pub fn read_full(&self, offset: u64, mut buffer: &mut [u8]) -> Result<usize> {
        self.read_full_into(offset, &mut buffer)
    }

    /// The same into a target.
    ///
    /// # Errors
    /// Those of [`Libservice::read_into`].
    pub fn read_full_into(&self, offset: u64, target: &mut dyn ReadTarget) -> Result<usize> {
        let length = target.buffer().len();
        let mut done = 0;
        while done < length {
            match self.read_into(&Caller::ROOT, offset + done as u64, &mut PartOf::new(target, done..length))? {
                0 => break,
                count => done += count,
            }
        }
        Ok(done)
    }

    /// Writes all of `data` or fails.
    ///
    /// # Errors
    /// Those of [`Libservice::write`], `ENOSPC` when it takes nothing more.
    pub fn write_full(&self, offset: u64, data: &[u8]) -> Result<()> {
        crate::write_whole(&*self.branch, &Caller::ROOT, self.handle, offset, data)
    }

    /// Writes at least one byte of `data`, which is not empty, or fails; returns how many.
    ///
    /// # Errors
    /// As [`Opened::write_full`].
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
