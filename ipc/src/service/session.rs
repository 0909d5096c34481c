//! A client's session, and a request taken from it.

use crate::area::{BufferArea, DirectReads, OutOfBounds, TAIL_LENGTH};
use crate::futex;
use crate::handshake::send_grant;
use crate::memory::{Mapping, PAGE};
use crate::posts;
use crate::service::budget::{Paid, SessionMemory};
use crate::service::peer::PeerFacts;
use crate::service::tasks::{Rights, Tasks};
use crate::state::{Acquisition, Sequence, withdraw};
use crate::wire::{Grant, Reply, Request, Status};
use poolfs_types::Errno;
use rustix::time::{ClockId, clock_gettime};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// One client's session. `C` is what the service keeps with it.
pub struct Session<C> {
    number: u32,
    facts: PeerFacts,
    tasks: Tasks,
    recheck: Option<Recheck>,
    content: C,
    pub(super) buffers: Mapping,
    data_bytes: usize,
    pub(super) records: Box<[Acquisition]>,
    paid: Box<[Paid]>,
    budget: Arc<dyn SessionMemory>,
    ended: AtomicBool,
    /// It is about to end: no posts are granted any more, and nothing is adopted.
    pub(super) is_dismissed: AtomicBool,
    /// Its client is not what it was: no request is served any more, each is answered that the session has ended.
    is_over: AtomicBool,
    /// A look has shown that, and the thread that looked does what comes before the session is over.
    is_ending: AtomicBool,
    /// When it was last looked what rights the client has.
    looked_at_ms: AtomicU64,
    /// A look has shown that it has others than it was let in with.
    has_other_rights: AtomicBool,
    /// The reception's, which closes it.
    socket: OnceLock<Weak<OwnedFd>>,
    grants: AtomicU64,
}

/// Whether what the service has found out about a client besides still holds. Asked as often as what rights it has.
pub type Recheck = Box<dyn Fn() -> bool + Send + Sync>;

/// A client that changes its rights behind its library's back has at most so long what it had before.
const RIGHTS_MS_MAX: u64 = 1000;

/// Some milliseconds coarse.
fn coarse_ms() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Why bytes of a data area were not moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataError {
    /// the range is not within the area
    OutOfBounds,
    /// the service pays for no more memory of its sessions
    OverBudget,
    /// the file that the bytes come from cannot be read
    Unreadable,
}

impl From<OutOfBounds> for DataError {
    fn from(_: OutOfBounds) -> Self {
        Self::OutOfBounds
    }
}

impl<C> Session<C> {
    /// A session; its buffers' headers and the pages behind them are paid for from `budget`.
    ///
    /// # Errors
    /// `ENOMEM` when the budget does not allow it.
    pub(super) fn new(
        number: u32,
        (facts, tasks): (PeerFacts, Tasks),
        (content, recheck): (C, Option<Recheck>),
        buffers: Mapping,
        count: usize,
        data_bytes: usize,
        budget: &Arc<dyn SessionMemory>,
    ) -> Result<Self, Errno> {
        if !budget.take(count + TAIL_LENGTH / PAGE) {
            return Err(Errno::ENOMEM);
        }
        let records = (0..count).map(|_| Acquisition::default()).collect();
        let paid = (0..count).map(|_| Paid::default()).collect();
        Ok(Self {
            number,
            facts,
            tasks,
            recheck,
            content,
            buffers,
            data_bytes,
            records,
            paid,
            budget: Arc::clone(budget),
            ended: AtomicBool::new(false),
            is_dismissed: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            looked_at_ms: AtomicU64::new(coarse_ms()),
            has_other_rights: AtomicBool::new(false),
            socket: OnceLock::new(),
            grants: AtomicU64::new(1),
        })
    }

    /// Its number in the instance.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Who the client is.
    pub fn facts(&self) -> &PeerFacts {
        &self.facts
    }

    /// What the service keeps with it.
    pub fn content(&self) -> &C {
        &self.content
    }

    /// Its client's socket, before it is welcomed there: its first request may be for what is sent over it.
    pub(super) fn set_socket(&self, socket: &Arc<OwnedFd>) {
        // It is welcomed once.
        let _ = self.socket.set(Arc::downgrade(socket));
    }

