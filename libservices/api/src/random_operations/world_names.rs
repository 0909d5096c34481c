//! Runs and compares the operations on names.

use super::operation::{Operation, Place};
use super::world::{Both, HeldHandle, ROOT_USER, Side, Verdict, World};
use crate::types::{FileType, Name, NodeId, RenameFlags, SetAttributes, SetTime, Timestamp};
use crate::{DirectoryEntry, Libservice, Result};
use std::collections::BTreeMap;
use std::ops::ControlFlow;

/// A listing: for each name, inode number and type.
pub(super) type Listing = BTreeMap<Vec<u8>, (u64, FileType)>;

/// More entries than any directory of a program has.
const ENTRIES_MAX: usize = 1 << 20;

impl World {
    pub(super) fn apply_to_names(&mut self, operation: &Operation) -> Verdict {
        match operation {
            Operation::Lookup(place) => {
                let (parent, name) = self.place(place)?;
                let found = self.both(|layer, side| layer.lookup(&ROOT_USER, parent.of(side), name))?;
                found.map_or(Ok(()), |entry| self.gained(entry))
            }
            Operation::Create { place, permissions, flags, caller } => {
                let (parent, name) = self.place(place)?;
                let made =
                    self.both(|layer, side| layer.create(caller, parent.of(side), name, *permissions, *flags))?;
                let Some(Both { subject, reference }) = made else { return Ok(()) };
                let id = Both { subject: subject.1, reference: reference.1 };
                let node = Both { subject: subject.0.node, reference: reference.0.node };
                self.handles.push(HeldHandle { id, node, flags: *flags });
                self.gained(Both { subject: subject.0, reference: reference.0 })?;
                self.check_attributes(parent)
            }
            Operation::Mknod { place, file_type, permissions, device, caller } => self
                .make(place, |layer, parent, name| {
                    layer.mknod(caller, parent, name, *file_type, *permissions, *device)
                }),
            Operation::Mkdir { place, permissions, caller } => {
                self.make(place, |layer, parent, name| layer.mkdir(caller, parent, name, *permissions))
            }
            Operation::Symlink { place, target, caller } => {
                self.make(place, |layer, parent, name| layer.symlink(caller, parent, name, &target.0))
            }
            Operation::Link { node, place } => {
                let (parent, name) = self.place(place)?;
                let node = self.nodes[*node].id;
                let made = self.both(|layer, side| layer.link(&ROOT_USER, node.of(side), parent.of(side), name))?;
                made.map_or(Ok(()), |entry| self.gained(entry))?;
                self.check_attributes(parent)
            }
            Operation::Unlink(place) => {
                let (parent, name) = self.place(place)?;
                self.equal(|layer, side| layer.unlink(&ROOT_USER, parent.of(side), name))?;
                self.check_attributes(parent)
            }
            Operation::Rmdir(place) => {
                let (parent, name) = self.place(place)?;
                self.equal(|layer, side| layer.rmdir(&ROOT_USER, parent.of(side), name))?;
                self.check_attributes(parent)
            }
            Operation::Rename { from, to, flags } => self.rename(from, to, *flags),
            Operation::Readlink(slot) => {
                let node = self.nodes[*slot].id;
                self.equal(|layer, side| layer.readlink(&ROOT_USER, node.of(side))).map(drop)
            }
            Operation::List { node, step } => {
                let node = self.nodes[*node].id;
                self.same_listing(node, *step).map(drop)
            }
            other => Err(format!("{other:?} is not about names")),
        }
    }

    fn rename(&mut self, from: &Place, to: &Place, flags: RenameFlags) -> Verdict {
        let ((from, name), (to, new_name)) = (self.place(from)?, self.place(to)?);
        let renamed =
            self.equal(|layer, side| layer.rename(&ROOT_USER, from.of(side), name, to.of(side), new_name, flags))?;
        if renamed.is_none() && flags.contains(RenameFlags::WHITEOUT) {
            // ext4 has put a whiteout there and taken it away again by then, which shows in the directory's time.
            let modified = Some(SetTime::At(Timestamp::default()));
            let changes = SetAttributes { modified, ..Default::default() };
            self.both(|layer, side| layer.setattr(&ROOT_USER, from.of(side), &changes, None))?;
        }
        self.check_attributes(from)?;
        self.check_attributes(to)
    }

    fn make(
        &mut self,
        place: &Place,
        call: impl Fn(&dyn Libservice, NodeId, Name<'_>) -> Result<crate::Entry>,
    ) -> Verdict {
        let (parent, name) = self.place(place)?;
        let made = self.both(|layer, side| call(layer, parent.of(side), name))?;
        made.map_or(Ok(()), |entry| self.gained(entry))?;
        self.check_attributes(parent)
    }

    fn place<'p>(&self, place: &'p Place) -> Verdict<(Both<NodeId>, Name<'p>)> {
        let name = Name::new(&place.name.0).map_err(|error| error.to_string())?;
        Ok((self.nodes[place.parent].id, name))
    }

    /// Lists a directory on both sides; names and types must agree, and inode numbers be the known ones.
    pub(super) fn same_listing(&mut self, node: Both<NodeId>, step: usize) -> Verdict<Listing> {
        let listings = self.both(|layer, side| {
            // The reference is listed in one go.
            list(layer, node.of(side), if side == Side::Subject { step } else { ENTRIES_MAX })
        })?;
        let Some(Both { subject, reference }) = listings else { return Ok(Listing::new()) };
        let (subject, reference) = (subject?, reference?);
        if let Some(name) = reference.keys().find(|&name| !subject.contains_key(name)) {
            return Err(format!("\"{}\" is missing in the listing", name.escape_ascii()));
        }
        for (name, &(inode, file_type)) in &subject {
            let name_text = name.escape_ascii();
            let Some(&(reference_inode, expected)) = reference.get(name) else {
                return Err(format!("the listing shows \"{name_text}\", which is not there"));
            };
            if file_type != expected {
                return Err(format!("the listing says \"{name_text}\" is a {file_type:?}, not a {expected:?}"));
            }
            let known = self.inodes.check(inode, reference_inode);
            known.map_err(|text| format!("\"{name_text}\" in the listing: {text}"))?;
        }
        Ok(reference)
    }
}

/// Walks a directory in steps of at most `step` entries; the inner error is a name that came twice, or no end.
fn list(layer: &dyn Libservice, node: NodeId, step: usize) -> Result<Verdict<Listing>> {
    let handle = layer.opendir(&ROOT_USER, node)?;
    let mut listing = Listing::new();
    let mut cookie = 0;
    let mut wrong = None;
    loop {
        let from = cookie;
        let mut taken = 0;
        let mut visit = |entry: DirectoryEntry<'_>| {
            if taken == step {
                return ControlFlow::Break(());
            }
            taken += 1;
            cookie = entry.cookie;
            let name = entry.name.as_bytes().to_vec();
            if listing.insert(name, (entry.inode, entry.file_type)).is_some() {
                wrong = Some(format!("{:?} comes twice in the listing", entry.name));
            }
            ControlFlow::Continue(())
        };
        let outcome = layer.readdir(&ROOT_USER, handle, from, &mut visit);
        if outcome.is_err() || taken == 0 || wrong.is_some() || listing.len() > ENTRIES_MAX {
            layer.release(handle);
            outcome?;
            return Ok(wrong.map_or(Ok(listing), Err));
        }
    }
}
