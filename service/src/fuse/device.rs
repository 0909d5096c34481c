//! The descriptor of `/dev/fuse`: one read for each message, one write for each answer or notification.

use super::abi::{self, notify};
use crate::guard::Guarded;
use crate::notify::{ByDescriptor, KernelCache};
use crate::transfers::{Charge, KEPT_BYTES, MountTransfers};
use poolfs_libservice::types::Errno;
use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno as OsErrno;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tracing::debug;
use zerocopy::{Immutable, IntoBytes};

/// Most bytes of one READ or WRITE.
pub(super) const TRANSFER_BYTES_MAX: usize = 1 << 20;

const PAGE: usize = 4096;

/// What comes before the data of a WRITE.
const WRITE_HEAD: usize = size_of::<abi::InHeader>() + size_of::<abi::WriteIn>();

/// A thread that has had nothing to do for so long keeps little of its buffer. Only a buffer of which more was used is waited
/// with, unless the thread is to end then: every mount has several threads, and most mounts nothing to do.
const KEPT_FOR: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// The kernel takes errors above this one for a broken answer, and its caller would wait for good.
const ERRNO_MAX: i32 = 511;

/// The connection of one mount.
pub(super) struct Device {
    descriptor: Arc<OwnedFd>,
    expires_names: bool,
    takes_backings: bool,
    forget_unused: OnceLock<ForgetUnused>,
    guarded: OnceLock<Guarded>,
}

/// Has the kernel forget what nobody uses of the mount.
pub(super) type ForgetUnused = Box<dyn Fn() -> io::Result<()> + Send + Sync>;

/// Where a thread receives messages and makes up its answers: one piece of memory for both. It is placed such that the data
/// of a WRITE, and of the answer to a READ, begin on a page.
pub(super) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    /// How much of it was ever used.
    used: usize,
    /// What of that the pool's memory is charged with.
    charge: Charge,
    transfers: Arc<MountTransfers>,
    /// What messages are waited for with, once that is done with a time-out.
    waiter: Option<OwnedFd>,
}

impl Buffer {
    pub(super) fn new(transfers: &Arc<MountTransfers>) -> Self {
        // A page to align in, one for the head, the data, one for the answer to a WRITE.
        let bytes = vec![0; TRANSFER_BYTES_MAX + 3 * PAGE];
        let aligned = bytes.as_ptr().align_offset(PAGE).min(PAGE);
        let start = aligned + PAGE - WRITE_HEAD;
        Self { bytes, start, used: 0, charge: transfers.charge(), transfers: Arc::clone(transfers), waiter: None }
    }

    /// The next message; nothing when a thread that `may_end` then had nothing to do for a while, and has given its memory back. For that it is
    /// waited only with much memory, or where threads are scarce: elsewhere a message is one system call.
    pub(super) fn receive(&mut self, device: &Device, may_end: bool) -> io::Result<Option<usize>> {
        if self.used > KEPT_BYTES || may_end && self.transfers.is_scarce() {
            match self.release_when_idle(device) {
                Ok(is_idle) if is_idle && may_end => return Ok(None),
                Ok(_) => {}
                Err(error) => debug!(%error, "a thread keeps its memory"),
            }
        }
        let room = &mut self.bytes[self.start..][..WRITE_HEAD + TRANSFER_BYTES_MAX];
        loop {
            match rustix::io::read(&device.descriptor, &mut *room) {
                // The caller has gone before its request was read.
                Err(OsErrno::INTR | OsErrno::AGAIN | OsErrno::NOENT) => {}
                outcome => {
                    let length = outcome?;
                    self.note_used(length);
                    return Ok(Some(length));
                }
            }
        }
    }

    /// Notes that so much was used for a message and its answer.
    pub(super) fn note_used(&mut self, bytes: usize) {
        self.used = self.used.max(bytes);
        self.charge.note_used(self.used);
    }

    /// Gives what was used back to the kernel.
    fn release(&mut self) {
        let waiter = self.waiter.take();
        *self = Self { waiter, ..Self::new(&self.transfers) };
    }

