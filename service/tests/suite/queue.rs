//! Tests of the two paths on one mount: requests beside the kernel, with the adoption ioctl between them.

use crate::harness::{Running, isolated, make};
use poolfs_ipc::Connection;
use poolfs_ipc::wire::{ADOPT, Adopt, Operation, Reply, Request, Status};
use poolfs_service_protocol::{Answer, Command as Order, OperationPath, StackSpec};
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::path::Path;

pub fn connect(folder: &Path, instance: &str) -> Connection {
    let path = folder.join(format!("run/{instance}.sock"));
    Connection::open(&CString::new(path.to_str().expect("text")).expect("no NUL")).expect("a session")
}

pub fn adopt(file: &File, session: u32) -> Adopt {
    let mut message = Adopt::asking(session);
    // SAFETY: the ioctl reads and writes exactly the 64 bytes of the message.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), u64::from(ADOPT), &raw mut message) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    message
}

pub fn handle(file: &File, connection: &Connection) -> u64 {
    let adopted = adopt(file, connection.session());
    assert_ne!(adopted.handle, 0);
    assert_eq!(adopted.inode, file.metadata().expect("stat").ino());
    adopted.handle
}

pub fn read(connection: &Connection, handle: u64, offset: u64, length: usize) -> Vec<u8> {
    let request =
        Request { operation: Operation::Read as u32, handle, offset, length: length as u64, ..Request::default() };
    let mut bytes = vec![0; length];
    let reply = connection.call(&request, &[], &mut bytes).expect("a reply");
    assert_eq!(reply.status, Status::Done as u32, "{reply:?}");
    bytes.truncate(reply.length as usize);
    bytes
}

pub fn write(connection: &Connection, handle: u64, offset: u64, bytes: &[u8]) -> Reply {
    let length = bytes.len() as u64;
    let request = Request { operation: Operation::Write as u32, handle, offset, length, ..Request::default() };
    connection.call(&request, &[bytes], &mut []).expect("a reply")
}

fn by_path(connection: &Connection, operation: Operation, path: &str) -> Reply {
    let request = Request { operation: operation as u32, path_length: path.len() as u32, ..Request::default() };
    connection.call(&request, &[path.as_bytes()], &mut []).expect("a reply")
}

#[test]
fn one_file_by_both_paths_is_always_current() {
    isolated("queue::one_file_by_both_paths_is_always_current", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let connection = connect(folder, "one");
        fs::write(at.join("f"), vec![1; 10_000]).expect("write");
        let file = OpenOptions::new().read(true).write(true).open(at.join("f")).expect("open");
        let handle = handle(&file, &connection);
        let mut kernel = vec![0; 10_000];
        for round in 2..50u8 {
            // The kernel holds the pages, then the other path changes them: it reads the new ones.
            file.read_exact_at(&mut kernel, 0).expect("read");
            assert_eq!(write(&connection, handle, 4000, &[round; 300]).length, 300);
            file.read_exact_at(&mut kernel, 0).expect("read");
            assert_eq!((kernel[3999], kernel[4000], kernel[4299], kernel[4300]), (1, round, round, 1));
            file.write_all_at(&[round; 10], 9000).expect("write");
            assert_eq!(read(&connection, handle, 9000, 10), [round; 10]);
        }
        assert_eq!(write(&connection, handle, 20_000, b"end").length, 3);
        assert_eq!(file.metadata().expect("stat").len(), 20_003);
        assert_eq!(by_path(&connection, Operation::Stat, "f").attributes.size, 20_003);
        fs::rename(at.join("f"), at.join("g")).expect("rename");
        assert_eq!(by_path(&connection, Operation::Stat, "f").errno, libc::ENOENT);
        assert_eq!(by_path(&connection, Operation::Unlink, "g").status, Status::Done as u32);
        assert!(!at.join("g").exists());
        assert_eq!(read(&connection, handle, 20_000, 10), b"end");
        let operations = &service.status().instances[0].operations[&OperationPath::Library];
        assert!(operations["read"].count >= 48 && operations["unlink"].count == 1);
        drop((file, connection));
        assert_eq!(service.unmount("one"), Answer::Done);
        assert!(!folder.join("run/one.sock").exists());
    });
}

