//! The state of a run: the layer and the reference under comparison, and the nodes and handles held in both.

use super::inodes::{Inodes, disagreement};
use super::operation::Operation;
use super::{Remount, Summary};
use crate::types::{Attributes, Caller, FileType, HandleId, Name, NodeId, OpenFlags};
use crate::{Entry, Libservice, Memory, Result};
use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Arc;

/// What must be so, or in words what is wrong.
pub(super) type Verdict<T = ()> = std::result::Result<T, String>;

/// Who asks for everything that has no caller of its own.
pub(super) const ROOT_USER: Caller = Caller::ROOT;

/// Which of the two layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Subject,
    Reference,
}

/// One thing on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Both<T> {
    pub(super) subject: T,
    pub(super) reference: T,
}

impl<T: Copy> Both<T> {
    pub(super) fn of(&self, side: Side) -> T {
        match side {
            Side::Subject => self.subject,
            Side::Reference => self.reference,
        }
    }
}

/// A node held, by one reference on each side (the root by none).
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldNode {
    pub(super) id: Both<NodeId>,
    pub(super) file_type: FileType,
}

/// A file's handle.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldHandle {
    pub(super) id: Both<HandleId>,
    pub(super) node: Both<NodeId>,
    pub(super) flags: OpenFlags,
}

pub(super) struct World {
    subject: Arc<dyn Libservice>,
    pub(super) reference: Arc<Memory>,
    /// The root first.
    pub(super) nodes: Vec<HeldNode>,
    pub(super) handles: Vec<HeldHandle>,
    pub(super) inodes: Inodes,
    summary: Summary,
}

impl World {
    pub(super) fn new(subject: Arc<dyn Libservice>, reference: Arc<Memory>) -> Self {
        let root = Both { subject: NodeId::ROOT, reference: NodeId::ROOT };
        Self {
            subject,
            reference,
            nodes: vec![HeldNode { id: root, file_type: FileType::Directory }],
            handles: Vec::new(),
            inodes: Inodes::default(),
            summary: Summary::default(),
        }
    }

    pub(super) fn subject(&self) -> &dyn Libservice {
        &*self.subject
    }

    pub(super) fn summary(&self) -> Summary {
        self.summary
    }

    pub(super) fn layer(&self, side: Side) -> &dyn Libservice {
        match side {
            Side::Subject => &*self.subject,
            Side::Reference => &*self.reference,
        }
    }

    /// Makes one call on both layers: both must do it (their answers are returned) or refuse it alike (`None`).
    pub(super) fn both<T: Debug>(
        &mut self,
        mut call: impl FnMut(&dyn Libservice, Side) -> Result<T>,
    ) -> Verdict<Option<Both<T>>> {
        let reference = call(self.layer(Side::Reference), Side::Reference);
        let subject = call(self.layer(Side::Subject), Side::Subject);
        match (subject, reference) {
            (Ok(subject), Ok(reference)) => {
                self.summary.succeeded += 1;
                Ok(Some(Both { subject, reference }))
            }
            (Err(subject), Err(reference)) if subject.errno() == reference.errno() => {
                self.summary.refused += 1;
                Ok(None)
            }
            (Err(subject), Err(reference)) => Err(format!("{subject}, the reference: {reference}")),
            (Ok(_), Err(reference)) => Err(format!("it worked, the reference: {reference}")),
            (Err(subject), Ok(_)) => Err(format!("{subject}, the reference did it")),
        }
    }

    /// As [`World::both`], where the answers must be equal.
    pub(super) fn equal<T: Debug + PartialEq>(
        &mut self,
        call: impl FnMut(&dyn Libservice, Side) -> Result<T>,
    ) -> Verdict<Option<T>> {
        match self.both(call)? {
            Some(Both { subject, reference }) if subject != reference => {
                Err(format!("{subject:?}, the reference: {reference:?}"))
            }
            answers => Ok(answers.map(|answers| answers.reference)),
        }
    }

    /// Runs one instruction.
    pub(super) fn apply(&mut self, operation: &Operation) -> Verdict {
        match operation {
            Operation::Lookup(_)
            | Operation::Create { .. }
            | Operation::Mknod { .. }
            | Operation::Mkdir { .. }
            | Operation::Symlink { .. }
            | Operation::Link { .. }
            | Operation::Unlink(_)
            | Operation::Rmdir(_)
            | Operation::Rename { .. }
            | Operation::Readlink(_)
            | Operation::List { .. } => self.apply_to_names(operation),
            Operation::Forget(slot) => {
                self.forget(*slot);
                Ok(())
            }
            Operation::Release(slot) => {
                self.release(*slot);
                Ok(())
            }
            Operation::Sync => self.equal(|layer, _| layer.sync()).map(drop),
            _ => self.apply_to_files(operation),
        }
    }

