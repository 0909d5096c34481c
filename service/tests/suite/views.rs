//! Tests of clients that see the instance differently from the host: read-only, in part, covered, or with something mounted in
//! it. What the kernel refuses them, requests refuse too.

use crate::harness::{Running, eventually, isolated};
use crate::queue::{connect, handle, read};
use crate::stolen::{ended_well, forked, system_call};
use poolfs_ipc::wire::{Operation, Request, Status};
use poolfs_ipc::{CallError, Connection};
use std::ffi::CString;
use std::fs::{self, File, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest until a session is known to be over.
const END_MAX: Duration = Duration::from_secs(20);

/// What a service says for its developers when a client's mounts are others, and its session goes on.
pub const LOOKED_AGAIN: &str = "a client's mounts have changed: they were looked at again";
/// And when it does not.
pub const ENDS: &str = "a client's mounts have changed: its session ends";
/// `MS_NOSYMFOLLOW`
const NO_LINKS: libc::c_ulong = 256;

fn text(path: &Path) -> CString {
    CString::new(path.to_str().expect("text")).expect("no NUL")
}

fn mount(source: &Path, target: &Path, kind: &str, flags: libc::c_ulong) {
    let (source, target, kind) = (text(source), text(target), CString::new(kind).expect("no NUL"));
    // SAFETY: strings that outlive the call, and no data.
    let result = unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, std::ptr::null()) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

pub fn bind(source: &Path, target: &Path) {
    mount(source, target, "", libc::MS_BIND);
}

pub fn make_read_only(at: &Path) {
    mount(at, at, "", libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY);
}

pub fn cover(at: &Path) {
    mount(Path::new("cover"), at, "tmpfs", 0);
}

/// Takes a mount out of this namespace.
pub fn detach(at: &Path) {
    // SAFETY: a string that outlives the call.
    assert_eq!(unsafe { libc::umount2(text(at).as_ptr(), libc::MNT_DETACH) }, 0);
}

/// Runs `work` in a process with a mount namespace of its own.
pub fn elsewhere(work: impl FnOnce()) {
    ended_well(forked(|| {
        system_call(libc::SYS_unshare, [libc::CLONE_NEWNS as usize, 0, 0]);
        mount(Path::new("none"), Path::new("/"), "", libc::MS_REC | libc::MS_PRIVATE);
        work();
    }));
}

/// Runs `work` in the mount namespace of a process, as in a container that shares the instance.
fn in_namespace_of(process: u32, work: impl FnOnce()) {
    ended_well(forked(|| {
        let namespace = File::open(format!("/proc/{process}/ns/mnt")).expect("alive");
        system_call(libc::SYS_setns, [namespace.as_raw_fd() as usize, libc::CLONE_NEWNS as usize, 0]);
        work();
    }));
}

/// As user 1000, who has no capabilities.
fn become_user() {
    system_call(libc::SYS_setresgid, [1000; 3]);
    system_call(libc::SYS_setgroups, [0; 3]);
    system_call(libc::SYS_setresuid, [1000; 3]);
}

fn set_attribute(of: &Path, name: &str, value: &[u8]) {
    let (of, name) = (text(of), CString::new(name).expect("no NUL"));
    // SAFETY: strings and a value that outlive the call.
    let result = unsafe { libc::setxattr(of.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// Has others pass through what the test has for itself.
fn open_to_all(folder: &Path) {
    fs::set_permissions(folder, Permissions::from_mode(0o755)).expect("mode");
}

fn is_let_in(folder: &Path) -> bool {
    Connection::open(&text(&folder.join("run/one.sock"))).is_ok()
}

/// By descriptors: what is asked of the file behind `handle`, or of names in the directory behind `directory`; 0 is none.
#[derive(Clone, Copy, Default)]
struct By {
    handle: u64,
    directory: u64,
}

fn ask_by(connection: &Connection, by: By, operation: Operation, path: &str, second: &str) -> Status {
    let request = Request {
        operation: operation as u32,
        handle: by.handle,
        directory: by.directory,
        second_directory: by.directory,
        path_length: path.len() as u32,
        second_length: second.len() as u32,
        mode: match operation {
            Operation::MakeDirectory => 0o755,
            Operation::Access => libc::W_OK.cast_unsigned(),
            _ => 0,
        },
        length: u64::from(operation == Operation::Write),
        ..Request::default()
    };
    let data: &[u8] = if operation == Operation::Write { b"x" } else { b"" };
    let reply = connection.call(&request, &[path.as_bytes(), second.as_bytes(), data], &mut []).expect("a reply");
    Status::from_number(reply.status).expect("a status")
}

fn ask(connection: &Connection, operation: Operation, path: &str, second: &str) -> Status {
    ask_by(connection, By::default(), operation, path, second)
}

/// Whether requests still have a session behind them.
pub fn is_served(connection: &Connection) -> bool {
    let request = Request { operation: Operation::Stat as u32, path_length: 1, ..Request::default() };
    connection.call(&request, &[b"f"], &mut []).is_ok()
}

/// Asks until there is no session any more, which is said of every request from then on: who asks knows that nothing has happened.
fn wait_for_end(connection: &Connection) {
    let start = Instant::now();
    let request = Request { operation: Operation::MakeDirectory as u32, path_length: 1, ..Request::default() };
    // Nothing is made: the name is there.
    let made = || connection.call(&request, &[b"f"], &mut []);
    loop {
        match made() {
            Err(CallError::Ended) => break,
            asked => assert_ne!(asked.expect("served or turned away").status, Status::Done as u32),
        }
        assert!(start.elapsed() < END_MAX, "it still acts as who it was");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(made().err(), Some(CallError::Ended));
    let unlink = Request { operation: Operation::Unlink as u32, path_length: 1, ..Request::default() };
    assert_eq!(connection.call(&unlink, &[b"f"], &mut []).err(), Some(CallError::Ended));
    assert!(connection.is_connected(), "it is its client that hangs up");
    connection.close();
    assert_eq!(made().err(), Some(CallError::NoSession));
}

#[test]
fn who_sees_a_mount_read_only_changes_nothing() {
    isolated("views::who_sees_a_mount_read_only_changes_nothing", |folder| {
        let service = Running::start(folder);
        let (at, directory) = service.mount_directory("one");
        fs::write(at.join("f"), b"kept").expect("written");
        elsewhere(|| {
            make_read_only(&at);
            let connection = connect(folder, "one");
            assert_eq!(ask(&connection, Operation::Stat, "f", ""), Status::Done);
            let file = File::open(at.join("f")).expect("opened");
            assert_eq!(read(&connection, handle(&file, &connection), 0, 4), b"kept");
            for (operation, path, second) in [
                (Operation::Unlink, "f", ""),
                (Operation::Truncate, "f", ""),
                (Operation::ChangeMode, "f", ""),
                (Operation::Rename, "f", "g"),
                (Operation::Link, "f", "g"),
                (Operation::MakeDirectory, "d", ""),
                (Operation::SymbolicLink, "l", "f"),
                (Operation::RemoveXattr, "f", "user.x"),
            ] {
                assert_eq!(ask(&connection, operation, path, second), Status::UseKernel, "{operation:?}");
            }
            let refused = fs::remove_file(at.join("f")).expect_err("read-only");
            assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
        });
        assert_eq!(fs::read(at.join("f")).expect("read"), b"kept");
        assert_eq!(fs::read_dir(directory).expect("listed").count(), 1);
    });
}

#[test]
fn who_does_not_see_the_whole_of_a_mount_has_no_session() {
    isolated("views::who_does_not_see_the_whole_of_a_mount_has_no_session", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let (part, other) = (at.join("part"), folder.join("other"));
        for path in [&part, &other] {
            fs::create_dir(path).expect("made");
        }
        elsewhere(|| {
            assert!(is_let_in(folder));
            bind(&part, &other);
            assert!(is_let_in(folder), "in whole and in part");
            cover(&at);
            assert!(!is_let_in(folder), "covered");
            detach(&at);
            assert!(is_let_in(folder));
            detach(&at);
            assert!(!is_let_in(folder), "in part only");
        });
        elsewhere(|| {
            bind(&at, &other);
            detach(&at);
            assert!(is_let_in(folder), "at another place");
            // By the same name, and of the same type, but not the same.
            detach(&other);
            mount(Path::new("poolfs:one"), &at, "tmpfs", 0);
            assert!(!is_let_in(folder));
        });
        assert!(is_let_in(folder), "others see it as ever");
    });
}

#[test]
fn names_on_which_something_is_mounted_are_the_kernels() {
    isolated("views::names_on_which_something_is_mounted_are_the_kernels", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        for directory in ["etc", "tmp/below"] {
            fs::create_dir_all(at.join(directory)).expect("made");
        }
        for file in ["etc/hosts", "etc/other", "tmp/below/f"] {
            fs::write(at.join(file), b"the instance's").expect("written");
        }
        let own = folder.join("hosts");
        fs::write(&own, b"its own").expect("written");
        elsewhere(|| {
            bind(&own, &at.join("etc/hosts"));
            cover(&at.join("tmp"));
            let connection = connect(folder, "one");
            for (operation, path, second) in [
                (Operation::Unlink, "etc/hosts", ""),
                (Operation::Unlink, "etc/./hosts", ""),
                (Operation::Truncate, "etc/hosts", ""),
                (Operation::Stat, "etc/hosts", ""),
                (Operation::Rename, "etc/hosts", "etc/gone"),
                (Operation::Rename, "etc/other", "etc/hosts"),
                (Operation::Link, "etc/hosts", "etc/second"),
                (Operation::Stat, "tmp", ""),
                (Operation::Unlink, "tmp/below/f", ""),
                (Operation::Stat, "tmp/below/f", ""),
                (Operation::MakeDirectory, "tmp/below/new", ""),
                (Operation::Rename, "etc/other", "tmp/below/other"),
            ] {
                assert_eq!(ask(&connection, operation, path, second), Status::UseKernel, "{operation:?} {path}");
            }
            assert_eq!(ask(&connection, Operation::Rename, "etc/other", "etc/renamed"), Status::Done);
            assert_eq!(ask(&connection, Operation::Unlink, "etc/renamed", ""), Status::Done);
            assert_eq!(fs::read(at.join("etc/hosts")).expect("read"), b"its own");
        });
        assert_eq!(fs::read(at.join("etc/hosts")).expect("read"), b"the instance's");
        assert!(at.join("tmp/below/f").exists() && !at.join("tmp/below/new").exists());
    });
}

/// Changes of metadata, and of names: the file's by its handle, a directory's.
const OF_FILE: [Operation; 3] = [Operation::ChangeMode, Operation::SetTimes, Operation::Access];
const OF_DIRECTORY: [(Operation, &str, &str); 10] = [
    (Operation::Unlink, "f", ""),
    (Operation::Truncate, "f", ""),
    (Operation::ChangeMode, "f", ""),
    (Operation::Access, "f", ""),
    (Operation::Rename, "f", "g"),
    (Operation::Link, "f", "g"),
    (Operation::MakeDirectory, "d", ""),
    (Operation::SymbolicLink, "l", "f"),
    (Operation::MakeNode, "n", ""),
    (Operation::RemoveXattr, "f", "user.x"),
];

#[test]
fn what_is_read_only_in_part_is_not_changed_by_descriptors() {
    isolated("views::what_is_read_only_in_part_is_not_changed_by_descriptors", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let (part, other) = (at.join("etc"), folder.join("other"));
        for directory in [&part, &at.join("home"), &other] {
            fs::create_dir(directory).expect("made");
        }
        for file in ["etc/f", "home/f"] {
            fs::write(at.join(file), b"kept").expect("written");
            fs::set_permissions(at.join(file), Permissions::from_mode(0o644)).expect("mode");
        }
        // On itself, and elsewhere.
        for place in [&part, &other] {
            elsewhere(|| {
                bind(&part, place);
                make_read_only(place);
                let connection = connect(folder, "one");
                let (file, directory) =
                    (File::open(place.join("f")).expect("opened"), File::open(place).expect("opened"));
                let by_file = By { handle: handle(&file, &connection), ..By::default() };
                let by_directory = By { directory: handle(&directory, &connection), ..By::default() };
                assert_eq!(read(&connection, by_file.handle, 0, 4), b"kept");
                assert_eq!(ask_by(&connection, by_directory, Operation::Stat, "f", ""), Status::Done);
                for operation in OF_FILE {
                    assert_eq!(ask_by(&connection, by_file, operation, "", ""), Status::UseKernel, "{operation:?}");
                }
                for (operation, path, second) in OF_DIRECTORY {
                    let answer = ask_by(&connection, by_directory, operation, path, second);
                    assert_eq!(answer, Status::UseKernel, "{operation:?}");
                }
                // The descriptor says itself that nothing is written by it.
                for operation in [Operation::Write, Operation::Truncate] {
                    assert_ne!(ask_by(&connection, by_file, operation, "", ""), Status::Done, "{operation:?}");
                }
                let refused = file.set_permissions(Permissions::from_mode(0o600)).expect_err("read-only");
                assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
                // By names from the root on, and by descriptors that can be written, all is as ever.
                let writable = fs::OpenOptions::new().write(true).open(at.join("home/f")).expect("opened");
                let by_writable = By { handle: handle(&writable, &connection), ..By::default() };
                assert_eq!(ask_by(&connection, by_writable, Operation::Write, "", ""), Status::Done);
                assert_eq!(ask(&connection, Operation::Rename, "home/f", "home/g"), Status::Done);
                assert_eq!(ask(&connection, Operation::Rename, "home/g", "home/f"), Status::Done);
            });
        }
        assert_eq!(fs::read(part.join("f")).expect("read"), b"kept");
        assert_eq!(fs::metadata(part.join("f")).expect("there").permissions().mode() & 0o777, 0o644);
        assert_eq!(fs::read_dir(part).expect("listed").count(), 1);
    });
}

#[test]
fn mount_points_that_others_rename_stay_the_kernels() {
    isolated("views::mount_points_that_others_rename_stay_the_kernels", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        for directory in ["etc", "tmp/old/below", "tmp/in/deep"] {
            fs::create_dir_all(at.join(directory)).expect("made");
        }
        for file in ["etc/hosts", "etc/other", "tmp/old/below/f", "tmp/in/deep/f"] {
            fs::write(at.join(file), b"the instance's").expect("written");
        }
        let own = folder.join("hosts");
        fs::write(&own, b"its own").expect("written");
        let others = std::process::id();
        let renamed = [("etc/hosts", "etc/renamed"), ("tmp/old", "tmp/new"), ("tmp/in", "tmp/out")];
        elsewhere(|| {
            bind(&own, &at.join("etc/hosts"));
            cover(&at.join("tmp/old"));
            cover(&at.join("tmp/in/deep"));
            let before = connect(folder, "one");
            assert_eq!(ask(&before, Operation::Stat, "tmp/old/below/f", ""), Status::UseKernel);
            in_namespace_of(others, || {
                for (from, to) in renamed {
                    fs::rename(at.join(from), at.join(to)).expect("renamed");
                }
            });
            let mounted = fs::read_to_string("/proc/self/mountinfo").expect("readable");
            assert!(mounted.contains("/tmp/new ") && mounted.contains("/etc/renamed "), "{mounted}");
            // For the session that there was, and for a new one.
            for connection in [before, connect(folder, "one")] {
                for (operation, path, second) in [
                    (Operation::Stat, "etc/renamed", ""),
                    (Operation::Unlink, "etc/renamed", ""),
                    (Operation::Truncate, "etc/renamed", ""),
                    (Operation::ChangeMode, "etc/renamed", ""),
                    (Operation::Rename, "etc/renamed", "etc/gone"),
                    (Operation::Rename, "etc/other", "etc/renamed"),
                    (Operation::Link, "etc/renamed", "etc/second"),
                    (Operation::Stat, "tmp/new", ""),
                    (Operation::Stat, "tmp/new/below/f", ""),
                    (Operation::Unlink, "tmp/new/below/f", ""),
                    (Operation::MakeDirectory, "tmp/new/made", ""),
                    (Operation::Rename, "etc/other", "tmp/new/below/other"),
                    (Operation::Unlink, "tmp/out/deep/f", ""),
                ] {
                    // The look at its rights may have ended it: then nothing was done either.
                    let request = || ask(&connection, operation, path, second);
                    let answer = std::panic::catch_unwind(std::panic::AssertUnwindSafe(request));
                    assert!(
                        answer.is_err() || answer.is_ok_and(|answer| answer == Status::UseKernel),
                        "{operation:?} {path}"
                    );
                }
            }
            assert_eq!(fs::read(at.join("etc/renamed")).expect("read"), b"its own");
        });
        assert_eq!(fs::read(at.join("etc/renamed")).expect("read"), b"the instance's");
        assert!(at.join("tmp/new/below/f").exists() && !at.join("tmp/new/made").exists());
        assert!(at.join("tmp/out/deep/f").exists());
    });
}

#[test]
fn mounts_that_a_client_cannot_reach_give_it_nothing() {
    isolated("views::mounts_that_a_client_cannot_reach_give_it_nothing", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        open_to_all(folder);
        fs::write(at.join("f"), b"kept").expect("written");
        for path in [at.clone(), at.join("f")] {
            chown(path, Some(1000), Some(1000)).expect("chown");
        }
        let (closed, theirs) = (folder.join("closed"), folder.join("theirs"));
        let (hidden, open) = (closed.join("at"), theirs.join("at"));
        for directory in [&hidden, &open] {
            fs::create_dir_all(directory).expect("made");
        }
        fs::set_permissions(&closed, Permissions::from_mode(0o700)).expect("mode");
        fs::set_permissions(&theirs, Permissions::from_mode(0o700)).expect("mode");
        chown(&theirs, Some(1000), Some(1000)).expect("chown");
        elsewhere(|| {
            bind(&at, &hidden);
            make_read_only(&at);
            ended_well(forked(|| {
                become_user();
                let connection = connect(folder, "one");
                assert_eq!(ask(&connection, Operation::Stat, "f", ""), Status::Done);
                assert_eq!(
                    ask(&connection, Operation::Unlink, "f", ""),
                    Status::UseKernel,
                    "read-only where it is reached"
                );
            }));
            assert_eq!(ask(&connect(folder, "one"), Operation::ChangeMode, "f", ""), Status::Done, "root gets there");
            detach(&at);
            ended_well(forked(|| {
                become_user();
                assert!(!is_let_in(folder), "it is only where others may look");
            }));
            assert!(is_let_in(folder), "root gets there");
            // By its access list: u::rwx,u:1000:--x,g::---,m::--x,o::---
            let entries: [[u16; 4]; 5] =
                [[1, 7, !0, !0], [2, 1, 1000, 0], [4, 0, !0, !0], [16, 1, !0, !0], [32, 0, !0, !0]];
            let list = [2u16, 0].iter().chain(entries.as_flattened()).flat_map(|part| part.to_le_bytes());
            set_attribute(&closed, "system.posix_acl_access", &list.collect::<Vec<_>>());
            ended_well(forked(|| {
                become_user();
                assert!(is_let_in(folder), "the access list names it");
            }));
            fs::set_permissions(&closed, Permissions::from_mode(0o700)).expect("mode");
            bind(&hidden, &open);
            ended_well(forked(|| {
                become_user();
                assert!(is_let_in(folder), "below a directory of its own");
            }));
        });
        assert_eq!(fs::read(at.join("f")).expect("read"), b"kept");
    });
}

