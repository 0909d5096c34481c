//! Renames. Callers hold the namespace lock for writing.
//!
//! If the old name hides something below, it gets a whiteout. Where that cannot be one step with the move, the intermediate state
//! is one that rename(2) allows: both names lead to the same object, and never neither.
//!
//! A file that replaces another has its content in the upper branch before ([`crate::content_first`]). Writing it can take a
//! while, so it is done without the lock, and the names are looked up again afterwards.

use crate::Union;
use crate::copyup::Bytes;
use crate::exchange::{At, Side};
use crate::format;
use crate::node::Node;
use crate::resolve::{Referenced, Slot};
use crate::temporary::Temporary;
use crate::{links, marks};
use poolfs_libservice::{Error, Held, Result, fail};
use poolfs_types::{Caller, Errno, FileType, Name, NodeId, RenameFlags};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const ROOT: &Caller = &Caller::ROOT;

/// The longest path of lower directories that a redirect tells: what fits into an extended attribute of every backend, beside
/// others. Whoever is refused copies the directory, as between two filesystems.
const REDIRECT_PATH_MAX: usize = 2048;

/// One end of a rename.
#[derive(Clone, Copy)]
pub(crate) struct End<'a> {
    pub parent: &'a Arc<Node>,
    pub name: Name<'a>,
}

impl<'a> End<'a> {
    /// It in the upper branch, where `directory` is its parent.
    fn side(&self, directory: &Held) -> Side<'a> {
        Side { directory: directory.node(), name: self.name, at: At::Union(self.parent) }
    }
}

