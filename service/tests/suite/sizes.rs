//! Tests of sizes changed by the user-level path while the kernel has descriptors that nobody adopted: mappings and reads use the
//! new size.

use crate::absent::Absent;
use crate::bare::eventually;
use crate::harness::{Running, isolated};
use crate::queue::{connect, handle, write};
use poolfs_ipc::Connection;
use poolfs_ipc::wire::{ADOPT, Adopt, Operation, Request, SHARE, Status};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, Barrier};

const PAGE: usize = 4096;

/// A shared, read-only mapping.
struct Mapping {
    start: *mut libc::c_void,
    length: usize,
}

impl Mapping {
    fn new(file: &File, length: usize) -> Self {
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        Self { start, length }
    }

    /// The byte at `offset`. Beyond the end of the file as the kernel knows it, the process dies of SIGBUS.
    fn byte(&self, offset: usize) -> u8 {
        assert!(offset < self.length);
        // SAFETY: the offset lies inside the mapping, which lives as long as `self`; bytes have no invalid values, and a
        // volatile read copes with their changing.
        unsafe { self.start.cast::<u8>().add(offset).read_volatile() }
    }

    /// Whether reading at `offset` ends a process by SIGBUS: tried by a child.
    fn ends_before(&self, offset: usize) -> bool {
        // SAFETY: the child reads one byte and leaves by _exit, both allowed after a fork of any process.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "{}", std::io::Error::last_os_error());
        if child == 0 {
            self.byte(offset);
            // SAFETY: as above.
            unsafe { libc::_exit(0) };
        }
        let mut status = 0;
        // SAFETY: the status is ours to write.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGBUS
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing refers to it any more.
        unsafe { libc::munmap(self.start, self.length) };
    }
}

fn resize(connection: &Connection, handle: u64, size: u64) -> u32 {
    let request = Request { operation: Operation::Truncate as u32, handle, offset: size, ..Request::default() };
    connection.call(&request, &[], &mut []).expect("a reply").status
}

fn truncate(connection: &Connection, handle: u64, size: u64) {
    assert_eq!(resize(connection, handle, size), Status::Done as u32);
}

pub fn open_both(service: &Running, at: &Path, connection: &Connection, size: usize) -> (File, File, u64) {
    let path = at.join("f");
    fs::write(&path, vec![1; size]).expect("write");
    // Until the service knows that it is closed, the file is left to the kernel.
    eventually("everything is closed", || service.status().instances[0].handles == 0);
    let reader = File::open(&path).expect("open");
    let writer = OpenOptions::new().read(true).write(true).open(&path).expect("open");
    let adopted = handle(&writer, connection);
    (reader, writer, adopted)
}

#[test]
fn a_file_that_was_open_before_it_grew_is_mapped_and_read_to_its_new_end() {
    isolated("sizes::a_file_that_was_open_before_it_grew_is_mapped_and_read_to_its_new_end", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let connection = connect(folder, "one");
        for touched in [false, true] {
            let (reader, _writer, adopted) = open_both(&service, &at, &connection, 100);
            let before = Mapping::new(&reader, 8 * PAGE);
            if touched {
                assert_eq!(before.byte(99), 1);
            }
            assert_eq!(write(&connection, adopted, 100, &vec![2; 3 * PAGE]).length, 3 * PAGE as u64);
            let after = Mapping::new(&reader, 8 * PAGE);
            for mapping in [&before, &after] {
                assert_eq!((mapping.byte(99), mapping.byte(100), mapping.byte(3 * PAGE + 99)), (1, 2, 2));
            }
            truncate(&connection, adopted, 5 * PAGE as u64);
            assert_eq!((before.byte(5 * PAGE - 1), after.byte(3 * PAGE + 100)), (0, 0));
            let mut bytes = [9; PAGE];
            assert_eq!(write(&connection, adopted, 5 * PAGE as u64, &[3; 10]).length, 10);
            assert_eq!(reader.read_at(&mut bytes, 5 * PAGE as u64 - 5).expect("read"), 15);
            assert_eq!(bytes[..15], [0, 0, 0, 0, 0, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]);
            fs::remove_file(at.join("f")).expect("remove");
        }
    });
}

