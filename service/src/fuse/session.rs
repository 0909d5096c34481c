//! The threads that serve one mount: each receives a message, serves it and answers it, in one piece of memory.
//!
//! Most mounts of a host are idle most of the time, so threads are started when they are needed. There is always one that waits
//! for a message, up to a limit and as far as the pool has memory for them ([`crate::transfers`]), and one that watches for
//! killed callers from the first time that it is needed. Threads that are no longer needed end.

use super::answer::{Answer, Given};
use super::device::{Buffer, Device};
use super::following::{self, Following, Kept};
use super::front::{Front, PutOff};
use super::incoming::{Call, Message, Operation};
use super::interrupts::InService;
use super::readers::{Added, Readers};
use super::rings::{self, Entries, READERS, RingSession, Rings, Served};
use crate::cpus::keep_on;
use crate::instance::Instance;
use crate::spans::Measured;
use crate::sync::lock;
use crate::transfers::{MountTransfers, Permit};
use poolfs_libservice::types::Errno;
use poolfs_service_protocol::{OperationPath, Timeout, Transport};
use rustix::io::Errno as OsErrno;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use tracing::{debug, error, info, warn};

/// How often the thread that answers while all others are held up looks whether they still are.
const RESERVE_PAUSE: Duration = Duration::from_millis(50);

/// One connection with the kernel. It ends with the last of its threads, when the mount is gone.
pub(super) struct Session {
    device: Arc<Device>,
    front: Front,
    name: String,
    /// Those of the rings have the first places, those that read the device the last.
    in_service: Arc<InService>,
    rings: Rings,
    readers: Readers,
    /// Whether the thread is there that answers while all others are held up.
    has_reserve: AtomicBool,
    /// What that thread was given back, for whoever is the first to be free again: itself it may wait for a message until then.
    put_off: Mutex<PutOff>,
    has_put_off: AtomicBool,
    transfers: Arc<MountTransfers>,
    following: Following,
    /// Told at the end of the session.
    on_end: OnEnd,
    /// Its end tells that of the session.
    _end: SyncSender<()>,
}

/// What is called when a session has ended.
pub type OnEnd = Box<dyn Fn() + Send + Sync>;

/// What threads and rings of the mount of an instance may take.
pub(super) fn transfers_of(instance: &Instance) -> Arc<MountTransfers> {
    instance.shares().map_or_else(MountTransfers::alone, |shares| Arc::clone(shares.transfers()))
}

impl Drop for Session {
    fn drop(&mut self) {
        self.in_service.end();
        info!(instance = self.name, "the mount has ended");
        (self.on_end)();
    }
}

impl Session {
    /// Serves `instance` to whom `device` is connected with: by `entries`, if the kernel takes them, else by up to that many
    /// `threads` that read the device. The channel ends when the mount has.
    ///
    /// # Errors
    /// When there is not even one thread to be had; those that there are end with the mount.
    pub(super) fn start(
        instance: &Arc<Instance>,
        device: Arc<Device>,
        threads: usize,
        entries: Entries,
        cpus: &[u32],
        on_end: OnEnd,
    ) -> io::Result<Receiver<()>> {
        let (end, ended) = sync_channel(0);
        let Entries { all: entries, counted } = entries;
        let first = entries.len();
        let transfers = transfers_of(instance);
        let timeout = instance.spec().timeout.map(Timeout::duration);
        let session = Arc::new(Self {
            device,
            front: Front::new(Arc::clone(instance)),
            name: instance.name().to_owned(),
            in_service: Arc::new(InService::new(first + threads, timeout)),
            has_reserve: AtomicBool::new(false),
            put_off: Mutex::default(),
            has_put_off: AtomicBool::new(false),
            rings: Rings::new(&entries, cpus),
            readers: Readers::new(first),
            transfers,
            following: Following::new(cpus),
            on_end,
            _end: end,
        });
        let by_rings = rings::start(&session, entries)?;
        session.rings.count_by(counted.filter(|_| by_rings));
        instance.set_transport(if by_rings { Transport::IoUring } else { Transport::DevFuse });
        session.readers.allow(if by_rings { READERS } else { threads });
        session.add_reader()?;
        if session.in_service.has_timeout() {
            session.look();
        }
        Ok(ended)
    }

    /// Starts one more thread that reads the device, if one is needed and there may be more.
    fn add_reader(self: &Arc<Self>) -> io::Result<Added> {
        let start = |place: usize, permit: Option<Permit>| {
            let session = Arc::clone(self);
            let work = move || {
                session.work(place, permit.is_some());
                // Only now that its memory is given back.
                drop(permit);
            };
            thread::Builder::new().name(format!("fuse-{place}")).spawn(work).map(drop)
        };
        self.readers.add(|| self.transfers.permit(), start)
    }

