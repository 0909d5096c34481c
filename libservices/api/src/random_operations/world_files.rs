//! Runs and compares the operations on content, attributes and extended attributes.

use super::operation::{Operation, bytes};
use super::world::{Both, HeldHandle, ROOT_USER, Side, Verdict, World};
use crate::types::{Errno, HandleId, NodeId, OpenFlags, SeekTo, SetAttributes};
use crate::{Libservice, Result};

/// How much is read at once when whole files are compared.
const CHUNK: usize = 1 << 17;

impl World {
    pub(super) fn apply_to_files(&mut self, operation: &Operation) -> Verdict {
        match operation {
            Operation::Getattr(slot) => self.check_attributes(self.nodes[*slot].id),
            Operation::Setattr { node, changes } => self.setattr(self.nodes[*node].id, changes, None),
            Operation::Truncate { node, size, handle } => {
                let changes = SetAttributes { size: Some(*size), ..Default::default() };
                let handle = handle.map(|slot| self.handles[slot]);
                let node = handle.map_or(self.nodes[*node].id, |held| held.node);
                self.setattr(node, &changes, handle.map(|held| held.id))
            }
            Operation::Open { node, flags } => self.open(self.nodes[*node].id, *flags),
            Operation::Content(slot) => self.same_content(self.nodes[*slot].id),
            Operation::Read { handle, offset, length } => self.same_bytes(self.handles[*handle], *offset, *length),
            Operation::Write { handle, offset, length, fill } => {
                self.write(self.handles[*handle], *offset, &bytes(*fill, *length))
            }
            Operation::WriteHeld { handle, offset, length, fill } => {
                self.write_held(self.handles[*handle], *offset, &bytes(*fill, *length))
            }
            Operation::Seek { handle, offset, to } => self.seek(self.handles[*handle], *offset, *to),
            Operation::Copy { source, source_offset, target, target_offset, length } => {
                let (source, target) = (self.handles[*source], self.handles[*target]);
                self.equal(|layer, side| {
                    let (from, to) = (source.id.of(side), target.id.of(side));
                    copy(layer, (from, *source_offset), (to, *target_offset), *length)
                })?;
                self.check_attributes(target.node)
            }
            Operation::Allocate { handle, mode, offset, length } => {
                let held = self.handles[*handle];
                self.equal(|layer, side| layer.fallocate(&ROOT_USER, held.id.of(side), *mode, *offset, *length))?;
                self.check_attributes(held.node)
            }
            Operation::Fsync { handle, durability } => {
                let held = self.handles[*handle];
                self.equal(|layer, side| layer.fsync(&ROOT_USER, held.id.of(side), *durability))?;
                self.check_attributes(held.node)
            }
            Operation::FlushRange { handle, offset, length } => {
                let held = self.handles[*handle];
                let range = *offset..offset.saturating_add(*length);
                self.equal(|layer, side| layer.flush_range(&ROOT_USER, held.id.of(side), range.clone())).map(drop)
            }
            other => self.apply_to_xattrs(other),
        }
    }

    fn apply_to_xattrs(&mut self, operation: &Operation) -> Verdict {
        match operation {
            Operation::Getxattr { node, name } => {
                let node = self.nodes[*node].id;
                self.equal(|layer, side| layer.getxattr(&ROOT_USER, node.of(side), &name.0)).map(drop)
            }
            Operation::Setxattr { node, name, value, flags } => {
                let node = self.nodes[*node].id;
                self.equal(|layer, side| layer.setxattr(&ROOT_USER, node.of(side), &name.0, &value.0, *flags))?;
                self.check_attributes(node)
            }
            Operation::Removexattr { node, name } => {
                let node = self.nodes[*node].id;
                self.equal(|layer, side| layer.removexattr(&ROOT_USER, node.of(side), &name.0))?;
                self.check_attributes(node)
            }
            Operation::Listxattr(slot) => self.same_xattrs(self.nodes[*slot].id),
            other => Err(format!("{other:?} is not about files")),
        }
    }

    fn setattr(&mut self, node: Both<NodeId>, changes: &SetAttributes, handle: Option<Both<HandleId>>) -> Verdict {
        let changed = self.both(|layer, side| {
            layer.setattr(&ROOT_USER, node.of(side), changes, handle.map(|handle| handle.of(side)))
        })?;
        if let Some(attributes) = changed {
            self.same_attributes(&attributes)?;
            let Both { subject, reference } = attributes;
            if let Some(crate::types::SetTime::At(time)) = changes.accessed
                && subject.accessed != time
            {
                return Err(format!("accessed {:?}, the reference: {:?}", subject.accessed, reference.accessed));
            }
        }
        self.check_attributes(node)
    }

    fn open(&mut self, node: Both<NodeId>, flags: OpenFlags) -> Verdict {
        if let Some(id) = self.both(|layer, side| layer.open(&ROOT_USER, node.of(side), flags))? {
            self.handles.push(HeldHandle { id, node, flags });
        }
        self.check_attributes(node)
    }

    fn write(&mut self, held: HeldHandle, offset: u64, data: &[u8]) -> Verdict {
        self.equal(|layer, side| layer.write(&ROOT_USER, held.id.of(side), offset, data))?;
        self.check_attributes(held.node)
    }

    /// Writes under a hold, which must make no difference to readers, and lets go.
    fn write_held(&mut self, held: HeldHandle, offset: u64, data: &[u8]) -> Verdict {
        let range = offset..offset + data.len() as u64;
        self.equal(|layer, side| layer.hold(&ROOT_USER, held.id.of(side), range.clone(), true))?;
        self.write(held, offset, data)?;
        self.same_bytes(held, offset, data.len())?;
        self.equal(|layer, side| layer.hold(&ROOT_USER, held.id.of(side), range.clone(), false)).map(drop)
    }

