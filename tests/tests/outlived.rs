//! Processes that outlive the `poolfs exec` that started them: they stay in the pool, within its limits, and are reported.

use poolfs_tests::{Pool, Way, isolated, shell};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Starts a process in the background of a shell of the pool; its number.
const BACKGROUND: &str = "setsid sleep 600 </dev/null >/dev/null 2>&1 &
    until [ \"$(cat /proc/$!/comm)\" = sleep ]; do sleep 0.01; done; echo $!";

/// The groups of a process in which a pool's limits are: its path in each hierarchy.
fn limiting_groups(pid: u32) -> Vec<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("it runs");
    let limits = |line: &&str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let controllers = fields.next().unwrap_or_default();
        controllers.split(',').any(|name| name == "memory" || name == "cpuset") || text.lines().count() == 1
    };
    text.lines().filter(limits).map(|line| line.rsplit_once(':').expect("a path").1.to_owned()).collect()
}

fn groups_of(mark: &str) -> Vec<String> {
    fn collect(folder: &Path, depth: u32, mark: &str, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) && depth > 0 {
                if path.to_string_lossy().contains(mark) {
                    found.push(path.display().to_string());
                }
                collect(&path, depth - 1, mark, found);
            }
        }
    }
    let mut found = Vec::new();
    collect(Path::new("/sys/fs/cgroup"), 6, mark, &mut found);
    found
}

fn number(text: &str) -> u32 {
    text.trim().parse().unwrap_or_else(|error| panic!("{text:?}: {error}"))
}

fn end(pid: u32) {
    let _ = shell(&format!("kill -KILL {pid}")).expect("killed");
    wait_for_the_end(pid);
}

fn wait_for_the_end(pid: u32) {
    let deadline = Instant::now() + Duration::from_secs(30);
    let has_ended = || match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('Z')),
        Err(_) => true,
    };
    while !has_ended() {
        assert!(Instant::now() < deadline, "process {pid} does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_outlives_exec_stays_in_the_pool_until_it_ends() {
    isolated("what_outlives_exec_stays_in_the_pool_until_it_ends", |folder| {
        let pool = Pool::create(folder, "16M");
        for way in [Way::Library, Way::Fuse] {
            let pid = number(&pool.shell(way, BACKGROUND).expect("exec"));
            let groups = limiting_groups(pid);
            let inside = format!("/poolfs/{}/containers/exec-", pool.name());
            assert!(!groups.is_empty() && groups.iter().all(|group| group.starts_with(&inside)), "{groups:?}");

            let status = pool.status();
            assert_eq!(status["processes"][0]["pid"], pid, "{status}");
            assert_eq!(status["processes"][0]["outlived_exec"], true, "{status}");
            let told = pool.poolfs(&["status", pool.name()]).expect("status");
            assert!(told.contains(&format!("process {pid} (sleep)")), "{told}");
            let refused = pool.poolfs(&["pool", "rm", pool.name()]);
            assert!(refused.code != 0 && refused.err.contains(&format!("{pid} (sleep)")), "{refused:?}");
            assert!(refused.err.contains("--force"), "{refused:?}");

            // Others come and go beside it.
            let _ = pool.shell(way, ":").expect("another command");
            assert_eq!(limiting_groups(pid), groups);
            end(pid);
            // The next command takes its group away, and with it those of the pool, which nobody uses.
            let _ = pool.shell(way, ":").expect("the next command");
            assert_eq!(groups_of(pool.name()), [""; 0]);
        }
        let pid = number(&pool.shell(Way::Library, BACKGROUND).expect("exec"));
        let name = pool.name().to_owned();
        let _ = pool.poolfs(&["pool", "rm", "--force", &name]).expect("pool rm --force");
        wait_for_the_end(pid);
        assert_eq!(groups_of(&name), [""; 0]);
        // As the end of the scope expects it.
        let _ = pool.poolfs(&["pool", "create", &name]).expect("pool create");
    });
}

#[test]
fn what_outlives_exec_works_on_a_mount_that_stays() {
    isolated("what_outlives_exec_works_on_a_mount_that_stays", |folder| {
        let pool = Pool::create(folder, "16M");
        let (at, data) = (folder.join("mnt"), folder.join("data"));
        fs::create_dir(&data).expect("a folder");
        let mounted = pool.mount_directory(&at, &data);
        let script = format!(
            "setsid sh -c 'while [ ! -e {0}/go ]; do sleep 0.02; done; echo done > {0}/said' </dev/null >/dev/null 2>&1 & echo $!",
            at.display()
        );
        let pid = number(&pool.shell(Way::Library, &script).expect("exec"));
        fs::write(at.join("go"), "").expect("written");
        let deadline = Instant::now() + Duration::from_secs(60);
        while fs::read_to_string(at.join("said")).unwrap_or_default() != "done\n" {
            assert!(Instant::now() < deadline, "process {pid} says nothing");
            std::thread::sleep(Duration::from_millis(10));
        }
        // The last unmount ends the service, but not who is still in the pool.
        let pid = number(&pool.shell(Way::Library, BACKGROUND).expect("exec"));
        let _ = mounted.unmount().expect("umount");
        assert!(limiting_groups(pid).iter().all(|group| group.contains(pool.name())));
        end(pid);
    });
}

#[test]
fn a_throw_away_pool_goes_with_the_last_of_its_processes() {
    isolated("a_throw_away_pool_goes_with_the_last_of_its_processes", |folder| {
        let pool = Pool::create(folder, "16M");
        let pools = || pool.poolfs(&["pool", "ls", "--json"]).expect("pool ls");
        let pid = number(&pool.poolfs(&["exec", "--", "sh", "-c", BACKGROUND]).expect("exec"));
        let groups = limiting_groups(pid);
        assert!(!groups.is_empty() && groups.iter().all(|group| group.starts_with("/poolfs/exec-")), "{groups:?}");
        let _ = pool.poolfs(&["exec", "--", "true"]).expect("exec");
        assert!(pools().contains("exec-"), "it still runs there");
        assert_eq!(limiting_groups(pid), groups);
        end(pid);
        let _ = pool.poolfs(&["exec", "--", "true"]).expect("exec");
        assert!(!pools().contains("exec-"), "{}", pools());
        assert_eq!(groups_of("poolfs/exec-"), [""; 0]);
    });
}