/// Leaves its root for a directory in it.
fn change_root(to: &Path) {
    system_call(libc::SYS_chroot, [text(to).as_ptr() as usize, 0, 0]);
    system_call(libc::SYS_chdir, [c"/".as_ptr() as usize, 0, 0]);
}

/// Makes a mount the root of its namespace, as containers have it.
fn move_root(to: &Path) {
    system_call(libc::SYS_chdir, [text(to).as_ptr() as usize, 0, 0]);
    system_call(libc::SYS_pivot_root, [c".".as_ptr() as usize, c".".as_ptr() as usize, 0]);
    detach(Path::new("."));
    system_call(libc::SYS_chdir, [c"/".as_ptr() as usize, 0, 0]);
}

/// Asked for as who is in another root: the kernel refuses it, and so does the service or there is no session.
fn cannot_unlink(folder: &Path, name: &str) {
    if let Ok(connection) = Connection::open(&text(&folder.join("run/one.sock"))) {
        assert_ne!(ask(&connection, Operation::Unlink, name, ""), Status::Done, "the kernel would refuse it");
    }
}

#[test]
fn mounts_outside_of_its_root_bind_a_client_too() {
    isolated("views::mounts_outside_of_its_root_bind_a_client_too", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        open_to_all(folder);
        fs::write(at.join("f"), b"the instance's").expect("written");
        let (jail, own) = (folder.join("jail"), folder.join("own"));
        for directory in ["run", "at"] {
            fs::create_dir_all(jail.join(directory)).expect("made");
        }
        fs::write(&own, b"its own").expect("written");
        // Its root is a directory, or a mount.
        for is_mount in [false, true] {
            elsewhere(|| {
                if is_mount {
                    bind(&jail, &jail);
                }
                bind(&folder.join("run"), &jail.join("run"));
                bind(&at, &jail.join("at"));
                bind(&own, &at.join("f"));
                ended_well(forked(|| {
                    change_root(&jail);
                    assert_eq!(
                        fs::read("/at/f").expect("read"),
                        b"the instance's",
                        "it does not see what is mounted there"
                    );
                    let refused = fs::remove_file("/at/f").expect_err("something is mounted on it");
                    assert_eq!(refused.raw_os_error(), Some(libc::EBUSY));
                    cannot_unlink(Path::new("/"), "f");
                }));
                // It comes to be there later.
                ended_well(forked(|| {
                    let connection = connect(folder, "one");
                    assert!(is_served(&connection));
                    change_root(&jail);
                    wait_for_end(&connection);
                    assert!(!is_let_in(Path::new("/")));
                }));
                if is_mount {
                    move_root(&jail);
                    let connection = connect(Path::new("/"), "one");
                    assert_eq!(ask(&connection, Operation::Stat, "f", ""), Status::Done, "as in a container");
                }
            });
        }
        assert_eq!(fs::read(at.join("f")).expect("kept"), b"the instance's");
    });
}

