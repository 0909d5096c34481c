//! Cached content that clients read by themselves, without a request: a file's *segment* (its cached bytes) and its *map*
//! (which of its blocks are there), as files of the pool's tmpfs that clients get through a mount that is read-only.
//!
//! ```text
//! map:    0x000 magic 'PFSM', layout version   0x008 capacity in blocks   0x040 state   0x080 size   0x1000 words, one a block
//! word:   [1:0] place: 0 ABSENT 1 RESIDENT 2 BASE (in the branch below) 3 ZERO    [2] BUSY (ask)    [3] 0    [31:4] generation
//! leases: 0x000 life: a robust mutex that the service holds   0x040 words, one a lease: its epoch
//! ```
//!
//! Every word here has one side that writes it: the service. A word's generation advances at every change of its place. A
//! reader looks at the words, copies, and looks again: when none has changed, what it copied was there all the time. Who takes
//! bytes away first says so in the words ([`retract`]), and then takes them.
//!
//! A *lease* says whether the segment still is the file's content for one instance: it is revoked before the file's content
//! moves elsewhere (copy-up), or may be changed by the kernel alone (a shared mapping). All leases end with the service: the
//! kernel itself marks the mutex of who died (`get_robust_list(2)`), so that nobody needs a system call to know.

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
        self.0 & PLACE == Place::Zero as u32
    }
}

/// The reader's first step: what can be copied, if anything can.
#[must_use]
pub fn look(word: &AtomicU32) -> Option<Look> {
    let now = word.load(Ordering::Acquire);
    let readable = now & PLACE == Place::Resident as u32 || now & PLACE == Place::Zero as u32;
    (readable && now & BUSY == 0).then_some(Look(now))
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
    BLOCK, CAPACITY_MAX, LEASES_MAX, Leases, Read, SegmentMap, SegmentView, capacity_for, leases_length, map_length,
};
#[cfg(all(feature = "std", not(loom)))]
pub use mounted::{Life, read_only_clone};

#[cfg(not(loom))]
mod mapped {
    use super::{Look, Place, copied, is_unchanged, look, publish, retract, retracted};
    use crate::area::word;
    use crate::copy::copy;
    use crate::memory::{Mapping, PAGE};
    use core::ops::Range;
    use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    use poolfs_types::Errno;
    use rustix::fd::AsFd;

    /// Bytes of a block.
    pub const BLOCK: u64 = PAGE as u64;

    /// Most blocks of a map: what lies beyond is read by requests.
    pub const CAPACITY_MAX: u64 = 1 << 20;

    /// Most leases of an instance.
    pub const LEASES_MAX: usize = 1 << 16;

    /// Fewest blocks of a map, which fill a page of words.
    const CAPACITY_MIN: u64 = 1 << 10;

    const MAGIC: u32 = u32::from_le_bytes(*b"PFSM");
    const LAYOUT: u32 = 1;
    const MAGIC_AT: usize = 0x00;
    const LAYOUT_AT: usize = 0x04;
    const CAPACITY_AT: usize = 0x08;
    const STATE_AT: usize = 0x40;
    const SIZE_AT: usize = 0x80;
    const WORDS_AT: usize = PAGE;
    /// The words of leases follow the mutex.
    const LEASES_AT: usize = 64;

    const _: () = assert!(SIZE_AT + 8 <= WORDS_AT && CAPACITY_AT.is_multiple_of(8) && SIZE_AT.is_multiple_of(8));

    const LIVE: u32 = 1;
    const DEAD: u32 = 2;

    /// Blocks that are copied between two looks at their words.
    const PIECE_BLOCKS: u64 = 32;

    /// How often a piece is copied that changes meanwhile.
    const ATTEMPTS_MAX: u32 = 3;

    /// How many blocks a map has for a file of `size` bytes, with room to grow.
    #[must_use]
    pub const fn capacity_for(size: u64) -> u64 {
        let blocks = size.div_ceil(BLOCK);
        if blocks >= CAPACITY_MAX / 2 {
            return CAPACITY_MAX;
        }
        let room = (blocks * 2).next_power_of_two();
        if room < CAPACITY_MIN { CAPACITY_MIN } else { room }
    }

    /// Bytes of a map's file.
    #[must_use]
    pub const fn map_length(capacity: u64) -> usize {
        WORDS_AT + (capacity as usize * size_of::<AtomicU32>()).next_multiple_of(PAGE)
    }

    /// Bytes of a file of so many leases.
    #[must_use]
    pub const fn leases_length(leases: usize) -> usize {
        (LEASES_AT + leases * size_of::<AtomicU32>()).next_multiple_of(PAGE)
    }

