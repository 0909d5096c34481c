//! Branch lookup: from a union directory and a name to the objects of the branches.

use crate::Union;
use crate::bitmap::SKETCH_SIZE_MAX;
use crate::branch::{self, LowerNode};
use crate::format::{Origin, SketchRecord};
use crate::lower_path::LowerPath;
use crate::marks::{self, Marks, Redirect};
use crate::node::{Content, NewNode, Node, State};
use crate::sketch::Sketch;
use crate::{inode, links};
use poolfs_libservice::{Error, Held, Result};
use poolfs_types::{Attributes, Caller, Errno, FileType, Name};
use std::sync::Arc;

/// What the upper branch has under a name.
pub(crate) enum Slot {
    Absent,
    Whiteout,
    Object(Arc<Held>, Attributes),
}

/// What the lower branches have under a name, merged.
#[derive(Default)]
pub(crate) struct LowerFound {
    pub nodes: Vec<LowerNode>,
    pub attributes: Option<Attributes>,
    /// of directories: the path in the union of the lower branches
    pub path: Option<LowerPath>,
}

/// Where to look in the lower branches.
enum Search<'a> {
    /// a name in these directories
    Name(&'a [LowerNode], Vec<u8>),
    /// a path from each branch's root
    Path(Vec<Vec<u8>>),
}

/// One lower branch's answer.
enum Step {
    Absent,
    /// nothing there, and nothing below may be shown
    Stop,
    Found {
        node: LowerNode,
        attributes: Attributes,
        last: bool,
        rest: Option<Vec<Vec<u8>>>,
    },
}

/// A union node with a reference that is given back when dropped.
pub(crate) struct Referenced<'a> {
    union: &'a Union,
    node: Arc<Node>,
}

impl Referenced<'_> {
    /// Leaves the reference to the caller.
    pub fn keep(self) -> Arc<Node> {
        self.union.nodes.refer(&self.node);
        self.node.clone()
    }
}

impl std::ops::Deref for Referenced<'_> {
    type Target = Arc<Node>;

    fn deref(&self) -> &Arc<Node> {
        &self.node
    }
}

impl Drop for Referenced<'_> {
    fn drop(&mut self) {
        self.union.nodes.forget(self.node.id, 1);
    }
}

/// A node that was found, with one more reference.
struct Read {
    node: Arc<Node>,
    /// a truncation had begun when its record was read
    is_truncating: bool,
}

impl From<Arc<Node>> for Read {
    fn from(node: Arc<Node>) -> Self {
        Read { node, is_truncating: false }
    }
}

/// What a look at the lower branches has come to.
enum Looked {
    Found(Read),
    Absent,
    /// another thread has had a node of it meanwhile
    Outdated,
}

/// How often an object is read that other threads have nodes of meanwhile.
const ATTEMPTS_MAX: usize = 100;

