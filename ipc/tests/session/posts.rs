//! Tests of posted writes between both ends, and of clients that forge them.

use crate::bare::{Bare, bare_session, eventually};
use crate::common::{EchoService, Written, assert_echo};
use poolfs_ipc::PostSlots;
use poolfs_ipc::area::{self, BufferArea, DATA_BYTES};
use poolfs_ipc::hold::Frame;
use poolfs_ipc::memory::PAGE;
use poolfs_ipc::posts::{self, POST_BYTES_MAX, POST_SLOTS, POSTED_MAX, PostGrant};
use poolfs_ipc::queue::{Doorbell, DoorbellQueue};
use poolfs_ipc::service::{MemoryBudget, Session};
use poolfs_ipc::state::{CallerState, Sequence};
use poolfs_ipc::wire::{Operation, Request};
use poolfs_ipc::{CallError, Connection, PostAt, Posting};
use poolfs_types::limits::CACHED_SIZE_MAX;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const EPOCH: u32 = 5;

fn session_of(service: &EchoService, number: u32) -> Arc<Session<()>> {
    service.endpoint.session(number).expect("the session")
}

fn grant(slot: u32) -> PostGrant {
    PostGrant::new(slot, EPOCH).expect("a grant")
}

fn try_post(connection: &Connection, grant: PostGrant, at: PostAt, data: &[u8]) -> Result<Posting, CallError> {
    // SAFETY: a slice is readable for its length.
    unsafe { connection.post(Frame::here(), grant, 7, at, data.as_ptr(), data.len()) }
}

fn post(connection: &Connection, slot: u32, at: PostAt, data: &[u8]) -> Posting {
    try_post(connection, grant(slot), at, data).expect("no error")
}

fn written(offset: u64, number: u64, data: &[u8]) -> Written {
    Written { handle: 7, offset, number, data: data.to_vec() }
}

/// A service, a client, and a slot by which it may post without having to ring.
fn tended(slot: usize) -> (tempfile::TempDir, EchoService, Connection, Arc<Session<()>>) {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&directory.path().join("i.sock"), 1, |_| {});
    let connection = service.connect();
    let session = session_of(&service, connection.session());
    assert!(session.grant_posts(slot, EPOCH));
    session.tend_posts(slot, true);
    (directory, service, connection, session)
}

#[test]
fn what_continues_the_latest_post_makes_it_longer_and_the_rest_is_served_in_order() {
    let (_directory, service, connection, session) = tended(3);
    assert!(matches!(post(&connection, 2, PostAt::End, b"no grant"), Posting::NotPosted));
    assert!(connection.may_post(grant(3)) && !connection.has_posts(3));
    for (at, data) in [(10, "ab"), (12, "cd"), (15, "e"), (16, "f"), (0, "g")] {
        assert!(matches!(post(&connection, 3, PostAt::Offset(at), data.as_bytes()), Posting::Posted));
    }
    for data in ["h", "ij"] {
        assert!(matches!(post(&connection, 3, PostAt::End, data.as_bytes()), Posting::Posted));
    }
    assert!(connection.has_posts(3) && session.has_posts(3) && !connection.has_posts(2));
    assert_echo(&connection, 1, b"other buffers are free");
    service.posts.take(&session, 3);
    assert!(!connection.has_posts(3) && !session.has_posts(3) && connection.is_idle());
    assert!(matches!(post(&connection, 3, PostAt::End, b"k"), Posting::Posted));
    session.revoke_posts(3);
    assert!(!connection.may_post(grant(3)));
    assert!(matches!(post(&connection, 3, PostAt::End, b"l"), Posting::NotPosted));
    service.posts.take(&session, 3);
    let expected = [written(10, 1, b"abcd"), written(15, 2, b"ef"), written(0, 3, b"g"), written(0, 4, b"hij")];
    assert_eq!(service.posts.all()[..4], expected);
    assert_eq!(service.posts.all()[4..], [written(0, 5, b"k")]);
}

