//! Clients and services killed at random moments: all others go on, and nothing is damaged.

use poolfs_tests::{Mounted, Pool, checksum, compile, is_soak, isolated, populate, run};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use std::collections::HashMap;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
const BLOCKS: u64 = 64;
const WHOLE: usize = 9000;

/// Longest time until everybody has noticed that the service is dead, and ended.
const END_WAIT: Duration = Duration::from_secs(60);

fn union<'a>(pool: &'a Pool, folder: &Path) -> Mounted<'a> {
    pool.mount_union(&folder.join("mnt"), &folder.join("upper"), &[&folder.join("lower")])
}

fn start(folder: &Path) -> Pool {
    fs::create_dir_all(folder.join("upper")).expect("a folder");
    populate(&folder.join("lower"));
    let _ = compile(folder, "mortal", false);
    let _ = compile(folder, "mortal", true);
    Pool::create(folder, "64M")
}

/// What a killed `mortal busy` leaves: a file that was only ever replaced as a whole, and records each of which is whole, there
/// once, and in the order of its process.
fn check_leavings(directory: &Path) {
    let whole = fs::read(directory.join("whole")).expect("it is never missing");
    assert!(whole.len() == WHOLE && whole.iter().all(|&byte| byte == whole[0]), "half of a replacement is seen");
    let log = fs::read(directory.join("log")).expect("readable");
    assert_eq!(log.len() % 16, 0, "half of a record");
    let mut last: HashMap<u64, u64> = HashMap::new();
    for record in log.chunks_exact(16) {
        let number = u64::from_le_bytes(record[..8].try_into().expect("eight bytes"));
        let check = u64::from_le_bytes(record[8..].try_into().expect("eight bytes"));
        assert_eq!(check, !number, "a record in pieces");
        let (process, round) = (number >> 32, number & 0xffff_ffff);
        let expected = last.get(&process).map_or(0, |last| last + 1);
        assert_eq!(round, expected, "a record of process {process} is missing or there twice");
        last.insert(process, round);
    }
    assert!(!last.is_empty(), "nothing was done");
}

#[test]
fn clients_killed_at_any_point_leave_everything_whole() {
    isolated("clients_killed_at_any_point_leave_everything_whole", |folder| {
        let pool = start(folder);
        let rounds = if is_soak() { 1000 } else { 50 };
        let mount = union(&pool, folder);
        let at = mount.path().join("work");
        fs::create_dir(&at).expect("made");
        // The library's and the kernel's clients meet on the same names.
        let script = format!(
            "i=0; while [ $i -lt {rounds} ]; do i=$((i + 1)); \
             {0}/mortal busy {1} & one=$!; {0}/mortal-static busy {2} & two=$!; \
             sleep 0.$((RANDOM % 2))$((RANDOM % 10)); kill -9 $one; sleep 0.0$((RANDOM % 10)); kill -9 $two; \
             wait $one; [ $? = 137 ] || exit 4; wait $two; [ $? = 137 ] || exit 5; done; exit 0",
            folder.display(),
            at.display(),
            at.display()
        );
        let mut command = pool.command();
        command.args(["exec", pool.name(), "--", "bash", "-c", &script]);
        let outcome = run(&mut command);
        assert_eq!(outcome.code, 0, "a client failed before it was killed: {outcome:?}");
        check_leavings(&at);
        drop(mount);
        let mount = union(&pool, folder);
        check_leavings(&mount.path().join("work"));
        let records = fs::metadata(mount.path().join("work/log")).expect("there").len() / 16;
        println!("soak: {rounds} times two clients killed, {records} records whole");
        drop(mount);
    });
}

/// The last number that was said to be synced.
fn synced(said: &str) -> u64 {
    let numbers = said.lines().filter_map(|line| line.strip_prefix("synced ")?.parse().ok());
    numbers.max().unwrap_or(0)
}

