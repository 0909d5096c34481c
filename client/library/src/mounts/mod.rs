//! Where instances are mounted, and what else is mounted on top of them, kept current without locks.
//!
//! The table is read from `/proc/self/mountinfo` into one of a few slots, which readers enter by a count and which is
//! rewritten only while nobody reads it. Who finds a refresh under way, or no slot to write to, uses the kernel for this
//! call. The kernel reports a change of the mounts by poll on an open mountinfo file.

mod parse;
mod table;

pub use table::{MountPoint, Table, components};

use crate::{raw, session::Sessions};
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use linux_raw_sys::general as sys;

/// Tables at a time: the current one, and old ones that are still being read.
const TABLES: usize = 3;

/// Our own descriptors stay at or above this number, where a program's are seldom.
const OWN_DESCRIPTOR_MIN: i32 = 500;

/// Cycles between two looks at the mounts for paths that lead to no known instance (some milliseconds).
const LAZY_LOOK_CYCLES: u64 = 20_000_000;

/// Turns one caller waits for another's look at the mounts to end.
const OTHERS_SPINS_MAX: u32 = 400;

/// The open mountinfo file of this process, which a forked child still has although its state is gone.
static INHERITABLE: (AtomicI32, AtomicU64) = (AtomicI32::new(0), AtomicU64::new(0));

/// Closes the mountinfo file that a forked child inherited: it shares its offset with the parent's.
pub fn close_inherited() {
    let number = INHERITABLE.0.swap(0, Ordering::Relaxed) - 1;
    let inode = INHERITABLE.1.load(Ordering::Relaxed);
    if number >= 0 && raw::statx_descriptor(number).is_ok_and(|found| found.stx_ino == inode) {
        raw::close(number);
    }
}

/// A reader count that says "being written".
const WRITING: u32 = u32::MAX;

#[repr(C)]
struct Slot {
    readers: AtomicU32,
    table: UnsafeCell<Table>,
}

/// The mounts of this process.
#[repr(C)]
pub struct Mounts {
    refreshing: AtomicU32,
    /// The slot of the current table, plus one.
    current: AtomicU32,
    /// The mountinfo descriptor, plus one.
    file: AtomicI32,
    file_inode: AtomicU64,
    looked_at: AtomicU64,
    /// Callers between asking the kernel for changes and having acted on its answer, which it gives only once.
    looking: AtomicU32,
    slots: [Slot; TABLES],
    scratch: UnsafeCell<parse::Scratch>,
}

// SAFETY: a slot's table is written only by who set `refreshing` and moved its `readers` from 0 to WRITING, and read only
// by who counted itself in while it was not WRITING; `scratch` belongs to who set `refreshing`.
unsafe impl Sync for Mounts {}

/// How sure the table has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freshness {
    /// A mount of some milliseconds ago may be missing.
    Lazy,
    /// Every mount made before the call is seen.
    Exact,
}

impl Mounts {
    /// Runs `read` on a table of the wanted freshness; nothing when there is none to be had without waiting.
    pub fn with<R>(&self, sessions: &Sessions, freshness: Freshness, read: impl FnOnce(&Table) -> R) -> Option<R> {
        self.bring_up_to_date(sessions, freshness)?;
        let index = self.current.load(Ordering::Acquire).checked_sub(1)?;
        let slot = self.slots.get(index as usize)?;
        let _reading = Reading::enter(slot)?;
        // A refresh may have moved on between the two loads; the slot's content is then old but whole, unless it is
        // current again.
        if self.current.load(Ordering::SeqCst) != index + 1 {
            return None;
        }
        // SAFETY: counted in as a reader of a slot that is not being written.
        Some(read(unsafe { &*slot.table.get() }))
    }

    /// The descriptor that the program must not close, if there is one.
    pub fn own_descriptor(&self) -> Option<i32> {
        self.file.load(Ordering::Relaxed).checked_sub(1).filter(|&file| file >= 0)
    }

    fn bring_up_to_date(&self, sessions: &Sessions, freshness: Freshness) -> Option<()> {
        let known = self.current.load(Ordering::Acquire) != 0;
        if known && freshness == Freshness::Lazy && !self.is_time_to_look() {
            return Some(());
        }
        self.looking.fetch_add(1, Ordering::SeqCst);
        let stale = !known || self.is_stale();
        let fresh = if stale { self.refresh(sessions) } else { self.others_have_looked() };
        self.looking.fetch_sub(1, Ordering::SeqCst);
        fresh
    }