#[test]
fn what_does_not_fit_behind_begins_another_post_and_what_does_not_fit_at_all_is_none() {
    let (_directory, service, connection, session) = tended(0);
    let data: Vec<u8> = (0..=POST_BYTES_MAX).map(|i| (i * 7 + i / 251) as u8).collect();
    assert!(matches!(post(&connection, 0, PostAt::End, &data), Posting::NotPosted));
    assert!(matches!(post(&connection, 0, PostAt::End, &[]), Posting::NotPosted));
    for _ in 0..3 {
        assert!(matches!(post(&connection, 0, PostAt::End, &data[..POST_BYTES_MAX]), Posting::Posted));
    }
    // Beyond that only the branch knows how long a file may be.
    assert!(matches!(post(&connection, 0, PostAt::Offset(CACHED_SIZE_MAX - 1), b"x"), Posting::Posted));
    for (far, data) in [(CACHED_SIZE_MAX, "y"), (CACHED_SIZE_MAX - 1, "yz"), (u64::MAX, "y")] {
        assert!(matches!(post(&connection, 0, PostAt::Offset(far), data.as_bytes()), Posting::NotPosted), "{far}");
    }
    assert!(matches!(post(&connection, 0, PostAt::Offset(0), b"elsewhere"), Posting::Posted));
    service.posts.take(&session, 0);
    let lengths: Vec<usize> = service.posts.all().iter().map(|written| written.data.len()).collect();
    assert_eq!(lengths, [DATA_BYTES, POST_BYTES_MAX, 1, 9]);
    assert_eq!(service.posts.bytes()[POST_BYTES_MAX..2 * POST_BYTES_MAX], data[..POST_BYTES_MAX]);
}

#[test]
fn who_posts_without_being_tended_rings_and_so_does_who_has_many_outstanding() {
    let (_directory, service, connection, session) = tended(0);
    for at in 0..4 {
        assert!(matches!(post(&connection, 0, PostAt::Offset(at * 10), b"silent"), Posting::Posted));
    }
    std::thread::sleep(Duration::from_millis(50));
    assert!(service.posts.all().is_empty() && session.has_posts(0), "nobody has rung");
    assert!(matches!(post(&connection, 0, PostAt::Offset(90), b"the fifth"), Posting::Posted));
    eventually("they are taken", || !connection.has_posts(0));
    session.tend_posts(0, false);
    assert!(matches!(post(&connection, 0, PostAt::End, b"rung"), Posting::Posted));
    eventually("it is taken", || !connection.has_posts(0));
    assert_eq!(service.posts.all().len(), 6);
    assert_eq!(service.endpoint.counters().stray.load(Ordering::Relaxed), 0);
}

#[test]
fn posts_leave_buffers_to_others_and_are_bounded() {
    let directory = tempfile::tempdir().expect("directory");
    // Nobody serves.
    let service = EchoService::start(&directory.path().join("i.sock"), 0, |config| config.buffers = 64);
    let connection = service.connect();
    let session = session_of(&service, connection.session());
    let mut posted = Vec::new();
    for slot in 0..POST_SLOTS as u32 {
        session.grant_posts(slot as usize, EPOCH);
        session.tend_posts(slot as usize, true);
        posted.push(
            (0..100)
                .take_while(|at| matches!(post(&connection, slot, PostAt::Offset(at * 9), b"x"), Posting::Posted))
                .count(),
        );
    }
    assert_eq!(posted[..4], [POSTED_MAX as usize, POSTED_MAX as usize, POSTED_MAX as usize, 0]);
    let frame = Frame::here();
    let borrowed: Vec<_> = (0..3).map(|_| connection.borrow(frame).expect("a buffer is kept")).collect();
    drop(borrowed);
    (0..POST_SLOTS).for_each(|slot| service.posts.take(&session, slot));
    assert_eq!(service.posts.all().len(), 48);
    assert!(matches!(post(&connection, 9, PostAt::End, b"x"), Posting::Posted));
}

#[test]
fn grants_that_come_and_go_lose_nothing_and_change_no_order() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&directory.path().join("i.sock"), 1, |_| {});
    let connection = service.connect();
    let session = session_of(&service, connection.session());
    let (epoch, done) = (AtomicU32::new(1), AtomicBool::new(false));
    let (mut posted, mut answered) = (0u32, 0u32);
    let mut expected = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for next in 2.. {
                service.posts.take(&session, 1);
                session.tend_posts(1, next % 3 == 0);
                session.revoke_posts(1);
                service.posts.take(&session, 1);
                if done.load(Ordering::Relaxed) {
                    return;
                }
                session.grant_posts(1, next);
                epoch.store(next, Ordering::Release);
                std::thread::yield_now();
            }
        });
        let end = Instant::now() + Duration::from_secs(2);
        let mut value = 0u64;
        while Instant::now() < end {
            let grant = PostGrant::new(1, epoch.load(Ordering::Acquire)).expect("a grant");
            let outcome = try_post(&connection, grant, PostAt::End, &value.to_le_bytes()).expect("no error");
            match outcome {
                Posting::Posted => posted += 1,
                Posting::Answered(reply) => {
                    assert!(reply.status == 0 && reply.length >= 8);
                    answered += 1;
                }
                Posting::NotPosted => continue,
            }
            expected.extend(value.to_le_bytes());
            value += 1;
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(posted > 100, "{posted} posted, {answered} answered");
    assert!(service.posts.bytes() == expected, "{posted} posted, {answered} answered");
    assert!(connection.is_idle() && !connection.has_posts(1));
    assert_echo(&connection, 1, b"and requests go on");
}

