//! The threads that serve one mount: each receives a message, serves it and answers it, in one piece of memory.

use super::answer::{Answer, Given};
use super::device::{Buffer, Device};
use super::front::Front;
use super::incoming::{Call, Message};
use super::interrupts::InService;
use super::rings::{READERS, Rings};
use crate::instance::Instance;
use crate::spans::Measured;
use poolfs_fuse_ring::Entry;
use poolfs_libservice::types::Errno;
use poolfs_service_protocol::{OperationPath, Transport};
use rustix::io::Errno as OsErrno;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use tracing::{error, info, warn};

/// One connection with the kernel. It ends with the last of its threads, when the mount is gone.
pub(super) struct Session {
    pub(super) device: Arc<Device>,
    pub(super) front: Front,
    pub(super) name: String,
    /// Those of the rings have the first places, those that read the device the last.
    pub(super) in_service: Arc<InService>,
    pub(super) rings: Rings,
    /// Its end tells that of the session.
    _end: SyncSender<()>,
}

/// A call that was served.
pub(super) struct Served<'a> {
    /// How long the answer is, or what went wrong.
    pub(super) outcome: Result<usize, Errno>,
    /// Nobody else has answered meanwhile.
    pub(super) is_waited_for: bool,
    pub(super) measured: Option<Measured<'a>>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.in_service.end();
        info!(instance = self.name, "the mount has ended");
    }
}

impl Session {
    /// Serves `instance` to whom `device` is connected with: by `entries`, if the kernel takes them, else by that many `threads`
    /// that read the device. The channel ends when the mount has.
    ///
    /// # Errors
    /// When there are not enough threads to be had; those that there are end with the mount.
    pub(super) fn start(
        instance: &Arc<Instance>,
        device: Arc<Device>,
        threads: usize,
        entries: Vec<Entry>,
        cpus: &[u32],
    ) -> io::Result<Receiver<()>> {
        let (end, ended) = sync_channel(0);
        let first = entries.len();
        let in_service = Arc::new(InService::new(first + threads));
        let session = Arc::new(Self {
            device,
            front: Front::new(Arc::clone(instance)),
            name: instance.name().to_owned(),
            in_service: Arc::clone(&in_service),
            rings: Rings::new(&entries, cpus),
            _end: end,
        });
        // It must not keep the session from ending.
        let watched = Arc::downgrade(&session);
        thread::Builder::new().name("fuse-watch".into()).spawn(move || {
            in_service.watch(|place, unique| match watched.upgrade() {
                Some(session) if session.is_ring(place) => session.take_over(place, unique),
                Some(session) => {
                    // Whoever has been answered meanwhile needs nothing more.
                    let _ = session.device.answer(unique, Err(Errno::EINTR));
                    true
                }
                None => true,
            });
        })?;
        let by_rings = session.start_rings(entries)?;
        instance.set_transport(if by_rings { Transport::IoUring } else { Transport::DevFuse });
        for place in first..first + if by_rings { READERS } else { threads } {
            let session = Arc::clone(&session);
            thread::Builder::new().name(format!("fuse-{place}")).spawn(move || session.work(place))?;
        }
        Ok(ended)
    }

    fn work(&self, place: usize) {
        let mut buffer = Buffer::new();
        let mut given = Vec::new();
        loop {
            let length = match buffer.receive(&self.device) {
                Ok(length) => length,
                Err(error) => return self.has_ended(&error),
            };
            let (message, room) = buffer.split(length);
            match Message::parse(message) {
                Ok(Message::Call(call)) => {
                    let answered = self.serve_read(place, call, room, &mut given);
                    buffer.note_used(length + answered);
                }
                Ok(Message::Forget(forgets)) => self.front.forget(forgets),
                Ok(Message::Interrupt) => self.in_service.look(),
                Ok(Message::Nothing) => {}
                Err(malformed) => error!(instance = self.name, length, ?malformed, "the kernel sent no message"),
            }
        }
    }

    /// A thread is about to end.
    pub(super) fn has_ended(&self, error: &io::Error) {
        let is_gone = [OsErrno::NODEV, OsErrno::CONNABORTED, OsErrno::NOTCONN].map(OsErrno::raw_os_error);
        if !error.raw_os_error().is_some_and(|raw| is_gone.contains(&raw)) {
            error!(instance = self.name, %error, "a thread of the FUSE session has ended");
        }
    }

    /// Serves a call; its answer is put into `room`, and what it gives the kernel noted in `given`.
    pub(super) fn serve(&self, place: usize, call: Call<'_>, room: &mut [u8], given: &mut Vec<Given>) -> Served<'_> {
        let mut measured = self.front.instance.measure(OperationPath::Fuse, call.thread, 0, None);
        let entered = self.in_service.enter(place, call.unique, call.thread);
        let mut answer = Answer::new(room, given);
        let outcome = self.front.serve(call, &mut answer).map(|()| answer.body().len());
        let is_waited_for = entered.leave();
        measured.iter_mut().for_each(Measured::stop);
        Served { outcome, is_waited_for, measured }
    }

    /// How long the answer was.
    fn serve_read(&self, place: usize, call: Call<'_>, room: &mut [u8], given: &mut Vec<Given>) -> usize {
        let unique = call.unique;
        let Served { outcome, measured, .. } = self.serve(place, call, room, given);
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
