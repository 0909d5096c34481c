//! The window: addresses that are always mapped, at which leases and notices are read without taking a reference.
//!
//! Each slot for a session has an area of the window: the words of its leases, the page where reads are counted, and a page for the notice
//! of each of its segments. They are mapped there a second time when they come, and zeros replace them when they go. So a reader finds
//! zeros, or what is there now, and has to tell by other words whether that is what it looks for. A count that is made here may be lost.
//!
//! A forked child has the same addresses with their contents, so that a call of its parent's which it continues may go on reading. The
//! child clears the window before it uses it itself.

use crate::limits::{INSTANCES_MAX, SEGMENTS_MAX};
use crate::raw::{self, Zeros};
use core::sync::atomic::{AtomicUsize, Ordering};
use poolfs_ipc::area::{COUNTS_LENGTH, DirectReads};
use poolfs_ipc::segment::{NOTICE_LENGTH, OptimisticLease, OptimisticNotice};

/// Bytes for the words of leases; where there are more of them, nothing is read here.
const LEASES_BYTES: usize = 4 * raw::PAGE;
const AREA_BYTES: usize = LEASES_BYTES + COUNTS_LENGTH + SEGMENTS_MAX * NOTICE_LENGTH;
const WINDOW_BYTES: usize = INSTANCES_MAX * AREA_BYTES;

/// Where it begins, the same in every child; 0: there is none.
static BASE: AtomicUsize = AtomicUsize::new(0);

/// One session's part of the window.
#[derive(Clone, Copy)]
pub struct Area {
    base: usize,
}

/// The area of a place for a session, if there is a window.
#[inline]
pub fn area(session: usize) -> Option<Area> {
    let base = BASE.load(Ordering::Acquire);
    (base != 0 && session < INSTANCES_MAX).then_some(Area { base: base + session * AREA_BYTES })
}

/// Makes the window, unless there is one.
pub fn make() {
    if BASE.load(Ordering::Acquire) != 0 {
        return;
    }
    let Ok(fresh) = raw::reserve_zeros(WINDOW_BYTES, raw::PAGE, Zeros::Writable) else { return };
    if BASE.compare_exchange(0, fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: nobody has seen it.
        unsafe { raw::unmap(fresh as *mut u8, WINDOW_BYTES) };
    }
}

/// In a forked child: forgets what was its parent's.
pub fn clear_inherited() {
    let base = BASE.load(Ordering::Acquire);
    if base != 0 && !clear(base, WINDOW_BYTES) {
        BASE.store(0, Ordering::Release);
    }
}

/// Puts zeros into a part of the window.
fn clear(address: usize, length: usize) -> bool {
    // SAFETY: a part of the window, where only atomics are used.
    unsafe { raw::replace_by_zeros(address, length, Zeros::Writable) }.is_ok()
}

impl Area {
    /// Shows the words of the session's leases, if there are not too many.
    pub fn show_leases(&self, (address, length): (usize, usize)) {
        if length <= LEASES_BYTES {
            // SAFETY: a part of the window, where only atomics are read. When it fails there are zeros.
            unsafe { raw::map_again(address, self.base, length) }.ok();
        }
    }

    /// Shows the page where the session's reads are counted.
    pub fn show_counts(&self, (address, length): (usize, usize)) {
        if length == COUNTS_LENGTH {
            // SAFETY: a part of the window, where only atomics are used. When it fails there are zeros.
            unsafe { raw::map_again(address, self.base + LEASES_BYTES, length) }.ok();
        }
    }

    /// Shows nothing of the session. When that fails nothing at all is shown any more.
    pub fn hide(&self) {
        if !clear(self.base, AREA_BYTES) {
            BASE.store(0, Ordering::Release);
        }
    }

    /// Shows the notice of the segment in this place.
    pub fn show_notice(&self, place: usize, (address, length): (usize, usize)) {
        if length == NOTICE_LENGTH && place < SEGMENTS_MAX {
            // SAFETY: a part of the window, where only atomics are read. When it fails there are zeros.
            unsafe { raw::map_again(address, self.notice(place), length) }.ok();
        }
    }