#[test]
fn posts_of_many_threads_beside_requests_are_each_served_once() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&directory.path().join("i.sock"), 1, |config| config.buffers = 8);
    let connection = service.connect();
    let session = session_of(&service, connection.session());
    (0..2).for_each(|slot| assert!(session.grant_posts(slot, EPOCH)));
    let mut expected: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4u64)
            .map(|thread| {
                let connection = &connection;
                scope.spawn(move || {
                    let values = (0..1500u64).map(move |n| thread << 32 | n);
                    let mut posted = Vec::new();
                    for value in values {
                        let slot = (value % 2) as u32;
                        match post(connection, slot, PostAt::End, &value.to_le_bytes()) {
                            Posting::Posted => posted.push(value),
                            Posting::NotPosted => assert_echo(connection, value, &[value as u8; 900]),
                            Posting::Answered(_) => panic!("nobody revokes"),
                        }
                    }
                    posted
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    });
    (0..2).for_each(|slot| service.posts.take(&session, slot));
    let mut served: Vec<u64> =
        service.posts.bytes().chunks(8).map(|value| u64::from_le_bytes(value.try_into().expect("eight"))).collect();
    for thread in 0..4 {
        for slot in 0..2 {
            assert!(served.iter().filter(|v| **v >> 32 == thread && **v % 2 == slot).is_sorted(), "in its order");
        }
    }
    served.sort_unstable();
    expected.sort_unstable();
    assert!(served == expected && !served.is_empty(), "{} served, {} posted", served.len(), expected.len());
}

#[test]
fn what_was_posted_is_found_when_the_session_ends_and_nothing_is_granted_then() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&directory.path().join("i.sock"), 1, |_| {});
    let (posts, called) = (Arc::clone(&service.posts), Arc::new(AtomicU32::new(0)));
    let count = Arc::clone(&called);
    service.endpoint.set_on_dismiss(move |session| {
        assert!(!session.has_ended() && !session.grant_posts(2, EPOCH + 1));
        session.revoke_posts(2);
        posts.take(session, 2);
        count.fetch_add(1, Ordering::Relaxed);
    });
    service.endpoint.set_on_dismiss(|_| panic!("it is set already"));
    let connection = service.connect();
    let session = session_of(&service, connection.session());
    session.grant_posts(2, EPOCH);
    session.tend_posts(2, true);
    assert!(matches!(post(&connection, 2, PostAt::End, b"last words"), Posting::Posted));
    drop(connection);
    eventually("the session ends", || service.endpoint.sessions().is_empty());
    assert_eq!((service.posts.bytes(), called.load(Ordering::Relaxed)), (b"last words".to_vec(), 1));
    assert!(!session.grant_posts(2, EPOCH) && !session.has_posts(2) && session.take_posts(2).is_empty());
}

#[test]
fn a_closed_session_posts_nothing() {
    let (_directory, _service, connection, _session) = tended(0);
    connection.close();
    assert!(!connection.may_post(grant(0)));
    assert_eq!(try_post(&connection, grant(0), PostAt::End, b"x").err(), Some(CallError::NoSession));
}

/// Puts a post into a buffer as a caller does, with an extent of another's making, and without a bit.
fn forge(hostile: &Bare, buffer: usize, request: &Request, length: u32) -> Sequence {
    let area = BufferArea::new(&hostile.buffers, buffer, DATA_BYTES);
    area.put_request(request);
    let unseen = (AtomicU32::new(0), AtomicU64::new(0));
    let words = posts::SlotWords::new(&unseen.0, &unseen.0, &unseen.1);
    let state = CallerState::new(area.state());
    let borrowed = state.borrow().expect("free");
    posts::submit(&words, (&state, area.extent()), (buffer, borrowed), 1, length).0
}

