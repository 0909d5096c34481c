//! The limiting layer: refuses calls for which the account has no space.

use crate::account::{Account, Promise};
use crate::nodes::attribute_bytes;
use hashbrown::HashMap;
use poolfs_libservice::{Branch, Entry, Error, Filter, Libservice, Result, Written, write_whole};
use poolfs_types::limits::BLOCK_SIZE;
use poolfs_types::{
    AllocateMode, Caller, Errno, FileSystemStatistics, FileType, HandleId, Name, NodeId, OpenFlags, RenameFlags,
    SeekTo, XattrFlags,
};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const BLOCK: u64 = BLOCK_SIZE as u64;

/// Most attempts to find room for one call.
const ATTEMPTS_MAX: usize = 8;

/// What the cache below has accepted.
pub trait Accepted: Send + Sync {
    /// Bytes that are not written yet.
    fn dirty_bytes(&self) -> u64;

    /// Waits, for a bounded time, as long as removed files may be about to give their room back, until there is `enough`; whether
    /// there is.
    fn wait_for_room(&self, enough: &mut dyn FnMut() -> bool) -> bool;
}

/// A layer over a cache that lets through what has room in an [`Account`].
pub struct QuotaLimit {
    below: Branch,
    account: Arc<Account>,
    accepted: Box<dyn Accepted>,
    /// the files of handles that append
    appending: Mutex<HashMap<HandleId, NodeId>>,
    /// held while the cache is made to write
    emptying: Mutex<()>,
}

/// Room for the first bytes of a call.
struct Room<'a> {
    bytes: u64,
    _promise: Option<Promise<'a>>,
}

/// What a range of a file, up to some end, takes that it does not have.
struct Missing {
    bytes: u64,
    end: u64,
}

impl QuotaLimit {
    /// A layer over `below`, of which `accepted` tells what waits there, and below which [`UsageAccounting`](crate::UsageAccounting) keeps
    /// the account.
    #[must_use]
    pub fn new(below: Branch, account: &Arc<Account>, accepted: Box<dyn Accepted>) -> Arc<Self> {
        let (appending, emptying) = (Mutex::default(), Mutex::default());
        Arc::new(QuotaLimit { below, account: Arc::clone(account), accepted, appending, emptying })
    }

    /// What waits in the cache, as it may be counted once it is stored.
    fn dirty(&self) -> u64 {
        self.account.most_stored(self.accepted.dirty_bytes())
    }

    fn promise(&self, bytes: u64) -> Option<Promise<'_>> {
        self.account.promise(bytes, || self.dirty())
    }

    fn full(&self) -> Error {
        let limit = self.account.limit();
        Error::new(
            Errno::ENOSPC,
            format!("the branch has reached its limit of {limit} bytes (--upper-size, or that of a tmpfs)"),
        )
    }

    /// Whether names and attributes may be added.
    fn check_names(&self) -> Result<()> {
        self.check_room_for_names(0)
    }

    /// The same, where that takes so many bytes for itself.
    fn check_room_for_names(&self, bytes: u64) -> Result<()> {
        let has_room = || self.account.has_room_for_names(self.dirty().saturating_add(bytes));
        // What is dirty may come to less once it is stored, also where nothing is free any more.
        let may_fit = self.account.has_room_for_names(bytes);
        if has_room() || may_fit && self.empty(0) && has_room() || self.accepted.wait_for_room(&mut || has_room()) {
            return Ok(());
        }
        Err(self.full())
    }

    /// Has the cache write, where `wanted` bytes may then be free. Returns whether it did.
    fn empty(&self, wanted: u64) -> bool {
        if self.dirty() == 0 || self.account.limit().saturating_sub(self.account.used()) < wanted {
            return false;
        }
        self.below.sync().is_ok()
    }

    /// Room for a call that writes `length` bytes at `offset`, or for the first of them.
    fn room(&self, caller: &Caller, handle: HandleId, offset: u64, length: u64) -> Result<Room<'_>> {
        let blocks = length.div_ceil(BLOCK).saturating_add(1);
        if let Some(promise) = self.promise(blocks.saturating_mul(BLOCK)) {
            return Ok(Room { bytes: length, _promise: Some(promise) });
        }
        for _ in 0..ATTEMPTS_MAX {
            let missing = match self.room_after_emptying(caller, handle, offset, length)? {
                Ok(room) => return Ok(room),
                Err(missing) => missing,
            };
            // With nothing locked that others need who write where there is room.
            if !self.accepted.wait_for_room(&mut || self.account.free(self.dirty()) >= missing.bytes) {
                break;
            }
        }
        let _alone = self.emptying.lock().unwrap_or_else(PoisonError::into_inner);
        let range = self.range(caller, handle, offset, length)?;
        let free = self.account.free(self.dirty());
        let missing = self.missing(caller, handle, range.clone(), free / BLOCK * BLOCK)?;
        let room = if missing.end > range.start { self.promised(range.start, &missing) } else { None };
        room.ok_or_else(|| self.full())
    }

    /// Room for all of a call, if need be after the cache has written what it holds; else what is missing.
    fn room_after_emptying(
        &self,
        caller: &Caller,
        handle: HandleId,
        offset: u64,
        length: u64,
    ) -> Result<std::result::Result<Room<'_>, Missing>> {
        let _alone = self.emptying.lock().unwrap_or_else(PoisonError::into_inner);
        let range = self.range(caller, handle, offset, length)?;
        let mut is_emptied = false;
        loop {
            let missing = self.missing(caller, handle, range.clone(), u64::MAX)?;
            if let Some(room) = self.promised(range.start, &missing) {
                return Ok(Ok(room));
            }
            if is_emptied || !self.empty(BLOCK) {
                return Ok(Err(missing));
            }
            is_emptied = true;
        }
    }

    /// The bytes that a call writes.
    fn range(&self, caller: &Caller, handle: HandleId, offset: u64, length: u64) -> Result<Range<u64>> {
        let appended = self.appending().get(&handle).copied();
        let start = match appended {
            Some(node) => self.below.getattr(caller, node)?.size,
            None => offset,
        };
        Ok(start..start.saturating_add(length))
    }

    fn promised(&self, start: u64, missing: &Missing) -> Option<Room<'_>> {
        let promise = match missing.bytes {
            0 => None,
            bytes => Some(self.promise(bytes)?),
        };
        Some(Room { bytes: missing.end - start, _promise: promise })
    }

    /// What `range` of a file takes that it does not have; no more than `most` bytes, and no further than that is enough for.
    fn missing(&self, caller: &Caller, handle: HandleId, range: Range<u64>, most: u64) -> Result<Missing> {
        let seek = |at, to| match self.below.seek(caller, handle, at, to) {
            Err(error) if error.errno() == Errno::ENXIO => Ok(u64::MAX),
            other => other,
        };
        let mut bytes = 0;
        let mut at = range.start / BLOCK * BLOCK;
        while at < range.end {
            let data = seek(at, SeekTo::Data)?;
            // A block with some data is there as a whole.
            let hole = (data / BLOCK * BLOCK).min(range.end.div_ceil(BLOCK).saturating_mul(BLOCK)) - at;
            if hole > most - bytes {
                let end = at + (most - bytes);
                return Ok(Missing { bytes: most, end: end.clamp(range.start, range.end) });
            }
            bytes += hole;
            if data >= range.end {
                break;
            }
            at = seek(data, SeekTo::Hole)?.div_ceil(BLOCK).saturating_mul(BLOCK);
        }
        Ok(Missing { bytes, end: range.end })
    }

    fn appending(&self) -> MutexGuard<'_, HashMap<HandleId, NodeId>> {
        self.appending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn opened(&self, handle: HandleId, node: NodeId, flags: OpenFlags) {
        if flags.contains(OpenFlags::APPEND) {
            self.appending().insert(handle, node);
        }
    }
}

