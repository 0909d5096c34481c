//! The reception thread: accepts clients, and detects when they are gone.

use crate::handshake::send_welcome;
use crate::service::endpoint::{Admission, Endpoint};
use crate::service::peer::{self, PeerFacts};
use crate::service::session::Session;
use crate::service::tasks::Tasks;
use crate::wire::Hello;
use poolfs_types::Errno;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::net::sockopt::{set_socket_passcred, set_socket_send_buffer_size};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

/// How long a client may take from connecting to its greeting.
const GREETING_WAIT_MAX: Duration = Duration::from_secs(1);

/// Most clients that have connected and not greeted yet.
const EXPECTED_MAX: usize = 64;

/// Connections the kernel keeps for us.
const BACKLOG: i32 = 128;

/// Bytes of messages that wait for a client to receive them. The kernel makes it the least it allows, which is room for some
/// five: each holds descriptors open that nobody can close but the client, or its end.
const UNRECEIVED_BYTES: usize = 0;

/// Pause after the kernel could give no descriptor.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(50);

const LISTENER: u64 = 0;
const STOP: u64 = 1;
/// The first client's number; its events are 2n (socket) and 2n+1 (process).
const FIRST_GUEST: u64 = 2;

/// A connected client.
struct Guest<C> {
    socket: Arc<OwnedFd>,
    /// Readable when the process ends, which may be before its socket closes: a forked child can hold that.
    process: OwnedFd,
    since: Instant,
    session: Option<Arc<Session<C>>>,
}

/// Ends a [`Reception::run`] from another thread.
#[derive(Clone, Debug)]
pub struct Stop(Arc<OwnedFd>);