#[test]
fn what_covers_a_part_shown_elsewhere_is_on_the_name_of_that_part() {
    isolated("views::what_covers_a_part_shown_elsewhere_is_on_the_name_of_that_part", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let (part, own) = (folder.join("part"), folder.join("own"));
        for (path, content) in
            [(at.join("f"), "kept"), (at.join("g"), "other"), (part.clone(), ""), (own.clone(), "cover")]
        {
            fs::write(path, content).expect("written");
        }
        elsewhere(|| {
            bind(&at.join("f"), &part);
            bind(&own, &part);
            for refused in [fs::remove_file(at.join("f")), fs::rename(at.join("g"), at.join("f"))] {
                assert_eq!(refused.expect_err("something is mounted on it").raw_os_error(), Some(libc::EBUSY));
            }
            let connection = connect(folder, "one");
            assert_eq!(ask(&connection, Operation::Unlink, "f", ""), Status::UseKernel);
            assert_eq!(ask(&connection, Operation::Rename, "g", "f"), Status::UseKernel);
            assert_eq!(fs::read(&part).expect("read"), b"cover");
        });
        assert_eq!(fs::read(at.join("f")).expect("read"), b"kept");
    });
}

/// A service that stands still until this is dropped.
struct Stopped(rustix::process::Pid);

