//! Tests with two processes: requests between them, and how each detects the other's death or stop.
//!
//! The test starts itself as the other process; [`ROLE`] tells it what to be.

mod common;
#[path = "processes/deaths.rs"]
mod deaths;
#[cfg(target_arch = "x86_64")]
#[path = "processes/interrupted.rs"]
mod interrupted;

use common::{EchoService, assert_echo, connect, echo};
use poolfs_ipc::CallError;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const ROLE: &str = "POOLFS_IPC_TEST_ROLE";
const SOCKET: &str = "POOLFS_IPC_TEST_SOCKET";

/// Another process of this test; killed when dropped.
struct Process(Child);

impl Process {
    fn start(role: &str, socket: &Path) -> Self {
        let program = std::env::current_exe().expect("own path");
        let child = Command::new(program).env(ROLE, role).env(SOCKET, socket).stdin(Stdio::null()).spawn();
        Self(child.expect("started"))
    }

    fn signal(&self, signal: i32) {
        // SAFETY: signals a child that was not waited for, so that the number is its.
        assert_eq!(unsafe { libc::kill(self.0.id() as i32, signal) }, 0);
    }

    /// Stops the process, and comes back when all its threads stand still.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let mut status = 0;
        // SAFETY: waits for a child of our own, without reaping it; `status` is valid for the call.
        let waited = unsafe { libc::waitpid(self.0.id() as i32, &raw mut status, libc::WUNTRACED) };
        assert_eq!(waited, self.0.id() as i32);
        assert!(libc::WIFSTOPPED(status));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It fails only when the child was waited for already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn play(role: &str, socket: &Path) {
    match role {
        "service" => {
            let _service = EchoService::start(socket, 2, |_| {});
            std::thread::sleep(Duration::from_secs(60));
        }
        "client" => {
            let connection = connect(socket);
            for value in 0.. {
                assert_echo(&connection, value, b"a client of its own");
            }
        }
        "parent" => {
            let connection = connect(socket);
            assert_echo(&connection, 1, b"before the fork");
            // SAFETY: the child does nothing but sleep and exit.
            if unsafe { libc::fork() } == 0 {
                std::thread::sleep(Duration::from_secs(3));
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(0) };
            }
            std::thread::sleep(Duration::from_secs(60));
        }
        "poster" => deaths::play_poster(socket),
        "granting" => deaths::play_granting_service(socket),
        other => panic!("unknown role {other}"),
    }
}

fn requests_cross_processes(socket: &Path) {
    let _service = Process::start("service", socket);
    let connection = connect(socket);
    for value in 0..2000 {
        assert_echo(&connection, value, &[7; 100]);
    }
}

fn a_dead_service_is_an_error_within_100_ms(socket: &Path) {
    let mut service = Process::start("service", socket);
    let (busy, idle) = (connect(socket), connect(socket));
    assert_echo(&busy, 1, b"alive");
    let mut slow = echo(1, 0);
    slow.mode = 10_000;
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| (busy.call(&slow, &[], &mut []).err(), Instant::now()));
        std::thread::sleep(Duration::from_millis(120));
        let killed = Instant::now();
        service.signal(libc::SIGKILL);
        let (result, returned) = caller.join().expect("caller");
        assert_eq!(result, Some(CallError::Dead));
        assert!(returned - killed < Duration::from_millis(100), "it took {:?}", returned - killed);
    });
    assert_eq!(service.0.wait().expect("dead").signal(), Some(libc::SIGKILL));
    let start = Instant::now();
    assert_eq!(idle.call(&echo(1, 0), &[], &mut []).err(), Some(CallError::Dead));
    assert!(start.elapsed() < Duration::from_millis(100), "it took {:?}", start.elapsed());
    assert_eq!(idle.call(&echo(1, 0), &[], &mut []).err(), Some(CallError::NoSession));
    let _next = Process::start("service", socket);
    assert_echo(&connect(socket), 2, b"a new service in the dead one's place");
}

