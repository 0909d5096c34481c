//! Mapped maps, leases and segments: the service's end and the client's.

use super::{Look, Place, copied, is_unchanged, look, publish, retract, retracted};
use crate::area::word;
use crate::copy::copy;
use crate::memory::{Mapping, PAGE};
use crate::notice::Notice;
use crate::wire::WireAttributes;
use core::ops::Range;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use poolfs_types::Errno;
use rustix::fd::AsFd;
use zerocopy::{FromBytes, Immutable, IntoBytes};

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
pub(super) const STATE_AT: usize = 0x40;
pub(super) const SIZE_AT: usize = 0x80;
pub(super) const WORDS_AT: usize = PAGE;
/// The words of leases follow the mutex.
pub(super) const LEASES_AT: usize = 64;
/// Words of what a notice says, behind its sequence number.
pub(super) const NOTED_WORDS: usize = size_of::<Noted>() / size_of::<u64>();
pub(super) const NOTED_AT: usize = 8;

/// Bytes of a notice's file.
pub const NOTICE_LENGTH: usize = PAGE;

/// Where in a lease's word the closings are counted: above the epoch.
pub(super) const CLOSINGS_SHIFT: u32 = 32;

const _: () = assert!(NOTED_AT + NOTED_WORDS * size_of::<AtomicU64>() <= NOTICE_LENGTH);
const _: () = assert!(SIZE_AT + 8 <= WORDS_AT && CAPACITY_AT.is_multiple_of(8) && SIZE_AT.is_multiple_of(8));

pub(super) const LIVE: u32 = 1;
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
    (LEASES_AT + leases * size_of::<AtomicU64>()).next_multiple_of(PAGE)
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

/// What a lease's word says at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseWord {
    /// Another one than it was granted with: the lease has been revoked.
    pub epoch: u32,
    /// Descriptors of the file that have been closed, modulo 2^32, of those whose closing the kernel announces.
    pub closings: u32,
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

    /// What a lease's word says.
    #[must_use]
    pub fn look(&self, lease: usize) -> Option<LeaseWord> {
        (lease < self.count).then(|| {
            let word = self.word(lease).load(Ordering::Acquire);
            LeaseWord { epoch: word as u32, closings: (word >> CLOSINGS_SHIFT) as u32 }
        })
    }

    /// Ends a lease for all who have it.
    pub fn revoke(&self, lease: usize) {
        if lease < self.count {
            self.word(lease).fetch_add(1, Ordering::SeqCst);
            retracted();
        }
    }

    /// Somebody closes a descriptor of the lease's file; to be called before the kernel goes on with it.
    pub fn count_closing(&self, lease: usize) {
        if lease < self.count {
            self.word(lease).fetch_add(1 << CLOSINGS_SHIFT, Ordering::SeqCst);
        }
    }

    /// Whether the service lives that gave them, and holds its [`Life`].
    #[must_use]
    pub fn is_live(&self) -> bool {
        lives(word::<AtomicU32>(&self.mapping, 0))
    }

    fn word(&self, lease: usize) -> &AtomicU64 {
        word(&self.mapping, LEASES_AT + lease * size_of::<AtomicU64>())
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

/// What the notice of a lease says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct Noted {
    /// The file's attributes. Its owners are those of the host: who reads it may be shown others.
    pub attributes: WireAttributes,
    /// Until when the space that the file takes is known (`CLOCK_MONOTONIC`, nanoseconds); the greatest number: for good.
    pub until_ns: u64,
}

/// The notice of a lease.
#[derive(Debug)]
pub struct FileNotice {
    mapping: Mapping,
}

impl FileNotice {
    /// Maps a file of [`NOTICE_LENGTH`] bytes, to write it as the service or to read it as a client. Zeros say nothing.
    ///
    /// # Errors
    /// Those of `mmap(2)`; `EPROTO` for a file that is too short.
    pub fn new(file: impl AsFd, writable: bool) -> Result<Self, Errno> {
        Ok(Self { mapping: Mapping::of_segment(file, NOTICE_LENGTH, writable)? })
    }

    /// The memory.
    #[must_use]
    pub fn range(&self) -> (usize, usize) {
        (self.mapping.base().as_ptr().addr(), self.mapping.length())
    }

    /// The attributes of the lease's file, if somebody vouches for them. They count when the lease is looked at afterwards and
    /// holds.
    #[inline]
    #[must_use]
    pub fn noted(&self) -> Option<Noted> {
        self.notice().read().map(|words: [u64; NOTED_WORDS]| zerocopy::transmute!(words))
    }

    /// Vouches for attributes from now on. One writer at a time.
    pub fn note(&self, noted: &Noted) {
        self.notice().publish(zerocopy::transmute!(*noted));
    }

    /// Vouches for attributes no more: who reads from now on finds none. One writer at a time.
    pub fn forget(&self) {
        self.notice().retract();
    }

    fn notice(&self) -> Notice<'_, NOTED_WORDS> {
        Notice::new(word(&self.mapping, 0), word(&self.mapping, NOTED_AT))
    }
}

/// Whether the thread lives that holds the mutex of this word.
pub(super) fn lives(life: &AtomicU32) -> bool {
    const OWNER_DIED: u32 = 1 << 30;
    let life = life.load(Ordering::Acquire);
    life != 0 && life & OWNER_DIED == 0
}

/// What came of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// Bytes read.
    pub count: usize,
    /// Whether that is all there is to read; else a request has to bring the rest.
    pub is_whole: bool,
}

/// A segment with its map.
#[derive(Debug)]
struct File {
    map: Mapping,
    data: Mapping,
    capacity: u64,
}

