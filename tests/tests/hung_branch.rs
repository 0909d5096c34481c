//! A branch whose filesystem does not answer any more: whoever has nothing to do with it goes on, and it can be given up.

use poolfs_tests::{Outcome, Pool, isolated, run_within, wait_until};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Longest that a command takes which waits for nobody but as long as its limit says: a machine may be busy.
const COMMAND_MAX: Duration = Duration::from_secs(120);

/// A filesystem by FUSE, of a process that can be stopped.
struct Foreign {
    process: Child,
    at: PathBuf,
}

impl Foreign {
    fn mount(folder: &Path) -> Self {
        let [at, lower, upper, work] = ["foreign", "foreign-lower", "foreign-upper", "foreign-work"].map(|name| {
            let path = folder.join(name);
            fs::create_dir(&path).expect("a folder");
            path
        });
        let options = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
        let mut command = Command::new("fuse-overlayfs");
        command.args(["-f", "-o", &options]).arg(&at).stdout(Stdio::null()).stderr(Stdio::null());
        let foreign = Self { process: command.spawn().expect("fuse-overlayfs starts"), at };
        wait_until("it is mounted", || is_mounted(&foreign.at));
        foreign
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.process.id()).expect("a number")).expect("a number");
        kill_process(pid, signal).expect("ours");
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        self.signal(Signal::CONT);
        let _ = Command::new("umount").arg("-l").arg(&self.at).status();
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn poolfs(pool: &Pool, line: &str) -> Outcome {
    run_within(&mut pool.line(line), COMMAND_MAX)
}

/// A foreign filesystem, a pool, and what to mount.
fn places(folder: &Path) -> (Foreign, Pool) {
    let foreign = Foreign::mount(folder);
    for name in ["mnt", "lower", "data", "more", "foreign/upper"] {
        fs::create_dir(folder.join(name)).expect("a folder");
    }
    (foreign, Pool::create(folder, "16M"))
}

/// The same with a mount over a branch of that filesystem, which does not answer any more, with something that was written.
fn hung(folder: &Path) -> (Foreign, Pool) {
    let (foreign, pool) = places(folder);
    let _ = poolfs(&pool, "mount POOL @mnt --upper @foreign/upper --lower @lower").expect("mount");
    let mut file = fs::File::create(folder.join("mnt/f")).expect("made");
    file.write_all(&[7]).expect("written");
    foreign.signal(Signal::STOP);
    // Nothing of this is below, however long it takes until somebody looks.
    file.write_all(&vec![7; (1 << 20) - 1]).expect("written");
    (foreign, pool)
}

fn is_mounted(at: &Path) -> bool {
    fs::read_to_string("/proc/self/mounts").expect("readable").contains(&format!(" {} ", at.display()))
}

/// A command to the service itself, and the connection on which it answers.
fn send(pool: &Pool, command: &str) -> UnixStream {
    let mut stream = UnixStream::connect(format!("/run/poolfs/{}.control", pool.name())).expect("it listens");
    stream.set_read_timeout(Some(COMMAND_MAX)).expect("set");
    // One connection too many is closed at once.
    let _ = writeln!(stream, "{command}");
    stream
}

/// How many threads of the service have this name and are in this system call, or in any.
fn threads(service: i32, name: &str, call: Option<i64>) -> usize {
    let tasks = fs::read_dir(format!("/proc/{service}/task")).expect("it lives").flatten();
    let told = |task: &fs::DirEntry, what: &str| fs::read_to_string(task.path().join(what)).unwrap_or_default();
    let is_in = |task: &fs::DirEntry, call: i64| told(task, "syscall").split(' ').next() == Some(&call.to_string());
    let fits = |task: &fs::DirEntry| told(task, "comm").trim_end() == name && call.is_none_or(|call| is_in(task, call));
    tasks.filter(fits).count()
}

fn answer(stream: UnixStream) -> String {
    let mut line = String::new();
    let _ = BufReader::new(stream).read_line(&mut line);
    line
}

