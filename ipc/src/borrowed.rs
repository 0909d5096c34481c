//! A request buffer: how a call borrows one, and one call in it, from submission to its reply.
//!
//! Nothing here allocates, locks, or uses thread-local storage or libc, so a signal handler may call it at any point.

use crate::area::{BufferArea, OutOfBounds};
use crate::connection::{CallError, Connection};
use crate::futex::{self, Woken};
use crate::hold::{Frame, thread_token};
use crate::posts::{self, PostGrant, Published, SlotWords};
use crate::queue::{Doorbell, DoorbellQueue, Full, RelaxedQueue};
use crate::state::{CallerState, Left, Sequence};
use crate::sync::Ordering;
use crate::wire::{Reply, Request, Status};
use core::time::Duration;

/// Calls one thread may have under way: its own and those of two nested signal handlers.
const DEPTH_MAX: usize = 3;

/// Longest sleep before a caller rings again and tests whether the service lives: well below the 100 ms within which a
/// caller has to know of a death.
const SLEEP_MAX: Duration = Duration::from_millis(40);

/// Longest sleep for a free slot of a full queue.
const FULL_SLEEP_MAX: Duration = Duration::from_millis(5);

/// Such sleeps of who rings for a post that nobody waits for.
const FULL_SLEEPS_MAX: usize = 4;

/// Sleeps until a full queue has a free slot again, or for a while.
fn wait_for_space(queue: &RelaxedQueue<'_>) -> Woken {
    futex::wake_all(queue.ring());
    let seen = queue.announce_full();
    let woken = futex::wait(queue.space(), seen, FULL_SLEEP_MAX);
    queue.end_full();
    woken
}

/// Until when a caller waits for a reply, by [`monotonic_ns`]; nothing: as long as it takes.
#[derive(Clone, Copy)]
struct Limit(Option<u64>);

impl Limit {
    fn of(timeout_ms: u32) -> Self {
        Self((timeout_ms > 0).then(|| monotonic_ns() + u64::from(timeout_ms) * 1_000_000))
    }

    /// The one of both that is over first.
    fn or(self, other: Self) -> Self {
        Self(self.0.into_iter().chain(other.0).min())
    }

    fn check(self) -> Result<(), CallError> {
        if self.0.is_some_and(|end| monotonic_ns() >= end) { Err(CallError::TimedOut) } else { Ok(()) }
    }
}

/// Now, as requests say when they were submitted.
fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A request buffer borrowed by the calling thread. Given back when dropped.
pub struct Borrowed<'a> {
    connection: &'a Connection,
    index: usize,
    sequence: Sequence,
    in_flight: bool,
    /// Whose doorbell calls for it: that of a slot, for a post.
    slot: Option<u16>,
}

impl<'a> Borrowed<'a> {
    fn new(connection: &'a Connection, index: usize, sequence: Sequence) -> Self {
        Self { connection, index, sequence, in_flight: false, slot: None }
    }

