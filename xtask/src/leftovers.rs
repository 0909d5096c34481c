//! Detects what a test run leaves on the machine: mounts, processes, control groups, loop devices, IPC segments, files.
//!
//! Others use the machine at the same time, so a run has to recognise its own. It has an identifier, which its processes inherit in their
//! environment and its tests put into the names of their pools, and so of control groups and sockets. Its directory for temporary files has
//! the identifier in its name too, so that mounts and loop devices that lead there have it. And the run has mount and IPC namespaces of its
//! own: what is new there is the run's, whatever its name. The control group above those of all pools is shared by all and does not count.

use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The variable that names the run to everything it starts.
const RUN: &str = "POOLFS_RUN";
/// How long what is new may take to go away: the kernel takes a moment to reap a killed mount namespace.
const SETTLING: Duration = Duration::from_secs(5);
/// Deepest level of control groups that is looked at.
const GROUP_DEPTH: u32 = 6;

/// A run of tests, inside its namespaces.
pub struct Run {
    id: String,
    temporary: PathBuf,
    before: BTreeSet<String>,
}

impl Run {
    /// Begins a run. The first call replaces this process by the same command in namespaces of the run's own.
    ///
    /// # Errors
    /// When namespaces cannot be made, which takes root.
    pub fn begin() -> Result<Run> {
        let Some(id) = std::env::var(RUN).ok().filter(|id| id.bytes().all(|byte| byte.is_ascii_alphanumeric())) else {
            let temporary = temporary_directory(&new_id());
            fs::create_dir(&temporary).with_context(|| format!("cannot make {}", temporary.display()))?;
            let id = temporary.to_string_lossy().rsplit('-').next().unwrap_or_default().to_owned();
            let error = Command::new("unshare")
                .args(["--mount", "--ipc", "--propagation", "private", "--"])
                .arg(std::env::current_exe()?)
                .args(std::env::args_os().skip(1))
                .envs([(RUN, id.as_str().as_ref()), ("TMPDIR", temporary.as_os_str())])
                .exec();
            fs::remove_dir(&temporary)?;
            return Err(error).context("cannot start unshare (package util-linux)");
        };
        let temporary = std::env::temp_dir();
        Ok(Run { id, temporary, before: in_namespaces()? })
    }

    /// Fails, naming it, when something of this run is left. Call it once, at the end.
    pub fn expect_nothing_left(&self) -> Result<()> {
        let deadline = Instant::now() + SETTLING;
        loop {
            let left = self.left(Path::new("/sys/fs/cgroup"), &["/run/poolfs", "/var/lib/poolfs"].map(Path::new))?;
            if left.is_empty() {
                fs::remove_dir(&self.temporary)
                    .with_context(|| format!("cannot remove {}", self.temporary.display()))?;
                println!("nothing was left behind");
                return Ok(());
            }
            if Instant::now() > deadline {
                let list: Vec<String> = left.into_iter().collect();
                bail!("left behind:\n  {}", list.join("\n  "));
            }
            std::thread::park_timeout(Duration::from_millis(200));
        }
    }

    fn left(&self, groups: &Path, places: &[&Path]) -> Result<BTreeSet<String>> {
        let mut found: BTreeSet<String> = in_namespaces()?.difference(&self.before).cloned().collect();
        self.processes(&mut found)?;
        for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
            let backing = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
            if self.names(backing.as_bytes()) {
                found.insert(format!("loop device {} ({})", entry.file_name().to_string_lossy(), backing.trim()));
            }
        }
        self.control_groups(groups, GROUP_DEPTH, &mut found);
        for place in places {
            for entry in fs::read_dir(place).into_iter().flatten().flatten() {
                if self.names(entry.file_name().as_bytes()) {
                    found.insert(format!("file {}", entry.path().display()));
                }
            }
        }
        for entry in fs::read_dir(&self.temporary)? {
            found.insert(format!("temporary file {}", entry?.path().display()));
        }
        Ok(found)
    }

    /// Whether a name is one of this run's.
    fn names(&self, name: &[u8]) -> bool {
        name.windows(self.id.len()).any(|part| part == self.id.as_bytes())
    }

    /// Those that this process has started are in its own group of processes, with its environment: what counts is who else has it. A process whose
    /// environment is another one is found by its control group, which has the name of a pool.
    fn processes(&self, found: &mut BTreeSet<String>) -> Result<()> {
        let mark = format!("{RUN}={}", self.id).into_bytes();
        let own = ancestry()?;
        for entry in fs::read_dir("/proc")?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            // One that is gone between the listing and here was not left behind; one that has ended has neither.
            let read = |file: &str| fs::read(entry.path().join(file)).unwrap_or_default();
            let is_marked = read("environ").split(|&byte| byte == 0).any(|variable| variable == mark);
            if !own.contains(&pid) && (is_marked || self.names(&read("cgroup"))) {
                found.insert(format!("process {pid} ({})", String::from_utf8_lossy(&read("comm")).trim()));
            }
        }
        Ok(())
    }

    fn control_groups(&self, folder: &Path, depth: u32, found: &mut BTreeSet<String>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            if self.names(entry.file_name().as_bytes()) {
                found.insert(format!("control group {}", entry.path().display()));
            }
            if depth > 0 {
                self.control_groups(&entry.path(), depth - 1, found);
            }
        }
    }
}