    /// Sends the client a segment with the descriptors that belong to it; returns the grant's number. Never waits.
    ///
    /// # Errors
    /// `EAGAIN` when the client has not received earlier ones, `EPIPE` when it is gone.
    pub fn grant(&self, grant: Grant, files: &[BorrowedFd<'_>]) -> Result<u64, Errno> {
        let socket = self.socket.get().and_then(Weak::upgrade).ok_or(Errno::EPIPE)?;
        let number = self.grants.fetch_add(1, Ordering::Relaxed);
        let grant = Grant { number, ..grant };
        send_grant(socket.as_fd(), &grant, files)?;
        Ok(number)
    }

    /// Reads that the client says it did without a request.
    pub fn direct_reads(&self) -> DirectReads<'_> {
        DirectReads::new(&self.buffers)
    }

    /// Whether the client is gone or was sent away; requests under way still end.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Whether the calling thread has to look whether the client still is who it was, because that was done a second ago or longer: no other
    /// thread does it then. Looked at only for who asks something: an idle client costs nothing.
    pub(super) fn claim_look(&self) -> bool {
        let (now, looked_at) = (coarse_ms(), self.looked_at_ms.load(Ordering::Relaxed));
        // Of several threads one looks; none goes on with the old answer for longer than that takes.
        now >= looked_at + RIGHTS_MS_MAX
            && self.looked_at_ms.compare_exchange(looked_at, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// The same for a request.
    pub(super) fn has_to_be_looked_at(&self) -> bool {
        !self.is_ending.load(Ordering::Acquire) && self.claim_look()
    }

    /// A look has shown that its client is not what it was. Whether the calling thread is the one to do what comes before the session
    /// is [over](Session::be_over).
    pub(super) fn begin_ending(&self) -> bool {
        !self.is_ending.swap(true, Ordering::AcqRel)
    }

    /// Whether a thread is at that: nothing is served meanwhile, and nobody waits for it with a thread of the service.
    pub(super) fn is_being_ended(&self) -> bool {
        self.is_ending.load(Ordering::Acquire) && !self.is_over()
    }

    /// Whether the client still is who it was when it was let in.
    pub(super) fn still_has_its_rights(&self) -> bool {
        self.rights() == Rights::Held
    }

    fn rights(&self) -> Rights {
        let found = self.tasks.rights(&self.facts);
        if found == Rights::Lost {
            self.has_other_rights.store(true, Ordering::Relaxed);
        }
        match found {
            Rights::Held if self.recheck.as_ref().is_some_and(|recheck| !recheck()) => Rights::Lost,
            found => found,
        }
    }

    /// Looks at the client where a look is due, as for a request; a session whose client is not what it was ends with its next request.
    /// Whether it is: then no more is to be posted.
    pub fn is_who_it_was(&self) -> bool {
        if !self.claim_look() || self.rights() != Rights::Lost {
            return true;
        }
        self.looked_at_ms.store(0, Ordering::Relaxed);
        false
    }

    /// Whether a look has shown that the client has other rights than it was let in with. What a process has posted that has ended since has those
    /// that it had: nobody can tell any more who it was.
    pub fn has_other_rights(&self) -> bool {
        self.has_other_rights.load(Ordering::Relaxed)
    }

    /// Whether it is about to end, or over: no posts are granted any more, and nothing is adopted.
    pub fn is_dismissed(&self) -> bool {
        self.is_dismissed.load(Ordering::Acquire)
    }

    /// From now on no request is served. It ends when its client hangs up, who has learnt it by then from an answer.
    pub(super) fn be_over(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// Whether its client has become what it was not: whoever waits for an answer is [turned away](Acquired::turn_away).
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Whether `thread` (as this process numbers it) is one of the client's. One system call.
    pub fn owns_thread(&self, thread: u32) -> bool {
        if thread == 0 || self.is_over() || self.has_ended() {
            return false;
        }
        // SAFETY: signal 0 sends nothing; the kernel only says whether the thread belongs to the process.
        let result = unsafe { libc::syscall(libc::SYS_tgkill, self.facts.process, thread, 0) };
        // That it may not be sent a signal is said of a thread that is there: the service needs no right to send any.
        result == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::EPERM)
    }

    pub(super) fn area(&self, index: usize) -> BufferArea<'_> {
        BufferArea::new(&self.buffers, index, self.data_bytes)
    }

    pub(super) fn buffers(&self) -> usize {
        self.records.len()
    }

    /// Acquires buffer `index` if a new request was submitted in it.
    pub(super) fn acquire(self: &Arc<Self>, index: usize) -> Option<Acquired<C>> {
        let record = self.records.get(index)?;
        if self.has_ended() {
            return None;
        }
        let area = self.area(index);
        let sequence = record.acquire(area.state())?;
        let request = area.get_request();
        Some(Acquired { session: Arc::clone(self), index, sequence, request, reply: None, slot: None })
    }

    /// Whether buffer `index` holds a request nobody has acquired.
    pub(super) fn is_waiting(&self, index: usize) -> bool {
        !self.has_ended() && self.records[index].is_due(self.area(index).state())
    }

    /// Whether the service may touch `length` bytes at `offset` of the data area of buffer `index`.
    fn pay(&self, index: usize, offset: usize, length: usize) -> Result<(), DataError> {
        if offset.checked_add(length).is_none_or(|end| end > self.data_bytes) {
            return Err(DataError::OutOfBounds);
        }
        if self.paid[index].pay(&*self.budget, offset, length) { Ok(()) } else { Err(DataError::OverBudget) }
    }
}

impl<C> Drop for Session<C> {
    /// The client may keep the memory file for as long as it likes, and from now on pays for what is in it.
    fn drop(&mut self) {
        // A client that is still copying a reply finds out.
        (0..self.records.len()).for_each(|index| withdraw(self.area(index).state()));
        self.buffers.discard();
        self.budget.give(self.records.len() + TAIL_LENGTH / PAGE + self.paid.iter().map(Paid::pages).sum::<usize>());
    }
}

/// A request, or a post, taken from a session. When dropped it publishes the reply given to [`Acquired::finish`], or `EIO` when the
/// thread that served it gave up.
pub struct Acquired<C> {
    pub(super) session: Arc<Session<C>>,
    pub(super) index: usize,
    pub(super) sequence: Sequence,
    pub(super) request: Request,
    pub(super) reply: Option<Reply>,
    /// Of a post: its slot.
    pub(super) slot: Option<usize>,
}

impl<C> Acquired<C> {
    /// The session it came from.
    pub fn session(&self) -> &Arc<Session<C>> {
        &self.session
    }

