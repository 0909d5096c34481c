//! Shortages of a service (descriptors, memory, the branch itself) affect its own pool only, and end when there is enough again.

use poolfs_tests::{Pool, Way, isolated, populate, shell};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Whether `work` was done, or failed as the kernel's own file systems fail; in no case it waits long.
fn in_time<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let done = work();
    assert!(start.elapsed() < Duration::from_secs(20), "{what} took {:?}", start.elapsed());
    done
}

fn descriptors(process: i32) -> u64 {
    fs::read_dir(format!("/proc/{process}/fd")).expect("it lives").count() as u64
}

#[test]
fn a_service_out_of_descriptors_says_so_and_recovers() {
    isolated("a_service_out_of_descriptors_says_so_and_recovers", |folder| {
        fs::create_dir_all(folder.join("dir")).expect("a folder");
        for number in 0..200 {
            fs::write(folder.join(format!("dir/f{number}")), vec![number as u8; 100_000]).expect("a file");
        }
        let pool = Pool::create(folder, "64M");
        let mount = pool.mount_directory(&folder.join("mnt"), &folder.join("dir"));
        let at = mount.path();
        let mut early = File::open(at.join("f0")).expect("there");
        let service = pool.service_pid();
        let process = Pid::from_raw(service).expect("a process");
        let few = descriptors(service) + 4;
        let before = prlimit(Some(process), Resource::Nofile, Rlimit { current: Some(few), maximum: Some(20_000) })
            .expect("root may");
        // With so few, those of files used longest ago are closed for others; who is refused nevertheless is told why.
        let mut held = Vec::new();
        for number in 1..200 {
            match in_time("an open", || File::open(at.join(format!("f{number}")))) {
                Ok(file) => {
                    let mut byte = [0];
                    if let Err(error) = file.read_exact_at(&mut byte, 99_999) {
                        let errno = error.raw_os_error();
                        assert!(matches!(errno, Some(libc::EMFILE | libc::ENFILE | libc::EIO)), "{error}");
                    } else {
                        assert_eq!(byte[0], number as u8);
                    }
                    held.push(file);
                }
                Err(error) => {
                    let errno = error.raw_os_error();
                    assert!(matches!(errno, Some(libc::EMFILE | libc::ENFILE)), "{error}");
                }
            }
        }
        // Programs that get no session use the kernel.
        let out = pool.shell(Way::Library, &format!("ls {} | wc -l", at.display()));
        assert!(out.code == 0 || out.err.contains("Too many open files"), "{out:?}");
        let limit = Rlimit { current: before.current, maximum: before.maximum };
        prlimit(Some(process), Resource::Nofile, limit).expect("root may");
        drop(held);
        for number in 0..200 {
            let content = fs::read(at.join(format!("f{number}"))).expect("enough again");
            assert!(content == vec![number as u8; 100_000], "f{number}");
        }
        let mut first = Vec::new();
        early.read_to_end(&mut first).expect("it was open");
        assert!(first == vec![0; 100_000]);
        assert_eq!(pool.service_pid(), service, "{}", pool.service_log());
        drop((early, mount));
    });
}