/// The first instance of a pool.
fn instance(pool: &Pool) -> String {
    let status = pool.status();
    status["service"]["instances"][0]["instance"].as_str().unwrap_or_else(|| panic!("{status}")).to_owned()
}

#[test]
fn a_branch_that_does_not_answer_holds_up_nobody_else_and_can_be_given_up() {
    isolated("a_branch_that_does_not_answer_holds_up_nobody_else_and_can_be_given_up", |folder| {
        let foreign = Foreign::mount(folder);
        for name in ["mnt", "lower", "data", "more", "third", "rest", "foreign/upper"] {
            fs::create_dir(folder.join(name)).expect("a folder");
        }
        let pool = Pool::create(folder, "16M");
        let _ = poolfs(&pool, "mount POOL @mnt --upper @foreign/upper --lower @lower").expect("mount");
        let _ = poolfs(&pool, "mount POOL @more --dir @data").expect("mount");
        let _ = poolfs(&pool, "mount POOL @third --dir @rest").expect("mount");
        fs::write(folder.join("more/g"), vec![8; 1 << 20]).expect("written");
        let mut file = fs::File::create(folder.join("mnt/f")).expect("made");
        file.write_all(&[7]).expect("written");
        foreign.signal(Signal::STOP);
        file.write_all(&vec![7; (1 << 20) - 1]).expect("written");
        drop(file);
        let mut waiting = pool.line("umount POOL @mnt").stderr(Stdio::null()).spawn().expect("poolfs starts");
        let _ = poolfs(&pool, "umount POOL @more").expect("it is another one's branch");
        assert_eq!(fs::read(folder.join("data/g")).expect("flushed"), vec![8; 1 << 20]);
        let _ = poolfs(&pool, "exec POOL -- true").expect("exec");
        assert!(waiting.try_wait().expect("ours").is_none(), "its branch does not answer");
        let forced = poolfs(&pool, "umount POOL @mnt --force --timeout 2");
        assert!(forced.code == 0 && forced.err.contains("unmounted all the same"), "{forced:?}");
        assert!(!fs::read_to_string("/proc/self/mounts").expect("readable").contains("/mnt "));
        let _ = poolfs(&pool, "exec POOL -- true").expect("exec");
        foreign.signal(Signal::CONT);
        waiting.wait().expect("ours");
        let _ = poolfs(&pool, "umount POOL @third").expect("umount");
    });
}

#[test]
fn a_mount_that_was_taken_away_and_whose_branch_does_not_answer_holds_up_nobody() {
    isolated("a_mount_that_was_taken_away_and_whose_branch_does_not_answer_holds_up_nobody", |folder| {
        let (foreign, pool) = hung(folder);
        // The program would look at the root first.
        unmount(folder.join("mnt"), UnmountFlags::empty()).expect("unmounted");
        let _ = poolfs(&pool, "mount POOL @more --dir @data").expect("mount");
        let _ = poolfs(&pool, "umount POOL @more").expect("umount");
        let _ = poolfs(&pool, "status POOL").expect("status");
        foreign.signal(Signal::CONT);
        // Nothing is lost: it ends when its branch has taken what was written.
        let mut again = || poolfs(&pool, "mount POOL @mnt --upper @foreign/upper --lower @lower").code == 0;
        wait_until("its branch is free", &mut again);
        assert_eq!(fs::read(folder.join("foreign-upper/upper/f")).expect("flushed"), vec![7; 1 << 20]);
        let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
    });
}

#[test]
fn the_last_mount_of_a_pool_can_be_given_up_and_its_service_ends() {
    isolated("the_last_mount_of_a_pool_can_be_given_up_and_its_service_ends", |folder| {
        let (_foreign, pool) = hung(folder);
        let service = pool.service_pid();
        let forced = poolfs(&pool, "umount POOL @mnt --force --timeout 2");
        assert!(forced.code == 0 && forced.err.contains("unmounted all the same"), "{forced:?}");
        assert!(!is_mounted(&folder.join("mnt")) && !Path::new(&format!("/proc/{service}")).exists());
        let _ = poolfs(&pool, "mount POOL @more --dir @data").expect("another service");
        let _ = poolfs(&pool, "umount POOL @more").expect("umount");
    });
}

