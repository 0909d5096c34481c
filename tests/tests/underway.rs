//! Commands on a pool while another command mounts something whose branch takes long to examine: they do not wait for it, and know of it.

use poolfs_tests::{Outcome, Pool, import_small, isolated, run_within};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// The longest that a command takes which waits for nobody: a machine may be busy. The kernel lets who waits for a lease go on after 45 s.
const COMMAND_MAX: Duration = Duration::from_secs(40);
/// Holds leases on files until its input ends: who opens one of them waits for that. Says when somebody waits for each.
const LEASE: &str = "import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
files = [os.open(path, os.O_RDWR) for path in sys.argv[1:]]
for file in files: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print('held', flush=True)
while any(fcntl.fcntl(file, fcntl.F_GETLEASE) == fcntl.F_WRLCK for file in files): time.sleep(0.002)
print('wanted', flush=True)
sys.stdin.read()";

/// Files that nobody else opens until this is dropped.
struct Lease {
    holder: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Lease {
    fn take(paths: &[PathBuf]) -> Self {
        let mut command = Command::new("python3");
        command.args(["-c", LEASE]).args(paths).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut holder = command.spawn().expect("python3 starts");
        let (input, output) = (holder.stdin.take(), BufReader::new(holder.stdout.take().expect("piped")));
        let mut lease = Self { holder, input, output };
        lease.await_line("held");
        lease
    }

    fn await_line(&mut self, wanted: &str) {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("readable");
        assert_eq!(line.trim(), wanted);
    }

    /// Waits until somebody waits for each of the files.
    fn await_opener(&mut self) {
        self.await_line("wanted");
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.holder.wait();
    }
}

/// A pool, and a union whose upper branch has been mounted before: a mount of it begins with a file that can be leased.
fn pool(folder: &Path) -> Pool {
    for name in ["mnt", "upper", "lower", "data", "more", "third"] {
        fs::create_dir(folder.join(name)).expect("a folder");
    }
    let pool = Pool::create(folder, "16M");
    let _ = poolfs(&pool, UNION).expect("mount");
    fs::write(folder.join("mnt/f"), "in it").expect("written");
    let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
    pool
}

const UNION: &str = "mount POOL @mnt --upper @upper --lower @lower";

fn lease(folder: &Path) -> Lease {
    Lease::take(&[folder.join("upper/.poolfs/format")])
}

fn poolfs(pool: &Pool, line: &str) -> Outcome {
    run_within(&mut pool.line(line), COMMAND_MAX)
}

fn begin(pool: &Pool, line: &str) -> Child {
    pool.line(line).stderr(Stdio::piped()).spawn().expect("poolfs starts")
}

fn signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).expect("a number")).expect("a number");
    kill_process(pid, signal).expect("ours");
}

fn mounted(pool: &Pool) -> String {
    let all = poolfs(pool, "pool inspect POOL").expect("inspect");
    let lines = all.lines().filter(|line| line.starts_with("mount"));
    lines
        .map(|line| format!("{} {}\n", line.split(' ').next().unwrap_or(""), line.rsplit('/').next().unwrap_or("")))
        .collect()
}

