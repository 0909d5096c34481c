//! Tests of clients that try to make the service, or their neighbours, wait or pay.

use crate::bare::{Bare, bare_session, eventually, raw_socket};
use crate::common::{EchoService, assert_echo, echo};
use poolfs_ipc::CallError;
use poolfs_ipc::area::{self, BufferArea, DATA_BYTES};
use poolfs_ipc::futex;
use poolfs_ipc::handshake::receive_grant;
use poolfs_ipc::hold::Frame;
use poolfs_ipc::memory::PAGE;
use poolfs_ipc::queue::{Doorbell, DoorbellQueue};
use poolfs_ipc::service::MemoryBudget;
use poolfs_ipc::state::CallerState;
use poolfs_ipc::wire::{Grant, Hello, Reply};
use poolfs_types::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::io::{ErrorKind, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// A connection whose last close waits: it has bytes nobody reads, and lingers.
fn lingering() -> (TcpListener, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
    stream.set_nonblocking(true).expect("ours");
    loop {
        match stream.write(&[0; 4096]) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("{error}"),
        }
    }
    let linger = libc::linger { l_onoff: 1, l_linger: 30 };
    let length = size_of_val(&linger) as libc::socklen_t;
    // SAFETY: the option's value is valid for the call.
    let set = unsafe {
        libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, (&raw const linger).cast(), length)
    };
    assert_eq!(set, 0);
    (listener, stream)
}

#[test]
fn a_descriptor_that_comes_unasked_makes_nobody_wait_for_its_end() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&directory.path().join("i.sock"), 1, |_| {});
    let (unread, stream) = lingering();
    let socket = raw_socket(service.socket());
    let files = [stream.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    let hello = Hello::current();
    let part = rustix::io::IoSlice::new(hello.as_bytes());
    // A kernel that knows how refuses it on the way.
    let sent = rustix::net::sendmsg(&socket, &[part], &mut control, SendFlags::NOSIGNAL);
    if sent.is_err() {
        // Its own last close is not to wait either: without a peer there is nothing to linger for.
        drop(unread);
    }
    drop(stream);
    if sent.is_ok() {
        eventually("it is sent away", || service.endpoint.sessions().is_empty());
    }
    let start = Instant::now();
    assert_echo(&service.connect(), 1, b"somebody else");
    drop(socket);
    assert_echo(&service.connect(), 1, b"and the next");
    drop(service);
    assert!(start.elapsed() < Duration::from_secs(5), "the service waited {:?} for a stranger", start.elapsed());
}

#[test]
fn sleepers_on_the_queue_that_are_not_the_service_take_nobodys_wake_up() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&directory.path().join("i.sock"), 1, |_| {});
    let connection = service.connect();
    let hostile = bare_session(service.socket());
    let slots = hostile.welcome.queue_slots as usize;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for mapping in &hostile.queues {
            for _ in 0..100 {
                scope.spawn(|| {
                    let queue = area::queue(mapping, slots);
                    while !done.load(Ordering::Relaxed) {
                        let seen = queue.events().load(Ordering::Relaxed);
                        futex::wait(queue.events(), seen, Duration::from_secs(10));
                    }
                });
            }
        }
        let mut longest = Duration::ZERO;
        for round in 0..10 {
            // All are asleep again, the service behind the others.
            std::thread::sleep(Duration::from_millis(30));
            let start = Instant::now();
            assert_echo(&connection, round, b"over here");
            longest = longest.max(start.elapsed());
        }
        done.store(true, Ordering::Relaxed);
        for group in 0..hostile.queues.len() {
            service.endpoint.wake_all(group);
        }
        assert!(longest < Duration::from_millis(300), "one call took {longest:?}");
    });
}

/// Has the service write `bytes` into the data area of a buffer that the client never touched; the reply.
fn fill(service: &EchoService, hostile: &Bare, buffer: usize, bytes: usize) -> Reply {
    let area = BufferArea::new(&hostile.buffers, buffer, DATA_BYTES);
    area.put_request(&echo(1, bytes));
    let state = CallerState::new(area.state());
    let submitted = state.submit(state.borrow().expect("free"));
    let slots = hostile.welcome.queue_slots as usize;
    let bell = Doorbell { session: hostile.welcome.session, buffer: buffer as u16, again: false };
    area::queue(&hostile.queues[0], slots).publish(bell).expect("room");
    eventually("an answer", || {
        service.endpoint.wake_all(0);
        state.is_done(submitted)
    });
    state.give_back(submitted);
    area.get_reply()
}