    /// The request, copied out: the client can no longer change it.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// The slot, if it is a post.
    pub fn posted_in(&self) -> Option<usize> {
        self.slot
    }

    /// Bytes of the data area.
    pub fn data_bytes(&self) -> usize {
        self.session.data_bytes
    }

    /// Copies from the data area into `target`. Whatever is checked is to be checked on the copy.
    ///
    /// # Errors
    /// [`DataError`], and nothing is copied.
    pub fn get_data(&self, offset: usize, target: &mut [u8]) -> Result<(), DataError> {
        match self.session.pay(self.index, offset, target.len()) {
            // Nobody waits for the answer: the bytes are the client's, who has touched the pages first.
            Err(DataError::OverBudget) if self.slot.is_some() => {}
            paid => paid?,
        }
        Ok(self.session.area(self.index).get_data(offset, target)?)
    }

    /// Copies `source` into the data area.
    ///
    /// # Errors
    /// [`DataError`], and nothing is copied.
    pub fn put_data(&self, offset: usize, source: &[u8]) -> Result<(), DataError> {
        self.session.pay(self.index, offset, source.len())?;
        Ok(self.session.area(self.index).put_data(offset, source)?)
    }

    /// Has the kernel put what `file` has from `at` on into the data area; zeros behind its end.
    ///
    /// # Errors
    /// [`DataError`], and nothing is put.
    pub fn put_file(&self, offset: usize, length: usize, file: &File, at: u64) -> Result<(), DataError> {
        self.session.pay(self.index, offset, length)?;
        self.session.area(self.index).put_file(offset, length, file, at).map_err(|_| DataError::Unreadable)
    }

    /// Tells the caller that its session has ended, and that nothing has happened.
    pub fn turn_away(self) {
        self.finish(&Reply { status: Status::Ended as u32, ..Reply::default() });
    }

    /// Publishes the reply and wakes the caller if it sleeps.
    pub fn finish(mut self, reply: &Reply) {
        self.reply = Some(*reply);
    }
}

impl<C> Drop for Acquired<C> {
    fn drop(&mut self) {
        let failed = Reply { status: Status::Failed as u32, errno: Errno::EIO.raw(), ..Reply::default() };
        let area = self.session.area(self.index);
        area.put_reply(self.reply.as_ref().unwrap_or(&failed));
        let (record, word) = (&self.session.records[self.index], area.state());
        let must_wake = match self.slot {
            Some(slot) => posts::finish(&self.session.slot(slot), record, word, (self.index, self.sequence)),
            None => record.finish(word, self.sequence),
        };
        if must_wake {
            futex::wake_all(word);
        }
    }
}