    /// Shows none there. When that fails nothing at all is shown any more.
    pub fn hide_notice(&self, place: usize) {
        if place < SEGMENTS_MAX && !clear(self.notice(place), NOTICE_LENGTH) {
            BASE.store(0, Ordering::Release);
        }
    }

    fn notice(&self, place: usize) -> usize {
        self.base + LEASES_BYTES + COUNTS_LENGTH + place * NOTICE_LENGTH
    }

    /// What is there now of a lease.
    #[inline]
    pub fn lease(&self, lease: u32) -> Option<OptimisticLease> {
        // SAFETY: it lies in the window, where something is mapped at all times; files in it are as long as the pages.
        (OptimisticLease::leases_length(lease) <= LEASES_BYTES)
            .then(|| unsafe { OptimisticLease::new(self.base as *const u8, lease) })
    }

    /// The notice that is in a place now.
    #[inline]
    pub fn notice_at(&self, place: usize) -> Option<OptimisticNotice> {
        // SAFETY: as in `lease`.
        (place < SEGMENTS_MAX).then(|| unsafe { OptimisticNotice::new(self.notice(place) as *const u8) })
    }

    /// Where reads are counted, for somebody.
    #[inline]
    pub fn counts(&self) -> DirectReads<'static> {
        // SAFETY: it lies in the window, where something is mapped at all times that can be written.
        unsafe { DirectReads::at((self.base + LEASES_BYTES) as *const u8) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_ipc::segment::{FileNotice, Leases, Noted, leases_length};
    use poolfs_ipc::wire::WireAttributes;
    use std::fs::File;
    use std::os::fd::FromRawFd;
    use std::os::unix::fs::FileExt;

    fn file(length: usize) -> File {
        // SAFETY: a name that ends, and a new descriptor that is this file's alone.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC)) };
        file.set_len(length as u64).expect("sized");
        file
    }

    #[test]
    fn what_is_shown_is_seen_where_it_is_until_it_is_hidden() {
        make();
        let (area, other) = (area(0).expect("a window"), area(1).expect("a window"));
        let (leases_file, notice_file) = (file(leases_length(8)), file(NOTICE_LENGTH));
        // Somebody lives.
        leases_file.write_all_at(&1u32.to_ne_bytes(), 0).expect("written");
        let leases = Leases::new(&leases_file, 8, false).expect("leases");
        let notice = FileNotice::new(&notice_file, true).expect("a notice");
        let noted = Noted { attributes: WireAttributes { inode: 7, ..WireAttributes::default() }, until_ns: 1 };
        notice.note(&noted);
        let seen =
            |area: Area, place| area.notice_at(place).expect("inside").noted(area.lease(5).expect("inside"), 0, 0);
        assert_eq!(seen(area, 3), None);
        area.show_leases(leases.range());
        area.show_notice(3, notice.range());
        assert_eq!((seen(area, 3), seen(area, 2), seen(other, 3)), (Some(noted), None, None));
        // It needs nothing of what it was mapped from.
        drop(leases);
        notice.forget();
        assert_eq!(seen(area, 3), None);
        notice.note(&noted);
        drop(notice);
        assert_eq!(seen(area, 3), Some(noted));
        area.hide_notice(3);
        assert_eq!(seen(area, 3), None);
        let notice = FileNotice::new(&notice_file, true).expect("a notice");
        area.show_notice(3, notice.range());
        assert_eq!(seen(area, 3), Some(noted));
        area.hide();
        assert_eq!(seen(area, 3), None);
        area.show_notice(SEGMENTS_MAX, notice.range());
        assert!(area.notice_at(SEGMENTS_MAX).is_none() && area.lease(1 << 20).is_none());
        assert!(super::area(INSTANCES_MAX).is_none());
    }
}
