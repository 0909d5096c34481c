//! Cached content that a layer gives away by descriptor, so that it is read or mapped without asking the layer.

use crate::{Libservice, Result, fail};
use poolfs_types::{Errno, HandleId};
use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A layer that has cached content to share.
pub trait SharedContent: Send + Sync {
    /// The file's cached bytes, for clients that read them without asking. Before the file's content comes to be anywhere
    /// else, the layer revokes `lease`; while it is not revoked, what the segment's map shows is what `read` returns.
    ///
    /// # Errors
    /// `EBADF`; `EOPNOTSUPP` when the layer has no such bytes, or not for this file now.
    fn segment(&self, handle: HandleId, lease: &Arc<dyn Lease>) -> Result<Segment>;

    /// All bytes of a program, for the kernel, which maps it from there and reads it by itself. They stay where they are until
    /// what comes with them is dropped. Only of a file that is a program (ELF) and whose bytes are where nothing ever changes: the
    /// layer above may come to have others for the file, but these stay. `holder`: whose processes have them from here on; nothing is given
    /// while it is suspended.
    ///
    /// # Errors
    /// `EBADF`; `EOPNOTSUPP` when the file is none of those, or too large; `ENOMEM` when there is no room for it now.
    fn text(&self, handle: HandleId, holder: Option<&Arc<dyn Holder>>) -> Result<Text>;

    /// All bytes of a file, in another one that a process may map instead. They stay there for as long as anybody has that one open
    /// or mapped. Only of a file that is opened to be read and whose bytes are where nothing ever changes, as [`SharedContent::text`]:
    /// what is mapped does not follow when the layer above comes to have others for the file. `holder`: as there.
    ///
    /// # Errors
    /// `EBADF`; `EOPNOTSUPP` when the file is none of those, too large, or so little of it cached that it is not worth reading all;
    /// `ENOMEM` when there is no room for it now.
    fn lend(&self, handle: HandleId, holder: Option<&Arc<dyn Holder>>) -> Result<OwnedFd>;
}

/// The shared content of a layer.
///
/// # Errors
/// `EOPNOTSUPP` when it has none.
pub fn shared_content(layer: &dyn Libservice) -> Result<&dyn SharedContent> {
    layer.shared_content().map_or_else(|| fail(Errno::EOPNOTSUPP), Ok)
}

/// A file's cached bytes and the map that says which of them are there, as read-only descriptors.
#[derive(Debug)]
pub struct Segment {
    /// The map.
    pub map: OwnedFd,
    /// The bytes, at their offsets.
    pub data: OwnedFd,
    /// Blocks of the map.
    pub capacity: u64,
}

/// All bytes of a program.
pub struct Text {
    /// A file that is as long as the program, and that nobody can open for writing by this descriptor.
    pub file: OwnedFd,
    /// Its length.
    pub bytes: u64,
    /// Keeps the bytes where they are.
    pub pin: Arc<dyn Any + Send + Sync>,
}

/// The right to take a segment for a file's content.
pub trait Lease: Send + Sync {
    /// Ends it, for good, before this returns.
    fn revoke(&self);

    /// Whose clients have the segment, also when the lease is over.
    fn holder(&self) -> Option<Arc<dyn Holder>> {
        None
    }
}

/// Clients that are given segments, programs for their kernel, and files to map.
pub trait Holder: Send + Sync {
    /// Of what they have, or had, `taken` bytes were taken away, and of those so many stayed in memory all the same: somebody keeps them.
    fn stayed(&self, taken: u64, stayed: u64);

    /// Whether they keep what is taken away, so that nothing more may come into what they have.
    fn is_suspended(&self) -> bool;
}
