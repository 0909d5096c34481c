//! Files that wait for a replay: a service had accepted changes of them before it died, and they could not be applied when the
//! union was opened.
//!
//! The changes are known for the file as it was. Nobody reads or writes it meanwhile: a reader would see, and a writer build on,
//! the content from before, and the next union would put the old over the new. So such a file is answered `EIO` until the branch
//! is mounted again and the obstacle is gone.

use crate::Union;
use crate::branch::LowerNode;
use crate::first_write::FirstWrite;
use poolfs_libservice::{Error, Result};
use poolfs_types::Errno;
use std::collections::HashSet;

/// What is known of these files.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    /// ids of sketches
    sketches: HashSet<[u8; 16]>,
    /// lower files that have no upper ones, by the ids of their layers and their paths in these
    lowers: HashSet<(String, Vec<u8>)>,
    /// where the union shows them
    paths: Vec<Vec<u8>>,
}

fn lower_of(first: &FirstWrite) -> (String, Vec<u8>) {
    (first.origin.layer_id.clone(), first.origin.path.clone())
}

impl Waiting {
    /// The sketch with this id waits.
    pub fn add_sketch(&mut self, id: [u8; 16]) {
        self.sketches.insert(id);
    }

    /// The file waits that was written for the first time.
    pub fn add_first_write(&mut self, first: &FirstWrite) {
        self.lowers.insert(lower_of(first));
        self.paths.push(first.path.clone());
    }

    /// Whether the file of another first write waits already.
    pub fn has(&self, first: &FirstWrite) -> bool {
        self.lowers.contains(&lower_of(first))
    }

    fn is_below(&self, directory: &[u8]) -> bool {
        self.paths.iter().any(|path| path.strip_prefix(directory).is_some_and(|rest| rest.first() == Some(&b'/')))
    }
}

/// What is said of such a file.
const CAUSE: &str = "what a service that died had accepted for it could not be made good: mount the branch again";

impl Union {
    /// Why a sketch cannot be used, if it waits.
    pub(crate) fn sketch_waits(&self, id: &[u8; 16]) -> Option<&'static str> {
        self.waiting.get().filter(|waiting| waiting.sketches.contains(id)).map(|_| CAUSE)
    }

    /// The same of a file that has no upper one.
    pub(crate) fn lower_waits(&self, lower: &LowerNode) -> Option<&'static str> {
        let waiting = self.waiting.get().filter(|waiting| !waiting.lowers.is_empty())?;
        let key = (self.lowers[lower.layer].layer_id.clone(), lower.path.to_vec());
        waiting.lowers.contains(&key).then_some(CAUSE)
    }

    /// Whether what is below a directory may get other paths.
    ///
    /// # Errors
    /// `EIO` when a file waits there that could not be found by another one.
    pub(crate) fn paths_may_change(&self, directory: &[u8]) -> Result<()> {
        match self.waiting.get() {
            Some(waiting) if waiting.is_below(directory) => {
                Err(Error::new(Errno::EIO, format!("of a file in {}, {CAUSE}", directory.escape_ascii())))
            }
            _ => Ok(()),
        }
    }

    /// Whether all that was accepted is in the upper branch, or can be brought there.
    ///
    /// # Errors
    /// `EIO` when something waits that is not in it.
    pub(crate) fn nothing_waits(&self) -> Result<()> {
        match self.waiting.get() {
            Some(waiting) if !waiting.lowers.is_empty() => {
                Err(Error::new(Errno::EIO, format!("of {} files, {CAUSE}", waiting.lowers.len())))
            }
            _ => Ok(()),
        }
    }
}
