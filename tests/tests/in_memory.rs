//! Branches on a tmpfs, whose content is memory of the pool's service: writers get ENOSPC before the service runs out of it.

use poolfs_tests::{Mounted, Pool, Way, isolated, run};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Of the pool; its cache has 16 MiB, so that 110 MiB are left.
const MEMORY: &str = "320M";
const LEFT: u64 = 110 << 20;

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// A pool with little memory, a tmpfs (or another filesystem) that has much, and mount points.
fn with_filesystem(folder: &Path, kind: &str, options: &str) -> (Pool, PathBuf) {
    let [memory, lower] = ["memory", "lower"].map(|name| folder.join(name));
    for path in [&memory, &lower] {
        fs::create_dir(path).expect("a folder");
    }
    fs::write(lower.join("lower"), vec![b'l'; 1 << 20]).expect("written");
    let _ = run(Command::new("mount").args(["-t", kind, "-o", options, "branch"]).arg(&memory)).expect("mount");
    for name in ["up", "second", "dir"] {
        fs::create_dir(memory.join(name)).expect("a folder");
    }
    (Pool::with_memory(folder, MEMORY, "16M"), memory)
}

/// The process of the pool's service, which answers.
fn service(pool: &Pool) -> u64 {
    let record: Value =
        serde_json::from_str(&pool.poolfs(&["pool", "inspect", pool.name(), "--json"]).expect("inspect"))
            .expect("JSON");
    let _ = pool.poolfs(&["status", pool.name()]).expect("status");
    record["service"]["pid"].as_u64().expect("it has a service")
}

/// Fills what is mounted with content, then with names, then with attributes, and finds the service as it was.
fn fill(pool: &Pool, way: Way, mounted: &Mounted<'_>, limit: u64) {
    let at = mounted.path().display();
    let before = service(pool);
    let refused = |script: &str| {
        let outcome = pool.shell(way, script);
        assert!(outcome.code != 0 && outcome.err.contains("No space left"), "{way:?} {script}: {outcome:?}");
        assert_eq!(service(pool), before, "{way:?} {script}");
    };
    refused(&format!("dd if=/dev/zero of={at}/full bs=1M count=2000"));
    let size = fs::metadata(mounted.path().join("full")).expect("there").len();
    assert!((limit * 9 / 10..=limit).contains(&size), "{way:?}: {size} bytes of {limit}");
    let _ = pool.shell(way, &format!("sync {at}/full; rm {at}/full")).expect("removed");
    // Each of these takes memory, and no block.
    refused(&format!("mkdir {at}/names; cd {at}/names; seq 1000000 | xargs -n 1000 sh -c 'for n; do : > $n; done'"));
    let _ = pool.shell(way, &format!("rm -r {at}/names")).expect("removed");
    // As much as before can be written again.
    refused(&format!("dd if=/dev/zero of={at}/full bs=1M count=2000"));
    let again = fs::metadata(mounted.path().join("full")).expect("there").len();
    assert!(again >= size * 9 / 10, "{way:?}: {again} bytes, and {size} before");
    let _ = pool.shell(way, &format!("rm {at}/full")).expect("removed");
}

#[test]
fn writers_get_enospc_and_the_service_lives() {
    isolated("writers_get_enospc_and_the_service_lives", |folder| {
        let (pool, memory) = with_filesystem(folder, "tmpfs", "mode=755");
        let limit = LEFT / 2;
        let at = folder.join("mnt");
        fs::create_dir(&at).expect("a mount point");
        let lower = folder.join("lower");
        let mount = |stack: &[&str]| {
            let outcome = pool.poolfs(&[&["mount", pool.name(), text(&at)], stack].concat());
            assert_eq!(outcome.code, 0, "{outcome:?}");
            assert_eq!(outcome.err.lines().filter(|line| line.contains("tmpfs")).count(), 1, "{outcome:?}");
            let size = pool.shell(Way::Fuse, &format!("df -B1 --output=size {} | tail -n 1", at.display()));
            assert_eq!(size.expect("df").trim(), limit.to_string());
            pool.mounted(&at)
        };
        for way in [Way::Library, Way::Fuse] {
            let mounted = mount(&["--upper", text(&memory.join("up")), "--lower", text(&lower)]);
            fill(&pool, way, &mounted, limit);
            drop(mounted);
            let mounted = mount(&["--dir", text(&memory.join("dir"))]);
            fill(&pool, way, &mounted, limit);
            drop(mounted);
        }
    });
}

