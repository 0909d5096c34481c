//! Sessions with instances: made when first needed, ended before a change of rights, never inherited.
//!
//! One slot per instance. Its word holds what the slot is and how many calls use it; a slot that was ended is taken down by
//! the last call that leaves it, so that nothing waits and no call loses its memory under its hands.

use crate::outcome::{Refusal, Served};
use crate::state::State;
use crate::{descriptors::Adopted, raw, trace};
use core::cell::UnsafeCell;
use core::ffi::CStr;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use poolfs_ipc::wire::{Operation, Reply, Request, SOCKET_DIRECTORY, SOCKET_SUFFIX, Status};
use poolfs_ipc::{Borrowed, CallError, Connection};
use poolfs_types::Errno;

/// Instances one process can talk to; further ones are left to the kernel.
pub const INSTANCES_MAX: usize = 16;

/// Longest name of an instance.
pub const NAME_MAX: usize = 64;

/// Longest path of a socket, as `sockaddr_un` has room for it.
const SOCKET_PATH_MAX: usize = 108;

/// After a failed connection the kernel serves for so long.
const RETRY_NS: u64 = 200_000_000;

const KIND: u64 = 7;
const EMPTY: u64 = 0;
const CONNECTING: u64 = 1;
const LIVE: u64 = 2;
const ENDED: u64 = 3;
const CLOSING: u64 = 4;
const USER: u64 = 1 << 3;
const USERS: u64 = ((1 << 24) - 1) << 3;
const GENERATION: u64 = 1 << 32;

#[repr(C)]
struct Slot {
    word: AtomicU64,
    retry_at: AtomicU64,
    name_length: AtomicU32,
    name: UnsafeCell<[u8; NAME_MAX]>,
    connection: UnsafeCell<MaybeUninit<Connection>>,
}

/// The sessions of this process, by slot.
#[repr(transparent)]
pub struct Sessions([Slot; INSTANCES_MAX]);

// SAFETY: a name is written once, before its length is published; a connection only by who moved the word from EMPTY to
// CONNECTING, dropped only by who moved it from ENDED without users to CLOSING, and read by counted users in between.
unsafe impl Sync for Sessions {}

/// Socket descriptors of sessions, which a forked child still has although its state is gone.
static SOCKETS: [AtomicI32; INSTANCES_MAX] = [const { AtomicI32::new(0) }; INSTANCES_MAX];

/// Their cookies, which tell whether a number still is that socket.
static COOKIES: [AtomicU64; INSTANCES_MAX] = [const { AtomicU64::new(0) }; INSTANCES_MAX];

/// A session in use by one call.
pub struct Session<'a> {
    slot: &'a Slot,
    /// What makes handles of this session different from those of the ones before in the slot.
    pub generation: u64,
}

impl Sessions {
    /// The slot of an instance, made when there is none yet. Called by one caller at a time.
    pub fn slot_of(&self, name: &[u8]) -> Option<usize> {
        if name.is_empty() || name.len() > NAME_MAX || name.contains(&b'/') || name.contains(&0) {
            return None;
        }
        let known = self.0.iter().position(|slot| slot.name() == name);
        known.or_else(|| {
            let index = self.0.iter().position(|slot| slot.name_length.load(Ordering::Acquire) == 0)?;
            let slot = &self.0[index];
            // SAFETY: the length is 0, so that nobody reads the name, and there is one caller.
            unsafe { (&mut *slot.name.get())[..name.len()].copy_from_slice(name) };
            slot.name_length.store(name.len() as u32, Ordering::Release);
            Some(index)
        })
    }

