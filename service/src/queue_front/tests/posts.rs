//! Tests of posted writes, from the connection to the layer.

use super::{Served, done, open, own_context, request, served, served_over};
use crate::handles::OpenFile;
use crate::instance::Adopter;
use crate::notify::KernelCache;
use crate::queue_front::posts::APPENDED_SIZE_MAX;
use crate::request::{Context, Reply as Outcome, Request as Asked};
use poolfs_ipc::posts::{POST_SLOTS, PostGrant};
use poolfs_ipc::wire::{Adopt, Operation, Request};
use poolfs_ipc::{PostAt, Posting};
use poolfs_libservice::Memory;
use poolfs_libservice::types::{Caller, Name, NodeId, OpenFlags, SetAttributes};
use poolfs_service_protocol::{NotPosted, WriteStatus};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const EVENT_MAX: Duration = Duration::from_secs(60);

struct Writer {
    served: Served,
    file: Arc<OpenFile>,
    grant: PostGrant,
}

impl Served {
    fn adopt_unshared(&self, file: &Arc<OpenFile>) -> u64 {
        let asked = Adopt { unshared: 1, ..self.asked() };
        self.front.adopt(&own_context(), file, asked).expect("an answer").handle
    }

    fn write(&self, handle: u64, offset: u64, data: &[u8]) -> Option<PostGrant> {
        let request = Request { handle, offset, length: data.len() as u64, ..request(Operation::Write, "", "") };
        let reply = self.call(&request, &[data], 0).0;
        done(&reply);
        assert_eq!(reply.length, data.len() as u64);
        PostGrant::of_reply(&reply)
    }

    fn not_posted(&self, cause: NotPosted) -> u64 {
        self.front.posted().1.get(&cause).copied().unwrap_or(0)
    }
}

/// A file of four bytes, `abcd`, whose next writes may be posted.
fn writer(flags: OpenFlags) -> Writer {
    writer_of(served(), flags)
}

fn writer_of(served: Served, flags: OpenFlags) -> Writer {
    let file = open(&served.instance, "f", flags);
    let handle = served.adopt_unshared(&file);
    assert_eq!(handle, file.key());
    assert_eq!(served.write(handle, 0, b"ab"), None, "one write is no habit");
    let grant = served.write(handle, 2, b"cd").expect("a grant");
    Writer { served, file, grant }
}

impl Writer {
    fn post_at(&self, at: PostAt, data: &[u8]) -> Posting {
        let posted = self.served.connection.post_slice(self.grant, self.file.key(), at, data);
        posted.expect("the service lives")
    }

    fn post(&self, at: PostAt, data: &[u8]) {
        assert!(matches!(self.post_at(at, data), Posting::Posted), "{data:?}");
    }

    /// By nobody's request.
    fn content(&self) -> Vec<u8> {
        let layer = self.served.instance.layer();
        let handle = layer.open(&Caller::ROOT, self.file.node(), OpenFlags::READ_ONLY).expect("open");
        let mut bytes = vec![0; 1 << 20];
        let count = layer.read(&Caller::ROOT, handle, 0, &mut bytes).expect("readable");
        layer.release(handle);
        bytes.truncate(count);
        bytes
    }

    fn size_by_kernel(&self) -> u64 {
        match self.served.instance.dispatch(&Context::fuse(0, 0, 0, 0), Asked::Stat { node: self.file.node() }) {
            Ok(Outcome::Attributes(attributes)) => attributes.size,
            other => panic!("{other:?}"),
        }
    }

    fn may_post(&self) -> bool {
        self.served.connection.may_post(self.grant)
    }

    /// Posts something, has `act` done, and sees that the grant has ended and what was posted was taken before that.
    fn ends_by(&self, act: impl FnOnce()) {
        self.post(PostAt::Offset(4), b"efg");
        act();
        assert!(!self.may_post());
        assert_eq!(self.content(), b"abcdefg");
        assert!(matches!(self.post_at(PostAt::Offset(7), b"h"), Posting::NotPosted));
    }
}