fn allocated(hostile: &Bare) -> usize {
    rustix::fs::fstat(&hostile.files[0]).expect("a memory file").st_blocks as usize * 512
}

#[test]
fn a_session_that_is_over_leaves_no_memory_to_the_service() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&directory.path().join("i.sock"), 1, |_| {});
    let hostile = bare_session(service.socket());
    for buffer in 0..hostile.welcome.buffers as usize {
        assert_eq!(fill(&service, &hostile, buffer, DATA_BYTES).errno, 0);
    }
    assert!(allocated(&hostile) > hostile.welcome.buffers as usize * DATA_BYTES);
    rustix::net::shutdown(&hostile.socket, rustix::net::Shutdown::Both).expect("connected");
    eventually("the memory is given back", || allocated(&hostile) == 0);
}

#[test]
fn a_reply_whose_session_ended_before_it_was_read_is_none() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&directory.path().join("i.sock"), 1, |_| {});
    let connection = service.connect();
    let mut buffer = connection.borrow(Frame::here()).expect("free");
    buffer.put_data(0, b"abc").expect("room");
    buffer.execute(&echo(1, 3)).expect("a reply");
    let mut back = [0; 3];
    assert_eq!((buffer.get_data(0, &mut back), &back), (Ok(()), b"cba"));
    drop(service);
    assert_eq!(buffer.get_data(0, &mut back), Err(CallError::Dead));
}

#[test]
fn what_the_service_pays_for_sessions_is_bounded_and_given_back() {
    let directory = tempfile::tempdir().expect("directory");
    let buffers = 16;
    // Both sessions' headers and counts, and the data of three buffers.
    let budget = Arc::new(MemoryBudget::new((2 * (buffers + 2) + 3 * DATA_BYTES / PAGE) * PAGE));
    let service = EchoService::start(&directory.path().join("i.sock"), 1, |config| {
        config.buffers = buffers;
        config.memory = budget.clone();
    });
    let [first, second] = [(); 2].map(|()| bare_session(service.socket()));
    for buffer in [0, 1, 1, 1] {
        assert_eq!(fill(&service, &first, buffer, DATA_BYTES).errno, 0, "paid once, used often");
    }
    assert_eq!(fill(&service, &second, 5, DATA_BYTES).errno, 0);
    assert_eq!(fill(&service, &second, 6, 1).errno, libc::EIO);
    assert_eq!(fill(&service, &first, 0, DATA_BYTES).errno, 0);
    let path = std::ffi::CString::new(service.socket().to_str().expect("text")).expect("no NUL");
    assert!(poolfs_ipc::Connection::open(&path).is_err(), "no room for another session's headers");
    drop(first);
    eventually("the first session's memory is given back", || fill(&service, &second, 6, 1).errno == 0);
    assert_echo(&service.connect(), 7, b"room again");
}

/// Messages that may wait for a client that does not receive them, each with up to three descriptors.
const UNRECEIVED_MAX: usize = 8;

#[test]
fn a_client_that_never_receives_its_segments_holds_few_descriptors() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&directory.path().join("i.sock"), 1, |_| {});
    let hostile = bare_session(service.socket());
    let session = service.endpoint.session(hostile.welcome.session).expect("the session");
    let (map, mut seen) = std::io::pipe().expect("a pipe");
    let give = || session.grant(Grant::new(1, 0, 0), &[map.as_fd(); 3]);
    let start = Instant::now();
    let given = (0..1000).take_while(|_| give().is_ok()).count();
    assert!((1..=UNRECEIVED_MAX).contains(&given), "{given} messages wait for it");
    assert!((0..1000).all(|_| give() == Err(Errno::EAGAIN)));
    assert!(start.elapsed() < Duration::from_secs(1), "the service waited {:?}", start.elapsed());
    assert_echo(&service.connect(), 1, b"somebody else");

    // Who receives after all gets what was sent, and what it asks for then.
    for number in 1..=given as u64 {
        assert_eq!(receive_grant(hostile.socket.as_fd()).expect("a segment").0.number, number);
    }
    give().expect("room again");
    receive_grant(hostile.socket.as_fd()).expect("a segment");

    // What was never received goes with the session.
    give().expect("room");
    drop((session, hostile));
    drop(map);
    eventually("the descriptors are closed", || seen.write(b"x").is_err());
}
