//! Copy-up: the first change of a lower object gives it an upper one. For a regular file this is a sketch, without a byte of its
//! content. Callers hold the namespace lock for writing.

use crate::Union;
use crate::bitmap::SKETCH_SIZE_MAX;
use crate::branch::LowerNode;
use crate::first_write::FirstWrite;
use crate::format::{ORIGIN_PATH_MAX, Origin, SketchRecord};
use crate::node::{Content, Node, State};
use crate::sketch::Sketch;
use crate::sync::lock;
use crate::temporary::Temporary;
use crate::{inode, links, marks};
use poolfs_libservice::{Durability, Error, Held, Opened, PageBuffer, Result};
use poolfs_types::{Attributes, Caller, Errno, FileType, Name, OpenFlags, SeekTo, SetAttributes, SetTime, XattrFlags};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes copied at once where a file has to be copied whole.
const COPY_BYTES: u64 = 1 << 20;
const ROOT: &Caller = &Caller::ROOT;

/// What of a regular file is copied up.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bytes {
    /// all stay visible, and stay below
    Sketch,
    /// none: the file is about to be truncated to nothing
    None,
}

/// What an upper object begins with.
struct What {
    bytes: Bytes,
    /// what was written of the file before it is copied up
    first: Option<Arc<FirstWrite>>,
}

/// Whether a mark was set. Without xattrs on links and special files these only lose their inode number, and their other names.
fn marked(set: Result<()>, file_type: FileType) -> Result<bool> {
    match set {
        Err(error)
            if !matches!(file_type, FileType::Regular | FileType::Directory)
                && (error == Errno::EPERM || error == Errno::EOPNOTSUPP) =>
        {
            Ok(false)
        }
        other => other.map(|()| true),
    }
}

impl Union {
    /// Gives `node`, and every directory above it, an upper object; returns that of `node`.
    pub(crate) fn copy_up(&self, node: &Arc<Node>, bytes: Bytes) -> Result<Arc<Held>> {
        if let Some(upper) = node.upper() {
            return Ok(upper);
        }
        let mut missing = vec![node.clone()];
        while let Some(parent) = missing.last().and_then(|node| node.parent()) {
            if parent.upper().is_some() {
                break;
            }
            missing.push(parent);
        }
        while let Some(next) = missing.pop() {
            self.copy_up_one(&next, bytes)?;
        }
        node.upper().ok_or_else(|| Error::from(Errno::ESTALE))
    }

    /// Copies up one object whose parent has an upper directory (or which has no name any more).
    fn copy_up_one(&self, node: &Arc<Node>, bytes: Bytes) -> Result<()> {
        // What is written for the first time from here on waits for the upper file.
        node.write().is_copied_up_now = true;
        let result = self.copy_up_alone(node, bytes);
        node.write().is_copied_up_now = false;
        let held = result?;
        if node.is_directory() {
            node.undurable.store(true, Ordering::Release);
        }
        self.statistics.copied_up(node.file_type);
        self.reopen(node, &held)
    }

    fn copy_up_alone(&self, node: &Arc<Node>, bytes: Bytes) -> Result<Arc<Held>> {
        let (lower, place, what) = {
            let state = node.read();
            if let Content::Damaged(cause) = &state.content {
                return Err(self.damaged(node, cause));
            }
            let lower = state.lowers.first().cloned().ok_or_else(|| Error::from(Errno::ESTALE))?;
            let place = state.names.first().map(|name| (name.parent.clone(), name.name.clone()));
            // What was written is there also when the truncation fails that is about to come.
            let bytes = if state.first_write.is_some() { Bytes::Sketch } else { bytes };
            (lower, place, What { bytes, first: state.first_write.clone() })
        };
        let attributes = self.lowers[lower.layer].layer.getattr(ROOT, lower.held.node())?;
        let mut temporary = Temporary::new(&self.work);
        let (held, content) = self.build(node, &lower, &attributes, &what, &mut temporary)?;
        let index_links = self.put_into_place(node, &held, &lower, &attributes, temporary, place.as_ref())?;
        self.nodes.bind_upper(node, held.node());
        let left = self.upper.getattr(ROOT, held.node());
        if what.first.is_some() {
            // Before others see that it waits no more: whoever syncs finds it there, and it stays the node of the file until it is on disk.
            self.queue(node);
        }
        {
            let mut state = node.write();
            if let Ok(left) = left {
                node.changed.show(left.changed, node.changed.shown(attributes.changed));
            }
            if let Some(lease) = lock(&node.lease).take().and_then(|lease| lease.upgrade()) {
                lease.revoke();
            }
            state.upper = Some(held.clone());
            state.content = content;
            state.first_write = None;
            state.origin = true;
            state.index_links = index_links;
        }
        if what.first.is_some()
            && let Content::Sketch(sketch) = &node.read().content
        {
            self.have_transit_ended(node, sketch);
        }
        Ok(held)
    }

