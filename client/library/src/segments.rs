//! Segments that this process reads by itself: the places where a session has them mapped.
//!
//! A place belongs to its session. It is filled by one thread at a time; whoever uses the session may read what a place holds,
//! and what it held is unmapped only when, after it was taken out, no other call used the session.

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use poolfs_ipc::hold::{Frame, Hold};
use poolfs_ipc::segment::SegmentView;
use poolfs_ipc::wire::Grant;

/// Segments one session has at a time: a handle has its place by its number.
const SEGMENTS_MAX: usize = 128;

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
    handle: AtomicU64,
    view: UnsafeCell<MaybeUninit<SegmentView>>,
}

/// The segments of one session. All zeros: none.
#[repr(C)]
pub struct Segments {
    maker: Hold,
    arrived: AtomicU32,
    places: [Place; SEGMENTS_MAX],
}

// SAFETY: a place's view is written and dropped only by who holds `maker` or takes the session down, while the place is not
// LIVE and no other call uses the session; it is read by calls that use the session and found it LIVE.
unsafe impl Sync for Segments {}

/// A segment, readable while the session is used.
#[derive(Clone, Copy)]
pub struct Segment<'a> {
    place: &'a Place,
    /// The bytes.
    pub view: &'a SegmentView,
    /// The lease.
    pub lease: u32,
    /// Its epoch when it was given.
    pub epoch: u32,
    /// What tells it from all others of the session, before and after it; never 0.
    pub number: u32,
}

impl Segment<'_> {
    /// It is over: from here on requests are made.
    pub fn end(&self) {
        self.place.state.compare_exchange(LIVE, ENDED, Ordering::SeqCst, Ordering::Relaxed).ok();
    }
}

/// The right to fill a place.
pub struct Filling<'a> {
    segments: &'a Segments,
    place: &'a Place,
}

impl Segments {
    fn place(&self, handle: u64) -> &Place {
        &self.places[handle as usize % SEGMENTS_MAX]
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
        let view = unsafe { (*place.view.get()).assume_init_ref() };
        Some(Segment { place, view, lease, epoch, number })
    }

    /// Takes out what is in the place of a handle, so that it can be filled anew. `is_alone` says whether no other call uses
    /// the session. Nothing when the place cannot be had now.
    pub fn begin(&self, handle: u64, frame: Frame, is_alone: impl Fn() -> bool) -> Option<Filling<'_>> {
        if !self.maker.take_or_recover(frame) {
            return None;
        }
        let filling = Filling { segments: self, place: self.place(handle) };
        let state = &filling.place.state;
        if state.load(Ordering::Relaxed) == EMPTY {
            return Some(filling);
        }
        state.store(ENDED, Ordering::SeqCst);
        if !is_alone() {
            return None;
        }
        // SAFETY: it is not LIVE, and nobody uses the session who may have seen it so.
        unsafe { filling.place.clear() };
        Some(filling)
    }

    /// Takes out everything; `is_inherited`: what is mapped at its addresses is not the session's.
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
        filled.flat_map(|place| unsafe { (*place.view.get()).assume_init_ref() }.ranges())
    }
}

impl Place {
    /// Unmaps what is in the place.
    ///
    /// # Safety
    /// It is not EMPTY, and nobody uses it.
    unsafe fn clear(&self) {
        self.state.store(EMPTY, Ordering::SeqCst);
        // SAFETY: as this function's.
        unsafe { (*self.view.get()).assume_init_drop() };
    }
}

impl Filling<'_> {
    /// Fills the place.
    pub fn put(self, handle: u64, grant: &Grant, view: SegmentView) {
        self.place.handle.store(handle, Ordering::Relaxed);
        self.place.lease.store(grant.lease, Ordering::Relaxed);
        self.place.epoch.store(grant.epoch, Ordering::Relaxed);
        let arrived = self.segments.arrived.fetch_add(1, Ordering::Relaxed);
        self.place.number.store(arrived.wrapping_add(1).max(1), Ordering::Relaxed);
        // SAFETY: the place is EMPTY, and `maker` is held.
        unsafe { (*self.place.view.get()).write(view) };
        self.place.state.store(LIVE, Ordering::SeqCst);
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        self.segments.maker.give_back();
    }
}
