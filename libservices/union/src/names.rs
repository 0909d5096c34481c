//! Creates and removes names. Callers hold the namespace lock for writing.

use crate::Union;
use crate::copyup::Bytes;
use crate::exchange::{At, Side};
use crate::format;
use crate::node::{Content, Node};
use crate::resolve::{Referenced, Slot};
use crate::sync::lock;
use crate::temporary::Temporary;
use crate::upper_names::list;
use crate::{changes, inode, links, marks};
use poolfs_libservice::{Entry, Error, Held, Opened, Result, fail};
use poolfs_types::{Attributes, Caller, Errno, FileType, HandleId, Name, NodeId, OpenFlags, RenameFlags, XattrFlags};
use std::sync::Arc;

const ROOT: &Caller = &Caller::ROOT;
const DEFAULT_ACL: &[u8] = b"system.posix_acl_default";

/// What to make.
#[derive(Clone, Copy)]
pub(crate) enum New<'a> {
    File(u32, OpenFlags),
    Special(FileType, u32, u32),
    Directory(u32),
    Symlink(&'a [u8]),
    Link(&'a Held),
}

/// What was made in the upper branch.
struct Made {
    held: Held,
    attributes: Attributes,
    opened: Option<Opened>,
}

impl Union {
    /// Checks that names may be made in `parent`.
    pub(crate) fn parent_of_new(&self, parent: NodeId, name: &[u8]) -> Result<Arc<Node>> {
        let parent = self.node(parent)?;
        if !parent.is_directory() {
            return fail(Errno::ENOTDIR);
        }
        if parent.read().removed {
            return fail(Errno::ENOENT);
        }
        if parent.id == NodeId::ROOT && name == format::DIRECTORY {
            return fail(Errno::EPERM);
        }
        Ok(parent)
    }

    /// Makes `name`, which must not exist, and returns its node with a reference, and an open file's upper handle.
    pub(crate) fn make(
        &self,
        caller: &Caller,
        parent: &Arc<Node>,
        name: Name<'_>,
        new: New<'_>,
    ) -> Result<(Entry, Option<Opened>)> {
        if self.child(parent, name.as_bytes())?.is_some() {
            return fail(Errno::EEXIST);
        }
        let directory = self.copy_up(parent, Bytes::Sketch)?;
        let Made { held, attributes, opened } = match self.slot(&directory, name.as_bytes())? {
            Slot::Whiteout => self.make_over_whiteout(caller, (parent, &directory), name, new)?,
            _ => self.make_at(caller, directory.node(), name, new)?,
        };
        parent.changed.see();
        if matches!(new, New::Directory(_)) {
            parent.write().subdirectories = None;
        }
        let child = if matches!(new, New::Link(_)) {
            self.child(parent, name.as_bytes())?.ok_or_else(|| Error::from(Errno::EIO))?
        } else {
            let made = self.node_of_new(held, &attributes);
            self.nodes.add_name(&made, parent, name.as_bytes());
            made
        };
        child.changed.see();
        let attributes = self.attributes(caller, &child)?;
        Ok((Entry { node: child.keep().id, attributes }, opened))
    }

    /// Makes a file without a name in the upper branch, with what `parent` passes on; returns its node with a reference, and its
    /// upper handle.
    pub(crate) fn make_nameless(
        &self,
        caller: &Caller,
        parent: &Arc<Node>,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, Opened)> {
        let directory = self.copy_up(parent, Bytes::Sketch)?;
        let (made, handle) = self.upper.tmpfile(caller, directory.node(), permissions, flags)?;
        let opened = Opened::new(&self.upper, handle);
        let node = self.node_of_new(Held::new(&self.upper, made.node), &made.attributes);
        let attributes = self.attributes(caller, &node)?;
        Ok((Entry { node: node.keep().id, attributes }, opened))
    }

    fn make_at(&self, caller: &Caller, parent: NodeId, name: Name<'_>, new: New<'_>) -> Result<Made> {
        let mut opened = None;
        let entry = match new {
            New::File(permissions, flags) => {
                let (entry, handle) = self.upper.create(caller, parent, name, permissions, flags)?;
                opened = Some(Opened::new(&self.upper, handle));
                entry
            }
            New::Special(file_type, permissions, device) => {
                self.upper.mknod(caller, parent, name, file_type, permissions, device)?
            }
            New::Directory(permissions) => self.upper.mkdir(caller, parent, name, permissions)?,
            New::Symlink(target) => self.upper.symlink(caller, parent, name, target)?,
            New::Link(held) => self.upper.link(caller, held.node(), parent, name)?,
        };
        Ok(Made { held: Held::new(&self.upper, entry.node), attributes: entry.attributes, opened })
    }

    /// Makes the object in the work directory and puts it in the whiteout's place, so that what the whiteout hides never
    /// shows. It is made in a directory with the parent's default ACL, which decides its mode.
    fn make_over_whiteout(
        &self,
        caller: &Caller,
        (above, parent): (&Node, &Held),
        name: Name<'_>,
        new: New<'_>,
    ) -> Result<Made> {
        let mut nest = Temporary::new(&self.work);
        let nested = Held::new(&self.upper, self.upper.mkdir(ROOT, nest.parent(), nest.name()?, 0o700)?.node);
        nest.holds(FileType::Directory);
        match self.upper.getxattr(ROOT, parent.node(), DEFAULT_ACL) {
            Ok(acl) => self.upper.setxattr(ROOT, nested.node(), DEFAULT_ACL, &acl, XattrFlags::empty())?,
            Err(error) if error == Errno::ENODATA || error == Errno::EOPNOTSUPP => {}
            Err(error) => return Err(error),
        }
        let made = self.make_at(caller, nested.node(), name, new)?;
        if matches!(new, New::Directory(_)) {
            marks::set(&*self.upper, made.held.node(), marks::OPAQUE, b"y")?;
            let place = nest.name()?;
            let inside = Side { directory: nested.node(), name, at: At::Nested(place.as_bytes()) };
            self.exchange_names(ROOT, inside, Side { directory: parent.node(), name, at: At::Union(above) })?;
            return Ok(made);
        }
        self.upper.rename(ROOT, nested.node(), name, parent.node(), name, RenameFlags::empty())?;
        Ok(made)
    }

    /// Gives `node` another name.
    pub(crate) fn make_link(
        &self,
        caller: &Caller,
        node: &Arc<Node>,
        parent: &Arc<Node>,
        name: Name<'_>,
    ) -> Result<Entry> {
        if self.child(parent, name.as_bytes())?.is_some() {
            return fail(Errno::EEXIST);
        }
        if node.is_directory() {
            return fail(Errno::EPERM);
        }
        if node.read().removed {
            return fail(Errno::ENOENT);
        }
        let held = self.copy_up(node, Bytes::Sketch)?;
        if let Some(delta) = node.read().index_links {
            links::store_upper(self, &held, delta)?;
        }
        let directory = self.copy_up(parent, Bytes::Sketch)?;
        if node.read().origin {
            self.mark_impure(parent, &directory)?;
        }
        Ok(self.make(caller, parent, name, New::Link(&held))?.0)
    }

    /// Whether the lower branches have something under `name`, which a whiteout has to hide.
    pub(crate) fn hides(&self, parent: &Node, name: &[u8]) -> Result<bool> {
        Ok(self.search_name(&parent.read(), name)?.attributes.is_some())
    }

    /// Marks a directory as one that may hold whiteouts.
    pub(crate) fn mark_whiteouts(&self, parent: &Node, directory: &Held) -> Result<()> {
        let (marked, pure) = {
            let state = parent.read();
            (state.whiteouts, state.lowers.is_empty())
        };
        if !marked {
            let (name, value) = if pure { (marks::WHITEOUTS, &b""[..]) } else { (marks::OPAQUE, &b"x"[..]) };
            marks::set(&*self.upper, directory.node(), name, value)?;
            parent.write().whiteouts = true;
        }
        Ok(())
    }

    /// Cuts an upper directory off from the lower branches; whiteouts it holds stay known as such.
    pub(crate) fn cut_off(&self, directory: &Held, whiteouts: bool) -> Result<()> {
        if whiteouts {
            marks::set(&*self.upper, directory.node(), marks::WHITEOUTS, b"")?;
        }
        marks::set(&*self.upper, directory.node(), marks::OPAQUE, b"y")
    }

    /// Makes a whiteout in the work directory, for `parent`.
    pub(crate) fn make_whiteout(&self, parent: &Node, directory: &Held) -> Result<Temporary<'_>> {
        self.mark_whiteouts(parent, directory)?;
        let mut temporary = Temporary::new(&self.work);
        let entry = self.upper.mknod(ROOT, temporary.parent(), temporary.name()?, FileType::Regular, 0o600, 0)?;
        temporary.holds(FileType::Regular);
        let held = Held::new(&self.upper, entry.node);
        marks::set(&*self.upper, held.node(), marks::WHITEOUT, b"")?;
        Ok(temporary)
    }

    /// Puts a whiteout over `name`, in the place of the upper object that is no directory, if there is one.
    pub(crate) fn white_out(&self, parent: &Arc<Node>, directory: &Held, name: Name<'_>) -> Result<()> {
        let whiteout = self.make_whiteout(parent, directory)?;
        self.put(whiteout, directory, name)
    }

    /// Moves an object from the work directory to `name`, in the place of what may be there.
    pub(crate) fn put(&self, object: Temporary<'_>, directory: &Held, name: Name<'_>) -> Result<()> {
        let none = RenameFlags::empty();
        self.upper.rename(ROOT, object.parent(), object.name()?, directory.node(), name, none)?;
        object.moved_away();
        Ok(())
    }

    /// Removes a name of something that is no directory.
    pub(crate) fn remove_file(&self, caller: &Caller, parent: &Arc<Node>, name: Name<'_>) -> Result<()> {
        let child = self.child(parent, name.as_bytes())?.ok_or_else(|| Error::from(Errno::ENOENT))?;
        if child.is_directory() {
            return fail(Errno::EISDIR);
        }
        let links = self.before_name_goes(&child, parent, name.as_bytes())?;
        if self.hides(parent, name.as_bytes())? {
            let directory = self.copy_up(parent, Bytes::Sketch)?;
            self.white_out(parent, &directory, name)?;
        } else {
            let directory = parent.upper().ok_or_else(|| Error::from(Errno::ESTALE))?;
            self.upper.unlink(caller, directory.node(), name)?;
        }
        self.after_name_went(&child, parent, name.as_bytes(), links)
    }

    /// Prepares a file for losing a name; returns how many links it has before.
    pub(crate) fn before_name_goes(&self, child: &Referenced<'_>, parent: &Arc<Node>, name: &[u8]) -> Result<u32> {
        let attributes = self.attributes(ROOT, child)?;
        let lower_only = child.read().upper.is_none();
        if lower_only && links::has_several_names(&attributes) {
            self.copy_up(child, Bytes::Sketch)?;
        }
        if child.read().index_links.is_some() {
            self.link_name(child, parent, name)?;
            if let (Some(held), Some(delta)) = (child.upper(), child.read().index_links) {
                links::store_upper(self, &held, delta)?;
            }
        }
        Ok(attributes.links)
    }

    /// Keeps the books after a file lost one of its `links` names.
    pub(crate) fn after_name_went(&self, child: &Arc<Node>, parent: &Arc<Node>, name: &[u8], links: u32) -> Result<()> {
        self.name_went(child, parent, name);
        if links > 1 {
            return Ok(());
        }
        let (indexed, id) = {
            let mut state = child.write();
            state.removed = true;
            let id = match &state.content {
                Content::Sketch(sketch) => Some(sketch.record.id),
                _ => None,
            };
            (state.index_links.is_some(), id)
        };
        if indexed {
            self.remove_from_index(child)?;
        }
        self.close_unused(child);
        match id {
            // A flush that is under way removes the bitmap itself when it ends.
            Some(id) if child.flushing.try_lock().is_ok() => self.work.remove_bitmap(&id),
            _ => Ok(()),
        }
    }

    /// Forgets a name that was removed, which changes the object and the directory.
    fn name_went(&self, child: &Arc<Node>, parent: &Arc<Node>, name: &[u8]) {
        self.nodes.remove_name(child, parent, name);
        parent.changed.see();
        child.changed.see();
        let lower = {
            let state = child.read();
            if state.upper.is_none() { state.lowers.first().cloned() } else { None }
        };
        // A lower object never changes. Who still has it open sees when its name went.
        if let Some(Ok(raw)) = lower.map(|lower| self.lowers[lower.layer].layer.getattr(ROOT, lower.held.node())) {
            child.changed.show(raw.changed, changes::now());
        }
    }

    fn remove_from_index(&self, child: &Node) -> Result<()> {
        let Some(held) = child.upper() else { return Ok(()) };
        let index = self.work.index.node();
        // The key needs the lower inode. If that is gone, the entry is found as the one that is this upper file.
        let names = match self.lower_file(child)? {
            Some((layer, attributes)) => vec![inode::index_key(&self.lowers[layer].layer_id, &attributes).into_bytes()],
            None => list(&self.upper, index)?.into_iter().map(|(name, _)| name).collect(),
        };
        for name in names {
            let found = match self.slot(&self.work.index, &name)? {
                Slot::Object(found, _) => found.node() == held.node(),
                _ => false,
            };
            if found {
                self.upper.unlink(ROOT, index, Name::new(&name)?)?;
                child.write().index_links = Some(0);
                break;
            }
        }
        Ok(())
    }

    /// Removes a directory that is empty in the union. What is returned goes when it is dropped, which may take a while (a
    /// whiteout for each lower name) and needs no lock.
    pub(crate) fn remove_directory(&self, parent: &Arc<Node>, name: Name<'_>) -> Result<Option<Temporary<'_>>> {
        let child = self.child(parent, name.as_bytes())?.ok_or_else(|| Error::from(Errno::ENOENT))?;
        if !child.is_directory() {
            return fail(Errno::ENOTDIR);
        }
        if !self.is_empty(&child)? {
            return fail(Errno::ENOTEMPTY);
        }
        let mut left = None;
        if self.hides(parent, name.as_bytes())? {
            let directory = self.copy_up(parent, Bytes::Sketch)?;
            let mut whiteout = self.make_whiteout(parent, &directory)?;
            if child.upper().is_some() {
                let there = Side { directory: directory.node(), name, at: At::Union(parent) };
                self.exchange_names(ROOT, whiteout.side()?, there)?;
                whiteout.holds(FileType::Directory);
                left = Some(whiteout);
            } else {
                self.put(whiteout, &directory, name)?;
            }
        } else {
            let directory = parent.upper().ok_or_else(|| Error::from(Errno::ESTALE))?;
            if child.read().whiteouts {
                left = Some(self.take_away(&directory, name, FileType::Directory)?);
            } else {
                self.upper.rmdir(ROOT, directory.node(), name)?;
            }
        }
        self.directory_went(&child, parent, name.as_bytes());
        Ok(left)
    }

    /// Removes a name of an upper directory in one step, whatever is below it.
    pub(crate) fn take_away(&self, directory: &Held, name: Name<'_>, file_type: FileType) -> Result<Temporary<'_>> {
        let mut temporary = Temporary::new(&self.work);
        let (work, to) = (temporary.parent(), temporary.name()?);
        self.upper.rename(ROOT, directory.node(), name, work, to, RenameFlags::empty())?;
        temporary.holds(file_type);
        Ok(temporary)
    }

    /// Keeps the books after a directory was removed: whoever has it open sees it empty.
    pub(crate) fn directory_went(&self, child: &Arc<Node>, parent: &Arc<Node>, name: &[u8]) {
        self.name_went(child, parent, name);
        let mut state = child.write();
        state.removed = true;
        if state.upper.is_some() {
            state.lowers.clear();
        }
        drop(state);
        parent.write().subdirectories = None;
    }

    /// Registers an open file.
    pub(crate) fn open_handle(&self, file: crate::node::OpenFile) -> HandleId {
        self.nodes.pin(&file.node);
        let file = Arc::new(file);
        if !file.directory {
            lock(&file.node.handles).push(Arc::downgrade(&file));
        }
        self.handles.insert(file)
    }
}
