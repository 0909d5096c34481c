//! Walks over whole trees, and their comparison.

use super::inodes::is_whiteout;
use super::operation::Text;
use super::world::{Both, ROOT_USER, Side, Verdict, World};
use crate::types::{FileType, Name, NodeId};
use crate::{DirectoryEntry, Libservice};
use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;

/// A directory yet to be visited.
struct Pending {
    node: Both<NodeId>,
    path: String,
}

impl World {
    /// Compares everything that both trees hold, and what the held handles and nodes without names show.
    pub(super) fn compare_trees(&mut self) -> Verdict {
        let held: Vec<Both<NodeId>> = self.nodes.iter().map(|held| held.id).collect();
        for node in held {
            self.check_attributes(node).map_err(|text| format!("a node held: {text}"))?;
            self.same_content(node).map_err(|text| format!("a node held: {text}"))?;
        }
        let root = Both { subject: NodeId::ROOT, reference: NodeId::ROOT };
        let mut pending = vec![Pending { node: root, path: String::new() }];
        let mut visited = HashMap::new();
        let mut outcome = Ok(());
        while let Some(directory) = pending.pop() {
            outcome = self.compare_directory(&directory, &mut pending, &mut visited);
            self.forget_pending(directory.node);
            if outcome.is_err() {
                break;
            }
        }
        pending.into_iter().for_each(|left| self.forget_pending(left.node));
        outcome
    }

    fn compare_directory(
        &mut self,
        directory: &Pending,
        pending: &mut Vec<Pending>,
        visited: &mut HashMap<u64, u64>,
    ) -> Verdict {
        let located = |text: String| format!("{}/: {text}", directory.path);
        self.check_attributes(directory.node).map_err(located)?;
        self.same_xattrs(directory.node).map_err(located)?;
        for name in self.same_listing(directory.node, 17).map_err(located)?.into_keys() {
            let path = format!("{}/{}", directory.path, name.escape_ascii());
            let name = Name::new(&name).map_err(|error| error.to_string())?;
            let parent = directory.node;
            let located = |text: String| format!("{path}: {text}");
            let found = self.both(|layer, side| layer.lookup(&ROOT_USER, parent.of(side), name)).map_err(located)?;
            let Some(Both { subject, reference }) = found else { return Err(located("listed, but not there".into())) };
            let node = Both { subject: subject.node, reference: reference.node };
            let attributes = Both { subject: subject.attributes, reference: reference.attributes };
            let same = self.same_attributes(&attributes).map_err(located);
            if attributes.reference.file_type == FileType::Directory {
                pending.push(Pending { node, path: path.clone() });
                same?;
                continue;
            }
            let numbers = (attributes.subject.inode, attributes.reference.inode);
            let same = same.and_then(|()| match visited.insert(numbers.0, numbers.1) {
                Some(other) if other != numbers.1 => Err(located("shares its inode number with another file".into())),
                Some(_) => Ok(()),
                None if is_whiteout(&attributes.reference) => Ok(()),
                None => self.compare_object(node, attributes.reference.file_type).map_err(located),
            });
            self.forget_pending(node);
            same?;
        }
        Ok(())
    }

    fn compare_object(&mut self, node: Both<NodeId>, file_type: FileType) -> Verdict {
        self.same_xattrs(node)?;
        match file_type {
            FileType::Regular => self.same_content(node),
            FileType::Symlink => self.equal(|layer, side| layer.readlink(&ROOT_USER, node.of(side))).map(drop),
            _ => Ok(()),
        }
    }

    fn forget_pending(&self, node: Both<NodeId>) {
        if node.reference != NodeId::ROOT {
            self.layer(Side::Subject).forget(node.subject, 1);
            self.layer(Side::Reference).forget(node.reference, 1);
        }
    }

    /// What the program holds, for a failure: instructions name nodes and handles by these places.
    pub(super) fn held(&self) -> String {
        let paths = self.reference_paths();
        let path_of = |node: NodeId| match paths.get(&node) {
            Some(path) => path.iter().map(|name| format!("/{:?}", Text(name.clone()))).collect(),
            None => "no name".to_owned(),
        };
        let mut text = String::new();
        for (slot, held) in self.nodes.iter().enumerate() {
            let (subject, path) = (held.id.subject, path_of(held.id.reference));
            text += &format!("  node {slot}: {:?}, the subject's {subject:?}: {path}\n", held.file_type);
        }
        for (slot, held) in self.handles.iter().enumerate() {
            let (subject, path) = (held.id.subject, path_of(held.node.reference));
            text += &format!("  handle {slot}: {:?}, the subject's {subject:?}: {path}\n", held.flags);
        }
        text
    }

    /// One path to every object of the reference that has a name.
    pub(super) fn reference_paths(&self) -> HashMap<NodeId, Vec<Vec<u8>>> {
        let layer = self.layer(Side::Reference);
        let mut paths = HashMap::from([(NodeId::ROOT, Vec::new())]);
        let mut pending = vec![NodeId::ROOT];
        let mut seen = HashSet::new();
        while let Some(directory) = pending.pop() {
            let path = paths.get(&directory).cloned().unwrap_or_default();
            for name in names(layer, directory) {
                let Ok(Ok(entry)) = Name::new(&name).map(|name| layer.lookup(&ROOT_USER, directory, name)) else {
                    continue;
                };
                if seen.insert(entry.node) {
                    paths.insert(entry.node, path.iter().cloned().chain([name]).collect());
                }
                if entry.attributes.is_directory() {
                    pending.push(entry.node);
                } else {
                    layer.forget(entry.node, 1);
                }
            }
            if directory != NodeId::ROOT {
                layer.forget(directory, 1);
            }
        }
        paths
    }
}

/// The names of a directory; none where it cannot be listed.
pub(super) fn names(layer: &dyn Libservice, node: NodeId) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    if let Ok(handle) = layer.opendir(&ROOT_USER, node) {
        let mut visit = |entry: DirectoryEntry<'_>| {
            names.push(entry.name.as_bytes().to_vec());
            ControlFlow::Continue(())
        };
        // A listing of the reference fails only for a handle it did not give.
        let _ = layer.readdir(&ROOT_USER, handle, 0, &mut visit);
        layer.release(handle);
    }
    names
}