#[test]
fn adoption_needs_the_callers_own_session_and_ends_with_the_descriptor() {
    isolated("queue::adoption_needs_the_callers_own_session_and_ends_with_the_descriptor", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let (other_at, _) = service.mount_directory("two");
        let connection = connect(folder, "one");
        let mut file = File::create(at.join("f")).expect("create");
        assert_eq!(adopt(&file, connection.session() ^ 1 << 13).handle, 0, "no such session");
        let elsewhere = File::create(other_at.join("f")).expect("create");
        assert_eq!(adopt(&elsewhere, connection.session()).handle, 0, "another instance's");
        let handle = handle(&file, &connection);
        file.write_all(b"hello").expect("write");
        // An unadopted writer may map: the content is the kernel's until it is closed.
        let writer = OpenOptions::new().write(true).open(at.join("f")).expect("open");
        assert_eq!(write(&connection, handle, 0, b"H").status, Status::UseKernel as u32);
        drop(writer);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while write(&connection, handle, 0, b"H").status != Status::Done as u32 {
            assert!(std::time::Instant::now() < deadline, "the writer's end is not noticed");
        }
        drop(file);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while write(&connection, handle, 0, b"x").status != Status::UseKernel as u32 {
            assert!(std::time::Instant::now() < deadline, "the handle outlives its descriptor");
        }
        assert_eq!(fs::read(at.join("f")).expect("read").len(), 5);
        symlink("f", at.join("l")).expect("symlink");
        assert_eq!(by_path(&connection, Operation::Stat, "l").status, Status::Redirect as u32);
        assert_eq!(service.status().instances.iter().map(|instance| instance.sessions).sum::<u64>(), 1);
    });
}

#[test]
fn a_killed_service_fails_its_callers_and_the_next_one_serves_them() {
    isolated("queue::a_killed_service_fails_its_callers_and_the_next_one_serves_them", |folder| {
        let mut service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let connection = connect(folder, "one");
        fs::write(at.join("f"), b"kept").expect("write");
        File::open(at.join("f")).expect("open").sync_all().expect("sync");
        assert_eq!(by_path(&connection, Operation::Stat, "f").attributes.size, 4);
        service.kill();
        let request = Request { operation: Operation::Echo as u32, ..Request::default() };
        assert_eq!(connection.call(&request, &[], &mut []).err(), Some(poolfs_ipc::CallError::Dead));
        let service = Running::start(folder);
        service.mount_directory("one");
        assert_eq!(by_path(&connect(folder, "one"), Operation::Stat, "f").attributes.size, 4);
    });
}

const PROTECTED_SYMLINKS: &str = "/proc/sys/fs/protected_symlinks";

/// The host's setting as it was, put back at the end.
struct Setting(String);

impl Setting {
    fn keep() -> Self {
        Self(fs::read_to_string(PROTECTED_SYMLINKS).expect("readable"))
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        let _ = fs::write(PROTECTED_SYMLINKS, &self.0);
    }
}

