//! A layer in memory that records every change, and reconstructs the disk state that a crash after any of them may leave.
//!
//! The model is a journalling filesystem. Changes of names, attributes, sizes and extended attributes survive in their order up
//! to the crash. Written bytes are certain to survive only if the file was synced after them. Without that they may be there, be
//! missing, or be torn at any sector.

use crate::{Durability, Entry, Filter, Libservice, Memory, NameChange, Result, Written, copy_by_reading, write_whole};
use poolfs_types::{
    AllocateMode, Attributes, Caller, Errno, FileType, HandleId, Name, NodeId, OpenFlags, RenameFlags, SetAttributes,
    XattrFlags,
};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

const ROOT: &Caller = &Caller::ROOT;
const SECTOR: usize = 512;

/// One change.
#[derive(Clone, Debug)]
enum Change {
    Make { parent: NodeId, name: Vec<u8>, new: New, caller: Caller, node: NodeId },
    Link { node: NodeId, parent: NodeId, name: Vec<u8> },
    Unlink { parent: NodeId, name: Vec<u8> },
    Rmdir { parent: NodeId, name: Vec<u8> },
    Rename { from: (NodeId, Vec<u8>), to: (NodeId, Vec<u8>), flags: RenameFlags },
    Setattr { node: NodeId, changes: SetAttributes },
    Write { node: NodeId, offset: u64, data: Vec<u8> },
    Fallocate { node: NodeId, mode: AllocateMode, offset: u64, length: u64 },
    Setxattr { node: NodeId, name: Vec<u8>, value: Vec<u8> },
    Removexattr { node: NodeId, name: Vec<u8> },
    Sync { node: Option<NodeId> },
}

#[derive(Clone, Debug)]
enum New {
    File(u32),
    Special(FileType, u32, u32),
    Directory(u32),
    Symlink(Vec<u8>),
}

/// The recording branch.
pub struct Recorder {
    memory: Arc<Memory>,
    changes: Mutex<Vec<Change>>,
    handles: Mutex<HashMap<HandleId, NodeId>>,
}

impl Recorder {
    /// An empty one.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Recorder { memory: Memory::new(), changes: Mutex::default(), handles: Mutex::default() })
    }

    /// How many changes there have been.
    ///
    /// # Panics
    /// When a user of it did.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is no collection")]
    pub fn len(&self) -> usize {
        self.changes.lock().expect("no panic").len()
    }

    fn note(&self, change: Change) {
        self.changes.lock().expect("no panic").push(change);
    }

    fn opened(&self, handle: HandleId, node: NodeId) -> HandleId {
        self.handles.lock().expect("no panic").insert(handle, node);
        handle
    }

    fn of(&self, handle: HandleId) -> NodeId {
        self.handles.lock().expect("no panic")[&handle]
    }

    /// What a crash after the first `count` changes may leave; `seed` decides what of it.
    ///
    /// # Panics
    /// When that many changes were not made.
    #[must_use]
    pub fn crashed(&self, count: usize, seed: u64) -> Arc<Memory> {
        let changes = self.changes.lock().expect("no panic");
        let disk = Memory::new();
        let mut random = seed;
        let mut chance = move || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            random >> 40
        };
        for (at, change) in changes[..count].iter().enumerate() {
            let durable = |node: NodeId| {
                changes[at..count]
                    .iter()
                    .any(|later| matches!(later, Change::Sync { node: synced } if synced.is_none_or(|n| n == node)))
            };
            match change {
                Change::Write { node, offset, data } if !durable(*node) => {
                    lose(&disk, *node, *offset, data, &mut chance);
                }
                change => replay(&disk, change),
            }
        }
        disk
    }

    /// Adds to what [`Recorder::crashed`] made of `disk`: if the next change would have been one of bytes, it has come up to a point among
    /// those that it changes, which `seed` chooses.
    ///
    /// # Panics
    /// When a user of it did.
    pub fn tear(&self, disk: &Memory, count: usize, seed: u64) {
        if let Some(Change::Write { node, offset, data }) = self.changes.lock().expect("no panic").get(count) {
            opened(disk, *node, |handle| {
                let mut before = vec![0; data.len()];
                disk.read(ROOT, handle, *offset, &mut before).expect("read");
                let changed: Vec<usize> = (0..data.len()).filter(|&at| before[at] != data[at]).collect();
                if let Some(&last) = changed.get(seed as usize % changed.len().max(1)) {
                    disk.write(ROOT, handle, *offset, &data[..=last]).expect("written");
                }
            });
        }
    }
}

