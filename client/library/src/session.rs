//! Sessions with instances: made when first needed, ended before a change of rights, never inherited.
//!
//! There are a few slots, each with a session or none. The slot's word is its state; a call that uses the session holds one of the slot's
//! `users`. A slot that was ended is taken down by the last call that leaves it, so that nothing waits and no call loses memory it is
//! using. A slot without a session is free for any instance: however many instances come and go, there is room for the next one.

mod posts;
mod requests;
mod sharing;

use crate::descriptor_path::path_of;
use crate::descriptors::{Adopted, Found, Witness};
use crate::instance_name::InstanceName;
use crate::life::Began;
use crate::limits::INSTANCES_MAX;
use crate::memory::UserMemory;
use crate::mounts::MountPoint;
use crate::segments::{Segment, Segments};
use crate::signals::SignalsHeld;
use crate::trace;
use crate::{mapping_slots, process, raw, window};
use core::cell::UnsafeCell;
use core::ffi::CStr;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering, fence};
use linux_raw_sys::general as sys;
use poolfs_ipc::Connection;
use poolfs_ipc::hold::{Frame, Hold};
use poolfs_ipc::segment::Read;
use poolfs_ipc::wire::{Operation, Reply, Request, SOCKET_DIRECTORY, SOCKET_SUFFIX, WireAttributes, owners};
use poolfs_types::Errno;
use rustix::fd::{AsFd, BorrowedFd};

/// Calls that can use one session at a time; further ones are the kernel's.
const USERS_MAX: usize = 64;

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
/// Ended while it was connecting: whoever connects takes it down.
const CANCELLED: u64 = 5;
const GENERATION: u64 = 1 << 32;

#[repr(C)]
struct Slot {
    word: AtomicU64,
    /// Its place among the slots, once it has a session.
    index: AtomicU32,
    retry_at: AtomicU64,
    /// That of the name; 0: it never had one.
    hash: AtomicU64,
    /// Who makes a session here.
    maker: Hold,
    users: [Hold; USERS_MAX],
    /// For each user the [era](Segments::era) it began in at the latest.
    eras: [AtomicU64; USERS_MAX],
    /// Generation of the last session that was lost with posts on the way, and by which of its slots they went.
    lost: AtomicU64,
    segments: Segments,
    name: UnsafeCell<InstanceName>,
    connection: UnsafeCell<MaybeUninit<Connection>>,
}

/// The sessions of this process. All zeros: none.
#[repr(C)]
pub struct Sessions {
    slots: [Slot; INSTANCES_MAX],
    generations: AtomicU32,
    swept_at: AtomicU64,
    /// Whether a session was found to be over, and the others share what they have.
    is_given_up: AtomicBool,
}

// SAFETY: a slot's name and connection are written only by who holds its `maker` and moved its word to CONNECTING, and the
// connection is dropped only by who moved the word from ENDED to CLOSING while no user was there. Users read them, who took
// their hold before they found the word LIVE: either they are seen by who ended it, or they see that it has ended.
unsafe impl Sync for Sessions {}

/// Socket descriptors of sessions, which a forked child still has although its state is gone.
static SOCKETS: [AtomicI32; INSTANCES_MAX] = [const { AtomicI32::new(0) }; INSTANCES_MAX];

/// Their cookies, which tell whether a number still is that socket.
static COOKIES: [AtomicU64; INSTANCES_MAX] = [const { AtomicU64::new(0) }; INSTANCES_MAX];

/// Sessions that are being made: their sockets and memory files stand nowhere yet, and a child that is forked meanwhile has them.
static GREETING: AtomicU32 = AtomicU32::new(0);

/// A session in use by one call.
pub struct Session<'a> {
    all: &'a Sessions,
    slot: &'a Slot,
    user: &'a Hold,
    began: Began,
    /// The slot's number.
    pub index: usize,
    /// What makes handles of this session different from those of all others.
    pub generation: u64,
}