    fn area(&self) -> BufferArea<'_> {
        self.connection.buffer(self.index)
    }

    /// Copies `source` into the data area.
    ///
    /// # Errors
    /// [`OutOfBounds`], and nothing is copied.
    pub fn put_data(&mut self, offset: usize, source: &[u8]) -> Result<(), OutOfBounds> {
        self.area().put_data(offset, source)
    }

    /// Copies from the data area what a reply brought.
    ///
    /// # Errors
    /// [`CallError::Dead`] beyond the area, and when the session ended meanwhile: what was copied is worth nothing then.
    pub fn get_data(&self, offset: usize, target: &mut [u8]) -> Result<(), CallError> {
        // SAFETY: a slice is writable for its length.
        unsafe { self.get_data_raw(offset, target.as_mut_ptr(), target.len()) }
    }

    /// As [`put_data`](Self::put_data), from the program's own memory.
    ///
    /// # Errors
    /// [`OutOfBounds`], and nothing is copied.
    ///
    /// # Safety
    /// `source` must be readable for `length` bytes (a fault is the program's own).
    pub unsafe fn put_data_raw(&mut self, offset: usize, source: *const u8, length: usize) -> Result<(), OutOfBounds> {
        // SAFETY: the caller vouches for the source; no program has a pointer into the session's memory.
        unsafe { self.area().put_data_raw(offset, source, length) }
    }

    /// As [`get_data`](Self::get_data), into the program's own memory.
    ///
    /// # Errors
    /// As for [`get_data`](Self::get_data).
    ///
    /// # Safety
    /// `target` must be writable for `length` bytes (a fault is the program's own).
    pub unsafe fn get_data_raw(&self, offset: usize, target: *mut u8, length: usize) -> Result<(), CallError> {
        // SAFETY: the caller vouches for the target; no program has a pointer into the session's memory.
        unsafe { self.area().get_data_raw(offset, target, length) }.map_err(|OutOfBounds| CallError::Dead)?;
        self.confirm()
    }

    /// Whether what was copied from the reply is the reply's.
    fn confirm(&self) -> Result<(), CallError> {
        let whole = CallerState::new(self.area().state()).is_still_done(self.sequence);
        if whole { Ok(()) } else { Err(CallError::Dead) }
    }

    /// Submits `request`, waits for its end and returns the reply. The data area then holds what the reply says.
    ///
    /// # Errors
    /// [`CallError::Dead`], at most 100 ms after the service's death; [`CallError::TimedOut`]; [`CallError::NoSession`];
    /// [`CallError::Ended`].
    pub fn execute(&mut self, request: &Request) -> Result<Reply, CallError> {
        self.execute_within(request, Limit(None))
    }

    /// As [`Borrowed::execute`], for who waits so long at most.
    ///
    /// # Errors
    /// As there.
    pub fn execute_for(&mut self, request: &Request, time: Duration) -> Result<Reply, CallError> {
        self.execute_within(request, Limit::of(u32::try_from(time.as_millis()).unwrap_or(u32::MAX).max(1)))
    }

    fn execute_within(&mut self, request: &Request, limit: Limit) -> Result<Reply, CallError> {
        // A handler may fork at any point of this. Its child finds the session's memory empty, which else would mean that the
        // service let go of the session.
        self.execute_here(request, limit)
            .map_err(|error| if self.connection.is_inherited() { CallError::NoSession } else { error })
    }

    fn execute_here(&mut self, request: &Request, limit: Limit) -> Result<Reply, CallError> {
        if !self.connection.is_usable() {
            return Err(CallError::NoSession);
        }
        self.put_request(request);
        self.sequence = CallerState::new(self.area().state()).submit(self.sequence);
        self.in_flight = true;
        self.connection.calls.fetch_add(1, Ordering::Relaxed);
        self.complete(limit)
    }

    /// Has what was submitted served, and waits for the reply.
    fn complete(&mut self, limit: Limit) -> Result<Reply, CallError> {
        let limit = limit.or(Limit::of(self.connection.welcome.timeout_ms));
        let group = self.ring(false, limit)?;
        self.wait(group, limit)?;
        let reply = self.area().get_reply();
        self.confirm()?;
        self.in_flight = false;
        if reply.status == Status::Ended as u32 { Err(CallError::Ended) } else { Ok(reply) }
    }

    /// Submits `request` as a post of the slot with these words, of `length` bytes that are in the data area. It is served
    /// from then on: when dropped, the buffer is left to who serves it.
    pub(crate) fn post(
        &mut self,
        request: &Request,
        words: &SlotWords<'_>,
        grant: PostGrant,
        length: u32,
    ) -> (Sequence, Published) {
        self.put_request(request);
        self.slot = Some(grant.slot() as u16);
        self.in_flight = true;
        let area = self.area();
        let state = CallerState::new(area.state());
        let borrowed = (self.index, self.sequence);
        let (sequence, published) = posts::submit(words, (&state, area.extent()), borrowed, grant.epoch(), length);
        self.sequence = sequence;
        self.connection.calls.fetch_add(1, Ordering::Relaxed);
        (sequence, published)
    }

    /// Waits for the answer to a post after all.
    ///
    /// # Errors
    /// As [`Borrowed::execute`].
    pub(crate) fn answer(&mut self) -> Result<Reply, CallError> {
        self.complete(Limit(None))
            .map_err(|error| if self.connection.is_inherited() { CallError::NoSession } else { error })
    }

    /// Rings for a post that nobody waits for. Should the queue stay full, the next post or request has it served.
    pub(crate) fn announce(&self) {
        for _ in 0..FULL_SLEEPS_MAX {
            let (_, Some(queue)) = self.connection.queue() else { return };
            match queue.publish(self.doorbell(false)) {
                Ok(true) => return futex::wake_one(queue.ring()),
                Ok(false) => return,
                Err(Full) => _ = wait_for_space(&queue),
            }
        }
    }

    pub(crate) fn index(&self) -> usize {
        self.index
    }

    fn doorbell(&self, again: bool) -> Doorbell {
        let session = self.connection.welcome.session;
        let bell = self.slot.map(|slot| Doorbell::of_posts(session, slot));
        Doorbell { again, ..bell.unwrap_or(Doorbell { session, buffer: self.index as u16, again }) }
    }

    fn put_request(&self, request: &Request) {
        if self.connection.wants_stamps() {
            let stamped = Request { submitted_ns: monotonic_ns(), ..*request };
            self.area().put_request(&stamped);
        } else {
            self.area().put_request(request);
        }
    }

    /// Puts the doorbell into the queue of this CPU's core group and wakes a service thread if one may sleep.
    fn ring(&self, again: bool, limit: Limit) -> Result<usize, CallError> {
        let doorbell = self.doorbell(again);
        loop {
            let (group, queue) = self.connection.queue();
            let Some(queue) = queue else { return Err(CallError::Dead) };
            match queue.publish(doorbell) {
                Ok(sleepers) => {
                    // Who rings again wakes all: others of the instance may sleep on the word, and take the wake-up of one.
                    if again {
                        futex::wake_all(queue.ring());
                    } else if sleepers {
                        futex::wake_one(queue.ring());
                    }
                    return Ok(group);
                }
                Err(Full) => {
                    if wait_for_space(&queue) == Woken::TimedOut {
                        self.test_service()?;
                    }
                }
            }
            // A doorbell of this session that was rung again may have had the buffer served meanwhile.
            if CallerState::new(self.area().state()).is_done(self.sequence) {
                return Ok(group);
            }
            limit.check()?;
        }
    }

    fn wait(&self, group: usize, limit: Limit) -> Result<(), CallError> {
        let area = self.area();
        let state = CallerState::new(area.state());
        if self.connection.shared_by_cpus >> group & 1 == 1
            && self.connection.spinner.spin(|| state.is_done(self.sequence))
        {
            return Ok(());
        }
        while !state.is_done(self.sequence) {
            // The child of a handler that forked goes on here.
            if self.connection.is_inherited() {
                return Err(CallError::NoSession);
            }
            if self.connection.closed.load(Ordering::Acquire) {
                return Err(CallError::Dead);
            }
            let Some(expected) = state.announce_sleep(self.sequence) else {
                // Served just now, or withdrawn by a service that let go of the session.
                return if state.is_done(self.sequence) { Ok(()) } else { Err(CallError::Dead) };
            };
            if futex::wait(area.state(), expected, SLEEP_MAX) == Woken::TimedOut && !state.is_done(self.sequence) {
                self.test_service()?;
                limit.check()?;
                self.ring(true, limit)?;
            }
        }
        Ok(())
    }

    /// Whether the service still lives; closes the session when it does not.
    fn test_service(&self) -> Result<(), CallError> {
        if self.connection.is_connected() {
            return Ok(());
        }
        self.connection.close();
        // The service may have served the request before it let go.
        if CallerState::new(self.area().state()).is_done(self.sequence) { Ok(()) } else { Err(CallError::Dead) }
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        // A request whose end is not known keeps its buffer, as a post does: the service might still write there.
        if self.connection.marker.is_ours() {
            if !self.in_flight {
                CallerState::new(self.area().state()).give_back(self.sequence);
            }
            self.connection.owners[self.index].give_back();
        }
    }
}