fn opened(disk: &Memory, node: NodeId, put: impl FnOnce(HandleId)) {
    let handle = disk.open(ROOT, node, OpenFlags::READ_WRITE).expect("opened");
    put(handle);
    disk.release(handle);
}

/// Bytes that nobody waited for: they never left the cache, or the size they gave the file is there, and of the sectors only some.
fn lose(disk: &Memory, node: NodeId, offset: u64, data: &[u8], chance: &mut dyn FnMut() -> u64) {
    let fate = chance() % 5;
    if fate == 4 {
        return;
    }
    let end = offset + data.len() as u64;
    if disk.getattr(ROOT, node).expect("there").size < end {
        let changes = SetAttributes { size: Some(end), ..SetAttributes::default() };
        disk.setattr(ROOT, node, &changes, None).expect("extended");
    }
    opened(disk, node, |handle| {
        let mut at = 0;
        while at < data.len() {
            let within = (offset as usize + at) % SECTOR;
            let stop = data.len().min(at + SECTOR - within);
            if fate == 1 || fate > 1 && chance().is_multiple_of(2) {
                disk.write(ROOT, handle, offset + at as u64, &data[at..stop]).expect("written");
            }
            at = stop;
        }
    });
}

fn replay(disk: &Memory, change: &Change) {
    let name = |bytes: &[u8]| -> Vec<u8> { bytes.to_vec() };
    match change {
        Change::Make { parent, name: last, new, caller, node } => {
            let last = name(last);
            let last = Name::new(&last).expect("a name");
            let entry = match new {
                New::File(permissions) => {
                    disk.mknod(caller, *parent, last, FileType::Regular, *permissions, 0).expect("made")
                }
                New::Special(file_type, permissions, device) => {
                    disk.mknod(caller, *parent, last, *file_type, *permissions, *device).expect("made")
                }
                New::Directory(permissions) => disk.mkdir(caller, *parent, last, *permissions).expect("made"),
                New::Symlink(target) => disk.symlink(caller, *parent, last, target).expect("made"),
            };
            assert_eq!(entry.node, *node, "the replay gives the same numbers");
        }
        Change::Link { node, parent, name } => {
            disk.link(ROOT, *node, *parent, Name::new(name).expect("a name")).expect("linked");
        }
        Change::Unlink { parent, name } => {
            disk.unlink(ROOT, *parent, Name::new(name).expect("a name")).expect("removed");
        }
        Change::Rmdir { parent, name } => {
            disk.rmdir(ROOT, *parent, Name::new(name).expect("a name")).expect("removed");
        }
        Change::Rename { from, to, flags } => {
            let (old, new) = (Name::new(&from.1).expect("a name"), Name::new(&to.1).expect("a name"));
            disk.rename(ROOT, from.0, old, to.0, new, *flags).expect("renamed");
        }
        Change::Setattr { node, changes } => {
            disk.setattr(ROOT, *node, changes, None).expect("set");
        }
        Change::Write { node, offset, data } => opened(disk, *node, |handle| {
            disk.write(ROOT, handle, *offset, data).expect("written");
        }),
        Change::Fallocate { node, mode, offset, length } => opened(disk, *node, |handle| {
            disk.fallocate(ROOT, handle, *mode, *offset, *length).expect("allocated");
        }),
        Change::Setxattr { node, name, value } => {
            disk.setxattr(ROOT, *node, name, value, XattrFlags::empty()).expect("set");
        }
        Change::Removexattr { node, name } => disk.removexattr(ROOT, *node, name).expect("removed"),
        Change::Sync { .. } => {}
    }
}

impl Recorder {
    fn made(&self, caller: &Caller, parent: NodeId, name: Name<'_>, new: New, entry: &Entry) {
        let name = name.as_bytes().to_vec();
        self.note(Change::Make { parent, name, new, caller: *caller, node: entry.node });
    }
}

impl Filter for Recorder {
    fn below(&self) -> &dyn Libservice {
        &*self.memory
    }