impl Stopped {
    fn stop(service: &Running) -> Self {
        let service = i32::try_from(service.pid()).ok().and_then(rustix::process::Pid::from_raw).expect("a process");
        rustix::process::kill_process(service, rustix::process::Signal::STOP).expect("stopped");
        Self(service)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(self.0, rustix::process::Signal::CONT);
    }
}

#[test]
fn filesystems_that_do_not_answer_keep_nobody_waiting_on_the_way_to_a_mount() {
    isolated("views::filesystems_that_do_not_answer_keep_nobody_waiting_on_the_way_to_a_mount", |folder| {
        let other_folder = folder.join("other");
        let (service, other) = (Running::start(folder), Running::start(&other_folder));
        let (at, _) = service.mount_directory("one");
        let (way, _) = other.mount_directory("two");
        open_to_all(folder);
        let place = way.join("below/at");
        fs::create_dir_all(&place).expect("made");
        elsewhere(|| {
            bind(&at, &place);
            detach(&at);
            let _stopped = Stopped::stop(&other);
            assert!(is_let_in(folder), "root passes whatever access lists say");
            ended_well(forked(|| {
                become_user();
                assert!(!is_let_in(folder), "what they say is not asked");
            }));
            assert!(is_let_in(folder), "as before");
        });
        assert!(is_let_in(folder));
    });
}

