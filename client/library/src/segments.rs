//! The segment table of a session: segments that this process has mapped and reads without a request.
//!
//! One thread at a time fills a place of the table. Every call that uses the session may read the segment of a place. A segment that is
//! taken out is unmapped only when all calls have ended that used the session at that time: each removal begins an *era*, and calls record
//! in which one they begin.

use crate::descriptors::Witness;
use crate::limits::{INSTANCES_MAX, SEGMENTS_MAX};
use crate::mapping_slots;
use crate::raw;
use crate::window::Area;
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use poolfs_ipc::hold::{Frame, Hold};
use poolfs_ipc::segment::{FileNotice, Noted, SegmentRanges, SegmentView};
use poolfs_ipc::wire::{Grant, WireAttributes, owners};

/// The longest that attributes count which are not noted for good. What is noted for longer is by another clock than ours, as
/// another time namespace has one.
const NOTED_LEFT_NS_MAX: u64 = 1_100_000_000;

const EMPTY: u32 = 0;
const LIVE: u32 = 1;
const ENDED: u32 = 2;

#[repr(C)]
struct Place {
    state: AtomicU32,
    lease: AtomicU32,
    epoch: AtomicU32,
    /// The number of its arrival.
    number: AtomicU32,
    /// Device number of the mount, major in the upper half.
    device: AtomicU64,
    handle: AtomicU64,
    /// The era that began when its segment was taken out; 0: it has not been.
    ended: AtomicU64,
    /// Blocks that can be read in the place's room; 0: none.
    capacity: AtomicU64,
    owners: Owners,
    memory: UnsafeCell<MaybeUninit<Memory>>,
}

/// What is mapped of a segment.
struct Memory {
    view: SegmentView,
    notice: FileNotice,
}

/// The segments of one session. All zeros: none.
#[repr(C)]
pub struct Segments {
    maker: Hold,
    arrived: AtomicU32,
    era: AtomicU64,
    places: [Place; SEGMENTS_MAX],
}

// SAFETY: a place's memory is written and dropped only by who holds `maker` or takes the session down, while the place is not
// LIVE and no other call uses the session; it is read by calls that use the session and found it LIVE.
unsafe impl Sync for Segments {}

/// A segment, readable while the session is used.
#[derive(Clone, Copy)]
pub struct Segment<'a> {
    place: &'a Place,
    /// The bytes.
    pub view: &'a SegmentView,
    /// The attributes.
    pub notice: &'a FileNotice,
    /// The lease.
    pub lease: u32,
    /// Its epoch when it was given.
    pub epoch: u32,
    /// What tells it from all others of the session, before and after it; never 0.
    pub number: u32,
}

/// Owners of the host, as whom this process sees them, and a sum of both: two threads may note them at a time.
#[repr(C)]
#[derive(Default)]
struct Owners([AtomicU64; 3]);

impl Owners {
    /// Not 0 where both are.
    fn sum(owners: u64, seen: u64) -> u64 {
        // FNV-1a, a word at a time.
        const PRIME: u64 = 0x0000_0100_0000_01b3;
        ((0xcbf2_9ce4_8422_2325 ^ owners).wrapping_mul(PRIME) ^ seen).wrapping_mul(PRIME)
    }

    fn seen_as(&self, owners: u64) -> Option<u64> {
        let [known, seen, sum] = self.0.each_ref().map(|word| word.load(Ordering::Relaxed));
        (known == owners && sum == Self::sum(known, seen)).then_some(seen)
    }

    fn note(&self, owners: u64, seen: u64) {
        for (word, new) in self.0.iter().zip([owners, seen, Self::sum(owners, seen)]) {
            word.store(new, Ordering::Relaxed);
        }
    }
}

impl Segment<'_> {
    /// What the notice says, as this process sees it, if it counts now.
    pub fn attributes(&self) -> Option<WireAttributes> {
        self.place.as_seen(self.notice.noted()?)
    }

    /// Notes as whom this process sees owners of the host.
    pub fn note_owners(&self, owners: u64, seen: u64) {
        self.place.owners.note(owners, seen);
    }

    /// It is over: from here on requests are made.
    pub fn end(&self) {
        self.place.state.compare_exchange(LIVE, ENDED, Ordering::SeqCst, Ordering::Relaxed).ok();
    }
}

/// Bits of a segment's number that say which session's it is.
const SESSION_BITS: u32 = INSTANCES_MAX.ilog2();

const _: () = assert!(INSTANCES_MAX.is_power_of_two());

/// The place of a handle's segment.
fn place_of(handle: u64) -> usize {
    handle as usize % SEGMENTS_MAX
}

/// The right to fill a place.
pub struct Filling<'a> {
    receiving: Receiving<'a>,
    place: &'a Place,
}

