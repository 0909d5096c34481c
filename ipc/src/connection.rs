//! The caller's end of a session: its socket, its memory, and what the service said at the beginning.
//!
//! Nothing here allocates, locks, or uses thread-local storage or libc, so a signal handler may call it at any point.

use crate::area::{self, BUFFERS_MAX, BufferArea, DirectReads, QUEUES_MAX};
use crate::futex;
use crate::handshake::{DESCRIPTORS_MAX, Granted, receive_grant, receive_welcome, send_hello, wait_readable};
use crate::hold::Hold;
use crate::memory::{ForkMarker, Mapping, errno};
use crate::post_slots::PostSlots;
use crate::posts::POST_SLOTS;
use crate::queue::RelaxedQueue;
use crate::segment::{FileNotice, Leases, SegmentView};
use crate::slot_record::SlotRecord;
use crate::spin::Spinner;
use crate::sync::{AtomicBool, AtomicU64, Ordering};
use crate::wire::{Grant, Welcome};
use core::ffi::CStr;
use core::mem::ManuallyDrop;
use core::time::Duration;
use poolfs_types::Errno;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use rustix::net::sockopt::Timeout;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Longest wait for a place in the queue of connections, which is full when many programs start while the service cannot run.
const CONNECT_WAIT_MAX: Duration = Duration::from_secs(1);

/// Signals that may interrupt that wait, each of which begins it anew.
const INTERRUPTIONS_MAX: usize = 16;

/// Longest wait for the service's answer to a connection.
const WELCOME_WAIT_MS_MAX: u32 = 1000;

/// The library's own descriptors are kept at or above this number, out of the way of programs that rely on low ones.
pub const OWN_DESCRIPTOR_MIN: i32 = 500;

/// Why a call brought no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallError {
    /// The session is not this process's (it was inherited over a fork), or was closed: nothing happened. Use the kernel.
    NoSession,
    /// The service has ended the session, because this process is not what it was: nothing happened. Close it, and use the kernel.
    Ended,
    /// No buffer is free, or this thread is too deep in signal handlers: nothing happened. Use the kernel.
    Busy,
    /// The service died or dropped the session; whether the request was served is not known: `EIO`.
    Dead,
    /// No reply came within the time that the service has named for its mount: `EIO`. The request may be served later.
    TimedOut,
}

/// A session with a filesystem instance. All methods may be called from many threads and from signal handlers.
pub struct Connection {
    pub(crate) marker: ForkMarker,
    /// Number of the socket's descriptor; negative when closed. The program may have closed it behind our back: see
    /// [`Connection::with_socket`].
    socket: i32,
    cookie: u64,
    pub(crate) welcome: Welcome,
    buffers: ManuallyDrop<Mapping>,
    queues: ManuallyDrop<[Option<Mapping>; QUEUES_MAX]>,
    pub(crate) leases: ManuallyDrop<Option<Leases>>,
    /// Per queue: whether another CPU serves it too, so that spinning can pay.
    pub(crate) shared_by_cpus: u64,
    /// Which call borrowed each buffer.
    pub(crate) owners: [Hold; BUFFERS_MAX],
    /// Who posts in each slot.
    pub(crate) slot_records: [SlotRecord; POST_SLOTS],
    pub(crate) closed: AtomicBool,
    pub(crate) spinner: Spinner,
    pub(crate) calls: AtomicU64,
}

