//! A layer that misbehaves by the name: it panics, fails, or waits until it is told to go on. The next answer to a look-up
//! or to a question for attributes can be held back whatever the name, and the next write.

use poolfs_libservice::types::{
    AllocateMode, Attributes, Caller, Errno, FileSystemStatistics, FileType, HandleId, Name, NodeId, OpenFlags,
    RenameFlags, SeekTo, SetAttributes, XattrFlags,
};
use poolfs_libservice::{DirectoryEntry, Durability, Entry, Libservice, Memory, Result, Written, fail};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

const WAIT_MAX: Duration = Duration::from_secs(20);

#[derive(Default)]
struct Gate {
    open: bool,
    waiting: usize,
    /// Writes that were held back and are not made yet.
    to_be_written: usize,
}

/// [`Memory`], except for names that begin with `panic`, `fail` or `wait`, and for new ones that begin with `lack`.
pub struct Trap {
    pub memory: Arc<Memory>,
    gate: Mutex<Gate>,
    changed: Condvar,
    hold_back: AtomicBool,
    hold_back_write: AtomicBool,
}

impl Trap {
    pub fn new() -> Arc<Self> {
        let (gate, changed, hold_back, hold_back_write) = Default::default();
        Arc::new(Self { memory: Memory::new(), gate, changed, hold_back, hold_back_write })
    }

    /// Waits until `count` calls wait.
    pub fn wait_for(&self, count: usize) {
        let gate = self.gate.lock().expect("unpoisoned");
        let waited = self.changed.wait_timeout_while(gate, WAIT_MAX, |gate| gate.waiting != count);
        let (gate, result) = waited.expect("unpoisoned");
        assert!(!result.timed_out(), "{} calls wait instead of {count}", gate.waiting);
    }

    /// Lets those that wait go on, and waits until they have, and what they write is written.
    pub fn let_go(&self) {
        let mut gate = self.gate.lock().expect("unpoisoned");
        gate.open = true;
        self.changed.notify_all();
        let is_under_way = |gate: &mut Gate| gate.waiting > 0 || gate.to_be_written > 0;
        let (mut gate, result) = self.changed.wait_timeout_while(gate, WAIT_MAX, is_under_way).expect("unpoisoned");
        assert!(!result.timed_out(), "{} calls still wait", gate.waiting);
        gate.open = false;
    }

    /// A file of that name, made without its traps.
    pub fn make(&self, name: &str) {
        let name = Name::new(name.as_bytes()).expect("a name");
        let caller = Caller::ROOT;
        let created = self.memory.create(&caller, NodeId::ROOT, name, 0o666, OpenFlags::READ_WRITE);
        let (entry, handle) = created.expect("room");
        self.memory.release(handle);
        self.memory.forget(entry.node, 1);
    }

    /// What has been done when a name is a trap stays done: what comes late is the answer.
    fn pass<T>(&self, name: Name<'_>, done: Result<T>) -> Result<T> {
        if name.as_bytes().starts_with(b"fail") {
            return fail(Errno::EIO);
        }
        if name.as_bytes().starts_with(b"panic") {
            // As a panic, but for a message: those in a test's output are of what went wrong.
            std::panic::resume_unwind(Box::new("as asked by the name"));
        }
        if name.as_bytes().starts_with(b"wait") {
            self.wait();
        }
        done
    }

    fn wait(&self) {
        let mut gate = self.gate.lock().expect("unpoisoned");
        gate.waiting += 1;
        self.changed.notify_all();
        gate = self.changed.wait_while(gate, |gate| !gate.open).expect("unpoisoned");
        gate.waiting -= 1;
        self.changed.notify_all();
    }

    /// The next answer to a look-up or to a question for attributes waits.
    pub fn hold_back_next(&self) {
        self.hold_back.store(true, Ordering::SeqCst);
    }

    /// The next write waits before it is made.
    pub fn hold_back_next_write(&self) {
        self.hold_back_write.store(true, Ordering::SeqCst);
    }

