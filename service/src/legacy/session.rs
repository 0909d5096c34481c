//! The threads that serve one mount: each reads a message, serves it and writes the answer, in one buffer.

use super::answer::{Answer, Given};
use super::device::{Buffer, Device};
use super::front::Front;
use super::incoming::{Call, Message};
use super::interrupts::InService;
use crate::instance::Instance;
use crate::spans::Measured;
use poolfs_libservice::types::Errno;
use poolfs_service_protocol::OperationPath;
use rustix::io::Errno as OsErrno;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use tracing::{error, info, warn};

/// One connection with the kernel. It ends with the last of its threads, when the mount is gone.
pub(super) struct Session {
    device: Arc<Device>,
    front: Front,
    name: String,
    in_service: Arc<InService>,
    /// Its end tells that of the session.
    _end: SyncSender<()>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.in_service.end();
        info!(instance = self.name, "the mount has ended");
    }
}

impl Session {
    /// Serves `instance` to whom `device` is connected with. The channel ends when the mount has.
    ///
    /// # Errors
    /// When there are not enough threads to be had; those that there are end with the mount.
    pub(super) fn start(instance: &Arc<Instance>, device: Arc<Device>, threads: usize) -> io::Result<Receiver<()>> {
        let (end, ended) = sync_channel(0);
        let in_service = Arc::new(InService::new(threads));
        let session = Arc::new(Self {
            device: Arc::clone(&device),
            front: Front::new(Arc::clone(instance)),
            name: instance.name().to_owned(),
            in_service: Arc::clone(&in_service),
            _end: end,
        });
        thread::Builder::new().name("fuse-watch".into()).spawn(move || {
            // Whoever has been answered meanwhile needs nothing more.
            in_service.watch(|unique| drop(device.answer(unique, Err(Errno::EINTR))));
        })?;
        for place in 0..threads {
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
                Err(error) => {
                    let is_gone = [OsErrno::NODEV, OsErrno::CONNABORTED].map(OsErrno::raw_os_error);
                    if !error.raw_os_error().is_some_and(|raw| is_gone.contains(&raw)) {
                        error!(instance = self.name, %error, "a thread of the FUSE session has ended");
                    }
                    return;
                }
            };
            let (message, room) = buffer.split(length);
            match Message::parse(message) {
                Ok(Message::Call(call)) => self.serve(place, call, room, &mut given),
                Ok(Message::Forget(forgets)) => self.front.forget(forgets),
                Ok(Message::Interrupt) => self.in_service.look(),
                Ok(Message::Nothing) => {}
                Err(malformed) => error!(instance = self.name, length, ?malformed, "the kernel sent no message"),
            }
        }
    }

    fn serve(&self, place: usize, call: Call<'_>, room: &mut [u8], given: &mut Vec<Given>) {
        let unique = call.unique;
        let mut measured = self.front.instance.measure(OperationPath::Fuse, call.thread, 0, None);
        let entered = self.in_service.enter(place, unique, call.thread);
        let mut answer = Answer::new(room, given);
        let outcome = self.front.serve(call, &mut answer);
        drop(entered);
        measured.iter_mut().for_each(Measured::stop);
        let sent = self.device.answer(unique, outcome.map(|()| answer.body()));
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
    }
}
