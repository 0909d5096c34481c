//! The differences between a union and its lower branches: names, and parts of files.

use crate::format::BLOCK;
use crate::node::{Content, Node};
use crate::pending_names::PendingNames;
use crate::resolve::{LowerFound, Referenced};
use crate::sketch::Sketch;
use crate::{Union, marks, upper_names};
use poolfs_libservice::walk::WALK_DEPTH_MAX;
use poolfs_libservice::{
    Branch, ChangesHeld, Difference, Error, Flattened, Layered, Opened, Relation, Result, Visit, fail, shown_path,
};
use poolfs_types::{Attributes, Caller, Errno, FileType, NodeId, OpenFlags, SeekTo};
use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::sync::{Arc, PoisonError, RwLockReadGuard};

const ROOT: &Caller = &Caller::ROOT;

/// Labels that the host gives to what is in its filesystems.
const HOST_LABEL: &[u8] = b"security.selinux";

/// Which names of a directory are told of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Below {
    /// The lower branches have it at the same path: what differs from what they have there.
    Same,
    /// They have nothing there: all it shows.
    Nothing,
}

/// A directory on the way.
struct Entered<'a> {
    node: Arc<Node>,
    /// what keeps the node, of all but the root
    _reference: Option<Referenced<'a>>,
    /// of its path, which all below it begin with
    path_length: usize,
    names: PendingNames,
    below: Below,
    is_told: bool,
}

impl Layered for Union {
    fn differences(&self, visit: &mut Visit<'_>) -> Result<()> {
        self.visit_differences(visit)
    }

    fn root_differs(&self) -> Result<bool> {
        let root = self.node(NodeId::ROOT)?;
        let state = root.read();
        let (Some(upper), Some(lower)) = (&state.upper, state.lowers.first()) else { return Ok(true) };
        let below = &self.lowers[lower.layer].layer;
        Ok(shown_attributes(&self.upper, upper.node())? != shown_attributes(below, lower.held.node())?)
    }

    fn changed_parts(&self, node: NodeId, from: u64, most: usize) -> Result<Vec<Range<u64>>> {
        self.parts_of(node, from, most)
    }

    fn hold_changes(&self) -> ChangesHeld<'_> {
        ChangesHeld::by(self.changing.write().unwrap_or_else(PoisonError::into_inner))
    }

    fn flatten(&self, go_on: &dyn Fn() -> bool) -> Result<Flattened> {
        self.complete_all(go_on)
    }
}

