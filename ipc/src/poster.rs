//! The caller's end of posted writes: which call posts in a slot, and what was posted there last.
//!
//! One thread of the process at a time posts in a slot. If another thread is posting there, or a signal handler has interrupted a
//! call that does, an ordinary request is sent. As everything of the caller's end, a post may be interrupted at any point by a
//! handler that posts itself, forks, or leaves by a jump. A post that was left before its bit was set has not happened, and the
//! thread's next call takes its buffer back; a post that was left later has happened.

use crate::area::OutOfBounds;
use crate::borrowed::Borrowed;
use crate::connection::{CallError, Connection};
use crate::hold::{Frame, Hold};
use crate::post_slots::PostSlots;
use crate::posts::{self, POST_BYTES_MAX, POSTED_MAX, PostGrant, SlotWords};
use crate::segment::Leases;
use crate::state::{CallerState, Sequence};
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::wire::{Operation, Reply, Request};
use poolfs_types::limits::CACHED_SIZE_MAX;

/// Now, as a write's file shows it.
fn realtime_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
}

/// Where the bytes of a write go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostAt {
    /// Behind the file's end, wherever that is by then.
    End,
    /// To this offset.
    Offset(u64),
}

impl PostAt {
    /// Whether what goes there continues `length` bytes at `self`.
    fn is_continued_by(self, next: Self, length: u64) -> bool {
        match (self, next) {
            (Self::End, Self::End) => true,
            (Self::Offset(start), Self::Offset(offset)) => start.checked_add(length) == Some(offset),
            _ => false,
        }
    }

    /// Whether a write of so many bytes there ends where only the branch knows whether a file may be that long: the writer is
    /// to hear it. For the end of a file the service sees to that.
    fn is_far(self, length: usize) -> bool {
        match self {
            Self::End => false,
            Self::Offset(offset) => offset.checked_add(length as u64).is_none_or(|end| end > CACHED_SIZE_MAX),
        }
    }
}

/// What became of a write.
#[derive(Clone, Copy, Debug)]
pub enum Posting {
    /// It has happened, for everybody who asks the service. If it fails after all, the next call that can tell it does.
    Posted,
    /// The grant was gone, and this is the service's answer.
    Answered(Reply),
    /// Nothing happened: send an ordinary request.
    NotPosted,
}

/// What was posted last in a slot, as long as it may be made longer.
struct Latest {
    grant: PostGrant,
    handle: u64,
    at: PostAt,
    buffer: usize,
    number: u32,
    length: u32,
}

/// The one who posts in a slot. All zeros: nobody, and nothing was posted.
#[derive(Default)]
pub(crate) struct Poster {
    hold: Hold,
    /// Number of the latest post.
    number: AtomicU64,
    /// That of the latest post's grant; 0: there is none that may be made longer. What follows is that post's.
    grant: AtomicU64,
    handle: AtomicU64,
    offset: AtomicU64,
    buffer: AtomicU32,
    appends: AtomicU32,
    sequence: AtomicU32,
    length: AtomicU32,
}

impl Poster {
    /// Whether no call posts here.
    pub(crate) fn is_free(&self) -> bool {
        self.hold.is_free()
    }

    fn latest(&self) -> Option<Latest> {
        let offset = self.offset.load(Ordering::Relaxed);
        Some(Latest {
            grant: PostGrant::from_bits(self.grant.load(Ordering::Relaxed))?,
            handle: self.handle.load(Ordering::Relaxed),
            at: if self.appends.load(Ordering::Relaxed) == 1 { PostAt::End } else { PostAt::Offset(offset) },
            buffer: self.buffer.load(Ordering::Relaxed) as usize,
            number: self.sequence.load(Ordering::Relaxed),
            length: self.length.load(Ordering::Relaxed),
        })
    }

