//! A fault-injection filter that also records what is durable: a power cut would keep what was there at the last fsync of a file,
//! and lose the rest.

use poolfs_libservice::{
    Durability, Entry, Filter, Libservice, Memory, NameChange, ReadTarget, Result, Written, copy_by_reading, fail,
    write_whole,
};
use poolfs_types::{
    Attributes, Caller, Errno, HandleId, Name, NodeId, OpenFlags, RenameFlags, SetAttributes, Timestamp, XattrFlags,
};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A file as a power cut would leave it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Durable {
    pub content: Vec<u8>,
    pub modified: Timestamp,
}

/// The calls that something else may be made to happen in the middle of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Create,
    Link,
    Lookup,
    Setattr,
    Setxattr,
    Unlink,
}

/// A call that was carried out, of those whose order matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logged {
    Write(NodeId),
    BeforeNames(NodeId, NameChange),
    Link(NodeId),
    Rename,
}

type Meanwhile = (Call, Box<dyn FnOnce() + Send>);

/// The layer.
pub struct Fault {
    pub memory: Arc<Memory>,
    /// Nothing is changed in it.
    pub read_only: AtomicBool,
    /// errno of every read; 0: none
    pub fail_reads: AtomicI32,
    /// errno of every write
    pub fail_writes: AtomicI32,
    /// number of the node of which every write answers EIO; 0: none
    pub fail_writes_of: AtomicU64,
    /// as many writes do not fail all the same
    pub writes_spared: AtomicU64,
    /// errno of every fsync and sync
    pub fail_fsyncs: AtomicI32,
    /// errno of every look-up
    pub fail_lookups: AtomicI32,
    /// errno of every getattr
    pub fail_getattrs: AtomicI32,
    /// as many reads are carried out; further ones wait until there may be more
    pub reads_allowed: AtomicU64,
    /// milliseconds every read takes
    pub slow_reads: AtomicU64,
    /// as many writes are carried out; further ones wait until there may be more
    pub writes_allowed: AtomicU64,
    pub reads: AtomicU64,
    pub writes: AtomicU64,
    /// calls that had several places written
    pub scattered_writes: AtomicU64,
    pub lookups: AtomicU64,
    pub getattrs: AtomicU64,
    pub opens: AtomicU64,
    pub log: Mutex<Vec<Logged>>,
    meanwhile: Mutex<Option<Meanwhile>>,
    nodes: Mutex<HashMap<HandleId, NodeId>>,
    durable: Mutex<HashMap<NodeId, Durable>>,
}

fn check(errno: &AtomicI32) -> Result<()> {
    match errno.load(Ordering::SeqCst) {
        0 => Ok(()),
        raw => fail(Errno::from_raw(raw)),
    }
}

impl Fault {
    pub fn over(memory: Arc<Memory>) -> Arc<Self> {
        Arc::new(Self {
            memory,
            read_only: AtomicBool::new(false),
            fail_reads: AtomicI32::new(0),
            fail_writes: AtomicI32::new(0),
            fail_writes_of: AtomicU64::new(0),
            writes_spared: AtomicU64::new(0),
            fail_fsyncs: AtomicI32::new(0),
            fail_lookups: AtomicI32::new(0),
            fail_getattrs: AtomicI32::new(0),
            reads_allowed: AtomicU64::new(u64::MAX),
            slow_reads: AtomicU64::new(0),
            writes_allowed: AtomicU64::new(u64::MAX),
            reads: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            scattered_writes: AtomicU64::new(0),
            lookups: AtomicU64::new(0),
            getattrs: AtomicU64::new(0),
            opens: AtomicU64::new(0),
            log: Mutex::default(),
            meanwhile: Mutex::default(),
            nodes: Mutex::default(),
            durable: Mutex::default(),
        })
    }

    /// The next time `call` is made, `happens` runs when it has been carried out and has not returned yet.
    pub fn meanwhile(&self, call: Call, happens: impl FnOnce() + Send + 'static) {
        *self.meanwhile.lock().unwrap() = Some((call, Box::new(happens)));
    }

    /// What was carried out since the last time this was asked for.
    pub fn take_log(&self) -> Vec<Logged> {
        std::mem::take(&mut *self.log.lock().unwrap())
    }

    fn logged<T>(&self, call: Logged, result: Result<T>) -> Result<T> {
        if result.is_ok() {
            self.log.lock().unwrap().push(call);
        }
        result
    }

    fn carried_out(&self, call: Call) {
        let happens = self.meanwhile.lock().unwrap().take_if(|planned| planned.0 == call);
        if let Some((_, happens)) = happens {
            happens();
        }
    }

    /// What a power cut would leave of a file.
    pub fn durable(&self, node: NodeId) -> Durable {
        self.durable.lock().unwrap().get(&node).cloned().unwrap_or_default()
    }

    /// What the layer holds of a file now, at one moment of it.
    pub fn now(&self, node: NodeId) -> Durable {
        loop {
            let before = self.memory.getattr(&Caller::ROOT, node).unwrap();
            let mut content = vec![0; before.size as usize];
            let handle = self.memory.open(&Caller::ROOT, node, OpenFlags::READ_ONLY).unwrap();
            let count = self.memory.read(&Caller::ROOT, handle, 0, &mut content).unwrap();
            self.memory.release(handle);
            if count == content.len() && self.memory.getattr(&Caller::ROOT, node).unwrap() == before {
                return Durable { content, modified: before.modified };
            }
        }
    }
}

impl Filter for Fault {
    fn below(&self) -> &dyn Libservice {
        &*self.memory
    }

