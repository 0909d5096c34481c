//! pjdfstest over a directory and a union, through FUSE: no failure that the disk's own filesystem does not have.

use poolfs_tests::{Pool, checksum, isolated, populate, run, tool};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The cases that failed, and how many passed.
fn pjdfstest(folder: &Path, at: &Path) -> (BTreeSet<String>, usize) {
    let configuration = folder.join("pjdfstest.toml");
    fs::write(
        &configuration,
        "[features]\nposix_fallocate = {}\nrename_ctime = {}\nutime_now = {}\nutimensat = {}\n[settings]\nnaptime = 0.01\nallow_remount = false\n\
         [dummy_auth]\nentries = [[\"nobody\", \"nogroup\"], [\"daemon\", \"daemon\"]]\n",
    )
    .expect("a file");
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
        let (on_disk, _) = pjdfstest(folder, &folder.join("native"));
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
            let (failed, passed) = pjdfstest(folder, &mount.path().join("pjd"));
            println!("pjdfstest over a {what}: {passed} passed, {} failed", failed.len());
            let ours: Vec<_> = failed.difference(&on_disk).collect();
            assert!(ours.is_empty(), "over a {what}, but not on the disk: {ours:#?}");
        }
        drop((directory, union));
        assert_eq!(before, checksum(&lower), "the lower branch changed");
    });
}