    /// Takes note of a node that both layers gave a reference on.
    pub(super) fn gained(&mut self, entry: Both<Entry>) -> Verdict {
        let id = Both { subject: entry.subject.node, reference: entry.reference.node };
        let attributes = Both { subject: entry.subject.attributes, reference: entry.reference.attributes };
        self.nodes.push(HeldNode { id, file_type: attributes.reference.file_type });
        if let Some(other) = self.nodes.iter().find(|held| held.id.reference == id.reference && held.id != id) {
            return Err(format!("one object is {:?} and {:?}", other.id.subject, id.subject));
        }
        if let Some(other) = self.nodes.iter().find(|held| held.id.subject == id.subject && held.id != id) {
            return Err(format!("{:?} is two objects: {:?} and {:?}", id.subject, other.id.reference, id.reference));
        }
        self.same_attributes(&attributes)
    }

    pub(super) fn same_attributes(&mut self, attributes: &Both<Attributes>) -> Verdict {
        disagreement(&attributes.subject, &attributes.reference).map_or(Ok(()), Err)?;
        self.inodes.check(attributes.subject.inode, attributes.reference.inode)
    }

    /// Asks both layers for a node's attributes and compares.
    pub(super) fn check_attributes(&mut self, node: Both<NodeId>) -> Verdict {
        match self.both(|layer, side| layer.getattr(&ROOT_USER, node.of(side)))? {
            Some(attributes) => self.same_attributes(&attributes),
            None => Ok(()),
        }
    }

    pub(super) fn forget(&mut self, slot: usize) {
        if slot == 0 || slot >= self.nodes.len() {
            return;
        }
        let held = self.nodes.swap_remove(slot);
        self.subject.forget(held.id.subject, 1);
        self.reference.forget(held.id.reference, 1);
    }

    pub(super) fn release(&mut self, slot: usize) {
        if slot < self.handles.len() {
            let held = self.handles.swap_remove(slot);
            self.subject.release(held.id.subject);
            self.reference.release(held.id.reference);
        }
    }

    /// Gives everything back.
    pub(super) fn let_go(&mut self) {
        while !self.handles.is_empty() {
            self.release(0);
        }
        while self.nodes.len() > 1 {
            self.forget(1);
        }
    }

    /// Replaces the subject, synced or not, by what `remount` makes of it, and opens there what was open.
    pub(super) fn remount(&mut self, remount: &mut Remount<'_>, syncs: bool) -> Verdict {
        if syncs {
            self.subject.sync().map_err(|error| format!("sync before a remount: {error}"))?;
        }
        let paths = self.reference_paths();
        for slot in (0..self.handles.len()).rev() {
            if !paths.contains_key(&self.handles[slot].node.reference) {
                self.release(slot);
            }
        }
        for slot in (1..self.nodes.len()).rev() {
            if !paths.contains_key(&self.nodes[slot].id.reference) {
                self.forget(slot);
            }
        }
        self.handles.iter().for_each(|held| self.subject.release(held.id.subject));
        self.nodes[1..].iter().for_each(|held| self.subject.forget(held.id.subject, 1));
        // The hook gets the last reference, so that it can end the instance before it starts another.
        let placeholder: Arc<dyn Libservice> = Memory::with_capacity(0);
        self.subject = remount(std::mem::replace(&mut self.subject, placeholder));
        self.inodes = Inodes::default();
        self.reopen(&paths)
    }

    fn reopen(&mut self, paths: &HashMap<NodeId, Vec<Vec<u8>>>) -> Verdict {
        let subject = Arc::clone(&self.subject);
        for held in &mut self.nodes[1..] {
            held.id.subject = resolve(&*subject, &paths[&held.id.reference])?;
        }
        for held in &mut self.handles {
            let node = resolve(&*subject, &paths[&held.node.reference])?;
            let flags = held.flags - OpenFlags::TRUNCATE;
            let opened = subject.open(&ROOT_USER, node, flags);
            held.id.subject = opened.map_err(|error| format!("open after a remount: {error}"))?;
            held.node.subject = node;
            subject.forget(node, 1);
        }
        Ok(())
    }
}

/// Looks a path up, keeping one reference on its end.
fn resolve(layer: &dyn Libservice, path: &[Vec<u8>]) -> Verdict<NodeId> {
    let mut node = NodeId::ROOT;
    for component in path {
        let name = Name::new(component).map_err(|error| error.to_string())?;
        let found = layer.lookup(&ROOT_USER, node, name);
        let found = found.map_err(|error| format!("{name} is not there after a remount: {error}"))?;
        if node != NodeId::ROOT {
            layer.forget(node, 1);
        }
        node = found.node;
    }
    Ok(node)
}