#[test]
fn a_branch_that_is_gone_is_an_error_and_hurts_no_other() {
    isolated("a_branch_that_is_gone_is_an_error_and_hurts_no_other", |folder| {
        fs::create_dir_all(folder.join("upper")).expect("a folder");
        fs::create_dir_all(folder.join("other")).expect("a folder");
        let (image, lower) = (folder.join("lower.img"), folder.join("lower"));
        let disk = format!("mount -o loop {} {}", image.display(), lower.display());
        let made =
            format!("mkdir {0}; truncate -s 40M {1}; mkfs.ext4 -q {1}; {disk}", lower.display(), image.display());
        let _ = shell(&made).expect("a small disk");
        populate(&lower.join("tree"));
        // So that the kernel has nothing of it in its memory.
        let _ = shell(&format!("umount {}; {disk}", lower.display())).expect("mounted again");
        let pool = Pool::create(folder, "64M");
        let other = pool.mount_directory(&folder.join("mnt-other"), &folder.join("other"));
        let mount = pool.mount_union(&folder.join("mnt"), &folder.join("upper"), &[&lower.join("tree")]);
        let service = pool.service_pid();
        let at = mount.path();
        fs::write(at.join("etc/own"), b"mine").expect("written");
        let known = fs::read(at.join("etc/passwd")).expect("readable");
        // The disk below is no more: what nobody has read cannot be read.
        let _ = shell(&format!("truncate -s 4096 {}", image.display())).expect("cut");
        let big = in_time("a read", || fs::read(at.join("usr/share/doc/big")));
        let error = big.expect_err("its blocks are gone").raw_os_error();
        assert!(matches!(error, Some(libc::EIO | libc::ENOENT | libc::ESTALE | 117)), "{error:?}");
        let _ = in_time("a listing", || shell(&format!("find {} > /dev/null 2>&1 || true", at.display())));
        assert_eq!(fs::read(at.join("etc/own")).expect("of the upper branch"), b"mine");
        let again = in_time("a read of what is cached", || fs::read(at.join("etc/passwd")));
        assert!(again.is_ok_and(|content| content == known), "it was cached");
        fs::write(other.path().join("f"), b"not concerned").expect("written");
        assert_eq!(fs::read(other.path().join("f")).expect("readable"), b"not concerned");
        assert_eq!(pool.service_pid(), service, "{}", pool.service_log());
        drop((mount, other));
        drop(pool);
        let _ = shell(&format!("umount {}", lower.display())).expect("umount");
    });
}

/// What the memory control group of the pool's service counts, in this file.
fn of_group(process: i32, file: &str) -> Option<u64> {
    let groups = fs::read_to_string(format!("/proc/{process}/cgroup")).ok()?;
    let relative = groups.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        parts.next()?.split(',').any(|name| name == "memory").then(|| parts.next())?
    })?;
    let path = format!("/sys/fs/cgroup/memory{relative}/{file}");
    fs::read_to_string(Path::new(&path)).ok()?.trim().parse().ok()
}

#[test]
fn a_pool_at_its_memory_limit_goes_on_and_stays_below_it() {
    isolated("a_pool_at_its_memory_limit_goes_on_and_stays_below_it", |folder| {
        let lower = folder.join("lower");
        fs::create_dir_all(folder.join("upper")).expect("a folder");
        for directory in 0..20 {
            let directory = lower.join(format!("d{directory}"));
            fs::create_dir_all(&directory).expect("a folder");
            (0..1000).for_each(|file| drop(File::create(directory.join(format!("f{file}"))).expect("a file")));
        }
        fs::write(lower.join("big"), vec![1; 160 << 20]).expect("a file");
        let pool = Pool::with_memory(folder, "512M", "64M");
        let mount = pool.mount_union(&folder.join("mnt"), &folder.join("upper"), &[&lower]);
        let (at, service) = (mount.path().display(), pool.service_pid());
        let script = format!(
            "cat {at}/big | wc -c; head -c 200000000 /dev/zero > {at}/new; find {at} -type f | wc -l; \
             cat {at}/new | wc -c; ls -lR {at} | wc -l; rm {at}/new"
        );
        for way in [Way::Library, Way::Fuse] {
            let out = pool.shell(way, &script).expect("work beyond the pool's memory");
            let lines: Vec<&str> = out.split_whitespace().collect();
            assert_eq!(lines[..3], ["167772160", "20002", "200000000"], "{way:?}: {out}");
        }
        assert_eq!(pool.service_pid(), service, "{}", pool.service_log());
        if let (Some(most), Some(limit)) =
            (of_group(service, "memory.max_usage_in_bytes"), of_group(service, "memory.limit_in_bytes"))
        {
            assert!(most <= limit && limit < 512 << 20, "{most} of {limit}");
            // It looks at this very group.
            let status = pool.status();
            let memory = &status["service"]["memory"];
            assert_eq!(
                (memory["limit_bytes"].as_u64(), memory["state"].as_str()),
                (Some(limit), Some("plenty")),
                "{memory}"
            );
        }
        drop(mount);
    });
}
