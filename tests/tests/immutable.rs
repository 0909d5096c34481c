//! Lower branches that are mounted with `--immutable`: what others change in them is not served, by neither path.

use poolfs_tests::{Pool, Way, isolated};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Changes a file until it shows a later time of change than before: clocks of files tick.
fn change(path: &Path) {
    let changed = || fs::metadata(path).map(|found| (found.ctime(), found.ctime_nsec())).expect("there");
    let before = changed();
    while changed() == before {
        fs::write(path, "another").expect("written");
    }
}

#[test]
fn what_others_change_in_an_immutable_branch_is_not_served() {
    isolated("what_others_change_in_an_immutable_branch_is_not_served", |folder| {
        let [lower, upper, at] = ["lower", "upper", "mnt"].map(|name| folder.join(name));
        [&lower, &upper, &at].iter().for_each(|directory| fs::create_dir(directory).expect("made"));
        for name in ["changed", "same"] {
            fs::create_dir(lower.join(name)).expect("made");
            fs::write(lower.join(name).join("f"), "as it was").expect("written");
        }
        let pool = Pool::create(folder, "16M");
        let [upper, branch] = [&upper, &lower].map(|path| path.to_str().expect("text"));
        let _mounted = pool.mount(&at, &["--upper", upper, "--lower", branch, "--immutable"]);
        let inspected = pool.poolfs(&["pool", "inspect", pool.name()]).expect("pool inspect");
        assert!(inspected.contains(&format!("immutable lower branch {branch}")), "{inspected}");
        change(&lower.join("changed/f"));
        for way in [Way::Library, Way::Fuse] {
            let read = |name: &str| pool.shell(way, &format!("head -c 9 {}/{name}/f", at.display()));
            let refused = read("changed");
            assert!(refused.code != 0 && refused.err.contains("Input/output error"), "{way:?}: {refused:?}");
            assert_eq!(read("same").expect("what nobody has changed"), "as it was", "{way:?}");
        }
        assert!(pool.service_log().contains("mounted as immutable was changed"), "{}", pool.service_log());
    });
}