impl Union {
    /// Whoever is about to change what the union shows holds this while doing so.
    pub(crate) fn change(&self) -> RwLockReadGuard<'_, ()> {
        self.changing.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`Layered::differences`].
    fn visit_differences(&self, visit: &mut Visit<'_>) -> Result<()> {
        self.nothing_waits()?;
        self.complete_all_deferred()?;
        // A file with several lower names may have changed under names that are in no upper directory.
        let has_links = !upper_names::first_names(&self.upper, self.work.index.node(), 1)?.is_empty();
        let root = self.node(NodeId::ROOT)?;
        let mut path = Vec::new();
        let mut way = vec![self.enter(root, None, &path, Below::Same, has_links, false)?];
        if self.tell_of(&mut way, &path, visit)?.is_break() {
            return Ok(());
        }
        while let Some(directory) = way.last_mut() {
            path.truncate(directory.path_length);
            let Some(name) = directory.names.pop() else {
                way.pop();
                continue;
            };
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name);
            let name = &path[path.len() - name.len()..];
            let parent = directory.node.clone();
            let (child, relation, attributes) = {
                let _names = self.names();
                let lower = match directory.below {
                    Below::Same => self.search_name(&parent.read(), name)?,
                    Below::Nothing => LowerFound::default(),
                };
                match self.child(&parent, name)? {
                    None if lower.attributes.is_some() => (None, Relation::Added, None),
                    None => continue,
                    Some(child) => {
                        let is_told = child.upper().is_some() || directory.below == Below::Nothing;
                        let attributes = if is_told { Some(self.attributes(ROOT, &child)?) } else { None };
                        let relation = self.relation(&child, &lower)?;
                        (Some(child), relation, attributes)
                    }
                }
            };
            let is_told = child.is_none() || attributes.is_some();
            if is_told && self.tell_of(&mut way, &path, visit)?.is_break() {
                return Ok(());
            }
            let told = match (&child, &attributes) {
                (None, _) => visit(&path, Difference::Removed)?,
                (Some(child), Some(attributes)) => {
                    visit(&path, Difference::Object { node: child.id, attributes, relation })?
                }
                (Some(_), None) => ControlFlow::Continue(()),
            };
            if told.is_break() {
                return Ok(());
            }
            if let Some(child) = child
                && child.is_directory()
            {
                let below = if relation == Relation::Changed { Below::Same } else { Below::Nothing };
                if way.len() == WALK_DEPTH_MAX {
                    return Err(too_deep(&path));
                }
                let node = Arc::clone(&child);
                way.push(self.enter(node, Some(child), &path, below, has_links, is_told)?);
            }
        }
        Ok(())
    }

    /// Tells of the directories on the way of which it was not done yet, as there was nothing to tell of in them.
    fn tell_of(&self, way: &mut [Entered<'_>], path: &[u8], visit: &mut Visit<'_>) -> Result<ControlFlow<()>> {
        for directory in way.iter_mut().filter(|directory| !directory.is_told) {
            directory.is_told = true;
            let attributes = {
                let _names = self.names();
                self.attributes(ROOT, &directory.node)?
            };
            let (node, relation) = (directory.node.id, Relation::Changed);
            let path = &path[..directory.path_length];
            if visit(path, Difference::Object { node, attributes: &attributes, relation })?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn enter<'a>(
        &'a self,
        node: Arc<Node>,
        reference: Option<Referenced<'a>>,
        path: &[u8],
        below: Below,
        has_links: bool,
        is_told: bool,
    ) -> Result<Entered<'a>> {
        let names = self.pending_names(&node, below, has_links).map_err(|error| no_room(path, error))?;
        Ok(Entered { node, _reference: reference, path_length: path.len(), names, below, is_told })
    }

    /// The names of a directory that are looked at.
    fn pending_names(&self, node: &Node, below: Below, has_links: bool) -> Result<PendingNames> {
        let mut names = PendingNames::new(&self.listings);
        if below == Below::Same
            && let Some(upper) = node.upper()
        {
            upper_names::each_name(&self.upper, upper.node(), &mut |name| names.push(name))?;
        }
        if below == Below::Nothing || has_links {
            let _names = self.names();
            self.each_name(node, &mut |named, _| names.push(&named.name).map(ControlFlow::Continue))?;
        }
        names.finish()
    }

    /// How `node` stands to what was found below under its name.
    fn relation(&self, node: &Node, found: &LowerFound) -> Result<Relation> {
        let (Some(top), Some(lower)) = (found.nodes.first(), &found.attributes) else { return Ok(Relation::Added) };
        let is_same = if node.is_directory() {
            let state = node.read();
            let first = state.lowers.first();
            first.is_some_and(|first| (first.layer, first.held.node()) == (top.layer, top.held.node()))
        } else {
            let origin = self.origin_of(node)?;
            origin.is_some_and(|(layer, attributes)| (layer, attributes.inode) == (top.layer, lower.inode))
        };
        Ok(if is_same { Relation::Changed } else { Relation::Replaced })
    }

    /// The lower object that a node is or was, if it still can be told.
    fn origin_of(&self, node: &Node) -> Result<Option<(usize, Attributes)>> {
        match self.lower_file(node) {
            // Not copied up.
            Err(error) if error == Errno::ENODATA || error == Errno::EOPNOTSUPP => Ok(None),
            other => other,
        }
    }

    /// See [`Layered::changed_parts`].
    fn parts_of(&self, node: NodeId, from: u64, most: usize) -> Result<Vec<Range<u64>>> {
        let node = self.node(node)?;
        if node.file_type != FileType::Regular {
            return fail(Errno::EINVAL);
        }
        self.complete_deferred(&node)?;
        let mut state = node.write();
        let Some(held) = state.upper.clone() else { return Ok(Vec::new()) };
        let size = self.upper.getattr(ROOT, held.node())?.size;
        self.load_locked(&node, &mut state)?;
        let parts = match &state.content {
            _ if from >= size => Ok(Vec::new()),
            Content::Sketch(sketch) => moved_parts(sketch, from..size, most),
            Content::Plain => {
                let file = Opened::file(&self.upper, ROOT, held.node(), OpenFlags::READ_ONLY)?;
                data_parts(&file, from..size, most)
            }
            Content::Damaged(cause) => Err(self.damaged(&node, cause)),
        };
        drop(state);
        self.close_unused(&node);
        parts
    }
}

