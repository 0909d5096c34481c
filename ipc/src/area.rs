//! Layout of the memory files: request buffers and queues.
//!
//! ```text
//! buffer n at n * (4096 + data):  0x000 state word   0x008 extent   0x010 time of a post   0x040 Request   0x100 Reply   0x1000 data
//! behind the last buffer:  0x000 reads without a request, 128 times: handle, reads   0x800 reads of other handles
//! behind that:  posts, 16 slots of 64 bytes: 0x00 granted   0x04 tended   0x08 posted
//! queue:  0x000 head  0x040 tail  0x080 events, sleepers  0x0C0 space, producers asleep, stamps  0x100 slots, 8 bytes each
//! ```
//!
//! This is the only module that turns addresses of shared memory into anything else. References are made to atomics alone;
//! everything else is copied, within bounds that this side knows by itself.

use crate::copy::copy;
use crate::memory::{Mapping, PAGE};
use crate::posts::Extent;
use crate::queue::{QueueWords, RelaxedQueue};
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::wire::{Reply, Request};
use core::mem::{align_of, size_of};
use core::ptr::NonNull;
use zerocopy::{FromZeros, IntoBytes};

const EXTENT: usize = 0x08;
const WRITTEN_AT: usize = 0x10;
const REQUEST: usize = 0x40;
const REPLY: usize = 0x100;
const COUNTS: usize = 0;
const OTHERS: usize = 0x800;
const DATA: usize = PAGE;
const SLOTS: usize = 0x100;

const _: () = assert!(REQUEST + size_of::<Request>() <= REPLY && REPLY + size_of::<Reply>() <= DATA);
const _: () = assert!(COUNTS + size_of::<Counts>() <= OTHERS && OTHERS + size_of::<AtomicU64>() <= COUNTS_LENGTH);

/// Bytes of a data area: the largest read or write of one request.
pub const DATA_BYTES: usize = 128 * 1024;

/// Bytes for the reads that a client counts: a page of their own, which tells nothing else of the session.
pub const COUNTS_LENGTH: usize = PAGE;

/// Bytes for the words of posted writes ([`crate::posts`]): the last page.
pub const POSTS_LENGTH: usize = PAGE;

/// Bytes behind the last request buffer.
pub const TAIL_LENGTH: usize = COUNTS_LENGTH + POSTS_LENGTH;

/// Handles whose reads a client counts at a time.
pub const COUNTED_MAX: usize = 128;

/// For each place a handle, and the reads of it.
type Counts = [[AtomicU64; 2]; COUNTED_MAX];

/// The reads that a client did without a request, by handle, as the client counts them: nobody vouches for the numbers.
#[derive(Clone, Copy)]
pub struct DirectReads<'a> {
    others: &'a AtomicU64,
    counts: &'a Counts,
}

impl<'a> DirectReads<'a> {
    /// Those behind the request buffers.
    pub fn new(buffers: &'a Mapping) -> Self {
        let (start, _) = Self::range(buffers);
        // SAFETY: the last page but one of the mapping, mapped as long as it is borrowed.
        unsafe { Self::at(start as *const u8) }
    }

    /// Where they are in the memory of such a mapping.
    pub fn range(buffers: &Mapping) -> (usize, usize) {
        assert!(buffers.length() >= TAIL_LENGTH && buffers.length().is_multiple_of(PAGE));
        (buffers.base().as_ptr().addr() + buffers.length() - TAIL_LENGTH, COUNTS_LENGTH)
    }

    /// Those at an address.
    ///
    /// # Safety
    /// It is that of a page, which can be read and written as long as they are used.
    #[inline]
    pub unsafe fn at(page: *const u8) -> Self {
        // SAFETY: the caller's promise; both lie within the page, are aligned, and are atomics.
        unsafe { Self { others: &*page.add(OTHERS).cast(), counts: &*page.add(COUNTS).cast() } }
    }

