//! The work directory in the upper branch's root: objects on their way, bitmaps, the index of hard links.

use crate::bitmap::{SECTOR_BYTES, mended as mended_sector};
use crate::format::{SketchRecord, bitmap_id, bitmap_name};
use crate::marks;
use crate::node::lock;
use poolfs_libservice::{Branch, Durability, Error, Held, Opened, Result};
use poolfs_types::{Attributes, Caller, Errno, FileType, Name, NodeId, OpenFlags, SetAttributes, SetTime};
use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The name of the work directory, which the union hides.
pub(crate) const DIRECTORY: &[u8] = b".poolfs";
const FORMAT: &[u8] = b"poolfs-union 1\n";
const ROOT: &Caller = &Caller::ROOT;

/// The work directory, open for the life of the union.
pub(crate) struct Work {
    pub upper: Branch,
    top: Held,
    format: Held,
    pub work: Held,
    pub bitmaps: Held,
    pub index: Held,
    counter: AtomicU64,
    /// whether names were made in `index` or above that are not durable yet
    pub undurable: AtomicBool,
    /// held by whoever makes them durable
    syncing: Mutex<()>,
}

/// A listed name with its type.
pub(crate) type Listed = (Vec<u8>, FileType);

/// All names of a directory of the upper branch.
pub(crate) fn list(upper: &Branch, node: NodeId) -> Result<Vec<Listed>> {
    let directory = Opened::directory(upper, node)?;
    let mut names = Vec::new();
    upper.readdir(ROOT, directory.id(), 0, &mut |entry| {
        names.push((entry.name.as_bytes().to_vec(), entry.file_type));
        ControlFlow::Continue(())
    })?;
    Ok(names)
}

fn find(upper: &Branch, parent: NodeId, name: &[u8]) -> Result<Option<(Held, Attributes)>> {
    match upper.lookup(ROOT, parent, Name::new(name)?) {
        Ok(entry) => Ok(Some((Held::new(upper, entry.node), entry.attributes))),
        Err(error) if error == Errno::ENOENT => Ok(None),
        Err(error) => Err(error),
    }
}

fn directory(upper: &Branch, parent: NodeId, name: &[u8]) -> Result<Held> {
    match find(upper, parent, name)? {
        Some((held, attributes)) if attributes.is_directory() => Ok(held),
        Some(_) => Err(Error::new(Errno::EIO, format!("{} in the upper branch is no directory", name.escape_ascii()))),
        None => {
            let held = Held::new(upper, upper.mkdir(ROOT, parent, Name::new(name)?, 0o700)?.node);
            for acl in [&b"system.posix_acl_default"[..], b"system.posix_acl_access"] {
                match upper.removexattr(ROOT, held.node(), acl) {
                    Err(error) if error != Errno::ENODATA && error != Errno::EOPNOTSUPP => return Err(error),
                    _ => {}
                }
            }
            Ok(held)
        }
    }
}

impl Work {
    /// Opens or makes the work directory. Says as well whether the last end was unclean.
    pub fn open(upper: &Branch) -> Result<(Self, bool)> {
        let top = directory(upper, NodeId::ROOT, DIRECTORY)?;
        let format = checked_format(upper, &top)?;
        let work = Work {
            upper: upper.clone(),
            format,
            work: directory(upper, top.node(), b"work")?,
            bitmaps: directory(upper, top.node(), b"bitmaps")?,
            index: directory(upper, top.node(), b"index")?,
            top,
            counter: AtomicU64::new(0),
            undurable: AtomicBool::new(true),
            syncing: Mutex::new(()),
        };
        let unclean = find(upper, work.top.node(), b"open")?.is_some();
        if !unclean {
            let entry = upper.mknod(ROOT, work.top.node(), Name::new(b"open")?, FileType::Regular, 0o600, 0)?;
            drop(Held::new(upper, entry.node));
        }
        for (name, file_type) in list(upper, work.work.node())? {
            remove_tree(upper, &work.work, &name, file_type)?;
        }
        Ok((work, unclean))
    }

    /// Says that everything is in order on disk.
    pub fn close(&self) -> Result<()> {
        match self.upper.unlink(ROOT, self.top.node(), Name::new(b"open")?) {
            Err(error) if error != Errno::ENOENT => Err(error),
            _ => Ok(()),
        }
    }

    /// A name for a new object in `work`.
    pub fn temporary(&self) -> Vec<u8> {
        format!("w{}", self.counter.fetch_add(1, Ordering::Relaxed)).into_bytes()
    }

    /// The upper file of a hard-linked lower file that was copied up.
    pub fn indexed(&self, upper: &Branch, key: &str) -> Result<Option<(Arc<Held>, Attributes)>> {
        Ok(find(upper, self.index.node(), key.as_bytes())?.map(|(held, attributes)| (Arc::new(held), attributes)))
    }

