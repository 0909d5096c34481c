//! What is refused, or told of, because it would do harm: one directory in two pools, a limit that is dropped, more memory than there is,
//! the removal of an image in use.

use poolfs_tests::{Mounted, Outcome, Pool, import_small, isolated};
use std::fs;
use std::path::Path;

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn try_mount(pool: &Pool, at: &Path, stack: &[&str]) -> Outcome {
    fs::create_dir_all(at).expect("a mount point");
    pool.poolfs(&[&["mount", pool.name(), text(at)], stack].concat())
}

#[test]
fn a_directory_is_mounted_by_two_pools_only_when_both_say_so() {
    isolated("a_directory_is_mounted_by_two_pools_only_when_both_say_so", |folder| {
        let one = Pool::create(folder, "16M");
        let two = Pool::named(folder, &format!("{}-2", one.name()), "16M");
        // What another state directory knows nothing of.
        let elsewhere = folder.join("elsewhere");
        fs::create_dir(&elsewhere).expect("a folder");
        let three = Pool::named(&elsewhere, &format!("{}-3", one.name()), "16M");
        let [data, inside, upper] = ["data", "data/inside", "upper"].map(|name| folder.join(name));
        for path in [&inside, &upper] {
            fs::create_dir_all(path).expect("a folder");
        }
        let at = |name: &str| folder.join(format!("mnt-{name}"));
        let refused = |pool: &Pool, stack: &[&str], parts: &[&str]| {
            let outcome = try_mount(pool, &at("refused"), stack);
            assert_ne!(outcome.code, 0, "{stack:?}: {outcome:?}");
            for part in parts {
                assert!(outcome.err.contains(part), "{stack:?}: {part} in {outcome:?}");
            }
        };
        let mounted = one.mount_directory(&at("one"), &data);
        fs::write(at("one").join("f"), "f").expect("written");
        let by = format!("by pool {}", one.name());
        refused(&two, &["--dir", text(&data)], &["it is what is mounted", &by, "--shared"]);
        refused(&two, &["--dir", text(&data), "--shared"], &[&by, "both with --shared"]);
        refused(&two, &["--dir", text(&inside)], &["contains, or lies in", &by]);
        refused(&two, &["--dir", text(folder)], &["contains, or lies in", &by]);
        refused(&two, &["--upper", text(&inside), "--lower", text(&elsewhere)], &[&by]);
        refused(&two, &["--upper", text(&upper), "--lower", text(&data)], &["it is what is mounted", &by]);
        refused(&three, &["--dir", text(&data)], &["another process has it mounted"]);
        // Within one pool there is one cache.
        drop(one.mount_directory(&at("again"), &data));
        drop(mounted);

        // By name.
        let shared = ["--dir", text(&data), "--shared"];
        let mounts: Vec<Mounted> = [(&one, "one"), (&two, "two"), (&three, "three")]
            .into_iter()
            .map(|(pool, name)| pool.mount(&at(name), &shared))
            .collect();
        assert_eq!(fs::read_to_string(at("two").join("f")).expect("there"), "f");
        drop(mounts);
        let exec = |pool: &Pool, spec: &str| {
            fs::create_dir_all(at("exec")).expect("a mount point");
            let spec = format!("at={},dir={}{spec}", at("exec").display(), data.display());
            pool.poolfs(&["exec", pool.name(), "--mount", &spec, "--", "cat", text(&at("exec").join("f"))])
        };
        let mounted = one.mount(&at("one"), &shared);
        assert_ne!(exec(&two, "").code, 0);
        assert_eq!(exec(&two, ",shared=yes").expect("exec"), "f");
        drop(mounted);
        assert_eq!(exec(&two, "").expect("exec"), "f");
        drop(three);
    });
}

#[test]
fn a_limit_that_a_mount_does_not_keep_is_told_of() {
    isolated("a_limit_that_a_mount_does_not_keep_is_told_of", |folder| {
        let pool = Pool::create(folder, "16M");
        let [at, upper, lower] = ["mnt", "upper", "lower"].map(|name| folder.join(name));
        for path in [&upper, &lower] {
            fs::create_dir(path).expect("a folder");
        }
        let says = |more: &[&str]| {
            let stack = [&["--upper", text(&upper), "--lower", text(&lower)], more].concat();
            let outcome = try_mount(&pool, &at, &stack);
            assert_eq!(outcome.code, 0, "{outcome:?}");
            let _ = pool.poolfs(&["umount", pool.name(), text(&at)]).expect("umount");
            outcome.err
        };
        assert_eq!(says(&[]), "");
        assert_eq!(says(&["--upper-size", "50M"]), "");
        assert_eq!(says(&["--upper-size", "60M"]), "");
        let told = says(&[]);
        let parts = ["had a limit of 60.0 MiB", &format!("--upper-size {}", 60 << 20), text(&upper)];
        assert!(parts.iter().all(|part| told.contains(part)), "{told}");
        assert_eq!(says(&[]), "", "it is told once");
        let checked = pool.poolfs(&["fsck", text(&upper), "--lower", text(&lower)]);
        assert_eq!(checked.code, 0, "{checked:?}");
    });
}

