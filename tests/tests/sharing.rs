//! One cached copy of every byte for all instances of a pool that share a branch.

use poolfs_tests::{Pool, Way, isolated};
use std::fs;

#[test]
fn two_instances_that_read_the_same_branch_share_its_cached_bytes() {
    isolated("two_instances_that_read_the_same_branch_share_its_cached_bytes", |folder| {
        const FILES: usize = 10;
        const SIZE: usize = 30 << 20;
        let lower = folder.join("lower");
        fs::create_dir_all(&lower).expect("a folder");
        for number in 0..FILES {
            fs::write(lower.join(format!("f{number}")), vec![number as u8 + 1; SIZE]).expect("a file");
        }
        let pool = Pool::create(folder, "1G");
        let mounts: Vec<_> = ["a", "b"]
            .map(|name| {
                let upper = folder.join(format!("upper-{name}"));
                fs::create_dir_all(&upper).expect("a folder");
                pool.mount_union(&folder.join(name), &upper, &[&lower])
            })
            .into_iter()
            .collect();
        let memory = |pool: &Pool| {
            find(&pool.status(), "memory_used_bytes").and_then(serde_json::Value::as_u64).expect("a running service")
        };
        let before = memory(&pool);
        for mount in &mounts {
            let script = format!(
                "for f in {}/f*; do /usr/bin/python3 -c '
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
at = 0
while True:
    piece = os.pread(fd, 1 << 17, at)
    if not piece: break
    at += len(piece)
print(at)' $f; done",
                mount.path().display()
            );
            let text = pool.shell(Way::Library, &script).expect("reading");
            assert_eq!(text.lines().filter(|line| *line == SIZE.to_string()).count(), FILES, "{text}");
        }
        let (grown, all) = (memory(&pool) - before, (FILES * SIZE) as u64);
        assert!(grown <= all * 11 / 10, "the pool's memory grew by {grown} for files of {all}");
        let status = pool.status();
        let cache = find(&status, "cache").expect("status tells of the cache");
        let used = cache.get("used_bytes").and_then(serde_json::Value::as_u64).expect("a number");
        assert!(used >= all * 9 / 10, "the files are cached: {used} of {all}");
        assert!(used <= all * 11 / 10, "two readers hold {used} bytes of files of {all}");
        drop(mounts);
    });
}

fn find<'v>(value: &'v serde_json::Value, key: &str) -> Option<&'v serde_json::Value> {
    match value {
        serde_json::Value::Object(map) => map.get(key).or_else(|| map.values().find_map(|inner| find(inner, key))),
        serde_json::Value::Array(items) => items.iter().find_map(|inner| find(inner, key)),
        _ => None,
    }
}
