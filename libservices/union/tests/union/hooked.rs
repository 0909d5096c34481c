//! A layer that lets a test in before every call: to count, to refuse, to wait, to do something else meanwhile.

use poolfs_libservice::types::*;
use poolfs_libservice::{DirectoryEntry, Durability, Entry, Libservice, NameChange, Result, Written, fail};
use std::collections::HashSet;
use std::ops::ControlFlow;
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
    SyncFile,
    SyncDirectory,
    SyncAll,
    Setxattr,
    Removexattr,
}

impl Call {
    /// Whether the call changes what is on disk.
    pub fn changes(self) -> bool {
        use Call::{Getxattr, Listxattr, Look, Read, SyncAll, SyncDirectory, SyncFile, WriteContent};
        !matches!(self, Look | Getxattr | Listxattr | Read | SyncFile | SyncDirectory | SyncAll | WriteContent)
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

impl Libservice for Hooked {
    fn lookup(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        self.before(Call::Look)?;
        if self.damaged.lock().unwrap().contains(name.as_bytes()) {
            return fail(Errno::EIO);
        }
        self.below.lookup(caller, parent, name)
    }
    fn forget(&self, node: NodeId, count: u64) {
        self.below.forget(node, count);
    }
    fn getattr(&self, caller: &Caller, node: NodeId) -> Result<Attributes> {
        self.before(Call::Look)?;
        self.below.getattr(caller, node)
    }
    fn setattr(&self, c: &Caller, n: NodeId, changes: &SetAttributes, h: Option<HandleId>) -> Result<Attributes> {
        self.before(Call::Setattr)?;
        self.below.setattr(c, n, changes, h)
    }
    fn readlink(&self, caller: &Caller, node: NodeId) -> Result<Vec<u8>> {
        self.before(Call::Look)?;
        self.below.readlink(caller, node)
    }
    fn create(&self, c: &Caller, p: NodeId, n: Name<'_>, mode: u32, f: OpenFlags) -> Result<(Entry, HandleId)> {
        self.before(Call::Make)?;
        self.below.create(c, p, n, mode, f)
    }
    fn tmpfile(&self, c: &Caller, p: NodeId, mode: u32, f: OpenFlags) -> Result<(Entry, HandleId)> {
        self.before(Call::Make)?;
        self.below.tmpfile(c, p, mode, f)
    }
    fn mknod(&self, c: &Caller, p: NodeId, n: Name<'_>, t: FileType, mode: u32, d: u32) -> Result<Entry> {
        self.before(Call::Make)?;
        self.below.mknod(c, p, n, t, mode, d)
    }
    fn mkdir(&self, c: &Caller, p: NodeId, n: Name<'_>, mode: u32) -> Result<Entry> {
        self.before(Call::Make)?;
        self.below.mkdir(c, p, n, mode)
    }
    fn symlink(&self, c: &Caller, p: NodeId, n: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.before(Call::Make)?;
        self.below.symlink(c, p, n, target)
    }
    fn link(&self, c: &Caller, node: NodeId, p: NodeId, n: Name<'_>) -> Result<Entry> {
        self.before(Call::Link)?;
        self.below.link(c, node, p, n)
    }
    fn unlink(&self, c: &Caller, p: NodeId, n: Name<'_>) -> Result<()> {
        self.before(Call::Remove)?;
        self.below.unlink(c, p, n)
    }
    fn rmdir(&self, c: &Caller, p: NodeId, n: Name<'_>) -> Result<()> {
        self.before(Call::Remove)?;
        self.below.rmdir(c, p, n)
    }
    fn rename(&self, c: &Caller, p: NodeId, n: Name<'_>, q: NodeId, m: Name<'_>, f: RenameFlags) -> Result<()> {
        self.before(Call::Rename)?;
        self.below.rename(c, p, n, q, m, f)
    }
    fn open(&self, caller: &Caller, node: NodeId, flags: OpenFlags) -> Result<HandleId> {
        self.before(Call::Look)?;
        self.below.open(caller, node, flags)
    }
    fn read(&self, caller: &Caller, handle: HandleId, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        self.before(Call::Read)?;
        self.below.read(caller, handle, offset, buffer)
    }
    fn write(&self, caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        self.before(Call::Write)?;
        let room = self.room.load(Ordering::SeqCst).min(data.len() as u64) as usize;
        if room == 0 && !data.is_empty() {
            return fail(Errno::ENOSPC);
        }
        let written = self.below.write(caller, handle, offset, &data[..room])?;
        self.room.fetch_sub(written.count as u64, Ordering::SeqCst);
        Ok(written)
    }
    fn fallocate(&self, c: &Caller, h: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        self.before(Call::Allocate)?;
        self.below.fallocate(c, h, mode, offset, length)
    }
    fn seek(&self, caller: &Caller, handle: HandleId, offset: u64, to: SeekTo) -> Result<u64> {
        self.before(Call::Read)?;
        self.below.seek(caller, handle, offset, to)
    }
    fn write_before_names(&self, caller: &Caller, node: NodeId, change: NameChange) -> Result<()> {
        if change == NameChange::Replaces {
            self.before(Call::WriteContent)?;
        }
        self.below.write_before_names(caller, node, change)
    }
    fn fsync(&self, caller: &Caller, handle: HandleId, durability: Durability) -> Result<()> {
        let directory = self.directories.lock().unwrap().contains(&handle);
        self.before(if directory { Call::SyncDirectory } else { Call::SyncFile })?;
        self.below.fsync(caller, handle, durability)
    }
    fn flush(&self, caller: &Caller, handle: HandleId) -> Result<()> {
        self.below.flush(caller, handle)
    }
    fn release(&self, handle: HandleId) {
        self.directories.lock().unwrap().remove(&handle);
        self.below.release(handle);
    }
    fn opendir(&self, caller: &Caller, node: NodeId) -> Result<HandleId> {
        self.before(Call::Look)?;
        let handle = self.below.opendir(caller, node)?;
        self.directories.lock().unwrap().insert(handle);
        Ok(handle)
    }
    fn readdir(
        &self,
        caller: &Caller,
        handle: HandleId,
        cookie: u64,
        visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        self.before(Call::Read)?;
        self.below.readdir(caller, handle, cookie, visit)
    }
    fn getxattr(&self, caller: &Caller, node: NodeId, name: &[u8]) -> Result<Vec<u8>> {
        self.before(Call::Getxattr)?;
        self.below.getxattr(caller, node, name)
    }
    fn setxattr(&self, caller: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        self.before(Call::Setxattr)?;
        self.below.setxattr(caller, node, name, value, flags)
    }
    fn listxattr(&self, caller: &Caller, node: NodeId) -> Result<Vec<Vec<u8>>> {
        self.before(Call::Listxattr)?;
        self.below.listxattr(caller, node)
    }
    fn removexattr(&self, caller: &Caller, node: NodeId, name: &[u8]) -> Result<()> {
        self.before(Call::Removexattr)?;
        self.below.removexattr(caller, node, name)
    }
    fn statfs(&self, caller: &Caller, node: NodeId) -> Result<FileSystemStatistics> {
        self.below.statfs(caller, node)
    }
    fn sync(&self) -> Result<()> {
        self.before(Call::SyncAll)?;
        self.below.sync()
    }
}
