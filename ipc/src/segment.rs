//! Segments: cached content that clients read without a request. A file's *segment* has its cached bytes and its *map* says which
//! of its blocks are there. Both are files of the pool's tmpfs, which clients get through a read-only mount.
//!
//! ```text
//! map:    0x000 magic 'PFSM', layout version   0x008 capacity in blocks   0x040 state   0x080 size   0x1000 words, one a block
//! word:   [1:0] place: 0 ABSENT 1 RESIDENT 3 ZERO    [2] BUSY (ask)    [3] 0    [31:4] generation
//! leases: 0x000 life: a robust mutex that the service holds   0x040 words, one a lease: [31:0] its epoch [63:32] closings
//! notice: 0x000 sequence   0x008 what it says: the file's attributes, and until when they count
//! ```
//!
//! Every word here is written by the service only. A word's generation advances at every change of its place. A reader looks at
//! the words, copies, and looks again: when none has changed, what it copied was there all the time. Before bytes are taken away,
//! their words are changed ([`retract`]).
//!
//! A *lease* says whether the segment still is the file's content for one instance. It is revoked before the file's content moves
//! elsewhere (copy-up), or may be changed by the kernel alone (a shared mapping). All leases end with the service: the kernel
//! itself marks the mutex of a dead process (`get_robust_list(2)`), so that nobody needs a system call to know.
//!
//! A lease's word also counts how often descriptors of the file are closed, in whatever way. The kernel has the service answer
//! (`FLUSH`) before a close is done. So a client that has verified what a descriptor stands for needs no system call to know that
//! it still does, as long as no close was counted since.
//!
//! The *notice* of a lease ([`crate::notice`]) states the file's attributes, while the service vouches for them. It is a file of
//! its own: a client that may read one file learns nothing of others.

use crate::sync::{AtomicU32, Ordering, fence};

const PLACE: u32 = 3;
const BUSY: u32 = 4;
const GENERATION: u32 = 16;

/// Where a block's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Place {
    /// not in the cache: ask
    Absent = 0,
    /// in the segment
    Resident = 1,
    /// nowhere: they are zeros
    Zero = 3,
}

/// What a word said before its block was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Look(u32);

impl Look {
    /// Whether the block is zeros that no file has.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self.is(Place::Zero)
    }

    /// Whether its bytes are there.
    #[must_use]
    pub fn is(self, place: Place) -> bool {
        self.0 & PLACE == place as u32
    }
}

/// The reader's first step: what can be copied, if anything can.
#[must_use]
pub fn look(word: &AtomicU32) -> Option<Look> {
    let now = word.load(Ordering::Acquire);
    let is_there = [Place::Resident, Place::Zero].map(|place| place as u32).contains(&(now & PLACE));
    (is_there && now & BUSY == 0).then_some(Look(now))
}

/// The reader's last step, after [`copied`]: whether what it copied was the block.
#[must_use]
pub fn is_unchanged(word: &AtomicU32, before: Look) -> bool {
    word.load(Ordering::Relaxed) == before.0
}

/// Between the copy and the second looks.
pub fn copied() {
    fence(Ordering::Acquire);
}

/// The service's last step: the block's bytes are in place.
pub fn publish(word: &AtomicU32, place: Place) {
    let now = word.load(Ordering::Relaxed);
    if now & (PLACE | BUSY) != place as u32 {
        word.store(next(now) | place as u32, Ordering::Release);
    }
}

/// The service's first step: nobody who looks from now on uses the block. To be followed by [`retracted`].
pub fn retract(word: &AtomicU32) {
    let now = word.load(Ordering::Relaxed);
    if now & PLACE != Place::Absent as u32 {
        word.store(next(now) | BUSY, Ordering::Relaxed);
    }
}

/// Between the words and what happens to the bytes.
pub fn retracted() {
    fence(Ordering::SeqCst);
}

fn next(word: u32) -> u32 {
    (word & !(GENERATION - 1)).wrapping_add(GENERATION)
}

