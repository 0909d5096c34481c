//! The first paths of objects with several names: what a layer's links lead to.
//!
//! How many there are, and how deep they are, whoever writes to the union decides. So what is kept of them is taken of the pool's memory, a
//! directory's path once for all that follow each other in it.

use super::ArchiveError;
use hashbrown::HashMap;
use poolfs_libservice::{Headroom, shown_path};
use std::sync::Arc;

/// What a piece of memory takes beside its bytes.
const PIECE_COST: u64 = 32;

struct FirstPath {
    directory: Arc<[u8]>,
    name: Box<[u8]>,
}

/// Those of objects by their inode numbers, with what they are charged to until they are dropped.
pub(super) struct FirstPaths {
    paths: HashMap<u64, FirstPath>,
    /// that of the last one, in which the next one mostly is, too
    directory: Arc<[u8]>,
    room: Arc<dyn Headroom>,
    /// bytes of directories and names
    pieces_bytes: u64,
    charged_bytes: u64,
}

impl FirstPaths {
    pub(super) fn new(room: Arc<dyn Headroom>) -> Self {
        Self { paths: HashMap::new(), directory: Arc::default(), room, pieces_bytes: 0, charged_bytes: 0 }
    }

    pub(super) fn get(&self, inode: u64) -> Option<Vec<u8>> {
        self.paths.get(&inode).map(|path| [&path.directory[..], &path.name].concat())
    }

    pub(super) fn insert(&mut self, inode: u64, path: &[u8]) -> Result<(), ArchiveError> {
        let name_at = path.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
        let (directory, name) = path.split_at(name_at);
        let is_new = self.paths.is_empty() || *self.directory != *directory;
        if is_new {
            self.directory = directory.into();
            self.pieces_bytes += directory.len() as u64 + PIECE_COST;
        }
        self.pieces_bytes += name.len() as u64 + PIECE_COST;
        let _ = self.paths.insert(inode, FirstPath { directory: Arc::clone(&self.directory), name: name.into() });
        self.charge(path)
    }

    /// Charges what has come to be taken.
    fn charge(&mut self, path: &[u8]) -> Result<(), ArchiveError> {
        let bytes = self.paths.allocation_size() as u64 + self.pieces_bytes;
        let more = bytes.saturating_sub(self.charged_bytes);
        if more > 0 && !self.room.add(more) {
            return Err(ArchiveError::Linked { count: self.paths.len(), path: shown_path(path) });
        }
        self.charged_bytes += more;
        Ok(())
    }
}

impl Drop for FirstPaths {
    fn drop(&mut self) {
        self.room.subtract(self.charged_bytes);
    }
}
