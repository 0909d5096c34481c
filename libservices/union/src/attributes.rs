//! Attributes, sizes, allocation and extended attributes of union nodes.

use crate::Union;
use crate::copyup::Bytes;
use crate::format::BLOCK;
use crate::format::SketchRecord;
use crate::marks;
use crate::node::{Content, Node, OpenFile, State};
use poolfs_libservice::{Branch, Durability, Error, Held, Result, fail};
use poolfs_types::limits::FILE_SIZE_MAX;
use poolfs_types::{
    AllocateMode, Attributes, Caller, Errno, FileType, NodeId, OpenFlags, SeekTo, SetAttributes, XattrFlags,
};
use std::sync::Arc;

/// The bit of a mode that keeps others from removing names of a directory.
const STICKY: u32 = 0o1000;

const ACCESS_LIST: &[u8] = b"system.posix_acl_access";

/// Attributes that the kernel removes again and again without a word.
const ACCESS_LISTS: [&[u8]; 2] = [ACCESS_LIST, b"system.posix_acl_default"];

/// The bits of a mode that an access list says which says no more than a mode can (`fs/posix_acl.c` in Linux): entries for the owner, the
/// group and all others, and no more.
fn mode_of(list: &[u8]) -> Option<u32> {
    const VERSION: [u8; 4] = 2u32.to_le_bytes();
    const TAGS: [u16; 3] = [0x01, 0x04, 0x20];
    let (entries, rest) = list.strip_prefix(&VERSION)?.as_chunks::<8>();
    let entry = |entry: &[u8; 8]| (u16::from_le_bytes([entry[0], entry[1]]), u16::from_le_bytes([entry[2], entry[3]]));
    let (tags, permissions): (Vec<u16>, Vec<u16>) = entries.iter().map(entry).unzip();
    let is_mode = rest.is_empty() && tags == TAGS && permissions.iter().all(|&permissions| permissions <= 7);
    is_mode.then(|| permissions.iter().fold(0, |mode, &permissions| mode << 3 | u32::from(permissions)))
}

