//! Confinement tests: what a confined process can no longer do, and what it still can.

use poolfs_service::confinement;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

/// Which attempt of [`attempts`] a process started by these tests makes.
const ATTEMPT: &str = "POOLFS_TEST_ATTEMPT";

const SIGSYS: i32 = 31;
/// Which signal a descriptor sends.
const F_SETSIG: libc::c_long = 10;

/// System calls by name: what of a call is looked at are its number and these arguments.
const CALLS: [(&str, libc::c_long, [libc::c_long; 3]); 24] = [
    ("execve", libc::SYS_execve, [0, 0, 0]),
    ("execveat", libc::SYS_execveat, [0, 0, 0]),
    ("ptrace", libc::SYS_ptrace, [libc::PTRACE_TRACEME as libc::c_long, 0, 0]),
    ("process_vm_readv", libc::SYS_process_vm_readv, [1, 0, 0]),
    ("setns", libc::SYS_setns, [0, 0, 0]),
    ("chroot", libc::SYS_chroot, [0, 0, 0]),
    ("bpf", libc::SYS_bpf, [0, 0, 0]),
    ("init_module", libc::SYS_init_module, [0, 0, 0]),
    ("setuid", libc::SYS_setuid, [0, 0, 0]),
    ("clone3", libc::SYS_clone3, [0, 0, 0]),
    ("a process", libc::SYS_clone, [libc::SIGCHLD as libc::c_long, 0, 0]),
    ("a user namespace", libc::SYS_unshare, [libc::CLONE_NEWUSER as libc::c_long, 0, 0]),
    ("a mount namespace", libc::SYS_unshare, [libc::CLONE_NEWNS as libc::c_long, 0, 0]),
    ("a network socket", libc::SYS_socket, [libc::AF_INET as libc::c_long, libc::SOCK_STREAM as libc::c_long, 0]),
    ("a netlink socket", libc::SYS_socket, [libc::AF_NETLINK as libc::c_long, libc::SOCK_RAW as libc::c_long, 0]),
    ("a signal", libc::SYS_kill, [0, 0, 0]),
    ("a signal by a descriptor of a process", libc::SYS_pidfd_send_signal, [-1, 0, 0]),
    ("who gets signals of a descriptor", libc::SYS_fcntl, [0, libc::F_SETOWN as libc::c_long, 0]),
    ("which signal a descriptor sends", libc::SYS_fcntl, [0, F_SETSIG, libc::SIGKILL as libc::c_long]),
    ("a quota", libc::SYS_quotactl, [0, 0, 0]),
    ("a mount", libc::SYS_mount, [0, 0, 0]),
    ("an unmount", libc::SYS_umount2, [0, 0, 0]),
    ("a clone of a mount", libc::SYS_open_tree, [0, 0, 0]),
    ("a mount moved", libc::SYS_move_mount, [0, 0, 0]),
];

fn attempt(name: &str) -> ExitStatus {
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command.args(["--exact", "--ignored", "confinement::attempts"]).env(ATTEMPT, name);
    command.stdout(std::process::Stdio::null()).status().expect("started")
}

/// Not a test, but the process that the tests start.
#[test]
#[ignore = "the tests start it, each with its own attempt"]
fn attempts() {
    let Ok(name) = std::env::var(ATTEMPT) else { panic!("{ATTEMPT} says what to attempt") };
    confinement::enter(None).expect("confined");
    if name == "service" {
        serve();
        std::process::exit(0);
    }
    let (_, call, [first, second, third]) = CALLS.into_iter().find(|(known, ..)| *known == name).expect("a known call");
    // SAFETY: the filter answers before the kernel looks at an argument; unconfined, all of them fail or change this process alone, which ends here.
    let result = unsafe { libc::syscall(call, first, second, third, 0, 0, 0) };
    let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    std::process::exit(if result < 0 { errno } else { 0 });
}

/// What a service does all day, and what of the host it sees.
fn serve() {
    let own = format!("/proc/{}", std::process::id());
    // A path of the host that somebody made the service use: nothing is there.
    for path in
        ["/etc/shadow", "/etc/passwd", "/root", "/dev/null", "/bin/sh", "/tmp", "/var", "/proc/1/root/etc/passwd"]
    {
        let read = std::thread::spawn(move || std::fs::File::open(path)).join().expect("a thread");
        assert!(read.is_err(), "{path}");
    }
    assert!(std::fs::File::open(format!("{own}/root/etc/passwd")).is_err());
    assert!(std::fs::File::create("/file").is_err() && std::fs::create_dir("/directory").is_err());
    let there: Vec<_> = std::fs::read_dir("/").expect("listed").map(|entry| entry.expect("read").file_name()).collect();
    assert!(there.iter().all(|name| name == "proc" || name == "sys"), "{there:?}");
    let own = format!("{own}/task/{}", rustix::thread::gettid().as_raw_nonzero());
    let mounts = std::fs::read_to_string(format!("{own}/mountinfo")).expect("readable");
    assert_eq!(mounts.lines().count(), 3, "{mounts}");
    assert!(std::fs::read_to_string("/sys/devices/system/cpu/possible").is_ok());
    let (one, _other) = std::os::unix::net::UnixStream::pair().expect("sockets");
    one.set_nonblocking(true).expect("set");
    assert!(std::panic::catch_unwind(|| panic!("caught")).is_err());
    let status = std::fs::read_to_string(format!("{own}/status")).expect("readable");
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim).unwrap_or_default();
    assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1", "2"));
    for set in ["CapEff:", "CapPrm:"] {
        let held = u64::from_str_radix(field(set), 16).expect("a set");
        assert_eq!(held & !confinement::kept().bits(), 0, "{set}");
    }
}

#[test]
fn what_only_an_intruder_does_ends_the_process() {
    for (name, ..) in &CALLS[..9] {
        assert_eq!(attempt(name).signal(), Some(SIGSYS), "{name}");
    }
}

#[test]
fn what_the_service_has_no_use_for_is_refused() {
    for (name, ..) in &CALLS[9..] {
        assert_eq!(attempt(name).code(), Some(libc::ENOSYS), "{name}");
    }
}

#[test]
fn what_it_needs_it_has() {
    assert!(attempt("service").success());
}