fn too_deep(path: &[u8]) -> Error {
    let message = format!(
        "/{} is below {WALK_DEPTH_MAX} directories; move it nearer to the root, or remove it",
        shown_path(path)
    );
    Error::new(Errno::ENAMETOOLONG, message)
}

/// An error of listing a directory, which says where it was if there was no memory for it.
fn no_room(path: &[u8], error: Error) -> Error {
    if error != Errno::ENOMEM {
        return error;
    }
    let cause = format!(
        "/{}: there is too little memory for its names and those of the directories above it ({error}); divide the largest of them, or try again \
         when less is listed",
        shown_path(path)
    );
    Error::new(Errno::ENOMEM, cause)
}

/// Permissions, owners and extended attributes of an object of a branch, as far as users see them and they are not the host's own.
type ShownAttributes = (u32, u32, u32, BTreeMap<Vec<u8>, Vec<u8>>);

fn shown_attributes(branch: &Branch, node: NodeId) -> Result<ShownAttributes> {
    let Attributes { permissions, uid, gid, .. } = branch.getattr(ROOT, node)?;
    let names = match branch.listxattr(ROOT, node) {
        Err(error) if error == Errno::EOPNOTSUPP => Vec::new(),
        names => names?,
    };
    let is_shown = |name: &Vec<u8>| !marks::hidden(name) && !name.starts_with(HOST_LABEL);
    let values = names.into_iter().filter(is_shown).map(|name| {
        let value = branch.getxattr(ROOT, node, &name)?;
        Ok((name, value))
    });
    Ok((permissions, uid, gid, values.collect::<Result<_>>()?))
}

fn moved_parts(sketch: &Sketch, bytes: Range<u64>, most: usize) -> Result<Vec<Range<u64>>> {
    let (map, _) = sketch.parts()?;
    let limit = sketch.record.limit;
    // Where the lower file was cut off, something else has taken the place of the rest of a block.
    let lower_end = if limit < sketch.origin.size { limit / BLOCK } else { sketch.lower_blocks() };
    let end = bytes.end.div_ceil(BLOCK);
    let mut parts: Vec<Range<u64>> = Vec::new();
    let mut block = bytes.start / BLOCK;
    while block < end {
        let first = block;
        let is_changed = block >= lower_end || map.bitmap.moved(block) || sketch.transit.any(block..block + 1);
        // Of those that are in one state, as many as can be told at once.
        block = if block >= lower_end {
            end
        } else if sketch.transit.any(block..lower_end) {
            block + 1
        } else {
            map.bitmap.run_end(block, lower_end.min(end), is_changed)
        };
        if !is_changed {
            continue;
        }
        let part = (first * BLOCK).max(bytes.start)..(block * BLOCK).min(bytes.end);
        let is_full = parts.len() == most;
        match parts.last_mut().filter(|last| last.end == part.start) {
            Some(last) => last.end = part.end,
            None if is_full => break,
            None => parts.push(part),
        }
    }
    Ok(parts)
}

fn data_parts(file: &Opened, bytes: Range<u64>, most: usize) -> Result<Vec<Range<u64>>> {
    let mut parts = Vec::new();
    let mut at = bytes.start;
    let beyond = |error: Error| if error == Errno::ENXIO { Ok(bytes.end) } else { Err(error) };
    while at < bytes.end && parts.len() < most {
        let start = file.branch().seek(ROOT, file.id(), at, SeekTo::Data).or_else(beyond)?;
        if start >= bytes.end {
            break;
        }
        let end = file.branch().seek(ROOT, file.id(), start, SeekTo::Hole).or_else(beyond)?;
        let part = (start - start % BLOCK).max(bytes.start)..end.next_multiple_of(BLOCK).min(bytes.end);
        at = part.end.max(at + 1);
        parts.push(part);
    }
    Ok(parts)
}
