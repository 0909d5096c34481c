//! pjdfstest over a directory and a union, through FUSE: no failure that the disk's own filesystem does not have.

use poolfs_tests::{Cluster, Pool, checksum, isolated, populate, run, tool};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

const FEATURES: &str = "rename_ctime = {}\nutime_now = {}\nutimensat = {}\n[settings]\nnaptime = 0.01\nallow_remount = false\n\
    [dummy_auth]\nentries = [[\"nobody\", \"nogroup\"], [\"daemon\", \"daemon\"]]\n";

/// What filesystems have that reserve room.
const RESERVES: &str = "posix_fallocate = {}\n";

/// What fails over CephFS, which has 32 bits for seconds.
const NOT_AT_CLUSTER: [&str; 1] = ["utimensat::y2038"];

/// The cases that failed, and how many passed, with these features beside those that every filesystem here has.
fn pjdfstest(folder: &Path, at: &Path, features: &str) -> (BTreeSet<String>, usize) {
    let configuration = folder.join("pjdfstest.toml");
    fs::write(&configuration, format!("[features]\n{features}{FEATURES}")).expect("a file");
    fs::create_dir_all(at).expect("a folder");
    let outcome =
        run(Command::new(tool("pjdfstest")).arg("-c").arg(&configuration).arg("-p").arg(at).args(["-s", "/dev/shm"]));
    let (mut failed, mut passed) = (BTreeSet::new(), 0);
    for line in outcome.out.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.last() {
            Some(&"ok") => passed += 1,
            Some(&"FAILED") => {
                failed.insert(words[0].to_owned());
            }
            _ => {}
        }
    }
    assert!(passed > 300, "pjdfstest ran too little:\n{}\n{}", outcome.out, outcome.err);
    (failed, passed)
}

#[test]
fn pjdfstest_over_a_directory_and_a_union_is_as_on_the_disk() {
    isolated("pjdfstest_over_a_directory_and_a_union_is_as_on_the_disk", |folder| {
        let (on_disk, _) = pjdfstest(folder, &folder.join("native"), RESERVES);
        let lower = folder.join("lower");
        populate(&lower);
        let before = checksum(&lower);
        for branch in ["dir", "upper"] {
            fs::create_dir_all(folder.join(branch)).expect("a folder");
        }
        let pool = Pool::create(folder, "256M");
        let directory = pool.mount_directory(&folder.join("mnt-dir"), &folder.join("dir"));
        let union = pool.mount_union(&folder.join("mnt-union"), &folder.join("upper"), &[&lower]);
        for (what, mount) in [("directory", &directory), ("union", &union)] {
            let (failed, passed) = pjdfstest(folder, &mount.path().join("pjd"), RESERVES);
            println!("pjdfstest over a {what}: {passed} passed, {} failed", failed.len());
            let ours: Vec<_> = failed.difference(&on_disk).collect();
            assert!(ours.is_empty(), "over a {what}, but not on the disk: {ours:#?}");
        }
        drop((directory, union));
        assert_eq!(before, checksum(&lower), "the lower branch changed");
    });
}

#[test]
fn pjdfstest_over_a_cluster_is_as_on_the_disk() {
    isolated("pjdfstest_over_a_cluster_is_as_on_the_disk", |folder| {
        let (on_disk, _) = pjdfstest(folder, &folder.join("native"), "");
        let cluster = Cluster::create(folder);
        cluster.make_directories(&["dir", "strict", "upper", "lower"]);
        let pool = Pool::create(folder, "256M");
        let mount = |at: &str, stack: &[&str]| pool.mount(&folder.join(at), &[stack, &cluster.access()[..]].concat());
        let lower = mount("mnt-lower", &["--dir", "ceph:/lower"]);
        populate(lower.path());
        let before = checksum(lower.path());
        let _ = lower.unmount().expect("umount");
        let directory = mount("mnt-dir", &["--dir", "ceph:/dir"]);
        let strict = mount("mnt-strict", &["--dir", "ceph:/strict", "--consistency", "strict"]);
        let union = mount("mnt-union", &["--upper", "ceph:/upper", "--lower", "ceph:/lower"]);
        for (what, mount) in [("directory", &directory), ("strict directory", &strict), ("union", &union)] {
            let (failed, passed) = pjdfstest(folder, &mount.path().join("pjd"), "");
            println!("pjdfstest over a {what} at a cluster: {passed} passed, {} failed", failed.len());
            let ours: Vec<_> = failed.difference(&on_disk).collect();
            assert_eq!(ours, NOT_AT_CLUSTER, "over a {what} at a cluster, but not on the disk");
        }
        drop((directory, strict, union));
        let lower = mount("mnt-lower", &["--dir", "ceph:/lower"]);
        assert_eq!(before, checksum(lower.path()), "the lower branch changed");
        let _ = lower.unmount().expect("umount");
    });
}
