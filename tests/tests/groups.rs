//! Control groups of version 2, which most hosts have: in a virtual machine, whichever version this host has.

use poolfs_tests::{Outcome, Pool, Way, compile, group_file, group_of, import_small, in_guest, workspace};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Beside two busy programs the machine takes some minutes.
const LIMIT: Duration = Duration::from_secs(15 * 60);
const PROGRAMS: &[&str] =
    &["bash", "grep", "ldd", "mount", "nproc", "runc", "setpriv", "setsid", "touch", "umount", "wc"];

/// So many nodes a service with a cache of 64 MiB has the kernel keep, and more than those.
const NODES_KEPT: u64 = 4096;
const MANY: u64 = 4200;

/// Takes memory.
const GREEDY: &str = "/bin/greedy-static";

fn limit_of(pool: &Pool, group: &str) -> u64 {
    group_file(pool, &format!("{group}memory.max")).parse().expect("a number")
}

fn limits_are_set(pool: &Pool) {
    assert_eq!(limit_of(pool, ""), 512 << 20);
    assert_eq!(limit_of(pool, "service/") + limit_of(pool, "containers/"), 512 << 20);
    for group in ["", "service/", "containers/"] {
        assert_eq!(group_file(pool, &format!("{group}cpuset.cpus.effective")), "0", "{group}");
    }
    let service = pool.service_pid().to_string();
    assert_eq!(group_of(&service), format!("/poolfs/{}/service", pool.name()));
}

fn what_runs_in_a_pool_is_held_to_its_limits(pool: &Pool) {
    assert_eq!(pool.shell(Way::Fuse, "nproc").expect("nproc"), "1\n", "the machine has two CPUs, the pool one");
    let group = pool.shell(Way::Fuse, "cat /proc/self/cgroup").expect("cat");
    assert!(group.starts_with(&format!("0::/poolfs/{}/containers/exec-", pool.name())), "{group}");
    // Whoever outlives the command stays in the pool.
    let left = pool.shell(Way::Fuse, "setsid sleep 1000 > /dev/null 2>&1 & echo $!").expect("setsid");
    let group = group_of(left.trim());
    assert!(group.starts_with(&format!("/poolfs/{}/containers/", pool.name())), "{group}");
    let _ = poolfs_tests::shell(&format!("kill {}", left.trim())).expect("kill");
    let greedy = pool.shell(Way::Fuse, &format!("{GREEDY} 500"));
    assert_eq!(greedy.code, 137, "{greedy:?}");
    assert!(group_file(pool, "containers/memory.events").contains("oom_kill 1"));
    assert_eq!(pool.status()["state"], "running", "its service has a limit of its own");
    let used = pool.status()["memory_used_bytes"].as_u64().expect("known");
    assert!(used <= 512 << 20, "{used}");
}

/// The machine's kernel is older than the message that asks for single nodes (Linux 6.18).
fn an_older_kernel_forgets_what_nobody_uses(pool: &Pool, at: &Path) {
    let nodes = || pool.status()["service"]["instances"][0]["nodes"].as_u64().expect("known");
    for number in 0..MANY {
        assert!(!at.join(number.to_string()).exists());
        fs::write(at.join(number.to_string()), "").expect("written");
    }
    let start = Instant::now();
    while nodes() >= NODES_KEPT {
        assert!(start.elapsed() < Duration::from_secs(60), "{}", nodes());
        std::thread::park_timeout(Duration::from_millis(100));
    }
    assert!(at.join("0").exists());
}

fn containers_run(pool: &Pool, folder: &Path) {
    import_small(pool, folder, "small", &[Path::new(GREEDY)], |_| {});
    let run = |more: &[&str], script: &str| -> Outcome {
        let mut line = vec!["run", pool.name(), "small"];
        line.extend_from_slice(more);
        line.extend_from_slice(&["--", "sh", "-c", script]);
        pool.poolfs(&line)
    };
    assert_eq!(run(&["--rm"], "cat /proc/self/cgroup; echo inside").expect("run"), "0::/\ninside\n");
    let greedy = run(&["--rm", "--memory", "40M"], "exec greedy-static 100");
    assert_eq!(greedy.code, 137, "{greedy:?}");
    let _ = run(&["-d", "--name", "long", "--memory", "64M"], "sleep 1000").expect("run -d");
    assert_eq!(limit_of(pool, "containers/long/"), 64 << 20);
    let first = group_file(pool, "containers/long/cgroup.procs").lines().next().expect("it runs").to_owned();
    assert_eq!(group_of(&first), format!("/poolfs/{}/containers/long", pool.name()));
    let _ = pool.poolfs(&["stop", "long", "--time", "1"]).expect("stop");
    let _ = pool.poolfs(&["rm", "long"]).expect("rm");
}

