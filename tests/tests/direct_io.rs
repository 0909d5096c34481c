//! Writes that bypass the kernel's page cache (`programs/direct.c`), beside readers that it caches for: once written, the data is what
//! everybody reads, also when others read while the writes were in progress.

use poolfs_tests::{Pool, Way, compile, isolated};
use std::fs;

const ROUNDS: u32 = 150;

#[test]
fn readers_see_direct_writes_by_fuse() {
    check("readers_see_direct_writes_by_fuse", Way::Fuse);
}

#[test]
fn readers_see_direct_writes_by_the_library() {
    check("readers_see_direct_writes_by_the_library", Way::Library);
}

fn check(name: &str, way: Way) {
    isolated(name, |folder| {
        let pool = Pool::create(folder, "64M");
        let (upper, lower, mounted) = (folder.join("upper"), folder.join("lower"), folder.join("mnt"));
        let _ = [&upper, &lower].map(|place| fs::create_dir(place).expect("a folder"));
        let union = pool.mount_union(&mounted, &upper, &[&lower]);
        let program = compile(folder, "direct", false);
        let mut wrong = Vec::new();
        for how in ["pwrite", "libaio", "io_uring"] {
            let script = format!("{} {how} {} {ROUNDS}", program.display(), mounted.join(how).display());
            let outcome = pool.shell(way, &script);
            if outcome.code != 0 {
                wrong.push(format!("{how}: {}{}", outcome.out, outcome.err));
            }
        }
        assert!(wrong.is_empty(), "by {way:?}: {wrong:#?}");
        let _ = union.unmount().expect("umount");
    });
}