impl Connection {
    /// Connects to the instance's socket at `path`. Waits at most a second for a place among those who want to be let in, and
    /// another one to be let in.
    ///
    /// # Errors
    /// Those of `connect(2)`; `ETIMEDOUT`; `EPROTO` when the peer is no service of this version; `ECONNRESET` when the service
    /// refused.
    pub fn open(path: &CStr) -> Result<Self, Errno> {
        let address = SocketAddrUnix::new(path).map_err(errno)?;
        let flags = SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(errno)?;
        rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Send, Some(CONNECT_WAIT_MAX)).map_err(errno)?;
        for _ in 0..INTERRUPTIONS_MAX {
            match rustix::net::connect(&socket, &address) {
                Err(rustix::io::Errno::INTR) => {}
                result => return result.map_err(errno).and_then(|()| Self::greet(socket)),
            }
        }
        Err(Errno::EINTR)
    }

    /// Makes a session over a connected socket.
    ///
    /// # Errors
    /// As [`Connection::open`].
    pub fn greet(socket: OwnedFd) -> Result<Self, Errno> {
        send_hello(socket.as_fd())?;
        if !wait_readable(socket.as_fd(), WELCOME_WAIT_MS_MAX)? {
            return Err(Errno::ETIMEDOUT);
        }
        let mut files = [const { None }; DESCRIPTORS_MAX];
        let welcome = receive_welcome(socket.as_fd(), |index, file| {
            if let Some(place) = files.get_mut(index) {
                *place = Some(file);
            }
        })?;
        let map = |file: &Option<OwnedFd>, length| match file {
            Some(file) => Mapping::of_sealed(file, length, true),
            None => Err(Errno::EPROTO),
        };
        let buffers = map(&files[0], area::buffers_length(welcome.buffers as usize, welcome.buffer_data as usize))?;
        let mut queues = [const { None }; QUEUES_MAX];
        for (queue, file) in queues.iter_mut().zip(&files[1..]).take(welcome.queues as usize) {
            *queue = Some(map(file, area::queue_length(welcome.queue_slots as usize))?);
        }
        let leases = match files.get(1 + welcome.queues as usize).and_then(Option::as_ref) {
            Some(file) if welcome.leases > 0 => Some(Leases::new(file, welcome.leases as usize, false)?),
            _ => None,
        };
        let cookie = rustix::net::sockopt::socket_cookie(&socket).map_err(errno)?;
        let marker = ForkMarker::new()?;
        let socket = rustix::io::fcntl_dupfd_cloexec(&socket, OWN_DESCRIPTOR_MIN).unwrap_or(socket);
        Ok(Self {
            marker,
            socket: socket.into_raw_fd(),
            cookie,
            shared_by_cpus: shared_by_cpus(&welcome),
            welcome,
            buffers: ManuallyDrop::new(buffers),
            queues: ManuallyDrop::new(queues),
            leases: ManuallyDrop::new(leases),
            owners: [const { Hold::new() }; BUFFERS_MAX],
            slot_records: Default::default(),
            closed: AtomicBool::new(false),
            spinner: Spinner::default(),
            calls: AtomicU64::new(0),
        })
    }

    /// The session's number, as the adoption ioctl wants it.
    pub fn session(&self) -> u32 {
        self.welcome.session
    }

    /// Device number (major, minor) of the instance's mounts.
    pub fn device(&self) -> (u32, u32) {
        (self.welcome.device[0], self.welcome.device[1])
    }

    /// Bytes of a data area: the most one request carries.
    pub fn data_bytes(&self) -> usize {
        self.welcome.buffer_data as usize
    }

    /// Requests submitted so far.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Number of the socket's descriptor, so that the library can keep the program from closing it by mistake.
    pub fn socket_number(&self) -> i32 {
        self.socket
    }

    /// Whether this process may use the session: it was not inherited over a fork, not closed, and was not found dead.
    pub fn is_usable(&self) -> bool {
        self.marker.is_ours() && !self.closed.load(Ordering::Acquire)
    }

    /// Whether the session was inherited over a fork: its memory is not mapped here.
    pub fn is_inherited(&self) -> bool {
        !self.marker.is_ours()
    }

    /// The ranges of its memory, which a forked child does not have.
    pub fn ranges(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let all = core::iter::once(&*self.buffers).chain(self.queues.iter().flatten());
        let all = all.map(|mapping| (mapping.base().as_ptr() as usize, mapping.length()));
        all.chain(self.leases.iter().map(Leases::range))
    }

    /// Where it counts the reads it does without a request.
    #[inline]
    pub fn direct_reads(&self) -> DirectReads<'_> {
        DirectReads::new(&self.buffers)
    }

    /// The page where that is.
    pub fn counts_range(&self) -> (usize, usize) {
        DirectReads::range(&self.buffers)
    }

    /// The words of its leases, if there are any.
    pub fn leases_range(&self) -> Option<(usize, usize)> {
        self.leases.as_ref().map(Leases::range)
    }

    /// Whether the service gives segments.
    pub fn gives_segments(&self) -> bool {
        self.leases.is_some()
    }

    /// How many closings of its file's descriptors a lease counts; nothing when it has been revoked since its grant, or the
    /// service that gave it is gone.
    #[inline]
    pub fn closings(&self, lease: u32, epoch: u32) -> Option<u32> {
        let leases = self.leases.as_ref()?;
        let word = leases.look(lease as usize).filter(|word| word.epoch == epoch)?;
        leases.is_live().then_some(word.closings)
    }

    /// Receives the grant with this number, which the service has sent, and maps it. Earlier ones that nobody received are
    /// dropped. One thread at a time, and not to be left by a jump.
    ///
    /// # Errors
    /// `EAGAIN` when it is not there (another thread has received it), else those of receiving and mapping.
    pub fn receive_segment(&self, number: u64) -> Result<(Grant, SegmentView, FileNotice), Errno> {
        let (grant, [Some(map), Some(data), Some(notice)]) = self.receive(number)? else { return Err(Errno::EPROTO) };
        let notice = FileNotice::new(notice, false)?;
        Ok((grant, SegmentView::new(map, data, grant.capacity)?, notice))
    }

    /// Receives the whole file that was granted with this number, as [`Connection::receive_segment`].
    ///
    /// # Errors
    /// As there.
    pub fn receive_whole_file(&self, number: u64) -> Result<OwnedFd, Errno> {
        match self.receive(number)? {
            (Grant { capacity: 0, .. }, [Some(file), ..]) => Ok(file),
            _ => Err(Errno::EPROTO),
        }
    }

    fn receive(&self, number: u64) -> Result<Granted, Errno> {
        let received = self.with_socket(|socket| {
            loop {
                let granted = receive_grant(socket)?;
                if granted.0.number == number {
                    return Ok(granted);
                }
            }
        });
        received.unwrap_or(Err(Errno::EBADF))
    }

    /// Whether no call is under way, so that the value may be dropped once nobody can start one.
    pub fn is_idle(&self) -> bool {
        self.owners.iter().all(Hold::is_free) && self.slot_records.iter().all(SlotRecord::is_free)
    }

    /// Runs `use_it` with the socket, if the number still is our socket's.
    fn with_socket<T>(&self, use_it: impl FnOnce(BorrowedFd<'_>) -> T) -> Option<T> {
        if self.socket < 0 {
            return None;
        }
        // SAFETY: the number is only used for calls that fail cleanly on a closed one, and the cookie, unique on this
        // kernel, tells whether it is still our socket before anything is done with it.
        let socket = unsafe { BorrowedFd::borrow_raw(self.socket) };
        match rustix::net::sockopt::socket_cookie(socket) {
            Ok(cookie) if cookie == self.cookie => Some(use_it(socket)),
            _ => None,
        }
    }

    /// Whether the service still holds its end, and the program has not closed ours. One or two system calls.
    pub fn is_connected(&self) -> bool {
        self.with_socket(|socket| {
            let mut polled = [PollFd::new(&socket, PollFlags::RDHUP)];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let hang_up = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
            !matches!(poll(&mut polled, Some(&now)), Ok(1..) if polled[0].revents().intersects(hang_up))
        })
        .unwrap_or(false)
    }

    /// Ends the session: calls under way end with [`CallError::Dead`] unless they were served, later ones with
    /// [`CallError::NoSession`]. The memory stays mapped until the value is dropped.
    ///
    /// In a forked child this only closes the child's copy of the descriptor.
    pub fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let ours = self.marker.is_ours();
        self.with_socket(|socket| {
            if ours {
                // A failure means that the peer is gone already.
                let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
            }
            // SAFETY: the descriptor is our socket's (its cookie matched) and `closed` keeps anybody from closing it again.
            drop(unsafe { OwnedFd::from_raw_fd(self.socket) });
        });
        if ours {
            for index in 0..self.welcome.buffers as usize {
                futex::wake_all(self.buffer(index).state());
            }
        }
    }

    pub(crate) fn buffer(&self, index: usize) -> BufferArea<'_> {
        BufferArea::new(&self.buffers, index, self.welcome.buffer_data as usize)
    }

    /// The queue of the core group this thread runs on, and its number.
    pub(crate) fn queue(&self) -> (usize, Option<RelaxedQueue<'_>>) {
        let cpu = rustix::thread::sched_getcpu();
        let group = usize::from(self.welcome.group_of_cpu.get(cpu).copied().unwrap_or(0));
        let group = if group < self.welcome.queues as usize { group } else { 0 };
        let queue = self.queues[group].as_ref().map(|mapping| area::queue(mapping, self.welcome.queue_slots as usize));
        (group, queue)
    }

    /// Whether the service wants to know when requests are submitted: where they have a time limit, or it says so. All its queues say the same.
    pub(crate) fn wants_stamps(&self) -> bool {
        if self.welcome.timeout_ms > 0 {
            return true;
        }
        let first = self.queues[0].as_ref();
        first.is_some_and(|mapping| area::queue(mapping, self.welcome.queue_slots as usize).wants_stamps())
    }

    pub(crate) fn post_slots(&self) -> PostSlots<'_> {
        PostSlots::new(&self.buffers)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close();
        if self.marker.is_ours() {
            // SAFETY: dropped once, here; in a forked child they are not mapped, and their addresses may be others'.
            unsafe {
                ManuallyDrop::drop(&mut self.buffers);
                ManuallyDrop::drop(&mut self.queues);
                ManuallyDrop::drop(&mut self.leases);
            }
        }
    }
}

/// Bit n: the core group n has more than one CPU.
fn shared_by_cpus(welcome: &Welcome) -> u64 {
    let (mut seen, mut twice) = (0u64, 0u64);
    for group in welcome.group_of_cpu.iter().filter(|&&group| u32::from(group) < welcome.queues) {
        let bit = 1 << group;
        twice |= seen & bit;
        seen |= bit;
    }
    twice
}
