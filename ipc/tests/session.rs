//! Tests of sessions within one process: requests and replies, limits, session ends, and hostile neighbours.

#[path = "session/bare.rs"]
mod bare;
mod common;
#[path = "session/endings.rs"]
mod endings;
#[path = "session/hostile.rs"]
mod hostile;
#[path = "session/posts.rs"]
mod posts;

use bare::{bare_session, eventually, raw_socket};
use common::{EchoService, assert_echo, connect, echo};
use poolfs_ipc::area::{BufferArea, DATA_BYTES};
use poolfs_ipc::hold::Frame;
use poolfs_ipc::memory::Mapping;
use poolfs_ipc::{CallError, Connection};
use poolfs_types::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn socket_in(directory: &tempfile::TempDir) -> std::path::PathBuf {
    directory.path().join("i.sock")
}

#[test]
fn every_size_goes_there_and_back_from_many_threads() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&socket_in(&directory), 2, |_| {});
    let connection = service.connect();
    let data: Vec<u8> = (0..DATA_BYTES).map(|i| (i * 13 + i / 256) as u8).collect();
    for length in [0, 1, 63, 4096, 65537, DATA_BYTES] {
        assert_echo(&connection, length as u64, &data[..length]);
    }
    std::thread::scope(|scope| {
        for thread in 0..6u64 {
            let (connection, data) = (&connection, &data);
            scope.spawn(move || {
                for round in 0..300 {
                    assert_echo(connection, thread << 32 | round, &data[..(round as usize * 37) % 5000]);
                }
            });
        }
    });
    assert_eq!(connection.calls(), 6 + 6 * 300);
    assert!(connection.is_idle());
    assert_eq!(connection.call(&echo(0, 0), &[&[0; DATA_BYTES + 1]], &mut []).err(), Some(CallError::Busy));
}

#[test]
fn the_kernel_vouches_for_the_client() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&socket_in(&directory), 1, |_| {});
    let connection = service.connect();
    let session = service.endpoint.session(connection.session()).expect("the session");
    let facts = session.facts();
    assert_eq!(facts.process, std::process::id());
    assert_eq!(facts.uid, rustix::process::geteuid().as_raw());
    assert_eq!(facts.real_gid, rustix::process::getgid().as_raw());
    assert_eq!(facts.user_namespace, None);
    assert!(session.owns_thread(rustix::thread::gettid().as_raw_nonzero().get() as u32));
    assert!(!session.owns_thread(1) && !session.owns_thread(0));
    assert!(service.endpoint.session(connection.session() ^ 1 << 12).is_none(), "an old number of the same place");
}

#[test]
fn a_session_ends_with_its_socket_and_late_calls_are_told() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&socket_in(&directory), 1, |_| {});
    let connection = service.connect();
    assert_echo(&connection, 1, b"before");
    connection.close();
    eventually("the session ends", || service.endpoint.sessions().is_empty());
    assert_eq!(connection.call(&echo(1, 0), &[], &mut []).err(), Some(CallError::NoSession));
    assert!(!connection.is_usable());
    // The program closed the descriptor and reuses its number: found out by the cookie, and left alone.
    let connection = service.connect();
    let number = connection.socket_number();
    // SAFETY: the test plays a program that uses descriptors it does not know.
    assert_eq!(unsafe { libc::dup2(0, number) }, number);
    assert!(!connection.is_connected());
    eventually("the session ends", || service.endpoint.sessions().is_empty());
    drop(connection);
    // SAFETY: closes what `dup2` made, which must still be there.
    assert_eq!(unsafe { libc::close(number) }, 0);
}

#[test]
fn an_unclear_end_is_an_error_and_not_a_hang() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&socket_in(&directory), 1, |_| {});
    let connection = service.connect();
    let mut slow = echo(1, 0);
    slow.mode = 300;
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| connection.call(&slow, &[], &mut []).err());
        std::thread::sleep(Duration::from_millis(50));
        let start = Instant::now();
        connection.close();
        assert_eq!(caller.join().expect("caller"), Some(CallError::Dead));
        assert!(start.elapsed() < Duration::from_millis(100));
    });
}