/// The right to receive what the service sends over the socket: one thread's at a time.
pub struct Receiving<'a>(&'a Segments);

impl Segments {
    fn place(&self, handle: u64) -> &Place {
        &self.places[place_of(handle)]
    }

    /// The attributes of the file behind a handle, and the device number of its mount, for a caller that holds nothing: while
    /// nothing has happened since `witness` that could make them others'.
    #[inline]
    pub fn optimistic_stat(&self, area: Area, handle: u64, witness: Witness) -> Option<(WireAttributes, (u32, u32))> {
        let place = self.place(handle);
        if !place.has(handle, witness) {
            return None;
        }
        let (lease, epoch) = (place.lease.load(Ordering::Relaxed), place.epoch.load(Ordering::Relaxed));
        let noted = area.notice_at(place_of(handle))?.noted(area.lease(lease)?, epoch, witness.closings)?;
        let (attributes, device) = (place.as_seen(noted)?, place.device.load(Ordering::Relaxed));
        // Whoever takes the segment out says so before other things are mapped where it was.
        fence(Ordering::Acquire);
        place.has(handle, witness).then_some((attributes, ((device >> 32) as u32, device as u32)))
    }

    /// Has the processor fetch what is going to be read.
    #[inline]
    pub fn prefetch(&self, session: usize, handle: u64, offset: u64, length: usize) {
        mapping_slots::prefetch(session, place_of(handle), offset, length);
    }

    /// Reads up to `length` bytes of the file behind a handle, on the terms of [`Segments::optimistic_stat`]; returns how many. Nothing when
    /// it takes more than that.
    ///
    /// # Safety
    /// `target` must be writable for `length` bytes, and lie outside of all that is shown.
    #[inline]
    pub unsafe fn optimistic_read(
        &self,
        (session, area): (usize, Area),
        (handle, witness): (u64, Witness),
        offset: u64,
        (target, length): (*mut u8, usize),
    ) -> Option<usize> {
        let place = self.place(handle);
        if !place.has(handle, witness) {
            return None;
        }
        let (lease, epoch) = (area.lease(place.lease.load(Ordering::Relaxed))?, place.epoch.load(Ordering::Relaxed));
        let content = mapping_slots::content(session, place_of(handle), place.capacity.load(Ordering::Relaxed))?;
        // SAFETY: the caller's promise.
        let count = unsafe { content.read(offset, target, length, || lease.holds(epoch, witness.closings)) }?;
        // As in `optimistic_stat`.
        fence(Ordering::Acquire);
        place.has(handle, witness).then_some(count)
    }

    /// The segment of a handle, for a caller that uses the session.
    #[inline]
    pub fn of(&self, handle: u64) -> Option<Segment<'_>> {
        let place = self.place(handle);
        if place.state.load(Ordering::SeqCst) != LIVE || place.handle.load(Ordering::Relaxed) != handle {
            return None;
        }
        let (lease, epoch) = (place.lease.load(Ordering::Relaxed), place.epoch.load(Ordering::Relaxed));
        let number = place.number.load(Ordering::Relaxed);
        // SAFETY: written before the place was LIVE, which the caller, a user of the session, has seen.
        let Memory { view, notice } = unsafe { (*place.memory.get()).assume_init_ref() };
        Some(Segment { place, view, notice, lease, epoch, number })
    }

    /// The era. Sequentially consistent: a call that finds a place LIVE when it has noted an era is seen by whoever ends a later one.
    #[inline]
    pub fn era(&self) -> u64 {
        self.era.load(Ordering::SeqCst)
    }

    /// Nothing while another thread has it.
    pub fn receiving(&self, frame: Frame) -> Option<Receiving<'_>> {
        self.maker.take_or_recover(frame).then(|| Receiving(self))
    }

    /// Takes out what is in the place of a handle, so that it can be filled anew. `is_over` says whether no other call uses
    /// the session that began before an era. Nothing when the place cannot be had yet.
    pub fn begin(
        &self,
        handle: u64,
        frame: Frame,
        (session, area): (usize, Option<Area>),
        is_over: impl Fn(u64) -> bool,
    ) -> Option<Filling<'_>> {
        let filling = Filling { receiving: self.receiving(frame)?, place: self.place(handle) };
        let state = &filling.place.state;
        if state.load(Ordering::Relaxed) == EMPTY {
            return Some(filling);
        }
        let mut ended = filling.place.ended.load(Ordering::Relaxed);
        if ended == 0 {
            state.store(ENDED, Ordering::SeqCst);
            ended = self.era.fetch_add(1, Ordering::SeqCst) + 1;
            filling.place.ended.store(ended, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        if !is_over(ended) {
            return None;
        }
        area.into_iter().for_each(|area| area.hide_notice(place_of(handle)));
        mapping_slots::hide(session, place_of(handle));
        // SAFETY: it is not LIVE, and nobody uses the session who may have seen it so.
        unsafe { filling.place.clear() };
        Some(filling)
    }

    /// Takes out everything, of which nothing is shown any more; `is_inherited`: what is mapped at its addresses is not the session's.
    ///
    /// # Safety
    /// Nobody uses the session.
    pub unsafe fn clear(&self, is_inherited: bool) {
        for place in &self.places {
            if place.state.load(Ordering::Relaxed) == EMPTY {
                continue;
            }
            if is_inherited {
                place.state.store(EMPTY, Ordering::Relaxed);
            } else {
                // SAFETY: the caller's promise.
                unsafe { place.clear() };
            }
        }
        self.maker.give_back();
    }

    /// The memory of all segments.
    pub fn ranges(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let filled = self.places.iter().filter(|place| place.state.load(Ordering::SeqCst) != EMPTY);
        // SAFETY: written before the place was filled; the caller uses the session, or all its threads are stopped.
        let memory = filled.map(|place| unsafe { (*place.memory.get()).assume_init_ref() });
        memory.flat_map(|memory| {
            let SegmentRanges { map, data, .. } = memory.view.ranges();
            [map, data, memory.notice.range()]
        })
    }
}

