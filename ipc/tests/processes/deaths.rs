//! Tests of posts by a process that is killed, and of posts to a service that is killed.

use crate::Process;
use crate::common::{EchoService, connect, echo};
use poolfs_ipc::hold::Frame;
use poolfs_ipc::posts::PostGrant;
use poolfs_ipc::words::Words;
use poolfs_ipc::{CallError, Connection, PostAt, Posting};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const EPOCH: u32 = 5;

fn post(connection: &Connection, value: u64) -> Result<Posting, CallError> {
    let grant = PostGrant::new(0, EPOCH).expect("a grant");
    let bytes = value.to_le_bytes();
    // SAFETY: an array is readable for its length.
    unsafe { connection.post(Frame::here(), grant, 7, PostAt::End, bytes.as_ptr(), bytes.len()) }
}

/// Where a client notes how many values it has posted.
fn returned(socket: &Path) -> PathBuf {
    socket.with_extension("returned")
}

/// Posts one value after another, until it is killed.
pub fn play_poster(socket: &Path) {
    let file = File::options().read(true).write(true).open(returned(socket)).expect("the parent's file");
    let returned = Words::new(&file, 1).expect("mapped");
    let connection = connect(socket);
    let mut value = 0;
    loop {
        match post(&connection, value) {
            Ok(Posting::Posted | Posting::Answered(_)) => {
                value += 1;
                returned.store(0, value);
            }
            Ok(Posting::NotPosted) => std::thread::yield_now(),
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// A service that lets every client post.
pub fn play_granting_service(socket: &Path) {
    let service = EchoService::start(socket, 1, |_| {});
    loop {
        for session in service.endpoint.sessions() {
            session.grant_posts(0, EPOCH);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub fn what_a_client_had_posted_when_it_was_killed_is_served(socket: &Path) {
    for round in 0..20u64 {
        let file = File::create_new(returned(socket)).expect("a file");
        file.set_len(8).expect("a word");
        let file = File::options().read(true).write(true).open(returned(socket)).expect("the file");
        let count = Words::new(&file, 1).expect("mapped");
        std::fs::remove_file(socket).ok();
        let service = EchoService::start(socket, 1, |_| {});
        let posts = Arc::clone(&service.posts);
        service.endpoint.set_on_dismiss(move |session| {
            session.revoke_posts(0);
            posts.take(session, 0);
        });
        let client = Process::start("poster", socket);
        let start = Instant::now();
        let wait = |what: &str, done: &dyn Fn() -> bool| {
            while !done() {
                assert!(start.elapsed() < Duration::from_secs(20), "{what}");
                std::thread::sleep(Duration::from_micros(200));
            }
        };
        wait("the client does not come", &|| !service.endpoint.sessions().is_empty());
        let session = service.endpoint.sessions().pop().expect("there is one");
        session.tend_posts(0, round % 2 == 0);
        session.grant_posts(0, EPOCH);
        wait("it posts nothing", &|| count.load(0) > Some(0));
        let end = Instant::now() + Duration::from_micros(500 + 731 * round);
        while Instant::now() < end {
            service.posts.take(&session, 0);
            std::thread::sleep(Duration::from_micros(50));
        }
        drop(client);
        drop(session);
        wait("the session stays", &|| service.endpoint.sessions().is_empty());
        let returned_count = count.load(0).expect("a word");
        let values: Vec<u64> =
            service.posts.bytes().chunks(8).map(|value| u64::from_le_bytes(value.try_into().expect("eight"))).collect();
        assert!(values.len() as u64 >= returned_count, "{} served, {returned_count} had returned", values.len());
        assert!(values.iter().copied().eq(0..values.len() as u64), "not each once, in order");
        std::fs::remove_file(returned(socket)).expect("removed");
    }
}

pub fn a_service_that_is_killed_is_noticed_by_the_first_request_behind_the_posts(socket: &Path) {
    let service = Process::start("granting", socket);
    let connection = connect(socket);
    let start = Instant::now();
    while !matches!(post(&connection, 1), Ok(Posting::Posted)) {
        assert!(start.elapsed() < Duration::from_secs(10), "no grant");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(service);
    // What is posted now has returned, and nobody has it: its file's next call says so. That is soon: there is an end to it.
    let room = (0..1_000_000).take_while(|value| matches!(post(&connection, *value), Ok(Posting::Posted))).count();
    assert!(room < 1_000_000, "posted for ever");
    let start = Instant::now();
    assert_eq!(connection.call(&echo(1, 0), &[], &mut []).err(), Some(CallError::Dead));
    assert!(start.elapsed() < Duration::from_secs(1), "it took {:?}", start.elapsed());
    assert_eq!(post(&connection, 2).err(), Some(CallError::NoSession));
}