    /// Waits for a message, for a while; when there is none, the memory goes back to the kernel, and it is said. One message wakes one of those
    /// who wait, as it does without a time-out. Should another thread be faster with it, this one keeps its memory until the next.
    fn release_when_idle(&mut self, device: &Device) -> io::Result<bool> {
        let waiter = match self.waiter.take() {
            Some(waiter) => waiter,
            None => {
                let waiter = epoll::create(epoll::CreateFlags::CLOEXEC)?;
                let flags = epoll::EventFlags::IN | epoll::EventFlags::EXCLUSIVE;
                epoll::add(&waiter, &device.descriptor, epoll::EventData::new_u64(0), flags)?;
                waiter
            }
        };
        let mut events = Vec::with_capacity(1);
        let waited = epoll::wait(&waiter, spare_capacity(&mut events), Some(&KEPT_FOR));
        self.waiter = Some(waiter);
        if waited == Ok(0) {
            self.release();
        }
        match waited {
            Ok(count) => Ok(count == 0),
            Err(OsErrno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// The message of `length` bytes that was received, and the room behind it.
    pub(super) fn split(&mut self, length: usize) -> (&[u8], &mut [u8]) {
        let (message, room) = self.bytes[self.start..].split_at_mut(length);
        (message, room)
    }
}

/// An errno as the kernel takes it.
pub(super) fn answerable(errno: Errno) -> i32 {
    if errno.raw() > ERRNO_MAX { Errno::EIO.raw() } else { errno.raw() }
}

impl Device {
    pub(super) fn new(descriptor: OwnedFd) -> Self {
        Self {
            descriptor: Arc::new(descriptor),
            expires_names: false,
            takes_backings: false,
            forget_unused: OnceLock::new(),
            guarded: OnceLock::new(),
        }
    }

    pub(super) fn descriptor(&self) -> &Arc<OwnedFd> {
        &self.descriptor
    }

    /// Whether the kernel has no mount of this connection any more, or has cut it off.
    pub(super) fn is_cut_off(&self) -> bool {
        let mut polled = [PollFd::new(&*self.descriptor, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().contains(PollFlags::ERR)
    }

    /// Waits for a message so long at most; whether there is one, or the connection has ended.
    ///
    /// # Errors
    /// Those of waiting.
    pub(super) fn wait_for_message(&self, limit: Duration) -> io::Result<bool> {
        let limit = Timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: limit.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&*self.descriptor, PollFlags::IN)], Some(&limit)) {
            Ok(count) => Ok(count > 0),
            Err(OsErrno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Notes whether the kernel can let names expire. One that cannot takes such a message for [`KernelCache::invalidate_name`].
    pub(super) fn set_expires_names(&mut self, expires_names: bool) {
        self.expires_names = expires_names;
    }

    /// Notes whether the kernel takes files to map in place of the mount's, and forgets them when asked to.
    pub(super) fn set_takes_backings(&mut self, takes_backings: bool) {
        self.takes_backings = takes_backings;
    }

    /// Has it aborted at the service's death, as long as it is used here; once.
    pub(super) fn set_guarded(&self, guarded: Guarded) {
        let _ = self.guarded.set(guarded);
    }

    /// Says how the kernel is made to forget what nobody uses; once.
    pub(super) fn set_forget_unused(&self, forget_unused: ForgetUnused) {
        let _ = self.forget_unused.set(forget_unused);
    }

    /// Answers the request with this number.
    ///
    /// # Errors
    /// `ENOENT` when nobody waits for it any more.
    pub(super) fn answer(&self, unique: u64, outcome: Result<&[u8], Errno>) -> io::Result<()> {
        let (error, body) = match outcome {
            Ok(body) => (0, body),
            Err(errno) => (-answerable(errno), &[][..]),
        };
        self.write(error, unique, &[body])
    }

    /// Whether there was something to tell: the kernel may have forgotten the node or the name.
    fn notify(&self, code: i32, head: &(impl IntoBytes + Immutable), rest: &[&[u8]]) -> io::Result<bool> {
        let mut parts = [head.as_bytes(), &[], &[]];
        parts[1..][..rest.len()].copy_from_slice(rest);
        match self.write(code, 0, &parts) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            outcome => outcome.map(|()| true),
        }
    }

    fn write(&self, error: i32, unique: u64, parts: &[&[u8]]) -> io::Result<()> {
        let body: usize = parts.iter().map(|part| part.len()).sum();
        let length = u32::try_from(size_of::<abi::OutHeader>() + body).map_err(|_| OsErrno::TOOBIG)?;
        let header = abi::OutHeader { length, error, unique };
        let mut slices = [IoSlice::new(header.as_bytes()); 4];
        for (slice, part) in slices[1..].iter_mut().zip(parts) {
            *slice = IoSlice::new(part);
        }
        rustix::io::writev(&self.descriptor, &slices[..=parts.len()])?;
        Ok(())
    }
}

impl KernelCache for Device {
    fn expires_names(&self) -> bool {
        self.expires_names
    }

    fn drop_attributes(&self, number: u64) -> io::Result<bool> {
        let head = abi::InvalidateInodeOut { node: number, offset: -1, length: 0 };
        self.notify(notify::INVALIDATE_INODE, &head, &[])
    }

    fn invalidate(&self, number: u64, offset: i64, length: i64) -> io::Result<()> {
        self.notify(notify::INVALIDATE_INODE, &abi::InvalidateInodeOut { node: number, offset, length }, &[]).map(drop)
    }

    fn store(&self, number: u64, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let size = u32::try_from(bytes.len()).map_err(|_| OsErrno::TOOBIG)?;
        self.notify(notify::STORE, &abi::StoreOut { node: number, offset, size, padding: 0 }, &[bytes]).map(drop)
    }

    fn invalidate_name(&self, parent: u64, name: &[u8]) -> io::Result<()> {
        self.name(parent, name, 0)
    }

    fn expire_name(&self, parent: u64, name: &[u8]) -> io::Result<()> {
        if !self.expires_names {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.name(parent, name, notify::EXPIRE_ONLY)
    }

    /// A name that is said to be in the file has the kernel lock it, and find that it is no directory. From Linux 6.19 on it finds that before
    /// (`fuse_reverse_inval_entry`), and nothing is waited for.
    fn await_unlocked(&self, number: u64) -> io::Result<()> {
        match self.name(number, b"none", 0) {
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(()),
            outcome => outcome,
        }
    }

    fn prune(&self, numbers: &[u64]) -> io::Result<()> {
        let count = u32::try_from(numbers.len()).map_err(|_| OsErrno::TOOBIG)?;
        self.notify(notify::PRUNE, &abi::PruneOut { count, padding: 0, spare: 0 }, &[numbers.as_bytes()]).map(drop)
    }

    fn forget_unused(&self) -> io::Result<()> {
        self.forget_unused.get().ok_or(io::ErrorKind::Unsupported)?()
    }

    fn by_descriptor(&self) -> Option<(BorrowedFd<'_>, ByDescriptor)> {
        let expires_names = self.expires_names;
        let with =
            move |descriptor| -> Box<dyn KernelCache> { Box::new(Self { expires_names, ..Self::new(descriptor) }) };
        Some((self.descriptor.as_fd(), Box::new(with)))
    }

    fn takes_backings(&self) -> bool {
        self.takes_backings
    }

    fn open_backing(&self, file: &OwnedFd) -> io::Result<u32> {
        poolfs_fuse_ring::open_backing(&*self.descriptor, file)
    }

    fn close_backing(&self, id: u32) -> io::Result<()> {
        poolfs_fuse_ring::close_backing(&*self.descriptor, id)
    }
}

impl Device {
    fn name(&self, parent: u64, name: &[u8], flags: u32) -> io::Result<()> {
        let name_length = u32::try_from(name.len()).map_err(|_| OsErrno::NAMETOOLONG)?;
        let head = abi::InvalidateEntryOut { parent, name_length, flags };
        self.notify(notify::INVALIDATE_ENTRY, &head, &[name, &[0]]).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool_memory::PoolMemory;
    use crate::shares::tests::Memory;
    use crate::transfers::PoolTransfers;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::Ordering;

    /// A device whose other end is not the kernel.
    fn device() -> (Device, UnixStream) {
        let (own, other) = UnixStream::pair().expect("sockets");
        (Device::new(own.into()), other)
    }

    fn received(buffer: &mut Buffer, device: &Device) -> usize {
        buffer.receive(device, false).expect("received").expect("a message")
    }

    fn is_kept(buffer: &Buffer) -> bool {
        buffer.bytes[buffer.start + 1..].iter().any(|&byte| byte != 0)
    }

    fn written<const COUNT: usize>(mut stream: &UnixStream) -> [u8; COUNT] {
        let mut bytes = [0; COUNT];
        stream.read_exact(&mut bytes).expect("written");
        bytes
    }

    #[test]
    fn an_answer_is_its_header_and_its_body() {
        let (device, kernel) = device();
        device.answer(7, Ok(b"body")).expect("sent");
        assert_eq!(written(&kernel), *b"\x14\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0body");
        device.answer(1 << 63, Err(Errno::ENOENT)).expect("sent");
        assert_eq!(written(&kernel), [16, 0, 0, 0, 0xfe, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0x80]);
        for beyond in [512, 4095] {
            device.answer(0, Err(Errno::from_raw(beyond))).expect("sent");
            let [_, _, _, _, error @ ..] = written::<16>(&kernel);
            assert_eq!(error[..4], (-5i32).to_ne_bytes(), "the kernel drops the answer {beyond}");
        }
    }

    #[test]
    fn names_expire_only_where_the_kernel_knows_the_difference() {
        let (mut device, kernel) = device();
        let error = device.expire_name(1, b"n").expect_err("nothing is known of the kernel");
        assert_eq!(error.kind(), io::ErrorKind::Unsupported);
        device.set_expires_names(true);
        device.expire_name(1, b"n").expect("sent");
        let expected = *b"\x22\0\0\0\x03\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\x01\0\0\0n\0";
        assert_eq!(written(&kernel), expected);
    }

    #[test]
    fn memory_of_a_long_message_goes_when_nothing_follows() {
        let (device, kernel) = device();
        let mut buffer = Buffer::new(&MountTransfers::alone());
        rustix::io::write(&kernel, &[1; KEPT_BYTES + PAGE]).expect("sent");
        assert!(received(&mut buffer, &device) > KEPT_BYTES);
        rustix::io::write(&kernel, &[2]).expect("sent");
        assert_eq!(received(&mut buffer, &device), 1);
        assert!(is_kept(&buffer), "something followed");
        let sender = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(500));
            rustix::io::write(&kernel, &[3]).expect("sent");
            kernel
        });
        assert_eq!(received(&mut buffer, &device), 1);
        assert!(!is_kept(&buffer), "nothing followed");
        let kernel = sender.join().expect("sent");
        rustix::io::write(&kernel, &[4]).expect("sent");
        assert_eq!((received(&mut buffer, &device), buffer.split(1).0), (1, &[4][..]));
    }

    #[test]
    fn the_pools_memory_is_charged_with_long_messages_until_their_memory_is_given_back() {
        let (device, kernel) = device();
        let memory = Arc::new(Memory::default());
        let pool = PoolTransfers::new(None, Arc::clone(&memory) as Arc<dyn PoolMemory>);
        let mut buffer = Buffer::new(&pool.join());
        let receive = |buffer: &mut Buffer, length: usize| {
            rustix::io::write(&kernel, &vec![1; length]).expect("sent");
            assert_eq!(received(buffer, &device), length);
            memory.0.load(Ordering::Relaxed) as usize
        };
        assert_eq!(receive(&mut buffer, KEPT_BYTES), 0);
        assert_eq!(receive(&mut buffer, KEPT_BYTES + PAGE), KEPT_BYTES + PAGE);
        assert_eq!(receive(&mut buffer, 1), KEPT_BYTES + PAGE);
        assert_eq!(receive(&mut buffer, KEPT_BYTES + 2 * PAGE), KEPT_BYTES + 2 * PAGE, "only of what is more");
        buffer.release();
        assert_eq!(receive(&mut buffer, 1), 0);
        assert_eq!(receive(&mut buffer, KEPT_BYTES + PAGE), KEPT_BYTES + PAGE);
        drop(buffer);
        assert_eq!(memory.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_thread_that_may_end_is_told_when_it_has_nothing_to_do() {
        let (device, kernel) = device();
        let transfers = PoolTransfers::new(Some(0), Arc::new(Memory::default())).join();
        let mut buffer = Buffer::new(&transfers);
        rustix::io::write(&kernel, &[1; KEPT_BYTES + PAGE]).expect("sent");
        assert_eq!(buffer.receive(&device, true).expect("received"), Some(KEPT_BYTES + PAGE));
        assert_eq!(buffer.receive(&device, true).expect("nothing"), None);
        assert!(!is_kept(&buffer));
        let permits: Vec<_> = std::iter::from_fn(|| transfers.permit()).collect();
        assert_eq!(buffer.receive(&device, true).expect("nothing"), None, "threads are scarce");
        drop(permits);
        let sender = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(500));
            rustix::io::write(&kernel, &[2]).expect("sent");
        });
        assert_eq!(buffer.receive(&device, true).expect("received"), Some(1), "they are not");
        sender.join().expect("sent");
    }

    #[test]
    fn data_begins_on_a_page_in_either_direction() {
        let (device, kernel) = device();
        let mut buffer = Buffer::new(&MountTransfers::alone());
        rustix::io::write(&kernel, &[1; WRITE_HEAD]).expect("sent");
        assert_eq!(received(&mut buffer, &device), WRITE_HEAD);
        let (message, room) = buffer.split(WRITE_HEAD);
        assert_eq!((message, room.as_ptr().addr() % PAGE), (&[1; WRITE_HEAD][..], 0));
        assert!(room.len() >= TRANSFER_BYTES_MAX);
        let (_, room) = buffer.split(WRITE_HEAD + TRANSFER_BYTES_MAX);
        assert!(room.len() >= PAGE, "an answer fits behind the longest message");
    }
}
