//! Malicious clients, each a process of its own.

use super::witnesses::MARK;
use super::{PLACE, SOCKET};
use crate::bare::{Bare, bare_session, eventually, raw_socket};
use crate::queue::adopt;
use poolfs_ipc::area::{BufferArea, DATA_BYTES, queue};
use poolfs_ipc::futex;
use poolfs_ipc::memory::Mapping;
use poolfs_ipc::queue::{Doorbell, DoorbellQueue};
use poolfs_ipc::state::CallerState;
use poolfs_ipc::wire::{Operation, Reply, Request, Status, WireTime};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A small deterministic generator (Marsaglia's xorshift64).
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Numbers at which something changes, and any others.
    fn number(&mut self) -> u64 {
        const EDGES: [u64; 12] =
            [0, 1, 7, 4095, 4096, 4097, 131_071, 131_072, 131_073, u32::MAX as u64, i64::MAX as u64, u64::MAX];
        match self.below(4) {
            0 => self.next(),
            1 => self.below(100_000),
            _ => EDGES[self.below(EDGES.len() as u64) as usize],
        }
    }
}

/// Plays one offender to the end. It fails when it sees what it must not.
pub fn play(kind: &str, end: Instant) {
    let socket = PathBuf::from(std::env::var_os(SOCKET).expect("told"));
    let place = PathBuf::from(std::env::var_os(PLACE).expect("told"));
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15 ^ kind.len() as u64);
    while Instant::now() < end {
        let round = Instant::now() + Duration::from_secs(2);
        let until = end.min(round);
        match kind {
            "doorbells" => ring(&bare_session(&socket), &mut dice, until),
            "rubbish" => ask_rubbish(&bare_session(&socket), &mut dice, until),
            "changing" => change_while_served(&bare_session(&socket), &mut dice, until),
            "scribbler" => scribble_queues(&bare_session(&socket), &mut dice, until),
            "silent" => never_read(&bare_session(&socket), &mut dice, until),
            "crowd" => crowd(&socket, &mut dice, until),
            "appender" => append(&bare_session(&socket), &place, until),
            "hoarder" => hoard(&bare_session(&socket), &place, until),
            other => panic!("no such offender: {other}"),
        }
    }
}

/// Whether a round has ended: it goes on behind its end until it has come to anything, which on a busy machine may take its time.
fn is_over(end: Instant, has_come_to_anything: bool) -> bool {
    const LATE_MAX: Duration = Duration::from_secs(60);
    Instant::now() >= if has_come_to_anything { end } else { end + LATE_MAX }
}

/// Rings for a buffer, by whatever queue.
fn publish(hostile: &Bare, dice: &mut Dice, session: u32, buffer: u16, again: bool) {
    let slots = hostile.welcome.queue_slots as usize;
    let words = queue(&hostile.queues[dice.below(hostile.queues.len() as u64) as usize], slots);
    // A full queue is its own doing.
    if words.publish(Doorbell { session, buffer, again }) == Ok(true) {
        futex::wake_one(words.ring());
    }
}

/// Forged and repeated doorbells: for sessions of others, for buffers that are not there, for nothing.
fn ring(hostile: &Bare, dice: &mut Dice, end: Instant) {
    let own = hostile.welcome.session;
    reopen(&hostile.files);
    while Instant::now() < end {
        for _ in 0..50 {
            let session = match dice.below(4) {
                0 => own,
                // Numbers of other sessions are near.
                1 => own.wrapping_sub(dice.below(20) as u32 * 4097),
                2 => (dice.below(64) as u32) << 12 | dice.below(64) as u32,
                _ => dice.next() as u32,
            };
            let buffer = [dice.below(16) as u16, dice.next() as u16][dice.below(2) as usize];
            let again = dice.below(2) == 0;
            publish(hostile, dice, session, buffer, again);
        }
        std::thread::sleep(Duration::from_micros(500));
    }
}

const PATHS: [&str; 14] = [
    "open/a",
    "open/b",
    "open/c",
    "open/d",
    "open/e",
    "open/d/f",
    "open",
    "",
    "/",
    "witness-of-requests",
    "witness-of-the-kernel",
    "open/../witness-of-requests",
    "../dir-two/witness-of-requests",
    "open/\0x",
];

/// A request that may mean anything; lengths that agree with nothing.
fn rubbish(dice: &mut Dice) -> (Request, Vec<u8>) {
    let mut data = Vec::new();
    let mut lengths = [0; 3];
    for length in &mut lengths {
        let path = PATHS[dice.below(PATHS.len() as u64) as usize];
        data.extend_from_slice(path.as_bytes());
        *length = if dice.below(8) == 0 { dice.number() as u32 } else { path.len() as u32 };
    }
    let operation = if dice.below(16) == 0 { dice.next() as u32 } else { dice.below(26) as u32 };
    let mut number = || if dice.below(2) == 0 { 0 } else { dice.number() };
    let request = Request {
        operation,
        handle: number(),
        second_handle: number(),
        directory: number(),
        second_directory: number(),
        offset: number(),
        second_offset: number(),
        length: number(),
        mode: number() as u32,
        flags: number() as u32,
        device: number() as u32,
        umask: number() as u32,
        path_length: lengths[0],
        second_length: lengths[1],
        third_length: lengths[2],
        times: [WireTime { seconds: number() as i64, nanoseconds: number() as u32, reserved: 0 }; 2],
        submitted_ns: number(),
    };
    (request, data)
}

