//! Looks at clients, and sessions that end by what a look shows.

use super::common::{EchoService, assert_echo, echo};
use super::socket_in;
use poolfs_ipc::CallError;
use poolfs_ipc::hold::Frame;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Threads of each group of the service.
const THREADS: usize = 2;
/// Nobody waits longer for what must come.
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_look_that_takes_long_is_waited_for_by_no_other() {
    let directory = tempfile::tempdir().expect("directory");
    let (go_on, gate) = channel::<()>();
    let (gate, looks) = (Arc::new(Mutex::new(gate)), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&looks);
    let look = move || {
        if counted.fetch_add(1, Ordering::SeqCst) == 0 {
            let _ = gate.lock().expect("not poisoned").recv();
        }
        true
    };
    let service =
        EchoService::start_looking(&socket_in(&directory), THREADS, |_| {}, move || Some(Box::new(look.clone())));
    let connection = service.connect();
    let (told, all) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // As many as would keep all threads of both groups.
            while looks.load(Ordering::SeqCst) <= 2 * THREADS {
                assert_echo(&connection, 1, b"served");
            }
            told.send(()).expect("waited for");
        });
        let outcome = all.recv_timeout(LIMIT);
        drop(go_on);
        outcome.expect("requests are served beside a look that does not end");
    });
}

#[test]
fn who_waits_for_so_long_at_most_is_answered_no_later() {
    let directory = tempfile::tempdir().expect("directory");
    let (go_on, gate) = channel::<()>();
    let gate = Arc::new(Mutex::new(gate));
    let look = move || {
        let _ = gate.lock().expect("not poisoned").recv();
        true
    };
    let service =
        EchoService::start_looking(&socket_in(&directory), THREADS, |_| {}, move || Some(Box::new(look.clone())));
    let connection = service.connect();
    let (told, ended) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let ends = || {
                let mut buffer = connection.borrow(Frame::here()).expect("free");
                buffer.execute_for(&echo(1, 0), Duration::from_millis(20)).err()
            };
            // Until a look is due, which does not end.
            told.send((0..).find_map(|_| ends())).expect("waited for");
        });
        let error = ended.recv_timeout(LIMIT);
        drop(go_on);
        assert_eq!(error.expect("it waits no longer"), Some(CallError::TimedOut));
    });
}

#[test]
fn requests_of_a_session_that_is_ending_keep_no_threads() {
    const CALLERS: usize = 2 * THREADS + 2;
    let directory = tempfile::tempdir().expect("directory");
    let (is_lost, admitted) = (Arc::new(AtomicBool::new(false)), AtomicUsize::new(0));
    let lost = Arc::clone(&is_lost);
    // Only the first client becomes what it was not.
    let recheck = move || {
        let is_first = admitted.fetch_add(1, Ordering::SeqCst) == 0;
        let lost = Arc::clone(&lost);
        Some(Box::new(move || !(is_first && lost.load(Ordering::SeqCst))) as _)
    };
    let service = EchoService::start_looking(&socket_in(&directory), THREADS, |_| {}, recheck);
    let ((begun, is_ending), (go_on, gate)) = (channel(), channel::<()>());
    let gate = Mutex::new(gate);
    service.endpoint.set_on_over(move |_| {
        begun.send(()).expect("waited for");
        let _ = gate.lock().expect("not poisoned").recv();
    });
    let first = service.connect();
    assert_echo(&first, 1, b"served");
    let other = service.connect();
    let is_over = AtomicBool::new(false);
    is_lost.store(true, Ordering::SeqCst);
    let (told, all) = channel();
    std::thread::scope(|scope| {
        for _ in 0..CALLERS {
            scope.spawn(|| {
                // Until a look is due.
                while !matches!(first.call(&echo(2, 0), &[], &mut []), Err(CallError::Ended)) {}
                assert!(is_over.load(Ordering::SeqCst), "turned away too early");
            });
        }
        is_ending.recv_timeout(LIMIT).expect("a look finds it");
        scope.spawn(|| {
            // Its callers ring again meanwhile, each many times.
            for _ in 0..20 {
                assert_echo(&other, 3, b"served");
                std::thread::sleep(Duration::from_millis(20));
            }
            told.send(()).expect("waited for");
        });
        let outcome = all.recv_timeout(LIMIT);
        is_over.store(true, Ordering::SeqCst);
        drop(go_on);
        outcome.expect("others are served beside a session that is ending");
    });
}