fn raw_word(hostile: &Bare, offset: usize) -> &AtomicU64 {
    assert!(offset + 8 <= hostile.buffers.length() && offset.is_multiple_of(8));
    // SAFETY: in bounds, aligned, and mapped as long as it is borrowed; an atomic of shared memory.
    unsafe { hostile.buffers.base().add(offset).cast().as_ref() }
}

fn posted_word(hostile: &Bare, slot: usize) -> &AtomicU64 {
    raw_word(hostile, hostile.buffers.length() - PAGE + slot * 64 + 8)
}

fn extent_word(hostile: &Bare, buffer: usize) -> &AtomicU64 {
    raw_word(hostile, buffer * (PAGE + DATA_BYTES) + 8)
}

fn write_of(number: u64) -> Request {
    Request { operation: Operation::Write as u32, handle: 7, second_offset: number, length: 77, ..Request::default() }
}

#[test]
fn forged_bits_are_cleared_and_forged_posts_are_refused_with_an_end() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&directory.path().join("i.sock"), 1, |_| {});
    let hostile = bare_session(service.socket());
    let session = session_of(&service, hostile.welcome.session);
    let take = |slot| {
        let taken: Vec<_> = session.take_posts(slot).iter().map(|post| post.request().length).collect();
        assert!(!session.has_posts(slot), "slot {slot}");
        taken
    };
    for slot in 0..POST_SLOTS {
        posted_word(&hostile, slot).store(u64::MAX, Ordering::Relaxed);
        assert!(take(slot).is_empty());
    }
    let bits = |bits: u64| posted_word(&hostile, 4).store(bits, Ordering::Relaxed);
    let is_done = |buffer, submitted| {
        CallerState::new(BufferArea::new(&hostile.buffers, buffer, DATA_BYTES).state()).is_done(submitted)
    };
    let errno = |buffer| BufferArea::new(&hostile.buffers, buffer, DATA_BYTES).get_reply().errno;
    // A true one, with lies in the request's length, and one without a bit.
    let (true_one, unseen) = (forge(&hostile, 0, &write_of(1), 5), forge(&hostile, 1, &write_of(2), 5));
    bits(1);
    assert_eq!(take(4), [5]);
    assert!(is_done(0, true_one) && !is_done(1, unseen));
    // Extents that are too long, closed, or another post's.
    for change in [
        |word: u64| word | u64::from(u32::MAX),
        |word| word + 1 + DATA_BYTES as u64,
        |word| word | 1 << 63,
        |word| word + (1 << 32),
        |_| 0,
        |_| u64::MAX,
    ] {
        let forged = forge(&hostile, 0, &write_of(3), 0);
        extent_word(&hostile, 0).store(change(extent_word(&hostile, 0).load(Ordering::Relaxed)), Ordering::Relaxed);
        bits(1);
        assert!(take(4).is_empty());
        assert!(is_done(0, forged) && errno(0) == libc::EINVAL);
    }
    // The whole area, and no write at all.
    let whole = forge(&hostile, 0, &write_of(3), DATA_BYTES as u32);
    bits(1);
    assert_eq!(take(4), [DATA_BYTES as u64]);
    assert!(is_done(0, whole));
    let unlink = forge(&hostile, 0, &Request { operation: Operation::Unlink as u32, ..write_of(4) }, 1);
    bits(1);
    assert!(take(4).is_empty() && is_done(0, unlink) && errno(0) == libc::EINVAL);
    // The bit of an ordinary request, waiting and being served.
    let area = BufferArea::new(&hostile.buffers, 2, DATA_BYTES);
    let state = CallerState::new(area.state());
    area.put_request(&Request { operation: Operation::Echo as u32, mode: 200, ..Request::default() });
    let waiting = state.submit(state.borrow().expect("free"));
    bits(1 << 2);
    assert!(take(4).is_empty() && !state.is_done(waiting));
    let queue = area::queue(&hostile.queues[0], hostile.welcome.queue_slots as usize);
    queue.publish(Doorbell { session: hostile.welcome.session, buffer: 2, again: false }).expect("room");
    service.endpoint.wake_all(0);
    std::thread::sleep(Duration::from_millis(50));
    bits(1 << 2);
    assert!(session.take_posts(4).is_empty() && !state.is_done(waiting));
    eventually("an answer", || state.is_done(waiting));
    assert!(take(4).is_empty());
    // One post with bits in two slots is one post.
    forge(&hostile, 3, &write_of(5), 1);
    (6..8).for_each(|slot| posted_word(&hostile, slot).store(1 << 3, Ordering::Relaxed));
    assert_eq!((take(7), take(6)), (vec![1], vec![]));
}

