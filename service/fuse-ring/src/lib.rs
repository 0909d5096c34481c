//! FUSE over io_uring: entries of the kernel's queues, each with a ring and memory of its own.
//!
//! It assumes a kernel whose `linux/fuse.h` has `FUSE_OVER_IO_URING` (from 7.42 on); layouts and numbers are those of that
//! header. Begin reading with [`Entry`].
//!
//! The kernel has a queue for each possible CPU. As soon as every queue has an entry, it puts a request into the queue of the CPU
//! on which its caller runs. An [`Entry`] takes one request at a time. Answering it and waiting for the next is one system call
//! of one thread; the kernel wakes the thread that answered for the entry's next request. A message is assembled such that it
//! looks as if it was read from `/dev/fuse`.
//!
//! The crate also has other system calls of FUSE: [`open_backing`] and its counterpart, by which the kernel is given files that
//! it maps by itself.

mod backing;
mod layout;
mod memory;
mod message;

pub use backing::{close_backing, open_backing};
use io_uring::{EnterFlags, IoUring, opcode, squeue, types};
use layout::command;
use memory::{Desk, PAYLOAD, Window};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Pause before a command is tried again for which the kernel had no memory.
const PAUSE: Duration = Duration::from_millis(1);

/// One place of a queue.
pub struct Entry {
    queue: u16,
    device: Arc<OwnedFd>,
    window: Arc<Window>,
    desk: Desk,
    ring: IoUring<squeue::Entry128>,
    /// The number of the request that is being served.
    request: u64,
    /// Where its message is on the desk. The room for its answer begins at its end.
    message: Range<usize>,
}

impl Entry {
    /// An entry of the queue of CPU number `queue`, for requests and answers of up to `payload_bytes` bytes of data: whole
    /// pages, and as much as the connection of `device` was agreed on for.
    ///
    /// # Errors
    /// Those of `io_uring_setup(2)`, `memfd_create(2)` and `mmap(2)`.
    pub fn new(device: &Arc<OwnedFd>, queue: u16, payload_bytes: usize) -> io::Result<Self> {
        let file = memory::file(payload_bytes)?;
        let window = Arc::new(Window::new(&file, payload_bytes)?);
        Self::at(device, queue, window, &file)
    }

    fn at(device: &Arc<OwnedFd>, queue: u16, window: Arc<Window>, file: &OwnedFd) -> io::Result<Self> {
        let desk = Desk::new(file, window.payload_bytes())?;
        Ok(Self {
            queue,
            device: Arc::clone(device),
            window,
            desk,
            ring: ring()?,
            request: 0,
            message: PAYLOAD..PAYLOAD,
        })
    }

    /// The queue it is of.
    #[must_use]
    pub fn queue(&self) -> u16 {
        self.queue
    }