#[test]
fn whoever_asks_for_anything_finds_what_was_posted_before() {
    let writer = writer(OpenFlags::READ_WRITE);
    for (round, byte) in (b'e'..=b'z').enumerate() {
        writer.post(PostAt::Offset(4 + round as u64), &[byte]);
        assert_eq!(writer.size_by_kernel(), 5 + round as u64);
    }
    assert_eq!(writer.content(), (b'a'..=b'z').collect::<Vec<_>>());
    assert!(writer.may_post(), "a look at attributes ends nothing");
    let posted = writer.served.front.posted();
    assert!((1..=22).contains(&posted.0) && posted.1.is_empty(), "{posted:?}");
    let (reply, bytes) = {
        let read = Request { handle: writer.file.key(), length: 100, ..request(Operation::Read, "", "") };
        writer.post(PostAt::Offset(0), b"ABC");
        writer.served.call(&read, &[], 100)
    };
    done(&reply);
    assert_eq!(&bytes[..4], b"ABCd");
}

#[test]
fn appends_keep_their_order_whoever_takes_them() {
    const RECORDS: u32 = 20_000;
    let writer = writer(OpenFlags::READ_WRITE | OpenFlags::APPEND);
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Requests of the kernel take posts beside the thread of the instance and doorbells.
        scope.spawn(|| {
            let mut least = 0;
            while !ends.load(Ordering::Relaxed) {
                let size = writer.size_by_kernel();
                assert!(size >= least);
                least = size;
            }
        });
        for record in 0..RECORDS {
            let bytes = record.to_be_bytes();
            if let Posting::NotPosted = writer.post_at(PostAt::End, &bytes) {
                writer.served.write(writer.file.key(), 0, &bytes);
            }
        }
        assert_eq!(writer.size_by_kernel(), 4 + 4 * u64::from(RECORDS));
        ends.store(true, Ordering::Relaxed);
    });
    let content = writer.content();
    let found: Vec<u32> =
        content[4..].chunks(4).map(|record| u32::from_be_bytes(record.try_into().expect("four bytes"))).collect();
    assert_eq!(found, (0..RECORDS).collect::<Vec<_>>());
}

#[test]
fn what_nobody_asks_for_is_taken_soon() {
    let writer = writer(OpenFlags::READ_WRITE);
    let start = Instant::now();
    for round in 0..3_u64 {
        writer.post(PostAt::Offset(4 + round), b"x");
        while writer.content().len() != 5 + round as usize {
            assert!(start.elapsed() < EVENT_MAX);
            std::thread::sleep(Duration::from_millis(1));
        }
        // The thread that takes posts may have gone to sleep.
        std::thread::sleep(Duration::from_millis(round * 50));
    }
}

#[test]
fn another_open_file_ends_a_grant() {
    let writer = writer(OpenFlags::READ_WRITE);
    writer.ends_by(|| drop(open(&writer.served.instance, "f", OpenFlags::READ_ONLY)));
    assert_eq!(writer.served.not_posted(NotPosted::Observed), 1);
}

#[test]
fn a_read_of_the_kernel_ends_a_grant_and_finds_what_was_posted() {
    let writer = writer(OpenFlags::READ_WRITE);
    let mut buffer = [0; 16];
    writer.ends_by(|| {
        let (file, context) = (&writer.file, Context::fuse(0, 0, 0, 0));
        let read =
            writer.served.instance.dispatch(&context, Asked::Read { file, offset: 0, target: &mut &mut buffer[..] });
        assert!(matches!(read, Ok(Outcome::Count(7))), "{read:?}");
    });
    assert_eq!(&buffer[..7], b"abcdefg");
}

#[test]
fn closing_a_descriptor_ends_a_grant() {
    let writer = writer(OpenFlags::READ_WRITE);
    writer.ends_by(|| {
        let flush = writer.served.instance.dispatch(&Context::fuse(0, 0, 0, 0), Asked::Flush { file: &writer.file });
        assert!(matches!(flush, Ok(Outcome::Done)), "{flush:?}");
    });
}

