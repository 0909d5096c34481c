//! The mount table: where instances are mounted, and what is mounted on top of them, kept current without locks.
//!
//! The table is read from `/proc/self/mountinfo` into one of a few slots. Each slot has holds for its readers, and is rewritten only while
//! nobody reads it. A call that finds a refresh in progress, or no slot to write to, is left to the kernel. The kernel reports a change of
//! the mounts by poll on an open mountinfo file ([`looker`]). A thread that sees a report raises a counter first, and a table is good only
//! as long as the counter has the value from before the table was read.

mod filter;
mod looker;
mod parse;
mod table;

pub use looker::close_inherited;
pub use table::{MountPoint, Table, components};

use crate::raw::{self, coarse_time_ns};
use crate::signals::SignalsHeld;
use crate::trace;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use filter::{Filter, Places};
use looker::{LOOKERS, Look, Looker};
use poolfs_ipc::hold::{Frame, Hold};

/// Tables at a time: the current one, and old ones that are still being read.
const TABLES: usize = 3;

/// Time between two looks at the mounts for paths that lead to no known instance.
const LAZY_LOOK_NS: u64 = 8_000_000;

/// Time before mounts that could not be read, or are too many, are read again.
const RETRY_NS: u64 = 1_000_000_000;

/// How often, and for how long each time, is waited for the tables by whom has to have one. Readers are done in microseconds.
const WAITS: u32 = 1000;
const WAIT_NS: u32 = 1_000_000;

/// Calls that can read one table at a time; further ones are the kernel's.
const READERS_MAX: usize = 32;

#[repr(C)]
struct Slot {
    readers: [Hold; READERS_MAX],
    /// 1: being written.
    writing: AtomicU32,
    /// The count of changes before the table was read.
    changes: AtomicU32,
    table: UnsafeCell<Table>,
}

/// The mounts of this process. What most calls look at comes first, together.
#[repr(C, align(64))]
pub struct Mounts {
    /// Changes heard of.
    changes: AtomicU32,
    /// The slot of the current table, plus one.
    current: AtomicU32,
    looked_at: AtomicU64,
    /// Of the table that was read last, stamped with the count of changes before that.
    filter: Filter,
    refreshing: Hold,
    /// When reading last failed; 0: it did not.
    failed_at: AtomicU64,
    lookers: [Looker; LOOKERS],
    slots: [Slot; TABLES],
    scratch: UnsafeCell<parse::Scratch>,
}

