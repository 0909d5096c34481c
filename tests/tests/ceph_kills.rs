//! What was durable at a cluster outlives everything that is killed at random moments, services and the cluster's daemons, and a network that fails.

use poolfs_tests::{Cluster, Daemon, Mounted, Pool, Way, is_soak, isolated_for, name_of, wait_until};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

/// Longest run of all rounds.
const LIMIT: Duration = Duration::from_secs(4 * 3600);

/// A program that makes one file after the other, and says of each that it is durable.
struct Writer {
    child: Child,
    durable: PathBuf,
}

/// Numbers that a file contains: the more, the larger it is.
fn content(number: u64) -> String {
    (number..number + number * 37 % 4_000).map(|number| format!("{number}\n")).collect()
}

impl Writer {
    /// Begins with a number, in a directory of a mount.
    fn start(pool: &Pool, folder: &Path, at: &Path, way: Way, from: u64) -> Self {
        let name = if way == Way::Library { "library" } else { "fuse" };
        let durable = folder.join(format!("durable-{name}"));
        // A name is told only when what it leads to is durable, and it too; what is told is whole.
        let script = format!(
            "cd {at}; i={from}; while [ ! -e {told}-end ]; do seq $i $((i + i * 37 % 4000 - 1)) > {name}-new; sync {name}-new; \
             mv {name}-new {name}-$i; sync .; echo $i > {told}-new; mv {told}-new {told}; i=$((i + 1)); done",
            at = at.display(),
            told = durable.display()
        );
        let mut command = pool.command();
        command.args(["exec", pool.name()]);
        if way == Way::Fuse {
            command.arg("--fuse");
        }
        command.args(["--", "sh", "-euc", &script]).stdout(Stdio::null()).stderr(Stdio::null());
        Self { child: command.spawn().expect("a writer"), durable }
    }

    /// The last of which it has said that it is durable; 0 before the first.
    fn told(&self) -> u64 {
        fs::read_to_string(&self.durable).map_or(0, |text| text.trim().parse().expect("a number"))
    }

    fn wait_for(&self, more: u64) {
        let begun = self.told();
        wait_until("a writer goes on", || self.told() >= begun + more);
    }

    /// Ends it, which has met no error; the last that was durable.
    fn end(mut self) -> u64 {
        let mut end = self.durable.clone().into_os_string();
        end.push("-end");
        fs::write(end, "").expect("told to end");
        let ended = self.child.wait().expect("ended");
        assert!(ended.success(), "a writer of {}: {ended}", self.durable.display());
        self.told()
    }

    /// The same of one that ends because its service was killed.
    fn ended(mut self) -> u64 {
        self.child.wait().expect("ended");
        self.told()
    }

    fn check(name: &str, at: &Path, last: u64) {
        for number in 1..=last {
            let path = at.join(format!("{name}-{number}"));
            let found = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert!(found == content(number), "{}: another content", path.display());
        }
    }
}

const STACKS: [&[&str]; 2] = [&["--dir", "ceph:/dir"], &["--upper", "ceph:/upper", "--lower", "ceph:/lower"]];

/// Mounts, also where a service that is dead has mounted.
fn mount<'a>(pool: &'a Pool, at: &Path, stack: &[&str]) -> Mounted<'a> {
    // What is dead cannot be looked at.
    let _ = fs::create_dir(at);
    let _ = pool.poolfs(&[&["mount", pool.name(), at.to_str().expect("text")][..], stack].concat()).expect("mount");
    pool.mounted(at)
}

fn writers(pool: &Pool, folder: &Path, at: &Path, last: [u64; 2]) -> [Writer; 2] {
    let start = |way, last: u64| Writer::start(pool, folder, at, way, last + 1);
    [start(Way::Library, last[0]), start(Way::Fuse, last[1])]
}

fn check(at: &Path, last: [u64; 2]) {
    Writer::check("library", at, last[0]);
    Writer::check("fuse", at, last[1]);
}

fn forget(folder: &Path) {
    for name in ["library", "fuse"] {
        for end in ["", "-end"] {
            let _ = fs::remove_file(folder.join(format!("durable-{name}{end}")));
        }
    }
}

#[test]
fn killed_services_lose_nothing_that_was_durable_at_a_cluster() {
    isolated_for("killed_services_lose_nothing_that_was_durable_at_a_cluster", LIMIT, |folder| {
        let cluster = Cluster::create(folder);
        cluster.make_directories(&["dir", "upper", "lower"]);
        let pool = Pool::create(folder, "16M").patient();
        let rounds = if is_soak() { 50 } else { 3 };
        for stack in STACKS {
            forget(folder);
            let arguments = [stack, &cluster.access()[..]].concat();
            let at = folder.join("mnt");
            let mut last = [0, 0];
            for round in 0..rounds {
                let mounted = mount(&pool, &at, &arguments);
                check(mounted.path(), last);
                let writers = writers(&pool, folder, mounted.path(), last);
                for writer in &writers {
                    writer.wait_for(2 + round % 5);
                }
                pool.kill_service();
                last = writers.map(Writer::ended);
                mounted.keep();
            }
            let mounted = mount(&pool, &at, &arguments);
            check(mounted.path(), last);
            let _ = mounted.unmount().expect("umount");
            println!("soak: {} {rounds} services killed, {last:?} files whole", stack[0]);
        }
    });
}

