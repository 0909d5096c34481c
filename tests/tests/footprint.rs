//! What mounts take of a service's memory, and that they give it back.

use poolfs_tests::{Mounted, Pool, isolated, populate};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

const MOUNTS: usize = 8;
const ROUNDS: usize = 3;
/// Far above what the service needs for a single mount, far below what the buffers of all these are together.
const LEFT_BYTES_MAX: u64 = 24 << 20;

/// Bytes of a process's memory that are in no file.
fn anonymous(process: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("a line of it");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

#[test]
fn mounts_that_are_gone_leave_no_memory_behind() {
    isolated("mounts_that_are_gone_leave_no_memory_behind", |folder| {
        let lower = folder.join("lower");
        populate(&lower);
        fs::write(lower.join("large"), vec![7; 4 << 20]).expect("a file");
        let pool = Pool::create(folder, "64M");
        let mount = |name: String| {
            let upper = folder.join(format!("{name}-upper"));
            fs::create_dir_all(&upper).expect("a folder");
            pool.mount_union(&folder.join(name), &upper, &[&lower])
        };
        // With one that stays the service does.
        let _stays = mount("stays".to_owned());
        for _ in 0..ROUNDS {
            let mounts: Vec<Mounted<'_>> = (0..MOUNTS).map(|number| mount(format!("m{number}"))).collect();
            for mount in &mounts {
                assert_eq!(fs::read(mount.path().join("large")).expect("it is there").len(), 4 << 20);
            }
        }
        let left = anonymous(pool.service_pid());
        assert!(left <= LEFT_BYTES_MAX, "{left} bytes after {ROUNDS} times {MOUNTS} mounts");
    });
}

#[test]
fn clones_that_run_the_same_program_have_one_copy_of_it() {
    isolated("clones_that_run_the_same_program_have_one_copy_of_it", |folder| {
        const CLONES: usize = 4;
        let lower = folder.join("lower");
        populate(&lower);
        let program = lower.join("bash");
        fs::copy("/bin/bash", &program).expect("a program");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("changed");
        let length = fs::metadata(&program).expect("there").len();
        let pool = Pool::create(folder, "64M");
        let mount = |number: usize| {
            let upper = folder.join(format!("upper-{number}"));
            fs::create_dir_all(&upper).expect("a folder");
            pool.mount_union(&folder.join(format!("clone-{number}")), &upper, &[&lower])
        };
        let clones: Vec<Mounted<'_>> = (0..CLONES).map(mount).collect();
        for clone in &clones {
            let program = clone.path().join("bash");
            let said =
                Command::new(&program).args(["-c", "cat \"$0\" | wc -c"]).arg(&program).output().expect("it runs");
            assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), length.to_string());
        }
        let status = pool.status();
        let number = |value: &serde_json::Value| value.as_u64().expect("a number");
        let service = &status["service"];
        assert_eq!(number(&service["cache"]["pinned_bytes"]), length.next_multiple_of(4096), "{status:#}");
        let instances = service["instances"].as_array().expect("a list");
        assert_eq!(instances.len(), CLONES);
        for instance in instances {
            assert_eq!(number(&instance["kernel_cached_bytes"]), 0, "{instance:#}");
            assert!(number(&instance["programs"]["opens"]) >= 2, "{instance:#}");
        }
    });
}
