//! Tests of stolen sessions: used by a process that gave up the rights they were made with, behind the library's back, and by
//! processes that got their memory or socket from such a process.
//!
//! The thieves are processes of root that become user 1000, each in its own way, and then ask for what only root may see.

use crate::bare::{Bare, bare_session, eventually, raw_socket};
use crate::harness::{Running, isolated};
use poolfs_ipc::Connection;
use poolfs_ipc::area::{BufferArea, DATA_BYTES, buffers_length, queue, queue_length};
use poolfs_ipc::futex;
use poolfs_ipc::handshake::{receive_welcome, send_hello};
use poolfs_ipc::memory::Mapping;
use poolfs_ipc::queue::{Doorbell, DoorbellQueue};
use poolfs_ipc::state::CallerState;
use poolfs_ipc::wire::{Operation, Request, Status};
use std::ffi::CString;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Barrier;
use std::time::{Duration, Instant};

const NAME: &str = "stolen::a_session_is_no_use_to_anybody_else";

/// What thieves are told by the environment: their kind, and where the socket is.
const THIEF: &str = "POOLFS_STOLEN_THIEF";
const SOCKET: &str = "POOLFS_STOLEN_SOCKET";

/// How they become somebody else ...
const CHANGES: [&str; 6] = ["user", "user-keeping-capabilities", "group", "groups", "capabilities", "users-namespace"];
/// ... how one of their threads does, which has a number of others beside it ...
const THREADS: [(&str, usize); 6] = [
    ("thread-user", 0),
    ("thread-group", 0),
    ("thread-capabilities", 0),
    ("thread-mounts", 0),
    ("thread-root", 0),
    // More than one look covers.
    ("thread-user-among-many", 300),
];
/// ... and how somebody else gets the session.
const HEIRS: [&str; 3] = ["child-of-changed", "child-of-dead", "greeting-child"];

/// A directory only user 2000 may look into, or who may override that.
const LINK: &str = "closed/link";
const TARGET: &str = "what-only-the-owner-may-see";

/// Most groups of a client with a session.
const GROUPS_MAX: usize = 256;

/// Longest until a session is known to be over.
const END_MAX: Duration = Duration::from_secs(20);