// SAFETY: a slot's table is written only by who holds `refreshing`, has set `writing` and then found no reader, and read only
// by who took a reader's hold and then found `writing` not set: one of the two sees the other. `scratch` belongs to who
// holds `refreshing`.
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
    pub fn with<R>(&self, frame: Frame, freshness: Freshness, read: impl FnOnce(&Table) -> R) -> Option<R> {
        self.bring_up_to_date(frame, freshness)?;
        let (index, slot) = self.current()?;
        let _reading = Reading::enter(slot, frame)?;
        // A refresh may have moved on between the two loads, or a change have been heard of.
        if self.current()?.0 != index {
            return None;
        }
        // SAFETY: a reader of a slot that is not being written.
        Some(read(unsafe { &*slot.table.get() }))
    }

    /// As [`Self::with`] on an exact table, but waits while others are at the tables; nothing when the mounts cannot be read.
    pub fn with_waiting<R>(&self, frame: Frame, mut read: impl FnMut(&Table) -> R) -> Option<R> {
        for attempt in 0..WAITS {
            if attempt > 0 {
                raw::sleep(WAIT_NS);
            }
            let found = self.with(frame, Freshness::Exact, &mut read);
            if found.is_some() || self.failed_at.load(Ordering::Relaxed) != 0 {
                return found;
            }
        }
        None
    }

    /// Whether an absolute path, with its NUL, surely leads into no instance that was mounted some milliseconds ago. `now` is by
    /// [`coarse_time_ns`].
    #[inline]
    pub fn is_elsewhere(&self, path: &[u8], now: u64) -> bool {
        !self.is_look_due(now) && !self.filter.may_lead(path, self.changes.load(Ordering::SeqCst))
    }

    /// The descriptors that the program must not close.
    pub fn descriptors(&self) -> impl Iterator<Item = i32> + '_ {
        self.lookers.iter().filter_map(Looker::descriptor)
    }

    /// Has the mounts read again before they are next relied on: what this process can reach of them is to change.
    pub fn distrust(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
    }

    /// The slot of the table that holds everything heard of.
    fn current(&self) -> Option<(usize, &Slot)> {
        let index = self.current.load(Ordering::SeqCst).checked_sub(1)? as usize;
        let slot = self.slots.get(index)?;
        (slot.changes.load(Ordering::SeqCst) == self.changes.load(Ordering::SeqCst)).then_some((index, slot))
    }

    fn bring_up_to_date(&self, frame: Frame, freshness: Freshness) -> Option<()> {
        let lazy = freshness == Freshness::Lazy && self.current().is_some();
        if lazy && !self.is_time_to_look() {
            return Some(());
        }
        let Some(look) = looker::take(&self.lookers, frame) else {
            return if lazy { Some(()) } else { None };
        };
        if look.sees_change() {
            self.distrust();
        }
        if self.current().is_some() { Some(()) } else { self.refresh(frame, &look) }
    }

    fn is_look_due(&self, now: u64) -> bool {
        now.wrapping_sub(self.looked_at.load(Ordering::Relaxed)) >= LAZY_LOOK_NS
    }

    fn is_time_to_look(&self) -> bool {
        let now = coarse_time_ns();
        let due = self.is_look_due(now);
        if due {
            self.looked_at.store(now, Ordering::Relaxed);
        }
        due
    }

    #[cold]
    fn refresh(&self, frame: Frame, look: &Look<'_>) -> Option<()> {
        let failed_at = self.failed_at.load(Ordering::Relaxed);
        if failed_at != 0 && coarse_time_ns().wrapping_sub(failed_at) < RETRY_NS {
            return None;
        }
        let Some(file) = look.file() else {
            self.note_failure();
            return None;
        };
        // Nobody takes up a table half read, and the child of a handler that forked would find only its second half.
        let _held = SignalsHeld::hold();
        if !self.refreshing.take_or_recover(frame) {
            return None;
        }
        let result = self.refresh_alone(frame, file);
        self.refreshing.give_back();
        result
    }

    fn note_failure(&self) {
        trace::no_mounts();
        self.failed_at.store(coarse_time_ns(), Ordering::Relaxed);
    }

    fn refresh_alone(&self, frame: Frame, file: i32) -> Option<()> {
        let changes = self.changes.load(Ordering::SeqCst);
        let current = self.current.load(Ordering::Relaxed);
        let (index, slot) = self
            .slots
            .iter()
            .enumerate()
            .find(|(index, slot)| *index as u32 + 1 != current && slot.begin_writing(frame))?;
        // SAFETY: `writing` and `refreshing` are ours, and nobody reads.
        let (table, scratch) = unsafe { (&mut *slot.table.get(), &mut *self.scratch.get()) };
        let filled = parse::fill(table, scratch, file);
        let mut places = Places::NONE;
        table
            .points()
            .iter()
            .filter(|point| point.instance().is_some())
            .for_each(|point| places.add(table.place(point)));
        slot.changes.store(changes, Ordering::SeqCst);
        slot.writing.store(0, Ordering::SeqCst);
        if filled.is_none() {
            self.note_failure();
            return None;
        }
        self.failed_at.store(0, Ordering::Relaxed);
        self.filter.replace(&places, changes);
        self.looked_at.store(coarse_time_ns(), Ordering::Relaxed);
        self.current.store(index as u32 + 1, Ordering::SeqCst);
        Some(())
    }
}

impl Slot {
    /// Keeps readers out, if there are none. Whoever holds `refreshing` may find `writing` set by one who left by a jump.
    fn begin_writing(&self, frame: Frame) -> bool {
        self.writing.store(1, Ordering::SeqCst);
        let unread = self.readers.iter().all(|reader| reader.is_free() || reader.is_left(frame));
        if unread {
            self.readers.iter().filter(|reader| reader.is_left(frame)).for_each(Hold::give_back);
        } else {
            self.writing.store(0, Ordering::SeqCst);
        }
        unread
    }
}

/// A reader of a slot.
struct Reading<'a>(&'a Hold);