#[test]
fn killed_daemons_of_a_cluster_lose_nothing_that_was_durable() {
    isolated_for("killed_daemons_of_a_cluster_lose_nothing_that_was_durable", LIMIT, |folder| {
        let cluster = Cluster::lasting(folder);
        cluster.make_directories(&["dir", "upper", "lower"]);
        let pool = Pool::create(folder, "16M").patient();
        let rounds = if is_soak() { 25 } else { 1 };
        for stack in STACKS {
            forget(folder);
            let arguments = [stack, &cluster.access()[..]].concat();
            let at = folder.join("mnt");
            let mounted = pool.mount(&at, &arguments);
            let writers = writers(&pool, folder, mounted.path(), [0, 0]);
            for round in 0..rounds {
                for daemon in [Daemon::Osd, Daemon::Mds] {
                    for writer in &writers {
                        writer.wait_for(2 + round % 5);
                    }
                    cluster.kill(daemon);
                }
            }
            for writer in &writers {
                writer.wait_for(2);
            }
            let last = writers.map(Writer::end);
            check(mounted.path(), last);
            let _ = mounted.unmount().expect("umount");
            let mounted = pool.mount(&at, &arguments);
            check(mounted.path(), last);
            let _ = mounted.unmount().expect("umount");
            println!("soak: {} {} daemons killed, {last:?} files whole", stack[0], 2 * rounds);
        }
    });
}

/// Nobody is given up meanwhile.
#[test]
fn a_cluster_that_was_cut_off_goes_on_where_it_was() {
    isolated_for("a_cluster_that_was_cut_off_goes_on_where_it_was", LIMIT, |folder| {
        let cluster = Cluster::apart(folder);
        cluster.make_directories(&["dir"]);
        let pool = Pool::create(folder, "16M").patient();
        let arguments = [STACKS[0], &cluster.access()[..]].concat();
        let mounted = pool.mount(&folder.join("mnt"), &arguments);
        let writers = writers(&pool, folder, mounted.path(), [0, 0]);
        let lengths: &[u64] = if is_soak() { &[1, 5, 15, 30, 45, 30, 1] } else { &[1, 10] };
        for length in lengths {
            for writer in &writers {
                writer.wait_for(2);
            }
            cluster.cut_off(true);
            // How long it is cut off is what the test is about; nothing is taken to have happened meanwhile.
            std::thread::sleep(Duration::from_secs(*length));
            cluster.cut_off(false);
        }
        for writer in &writers {
            writer.wait_for(2);
        }
        let last = writers.map(Writer::end);
        check(mounted.path(), last);
        let _ = mounted.unmount().expect("umount");
        println!("soak: cut off {} times, {last:?} files whole", lengths.len());
    });
}

/// The metadata server ends its session then, and whoever comes next may have what it had claimed.
#[test]
fn a_service_that_was_cut_off_for_too_long_is_told_so() {
    isolated_for("a_service_that_was_cut_off_for_too_long_is_told_so", LIMIT, |folder| {
        let cluster = Cluster::apart(folder);
        cluster.make_directories(&["dir"]);
        for setting in ["session_timeout", "session_autoclose"] {
            // The least that there is.
            let _ = cluster.ceph(&["fs", "set", "cephfs", setting, "30"]);
        }
        let pool = Pool::create(folder, "16M").patient();
        // As on another host: with a state of its own.
        let elsewhere = folder.join("elsewhere");
        fs::create_dir(&elsewhere).expect("made");
        let other = Pool::named(&elsewhere, &format!("{}-other", name_of(folder)), "16M");
        let arguments = [STACKS[0], &cluster.access()[..]].concat();
        let at = folder.join("mnt");
        let mounted = pool.mount(&at, &arguments);
        let writers = writers(&pool, folder, mounted.path(), [0, 0]);
        for writer in &writers {
            writer.wait_for(2);
        }
        cluster.cut_off(true);
        wait_until("the session is over", || cluster.ceph(&["tell", "mds.0", "session", "ls"]).trim() == "[]");
        cluster.cut_off(false);
        // What they want durable fails, and nothing waits for ever.
        let last = writers.map(Writer::ended);
        let taken_over = other.mount(&folder.join("other"), &arguments);
        check(taken_over.path(), last);
        let _ = taken_over.unmount().expect("umount");
        let _ = pool.poolfs(&["umount", "--force", pool.name(), at.to_str().expect("text")]).expect("umount");
        mounted.keep();
        let mounted = pool.mount(&at, &arguments);
        check(mounted.path(), last);
        let _ = mounted.unmount().expect("umount");
    });
}