#[cfg(not(loom))]
pub use mapped::{
    BLOCK, CAPACITY_MAX, FileNotice, LEASES_MAX, LeaseWord, Leases, NOTICE_LENGTH, Noted, Read, SegmentMap,
    SegmentRanges, SegmentView, capacity_for, leases_length, map_length,
};
#[cfg(all(feature = "std", not(loom)))]
pub use mounted::{Life, collapse, is_used_by_others, read_only_clone};
#[cfg(not(loom))]
pub use optimistic_read::{OptimisticLease, OptimisticNotice, OptimisticRead};

#[cfg(not(loom))]
mod optimistic_read;

#[cfg(not(loom))]
mod mapped;

#[cfg(all(feature = "std", not(loom)))]
mod mounted;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memory::PAGE;
    use crate::wire::WireAttributes;
    use poolfs_types::Errno;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::FileExt;

    const CAPACITY: u64 = 1024;

    struct Served {
        map: SegmentMap,
        data: std::fs::File,
        view: SegmentView,
    }

    fn file(length: usize) -> OwnedFd {
        let file = memfd_create(c"test", MemfdFlags::CLOEXEC).expect("a memory file");
        ftruncate(&file, length as u64).expect("truncated");
        file
    }

    fn served() -> Served {
        let (map_file, data) = (file(map_length(CAPACITY)), file(CAPACITY as usize * PAGE));
        let map = SegmentMap::new(&map_file, CAPACITY).expect("a map");
        let view = SegmentView::new(&map_file, &data, CAPACITY).expect("a view");
        Served { map, data: data.into(), view }
    }

    impl Served {
        fn read(&self, offset: u64, length: usize) -> (Vec<u8>, bool) {
            let mut bytes = vec![9; length];
            // SAFETY: the vector has that many bytes.
            let read = unsafe { self.view.read(offset, bytes.as_mut_ptr(), length, || true) };
            bytes.truncate(read.count);
            (bytes, read.is_whole)
        }
    }

    #[test]
    fn what_is_there_is_read_and_the_rest_is_asked_for() {
        let served = served();
        assert_eq!(served.read(0, 10), (vec![], true), "an empty file");
        served.data.write_all_at(&[1; 2 * PAGE], 0).expect("written");
        served.map.publish(0, Place::Resident);
        served.map.publish(1, Place::Resident);
        served.map.publish(2, Place::Zero);
        served.map.set_size(3 * PAGE as u64 + 100);
        assert_eq!(served.read(5, 10), (vec![1; 10], true));
        let (bytes, whole) = served.read(PAGE as u64, 3 * PAGE);
        assert_eq!((bytes.len(), whole), (2 * PAGE, false), "the last block is absent");
        assert!(bytes[..PAGE].iter().all(|&byte| byte == 1) && bytes[PAGE..].iter().all(|&byte| byte == 0));
        served.map.publish(3, Place::Zero);
        assert_eq!(served.read(3 * PAGE as u64 + 90, 50), (vec![0; 10], true), "to the end of the file");
        assert_eq!(served.read(u64::MAX - 3, 50), (vec![], true), "behind it");
        served.map.retract(0..1);
        assert_eq!(served.read(0, 10), (vec![], false));
        served.map.publish(0, Place::Resident);
        assert_eq!(served.read(0, 1), (vec![1], true));
        drop(served.map);
        let mut byte = 7;
        // SAFETY: one byte.
        let read = unsafe { served.view.read(0, &raw mut byte, 1, || true) };
        assert_eq!((read, byte), (Read { count: 0, is_whole: false }, 7));
    }

    #[test]
    fn without_a_lease_nothing_is_read() {
        let served = served();
        served.map.publish(0, Place::Zero);
        served.map.set_size(10);
        let leases_file = file(leases_length(3));
        let own = Leases::new(&leases_file, 3, true).expect("leases");
        let theirs = Leases::new(&leases_file, 3, false).expect("leases");
        let epoch = own.look(2).expect("a lease").epoch;
        let seen = || theirs.look(2).expect("a lease");
        let mut bytes = [1; 10];
        // SAFETY: ten bytes.
        let mut read = || unsafe { served.view.read(0, bytes.as_mut_ptr(), 10, || seen().epoch == epoch) };
        assert_eq!(read(), Read { count: 10, is_whole: true });
        own.count_closing(2);
        assert_eq!((read(), seen().closings), (Read { count: 10, is_whole: true }, 1));
        own.revoke(2);
        assert_eq!((read(), seen().closings), (Read { count: 0, is_whole: false }, 1));
        assert_eq!((theirs.look(3), own.look(usize::MAX)), (None, None));
    }

    #[test]
    fn attributes_are_seen_as_long_as_somebody_vouches_for_them() {
        let (file, short) = (file(NOTICE_LENGTH), file(1));
        let own = FileNotice::new(&file, true).expect("a notice");
        let theirs = FileNotice::new(&file, false).expect("a notice");
        let noted = |inode| Noted {
            attributes: WireAttributes { inode, seconds: [-1, 2, i64::MAX], ..WireAttributes::default() },
            until_ns: inode + 1,
        };
        assert_eq!(theirs.noted(), None);
        own.note(&noted(1));
        own.note(&noted(2));
        assert_eq!(theirs.noted(), Some(noted(2)));
        own.forget();
        assert_eq!(theirs.noted(), None);
        assert_eq!(FileNotice::new(short, false).err(), Some(Errno::EPROTO));
    }

    #[test]
    fn leases_live_as_long_as_the_thread_that_says_so() {
        let file = file(leases_length(1));
        let seen = Leases::new(&file, 1, false).expect("leases");
        assert!(!seen.is_live(), "nobody has begun");
        let own = Leases::new(&file, 1, true).expect("leases");
        let (begun, end) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                // As a thread that is killed: it does not let go.
                let _life = std::mem::ManuallyDrop::new(own.live().expect("a life"));
                begun.wait();
                end.wait();
            });
            begun.wait();
            assert!(seen.is_live());
            end.wait();
            thread.join().expect("it ends");
        });
        // The kernel marks it after the thread was joined at the latest.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while seen.is_live() {
            assert!(std::time::Instant::now() < deadline, "the thread is gone");
            std::thread::yield_now();
        }
    }

    #[test]
    fn files_that_are_too_short_or_no_maps_are_refused() {
        let (short, data) = (file(map_length(CAPACITY) - PAGE), file(CAPACITY as usize * PAGE));
        assert_eq!(SegmentView::new(&short, &data, CAPACITY).err(), Some(Errno::EPROTO));
        let empty = file(map_length(CAPACITY));
        assert_eq!(SegmentView::new(&empty, &data, CAPACITY).err(), Some(Errno::EPROTO));
        assert_eq!(SegmentView::new(&empty, &data, 0).err(), Some(Errno::EPROTO));
        assert_eq!(SegmentMap::new(&empty, CAPACITY_MAX + 1).err(), Some(Errno::EINVAL));
        let _map = SegmentMap::new(&empty, CAPACITY).expect("a map");
        assert_eq!(SegmentView::new(&empty, file(0), CAPACITY).err(), Some(Errno::EPROTO));
    }

    #[test]
    fn nothing_is_read_behind_the_end_of_a_segment() {
        let (map_file, data) = (file(map_length(CAPACITY)), file(PAGE + 5));
        let map = SegmentMap::new(&map_file, CAPACITY).expect("a map");
        let view = SegmentView::new(&map_file, &data, CAPACITY).expect("a view");
        (0..CAPACITY).for_each(|block| map.publish(block, Place::Resident));
        map.set_size(CAPACITY * BLOCK);
        let mut bytes = vec![1; CAPACITY as usize * PAGE];
        // SAFETY: the vector has that many bytes.
        let read = unsafe { view.read(0, bytes.as_mut_ptr(), bytes.len(), || true) };
        assert_eq!((read.count, read.is_whole), (2 * PAGE, false));
    }

    #[test]
    fn maps_have_room_to_grow() {
        assert_eq!(capacity_for(0), 1024);
        assert_eq!(capacity_for(1 << 30), 1 << 19);
        assert_eq!(capacity_for((1 << 30) + 1), 1 << 20);
        assert_eq!(capacity_for(u64::MAX), CAPACITY_MAX);
    }
}