impl Sessions {
    /// A session with an instance, connected when there is none; nothing: the kernel serves.
    pub fn enter<'a>(&'a self, call: Began, name: &InstanceName) -> Option<Session<'a>> {
        // What the paths lead to is not known any more.
        if self.is_given_up.load(Ordering::Acquire) {
            return None;
        }
        let mut of_name = self.slots.iter().enumerate().filter(|(_, slot)| slot.is_of(name));
        match of_name.find(|(_, slot)| slot.kind() == LIVE) {
            Some((index, slot)) => usable(slot.enter(self, index, call)?).filter(|session| session.name() == name),
            None => self.connect(call, name),
        }
    }

    /// The session an adopted descriptor's handle belongs to, if it still lives.
    pub fn enter_for(&self, call: Began, file: &Adopted) -> Option<Session<'_>> {
        let index = file.instance as usize;
        let session = self.slots.get(index)?.enter(self, index, call)?;
        usable(session).filter(|session| session.generation == file.generation)
    }

    /// Ends all sessions: no call that begins later uses them.
    pub fn end_all(&self) {
        let frame = Frame::here();
        for slot in &self.slots {
            slot.end(frame);
            // Who could not connect may be able to as somebody else.
            slot.retry_at.store(0, Ordering::Relaxed);
        }
    }

    /// Whether a call of this thread is under way, which a signal handler has interrupted.
    pub fn is_interrupted(&self) -> bool {
        let frame = Frame::here();
        let mut users = self.slots.iter().flat_map(|slot| &slot.users);
        users.any(|user| user.is_own() && !user.is_left(frame))
    }

    /// The attributes of the file that a number was found to stand for, and the device number of its mount, for a caller that holds
    /// nothing.
    #[inline]
    pub fn optimistic_stat(&self, found: &Found) -> Option<(WireAttributes, (u32, u32))> {
        let index = found.instance as usize;
        let slot = self.slots.get(index).filter(|slot| slot.kind() == LIVE)?;
        slot.segments.optimistic_stat(window::area(index)?, found.handle, found.witness)
    }

    /// Reads what a number was found to stand for, from `offset` on, for a caller that holds nothing; nothing when it takes more than
    /// a look at one or two blocks.
    #[inline]
    pub fn optimistic_read(&self, found: &Found, offset: u64, target: UserMemory) -> Option<usize> {
        let index = found.instance as usize;
        let slot = self.slots.get(index).filter(|slot| slot.kind() == LIVE)?;
        let area = window::area(index)?;
        slot.segments.prefetch(index, found.handle, offset, target.length());
        if !target.is_writable() {
            return None;
        }
        let (place, room) = ((index, area), (target.address() as *mut u8, target.length()));
        // SAFETY: the application's own memory, to be filled by this call; it can be written.
        let count = unsafe { slot.segments.optimistic_read(place, (found.handle, found.witness), offset, room) }?;
        trace::direct();
        area.counts().count(found.handle, process::single_threaded());
        Some(count)
    }

    /// The memory of the sessions that are in use.
    pub fn ranges(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let used = self.slots.iter().filter(|slot| slot.users.iter().any(|user| !user.is_free()));
        let connected = used.filter(|slot| matches!(slot.kind(), LIVE | ENDED));
        connected.flat_map(|slot| {
            // SAFETY: written before the slot was LIVE, and kept while it has users.
            let connection = unsafe { (*slot.connection.get()).assume_init_ref() };
            connection.ranges().chain(slot.segments.ranges())
        })
    }

    /// The socket descriptors of live sessions.
    pub fn descriptors(&self) -> impl Iterator<Item = i32> + '_ {
        let live = self.slots.iter().zip(&SOCKETS).filter(|(slot, _)| slot.kind() == LIVE);
        live.map(|(_, socket)| socket.load(Ordering::Relaxed))
    }

    /// Whether a descriptor number is one of our sockets.
    pub fn owns(&self, descriptor: i32) -> bool {
        descriptor > 0 && self.descriptors().any(|socket| socket == descriptor)
    }

    /// No signal handler runs while it is made: a connection that is left by a jump before it stands in its slot stays open for
    /// good.
    #[cold]
    fn connect(&self, call: Began, name: &InstanceName) -> Option<Session<'_>> {
        // A session that this thread used when it ended, and then left by a jump, waits for somebody to take it down.
        self.slots.iter().filter(|slot| slot.kind() == ENDED).for_each(|slot| slot.take_down(call.frame));
        let now = raw::coarse_time_ns();
        let index = self.place(call, name, now)?;
        let _held = SignalsHeld::hold();
        let slot = &self.slots[index];
        // From here on no handler forks.
        if !call.is_current() || !slot.maker.take_or_recover(call.frame) {
            return None;
        }
        let made = self.make(index, slot, call, name);
        slot.maker.give_back();
        made
    }

    /// The slot for a new session with an instance: the one it had, while nobody else has it, or another one without a session.
    fn place(&self, call: Began, name: &InstanceName, now: u64) -> Option<usize> {
        let is_free = |slot: &Slot| match slot.kind() {
            EMPTY => true,
            // Whoever began to connect may have left by a jump.
            CONNECTING | CANCELLED => slot.maker.is_left(call.frame),
            _ => false,
        };
        if let Some(index) = self.slots.iter().position(|slot| slot.is_of(name) && is_free(slot)) {
            return (now >= self.slots[index].retry_at.load(Ordering::Relaxed)).then_some(index);
        }
        if self.slots.iter().any(|slot| slot.is_of(name) && matches!(slot.kind(), CONNECTING | LIVE)) {
            return None;
        }
        let new = self.slots.iter().position(|slot| slot.hash.load(Ordering::Relaxed) == 0 && is_free(slot));
        new.or_else(|| self.slots.iter().position(is_free)).or_else(|| {
            self.end_dead(call, now);
            self.slots.iter().position(is_free)
        })
    }

    /// Ends the sessions whose services are gone, which nobody has noticed who does not use them.
    fn end_dead(&self, call: Began, now: u64) {
        if now < self.swept_at.swap(now + RETRY_NS, Ordering::Relaxed) {
            return;
        }
        for (index, slot) in self.slots.iter().enumerate() {
            if let Some(session) = slot.enter(self, index, call).filter(|session| !session.connection().is_connected())
            {
                session.end();
            }
        }
    }

    fn make<'a>(&'a self, index: usize, slot: &'a Slot, call: Began, name: &InstanceName) -> Option<Session<'a>> {
        let word = slot.word.load(Ordering::Acquire);
        if matches!(word & KIND, LIVE | ENDED | CLOSING) {
            return None;
        }
        let connecting = (word & !KIND) | CONNECTING;
        slot.word.compare_exchange(word, connecting, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        // SAFETY: CONNECTING and the maker's hold are ours.
        unsafe { *slot.name.get() = *name };
        slot.hash.store(name.hash, Ordering::Relaxed);
        slot.index.store(index as u32, Ordering::Relaxed);
        let connection = match open(name) {
            Ok(connection) => connection,
            Err(errno) => {
                trace::no_session(errno);
                // Counted from the end of the attempt, which may have waited longer than the pause is.
                slot.retry_at.store(raw::coarse_time_ns() + RETRY_NS, Ordering::Relaxed);
                slot.word.store((word & !KIND) | EMPTY, Ordering::Release);
                return None;
            }
        };
        let socket = connection.socket_number();
        COOKIES[index].store(raw::socket_cookie(socket).unwrap_or(0), Ordering::Relaxed);
        SOCKETS[index].store(socket, Ordering::Relaxed);
        process::note_own_descriptor(socket);
        let generation = u64::from(self.generations.fetch_add(1, Ordering::Relaxed));
        window::make();
        if let (Some(area), Some(leases)) = (window::area(index), connection.leases_range()) {
            area.show_leases(leases);
            area.show_counts(connection.counts_range());
        }
        // SAFETY: as above.
        unsafe { (*slot.connection.get()).write(connection) };
        let live = (generation * GENERATION) | LIVE;
        if slot.word.compare_exchange(connecting, live, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            return slot.enter(self, index, call);
        }
        // A change of rights that came meanwhile has cancelled it.
        // SAFETY: as above; it was just written, and nobody found the slot LIVE.
        unsafe { (*slot.connection.get()).assume_init_drop() };
        slot.word.store((word & !KIND) | EMPTY, Ordering::Release);
        None
    }
}