    fn set_latest(&self, latest: &Latest) {
        let (appends, offset) = match latest.at {
            PostAt::End => (1, 0),
            PostAt::Offset(offset) => (0, offset),
        };
        self.handle.store(latest.handle, Ordering::Relaxed);
        self.appends.store(appends, Ordering::Relaxed);
        self.offset.store(offset, Ordering::Relaxed);
        self.buffer.store(latest.buffer as u32, Ordering::Relaxed);
        self.sequence.store(latest.number, Ordering::Relaxed);
        self.length.store(latest.length, Ordering::Relaxed);
        self.grant.store(latest.grant.bits(), Ordering::Relaxed);
    }

    /// What was posted last stays as long as it is.
    fn forget_latest(&self) {
        self.grant.store(0, Ordering::Relaxed);
    }
}

/// A call that is the one who posts in a slot; ends when dropped.
struct Turn<'a> {
    connection: &'a Connection,
    poster: &'a Poster,
    slot: usize,
    frame: Frame,
}

impl<'a> Turn<'a> {
    /// Nothing while another thread's call, or one of this thread that goes on later, has the slot.
    fn take(connection: &'a Connection, slot: usize, frame: Frame) -> Option<Self> {
        let poster = connection.posters.get(slot)?;
        if !poster.hold.take(frame) {
            if !poster.hold.recover(frame) {
                return None;
            }
            // What the call that was left has noted may be half of it.
            poster.forget_latest();
        }
        Some(Self { connection, poster, slot, frame })
    }

    fn words(&self) -> SlotWords<'a> {
        self.connection.post_slots().slot(self.slot)
    }

    /// Makes the latest post longer, if that is what the write comes to; whether it did.
    ///
    /// # Safety
    /// As [`Connection::post`].
    unsafe fn grow(&self, grant: PostGrant, handle: u64, at: PostAt, source: *const u8, length: usize) -> bool {
        let Some(latest) = self.poster.latest() else { return false };
        let end = latest.length as usize + length;
        let continues = (latest.grant, latest.handle) == (grant, handle)
            && latest.at.is_continued_by(at, u64::from(latest.length))
            && end <= self.connection.data_bytes();
        let area = self.connection.buffer(latest.buffer);
        // Whoever holds the buffer keeps others from borrowing it, when it is served meanwhile, while bytes are put there.
        let owner = &self.connection.owners[latest.buffer];
        if !continues || !area.extent().is_open(latest.number, latest.length) || !owner.take(self.frame) {
            return false;
        }
        area.written_at().store(realtime_ns(), Ordering::Relaxed);
        let grown = area.extent().grow(latest.number, latest.length, end as u32, || {
            // SAFETY: the caller vouches for the source; no program has a pointer into the session's memory.
            unsafe { area.put_data_raw(latest.length as usize, source, length) }.is_ok()
        });
        if grown {
            self.poster.length.store(end as u32, Ordering::Relaxed);
        }
        if self.connection.marker.is_ours() {
            owner.give_back();
        }
        grown
    }

    /// Begins a new post.
    ///
    /// # Safety
    /// As [`Connection::post`].
    unsafe fn begin(
        &self,
        grant: PostGrant,
        handle: u64,
        at: PostAt,
        source: *const u8,
        length: usize,
    ) -> Result<Posting, CallError> {
        self.poster.forget_latest();
        if self.words().posted().count_ones() >= POSTED_MAX {
            return Ok(Posting::NotPosted);
        }
        let mut buffer = match self.connection.borrow_to_post(self.frame) {
            Ok(buffer) => buffer,
            Err(CallError::Busy) => return Ok(Posting::NotPosted),
            Err(error) => return Err(error),
        };
        // SAFETY: the caller vouches for the source.
        if let Err(OutOfBounds) = unsafe { buffer.put_data_raw(0, source, length) } {
            return Ok(Posting::NotPosted);
        }
        let number = self.poster.number.load(Ordering::Relaxed).wrapping_add(1);
        self.poster.number.store(number, Ordering::Relaxed);
        let request = Request {
            operation: Operation::Write as u32,
            handle,
            offset: if let PostAt::Offset(offset) = at { offset } else { 0 },
            second_offset: number,
            length: length as u64,
            ..Request::default()
        };
        let (index, length) = (buffer.index(), length as u32);
        self.connection.buffer(index).written_at().store(realtime_ns(), Ordering::Relaxed);
        let (sequence, published) = buffer.post(&request, &self.words(), grant, length);
        if !published.is_granted {
            return buffer.answer().map(Posting::Answered);
        }
        if published.must_ring {
            buffer.announce();
        }
        self.poster.set_latest(&Latest { grant, handle, at, buffer: index, number: sequence.number(), length });
        Ok(Posting::Posted)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.connection.marker.is_ours() {
            self.poster.hold.give_back();
        }
    }
}

