//! Mapping slots: reserved addresses at which the content of segments is read without taking a reference.
//!
//! A slot belongs to a segment's place in a session. When a segment comes, its bytes and its map are mapped in the slot a second time; when
//! it goes, zeros replace them. No slot is ever unmapped. A place whose segment is larger than its slot gets another slot, and the old one
//! stays mapped: a reader that has its address may go on reading. As each slot is at least twice as large as the one before, all slots of a
//! place together are no more than twice the last.
//!
//! A forked child has the same addresses with their contents, so that a call of its parent's which it continues may go on reading. The
//! child clears the slots before it uses them itself.

use crate::limits::{INSTANCES_MAX, SEGMENTS_MAX};
use crate::raw::{self, Zeros};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use linux_raw_sys::general as sys;
use poolfs_ipc::memory::HUGE_PAGE;
use poolfs_ipc::segment::{BLOCK, CAPACITY_MAX, OptimisticRead, SegmentRanges, map_length};

/// Bytes of a cache line.
const LINE: usize = 64;

/// Most bytes that are prefetched: a processor fetches about so many lines at a time.
const PREFETCHED_MAX: usize = 512;

struct MappingSlot {
    /// Its base, a multiple of a huge page, and in the lowest bits of how many blocks it is, as a power of two; 0: there is none.
    /// One word, so that nobody takes one slot's base for another one's length.
    word: AtomicUsize,
    /// Whether there may be anything but zeros.
    is_shown: AtomicBool,
}

static SLOTS: [[MappingSlot; SEGMENTS_MAX]; INSTANCES_MAX] =
    [const { [const { MappingSlot::new() }; SEGMENTS_MAX] }; INSTANCES_MAX];

/// What a slot's word says.
#[derive(Clone, Copy)]
struct Site {
    base: usize,
    blocks: u64,
}

impl Site {
    fn of_word(word: usize) -> Option<Self> {
        let base = word & !(HUGE_PAGE - 1);
        (base != 0).then_some(Self { base, blocks: 1 << (word % HUGE_PAGE) })
    }

    fn word(self) -> usize {
        self.base | self.blocks.ilog2() as usize
    }

    fn map(self) -> usize {
        self.base + (self.blocks * BLOCK) as usize
    }

    fn length(self) -> usize {
        self.map() - self.base + map_length(self.blocks)
    }
}

/// Reads what is in a slot of at least `capacity` blocks now.
#[inline]
pub fn content(session: usize, place: usize, capacity: u64) -> Option<OptimisticRead> {
    let slot = SLOTS.get(session)?.get(place)?;
    let site = Site::of_word(slot.word.load(Ordering::Acquire)).filter(|site| capacity <= site.blocks)?;
    // SAFETY: a slot's addresses, where something is mapped at all times; files in it are as long as what is shown of them.
    Some(unsafe { OptimisticRead::new(site.map() as *const u8, site.base as *const u8, capacity) })
}

/// Has the processor fetch what is going to be read there, while the reader still finds out whether it may: of the first
/// [`PREFETCHED_MAX`] bytes the rest follows by itself.
#[inline]
pub fn prefetch(session: usize, place: usize, offset: u64, length: usize) {
    let Some(slot) = SLOTS.get(session).and_then(|slots| slots.get(place)) else { return };
    let Some(site) = Site::of_word(slot.word.load(Ordering::Relaxed)) else { return };
    let start = site.base.wrapping_add(offset as usize);
    fetch(OptimisticRead::word_address(site.map(), offset));
    (0..length.min(PREFETCHED_MAX)).step_by(LINE).for_each(|at| fetch(start.wrapping_add(at)));
}