impl Union {
    /// One more reference on a node that is known.
    pub(crate) fn refer(&self, node: &Arc<Node>) -> Referenced<'_> {
        self.nodes.refer(node);
        Referenced { union: self, node: node.clone() }
    }

    /// What the upper directory `parent` has under `name`.
    pub(crate) fn slot(&self, parent: &Held, name: &[u8]) -> Result<Slot> {
        let Some((held, attributes)) = self.upper_entry(parent, name)? else { return Ok(Slot::Absent) };
        if marks::is_xattr_whiteout(&*self.upper, held.node(), &attributes)? {
            return Ok(Slot::Whiteout);
        }
        Ok(Slot::Object(Arc::new(held), attributes))
    }

    /// One name of one upper directory: an object, or a whiteout.
    fn upper_entry(&self, parent: &Held, name: &[u8]) -> Result<Option<(Held, Attributes)>> {
        match self.upper.lookup(&Caller::ROOT, parent.node(), Name::new(name)?) {
            Ok(entry) => Ok(Some((Held::new(&self.upper, entry.node), entry.attributes))),
            Err(error) if error == Errno::ENOENT => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The union node under `name`, if there is one.
    pub(crate) fn child(&self, parent: &Arc<Node>, name: &[u8]) -> Result<Option<Referenced<'_>>> {
        if parent.id == poolfs_types::NodeId::ROOT && name == crate::format::DIRECTORY {
            return Ok(None);
        }
        let found = {
            let state = parent.read();
            let removals = self.nodes.removals();
            let entry = state.upper.as_ref().map(|upper| self.upper_entry(upper, name)).transpose()?;
            match entry.flatten() {
                None => self.node_of_lower(&state, name)?,
                Some((held, attributes)) => match self.nodes.refer_upper(held.node()) {
                    // No node ever stands for a whiteout.
                    Some(node) => Some(node.into()),
                    None if marks::is_xattr_whiteout(&*self.upper, held.node(), &attributes)? => None,
                    None => Some(self.node_of_upper(&state, name, Arc::new(held), &attributes, removals)?),
                },
            }
        };
        let Some(Read { node, is_truncating }) = found else { return Ok(None) };
        self.nodes.add_name(&node, parent, name);
        let node = Referenced { union: self, node };
        if is_truncating {
            self.complete_truncation(&node)?;
        }
        Ok(Some(node))
    }

    /// Makes good a truncation that was begun when the record was read: by another thread, which then has done it, or by a service that is
    /// no more. Nothing of the directory that the node is in may be locked.
    fn complete_truncation(&self, node: &Node) -> Result<()> {
        match &mut *node.write() {
            State { upper: Some(upper), content: Content::Sketch(sketch), .. } if sketch.is_truncating() => {
                self.finish_truncation(upper, &mut sketch.record)
            }
            _ => Ok(()),
        }
    }

    /// A node for an upper object that has none yet, and was looked up since there were so many removals.
    fn node_of_upper(
        &self,
        parent: &State,
        name: &[u8],
        held: Arc<Held>,
        attributes: &Attributes,
        removals: u64,
    ) -> Result<Read> {
        let (mut attributes, mut removals) = (*attributes, removals);
        for _ in 0..ATTEMPTS_MAX {
            if let Some(read) = self.read_upper(parent, name, &held, &attributes, removals)? {
                return Ok(read);
            }
            removals = self.nodes.removals();
            attributes = self.upper.getattr(&Caller::ROOT, held.node())?;
        }
        Err(Error::new(Errno::ESTALE, "its upper object is looked up and let go again and again"))
    }

    /// The same, unless another thread has had a node of it meanwhile.
    fn read_upper(
        &self,
        parent: &State,
        name: &[u8],
        held: &Arc<Held>,
        attributes: &Attributes,
        removals: u64,
    ) -> Result<Option<Read>> {
        let upper = &*self.upper;
        let marks = Marks::read(upper, held.node())?;
        let origin = match marks.origin {
            true => Origin::decode(&upper.getxattr(&Caller::ROOT, held.node(), marks::ORIGIN)?).ok(),
            false => None,
        };
        let mut found = LowerFound::default();
        if attributes.is_directory() && !marks.opaque {
            found = match &marks.redirect {
                Some(Redirect::Path(path)) => self.search(parent, Search::Path(path.clone()))?,
                Some(Redirect::Sibling(other)) => self.search_name(parent, other)?,
                None => self.search_name(parent, name)?,
            };
            if found.attributes.is_some_and(|attributes| !attributes.is_directory()) {
                found = LowerFound::default();
            }
        }
        let mut content = Content::Plain;
        if attributes.file_type == FileType::Regular && (marks.sketch || marks.metacopy) {
            content = self.sketch_content(held, attributes, &marks, origin.clone())?;
        }
        let is_truncating = matches!(&content, Content::Sketch(sketch) if sketch.is_truncating());
        let index_links = match marks.links {
            true => Some(links::load(self, held, attributes, origin.as_ref())?),
            false => None,
        };
        let new = NewNode {
            inode: origin.map_or_else(|| inode::shown(inode::UPPER, attributes.inode), |origin| origin.inode),
            file_type: attributes.file_type,
            state: State {
                upper: Some(held.clone()),
                lowers: found.nodes,
                names: Vec::new(),
                removed: false,
                content,
                first_write: None,
                is_copied_up_now: false,
                index_links,
                origin: marks.origin,
                lower_path: found.path,
                whiteouts: marks.whiteouts,
                impure: marks.impure,
                subdirectories: None,
            },
        };
        Ok(self.nodes.intern_read(new, removals).map(|node| Read { node, is_truncating }))
    }

    /// The node of what was just made in the upper branch. Nobody has to look for its marks: it has none, but a directory perhaps
    /// the one that cuts it off from below.
    pub(crate) fn node_of_new(&self, held: Held, attributes: &Attributes) -> Referenced<'_> {
        let node = self.nodes.intern(NewNode {
            inode: inode::shown(inode::UPPER, attributes.inode),
            file_type: attributes.file_type,
            state: State {
                upper: Some(Arc::new(held)),
                lowers: Vec::new(),
                names: Vec::new(),
                removed: false,
                content: Content::Plain,
                first_write: None,
                is_copied_up_now: false,
                index_links: None,
                origin: false,
                lower_path: None,
                whiteouts: false,
                impure: false,
                subdirectories: None,
            },
        });
        Referenced { union: self, node }
    }

    /// What an upper file that is or was a sketch consists of.
    fn sketch_content(
        &self,
        held: &Held,
        attributes: &Attributes,
        marks: &Marks,
        origin: Option<Origin>,
    ) -> Result<Content> {
        if !marks.sketch {
            if !self.work.is_frozen() {
                marks::clear(&*self.upper, held.node(), marks::METACOPY)?;
            }
            return Ok(Content::Plain);
        }
        let value = self.upper.getxattr(&Caller::ROOT, held.node(), marks::SKETCH)?;
        let decoded = SketchRecord::decode(&value)
            .and_then(|record| Ok((record, origin.ok_or("its origin is missing or broken")?)));
        let decoded = decoded.and_then(|(record, origin)| match record.limit <= origin.size.min(SKETCH_SIZE_MAX) {
            true => Ok((record, origin)),
            false => Err("its record and its origin contradict each other".into()),
        });
        let (record, origin) = match decoded {
            Ok(decoded) => decoded,
            Err(cause) => return Ok(Content::Damaged(cause.into())),
        };
        if let Some(cause) = self.work.stranger(&record, attributes.inode) {
            return Ok(Content::Damaged(cause.into()));
        }
        if let Some(cause) = self.sketch_waits(&record.id) {
            return Ok(Content::Damaged(cause.into()));
        }
        Ok(Content::Sketch(Box::new(Sketch::found(record, origin, attributes.size))))
    }

    /// A node for what the lower branches have, which may be known to the index of hard links.
    fn node_of_lower(&self, parent: &State, name: &[u8]) -> Result<Option<Read>> {
        for _ in 0..ATTEMPTS_MAX {
            match self.read_lower(parent, name)? {
                Looked::Found(read) => return Ok(Some(read)),
                Looked::Absent => return Ok(None),
                Looked::Outdated => {}
            }
        }
        Err(Error::new(Errno::ESTALE, "its lower object is looked up and let go again and again"))
    }

    fn read_lower(&self, parent: &State, name: &[u8]) -> Result<Looked> {
        let removals = self.nodes.removals();
        let found = self.search_name(parent, name)?;
        let (Some(top), Some(attributes)) = (found.nodes.first(), found.attributes) else {
            return Ok(Looked::Absent);
        };
        if let Some(node) = self.nodes.refer_lower(top.layer, top.held.node()) {
            return Ok(Looked::Found(node.into()));
        }
        let layer_id = &self.lowers[top.layer].layer_id;
        if links::has_several_names(&attributes)
            && let Some((held, upper)) = self.work.indexed(&self.upper, &inode::index_key(layer_id, &attributes))?
        {
            return match self.nodes.refer_upper(held.node()) {
                Some(node) => Ok(Looked::Found(node.into())),
                None => self.node_of_upper(parent, name, held, &upper, removals).map(Looked::Found),
            };
        }
        let mut content = Content::Plain;
        if attributes.file_type == FileType::Regular
            && Marks::read(&*self.lowers[top.layer].layer, top.held.node())?.metacopy
        {
            content = Content::Damaged("it is an unfinished sketch in a lower branch".into());
        }
        if let Some(cause) = self.lower_waits(top) {
            content = Content::Damaged(cause.into());
        }
        let new = NewNode {
            inode: inode::shown(layer_id, attributes.inode),
            file_type: attributes.file_type,
            state: State {
                upper: None,
                lowers: found.nodes,
                names: Vec::new(),
                removed: false,
                content,
                first_write: None,
                is_copied_up_now: false,
                index_links: None,
                origin: false,
                lower_path: found.path,
                whiteouts: false,
                impure: false,
                subdirectories: None,
            },
        };
        let node = self.nodes.intern_read(new, removals);
        Ok(node.map_or(Looked::Outdated, |node| Looked::Found(node.into())))
    }

    /// What the lower branches have under `name` in `parent`.
    pub(crate) fn search_name(&self, parent: &State, name: &[u8]) -> Result<LowerFound> {
        if parent.lowers.is_empty() {
            return Ok(LowerFound::default());
        }
        self.search(parent, Search::Name(&parent.lowers, name.to_vec()))
    }

    fn search(&self, parent: &State, mut search: Search<'_>) -> Result<LowerFound> {
        let mut found = LowerFound::default();
        for layer in 0..self.lowers.len() {
            let (mut node, attributes, last, rest) = match self.step(layer, &search)? {
                Step::Absent => continue,
                Step::Stop => break,
                Step::Found { node, attributes, last, rest } => (node, attributes, last, rest),
            };
            if found.attributes.is_some() && !attributes.is_directory() {
                break;
            }
            let held = node.held.clone();
            if found.attributes.is_none() {
                found.attributes = Some(attributes);
                // Where it was looked for so far. Only of what is there: a new name in the upper branch may be deeper than any that the lower ones can have.
                found.path = match &search {
                    Search::Name(_, name) => parent.lower_path.as_ref().map(|path| path.child(name)).transpose()?,
                    Search::Path(parts) => Some(self.lower_root.beside(parts)?),
                };
            }
            let known = found.path.iter().chain(found.nodes.last().map(|above| &above.path));
            known.for_each(|path| node.path.share(path));
            found.nodes.push(node);
            if !attributes.is_directory() {
                break;
            }
            let marks = Marks::read(&*self.lowers[layer].layer, held.node())?;
            if last || marks.opaque {
                break;
            }
            match (marks.redirect, rest) {
                (Some(Redirect::Path(path)), _) => search = Search::Path(path),
                (Some(Redirect::Sibling(name)), Some(mut parts)) => {
                    parts.pop();
                    parts.push(name);
                    search = Search::Path(parts);
                }
                (Some(Redirect::Sibling(name)), None) => {
                    if let Search::Name(_, current) = &mut search {
                        *current = name;
                    }
                }
                (None, Some(parts)) => search = Search::Path(parts),
                (None, None) => {}
            }
        }
        if !found.attributes.is_some_and(|attributes| attributes.is_directory()) {
            found.path = None;
        }
        Ok(found)
    }

    /// Looks into one lower branch.
    fn step(&self, layer: usize, search: &Search<'_>) -> Result<Step> {
        match search {
            Search::Name(directories, name) => {
                let Some(directory) = directories.iter().find(|directory| directory.layer == layer) else {
                    return Ok(Step::Absent);
                };
                Ok(match self.lower_entry(layer, &directory.held, &directory.path, name)? {
                    None => Step::Absent,
                    Some((node, attributes)) if self.is_whiteout(&node, &attributes)? => Step::Stop,
                    Some((node, attributes)) => Step::Found { node, attributes, last: false, rest: None },
                })
            }
            Search::Path(parts) => self.walk(layer, parts),
        }
    }

    /// Walks a path from the root of one lower branch; `rest` is the path that the branches below have to be asked for.
    fn walk(&self, layer: usize, parts: &[Vec<u8>]) -> Result<Step> {
        let branch = &self.lowers[layer].layer;
        let mut held = Arc::new(Held::new(branch, poolfs_types::NodeId::ROOT));
        let mut path = self.lower_root.clone();
        let mut below: Vec<Vec<u8>> = Vec::new();
        let mut last = false;
        for (at, part) in parts.iter().enumerate() {
            let Some((node, attributes)) = self.lower_entry(layer, &held, &path, part)? else {
                return Ok(if last { Step::Stop } else { Step::Absent });
            };
            if self.is_whiteout(&node, &attributes)? {
                return Ok(Step::Stop);
            }
            below.push(part.clone());
            if at + 1 == parts.len() {
                return Ok(Step::Found { node, attributes, last, rest: Some(below) });
            }
            if !attributes.is_directory() {
                return Ok(Step::Stop);
            }
            let marks = Marks::read(&**branch, node.held.node())?;
            last |= marks.opaque;
            match marks.redirect {
                Some(Redirect::Path(path)) => below = path,
                Some(Redirect::Sibling(name)) => {
                    below.pop();
                    below.push(name);
                }
                None => {}
            }
            (held, path) = (node.held, node.path);
        }
        Ok(Step::Stop)
    }

    fn is_whiteout(&self, node: &LowerNode, attributes: &Attributes) -> Result<bool> {
        self.lowers[node.layer].is_whiteout(node.held.node(), attributes)
    }

    /// One name of one lower directory.
    pub(crate) fn lower_entry(
        &self,
        layer: usize,
        directory: &Held,
        path: &LowerPath,
        name: &[u8],
    ) -> Result<Option<(LowerNode, Attributes)>> {
        branch::lower_entry(&self.lowers, layer, directory, path, name)
    }

    /// The lower file an origin names, with its attributes; the cause when it is not the one that was copied up.
    pub(crate) fn lower_of(&self, origin: &Origin) -> Result<std::result::Result<(LowerNode, Attributes), String>> {
        branch::lower_of(&self.lowers, &self.lower_root, origin)
    }

    /// The node for an id that a caller gave.
    pub(crate) fn node(&self, id: poolfs_types::NodeId) -> Result<Arc<Node>> {
        self.nodes.get(id).ok_or_else(|| Error::from(Errno::ESTALE))
    }
}
