//! fsx on files of the lower branch: through FUSE and through the library, with caches larger and far smaller than the file.

use poolfs_tests::{Cluster, Pool, Way, checksum, isolated, tool};
use std::fs;
use std::path::Path;

const OPERATIONS: u32 = 50_000;

/// Each of which may ask a cluster.
const OPERATIONS_AT_CLUSTER: u32 = 2_000;

/// A file that was mapped shared and writable is the kernel's from then on, so the library's runs do not map.
const CONFIGURATION: &str = "flen = 1048576\n[opsize]\nmax = 65536\n[weights]\nclose_open = 1\ninvalidate = 1\nmapread = MAP\n\
    mapwrite = MAP\nread = 10\nwrite = 10\ntruncate = 10\nfsync = 0.5\nfdatasync = 0.5\nposix_fallocate = 1\npunch_hole = 5\n\
    sendfile = 5\nposix_fadvise = 1\ncopy_file_range = 5\n";

/// Has fsx do so many operations on a file, weighted like this.
fn run_fsx(folder: &Path, pool: &Pool, way: Way, seed: u32, file: &Path, weights: &str, operations: u32) {
    let configuration = folder.join("fsx.toml");
    let maps = if way == Way::Library { "0" } else { "10" };
    fs::write(&configuration, weights.replace("MAP", maps)).expect("a file");
    let script = format!(
        "{} -f {} -N {operations} -S {seed} -P {} {}",
        tool("fsx").display(),
        configuration.display(),
        folder.display(),
        file.display()
    );
    let outcome = pool.shell(way, &script);
    assert_eq!(outcome.code, 0, "fsx, seed {seed}, {way:?}:\n{}\n{}", outcome.out, outcome.err);
}

fn fsx_on_lower_file(folder: &Path, cache: &str, way: Way, seeds: &[u32]) {
    fsx_on_lower_file_stored(folder, cache, way, seeds, "sparse");
}

fn fsx_on_lower_file_stored(folder: &Path, cache: &str, way: Way, seeds: &[u32], format: &str) {
    let lower = folder.join("lower");
    fs::create_dir_all(&lower).expect("a folder");
    fs::create_dir_all(folder.join("upper")).expect("a folder");
    for seed in seeds {
        fs::write(lower.join(format!("file-{seed}")), vec![0xa5; 700_001]).expect("a file");
    }
    let before = checksum(&lower);
    let pool = Pool::create(folder, cache);
    let mount = pool.mount_stored(&folder.join("mnt"), &folder.join("upper"), &lower, format);
    for seed in seeds {
        let file = mount.path().join(format!("file-{seed}"));
        run_fsx(folder, &pool, way, *seed, &file, CONFIGURATION, OPERATIONS);
    }
    assert!(pool.operations(way) > u64::from(OPERATIONS) / 10, "hardly any operation went by {way:?}");
    drop(mount);
    drop(pool);
    assert_eq!(before, checksum(&lower), "the lower branch changed");
}

#[test]
fn fsx_through_fuse() {
    isolated("fsx_through_fuse", |folder| fsx_on_lower_file(folder, "64M", Way::Fuse, &[1, 2]));
}

#[test]
fn fsx_through_the_library() {
    isolated("fsx_through_the_library", |folder| fsx_on_lower_file(folder, "64M", Way::Library, &[3, 4]));
}

#[test]
fn fsx_through_fuse_with_a_tiny_cache() {
    isolated("fsx_through_fuse_with_a_tiny_cache", |folder| fsx_on_lower_file(folder, "256K", Way::Fuse, &[5]));
}

#[test]
fn fsx_through_the_library_with_a_tiny_cache() {
    isolated("fsx_through_the_library_with_a_tiny_cache", |folder| {
        fsx_on_lower_file(folder, "256K", Way::Library, &[6]);
    });
}

#[test]
fn fsx_on_files_stored_compactly() {
    isolated("fsx_on_files_stored_compactly", |folder| {
        for (format, way, seed) in [("bcow-space", Way::Fuse, 7), ("bcow-performance", Way::Library, 8)] {
            let own = folder.join(format);
            fsx_on_lower_file_stored(&own, "256K", way, &[seed], format);
        }
    });
}

#[test]
fn fsx_on_files_at_a_cluster() {
    isolated("fsx_on_files_at_a_cluster", |folder| {
        let cluster = Cluster::create(folder);
        cluster.make_directories(&["dir", "strict", "upper", "compact", "lower"]);
        let pool = Pool::create(folder, "256K");
        let mount = |at: &str, stack: &[&str]| pool.mount(&folder.join(at), &[stack, &cluster.access()[..]].concat());
        let lower = mount("mnt-lower", &["--dir", "ceph:/lower"]);
        let seeds = [9, 10];
        for seed in seeds {
            fs::write(lower.path().join(format!("file-{seed}")), vec![0xa5; 700_001]).expect("a file");
        }
        let before = checksum(lower.path());
        let _ = lower.unmount().expect("umount");
        let stacks: [&[&str]; 4] = [
            &["--dir", "ceph:/dir"],
            &["--dir", "ceph:/strict", "--consistency", "strict"],
            &["--upper", "ceph:/upper", "--lower", "ceph:/lower"],
            &["--upper", "ceph:/compact", "--lower", "ceph:/lower", "--upper-format", "bcow"],
        ];
        for stack in stacks {
            let mounted = mount("mnt", stack);
            for (way, seed) in [Way::Library, Way::Fuse].into_iter().zip(seeds) {
                let file = mounted.path().join(format!("file-{seed}"));
                if !file.exists() {
                    fs::write(&file, vec![0xa5; 700_001]).expect("a file");
                }
                // CephFS reserves no room.
                let weights = CONFIGURATION.replace("posix_fallocate = 1", "posix_fallocate = 0");
                run_fsx(folder, &pool, way, seed, &file, &weights, OPERATIONS_AT_CLUSTER);
            }
            let _ = mounted.unmount().expect("umount");
        }
        let lower = mount("mnt-lower", &["--dir", "ceph:/lower"]);
        assert_eq!(before, checksum(lower.path()), "the lower branch changed");
        let _ = lower.unmount().expect("umount");
    });
}