    /// Makes the entry known to the kernel. The calling thread is the one that is going to serve it.
    ///
    /// # Errors
    /// The kernel's. It does without rings then, unless all queues have other entries.
    pub fn register(&mut self) -> io::Result<()> {
        self.ring.submitter().register_enable_rings()?;
        let segments = self.window.lend();
        self.submit(command::REGISTER, segments.as_ptr().addr() as u64)?;
        self.enter(0, EnterFlags::empty())?;
        match self.completed() {
            Some(Err(error)) => {
                self.window.give_back();
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// Hands the last answer over, and waits for the next message. The mount's end ends the wait.
    ///
    /// # Errors
    /// `ENOTCONN` and `ECONNABORTED` when the mount is gone. Whatever the error, nobody has got the last answer, and the
    /// entry is of no more use.
    pub fn receive(&mut self) -> io::Result<()> {
        loop {
            match self.completed() {
                None => self.enter(1, self.wait_flags())?,
                Some(Ok(())) => break,
                Some(Err(error)) => {
                    if matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED)) {
                        self.window.give_back();
                    }
                    return Err(error);
                }
            }
        }
        let (request, message) = self.desk.message();
        (self.request, self.message) = (request, message.unwrap_or(PAYLOAD..PAYLOAD));
        Ok(())
    }

    /// The message that was received, and the room for its answer. The message is empty when the kernel's was none.
    pub fn split(&mut self) -> (&[u8], &mut [u8]) {
        let (before, room) = self.desk.bytes().split_at_mut(self.message.end);
        (&before[self.message.start..], room)
    }

    /// Answers the request with the first so many bytes of the room, or with an errno. [`Entry::receive`] hands that over.
    ///
    /// # Errors
    /// When there is an answer already.
    pub fn answer(&mut self, outcome: Result<usize, i32>) -> io::Result<()> {
        self.desk.answer(self.request, self.message.end, outcome);
        self.submit(command::COMMIT_AND_FETCH, 0)
    }

    /// Whoever may go on with the entry when its thread cannot.
    #[must_use]
    pub fn heir(&self) -> Heir {
        Heir { queue: self.queue, device: Arc::clone(&self.device), window: Arc::clone(&self.window) }
    }

    fn submit(&mut self, number: u32, segments: u64) -> io::Result<()> {
        let command = command::bytes(self.request, self.queue);
        let built = opcode::UringCmd80::new(types::Fd(self.device.as_raw_fd()), number).cmd(command);
        let mut built = built.addr((segments != 0).then_some(segments)).build();
        if segments != 0 {
            layout::set_length(&mut built, layout::SEGMENTS);
        }
        // SAFETY: the kernel reads the segments while the command is submitted. What they refer to is memory of `window`, which
        // is not given back as long as the kernel may use it.
        unsafe { self.ring.submission().push(&built) }.map_err(|_| io::Error::other("two answers to one request"))
    }

    fn completed(&mut self) -> Option<io::Result<()>> {
        let result = self.ring.completion().next()?.result();
        Some(if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) })
    }

    fn wait_flags(&self) -> EnterFlags {
        // Waiting for requests is no waiting for a disk, and is not to be counted as that.
        let quietly = self.ring.params().is_feature_no_iowait();
        EnterFlags::GETEVENTS | if quietly { EnterFlags::NO_IOWAIT } else { EnterFlags::empty() }
    }

    /// Submits what there is to submit, and waits for that many completions.
    fn enter(&mut self, completions: u32, flags: EnterFlags) -> io::Result<()> {
        loop {
            let submitted = self.ring.submission().len() as u32;
            let submitter = self.ring.submitter();
            // SAFETY: without an argument there is nothing the kernel could read or write beyond the ring itself.
            match unsafe { submitter.enter::<libc::sigset_t>(submitted, completions, flags.bits(), None) } {
                Ok(_) => return Ok(()),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => thread::sleep(PAUSE),
                    _ => return Err(error),
                },
            }
        }
    }
}

/// What is left of an entry when the thread that serves its request is stuck with it: enough to answer the request and to serve
/// the next ones in other memory, while the thread goes on with what it has.
#[derive(Clone)]
pub struct Heir {
    queue: u16,
    device: Arc<OwnedFd>,
    window: Arc<Window>,
}

/// An entry that is ready to take the place of another one.
pub struct Successor {
    entry: Entry,
    file: OwnedFd,
}

impl Heir {
    /// The queue it is of.
    #[must_use]
    pub fn queue(&self) -> u16 {
        self.queue
    }

    /// Makes what a successor needs.
    ///
    /// # Errors
    /// As those of [`Entry::new`].
    pub fn successor(&self) -> io::Result<Successor> {
        let file = memory::file(self.window.payload_bytes())?;
        let entry = Entry::at(&self.device, self.queue, Arc::clone(&self.window), &file)?;
        Ok(Successor { entry, file })
    }
}

impl Successor {
    /// Takes the place: from here on the kernel's memory is the new entry's, and `request`, which its predecessor must not answer
    /// any more, is the new entry's to answer. The calling thread is the one that is going to serve it.
    ///
    /// # Errors
    /// Nothing has changed then.
    pub fn step_in(mut self, request: u64) -> io::Result<Entry> {
        self.entry.ring.submitter().register_enable_rings()?;
        self.entry.window.turn_to(&self.file)?;
        self.entry.request = request;
        Ok(self.entry)
    }
}

/// Has the kernel do without rings for the connection of `device`, on which it otherwise waits for every queue to have an entry.
///
/// # Errors
/// Those of `io_uring_setup(2)`: whoever uses the mount waits for good.
pub fn refuse(device: &Arc<OwnedFd>) -> io::Result<()> {
    // It is the refusal of an entry that tells the kernel so, and there is no such queue.
    match Entry::new(device, u16::MAX, memory::PAGE)?.register() {
        Err(_) => Ok(()),
        Ok(()) => Err(io::Error::other("the kernel has a queue too many")),
    }
}

/// A ring for one command at a time, of which the thread that enables it is the only user.
fn ring() -> io::Result<IoUring<squeue::Entry128>> {
    IoUring::builder().setup_r_disabled().setup_single_issuer().setup_defer_taskrun().build(1)
}

#[cfg(test)]
mod tests;
