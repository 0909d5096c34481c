//! A test filter with a hook before every call: to count, to refuse, to wait, or to do something else meanwhile.

use poolfs_libservice::types::*;
use poolfs_libservice::{
    Durability, Entry, Filter, Libservice, NameChange, Operation, Result, Written, copy_by_reading, fail, write_whole,
};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

/// What is about to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Look,
    Getxattr,
    Listxattr,
    Read,
    Setattr,
    Make,
    Link,
    Remove,
    Rename,
    WriteContent,
    Write,
    Allocate,
    Hold,
    SyncFile,
    SyncDirectory,
    SyncAll,
    Setxattr,
    Removexattr,
}

impl Call {
    /// Whether the call changes what is on disk.
    pub fn changes(self) -> bool {
        use Call::{Getxattr, Hold, Listxattr, Look, Read, SyncAll, SyncDirectory, SyncFile, WriteContent};
        !matches!(self, Look | Getxattr | Listxattr | Read | Hold | SyncFile | SyncDirectory | SyncAll | WriteContent)
    }
}

type Hook = Arc<dyn Fn(Call) -> Result<()> + Send + Sync>;

/// The layer.
pub struct Hooked {
    below: Arc<dyn Libservice>,
    hook: RwLock<Option<Hook>>,
    /// bytes that may still be written
    room: AtomicU64,
    directories: Mutex<HashSet<HandleId>>,
    damaged: Mutex<HashSet<Vec<u8>>>,
}

impl Hooked {
    pub fn over(below: Arc<dyn Libservice>) -> Arc<Self> {
        Arc::new(Hooked {
            below,
            hook: RwLock::default(),
            room: AtomicU64::new(u64::MAX),
            directories: Mutex::default(),
            damaged: Mutex::default(),
        })
    }

    /// From now on `hook` is asked before every call; an error of it is the call's.
    pub fn hook(&self, hook: impl Fn(Call) -> Result<()> + Send + Sync + 'static) {
        *self.hook.write().unwrap() = Some(Arc::new(hook));
    }

    /// From now on only so many bytes of writes are taken; the one that meets the end is short.
    pub fn limit(&self, room: u64) {
        self.room.store(room, Ordering::SeqCst);
    }

    /// From now on nothing of this name can be looked up.
    pub fn damage(&self, name: &[u8]) {
        self.damaged.lock().unwrap().insert(name.to_owned());
    }

    /// All can be looked up again.
    pub fn mend(&self) {
        self.damaged.lock().unwrap().clear();
    }

    pub fn unhook(&self) {
        *self.hook.write().unwrap() = None;
    }

    fn before(&self, call: Call) -> Result<()> {
        let hook = self.hook.read().unwrap().clone();
        hook.map_or(Ok(()), |hook| hook(call))
    }
}

impl Filter for Hooked {
    fn below(&self) -> &dyn Libservice {
        &*self.below
    }

    fn enter(&self, operation: Operation) -> Result<impl Sized> {
        use Operation as Op;
        self.before(match operation {
            Op::Lookup | Op::Getattr | Op::Readlink | Op::Open | Op::Opendir => Call::Look,
            Op::Setattr => Call::Setattr,
            Op::Create | Op::Tmpfile | Op::Mknod | Op::Mkdir | Op::Symlink => Call::Make,
            Op::Link => Call::Link,
            Op::Unlink | Op::UnlinkKnown | Op::Rmdir => Call::Remove,
            Op::Rename => Call::Rename,
            Op::ReadInto | Op::Seek | Op::Readdir => Call::Read,
            Op::Write => Call::Write,
            Op::Fallocate => Call::Allocate,
            Op::Hold => Call::Hold,
            Op::Getxattr => Call::Getxattr,
            Op::Setxattr => Call::Setxattr,
            Op::Listxattr => Call::Listxattr,
            Op::Removexattr => Call::Removexattr,
            Op::Sync => Call::SyncAll,
            _ => return Ok(()),
        })
    }

    fn lookup(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        if self.damaged.lock().unwrap().contains(name.as_bytes()) {
            return fail(Errno::EIO);
        }
        self.below.lookup(caller, parent, name)
    }

    fn write(&self, caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        let room = self.room.load(Ordering::SeqCst).min(data.len() as u64) as usize;
        if room == 0 && !data.is_empty() {
            return fail(Errno::ENOSPC);
        }
        let written = self.below.write(caller, handle, offset, &data[..room])?;
        self.room.fetch_sub(written.count as u64, Ordering::SeqCst);
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

    fn fsync(&self, caller: &Caller, handle: HandleId, durability: Durability) -> Result<()> {
        let directory = self.directories.lock().unwrap().contains(&handle);
        self.before(if directory { Call::SyncDirectory } else { Call::SyncFile })?;
        self.below.fsync(caller, handle, durability)
    }

    fn flush_range(&self, caller: &Caller, handle: HandleId, _: Range<u64>) -> Result<()> {
        Filter::fsync(self, caller, handle, Durability::Data)
    }

    fn write_before_names(&self, caller: &Caller, node: NodeId, change: NameChange) -> Result<()> {
        if change == NameChange::Replaces {
            self.before(Call::WriteContent)?;
        }
        self.below.write_before_names(caller, node, change)
    }

    fn opendir(&self, caller: &Caller, node: NodeId) -> Result<HandleId> {
        let handle = self.below.opendir(caller, node)?;
        self.directories.lock().unwrap().insert(handle);
        Ok(handle)
    }

    fn release(&self, handle: HandleId) {
        self.directories.lock().unwrap().remove(&handle);
        self.below.release(handle);
    }
}
