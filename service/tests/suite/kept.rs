//! Tests of threads that the kernel keeps while a program has a file or a directory locked: the death of the service closes all else that it has,
//! and ends what is asked of its mounts.

use crate::absent::Absent;
use crate::bare::eventually;
use crate::harness::{Running, isolated};
use crate::queue::{connect, write};
use crate::sizes::open_both;
use poolfs_ipc::wire::{Operation, Request};
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File, Permissions};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// What does not come is let come at the end, also of a test that fails: whoever is kept is waited for after that.
struct Comes<'a>(Arc<Absent>, &'a Path);

impl Drop for Comes<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = rustix::mount::unmount(self.1, UnmountFlags::FORCE | UnmountFlags::DETACH);
        }
        self.0.let_come();
    }
}

/// Whether the kernel keeps a thread of this name.
fn keeps(service: &Running, name: &str) -> bool {
    let tasks = fs::read_dir(format!("/proc/{}/task", service.pid())).expect("a process");
    let texts = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("stat")).ok());
    texts.into_iter().any(|text| text.contains(&format!("({name})")) && text.contains(") D "))
}

/// Kills the service while the kernel keeps a thread of this name: whoever is connected with it hears of it, although it is not gone.
fn kill_and_hear(service: &Running, name: &str) {
    let mut connected = UnixStream::connect(service.control_socket()).expect("it listens");
    connected.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
    eventually("the kernel keeps it", || keeps(service, name));
    let pid = Pid::from_raw(service.pid() as i32).expect("a process");
    kill_process(pid, Signal::KILL).expect("alive");
    let heard = connected.read(&mut [0]).map_err(|error| error.kind());
    assert!(matches!(heard, Ok(0) | Err(std::io::ErrorKind::ConnectionReset)), "{heard:?}");
    eventually("nobody listens", || UnixStream::connect(service.control_socket()).is_err());
    assert!(keeps(service, name), "it is still kept");
}

/// Has a program lock a file by writing to it, the service wait for that because somebody makes it longer, and then kills the service.
fn lock_and_kill(
    service: &Running,
    absent: &Arc<Absent>,
    file: File,
    makes_longer: impl FnOnce() -> bool,
) -> JoinHandle<isize> {
    file.set_permissions(Permissions::from_mode(0o600)).expect("changed");
    let memory = Arc::clone(absent);
    let locks = std::thread::spawn(move || memory.write_to(&file));
    absent.await_fault();
    assert!(makes_longer());
    kill_and_hear(service, "locked-one");
    locks
}

#[test]
fn a_locked_file_keeps_nothing_of_a_killed_service() {
    isolated("kept::a_locked_file_keeps_nothing_of_a_killed_service", |folder| {
        let mut service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let connection = connect(folder, "one");
        let (_reader, writer, adopted) = open_both(&service, &at, &connection, 1);
        let absent = Arc::new(Absent::new());
        let comes = Comes(Arc::clone(&absent), &at);
        let locks = lock_and_kill(&service, &absent, writer, || write(&connection, adopted, 1, &[2]).length == 1);
        drop(comes);
        assert_eq!(locks.join().expect("no panic"), -1, "what began to be written then is not taken");
        let _ = service.wait();
        assert_eq!(fs::read(at.join("f")).expect_err("nobody serves it").raw_os_error(), Some(libc::ENOTCONN));
    });
}

#[test]
fn a_locked_directory_keeps_nothing_of_a_killed_service() {
    isolated("kept::a_locked_directory_keeps_nothing_of_a_killed_service", |folder| {
        let mut service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let connection = connect(folder, "one");
        fs::write(at.join("f"), "f").expect("made");
        let listed = File::open(&at).expect("open");
        let absent = Arc::new(Absent::new());
        let comes = Comes(Arc::clone(&absent), &at);
        let memory = Arc::clone(&absent);
        let locks = std::thread::spawn(move || memory.list(&listed));
        absent.await_fault();
        let removes = std::thread::spawn(move || {
            let request = Request { operation: Operation::Unlink as u32, path_length: 1, ..Request::default() };
            connection.call(&request, &[b"f"], &mut []).is_ok()
        });
        kill_and_hear(&service, "names-one");
        drop(comes);
        let _ = locks.join().expect("no panic");
        let _ = removes.join().expect("no panic");
        let _ = service.wait();
        assert_eq!(fs::read(at.join("f")).expect_err("nobody serves it").raw_os_error(), Some(libc::ENOTCONN));
    });
}

/// The guard of a service.
fn guard_of(service: &Running) -> Pid {
    let parent = format!("PPid:\t{}\n", service.pid());
    let is_child = |at: &Path| fs::read_to_string(at.join("status")).is_ok_and(|status| status.contains(&parent));
    let processes = fs::read_dir("/proc").expect("mounted").filter_map(|entry| Some(entry.ok()?.path()));
    let children: Vec<_> = processes.filter(|at| is_child(at)).collect();
    let [guard] = &children[..] else { panic!("children of the service: {children:?}") };
    let number = guard.file_name().and_then(|name| name.to_str()?.parse().ok());
    Pid::from_raw(number.expect("a process")).expect("a process")
}

#[test]
fn a_guard_that_stood_still_cuts_off_what_it_has_not_heard_of_yet() {
    isolated("kept::a_guard_that_stood_still_cuts_off_what_it_has_not_heard_of_yet", |folder| {
        let mut service = Running::start(folder);
        // With the first mount it is ready.
        let _ = service.mount_directory("before");
        let guard = guard_of(&service);
        kill_process(guard, Signal::STOP).expect("alive");
        let (at, _) = service.mount_directory("one");
        let connection = connect(folder, "one");
        let (_reader, writer, adopted) = open_both(&service, &at, &connection, 1);
        let absent = Arc::new(Absent::new());
        let comes = Comes(Arc::clone(&absent), &at);
        let locks = lock_and_kill(&service, &absent, writer, || write(&connection, adopted, 1, &[2]).length == 1);
        kill_process(guard, Signal::CONT).expect("alive");
        let (tell, told) = std::sync::mpsc::channel();
        let other = at.join("other");
        std::thread::spawn(move || tell.send(fs::metadata(other).map(drop).map_err(|error| error.raw_os_error())));
        // The kernel keeps the thread with the device meanwhile. What it has asked for already is aborted.
        let told = told.recv_timeout(Duration::from_secs(60));
        assert!(matches!(told, Ok(Err(Some(libc::ENOTCONN | libc::ECONNABORTED)))), "{told:?}");
        assert!(keeps(&service, "locked-one"));
        drop(comes);
        assert_eq!(locks.join().expect("no panic"), -1, "what began to be written then is not taken");
        let _ = service.wait();
    });
}
