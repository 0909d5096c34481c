//! A branch whose filesystem does not answer any more: whoever has nothing to do with it goes on, and it can be given up.

use poolfs_tests::{Outcome, Pool, isolated, run_within};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

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
        let end = Instant::now() + COMMAND_MAX;
        while !fs::read_to_string("/proc/self/mounts").expect("readable").contains("fuse-overlayfs") {
            assert!(Instant::now() < end, "it is not mounted");
            std::thread::sleep(Duration::from_millis(5));
        }
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
        fs::write(folder.join("mnt/f"), vec![7; 1 << 20]).expect("written");
        fs::write(folder.join("more/g"), vec![8; 1 << 20]).expect("written");
        foreign.signal(Signal::STOP);
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