#[test]
fn all_directories_in_memory_have_no_more_than_the_pool_can_spare() {
    isolated("all_directories_in_memory_have_no_more_than_the_pool_can_spare", |folder| {
        let (pool, memory) = with_filesystem(folder, "tmpfs", "size=10G");
        let lower = folder.join("lower");
        let mount = |at: &str, upper: &str, more: &[&str]| {
            let at = folder.join(at);
            fs::create_dir_all(&at).expect("a mount point");
            let upper = memory.join(upper);
            let stack = ["mount", pool.name(), text(&at), "--upper", text(&upper), "--lower", text(&lower)];
            pool.poolfs(&[&stack, more].concat())
        };
        let refused = mount("one", "up", &["--upper-size", "1G"]);
        let told = "110 MiB of that are left";
        assert!(refused.code != 0 && refused.err.contains(told) && refused.err.contains("--upper-size"), "{refused:?}");
        let _ = mount("one", "up", &["--upper-size", "70M"]).expect("mount");
        let first = service(&pool);
        let refused = mount("two", "second", &["--upper-size", "41M"]);
        assert!(refused.code != 0 && refused.err.contains("40.0 MiB of that are left"), "{refused:?}");
        let _ = mount("two", "second", &["--upper-size", "40M"]).expect("mount");
        let refused = mount("three", "dir", &[]);
        assert!(refused.code != 0 && refused.err.contains("--memory"), "{refused:?}");
        for at in ["one", "two"] {
            let full =
                pool.shell(Way::Library, &format!("dd if=/dev/zero of={}/full bs=1M", folder.join(at).display()));
            assert!(full.code != 0 && full.err.contains("No space left"), "{full:?}");
        }
        assert_eq!(service(&pool), first);
        // What was written is there, and counts, after its mount has gone; not any more after the last.
        let umount = |at: &str| pool.poolfs(&["umount", pool.name(), text(&folder.join(at))]).expect("umount");
        let _ = umount("two");
        let refused = mount("three", "dir", &[]);
        assert!(refused.code != 0 && refused.err.contains("--memory"), "{refused:?}");
        let _ = mount("two", "second", &[]).expect("mount");
        let _ = (umount("one"), umount("two"));
        let _ = mount("three", "dir", &[]).expect("mount");
        let _ = umount("three");
    });
}

#[test]
fn what_containers_have_is_not_taken_from_them() {
    isolated("what_containers_have_is_not_taken_from_them", |folder| {
        let (pool, memory) = with_filesystem(folder, "tmpfs", "mode=755");
        fs::create_dir(folder.join("disk")).expect("a folder");
        let [at, lower] = ["mnt", "lower"].map(|name| folder.join(name));
        fs::create_dir(&at).expect("a mount point");
        // As long as something is mounted, what commands leave in memory counts for the pool.
        let other = pool.mount_union(&folder.join("other"), &folder.join("disk"), &[&lower]);
        let hog = memory.join("hog");
        let _ = pool.shell(Way::Fuse, &format!("head -c 100000000 /dev/zero > {}", hog.display())).expect("room");
        let mount = |size: &str| {
            let upper = memory.join("up");
            let stack = ["--upper", text(&upper), "--lower", text(&lower), "--upper-size", size];
            pool.poolfs(&[&["mount", pool.name(), text(&at)], &stack[..]].concat())
        };
        let refused = mount("100M");
        assert!(refused.code != 0 && refused.err.contains("its containers have"), "{refused:?}");
        let _ = mount("50M").expect("mount");
        drop(pool.mounted(&at));
        fs::remove_file(hog).expect("there");
        let _ = mount("100M").expect("mount");
        drop(pool.mounted(&at));
        drop(other);
    });
}

#[test]
fn what_has_no_size_or_takes_more_than_is_written_is_refused() {
    isolated("what_has_no_size_or_takes_more_than_is_written_is_refused", |folder| {
        let (pool, memory) = with_filesystem(folder, "ramfs", "mode=755");
        let [at, upper, directory, lower] =
            [folder.join("mnt"), memory.join("up"), memory.join("dir"), folder.join("lower")];
        fs::create_dir(&at).expect("a mount point");
        for stack in [&["--upper", text(&upper), "--lower", text(&lower)][..], &["--dir", text(&directory)]] {
            let refused = pool.poolfs(&[&["mount", pool.name(), text(&at)], stack].concat());
            assert!(refused.code != 0 && refused.err.contains("ramfs"), "{refused:?}");
        }
        drop(pool.mount_union(&at, &lower, &[&directory]));
        let _ =
            run(Command::new("mount").args(["-t", "tmpfs", "-o", "huge=always", "huge"]).arg(&memory)).expect("mount");
        let refused = pool.poolfs(&["mount", pool.name(), text(&at), "--dir", text(&memory)]);
        assert!(refused.code != 0 && refused.err.contains("huge"), "{refused:?}");
        let _ = run(Command::new("umount").arg(&memory)).expect("umount");
        let _ = run(Command::new("umount").arg(&memory)).expect("umount");
    });
}

#[test]
fn what_was_set_aside_for_a_mount_that_failed_is_given_back() {
    isolated("what_was_set_aside_for_a_mount_that_failed_is_given_back", |folder| {
        let (pool, memory) = with_filesystem(folder, "tmpfs", "size=1G");
        let [at, dir, lower] = ["at", "dir", "lower"].map(|name| folder.join(name));
        for path in [&at, &dir] {
            fs::create_dir(path).expect("a folder");
        }
        let other = pool.mount_directory(&folder.join("other"), &dir);
        let set_aside = || {
            let record = pool.poolfs(&["pool", "inspect", pool.name(), "--json"]).expect("inspect");
            let record: Value = serde_json::from_str(&record).expect("JSON");
            record["in_memory"].as_array().map_or(0, Vec::len)
        };
        let damaged = memory.join("second/.poolfs");
        fs::create_dir(&damaged).expect("a folder");
        fs::write(damaged.join("format"), "nothing known").expect("written");
        let mount = |upper: &str| {
            let mut command = pool.command();
            command.args(["mount", pool.name()]).arg(&at).arg("--upper").arg(memory.join(upper));
            run(command.arg("--lower").arg(&lower))
        };
        for _ in 0..3 {
            let refused = mount("second");
            assert!(refused.code != 0, "{refused:?}");
            assert_eq!(set_aside(), 0);
        }
        let _ = mount("up").expect("mount");
        assert_eq!(set_aside(), 1);
        let _ = pool.poolfs(&["umount", pool.name(), text(&at)]).expect("umount");
        // What was written there is memory of the pool's as before.
        assert_eq!(set_aside(), 1);
        drop(other);
    });
}
