//! What the service keeps of each node, where somebody holds as many as he can.

use super::{
    CACHE_BYTES, Group, LIMIT_BYTES, allow_many_descriptors, goes_on, mebibytes, mounted_with_full_cache, tmpfs,
};
use crate::harness::{Running, isolated, make};
use rustix::fs::{CWD, Mode, OFlags, getxattr, mkdirat, mknodat, open, openat, readlinkat};
use rustix::io::Errno;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::Path;

const NAMES: [&str; 2] = ["hostile", "other"];

/// Holds without opening.
fn hold(directory: &impl AsFd, name: &str) -> Result<OwnedFd, Errno> {
    openat(directory, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

fn report(group: &Group, held: usize, log: &Path) {
    println!("{} MiB with {held} nodes", mebibytes(group.kept()));
    assert_eq!(group.kills(), 0, "{}", fs::read_to_string(log).expect("a log"));
}

#[test]
fn paths_in_lower_branches() {
    isolated("memory::held::paths_in_lower_branches", |folder| {
        const DEPTH: usize = 1500;
        const FILES: usize = 36_000;
        allow_many_descriptors();
        let (group, log) = (Group::make(folder, LIMIT_BYTES), folder.join("log"));
        let service = Running::start_in(folder, CACHE_BYTES, &log, &group.place);
        let lower = tmpfs(&folder.join("lower"));
        let part = "d".repeat(255);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut at = open(&lower, flags, Mode::empty()).expect("opened");
        for depth in 0..DEPTH {
            mkdirat(&at, &part, Mode::RWXU).expect("made");
            at = openat(&at, &part, flags, Mode::empty()).expect("opened");
            // Names of files there are just not too long.
            for number in 0..if depth == 14 { FILES } else { 0 } {
                mknodat(&at, format!("{number:0>250}"), rustix::fs::FileType::RegularFile, Mode::RUSR, 0)
                    .expect("made");
            }
        }
        let [hostile, other] = mounted_with_full_cache(&service, folder, &[lower], NAMES);
        let mut held = vec![open(&hostile, flags, Mode::empty()).expect("opened")];
        let why = loop {
            match hold(held.last().expect("the root"), &part) {
                Ok(next) => held.push(next),
                Err(why) => break why,
            }
        };
        report(&group, held.len(), &log);
        assert_eq!((held.len() - 1, why), (15, Errno::NAMETOOLONG));
        let last = held.pop().expect("the last");
        let refused = (0..FILES).find_map(|number| match hold(&last, &format!("{number:0>250}")) {
            Ok(file) => {
                held.push(file);
                None
            }
            Err(why) => Some(why),
        });
        goes_on(&other);
        report(&group, held.len(), &log);
        assert_eq!(refused, Some(Errno::NOMEM));
    });
}

#[test]
fn answers_of_branches() {
    isolated("memory::held::answers_of_branches", |folder| {
        const LINKS: usize = 20_000;
        allow_many_descriptors();
        let (group, log) = (Group::make(folder, LIMIT_BYTES), folder.join("log"));
        let service = Running::start_in(folder, CACHE_BYTES, &log, &group.place);
        let lower = tmpfs(&folder.join("lower"));
        let links = make(&lower.join("links"));
        let target = "t".repeat(4000);
        (0..LINKS).for_each(|number| symlink(&target, links.join(number.to_string())).expect("made"));
        let [hostile, other] = mounted_with_full_cache(&service, folder, &[lower], NAMES);
        let place = openat(CWD, hostile.join("links"), OFlags::PATH, Mode::empty()).expect("held");
        let held: Vec<_> = (0..LINKS).map_while(|number| hold(&place, &number.to_string()).ok()).collect();
        for link in &held {
            assert_eq!(readlinkat(link, "", Vec::new()).expect("read").as_bytes(), target.as_bytes());
            let path = format!("/proc/self/fd/{}", link.as_raw_fd());
            for number in 0..8 {
                let absent = format!("trusted.{}", number.to_string().repeat(240));
                let mut value = [0; 8];
                assert_eq!(getxattr(&path, absent, &mut value), Err(Errno::NODATA));
            }
        }
        goes_on(&other);
        report(&group, held.len(), &log);
        assert!(held.len() > 10_000, "{} links were held", held.len());
    });
}