    /// Makes the upper object in the work directory, complete with attributes and marks.
    fn build(
        &self,
        node: &Node,
        lower: &LowerNode,
        attributes: &Attributes,
        what: &What,
        temporary: &mut Temporary<'_>,
    ) -> Result<(Arc<Held>, Content)> {
        let branch = &self.lowers[lower.layer].layer;
        let caller = Caller { uid: attributes.uid, gid: attributes.gid, umask: 0 };
        let (work, name) = (temporary.parent(), temporary.name()?);
        let permissions = attributes.permissions;
        let entry = match node.file_type {
            FileType::Directory => self.upper.mkdir(&caller, work, name, permissions)?,
            FileType::Symlink => {
                let target = branch.readlink(ROOT, lower.held.node())?;
                self.upper.symlink(&caller, work, name, &target)?
            }
            other => self.upper.mknod(&caller, work, name, other, permissions, attributes.device)?,
        };
        temporary.holds(node.file_type);
        let held = Arc::new(Held::new(&self.upper, entry.node));
        let mut origin = Origin {
            layer_id: self.lowers[lower.layer].layer_id.clone(),
            path: lower.path.to_vec(),
            inode: node.inode,
            size: attributes.size,
            modified: attributes.modified,
        };
        let fits = origin.path.len() <= ORIGIN_PATH_MAX;
        if !fits {
            origin.path.clear();
        }
        let mut changes = SetAttributes {
            accessed: Some(SetTime::At(attributes.accessed)),
            modified: Some(SetTime::At(attributes.modified)),
            ..SetAttributes::default()
        };
        if node.file_type != FileType::Symlink && entry.attributes.permissions != permissions {
            changes.permissions = Some(permissions);
        }
        let has_bytes = node.file_type == FileType::Regular && attributes.size > 0 && what.bytes == Bytes::Sketch;
        if has_bytes {
            if fits && attributes.size > SKETCH_SIZE_MAX {
                return Err(Error::new(Errno::EFBIG, "a lower file is too large for a sketch"));
            }
            if !fits {
                self.copy_whole(lower, &held, attributes.size)?;
            }
            changes.size = Some(attributes.size);
        }
        self.upper.setattr(ROOT, held.node(), &changes, None)?;
        // After content and size: whoever changes these takes the file's capabilities away.
        self.copy_xattrs(lower, &held, node.file_type)?;
        self.set_origin(&held, &origin, node.file_type)?;
        let content = match has_bytes && fits {
            true => {
                let id = what.first.as_ref().map_or_else(crate::sketch::new_id, |first| Ok(first.id))?;
                let (limit, owner) = (attributes.size, entry.attributes.inode);
                let record = SketchRecord { id, bitmap_durable: false, limit, size: limit, epoch: 0, owner };
                let mut content = self.make_sketch(record, &held, origin, lower)?;
                if let Some(first) = &what.first {
                    self.put_first_write(node, &held, &mut content, first)?;
                }
                content
            }
            false => Content::Plain,
        };
        Ok((held, content))
    }

    fn set_origin(&self, held: &Held, origin: &Origin, file_type: FileType) -> Result<()> {
        let set = marks::set(&*self.upper, held.node(), marks::ORIGIN, &origin.encode());
        marked(set, file_type).map(drop)
    }