#[test]
fn a_file_that_was_open_before_it_shrank_shows_nothing_old() {
    isolated("sizes::a_file_that_was_open_before_it_shrank_shows_nothing_old", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let connection = connect(folder, "one");
        for touched in [false, true] {
            let (reader, writer, adopted) = open_both(&service, &at, &connection, 4 * PAGE);
            let before = Mapping::new(&reader, 8 * PAGE);
            if touched {
                assert!((0..4).all(|page| before.byte(page * PAGE) == 1));
            }
            // The kernel can be told that a file has grown, and not that it has shrunk.
            assert_eq!(resize(&connection, adopted, 100), Status::UseKernel as u32);
            writer.set_len(100).expect("truncated");
            let after = Mapping::new(&reader, 8 * PAGE);
            for mapping in [&before, &after] {
                assert_eq!((mapping.byte(99), mapping.byte(100), mapping.byte(PAGE - 1)), (1, 0, 0));
                assert!(mapping.ends_before(2 * PAGE));
            }
            let mut bytes = [9; 2 * PAGE];
            assert_eq!(reader.read_at(&mut bytes, 0).expect("read"), 100);
            assert_eq!(reader.read_at(&mut bytes, 100).expect("read"), 0);
            assert_eq!(reader.read_at(&mut bytes, 2 * PAGE as u64).expect("read"), 0);
            // Grown again: what was cut off does not come back.
            truncate(&connection, adopted, 4 * PAGE as u64);
            assert_eq!((before.byte(100), before.byte(2 * PAGE), after.byte(4 * PAGE - 1)), (0, 0, 0));
            fs::remove_file(at.join("f")).expect("remove");
        }
    });
}

/// What is left to be read from the descriptor's offset on, as the kernel knows it without asking.
fn left(file: &File) -> u64 {
    rustix::io::ioctl_fionread(file).expect("a regular file")
}

/// Sends what is from `offset` on into a pipe by `sendfile` and by `splice`; how much came by each, up to a page.
fn sent(file: &File, offset: u64) -> [usize; 2] {
    let into_pipe = |send: &dyn Fn(&std::io::PipeWriter) -> usize| {
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        let count = send(&writer);
        drop(writer);
        let mut bytes = Vec::new();
        assert_eq!(reader.read_to_end(&mut bytes).expect("read"), count);
        count
    };
    let by_sendfile =
        |pipe: &std::io::PipeWriter| rustix::fs::sendfile(pipe, file, Some(&mut { offset }), PAGE).expect("sendfile");
    let by_splice = |pipe: &std::io::PipeWriter| {
        let (mut at, out) = (offset as i64, std::ptr::null_mut());
        // SAFETY: both descriptors are open, and the offset is valid for the call.
        let count = unsafe { libc::splice(file.as_raw_fd(), &raw mut at, pipe.as_raw_fd(), out, PAGE, 0) };
        usize::try_from(count).expect("splice")
    };
    [into_pipe(&by_sendfile), into_pipe(&by_splice)]
}

fn set_append(file: &impl AsFd, appends: bool) {
    let mut flags = rustix::fs::fcntl_getfl(file).expect("flags");
    flags.set(rustix::fs::OFlags::APPEND, appends);
    rustix::fs::fcntl_setfl(file, flags).expect("flags");
}

/// Writes as who has not been told the size: behind the end that the kernel knows.
fn append_once(file: &File, bytes: &[u8]) {
    let flags = rustix::io::ReadWriteFlags::APPEND;
    assert_eq!(rustix::io::pwritev2(file, &[IoSlice::new(bytes)], 0, flags).expect("written"), bytes.len());
}

/// Adopts a file that this process vouches to share with nobody.
fn adopt_unshared(file: &File, connection: &Connection) -> u64 {
    let mut message = Adopt { unshared: 1, ..Adopt::asking(connection.session()) };
    // SAFETY: the ioctl reads and writes exactly the 64 bytes of the message.
    assert_eq!(unsafe { libc::ioctl(file.as_raw_fd(), u64::from(ADOPT), &raw mut message) }, 0);
    assert_ne!(message.handle, 0);
    message.handle
}

#[test]
fn the_kernel_knows_the_size_of_what_is_about_to_be_shared() {
    isolated("sizes::the_kernel_knows_the_size_of_what_is_about_to_be_shared", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let connection = connect(folder, "one");
        let page = [1; PAGE];
        let size = |pages: usize| (pages * PAGE) as u64;
        let grow = |handle, pages| assert_eq!(write(&connection, handle, size(pages), &page).length, size(1));
        let create = |name: &str| {
            let file = File::create_new(at.join(name)).expect("created");
            let handle = adopt_unshared(&file, &connection);
            // At the first change the kernel has attributes to be dropped, and is told the size with that.
            grow(handle, 0);
            grow(handle, 1);
            assert!(left(&file) < size(2), "nobody needs to know");
            (file, handle)
        };
        let (files, all): (Vec<_>, Vec<_>) = ["a", "b", "c"].map(create).into_iter().unzip();
        let share = Request { operation: Operation::Share as u32, ..Request::default() };
        assert_eq!(connection.call(&share, &[], &mut []).expect("a reply").status, Status::Done as u32);
        assert!(files.iter().all(|file| left(file) == size(2)));
        all.iter().for_each(|&handle| grow(handle, 2));
        assert!(files.iter().all(|file| left(file) == size(3)));
        // One alone, which is shared from then on.
        let (file, handle) = create("d");
        // SAFETY: the ioctl reads and writes nothing.
        assert_eq!(unsafe { libc::ioctl(file.as_raw_fd(), u64::from(SHARE)) }, 0);
        grow(handle, 2);
        assert_eq!(left(&file), size(3));
        // What is left by its session.
        let (file, _) = create("e");
        drop(connection);
        eventually("the session's files are shared", || left(&file) == size(2));
    });
}