/// The session, when it can be used; else it ends.
fn usable(session: Session<'_>) -> Option<Session<'_>> {
    if session.connection().is_usable() {
        return Some(session);
    }
    session.end();
    None
}

fn open(name: &InstanceName) -> Result<Connection, Errno> {
    let parts = [SOCKET_DIRECTORY.as_bytes(), b"/", name.bytes(), SOCKET_SUFFIX.as_bytes(), b"\0"];
    let mut path = [0; SOCKET_PATH_MAX];
    let mut length = 0;
    for part in parts {
        path.get_mut(length..length + part.len()).ok_or(Errno::ENAMETOOLONG)?.copy_from_slice(part);
        length += part.len();
    }
    let path = CStr::from_bytes_until_nul(&path).map_err(|_| Errno::EINVAL)?;
    GREETING.fetch_add(1, Ordering::SeqCst);
    let opened = Connection::open(path);
    GREETING.fetch_sub(1, Ordering::SeqCst);
    opened
}

impl Slot {
    fn kind(&self) -> u64 {
        self.word.load(Ordering::Relaxed) & KIND
    }

    /// Whether the name may be this one: who uses the slot has to compare.
    fn is_of(&self, name: &InstanceName) -> bool {
        self.hash.load(Ordering::Relaxed) == name.hash
    }

    /// A handler that forks before the hold is taken leaves its child another state, and after it a session that is not its own.
    fn enter<'a>(&'a self, all: &'a Sessions, index: usize, call: Began) -> Option<Session<'a>> {
        if self.kind() != LIVE {
            return None;
        }
        let frame = call.frame;
        let number = self.users.iter().position(|user| user.take(frame));
        let number = number.or_else(|| self.users.iter().position(|user| user.take_or_recover(frame)))?;
        let user = &self.users[number];
        self.eras[number].store(self.segments.era(), Ordering::Relaxed);
        let word = self.word.load(Ordering::SeqCst);
        if word & KIND == LIVE && call.is_current() {
            return Some(Session { all, slot: self, user, began: call, index, generation: word / GENERATION });
        }
        user.give_back();
        self.take_down(frame);
        None
    }

    fn end(&self, frame: Frame) {
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            let ended = match word & KIND {
                LIVE => (word & !KIND) | ENDED,
                CONNECTING => (word & !KIND) | CANCELLED,
                _ => return self.take_down(frame),
            };
            match self.word.compare_exchange_weak(word, ended, Ordering::SeqCst, Ordering::Acquire) {
                Ok(_) => return self.take_down(frame),
                Err(now) => word = now,
            }
        }
    }

    /// Drops the connection of an ended slot that nobody uses. Calls that this thread has left by a jump use nothing.
    fn take_down(&self, frame: Frame) {
        fence(Ordering::SeqCst);
        let word = self.word.load(Ordering::SeqCst);
        let is_idle = || self.users.iter().all(|user| user.is_free() || user.is_left(frame));
        if word & KIND != ENDED || !is_idle() {
            return;
        }
        // A slot that stays in CLOSING is nobody's any more.
        let _held = SignalsHeld::hold();
        let closing = (word & !KIND) | CLOSING;
        if self.word.compare_exchange(word, closing, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            self.users.iter().filter(|user| user.is_left(frame)).for_each(Hold::give_back);
            let index = self.index.load(Ordering::Relaxed) as usize;
            window::area(index).into_iter().for_each(|area| area.hide());
            mapping_slots::hide_all(index);
            // SAFETY: CLOSING is ours alone, and the value was written before the slot was LIVE.
            unsafe {
                self.note_lost((*self.connection.get()).assume_init_ref(), word / GENERATION);
                self.segments.clear((*self.connection.get()).assume_init_ref().is_inherited());
                (*self.connection.get()).assume_init_drop();
            }
            self.word.store((word & !KIND) | EMPTY, Ordering::Release);
        }
    }
}