    fn make_sketch(&self, record: SketchRecord, held: &Held, origin: Origin, lower: &LowerNode) -> Result<Content> {
        self.needed.note(&self.work, lower.layer, &origin.layer_id);
        marks::set(&*self.upper, held.node(), marks::METACOPY, b"")?;
        marks::set(&*self.upper, held.node(), marks::SKETCH, &record.encode())?;
        Ok(Content::Sketch(Box::new(Sketch::fresh(record, origin, lower.clone(), &self.sectors))))
    }

    fn copy_whole(&self, lower: &LowerNode, held: &Held, size: u64) -> Result<()> {
        let branch = &self.lowers[lower.layer].layer;
        let from = Opened::file(branch, ROOT, lower.held.node(), OpenFlags::READ_ONLY)?;
        let to = Opened::file(&self.upper, ROOT, held.node(), OpenFlags::READ_WRITE)?;
        let mut buffer = PageBuffer::zeroed(COPY_BYTES.min(size) as usize);
        let mut offset = 0;
        while offset < size {
            offset = match branch.seek(ROOT, from.id(), offset, SeekTo::Data) {
                Ok(data) => data,
                Err(error) if error == Errno::ENXIO => break,
                Err(error) => return Err(error),
            };
            let end = branch.seek(ROOT, from.id(), offset, SeekTo::Hole)?.min(size);
            let part = &mut buffer[..COPY_BYTES.min(end.saturating_sub(offset)) as usize];
            if part.is_empty() || from.read_full(offset, part)? < part.len() {
                return Err(Error::new(Errno::EIO, "a lower file became shorter while it was copied"));
            }
            to.write_full(offset, part)?;
            offset += part.len() as u64;
        }
        // It is about to hide the lower file, whose bytes nobody has been told to be at risk.
        self.upper.fsync(ROOT, to.id(), Durability::All)
    }

    fn copy_xattrs(&self, lower: &LowerNode, held: &Held, file_type: FileType) -> Result<()> {
        let branch = &self.lowers[lower.layer].layer;
        let names = match branch.listxattr(ROOT, lower.held.node()) {
            Ok(names) => names,
            Err(error) if error == Errno::EOPNOTSUPP => return Ok(()),
            Err(error) => return Err(error),
        };
        for name in names.iter().filter(|name| !marks::hidden(name)) {
            let value = branch.getxattr(ROOT, lower.held.node(), name)?;
            match self.upper.setxattr(ROOT, held.node(), name, &value, XattrFlags::empty()) {
                // Security labels of the host do not have to fit the upper branch.
                Err(error) if error == Errno::EOPNOTSUPP && name.starts_with(b"security.selinux") => {}
                Err(error) if error == Errno::EPERM && file_type == FileType::Symlink => {}
                other => other?,
            }
        }
        Ok(())
    }

    /// Moves a copied-up object from the work directory to where it belongs; of an indexed file returns its links.
    fn put_into_place(
        &self,
        node: &Arc<Node>,
        held: &Held,
        lower: &LowerNode,
        attributes: &Attributes,
        temporary: Temporary<'_>,
        place: Option<&(Arc<Node>, Box<[u8]>)>,
    ) -> Result<Option<i64>> {
        if links::has_several_names(attributes)
            && (place.is_some() || !node.read().removed)
            && marked(links::store_lower(self, held, i64::from(attributes.links), attributes.links), node.file_type)?
        {
            let key = inode::index_key(&self.lowers[lower.layer].layer_id, attributes);
            self.put(temporary, &self.work.index, Name::new(key.as_bytes())?)?;
            self.work.undurable.store(true, Ordering::Release);
            let mut upper_links = 1;
            if let Some((parent, place)) = place {
                self.inside(parent, |directory| {
                    self.upper.link(ROOT, held.node(), directory.node(), Name::new(place)?).map(|entry| {
                        drop(Held::new(&self.upper, entry.node));
                    })
                })?;
                upper_links = 2;
            }
            return Ok(Some(i64::from(attributes.links) - upper_links));
        }
        // What was removed while it was open has no place: its upper object lives as long as the node.
        if let Some((parent, place)) = place {
            self.inside(parent, |directory| self.put(temporary, directory, Name::new(place)?))?;
        }
        Ok(None)
    }