    fn place(&self, handle: u64) -> &'a [AtomicU64; 2] {
        &self.counts[handle as usize % COUNTED_MAX]
    }

    /// Counts the reads of a handle from now on, instead of those of another one in its place.
    pub fn begin(&self, handle: u64) {
        let [counted, reads] = self.place(handle);
        if counted.load(Ordering::Relaxed) != handle {
            self.others.fetch_add(reads.swap(0, Ordering::Relaxed), Ordering::Relaxed);
            counted.store(handle, Ordering::Relaxed);
        }
    }

    /// Counts a read of a handle. `is_alone`: no other thread counts, but for a signal handler, whose read may get lost.
    #[inline]
    pub fn count(&self, handle: u64, is_alone: bool) {
        let [_, reads] = self.place(handle);
        if is_alone {
            reads.store(reads.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        } else {
            reads.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Reads of a handle.
    pub fn of(&self, handle: u64) -> u64 {
        let [counted, reads] = self.place(handle);
        if counted.load(Ordering::Relaxed) == handle { reads.load(Ordering::Relaxed) } else { 0 }
    }

    /// Reads of all handles so far.
    pub fn sum(&self) -> u64 {
        let counts = self.counts.iter().map(|[_, reads]| reads.load(Ordering::Relaxed));
        counts.fold(self.others.load(Ordering::Relaxed), u64::saturating_add)
    }
}

/// Most request buffers of a session.
pub const BUFFERS_MAX: usize = 64;

/// Most queues of an instance: one per core group.
pub const QUEUES_MAX: usize = 64;

/// Most slots of a queue.
pub const SLOTS_MAX: usize = 4096;

/// A range beyond the end of a data area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfBounds;

/// Bytes of the memory file of `buffers` request buffers with `data` bytes each, of what is counted, and of the posts' words.
pub const fn buffers_length(buffers: usize, data: usize) -> usize {
    buffers * (DATA + data) + TAIL_LENGTH
}

/// Bytes of the memory file of a queue.
pub const fn queue_length(slots: usize) -> usize {
    (SLOTS + slots * size_of::<AtomicU64>()).next_multiple_of(PAGE)
}

/// The atomic word, or the row of them, at `offset` of a mapping.
///
/// Panics beyond the mapping: offsets are this side's own numbers.
pub(crate) fn word<T>(mapping: &Mapping, offset: usize) -> &T {
    assert!(offset + size_of::<T>() <= mapping.length() && offset.is_multiple_of(align_of::<T>()));
    // SAFETY: in bounds and aligned, mapped as long as the mapping is borrowed; T is an atomic or a row of them (the callers'),
    // so that concurrent changes by a peer are ordinary.
    unsafe { mapping.base().add(offset).cast::<T>().as_ref() }
}

/// The queue in a mapping of at least [`queue_length`]`(slots)` bytes.
pub fn queue(mapping: &Mapping, slots: usize) -> RelaxedQueue<'_> {
    assert!(slots <= SLOTS_MAX && queue_length(slots) <= mapping.length());
    let line = |offset| word::<AtomicU32>(mapping, offset);
    let first = NonNull::from(word::<AtomicU64>(mapping, SLOTS));
    // SAFETY: `slots` atomics follow the first within the mapping, as asserted above.
    let slots = unsafe { core::slice::from_raw_parts(first.as_ptr(), slots) };
    let words = QueueWords {
        head: line(0),
        tail: line(0x40),
        events: line(0x80),
        sleepers: line(0x84),
        space: line(0xC0),
        space_sleepers: line(0xC4),
        stamps: line(0xC8),
    };
    RelaxedQueue::new(words, slots)
}

/// One request buffer in a mapping.
#[derive(Clone, Copy)]
pub struct BufferArea<'a> {
    mapping: &'a Mapping,
    start: usize,
    data: usize,
}

impl<'a> BufferArea<'a> {
    /// Buffer `index` of a mapping of at least [`buffers_length`]`(index + 1, data)` bytes.
    pub fn new(mapping: &'a Mapping, index: usize, data: usize) -> Self {
        assert!(buffers_length(index + 1, data) <= mapping.length() && data.is_multiple_of(PAGE));
        Self { mapping, start: index * (DATA + data), data }
    }

