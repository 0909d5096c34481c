//! Handshake messages: their validation, and sending and receiving them with descriptors over `SOCK_SEQPACKET`.

use crate::area::{BUFFERS_MAX, DATA_BYTES, QUEUES_MAX, SLOTS_MAX};
use crate::memory::{PAGE, errno};
use crate::segment::LEASES_MAX;
use crate::wire::{Grant, Hello, MAGIC, VERSION, Welcome};
use core::mem::MaybeUninit;
use poolfs_types::Errno;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::{IoSlice, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use zerocopy::{FromZeros, IntoBytes};

/// Descriptors of a handshake: the buffers' memory file, each queue's, and the leases'.
pub const DESCRIPTORS_MAX: usize = 2 + QUEUES_MAX;

/// Most descriptors of a grant.
pub const GRANT_DESCRIPTORS_MAX: usize = 3;

impl Hello {
    /// The greeting of this version.
    #[must_use]
    pub fn current() -> Self {
        Self { magic: MAGIC, version: VERSION }
    }

    /// Whether the peer speaks this version.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.magic == MAGIC && self.version == VERSION
    }
}

impl Welcome {
    /// Whether every number is within what this version can work with.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let data = self.buffer_data as usize;
        self.magic == MAGIC
            && self.version == VERSION
            && (1..=BUFFERS_MAX).contains(&(self.buffers as usize))
            && (PAGE..=DATA_BYTES).contains(&data)
            && data.is_multiple_of(PAGE)
            && (1..=QUEUES_MAX).contains(&(self.queues as usize))
            && (2..=SLOTS_MAX).contains(&(self.queue_slots as usize))
            && self.queue_slots.is_power_of_two()
            && self.leases as usize <= LEASES_MAX
    }

    /// How many descriptors come with it.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        1 + self.queues as usize + usize::from(self.leases > 0)
    }
}

/// Waits until `socket` is readable; false after `limit_ms`.
pub(crate) fn wait_readable(socket: BorrowedFd<'_>, limit_ms: u32) -> Result<bool, Errno> {
    let limit = Timespec { tv_sec: i64::from(limit_ms / 1000), tv_nsec: i64::from(limit_ms % 1000) * 1_000_000 };
    loop {
        match poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&limit)) {
            Err(rustix::io::Errno::INTR) => {}
            result => return result.map(|ready| ready > 0).map_err(errno),
        }
    }
}

/// Sends the client's greeting.
///
/// # Errors
/// Those of `sendmsg(2)`; never a signal.
pub fn send_hello(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    let hello = Hello::current();
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::send(socket, hello.as_bytes(), flags).map(|_| ()).map_err(errno)
}

/// Sends the service's answer with its descriptors.
///
/// # Errors
/// Those of `sendmsg(2)`; never a signal, never a wait.
pub fn send_welcome(socket: BorrowedFd<'_>, welcome: &Welcome, files: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    send(socket, welcome.as_bytes(), files)
}

/// Receives the service's answer: the message, and its descriptors one by one through `take`, in order.
///
/// # Errors
/// `EPROTO` for anything but a valid answer with the number of descriptors it promises; those of `recvmsg(2)`.
pub fn receive_welcome(socket: BorrowedFd<'_>, take: impl FnMut(usize, OwnedFd)) -> Result<Welcome, Errno> {
    let mut welcome = Welcome::new_zeroed();
    let files = receive(socket, welcome.as_mut_bytes(), take)?;
    if welcome.is_valid() && files == welcome.descriptors() { Ok(welcome) } else { Err(Errno::EPROTO) }
}

/// Sends a grant with its descriptors.
///
/// # Errors
/// As [`send_welcome`]; `EAGAIN` when the client has not received what was sent before.
pub fn send_grant(socket: BorrowedFd<'_>, grant: &Grant, files: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    send(socket, grant.as_bytes(), files)
}

/// A grant, and the descriptors that came with it.
pub type Granted = (Grant, [Option<OwnedFd>; GRANT_DESCRIPTORS_MAX]);

/// Receives a grant: the message, and as many descriptors as it promises.
///
/// # Errors
/// As [`receive_welcome`]; `EAGAIN` when nothing was sent.
pub fn receive_grant(socket: BorrowedFd<'_>) -> Result<Granted, Errno> {
    let mut grant = Grant::new_zeroed();
    let mut received = [const { None }; GRANT_DESCRIPTORS_MAX];
    let files = receive(socket, grant.as_mut_bytes(), |index, file| {
        if let Some(place) = received.get_mut(index) {
            *place = Some(file);
        }
    })?;
    let is_valid = (grant.magic, grant.version, files) == (MAGIC, VERSION, grant.descriptors());
    if is_valid { Ok((grant, received)) } else { Err(Errno::EPROTO) }
}

fn send(socket: BorrowedFd<'_>, message: &[u8], files: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if files.len() > DESCRIPTORS_MAX || !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::EMSGSIZE);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, &[IoSlice::new(message)], &mut control, flags).map(|_| ()).map_err(errno)
}

/// Receives one message of exactly that length; how many descriptors came with it.
fn receive(socket: BorrowedFd<'_>, message: &mut [u8], mut take: impl FnMut(usize, OwnedFd)) -> Result<usize, Errno> {
    let length = message.len();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(socket, &mut [IoSliceMut::new(message)], &mut control, flags).map_err(errno)?;
    let mut files = 0;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            for file in descriptors {
                take(files, file);
                files += 1;
            }
        }
    }
    let whole = received.bytes == length && !received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    if whole { Ok(files) } else { Err(Errno::EPROTO) }
}