impl Place {
    /// Whether the segment with the witness's number is there, which no other one of any session has.
    #[inline]
    fn has(&self, handle: u64, witness: Witness) -> bool {
        let is_live = self.state.load(Ordering::Acquire) == LIVE;
        let number = self.number.load(Ordering::Relaxed);
        is_live && number == witness.segment && self.handle.load(Ordering::Relaxed) == handle
    }

    /// What is noted, as this process sees it, if it counts now.
    #[inline]
    fn as_seen(&self, Noted { attributes, until_ns }: Noted) -> Option<WireAttributes> {
        let is_left = || until_ns.checked_sub(raw::coarse_time_ns()).is_some_and(|left| left <= NOTED_LEFT_NS_MAX);
        if until_ns != u64::MAX && !is_left() {
            return None;
        }
        let seen = self.owners.seen_as(owners(attributes.uid, attributes.gid))?;
        Some(WireAttributes { uid: (seen >> 32) as u32, gid: seen as u32, ..attributes })
    }

    /// Unmaps what is in the place.
    ///
    /// # Safety
    /// It is not EMPTY, and nobody uses it.
    unsafe fn clear(&self) {
        self.state.store(EMPTY, Ordering::SeqCst);
        // SAFETY: as this function's.
        unsafe { (*self.memory.get()).assume_init_drop() };
    }
}

impl Filling<'_> {
    /// Fills the place.
    ///
    /// It is shown in `area`, if there is one: what belongs to `session`, of mounts with that device number.
    pub fn put(
        self,
        (handle, grant): (u64, &Grant),
        (view, notice): (SegmentView, FileNotice),
        (session, area, device): (usize, Option<Area>, (u32, u32)),
    ) {
        self.place.handle.store(handle, Ordering::Relaxed);
        self.place.ended.store(0, Ordering::Relaxed);
        self.place.lease.store(grant.lease, Ordering::Relaxed);
        self.place.epoch.store(grant.epoch, Ordering::Relaxed);
        let arrived = self.receiving.0.arrived.fetch_add(1, Ordering::Relaxed);
        let number = arrived.wrapping_add(1) << SESSION_BITS | session as u32;
        self.place.number.store(number.max(1), Ordering::Relaxed);
        self.place.device.store(u64::from(device.0) << 32 | u64::from(device.1), Ordering::Relaxed);
        area.into_iter().for_each(|area| area.show_notice(place_of(handle), notice.range()));
        // Without an area nothing is read optimistically.
        let ranges = area.map(|_| view.ranges());
        let capacity = ranges
            .filter(|ranges| mapping_slots::show(session, place_of(handle), ranges))
            .map_or(0, |ranges| ranges.capacity);
        self.place.capacity.store(capacity, Ordering::Relaxed);
        // SAFETY: the place is EMPTY, and `maker` is held.
        unsafe { (*self.place.memory.get()).write(Memory { view, notice }) };
        self.place.state.store(LIVE, Ordering::SeqCst);
    }
}

impl Drop for Receiving<'_> {
    fn drop(&mut self) {
        self.0.maker.give_back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_known_as_a_pair_or_not_at_all() {
        let owners = Owners::default();
        assert_eq!((owners.seen_as(0), owners.seen_as(5)), (None, None));
        owners.note(5, 0);
        assert_eq!((owners.seen_as(0), owners.seen_as(5)), (None, Some(0)));
        // Another thread has come as far as this.
        owners.0[0].store(6, Ordering::Relaxed);
        assert_eq!((owners.seen_as(5), owners.seen_as(6)), (None, None));
    }
}
