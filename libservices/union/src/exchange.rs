//! Exchange of two names of the upper branch, also where its backend has none: CephFS does not.
//!
//! There it takes three renames, by way of a name beside the work directory, with a note of them before
//! ([`exchange_note`](crate::exchange_note)). Nobody sees the branch in between: callers hold the namespace lock for writing.

use crate::Union;
use crate::exchange_note::{ASIDE, NOTE, complete, text};
use crate::format::DIRECTORY;
use crate::node::Node;
use crate::temporary::Temporary;
use crate::upper_names::find;
use crate::work::Work;
use poolfs_libservice::{Durability, Held, Opened, Result};
use poolfs_types::{Caller, FileType, Name, NodeId, OpenFlags, RenameFlags};

const ROOT: &Caller = &Caller::ROOT;
const NONE: RenameFlags = RenameFlags::empty();

/// A name in a directory of the upper branch.
#[derive(Clone, Copy)]
pub(crate) struct Side<'a> {
    pub directory: NodeId,
    pub name: Name<'a>,
    pub at: At<'a>,
}

/// Which directory it is.
#[derive(Clone, Copy)]
pub(crate) enum At<'a> {
    /// one of the union
    Union(&'a Node),
    /// one that has this name in the work directory
    Nested(&'a [u8]),
    /// the work directory
    Work,
}

impl Side<'_> {
    fn path(&self) -> Vec<u8> {
        let work = [DIRECTORY, b"/work"].concat();
        let directory = match self.at {
            At::Union(node) => node.path_bytes(),
            At::Nested(name) => Some([&work, name].join(&b'/')),
            At::Work => Some(work),
        };
        directory.map_or_else(|| self.name.as_bytes().to_vec(), |path| [&path, self.name.as_bytes()].join(&b'/'))
    }
}

impl Work {
    /// Writes the note: it is whole, and on disk, or not there.
    fn note_exchange(&self, sides: [&Side<'_>; 2]) -> Result<()> {
        let text = text(sides.map(Side::path))?;
        let mut note = Temporary::new(self);
        let (entry, handle) = self.upper.create(ROOT, note.parent(), note.name()?, 0o600, OpenFlags::WRITE_ONLY)?;
        note.holds(FileType::Regular);
        drop(Held::new(&self.upper, entry.node));
        let file = Opened::new(&self.upper, handle);
        file.write_full(0, &text)?;
        self.upper.fsync(ROOT, file.id(), Durability::All)?;
        drop(file);
        self.upper.rename(ROOT, note.parent(), note.name()?, self.top.node(), Name::new(NOTE)?, NONE)?;
        note.moved_away();
        Ok(())
    }
}

impl Temporary<'_> {
    /// It in the upper branch.
    pub fn side(&self) -> Result<Side<'_>> {
        Ok(Side { directory: self.parent(), name: self.name()?, at: At::Work })
    }
}

impl Union {
    /// Exchanges two names, both of which exist.
    pub(crate) fn exchange_names(&self, caller: &Caller, first: Side<'_>, second: Side<'_>) -> Result<()> {
        let upper = &self.upper;
        if self.work.exchanges {
            let (from, to) = (first, second);
            return upper.rename(caller, from.directory, from.name, to.directory, to.name, RenameFlags::EXCHANGE);
        }
        let (top, aside) = (&self.work.top, Name::new(ASIDE)?);
        // Of an exchange that could be neither completed nor undone when it failed.
        complete(upper, top)?;
        self.work.note_exchange([&first, &second])?;
        let moved = upper
            .rename(ROOT, second.directory, second.name, top.node(), aside, NONE)
            .and_then(|()| upper.rename(ROOT, first.directory, first.name, second.directory, second.name, NONE))
            .and_then(|()| upper.rename(ROOT, top.node(), aside, first.directory, first.name, NONE));
        if moved.is_err() && find(upper, first.directory, first.name.as_bytes())?.is_none() {
            // Else what is on its way would be completed here, which is told to have failed.
            upper.rename(ROOT, second.directory, second.name, first.directory, first.name, NONE)?;
        }
        let ended = complete(upper, top);
        moved?;
        // What is done is done: the note says nothing any more, and is looked at again.
        if let Err(error) = ended {
            tracing::warn!(%error, "the note of an exchange stays in an upper branch");
        }
        Ok(())
    }
}