impl File {
    fn new(map: impl AsFd, data: impl AsFd, capacity: u64) -> Result<Self, Errno> {
        let map = read_map(map, capacity)?;
        // A file that cannot grow is as long as it is, and so is its segment.
        let data = Mapping::of_segment_as_far_as_it_goes(data, (capacity * BLOCK) as usize)?;
        Ok(Self { map, data, capacity })
    }

    fn look(&self, block: u64) -> Option<Look> {
        let is_mapped = block < self.capacity.min(self.data.length() as u64 / BLOCK);
        is_mapped.then(|| look(block_word(&self.map, block))).flatten()
    }
}

/// Maps a map of `capacity` blocks, to read it.
fn read_map(file: impl AsFd, capacity: u64) -> Result<Mapping, Errno> {
    if !(1..=CAPACITY_MAX).contains(&capacity) {
        return Err(Errno::EPROTO);
    }
    let map = Mapping::of_segment(file, map_length(capacity), false)?;
    let told = (
        word::<AtomicU32>(&map, MAGIC_AT).load(Ordering::Relaxed),
        word::<AtomicU32>(&map, LAYOUT_AT).load(Ordering::Relaxed),
        word::<AtomicU64>(&map, CAPACITY_AT).load(Ordering::Relaxed),
    );
    if told == (MAGIC, LAYOUT, capacity) { Ok(map) } else { Err(Errno::EPROTO) }
}

/// A segment with its map, as a client reads it.
#[derive(Debug)]
pub struct SegmentView(File);

/// Where a segment and its map are mapped: addresses and lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentRanges {
    /// The map.
    pub map: (usize, usize),
    /// The bytes.
    pub data: (usize, usize),
    /// Blocks.
    pub capacity: u64,
}

impl SegmentView {
    /// Maps what the service gave.
    ///
    /// # Errors
    /// `EPROTO` for files that are no map and segment of `capacity` blocks; those of `mmap(2)`.
    pub fn new(map: impl AsFd, data: impl AsFd, capacity: u64) -> Result<Self, Errno> {
        Ok(Self(File::new(map, data, capacity)?))
    }

    /// Where its map and its bytes are, and how many blocks that is.
    #[must_use]
    pub fn ranges(&self) -> SegmentRanges {
        let range = |mapping: &Mapping| (mapping.base().as_ptr().addr(), mapping.length());
        let File { map, data, capacity } = &self.0;
        SegmentRanges { map: range(map), data: range(data), capacity: *capacity }
    }

    /// Whether the service still keeps it.
    #[must_use]
    pub fn is_live(&self) -> bool {
        state(&self.0.map).load(Ordering::Acquire) == LIVE
    }

    /// Whether it is of no use for reads at `offset` any more.
    #[must_use]
    pub fn is_over(&self, offset: u64) -> bool {
        !self.is_live() || (offset >= self.0.capacity * BLOCK && self.0.capacity < CAPACITY_MAX)
    }

    /// Bytes of the file, as the service says now.
    #[must_use]
    pub fn size(&self) -> u64 {
        size(&self.0.map).load(Ordering::Acquire)
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
        let file_end = size(&self.0.map).load(Ordering::Acquire);
        let wanted_end = offset.saturating_add(length as u64).min(file_end);
        let end = wanted_end.min(self.0.capacity * BLOCK);
        let mut at = offset;
        while at < end {
            let piece_end = ((at / BLOCK + PIECE_BLOCKS) * BLOCK).min(end);
            let done = (at - offset) as usize;
            // SAFETY: `target` has room for `length` bytes, and this piece ends before them.
            at = unsafe { self.copy_piece(at..piece_end, target.add(done)) };
            if at < piece_end {
                break;
            }
        }
        copied();
        if !self.is_live() || !is_leased() {
            return NOTHING;
        }
        Read { count: at.saturating_sub(offset) as usize, is_whole: at >= wanted_end }
    }

    /// Copies bytes within the map's blocks, as far as they were there all the time; returns where that ends.
    ///
    /// # Safety
    /// `target` must be writable for that many bytes and lie outside the segment.
    unsafe fn copy_piece(&self, bytes: Range<u64>, target: *mut u8) -> u64 {
        let first = bytes.start / BLOCK;
        let File { map, data, .. } = &self.0;
        let mut looks = [Look::default(); PIECE_BLOCKS as usize];
        for _ in 0..ATTEMPTS_MAX {
            let mut end = first;
            for (seen, block) in looks.iter_mut().zip(first..bytes.end.div_ceil(BLOCK)) {
                let Some(now) = self.0.look(block) else { break };
                *seen = now;
                end = block + 1;
            }
            let stop = (end * BLOCK).clamp(bytes.start, bytes.end);
            let mut from = bytes.start;
            while from < stop {
                let block = from / BLOCK;
                let is_zero = |block: u64| looks[(block - first) as usize].is_zero();
                let alike = (block..end).take_while(|&other| is_zero(other) == is_zero(block)).count() as u64;
                let to = ((block + alike) * BLOCK).min(stop);
                let count = (to - from) as usize;
                // SAFETY: the caller vouches for `target`; a block that was looked at is one of the file's map, and the segment is
                // mapped as long as that. What the service changes meanwhile is found out below.
                unsafe {
                    let place = target.add((from - bytes.start) as usize);
                    if is_zero(block) {
                        place.write_bytes(0, count);
                    } else {
                        copy(data.base().as_ptr().add(from as usize), place, count);
                    }
                }
                from = to;
            }
            copied();
            if looks.iter().zip(first..end).all(|(seen, block)| is_unchanged(block_word(map, block), *seen)) {
                return stop;
            }
        }
        bytes.start
    }
}
