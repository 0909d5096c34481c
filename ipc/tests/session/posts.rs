//! Posted writes between both ends.

use crate::bare::eventually;
use crate::common::{EchoService, Written, assert_echo};
use poolfs_ipc::hold::Frame;
use poolfs_ipc::posts::PostGrant;
use poolfs_ipc::service::Session;
use poolfs_ipc::{Connection, PostAt, Posting};
use std::sync::Arc;

const EPOCH: u32 = 5;

fn session_of(service: &EchoService, connection: &Connection) -> Arc<Session<()>> {
    service.endpoint.session(connection.session()).expect("the session")
}

fn grant(slot: u32) -> PostGrant {
    PostGrant::new(slot, EPOCH).expect("a grant")
}

fn post(connection: &Connection, slot: u32, at: PostAt, data: &[u8]) -> Posting {
    // SAFETY: a slice is readable for its length.
    unsafe { connection.post(Frame::here(), grant(slot), 7, at, data.as_ptr(), data.len()) }.expect("no error")
}

fn written(offset: u64, number: u64, data: &[u8]) -> Written {
    Written { handle: 7, offset, number, data: data.to_vec() }
}

#[test]
fn what_continues_the_latest_post_makes_it_longer_and_the_rest_is_served_in_order() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&directory.path().join("i.sock"), 1, |_| {});
    let connection = service.connect();
    let session = session_of(&service, &connection);
    assert!(matches!(post(&connection, 3, PostAt::End, b"no grant"), Posting::NotPosted));
    assert!(session.grant_posts(3, EPOCH));
    session.tend_posts(3, true);
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
    let expected = [written(10, 1, b"abcd"), written(15, 2, b"ef"), written(0, 3, b"g"), written(0, 4, b"hij")];
    assert_eq!(service.posts.all(), expected);
}

#[test]
fn who_posts_without_being_tended_rings_and_who_lost_the_grant_is_answered() {
    let directory = tempfile::tempdir().expect("directory");
    let service = EchoService::start(&directory.path().join("i.sock"), 1, |_| {});
    let connection = service.connect();
    let session = session_of(&service, &connection);
    session.grant_posts(0, EPOCH);
    assert!(matches!(post(&connection, 0, PostAt::End, b"rung"), Posting::Posted));
    eventually("it is taken", || !connection.has_posts(0));
    assert_eq!(service.posts.all(), [written(0, 1, b"rung")]);
}
