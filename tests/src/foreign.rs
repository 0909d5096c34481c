//! A foreign filesystem that can be made unresponsive: fuse-overlayfs, whose process is stopped.

use crate::wait_until;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A filesystem by FUSE, of a process that can be stopped.
pub struct Foreign {
    process: Child,
    at: PathBuf,
}

impl Foreign {
    /// One in `folder`, at `foreign`, whose files are in `foreign-upper`.
    ///
    /// # Panics
    /// When it is not mounted.
    #[must_use]
    pub fn mount(folder: &Path) -> Self {
        let [at, lower, upper, work] = ["foreign", "foreign-lower", "foreign-upper", "foreign-work"].map(|name| {
            let path = folder.join(name);
            fs::create_dir_all(&path).expect("a folder");
            path
        });
        let options = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
        let mut command = Command::new("fuse-overlayfs");
        command.args(["-f", "-o", &options]).arg(&at).stdout(Stdio::null()).stderr(Stdio::null());
        let foreign = Self { process: command.spawn().expect("fuse-overlayfs starts"), at };
        wait_until("it is mounted", || is_mounted(&foreign.at));
        foreign
    }

    /// Makes an upper branch in it, at `foreign/upper`, as one that was copied there from elsewhere: a new one is refused, as fuse-overlayfs
    /// keeps no marks of a union.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn make_upper(&self) {
        let work = self.at.join("upper/.poolfs");
        fs::create_dir_all(&work).expect("folders");
        fs::write(work.join("format"), "poolfs-union 1\n").expect("written");
    }

    /// The process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// From here on it answers nothing.
    ///
    /// # Panics
    /// When it has ended.
    pub fn stop(&self) {
        self.stop_at_once();
        let is_stopped = |task: &Path| {
            let stat = fs::read_to_string(task.join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with('T'))
        };
        let tasks = || fs::read_dir(format!("/proc/{}/task", self.process.id())).expect("it lives").flatten();
        wait_until("it is stopped", || tasks().all(|task| is_stopped(&task.path())));
    }

    /// The same, without waiting until none of its threads answers any more.
    pub fn stop_at_once(&self) {
        self.signal(Signal::STOP);
    }

    /// It goes on.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
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

/// Whether something is mounted there.
///
/// # Panics
/// When the mount table cannot be read.
#[must_use]
pub fn is_mounted(at: &Path) -> bool {
    fs::read_to_string("/proc/self/mounts").expect("readable").contains(&format!(" {} ", at.display()))
}