    fn block_word(map: &Mapping, block: u64) -> &AtomicU32 {
        word(map, WORDS_AT + block as usize * size_of::<AtomicU32>())
    }

    fn state(map: &Mapping) -> &AtomicU32 {
        word(map, STATE_AT)
    }

    fn size(map: &Mapping) -> &AtomicU64 {
        word(map, SIZE_AT)
    }

    /// A map, as the service writes it. Dropped, it ends for all who read by it.
    #[derive(Debug)]
    pub struct SegmentMap {
        mapping: Mapping,
        capacity: u64,
    }

    impl SegmentMap {
        /// Makes the map of `capacity` blocks in an empty file of [`map_length`]`(capacity)` bytes: no block is there, the size is 0.
        ///
        /// # Errors
        /// Those of `mmap(2)`; `EINVAL` when there are too many blocks.
        pub fn new(file: impl AsFd, capacity: u64) -> Result<Self, Errno> {
            if !(1..=CAPACITY_MAX).contains(&capacity) {
                return Err(Errno::EINVAL);
            }
            let mapping = Mapping::of_segment(file, map_length(capacity), true)?;
            word::<AtomicU32>(&mapping, MAGIC_AT).store(MAGIC, Ordering::Relaxed);
            word::<AtomicU32>(&mapping, LAYOUT_AT).store(LAYOUT, Ordering::Relaxed);
            word::<AtomicU64>(&mapping, CAPACITY_AT).store(capacity, Ordering::Relaxed);
            state(&mapping).store(LIVE, Ordering::Release);
            Ok(Self { mapping, capacity })
        }

        /// Its blocks.
        #[must_use]
        pub fn capacity(&self) -> u64 {
            self.capacity
        }

        /// Says where a block's bytes are, which are in their place by now. Blocks beyond the map are nobody's to read.
        pub fn publish(&self, block: u64, place: Place) {
            if block < self.capacity {
                publish(block_word(&self.mapping, block), place);
            }
        }

        /// To be called before bytes of these blocks are taken away, or changed in another way than by an ordinary write.
        pub fn retract(&self, blocks: Range<u64>) {
            (blocks.start..blocks.end.min(self.capacity)).for_each(|block| retract(block_word(&self.mapping, block)));
            retracted();
        }

        /// Says how long the file is; after its blocks have been published.
        pub fn set_size(&self, bytes: u64) {
            if size(&self.mapping).load(Ordering::Relaxed) != bytes {
                size(&self.mapping).store(bytes, Ordering::Release);
            }
        }
    }

    impl Drop for SegmentMap {
        fn drop(&mut self) {
            state(&self.mapping).store(DEAD, Ordering::Relaxed);
            retracted();
        }
    }

    /// The words of leases.
    #[derive(Debug)]
    pub struct Leases {
        mapping: Mapping,
        count: usize,
    }

    impl Leases {
        /// Maps a file of [`leases_length`]`(count)` bytes, to write it as the service or to read it as a client.
        ///
        /// # Errors
        /// Those of `mmap(2)`; `EPROTO` for a file that is too short.
        pub fn new(file: impl AsFd, count: usize, writable: bool) -> Result<Self, Errno> {
            Ok(Self { mapping: Mapping::of_segment(file, leases_length(count), writable)?, count })
        }

        /// How many there are.
        #[must_use]
        pub fn count(&self) -> usize {
            self.count
        }

        /// The memory.
        #[must_use]
        pub fn range(&self) -> (usize, usize) {
            (self.mapping.base().as_ptr().addr(), self.mapping.length())
        }

        /// The epoch of a lease.
        #[must_use]
        pub fn epoch(&self, lease: usize) -> Option<u32> {
            (lease < self.count).then(|| self.word(lease).load(Ordering::Acquire))
        }

        /// Ends a lease for all who have it.
        pub fn revoke(&self, lease: usize) {
            if lease < self.count {
                self.word(lease).fetch_add(1, Ordering::SeqCst);
                retracted();
            }
        }

        /// Whether the service lives that gave them, and holds its [`Life`].
        #[must_use]
        pub fn is_live(&self) -> bool {
            const OWNER_DIED: u32 = 1 << 30;
            let life = word::<AtomicU32>(&self.mapping, 0).load(Ordering::Acquire);
            life != 0 && life & OWNER_DIED == 0
        }

        fn word(&self, lease: usize) -> &AtomicU32 {
            word(&self.mapping, LEASES_AT + lease * size_of::<AtomicU32>())
        }