#[test]
fn who_has_an_adopted_description_without_a_session_goes_by_the_size_it_has() {
    isolated("sizes::who_has_an_adopted_description_without_a_session_goes_by_the_size_it_has", |folder| {
        let service = Running::start(folder);
        let (at, directory) = service.mount_directory("one");
        let connection = connect(folder, "one");
        let open = || OpenOptions::new().read(true).write(true).create(true).truncate(true).open(at.join("f"));
        let mut file = open().expect("open");
        let adopted = handle(&file, &connection);
        let page = |value: u8| vec![value; PAGE];
        let end = |pages: usize| (pages * PAGE) as u64;
        assert_eq!(write(&connection, adopted, 0, &page(1)).length, end(1));
        assert_eq!((left(&file), sent(&file, 0)), (end(1), [PAGE; 2]));
        let mapping = Mapping::new(&file, 8 * PAGE);
        assert_eq!(mapping.byte(PAGE - 1), 1);
        // Grown behind the back of who has mapped it.
        assert_eq!(write(&connection, adopted, end(1), &page(2)).length, end(1));
        assert_eq!((mapping.byte(PAGE), left(&file), sent(&file, end(1))), (2, end(2), [PAGE; 2]));
        assert_eq!(write(&connection, adopted, end(2), &page(3)).length, end(1));
        append_once(&file, &page(4));
        assert_eq!(write(&connection, adopted, end(4), &page(5)).length, end(1));
        set_append(&file, true);
        file.write_all(&page(6)).expect("written");
        let expected: Vec<u8> = (1..=6).flat_map(page).collect();
        let mut bytes = vec![0; 8 * PAGE];
        assert_eq!(file.read_at(&mut bytes, 0).expect("read"), 6 * PAGE);
        assert!(bytes[..6 * PAGE] == expected, "the kernel shows something else");
        assert!((0..6).all(|number| usize::from(mapping.byte(number * PAGE)) == number + 1));
        file.sync_all().expect("sync");
        assert!(fs::read(directory.join("f")).expect("read") == expected, "the disk has something else");
    });
}

/// While somebody writes to a file from memory that does not come, the kernel has it locked. Who makes it longer does not wait for that for ever.
#[test]
fn who_keeps_a_file_locked_keeps_nobody_from_making_it_longer() {
    isolated("sizes::who_keeps_a_file_locked_keeps_nobody_from_making_it_longer", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let connection = connect(folder, "one");
        let (reader, writer, adopted) = open_both(&service, &at, &connection, 1);
        let absent = Arc::new(Absent::new());
        writer.set_permissions(Permissions::from_mode(0o600)).expect("changed");
        let memory = Arc::clone(&absent);
        // Not a scope: should this fail, it is not to wait for the other.
        let locks = std::thread::spawn(move || memory.write_to(&writer));
        absent.await_fault();
        assert_eq!(write(&connection, adopted, 1, &[2]).length, 1);
        assert!(!locks.is_finished());
        absent.let_come();
        assert_eq!(locks.join().expect("no panic"), 1);
        eventually("the kernel knows the size", || left(&reader) == 2);
        assert_eq!(fs::read(at.join("f")).expect("read"), [0, 2]);
    });
}

/// The kernel takes the size from the answer to its own change of attributes, or to a hard link, whatever it was told since that was given.
#[test]
fn a_size_outlasts_the_changes_of_attributes_and_links_that_it_crosses() {
    const ROUNDS: u64 = 1000;
    isolated("sizes::a_size_outlasts_the_changes_of_attributes_and_links_that_it_crosses", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let connection = connect(folder, "one");
        let (reader, writer, adopted) = open_both(&service, &at, &connection, 1);
        let (begin, end) = (Barrier::new(2), Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    begin.wait();
                    for change in 0..=round % 3 {
                        if round % 2 == 0 {
                            fs::hard_link(at.join("f"), at.join("g")).expect("linked");
                            fs::remove_file(at.join("g")).expect("removed");
                            continue;
                        }
                        let mode = Permissions::from_mode(0o600 | (change as u32 & 1));
                        writer.set_permissions(mode).expect("changed");
                    }
                    end.wait();
                }
            });
            let mut short = Vec::new();
            for round in 0..ROUNDS {
                begin.wait();
                for at in [1 + 2 * round, 2 + 2 * round] {
                    assert_eq!(write(&connection, adopted, at, &[2]).length, 1);
                }
                end.wait();
                let (expected, found) = (3 + 2 * round, left(&reader));
                if found != expected {
                    short.push((round, expected, found));
                    reader.metadata().expect("attributes");
                }
            }
            assert!(short.is_empty(), "{} of {ROUNDS}: {:?}", short.len(), short.first());
        });
    });
}
