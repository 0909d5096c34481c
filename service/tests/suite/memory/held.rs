//! Tests of the memory that the service keeps for each node, when a client holds as many nodes as it can.

use super::{CACHE_BYTES, Group, LIMIT_BYTES, goes_on, mebibytes, mounted_with_full_cache, tmpfs};
use crate::harness::{Running, isolated, make};
use rustix::fs::{FileType, Mode, OFlags, inotify, lgetxattr, mkdirat, mknodat, open, openat};
use rustix::io::Errno;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

const NAMES: [&str; 2] = ["hostile", "other"];

/// Holds what is at a path without opening it, nor with a descriptor of each.
fn hold(watch: &OwnedFd, path: &Path) -> Result<(), Errno> {
    inotify::add_watch(watch, path, inotify::WatchFlags::DELETE_SELF | inotify::WatchFlags::DONT_FOLLOW).map(drop)
}

fn watch() -> OwnedFd {
    inotify::init(inotify::CreateFlags::CLOEXEC).expect("inotify")
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
        let (group, log) = (Group::make(folder, LIMIT_BYTES), folder.join("log"));
        let service = Running::start_in(folder, CACHE_BYTES, &log, &group.place);
        let lower = tmpfs(&folder.join("lower"));
        let part = "d".repeat(255);
        let file = |number: usize| format!("{number:0>250}");
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut at = open(&lower, flags, Mode::empty()).expect("opened");
        for depth in 1..=DEPTH {
            mkdirat(&at, &part, Mode::RWXU).expect("made");
            at = openat(&at, &part, flags, Mode::empty()).expect("opened");
            // Paths of files there are just not too long.
            for number in 0..if depth == 15 { FILES } else { 0 } {
                mknodat(&at, file(number), FileType::RegularFile, Mode::RUSR, 0).expect("made");
            }
        }
        let [hostile, other] = mounted_with_full_cache(&service, folder, &[lower], NAMES);
        let mut way = vec![open(&hostile, flags, Mode::empty()).expect("opened")];
        let why = loop {
            match openat(way.last().expect("the root"), &part, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
                Ok(next) => way.push(next),
                Err(why) => break why,
            }
        };
        report(&group, way.len(), &log);
        assert_eq!((way.len() - 1, why), (16, Errno::NAMETOOLONG));
        let (watch, place) = (watch(), PathBuf::from(format!("/proc/self/fd/{}", way[15].as_raw_fd())));
        let mut held = (0..FILES).map(|number| (number, hold(&watch, &place.join(file(number)))));
        let (held, refused) = held.find(|(_, held)| held.is_err()).expect("there is a bound");
        goes_on(&other);
        report(&group, held, &log);
        assert_eq!(refused, Err(Errno::NOMEM));
    });
}

#[test]
fn answers_of_branches() {
    isolated("memory::held::answers_of_branches", |folder| {
        const LINKS: usize = 20_000;
        let (group, log) = (Group::make(folder, LIMIT_BYTES), folder.join("log"));
        let service = Running::start_in(folder, CACHE_BYTES, &log, &group.place);
        let lower = tmpfs(&folder.join("lower"));
        let links = make(&lower.join("links"));
        let target = "t".repeat(4000);
        (0..LINKS).for_each(|number| symlink(&target, links.join(number.to_string())).expect("made"));
        let [hostile, other] = mounted_with_full_cache(&service, folder, &[lower], NAMES);
        let (watch, place) = (watch(), hostile.join("links"));
        let path = |number: usize| place.join(number.to_string());
        let held = (0..LINKS).take_while(|&number| hold(&watch, &path(number)).is_ok()).count();
        for number in 0..held {
            assert_eq!(fs::read_link(path(number)).expect("read"), Path::new(&target));
            for digit in 0..8 {
                let absent = format!("trusted.{}", digit.to_string().repeat(240));
                let mut value = [0; 8];
                assert_eq!(lgetxattr(path(number), absent, &mut value), Err(Errno::NODATA));
            }
        }
        goes_on(&other);
        report(&group, held, &log);
        assert!(held > 10_000, "{held} links were held");
    });
}