#[test]
fn another_size_ends_a_grant() {
    let writer = writer(OpenFlags::READ_WRITE);
    writer.post(PostAt::Offset(4), b"efg");
    let changes = SetAttributes { size: Some(5), ..SetAttributes::default() };
    let change = Asked::Change { node: writer.file.node(), changes, file: None };
    assert!(writer.served.instance.dispatch(&Context::fuse(0, 0, 0, 0), change).is_ok());
    assert!(!writer.may_post());
    assert_eq!(writer.content(), b"abcde");
}

#[test]
fn sharing_a_description_ends_a_grant() {
    let writer = writer(OpenFlags::READ_WRITE);
    writer.ends_by(|| done(&writer.served.call(&request(Operation::Share, "", ""), &[], 0).0));
    assert_eq!(writer.served.write(writer.file.key(), 7, b"h"), None);
    assert_eq!(writer.served.write(writer.file.key(), 8, b"i"), None, "it stays shared");
}

#[test]
fn another_instance_over_the_same_ends_all_grants_for_good() {
    let writer = writer(OpenFlags::READ_WRITE);
    writer.ends_by(|| writer.served.instance.share());
    assert_eq!(writer.served.write(writer.file.key(), 7, b"h"), None);
}

#[test]
fn while_changes_are_held_nothing_is_posted() {
    let writer = writer(OpenFlags::READ_WRITE);
    writer.ends_by(|| {
        let held = writer.served.instance.without_posts(|| {
            assert_eq!(writer.content(), b"abcdefg");
            assert_eq!(writer.served.write(writer.file.key(), 0, b"a"), None);
        });
        assert_eq!(held, Some(()));
    });
}

