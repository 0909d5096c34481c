//! Optimistic reads: a client reads at addresses at which something is always mapped, without taking a reference. It finds zeros
//! or the present content there.
//!
//! Whoever removes such a mapping puts zeros in its place, in which nothing is valid: no lease holds, no notice says anything, no
//! segment is live.

use super::mapped::{
    BLOCK, CLOSINGS_SHIFT, LEASES_AT, LIVE, NOTED_AT, NOTED_WORDS, Noted, SIZE_AT, STATE_AT, WORDS_AT, lives,
};
use super::{Place, copied, is_unchanged, look};
use crate::copy::copy;
use crate::notice::Notice;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A lease's word.
#[derive(Clone, Copy, Debug)]
pub struct OptimisticLease {
    leases: *const u8,
    lease: u32,
}

impl OptimisticLease {
    /// Bytes of a lease's word and all before it.
    #[must_use]
    pub const fn leases_length(lease: u32) -> usize {
        LEASES_AT + (lease as usize + 1) * size_of::<AtomicU64>()
    }

    /// What is at this address.
    ///
    /// # Safety
    /// It is that of a page, from which on [`OptimisticLease::leases_length`]`(lease)` bytes can be read for good.
    #[must_use]
    pub const unsafe fn new(leases: *const u8, lease: u32) -> Self {
        Self { leases, lease }
    }

    /// Whether the lease holds that was given in this epoch, and no more than so many closings were counted.
    #[inline]
    #[must_use]
    pub fn holds(&self, epoch: u32, closings: u32) -> bool {
        // SAFETY: the promise of `new`; an atomic, aligned as the page is.
        self.is_as_granted(epoch, closings) && lives(unsafe { &*self.leases.cast::<AtomicU32>() })
    }

    fn is_as_granted(&self, epoch: u32, closings: u32) -> bool {
        let at = Self::leases_length(self.lease) - size_of::<AtomicU64>();
        // SAFETY: as in `holds`.
        let word = unsafe { &*self.leases.add(at).cast::<AtomicU64>() };
        word.load(Ordering::Acquire) == u64::from(closings) << CLOSINGS_SHIFT | u64::from(epoch)
    }
}

/// A lease's notice.
#[derive(Clone, Copy, Debug)]
pub struct OptimisticNotice(*const u8);

impl OptimisticNotice {
    /// What is at this address.
    ///
    /// # Safety
    /// It is that of a page, from which on [`NOTICE_LENGTH`](super::NOTICE_LENGTH) bytes can be read for good.
    #[must_use]
    pub const unsafe fn new(notice: *const u8) -> Self {
        Self(notice)
    }

    /// What the notice says, if the lease holds and no more than so many closings were counted.
    #[inline]
    #[must_use]
    pub fn noted(&self, lease: OptimisticLease, epoch: u32, closings: u32) -> Option<Noted> {
        // SAFETY: the promise of `new`; atomics, aligned as the page is.
        let (sequence, words) =
            unsafe { (&*self.0.cast::<AtomicU64>(), &*self.0.add(NOTED_AT).cast::<[AtomicU64; NOTED_WORDS]>()) };
        if !lease.is_as_granted(epoch, closings) {
            return None;
        }
        let words: [u64; NOTED_WORDS] = Notice::new(sequence, words).read()?;
        lease.holds(epoch, closings).then(|| zerocopy::transmute!(words))
    }
}

/// A map and its segment.
#[derive(Clone, Copy, Debug)]
pub struct OptimisticRead {
    map: *const u8,
    data: *const u8,
    capacity: u64,
}

impl OptimisticRead {
    /// Most bytes of a read: they are in two blocks at most.
    pub const LENGTH_MAX: usize = BLOCK as usize;

    /// What is at these addresses.
    ///
    /// # Safety
    /// Both are those of pages. From the first one [`map_length`](super::map_length)`(capacity)` bytes can be read for good, from the
    /// second one as many blocks as `capacity` says.
    #[must_use]
    pub const unsafe fn new(map: *const u8, data: *const u8, capacity: u64) -> Self {
        Self { map, data, capacity }
    }

