//! The caller's end of posted writes: a call that posts in a slot.
//!
//! One thread of the process at a time posts in a slot. If another thread is posting there, or a signal handler has interrupted a
//! call that does, an ordinary request is sent. As everything of the caller's end, a post may be interrupted at any point by a
//! handler that posts itself, forks, or leaves by a jump. A post that was left before its bit was set has not happened, and the
//! thread's next call takes its buffer back; a post that was left later has happened.

use crate::area::OutOfBounds;
use crate::borrowed::Borrowed;
use crate::connection::{CallError, Connection};
use crate::hold::Frame;
use crate::posts::{self, POST_BYTES_MAX, POSTED_MAX, PostGrant, SlotWords};
use crate::segment::Leases;
use crate::slot_record::{Latest, PostAt, SlotRecord};
use crate::sync::Ordering;
use crate::wire::{Operation, Reply, Request};

/// Now, as a write's file shows it.
fn realtime_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
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

/// A call that is the one who posts in a slot; ends when dropped.
struct Turn<'a> {
    connection: &'a Connection,
    record: &'a SlotRecord,
    slot: usize,
    frame: Frame,
}

impl<'a> Turn<'a> {
    /// Nothing while another thread's call, or one of this thread that goes on later, has the slot.
    fn take(connection: &'a Connection, slot: usize, frame: Frame) -> Option<Self> {
        let record = connection.slot_records.get(slot)?;
        if !record.hold.take(frame) {
            if !record.hold.recover(frame) {
                return None;
            }
            // What the call that was left has noted may be half of it.
            record.forget_latest();
        }
        Some(Self { connection, record, slot, frame })
    }

    fn words(&self) -> SlotWords<'a> {
        self.connection.post_slots().slot(self.slot)
    }

    /// Makes the latest post longer, if that is what the write comes to; whether it did.
    ///
    /// # Safety
    /// As [`Connection::post`].
    unsafe fn grow(&self, grant: PostGrant, handle: u64, at: PostAt, source: *const u8, length: usize) -> bool {
        let Some(latest) = self.record.latest() else { return false };
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
            self.record.lengthen(end as u32);
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
        self.record.forget_latest();
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
        let number = self.record.next_number();
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
        self.record.set_latest(&Latest { grant, handle, at, buffer: index, number: sequence.number(), length });
        Ok(Posting::Posted)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.connection.marker.is_ours() {
            self.record.hold.give_back();
        }
    }
}

impl Connection {
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

    /// As [`Connection::borrow`], of the buffers that are not kept for those who wait for an answer.
    fn borrow_to_post(&self, frame: Frame) -> Result<Borrowed<'_>, CallError> {
        let count = self.welcome.buffers as usize;
        self.borrow_from((count / 4).max(1), frame)
    }
}