#[inline]
fn fetch(address: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no effect but on the time of later reads, whatever the address is.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(address as *const i8);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Shows a segment in the slot of a place where nothing is shown; whether it is there now. For one caller at a time.
pub fn show(session: usize, place: usize, ranges: &SegmentRanges) -> bool {
    let Some(slot) = SLOTS.get(session).and_then(|slots| slots.get(place)) else { return false };
    let Some(site) = slot.site(ranges.capacity) else { return false };
    let fits = ranges.data.1 as u64 == ranges.capacity * BLOCK && ranges.map.1 == map_length(ranges.capacity);
    slot.is_shown.store(true, Ordering::Relaxed);
    // SAFETY: both lie in the slot, whose readers tell by the map's words whether they have found what they meant.
    let shown = fits
        && unsafe {
            raw::map_again(ranges.data.0, site.base, ranges.data.1)
                .and_then(|()| raw::map_again(ranges.map.0, site.map(), ranges.map.1))
        }
        .is_ok();
    if !shown {
        slot.hide();
    }
    shown
}

/// Shows nothing in the slot of a place any more. For one caller at a time.
pub fn hide(session: usize, place: usize) {
    SLOTS.get(session).and_then(|slots| slots.get(place)).into_iter().for_each(MappingSlot::hide);
}

/// Shows nothing of a session any more.
pub fn hide_all(session: usize) {
    SLOTS.get(session).into_iter().flatten().for_each(MappingSlot::hide);
}

/// In a forked child: forgets what was its parent's.
pub fn clear_inherited() {
    SLOTS.iter().flatten().for_each(MappingSlot::hide);
}

impl MappingSlot {
    const fn new() -> Self {
        Self { word: AtomicUsize::new(0), is_shown: AtomicBool::new(false) }
    }

    /// The slot, made so large if it is not.
    fn site(&self, capacity: u64) -> Option<Site> {
        let site = Site::of_word(self.word.load(Ordering::Relaxed));
        if let Some(site) = site.filter(|site| capacity <= site.blocks) {
            return Some(site);
        }
        if !(1..=CAPACITY_MAX).contains(&capacity) || is_address_space_limited() {
            return None;
        }
        let mut site = Site { base: 0, blocks: capacity.next_power_of_two() };
        site.base = raw::reserve_zeros(site.length(), HUGE_PAGE, Zeros::Readable).ok()?;
        self.word.store(site.word(), Ordering::Release);
        Some(site)
    }

    /// When zeros cannot be put there, the slot is given up as it is.
    fn hide(&self) {
        let Some(site) = Site::of_word(self.word.load(Ordering::Relaxed)) else { return };
        if !self.is_shown.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: a slot, whose readers take zeros, too.
        if unsafe { raw::replace_by_zeros(site.base, site.length(), Zeros::Readable) }.is_err() {
            self.word.store(0, Ordering::Release);
        }
        self.is_shown.store(false, Ordering::Relaxed);
    }
}

/// Addresses that nothing needs but speed are not to be taken from a program that has few.
fn is_address_space_limited() -> bool {
    raw::limit(sys::RLIMIT_AS).map_or(true, |(soft, _)| soft != u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::PAGE;
    use poolfs_ipc::memory::{Mapping, create_sealed};
    use poolfs_ipc::segment::{Place, SegmentMap, SegmentView};
    use std::os::fd::OwnedFd;

    /// A session of no other test.
    const SESSION: usize = 7;

    struct Content {
        map: SegmentMap,
        view: SegmentView,
    }

    fn content_of(capacity: u64, byte: u8) -> Content {
        let file = |length| -> OwnedFd { create_sealed(c"test", length).expect("memory file") };
        let (map_file, data) = (file(map_length(capacity)), file((capacity * BLOCK) as usize));
        let map = SegmentMap::new(&map_file, capacity).expect("a map");
        let bytes = Mapping::of_segment(&data, (capacity * BLOCK) as usize, true).expect("mapped");
        // SAFETY: the first page of a mapping that nobody else has.
        unsafe { bytes.base().as_ptr().write_bytes(byte, PAGE) };
        map.publish(0, Place::Resident);
        map.set_size(capacity * BLOCK);
        Content { map, view: SegmentView::new(map_file, data, capacity).expect("a view") }
    }

    fn first_byte(place: usize, capacity: u64) -> Option<u8> {
        let mut byte = 0;
        // SAFETY: one byte.
        let count = unsafe { content(SESSION, place, capacity)?.read(0, &raw mut byte, 1, || true) };
        count.map(|_| byte)
    }

    #[test]
    fn what_is_shown_is_read_until_it_is_hidden_and_nothing_is_unmapped() {
        let (small, large) = (content_of(1024, 3), content_of(4096, 5));
        let ranges = |content: &Content| content.view.ranges();
        assert_eq!(first_byte(1, 1), None, "there is no slot");
        assert!(show(SESSION, 1, &ranges(&small)));
        assert_eq!((first_byte(1, 1024), first_byte(1, 1025), first_byte(2, 1024)), (Some(3), None, None));
        let before = content(SESSION, 1, 1024).expect("a slot");
        hide(SESSION, 1);
        assert_eq!(first_byte(1, 1024), None);
        assert!(show(SESSION, 1, &ranges(&large)));
        assert_eq!(first_byte(1, 4096), Some(5));
        let mut byte = 0;
        // SAFETY: one byte; the slot that was left is mapped still.
        assert_eq!(unsafe { before.read(0, &raw mut byte, 1, || true) }, None, "it is in another slot");
        hide_all(SESSION);
        assert_eq!(first_byte(1, 4096), None);

        // The larger slot is large enough, and a part of it is none of the segment's.
        assert!(show(SESSION, 1, &ranges(&small)));
        assert_eq!((first_byte(1, 1024), first_byte(1, 4096)), (Some(3), Some(3)));
        drop(small.map);
        assert_eq!(first_byte(1, 1024), None, "it has ended");
        clear_inherited();
        assert!(!SLOTS[SESSION][1].is_shown.load(Ordering::Relaxed));
        assert!(!show(INSTANCES_MAX, 0, &ranges(&large)) && !show(SESSION, SEGMENTS_MAX, &ranges(&large)));
        let wrong = SegmentRanges { capacity: 8192, ..ranges(&large) };
        assert!(!show(SESSION, 2, &wrong));
        assert_eq!(first_byte(2, 1), None);
    }
}