#[test]
fn what_a_client_has_posted_outlives_it() {
    let writer = writer(OpenFlags::READ_WRITE);
    writer.post(PostAt::Offset(4), b"efg");
    writer.served.connection.close();
    let start = Instant::now();
    while writer.served.front.sessions() > 0 {
        assert!(start.elapsed() < EVENT_MAX);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(writer.content(), b"abcdefg");
}

#[test]
fn a_grant_that_has_ended_has_nothing_to_wait_for() {
    let writer = writer(OpenFlags::READ_WRITE);
    let (posts, sessions) = (&writer.served.front.posts, writer.served.front.endpoint().sessions());
    let [granted] = &posts.grants()[..] else { panic!("not one grant") };
    let session = sessions.first().expect("one");
    let taking = granted.begin_taking(None).expect("it has not ended");
    assert!(posts.may_have_posts_of(session), "somebody takes what was posted");
    // As whoever ends it leaves it for a moment, before it is taken out.
    granted.end_taking(taking, true);
    assert_eq!(posts.grants().len(), 1);
    assert!(!posts.may_have_posts_of(session));
}

#[test]
fn what_waits_for_its_durability_is_not_posted() {
    for flags in [OpenFlags::FILE_SYNC | OpenFlags::DATA_SYNC, OpenFlags::DATA_SYNC, OpenFlags::DIRECT] {
        let served = served();
        let file = open(&served.instance, "f", OpenFlags::READ_WRITE | flags);
        let handle = served.adopt_unshared(&file);
        assert!((0..4).all(|offset| served.write(handle, offset, b"x").is_none()), "{flags:?}");
        assert!(served.not_posted(NotPosted::Flags) > 0);
    }
}

#[test]
fn a_session_posts_to_so_many_files_as_it_has_slots() {
    let served = served();
    let granted: Vec<_> = (0..POST_SLOTS + 2)
        .map(|number| {
            let file = open(&served.instance, &format!("f{number}"), OpenFlags::READ_WRITE);
            let handle = served.adopt_unshared(&file);
            served.write(handle, 0, b"x");
            (served.write(handle, 1, b"x"), file)
        })
        .collect();
    let count = granted.iter().filter(|(grant, _)| grant.is_some()).count();
    assert_eq!((count, served.not_posted(NotPosted::Limit)), (POST_SLOTS, 2));
    // Who closes one makes room for another.
    let closed = granted[0].1.node();
    served.instance.release(granted[0].1.key());
    assert_ne!(closed, NodeId::ROOT);
    let file = &granted[POST_SLOTS].1;
    assert!(served.write(file.key(), 2, b"x").is_some());
}

/// Each of these takes a block of its own, or two, whatever it writes.
#[test]
fn writes_of_a_byte_here_and_there_end_a_grant_before_there_is_no_room_for_them() {
    const ROOM: u64 = 100 << 20;
    for (stride, data) in [(4096, "x"), (8192, "xy")] {
        let writer = writer_of(served_over(Memory::with_capacity(ROOM)), OpenFlags::READ_WRITE);
        let mut last = 0;
        for round in 1..ROOM / stride {
            let post = || writer.post_at(PostAt::Offset(round * stride + 4095), data.as_bytes());
            let posting = match post() {
                // Others are outstanding, until somebody asks for something.
                Posting::NotPosted => {
                    writer.size_by_kernel();
                    post()
                }
                other => other,
            };
            // One that was answered is written as well, and the last one: the grant ended meanwhile.
            last = if matches!(posting, Posting::NotPosted) { last } else { round };
            if !matches!(posting, Posting::Posted) {
                break;
            }
        }
        assert!(last > 0 && !writer.may_post());
        assert_eq!(writer.size_by_kernel(), last * stride + 4095 + data.len() as u64, "the last one is there");
        // On a busy machine it may have ended because it took long.
        let ended_by = |cause| writer.served.not_posted(cause);
        let start = Instant::now();
        while ended_by(NotPosted::Room) + ended_by(NotPosted::Slow) == 0 {
            assert!(start.elapsed() < EVENT_MAX && ended_by(NotPosted::Failed) == 0);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn a_grant_ends_when_others_have_taken_the_room_though_nothing_is_posted() {
    const ROOM: u64 = 100 << 20;
    let writer = writer_of(served_over(Memory::with_capacity(ROOM)), OpenFlags::READ_WRITE);
    let layer = writer.served.instance.layer();
    let (_, handle) = layer
        .create(&Caller::ROOT, NodeId::ROOT, Name::new(b"others").expect("a name"), 0o600, OpenFlags::READ_WRITE)
        .expect("room");
    let data = vec![b'x'; 1 << 20];
    for offset in (0..ROOM / 2).step_by(data.len()) {
        layer.write(&Caller::ROOT, handle, offset, &data).expect("room");
    }
    layer.release(handle);
    let start = Instant::now();
    while writer.may_post() || writer.served.not_posted(NotPosted::Room) == 0 {
        assert!(start.elapsed() < EVENT_MAX, "it is still granted");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(writer.served.write(writer.file.key(), 0, b"x"), None, "nor is there another one");
    assert_eq!(writer.served.not_posted(NotPosted::Slow), 0);
}

#[test]
fn a_file_that_is_too_long_to_be_cached_is_not_appended_to_by_posts() {
    let writer = writer(OpenFlags::READ_WRITE | OpenFlags::APPEND);
    let enlarge = |size: u64| {
        let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
        let change = Asked::Change { node: writer.file.node(), changes, file: None };
        assert!(writer.served.instance.dispatch(&Context::fuse(0, 0, 0, 0), change).is_ok());
        // That ends a grant, and nothing is posted for a while.
        let start = Instant::now();
        loop {
            let grant = writer.served.write(writer.file.key(), 0, b"x");
            if grant.is_some() || writer.served.not_posted(NotPosted::Limit) > 0 {
                return grant;
            }
            assert!(start.elapsed() < EVENT_MAX);
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let grant = enlarge(APPENDED_SIZE_MAX - 1000).expect("it is not too long yet");
    let file = writer.file.key();
    let posted = writer.served.connection.post_slice(grant, file, PostAt::End, &[b'y'; 2000]).expect("a service");
    assert!(matches!(posted, Posting::Posted));
    assert!(writer.size_by_kernel() > APPENDED_SIZE_MAX);
    let start = Instant::now();
    while writer.served.connection.may_post(grant) {
        assert!(start.elapsed() < EVENT_MAX);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(enlarge(APPENDED_SIZE_MAX + 1000), None);
}

/// The sizes that the kernel is told, by number.
#[derive(Clone, Default)]
struct Sizes(Arc<Mutex<Vec<(u64, u64)>>>);

impl KernelCache for Sizes {
    fn expires_names(&self) -> bool {
        true
    }

    fn drop_attributes(&self, _: u64) -> io::Result<bool> {
        Ok(true)
    }

    fn invalidate(&self, _: u64, _: i64, _: i64) -> io::Result<()> {
        Ok(())
    }

    fn store(&self, number: u64, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.lock().expect("unpoisoned").push((number, offset + bytes.len() as u64));
        Ok(())
    }

    fn invalidate_name(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn expire_name(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn prune(&self, _: &[u64]) -> io::Result<()> {
        Ok(())
    }
}

/// It has asked for the size before, and does not ask again for `sendfile`.
#[test]
fn the_kernel_knows_what_was_posted_when_it_has_opened_a_file() {
    let served = served();
    let sizes = Sizes::default();
    served.instance.attach_kernel(Arc::new(sizes.clone()), &[]);
    let told = || std::mem::take(&mut *sizes.0.lock().expect("unpoisoned"));
    let writer = writer_of(served, OpenFlags::READ_WRITE);
    let nodes = writer.served.instance.nodes();
    assert_eq!(nodes.enter(writer.file.node(), 70), 70);
    let _ = told();
    writer.post(PostAt::Offset(4), b"ef");
    nodes.shows_size(writer.file.node());
    assert_eq!(writer.size_by_kernel(), 6);
    writer.post(PostAt::Offset(6), b"g");
    assert_eq!(told(), [], "nobody goes by it");
    drop(open(&writer.served.instance, "f", OpenFlags::READ_ONLY));
    assert_eq!(told(), [(70, 7)]);
    drop(open(&writer.served.instance, "f", OpenFlags::READ_ONLY));
    assert_eq!(told(), [], "it knows it");
}

/// The same of a write that waited for its answer, and for nobody else: at that moment the kernel had not opened the file.
#[test]
fn the_kernel_knows_what_was_written_while_it_was_about_to_open_a_file() {
    let served = served();
    let sizes = Sizes::default();
    served.instance.attach_kernel(Arc::new(sizes.clone()), &[]);
    let told = || std::mem::take(&mut *sizes.0.lock().expect("unpoisoned"));
    let writer = writer_of(served, OpenFlags::READ_WRITE);
    let nodes = writer.served.instance.nodes();
    assert_eq!(nodes.enter(writer.file.node(), 70), 70);
    nodes.shows_size(writer.file.node());
    let size = writer.size_by_kernel();
    let _ = told();
    let _ = writer.served.write(writer.file.key(), size, b"h");
    assert_eq!(told(), [], "nobody goes by it");
    drop(open(&writer.served.instance, "f", OpenFlags::READ_ONLY));
    assert_eq!(told(), [(70, size + 1)]);
}

#[test]
fn it_is_known_whether_writes_are_posted_and_what_stands_against_it() {
    let writer = writer(OpenFlags::READ_WRITE);
    let known = || {
        let (_, files, _) = writer.served.front.client(std::process::id());
        files.iter().find(|adopted| Arc::ptr_eq(&adopted.file, &writer.file)).expect("adopted").writes
    };
    let refused = |cause| WriteStatus { granted: false, posted_requests: 1, not_posted: Some(cause) };
    assert_eq!(known(), WriteStatus { granted: true, ..WriteStatus::default() });
    writer.post(PostAt::Offset(4), b"e");
    assert_eq!(writer.size_by_kernel(), 5);
    assert_eq!(known(), WriteStatus { granted: true, posted_requests: 1, not_posted: None });
    let other = open(&writer.served.instance, "f", OpenFlags::READ_ONLY);
    assert_eq!(known(), refused(NotPosted::Shared), "as it is now");
    writer.served.instance.release(other.key());
    assert_eq!(known(), refused(NotPosted::Observed), "as it was decided last");
    let start = Instant::now();
    while writer.served.write(writer.file.key(), 0, b"a").is_none() {
        assert!(start.elapsed() < EVENT_MAX);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(known(), WriteStatus { granted: true, posted_requests: 1, not_posted: None });
}
