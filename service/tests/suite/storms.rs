//! Hostile storms: malicious clients that access the shared memory directly, all kinds at once, beside others who must not
//! notice.
//!
//! The offenders are processes of an ordinary user, the witnesses are root's. If the offenders are shown a byte of a witness's
//! file, or change one, the test detects it.

mod offenders;
mod witnesses;

use crate::bare::bare_session;
use crate::harness::{Running, isolated, make};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use witnesses::{Witness, witness};

/// What offenders are told by the environment: which kind, and where.
const OFFENDER: &str = "POOLFS_STORM_OFFENDER";
const SOCKET: &str = "POOLFS_STORM_SOCKET";
const PLACE: &str = "POOLFS_STORM_PLACE";

const KINDS: [&str; 8] = ["doorbells", "rubbish", "changing", "scribbler", "silent", "crowd", "appender", "hoarder"];

/// Whether this is a long run, alone on the machine (`make soak`).
fn is_soak() -> bool {
    std::env::var_os("POOLFS_SOAK").is_some()
}

fn time() -> Duration {
    if is_soak() { Duration::from_secs(300) } else { Duration::from_secs(6) }
}

/// The longest that an operation of a witness may take while a neighbour of its own instance storms its queue.
fn wait_max() -> Duration {
    if is_soak() { Duration::from_secs(1) } else { Duration::from_secs(10) }
}

/// Where the instances' files are, and what the service says: disks of their own, so that no forged length fills another, and nobody
/// waits for what others write to a slow one.
fn disk(folder: &Path) {
    let options = c"size=512m,mode=0755";
    make(&folder.join("dir-one"));
    make(&folder.join("dir-two"));
    make(&folder.join("said"));
    for name in ["dir-one", "dir-two", "said"] {
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("storm", folder.join(name), "tmpfs", flags, options).expect("root");
    }
}

fn start(folder: &Path, kind: &str, instance: &str, place: &Path) -> Child {
    let name = "storms::hostile_clients_hurt_nobody_but_themselves";
    Command::new(std::env::current_exe().expect("the test's own path"))
        .args(["--exact", name, "--nocapture", "--test-threads", "1"])
        .env(OFFENDER, kind)
        .env(SOCKET, folder.join(format!("run/{instance}.sock")))
        .env(PLACE, place)
        // A crowd takes what one user can have.
        .uid(if kind == "crowd" { 1001 } else { 1000 })
        .gid(1000)
        .spawn()
        .expect("an offender")
}

/// What a storm must leave as it was.
#[derive(Debug)]
struct Held {
    /// Of files, memory and sockets. Those that only name a file (`O_PATH`) are a bounded cache.
    descriptors: usize,
    kibibytes: u64,
    sessions: u64,
}

fn held(service: &Running) -> Held {
    let descriptors = fs::read_dir(format!("/proc/{}/fdinfo", service.pid())).expect("it lives");
    let descriptors = descriptors.filter(|entry| entry.as_ref().is_ok_and(|entry| !only_names(&entry.path()))).count();
    let status = fs::read_to_string(format!("/proc/{}/status", service.pid())).expect("it lives");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it lives");
    let kibibytes = line.trim().trim_end_matches(" kB").parse().expect("a number");
    let sessions = service.status().instances.iter().map(|instance| instance.sessions).sum();
    Held { descriptors, kibibytes, sessions }
}

/// Whether a descriptor, by its `fdinfo`, only names a file.
fn only_names(descriptor: &Path) -> bool {
    let text = fs::read_to_string(descriptor).unwrap_or_default();
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    flags.is_some_and(|flags| i32::from_str_radix(flags.trim(), 8).is_ok_and(|flags| flags & libc::O_PATH != 0))
}

#[test]
fn hostile_clients_hurt_nobody_but_themselves() {
    if let Some(kind) = std::env::var_os(OFFENDER) {
        return offenders::play(kind.to_str().expect("a kind"), Instant::now() + time());
    }
    isolated("storms::hostile_clients_hurt_nobody_but_themselves", |folder| {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).expect("ours");
        let log = folder.join("said/log");
        disk(folder);
        let service = Running::start_logging(folder, &log);
        let (one, _) = service.mount_directory("one");
        let (two, _) = service.mount_directory("two");
        let place = make(&one.join("open"));
        // As root, who may open what others may not.
        offenders::reopen(&bare_session(&folder.join("run/one.sock")).files);
        fs::set_permissions(&place, fs::Permissions::from_mode(0o777)).expect("ours");

        let stop = std::sync::atomic::AtomicBool::new(false);
        let (calm, after) = std::thread::scope(|scope| {
            let witnesses: Vec<_> = [("one", &one), ("two", &two)]
                .into_iter()
                .flat_map(|(name, at)| [Witness::by_library(folder, name, at), Witness::by_kernel(at)])
                .map(|subject| scope.spawn(|| witness(subject, &stop)))
                .collect();
            let calm = held(&service);
            let end = witnesses::Stop(&stop);
            let mut offenders: Vec<_> = KINDS.iter().map(|kind| (*kind, start(folder, kind, "one", &place))).collect();
            for (kind, offender) in &mut offenders {
                let status = offender.wait().expect("ours");
                assert!(status.success(), "the offender \"{kind}\" saw what must not be");
            }
            let after = settled(&service, &calm);
            drop(end);
            for witness in witnesses {
                let (done, longest) = witness.join().expect("a witness saw what must not be");
                assert!(done > 20, "a witness came to {done} operations");
                assert!(longest < wait_max(), "a witness waited {longest:?}");
                println!("soak: a witness did {done} operations, the longest in {longest:.0?}");
            }
            (calm, after)
        });
        assert_eq!(after.sessions, calm.sessions);
        assert!(after.descriptors <= calm.descriptors + 32, "descriptors are left: {calm:?}, then {after:?}");
        assert!(after.kibibytes <= calm.kibibytes + (96 << 10), "memory is left: {calm:?}, then {after:?}");
        let said = fs::read_to_string(&log).expect("readable");
        assert!(!said.contains("panicked"), "{said}");
    });
}

/// What the service holds when the offenders are gone, as soon as that is what it was before.
fn settled(service: &Running, before: &Held) -> Held {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let now = held(service);
        let is_settled = now.sessions == before.sessions && now.descriptors <= before.descriptors + 32;
        if is_settled || Instant::now() > deadline {
            return now;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