    /// Where the word of the block at an offset is, in a map at an address.
    #[inline]
    #[must_use]
    pub const fn word_address(map: usize, offset: u64) -> usize {
        map.wrapping_add(WORDS_AT + (offset / BLOCK) as usize * size_of::<AtomicU32>())
    }

    /// Copies up to `length` bytes from `offset` on, as far as the file goes, while `holds` says that this is the file's content;
    /// returns how many. Nothing where it takes another look, or a request, or where there is nothing to read.
    ///
    /// # Safety
    /// `target` must be writable for `length` bytes, and lie outside the segment.
    #[inline]
    pub unsafe fn read(&self, offset: u64, target: *mut u8, length: usize, holds: impl Fn() -> bool) -> Option<usize> {
        let room = self.capacity * BLOCK;
        if length > Self::LENGTH_MAX || offset >= room || !self.is_live() || !holds() {
            return None;
        }
        // SAFETY: the promise of `new`; an atomic, aligned.
        let size = unsafe { &*self.map.add(SIZE_AT).cast::<AtomicU64>() }.load(Ordering::Acquire);
        let end = (offset + length as u64).min(size);
        if end <= offset || end > room {
            return None;
        }
        let (first, last) = (self.word(offset / BLOCK), self.word((end - 1) / BLOCK));
        let before = (look(first)?, look(last)?);
        if !before.0.is(Place::Resident) || !before.1.is(Place::Resident) {
            return None;
        }
        let count = (end - offset) as usize;
        // SAFETY: the caller vouches for `target`; the range ends within the blocks that `new` was promised. What changes meanwhile
        // is found out below.
        unsafe { copy(self.data.add(offset as usize), target, count) };
        copied();
        let is_same = is_unchanged(first, before.0) && is_unchanged(last, before.1);
        (is_same && self.is_live() && holds()).then_some(count)
    }

    fn is_live(&self) -> bool {
        // SAFETY: the promise of `new`; an atomic, aligned.
        unsafe { &*self.map.add(STATE_AT).cast::<AtomicU32>() }.load(Ordering::Acquire) == LIVE
    }