#[test]
fn links_the_host_may_protect_are_followed_by_the_kernel_alone() {
    isolated("queue::links_the_host_may_protect_are_followed_by_the_kernel_alone", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let connection = connect(folder, "one");
        fs::create_dir_all(at.join("d/target/below")).expect("mkdir");
        let (setting, mut refused, mut left) = (Setting::keep(), 0, 0);
        for protects in ["0", "1"] {
            fs::write(PROTECTED_SYMLINKS, protects).expect("root may");
            let modes = [0o1777, 0o1775, 0o777];
            let owners = [(0, 0), (0, 1001), (1001, 0), (1001, 1001), (1002, 1001)];
            for (mode, (directory, link)) in modes.into_iter().flat_map(|mode| owners.map(|owners| (mode, owners))) {
                let _ = fs::remove_file(at.join("d/link"));
                symlink("target", at.join("d/link")).expect("symlink");
                lchown(at.join("d/link"), Some(link), None).expect("lchown");
                chown(at.join("d"), Some(directory), None).expect("chown");
                fs::set_permissions(at.join("d"), fs::Permissions::from_mode(mode)).expect("chmod");
                for path in ["d/link", "d/link/", "d//link//", "d/link/below", "d/target"] {
                    let kernel = fs::metadata(at.join(path)).map_err(|error| error.raw_os_error());
                    let own = by_path(&connection, Operation::Stat, path);
                    let is_refused = kernel.err() == Some(Some(libc::EACCES));
                    let is_left = own.status == Status::UseKernel as u32;
                    assert!(
                        is_left || !is_refused,
                        "{path}, setting {protects}, mode {mode:o}, owners {directory} {link}: {own:?}"
                    );
                    (refused, left) = (refused + u32::from(is_refused), left + u32::from(is_left));
                }
            }
        }
        drop(setting);
        assert_eq!(refused, 6, "two pairs of owners, three paths that end with the link");
        assert_eq!(left, 16, "only what the kernel may refuse, whatever the setting, and what follows such a link");
    });
}

/// Whether a process of user 1000 gets a session.
fn is_let_in(path: &CString) -> bool {
    // SAFETY: the child makes system calls only, and ends without running anything of the parent's.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above; the ids are numbers.
        let changed = unsafe {
            libc::setgroups(0, std::ptr::null()) == 0
                && libc::setresgid(1000, 1000, 1000) == 0
                && libc::setresuid(1000, 1000, 1000) == 0
        };
        let outcome = if changed { i32::from(Connection::open(path).is_ok()) } else { 2 };
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(outcome) };
    }
    let mut status = 0;
    // SAFETY: `status` is valid for the call, and the child is ours.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) < 2, "{status}");
    libc::WEXITSTATUS(status) == 1
}

#[test]
fn who_cannot_reach_a_mount_has_no_session_with_it() {
    isolated("queue::who_cannot_reach_a_mount_has_no_session_with_it", |folder| {
        let service = Running::start(folder);
        let sockets = fs::metadata(folder.join("run")).expect("made by the service");
        assert_eq!(sockets.mode() & 0o7777, 0o755, "others could put sockets of their own there");
        let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("ours");
        mode(folder, 0o755);
        let closed = folder.join("closed");
        let mut spec = service.spec("one", StackSpec::directory(make(&folder.join("dir"))));
        spec.mount_point = make(&closed.join("mnt"));
        assert_eq!(service.order(&Order::Mount(spec.clone())), Answer::Done);
        let socket = folder.join("run/one.sock");
        let socket = CString::new(socket.to_str().expect("text")).expect("no NUL");
        assert!(is_let_in(&socket));
        mode(&closed, 0o700);
        assert!(fs::read_dir(&spec.mount_point).is_ok() && !is_let_in(&socket));
        mode(&closed, 0o710);
        assert!(!is_let_in(&socket), "not of the group");
        chown(&closed, None, Some(1000)).expect("chown");
        assert!(is_let_in(&socket));
        // An access list that lets the user in, and one that keeps it out.
        let list = |user: u16| {
            let entries = [(1, 7, u32::MAX), (2, user, 1000), (4, 7, u32::MAX), (16, 7, u32::MAX), (32, 7, u32::MAX)];
            let entry = |(tag, mode, id): (u16, u16, u32)| {
                [&tag.to_le_bytes()[..], &mode.to_le_bytes(), &id.to_le_bytes()].concat()
            };
            let value = [2u32.to_le_bytes().to_vec(), entries.map(entry).concat()].concat();
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::setxattr(&closed, "system.posix_acl_access", &value, flags).expect("access lists");
        };
        list(0);
        assert!(!is_let_in(&socket));
        list(1);
        assert!(is_let_in(&socket));
    });
}