#[test]
fn what_is_thrown_away_waits_for_no_branch() {
    isolated("what_is_thrown_away_waits_for_no_branch", |folder| {
        let (_foreign, pool) = hung(folder);
        let command = format!(r#"{{"command":"unmount","instance":"{}","ending":"discarded"}}"#, instance(&pool));
        let answer = answer(send(&pool, &command));
        assert!(answer.contains("done"), "{answer}");
        assert!(!is_mounted(&folder.join("mnt")));
        let _ = poolfs(&pool, "mount POOL @more --dir @data").expect("mount");
        let _ = poolfs(&pool, "umount POOL @more").expect("umount");
    });
}

#[test]
fn an_unmount_in_order_gives_up_before_long_and_leaves_everything() {
    isolated("an_unmount_in_order_gives_up_before_long_and_leaves_everything", |folder| {
        let (foreign, pool) = hung(folder);
        // As by whoever has flushed before, and has the pool's lock now.
        let command = format!(r#"{{"command":"unmount","instance":"{}","ending":"orderly"}}"#, instance(&pool));
        let answer = answer(send(&pool, &command));
        assert!(answer.contains("its branch does not answer") && answer.contains("the mount stays"), "{answer}");
        assert!(is_mounted(&folder.join("mnt")));
        foreign.signal(Signal::CONT);
        let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
        assert_eq!(fs::read(folder.join("foreign-upper/upper/f")).expect("flushed"), vec![7; 1 << 20]);
    });
}

#[test]
fn flushes_that_nobody_waits_for_any_more_keep_no_connections() {
    isolated("flushes_that_nobody_waits_for_any_more_keep_no_connections", |folder| {
        let (foreign, pool) = hung(folder);
        let service = pool.service_pid();
        let command = format!(r#"{{"command":"flush","instance":"{}"}}"#, instance(&pool));
        // All that a service has.
        let waiting: Vec<_> = (0..32).map(|_| send(&pool, &command)).collect();
        wait_until("they wait", || threads(service, "control", Some(libc::SYS_futex)) >= 30);
        drop(waiting);
        wait_until("there are connections", || answer(send(&pool, r#"{"command":"ping"}"#)).contains("done"));
        foreign.signal(Signal::CONT);
        let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
    });
}

#[test]
fn a_command_that_is_interrupted_while_its_mount_is_flushed_leaves_that_to_the_user() {
    isolated("a_command_that_is_interrupted_while_its_mount_is_flushed_leaves_that_to_the_user", |folder| {
        let (foreign, pool) = places(folder);
        let (at, upper, lower) = (folder.join("mnt"), folder.join("foreign/upper"), folder.join("lower"));
        let spec = format!("at={},upper={},lower={}", at.display(), upper.display(), lower.display());
        let script = format!(
            "exec 3> {}/f; printf x >&3; kill -STOP {}; printf %01048575d 0 >&3",
            at.display(),
            foreign.process.id()
        );
        let mut command = pool.command();
        command.args(["exec", pool.name(), "--mount", &spec, "--", "/bin/sh", "-c", &script]);
        let mut waiting = command.stderr(Stdio::null()).spawn().expect("poolfs starts");
        // It has answered once before its branch is looked at again.
        wait_until("it flushes", || {
            let status = pool.status();
            let pid = status["service"]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
            pid.is_some_and(|pid| threads(pid, "last-flush", None) > 0)
        });
        let pid = Pid::from_raw(i32::try_from(waiting.id()).expect("a number")).expect("a number");
        kill_process(pid, Signal::INT).expect("ours");
        wait_until("it ends", || waiting.try_wait().expect("ours").is_some());
        assert!(is_mounted(&at));
        let _ = poolfs(&pool, "mount POOL @more --dir @data").expect("nobody has the pool's lock");
        foreign.signal(Signal::CONT);
        let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
        assert_eq!(fs::metadata(folder.join("foreign-upper/upper/f")).expect("flushed").len(), 1 << 20);
        let _ = poolfs(&pool, "umount POOL @more").expect("umount");
    });
}