#[test]
fn commands_do_not_wait_for_a_mount_of_their_pool() {
    isolated("commands_do_not_wait_for_a_mount_of_their_pool", |folder| {
        let pool = pool(folder);
        let other = Pool::named(folder, &format!("{}-2", pool.name()), "16M");
        let mut lease = lease(folder);
        let mut mount = begin(&pool, UNION);
        lease.await_opener();
        let _ = poolfs(&pool, "mount POOL @more --dir @data").expect("it has nothing to do with the other mount");
        fs::write(folder.join("more/g"), "beside it").expect("written");
        let _ = poolfs(&pool, "exec POOL --mount at=@third,dir=@data,shared=yes -- cat @third/g").expect("exec");
        assert_eq!(mounted(&pool), "mounting mnt\nmounted more\n");
        let _ = poolfs(&pool, "umount POOL @more").expect("umount");
        // What it is about to mount is known.
        let union = "@more --upper @upper --lower @lower";
        for (pool, line, told) in [
            (&pool, "umount POOL @mnt".to_owned(), format!("process {} is about to mount it", mount.id())),
            (&pool, format!("mount POOL {union}"), "it is the upper branch of what is mounted".to_owned()),
            (&other, format!("mount POOL {union}"), "it is the upper branch of what is mounted".to_owned()),
            (&pool, "pool rm POOL".to_owned(), "it is mounted at".to_owned()),
        ] {
            let outcome = poolfs(pool, &line);
            assert!(outcome.code != 0 && outcome.err.contains(&told), "{line}: {outcome:?}");
        }
        assert!(mount.try_wait().expect("ours").is_none(), "it waits for its branch all the time");
        drop(lease);
        assert!(mount.wait().expect("ours").success());
        assert_eq!(fs::read_to_string(folder.join("mnt/f")).expect("read"), "in it");
        assert_eq!(mounted(&pool), "mounted mnt\n");
        let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
    });
}

#[test]
fn a_mount_that_takes_long_can_be_given_up() {
    isolated("a_mount_that_takes_long_can_be_given_up", |folder| {
        let pool = pool(folder);
        let exec = "exec POOL --mount at=@mnt,upper=@upper,lower=@lower -- true";
        let ways = [(UNION, Signal::TERM), (exec, Signal::TERM), (exec, Signal::KILL)];
        // With and without another mount in the pool, without which its service ends.
        for (time, (line, how)) in ways.into_iter().chain(ways).enumerate() {
            if time == ways.len() {
                let _ = poolfs(&pool, "mount POOL @more --dir @data").expect("mount");
            }
            let others = if time < ways.len() { "" } else { "mounted more\n" };
            let mut lease = lease(folder);
            let mut begun = begin(&pool, line);
            lease.await_opener();
            signal(&begun, how);
            assert!(!begun.wait().expect("ours").success(), "{line}");
            // The next command takes note of it where it was killed.
            let _ = poolfs(&pool, "mount POOL @third --dir @data --shared");
            let _ = poolfs(&pool, "umount POOL @third");
            assert_eq!(mounted(&pool), others, "{line}");
            drop(lease);
            let _ = poolfs(&pool, UNION).expect("mount");
            assert_eq!(fs::read_to_string(folder.join("mnt/f")).expect("read"), "in it");
            let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
        }
        let _ = poolfs(&pool, "umount POOL @more").expect("umount");
    });
}

#[test]
fn the_root_of_an_ended_container_that_takes_long_holds_up_nobody() {
    isolated("the_root_of_an_ended_container_that_takes_long_holds_up_nobody", |folder| {
        let pool = pool(folder);
        import_small(&pool, folder, "small", &[], |_| {});
        let _ = poolfs(&pool, "run POOL small --name c -- /bin/sh -c :").expect("run");
        let upper = folder.join("state/containers/c/upper/.poolfs/format");
        let mut lease = Lease::take(std::slice::from_ref(&upper));
        let mut diff = begin(&pool, "diff POOL c");
        lease.await_opener();
        let _ = poolfs(&pool, "mount POOL @more --dir @data").expect("mount");
        signal(&diff, Signal::KILL);
        diff.wait().expect("ours");
        let _ = poolfs(&pool, "umount POOL @more").expect("umount");
        drop(lease);
        let _ = poolfs(&pool, "diff POOL c").expect("diff");
        let _ = poolfs(&pool, "rm c").expect("rm");
    });
}

