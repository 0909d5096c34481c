//! Tests of posted writes by a process that comes to have other rights, or to see something else: what has returned is written. No more than that
//! is done with rights that it does not have.

use crate::bare::{Bare, bare_session};
use crate::harness::{Running, eventually, isolated};
use crate::queue::connect;
use crate::stolen::{ended_well, forked, system_call};
use crate::views::{ENDS, LOOKED_AGAIN, bind, cover, detach, elsewhere, is_served, make_read_only};
use poolfs_ipc::area::{BufferArea, DATA_BYTES, queue};
use poolfs_ipc::futex;
use poolfs_ipc::posts::{self, PostGrant};
use poolfs_ipc::queue::{Doorbell, DoorbellQueue};
use poolfs_ipc::state::{CallerState, Sequence};
use poolfs_ipc::wire::{ADOPT, Adopt, Operation, Reply, Request, Status};
use poolfs_ipc::{Connection, PostAt, Posting};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Much longer than a service goes without looking whom it serves.
const LIMIT: Duration = Duration::from_secs(120);
/// Where what is posted begins in a file.
const BEGIN: u64 = 100;
/// What is posted, one after the other.
const RECORD: &[u8; 8] = b"posted!!";
/// Words of a slot by which it is posted, as docs/protocol.md has them: their bytes, and where the one is that says that somebody looks.
const SLOT_BYTES: usize = 64;
const TENDED_AT: usize = 4;
/// And where that with a bit for each post is.
const POSTED_AT: usize = 8;
/// The last page of a session's memory has them.
const SLOTS_BYTES: usize = 4096;

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).expect("opened")
}

/// Adopts a file that nobody else has for a session; 0 when it is refused.
fn adopt_alone(file: &File, session: u32) -> u64 {
    let mut message = Adopt { unshared: 1, ..Adopt::asking(session) };
    // SAFETY: the structure is what the number says, and lives as long as the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), u64::from(ADOPT), &raw mut message) };
    assert_eq!(result, 0);
    message.handle
}