/// What came of a rename.
pub(crate) enum Renamed<'a> {
    /// it is done; what is left of a directory that was replaced goes when it is dropped, which needs no lock
    Done(Option<Temporary<'a>>),
    /// nothing is done: the content of these files has to be written first
    Unwritten(Vec<Referenced<'a>>),
}

impl Union {
    /// Renames; `written` are the files whose content was written for this rename, if that was tried already. Others are then written here.
    pub(crate) fn rename_name(
        &self,
        caller: &Caller,
        old: End<'_>,
        new: End<'_>,
        flags: RenameFlags,
        written: Option<&[Referenced<'_>]>,
    ) -> Result<Renamed<'_>> {
        let exchange = flags.contains(RenameFlags::EXCHANGE);
        if exchange && flags != RenameFlags::EXCHANGE {
            return fail(Errno::EINVAL);
        }
        let source = self.child(old.parent, old.name.as_bytes())?.ok_or_else(|| Error::from(Errno::ENOENT))?;
        let target = self.child(new.parent, new.name.as_bytes())?;
        if new.parent.read().removed || exchange && target.is_none() {
            return fail(Errno::ENOENT);
        }
        if new.parent.id == NodeId::ROOT && new.name.as_bytes() == format::DIRECTORY {
            return fail(Errno::EPERM);
        }
        if target.is_some() && flags.contains(RenameFlags::NO_REPLACE) {
            return fail(Errno::EEXIST);
        }
        if source.is_directory() && self.is_within(new.parent, &source) {
            return fail(Errno::EINVAL);
        }
        let moved = [Some(&source), target.as_ref().filter(|_| exchange)];
        let mut directories = moved.into_iter().flatten().filter(|node| node.is_directory()).peekable();
        if directories.peek().is_some() {
            self.complete_all_deferred_locked()?;
        }
        directories.filter_map(|node| node.path_bytes()).try_for_each(|path| self.paths_may_change(&path))?;
        if let Some(target) = &target
            && target.id == source.id
        {
            return Ok(Renamed::Done(None));
        }
        if let Some(target) = target.as_ref().filter(|_| exchange) {
            if target.is_directory() && self.is_within(old.parent, target) {
                return fail(Errno::EINVAL);
            }
            let unwritten = self.unwritten(&[&source, target], written)?;
            if !unwritten.is_empty() {
                return Ok(Renamed::Unwritten(unwritten));
            }
            return self.exchange(caller, old, &source, new, target).map(|()| Renamed::Done(None));
        }
        if let Some(target) = &target {
            if target.is_directory() && self.is_within(old.parent, target) {
                return fail(Errno::ENOTEMPTY);
            }
            match (source.is_directory(), target.is_directory()) {
                (true, false) => return fail(Errno::ENOTDIR),
                (false, true) => return fail(Errno::EISDIR),
                (true, true) if !self.is_empty(target)? => return fail(Errno::ENOTEMPTY),
                _ => {}
            }
            let unwritten = self.unwritten(&[&source], written)?;
            if !unwritten.is_empty() {
                return Ok(Renamed::Unwritten(unwritten));
            }
        }
        if source.is_directory() {
            old.parent.write().subdirectories = None;
            new.parent.write().subdirectories = None;
        }
        self.replace(caller, old, &source, new, target.as_ref(), flags).map(Renamed::Done)
    }

    /// Whether `node` is `ancestor` or below it.
    fn is_within(&self, node: &Arc<Node>, ancestor: &Node) -> bool {
        let mut next = Some(node.clone());
        while let Some(node) = next {
            if node.id == ancestor.id {
                return true;
            }
            next = node.parent();
        }
        false
    }

    /// Gets an object ready to stand under a name of the upper branch alone: copied up, linked at its present name, and, of a
    /// directory, with its lower ones named by a redirect or cut off.
    fn prepare(&self, node: &Referenced<'_>, at: End<'_>) -> Result<Arc<Held>> {
        let held = self.copy_up(node, Bytes::Sketch)?;
        if node.read().index_links.is_some() {
            self.link_name(node, at.parent, at.name.as_bytes())?;
        }
        if node.is_directory() {
            let (path, merged) = {
                let state = node.read();
                (state.lower_path.clone(), !state.lowers.is_empty())
            };
            match path {
                Some(path) if merged && path.len() > REDIRECT_PATH_MAX => {
                    return Err(Error::new(Errno::EXDEV, "the path of a lower directory is too long to be remembered"));
                }
                Some(path) if merged => {
                    let value = [b"/", &*path].concat();
                    marks::set(&*self.upper, held.node(), marks::REDIRECT, &value)?;
                }
                _ => self.cut_off(&held, node.read().whiteouts)?,
            }
        }
        Ok(held)
    }

    fn note_origin(&self, node: &Node, parent: &Node, directory: &Held) -> Result<()> {
        // A directory with a redirect keeps its number in its origin as well.
        if node.read().origin { self.mark_impure(parent, directory) } else { Ok(()) }
    }

    fn exchange(
        &self,
        caller: &Caller,
        old: End<'_>,
        source: &Referenced<'_>,
        new: End<'_>,
        target: &Referenced<'_>,
    ) -> Result<()> {
        self.prepare(source, old)?;
        self.prepare(target, new)?;
        let (from, to) = (self.copy_up(old.parent, Bytes::Sketch)?, self.copy_up(new.parent, Bytes::Sketch)?);
        self.note_origin(source, new.parent, &to)?;
        self.note_origin(target, old.parent, &from)?;
        self.exchange_names(caller, old.side(&from), new.side(&to))?;
        self.move_name(source, old, new);
        self.move_name(target, new, old);
        Ok(())
    }

    fn move_name(&self, node: &Arc<Node>, from: End<'_>, to: End<'_>) {
        for changed in [node, from.parent, to.parent] {
            changed.changed.see();
        }
        // The new name first: removing the last one would unpin what the node needs.
        let replaced = node.is_directory();
        if !replaced {
            self.nodes.remove_name(node, from.parent, from.name.as_bytes());
        }
        self.nodes.add_name(node, to.parent, to.name.as_bytes());
        for parent in [from.parent, to.parent].into_iter().filter(|_| node.is_directory()) {
            parent.write().subdirectories = None;
        }
    }

    fn replace(
        &self,
        caller: &Caller,
        old: End<'_>,
        source: &Referenced<'_>,
        new: End<'_>,
        target: Option<&Referenced<'_>>,
        flags: RenameFlags,
    ) -> Result<Option<Temporary<'_>>> {
        let links = match target {
            Some(target) if !target.is_directory() => {
                Some(self.before_name_goes(target, new.parent, new.name.as_bytes())?)
            }
            _ => None,
        };
        self.prepare(source, old)?;
        let (from, to) = (self.copy_up(old.parent, Bytes::Sketch)?, self.copy_up(new.parent, Bytes::Sketch)?);
        self.note_origin(source, new.parent, &to)?;
        let hides = self.hides(old.parent, old.name.as_bytes())?;
        if let Some(target) = target.filter(|target| hides && target.is_directory()) {
            // It changes places with the source, so it needs an upper directory.
            self.copy_up(target, Bytes::Sketch)?;
        }
        let (mut whiteout, mut left) = (None, None);
        if source.is_directory() {
            left = self.move_directory(old, &from, new, &to, hides)?;
        } else if hides && target.is_none() && self.work.exchanges {
            self.change_places(old, &from, new, &to)?;
        } else if hides {
            whiteout = Some(self.make_whiteout(old.parent, &from)?);
            self.link_over(source, new, &to)?;
        } else {
            self.upper.rename(caller, from.node(), old.name, to.node(), new.name, RenameFlags::empty())?;
        }
        let went = match (target, links) {
            (Some(target), Some(links)) => self.after_name_went(target, new.parent, new.name.as_bytes(), links),
            (Some(target), None) => {
                self.directory_went(target, new.parent, new.name.as_bytes());
                Ok(())
            }
            _ => Ok(()),
        };
        if let Some(whiteout) = whiteout {
            self.nodes.add_name(source, new.parent, new.name.as_bytes());
            self.put(whiteout, &from, old.name)?;
        }
        self.move_name(source, old, new);
        if flags.contains(RenameFlags::WHITEOUT) {
            self.leave_device(caller, old, &from)?;
        }
        went.map(|()| left)
    }

    /// Moves a directory. A directory cannot take the place of a whiteout, only change places with it.
    fn move_directory(
        &self,
        old: End<'_>,
        from: &Held,
        new: End<'_>,
        to: &Held,
        hides: bool,
    ) -> Result<Option<Temporary<'_>>> {
        let mut whiteout = None;
        match self.slot(to, new.name.as_bytes())? {
            Slot::Absent if !hides => {
                let none = RenameFlags::empty();
                self.upper.rename(ROOT, from.node(), old.name, to.node(), new.name, none)?;
                return Ok(None);
            }
            Slot::Absent => {
                self.white_out(new.parent, to, new.name)?;
                self.mark_whiteouts(old.parent, from)?;
            }
            // It comes to the old name, and has to be known as a whiteout there for as long as it stays.
            Slot::Whiteout => self.mark_whiteouts(old.parent, from)?,
            // An empty directory of the union may hold whiteouts: cut off from below, it changes places, and then goes.
            Slot::Object(empty, _) => {
                if hides {
                    whiteout = Some(self.make_whiteout(old.parent, from)?);
                }
                self.cut_off(&empty, marks::Marks::read(&*self.upper, empty.node())?.whiteouts)?;
            }
        }
        self.exchange_names(ROOT, old.side(from), new.side(to))?;
        let left = match self.slot(from, old.name.as_bytes())? {
            Slot::Whiteout if hides => return Ok(None),
            Slot::Whiteout => FileType::Regular,
            Slot::Object(_, attributes) => attributes.file_type,
            Slot::Absent => return Ok(None),
        };
        match whiteout {
            Some(mut whiteout) => {
                self.exchange_names(ROOT, old.side(from), whiteout.side()?)?;
                whiteout.holds(left);
                Ok(Some(whiteout))
            }
            None => self.take_away(from, old.name, left).map(Some),
        }
    }

    /// Moves a file whose old name hides a lower one to a name without an object: that gets a whiteout, which then changes
    /// places with the file.
    fn change_places(&self, old: End<'_>, from: &Held, new: End<'_>, to: &Held) -> Result<()> {
        if matches!(self.slot(to, new.name.as_bytes())?, Slot::Absent) {
            self.white_out(new.parent, to, new.name)?;
        }
        self.mark_whiteouts(old.parent, from)?;
        self.exchange_names(ROOT, old.side(from), new.side(to))
    }

    /// Gives a file the name of another, which loses it. A whiteout has to take the old name then: no single step replaces
    /// one name and leaves a whiteout at the other.
    fn link_over(&self, source: &Node, new: End<'_>, to: &Held) -> Result<()> {
        let held = source.upper().ok_or_else(|| Error::from(Errno::ESTALE))?;
        let delta = source.read().index_links;
        if let Some(delta) = delta {
            links::store_upper(self, &held, delta)?;
        }
        let mut link = Temporary::new(&self.work);
        let entry = self.upper.link(ROOT, held.node(), link.parent(), link.name()?)?;
        drop(Held::new(&self.upper, entry.node));
        link.holds(FileType::Regular);
        self.put(link, to, new.name)
    }

    /// Leaves a 0/0 device at the old name, as `RENAME_WHITEOUT` asks.
    fn leave_device(&self, caller: &Caller, old: End<'_>, from: &Held) -> Result<()> {
        let mut device = Temporary::new(&self.work);
        let entry = self.upper.mknod(caller, device.parent(), device.name()?, FileType::CharDevice, 0, 0)?;
        drop(Held::new(&self.upper, entry.node));
        device.holds(FileType::CharDevice);
        self.put(device, from, old.name)?;
        old.parent.undurable.store(true, Ordering::Release);
        Ok(())
    }
}