    /// Has somebody read the device while all who do have something to do.
    fn keep_reading(self: &Arc<Self>) {
        match self.add_reader() {
            Ok(Added::Enough) => return,
            Ok(Added::Refused) => {}
            Err(error) => debug!(instance = self.name, %error, "no further thread reads the device"),
        }
        // Nobody may be left who reads that a caller gets a signal.
        self.look();
    }

    /// Has somebody look whether callers of requests in service were killed.
    fn look(self: &Arc<Self>) {
        let [watched, for_readers] = [(); 2].map(|()| Arc::downgrade(self));
        let in_service = Arc::clone(&self.in_service);
        let cpus = self.following.all().to_vec();
        let started = self.in_service.look(|| {
            let watch = move || {
                keep_on(&cpus);
                // It must not keep the session from ending.
                in_service.watch(
                    |place, unique, errno| {
                        watched.upgrade().is_none_or(|session| session.give_up(place, unique, errno))
                    },
                    || {
                        let Some(session) = for_readers.upgrade() else { return };
                        if let Err(error) = session.add_reader() {
                            debug!(instance = session.name, %error, "no further thread reads the device");
                        }
                        session.add_reserve();
                    },
                );
            };
            thread::Builder::new().name("fuse-watch".into()).spawn(watch).map(drop)
        });
        if let Err(error) = started {
            warn!(instance = self.name, %error, "callers that were killed wait for their answers");
        }
    }

    /// Answers a request that nobody waits for any more with `errno`; whether it will be.
    fn give_up(self: Arc<Self>, place: usize, unique: u64, errno: Errno) -> bool {
        if errno == Errno::EIO {
            self.front.instance.timed_out.fetch_add(1, Ordering::Relaxed);
        }
        if self.rings.have(place) {
            return rings::take_over(&self, place, unique, errno);
        }
        // Whoever has been answered meanwhile needs nothing more.
        let _ = self.device.answer(unique, Err(errno));
        true
    }

    /// Whether all threads that read the device are held up by requests that nobody waits for any more.
    fn is_held_up(&self) -> bool {
        self.readers.are_all(self.in_service.given_up(self.readers.first()))
    }

    /// Has somebody answer what comes while all who read the device are held up, where requests have a time limit.
    fn add_reserve(self: &Arc<Self>) {
        if !self.in_service.has_timeout() || !self.is_held_up() || self.has_reserve.swap(true, Ordering::AcqRel) {
            return;
        }
        warn!(instance = self.name, "all threads wait for a branch: what is asked meanwhile fails");
        let session = Arc::clone(self);
        let spawned = thread::Builder::new().name("fuse-reserve".into()).spawn(move || {
            session.refuse_while_held_up();
            session.has_reserve.store(false, Ordering::Release);
        });
        if let Err(error) = spawned {
            self.has_reserve.store(false, Ordering::Release);
            warn!(instance = self.name, %error, "what is asked while all threads wait for a branch waits, too");
        }
    }

    /// Answers calls with `EIO` until a thread is there again that serves them.
    fn refuse_while_held_up(self: &Arc<Self>) {
        let mut buffer = Buffer::new(&self.transfers);
        let mut given = Vec::new();
        while self.is_held_up() {
            match self.device.wait_for_message(RESERVE_PAUSE) {
                Ok(false) => continue,
                Ok(true) => {}
                Err(error) => return debug!(instance = self.name, %error, "no message can be waited for"),
            }
            let length = match buffer.receive(&self.device, false) {
                Ok(Some(length)) => length,
                Ok(None) => continue,
                Err(error) => return self.has_ended(&error),
            };
            let (message, room) = buffer.split(length);
            match Message::parse(message) {
                // Another thread was faster with the message that was there, and this one came later.
                Ok(Message::Call(call)) if !self.is_held_up() => {
                    let _ = self.serve_read(self.in_service.spare(), call, room, &mut given, None);
                }
                Ok(Message::Call(call)) => {
                    let outcome = match call.operation {
                        Ok(Operation::Release { handle }) => {
                            self.put_off(|put_off| put_off.releases.push(handle));
                            Ok(&[][..])
                        }
                        _ => {
                            self.front.instance.timed_out.fetch_add(1, Ordering::Relaxed);
                            Err(Errno::EIO)
                        }
                    };
                    let _ = self.device.answer(call.unique, outcome);
                }
                Ok(Message::Forget(forgets)) => self.put_off(|put_off| {
                    forgets.for_each(|(number, count)| *put_off.forgets.entry(number).or_default() += count);
                }),
                Ok(Message::Interrupt | Message::Nothing) => {}
                Err(malformed) => error!(instance = self.name, length, ?malformed, "the kernel sent no message"),
            }
        }
        self.take_put_off();
    }

