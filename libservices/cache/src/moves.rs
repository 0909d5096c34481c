//! The two calls that involve two objects: rename, and copying between files.

use crate::cache::{Cache, Peeked};
use crate::names::Known;
use crate::node::Node;
use crate::sync::write;
use poolfs_libservice::{Result, copy_by_reading, fail};
use poolfs_types::{Caller, Errno, HandleId, Name, NodeId, RenameFlags};
use std::sync::Arc;

/// Writes the content of the files below that are about to take each other's place, or one the other's.
fn write_before_rename(source: Option<&Peeked<'_>>, target: Option<&Peeked<'_>>, exchange: bool) -> Result<()> {
    let (Some(source), Some(target)) = (source, target) else { return Ok(()) };
    if source.node.id == target.node.id {
        return Ok(());
    }
    source.node.write_before_names()?;
    if exchange { target.node.write_before_names() } else { Ok(()) }
}

impl Cache {
    pub(crate) fn rename_locked(
        &self,
        caller: &Caller,
        (parent, name): (NodeId, Name<'_>),
        (new_parent, new_name): (NodeId, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let (from, to) = (self.directory(parent)?, self.directory(new_parent)?);
        let exchange = flags.contains(RenameFlags::EXCHANGE);
        let replaces = !flags.contains(RenameFlags::NO_REPLACE);
        if replaces {
            // Before the directories are locked: a large file takes its time.
            let (source, target) = (self.peek_known(parent, name), self.peek_known(new_parent, new_name));
            write_before_rename(source.as_ref(), target.as_ref(), exchange)?;
        }
        // Two directories are locked in the order of their numbers; one and the same only once.
        let (first, second) = if from.id < to.id { (&from, &to) } else { (&to, &from) };
        let changing = write(&first.names);
        let _other = (!Arc::ptr_eq(first, second)).then(|| write(&second.names));
        let source = self.peek(&changing, parent, name)?;
        let target = self.peek(&changing, new_parent, new_name)?;
        if replaces {
            // Mostly there is nothing left to write; else a name was not known, or somebody has changed it since.
            write_before_rename(source.as_ref(), target.as_ref(), exchange)?;
        }
        let (source, target) = (source.as_ref().map(|peeked| &peeked.node), target.as_ref().map(|peeked| &peeked.node));
        let same = source.is_some_and(|source| target.is_some_and(|target| Arc::ptr_eq(source, target)));
        let epochs = [parent, new_parent].map(|directory| self.core.epoch_of_names(directory));
        let rename = || self.core.below.rename(caller, parent, name, new_parent, new_name, flags);
        match target.filter(|_| !same && !exchange) {
            Some(victim) => victim.lose_name(|_| rename())?,
            None => rename()?,
        }
        from.outdate();
        to.outdate();
        if same {
            return Ok(());
        }
        let names = &self.core.names;
        let known = |node: Option<&Arc<Node>>, parent, name, epoch| match node {
            Some(node) => {
                names.set(parent, name, Known::Present(node.id), epoch);
                node.outdate();
            }
            None => names.forget(parent, name),
        };
        known(source, new_parent, new_name, epochs[1]);
        if exchange {
            known(target, parent, name, epochs[0]);
        } else if flags.contains(RenameFlags::WHITEOUT) {
            names.forget(parent, name);
        } else {
            names.set(parent, name, Known::Absent, epochs[0]);
        }
        Ok(())
    }

    pub(crate) fn copy(
        &self,
        caller: &Caller,
        (source, source_offset): (HandleId, u64),
        (target, target_offset): (HandleId, u64),
        length: u64,
    ) -> Result<u64> {
        let (reading, writing) = (self.handles.readable(source)?, self.handles.writable(target)?);
        let overlap = source_offset < target_offset.saturating_add(length)
            && target_offset < source_offset.saturating_add(length);
        if overlap && reading.node.0.id == writing.node.0.id {
            return fail(Errno::EINVAL);
        }
        copy_by_reading(self, caller, (source, source_offset), (target, target_offset), length)
    }
}