    /// The state word.
    pub fn state(&self) -> &'a AtomicU32 {
        word(self.mapping, self.start)
    }

    /// How far the post in it goes.
    pub fn extent(&self) -> Extent<'a> {
        Extent::new(word(self.mapping, self.start + EXTENT))
    }

    /// When the last write of the post in it was made, nanoseconds since 1970 (`CLOCK_REALTIME`).
    pub fn written_at(&self) -> &'a AtomicU64 {
        word(self.mapping, self.start + WRITTEN_AT)
    }

    /// Bytes of the data area.
    pub fn data_bytes(&self) -> usize {
        self.data
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.mapping.base().as_ptr().wrapping_add(self.start + offset)
    }

    /// Writes the request.
    pub fn put_request(&self, request: &Request) {
        let bytes = request.as_bytes();
        // SAFETY: `new` checked that the whole buffer is mapped; the request's place is inside it.
        unsafe { copy(bytes.as_ptr(), self.at(REQUEST), bytes.len()) };
    }

    /// Copies the request out.
    pub fn get_request(&self) -> Request {
        let mut request = Request::new_zeroed();
        let bytes = request.as_mut_bytes();
        // SAFETY: as in `put_request`; `bytes` is this function's own.
        unsafe { copy(self.at(REQUEST), bytes.as_mut_ptr(), bytes.len()) };
        request
    }

    /// Writes the reply.
    pub fn put_reply(&self, reply: &Reply) {
        let bytes = reply.as_bytes();
        // SAFETY: as in `put_request`.
        unsafe { copy(bytes.as_ptr(), self.at(REPLY), bytes.len()) };
    }

    /// Copies the reply out.
    pub fn get_reply(&self) -> Reply {
        let mut reply = Reply::new_zeroed();
        let bytes = reply.as_mut_bytes();
        // SAFETY: as in `get_request`.
        unsafe { copy(self.at(REPLY), bytes.as_mut_ptr(), bytes.len()) };
        reply
    }

    fn data_at(&self, offset: usize, length: usize) -> Result<*mut u8, OutOfBounds> {
        match offset.checked_add(length) {
            Some(end) if end <= self.data => Ok(self.at(DATA + offset)),
            _ => Err(OutOfBounds),
        }
    }

    /// Copies `source` into the data area.
    ///
    /// # Errors
    /// [`OutOfBounds`], and nothing is copied.
    pub fn put_data(&self, offset: usize, source: &[u8]) -> Result<(), OutOfBounds> {
        // SAFETY: a slice is readable for its length.
        unsafe { self.put_data_raw(offset, source.as_ptr(), source.len()) }
    }

    /// Copies from the data area into `target`.
    ///
    /// # Errors
    /// [`OutOfBounds`], and nothing is copied.
    pub fn get_data(&self, offset: usize, target: &mut [u8]) -> Result<(), OutOfBounds> {
        // SAFETY: a slice is writable for its length.
        unsafe { self.get_data_raw(offset, target.as_mut_ptr(), target.len()) }
    }

    /// Has the kernel put what `file` has from `at` on into the data area; zeros behind its end.
    ///
    /// # Errors
    /// Those of reading, but for interruptions; that of [`OutOfBounds`] is `EFAULT`, and nothing is put then.
    #[cfg(feature = "std")]
    pub fn put_file(&self, offset: usize, length: usize, file: &std::fs::File, at: u64) -> std::io::Result<()> {
        use std::os::fd::AsRawFd;
        let target = self.data_at(offset, length).map_err(|OutOfBounds| rustix::io::Errno::FAULT)?;
        let mut done = 0;
        while done < length {
            let from = i64::try_from(at + done as u64).map_err(|_| rustix::io::Errno::OVERFLOW)?;
            // SAFETY: `data_at` checked the bounds, so what is left of the range is within the mapping; the kernel alone writes there, and
            // no reference is made to it.
            let count = unsafe { libc::pread64(file.as_raw_fd(), target.add(done).cast(), length - done, from) };
            match usize::try_from(count) {
                Ok(0) => {
                    // SAFETY: as above.
                    unsafe { target.add(done).write_bytes(0, length - done) };
                    break;
                }
                Ok(count) => done += count,
                Err(_) => match std::io::Error::last_os_error() {
                    error if error.kind() == std::io::ErrorKind::Interrupted => {}
                    error => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// As [`put_data`](Self::put_data), from memory that other threads may be writing.
    ///
    /// # Errors
    /// [`OutOfBounds`], and nothing is copied.
    ///
    /// # Safety
    /// `source` must be readable for `length` bytes and lie outside the mapping.
    pub unsafe fn put_data_raw(&self, offset: usize, source: *const u8, length: usize) -> Result<(), OutOfBounds> {
        let target = self.data_at(offset, length)?;
        // SAFETY: `data_at` checked the target's bounds; the caller vouches for the source.
        unsafe { copy(source, target, length) };
        Ok(())
    }

    /// As [`get_data`](Self::get_data), into memory that other threads may be using.
    ///
    /// # Errors
    /// [`OutOfBounds`], and nothing is copied.
    ///
    /// # Safety
    /// `target` must be writable for `length` bytes and lie outside the mapping.
    pub unsafe fn get_data_raw(&self, offset: usize, target: *mut u8, length: usize) -> Result<(), OutOfBounds> {
        let source = self.data_at(offset, length)?;
        // SAFETY: `data_at` checked the source's bounds; the caller vouches for the target.
        unsafe { copy(source, target, length) };
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memory::create_sealed;

    #[test]
    fn the_kernel_puts_a_file_into_a_data_area_and_not_beyond_it() {
        use std::io::Write;
        let length = buffers_length(1, PAGE);
        let memory = create_sealed(c"test", length).expect("memory file");
        let mapping = Mapping::of_sealed(&memory, length, true).expect("mapping");
        let area = BufferArea::new(&mapping, 0, PAGE);
        let mut file = std::fs::File::from(create_sealed(c"content", PAGE).expect("memory file"));
        file.write_all(b"0123456789").expect("written");
        let content = |offset, length| {
            let mut bytes = vec![9; length];
            area.get_data(offset, &mut bytes).expect("within it");
            bytes
        };
        area.put_data(0, &[7; PAGE]).expect("within it");
        area.put_file(100, 4, &file, 3).expect("read");
        assert_eq!(content(99, 6), [7, b'3', b'4', b'5', b'6', 7]);
        area.put_file(PAGE - 4, 4, &file, PAGE as u64 - 2).expect("read");
        assert_eq!(content(PAGE - 5, 5), [7, 0, 0, 0, 0], "zeros behind its end");
        area.put_data(0, &[7; PAGE]).expect("within it");
        for (offset, length) in [(PAGE - 3, 4), (PAGE, 1), (usize::MAX, 2)] {
            let error = area.put_file(offset, length, &file, 0).expect_err("beyond it");
            assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
        }
        area.put_file(0, 4, &file, u64::MAX - 1).expect_err("no such offset");
        let directory = std::fs::File::open("/").expect("open");
        area.put_file(0, 4, &directory, 0).expect_err("it cannot be read");
        assert_eq!(content(0, PAGE), [7; PAGE], "nothing is put");
    }

    #[test]
    fn reads_are_counted_by_handle_and_stay_counted_when_another_takes_the_place() {
        let length = buffers_length(1, PAGE);
        let file = create_sealed(c"test", length).expect("memory file");
        let mapping = Mapping::of_sealed(&file, length, true).expect("mapping");
        let reads = DirectReads::new(&mapping);
        assert_eq!((reads.of(0), reads.of(7), reads.sum()), (0, 0, 0));
        let other = 7 + COUNTED_MAX as u64;
        reads.begin(7);
        reads.count(7, true);
        reads.count(7, false);
        reads.begin(7);
        assert_eq!((reads.of(7), reads.of(other), reads.sum()), (2, 0, 2));
        reads.begin(other);
        reads.count(other, true);
        assert_eq!((reads.of(7), reads.of(other), reads.sum()), (0, 1, 3));
        // Whoever can write what he likes gets no more than large numbers.
        reads.counts[1][1].store(u64::MAX, Ordering::Relaxed);
        assert_eq!(reads.sum(), u64::MAX);
    }
}
