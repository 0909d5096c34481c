//! Targets of symbolic links, which the kernel caches, are current by both paths.

use poolfs_tests::{Pool, Way, isolated};
use std::fs;

#[test]
fn targets_of_links_stay_with_the_kernel_and_are_current() {
    isolated("targets_of_links_stay_with_the_kernel_and_are_current", |folder| {
        let (pool, lower) = (Pool::create(folder, "64M"), folder.join("lower"));
        for branch in ["lower", "upper"] {
            fs::create_dir_all(folder.join(branch)).expect("a folder");
        }
        std::os::unix::fs::symlink("below", lower.join("link")).expect("a link");
        let mount = pool.mount_union(&folder.join("mnt"), &folder.join("upper"), &[&lower]);
        let link = mount.path().join("link");
        let target = || fs::read_link(&link).expect("a link").display().to_string();
        assert_eq!(target(), "below");
        let before = pool.operations(Way::Fuse);
        for _ in 0..100 {
            assert_eq!(target(), "below");
        }
        let asked = pool.operations(Way::Fuse) - before;
        assert!(asked < 10, "the kernel asked {asked} times for what it knows");
        // A copy in the upper branch is the same link; every other target, longer or shorter, is a new one.
        for way in [Way::Library, Way::Fuse] {
            let change = |script: &str| {
                let _ = pool.shell(way, &format!("cd {}; {script}", mount.path().display())).expect(script);
            };
            let now = target();
            change("chown -h 12:34 link");
            assert_eq!(target(), now, "{way:?}");
            let longer = "x".repeat(4_000);
            for next in ["a", &longer, "bc"] {
                change(&format!("ln -sfn {next} link"));
                assert_eq!(target(), next, "{way:?}");
                change(&format!("ln -s other-{next} new; mv -T new link"));
                assert_eq!(target(), format!("other-{next}"), "{way:?}");
                change(&format!("rm link; ln -s {next} link"));
                assert_eq!(target(), next, "{way:?}");
            }
        }
        drop(mount);
    });
}