impl Stop {
    /// Ends it. May be called more than once.
    pub fn stop(&self) {
        // It fails only when the counter would overflow: then it has been told often enough.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}

/// The listening socket of an instance and the clients behind it.
pub struct Reception<C> {
    endpoint: Arc<Endpoint<C>>,
    path: PathBuf,
    listener: OwnedFd,
    events: OwnedFd,
    stop: Stop,
    guests: HashMap<u64, Guest<C>>,
    next_guest: u64,
}

impl<C> Reception<C> {
    /// Makes the socket at `path`, mode 0666 (who can reach it is decided by where it is mounted), in place of a socket a
    /// dead service left there.
    ///
    /// # Errors
    /// Those of the socket calls; `EEXIST` when something else is in the way.
    pub fn bind(path: &Path, endpoint: Arc<Endpoint<C>>) -> io::Result<Self> {
        match fs::symlink_metadata(path) {
            Ok(found) if found.file_type().is_socket() => fs::remove_file(path)?,
            Ok(_) => return Err(io::ErrorKind::AlreadyExists.into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        // Inherited by accepted sockets, so that the first message already carries credentials.
        set_socket_passcred(&listener, true)?;
        peer::refuse_descriptors(listener.as_fd());
        rustix::net::bind(&listener, &SocketAddrUnix::new(path)?)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o666))?;
        rustix::net::listen(&listener, BACKLOG)?;
        let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let stop = Stop(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        epoll::add(&events, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        epoll::add(&events, &*stop.0, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)?;
        let path = path.to_owned();
        Ok(Self { endpoint, path, listener, events, stop, guests: HashMap::new(), next_guest: FIRST_GUEST })
    }

    /// What ends [`Reception::run`].
    pub fn stop(&self) -> Stop {
        self.stop.clone()
    }

    /// Lets clients in until stopped; `admit` says who is let in, and makes what the service keeps with a session. Then every session ends and
    /// the socket goes.
    ///
    /// # Errors
    /// Those of `epoll_wait(2)`.
    pub fn run(mut self, admit: impl Fn(&PeerFacts) -> Result<Admission<C>, Errno>) -> io::Result<()> {
        let mut events = Vec::with_capacity(64);
        loop {
            let limit = self.is_expecting().then_some(Timespec { tv_sec: 1, tv_nsec: 0 });
            match epoll::wait(&self.events, rustix::buffer::spare_capacity(&mut events), limit.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            for event in events.drain(..) {
                match event.data.u64() {
                    LISTENER => self.accept(),
                    STOP => return Ok(()),
                    number => self.attend(number, &admit),
                }
            }
            self.dismiss_silent(&admit);
        }
    }

    fn is_expecting(&self) -> bool {
        self.guests.values().any(|guest| guest.session.is_none())
    }

    fn accept(&mut self) {
        let expected = self.guests.values().filter(|guest| guest.session.is_none()).count();
        if expected >= EXPECTED_MAX
            && let Some(oldest) = self.oldest_expected()
        {
            self.endpoint.counters().count_refusal(Errno::ETIMEDOUT);
            self.dismiss(oldest);
        }
        match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => {
                // A client that fails here is gone already, or the kernel lacks what we need: its library uses the kernel.
                if let Err(why) = self.expect(socket) {
                    self.endpoint.counters().count_refusal(why);
                }
            }
            Err(error @ (rustix::io::Errno::MFILE | rustix::io::Errno::NFILE | rustix::io::Errno::NOBUFS)) => {
                self.endpoint.counters().count_refusal(crate::memory::errno(error));
                std::thread::sleep(SHORTAGE_PAUSE);
            }
            Err(_) => {}
        }
    }

    fn oldest_expected(&self) -> Option<u64> {
        let expected = self.guests.iter().filter(|(_, guest)| guest.session.is_none());
        expected.min_by_key(|(_, guest)| guest.since).map(|(&number, _)| number)
    }

    fn expect(&mut self, socket: OwnedFd) -> Result<(), Errno> {
        let errno = crate::memory::errno;
        let process = peer::peer_process(socket.as_fd())?;
        set_socket_send_buffer_size(&socket, UNRECEIVED_BYTES).map_err(errno)?;
        let number = self.next_guest;
        self.next_guest += 1;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        epoll::add(&self.events, &socket, epoll::EventData::new_u64(2 * number), flags).map_err(errno)?;
        let ended = epoll::EventFlags::IN;
        epoll::add(&self.events, &process, epoll::EventData::new_u64(2 * number + 1), ended).map_err(errno)?;
        let socket = Arc::new(socket);
        self.guests.insert(number, Guest { socket, process, since: Instant::now(), session: None });
        Ok(())
    }

    /// A client wrote, hung up, or died.
    fn attend(&mut self, event: u64, admit: &impl Fn(&PeerFacts) -> Result<Admission<C>, Errno>) {
        let (number, died) = (event / 2, event % 2 == 1);
        let stays = match self.guests.get(&number) {
            None => return,
            // After the greeting there is nothing to say: whoever still writes is not our library.
            Some(guest) if died || guest.session.is_some() => Ok(None),
            Some(guest) => self.greet(guest, admit).map(Some),
        };
        match stays {
            Ok(Some(session)) => {
                if let Some(guest) = self.guests.get_mut(&number) {
                    guest.session = Some(session);
                }
            }
            Err(Errno::EAGAIN) => {}
            Ok(None) => self.dismiss(number),
            Err(why) => {
                self.endpoint.counters().count_refusal(why);
                if let Some(process) = self.guests.get(&number).and_then(|guest| peer::process(guest.socket.as_fd())) {
                    self.endpoint.counters().remember_refusal(process, why);
                }
                self.dismiss(number);
            }
        }
    }

    fn greet(
        &self,
        guest: &Guest<C>,
        admit: &impl Fn(&PeerFacts) -> Result<Admission<C>, Errno>,
    ) -> Result<Arc<Session<C>>, Errno> {
        let mut bytes = [0; size_of::<Hello>()];
        let (length, sender) = peer::receive(guest.socket.as_fd(), &mut bytes)?.ok_or(Errno::ECONNRESET)?;
        let hello = Hello::read_from_bytes(&bytes[..length]).map_err(|_| Errno::EPROTO)?;
        if !hello.is_valid() {
            return Err(Errno::EPROTO);
        }
        let facts = PeerFacts::of(guest.socket.as_fd(), guest.process.as_fd())?;
        if !facts.sent(sender) {
            return Err(Errno::EPERM);
        }
        let tasks = Tasks::of(&facts)?;
        let (session, welcome, buffers) = self.endpoint.admit(facts, tasks, admit)?;
        // As long as it is, all that was read about the number was about the process.
        if !peer::is_alive(guest.process.as_fd(), session.facts().process) {
            self.endpoint.dismiss(&session);
            return Err(Errno::ESRCH);
        }
        let mut files = vec![buffers.as_fd()];
        files.extend(self.endpoint.shared_files());
        session.set_socket(&guest.socket);
        if let Err(error) = send_welcome(guest.socket.as_fd(), &welcome, &files) {
            self.endpoint.dismiss(&session);
            return Err(error);
        }
        Ok(session)
    }

    fn dismiss_silent(&mut self, admit: &impl Fn(&PeerFacts) -> Result<Admission<C>, Errno>) {
        let late = |guest: &Guest<C>| guest.session.is_none() && guest.since.elapsed() > GREETING_WAIT_MAX;
        let all_late: Vec<u64> =
            self.guests.iter().filter(|(_, guest)| late(guest)).map(|(&number, _)| number).collect();
        for number in all_late {
            // It may have been this thread that was late.
            self.attend(2 * number, admit);
            if self.guests.get(&number).is_some_and(|guest| guest.session.is_none()) {
                self.endpoint.counters().count_refusal(Errno::ETIMEDOUT);
                self.dismiss(number);
            }
        }
    }

    fn dismiss(&mut self, number: u64) {
        if let Some(session) = self.guests.remove(&number).and_then(|guest| guest.session) {
            self.endpoint.dismiss(&session);
        }
    }
}

impl<C> Drop for Reception<C> {
    fn drop(&mut self) {
        // A socket left behind would only be refused by `connect` and replaced by the next service.
        let _ = fs::remove_file(&self.path);
        for session in self.guests.drain().filter_map(|(_, guest)| guest.session) {
            self.endpoint.dismiss(&session);
        }
    }
}