/// Writes until the service grants that writes are posted.
fn granted(connection: &Connection, handle: u64) -> PostGrant {
    let begun = Instant::now();
    loop {
        let request = Request { operation: Operation::Write as u32, handle, length: 1, ..Request::default() };
        let reply = connection.call(&request, &[b"x"], &mut []).expect("a reply");
        if let Some(grant) = PostGrant::of_reply(&reply) {
            return grant;
        }
        assert!(begun.elapsed() < LIMIT, "nothing was granted");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Says that somebody looks at the slot, so that nobody is rung for.
fn hush(connection: &Connection, grant: PostGrant) {
    let (base, _) = connection.posts_range();
    // SAFETY: the client's own memory, aligned, which the service reads and writes as an atomic word, too.
    unsafe {
        (*((base + grant.slot() as usize * SLOT_BYTES + TENDED_AT) as *const AtomicU32)).store(1, Ordering::SeqCst)
    };
}

/// Attempts that may end with nothing outstanding: that is found by the question whether the session holds, if that comes just when a look is due.
const UNLUCKY_MAX: usize = 3;

fn posts_end_with_the_rights(name: &str, is_hushed: bool) {
    isolated(name, |folder| {
        fs::set_permissions(folder, Permissions::from_mode(0o755)).expect("set");
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let [program, others] = ["program", "others"].map(|name| at.join(name));
        fs::write(&others, b"abcd").expect("written");
        let (begun, mut unlucky) = (Instant::now(), 0);
        loop {
            fs::write(&program, b"abcd").expect("written");
            fs::set_permissions(&program, Permissions::from_mode(0o4755)).expect("set");
            post_with_other_rights(folder, (&program, &others), is_hushed);
            eventually("its session has ended", || service.status().instances[0].sessions == 0);
            all_is_written(folder, &fs::read(&program).expect("readable"));
            let mode = fs::metadata(&program).expect("there").permissions().mode();
            if mode & 0o7777 == 0o755 {
                return;
            }
            // A grant also ends by a post that takes long, as on a busy machine. Then nobody has seen the change of rights.
            unlucky += usize::from(fs::read(folder.join("held")).expect("noted").is_empty());
            assert!(unlucky < UNLUCKY_MAX, "mode {mode:o} of a program that somebody else has written");
            assert!(begun.elapsed() < LIMIT, "its grant always ends before somebody looks");
        }
    });
}

/// A process posts, becomes somebody else, and posts as long as it may. Notes how much it has posted, and whether its session held at the end.
fn post_with_other_rights(folder: &Path, (program, others): (&Path, &Path), is_hushed: bool) {
    ended_well(forked(|| {
        let (file, by_kernel) = (open(program), open(others));
        let [mut posted, mut held] = ["posted", "held"].map(|name| File::create(folder.join(name)).expect("made"));
        let connection = connect(folder, "one");
        let handle = adopt_alone(&file, connection.session());
        let grant = granted(&connection, handle);
        system_call(libc::SYS_setresgid, [1000; 3]);
        system_call(libc::SYS_setgroups, [0; 3]);
        system_call(libc::SYS_setresuid, [1000; 3]);
        let (begun, mut offset) = (Instant::now(), BEGIN);
        loop {
            if is_hushed {
                hush(&connection, grant);
            }
            match connection.post_slice(grant, handle, PostAt::Offset(offset), RECORD) {
                Ok(Posting::Posted) => offset += 8,
                Ok(Posting::Answered(_) | Posting::NotPosted) | Err(_) => {
                    if is_served(&connection) {
                        write!(held, "it held").expect("written");
                    }
                    return write!(posted, "{}", offset - BEGIN).expect("written");
                }
            }
            assert!(begun.elapsed() < LIMIT, "it still posts");
            // What the kernel asks has all posts taken.
            by_kernel.write_at(b"y", 0).expect("written");
            std::thread::sleep(Duration::from_millis(2));
        }
    }));
}

/// Whether the file has all that was posted: as much as was noted, or a little more, of which nobody knows whether it had returned.
fn all_is_written(folder: &Path, content: &[u8]) {
    let posted: usize = fs::read_to_string(folder.join("posted")).expect("noted").parse().expect("a number");
    let written = content.get(BEGIN as usize..).unwrap_or_default();
    assert!(posted > 0 && written.len() >= posted, "{} bytes of {posted} that were posted are written", written.len());
    assert!(written.chunks(RECORD.len()).all(|record| record == RECORD), "something is missing between");
}

#[test]
fn what_has_returned_is_written_whatever_its_process_comes_to_see() {
    const NAME: &str = "posting_rights::what_has_returned_is_written_whatever_its_process_comes_to_see";
    isolated(NAME, |folder| {
        let log = folder.join("log");
        let service = Running::start_telling(folder, &log);
        let (at, directory) = service.mount_directory("one");
        let part = at.join("part");
        fs::create_dir(&part).expect("made");
        let read_only_in_part = || {
            bind(&part, &part);
            make_read_only(&part);
        };
        let changes: [(&str, &dyn Fn(), &str); 3] = [
            ("mounted on", &|| cover(&part), LOOKED_AGAIN),
            ("read-only in part", &read_only_in_part, LOOKED_AGAIN),
            ("detached", &|| detach(&at), ENDS),
        ];
        for (what, change, says) in changes {
            let said = || fs::read_to_string(&log).expect("readable").matches(says).count();
            let path = at.join(what);
            fs::write(&path, [0; BEGIN as usize]).expect("written");
            elsewhere(|| {
                let file = open(&path);
                let connection = connect(folder, "one");
                let handle = adopt_alone(&file, connection.session());
                let grant = granted(&connection, handle);
                let (begun, before, mut offset, mut by_kernel) = (Instant::now(), said(), BEGIN, false);
                for turn in 0.. {
                    if turn == 50 {
                        change();
                    }
                    // As the library does: by the descriptor when nothing more is posted.
                    if !by_kernel
                        && !matches!(
                            connection.post_slice(grant, handle, PostAt::Offset(offset), RECORD),
                            Ok(Posting::Posted)
                        )
                    {
                        by_kernel = true;
                    }
                    if by_kernel {
                        // Whoever asks for nothing is not looked at.
                        let _ = is_served(&connection);
                        assert_eq!(file.write_at(RECORD, offset).expect("written"), RECORD.len());
                    }
                    offset += RECORD.len() as u64;
                    if turn > 50 && said() > before {
                        break;
                    }
                    assert!(begun.elapsed() < LIMIT, "{what}: nobody looks");
                    std::thread::sleep(Duration::from_millis(2));
                }
                file.sync_all().expect("synced");
                fs::write(folder.join("posted"), (offset - BEGIN).to_string()).expect("written");
            });
            all_is_written(folder, &fs::read(directory.join(what)).expect("readable"));
        }
    });
}

#[test]
fn posts_end_when_their_process_has_other_rights() {
    posts_end_with_the_rights("posting_rights::posts_end_when_their_process_has_other_rights", false);
}

#[test]
fn posts_that_nobody_is_rung_for_end_when_their_process_has_other_rights() {
    posts_end_with_the_rights(
        "posting_rights::posts_that_nobody_is_rung_for_end_when_their_process_has_other_rights",
        true,
    );
}

/// Makes a request in a buffer of a client that keeps its session whatever it is told, and waits for the answer.
fn ask_bare(bare: &Bare, request: &Request, data: &[u8]) -> Reply {
    let area = BufferArea::new(&bare.buffers, 0, DATA_BYTES);
    area.put_data(0, data).expect("room");
    area.put_request(request);
    let state = CallerState::new(area.state());
    let submitted = state.submit(state.borrow().expect("free"));
    answer_of(bare, (0, submitted), Doorbell { session: bare.welcome.session, buffer: 0, again: false })
}

/// Makes a post of slot 0 that nobody has granted.
fn forge_post(bare: &Bare, request: &Request, data: &[u8]) -> Reply {
    const BUFFER: usize = 1;
    let area = BufferArea::new(&bare.buffers, BUFFER, DATA_BYTES);
    area.put_data(0, data).expect("room");
    area.put_request(request);
    let state = CallerState::new(area.state());
    let borrowed = (BUFFER, state.borrow().expect("free"));
    // The service is shown the bit only.
    let (unseen, unseen_bits) = (AtomicU32::new(0), AtomicU64::new(0));
    let words = posts::SlotWords::new(&unseen, &unseen, &unseen_bits);
    let (submitted, _) = posts::submit(&words, (&state, area.extent()), borrowed, 1, data.len() as u32);
    let first_slot = bare.buffers.length() - SLOTS_BYTES;
    // SAFETY: within the client's own memory, aligned, which the service reads and writes as an atomic word, too.
    unsafe { bare.buffers.base().add(first_slot + POSTED_AT).cast::<AtomicU64>().as_ref() }
        .fetch_or(1 << BUFFER, Ordering::SeqCst);
    answer_of(bare, (BUFFER, submitted), Doorbell::of_posts(bare.welcome.session, 0))
}

fn answer_of(bare: &Bare, (buffer, submitted): (usize, Sequence), doorbell: Doorbell) -> Reply {
    let area = BufferArea::new(&bare.buffers, buffer, DATA_BYTES);
    let state = CallerState::new(area.state());
    let words = queue(&bare.queues[0], bare.welcome.queue_slots as usize);
    let begun = Instant::now();
    while !state.is_done(submitted) {
        assert!(begun.elapsed() < LIMIT, "no answer");
        if words.publish(doorbell) == Ok(true) {
            futex::wake_one(words.ring());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let reply = area.get_reply();
    state.give_back(submitted);
    reply
}

#[test]
fn who_stays_in_a_session_that_has_ended_posts_and_adopts_nothing() {
    isolated("posting_rights::who_stays_in_a_session_that_has_ended_posts_and_adopts_nothing", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        for name in ["f", "later"] {
            fs::write(at.join(name), b"abcd").expect("written");
        }
        ended_well(forked(|| {
            let file = open(&at.join("f"));
            let bare = bare_session(&folder.join("run/one.sock"));
            let handle = adopt_alone(&file, bare.welcome.session);
            assert_ne!(handle, 0);
            let write = Request { operation: Operation::Write as u32, handle, length: 1, ..Request::default() };
            // What nobody is granted is served while the session holds: its caller waits.
            assert_eq!(forge_post(&bare, &write, b"1").status, Status::Done as u32);
            system_call(libc::SYS_setgroups, [1, [1000u32].as_ptr() as usize, 0]);
            let begun = Instant::now();
            let stat = Request { operation: Operation::Stat as u32, path_length: 1, ..Request::default() };
            while ask_bare(&bare, &stat, b"f").status != Status::Ended as u32 {
                assert!(begun.elapsed() < LIMIT, "it still acts as who it was");
            }
            assert_eq!(forge_post(&bare, &write, b"2").status, Status::Ended as u32);
            assert_eq!(ask_bare(&bare, &write, b"3").status, Status::Ended as u32);
            let later = adopt_alone(&open(&at.join("later")), bare.welcome.session);
            assert_eq!(later, 0, "adopted for a session that has ended");
        }));
        assert_eq!(fs::read(at.join("f")).expect("readable"), b"1bcd");
    });
}
