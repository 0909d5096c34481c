//! A fault-injection filter that acts by name: a call panics, fails, or waits until it is released. The next answer to a lookup
//! or to a request for attributes can be held back whatever the name, and the next write.

use poolfs_libservice::types::{Attributes, Caller, Errno, HandleId, Name, NodeId, OpenFlags};
use poolfs_libservice::{Entry, Filter, Libservice, Memory, Result, Written, copy_by_reading, fail, write_whole};
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

impl Filter for Trap {
    fn below(&self) -> &dyn Libservice {
        &*self.memory
    }

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
}
