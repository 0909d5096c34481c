//! One cached copy of every byte for all containers of a pool that share an image's layers.

use poolfs_tests::{Pool, Stepper, Way, compile, hash, import_small, isolated};
use serde_json::Value;
use std::fs;

const FILES: usize = 10;
const SIZE: usize = 30 << 20;
/// What is read at a time, the files taking turns: `cat` and `cp` read the smaller piece, copies of databases the larger.
const PIECES: [usize; 3] = [1 << 20, 1 << 20, 128 << 10];

/// Reads files of the image to their ends.
fn read_all(reader: &mut Stepper, files: usize) {
    for number in 0..files {
        assert_eq!(reader.step(&format!("open /data/f{number} 0")), Ok(0));
        let piece = PIECES[number % PIECES.len()];
        let expected = hash(&vec![number as u8 + 1; piece]);
        for at in (0..SIZE).step_by(piece) {
            assert_eq!(reader.step(&format!("pread {at} {piece}")), Ok(expected), "file {number} at {at}");
        }
        assert_eq!(reader.step("close"), Ok(0));
    }
}

fn instances(status: &Value) -> &[Value] {
    status["service"]["instances"].as_array().expect("a running service")
}

#[test]
fn two_containers_that_read_the_same_image_share_its_cached_bytes() {
    isolated("two_containers_that_read_the_same_image_share_its_cached_bytes", |folder| {
        let pool = Pool::create(folder, "1G");
        let program = compile(folder, "steps", false);
        import_small(&pool, folder, "shared", &[&program], |root| {
            fs::create_dir(root.join("data")).expect("a folder");
            for number in 0..FILES {
                fs::write(root.join(format!("data/f{number}")), vec![number as u8 + 1; SIZE]).expect("a file");
            }
        });
        let mut readers = [(); 2].map(|()| Stepper::in_container(&pool, "shared", "steps", Way::Library));
        for reader in &mut readers {
            assert_eq!(reader.step("statsize /data/f0"), Ok(SIZE as u64), "it runs");
        }
        let memory = || pool.status()["memory_used_bytes"].as_u64().expect("a running service");
        let before = memory();
        readers.iter_mut().for_each(|reader| read_all(reader, FILES));
        let (grown, all) = (memory() - before, (FILES * SIZE) as u64);
        assert!(grown <= all * 11 / 10, "the pool's memory grew by {grown} for files of {all}");
        let status = pool.status();
        assert_eq!(instances(&status).len(), 2);
        for instance in instances(&status) {
            let reads = instance["operations"]["library"]["read"]["count"].as_u64().expect("reads by the library");
            assert!(reads > 0, "{instance}");
            let besides = instance["kernel_cached_bytes"].as_u64().expect("a number");
            assert!(besides < all / 10, "the kernel caches {besides} of what the library read");
        }
        let used = status["service"]["cache"]["used_bytes"].as_u64().expect("a number");
        assert!(used >= all * 9 / 10 && used <= all * 11 / 10, "the cache holds {used} of files of {all}");

        // What the kernel caches besides, for whoever does not use the library, is told apart.
        let mut by_kernel = Stepper::in_container(&pool, "shared", "steps", Way::Fuse);
        read_all(&mut by_kernel, 1);
        let status = pool.status();
        let most = instances(&status).iter().filter_map(|instance| instance["kernel_cached_bytes"].as_u64()).max();
        let most = most.expect("three instances");
        assert!(most >= SIZE as u64 && most <= 2 * SIZE as u64, "the kernel caches {most} of one file of {SIZE}");
        let text = pool.poolfs(&["status", pool.name()]).expect("status");
        assert!(text.lines().filter(|line| line.contains("the kernel caches")).count() == 3, "{text}");
        drop((readers, by_kernel));
    });
}