#[test]
fn strangers_and_talkers_are_sent_away_and_numbers_are_bounded() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&socket_in(&directory), 1, |config| config.sessions_per_user_max = 2);
    let mut stranger = [0; 64];
    for hello in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"PFS1", b"PFS1\x01\0\0\0", b"PFS1\x03\0\0\0\0"] {
        let socket = raw_socket(service.socket());
        rustix::net::send(&socket, hello, SendFlags::NOSIGNAL).expect("send");
        assert!(matches!(rustix::io::read(&socket, &mut stranger), Ok(0) | Err(_)), "{hello:?}");
    }
    let first = service.connect();
    let talker = bare_session(service.socket());
    let path = std::ffi::CString::new(service.socket().to_str().expect("text")).expect("no NUL");
    assert!(Connection::open(&path).is_err(), "a third session of one user");
    eventually("refusals are counted", || {
        service.endpoint.counters().refused() == BTreeMap::from([(Errno::EPROTO, 4), (Errno::EUSERS, 1)])
    });
    rustix::net::send(&talker.socket, b"hello again", SendFlags::NOSIGNAL).expect("send");
    eventually("the talker's session ends", || service.endpoint.session(talker.welcome.session).is_none());
    let third = service.connect();
    assert_echo(&first, 1, b"first");
    assert_echo(&third, 3, b"third");
}

#[test]
fn a_full_queue_of_connections_is_waited_for() {
    let directory = tempfile::tempdir().expect("directory");
    let path = socket_in(&directory);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("socket");
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).expect("path")).expect("bind");
    rustix::net::listen(&listener, 0).expect("listen");
    let _first = raw_socket(&path);
    let name = std::ffi::CString::new(path.as_os_str().as_bytes()).expect("no NUL");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| Connection::open(&name).err());
        std::thread::sleep(Duration::from_millis(200));
        assert!(!waiting.is_finished(), "it did not wait");
        while !waiting.is_finished() {
            // Nobody to be accepted yet is no error of the test.
            drop(rustix::net::accept(&listener));
            std::thread::sleep(Duration::from_millis(10));
        }
        let error = waiting.join().expect("no panic").expect("nobody lets it in");
        assert!(matches!(error, Errno::EPROTO | Errno::ECONNRESET | Errno::EPIPE), "{error:?}");
    });
}

/// A call, and inside it others, as signal handlers make them: the fourth is too deep.
fn nest(connection: &Connection, depth: usize) {
    let borrowed = connection.borrow(Frame::here());
    assert_eq!(borrowed.is_ok(), depth < 3, "at depth {depth}");
    if let Ok(mut buffer) = borrowed {
        buffer.execute(&echo(7, 0)).expect("reply");
        nest(connection, depth + 1);
        let other = std::thread::scope(|scope| {
            scope.spawn(|| connection.borrow(Frame::here()).map(drop)).join().expect("another thread")
        });
        assert_eq!(other, Ok(()));
        std::hint::black_box(&buffer);
    }
}

/// A call that is left by a jump: what it had is never dropped.
#[inline(never)]
fn leave(connection: &Connection) {
    let _ = std::mem::ManuallyDrop::new(connection.borrow(Frame::here()).expect("a buffer"));
}

#[test]
fn what_calls_left_by_a_jump_had_is_used_again() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&socket_in(&directory), 1, |config| config.buffers = 4);
    let connection = service.connect();
    for _ in 0..10 {
        leave(&connection);
        assert_echo(&connection, 9, b"after the jump");
    }
}

#[test]
fn nested_borrowers_find_other_buffers_until_they_are_too_deep() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&socket_in(&directory), 1, |config| config.buffers = 4);
    let connection = service.connect();
    nest(&connection, 0);
    assert_echo(&connection, 9, b"free again");
}