/// Nothing in the whole buffer is anybody else's.
fn look_for_marks(area: &BufferArea<'_>) {
    let mut bytes = vec![0; DATA_BYTES];
    area.get_data(0, &mut bytes).expect("in bounds");
    assert!(!bytes.windows(MARK.len()).any(|window| window == MARK), "bytes of a witness's file");
}

fn area(hostile: &Bare, buffer: usize) -> BufferArea<'_> {
    BufferArea::new(&hostile.buffers, buffer, DATA_BYTES)
}

/// Submits what is in a buffer, rings as often as that, and waits for the reply.
fn submit(hostile: &Bare, dice: &mut Dice, buffer: usize, rings: u64) -> Reply {
    let area = area(hostile, buffer);
    let state = CallerState::new(area.state());
    let submitted = state.submit(state.borrow().expect("free"));
    for _ in 0..rings {
        publish(hostile, dice, hostile.welcome.session, buffer as u16, false);
    }
    let deadline = Instant::now() + Duration::from_secs(30);
    while !state.is_done(submitted) {
        assert!(Instant::now() < deadline, "no answer");
        std::thread::sleep(Duration::from_millis(1));
        publish(hostile, dice, hostile.welcome.session, buffer as u16, true);
    }
    let reply = area.get_reply();
    state.give_back(submitted);
    // It runs nothing: what it rings for is over.
    publish(hostile, dice, hostile.welcome.session, buffer as u16, false);
    reply
}

fn ask_rubbish(hostile: &Bare, dice: &mut Dice, end: Instant) {
    while Instant::now() < end {
        let buffer = dice.below(u64::from(hostile.welcome.buffers)) as usize;
        let (request, data) = rubbish(dice);
        area(hostile, buffer).put_data(0, &data).expect("room");
        area(hostile, buffer).put_request(&request);
        let reply = submit(hostile, dice, buffer, 1);
        let known = Status::from_number(reply.status).is_some() && (0..=4095).contains(&reply.errno);
        assert!(known, "{request:?}: {reply:?}");
        look_for_marks(&area(hostile, buffer));
    }
}

/// Requests and data that change all the time they are looked at.
fn change_while_served(hostile: &Bare, dice: &mut Dice, end: Instant) {
    let stop = AtomicBool::new(false);
    let seed = dice.next();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut dice = Dice(seed);
            while !stop.load(Ordering::Relaxed) {
                let (request, data) = rubbish(&mut dice);
                for buffer in 0..4 {
                    area(hostile, buffer).put_request(&request);
                    area(hostile, buffer).put_data(0, &data).expect("room");
                }
            }
        });
        while Instant::now() < end {
            let buffer = dice.below(4) as usize;
            submit(hostile, dice, buffer, 2);
            look_for_marks(&area(hostile, buffer));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

fn scribble(mapping: &Mapping, dice: &mut Dice) {
    for _ in 0..64 {
        let offset = dice.below(mapping.length() as u64 / 8) as usize * 8;
        let value = if dice.below(2) == 0 { dice.next() } else { 0 };
        // SAFETY: in bounds of a mapping that is alive; it is shared memory whose every word may be anything.
        unsafe { mapping.base().add(offset).cast::<u64>().write_volatile(value) };
    }
}

fn scribble_queues(hostile: &Bare, dice: &mut Dice, end: Instant) {
    while Instant::now() < end {
        hostile.queues.iter().for_each(|queue| scribble(queue, dice));
        scribble(&hostile.buffers, dice);
        std::thread::sleep(Duration::from_micros(300));
    }
}

/// Requests whose replies nobody looks at, until the session just ends.
fn never_read(hostile: &Bare, dice: &mut Dice, end: Instant) {
    let request = Request { operation: Operation::Stat as u32, path_length: 6, ..Request::default() };
    for buffer in 0..hostile.welcome.buffers as usize {
        let area = area(hostile, buffer);
        area.put_data(0, b"open/a").expect("room");
        area.put_request(&request);
        let state = CallerState::new(area.state());
        state.submit(state.borrow().expect("free"));
        publish(hostile, dice, hostile.welcome.session, buffer as u16, false);
    }
    std::thread::sleep(Duration::from_millis(dice.below(200)).min(end.saturating_duration_since(Instant::now())));
    if dice.below(2) == 0 {
        // The service is told that it is over while it serves.
        let _ = rustix::net::shutdown(&hostile.socket, rustix::net::Shutdown::Both);
    }
}

/// As many sessions as can be had, and connections that never become one.
fn crowd(socket: &Path, dice: &mut Dice, end: Instant) {
    let limit = libc::rlimit { rlim_cur: 4096, rlim_max: 4096 };
    // SAFETY: the limits are valid for the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    let mut sessions = Vec::new();
    let mut refused = 0;
    while sessions.len() + refused < 1000 && Instant::now() < end {
        let connection = raw_socket(socket);
        match dice.below(10) {
            0 => drop(rustix::net::send(&connection, b"PFS1 and what not", rustix::net::SendFlags::NOSIGNAL)),
            1 => {}
            _ => drop(poolfs_ipc::handshake::send_hello(connection.as_fd())),
        }
        let start = Instant::now();
        let mut files = Vec::new();
        loop {
            match poolfs_ipc::handshake::receive_welcome(connection.as_fd(), |_, file| files.push(file)) {
                Ok(welcome) => {
                    sessions.push((connection, welcome));
                    break;
                }
                Err(error) if error.raw() == libc::EAGAIN && start.elapsed() < Duration::from_millis(5) => {
                    std::thread::sleep(Duration::from_micros(200));
                }
                Err(_) => {
                    refused += 1;
                    break;
                }
            }
        }
        reopen(&files);
    }
    assert!(sessions.len() <= 768, "{} sessions of one user", sessions.len());
}

/// Whatever the service gave keeps its size, whoever opens it how.
pub fn reopen(files: &[std::os::fd::OwnedFd]) {
    for file in files {
        let again = OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let length = rustix::fs::fstat(file).expect("a memory file").st_size;
        let is_sealed =
            rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(rustix::fs::SealFlags::SHRINK));
        assert!(is_sealed || again.is_err(), "the service's own words can be written");
        for file in again.iter().map(AsFd::as_fd).chain([file.as_fd()]) {
            assert!(rustix::fs::ftruncate(file, 0).is_err(), "it was cut");
            assert!(rustix::fs::ftruncate(file, length as u64 * 2).is_err(), "it has grown");
            let sealed = rustix::fs::fcntl_add_seals(file, rustix::fs::SealFlags::WRITE);
            assert!(sealed.is_err(), "it was sealed against the service");
        }
    }
}