    /// Puts a copied-up object into an upper directory, whose times stay: nothing changed that a user could see.
    pub(crate) fn inside(&self, parent: &Arc<Node>, put: impl FnOnce(&Held) -> Result<()>) -> Result<()> {
        // Whoever sets the times meanwhile waits, and has the last word.
        let mut state = parent.write();
        let directory = state.upper.clone().ok_or_else(|| Error::from(Errno::ESTALE))?;
        let before = self.upper.getattr(ROOT, directory.node())?;
        self.mark_impure_locked(&mut state, &directory)?;
        let result = put(&directory);
        parent.undurable.store(true, Ordering::Release);
        let times = SetAttributes { modified: Some(SetTime::At(before.modified)), ..SetAttributes::default() };
        match self.upper.setattr(ROOT, directory.node(), &times, None) {
            Ok(after) => parent.changed.hide(before.changed, after.changed),
            // The object is in its place, whatever becomes of the time.
            Err(error) => tracing::warn!(%error, "a directory shows the time of a copy-up as that of its last change"),
        }
        result
    }

    pub(crate) fn mark_impure(&self, parent: &Node, directory: &Held) -> Result<()> {
        if parent.read().impure { Ok(()) } else { self.mark_impure_locked(&mut parent.write(), directory) }
    }

    fn mark_impure_locked(&self, parent: &mut State, directory: &Held) -> Result<()> {
        if !parent.impure {
            marks::set(&*self.upper, directory.node(), marks::IMPURE, b"y")?;
            parent.impure = true;
        }
        Ok(())
    }

    /// Opens the upper file for every open handle of `node`, so that each learns of failed write-backs from now on.
    fn reopen(&self, node: &Arc<Node>, held: &Held) -> Result<()> {
        let handles: Vec<_> = lock(&node.handles).iter().filter_map(std::sync::Weak::upgrade).collect();
        for handle in handles {
            self.upper_handle(&handle, held)?;
        }
        Ok(())
    }

    /// Gives an existing name of an indexed file its upper link.
    pub(crate) fn link_name(&self, node: &Arc<Node>, parent: &Arc<Node>, name: &[u8]) -> Result<()> {
        let held = self.copy_up(node, Bytes::Sketch)?;
        self.copy_up(parent, Bytes::Sketch)?;
        let directory = parent.upper().ok_or_else(|| Error::from(Errno::ESTALE))?;
        if !matches!(self.slot(&directory, name)?, crate::resolve::Slot::Absent) {
            return Ok(());
        }
        let lower = self.lower_file(node)?;
        let mut state = node.write();
        let Some(delta) = state.index_links else { return Ok(()) };
        let before = self.upper.getattr(ROOT, held.node())?;
        let count = i64::from(before.links) + delta;
        if let Some((_, lower)) = lower {
            links::store_lower(self, &held, count, lower.links)?;
        }
        self.inside(parent, |directory| {
            let entry = self.upper.link(ROOT, held.node(), directory.node(), Name::new(name)?)?;
            drop(Held::new(&self.upper, entry.node));
            Ok(())
        })?;
        state.index_links = Some(delta - 1);
        // The file had that name before.
        if let Ok(after) = self.upper.getattr(ROOT, held.node()) {
            node.changed.hide(before.changed, after.changed);
        }
        Ok(())
    }

    /// The lower file that `node` was copied from, if it is still there: its layer and its attributes.
    pub(crate) fn lower_file(&self, node: &Node) -> Result<Option<(usize, Attributes)>> {
        let known = node.read().lowers.first().cloned();
        if let Some(lower) = known {
            let attributes = self.lowers[lower.layer].layer.getattr(ROOT, lower.held.node())?;
            return Ok(Some((lower.layer, attributes)));
        }
        let Some(upper) = node.upper() else { return Ok(None) };
        let value = self.upper.getxattr(ROOT, upper.node(), marks::ORIGIN)?;
        let Ok(origin) = Origin::decode(&value) else { return Ok(None) };
        Ok(self.lower_of(&origin)?.ok().map(|(lower, attributes)| (lower.layer, attributes)))
    }
}