    /// The word of a block of the map.
    fn word(&self, block: u64) -> &AtomicU32 {
        debug_assert!(block < self.capacity);
        // SAFETY: the promise of `new`; the callers stay below the capacity.
        unsafe { &*self.map.add(Self::word_address(0, block * BLOCK)).cast::<AtomicU32>() }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::{FileNotice, Leases, NOTICE_LENGTH, SegmentMap, leases_length, map_length};
    use super::*;
    use crate::memory::{Mapping, PAGE};
    use crate::wire::WireAttributes;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::cell::Cell;
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    fn file(length: usize) -> File {
        let file = memfd_create(c"test", MemfdFlags::CLOEXEC).expect("memory file");
        ftruncate(&file, length as u64).expect("sized");
        file.into()
    }

    #[test]
    fn an_optimistic_read_finds_what_is_noted_while_the_lease_holds() {
        let (leases_file, file) = (file(leases_length(3)), file(NOTICE_LENGTH));
        let leases = Leases::new(&leases_file, 3, true).expect("leases");
        let own = FileNotice::new(&file, true).expect("a notice");
        let noted = Noted { attributes: WireAttributes { inode: 7, ..WireAttributes::default() }, until_ns: 1 };
        let epoch = leases.look(2).expect("a lease").epoch;
        let (at, notice) = (leases.range().0 as *const u8, own.range().0 as *const u8);
        // SAFETY: both are mapped as long as the test runs.
        let (lease, notice) = unsafe { (OptimisticLease::new(at, 2), OptimisticNotice::new(notice)) };
        let noted_by = |epoch, closings| notice.noted(lease, epoch, closings);
        own.note(&noted);
        assert_eq!(noted_by(epoch, 0), None, "no service lives");
        let life = leases.live().expect("a life");
        assert_eq!(noted_by(epoch, 0), Some(noted));
        leases.count_closing(2);
        assert_eq!((noted_by(epoch, 0), noted_by(epoch, 1)), (None, Some(noted)));
        own.forget();
        assert_eq!(noted_by(epoch, 1), None);
        own.note(&noted);
        leases.revoke(2);
        assert_eq!((noted_by(epoch, 1), noted_by(epoch.wrapping_add(1), 1)), (None, Some(noted)));
        drop(life);
        assert_eq!(noted_by(epoch.wrapping_add(1), 1), None);
        // SAFETY: as above.
        let other = unsafe { OptimisticLease::new(at, 1) };
        assert_eq!(notice.noted(other, epoch, 1), None);
    }

    #[test]
    fn content_is_read_where_it_is_and_while_nothing_happens_to_it() {
        const CAPACITY: u64 = 8;
        let (map_file, data) = (file(map_length(CAPACITY)), file(CAPACITY as usize * PAGE));
        let map = SegmentMap::new(&map_file, CAPACITY).expect("a map");
        let seen_map = Mapping::of_segment(&map_file, map_length(CAPACITY), false).expect("mapped");
        let seen_data = Mapping::of_segment(&data, CAPACITY as usize * PAGE, false).expect("mapped");
        // SAFETY: both are mapped as long as the test runs.
        let optimistic = unsafe { OptimisticRead::new(seen_map.base().as_ptr(), seen_data.base().as_ptr(), CAPACITY) };
        let looks = Cell::new(0);
        let read_while = |offset: u64, length: usize, holds: &dyn Fn() -> bool| {
            let mut bytes = vec![0xEE; length];
            looks.set(0);
            let holds = || {
                looks.set(looks.get() + 1);
                holds()
            };
            // SAFETY: a vector of as many bytes.
            let count = unsafe { optimistic.read(offset, bytes.as_mut_ptr(), length, holds) };
            count.map(|count| bytes[..count].to_vec())
        };
        let read = |offset, length| read_while(offset, length, &|| true);
        let page = PAGE as u64;
        data.write_all_at(&[[1; PAGE], [2; PAGE]].concat(), 0).expect("written");
        map.publish(0, Place::Resident);
        assert_eq!(read(0, 1), None, "the file is empty");
        map.set_size(3 * page + 5);
        assert_eq!((read(7, 3), looks.get()), (Some(vec![1; 3]), 2));
        assert_eq!(read(page - 2, 4), None, "the second block is not there");
        map.publish(1, Place::Resident);
        assert_eq!(read(page - 2, 4), Some(vec![1, 1, 2, 2]));
        assert_eq!(read(1, PAGE).map(|bytes| (bytes.len(), bytes[PAGE - 1])), Some((PAGE, 2)));
        assert_eq!(read(1, PAGE + 1), None, "so much may be in three blocks");
        map.publish(2, Place::Zero);
        assert_eq!(read(2 * page, 4), None);
        map.publish(3, Place::Resident);
        assert_eq!(read(3 * page, 50), Some(vec![0; 5]), "to the end of the file");
        for behind in [3 * page + 5, CAPACITY * page, u64::MAX] {
            assert_eq!(read(behind, 1), None);
        }
        map.set_size(100 * page);
        map.publish(CAPACITY - 1, Place::Resident);
        assert_eq!(read(CAPACITY * page - 2, 2), Some(vec![0; 2]));
        assert_eq!(read(CAPACITY * page - 2, 3), None, "behind the map");

        assert_eq!(read_while(0, 1, &|| false), None);
        assert_eq!(read_while(0, 1, &|| looks.get() < 2), None, "it held before the copy only");
        let at_first_look = |change: &dyn Fn()| {
            read_while(page - 1, 2, &|| {
                if looks.get() == 1 {
                    change();
                }
                true
            })
        };
        assert_eq!(at_first_look(&|| map.retract(1..2)), None);
        map.publish(1, Place::Resident);
        assert_eq!(read(page - 1, 2), Some(vec![1, 2]));
        let map = Cell::new(Some(map));
        assert_eq!(at_first_look(&|| drop(map.take())), None);
        assert_eq!(read(0, 1), None, "it has ended");
    }
}