        /// Says that the service lives, until the calling thread ends or drops what it gets. Once.
        ///
        /// # Errors
        /// Those of making and locking a robust mutex.
        #[cfg(feature = "std")]
        pub fn live(&self) -> Result<super::mounted::Life<'_>, Errno> {
            super::mounted::Life::begin(&self.mapping)
        }
    }

    /// What came of a read.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Read {
        /// Bytes read.
        pub count: usize,
        /// Whether that is all there is to read; else a request has to bring the rest.
        pub is_whole: bool,
    }

    /// A segment with its map, as a client reads it.
    #[derive(Debug)]
    pub struct SegmentView {
        map: Mapping,
        data: Mapping,
        capacity: u64,
    }

    impl SegmentView {
        /// Maps what the service gave.
        ///
        /// # Errors
        /// `EPROTO` for files that are no map and segment of `capacity` blocks; those of `mmap(2)`.
        pub fn new(map: impl AsFd, data: impl AsFd, capacity: u64) -> Result<Self, Errno> {
            if !(1..=CAPACITY_MAX).contains(&capacity) {
                return Err(Errno::EPROTO);
            }
            let map = Mapping::of_segment(map, map_length(capacity), false)?;
            let told = (
                word::<AtomicU32>(&map, MAGIC_AT).load(Ordering::Relaxed),
                word::<AtomicU32>(&map, LAYOUT_AT).load(Ordering::Relaxed),
                word::<AtomicU64>(&map, CAPACITY_AT).load(Ordering::Relaxed),
            );
            if told != (MAGIC, LAYOUT, capacity) {
                return Err(Errno::EPROTO);
            }
            let data = Mapping::of_segment(data, (capacity * BLOCK) as usize, false)?;
            Ok(Self { map, data, capacity })
        }

        /// The memory.
        pub fn ranges(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
            [&self.map, &self.data].into_iter().map(|mapping| (mapping.base().as_ptr().addr(), mapping.length()))
        }

        /// Whether the service still keeps it.
        #[must_use]
        pub fn is_live(&self) -> bool {
            state(&self.map).load(Ordering::Acquire) == LIVE
        }

        /// Whether it is of no use for reads at `offset` any more.
        #[must_use]
        pub fn is_over(&self, offset: u64) -> bool {
            !self.is_live() || (offset >= self.capacity * BLOCK && self.capacity < CAPACITY_MAX)
        }

        /// Copies up to `length` bytes from `offset` on, as far as they are there, while `is_leased` says that this is the
        /// file's content.
        ///
        /// # Safety
        /// `target` must be writable for `length` bytes and lie outside the segment.
        pub unsafe fn read(&self, offset: u64, target: *mut u8, length: usize, is_leased: impl Fn() -> bool) -> Read {
            const NOTHING: Read = Read { count: 0, is_whole: false };
            if !self.is_live() || !is_leased() {
                return NOTHING;
            }
            let file_end = size(&self.map).load(Ordering::Acquire);
            let wanted_end = offset.saturating_add(length as u64).min(file_end);
            let end = wanted_end.min(self.capacity * BLOCK);
            let mut at = offset;
            while at < end {
                let piece_end = ((at / BLOCK + PIECE_BLOCKS) * BLOCK).min(end);
                let done = (at - offset) as usize;
                // SAFETY: `target` has room for `length` bytes, and this piece ends before them.
                let copied = unsafe { self.copy_piece(at..piece_end, target.add(done)) };
                if !copied {
                    break;
                }
                at = piece_end;
            }
            copied();
            if !self.is_live() || !is_leased() {
                return NOTHING;
            }
            Read { count: at.saturating_sub(offset) as usize, is_whole: at >= wanted_end }
        }

        /// Copies bytes within the map's blocks; whether they were there all the time.
        ///
        /// # Safety
        /// `target` must be writable for that many bytes and lie outside the segment.
        unsafe fn copy_piece(&self, bytes: Range<u64>, target: *mut u8) -> bool {
            let (first, end) = (bytes.start / BLOCK, bytes.end.div_ceil(BLOCK));
            let word_of = |block: u64| block_word(&self.map, block);
            let mut looks = [Look::default(); PIECE_BLOCKS as usize];
            for _ in 0..ATTEMPTS_MAX {
                for (seen, block) in looks.iter_mut().zip(first..end) {
                    let Some(now) = look(word_of(block)) else { return false };
                    *seen = now;
                }
                let mut from = bytes.start;
                while from < bytes.end {
                    let block = from / BLOCK;
                    let is_zero = |block: u64| looks[(block - first) as usize].is_zero();
                    let alike = (block..end).take_while(|&other| is_zero(other) == is_zero(block)).count() as u64;
                    let to = ((block + alike) * BLOCK).min(bytes.end);
                    let count = (to - from) as usize;
                    // SAFETY: the caller vouches for `target`; `bytes` ends within the blocks of the map, and the segment is
                    // mapped as long as that. What the service changes meanwhile is found out below.
                    unsafe {
                        let place = target.add((from - bytes.start) as usize);
                        if is_zero(block) {
                            place.write_bytes(0, count);
                        } else {
                            copy(self.data.base().as_ptr().add(from as usize), place, count);
                        }
                    }
                    from = to;
                }
                copied();
                if looks.iter().zip(first..end).all(|(seen, block)| is_unchanged(word_of(block), *seen)) {
                    return true;
                }
            }
            false
        }
    }
}