impl<'a> Reading<'a> {
    fn enter(slot: &'a Slot, frame: Frame) -> Option<Self> {
        let reader = slot.readers.iter().find(|reader| reader.take(frame));
        let reader = reader.or_else(|| slot.readers.iter().find(|reader| reader.take_or_recover(frame)))?;
        let reading = Self(reader);
        (slot.writing.load(Ordering::SeqCst) == 0).then_some(reading)
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.give_back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::boxed::Box;

    fn zeroed<T>() -> Box<T> {
        // SAFETY: the type used here is valid as zeros, which is how the mapping of the state begins.
        unsafe { Box::<T>::new_zeroed().assume_init() }
    }

    #[test]
    fn the_table_is_read_once_and_again_when_it_is_distrusted() {
        let mounts = zeroed::<Mounts>();
        let read = || mounts.with(Frame::here(), Freshness::Exact, |table| std::ptr::from_ref(table) as usize);
        let first = read().expect("a table");
        assert_eq!(read(), Some(first), "read again without a change");
        mounts.distrust();
        assert_ne!(read().expect("a table"), first, "not read again");
        assert_eq!(mounts.descriptors().count(), 1);
    }

    #[test]
    fn the_program_may_take_our_descriptor_away() {
        let mounts = zeroed::<Mounts>();
        let read = || mounts.with(Frame::here(), Freshness::Exact, |_| ()).is_some();
        assert!(read());
        crate::raw::close(mounts.descriptors().next().expect("a descriptor"));
        assert!(read() && read());
    }

    #[test]
    fn a_reader_keeps_its_table() {
        let mounts = zeroed::<Mounts>();
        let inner = mounts.with(Frame::here(), Freshness::Exact, |table| {
            let before = table.points().len();
            for _ in 0..2 * TABLES {
                mounts.distrust();
                mounts.with(Frame::here(), Freshness::Exact, |_| ());
            }
            before == table.points().len()
        });
        assert_eq!(inner, Some(true));
    }

    #[test]
    fn who_waits_gets_a_table_among_threads_that_need_new_ones() {
        let mounts = zeroed::<Mounts>();
        std::thread::scope(|scope| {
            for _ in 0..2 * LOOKERS {
                scope.spawn(|| {
                    for _ in 0..200 {
                        mounts.distrust();
                        assert!(mounts.with_waiting(Frame::here(), |_| ()).is_some());
                    }
                });
            }
        });
    }

    /// A reader that is left by a jump: what it had is never given back.
    #[inline(never)]
    fn leave(mounts: &Mounts) {
        let frame = Frame::here();
        mounts.bring_up_to_date(frame, Freshness::Exact).expect("a table");
        let (_, slot) = mounts.current().expect("a table");
        let _ = std::mem::ManuallyDrop::new(Reading::enter(slot, frame).expect("room"));
        let _ = std::mem::ManuallyDrop::new(looker::take(&mounts.lookers, frame).expect("a looker"));
        assert!(mounts.refreshing.take_or_recover(frame));
    }

    #[test]
    fn readers_left_by_a_jump_are_in_nobodys_way() {
        let mounts = zeroed::<Mounts>();
        for _ in 0..2 * READERS_MAX {
            leave(&mounts);
            mounts.distrust();
            assert!(mounts.with(Frame::here(), Freshness::Exact, |_| ()).is_some());
        }
    }

    #[test]
    fn readers_left_by_a_jump_make_room_without_a_change_of_the_mounts() {
        let mounts = zeroed::<Mounts>();
        for _ in 0..2 * READERS_MAX {
            leave(&mounts);
            assert!(mounts.with(Frame::here(), Freshness::Lazy, |_| ()).is_some());
        }
    }

    #[test]
    fn threads_do_not_send_each_other_to_the_kernel() {
        let mounts = zeroed::<Mounts>();
        assert!(mounts.with(Frame::here(), Freshness::Exact, |_| ()).is_some());
        std::thread::scope(|scope| {
            for _ in 0..LOOKERS {
                scope.spawn(|| {
                    let served =
                        (0..500).filter(|_| mounts.with(Frame::here(), Freshness::Lazy, |_| ()).is_some()).count();
                    assert_eq!(served, 500);
                });
            }
        });
    }
}