/// Mounts and shared memory segments of this process's namespaces.
fn in_namespaces() -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for line in fs::read_to_string("/proc/self/mountinfo")?.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let kind = fields.iter().position(|&field| field == "-").and_then(|dash| fields.get(dash + 1));
        found.insert(format!("mount {} ({})", fields.get(4).unwrap_or(&"?"), kind.unwrap_or(&"?")));
    }
    for line in fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default().lines().skip(1) {
        let key_and_id: Vec<&str> = line.split_whitespace().take(2).collect();
        found.insert(format!("shared memory segment {}", key_and_id.join(" ")));
    }
    Ok(found)
}

/// This process and those that started it, which may be of the run, too (`cargo`).
fn ancestry() -> Result<BTreeSet<u32>> {
    let mut found = BTreeSet::new();
    let mut pid = std::process::id();
    while pid > 1 && found.insert(pid) {
        let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else { break };
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        pid = parent.context("a process has a parent")?.trim().parse()?;
    }
    Ok(found)
}

fn temporary_directory(id: &str) -> PathBuf {
    std::env::temp_dir().join(format!("poolfs-run-{id}"))
}

/// Eight letters that no other run on this machine has, nor anything else a reason to have in its name.
fn new_id() -> String {
    let nanoseconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
    let mut number = nanoseconds ^ (u64::from(std::process::id()) << 32);
    let letter = |_| {
        let letter = b'a' + (number % 26) as u8;
        number /= 26;
        char::from(letter)
    };
    (0..8).map(letter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OTHER: &str = "somebody";

    /// A run with directories in place of the machine's.
    fn run_in(folder: &Path) -> Run {
        let temporary = folder.join("tmp");
        fs::create_dir_all(&temporary).expect("made");
        Run { id: new_id(), temporary, before: in_namespaces().expect("readable") }
    }

    struct Folder(PathBuf);

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).expect("removable");
        }
    }

    fn folder(name: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("poolfs-leftovers-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("made");
        Folder(folder)
    }

    #[test]
    fn groups_sockets_and_temporary_files_of_others_do_not_count() {
        let folder = folder("names");
        let run = run_in(&folder.0);
        let (groups, sockets) = (folder.0.join("cgroup"), folder.0.join("run"));
        let make = |id: &str| {
            let pool = groups.join(format!("memory/poolfs/poolfs-test-{id}-Xy1/containers/c1"));
            fs::create_dir_all(&pool).expect("made");
            fs::create_dir_all(&sockets).expect("made");
            fs::write(sockets.join(format!("poolfs-test-{id}-Xy1.sock")), "").expect("written");
            fs::write(folder.0.join(format!("poolfs-test-{id}")), "").expect("written");
        };
        make(OTHER);
        fs::create_dir_all(groups.join("memory/poolfs/alice/service")).expect("made");
        assert_eq!(run.left(&groups, &[&sockets]).expect("readable"), BTreeSet::new());
        make(&run.id);
        fs::write(run.temporary.join(".tmpA"), "").expect("written");
        let left = run.left(&groups, &[&sockets]).expect("readable");
        let text = format!("{left:?}");
        assert!(left.len() == 3 && !text.contains(OTHER), "{text}");
        for kind in ["control group", "file ", "temporary file "] {
            assert!(left.iter().any(|line| line.starts_with(kind)), "no {kind} in {text}");
        }
    }

    #[test]
    fn processes_of_others_do_not_count() {
        let folder = folder("processes");
        let run = run_in(&folder.0);
        let sleep = |id: &str| Command::new("sleep").arg("600").env(RUN, id).spawn().expect("sleep starts");
        let (mut own, mut other) = (sleep(&run.id), sleep(OTHER));
        let mut found = BTreeSet::new();
        let begun = Instant::now();
        // Until it is a program of its own it has this process's environment.
        while found.is_empty() && begun.elapsed() < Duration::from_secs(60) {
            run.processes(&mut found).expect("readable");
        }
        let expected = format!("process {} (sleep)", own.id());
        for child in [&mut own, &mut other] {
            child.kill().expect("ours");
            child.wait().expect("ours");
        }
        assert_eq!(found, BTreeSet::from([expected]));
        assert_eq!(run.left(&folder.0, &[]).expect("readable"), BTreeSet::new(), "it has ended");
    }

    #[test]
    fn two_runs_have_two_identifiers() {
        let first = new_id();
        assert!(first.len() == 8 && first.bytes().all(|byte| byte.is_ascii_lowercase()));
        std::thread::park_timeout(Duration::from_millis(1));
        assert_ne!(first, new_id());
    }
}