impl Connection {
    pub(crate) fn post_slots(&self) -> PostSlots<'_> {
        PostSlots::new(&self.buffers)
    }

    /// The page of its slots' words.
    #[must_use]
    pub fn posts_range(&self) -> (usize, usize) {
        self.post_slots().range()
    }

    /// Whether a write by this grant would be posted now, as far as the grant goes. Nobody vouches for the next moment.
    #[must_use]
    pub fn may_post(&self, grant: PostGrant) -> bool {
        self.is_usable()
            && self.leases.as_ref().is_none_or(Leases::is_live)
            && self.post_slots().slot(grant.slot() as usize).is_granted(grant.epoch())
    }

    /// Whether something that was posted in a slot has not been served. What was is visible to this thread otherwise.
    #[must_use]
    pub fn has_posts(&self, slot: u32) -> bool {
        (slot as usize) < posts::POST_SLOTS && self.post_slots().slot(slot as usize).posted() != 0
    }

    /// Writes `length` bytes to the file with this handle, by its grant, and waits for no answer while the grant holds.
    /// `frame` is that of the call.
    ///
    /// # Errors
    /// As [`Connection::borrow`] and [`Borrowed::execute`].
    ///
    /// # Safety
    /// `source` must be readable for `length` bytes (a fault is the program's own).
    pub unsafe fn post(
        &self,
        frame: Frame,
        grant: PostGrant,
        handle: u64,
        at: PostAt,
        source: *const u8,
        length: usize,
    ) -> Result<Posting, CallError> {
        if !self.is_usable() {
            return Err(CallError::NoSession);
        }
        let may_be_posted = (1..=POST_BYTES_MAX.min(self.data_bytes())).contains(&length) && !at.is_far(length);
        if !may_be_posted || !self.may_post(grant) {
            return Ok(Posting::NotPosted);
        }
        let Some(turn) = Turn::take(self, grant.slot() as usize, frame) else { return Ok(Posting::NotPosted) };
        // SAFETY: the caller's promise.
        if unsafe { turn.grow(grant, handle, at, source, length) } {
            return Ok(Posting::Posted);
        }
        // SAFETY: the caller's promise.
        unsafe { turn.begin(grant, handle, at, source, length) }
    }

    /// As [`Connection::post`], of a slice.
    ///
    /// # Errors
    /// As there.
    pub fn post_slice(&self, grant: PostGrant, handle: u64, at: PostAt, data: &[u8]) -> Result<Posting, CallError> {
        // SAFETY: a slice is readable for its length.
        unsafe { self.post(Frame::here(), grant, handle, at, data.as_ptr(), data.len()) }
    }

    /// What a call of this thread that was left has posted, or was about to post, in a buffer: the number to go on with when
    /// the service knows nothing of it.
    pub(crate) fn take_back(&self, buffer: usize, post: Sequence) -> Option<Sequence> {
        let area = self.buffer(buffer);
        let state = CallerState::new(area.state());
        posts::take_back(self.post_slots().posted(), (&state, area.extent()), (buffer, post))
    }

    /// As [`Connection::borrow`], of the buffers that are not kept for those who wait for an answer.
    fn borrow_to_post(&self, frame: Frame) -> Result<Borrowed<'_>, CallError> {
        let count = self.welcome.buffers as usize;
        self.borrow_from((count / 4).max(1), frame)
    }
}