/// By the kernel's numbers, of which the library knows nothing here.
pub fn system_call(number: libc::c_long, arguments: [usize; 3]) {
    // SAFETY: ids, lists and structures that outlive the call, as the callers pass them.
    let result = unsafe { libc::syscall(number, arguments[0], arguments[1], arguments[2]) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

fn set_capabilities(effective: u32, permitted: u32) {
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0];
    let data = [effective, permitted, 0, 0, 0, 0];
    system_call(libc::SYS_capset, [header.as_ptr() as usize, data.as_ptr() as usize, 0]);
}

/// Both capabilities that let root look everywhere: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH.
const LOOKING: u32 = 1 << 1 | 1 << 2;

fn become_another(kind: &str) {
    match kind {
        "user" => system_call(libc::SYS_setresuid, [1000; 3]),
        "user-keeping-capabilities" => {
            system_call(libc::SYS_prctl, [libc::PR_SET_KEEPCAPS as usize, 1, 0]);
            system_call(libc::SYS_setresuid, [1000; 3]);
            set_capabilities(LOOKING, LOOKING);
        }
        "group" => system_call(libc::SYS_setresgid, [1000; 3]),
        "groups" => system_call(libc::SYS_setgroups, [1, [1000u32].as_ptr() as usize, 0]),
        "capabilities" => set_capabilities(0, 0),
        // With all capabilities there, and none here.
        "users-namespace" => system_call(libc::SYS_unshare, [libc::CLONE_NEWUSER as usize, 0, 0]),
        other => panic!("no such change: {other}"),
    }
}

/// Whether the target of the link is told to who asks for it.
fn is_told(bare: &Bare) -> bool {
    ask(bare) == Some((Status::Done as u32, TARGET.as_bytes().to_vec()))
}

/// Asks for the target of the link: the status, and what came with it; nothing when there is no answer.
fn ask(bare: &Bare) -> Option<(u32, Vec<u8>)> {
    let area = BufferArea::new(&bare.buffers, 0, DATA_BYTES);
    let request =
        Request { operation: Operation::ReadLink as u32, path_length: LINK.len() as u32, ..Request::default() };
    area.put_data(0, LINK.as_bytes()).expect("room");
    area.put_request(&request);
    let state = CallerState::new(area.state());
    let borrowed = state.borrow()?;
    let submitted = state.submit(borrowed);
    let give_up = Instant::now() + Duration::from_secs(2);
    let words = queue(&bare.queues[0], bare.welcome.queue_slots as usize);
    while !state.is_done(submitted) {
        if Instant::now() > give_up {
            return None;
        }
        let doorbell = Doorbell { session: bare.welcome.session, buffer: 0, again: false };
        if words.publish(doorbell) == Ok(true) {
            futex::wake_one(words.ring());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let reply = area.get_reply();
    state.give_back(submitted);
    let mut text = vec![0; TARGET.len()];
    area.get_data(0, &mut text).expect("in bounds");
    Some((reply.status, text))
}

fn is_over_in_time(bare: &Bare) {
    let start = Instant::now();
    while is_told(bare) {
        assert!(start.elapsed() < END_MAX, "it still acts as who it was");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The same session in a process that did not inherit its mappings.
fn mapped_again(bare: Bare) -> Bare {
    let Bare { socket, welcome, buffers, queues, files } = bare;
    // Here nothing is mapped at their addresses.
    let _ = (std::mem::ManuallyDrop::new(buffers), std::mem::ManuallyDrop::new(queues));
    let buffers =
        Mapping::of_sealed(&files[0], buffers_length(welcome.buffers as usize, DATA_BYTES), true).expect("buffers");
    let length = queue_length(welcome.queue_slots as usize);
    let queues = files[1..1 + welcome.queues as usize]
        .iter()
        .map(|file| Mapping::of_sealed(file, length, true).expect("queue"))
        .collect();
    Bare { socket, welcome, buffers, queues, files }
}

/// Runs `work`, which must not fail, in a forked child. Its one thread is its first, by which the service knows a process.
pub fn forked(work: impl FnOnce()) -> libc::pid_t {
    // SAFETY: the other thread of this process waits for the one that forks, and holds no lock.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err();
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(failed)) };
    }
    child
}

/// The same in a child that has become user 1000.
fn in_child(steal: impl FnOnce()) -> libc::pid_t {
    forked(|| {
        become_another("user");
        steal();
    })
}

/// A child that has the descriptors of its parent, which then ends.
fn inherit_from_dead(socket: &Path) {
    system_call(libc::SYS_prctl, [libc::PR_SET_CHILD_SUBREAPER as usize, 1, 0]);
    let parent = forked(|| {
        let bare = bare_session(socket);
        assert!(is_told(&bare), "root sees it");
        in_child(|| is_over_in_time(&mapped_again(bare)));
    });
    ended_well(parent);
    ended_well(-1);
}

pub fn ended_well(child: libc::pid_t) {
    let mut status = 0;
    // SAFETY: `status` is valid for the call, and the child is ours.
    assert!(unsafe { libc::waitpid(child, &raw mut status, 0) } > 0, "no child");
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the child got what it must not: {status}");
}

fn play(kind: &str, socket: &Path) {
    if kind == "greeting-child" {
        // Connected by root, greeted by another; or by this process as another.
        let connected = raw_socket(socket);
        ended_well(in_child(|| assert!(!is_greeted(&connected), "root's session for a child")));
        let connected = raw_socket(socket);
        become_another("user");
        return assert!(!is_greeted(&connected), "root's session for who is no longer root");
    }
    if kind == "child-of-dead" {
        return inherit_from_dead(socket);
    }
    let bare = bare_session(socket);
    assert!(is_told(&bare), "root sees it");
    match kind {
        "child-of-changed" => {
            become_another("user");
            // Now other processes of the user may take its descriptors (pidfd_getfd) and look into it.
            system_call(libc::SYS_prctl, [libc::PR_SET_DUMPABLE as usize, 1, 0]);
            ended_well(in_child(|| is_over_in_time(&mapped_again(bare))));
        }
        thread if thread.starts_with("thread-") => {
            let others = THREADS.iter().find(|(name, _)| *name == thread).map_or(0, |(_, others)| *others);
            change_thread(thread, others, &bare);
        }
        change => {
            become_another(change);
            is_over_in_time(&bare);
            let (status, _) = ask(&bare).expect("an answer");
            assert_eq!(status, Status::Ended as u32);
        }
    }
}

/// One thread becomes another, or sees something else, and the first stays who it was.
fn change_thread(kind: &str, others: usize, bare: &Bare) {
    let (leave, left) = (Barrier::new(others + 2), Barrier::new(2));
    std::thread::scope(|scope| {
        (0..others).for_each(|_| {
            let waits = std::thread::Builder::new().stack_size(64 << 10).spawn_scoped(scope, || leave.wait());
            waits.expect("a thread");
        });
        scope.spawn(|| {
            match kind.trim_start_matches("thread-").trim_end_matches("-among-many") {
                "mounts" => system_call(libc::SYS_unshare, [libc::CLONE_NEWNS as usize, 0, 0]),
                "root" => {
                    system_call(libc::SYS_unshare, [libc::CLONE_FS as usize, 0, 0]);
                    system_call(libc::SYS_chroot, [c"/proc".as_ptr() as usize, 0, 0]);
                }
                change => become_another(change),
            }
            left.wait();
            leave.wait();
        });
        left.wait();
        let over = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| is_over_in_time(bare)));
        // Whatever comes of it, the others may go.
        leave.wait();
        assert!(over.is_ok(), "{kind}");
    });
}