    fn setattr(
        &self,
        caller: &Caller,
        node: NodeId,
        set: &SetAttributes,
        handle: Option<HandleId>,
    ) -> Result<Attributes> {
        let attributes = self.memory.setattr(caller, node, set, handle)?;
        self.note(Change::Setattr { node, changes: *set });
        Ok(attributes)
    }

    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        let (entry, handle) = self.memory.create(caller, parent, name, permissions, flags)?;
        self.made(caller, parent, name, New::File(permissions), &entry);
        Ok((entry, self.opened(handle, entry.node)))
    }

    /// No script makes such files: a crash leaves nothing of them.
    fn tmpfile(&self, _: &Caller, _: NodeId, _: u32, _: OpenFlags) -> Result<(Entry, HandleId)> {
        Err(Errno::EOPNOTSUPP.into())
    }

    fn mknod(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        file_type: FileType,
        permissions: u32,
        device: u32,
    ) -> Result<Entry> {
        let entry = self.memory.mknod(caller, parent, name, file_type, permissions, device)?;
        self.made(caller, parent, name, New::Special(file_type, permissions, device), &entry);
        Ok(entry)
    }

    fn mkdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>, permissions: u32) -> Result<Entry> {
        let entry = self.memory.mkdir(caller, parent, name, permissions)?;
        self.made(caller, parent, name, New::Directory(permissions), &entry);
        Ok(entry)
    }

    fn symlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        let entry = self.memory.symlink(caller, parent, name, target)?;
        self.made(caller, parent, name, New::Symlink(target.to_vec()), &entry);
        Ok(entry)
    }

    fn link(&self, caller: &Caller, node: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        let entry = self.memory.link(caller, node, parent, name)?;
        self.note(Change::Link { node, parent, name: name.as_bytes().to_vec() });
        Ok(entry)
    }

    fn unlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.memory.unlink(caller, parent, name)?;
        self.note(Change::Unlink { parent, name: name.as_bytes().to_vec() });
        Ok(())
    }

    fn unlink_known(&self, caller: &Caller, parent: NodeId, name: Name<'_>, _: NodeId, _: Option<bool>) -> Result<()> {
        Filter::unlink(self, caller, parent, name)
    }

    fn rmdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.memory.rmdir(caller, parent, name)?;
        self.note(Change::Rmdir { parent, name: name.as_bytes().to_vec() });
        Ok(())
    }

    fn rename(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        new_parent: NodeId,
        new_name: Name<'_>,
        flags: RenameFlags,
    ) -> Result<()> {
        self.memory.rename(caller, parent, name, new_parent, new_name, flags)?;
        let (from, to) = ((parent, name.as_bytes().to_vec()), (new_parent, new_name.as_bytes().to_vec()));
        self.note(Change::Rename { from, to, flags });
        Ok(())
    }

    fn open(&self, caller: &Caller, node: NodeId, flags: OpenFlags) -> Result<HandleId> {
        Ok(self.opened(self.memory.open(caller, node, flags)?, node))
    }

    fn write(&self, caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        let written = self.memory.write(caller, handle, offset, data)?;
        let data = data[..written.count].to_vec();
        self.note(Change::Write { node: self.of(handle), offset: written.offset, data });
        Ok(written)
    }

    fn write_pieces(&self, caller: &Caller, handle: HandleId, pieces: &[(u64, &[u8])]) -> Result<()> {
        pieces.iter().try_for_each(|&(offset, data)| write_whole(self, caller, handle, offset, data))
    }

    fn copy_range(
        &self,
        caller: &Caller,
        source: HandleId,
        source_offset: u64,
        target: HandleId,
        target_offset: u64,
        length: u64,
    ) -> Result<u64> {
        copy_by_reading(self, caller, (source, source_offset), (target, target_offset), length)
    }

    fn fallocate(&self, caller: &Caller, handle: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        self.memory.fallocate(caller, handle, mode, offset, length)?;
        self.note(Change::Fallocate { node: self.of(handle), mode, offset, length });
        Ok(())
    }

    fn fsync(&self, caller: &Caller, handle: HandleId, durability: Durability) -> Result<()> {
        self.memory.fsync(caller, handle, durability)?;
        self.note(Change::Sync { node: Some(self.of(handle)) });
        Ok(())
    }

    fn flush_range(&self, caller: &Caller, handle: HandleId, _: Range<u64>) -> Result<()> {
        Filter::fsync(self, caller, handle, Durability::Data)
    }

    /// As a branch that commits names after the content that it has begun to write.
    fn write_before_names(&self, _: &Caller, node: NodeId, change: NameChange) -> Result<()> {
        if change == NameChange::Replaces {
            self.note(Change::Sync { node: Some(node) });
        }
        Ok(())
    }

    fn opendir(&self, caller: &Caller, node: NodeId) -> Result<HandleId> {
        Ok(self.opened(self.memory.opendir(caller, node)?, node))
    }

    fn setxattr(&self, caller: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        self.memory.setxattr(caller, node, name, value, flags)?;
        self.note(Change::Setxattr { node, name: name.to_vec(), value: value.to_vec() });
        Ok(())
    }

    fn removexattr(&self, caller: &Caller, node: NodeId, name: &[u8]) -> Result<()> {
        self.memory.removexattr(caller, node, name)?;
        self.note(Change::Removexattr { node, name: name.to_vec() });
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.memory.sync()?;
        self.note(Change::Sync { node: None });
        Ok(())
    }
}