impl Union {
    /// The object that has the attributes of a node: the upper one, else the topmost lower one.
    pub(crate) fn top<'a>(&'a self, state: &'a State) -> Result<(&'a Branch, NodeId)> {
        if let Some(upper) = &state.upper {
            return Ok((&self.upper, upper.node()));
        }
        let lower = state.lowers.first().ok_or_else(|| Error::from(Errno::ESTALE))?;
        Ok((&self.lowers[lower.layer].layer, lower.held.node()))
    }

    /// The attributes users see. Of a directory, callers hold the namespace lock: its subdirectories may have to be counted.
    pub(crate) fn attributes(&self, caller: &Caller, node: &Node) -> Result<Attributes> {
        let (raw, merged, known) = {
            let state = node.read();
            let (branch, id) = self.top(&state)?;
            let raw = branch.getattr(caller, id)?;
            let branches = usize::from(state.upper.is_some()) + state.lowers.len();
            (self.shown(node, &state, raw), node.is_directory() && branches > 1, state.subdirectories)
        };
        let mut shown = raw;
        if merged && !node.read().removed {
            let count = match known {
                Some(count) => count,
                None => {
                    let count = self.count_subdirectories(node)?;
                    node.write().subdirectories = Some(count);
                    count
                }
            };
            shown.links = count + 2;
        }
        Ok(shown)
    }

    fn shown(&self, node: &Node, state: &State, raw: Attributes) -> Attributes {
        let mut shown = Attributes { inode: node.inode, changed: node.changed.shown(raw.changed), ..raw };
        if node.is_directory() {
            if node.id == NodeId::ROOT {
                shown.links = raw.links.saturating_sub(1);
            }
            return shown;
        }
        if let Some(first) = &state.first_write {
            shown.modified = first.at;
        }
        if let Some(delta) = state.index_links {
            shown.links = u32::try_from(i64::from(raw.links) + delta).unwrap_or(0);
        } else if state.removed && state.upper.is_none() {
            shown.links = 0;
        }
        if let Content::Sketch(sketch) = &state.content {
            // Nobody may take a file with few upper blocks for one that is mostly holes.
            let below = sketch.lower_blocks() * (BLOCK / 512);
            shown.blocks = (raw.blocks + below).min(raw.size.div_ceil(BLOCK) * (BLOCK / 512)).max(raw.blocks);
        }
        shown
    }

    pub(crate) fn set_attributes(
        &self,
        caller: &Caller,
        node: &Arc<Node>,
        changes: &SetAttributes,
        file: Option<&OpenFile>,
    ) -> Result<Attributes> {
        if let Some(size) = changes.size {
            match node.file_type {
                FileType::Regular => {}
                FileType::Directory => return fail(Errno::EISDIR),
                _ => return fail(Errno::EINVAL),
            }
            if file.is_some_and(|file| file.directory || !file.flags.writable()) {
                return fail(Errno::EBADF);
            }
            if size > FILE_SIZE_MAX {
                return fail(Errno::EFBIG);
            }
        }
        if *changes == SetAttributes::default() {
            let _names = node.is_directory().then(|| self.names());
            return self.attributes(caller, node);
        }
        self.ensure_upper(node, if changes.size == Some(0) { Bytes::None } else { Bytes::Sketch })?;
        {
            let mut state = if changes.size.is_some() { self.ready(node)? } else { node.write() };
            let held = state.upper.clone().ok_or_else(|| Error::from(Errno::ESTALE))?;
            match changes.size {
                Some(size) => self.truncate(caller, &mut state, &held, size, changes)?,
                None => drop(self.upper.setattr(caller, held.node(), changes, None)?),
            }
            node.changed.see();
        }
        if changes.size.is_some() {
            self.close_unused(node);
        }
        let _names = node.is_directory().then(|| self.names());
        self.attributes(caller, node)
    }

    /// Changes the size of a file whose lock is held, and what else `changes` says.
    fn truncate(
        &self,
        caller: &Caller,
        state: &mut State,
        held: &Held,
        size: u64,
        changes: &SetAttributes,
    ) -> Result<()> {
        if let Content::Sketch(sketch) = &mut state.content {
            sketch.may_become(size);
        }
        if let Content::Sketch(sketch) = &mut state.content
            && size < sketch.record.limit
        {
            let before = sketch.record;
            let store = |record: &SketchRecord| marks::set(&*self.upper, held.node(), marks::SKETCH, &record.encode());
            let record = SketchRecord { limit: size, size, ..before.next_epoch() };
            store(&record)?;
            sketch.record = record;
            let size = SetAttributes { size: changes.size, ..SetAttributes::default() };
            if let Err(error) = self.upper.setattr(&Caller::ROOT, held.node(), &size, None) {
                // Nothing was cut off. If that cannot be stored, it will be.
                if store(&before).is_ok() {
                    sketch.record = before;
                }
                return Err(error);
            }
            let blocks = sketch.lower_blocks();
            if let Some(map) = &mut sketch.map {
                map.unmoved = blocks - map.bitmap.count_below(blocks);
            }
            let done = record.next_epoch();
            store(&done)?;
            sketch.record = done;
        }
        self.upper.setattr(caller, held.node(), changes, None)?;
        if matches!(&state.content, Content::Sketch(sketch) if sketch.record.limit == 0) {
            self.dissolve(state)?;
        }
        Ok(())
    }

    pub(crate) fn allocate(
        &self,
        caller: &Caller,
        file: &OpenFile,
        mode: AllocateMode,
        offset: u64,
        length: u64,
    ) -> Result<()> {
        if length == 0 {
            return fail(Errno::EINVAL);
        }
        let end = offset.checked_add(length).filter(|&end| end <= FILE_SIZE_MAX);
        let end = end.ok_or_else(|| Error::from(Errno::EFBIG))?;
        let clears = mode.intersects(AllocateMode::PUNCH_HOLE | AllocateMode::ZERO_RANGE);
        let punch = mode.contains(AllocateMode::PUNCH_HOLE);
        if punch && mode != AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE {
            return fail(Errno::EOPNOTSUPP);
        }
        let node = &file.node;
        self.ensure_upper(node, Bytes::Sketch)?;
        let cleared = {
            let mut state = self.ready(node)?;
            let State { upper: Some(held), content, .. } = &mut *state else { return fail(Errno::ESTALE) };
            let opened = self.upper_handle(file, held)?;
            match content {
                Content::Sketch(sketch) if clears => {
                    let size = self.upper.getattr(caller, held.node())?.size;
                    let admitted = sketch.admit(offset / BLOCK..end.min(size).div_ceil(BLOCK));
                    let edges = admitted.and_then(|()| self.move_edges(sketch, size, offset, end));
                    let moved = edges.and_then(|()| {
                        self.upper.fallocate(caller, opened.id(), mode, offset, length)?;
                        // Those at the edges moved above; those between are zero above and below there is nothing to
                        // keep. A block that reaches beyond the size ends at it.
                        let last = if end >= size { end.div_ceil(BLOCK) } else { end / BLOCK };
                        let fresh = sketch.set_moved(offset.div_ceil(BLOCK)..last);
                        self.statistics.moved(fresh, 0);
                        node.changed.see();
                        Ok(())
                    });
                    self.journal.record(node.id, sketch).and(moved)
                }
                _ => {
                    self.upper.fallocate(caller, opened.id(), mode, offset, length)?;
                    node.changed.see();
                    return Ok(());
                }
            }
        };
        // Also after a failure: later writes count on those that have moved being known.
        self.after_move(node);
        cleared?;
        if file.flags.contains(OpenFlags::DATA_SYNC) {
            self.sync_file(file, Durability::Data)?;
        }
        Ok(())
    }

    pub(crate) fn seek_file(&self, caller: &Caller, file: &OpenFile, offset: u64, to: SeekTo) -> Result<u64> {
        let node = &file.node;
        loop {
            let state = node.read();
            match (&state.upper, &state.content) {
                (_, Content::Damaged(cause)) => return Err(self.damaged(node, cause)),
                (None, _) if state.first_write.is_some() => {
                    drop(state);
                    self.complete_deferred(node)?;
                    continue;
                }
                (None, _) => {
                    let opened = self.lower_handle(file, &state)?;
                    return opened.branch().seek(caller, opened.id(), offset, to);
                }
                (Some(held), Content::Plain) => {
                    return self.upper.seek(caller, self.upper_handle(file, held)?.id(), offset, to);
                }
                (Some(held), Content::Sketch(sketch)) => {
                    if sketch.parts().is_ok() && sketch.transit.is_empty() {
                        let size = self.upper.getattr(caller, held.node())?.size;
                        return self.seek_runs(sketch, size, offset, to);
                    }
                }
            }
            drop(state);
            self.make_ready(node, 0..u64::MAX)?;
        }
    }

    fn seek_runs(&self, sketch: &crate::sketch::Sketch, size: u64, offset: u64, to: SeekTo) -> Result<u64> {
        if offset >= size {
            return fail(Errno::ENXIO);
        }
        let (map, files) = sketch.parts()?;
        let lower_blocks = sketch.lower_blocks();
        let mut at = offset;
        while at < size {
            let block = at / BLOCK;
            let upper = block >= lower_blocks || map.bitmap.moved(block);
            let run = if block >= lower_blocks { u64::MAX } else { map.bitmap.run_end(block, lower_blocks, upper) };
            let run_end = run.saturating_mul(BLOCK).min(size);
            let (opened, visible) =
                if upper { (&files.upper, run_end) } else { (&files.lower, run_end.min(sketch.record.limit)) };
            let found = if at >= visible {
                if to == SeekTo::Hole { at } else { run_end }
            } else {
                match opened.branch().seek(&Caller::ROOT, opened.id(), at, to) {
                    Ok(found) if found < visible => found,
                    Ok(_) if to == SeekTo::Hole && visible < run_end => visible,
                    Ok(_) => run_end,
                    Err(error) if error == Errno::ENXIO && to == SeekTo::Data => run_end,
                    Err(error) => return Err(error),
                }
            };
            if found < run_end {
                return Ok(found);
            }
            at = run_end;
        }
        if to == SeekTo::Hole { Ok(size) } else { fail(Errno::ENXIO) }
    }

    pub(crate) fn get_xattr(&self, caller: &Caller, node: &Node, name: &[u8]) -> Result<Vec<u8>> {
        marks::refuse_hidden(name, Errno::ENODATA, || {
            let state = node.read();
            let (branch, id) = self.top(&state)?;
            branch.getxattr(caller, id, name)
        })
    }

    pub(crate) fn list_xattrs(&self, caller: &Caller, node: &Node) -> Result<Vec<Vec<u8>>> {
        let state = node.read();
        let (branch, id) = self.top(&state)?;
        let mut names = branch.listxattr(caller, id)?;
        names.retain(|name| !marks::hidden(name));
        Ok(names)
    }

    pub(crate) fn set_xattr(
        &self,
        caller: &Caller,
        node: &Arc<Node>,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
    ) -> Result<()> {
        marks::refuse_hidden(name, Errno::EOPNOTSUPP, || {
            // A list that says what the mode says already, where there is none, is no change.
            if name == ACCESS_LIST
                && let Some(mode) = mode_of(value)
                && self.get_xattr(caller, node, name).is_err_and(|error| error == Errno::ENODATA)
                && self.has_mode(caller, node, mode)?
            {
                return Ok(());
            }
            self.change_xattrs(node, |held| self.upper.setxattr(caller, held.node(), name, value, flags))
        })
    }

    pub(crate) fn remove_xattr(&self, caller: &Caller, node: &Arc<Node>, name: &[u8]) -> Result<()> {
        marks::refuse_hidden(name, Errno::EOPNOTSUPP, || {
            let plain = matches!(node.file_type, FileType::Regular | FileType::Directory);
            let is_list = ACCESS_LISTS.contains(&name) && node.file_type != FileType::Symlink;
            if is_list || (plain && node.read().upper.is_none()) {
                // What is not there needs no copy-up: it is refused, or, an access list, gone as it was, which is no change.
                match self.get_xattr(caller, node, name) {
                    Err(error) if error.errno() == Errno::ENODATA && ACCESS_LISTS.contains(&name) => return Ok(()),
                    found => found.map(drop)?,
                }
            }
            self.change_xattrs(node, |held| self.upper.removexattr(caller, held.node(), name))
        })
    }

    /// Whether the mode of a node is this one, which has no set-id bits: those of a list's mode may go with it.
    fn has_mode(&self, caller: &Caller, node: &Node, mode: u32) -> Result<bool> {
        let state = node.read();
        let (branch, id) = self.top(&state)?;
        let permissions = branch.getattr(caller, id)?.permissions;
        Ok(permissions & !STICKY == mode)
    }

    fn change_xattrs(&self, node: &Arc<Node>, change: impl FnOnce(&Held) -> Result<()>) -> Result<()> {
        self.ensure_upper(node, Bytes::Sketch)?;
        // Whoever hides a change of the union's own waits.
        let state = node.read();
        change(state.upper.as_ref().ok_or_else(|| Error::from(Errno::ESTALE))?)?;
        node.changed.see();
        Ok(())
    }
}