fn is_greeted(socket: &impl AsFd) -> bool {
    send_hello(socket.as_fd()).and_then(|()| receive_welcome(socket.as_fd(), |_, _| {})).is_ok()
}

#[test]
fn a_session_is_no_use_to_anybody_else() {
    if let Some(kind) = std::env::var_os(THIEF) {
        let socket = std::env::var_os(SOCKET).expect("told");
        return ended_well(forked(|| play(kind.to_str().expect("a kind"), Path::new(&socket))));
    }
    isolated(NAME, |folder| {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).expect("ours");
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let closed = at.join("closed");
        fs::create_dir(&closed).expect("made");
        symlink(TARGET, closed.join("link")).expect("made");
        chown(&closed, Some(2000), Some(2000)).expect("root may");
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).expect("root may");
        let start = |kind: &&'static str| -> (&'static str, Child) {
            let mut command = Command::new(std::env::current_exe().expect("the test's own path"));
            command.args(["--exact", NAME, "--nocapture", "--test-threads", "1"]).env(THIEF, kind);
            (kind, command.env(SOCKET, folder.join("run/one.sock")).spawn().expect("a thief"))
        };
        let threads = THREADS.iter().map(|(kind, _)| kind);
        let thieves: Vec<_> = CHANGES.iter().chain(threads).chain(&HEIRS).map(start).collect();
        for (kind, mut thief) in thieves {
            assert!(thief.wait().expect("ours").success(), "\"{kind}\" still had its session");
        }
        eventually("no session is left", || service.status().instances[0].sessions == 0);
    });
}

#[test]
fn who_has_too_many_groups_has_no_session() {
    isolated("stolen::who_has_too_many_groups_has_no_session", |folder| {
        let service = Running::start(folder);
        service.mount_directory("one");
        let socket = folder.join("run/one.sock");
        let socket = CString::new(socket.to_str().expect("text")).expect("no NUL");
        let is_let_in = |groups: u32| {
            let groups: Vec<u32> = (0..groups).collect();
            ended_well(forked(|| {
                system_call(libc::SYS_setgroups, [groups.len(), groups.as_ptr() as usize, 0]);
                let has_session = Connection::open(&socket).is_ok();
                assert_eq!(has_session, groups.len() <= GROUPS_MAX, "{} groups", groups.len());
            }));
        };
        [1, GROUPS_MAX as u32, GROUPS_MAX as u32 + 1, 1 << 16].into_iter().for_each(is_let_in);
        let refused = &service.status().instances[0].sessions_refused;
        assert_eq!(refused.get("E2BIG"), Some(&2), "{refused:?}");
    });
}