/// Writes pseudo-random words all over a mapping, the state of another client's queue, say.
fn scribble(mapping: &Mapping, seed: &mut u64) {
    for _ in 0..64 {
        *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let offset = (*seed >> 33) as usize % (mapping.length() / 8) * 8;
        let value = if *seed >> 63 == 0 { *seed } else { 0 };
        // SAFETY: in bounds of a mapping that is alive; it is shared memory whose every word may be anything.
        unsafe { mapping.base().add(offset).cast::<u64>().write_volatile(value) };
    }
}

#[test]
fn a_neighbour_that_scribbles_on_the_queues_slows_but_breaks_nothing() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&socket_in(&directory), 2, |_| {});
    let connection = service.connect();
    let hostile = bare_session(service.socket());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut seed = 42;
            while !done.load(Ordering::Relaxed) {
                hostile.queues.iter().for_each(|queue| scribble(queue, &mut seed));
                scribble(&hostile.buffers, &mut seed);
                std::thread::sleep(Duration::from_micros(300));
            }
        });
        let mut longest = Duration::ZERO;
        let end = Instant::now() + Duration::from_millis(1500);
        let mut round = 0;
        while Instant::now() < end {
            let start = Instant::now();
            assert_echo(&connection, round, b"through the noise");
            longest = longest.max(start.elapsed());
            round += 1;
        }
        done.store(true, Ordering::Relaxed);
        assert!(round > 20, "only {round} calls got through");
        assert!(longest < Duration::from_secs(2), "one call took {longest:?}");
    });
    assert_echo(&connection, 1, b"and quiet again");
}

#[test]
fn forged_and_repeated_doorbells_run_nothing_twice() {
    use poolfs_ipc::queue::{Doorbell, DoorbellQueue};
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&socket_in(&directory), 1, |_| {});
    let connection = service.connect();
    let hostile = bare_session(service.socket());
    let slots = hostile.welcome.queue_slots as usize;
    for round in 0..50 {
        for buffer in [0, 1, 15, 16, u16::MAX] {
            for session in [connection.session(), hostile.welcome.session, 0, u32::MAX] {
                let bell = Doorbell { session, buffer, again: round % 2 == 0 };
                // A full queue is what the hostile client deserves.
                let _ = poolfs_ipc::area::queue(&hostile.queues[0], slots).publish(bell);
            }
        }
        service.endpoint.wake_all(0);
        assert_echo(&connection, round, b"once");
    }
    assert_eq!(connection.calls(), 50);
    // Its own buffer, submitted with a request that names more data than there is: refused, with an end.
    let area = BufferArea::new(&hostile.buffers, 0, DATA_BYTES);
    area.put_request(&echo(1, DATA_BYTES + 1));
    let state = poolfs_ipc::state::CallerState::new(area.state());
    let submitted = state.submit(state.borrow().expect("free"));
    let bell = Doorbell { session: hostile.welcome.session, buffer: 0, again: true };
    eventually("an answer", || {
        let _ = poolfs_ipc::area::queue(&hostile.queues[0], slots).publish(bell);
        service.endpoint.wake_all(0);
        state.is_done(submitted)
    });
    assert_eq!(area.get_reply().errno, 5);
}

#[test]
fn a_forked_child_has_no_session() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&socket_in(&directory), 1, |_| {});
    let connection = connect(service.socket());
    // SAFETY: the child only makes calls that are safe after a fork (the library's whole point) and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = connection.call(&echo(1, 0), &[], &mut []).err() == Some(CallError::NoSession);
        connection.close();
        // SAFETY: ends the child at once, without running the parent's destructors.
        unsafe { libc::_exit(if refused && connection.is_inherited() { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: `status` is valid for the call; the child is ours.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_echo(&connection, 2, b"the parent's is untouched");
}