/// Appends, each rung for many times before, while and after it is served: each is there once, in its order.
fn append(hostile: &Bare, place: &Path, end: Instant) {
    let path = place.join(format!("log-{}", hostile.welcome.session));
    let file = OpenOptions::new().append(true).create_new(true).open(&path).expect("made");
    let handle = adopt(&file, hostile.welcome.session).handle;
    assert_ne!(handle, 0, "not adopted");
    let mut dice = Dice(1 + u64::from(hostile.welcome.session));
    let mut expected = Vec::new();
    for number in 0u64.. {
        if is_over(end, !expected.is_empty()) {
            break;
        }
        let record = [number.to_le_bytes(), (!number).to_le_bytes()].concat();
        let buffer = dice.below(u64::from(hostile.welcome.buffers)) as usize;
        let length = record.len() as u64;
        let request = Request { operation: Operation::Write as u32, handle, length, ..Request::default() };
        area(hostile, buffer).put_data(0, &record).expect("room");
        area(hostile, buffer).put_request(&request);
        let rings = 1 + dice.below(8);
        let reply = submit(hostile, &mut dice, buffer, rings);
        if reply.status == Status::Done as u32 {
            assert_eq!(reply.length, length);
            expected.extend_from_slice(&record);
        }
    }
    assert!(!expected.is_empty(), "nothing was appended");
    drop(file);
    eventually("the file can be read", || fs::read(&path).is_ok());
    assert!(fs::read(&path).expect("there") == expected, "an append ran twice, or not at all");
    fs::remove_file(&path).expect("its own");
}

/// Asks for segments and receives none, until the end: few were sent.
fn hoard(hostile: &Bare, place: &Path, end: Instant) {
    const UNRECEIVED_MAX: u64 = 8;
    let path = place.join(format!("hoard-{}", hostile.welcome.session));
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).expect("made");
    file.write_all(&vec![1; 1 << 20]).expect("room");
    let handle = adopt(&file, hostile.welcome.session).handle;
    assert_ne!(handle, 0, "not adopted");
    let mut dice = Dice(handle | 1);
    let mut sent = 0;
    while !is_over(end, sent > 0) {
        let buffer = dice.below(u64::from(hostile.welcome.buffers)) as usize;
        area(hostile, buffer).put_request(&Request {
            operation: Operation::Segment as u32,
            handle,
            ..Request::default()
        });
        let reply = submit(hostile, &mut dice, buffer, 1);
        sent += u64::from(reply.status == Status::Done as u32);
    }
    assert!((1..=UNRECEIVED_MAX).contains(&sent), "{sent} segments were sent");
    let received = std::iter::from_fn(|| poolfs_ipc::handshake::receive_grant(hostile.socket.as_fd()).ok()).count();
    assert_eq!(received as u64, sent);
    fs::remove_file(&path).expect("its own");
}