impl Connection {
    /// Borrows a request buffer for one call or several in a row. `frame` is that of the call, which has ended when the thread
    /// is there again.
    ///
    /// # Errors
    /// [`CallError::NoSession`] or [`CallError::Busy`]; [`CallError::Dead`] when this thread left a call by a jump while its
    /// request was under way: only with the session it is sure that nothing comes of it any more.
    pub fn borrow(&self, frame: Frame) -> Result<Borrowed<'_>, CallError> {
        self.borrow_from(0, frame)
    }

    /// As [`Connection::borrow`]. Buffers before `first` are borrowed only if the thread has left them.
    pub(crate) fn borrow_from(&self, first: usize, frame: Frame) -> Result<Borrowed<'_>, CallError> {
        if !self.is_usable() {
            return Err(CallError::NoSession);
        }
        let count = self.welcome.buffers as usize;
        let mut depth = 0;
        for (index, owner) in self.owners[..count].iter().enumerate().filter(|(_, owner)| owner.is_own()) {
            if !owner.recover(frame) {
                depth += 1;
                continue;
            }
            let left = match CallerState::new(self.buffer(index).state()).recover() {
                Left::Nothing(left) => Some(left),
                Left::Request => return Err(CallError::Dead),
                Left::Post(post) => self.take_back(index, post),
            };
            match left {
                Some(left) => return Ok(Borrowed::new(self, index, left)),
                // It is served without anybody.
                None => owner.give_back(),
            }
        }
        if depth >= DEPTH_MAX {
            return Err(CallError::Busy);
        }
        // Thread control blocks lie whole pages apart: the bits above choose well.
        let token = thread_token();
        let start = (token >> 12) ^ (token >> 18);
        for index in (0..count).map(|step| start.wrapping_add(step) % count).filter(|&index| index >= first) {
            let area = self.buffer(index);
            let state = CallerState::new(area.state());
            // A post that waits to be taken is left in peace: it may be about to be made longer.
            if !(state.is_free() || state.is_served()) || !self.owners[index].take(frame) {
                continue;
            }
            // Served, and held by nobody: its caller has not waited so long.
            if let Some(sequence) = state.borrow().or_else(|| state.borrow_served()) {
                return Ok(Borrowed::new(self, index, sequence));
            }
            self.owners[index].give_back();
        }
        Err(CallError::Busy)
    }

    /// One call: copies `input` (its parts one after another) into the data area, and from the data area of a served reply as
    /// many bytes into `output` as the reply's `length` says and `output` holds.
    ///
    /// # Errors
    /// See [`CallError`]; [`CallError::Busy`] also for input beyond [`Connection::data_bytes`].
    pub fn call(&self, request: &Request, input: &[&[u8]], output: &mut [u8]) -> Result<Reply, CallError> {
        let mut buffer = self.borrow(Frame::here())?;
        let mut offset = 0;
        for part in input {
            buffer.put_data(offset, part).map_err(|OutOfBounds| CallError::Busy)?;
            offset += part.len();
        }
        let reply = buffer.execute(request)?;
        let length = (reply.length.min(self.data_bytes() as u64) as usize).min(output.len());
        buffer.get_data(0, &mut output[..length])?;
        Ok(reply)
    }

    /// What a call of this thread that was left has posted, or was about to post, in a buffer: the number to go on with when
    /// the service knows nothing of it.
    fn take_back(&self, buffer: usize, post: Sequence) -> Option<Sequence> {
        let area = self.buffer(buffer);
        let state = CallerState::new(area.state());
        posts::take_back(self.post_slots().posted(), (&state, area.extent()), (buffer, post))
    }
}