    /// The bitmap file of a sketch.
    pub fn bitmap(&self, id: &[u8; 16]) -> Result<Option<(Held, Attributes)>> {
        find(&self.upper, self.bitmaps.node(), bitmap_name(id).as_bytes())
    }

    /// Makes the bitmap file of a sketch, open for writing.
    pub fn make_bitmap(&self, id: &[u8; 16]) -> Result<(Held, Opened)> {
        let name = bitmap_name(id);
        let (entry, handle) =
            self.upper.create(ROOT, self.bitmaps.node(), Name::new(name.as_bytes())?, 0o600, OpenFlags::READ_WRITE)?;
        Ok((Held::new(&self.upper, entry.node), Opened::new(&self.upper, handle)))
    }

    /// Removes the bitmap file of a sketch, if there is one.
    pub fn remove_bitmap(&self, id: &[u8; 16]) -> Result<()> {
        match self.upper.unlink(ROOT, self.bitmaps.node(), Name::new(bitmap_name(id).as_bytes())?) {
            Err(error) if error != Errno::ENOENT => Err(error),
            _ => Ok(()),
        }
    }

    /// Makes the names in the index, in `bitmaps` and of the work directory itself durable.
    pub fn sync_names(&self) -> Result<()> {
        self.sync_directory(self.bitmaps.node())?;
        // Whoever comes second waits for the first.
        let _syncing = lock(&self.syncing);
        if self.undurable.swap(false, Ordering::AcqRel) {
            let directories = [self.index.node(), self.top.node(), NodeId::ROOT];
            let result = self
                .sync_format()
                .and_then(|()| directories.into_iter().try_for_each(|node| self.sync_directory(node)));
            if result.is_err() {
                self.undurable.store(true, Ordering::Release);
            }
            result?;
        }
        Ok(())
    }

    fn sync_format(&self) -> Result<()> {
        let file = Opened::file(&self.upper, ROOT, self.format.node(), OpenFlags::READ_ONLY)?;
        self.upper.fsync(ROOT, file.id(), Durability::All)
    }

    /// Makes the names of an upper directory durable.
    pub fn sync_directory(&self, node: NodeId) -> Result<()> {
        let directory = Opened::directory(&self.upper, node)?;
        self.upper.fsync(ROOT, directory.id(), Durability::All)
    }

    /// Mends sectors of bitmaps that a crash has cut while they were written; how many.
    pub fn mend_bitmaps(&self) -> Result<u64> {
        let mut mended = 0;
        for (name, _) in list(&self.upper, self.bitmaps.node())? {
            let Some(id) = bitmap_id(&name) else { continue };
            let Some((bitmap, attributes)) = find(&self.upper, self.bitmaps.node(), &name)? else { continue };
            let file = Opened::file(&self.upper, ROOT, bitmap.node(), OpenFlags::READ_WRITE)?;
            let before = mended;
            let mut sector = [0; SECTOR_BYTES];
            for number in 0..u32::try_from(attributes.size / SECTOR_BYTES as u64).unwrap_or(u32::MAX) {
                let offset = u64::from(number) * SECTOR_BYTES as u64;
                if file.read_full(offset, &mut sector)? == SECTOR_BYTES
                    && let Some(whole) = mended_sector(&id, number, &sector)
                {
                    file.write_full(offset, &whole)?;
                    mended += 1;
                }
            }
            if mended > before {
                self.upper.fsync(ROOT, file.id(), Durability::All)?;
            }
        }
        Ok(mended)
    }

    /// Removes bitmaps that no sketch of the upper branch names, and index entries of files without names.
    pub fn sweep(&self) -> Result<u64> {
        let mut removed = self.sweep_index()?;
        let mut orphans: HashSet<Vec<u8>> =
            list(&self.upper, self.bitmaps.node())?.into_iter().map(|(name, _)| name).collect();
        if orphans.is_empty() {
            return Ok(removed);
        }
        for (name, _) in list(&self.upper, self.index.node())? {
            self.keep_bitmap_of(self.index.node(), &name, &mut orphans)?;
        }
        let mut pending: Vec<Arc<Held>> = vec![Arc::new(Held::new(&self.upper, NodeId::ROOT))];
        while let Some(directory) = pending.pop() {
            for (name, file_type) in list(&self.upper, directory.node())? {
                if directory.node() == NodeId::ROOT && name == DIRECTORY {
                    continue;
                }
                match file_type {
                    FileType::Directory => {
                        if let Some((held, _)) = find(&self.upper, directory.node(), &name)? {
                            pending.push(Arc::new(held));
                        }
                    }
                    FileType::Regular => self.keep_bitmap_of(directory.node(), &name, &mut orphans)?,
                    _ => {}
                }
            }
        }
        for name in orphans {
            self.upper.unlink(ROOT, self.bitmaps.node(), Name::new(&name)?)?;
            removed += 1;
        }
        Ok(removed)
    }

