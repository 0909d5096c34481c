//! Test support: a session as a hostile client has it, with direct access to its memory.

use poolfs_ipc::area::{DATA_BYTES, buffers_length, queue_length};
use poolfs_ipc::handshake::{receive_welcome, send_hello};
use poolfs_ipc::memory::Mapping;
use poolfs_ipc::wire::Welcome;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

pub fn raw_socket(path: &Path) -> OwnedFd {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .expect("socket");
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).expect("path")).expect("connect");
    socket
}

/// A session as a hostile client has it: the bare memory.
pub struct Bare {
    pub socket: OwnedFd,
    pub welcome: Welcome,
    pub buffers: Mapping,
    pub queues: Vec<Mapping>,
    /// The memory files: the buffers' first, then each queue's; at last that of the leases, which is no memory file.
    pub files: Vec<OwnedFd>,
}

/// Where others crowd around the socket, a client may be sent away: it tries again.
pub fn bare_session(path: &Path) -> Bare {
    let start = Instant::now();
    let (mut socket, mut files) = (raw_socket(path), Vec::new());
    let mut greeted = send_hello(socket.as_fd());
    let welcome = loop {
        let answer = greeted.and_then(|()| receive_welcome(socket.as_fd(), |_, file| files.push(file)));
        match answer {
            Ok(welcome) => break welcome,
            Err(error) if start.elapsed() > Duration::from_secs(20) => panic!("no welcome: {error}"),
            Err(error) if error.raw() == libc::EAGAIN => std::thread::sleep(Duration::from_millis(1)),
            Err(_) => {
                std::thread::sleep(Duration::from_millis(5));
                files.clear();
                socket = raw_socket(path);
                greeted = send_hello(socket.as_fd());
            }
        }
    };
    let buffers =
        Mapping::of_sealed(&files[0], buffers_length(welcome.buffers as usize, DATA_BYTES), true).expect("buffers");
    let length = queue_length(welcome.queue_slots as usize);
    let queues = files[1..1 + welcome.queues as usize]
        .iter()
        .map(|file| Mapping::of_sealed(file, length, true).expect("queue"))
        .collect();
    Bare { socket, welcome, buffers, queues, files }
}

pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(5), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