    /// Puts something off until a thread is free. The caller looks afterwards whether one is.
    fn put_off(&self, note: impl FnOnce(&mut PutOff)) {
        note(&mut lock(&self.put_off));
        self.has_put_off.store(true, Ordering::Release);
    }

    /// Takes what was put off, after its thread is free.
    fn take_put_off(&self) {
        if self.has_put_off.swap(false, Ordering::AcqRel) {
            let put_off = std::mem::take(&mut *lock(&self.put_off));
            self.front.make_good(put_off);
        }
    }

    /// Serves until the mount is gone, or, where the thread `may_end`, until it is needed no more.
    fn work(self: &Arc<Self>, place: usize, may_end: bool) {
        let mut buffer = Buffer::new(&self.transfers);
        let mut given = Vec::new();
        let mut kept = Kept::default();
        loop {
            kept.follow(&self.following);
            let length = match buffer.receive(&self.device, may_end) {
                Ok(Some(length)) => length,
                Ok(None) if self.readers.retire(place) => return,
                Ok(None) => continue,
                Err(error) => return self.has_ended(&error),
            };
            let (message, room) = buffer.split(length);
            match Message::parse(message) {
                Ok(Message::Call(call)) => {
                    let followed = self.following.enter(&call);
                    if self.readers.begin() {
                        self.keep_reading();
                    }
                    let answered = self.serve_read(place, call, room, &mut given, followed);
                    buffer.note_used(length + answered);
                    self.readers.end();
                    if self.has_put_off.load(Ordering::Acquire) {
                        self.take_put_off();
                    }
                }
                Ok(Message::Forget(forgets)) => self.front.forget(forgets),
                Ok(Message::Interrupt) => self.look(),
                Ok(Message::Nothing) => {}
                Err(malformed) => error!(instance = self.name, length, ?malformed, "the kernel sent no message"),
            }
        }
    }

    /// How long the answer was.
    fn serve_read(
        self: &Arc<Self>,
        place: usize,
        call: Call<'_>,
        room: &mut [u8],
        given: &mut Vec<Given>,
        followed: Option<following::Entered<'_>>,
    ) -> usize {
        let unique = call.unique;
        let Served { outcome, measured, .. } = self.serve(place, call, room, given);
        // Its caller may ask again before this thread goes on, where both are on one CPU: that is no call beside this one.
        drop(followed);
        let sent = self.device.answer(unique, outcome.map(|length| &room[..length]));
        measured.into_iter().for_each(|measured| measured.end(outcome.err().map_or("done", Errno::name)));
        if outcome.is_err() || sent.is_err() {
            given.drain(..).for_each(|given| self.front.take_back(given));
        }
        // The caller was killed and has been answered, or the mount is gone.
        let nobody_waits = [OsErrno::NOENT, OsErrno::NODEV].map(OsErrno::raw_os_error);
        if let Err(error) = sent
            && !error.raw_os_error().is_some_and(|raw| nobody_waits.contains(&raw))
        {
            warn!(instance = self.name, %error, "the kernel did not take an answer");
        }
        outcome.unwrap_or(0)
    }
}

impl RingSession for Session {
    fn name(&self) -> &str {
        &self.name
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn rings(&self) -> &Rings {
        &self.rings
    }

    fn in_service(&self) -> &InService {
        &self.in_service
    }

    fn transfers(&self) -> &MountTransfers {
        &self.transfers
    }

    fn serve(self: &Arc<Self>, place: usize, call: Call<'_>, room: &mut [u8], given: &mut Vec<Given>) -> Served<'_> {
        let mut measured = self.front.instance.measure(OperationPath::Fuse, call.thread, 0, None);
        let (entered, is_last) = self.in_service.enter(place, call.unique, call.thread);
        if is_last {
            self.look();
        }
        let mut answer = Answer::new(room, given);
        let outcome = self.front.serve(call, &mut answer).map(|()| answer.body().len());
        let is_waited_for = entered.leave();
        measured.iter_mut().for_each(Measured::stop);
        Served { outcome, is_waited_for, measured }
    }

    fn take_back(&self, given: Given) {
        self.front.take_back(given);
    }

    fn has_ended(&self, error: &io::Error) {
        let is_gone = [OsErrno::NODEV, OsErrno::CONNABORTED, OsErrno::NOTCONN].map(OsErrno::raw_os_error);
        if !error.raw_os_error().is_some_and(|raw| is_gone.contains(&raw)) {
            error!(instance = self.name, %error, "a thread of the FUSE session has ended");
        }
    }
}