fn a_killed_service_is_told_of_and_replaced(pool: &Pool, mount: &Path, mount_again: impl FnOnce()) {
    fs::write(mount.join("written"), "before").expect("written");
    pool.kill_service();
    assert_eq!(pool.status()["state"], "dead");
    mount_again();
    assert_eq!(fs::read_to_string(mount.join("written")).expect("kept"), "before");
    assert_eq!(group_of(&pool.service_pid().to_string()), format!("/poolfs/{}/service", pool.name()));
}

#[test]
fn pools_have_their_limits_on_version_2() {
    in_guest(
        "pools_have_their_limits_on_version_2",
        LIMIT,
        PROGRAMS,
        |root| {
            fs::create_dir(root.join("bin")).expect("a folder");
            let _ = compile(&root.join("bin"), "greedy", true);
        },
        |folder| {
            {
                let pool = Pool::on_cpus(folder, "0", "512M", "64M");
                let (at, upper, lower) = (folder.join("mnt"), folder.join("upper"), folder.join("lower"));
                for folder in [&at, &upper, &lower] {
                    fs::create_dir(folder).expect("a folder");
                }
                fs::write(lower.join("file"), "content").expect("written");
                let mounted = pool.mount_union(&at, &upper, &[&lower]);
                assert_eq!(fs::read_to_string(at.join("file")).expect("readable"), "content");
                an_older_kernel_forgets_what_nobody_uses(&pool, &at);
                limits_are_set(&pool);
                what_runs_in_a_pool_is_held_to_its_limits(&pool);
                containers_run(&pool, folder);
                let (up, low) = (upper.display().to_string(), lower.display().to_string());
                a_killed_service_is_told_of_and_replaced(&pool, &at, || {
                    let at = at.display().to_string();
                    let _ = pool.poolfs(&["mount", pool.name(), &at, "--upper", &up, "--lower", &low]).expect("mount");
                });
                let _ = mounted.unmount().expect("umount");
            }
            assert!(!Path::new("/sys/fs/cgroup/poolfs").exists(), "groups are left");
        },
    );
}

/// What the tests below need besides a Debian system.
const MORE_PROGRAMS: &[&str] = &[
    "getfacl",
    "getfattr",
    "grep",
    "losetup",
    "mkfs.ext4",
    "mount",
    "nproc",
    "runc",
    "setfacl",
    "setfattr",
    "setpriv",
    "setsid",
    "umount",
];

/// Files of tests that are about pools, services and containers, and which of their tests need a kernel with which the library has sessions.
const FILES: &[(&str, &[&str])] = &[
    ("runs", &[]),
    ("death", &[]),
    ("userns", &["containers_of_one_image_see_their_own_root_and_nobody_else_gets_in"]),
    ("commands", &[]),
    ("outlived", &[]),
];

/// Puts a Debian system into a machine's root, with these tests and the programs they compile.
fn put_system(root: &Path) {
    let image = workspace().join(".poolfs-demo/root.tar");
    let (image, to) = (image.display().to_string(), root.display().to_string());
    let _ = poolfs_tests::shell(&format!("tar -xf {image} -C {to}")).expect("tar");
    let inside = |path: &Path| root.join(path.strip_prefix("/").expect("absolute"));
    let programs = workspace().join("tests/programs");
    fs::create_dir_all(inside(&workspace().join("tests"))).expect("a folder");
    let (from, to) = (programs.display().to_string(), inside(&programs).display().to_string());
    let _ = poolfs_tests::shell(&format!("cp -r {from} {to}")).expect("cp");
    fs::create_dir_all(root.join("tests")).expect("a folder");
    let here = std::env::current_exe().expect("the test's own path");
    for (file, _) in FILES {
        let newest = fs::read_dir(here.parent().expect("a folder"))
            .expect("readable")
            .filter_map(|entry| entry.ok()?.path().into_os_string().into_string().ok())
            .filter(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with(&format!("{file}-"))))
            .filter(|path| Path::new(path).extension().is_none())
            .max_by_key(|path| fs::metadata(path).and_then(|found| found.modified()).ok())
            .unwrap_or_else(|| panic!("{file} is not built: cargo test -p poolfs-tests --no-run"));
        fs::copy(newest, root.join("tests").join(file)).expect("copied");
    }
}

#[test]
#[ignore = "takes an hour or more: a stage of make soak"]
fn what_holds_on_version_1_holds_on_version_2() {
    let limit = Duration::from_secs(6 * 3600);
    in_guest("what_holds_on_version_1_holds_on_version_2", limit, MORE_PROGRAMS, put_system, |folder| {
        let mut failed = Vec::new();
        for (file, left_out) in FILES {
            let mut command = Command::new(Path::new("/tests").join(file));
            command.args(["--test-threads", "1"]).env("TMPDIR", folder).env_remove("POOLFS_GUEST");
            command.args(left_out.iter().flat_map(|test| ["--skip", test]));
            println!("soak: {file}");
            if !command.status().expect("it starts").success() {
                failed.push(*file);
            }
        }
        assert!(failed.is_empty(), "failed: {failed:?}");
    });
}
