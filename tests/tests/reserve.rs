//! Blocks reserved for root on the branch's filesystem stay root's: a user of the pool gets ENOSPC where the filesystem itself would say
//! so.

use poolfs_tests::{Pool, Way, compile, isolated, run, shell};
use rustix::fs::statvfs;
use std::fs;
use std::path::Path;
use std::process::Command;

const BLOCKS_MIN: u64 = 1000;

/// Free blocks, and those of them that users may have.
fn free(disk: &Path) -> (u64, u64) {
    rustix::fs::sync();
    let found = statvfs(disk).expect("mounted");
    (found.f_bfree, found.f_bavail)
}

/// A script run as a user who owns nothing but what lies in `mine`.
fn as_user(script: &str) -> String {
    format!("setpriv --reuid 1000 --regid 1000 --clear-groups sh -c '{script}'")
}

/// Fills the disk by way of the pool in the directory `at` as a user; then root goes on.
fn fill(pool: &Pool, way: Way, at: &Path, disk: &Path) {
    let at = at.display();
    let (before, users) = free(disk);
    let reserve = before - users;
    assert!(reserve > BLOCKS_MIN, "{reserve} blocks are kept for root");
    for script in [
        // Large and small writes, appended and into new files; then names alone; attributes.
        format!("dd if=/dev/zero of={at}/mine/large bs=64k"),
        format!("while head -c 3000 /dev/zero >> {at}/mine/small; do :; done; exit 1"),
        format!("i=0; while head -c 5000 /dev/zero > {at}/mine/f$i; do i=$((i + 1)); done; exit 1"),
        format!("i=0; while mkdir {at}/mine/d$i; do i=$((i + 1)); done; exit 1"),
    ] {
        let outcome = pool.shell(way, &as_user(&script));
        assert!(outcome.code != 0 && outcome.err.contains("No space left"), "{way:?} {script}: {outcome:?}");
        let (left, _) = free(disk);
        // The filesystem counts what its own tables take to nobody.
        assert!(left + 16 >= reserve, "{way:?} {script}: of {reserve} blocks kept for root {left} are left");
    }
    let _ = pool.shell(way, &format!("head -c 2000000 /dev/zero > {at}/of-root; sync {at}/of-root")).expect("root may");
    let (left, _) = free(disk);
    assert!(left + 400 < reserve, "{way:?}: {left} of {reserve} blocks are left");
    let _ = pool.shell(way, &format!("rm -rf {at}/mine/* {at}/of-root")).expect("removed");
}

/// A disk of 64 MiB, of which a fifth is kept for root, with a directory `mine` of a user for a union and for a directory; the lower branch is
/// in `folder`.
fn make_disk(folder: &Path) -> std::path::PathBuf {
    let disk = folder.join("disk");
    fs::create_dir_all(folder.join("lower/mine")).expect("a folder");
    let _ = shell(&format!(
        "set -eu; chmod 755 {0}; chown 1000:1000 {0}/lower/mine; mkdir {1}; truncate -s 64M {0}/img
         mkfs.ext4 -q -m 20 {0}/img; mount -o loop {0}/img {1}; mkdir {1}/upper {1}/dir {1}/dir/mine; chown 1000:1000 {1}/dir/mine",
        folder.display(),
        disk.display()
    ))
    .expect("a disk");
    disk
}

#[test]
fn users_do_not_take_what_is_kept_for_root() {
    isolated("users_do_not_take_what_is_kept_for_root", |folder| {
        let disk = make_disk(folder);
        let pool = Pool::create(folder, "64M");
        let union = pool.mount_union(&folder.join("union"), &disk.join("upper"), &[&folder.join("lower")]);
        let directory = pool.mount_directory(&folder.join("directory"), &disk.join("dir"));
        for way in [Way::Library, Way::Fuse] {
            for at in [union.path(), directory.path()] {
                fill(&pool, way, at, &disk);
            }
        }
        drop((union, directory));
        drop(pool);
        let _ = run(Command::new("umount").arg(&disk)).expect("umount");
    });
}

#[test]
fn stores_by_a_mapping_take_what_who_opened_the_file_may() {
    isolated("stores_by_a_mapping_take_what_who_opened_the_file_may", |folder| {
        let disk = make_disk(folder);
        let stores = compile(folder, "stores", false);
        let pool = Pool::create(folder, "64M");
        let union = pool.mount_union(&folder.join("union"), &disk.join("upper"), &[&folder.join("lower")]);
        let directory = pool.mount_directory(&folder.join("directory"), &disk.join("dir"));
        for way in [Way::Library, Way::Fuse] {
            for at in [union.path(), directory.path()] {
                let (before, users) = free(&disk);
                let reserve = before - users;
                let command = |name: &str| format!("{} {}/{name} 120000000", stores.display(), at.display());
                let outcome = pool.shell(way, &as_user(&command("mine/mapped")));
                assert!(outcome.code != 0 && outcome.out.contains("No space left"), "{way:?}: {outcome:?}");
                let (left, _) = free(&disk);
                assert!(left + 16 >= reserve, "{way:?}: of {reserve} blocks kept for root {left} are left");
                // Root may have the rest.
                let _ = pool
                    .shell(way, &format!("{} {}/of-root 2000000", stores.display(), at.display()))
                    .expect("root may");
                let (left, _) = free(&disk);
                assert!(left + 400 < reserve, "{way:?}: {left} of {reserve} blocks are left");
                let _ = pool.shell(way, &format!("rm {0}/mine/mapped {0}/of-root", at.display())).expect("removed");
            }
        }
        drop((union, directory));
        drop(pool);
        let _ = run(Command::new("umount").arg(&disk)).expect("umount");
    });
}
