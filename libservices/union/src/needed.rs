//! Notes in an upper branch about the lower layers that its files need.
//!
//! A layer is noted when the first file is copied up from it. If the union is later opened without that layer, it can tell that
//! there may be files which cannot be read. A note is a hint: it stays when the last such file is gone.

use crate::upper_names::{find, first_names};
use crate::work::Work;
use crate::{LAYER_ID_MAX, Lower};
use poolfs_libservice::{Branch, Held, Result};
use poolfs_types::{Caller, Errno, FileType, Name};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use xxhash_rust::xxh3::xxh3_128;

/// The directory of notes in the work directory: symbolic links, each to the id of a layer.
const DIRECTORY: &[u8] = b"layers";
/// Most notes that are read.
const NOTES_MAX: usize = 1024;
const ROOT: &Caller = &Caller::ROOT;

/// What of it is noted.
#[derive(Default)]
pub(crate) struct Needed {
    /// by lower branch: whether it is
    is_noted: Vec<AtomicBool>,
    missing: Vec<String>,
}

impl Needed {
    /// What an upper branch says that it needs, and which of these branches that is.
    pub fn read(upper: &Branch, top: &Held, lowers: &[Lower]) -> Result<Self> {
        let noted = noted(upper, top)?;
        let is_given = |id: &String| lowers.iter().any(|lower| lower.layer_id == *id);
        let is_noted = lowers.iter().map(|lower| AtomicBool::new(noted.contains(&lower.layer_id))).collect();
        Ok(Needed { is_noted, missing: noted.iter().filter(|id| !is_given(id)).cloned().collect() })
    }

    /// Layers that the upper branch needs, or needed once, and that the union has not.
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// Before a file is copied up of which bytes stay in the lower branch of that number.
    pub fn note(&self, work: &Work, layer: usize, id: &str) {
        let Some(is_noted) = self.is_noted.get(layer).filter(|is_noted| !is_noted.load(Ordering::Relaxed)) else {
            return;
        };
        match note(work, id) {
            Ok(()) => is_noted.store(true, Ordering::Relaxed),
            Err(error) => tracing::warn!(%error, layer = id, "that the upper branch needs a layer is not noted"),
        }
    }
}

fn note(work: &Work, id: &str) -> Result<()> {
    let upper = &work.upper;
    let directory = match find(upper, work.top.node(), DIRECTORY)? {
        Some((held, _)) => held,
        None => Held::new(upper, upper.mkdir(ROOT, work.top.node(), Name::new(DIRECTORY)?, 0o700)?.node),
    };
    let name = format!("{:032x}", xxh3_128(id.as_bytes()));
    match upper.symlink(ROOT, directory.node(), Name::new(name.as_bytes())?, id.as_bytes()) {
        Ok(entry) => drop(Held::new(upper, entry.node)),
        Err(error) if error == Errno::EEXIST => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

/// The ids that are noted. What is no note is passed over.
fn noted(upper: &Branch, top: &Held) -> Result<BTreeSet<String>> {
    let mut noted = BTreeSet::new();
    let Some((directory, _)) = find(upper, top.node(), DIRECTORY)?.filter(|(_, found)| found.is_directory()) else {
        return Ok(noted);
    };
    for (name, _) in first_names(upper, directory.node(), NOTES_MAX)? {
        let Some((held, attributes)) = find(upper, directory.node(), &name)? else { continue };
        if attributes.file_type == FileType::Symlink {
            let id = String::from_utf8(upper.readlink(ROOT, held.node())?);
            noted.extend(id.ok().filter(|id| id.len() <= LAYER_ID_MAX));
        }
    }
    Ok(noted)
}