impl Session<'_> {
    /// The connection.
    pub fn connection(&self) -> &Connection {
        // SAFETY: written before the slot was LIVE, and kept while it has users, of which this is one.
        unsafe { (*self.slot.connection.get()).assume_init_ref() }
    }

    fn name(&self) -> &InstanceName {
        // SAFETY: a slot with users keeps its name.
        unsafe { &*self.slot.name.get() }
    }

    /// Whether it is the session for what is mounted there. Who may mount can give a mount any name; a request would then
    /// do to the instance what was meant for that mount.
    pub fn serves(&self, mount: &MountPoint) -> bool {
        self.connection().device() == mount.device
    }

    /// Reads what a file's segment has, if there is one for its handle; nothing when a request has to be made for all of it.
    pub fn read_segment(&self, handle: u64, offset: u64, target: UserMemory) -> Option<Read> {
        let segment = self.slot.segments.of(handle)?;
        let is_leased = || self.closings(&segment).is_some();
        // What is behind the file's end is neither filled nor looked at: to look at it would allocate it.
        let there = segment.view.size().saturating_sub(offset);
        let target = target.part(0, usize::try_from(there).unwrap_or(usize::MAX));
        if !target.is_writable() {
            return None;
        }
        // SAFETY: the application's own memory, to be filled by this call; it can be written.
        let read = unsafe { segment.view.read(offset, target.address() as *mut u8, target.length(), is_leased) };
        if read.is_whole {
            trace::direct();
            self.connection().direct_reads().count(handle, process::single_threaded());
        } else if segment.view.is_over(offset + read.count as u64) || !is_leased() {
            segment.end();
        }
        (read.count > 0 || read.is_whole).then_some(read)
    }

    /// The attributes of a file as the service vouches for them, if it has a segment for its handle.
    pub fn noted_attributes(&self, handle: u64) -> Option<WireAttributes> {
        let segment = self.slot.segments.of(handle)?;
        let attributes = segment.attributes()?;
        // Else the content, and with it what else changes, is no longer what the service changes alone.
        self.closings(&segment)?;
        trace::direct_stat();
        Some(attributes)
    }

    /// Notes as whom a file's owners are seen, as the reply to a [`Operation::Stat`] by handle tells it.
    pub fn note_owners(&self, handle: u64, reply: &Reply) {
        if let Some(segment) = self.slot.segments.of(handle) {
            segment.note_owners(reply.value, owners(reply.attributes.uid, reply.attributes.gid));
        }
    }

    /// Ends a file's segment that it is of no use to keep, so that another one is asked for.
    pub fn end_segment_without_lease(&self, handle: u64) {
        let over = self.slot.segments.of(handle).filter(|segment| self.closings(segment).is_none());
        over.into_iter().for_each(|segment| segment.end());
    }

    fn closings(&self, segment: &Segment<'_>) -> Option<u32> {
        self.connection().closings(segment.lease, segment.epoch)
    }

    /// What tells whether a descriptor of a file is closed from now on, if the file has a segment for its handle.
    #[inline]
    pub fn witness(&self, handle: u64) -> Option<Witness> {
        let segment = self.slot.segments.of(handle)?;
        self.closings(&segment).map(|closings| Witness { segment: segment.number, closings })
    }

    /// Whether it is worth asking for a file's segment: there is none for its handle, and the service gives them.
    pub fn wants_segment(&self, handle: u64) -> bool {
        self.connection().gives_segments() && self.slot.segments.of(handle).is_none()
    }

    /// Asks for a file's segment; whether it came.
    #[cold]
    pub fn ask_segment(&self, handle: u64) -> bool {
        // Nobody else would unmap what a jump left half mapped.
        let _held = SignalsHeld::hold();
        let slot = self.slot;
        let is_over = |era: u64| {
            let mut users = slot.users.iter().zip(&slot.eras);
            users.all(|(user, began)| {
                let has_begun_since = || began.load(Ordering::Relaxed) >= era;
                core::ptr::eq(user, self.user) || user.is_free() || has_begun_since() || user.is_left(self.began.frame)
            })
        };
        let area = window::area(self.index);
        let Some(filling) = slot.segments.begin(handle, self.began.frame, (self.index, area), is_over) else {
            return false;
        };
        let Ok(mut borrowed) = self.borrow() else { return false };
        let request = Request { operation: Operation::Segment as u32, handle, ..Request::default() };
        let Ok(reply) = self.execute(&mut borrowed, &request) else { return false };
        match self.connection().receive_segment(reply.value) {
            Ok((grant, view, notice)) => {
                let shown = (self.index, area, self.connection().device());
                filling.put((handle, &grant), (view, notice), shown);
                self.connection().direct_reads().begin(handle);
                true
            }
            Err(_) => false,
        }
    }

    /// Runs `use_it` with all of a file, in another one to be mapped; nothing when the service does not lend it.
    #[cold]
    pub fn with_whole_file<T>(&self, handle: u64, use_it: impl FnOnce(BorrowedFd<'_>) -> T) -> Option<T> {
        // Nobody else would close what a jump left open.
        let _held = SignalsHeld::hold();
        let _receiving = self.slot.segments.receiving(self.began.frame)?;
        let mut borrowed = self.borrow().ok()?;
        let request = Request { operation: Operation::Lend as u32, handle, ..Request::default() };
        let reply = self.execute(&mut borrowed, &request).ok()?;
        let file = self.connection().receive_whole_file(reply.value).ok()?;
        Some(use_it(file.as_fd()))
    }

    /// Ends the session: it is gone when its last user leaves.
    pub fn end(&self) {
        // Before anybody finds that it has ended.
        self.slot.note_lost(self.connection(), self.generation);
        self.slot.end(self.began.frame);
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        self.user.give_back();
        // Whoever ended it meanwhile either sees that this user is gone, or is seen here.
        fence(Ordering::SeqCst);
        if self.slot.kind() == ENDED {
            self.slot.take_down(self.began.frame);
        }
    }
}

