//! Clients that see the instance otherwise than the host does: read-only, in part, covered, or with something mounted in it. What the
//! kernel refuses them, they do not get by request.

use crate::harness::{Running, isolated};
use crate::queue::{connect, read};
use crate::stolen::{ended_well, forked, system_call};
use poolfs_ipc::Connection;
use poolfs_ipc::wire::{Operation, Request, Status};
use std::ffi::CString;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest until a session is known to be over.
const END_MAX: Duration = Duration::from_secs(20);

fn text(path: &Path) -> CString {
    CString::new(path.to_str().expect("text")).expect("no NUL")
}

fn mount(source: &Path, target: &Path, kind: &str, flags: libc::c_ulong) {
    let (source, target, kind) = (text(source), text(target), CString::new(kind).expect("no NUL"));
    // SAFETY: strings that outlive the call, and no data.
    let result = unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, std::ptr::null()) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

fn bind(source: &Path, target: &Path) {
    mount(source, target, "", libc::MS_BIND);
}

fn make_read_only(at: &Path) {
    mount(at, at, "", libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY);
}

fn cover(at: &Path) {
    mount(Path::new("cover"), at, "tmpfs", 0);
}

/// Takes a mount out of this namespace.
fn detach(at: &Path) {
    // SAFETY: a string that outlives the call.
    assert_eq!(unsafe { libc::umount2(text(at).as_ptr(), libc::MNT_DETACH) }, 0);
}

/// Runs `work` in a process with a mount namespace of its own.
fn elsewhere(work: impl FnOnce()) {
    ended_well(forked(|| {
        system_call(libc::SYS_unshare, [libc::CLONE_NEWNS as usize, 0, 0]);
        mount(Path::new("none"), Path::new("/"), "", libc::MS_REC | libc::MS_PRIVATE);
        work();
    }));
}

fn is_let_in(folder: &Path) -> bool {
    Connection::open(&text(&folder.join("run/one.sock"))).is_ok()
}

fn ask(connection: &Connection, operation: Operation, path: &str, second: &str) -> Status {
    let request = Request {
        operation: operation as u32,
        path_length: path.len() as u32,
        second_length: second.len() as u32,
        mode: if operation == Operation::MakeDirectory { 0o755 } else { 0 },
        ..Request::default()
    };
    let reply = connection.call(&request, &[path.as_bytes(), second.as_bytes()], &mut []).expect("a reply");
    Status::from_number(reply.status).expect("a status")
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
            let file = fs::File::open(at.join("f")).expect("opened");
            assert_eq!(read(&connection, crate::queue::handle(&file, &connection), 0, 4), b"kept");
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

#[test]
fn a_session_ends_when_its_client_comes_to_see_something_else() {
    isolated("views::a_session_ends_when_its_client_comes_to_see_something_else", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        fs::write(at.join("f"), b"f").expect("written");
        let elsewhere_at = folder.join("elsewhere");
        fs::create_dir(&elsewhere_at).expect("made");
        let asks = |connection: &Connection| {
            let request = Request { operation: Operation::Stat as u32, path_length: 1, ..Request::default() };
            connection.call(&request, &[b"f"], &mut []).is_ok()
        };
        let over = |connection: &Connection| {
            let start = Instant::now();
            while asks(connection) {
                assert!(start.elapsed() < END_MAX, "it still acts as who it was");
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        let changes: [(&str, &dyn Fn()); 4] = [
            ("read-only", &|| make_read_only(&at)),
            ("covered", &|| cover(&at)),
            ("mounted on", &|| bind(&at.join("f"), &at.join("f"))),
            ("another namespace", &|| system_call(libc::SYS_unshare, [libc::CLONE_NEWNS as usize, 0, 0])),
        ];
        for (what, change) in changes {
            elsewhere(|| {
                let connection = connect(folder, "one");
                assert!(asks(&connection), "{what}");
                change();
                over(&connection);
            });
        }
        // What is mounted elsewhere is no reason.
        elsewhere(|| {
            let connection = connect(folder, "one");
            cover(&elsewhere_at);
            let start = Instant::now();
            while start.elapsed() < Duration::from_secs(3) {
                assert!(asks(&connection));
                std::thread::sleep(Duration::from_millis(50));
            }
        });
    });
}