fn a_stopped_service_is_waited_for(socket: &Path) {
    let service = Process::start("service", socket);
    let connection = connect(socket);
    assert_echo(&connection, 1, b"running");
    service.stop();
    let returned = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_echo(&connection, 2, b"in spite of the stop");
            returned.store(true, Ordering::Release);
        });
        std::thread::sleep(Duration::from_millis(300));
        assert!(!returned.load(Ordering::Acquire));
        service.signal(libc::SIGCONT);
    });
}

fn a_stopped_or_killed_client_hinders_nobody(socket: &Path) {
    let service = EchoService::start(socket, 2, |_| {});
    let connection = service.connect();
    for round in 0..20 {
        let client = Process::start("client", socket);
        let start = Instant::now();
        while service.endpoint.sessions().len() < 2 {
            assert!(start.elapsed() < Duration::from_secs(10), "the client does not come");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(700 * round));
        client.stop();
        for value in 0..200 {
            let start = Instant::now();
            assert_echo(&connection, value, b"beside a stopped client");
            assert!(start.elapsed() < Duration::from_secs(1));
        }
        client.signal(libc::SIGCONT);
        drop(client);
        let start = Instant::now();
        while service.endpoint.sessions().len() > 1 {
            assert!(start.elapsed() < Duration::from_secs(1), "the dead client's session stays");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn a_session_ends_with_its_process_though_a_child_holds_the_socket(socket: &Path) {
    let service = EchoService::start(socket, 1, |_| {});
    let parent = Process::start("parent", socket);
    let start = Instant::now();
    while service.endpoint.sessions().is_empty() {
        assert!(start.elapsed() < Duration::from_secs(10), "the client does not come");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(100));
    let other = connect(service.socket());
    assert_echo(&other, 1, b"another");
    drop((other, parent));
    let start = Instant::now();
    while !service.endpoint.sessions().is_empty() {
        assert!(start.elapsed() < Duration::from_secs(1), "the dead client's session stays");
        std::thread::sleep(Duration::from_millis(1));
    }
}

type Test = fn(&Path);

fn main() {
    if let (Ok(role), Ok(socket)) = (std::env::var(ROLE), std::env::var(SOCKET)) {
        return play(&role, &PathBuf::from(socket));
    }
    let tests: &[(&str, Test)] = &[
        ("requests_cross_processes", requests_cross_processes),
        ("a_dead_service_is_an_error_within_100_ms", a_dead_service_is_an_error_within_100_ms),
        ("a_stopped_service_is_waited_for", a_stopped_service_is_waited_for),
        ("a_stopped_or_killed_client_hinders_nobody", a_stopped_or_killed_client_hinders_nobody),
        (
            "a_session_ends_with_its_process_though_a_child_holds_the_socket",
            a_session_ends_with_its_process_though_a_child_holds_the_socket,
        ),
        (
            "what_a_client_had_posted_when_it_was_killed_is_served",
            deaths::what_a_client_had_posted_when_it_was_killed_is_served,
        ),
        (
            "a_service_that_is_killed_is_noticed_by_the_first_request_behind_the_posts",
            deaths::a_service_that_is_killed_is_noticed_by_the_first_request_behind_the_posts,
        ),
        #[cfg(target_arch = "x86_64")]
        (
            "posts_that_a_handler_leaves_by_a_jump_happen_or_not",
            interrupted::posts_that_a_handler_leaves_by_a_jump_happen_or_not,
        ),
        #[cfg(target_arch = "x86_64")]
        (
            "posts_of_a_handler_inside_a_post_are_served_once",
            interrupted::posts_of_a_handler_inside_a_post_are_served_once,
        ),
        #[cfg(target_arch = "x86_64")]
        (
            "posts_that_a_child_of_their_handler_goes_on_with_are_the_parents",
            interrupted::posts_that_a_child_of_their_handler_goes_on_with_are_the_parents,
        ),
    ];
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    for (name, test) in tests.iter().filter(|(name, _)| name.contains(&filter)) {
        let directory = tempfile::tempdir().expect("directory");
        test(&directory.path().join("i.sock"));
        println!("test {name} ... ok");
    }
}