    fn lookup(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        self.lookups.fetch_add(1, Ordering::SeqCst);
        check(&self.fail_lookups)?;
        let result = self.memory.lookup(caller, parent, name);
        self.carried_out(Call::Lookup);
        result
    }
    fn getattr(&self, caller: &Caller, node: NodeId) -> Result<Attributes> {
        self.getattrs.fetch_add(1, Ordering::SeqCst);
        check(&self.fail_getattrs)?;
        self.memory.getattr(caller, node)
    }
    fn setattr(&self, c: &Caller, n: NodeId, changes: &SetAttributes, h: Option<HandleId>) -> Result<Attributes> {
        let result = self.memory.setattr(c, n, changes, h);
        self.carried_out(Call::Setattr);
        result
    }
    fn create(&self, c: &Caller, p: NodeId, n: Name<'_>, mode: u32, f: OpenFlags) -> Result<(Entry, HandleId)> {
        let (entry, handle) = self.memory.create(c, p, n, mode, f)?;
        self.nodes.lock().unwrap().insert(handle, entry.node);
        self.carried_out(Call::Create);
        Ok((entry, handle))
    }
    fn tmpfile(&self, c: &Caller, p: NodeId, mode: u32, f: OpenFlags) -> Result<(Entry, HandleId)> {
        let (entry, handle) = self.memory.tmpfile(c, p, mode, f)?;
        self.nodes.lock().unwrap().insert(handle, entry.node);
        self.carried_out(Call::Create);
        Ok((entry, handle))
    }
    fn unlink_known(&self, c: &Caller, p: NodeId, n: Name<'_>, _: NodeId, _: Option<bool>) -> Result<()> {
        Filter::unlink(self, c, p, n)
    }
    fn link(&self, c: &Caller, node: NodeId, p: NodeId, n: Name<'_>) -> Result<Entry> {
        let result = self.logged(Logged::Link(node), self.memory.link(c, node, p, n));
        self.carried_out(Call::Link);
        result
    }
    fn unlink(&self, c: &Caller, p: NodeId, n: Name<'_>) -> Result<()> {
        let result = self.memory.unlink(c, p, n);
        self.carried_out(Call::Unlink);
        result
    }
    fn rename(&self, c: &Caller, p: NodeId, n: Name<'_>, q: NodeId, m: Name<'_>, f: RenameFlags) -> Result<()> {
        self.logged(Logged::Rename, self.memory.rename(c, p, n, q, m, f))
    }
    fn open(&self, caller: &Caller, node: NodeId, flags: OpenFlags) -> Result<HandleId> {
        self.opens.fetch_add(1, Ordering::SeqCst);
        let handle = self.memory.open(caller, node, flags)?;
        self.nodes.lock().unwrap().insert(handle, node);
        Ok(handle)
    }
    fn read_into(&self, caller: &Caller, handle: HandleId, offset: u64, target: &mut dyn ReadTarget) -> Result<usize> {
        check(&self.fail_reads)?;
        let before = self.reads.fetch_add(1, Ordering::SeqCst);
        while before >= self.reads_allowed.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(self.slow_reads.load(Ordering::SeqCst)));
        self.memory.read_into(caller, handle, offset, target)
    }
    fn write(&self, caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        let before = self.writes.fetch_add(1, Ordering::SeqCst);
        while before >= self.writes_allowed.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.fail_writes.load(Ordering::SeqCst) != 0 {
            let spare = self.writes_spared.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
            spare.or_else(|_| check(&self.fail_writes).map(|()| 0))?;
        }
        let node = self.nodes.lock().unwrap()[&handle];
        if node.0 == self.fail_writes_of.load(Ordering::SeqCst) {
            return fail(Errno::EIO);
        }
        self.logged(Logged::Write(node), self.memory.write(caller, handle, offset, data))
    }
    /// One after the other, so that a failure leaves some of them written.
    fn write_pieces(&self, caller: &Caller, handle: HandleId, pieces: &[(u64, &[u8])]) -> Result<()> {
        self.scattered_writes.fetch_add(u64::from(pieces.len() > 1), Ordering::SeqCst);
        pieces.iter().try_for_each(|(offset, data)| write_whole(self, caller, handle, *offset, data))
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
    fn flush_range(&self, caller: &Caller, handle: HandleId, _: Range<u64>) -> Result<()> {
        Filter::fsync(self, caller, handle, Durability::Data)
    }
    fn fsync(&self, caller: &Caller, handle: HandleId, durability: Durability) -> Result<()> {
        check(&self.fail_fsyncs)?;
        self.memory.fsync(caller, handle, durability)?;
        let node = self.nodes.lock().unwrap().get(&handle).copied();
        if let Some(node) = node {
            let now = self.now(node);
            self.durable.lock().unwrap().insert(node, now);
        }
        Ok(())
    }
    fn write_before_names(&self, _: &Caller, node: NodeId, change: NameChange) -> Result<()> {
        self.logged(Logged::BeforeNames(node, change), Ok(()))
    }
    fn release(&self, handle: HandleId) {
        self.nodes.lock().unwrap().remove(&handle);
        self.memory.release(handle);
    }
    fn setxattr(&self, caller: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        let result = self.memory.setxattr(caller, node, name, value, flags);
        self.carried_out(Call::Setxattr);
        result
    }
    fn read_only(&self) -> bool {
        self.read_only.load(Ordering::SeqCst)
    }
    fn sync(&self) -> Result<()> {
        check(&self.fail_fsyncs)?;
        self.memory.sync()
    }
}