impl Filter for QuotaLimit {
    fn below(&self) -> &dyn Libservice {
        &*self.below
    }

    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        self.check_names()?;
        let (entry, handle) = self.below.create(caller, parent, name, permissions, flags)?;
        self.opened(handle, entry.node, flags);
        Ok((entry, handle))
    }

    fn tmpfile(
        &self,
        caller: &Caller,
        parent: NodeId,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        self.check_names()?;
        let (entry, handle) = self.below.tmpfile(caller, parent, permissions, flags)?;
        self.opened(handle, entry.node, flags);
        Ok((entry, handle))
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
        self.check_names()?;
        self.below.mknod(caller, parent, name, file_type, permissions, device)
    }

    fn mkdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>, permissions: u32) -> Result<Entry> {
        self.check_names()?;
        self.below.mkdir(caller, parent, name, permissions)
    }

    fn symlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.check_names()?;
        self.below.symlink(caller, parent, name, target)
    }

    fn link(&self, caller: &Caller, node: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        self.check_names()?;
        self.below.link(caller, node, parent, name)
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
        if flags.contains(RenameFlags::WHITEOUT) {
            // One more name than before.
            self.check_names()?;
        }
        self.below.rename(caller, parent, name, new_parent, new_name, flags)
    }

    fn setxattr(&self, caller: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        // In memory, it takes what it has.
        let bytes = if self.account.is_in_memory() { attribute_bytes(name, value.len()) } else { 0 };
        self.check_room_for_names(bytes)?;
        self.below.setxattr(caller, node, name, value, flags)
    }

    fn open(&self, caller: &Caller, node: NodeId, flags: OpenFlags) -> Result<HandleId> {
        let handle = self.below.open(caller, node, flags)?;
        self.opened(handle, node, flags);
        Ok(handle)
    }

    fn release(&self, handle: HandleId) {
        self.appending().remove(&handle);
        self.below.release(handle);
    }

    fn write(&self, caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        let room = self.room(caller, handle, offset, data.len() as u64)?;
        self.below.write(caller, handle, offset, &data[..room.bytes as usize])
    }

    fn write_pieces(&self, caller: &Caller, handle: HandleId, pieces: &[(u64, &[u8])]) -> Result<()> {
        pieces.iter().try_for_each(|&(offset, data)| write_whole(self, caller, handle, offset, data))
    }

    fn fallocate(&self, caller: &Caller, handle: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        let needed = if mode.contains(AllocateMode::PUNCH_HOLE) { 0 } else { length };
        let room = self.room(caller, handle, offset, needed)?;
        if room.bytes < needed {
            return Err(self.full());
        }
        self.below.fallocate(caller, handle, mode, offset, length)
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
        let room = self.room(caller, target, target_offset, length)?;
        self.below.copy_range(caller, source, source_offset, target, target_offset, room.bytes)
    }

    /// As large as the limit, where there is as much behind it.
    fn statfs(&self, caller: &Caller, node: NodeId) -> Result<FileSystemStatistics> {
        let below = self.below.statfs(caller, node)?;
        let unit = u64::from(below.block_size.max(1));
        let free = self.account.free(self.dirty()) / unit;
        Ok(FileSystemStatistics {
            blocks: (self.account.limit() / unit).min(below.blocks),
            blocks_free: free.min(below.blocks_free),
            blocks_available: free.min(below.blocks_available),
            ..below
        })
    }
}