#[test]
fn a_pool_with_more_than_the_host_has_is_refused() {
    isolated("a_pool_with_more_than_the_host_has_is_refused", |folder| {
        let pool = Pool::create(folder, "16M");
        for (options, part) in [
            (&["--memory", "1000T"][..], "more than the host's"),
            (&["--cpus", "8000"], "not online"),
            (&["--memory", "512M", "--cache", "512M"], "of memory at least"),
        ] {
            let outcome = pool.poolfs(&[&["pool", "create", "other"], options].concat());
            assert!(outcome.code != 0 && outcome.err.contains(part), "{options:?}: {outcome:?}");
        }
        assert_eq!(pool.poolfs(&["pool", "ls", "--json"]).expect("pool ls").matches("\"name\"").count(), 1);
    });
}

#[test]
fn an_image_in_use_is_removed_only_by_force() {
    isolated("an_image_in_use_is_removed_only_by_force", |folder| {
        let pool = Pool::create(folder, "16M");
        import_small(&pool, folder, "small", &[], |_| {});
        let run = |name: &str, more: &[&str]| {
            let _ = pool.poolfs(&[&["run", pool.name(), "small", "--name", name], more].concat()).expect("run");
        };
        run("ended", &["--", "/bin/sh", "-c", ":"]);
        run("runs", &["-d", "--", "/bin/sleep", "600"]);
        let refused = pool.poolfs(&["image", "rm", "small"]);
        assert!(refused.code != 0 && refused.err.contains("ended, runs"), "{refused:?}");
        let _ = pool.poolfs(&["stop", "runs", "--time", "0"]).expect("stop");
        let refused = pool.poolfs(&["image", "rm", "small"]);
        assert!(refused.code != 0 && refused.err.contains("ended, runs"), "{refused:?}");
        let _ = pool.poolfs(&["image", "rm", "small", "--force"]).expect("image rm --force");
        // What it wrote can still be looked at: the layers are there.
        let _ = pool.poolfs(&["diff", pool.name(), "ended"]).expect("diff");
        for name in ["ended", "runs"] {
            let _ = pool.poolfs(&["rm", name]).expect("rm");
        }
        import_small(&pool, folder, "small", &[], |_| {});
        let _ = pool.poolfs(&["image", "rm", "small"]).expect("image rm");
    });
}

#[test]
fn failures_have_the_codes_and_the_exit_statuses_of_the_documents() {
    isolated("failures_have_the_codes_and_the_exit_statuses_of_the_documents", |folder| {
        let pool = Pool::create(folder, "16M");
        let fails = |arguments: &[&str], code: &str, status: i32| {
            let outcome = pool.poolfs(&[&["--json"], arguments].concat());
            let last = outcome.err.lines().last().unwrap_or_default();
            let told: serde_json::Value = serde_json::from_str(last).unwrap_or_default();
            assert_eq!(
                (told["error"]["code"].as_str(), outcome.code),
                (Some(code), status),
                "{arguments:?}: {outcome:?}"
            );
        };
        fails(&["pool", "create", "bad/name"], "usage", 2);
        fails(&["pool", "create", "other", "--memory", "3"], "usage", 2);
        fails(&["pool", "create", "other", "--cpus", "8000"], "usage", 2);
        fails(&["exec", pool.name(), "--mount", "x=y", "--", "true"], "usage", 2);
        fails(&["rm", "absent"], "not-found", 1);
        fails(&["exec", pool.name(), "--", "/absent"], "not-found", 127);
        import_small(&pool, folder, "small", &[], |_| {});
        for more in [&["--rm"][..], &["--rm", "-d"]] {
            let run = [&["run", pool.name(), "small"], more, &["--", "/absent"]].concat();
            fails(&run, "not-found", 127);
        }
        let [at, upper, lower] = ["mnt", "upper", "lower"].map(|name| folder.join(name));
        fs::create_dir_all(&upper).and_then(|()| fs::create_dir_all(&lower)).expect("folders");
        fs::write(lower.join("f"), "f").expect("written");
        let mounted = pool.mount(&at, &["--upper", text(&upper), "--lower", text(&lower)]);
        let user = fs::File::open(at.join("f")).expect("there");
        fails(&["umount", pool.name(), text(&at)], "in-use", 1);
        drop(user);
        let other = folder.join("other");
        fs::create_dir(&other).expect("a folder");
        fails(&["mount", pool.name(), text(&other), "--dir", text(&lower)], "in-use", 1);
        fails(&["fsck", text(&upper)], "in-use", 8);
        drop(mounted);
    });
}