/// Closes the sockets that a forked child inherited: the sessions are its parent's. Whoever the child becomes, it must not get hold of
/// them.
pub fn close_inherited() {
    if GREETING.swap(0, Ordering::SeqCst) > 0 {
        let limit = raw::limit(sys::RLIMIT_NOFILE).map_or(DESCRIPTORS_MAX, |(soft, _)| soft.min(DESCRIPTORS_MAX));
        (0..limit as i32).filter(|&descriptor| is_of_session(descriptor)).for_each(raw::close);
    }
    for (socket, cookie) in SOCKETS.iter().zip(&COOKIES) {
        let number = socket.swap(0, Ordering::Relaxed);
        if number > 0 && raw::socket_cookie(number) == Ok(cookie.load(Ordering::Relaxed)) {
            raw::close(number);
        }
    }
}

/// Where the search for inherited descriptors ends, whatever the limit.
const DESCRIPTORS_MAX: u64 = 1 << 20;

/// Whether a descriptor is a socket of a session, or the memory of one.
fn is_of_session(descriptor: i32) -> bool {
    let mut address = [0; 2 + SOCKET_PATH_MAX];
    if raw::is_sequenced_packets(descriptor) {
        // One that is about to be connected has no peer yet. The parent connects it for both.
        let length = raw::peer_address(descriptor, &mut address).unwrap_or(0);
        let path = address.get(2..length.min(address.len())).unwrap_or_default();
        return path.is_empty() || path.starts_with(SOCKET_DIRECTORY.as_bytes());
    }
    path_of(descriptor, &mut [0; 64]).is_some_and(|path| path.starts_with(b"/memfd:poolfs-"))
}