/// Asks until that is the answer; the session stays.
fn wait_for_answer(connection: &Connection, operation: Operation, path: &str, status: Status) {
    let start = Instant::now();
    while ask(connection, operation, path, "") != status {
        assert!(start.elapsed() < END_MAX, "it still sees what it saw: {operation:?} {path:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_session_follows_when_others_make_the_filesystem_read_only() {
    isolated("views::a_session_follows_when_others_make_the_filesystem_read_only", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        fs::write(at.join("f"), b"f").expect("written");
        let others = std::process::id();
        elsewhere(|| {
            let connection = connect(folder, "one");
            assert_eq!(ask(&connection, Operation::ChangeMode, "f", ""), Status::Done);
            // Not the mount: of that no other namespace hears.
            let remount =
                |flags| in_namespace_of(others, || mount(Path::new("none"), &at, "", libc::MS_REMOUNT | flags));
            remount(libc::MS_RDONLY);
            wait_for_answer(&connection, Operation::ChangeMode, "f", Status::UseKernel);
            assert_eq!(ask(&connect(folder, "one"), Operation::ChangeMode, "f", ""), Status::UseKernel);
            remount(0);
            wait_for_answer(&connection, Operation::ChangeMode, "f", Status::Done);
        });
    });
}

#[test]
fn a_session_goes_on_with_what_its_client_sees_now() {
    isolated("views::a_session_goes_on_with_what_its_client_sees_now", |folder| {
        let log = folder.join("log");
        let service = Running::start_telling(folder, &log);
        let (at, _) = service.mount_directory("one");
        let [f, name, elsewhere_at] = [at.join("f"), at.join("name"), folder.join("elsewhere")];
        fs::write(&f, b"f").expect("written");
        symlink("f", at.join("link")).expect("made");
        for directory in [&name, &elsewhere_at, &at.join("some")] {
            fs::create_dir(directory).expect("made");
        }
        let changes_nothing = (Operation::ChangeMode, "f", Status::UseKernel);
        type Asked<'a> = (Operation, &'a str, Status);
        let asked: [(&dyn Fn(), Asked<'_>); 5] = [
            (&|| make_read_only(&at), changes_nothing),
            (&|| mount(Path::new("none"), &at, "", libc::MS_REMOUNT | libc::MS_RDONLY), changes_nothing),
            (&|| bind(&f, &f), (Operation::Stat, "f", Status::UseKernel)),
            (&|| cover(&name), (Operation::Stat, "name/x", Status::UseKernel)),
            (
                &|| mount(&at, &at, "", libc::MS_REMOUNT | libc::MS_BIND | NO_LINKS),
                (Operation::ChangeMode, "link", Status::UseKernel),
            ),
        ];
        for (change, (operation, path, status)) in asked {
            elsewhere(|| {
                let connection = connect(folder, "one");
                assert_ne!(ask(&connection, operation, path, ""), status, "{path}");
                change();
                wait_for_answer(&connection, operation, path, status);
                assert!(is_served(&connection));
            });
            // For all: it is one filesystem.
            mount(Path::new("none"), &at, "", libc::MS_REMOUNT);
        }
        // By the same name on another directory, and then not any more.
        elsewhere(|| {
            cover(&name);
            let connection = connect(folder, "one");
            let stat = |path, status| wait_for_answer(&connection, Operation::Stat, path, status);
            stat("name", Status::UseKernel);
            detach(&name);
            fs::rename(&name, at.join("before")).expect("renamed");
            fs::create_dir(&name).expect("made");
            cover(&name);
            stat("before", Status::Done);
            stat("name", Status::UseKernel);
            detach(&name);
            stat("name", Status::Done);
        });
        // What is mounted elsewhere changes nothing.
        elsewhere(|| {
            let connection = connect(folder, "one");
            let looks = || fs::read_to_string(&log).expect("readable").matches(LOOKED_AGAIN).count();
            let before = looks();
            cover(&elsewhere_at);
            let start = Instant::now();
            while looks() == before {
                assert!(is_served(&connection) && start.elapsed() < END_MAX);
                std::thread::sleep(Duration::from_millis(20));
            }
            assert!(is_served(&connection));
        });
    });
}

#[test]
fn a_session_ends_when_its_client_would_not_be_let_in_any_more() {
    isolated("views::a_session_ends_when_its_client_would_not_be_let_in_any_more", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        fs::write(at.join("f"), b"f").expect("written");
        let changes: [(&str, &dyn Fn()); 3] = [
            ("covered", &|| cover(&at)),
            ("detached", &|| detach(&at)),
            ("another namespace", &|| system_call(libc::SYS_unshare, [libc::CLONE_NEWNS as usize, 0, 0])),
        ];
        for (what, change) in changes {
            elsewhere(|| {
                let connection = connect(folder, "one");
                assert!(is_served(&connection), "{what}");
                change();
                wait_for_end(&connection);
            });
            eventually("its client has hung up", || service.status().instances[0].sessions == 0);
        }
        assert_eq!(fs::read(at.join("f")).expect("not unlinked"), b"f");
    });
}