#[test]
fn many_commands_mount_in_one_pool_at_the_same_time() {
    isolated("many_commands_mount_in_one_pool_at_the_same_time", |folder| {
        const MANY: usize = 40;
        const AT_ONCE: usize = 16;
        let pool = pool(folder);
        let numbers: Vec<usize> = (0..MANY).collect();
        for number in &numbers {
            for kind in ["at", "up"] {
                fs::create_dir(folder.join(format!("{kind}-{number}"))).expect("a folder");
            }
        }
        let line = |n: &usize| format!("mount POOL @at-{n} --upper @up-{n} --lower @lower");
        let all_done = |numbers: &[usize]| {
            let children: Vec<Child> = numbers.iter().map(|number| begin(&pool, &line(number))).collect();
            for child in children {
                let outcome = child.wait_with_output().expect("ours");
                assert!(outcome.status.success(), "{}", String::from_utf8_lossy(&outcome.stderr));
            }
            assert_eq!(mounted(&pool).lines().count(), numbers.len());
        };
        let unmount = |n: &usize| drop(poolfs(&pool, &format!("umount POOL @at-{n}")).expect("umount"));
        all_done(&numbers);
        numbers.iter().for_each(unmount);
        // So many that take long leave the others out, and the service can be reached.
        let formats = numbers.iter().take(AT_ONCE).map(|n| folder.join(format!("up-{n}/.poolfs/format")));
        let mut lease = Lease::take(&formats.collect::<Vec<_>>());
        let slow: Vec<Child> = numbers.iter().take(AT_ONCE).map(|number| begin(&pool, &line(number))).collect();
        lease.await_opener();
        let outcome = poolfs(&pool, &format!("{} --wait 1", line(&AT_ONCE)));
        assert!(outcome.err.contains("16 commands are about to mount something in it"), "{outcome:?}");
        assert_eq!(pool.status()["state"], "running");
        drop(lease);
        for child in slow {
            assert!(child.wait_with_output().expect("ours").status.success());
        }
        numbers.iter().take(AT_ONCE).for_each(unmount);
    });
}

#[test]
fn who_begins_a_mount_and_is_late_takes_nothing_from_a_pool_of_the_same_name() {
    isolated("who_begins_a_mount_and_is_late_takes_nothing_from_a_pool_of_the_same_name", |folder| {
        let pool = pool(folder);
        // The second instance of the pool.
        let mut lease = lease(folder);
        let mut late = begin(&pool, UNION);
        lease.await_opener();
        signal(&late, Signal::STOP);
        pool.kill_service();
        drop(lease);
        let _ = poolfs(&pool, "pool rm POOL").expect("pool rm");
        let _ = poolfs(&pool, "pool create POOL --cpus 0-1 --memory 2G --cache 16M").expect("pool create");
        let _ = poolfs(&pool, "mount POOL @more --dir @data").expect("mount");
        let _ = poolfs(&pool, "mount POOL @third --dir @data --shared").expect("mount");
        let held = fs::File::create(folder.join("third/held")).expect("created");
        signal(&late, Signal::CONT);
        assert!(!late.wait().expect("ours").success());
        assert_eq!(mounted(&pool), "mounted more\nmounted third\n");
        fs::write(folder.join("third/f"), "still").expect("it is mounted");
        drop(held);
        for place in ["@third", "@more"] {
            let _ = poolfs(&pool, &format!("umount POOL {place}")).expect("umount");
        }
        let _ = poolfs(&pool, UNION).expect("its branch is free");
        let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
    });
}

#[test]
fn a_service_that_dies_while_something_is_mounted_ends_that_mount() {
    isolated("a_service_that_dies_while_something_is_mounted_ends_that_mount", |folder| {
        let pool = pool(folder);
        let mut lease = lease(folder);
        let mount = begin(&pool, UNION);
        lease.await_opener();
        pool.kill_service();
        let outcome = mount.wait_with_output().expect("ours");
        let told = String::from_utf8_lossy(&outcome.stderr);
        assert!(!outcome.status.success() && told.contains("it ended before it answered"), "{told}");
        assert_eq!(mounted(&pool), "");
        drop(lease);
        let _ = poolfs(&pool, UNION).expect("mount");
        assert_eq!(fs::read_to_string(folder.join("mnt/f")).expect("read"), "in it");
        let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
    });
}