/// Every block holds what was synced last into it, or something newer.
fn check_synced(path: &Path, last: u64) {
    let content = fs::read(path).expect("readable");
    for number in (1..=last).rev().take(BLOCKS as usize) {
        let at = (number % BLOCKS) as usize * BLOCK;
        let values: Vec<u64> = content[at..at + BLOCK]
            .chunks_exact(8)
            .map(|bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
            .collect();
        for value in values {
            assert!(
                value >= number && value % BLOCKS == number % BLOCKS,
                "block {number}, synced up to {last}: {value}"
            );
        }
    }
}

#[test]
fn a_service_killed_with_everything_open_is_an_end_for_all_and_loses_nothing_synced() {
    isolated("a_service_killed_with_everything_open_is_an_end_for_all_and_loses_nothing_synced", |folder| {
        let pool = start(folder);
        let before = checksum(&folder.join("lower"));
        let rounds: u64 = if is_soak() { 200 } else { 5 };
        for round in 0..rounds {
            let mount = union(&pool, folder);
            let at = mount.path().to_path_buf();
            let (own, big) = (folder.display(), at.join("usr/share/doc/big"));
            let mut script = String::new();
            for (program, suffix) in [("mortal", "l"), ("mortal-static", "k")] {
                for (what, file) in [("sync", "s"), ("map", "m"), ("lock", "o"), ("lock", "o"), ("lock", "o")] {
                    let said = if what == "sync" { format!("{own}/said-{suffix}") } else { "/dev/null".into() };
                    script += &format!("{own}/{program} {what} {}/{file}-{suffix} > {said} & ", at.display());
                }
                script += &format!("{own}/{program} read {} & ", big.display());
            }
            let mut command = pool.command();
            command.args(["exec", pool.name(), "--", "sh", "-c", &format!("{script} wait")]);
            let mut all = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
            let said = |suffix: &str| fs::read_to_string(folder.join(format!("said-{suffix}"))).unwrap_or_default();
            let begun = Instant::now();
            while [said("l"), said("k")].iter().any(|said| synced(said) < 10) {
                assert!(begun.elapsed() < END_WAIT, "nothing is synced");
                std::thread::park_timeout(Duration::from_millis(5));
            }
            std::thread::park_timeout(Duration::from_millis(round * 37 % 200));
            kill_process(Pid::from_raw(pool.service_pid()).expect("a process"), Signal::KILL).expect("it is ours");
            let killed = Instant::now();
            while all.try_wait().expect("ours").is_none() {
                if killed.elapsed() > END_WAIT {
                    let _ = all.kill();
                    let mut text = String::new();
                    let _ = all.stderr.take().expect("piped").read_to_string(&mut text);
                    panic!("round {round}: somebody still waits for the dead service: {text}");
                }
                std::thread::park_timeout(Duration::from_millis(5));
            }
            let (by_library, by_kernel) = (synced(&said("l")), synced(&said("k")));
            // It fails, as what was written last may be lost, and unmounts.
            let ended = mount.unmount();
            assert!(fs::metadata(&at).is_ok(), "round {round}: the mount stays: {ended:?}");
            let again = union(&pool, folder);
            check_synced(&again.path().join("s-l"), by_library);
            check_synced(&again.path().join("s-k"), by_kernel);
            for name in ["s-l", "s-k", "m-l", "m-k", "o-l", "o-k"] {
                fs::remove_file(again.path().join(name)).expect("it was made");
            }
            drop(again);
            for suffix in ["l", "k"] {
                fs::remove_file(folder.join(format!("said-{suffix}"))).expect("it was made");
            }
        }
        drop(pool);
        assert_eq!(before, checksum(&folder.join("lower")), "the lower branch changed");
        println!("soak: {rounds} services killed with twelve clients each");
    });
}

#[test]
fn a_mount_right_after_a_kill_is_made_by_a_new_service() {
    isolated("a_mount_right_after_a_kill_is_made_by_a_new_service", |folder| {
        let pool = Pool::create(folder, "64M");
        let data = folder.join("data");
        fs::create_dir(&data).expect("made");
        let mut mounts = vec![pool.mount_directory(&folder.join("first"), &data)];
        for round in 0..10 {
            let process = Pid::from_raw(pool.service_pid()).expect("a process");
            kill_process(process, Signal::KILL).expect("it is ours");
            // It may not have ended yet.
            mounts.push(pool.mount_directory(&folder.join(format!("mnt-{round}")), &data));
            // What the dead one had mounted has gone.
            mounts.swap_remove(0).keep();
        }
    });
}

#[test]
fn what_a_service_has_unmounted_at_its_end_is_not_called_mounted() {
    isolated("what_a_service_has_unmounted_at_its_end_is_not_called_mounted", |folder| {
        let pool = Pool::create(folder, "64M");
        let (data, at) = (folder.join("data"), folder.join("mnt"));
        fs::create_dir(&data).expect("made");
        let mount = pool.mount_directory(&at, &data);
        let process = Pid::from_raw(pool.service_pid()).expect("a process");
        let watched = pidfd_open(process, PidfdFlags::empty()).expect("it runs");
        kill_process(process, Signal::TERM).expect("it is ours");
        assert_eq!(poll(&mut [PollFd::new(&watched, PollFlags::IN)], None), Ok(1));
        let told = pool.poolfs(&["status", pool.name()]).expect("status");
        let says = format!("nothing is mounted at {} any more", at.display());
        assert!(told.contains(&says) && !told.contains("dead mount"), "{told}");
        assert_eq!(pool.status()["dead_mounts"][0]["is_mounted"], false);
        drop(mount);
    });
}
