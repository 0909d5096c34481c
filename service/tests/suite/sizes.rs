//! A size changed by the user-level path, and descriptors of the kernel that nobody adopted: mappings and reads go by it.

use crate::bare::eventually;
use crate::harness::{Running, isolated};
use crate::queue::{connect, handle, write};
use poolfs_ipc::Connection;
use poolfs_ipc::wire::{Operation, Request, Status};
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

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

fn truncate(connection: &Connection, handle: u64, size: u64) {
    let request = Request { operation: Operation::Truncate as u32, handle, offset: size, ..Request::default() };
    let reply = connection.call(&request, &[], &mut []).expect("a reply");
    assert_eq!(reply.status, Status::Done as u32, "{reply:?}");
}

fn open_both(service: &Running, at: &Path, connection: &Connection, size: usize) -> (File, File, u64) {
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
            let (reader, _writer, adopted) = open_both(&service, &at, &connection, 4 * PAGE);
            let before = Mapping::new(&reader, 8 * PAGE);
            if touched {
                assert!((0..4).all(|page| before.byte(page * PAGE) == 1));
            }
            truncate(&connection, adopted, 100);
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