    fn same_bytes(&mut self, held: HeldHandle, offset: u64, length: usize) -> Verdict {
        let answers = self.both(|layer, side| read(layer, held.id.of(side), offset, length))?;
        answers.map_or(Ok(()), |data| equal_bytes(offset, &data.subject, &data.reference))
    }

    /// Compares all of a file; what cannot be opened must be refused alike.
    pub(super) fn same_content(&mut self, node: Both<NodeId>) -> Verdict {
        let opened = self.both(|layer, side| layer.open(&ROOT_USER, node.of(side), OpenFlags::READ_ONLY))?;
        let Some(id) = opened else { return Ok(()) };
        let held = HeldHandle { id, node, flags: OpenFlags::READ_ONLY };
        let size = self.reference.getattr(&ROOT_USER, node.reference).map_err(|error| error.to_string())?.size;
        let mut outcome = Ok(());
        for offset in (0..=size).step_by(CHUNK) {
            outcome = self.same_bytes(held, offset, CHUNK);
            if outcome.is_err() {
                break;
            }
        }
        self.layer(Side::Subject).release(id.subject);
        self.layer(Side::Reference).release(id.reference);
        outcome
    }

    /// Compares names and values of all xattrs, without what the system adds to files by itself.
    pub(super) fn same_xattrs(&mut self, node: Both<NodeId>) -> Verdict {
        let names = self.equal(|layer, side| {
            let mut names = layer.listxattr(&ROOT_USER, node.of(side))?;
            names.retain(|name| name != b"security.selinux");
            names.sort();
            Ok(names.into_iter().map(super::operation::Text).collect::<Vec<_>>())
        })?;
        for name in names.unwrap_or_default() {
            let value = self.equal(|layer, side| layer.getxattr(&ROOT_USER, node.of(side), &name.0));
            value.map_err(|text| format!("{name:?}: {text}"))?;
        }
        Ok(())
    }

    /// A layer may know fewer holes than there are, never more.
    fn seek(&mut self, held: HeldHandle, offset: u64, to: SeekTo) -> Verdict {
        let subject = self.layer(Side::Subject).seek(&ROOT_USER, held.id.subject, offset, to);
        let node = self.reference.getattr(&ROOT_USER, held.node.reference);
        let size = node.map_err(|error| error.to_string())?.size;
        let zeros_until = match subject {
            Err(error) if error == Errno::ENXIO && (offset >= size || to == SeekTo::Data) => size,
            Ok(found) if offset < size && (offset..=size).contains(&found) => match to {
                SeekTo::Data if found < size => found,
                SeekTo::Hole => {
                    return if found == size { Ok(()) } else { self.reference_zeros(held, found..found + 1) };
                }
                SeekTo::Data => return Err(format!("data at {found}, the size")),
            },
            other => return Err(format!("{other:?} from {offset} in a file of {size} bytes")),
        };
        self.reference_zeros(held, offset..zeros_until)
    }

    /// Whether the reference holds only zeros in the range.
    fn reference_zeros(&mut self, held: HeldHandle, range: std::ops::Range<u64>) -> Verdict {
        if range.is_empty() {
            return Ok(());
        }
        let layer = self.layer(Side::Reference);
        let reader = layer.open(&ROOT_USER, held.node.reference, OpenFlags::READ_ONLY);
        let reader = reader.map_err(|error| error.to_string())?;
        let data = read(layer, reader, range.start, (range.end - range.start) as usize);
        layer.release(reader);
        match data.map_err(|error| error.to_string())?.iter().position(|&byte| byte != 0) {
            Some(at) => Err(format!("there is data at {}, within what is said to be a hole", range.start + at as u64)),
            None => Ok(()),
        }
    }
}

/// Reads up to `length` bytes, by as many calls as it takes.
fn read(layer: &dyn Libservice, handle: HandleId, offset: u64, length: usize) -> Result<Vec<u8>> {
    let mut data = vec![0xa5; length];
    let mut done = 0;
    while done < length {
        match layer.read(&ROOT_USER, handle, offset + done as u64, &mut data[done..])? {
            0 => break,
            got => done += got,
        }
    }
    data.truncate(done);
    Ok(data)
}

/// Copies until nothing is left, by as many calls as it takes; returns how many bytes that were.
fn copy(
    layer: &dyn Libservice,
    (source, source_offset): (HandleId, u64),
    (target, target_offset): (HandleId, u64),
    length: u64,
) -> Result<u64> {
    let mut done = 0;
    while done < length {
        let (from, to) = (source_offset + done, target_offset + done);
        match layer.copy_range(&ROOT_USER, source, from, target, to, length - done)? {
            0 => break,
            copied => done += copied,
        }
    }
    Ok(done)
}

fn equal_bytes(offset: u64, subject: &[u8], reference: &[u8]) -> Verdict {
    if subject.len() != reference.len() {
        let (found, expected) = (subject.len(), reference.len());
        return Err(format!("{found} bytes read at {offset}, the reference: {expected}"));
    }
    match subject.iter().zip(reference).position(|(left, right)| left != right) {
        Some(at) => {
            let wrong = subject.iter().zip(reference).filter(|(left, right)| left != right).count();
            let (found, expected, place) = (subject[at], reference[at], offset + at as u64);
            Err(format!("byte {place} is {found:#x}, the reference: {expected:#x} ({wrong} bytes differ)"))
        }
        None => Ok(()),
    }
}
