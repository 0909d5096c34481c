//! Tests of the threads that read `/dev/fuse`: the first of a mount serves everything by itself, others come where the pool has
//! memory for them, and end.

use crate::harness::{eventually, isolated};
use crate::kernel::{Mounted, kill, killed_in_time, shell};
use poolfs_service::memory::level::State;
use poolfs_service::pool_memory::PoolMemory;
use poolfs_service::shares::{InstanceShares, PoolShares};
use poolfs_service_protocol::Transport;
use rustix::fs::FlockOperation;
use rustix::process::Signal;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

const MEBIBYTE: usize = 1 << 20;
/// Longer than a thread with nothing to do stays.
const PAUSE: Duration = Duration::from_millis(500);

/// What the threads of a mount have come to use.
#[derive(Default)]
struct Used(AtomicU64);

impl PoolMemory for Used {
    fn charge(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::SeqCst);
    }

    fn discharge(&self, bytes: u64) {
        self.0.fetch_sub(bytes, Ordering::SeqCst);
    }
}

/// A pool with so many mounts that one thread is reserved for each, and nobody gets more while memory is short.
struct Crowd {
    shares: PoolShares,
    used: Arc<Used>,
    _others: Vec<Arc<InstanceShares>>,
}

impl Crowd {
    fn new(state: State) -> Self {
        let used = Arc::new(Used::default());
        let shares = PoolShares::new(64 << 20, Some(0), Arc::clone(&used) as Arc<dyn PoolMemory>);
        let others = (0..64).map(|_| shares.join()).collect();
        shares.tighten(state);
        Self { shares, used, _others: others }
    }

    /// How many threads had a message of a MiB since they were last idle. The kernel may have sent a few bytes of it apart.
    fn filled(&self) -> usize {
        (self.used.0.load(Ordering::SeqCst) as usize + MEBIBYTE / 2) / MEBIBYTE
    }

    /// One more mount, unless it has no such threads.
    fn mount(&self, folder: &Path) -> Option<Mounted> {
        let mounted = Mounted::with_shares(folder, &self.shares.join());
        (mounted.instance.status().transport == Transport::DevFuse).then_some(mounted)
    }
}

/// How many threads of this process read the device.
fn readers() -> usize {
    let names = fs::read_dir("/proc/self/task").expect("proc").flatten();
    let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    let is_reader = |name: &String| name.trim().strip_prefix("fuse-").is_some_and(|rest| rest.parse::<u32>().is_ok());
    names.map(name).filter(is_reader).count()
}

fn direct(path: &Path) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).custom_flags(libc::O_DIRECT);
    options.open(path).expect("a file for direct access")
}

/// All that programs do with files, by several of them at once.
fn use_everything(at: &Path) {
    fs::write(at.join("lock"), "").expect("written");
    thread::scope(|scope| {
        for number in 0..8_u8 {
            scope.spawn(move || {
                let lock = File::open(at.join("lock")).expect("there");
                let own = at.join(format!("own-{number}"));
                fs::create_dir(&own).expect("a directory");
                let file = direct(&own.join("file"));
                let bytes = vec![number; MEBIBYTE];
                for round in 0..4 {
                    file.write_all_at(&bytes, round * MEBIBYTE as u64).expect("written");
                    file.sync_all().expect("synced");
                    rustix::fs::flock(&lock, FlockOperation::LockExclusive).expect("locked");
                    fs::write(at.join("shared"), [number]).expect("written");
                    fs::rename(at.join("shared"), own.join("shared")).expect("renamed");
                    rustix::fs::flock(&lock, FlockOperation::Unlock).expect("unlocked");
                    fs::hard_link(own.join("file"), own.join("link")).expect("linked");
                    assert_eq!(fs::read_dir(&own).expect("listed").count(), 3);
                    fs::remove_file(own.join("link")).expect("removed");
                    assert!(fs::read(own.join("file")).expect("read").iter().all(|&byte| byte == number));
                }
                rustix::fs::fcntl_lock(&file, FlockOperation::LockExclusive).expect("locked");
                fs::remove_dir_all(&own).expect("removed");
            });
        }
    });
}

#[test]
fn the_first_thread_of_a_mount_serves_everything() {
    isolated("transfers::the_first_thread_of_a_mount_serves_everything", |folder| {
        let crowd = Crowd::new(State::Short);
        let Some(mounted) = crowd.mount(folder) else { return };
        use_everything(&mounted.at);
        assert_eq!(readers(), 1);
    });
}

#[test]
fn callers_of_an_only_thread_can_be_killed_and_another_one_comes_when_it_may() {
    isolated("transfers::callers_of_an_only_thread_can_be_killed_and_another_one_comes_when_it_may", |folder| {
        let crowd = Crowd::new(State::Short);
        let Some(mounted) = crowd.mount(folder) else { return };
        let mut child = shell("test -e \"$1\"", &mounted.at.join("wait"));
        mounted.trap.wait_for(1);
        kill(&child, Signal::KILL);
        killed_in_time(&mut child);
        mounted.trap.wait_for(1);
        assert_eq!(readers(), 1);
        crowd.shares.tighten(State::Plenty);
        // By nobody but who looks after the one that waits.
        eventually("another thread reads", || readers() == 2);
        let missing = fs::symlink_metadata(mounted.at.join("missing")).expect_err("there is none");
        assert_eq!(missing.raw_os_error(), Some(libc::ENOENT));
        mounted.trap.let_go();
    });
}

#[test]
fn threads_that_are_needed_no_more_end_and_come_again() {
    isolated("transfers::threads_that_are_needed_no_more_end_and_come_again", |folder| {
        let crowd = Crowd::new(State::Plenty);
        let Some(mounted) = crowd.mount(folder) else { return };
        let files: Vec<_> = (0..8).map(|number| direct(&mounted.at.join(number.to_string()))).collect();
        let bytes = vec![1; MEBIBYTE];
        for round in 0..3 {
            let mut unfilled = 0;
            eventually("several threads have long messages", || {
                thread::scope(|scope| {
                    for file in &files {
                        scope.spawn(|| (0..8).for_each(|_| file.write_all_at(&bytes, 0).expect("written")));
                    }
                });
                let filled = crowd.filled();
                // One that only ever had short ones stays while the pool has many more to give.
                unfilled = readers().saturating_sub(filled);
                filled >= 3
            });
            // Whoever waited for a message that another one got first waits for the next; the kernel asks for each name once.
            let mut names = 0..;
            eventually("they end", || {
                let missing = format!("missing-{round}-{:?}", names.next());
                fs::symlink_metadata(mounted.at.join(missing)).expect_err("there is none");
                thread::sleep(PAUSE);
                crowd.filled() == 0 && readers() <= 2 + unfilled
            });
            println!("round {round}: {} left", readers());
        }
        use_everything(&mounted.at);
    });
}