#[cfg(all(feature = "std", not(loom)))]
mod mounted {
    use crate::memory::Mapping;
    use poolfs_types::Errno;
    use rustix::mount::{OpenTreeFlags, open_tree};
    use std::io;
    use std::marker::PhantomData;
    use std::mem::MaybeUninit;
    use std::os::fd::{AsFd, AsRawFd, OwnedFd};

    /// Says that the service lives. Belongs to the thread that began it.
    pub struct Life<'a> {
        mutex: *mut libc::pthread_mutex_t,
        _mapping: PhantomData<&'a Mapping>,
    }

    impl<'a> Life<'a> {
        pub(super) fn begin(mapping: &'a Mapping) -> Result<Self, Errno> {
            assert!(size_of::<libc::pthread_mutex_t>() <= 64 && mapping.length() >= 64);
            let mutex = mapping.base().as_ptr().cast::<libc::pthread_mutex_t>();
            let mut attributes = MaybeUninit::uninit();
            let attributes = attributes.as_mut_ptr();
            let made = |result: i32| if result == 0 { Ok(()) } else { Err(Errno::from_raw(result)) };
            // SAFETY: the mutex's place is inside the mapping, page-aligned, and no other thread of this process uses it:
            // clients can only read it.
            unsafe {
                made(libc::pthread_mutexattr_init(attributes))?;
                made(libc::pthread_mutexattr_setpshared(attributes, libc::PTHREAD_PROCESS_SHARED))?;
                made(libc::pthread_mutexattr_setrobust(attributes, libc::PTHREAD_MUTEX_ROBUST))?;
                made(libc::pthread_mutex_init(mutex, attributes))?;
                libc::pthread_mutexattr_destroy(attributes);
                made(libc::pthread_mutex_lock(mutex))?;
            }
            Ok(Self { mutex, _mapping: PhantomData })
        }
    }

    impl Drop for Life<'_> {
        fn drop(&mut self) {
            // SAFETY: locked by this thread, which the type cannot leave; the mapping is borrowed.
            let unlocked = unsafe { libc::pthread_mutex_unlock(self.mutex) };
            debug_assert_eq!(unlocked, 0);
        }
    }

    /// A read-only way to the filesystem of a mount: what is opened through it cannot be opened for writing again, by nobody.
    ///
    /// # Errors
    /// Those of `open_tree(2)` and `mount_setattr(2)`: `EINVAL` on kernels that do not clone a mount which is nowhere.
    pub fn read_only_clone(root: impl AsFd) -> io::Result<OwnedFd> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        let clone = open_tree(root.as_fd(), c"", flags)?;
        let attributes =
            libc::mount_attr { attr_set: libc::MOUNT_ATTR_RDONLY, attr_clr: 0, propagation: 0, userns_fd: 0 };
        // SAFETY: the kernel reads the empty path and one `mount_attr`, of the size that is told.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mount_setattr,
                clone.as_raw_fd(),
                c"".as_ptr(),
                libc::AT_EMPTY_PATH,
                &raw const attributes,
                size_of::<libc::mount_attr>(),
            )
        };
        if result == 0 { Ok(clone) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memory::PAGE;
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
        let epoch = own.epoch(2).expect("a lease");
        let mut bytes = [1; 10];
        // SAFETY: ten bytes.
        let mut read = || unsafe { served.view.read(0, bytes.as_mut_ptr(), 10, || theirs.epoch(2) == Some(epoch)) };
        assert_eq!(read(), Read { count: 10, is_whole: true });
        own.revoke(2);
        assert_eq!(read(), Read { count: 0, is_whole: false });
        assert_eq!((theirs.epoch(3), own.epoch(usize::MAX)), (None, None));
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
                std::mem::forget(own.live().expect("a life"));
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
        assert_eq!(SegmentView::new(&empty, &file(PAGE), CAPACITY).err(), Some(Errno::EPROTO));
    }

    #[test]
    fn maps_have_room_to_grow() {
        assert_eq!(capacity_for(0), 1024);
        assert_eq!(capacity_for(1 << 30), 1 << 19);
        assert_eq!(capacity_for((1 << 30) + 1), 1 << 20);
        assert_eq!(capacity_for(u64::MAX), CAPACITY_MAX);
    }
}