    fn sweep_index(&self) -> Result<u64> {
        let mut removed = 0;
        for (name, _) in list(&self.upper, self.index.node())? {
            let Some((held, attributes)) = find(&self.upper, self.index.node(), &name)? else { continue };
            let links = self.upper.getxattr(ROOT, held.node(), marks::LINKS);
            if attributes.links == 1 && links.is_ok_and(|value| value == b"U-1") {
                self.upper.unlink(ROOT, self.index.node(), Name::new(&name)?)?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    fn keep_bitmap_of(&self, parent: NodeId, name: &[u8], orphans: &mut HashSet<Vec<u8>>) -> Result<()> {
        let Some((held, _)) = find(&self.upper, parent, name)? else { return Ok(()) };
        match self.upper.getxattr(ROOT, held.node(), marks::SKETCH) {
            Ok(value) => {
                // The id stands at the same place in every version; a sketch of a newer one keeps its bitmap too.
                if let Ok(record) = SketchRecord::decode(&value) {
                    orphans.remove(bitmap_name(&record.id).as_bytes());
                } else if let Some(id) = value.get(8..24).and_then(|id| <&[u8; 16]>::try_from(id).ok()) {
                    orphans.remove(bitmap_name(id).as_bytes());
                }
                Ok(())
            }
            Err(error) if error == Errno::ENODATA || error == Errno::EOPNOTSUPP => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// Whether there is no union that was not closed.
pub(crate) fn has_ended_cleanly(upper: &Branch) -> Result<bool> {
    match find(upper, NodeId::ROOT, DIRECTORY)? {
        Some((top, _)) => Ok(find(upper, top.node(), b"open")?.is_none()),
        None => Ok(true),
    }
}

/// The file that says which release wrote the upper branch. It is brought to disk with the first names that depend on it: what a crash
/// before that left of its text is completed here.
fn checked_format(upper: &Branch, top: &Held) -> Result<Held> {
    let held = match find(upper, top.node(), b"format")? {
        Some((held, _)) => held,
        None => {
            let entry = upper.mknod(ROOT, top.node(), Name::new(b"format")?, FileType::Regular, 0o600, 0)?;
            Held::new(upper, entry.node)
        }
    };
    let file = Opened::file(upper, ROOT, held.node(), OpenFlags::READ_WRITE)?;
    let mut text = [0; 64];
    let count = file.read_full(0, &mut text)?;
    let text = &text[..count];
    if text == FORMAT {
        return Ok(held);
    }
    let written = text.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    if count <= FORMAT.len() && FORMAT.starts_with(&text[..written]) {
        file.write_full(0, FORMAT)?;
    } else {
        let found = text.escape_ascii();
        return Err(Error::new(
            Errno::EIO,
            format!("the upper branch was written by another release (its .poolfs/format says \"{found}\")"),
        ));
    }
    Ok(held)
}

/// Who still has a removed directory open saw it empty, and sees it unchanged.
fn keep_time(upper: &Branch, directory: &Held, before: &Attributes) {
    let times = SetAttributes { modified: Some(SetTime::At(before.modified)), ..SetAttributes::default() };
    if let Err(error) = upper.setattr(ROOT, directory.node(), &times, None) {
        tracing::warn!(%error, "a removed directory shows that it was emptied");
    }
}

/// Removes a name of an upper directory and all below it.
pub(crate) fn remove_tree(upper: &Branch, parent: &Held, name: &[u8], file_type: FileType) -> Result<()> {
    if file_type != FileType::Directory {
        return upper.unlink(ROOT, parent.node(), Name::new(name)?);
    }
    // Directories on the way down, each with the names it still holds.
    type Entered = (Held, Vec<u8>, Vec<Listed>);
    let mut way: Vec<Entered> = Vec::new();
    let enter = |parent: NodeId, name: &[u8]| -> Result<(Entered, Attributes)> {
        let entry = upper.lookup(ROOT, parent, Name::new(name)?)?;
        let held = Held::new(upper, entry.node);
        let names = list(upper, held.node())?;
        Ok(((held, name.to_vec(), names), entry.attributes))
    };
    let (first, before) = enter(parent.node(), name)?;
    let held_something = !first.2.is_empty();
    way.push(first);
    while let Some((held, _, names)) = way.last_mut() {
        match names.pop() {
            Some((name, FileType::Directory)) => {
                let (below, _) = enter(held.node(), &name)?;
                way.push(below);
            }
            Some((name, _)) => upper.unlink(ROOT, held.node(), Name::new(&name)?)?,
            None => {
                if let Some((held, name, _)) = way.pop() {
                    let above = way.last().map_or(parent.node(), |(held, ..)| held.node());
                    if way.is_empty() && held_something {
                        keep_time(upper, &held, &before);
                    }
                    upper.rmdir(ROOT, above, Name::new(&name)?)?;
                }
            }
        }
    }
    Ok(())
}
