//! Claims on a tree, against all clients of its cluster: an advisory lock on its directory.

use crate::client::OpenFile;
use crate::layer::Ceph;
use poolfs_types::Errno;

/// What a tree is claimed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimKind {
    /// To be changed: there is no other claim.
    Alone,
    /// To be read as it is, or changed by several who know that: there are only such claims.
    Shared,
}

/// As long as it is there, nobody has one that contradicts it. The metadata server gives it up with the session that has it at the latest:
/// when that is reset ([`crate::Source::holder`]), or was not heard of for a minute.
pub struct Claim(#[expect(dead_code, reason = "the lock is given up when it is closed")] OpenFile);

impl Ceph {
    /// Claims the tree; nothing while another claim contradicts it.
    ///
    /// # Errors
    /// What the metadata server refuses.
    pub fn claim(&self, kind: ClaimKind) -> Result<Option<Claim>, Errno> {
        let directory = self.nodes.root().map_err(|error| error.errno())?.inode.open(libc::O_RDONLY)?;
        match directory.lock(kind == ClaimKind::Alone) {
            Ok(()) => Ok(Some(Claim(directory))),
            Err(Errno::EAGAIN | Errno::EACCES) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}
