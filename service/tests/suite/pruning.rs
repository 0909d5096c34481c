//! Test of pruning: a walk through more files than the service has memory for makes the kernel forget them.

use crate::harness::{Running, isolated, make};
use crate::over_rings::is_over_rings;
use poolfs_service_protocol::StackSpec;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

const DIRECTORIES: usize = 40;
const FILES: usize = 1000;

/// What a service with a cache of 16 MiB lets the kernel know.
const NODES_MAX: u64 = 4096;

fn kibibytes(service: &Running) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", service.pid())).expect("it lives");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("it lives");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// Looks at all of a tree, and after each directory waits until the kernel has forgotten what it was asked to: what the service needs at most then
/// depends on its bounds, and not on who is faster.
fn walk(service: &Running, at: &Path) -> usize {
    let mut found = 0;
    for entry in fs::read_dir(at).expect("listed") {
        let entry = entry.expect("listed");
        let metadata = fs::symlink_metadata(entry.path()).expect("there");
        found += 1;
        if metadata.is_dir() {
            found += walk(service, &entry.path());
            wait_for_room(service);
        }
    }
    found
}

fn wait_for_room(service: &Running) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let nodes: u64 = service.status().instances.iter().map(|instance| instance.nodes).sum();
        if nodes <= NODES_MAX * 5 / 4 {
            return;
        }
        assert!(Instant::now() < deadline, "the kernel knows {nodes} nodes");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn what_a_walk_leaves_with_the_service_is_bounded() {
    isolated("pruning::what_a_walk_leaves_with_the_service_is_bounded", |folder| {
        let [upper, lower] = ["upper", "lower"].map(|name| make(&folder.join(name)));
        for directory in 0..DIRECTORIES {
            let directory = make(&lower.join(format!("d{directory}")));
            for file in 0..FILES {
                File::create(directory.join(format!("a-file-with-a-name-{file}"))).expect("made");
            }
        }
        let service = Running::start_with(folder, 16 << 20);
        let at = service.mount("one", StackSpec::union(upper, vec![lower]));
        fs::write(at.join("d0/a-file-with-a-name-0"), b"kept").expect("written");
        let mut open = File::open(at.join("d0/a-file-with-a-name-0")).expect("there");
        let before = kibibytes(&service);
        for _ in 0..2 {
            assert_eq!(walk(&service, &at), DIRECTORIES * (FILES + 1));
            wait_for_room(&service);
        }
        let grown = kibibytes(&service).saturating_sub(before);
        // Half of what it is without pruning, over 100 MiB. Each entry of a ring, four of a CPU, has memory of its own for a transfer from its first use on.
        let entries = if is_over_rings() { std::thread::available_parallelism().expect("known").get() * 4 } else { 0 };
        assert!(grown < (48 + entries as u64) << 10, "the service has grown by {grown} KiB");
        let mut content = String::new();
        open.read_to_string(&mut content).expect("still open");
        assert_eq!(
            (content.as_str(), fs::read(at.join("d0/a-file-with-a-name-0")).expect("there")),
            ("kept", b"kept".to_vec())
        );
    });
}