    /// Whether nobody else holds an answer of the kernel that this caller would have needed.
    fn others_have_looked(&self) -> Option<()> {
        (0..OTHERS_SPINS_MAX).find(|_| {
            core::hint::spin_loop();
            self.looking.load(Ordering::SeqCst) == 1
        })?;
        Some(())
    }

    fn is_time_to_look(&self) -> bool {
        let now = cycles();
        let due = now.wrapping_sub(self.looked_at.load(Ordering::Relaxed)) >= LAZY_LOOK_CYCLES;
        if due {
            self.looked_at.store(now, Ordering::Relaxed);
        }
        due
    }

    fn is_stale(&self) -> bool {
        let Some(file) = self.own_descriptor() else { return true };
        // The program may have closed our number and got it back for something else.
        let same =
            raw::statx_descriptor(file).is_ok_and(|found| found.stx_ino == self.file_inode.load(Ordering::Relaxed));
        if !same {
            self.file.compare_exchange(file + 1, 0, Ordering::Relaxed, Ordering::Relaxed).ok();
            return true;
        }
        let changed = (sys::POLLPRI | sys::POLLERR) as i16;
        raw::poll_now(file, changed).is_ok_and(|events| events & changed != 0)
    }

    #[cold]
    fn refresh(&self, sessions: &Sessions) -> Option<()> {
        self.refreshing.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        let result = self.refresh_alone(sessions);
        if result.is_none() {
            // The poll that told of the change will not tell again: the old table must not be used.
            self.current.store(0, Ordering::SeqCst);
        }
        self.refreshing.store(0, Ordering::Release);
        result
    }

    fn refresh_alone(&self, sessions: &Sessions) -> Option<()> {
        let file = self.mountinfo()?;
        let current = self.current.load(Ordering::Relaxed);
        let (index, slot) = self.slots.iter().enumerate().find(|(index, slot)| {
            *index as u32 + 1 != current
                && slot.readers.compare_exchange(0, WRITING, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })?;
        // SAFETY: WRITING and `refreshing` are ours.
        let (table, scratch) = unsafe { (&mut *slot.table.get(), &mut *self.scratch.get()) };
        let filled = parse::fill(table, scratch, file, sessions);
        slot.readers.store(0, Ordering::Release);
        filled?;
        self.looked_at.store(cycles(), Ordering::Relaxed);
        self.current.store(index as u32 + 1, Ordering::SeqCst);
        Some(())
    }

    /// The open mountinfo file, opened when there is none.
    fn mountinfo(&self) -> Option<i32> {
        if let Some(file) = self.own_descriptor() {
            return Some(file);
        }
        let opened = raw::open_read(c"/proc/self/mountinfo").ok()?;
        let file = raw::move_up(opened, OWN_DESCRIPTOR_MIN).unwrap_or(opened);
        let Ok(found) = raw::statx_descriptor(file) else {
            raw::close(file);
            return None;
        };
        self.file_inode.store(found.stx_ino, Ordering::Relaxed);
        self.file.store(file + 1, Ordering::Relaxed);
        INHERITABLE.1.store(found.stx_ino, Ordering::Relaxed);
        INHERITABLE.0.store(file + 1, Ordering::Relaxed);
        Some(file)
    }
}

/// Counted in as a reader of a slot.
struct Reading<'a>(&'a Slot);

impl<'a> Reading<'a> {
    fn enter(slot: &'a Slot) -> Option<Self> {
        let mut readers = slot.readers.load(Ordering::Relaxed);
        loop {
            if readers >= WRITING - 1 {
                return None;
            }
            match slot.readers.compare_exchange_weak(readers, readers + 1, Ordering::SeqCst, Ordering::Relaxed) {
                Ok(_) => return Some(Self(slot)),
                Err(now) => readers = now,
            }
        }
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.readers.fetch_sub(1, Ordering::Release);
    }
}

fn cycles() -> u64 {
    // SAFETY: every x86-64 processor has the counter.
    unsafe { core::arch::x86_64::_rdtsc() }
}