    fn hold_back<T>(&self, done: T) -> T {
        if self.hold_back.swap(false, Ordering::SeqCst) {
            self.wait();
        }
        done
    }
}

macro_rules! delegate {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $(-> $out:ty)?;)*) => {$(
        fn $name(&self, $($argument: $type),*) $(-> $out)? {
            self.memory.$name($($argument),*)
        }
    )*};
}

impl Libservice for Trap {
    fn lookup(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        let found = self.hold_back(self.memory.lookup(caller, parent, name));
        self.pass(name, found)
    }

    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        if name.as_bytes().starts_with(b"lack") {
            return fail(Errno::ENOSYS);
        }
        self.pass(name, self.memory.create(caller, parent, name, permissions, flags))
    }

    fn getattr(&self, caller: &Caller, node: NodeId) -> Result<Attributes> {
        self.hold_back(self.memory.getattr(caller, node))
    }

    fn write(&self, caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written> {
        if !self.hold_back_write.swap(false, Ordering::SeqCst) {
            return self.memory.write(caller, handle, offset, data);
        }
        self.gate.lock().expect("unpoisoned").to_be_written += 1;
        self.wait();
        let written = self.memory.write(caller, handle, offset, data);
        self.gate.lock().expect("unpoisoned").to_be_written -= 1;
        self.changed.notify_all();
        written
    }

    delegate! {
        fn forget(node: NodeId, count: u64);
        fn setattr(
            caller: &Caller,
            node: NodeId,
            changes: &SetAttributes,
            handle: Option<HandleId>
        ) -> Result<Attributes>;
        fn readlink(caller: &Caller, node: NodeId) -> Result<Vec<u8>>;
        fn tmpfile(
            caller: &Caller,
            parent: NodeId,
            permissions: u32,
            flags: OpenFlags
        ) -> Result<(Entry, HandleId)>;
        fn mknod(
            caller: &Caller,
            parent: NodeId,
            name: Name<'_>,
            file_type: FileType,
            permissions: u32,
            device: u32
        ) -> Result<Entry>;
        fn mkdir(caller: &Caller, parent: NodeId, name: Name<'_>, permissions: u32) -> Result<Entry>;
        fn symlink(caller: &Caller, parent: NodeId, name: Name<'_>, target: &[u8]) -> Result<Entry>;
        fn link(caller: &Caller, node: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry>;
        fn unlink(caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()>;
        fn rmdir(caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()>;
        fn rename(
            caller: &Caller,
            parent: NodeId,
            name: Name<'_>,
            new_parent: NodeId,
            new_name: Name<'_>,
            flags: RenameFlags
        ) -> Result<()>;
        fn open(caller: &Caller, node: NodeId, flags: OpenFlags) -> Result<HandleId>;
        fn read(caller: &Caller, handle: HandleId, offset: u64, buffer: &mut [u8]) -> Result<usize>;
        fn fallocate(caller: &Caller, handle: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()>;
        fn seek(caller: &Caller, handle: HandleId, offset: u64, to: SeekTo) -> Result<u64>;
        fn fsync(caller: &Caller, handle: HandleId, durability: Durability) -> Result<()>;
        fn flush(caller: &Caller, handle: HandleId) -> Result<()>;
        fn release(handle: HandleId);
        fn opendir(caller: &Caller, node: NodeId) -> Result<HandleId>;
        fn readdir(
            caller: &Caller,
            handle: HandleId,
            cookie: u64,
            visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>
        ) -> Result<()>;
        fn getxattr(caller: &Caller, node: NodeId, name: &[u8]) -> Result<Vec<u8>>;
        fn setxattr(caller: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()>;
        fn listxattr(caller: &Caller, node: NodeId) -> Result<Vec<Vec<u8>>>;
        fn removexattr(caller: &Caller, node: NodeId, name: &[u8]) -> Result<()>;
        fn statfs(caller: &Caller, node: NodeId) -> Result<FileSystemStatistics>;
        fn sync() -> Result<()>;
    }
}
