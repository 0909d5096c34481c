//! Tests of fair shares between instances of one service: one takes all it can get, and the other goes on with what it needs.

use crate::harness::{Running, isolated, make};
use crate::queue::{connect, handle, read, write};
use poolfs_ipc::Connection;
use poolfs_ipc::wire::Status;
use poolfs_service_protocol::StackSpec;
use rustix::fs::inotify;
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// More than one instance gets of anything.
const MANY: usize = 12_000;

/// Two instances over one lower branch with `files` files of a block.
fn two_over_one(service: &Running, folder: &Path, files: usize) -> [PathBuf; 2] {
    let lower = make(&folder.join("lower"));
    for at in 0..files {
        fs::write(lower.join(at.to_string()), [at as u8; 4096]).expect("written");
    }
    ["hostile", "other"].map(|name| {
        let upper = make(&folder.join(format!("upper-{name}")));
        service.mount(name, StackSpec::union(upper, vec![lower.clone()]))
    })
}

/// Opens files and reads them, until that fails or there are `most`.
fn open_and_read(at: &Path, most: usize) -> (Vec<File>, Option<io::Error>) {
    let mut open = Vec::new();
    for number in 0..most {
        let opened = File::open(at.join(number.to_string())).and_then(|file| {
            let mut byte = [0];
            file.read_exact_at(&mut byte, 100)?;
            assert_eq!(byte[0], number as u8);
            Ok(file)
        });
        match opened {
            Ok(file) => open.push(file),
            Err(error) => return (open, Some(error)),
        }
    }
    (open, None)
}

/// What every instance of two must be able to do whatever the other has.
fn goes_on(folder: &Path, at: &Path) {
    let made = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(at.join("own"));
    let file = made.expect("a file of its own");
    file.write_all_at(b"by the kernel", 0).expect("written");
    file.sync_all().expect("synced");
    let connection = connect(folder, "other");
    let handle = handle(&file, &connection);
    assert_eq!(write(&connection, handle, 0, b"by the library").status, Status::Done as u32);
    assert_eq!(read(&connection, handle, 0, 100), b"by the library");
    assert_eq!(fs::read_dir(at).expect("listed").count(), fs::read_dir(at).expect("again").count());
}

#[test]
fn open_files() {
    isolated("shares::open_files", |folder| {
        let service = Running::start(folder);
        let [hostile, other] = two_over_one(&service, folder, MANY);
        let (taken, refused) = open_and_read(&hostile, MANY);
        let refused = refused.expect("there is a bound");
        assert_eq!(refused.raw_os_error(), Some(libc::ENFILE), "after {}", taken.len());
        assert!(taken.len() > 2500, "{}", taken.len());
        goes_on(folder, &other);
        let (own, refused) = open_and_read(&other, 1000);
        assert_eq!(own.len(), 1000, "{refused:?}");
        // What the first has is still good, though few descriptors are open for it.
        let descriptors = fs::read_dir(format!("/proc/{}/fd", service.pid())).expect("it lives").count();
        assert!(descriptors < 8000, "{descriptors}");
        for (number, file) in taken.iter().enumerate().step_by(7) {
            let mut bytes = [0; 10];
            file.read_exact_at(&mut bytes, 4086).expect("readable");
            assert_eq!(bytes, [number as u8; 10]);
        }
        drop(taken);
        let (more, refused) = open_and_read(&hostile, 1000);
        assert_eq!(more.len(), 1000, "{refused:?}");
    });
}

#[test]
fn removed_files_that_are_open() {
    isolated("shares::removed_files_that_are_open", |folder| {
        let service = Running::start_limited(folder, 2048);
        let [hostile, other] = two_over_one(&service, folder, 10);
        let removed = |at: &Path, most: usize| {
            let make = |number: usize| {
                let path = at.join(format!("removed-{number}"));
                let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
                file.write_all_at(b"still there", 0)?;
                fs::remove_file(path).map(|()| file)
            };
            (0..most).map_while(|number| make(number).ok()).collect::<Vec<_>>()
        };
        let taken = removed(&hostile, MANY);
        assert!((100..2048).contains(&taken.len()), "{}", taken.len());
        goes_on(folder, &other);
        let own = removed(&other, 64);
        assert_eq!(own.len(), 64);
        for file in taken.iter().chain(&own) {
            let mut bytes = [0; 11];
            file.read_exact_at(&mut bytes, 0).expect("readable");
            assert_eq!(&bytes, b"still there");
        }
    });
}

fn sessions(folder: &Path, instance: &str, most: usize) -> Vec<Connection> {
    let path = folder.join(format!("run/{instance}.sock"));
    let path = CString::new(path.to_str().expect("text")).expect("no NUL");
    (0..most).map_while(|_| Connection::open(&path).ok()).collect()
}

#[test]
fn sessions_of_clients() {
    isolated("shares::sessions_of_clients", |folder| {
        let service = Running::start_limited(folder, 4096);
        let [_, other] = two_over_one(&service, folder, 10);
        let taken = sessions(folder, "hostile", 4096);
        assert!((100..768).contains(&taken.len()), "{}", taken.len());
        goes_on(folder, &other);
        assert_eq!(sessions(folder, "other", 100).len(), 100);
    });
}

#[test]
fn nodes_in_use() {
    isolated("shares::nodes_in_use", |folder| {
        const FILES: usize = 32_000;
        let service = Running::start(folder);
        let [hostile, other] = two_over_one(&service, folder, FILES);
        // Nobody opens these files, so that no share of open files counts them, but the kernel cannot forget them.
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC).expect("inotify");
        let hold = |number: usize| {
            let path = hostile.join(number.to_string());
            inotify::add_watch(&watch, path, inotify::WatchFlags::DELETE_SELF)
        };
        let (held, refused) =
            (0..FILES).map(|number| (number, hold(number))).find(|(_, held)| held.is_err()).expect("there is a bound");
        assert_eq!(refused, Err(rustix::io::Errno::NOMEM), "after {held}");
        assert!(held > 20_000, "{held}");
        let made = File::create(hostile.join("new")).map(drop).expect_err("it makes one more node");
        assert_eq!(made.raw_os_error(), Some(libc::ENOMEM));
        assert_eq!(fs::read_dir(&hostile).expect("listed").count(), FILES);
        goes_on(folder, &other);
        // More than its part: what it does not use is forgotten in time.
        for number in 0..FILES {
            fs::metadata(other.join(number.to_string())).unwrap_or_else(|error| panic!("{number}: {error}"));
        }
        assert_eq!(fs::read(hostile.join("7")).expect("known already"), [7; 4096]);
        drop(watch);
        for number in (0..FILES).rev() {
            fs::metadata(hostile.join(number.to_string())).unwrap_or_else(|error| panic!("{number}: {error}"));
        }
    });
}