#[test]
fn doorbells_of_slots_that_do_not_exist_or_hold_nothing_call_nobody() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&directory.path().join("i.sock"), 1, |_| {});
    let (hostile, connection) = (bare_session(service.socket()), service.connect());
    let number = hostile.welcome.session;
    let queue = area::queue(&hostile.queues[0], hostile.welcome.queue_slots as usize);
    let ring = |doorbell| {
        eventually("room", || queue.publish(doorbell).is_ok());
        service.endpoint.wake_all(0);
    };
    for slot in [0, 15, 16, 17, 0x7FFF] {
        ring(Doorbell::of_posts(number, slot));
        ring(Doorbell { again: true, ..Doorbell::of_posts(number, slot) });
    }
    let stray = || service.endpoint.counters().stray.load(Ordering::Relaxed);
    eventually("all are looked at", || stray() == 6);
    // A post behind its buffer's doorbell is none of its business.
    let posted = forge(&hostile, 0, &write_of(1), 3);
    ring(Doorbell { session: number, buffer: 0, again: true });
    eventually("it is looked at", || stray() == 7);
    // Forged bits with a bell that is rung again and again.
    let end = Instant::now() + Duration::from_millis(300);
    while Instant::now() < end {
        posted_word(&hostile, 3).store(u64::MAX << 1, Ordering::Relaxed);
        ring(Doorbell { again: true, ..Doorbell::of_posts(number, 3) });
        assert_echo(&connection, 1, b"beside it");
    }
    assert!(service.posts.all().is_empty());
    posted_word(&hostile, 3).store(1, Ordering::Relaxed);
    ring(Doorbell::of_posts(number, 3));
    let state = CallerState::new(BufferArea::new(&hostile.buffers, 0, DATA_BYTES).state());
    eventually("it is served", || state.is_done(posted));
    assert_eq!(service.posts.all().len(), 1);
}

#[test]
fn words_that_are_scribbled_on_mislead_only_their_client() {
    let (_directory, service, connection, session) = tended(0);
    // SAFETY: the test plays another thread of the client, which writes what it likes into the page.
    let page = unsafe { std::slice::from_raw_parts(connection.posts_range().0 as *const AtomicU32, PAGE / 4) };
    let scribble = |value: u32| page.iter().for_each(|word| word.store(value, Ordering::Relaxed));
    for value in [0, 1, u32::MAX, EPOCH] {
        scribble(value);
        for slot in 0..POST_SLOTS as u32 {
            let outcome = try_post(&connection, grant(slot), PostAt::End, b"whatever");
            assert!(outcome.is_ok(), "{outcome:?}");
        }
        (0..POST_SLOTS).for_each(|slot| service.posts.take(&session, slot));
        (0..POST_SLOTS).for_each(|slot| session.revoke_posts(slot));
        (0..POST_SLOTS).for_each(|slot| assert!(!session.has_posts(slot)));
    }
    scribble(0);
    assert!(session.grant_posts(0, EPOCH));
    assert!(matches!(post(&connection, 0, PostAt::End, b"after it"), Posting::Posted));
    eventually("it is taken", || !connection.has_posts(0));
    assert_eq!(service.posts.all().last().map(|written| written.data.clone()), Some(b"after it".to_vec()));
    assert_eq!(PostSlots::new(&bare_session(service.socket()).buffers).posted().sum::<u64>(), 0);
}

#[test]
fn posts_need_no_budget_and_requests_still_do() {
    let directory = tempfile::tempdir().expect("directory");
    let buffers = 4;
    let budget = Arc::new(MemoryBudget::new((buffers + 2) * PAGE));
    let service = EchoService::start(&directory.path().join("i.sock"), 1, |config| {
        config.buffers = buffers;
        config.memory = budget.clone();
    });
    let connection = service.connect();
    let session = session_of(&service, connection.session());
    session.grant_posts(0, EPOCH);
    assert!(matches!(post(&connection, 0, PostAt::End, &[7; 9000]), Posting::Posted));
    eventually("it is taken", || !connection.has_posts(0));
    assert_eq!(service.posts.bytes(), [7; 9000]);
    let reply = connection.call(&crate::common::echo(1, 1), &[b"x"], &mut []).expect("reply");
    assert_eq!(reply.errno, libc::EIO);
}