    /// A session with the instance of a slot, connected when there is none; nothing: the kernel serves.
    pub fn enter<'a>(&'a self, state: &State, index: usize) -> Option<Session<'a>> {
        let slot = self.0.get(index)?;
        let mut word = slot.word.load(Ordering::Acquire);
        loop {
            match word & KIND {
                LIVE if word & USERS != USERS => {
                    match slot.word.compare_exchange_weak(word, word + USER, Ordering::AcqRel, Ordering::Acquire) {
                        Ok(_) => break,
                        Err(now) => word = now,
                    }
                }
                EMPTY => return self.connect(state, index, word),
                _ => return None,
            }
        }
        let session = Session { slot, generation: word / GENERATION };
        if session.connection().is_usable() {
            return Some(session);
        }
        session.end();
        None
    }

    /// The session an adopted descriptor's handle belongs to, if it still lives.
    pub fn enter_for<'a>(&'a self, state: &State, file: &Adopted) -> Option<Session<'a>> {
        let session = self.enter(state, file.instance as usize)?;
        (session.generation == file.generation).then_some(session)
    }

    /// Ends all sessions: no call that begins later uses them.
    pub fn end_all(&self) {
        for slot in &self.0 {
            slot.end();
            // Who could not connect may be able to as somebody else.
            slot.retry_at.store(0, Ordering::Relaxed);
        }
    }

    /// The socket descriptors of live sessions.
    pub fn descriptors(&self) -> impl Iterator<Item = i32> + '_ {
        self.0
            .iter()
            .zip(&SOCKETS)
            .filter(|(slot, _)| slot.word.load(Ordering::Relaxed) & KIND == LIVE)
            .map(|(_, socket)| socket.load(Ordering::Relaxed))
    }

    /// Whether a descriptor number is one of our sockets.
    pub fn owns(&self, descriptor: i32) -> bool {
        descriptor > 0 && self.descriptors().any(|socket| socket == descriptor)
    }

    #[cold]
    fn connect<'a>(&'a self, state: &State, index: usize, word: u64) -> Option<Session<'a>> {
        let slot = &self.0[index];
        let now = raw::coarse_time_ns();
        if now < slot.retry_at.load(Ordering::Relaxed) || !state.is_own_process() {
            return None;
        }
        let connecting = (word & !KIND) | CONNECTING;
        slot.word.compare_exchange(word, connecting, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        let connected = slot.open();
        let Some(connection) = connected else {
            slot.retry_at.store(now + RETRY_NS, Ordering::Relaxed);
            slot.word.store(word, Ordering::Release);
            return None;
        };
        let socket = connection.socket_number();
        COOKIES[index].store(raw::socket_cookie(socket).unwrap_or(0), Ordering::Relaxed);
        SOCKETS[index].store(socket, Ordering::Relaxed);
        // SAFETY: CONNECTING is ours alone.
        unsafe { (*slot.connection.get()).write(connection) };
        let generation = word / GENERATION + 1;
        // A change of rights that came meanwhile has asked for the end by ENDED; then nobody gets in.
        let live = (generation * GENERATION) | LIVE | USER;
        let session = Session { slot, generation };
        match slot.word.compare_exchange(connecting, live, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => Some(session),
            Err(_) => {
                slot.word.store((generation * GENERATION) | ENDED | USER, Ordering::Release);
                drop(session);
                None
            }
        }
    }
}

impl Slot {
    fn name(&self) -> &[u8] {
        let length = self.name_length.load(Ordering::Acquire) as usize;
        // SAFETY: a name with a length is never written again.
        unsafe { (&*self.name.get()).get(..length).unwrap_or_default() }
    }

    fn open(&self) -> Option<Connection> {
        let parts = [SOCKET_DIRECTORY.as_bytes(), b"/", self.name(), SOCKET_SUFFIX.as_bytes(), b"\0"];
        let mut path = [0; SOCKET_PATH_MAX];
        let mut length = 0;
        for part in parts {
            path.get_mut(length..length + part.len())?.copy_from_slice(part);
            length += part.len();
        }
        Connection::open(CStr::from_bytes_with_nul(path.get(..length)?).ok()?).ok()
    }

    fn end(&self) {
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            let ended = match word & KIND {
                LIVE | CONNECTING => (word & !KIND) | ENDED,
                _ => return,
            };
            match self.word.compare_exchange_weak(word, ended, Ordering::AcqRel, Ordering::Acquire) {
                Ok(before) if before & KIND == LIVE && before & USERS == 0 => return self.take_down(ended),
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }

    /// Drops the connection of an ended slot without users.
    fn take_down(&self, word: u64) {
        let closing = (word & !KIND) | CLOSING;
        if self.word.compare_exchange(word, closing, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            // SAFETY: CLOSING is ours alone, and the value was written before the slot was LIVE.
            unsafe { (*self.connection.get()).assume_init_drop() };
            self.word.store((word & !(KIND | USERS)) | EMPTY, Ordering::Release);
        }
    }
}

impl Session<'_> {
    /// The connection.
    pub fn connection(&self) -> &Connection {
        // SAFETY: written before the slot was LIVE, and kept while users are counted, of which this is one.
        unsafe { (*self.slot.connection.get()).assume_init_ref() }
    }

    /// A request buffer.
    ///
    /// # Errors
    /// [`Refusal::Kernel`] when there is none.
    pub fn borrow(&self) -> Served<Borrowed<'_>> {
        self.connection().borrow().map_err(|_| Refusal::Kernel)
    }

    /// Submits a request and sorts its reply: done and redirected ones come back.
    ///
    /// # Errors
    /// The refusal, or what the service answers.
    pub fn execute(&self, borrowed: &mut Borrowed<'_>, request: &Request) -> Served<Reply> {
        let reply = borrowed.execute(request).map_err(|error| match error {
            CallError::Dead => self.lost(request),
            CallError::NoSession | CallError::Busy => Refusal::Kernel,
        })?;
        let status = Status::from_number(reply.status);
        if status != Some(Status::UseKernel) {
            trace::library();
        }
        match status {
            Some(Status::Done | Status::Redirect | Status::RedirectSecond) => Ok(reply),
            Some(Status::UseKernel) => Err(Refusal::Kernel),
            Some(Status::Failed) => Err(Refusal::Failed(Errno::from_raw(reply.errno))),
            None => Err(Refusal::Failed(Errno::EIO)),
        }
    }

    /// The session was lost while a request waited. When the service lives, something took the socket away from us (the
    /// program closed its number); what changes nothing can then be asked again, of the kernel.
    #[cold]
    fn lost(&self, request: &Request) -> Refusal {
        self.end();
        let repeatable = Operation::from_number(request.operation).is_some_and(|operation| {
            use Operation::{Access, GetXattr, ListXattr, Read, ReadLink, Seek, Stat};
            matches!(operation, Access | GetXattr | ListXattr | Read | ReadLink | Seek | Stat)
        });
        if repeatable && self.slot.open().is_some() { Refusal::Kernel } else { Refusal::Failed(Errno::EIO) }
    }

    /// Ends the session: it is gone when its last user leaves.
    pub fn end(&self) {
        self.slot.end();
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        let before = self.slot.word.fetch_sub(USER, Ordering::AcqRel);
        if before & KIND == ENDED && before & USERS == USER {
            self.slot.take_down(before - USER);
        }
    }
}

/// Closes the sockets that a forked child inherited: the sessions are its parent's.
pub fn close_inherited() {
    for (socket, cookie) in SOCKETS.iter().zip(&COOKIES) {
        let number = socket.swap(0, Ordering::Relaxed);
        if number > 0 && raw::socket_cookie(number) == Ok(cookie.load(Ordering::Relaxed)) {
            raw::close(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::boxed::Box;

    #[test]
    fn instances_get_slots_and_odd_names_do_not() {
        // SAFETY: sessions are valid as zeros, which is how the mapping of the state begins.
        let sessions = unsafe { Box::<Sessions>::new_zeroed().assume_init() };
        assert_eq!(sessions.slot_of(b"pool-1"), Some(0));
        assert_eq!(sessions.slot_of(b"pool-2"), Some(1));
        assert_eq!(sessions.slot_of(b"pool-1"), Some(0));
        for bad in [&b""[..], b"a/b", b"a\0", &[b'x'; NAME_MAX + 1]] {
            assert_eq!(sessions.slot_of(bad), None);
        }
        for number in 2..INSTANCES_MAX {
            assert_eq!(sessions.slot_of(std::format!("more-{number}").as_bytes()), Some(number));
        }
        assert_eq!(sessions.slot_of(b"one-too-many"), None);
        sessions.end_all();
        assert_eq!(sessions.descriptors().count(), 0);
    }
}
